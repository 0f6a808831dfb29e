"""Rows of published measurements to plans, and how far each is off.

    python -m tests.plan.published            all rows of published.csv
    python -m tests.plan.published FILE.csv   others, with the same columns

Columns: model, seq, gpus, gpu, job (JSON, the fields of `systems.Job`), metric (peak, reserved, max_seq, step_s, tok_s, tok_s_gpu,
oom), value, unit (GiB, GB, tokens, s, tokens/s, tokens/s/GPU), scope (in, near, out), note.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path

from stack.config.derive import REPO_ROOT
from stack.config.schema import ModelConfig, SiteConfig
from stack.plan.changes import preset
from stack.plan.shape import Shape, read_shape
from stack.plan.verdict import CLOSE, FITS, NO, PROVEN_NODES, PROVEN_PARAMETERS, PROVEN_SP, TIGHT, UNPROVEN
from tests.plan.jobs import Found, Job
from tests.plan.systems import count, with_length

GIB = 2**30
UNITS = {
    "peak": {"GiB": GIB, "GB": 1e9},
    "reserved": {"GiB": GIB, "GB": 1e9},
    "max_seq": {"tokens": 1},
    "step_s": {"s": 1},
    "tok_s": {"tokens/s": 1},
    "tok_s_gpu": {"tokens/s/GPU": 1},
    "oom": {},
}
"""Bytes, tokens, seconds or tokens/s that one unit of a metric is; "oom" has none that matters."""

FILE = Path(__file__).with_name("published.csv")
MODELS = {"llama-8b": "llama3_8b", "llama-70b": "llama3_70b", "mistral-7b": "mistral_7b"}
"""Names that are not those of conf/model with other separators."""

OTHER_MODELS = {
    "llama2-7b": {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
    }
}
OTHER_SITES = {"b300": {"name": "b300", "peak_tflops": 2250.0, "memory_gib": 267.0, "memory_tb_s": 8.0}}
"""NVIDIA's B300 data sheet; memory: 288 GB less what the driver keeps. Links and shares as conf/site/b200x8.yaml."""

FP32_TFLOPS = 67.0 / 989.4
"""Of the bf16 peak, in fp32 without tensor cores: H100 data sheet. 0.7 of it is reached, as by other large products."""

EFFICIENCY_ROWS = {"trl-8b-1m-t", "alstpaper-8gpu-1100k-t"}
"""Rows of the runs that the attention shares were set from (Qwen3-8B at 1,048,576 tokens on 8 H100, conf/site/h100x8.yaml), so
that they say nothing of the error."""


@dataclass(frozen=True)
class Row:
    """One measurement."""

    id: str
    model: str
    seq: int
    gpus: int
    gpu: str
    job: Job
    metric: str
    value: float
    unit: str
    scope: str
    note: str

    @property
    def is_limit(self) -> bool:
        """A published maximum that is said to be one."""
        return self.metric == "max_seq" and "not always the limit" not in self.note


@dataclass(frozen=True)
class Outcome:
    """forecast: in the row's unit; error: its share of the published value."""

    row: Row
    forecast: float

    @property
    def error(self) -> float:
        return self.forecast / self.row.value - 1


def read_rows(file: Path = FILE) -> list[Row]:
    with file.open(encoding="utf-8", newline="") as text:
        return [_row(record) for record in csv.DictReader(text)]


def _row(record: dict[str, str]) -> Row:
    settings = json.loads(record["job"] or "{}")
    unknown = settings.keys() - {item.name for item in fields(Job)}
    if unknown:
        raise ValueError(f"{record['id']}: job has {sorted(unknown)}, which no system here knows")
    seq, gpus = int(float(record["seq"])), int(record["gpus"])
    settings = {"sp": min(8, gpus)} | settings
    job = Job(shape=shape_of(record["model"]), seq=seq, gpus=gpus, **settings)
    return Row(
        record["id"],
        record["model"],
        seq,
        gpus,
        record["gpu"],
        job,
        record["metric"],
        float(record["value"]),
        record["unit"],
        record["scope"],
        record.get("note") or "",
    )


@cache
def shape_of(name: str) -> Shape:
    if name in OTHER_MODELS:
        return read_shape(ModelConfig(architecture=OTHER_MODELS[name]))
    file = MODELS.get(name, name.replace("-", "_").replace(".", "_"))
    if not (REPO_ROOT / "conf" / "model" / f"{file}.yaml").is_file():
        raise ValueError(f"model {name}: not in conf/model")
    return read_shape(ModelConfig(architecture=dict(preset("model", file))["architecture"]))


@cache
def site_of(gpu: str) -> SiteConfig:
    values = dict(preset("site", "b200x8" if gpu in OTHER_SITES else f"{gpu}x8"))
    return SiteConfig(**(values | OTHER_SITES.get(gpu, {})))


@cache
def counted(job: Job) -> Found:
    return count(job)


def communication_gib(row: Row, job: Job) -> float:
    """NCCL's buffers, by the numbers of our own sites."""
    site = site_of(row.gpu)
    if job.gpus == 1:
        return 0.0
    groups = 1 + (1 < job.sp < job.gpus)
    exchanges = job.exchange == "ulysses" and job.sp > 1
    return site.communicator_gib * groups + (site.exchange_gib * (min(job.sp, 8) - 1) if exchanges else 0.0)


def reserved_bytes(row: Row, job: Job) -> float:
    """What nvidia-smi shows: live bytes, the pools of other streams, NCCL, the context, what lies idle."""
    found, site = counted(job), site_of(row.gpu)
    outside = (communication_gib(row, job) + site.context_gib) * GIB
    return found.peak * (1 + job.frag) + found.pools + outside


def need_bytes(row: Row, job: Job) -> float:
    """With the margin of `stack/plan/verdict.py`."""
    peak = counted(job).peak
    if job.gpus == 1:
        return 1.05 * peak + 2 * GIB
    return 1.12 * peak + (communication_gib(row, job) + 4) * GIB


def answer(row: Row, job: Job | None = None) -> str:
    """fits, tight, does not fit or unproven, by the rule of our own verdict."""
    job = job or row.job
    need, card = need_bytes(row, job), (site_of(row.gpu).memory_gib or 0) * GIB
    if need > card:
        return NO
    if job.sp > PROVEN_SP or job.gpus > 8 * PROVEN_NODES or job.shape.num_parameters > PROVEN_PARAMETERS:
        return UNPROVEN
    return TIGHT if need > CLOSE * card else FITS


def longest(row: Row) -> int:
    """Tokens of the longest row whose bytes, as nvidia-smi would show them, the card has."""
    card, step = (site_of(row.gpu).memory_gib or 0) * GIB, 64 * row.job.sp

    def fits(seq: int) -> bool:
        return reserved_bytes(row, with_length(row.job, seq)) <= card

    low, high = 0, 16384
    while fits(high) and high < 1 << 28:
        low, high = high, 2 * high
    while high - low > max(step, high // 200):
        middle = (low + high) // 2 // step * step
        if middle <= low:
            break
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def step_seconds(row: Row) -> float:
    """One micro-batch, forward and backward, and the update."""
    job, shape, site = row.job, row.job.shape, site_of(row.gpu)
    peak, bandwidth = (site.peak_tflops or 0) * 1e12, (site.memory_tb_s or 0) * 1e12 * site.memory_share
    attention = 2.0 * job.seq**2 * shape.num_heads * shape.head_dim * shape.num_layers
    weights = shape.attention_weights + shape.mlp_weights
    linear, head = 2.0 * job.seq * weights, 2.0 * job.seq * shape.head_weights
    again = 1 if job.ckpt else 0
    share = site.attention3_share if job.attn in ("fa3", "cudnn") else site.attention_share
    seconds = attention * (3.5 + again) / job.sp / (peak * share)
    products = linear * (3 + again) + (2.0 * job.seq * shape.mlp_weights if job.tiled_mlp else 0)
    products += 0 if job.head_fp32 else 3 * head
    seconds += products / job.sp / (peak * site.gemm_share)
    if job.head_fp32:
        seconds += 4 * head / job.sp / (0.7 * peak * FP32_TFLOPS)
        # Each chunk of rows reads the head three times, and adds to its gradient.
        chunks = job.tokens / job.loss_rows if job.loss_rows else 0
        seconds += chunks * 6 * 4 * shape.head_weights / bandwidth
    hidden, query = job.tokens * shape.hidden * 2, job.tokens * shape.num_heads * shape.head_dim * 2
    width = job.tokens * shape.intermediate * 2
    moved = hidden * (24 if job.fused_norm else 60) + 30 * query + width * (8 if job.fused_swiglu else 12)
    seconds += (2 + again) * shape.num_layers * moved / bandwidth
    if job.ring:
        seconds += shape.num_layers * _ring_bytes(job, again) / bandwidth
    return seconds + _other_seconds(job, site, seconds, hidden, query)


def _ring_bytes(job: Job, again: int) -> float:
    """What a layer of ring attention reads and writes to put its parts together, in fp32 (torch 2.13,
    distributed/tensor/experimental/_context_parallel/_attention.py: 38 bytes an element of the output and part in forward,
    20 of dq and 24 of dk and dv in backward; a balanced causal part has half the rows or half the keys, so 3/4)."""
    query = job.tokens * job.shape.num_heads * job.shape.head_dim
    keys = job.tokens * job.shape.num_kv_heads * job.shape.head_dim
    return 0.75 * (job.sp - 1) * (query * (38 * (1 + again) + 20) + 2 * keys * 24)


def _other_seconds(job: Job, site: SiteConfig, computing: float, hidden: int, query: int) -> float:
    shape, n = job.shape, job.shape.num_parameters / job.shards
    link = ((site.link_gb_s or 1) if job.gpus <= 8 else (site.network_gb_s or 1)) * 1e9
    passes = 3 if job.ckpt else 2
    keys = job.tokens * shape.num_kv_heads * shape.head_dim * 2
    seconds = 0.0
    if job.sp > 1 and job.exchange == "ulysses":
        seconds += (
            shape.num_layers * passes * 2 * (query + keys * max(1, job.sp // shape.num_kv_heads)) / link
        )
    if job.gpus > 1 and job.backend != "none":
        gathered = 2.0 * shape.num_parameters * (passes + 1)
        seconds += max(0.0, gathered / link - 0.9 * computing)
    if job.ckpt and job.offload_ckpt:  # half of it is seen: backward's copies come ahead of their layer
        seconds += shape.num_layers * hidden / ((site.host_link_gb_s or 1) * 1e9)
    if job.offload_opt:
        seconds += n * min(job.gpus, 8) * 28 / ((site.host_memory_gb_s or 1) * 1e9)
    return seconds


def not_comparable(row: Row) -> str | None:
    """What is not known of the row, in words."""
    if row.metric not in UNITS:
        return f"{row.id}: metric {row.metric!r}, expected one of {', '.join(UNITS)}"
    if row.metric != "oom" and row.unit not in UNITS[row.metric]:
        return f"{row.id}: {row.metric} in {row.unit!r}, expected {' or '.join(UNITS[row.metric])}"
    return None


def outcome(row: Row) -> Outcome:
    """The forecast of what the row measured."""
    unknown = not_comparable(row)
    if unknown:
        raise ValueError(unknown)
    scale = UNITS[row.metric][row.unit]
    if row.metric == "peak":
        return Outcome(row, counted(row.job).peak / scale)
    if row.metric == "reserved":
        return Outcome(row, reserved_bytes(row, row.job) / scale)
    if row.metric == "max_seq":
        return Outcome(row, longest(row))
    seconds = step_seconds(row)
    if row.metric == "step_s":
        return Outcome(row, seconds)
    rows = max(1, row.gpus // row.job.sp)
    rate = row.seq * rows / seconds
    if row.metric == "tok_s":
        return Outcome(row, rate)
    return Outcome(row, rate / row.gpus)  # tok_s_gpu


def outcomes(rows: list[Row], metrics: tuple[str, ...], scopes: tuple[str, ...] = ("in",)) -> list[Outcome]:
    chosen = [row for row in rows if row.metric in metrics and row.scope in scopes]
    return [outcome(row) for row in chosen if row.id not in EFFICIENCY_ROWS]


def median_error(found: list[Outcome]) -> float:
    return statistics.median(abs(one.error) for one in found)


def beyond_memory(rows: list[Row]) -> Iterator[tuple[Row, Job]]:
    """Runs that were out of memory: rows that say so, and a quarter more than a published limit."""
    for row in rows:
        if row.metric == "oom":
            yield row, row.job
        elif row.is_limit:
            yield row, replace(row.job, seq=int(1.25 * row.value) // (64 * row.job.sp) * 64 * row.job.sp)


def main(arguments: Sequence[str]) -> None:
    given = read_rows(*map(Path, arguments))
    rows = [row for row in given if not not_comparable(row)]
    for metrics in (("peak",), ("reserved",), ("step_s", "tok_s", "tok_s_gpu"), ("max_seq",)):
        for scopes in (("in",), ("near",), ("out",)):
            found = outcomes(rows, metrics, scopes)
            for one in found:
                print(
                    f"{one.row.id:<34}{one.row.metric:<10}{scopes[0]:<6}{one.row.value:>12,.2f}{one.forecast:>14,.2f} {one.row.unit:<12}"
                    f"{one.error:+7.1%}  {answer(one.row)}"
                )
            if found:
                print(
                    f"{'':<34}{'/'.join(metrics)}, scope {scopes[0]}: median error {median_error(found):.1%} of {len(found)}\n"
                )
    for row, job in beyond_memory(rows):
        print(f"out of memory: {row.id} at {job.seq:,} tokens: {answer(row, job)}")
    for row in given:
        if unknown := not_comparable(row):
            print(f"not compared: {unknown}")


if __name__ == "__main__":
    main(sys.argv[1:])
