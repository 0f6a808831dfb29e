"""Text to micro-batches, from top to bottom:

    sources/      documents, as blocks of text (or of ids), from files; one source a file
    tokenizer.py  the tokenizer: trained on the text, or the model's own
    chunks.py     where a long text can be cut without changing its ids
    store.py      the ids of all documents in one memory-mapped file, with their boundaries
    encode.py     documents through the tokenizer into a store
    prepare.py    the store for some settings, complete or absent
    packing.py    the store's documents -> rows of `seq_len` tokens, computed from offsets when asked for
    batch.py      rows -> MicroBatch, the tensors that a model takes
    order.py      in which order an epoch visits the rows
    loader.py     micro-batches of one rank for one step, with a position that can be saved

Every stage knows where it stands by place alone (document, row, step), never by what it has handed out, so a
position is a few numbers and holds for any number of ranks.
"""
