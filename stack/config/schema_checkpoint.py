"""The `checkpoint` section of the schema: what is saved, how, and where a start goes on from. See `schema.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(kw_only=True)
class CheckpointConfig:
    """Saving and resuming."""

    every: int = 0
    """Optimizer steps between checkpoints. 0: only at the end."""

    keep: int = 2
    """Newest checkpoints kept; older ones of this run are deleted once a new one is complete, unless `keep_every` or
    `keep_best` holds them. 0: all."""

    keep_every: int = 0
    """Each checkpoint whose step is a multiple of this is kept for ever. 0: none is."""

    keep_best: int = 0
    """The best so many checkpoints by `best_metric` are kept besides. 0: none. A checkpoint counts only if the metric was
    measured at its very step."""

    best_metric: Literal["eval_loss", "eval_perplexity", "loss"] = "eval_loss"
    """What `keep_best` compares; the lowest is the best."""

    asynchronous: bool = True
    """Write behind the steps: the loop waits for a copy into host memory only, as large as a rank's part of the
    checkpoint and kept for the whole run. A save that finds the one before it still being written waits for it. False:
    no copy; the loop waits until all is written."""

    max_failures: int = 3
    """Saves in a row that may fail (full disk, lost mount) before the run stops. Each is said aloud, and older checkpoints
    are kept. 0: stop at the first. A failure of the last save always ends the run with an error."""

    upload: str | None = None
    """Address that each complete checkpoint is copied to behind the steps: `s3://BUCKET/FOLDER`, `gs://...` or any other
    that fsspec knows; it becomes ADDRESS/NAME/step_NNNNNN, by the run's name. Its manifest goes last, so that the copy is
    complete or none. Trouble is said aloud, tried again and never ends the run; copies are never deleted. None: no
    copy."""

    resume: str = "auto"
    """`auto`: the newest whole checkpoint of this run's folder, or a fresh start, said aloud; `none`: a fresh start,
    refused if the folder holds checkpoints; else a step of this run or the path of a checkpoint, refused if it is missing
    or damaged. A run on other ranks, at another `parallel.sp` or `engine.stage` goes on from it just as well. A restart
    takes a step or path given here again, and what came behind it is set aside: let a job that is restarted use `auto`."""

    force: list[str] = field(default_factory=list)
    """Settings, such as `data.path`, or sections that may differ from those of the checkpoint although that would spoil
    most runs. Where the data is not what it was, it is read from its first row on."""

    weights_from: str | None = None
    """Folder of a checkpoint or of a Hugging Face model that a fresh start takes its weights from, with a new optimizer and
    new data; the model is still the one that `model` describes. Where there is a checkpoint to resume from, that counts."""

    final: bool = True
    """Save a checkpoint at the end of the run, so that it can be continued."""

    export: bool = True
    """Write a Hugging Face folder at the end of the run."""
