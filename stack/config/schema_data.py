"""The `data` section of the schema: text, its tokens, and the rows cut from them. See `schema.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

SourceName = Literal["stdlib", "text", "jsonl", "parquet", "hf", "tokens", "random"]
FormatName = Literal["text", "messages", "prompt_completion", "sharegpt", "alpaca"]


@dataclass(kw_only=True)
class MixturePart:
    """One source of a mixture. Settings left at None are those of the `data` section."""

    name: str = "???"
    """Label of the part in logs; each part has its own."""

    source: SourceName | None = None
    """As `data.source`."""

    path: str | None = None
    """As `data.path`."""

    text_field: str | None = None
    """As `data.text_field`."""

    format: FormatName | None = None
    """As `data.format`."""

    subset: str | None = None
    """As `data.subset`."""

    split: str | None = None
    """As `data.split`."""

    revision: str | None = None
    """As `data.revision`."""

    weight: float | None = None
    """Share of the training tokens, relative to the other parts' weights: 3 and 1 are three quarters and one quarter.
    A part that runs out starts again. Give all parts a weight, or all of them `epochs`."""

    epochs: float | None = None
    """How many times the part is read in one epoch of the mixture; 0.5 reads half of it. With neither, each part is read
    once."""


@dataclass(kw_only=True)
class DataConfig:
    """Text, its tokens, and how rows of one length are cut from them."""

    name: str = "stdlib"
    """Label of the data in logs."""

    source: SourceName = "stdlib"
    """`stdlib`: Python's own library files; `text`: files or folders of text, one document a file; `jsonl`: one
    document a line (.jsonl or .ndjson, also .gz, .zst, .bz2); `parquet`: one document a row; `hf`: a Hugging Face
    dataset; `tokens`: ids that another tool made (.bin with Megatron's .idx, or alone); `random`: ids drawn from `seed`,
    for benchmarks."""

    path: str | None = None
    """File, folder or shell pattern, relative to the folder the command was started in. Links are followed; what a folder
    holds and is not read is counted, by its kind. For `hf` the dataset's name on the hub, or a folder that `datasets` can
    load or has saved; Parquet and JSON Lines in a folder are read as those sources read them."""

    text_field: str = "text"
    """Name of the field that holds the text in records (`jsonl`, `parquet`, `hf`). Other fields are not read."""

    subset: str | None = None
    """Configuration of an `hf` dataset, such as a language. None: its only or default one."""

    split: str = "train"
    """Split of an `hf` dataset. In a folder: what the `configs` of its README.md say; else data/SPLIT-00000-of-00001.*; else
    files or folders named train, validation or test; else all is `train`."""

    revision: str | None = None
    """Commit of a dataset on the hub. None: the newest, which is asked for at each start; a commit needs no network once
    its tokens are there."""

    token_dtype: Literal["uint16", "uint32", "int32"] = "uint16"
    """Number format of a `tokens` file without an index, little-endian; an .idx beside it says its own."""

    token_eos: int | None = None
    """Id behind each document of a `tokens` file, which stays where it is. Without an .idx it is what parts documents;
    None: such a file is one document."""

    format: FormatName = "text"
    """What a document is. `text`: plain text, all of it learned. The others are records of supervised data, from
    sources of records such as `jsonl`. `messages`: role and content, as in the OpenAI API; `sharegpt`:
    `conversations` of from and value; `alpaca`: instruction, input, output; each rendered by the chat template.
    `prompt_completion`: two texts, joined as they are, or two lists of messages; only the completion is learned."""

    loss_on: Literal["assistant", "last", "all"] = "assistant"
    """Which tokens of supervised data are targets. `assistant`: what assistant turns say, each with its closing
    token, but those with `weight` 0; `last`: the last of these turns only; `all`: every token. Headers of turns are
    targets under `all` only."""

    chat_template: str | None = None
    """File with the chat template, in Jinja, for supervised data; it is exported with the tokenizer. None: the
    tokenizer's own. Where it marks what the assistant says, by `{% generation %}`, the marks decide the targets.
    Otherwise they are what the template adds for a turn behind its generation prompt; a template that words
    earlier turns anew (Qwen3 takes their thinking out) is then refused for all but the last turn."""

    template_variables: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template beside messages and tools, such as `enable_thinking: false`. Whatever serves the
    model has to give them too (vLLM: chat_template_kwargs)."""

    messages_field: str | None = None
    """Field that holds the turns. None: `messages`, or `conversations` for `sharegpt`."""

    tools_field: str = "tools"
    """Field of a record with its tools: JSON schemas, as a list or as JSON text. The template prints them."""

    random_tokens: int = 1_048_576
    """Ids that `random` draws in all."""

    random_document_tokens: int | None = None
    """Ids in one document of `random`. None: `seq_len`, so that each row is one document, the dearest case of
    attention."""

    store: str = "data"
    """Folder for prepared tokens. One sub-folder for each (source, tokenizer, settings) combination, so two
    settings never share tokens."""

    train_tokenizer: bool = False
    """Train a byte-level BPE on the text itself; for runs from scratch."""

    vocab_size: int = 4096
    """Size of the trained tokenizer, in tokens. Ignored unless `train_tokenizer`."""

    seq_len: int = 4096
    """Tokens in one row, over all ranks of a sequence-parallel group. A number that the degree does not
    divide is padded with ignored positions."""

    packing: Literal["concat", "best_fit", "document"] = "concat"
    """`concat`: documents joined end to end and cut every `seq_len` tokens, the last row padded: what very long rows of
    books are made of; `best_fit`: rows filled with whole documents, longest first, each into the fullest row with room
    for it: for documents shorter than a row that are not to be cut, such as chats; `document`: one document a row.
    Documents never attend to each other."""

    too_long: Literal["split", "drop"] = "split"
    """On a document of more than `seq_len` tokens: cut it into pieces, each in a row of its own or, what is left, as a
    shorter document is; or drop and count it, as for supervised data, where a tail alone makes no sense."""

    append_eos: bool = True
    """Put the end-of-text token behind each document; it is a target, so the model learns to stop."""

    micro_batch: int = 1
    """Rows per sequence-parallel group in one forward. 1 is right for long sequences: more rows use more
    memory."""

    shuffle: bool = True
    """Visit rows in an order drawn from `seed` and the epoch; the order is the same for any number of
    ranks."""

    eval_fraction: float = 0.02
    """Share of the documents held out for evaluation, chosen by a hash of each document's place, 0 to 0.5."""

    workers: int = 1
    """Threads of each rank that read rows ahead of the steps. 0: none, the step reads its rows itself."""

    prefetch: int = 2
    """Steps that are read ahead, with their micro-batches in host memory, 24 bytes a token of a rank's slice. Unused
    with `workers` at 0."""

    bad_text: Literal["stop", "skip"] = "stop"
    """On a document that cannot be read (bad bytes, a cut line, no text field, null, a link to nothing, too much text without
    a place to cut it): stop with file and line, or leave it out and count it."""

    prepare_workers: int | None = None
    """Processes that turn text into tokens, about 150 MB of memory each, 400 MB for chats, whose templates need more
    code, and 100 bytes a character of the longest stretch of text without a place to cut (up to 1.7 GB, as for DNA).
    0: none, the tokenizer's threads on all cores do it, which small texts are done with soonest. None: 0 below 64 MB of
    text, else one a core, at most 8."""

    mixture: list[MixturePart] = field(default_factory=list)
    """Several sources in one run, each with a token store of its own; empty: `source` alone. As in
    data.mixture='[{name: books, source: text, path: books, weight: 3}, {name: code, source: stdlib, weight: 1}]'."""
