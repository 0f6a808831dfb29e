"""One rank's step, from the embedding to the optimizer, by the sizes of its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stack.plan import lean
from stack.plan.blocks import Block
from stack.plan.forecast import (
    ATTENTION,
    BUCKETS,
    GATHERED,
    GRADIENTS,
    HIDDEN,
    LOSS,
    OPTIMIZER,
    OTHER,
    Peak,
)
from stack.plan.forms import Form, tiled
from stack.plan.operators import Operators
from stack.plan.settings import Settings
from stack.plan.shape import EMBEDDING, FINAL_NORM, HEAD
from stack.plan.states import States, states_of
from stack.plan.tensors import INDEX, Ledger, Storage, T, backward
from stack.plan.zero3 import Module, Param, Zero3

_LOSS, _HIDDEN, _OTHER, _GATHERED, _ATTENTION = (
    INDEX[one] for one in (LOSS, HIDDEN, OTHER, GATHERED, ATTENTION)
)
INT64 = 8


@dataclass
class Counted:
    """phases: peaks of a warm step. gathered, reduced: bytes of a micro-batch on this rank; renewed: gathered once a step."""

    phases: dict[str, Peak]
    states: States
    gathered_bytes: int
    renewed_bytes: int
    reduced_bytes: int
    pools_bytes: int
    """Most that gathers and reductions ever hold, beyond what of it lives at the peak: they run on streams of their own,
    whose memory the allocator does not give to the computation."""


@dataclass
class Model:
    """Parameters and modules of the whole model."""

    root: Module
    body: Module
    embedding: Module
    blocks: list[Block]
    norm: Module
    head: Module

    @property
    def params(self) -> list[Param]:
        found = dict.fromkeys(self.embedding.params)
        for block in self.blocks:
            found |= dict.fromkeys(block.params.values())
        return list(found | dict.fromkeys([*self.norm.params, *self.head.params]))


def count(settings: Settings) -> Counted:
    """Two steps: the first shows DeepSpeed the order of the modules, the second is what every later one is like."""
    ledger = Ledger()
    ledger.enter("init")
    zero = Zero3(ledger, settings.zero)
    model = build(settings)
    states = states_of(settings, model.params)
    op = Operators(ledger, zero, settings.work.width, settings.fused_norms)
    held = [Storage(ledger, size, INDEX[part]) for part, size in states.before_first_step()]
    persistent = {
        param: Storage(ledger, param.numel * settings.work.width, _GATHERED)
        for param in model.params
        if param.persistent
    }
    for param, storage in persistent.items():
        param.data = storage
    ledger.layer, ledger.operation = "all", "hooks on each parameter, the largest whole for a moment"
    if settings.zero.gathers and settings.world > 1:
        Storage(ledger, max(param.numel for param in model.params) * settings.work.width, _GATHERED)
    init = ledger.peaks()
    held.append(Storage(ledger, states.moments, INDEX[OPTIMIZER]))
    for _ in range(2):
        ledger.restart()
        ledger.phase = "forward"
        zero.start_step()
        for micro in range(min(2, settings.cfg.engine.accumulation)):
            if micro:
                zero.start_step()
            _micro_batch(settings, op, model)
        _optimizer(settings, ledger, states)
    del held
    # What stays whole on every rank is gathered once a step, when it has been updated.
    renewed = sum(storage.num_bytes for storage in persistent.values())
    phases = init | ledger.peaks()
    most = max(phases.values(), key=lambda peak: peak.num_bytes)
    pools = sum(ledger.highest[INDEX[part]] - most.parts.get(part, 0) for part in (GATHERED, BUCKETS))
    return Counted(phases, states, zero.gathered_bytes, renewed, zero.reduced_bytes, max(0, pools))


def build(settings: Settings) -> Model:
    """Parameters under the names that transformers gives them, and the modules that ZeRO-3 gathers."""
    shape, memory = settings.shape, settings.cfg.memory

    def param(name: str, numel: int) -> Param:
        small = settings.zero.gathers and settings.zero.world > 1 and numel <= settings.zero.persistence
        return Param(name, numel, shape.is_trained(name), persistent=small)

    embedding = param(EMBEDDING, shape.head_weights)
    blocks = []
    for layer in range(shape.num_layers):
        params, modules = {}, {}
        for name, numel, _ in shape.layer:
            short = name.removeprefix("self_attn.").removeprefix("mlp.").removesuffix(".weight")
            short = short.removeprefix("experts.")
            params[short] = param(f"model.layers.{layer}.{name}", numel)
        if settings.lean:
            modules["block"] = Module(f"layer {layer}", list(params.values()), leaf=True)
        else:
            inside = [
                short
                for (name, _, _), short in zip(shape.layer, params, strict=True)
                if name.startswith("mlp.")
            ]
            # Blocks of experts are leaves by DeepSpeed's own list (runtime/zero/leaf_module_config.py).
            whole_mlp = memory.tiled_mlp or shape.num_experts > 0
            if whole_mlp:
                modules["mlp"] = Module("mlp", [params[short] for short in inside], leaf=True)
            else:
                modules["act_fn"] = Module("act_fn", [])
            for short in params:
                if short.endswith(".bias") or (whole_mlp and short in inside):
                    continue
                modules[short] = Module(
                    short, [params[key] for key in (short, f"{short}.bias") if key in params]
                )
        if not settings.lean:
            modules["layer"] = Module("layer", [], below=list(params.values()))
            own = [one for one in params.values() if ".self_attn." in one.name]
            modules["self_attn"] = Module("attention", [], below=own)
            if "mlp" not in modules:
                own = [one for one in params.values() if ".mlp." in one.name]
                modules["mlp"] = Module("mlp", [], below=own)
        for module in modules.values():
            for one in module.params if module.leaf else ():
                one.in_leaf = settings.zero.gathers
        blocks.append(Block(params, modules))
    head = embedding if shape.tied else param(HEAD, shape.head_weights)
    norm = param(FINAL_NORM, shape.hidden)
    inside = [embedding, *(one for block in blocks for one in block.params.values()), norm]
    return Model(
        Module("model and loss", [], below=list(dict.fromkeys([*inside, head]))),
        Module("body", [], below=inside),
        Module("embedding", [embedding]),
        blocks,
        Module("final norm", [norm]),
        Module("head", [head]),
    )


def _micro_batch(settings: Settings, op: Operators, model: Model) -> None:
    work, memory, ledger = settings.work, settings.cfg.memory, op.ledger
    ledger.enter("forward")
    ledger.layer, ledger.operation = "embedding", "embedding"
    batch = op.new(3 * INT64 * work.tokens, _OTHER)
    layer = (
        lean.Layer(op, work, memory.mlp_tile, memory.attention_heads, memory.offload)
        if settings.lean
        else None
    )
    tile = memory.mlp_tile if memory.tiled_mlp else None
    form = Form(op, work, memory.checkpointing == "full", memory.offload, tile, layer)
    op.zero.fetch(model.root)
    op.zero.fetch(model.body)
    embedded = _embed(op, model, work.hidden)
    # It has no parameters, but fetches ahead as every module does.
    op.zero.fetch(Module("rotary embedding", []))
    angles = op.new(2 * work.tokens * work.shape.head_dim * work.width, _ATTENTION)
    hidden = embedded
    number = len(model.blocks)
    for index, block in enumerate(model.blocks):
        ledger.layer = f"layer {index} of {number}"
        hidden = form.run(block, hidden)
    ledger.layer, ledger.operation = "final norm", "final norm"
    norm = model.norm.params[0]
    if settings.lean or memory.tiled_mlp:
        hidden = op.call(
            model.norm,
            lambda x: tiled(
                op,
                x,
                lambda part: op.norm(part, norm, part.size // (work.shape.hidden * work.width)),
                [norm],
                memory.mlp_tile,
                work,
            ),
            hidden,
        )
    else:
        hidden = op.call(model.norm, lambda x: op.norm(x, norm, work.tokens), hidden)
    del embedded
    hidden = op.behind(model.body, hidden)
    ledger.layer, ledger.operation = "head", "loss"
    ledger.enter("loss")
    run = _tiled_loss if memory.tiled_loss else _plain_loss
    loss = op.call(model.head, lambda x: run(settings, op, model.head.params[0], x), hidden)
    del hidden
    loss = op.behind(model.root, loss)
    ledger.enter("backward")
    backward([(loss, op.new(4, _LOSS))])
    op.zero.end_backward()
    op.forget_leaves()
    del batch, angles


def _embed(op: Operators, model: Model, size: int) -> T:
    module = model.embedding
    param = module.params[0]
    op.zero.fetch(module)

    def back(saved: list[T], grads: list[T | None]) -> Sequence[T | None]:
        op.ledger.layer, op.ledger.operation = "embedding", "backward of the embedding"
        op.zero.fetch(module)
        return [op.new(param.numel * op.width, _GATHERED)]

    output = op.record("embedding", [param], op.new(size, _HIDDEN), [], back)
    op.zero.release(module)
    return output


def _tiled_loss(settings: Settings, op: Operators, param: Param, hidden: T) -> T:
    """`ops/tiled_loss.py`: gradients are made in forward, of the head in fp32."""
    work, size = settings.work, hidden.size
    tile = min(settings.cfg.memory.loss_tile, work.tokens)
    vocab = settings.shape.vocab
    to_hidden = op.new(size, _LOSS)
    to_weight = op.new(4 * param.numel, _LOSS) if param.trained else op.new(0, _LOSS)
    logits_of_before: T | None = None
    for part in lean.tiles(work.tokens, tile):
        narrow = op.new(part * vocab * op.width, _LOSS)
        wide = op.new(4 * part * vocab, _LOSS) if op.width != 4 else narrow
        del narrow
        op.new(INT64 * 4 * part, _LOSS)
        narrow = op.new(part * vocab * op.width, _LOSS) if op.width != 4 else wide
        logits_of_before = narrow
        del wide, narrow
        op.new(part * work.shape.hidden * op.width, _LOSS)
        if param.trained:
            op.new(param.numel * op.width, _LOSS)
    del logits_of_before

    def back(saved: list[T], grads: list[T | None]) -> Sequence[T | None]:
        op.ledger.layer, op.ledger.operation = "head", "backward of the loss"
        wide = op.new(op.wide(size), _LOSS) if op.width != 4 else None
        scaled = op.new(op.wide(size), _LOSS)
        del wide
        hidden_grad = op.new(size, _LOSS) if op.width != 4 else scaled
        del scaled
        if not param.trained:
            return [hidden_grad, None]
        scaled = op.new(4 * param.numel, _LOSS)
        weight_grad = op.new(param.numel * op.width, _GATHERED) if op.width != 4 else scaled
        return [hidden_grad, weight_grad]

    return op.record("loss", [hidden, param], op.new(4, _LOSS), [to_hidden, to_weight], back)


def _plain_loss(settings: Settings, op: Operators, param: Param, hidden: T) -> T:
    """`ops/reference.py`: logits of the whole slice, several times."""
    size, numbers = hidden.size, settings.work.tokens * settings.shape.vocab
    raw = op.new(numbers * op.width, _LOSS)
    wide = op.new(4 * numbers, _LOSS) if op.width != 4 else raw
    del raw
    logits = op.new(4 * numbers, _LOSS)
    del wide
    kept = op.new(4 * numbers, _LOSS)
    del logits

    def back(saved: list[T], grads: list[T | None]) -> Sequence[T | None]:
        op.ledger.layer, op.ledger.operation = "head", "backward of the loss"
        of_choice = op.new(4 * numbers, _LOSS)
        of_softmax = op.new(4 * numbers, _LOSS)
        saved.remove(kept_of[0])
        kept_of.clear()
        del of_choice
        of_scale = op.new(4 * numbers, _LOSS)
        del of_softmax
        of_raw = op.new(numbers * op.width, _LOSS) if op.width != 4 else of_scale
        del of_scale
        to_hidden = op.new(size, _HIDDEN)
        to_weight = op.new(param.numel * op.width, _GATHERED) if param.trained else None
        del of_raw
        return [to_hidden, to_weight]

    kept_of = [kept]
    del kept
    return op.record("loss", [hidden, param], op.new(4, _LOSS), [hidden, kept_of[0]], back)


def _optimizer(settings: Settings, ledger: Ledger, states: States) -> None:
    ledger.enter("optimizer")
    ledger.layer, ledger.operation = "all", "one group's gradients joined for the update"
    Storage(ledger, states.largest_group, INDEX[GRADIENTS])
