"""What of a run's configuration the forecast reads, resolved once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stack.config import derive
from stack.config.checks import read_ds_config
from stack.config.convert import leaves
from stack.config.schema import RunConfig
from stack.errors import ConfigError, Fault
from stack.plan.blocks import Work
from stack.plan.shape import Shape, read_shape
from stack.plan.zero3 import ZeroSettings

WIDTHS = {"bf16": 2, "fp16": 2, "fp32": 4}
DEEPSPEED = {
    "reduce_bucket_size": 500_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "sub_group_size": 1_000_000_000,
    "buffer_count": 4,
}
"""DeepSpeed's own values where neither the file nor `engine.overrides` says one (runtime/zero/config.py)."""


@dataclass(frozen=True)
class Settings:
    """A run on `world` ranks. Sizes in elements or tokens."""

    cfg: RunConfig
    world: int
    shape: Shape
    work: Work
    zero: ZeroSettings
    sub_group: int
    nvme_buffers: int
    """Each for one group of an optimizer on NVMe."""
    lean: bool
    fused_norms: bool
    documents: tuple[int, ...]
    """Tokens of each document of one micro-batch."""
    assumed: tuple[str, ...]
    not_modelled: tuple[str, ...]

    @property
    def dp(self) -> int:
        return self.world // self.cfg.parallel.sp

    @property
    def tokens_a_step(self) -> int:
        data = self.cfg.data
        return data.seq_len * data.micro_batch * self.cfg.engine.accumulation * self.dp

    @property
    def form(self) -> str:
        """In words."""
        memory = self.cfg.memory
        if self.lean:
            return "lean layers"
        parts = ["checkpointed blocks" if memory.checkpointing == "full" else "plain blocks"]
        parts += ["tiled MLP"] if memory.tiled_mlp else []
        return ", ".join(parts)


def resolve(cfg: RunConfig, world: int, documents: tuple[int, ...] | None = None) -> Settings:
    """documents: lengths of the documents of one micro-batch (tokens); None: as the data section says, or one a row.

    Raises ConfigError for a model that the closed form does not know.
    """
    if world % cfg.parallel.sp:
        fix = f"world={cfg.parallel.sp} or a multiple"
        raise ConfigError([Fault("world", world, f"a multiple of parallel.sp={cfg.parallel.sp}", fix)])
    shape = read_shape(cfg.model)
    width, sp = WIDTHS[cfg.engine.precision], cfg.parallel.sp
    lean = cfg.memory.lean and shape.lean
    fused = cfg.memory.fused_kernels != "none" and not (
        cfg.memory.fused_kernels == "auto" and cfg.site.device == "cpu"
    )
    lengths, assumed = _documents(cfg, documents)
    rows = cfg.data.micro_batch
    work = Work(
        shape=shape,
        tokens=rows * derive.seq_local(cfg.data, cfg.parallel),
        rows=rows,
        sp=sp,
        width=width,
        kv_local=_kv_local(shape, sp),
        documents=max(1, len(lengths) // rows),
        attention=cfg.model.attention,
    )
    numbers = _deepspeed_numbers(cfg)
    reduces_in = str(numbers.pop("communication_data_type", "fp32"))
    zero = ZeroSettings(
        world=world,
        width=width,
        prefetch=numbers["stage3_prefetch_bucket_size"],
        persistence=numbers["stage3_param_persistence_threshold"],
        max_live=numbers["stage3_max_live_parameters"],
        max_reuse=numbers["stage3_max_reuse_distance"],
        bucket=numbers["reduce_bucket_size"],
        reduce_width=4 if reduces_in == "fp32" else 2,
        gathers=cfg.engine.stage == 3,
        away=cfg.engine.offload_param != "none",
    )
    return Settings(
        cfg=cfg,
        world=world,
        shape=shape,
        work=work,
        zero=zero,
        sub_group=numbers["sub_group_size"],
        nvme_buffers=numbers["buffer_count"],
        lean=lean,
        fused_norms=fused,
        documents=lengths,
        assumed=tuple(assumed),
        not_modelled=tuple(_not_modelled(cfg, shape)),
    )


def _kv_local(shape: Shape, sp: int) -> int:
    """Key/value heads that a rank holds in attention, as `parallel/exchange.py: plan_heads` deals them."""
    if shape.num_heads % sp:
        fix = "a divisor of the heads"
        raise ConfigError([Fault("parallel.sp", sp, f"a divisor of {shape.num_heads} query heads", fix)])
    local, group = shape.num_heads // sp, shape.num_heads // shape.num_kv_heads
    needed = ({head // group for head in range(rank * local, (rank + 1) * local)} for rank in range(sp))
    return max(len(heads) for heads in needed)


def _documents(cfg: RunConfig, given: tuple[int, ...] | None) -> tuple[tuple[int, ...], list[str]]:
    rows, seq = cfg.data.micro_batch, cfg.data.seq_len
    if given:
        # A profile is repeated until the rows are full, its last document cut.
        lengths: list[int] = []
        left, place = rows * seq, 0
        while left > 0:
            lengths.append(min(given[place % len(given)], left, seq))
            left -= lengths[-1]
            place += 1
        return tuple(lengths), []
    length = cfg.data.random_document_tokens if cfg.data.source == "random" else None
    if length and length < seq:
        return (*[length] * (seq // length), *[seq % length] * bool(seq % length)) * rows, []
    note = "every row is one document, the dearest case of attention; documents=FILE gives their lengths"
    return (seq,) * rows, [] if cfg.data.source == "random" else [note]


def _deepspeed_numbers(cfg: RunConfig) -> dict[str, Any]:
    base, faults = read_ds_config(cfg.engine)
    if faults:
        raise ConfigError(faults)
    found: dict[str, Any] = dict(DEEPSPEED)
    for from_file, tree in ((True, base), (False, cfg.engine.overrides)):
        for path, value in leaves(tree):
            name = path.rsplit(".", 1)[-1]
            if value == "auto":
                continue
            if name == "communication_data_type":
                found[name] = value
            elif name in DEEPSPEED:
                number = _elements(value)
                found[name] = number
                if number is None:
                    file = cfg.engine.ds_config or derive.ds_config_file(cfg.engine)
                    key = path if from_file else f"engine.overrides.{path}"
                    want = "a whole number of elements, 0 or more" + (f", in {file}" if from_file else "")
                    faults.append(Fault(key, value, want, f"{key}={DEEPSPEED[name]}"))
    if faults:
        raise ConfigError(faults)
    return found


def _elements(value: object) -> int | None:
    """None for what is no such number."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = int(value)
    except (ValueError, OverflowError):
        return None
    return number if number >= 0 else None


def _not_modelled(cfg: RunConfig, shape: Shape) -> list[str]:
    found = []
    if cfg.memory.fused_kernels in ("liger", "compiled"):
        found.append("fused rotary embedding and SwiGLU: counted as the unfused ones, which take more")
    if cfg.engine.stage < 3:
        found.append(
            f"buckets of ZeRO stage {cfg.engine.stage} but for the largest; not compared with a count"
        )
    if cfg.model.attention not in ("sdpa", "flash_attention_2", "flash_attention_3"):
        found.append(f"scratch of {cfg.model.attention}: counted as that of FlashAttention 2")
    if cfg.engine.offload_optimizer == "nvme":
        found.append("speed of DeepSpeed's NVMe swapping")
    if cfg.engine.offload_param != "none":
        found.append("time of fetching parameters from where they are offloaded")
    if shape.num_experts:
        found.append("uneven routing: every token is counted with its experts, and experts are equally busy")
        found.append("memory inside grouped matrix products")
    if cfg.data.micro_batch > 1 and cfg.parallel.sp > 1 and not (cfg.memory.lean and shape.lean):
        found.append("copies of attention's tensors that several rows in a micro-batch need")
    if shape.frozen:
        found.append("time that frozen parameters save")
    if cfg.site.device == "cpu":
        found.append("CPU ranks: one memory holds what is listed here as device's and as host's")
    if cfg.engine.precision == "fp32" and cfg.site.device != "cpu":
        found.append(
            "rates of fp32: the step time takes those of 16-bit products and kernels, which are several times higher"
        )
    if cfg.engine.precision == "fp16":
        found.append("steps that the loss scaler skips")
    return found
