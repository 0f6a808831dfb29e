"""Live bytes of one rank's training step, counted without the machine: the real step on tensors that have no memory.

Model, parallelism, DeepSpeed's engine and optimizer are the ones of a run; only their tensors are fake (shapes without
numbers) and their process group answers for all ranks at once. Nothing is fitted or extrapolated: every tensor that the
step makes is counted from its birth to its end, as `live_bytes.py` counts real ones, and on two real ranks the two agree to
the byte (`tests/parity/test_dry_run.py`), but for what gloo copies and holds longer. 36 layers of Qwen3-8B take a minute on
one core.

What a GPU needs beyond this count: what a kernel takes inside one call, of which only FlashAttention's backward is added
here; CUDA's context, cuBLAS and NCCL; and what the allocator holds in reserve. Fused norms count as the unfused ones,
which is the dearer way. What DeepSpeed offloads (`engine.offload_optimizer`, `offload_param`) counts as if it stayed.

It changes DeepSpeed and torch for the whole process, so it needs one of its own: `launch/dry_run.py`.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from stack.bench.live_bytes import LiveBytes
from stack.config.schema import RunConfig
from stack.data.batch import MicroBatch
from stack.dist.topology import Topology
from stack.models import spec as model_spec

STATES, OTHER = "parameters, gradients and optimizer states", "other"
SCRATCH = "attention kernel's scratch"
PARTS = (
    ("stack/ops/tiled_loss.py", "", "loss"),
    ("stack/ops/token_loss.py", "", "loss"),
    ("stack/ops/host_store.py", "", "kept, back on the device"),
    ("stack/ops/attention_kernel.py", "", "attention"),
    ("stack/parallel/exchange.py", "", "q, k, v, attention output and their gradients"),
    ("stack/parallel/lean.py", "_first_half", "tile"),
    ("stack/parallel/lean.py", "_second_half", "tile"),
    ("stack/ops/param_grads.py", "", "tile"),
    ("stack/ops/tiled_mlp.py", "", "tile"),
    ("stack/parallel/lean.py", "", "hidden states"),
    ("zero/partition_parameters.py", "", "gathered parameters"),
    ("zero/partitioned_param_coordinator.py", "", "gathered parameters"),
    ("runtime/zero/stage", "", STATES),
    ("runtime/zero/utils.py", "", STATES),
    ("runtime/comm/", "", STATES),
    ("torch/optim/", "", STATES),
)
"""(end or part of a file's name, function or any, what its tensors are). The innermost caller in this table decides."""

PHASES = ("forward", "loss", "backward", "update")


@dataclass
class Peak:
    """The most at any moment of a phase, in bytes. parts: what it was made of."""

    num_bytes: int = 0
    parts: dict[str, int] = field(default_factory=dict)


@dataclass
class DryRun:
    """Of one rank. phases: of the second step, when all optimizer states are there."""

    phases: dict[str, Peak]
    states_bytes: int
    """Alive between steps: shards of parameters, gradients and optimizer states, buffers."""
    host_bytes: int
    """Kept activations in host memory, at the most."""

    @property
    def peak(self) -> Peak:
        return max(self.phases.values(), key=lambda peak: peak.num_bytes)


def dry_run(cfg: RunConfig, world: int, gpu_attention: bool = True) -> DryRun:
    """Two steps of rank 0 of `world`. cfg.data: every row is one document. gpu_attention: count the attention of lean
    layers as torch's FlashAttention on a GPU, though this is none."""
    from stack.engine.alone import compare_no_ranks

    # No kernel has to be installed here, and nothing reaches a disk.
    model, memory = (
        replace(cfg.model, attention="sdpa"),
        replace(cfg.memory, spill_folder=None, host_gib=None),
    )
    if model.architecture and not Path(model.path or "").expanduser().is_dir():
        # A ready model's config is that of its weights, which are not needed.
        model = replace(model, path=None, init="scratch")
    cfg = replace(cfg, model=model, memory=memory)
    topology = _fake_ranks(cfg, world)
    compare_no_ranks()
    if gpu_attention:
        _attend_as_a_gpu(cfg)
    with FakeTensorMode(allow_non_fake_inputs=True):
        return count_steps(cfg, topology, with_values=False)


def count_steps(cfg: RunConfig, topology: Topology, with_values: bool = True) -> DryRun:
    """Two steps, counted, from the model on. with_values: False where tensors are fake, so no weight is drawn or read."""
    from stack.engine.build import build_engine
    from stack.engine.ds_config import build_ds_config
    from stack.engine.zero_init import join_deepspeed, zero3_partitioner
    from stack.methods import build_method
    from stack.models.build import DTYPES, fill_model, prepare_model
    from stack.parallel.apply import apply_parallelism

    join_deepspeed(topology)
    ds_config, dtype = build_ds_config(cfg, topology.world), DTYPES[cfg.engine.precision]
    with unset_fake_temporarily():  # what judges a model reads numbers
        blank = prepare_model(cfg.model, cfg.data.seq_len, dtype, cfg.seed, reads_weights=with_values)
        rows, seq = cfg.data.micro_batch, cfg.data.seq_len
        bounds = torch.arange(0, (rows + 1) * seq, seq, dtype=torch.int32)
    if not with_values:
        blank = replace(blank, init="pretrained", weights=None)
    with _Counted() as live:
        host_before = live.host
        built = fill_model(blank, zero3_partitioner(ds_config, dtype) if cfg.engine.stage == 3 else None)
        apply_parallelism(
            built.model, built.spec, cfg.memory, cfg.model.attention, cfg.engine.stage, topology
        )
        engine = build_engine(built.model, cfg.optim, topology, ds_config)
        for group in engine._engine.optimizer.param_groups:
            group["fused"] = True  # as on a GPU; torch's CPU loop would make copies of whole shards
        head, method = model_spec.head(built.model), build_method(cfg.method)
        head.register_forward_pre_hook(lambda *_: live.enter("loss"), prepend=True)
        head.register_forward_hook(lambda *_: live.enter("backward"))
        for _ in range(2):
            live.phases.clear()
            live.enter("forward")
            ids = torch.zeros(rows, seq // topology.sp, dtype=torch.long)
            batch = MicroBatch(ids, ids.clone(), ids.clone(), bounds, (seq,) * rows)
            engine.forward_backward(method, batch, rows * seq)
            live.enter("update")
            engine.step(cfg.optim.lr)
            del ids, batch
        found = DryRun(dict(live.phases), live.device, live.peak_host - host_before)
        engine.close()
    return found


def _fake_ranks(cfg: RunConfig, world: int) -> Topology:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world)}
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    group: Any = (
        dist.group.WORLD if cfg.parallel.sp == world else dist.new_group(list(range(cfg.parallel.sp)))
    )
    return Topology(
        rank=0,
        world=world,
        sp=cfg.parallel.sp,
        dp=world // cfg.parallel.sp,
        sp_rank=0,
        dp_rank=0,
        device=torch.device("cpu"),
        sp_group=group if cfg.parallel.sp > 1 else None,
        host_group=dist.group.WORLD,
    )


def _attend_as_a_gpu(cfg: RunConfig) -> None:
    import stack.parallel.lean as lean
    from stack.ops.attention_kernel import CudaFlash

    def kernel(backend: str, cu_seqlens: Tensor, query: Tensor, how: Any) -> CudaFlash:
        return CudaFlash(cu_seqlens, cfg.data.seq_len, how.scale, how.window)

    lean.make_kernel = kernel


class _Counted(LiveBytes):
    """Live bytes by phase and by part, on fake tensors."""

    COUNTS_FAKE = True

    def __init__(self) -> None:
        super().__init__()
        self.phases: dict[str, Peak] = {}
        self._phase = "start"
        self._parts: Counter[str] = Counter()
        self._part_of: dict[int, str] = {}

    def enter(self, phase: str) -> None:
        self._phase = phase
        self._note()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The numbers that DeepSpeed and the engine ask for: finite, not overflown, equal.
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return False if args[0].dtype == torch.bool else 1
        if func is torch.ops.aten.equal.default and isinstance(args[0], FakeTensor):
            return True
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if "flash_attention" in (name := func._schema.name) and "backward" in name:
            self._with_scratch(*args[1:3])
        return result

    def _with_scratch(self, query: Tensor, key: Tensor) -> None:
        """FlashAttention 2 (csrc/flash_attn/flash_api.cpp): dq in fp32, a number a query, and with fewer key/value heads
        dk and dv of all query heads. Its results are alive beside it."""
        scratch = 4 * query.numel() + 4 * query.numel() // query.shape[-1]
        if query.shape[1] != key.shape[1]:
            scratch += 2 * query.numel() * query.element_size()
        self._parts[SCRATCH] = scratch
        self.device += scratch
        self._note()
        self.device -= scratch
        del self._parts[SCRATCH]

    def _count(self, tensors: Iterable[Tensor], host: bool | None) -> None:
        tensors = [tensor for tensor in tensors if tensor.device.type != "meta"]
        keys = {tensor.untyped_storage()._cdata for tensor in tensors} - self._known.keys()
        super()._count(tensors, host)
        for key in keys:
            _, num_bytes, on_host = self._known[key]
            if not on_host:
                self._part_of[key] = part = self._made_by()
                self._parts[part] += num_bytes
        self._note()

    def _made_by(self) -> str:
        frame = sys._getframe(2)
        while frame is not None:
            file, function = frame.f_code.co_filename, frame.f_code.co_name
            for place, name, part in PARTS:
                if place in file and name in ("", function):
                    return part
            frame = frame.f_back
        return OTHER

    def _forget(self, key: int) -> None:
        part, num_bytes = self._part_of.pop(key, None), self._known[key][1]
        super()._forget(key)
        if part is not None:
            self._parts[part] -= num_bytes

    def _note(self) -> None:
        peak = self.phases.setdefault(self._phase, Peak())
        if self.device > peak.num_bytes:
            peak.num_bytes = self.device
            peak.parts = {part: num_bytes for part, num_bytes in self._parts.items() if num_bytes}


def describe(found: DryRun) -> str:
    """A table in GiB: a line a phase, then what the highest peak is made of."""
    lines = [f"{'phase':<12}{'GiB at the most':>16}"]
    lines += [f"{phase:<12}{_gib(found.phases[phase].num_bytes):>16}" for phase in PHASES]
    lines += [f"between steps {_gib(found.states_bytes)}, in host memory {_gib(found.host_bytes)}", ""]
    lines += ["the highest:"]
    parts = sorted(found.peak.parts.items(), key=lambda item: -item[1])
    return "\n".join([*lines, *(f"  {_gib(num_bytes):>8}  {part}" for part, num_bytes in parts)])


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f}"
