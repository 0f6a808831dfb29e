"""Optimizer states that DeepSpeed keeps on an NVMe disk between steps, group by group.

DeepSpeed 0.19 saves a copy of their files, and reads neither moments nor small groups back. Here a checkpoint holds what it
would hold with the states in host memory, so that it is read, cut anew and exported as any other, and the files on the
disk are of no more use than memory is once a run has ended.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch


def _swapper(optimizer: Any) -> Any:
    """DeepSpeed's keeper of the files, or None for an optimizer of any stage that has none on a disk."""
    return getattr(optimizer, "optimizer_swapper", None)


def show_files(optimizer: Any) -> None:
    """Let the tensors that are empty between steps show the files on the disk, without memory of their own. They show what
    the next step writes, too: read them before.

    optimizer: of a DeepSpeed engine, with or without states on a disk, as in all functions here. Raises OSError or
    RuntimeError for a file that is missing or short.
    """
    if (swapper := _swapper(optimizer)) is not None:
        for group in swapper.swap_params_info.values():
            for each in group.tensors:
                each.compute_tensor.data = torch.from_file(
                    each.swap_path, shared=False, size=group.numel(), dtype=swapper.dtype
                )


def forget_states(optimizer: Any) -> None:
    """Before other states are put in place of those on the disk: no group has moments until it is next at hand."""
    if (swapper := _swapper(optimizer)) is not None:
        swapper.purge_state()


@contextmanager
def at_hand(optimizer: Any, group: int) -> Iterator[None]:
    """The fp32 weights and states of a group in host memory; behind it they are on the disk again, with what was changed."""
    if not optimizer._swappable_optimizer_subgroup(group):  # below 1 MiB, or no states are on a disk
        yield
        return
    optimizer._optimizer_states_and_gradient_swap_in(group)
    try:
        yield
    finally:
        optimizer._optimizer_states_and_gradient_swap_out(group)


def remove_files(optimizer: Any) -> None:
    """Of this rank, which takes no further step."""
    if (swapper := _swapper(optimizer)) is not None:
        folder = Path(swapper.swap_folder)
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # until the last rank of the node has removed its own
            for parent in list(folder.parents)[:3]:  # optimizer, zero_stage_3 and the run's
                parent.rmdir()
