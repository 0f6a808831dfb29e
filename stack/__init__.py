"""A trainer for language models on very long sequences.

The folders in import order; each may import those below it, not its neighbour on the same line:

    train, bench, submit         one run: composition, the step, hooks, console, W&B; presets measured side by side; jobs
    checkpoint                   training state on disk, export to Hugging Face format
    engine                       everything DeepSpeed; the one place that scales a loss
    parallel, methods, plan      what makes a plain model parallel; what is learned from a batch; the forecast of a run, which
                                 imports no torch
    models, data                 plain Hugging Face models; documents to micro-batches
    dist, ops                    ranks, groups, failures; tensor functions without groups
    config                       the schema and manual of all settings, checks, derived numbers

`errors.py` and `patches.py` may be imported from anywhere. `tests/unit/test_layout.py` keeps this so.

Letters in shapes: rows (of a micro-batch), seq (tokens of a row, over all ranks), seq_local (on this rank: seq / sp, padded),
tokens (rows x seq_local), hidden, heads, kv_heads, head_dim, vocab; sp and dp are the degrees of sequence and data
parallelism.
"""
