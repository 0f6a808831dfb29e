"""What a forecast says, in one schema for both tiers: the closed form of this folder and the exact count of stack/bench.

All of one rank unless a name says otherwise. Bytes are whole numbers, seconds and FLOPs floats. What a tier does not know
stays at its default, and is named in `not_modelled` where a reader would expect it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

GIB = 1 << 30

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer states"
GATHERED, KEPT, ATTENTION, MLP = "gathered layers", "kept activations", "attention", "MLP"
NORMS, LOSS, BUCKETS = "norms", "loss", "buckets"
HIDDEN = "hidden states"
OTHER = "other"
COMMUNICATION, OVERHEAD = "communication", "allocator and context"
CATEGORIES = (
    PARAMETERS,
    GRADIENTS,
    OPTIMIZER,
    GATHERED,
    KEPT,
    ATTENTION,
    MLP,
    NORMS,
    HIDDEN,
    LOSS,
    BUCKETS,
    OTHER,
    COMMUNICATION,
    OVERHEAD,
)
"""What memory is made of. The last two lie outside torch's live tensors: NCCL's buffers, and CUDA's context with what the
allocator holds beyond live bytes. `hidden states`: the residual stream and its gradient. `gathered layers`: whole
parameters, and their gradients until they are reduced."""

PHASES = ("init", "forward", "loss", "backward", "optimizer")
"""Of a step, in order; `init` is what building the engine takes."""


@dataclass
class Peak:
    """The most at any moment of a phase. parts: bytes by category of `CATEGORIES`, of live tensors only."""

    num_bytes: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    layer: str = ""
    """Which layers: `any of 36`, `last`, `head` or the like."""
    operation: str = ""
    """What is being computed, in words or as a source line."""


@dataclass
class Memory:
    """Device memory of the rank that needs most."""

    phases: dict[str, Peak] = field(default_factory=dict)
    """By `PHASES`, of a warm step (optimizer states exist)."""
    states_bytes: int = 0
    """Live between steps."""
    communication_bytes: int = 0
    """NCCL's buffers, outside torch's allocator."""
    overhead_bytes: int = 0
    """CUDA context, libraries, and what the allocator reserves beyond live bytes."""

    @property
    def where(self) -> str:
        """The phase with the highest peak."""
        return max(self.phases, key=lambda phase: self.phases[phase].num_bytes)

    @property
    def peak(self) -> Peak:
        """The highest peak of live bytes: what `torch.cuda.max_memory_allocated` would say."""
        return self.phases[self.where]

    @property
    def needed_bytes(self) -> int:
        """Of the card: live bytes, communication and overhead."""
        return self.peak.num_bytes + self.communication_bytes + self.overhead_bytes


@dataclass
class Host:
    """Host memory and disk. Bytes of one rank, by what it is for."""

    kept_bytes: int = 0
    """What layers keep for backward, in memory at the most."""
    optimizer_bytes: int = 0
    """Offloaded master weights, optimizer states and gradients."""
    parameter_bytes: int = 0
    buffer_bytes: int = 0
    """Page-locked buffers and the process itself."""
    checkpoint_copy_bytes: int = 0
    """What a checkpoint is written from while training goes on."""
    spilled_bytes: int = 0
    """On the local disk, not in memory."""
    nvme_bytes: int = 0
    """The optimizer's files on an NVMe disk."""
    ranks_a_node: int = 1

    @property
    def rank_bytes(self) -> int:
        states = self.optimizer_bytes + self.parameter_bytes + self.checkpoint_copy_bytes
        return self.kept_bytes + states + self.buffer_bytes

    @property
    def node_bytes(self) -> int:
        return self.rank_bytes * self.ranks_a_node


@dataclass
class Flops:
    """Of one optimizer step, all ranks together. Conventions: `stack/models/flops.py`."""

    model: float = 0.0
    """3 x forward, causal pairs only: what MFU divides."""
    hardware: float = 0.0
    """With what the memory levers recompute: what HFU divides."""
    attention: float = 0.0
    """Part of `hardware` in attention kernels."""


@dataclass
class StepTime:
    """Seconds of one optimizer step. parts add up to `seconds`; what is hidden behind them is in `hidden`."""

    seconds: float = 0.0
    low: float = 0.0
    high: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    """attention, GEMM, memory-bound, communication, offload, optimizer, other."""
    hidden: dict[str, float] = field(default_factory=dict)
    """Traffic that runs beside computation: seconds it takes on its own."""


@dataclass
class Constant:
    """A number that the forecast takes from elsewhere. source: `assumed (where from)` or `measured here (file)`."""

    value: float
    unit: str
    source: str


@dataclass
class Forecast:
    """One run on one machine."""

    tier: str
    """`closed form` or `exact count`."""
    run: dict[str, Any]
    """model, parameters, seq_len, ranks, sp, dp, nodes, memory preset, layer form: what was planned."""
    memory: Memory = field(default_factory=Memory)
    host: Host = field(default_factory=Host)
    checkpoint_bytes: int = 0
    """Disk of one checkpoint, all ranks."""
    flops: Flops = field(default_factory=Flops)
    time: StepTime = field(default_factory=StepTime)
    tokens_a_step: int = 0
    steps: int | None = None
    """Of the whole run; None where only the data says it."""
    communication: dict[str, int] = field(default_factory=dict)
    """Bytes of one rank and step by kind: all-to-all, all-gather, reduce-scatter, all-reduce, broadcast; the larger side of
    each call."""
    host_traffic_bytes: int = 0
    """Between device and host in a step, both ways."""
    not_modelled: list[str] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)
    """What had to be assumed, such as one document a row."""
    constants: dict[str, Constant] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)
