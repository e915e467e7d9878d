"""Everything that a GPU has to tell, by one command; see ``docs/gpu.md``.

::

    __main__.py        the command line: which parts, where, for how long
    suite.py           tests: the suite of the core on the device, a result per test
    results_plugin.py  what pytest loads for it
    speed.py           speed: every case in a process of its own, most telling first
    cases.py           which cases there are, and on which networks
    measure.py         one case, measured
    recipes.py         recipes: the large YAMLs; a checkpoint, and on from there
    jobs.py            functions in processes that cannot harm this one
    record.py          what is known so far, on disk after every result
    table.py           what was found, in at most 100 lines
"""
