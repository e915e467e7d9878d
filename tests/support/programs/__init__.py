"""Random training programs, run sharded and in plain torch: what a user may write, from a seed.

A program is data: a tree of modules, how each calls its children, how it is sharded, and what
happens in each step. So it can be printed, run again, and made smaller while it still fails.

    drawing.py     what a program may hold, and how one is drawn
    modules.py     its tree as modules, plain or sharded
    running.py     its steps, which a plain and a sharded model take alike, and the comparison
    shrinking.py   a smaller program that fails as well

The oracle is plain torch in one process, which adds up what the ranks' losses give. It goes first:
what torch itself refuses is no program.
"""
