"""Settings and memory of other systems, by the sizes of their tensors, from the same operators as our own.

What differs from our stack, each by its source: DeepSpeed's Ulysses and tiled MLP (runtime/sequence_parallel/ulysses_sp.py),
torch's reentrant checkpoint, FSDP2, ring attention (torch.distributed.tensor.experimental), Liger's kernels. Settings are
the columns of published.csv; a column that is left out has the default of `Job`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stack.plan.forecast import BUCKETS, GATHERED, GRADIENTS, NORMS, Peak
from stack.plan.operators import Operators
from stack.plan.shape import Shape
from stack.plan.tensors import INDEX, Ledger, Storage, T
from stack.plan.zero3 import Param, Zero3, ZeroSettings

GIB = 2**30
_GATHERED, _GRADIENTS = INDEX[GATHERED], INDEX[GRADIENTS]
BYTES = {"mixed": (2, 2, 12), "bf16": (2, 2, 4), "fp32": (4, 4, 8)}
"""Of a parameter: itself, its gradient, what the optimizer keeps. `mixed`: fp32 master weights and moments."""


@dataclass(frozen=True)
class Job:
    """Columns of `job` in published.csv, and of the row."""

    shape: Shape
    seq: int
    gpus: int
    sp: int = 8
    backend: str = "deepspeed"
    exchange: str = "ulysses"
    attn: str = "fa2"
    state: str = "mixed"
    ckpt: bool = True
    offload_ckpt: bool = True
    offload_opt: bool = False
    offload_param: bool = False
    tiled_mlp: bool = True
    mlp_shards: int = 0
    tiled_loss: bool = True
    loss_rows: int = 0
    fused_norm: bool = False
    fused_swiglu: bool = False
    fused_ce: bool = False
    bucket: float = 5e8
    prefetch: float = 5e7
    max_live: float = 1e9
    sub_group: float = 1e9
    fp32_reduce: bool = False
    fused_adam: bool = True
    trace_ok: bool = True
    reentrant: bool = False
    head_fp32: bool = False
    logit_bytes: float = 10.0
    overhead: float = 1.9
    frag: float = 0.03
    nodes: int = 0

    @property
    def tokens(self) -> int:
        return self.seq // self.sp

    @property
    def ring(self) -> bool:
        return self.exchange == "ring" and self.sp > 1

    @property
    def liger(self) -> bool:
        """Fused norms come from Liger, whose rotary embedding and norms then work in place."""
        return self.fused_norm

    @property
    def shards(self) -> int:
        return 1 if self.backend == "none" else self.gpus


@dataclass
class Found:
    """phases: live bytes. pools: bytes that the streams of gathers and reductions hold beyond what lives at the peak, as
    their memory is not the computation's to use."""

    phases: dict[str, Peak]
    pools: int

    @property
    def peak(self) -> int:
        return max(peak.num_bytes for peak in self.phases.values())


class Shards(Zero3):
    """FSDP2, or one process that holds all. The current layer, the one on its way and the one whose gather has not been let
    go are whole; the root's (embedding, norm, head) are for all of forward and backward, and so are their gradients."""

    def __init__(self, ledger: Ledger, job: Job):
        super().__init__(ledger, ZeroSettings(world=job.shards, width=2, gathers=False))
        self.job = job
        self.kept: list[Storage] = []
        self.grads: list[T] = []
        self.layer: list[Param] = []

    def take_grad(self, param: Param, grad: T) -> None:
        if self.job.backend == "none":
            wide = BYTES[self.job.state][1]
            self.kept.append(Storage(self.ledger, wide * param.numel, _GRADIENTS))
            return
        self.grads.append(grad)
        self.layer.append(param)

    def layer_done(self) -> None:
        """A layer's gradients are joined, scattered and kept in part."""
        numel = sum(param.numel for param in self.layer)
        wide = 4 if self.job.state == "fp32" else 2
        Storage(self.ledger, wide * numel, INDEX[BUCKETS])
        self.grads.clear()
        self.layer.clear()
        self.kept.append(
            Storage(self.ledger, BYTES[self.job.state][1] * numel // self.job.shards, _GRADIENTS)
        )

    def step_done(self) -> None:
        if self.layer:
            self.layer_done()
        self.kept.clear()


class OthersOperators(Operators):
    """Liger's norm writes its gradient over the incoming one, its rotary embedding over q and k."""

    def __init__(self, ledger: Ledger, zero: Zero3, job: Job):
        super().__init__(ledger, zero, 2, job.fused_norm)
        self.job = job

    def _fused_norm(self, hidden: T, param: Param, rows: int) -> T:
        output, scale = self.new(hidden.size, INDEX[NORMS]), self.new(4 * rows, INDEX[NORMS])

        def back(saved: list[T], grads: list[T | None]) -> Sequence[T | None]:
            return [grads[0], self.new(param.numel * 2, _GATHERED)]

        return self.record("norm", [hidden, param], output, [hidden, scale], back)

    def rotary(self, heads: T) -> T:
        return self.view(heads) if self.job.liger else super().rotary(heads)
