"""The Hugging Face folder of a run's checkpoint, on any host: without ranks, devices or the model's own folder.

Weights stream from DeepSpeed's files, a shard at a time. What else the folder holds was kept beside the checkpoints when
the run started (`keep_auxiliary`), so that nothing but the run's folder is needed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from stack.checkpoint.export_hf import AUXILIARY, export_hf
from stack.checkpoint.find import Checkpoint, find_checkpoint
from stack.checkpoint.manifest import FILE_NAME, step_folders
from stack.checkpoint.zero_files import ZeroFiles
from stack.config.convert import convert
from stack.config.schema import ModelConfig, RunConfig
from stack.data.tokenizer import load_tokenizer
from stack.dist.topology import Topology
from stack.errors import CheckpointError, ConfigError, Fault
from stack.models.build import DTYPES, prepare_model

EXAMPLE = "python launch/export.py run=runs/quickstart step=200 out=model dtype=bf16"


@dataclass(frozen=True)
class Request:
    """What to export, and to where. None: the newest checkpoint, a folder in the run's, the run's own type, no push."""

    run: Path
    step: int | None = None
    out: Path | None = None
    dtype: str | None = None
    push: str | None = None
    """`user/name` on the Hugging Face hub; made private if it is new."""


def read_arguments(arguments: Sequence[str]) -> Request:
    """From `name=value` words. Raises ConfigError with every fault."""
    given: dict[str, str] = {}
    for word in arguments:
        name, _, given[name] = word.partition("=")
    known = ("run", "step", "out", "dtype", "push")
    faults = [
        Fault(name, value, f"one of {', '.join(f'{each}=' for each in known)}", EXAMPLE)
        for name, value in given.items()
        if name not in known or not value
    ]
    run, step, out = Path(given.get("run", "")).expanduser(), given.get("step"), given.get("out")
    if not (run / "checkpoints").is_dir():
        faults.append(Fault("run", given.get("run"), "the folder of a run, with checkpoints", EXAMPLE))
    if step is not None and not step.isdigit():
        faults.append(Fault("step", step, "the step of a checkpoint", EXAMPLE))
    if given.get("dtype", "bf16") not in DTYPES:
        faults.append(Fault("dtype", given["dtype"], f"one of {', '.join(DTYPES)}", EXAMPLE))
    if faults:
        raise ConfigError(faults)
    return Request(
        run.resolve(),
        None if step is None else int(step),
        Path(out).expanduser().resolve() if out else None,
        given.get("dtype"),
        given.get("push"),
    )


def export_run(request: Request, tell: Callable[[str], None] = print) -> Path:
    """Write the folder and return it. Raises CheckpointError, ConfigError, ModelError.

    The run may be under way, and delete a checkpoint that is read: where no step was asked for, the newest is taken then.
    """
    os.environ.setdefault(
        "DS_ACCELERATOR", "cpu"
    )  # reading its files imports DeepSpeed, which would look for a device
    found = _find(request, tell)
    try:
        out = _write(request, found, tell)
    except CheckpointError as error:
        if (found.path / FILE_NAME).is_file():
            raise
        if request.step is not None:
            raise CheckpointError(
                f"{found.path} was deleted while it was read. Fix: leave step= out for the newest one, or keep such steps "
                "with checkpoint.keep or checkpoint.keep_every"
            ) from error
        tell(f"warning: {found.path.name} was deleted while it was read; taking the newest once more")
        out = _write(request, _find(request, tell), tell)
    if request.push:
        _push(out, request.push, tell)
    return out


def _find(request: Request, tell: Callable[[str], None]) -> Checkpoint:
    alone = Topology(0, 1, 1, 1, 0, 0, torch.device("cpu"), None, None)
    wanted = "auto" if request.step is None else str(request.step)
    folder = request.run / "checkpoints"
    try:
        found = find_checkpoint(folder, wanted, "", alone, tell)
    except CheckpointError as error:
        # Its advice is for a run that goes on from a checkpoint.
        cause = str(error).partition(". Fix: ")[0].removeprefix(f"checkpoint.resume={wanted}: ")
        there = ", ".join(path.name for path in step_folders(folder)) or "none"
        raise CheckpointError(
            f"nothing can be exported from {request.run}: {cause}. Fix: name a whole one by step=N (there are: {there}), or "
            "copy one that is whole elsewhere into that folder"
        ) from error
    missing = "" if found else "no checkpoint"
    if found and not (request.run / AUXILIARY / "config.json").is_file():
        missing = f"no {AUXILIARY}/config.json, which a run writes at its start"
    if not found or missing:
        raise CheckpointError(
            f"{request.run} holds {missing}. Fix: start the run with checkpoint.every or checkpoint.final"
        )
    return found


def _write(request: Request, found: Checkpoint, tell: Callable[[str], None]) -> Path:
    start = time.monotonic()
    auxiliary = request.run / AUXILIARY
    settings, _ = convert(found.manifest.settings)
    dtype = DTYPES[request.dtype or settings.engine.precision]
    try:
        files = ZeroFiles(found.path, found.manifest)
    except OSError as error:
        raise CheckpointError(f"{found.path} cannot be read: {error}") from error
    model = ModelConfig(path=str(auxiliary))
    built = prepare_model(model, settings.data.seq_len, dtype, seed=0, reads_weights=False).built
    tokenizer = load_tokenizer(str(auxiliary)) if (auxiliary / "tokenizer_config.json").is_file() else None
    out = request.out or request.run / f"hf_{found.path.name}"
    tell(f"exporting {found.path} to {out} in {str(dtype).removeprefix('torch.')}")
    parameters = ((name, files.whole(name, dtype)) for name in files.shapes)
    export_hf(built, parameters, out, dtype, tokenizer, protected=folders_in_use(settings, request.run))
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    tell(f"exported {size / 1e9:.3f} GB in {time.monotonic() - start:.1f} s: {out}")
    return out


def folders_in_use(settings: RunConfig, run: Path) -> list[Path]:
    """What no export of this run may replace."""
    sources = (settings.model.path, settings.model.tokenizer, settings.checkpoint.weights_from)
    return [run, run / AUXILIARY, *(Path(source).expanduser() for source in sources if source)]


def _push(folder: Path, name: str, tell: Callable[[str], None]) -> None:
    try:
        api = HfApi()
        api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise CheckpointError(
            f"{folder} is complete, but pushing it to {name} failed: {error}. Fix: log in with `hf auth login` or set "
            "HF_TOKEN, check the name (user/name) and the network, and run the same command again"
        ) from error
    tell(f"pushed to {name}")
