"""The errors that a user can meet. Each names what was given, what was expected and how to mend it.

`StackError` and its children are shown as one clear message without a traceback (see `dist/failure.py`); any other
exception is a fault of this project and keeps its traceback.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One thing wrong with the configuration or an input."""

    key: str
    got: object
    want: str
    fix: str

    def __str__(self) -> str:
        return f"{self.key}={self.got!r}: expected {self.want}. Fix: {self.fix}"


class StackError(Exception):
    """Base of all errors with a cause that the user can mend."""


class ConfigError(StackError):
    """One or more settings are wrong; carries every fault found, so that one start shows them all."""

    def __init__(self, faults: list[Fault]):
        self.faults = faults
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        super().__init__(f"{count} in the configuration:\n" + "\n".join(f"  - {fault}" for fault in faults))

    def __reduce__(self) -> tuple[type, tuple[list[Fault]]]:
        """Pickles by its faults: the default would rebuild it from its message."""
        return type(self), (self.faults,)


class LaunchError(StackError):
    """The process was started with missing or contradictory rank variables, or on a machine that lacks the device."""


class ModelError(StackError):
    """A model cannot be built, or its weights do not fit its configuration."""


class DataError(StackError):
    """A text or token file is missing, unreadable or holds too little. Its message is `printable`, as it names files."""

    def __init__(self, message: str):
        super().__init__(printable(message))


def printable(text: str) -> str:
    """Text that any stream takes: a file name may hold bytes that are not UTF-8, and JSON half a surrogate pair."""
    return text.encode(errors="backslashreplace").decode()


class CheckpointError(StackError):
    """A checkpoint is missing, incomplete or does not fit the run."""


class NonFiniteError(StackError):
    """The loss or the gradient norm was NaN or inf for more steps in a row than allowed."""


class SpikeError(StackError):
    """The loss jumped, and `faults.on_spike` says to stop."""


class RollbackError(StackError):
    """The run was to go back to a checkpoint and cannot: there is none, or it went back too often."""


class MemoryShortage(StackError):
    """Device or host memory ran out; says what would need less."""


class ForecastRefusal(StackError):
    """The run cannot fit its machine, as far as can be known before it is tried."""
