"""Whole steps of other systems; see jobs.py and layers.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stack.plan.blocks import Block, Work
from stack.plan.forecast import (
    ATTENTION,
    BUCKETS,
    GATHERED,
    GRADIENTS,
    HIDDEN,
    LOSS,
    OPTIMIZER,
    PARAMETERS,
    Peak,
)
from stack.plan.tensors import INDEX, Ledger, Storage, T, backward
from stack.plan.zero3 import Module, Param, Zero3, ZeroSettings
from tests.plan.jobs import BYTES, Found, Job, OthersOperators, Shards
from tests.plan.layers import run_layer, run_loss

_ATTENTION, _HIDDEN, _LOSS, _GATHERED = (INDEX[one] for one in (ATTENTION, HIDDEN, LOSS, GATHERED))


def count(job: Job) -> Found:
    """Two steps, the second of which is like every later one."""
    ledger = Ledger()
    ledger.enter("init")
    zero = _zero(ledger, job)
    op = OthersOperators(ledger, zero, job)
    model = _Model(job)
    held = _states(ledger, job, model)
    pools = _Pools(ledger)
    for _ in range(2):
        ledger.restart()
        ledger.phase = "forward"
        zero.start_step()
        _step(op, job, model, pools)
    ledger.enter("optimizer")
    n = -(-job.shape.num_parameters // job.shards)
    if not job.offload_opt and (job.state == "mixed" or not job.fused_adam):
        Storage(ledger, int(4 * min(n, job.sub_group)), INDEX[OPTIMIZER])
    del held
    phases = ledger.peaks()
    return Found(phases, pools.beyond(max(phases.values(), key=lambda peak: peak.num_bytes)))


class _Pools:
    """The most that gathers and reductions ever hold."""

    def __init__(self, ledger: Ledger):
        self.ledger = ledger
        self.most = {GATHERED: 0, BUCKETS: 0}

    def look(self) -> None:
        for name in self.most:
            self.most[name] = max(self.most[name], self.ledger.highest[INDEX[name]])

    def beyond(self, peak: Peak) -> int:
        self.look()
        return sum(max(0, most - peak.parts.get(name, 0)) for name, most in self.most.items())


class _Model:
    def __init__(self, job: Job):
        shape = job.shape

        def param(name: str, numel: int) -> Param:
            return Param(
                name, numel, persistent=job.backend == "deepspeed" and job.gpus > 1 and numel <= 100_000
            )

        self.embedding = Module("embedding", [param("embedding", shape.head_weights)])
        self.head = self.embedding if shape.tied else Module("head", [param("head", shape.head_weights)])
        self.norm = Module("norm", [param("norm", shape.hidden)])
        self.blocks = []
        for layer in range(shape.num_layers):
            params, modules = {}, {}
            for name, numel, _ in shape.layer:
                short = name.removeprefix("self_attn.").removeprefix("mlp.").removesuffix(".weight")
                params[short] = param(f"{layer}.{short}", numel)
                modules[short] = Module(short, [params[short]])
            modules["layer"] = Module("layer", [], below=list(params.values()))
            self.blocks.append(Block(params, modules))

    @property
    def params(self) -> list[Param]:
        found = [*self.embedding.params, *self.norm.params, *self.head.params]
        return list(dict.fromkeys(found + [one for block in self.blocks for one in block.params.values()]))


def _zero(ledger: Ledger, job: Job) -> Zero3:
    if job.backend != "deepspeed":
        return Shards(ledger, job)
    settings = ZeroSettings(
        world=job.gpus,
        width=2,
        prefetch=int(job.prefetch),
        max_live=int(job.max_live),
        bucket=int(job.bucket),
        # With sequence parallelism DeepSpeed reduces in fp32 unless told otherwise (runtime/constants.py).
        reduce_width=4 if job.sp > 1 or job.fp32_reduce else 2,
        gathers=job.gpus > 1 or job.offload_param,
        away=job.offload_param,
    )
    return Zero3(ledger, settings)


def _states(ledger: Ledger, job: Job, model: _Model) -> list[Storage]:
    n = sum(-(-param.numel // job.shards) for param in model.params)
    width, grad, optimizer = BYTES[job.state]
    sizes = {
        PARAMETERS: 0 if job.offload_param else width * n,
        OPTIMIZER: 0 if job.offload_opt else optimizer * n,
    }
    if job.backend == "deepspeed":
        sizes[GRADIENTS] = 0 if job.offload_opt else grad * n
        sizes[BUCKETS] = int(job.bucket) * (4 if job.sp > 1 or job.fp32_reduce else 2)
    if job.backend == "fsdp2":
        layer = job.shape.layer_parameters
        whole = job.shape.head_weights * (1 if job.shape.tied else 2)
        sizes[GATHERED] = 2 * (whole + 3 * layer)
    if job.backend == "none" and job.state == "fp32":
        sizes[GATHERED] = 2 * job.shape.head_weights  # cast for the products
    held = [Storage(ledger, size, INDEX[part]) for part, size in sizes.items()]
    for param in model.params:
        if param.persistent:
            param.data = Storage(ledger, 2 * param.numel, _GATHERED)
    return held


def _work(job: Job) -> Work:
    sp = job.sp if job.exchange == "ulysses" else 1
    shape = job.shape
    kv_local = max(1, shape.num_kv_heads // sp)
    return Work(shape, job.tokens, 1, sp, 2, kv_local, 1, job.attn)


def _step(op: OthersOperators, job: Job, model: _Model, pools: _Pools) -> None:
    work, ledger = _work(job), op.ledger
    ledger.enter("forward")
    batch = op.new(4 * 8 * job.seq, _HIDDEN)
    embedded = _embed(op, model.embedding, work.hidden)
    angles = op.new(2 * work.tokens * work.shape.head_dim * 2, _ATTENTION)
    hidden = embedded
    for index, block in enumerate(model.blocks):
        ledger.layer = f"layer {index}"
        hidden = op.call(
            block.modules["layer"], lambda x, block=block: run_layer(op, job, work, block, x), hidden
        )
    hidden = op.call(model.norm, lambda x: op.norm(x, model.norm.params[0], work.tokens), hidden)
    del embedded
    ledger.layer = "head"
    ledger.enter("loss")
    loss = op.call(model.head, lambda x: run_loss(op, job, work, model.head.params[0], x), hidden)
    del hidden
    ledger.enter("backward")
    backward([(loss, op.new(4, _LOSS))])
    if isinstance(op.zero, Shards):
        op.zero.step_done()
    else:
        op.zero.end_backward()
    op.forget_leaves()
    pools.look()
    del batch, angles


def _embed(op: OthersOperators, module: Module, size: int) -> T:
    param = module.params[0]
    op.zero.fetch(module)
    output = op.new(size, _HIDDEN)

    def back(saved: list[T], grads: list[T | None]) -> Sequence[T | None]:
        op.zero.fetch(module)
        return [op.new(2 * param.numel, _GATHERED)]

    op.record("embedding", [param], output, [], back)
    op.zero.release(module)
    return output


def with_length(job: Job, seq: int) -> Job:
    return replace(job, seq=seq)
