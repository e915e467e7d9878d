"""Complete training runs on the strategies of ``lightning_fsdp``: data, models, one YAML per run.

Read it in the order of a run::

    corpus.py     which files, and the documents in them        -> text
    documents.py  the documents of a file, a piece at a time: memory does not grow with it
    tokenizer.py  byte-level BPE, trained on the corpus or given -> token ids
    packing.py    the corpus as one array on disk, cut in sequences without padding
    data.py       the three above as one LightningDataModule, sharded by rank
    optimizer.py  decay groups, warm-up and cosine
    causal_lm.py  loss, perplexity, logging: what every language model here shares
    pretrained.py a model that exists already, from a folder or the hub
    gpt2.py       GPT-2 of transformers, nano to XL
    qwen.py       Qwen2.5 of transformers, tiny to 1.5B
    sample.py     text that the model writes at the end
    monitor.py    tokens per second and memory of every rank; stopping with Ctrl-C
    train.py      the command line
    options.py    its parser: a wrong option in one line, with the choices
    errors.py     a mistake of the user, shown without a traceback
"""
