"""The order in which an epoch visits its rows: a permutation computed place by place, without a list of all
rows.

A Feistel network (Luby and Rackoff 1988) permutes the numbers of 2k bits for any round function; numbers
beyond the last row are sent through again until they fall inside (Black and Rogaway 2002). Keyed by a hash of
seed and epoch, it depends on no library's random numbers, so that a resumed run sees the same order after any
upgrade.
"""

from __future__ import annotations

import hashlib

ROUNDS = 4


class RowOrder:
    """Row at each place of one epoch's order; the identity if `shuffle` is off."""

    def __init__(self, num_rows: int, seed: int, epoch: int, shuffle: bool):
        self.num_rows = num_rows
        self.shuffle = shuffle
        self._half_bits = max(1, (max(num_rows - 1, 0).bit_length() + 1) // 2)
        self._key = hashlib.blake2b(f"{seed}:{epoch}".encode(), digest_size=16).digest()

    def __getitem__(self, place: int) -> int:
        if not 0 <= place < self.num_rows:
            raise IndexError(f"place {place} of {self.num_rows} rows")
        if not self.shuffle:
            return place
        row = self._permute(place)
        while (
            row >= self.num_rows
        ):  # at most 4 times as many numbers as rows, so about 4 turns at worst on average
            row = self._permute(row)
        return row

    def _permute(self, number: int) -> int:
        mask = (1 << self._half_bits) - 1
        left, right = number >> self._half_bits, number & mask
        for turn in range(ROUNDS):
            left, right = right, left ^ (self._mix(turn, right) & mask)
        return left << self._half_bits | right

    def _mix(self, turn: int, value: int) -> int:
        message = turn.to_bytes(1, "little") + value.to_bytes(8, "little")
        return int.from_bytes(hashlib.blake2b(message, key=self._key, digest_size=8).digest(), "little")
