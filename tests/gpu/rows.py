"""Rows long enough for real kernels: several blocks of 128 tokens. Documents have 1 to 256: FlashAttention's backward adds
what blocks of 128 keys give in any order, which for two is the same to the bit."""

from __future__ import annotations

import torch

from tests.parity.reference import Row

LENGTHS = ([1, 129, 170], [256, 44], [64, 64, 172], [45, 255])


def rows_of(seed: int) -> list[Row]:
    generator, rows = torch.Generator().manual_seed(seed), []
    for lengths in LENGTHS:
        documents = [torch.randint(0, 64, (n,), generator=generator).tolist() for n in lengths]
        rows.append(Row(documents, [[True] * n for n in lengths]))
    return rows


STEPS = [rows_of(seed) for seed in range(4)]
LRS = [0.1] * len(STEPS)
