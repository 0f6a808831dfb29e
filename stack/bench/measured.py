"""What is measured, as it comes from the ranks."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Inspection:
    """The untimed steps at one length, on one rank. Bytes are of the whole process, states included."""

    rss_bytes: int
    peak_bytes: int
    """Of device memory; on the CPU of live tensors but those that offload keeps."""
    passes_peak_bytes: int
    """The same until the end of backward: what grows with the length. The optimizer step has a peak of its own."""
    states_bytes: int
    """Alive between steps: shards, gradients' buffers, optimizer states."""
    host_bytes: int
    """Most that offload kept at a time; 0 where it is unknown, on a GPU."""
    traffic: dict[str, dict[str, float]]
    """Kind of communication -> calls, num_bytes, seconds."""


@dataclass
class Probe:
    """Times of one rank's products by themselves, taken beside the timed steps."""

    gemm_flops_per_s: float
    """Of this model's MLP shapes, all three products of forward and backward."""
    attention_forward_s: float
    """One layer's attention over a whole row, this rank's heads."""
    attention_backward_s: float
    calls_s: list[float]
    """Each different call of the step, in the order of `CallCount`s."""


@dataclass(frozen=True)
class CallCount:
    """One kind of product in a step, on one rank."""

    call: str
    """Operator and shapes."""
    kind: str
    """`gemm`, `attention_forward` or `attention_backward`."""
    flops: float
    """Of one such call."""
    number: int


@dataclass
class Measured:
    """One contender at one length. Lists of lists: turns, then ranks."""

    contender: str
    tokens: int
    inspections: list[Inspection]
    calls: list[list[CallCount]]
    """Ranks, then kinds of calls."""
    loss: float = 0.0
    grad_norm: float = 0.0
    seconds: list[float] = field(default_factory=list)
    """Of each turn, on the slowest rank."""
    probes: list[list[Probe]] = field(default_factory=list)
