"""Text to micro-batches, from top to bottom:

    sources/      documents, as blocks of text (or of ids), from files; one source a file
    tokenizer.py  the tokenizer: trained on the text, or the model's own
    chunks.py     where a long text can be cut without changing its ids
    store.py      the ids of all documents in memory-mapped shards, with their boundaries; shards.py: its writing
    encode.py     a unit of documents through the tokenizer into a shard; workers.py: in several processes
    build.py      the making of one store, which can stop at any moment and go on
    prepare.py    the stores for some settings, complete or absent; command.py: what launch/prepare.py does
    summary.py    what a store holds, for people; megatron.py: the files that Megatron reads
    chat/         records of chats through the chat template: ids, and which of them are learned
    preview.py    the first documents as the model will see them, for people
    documents.py  the documents of one part, training or held out, in blocks; what is dropped
    packing.py    documents -> rows of `seq_len` tokens, computed from offsets when asked for; best_fit.py: rows of
                  whole documents
    part.py       the rows of one part, and the account of where its tokens went
    order.py      in which order an epoch visits the rows
    mixture.py    several stores in one order, each by its share of the tokens
    slices.py     rows -> MicroBatch (batch.py), the tensors of one rank's slice, read straight from the store
    prefetch.py   steps worked out ahead by threads
    loader.py     micro-batches of one rank for one step, with a position that can be saved

Every stage knows where it stands by place alone (document, row, step), never by what it has handed out, so a
position is a few numbers and holds for any number of ranks.
"""
