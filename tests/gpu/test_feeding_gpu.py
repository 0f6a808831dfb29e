"""Batches in page-locked memory, made by threads beside the steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stack.config.schema_data import DataConfig
from stack.data.loader import EvalLoader, Loader
from tests.gpu.machine import COUNT, REHEARSAL
from tests.stores import counting_store

NAMES = ("input_ids", "labels", "position_ids", "cu_seqlens")


@pytest.mark.skipif(REHEARSAL, reason="only a GPU's driver gives page-locked memory")
@pytest.mark.parametrize("workers", [0, 2])
def test_pinned_batches_are_the_plain_ones(tmp_path: Path, workers: int) -> None:
    store = counting_store(tmp_path / "s", [100, 30, 7] * 20)
    data = DataConfig(seq_len=64, eval_fraction=0.1, workers=workers)
    device = torch.device("cuda", COUNT - 1)
    settings = {"dp": 1, "dp_rank": 0}
    training = {**settings, "accumulation": 2, "seed": 1, "epochs": 2}
    held_out = {**settings, "max_rows": 3}
    pinned, plain = (Loader(store, data, **training, pin=pin) for pin in (device, None))  # type: ignore[arg-type]
    pairs = [
        *zip(*(EvalLoader(store, data, **held_out, pin=pin) for pin in (device, None)), strict=True)  # type: ignore[arg-type]
    ]
    while (want := plain.next_step()) is not None:
        pairs += zip(pinned.next_step() or [], want, strict=True)
    assert len(pairs) > 40
    for got, want in pairs:
        for name in NAMES:
            tensor = getattr(got, name)
            assert tensor.is_pinned() and not getattr(want, name).is_pinned()
            assert torch.equal(tensor.to(device, non_blocking=True).cpu(), getattr(want, name))
    pinned.close()
    plain.close()
