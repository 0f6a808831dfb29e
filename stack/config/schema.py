"""The whole configuration: schema and manual in one. YAML files under `conf/` hold values only.

Every field has a docstring with its unit, its effect and the reason for its default. `X | None` with default
None means "derived" (see `config/derive.py`) or "from the checkpoint", as the docstring says.
`config/convert.py` turns a plain nested dict into these classes and reports every unknown key, wrong type and
wrong choice at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from stack.config.schema_checkpoint import CheckpointConfig
from stack.config.schema_cluster import ClusterConfig
from stack.config.schema_data import DataConfig
from stack.config.schema_faults import FaultsConfig
from stack.config.schema_plan import PlanConfig
from stack.config.schema_site import SiteConfig


@dataclass(kw_only=True)
class RopeConfig:
    """Rotary position embedding beyond the length that the model was trained on."""

    scaling: Literal["checkpoint", "none", "linear", "dynamic", "yarn"] = "checkpoint"
    """How positions are stretched. `checkpoint` takes what the model's own config says; `none` refuses
    lengths beyond the model's original length; `yarn` (Peng et al. 2023) is the usual choice for long
    fine-tuning."""

    factor: float | None = None
    """How many times the original length is to be covered. None: the smallest whole factor that covers
    `data.seq_len`."""

    original_length: int | None = None
    """Tokens that the model was pretrained on, from which `linear`, `dynamic` and `yarn` stretch. None: from the
    checkpoint, which is nearly always right."""

    theta: float | None = None
    """Rotary base. None: from the checkpoint. Another value than a pretrained checkpoint's own is refused."""


@dataclass(kw_only=True)
class ModelConfig:
    """Which causal language model is trained, and how it is built."""

    name: str = "tiny"
    """Label of the model in logs and folder names."""

    path: str | None = None
    """Folder or hub name of a Hugging Face model. None: built from `architecture` alone."""

    init: Literal["pretrained", "scratch"] = "pretrained"
    """`pretrained` loads the safetensors weights of `path`; `scratch` draws them by the model's own rule from
    `seed`."""

    architecture: dict[str, Any] = field(default_factory=dict)
    """Fields of the Hugging Face config (with `model_type`). For a ready model it mirrors the published
    config, so that a run can be checked and planned offline; with `path` given and readable, the folder's own
    config wins."""

    attention: str = "sdpa"
    """Attention kernel: `sdpa`, `flex_attention`, `flash_attention_2`, `flash_attention_3` or a hub kernel
    (`kernels-community/...`). `sdpa` runs everywhere; the flash kernels are faster on long sequences."""

    rope: RopeConfig = field(default_factory=RopeConfig)
    """Positions beyond the length of pretraining."""

    tokenizer: str | None = None
    """Folder or hub name of the tokenizer. None: the one beside the weights, or the one that `data`
    trains."""

    freeze: list[str] = field(default_factory=list)
    """Parameter names (shell patterns such as `*norm*`) that keep their values."""


@dataclass(kw_only=True)
class MethodConfig:
    """What is learned from a row of tokens."""

    name: Literal["pretrain"] = "pretrain"
    """`pretrain`: every token is predicted from those before it in its document."""

    label_smoothing: float = 0.0
    """Share of the target probability spread over the whole vocabulary, 0 to below 1."""

    z_loss: float = 0.0
    """Weight of the squared log-partition added to each token's loss (PaLM, section 5); 1e-4 is usual when
    wanted."""


@dataclass(kw_only=True)
class ParallelConfig:
    """How ranks share the work. Data parallelism takes what sequence parallelism leaves: dp = ranks / sp."""

    sp: int = 1
    """Ranks that share one row (Ulysses: Jacobs et al. 2023). Divides the number of ranks and of query
    heads."""


@dataclass(kw_only=True)
class MemoryConfig:
    """Levers that trade time or host memory for device memory; none changes a result beyond rounding."""

    name: str = "plain"
    """Label of the preset."""

    lean: bool = False
    """Run each decoder block as two tiled halves around attention, which then runs forward once a step and not twice.
    Keeps a block's input, attention output and log-sum-exp. Models that do not fit it use the levers below instead."""

    attention_heads: int = 0
    """Query heads in one attention call of a lean block: the memory it works in falls with them. 0: as few as fill a
    GPU, which are 131,072 queries over all heads of the call."""

    tiled_loss: bool = False
    """Compute head and loss in tiles of tokens, so that the logits never exist whole (at 131,072 local tokens
    and 151,936 words they are 74 GiB in fp32)."""

    loss_tile: int = 4096
    """Tokens in one tile of the loss. Logits of a tile in fp32 take 4 x loss_tile x vocabulary bytes, 2.3 GiB
    for Qwen3."""

    tiled_mlp: bool = False
    """Compute MLPs and experts in tiles of tokens, recomputing each tile in backward."""

    mlp_tile: int = 32768
    """Tokens in one tile of the MLP. Large tiles keep the GEMMs efficient."""

    checkpointing: Literal["none", "full"] = "none"
    """`full` keeps one hidden state a layer and recomputes the layer in backward: 1/3 more FLOPs."""

    offload: bool = False
    """Keep the checkpointed hidden states in host memory: 2 x seq_local x hidden bytes a layer and rank in
    bf16."""

    pin_memory: bool = True
    """Use page-locked host memory for offload where there is a device; ignored on CPU ranks."""

    host_gib: float | None = None
    """GiB of host memory a rank uses for what lean layers keep. What is beyond it goes to `spill_folder`. None: no bound."""

    spill_folder: str | None = None
    """Folder on a local disk for what is beyond `host_gib`; its files have no names, so nothing is left behind."""

    fused_kernels: Literal["auto", "none", "torch", "compiled", "liger"] = "auto"
    """RMSNorm by one kernel of `torch`; RMSNorm, rotary embedding and SwiGLU `compiled` by torch.compile, or by `liger` (GPU,
    pip install '.[liger]'). They round less often than the model's own. `auto`: torch on a GPU; none on the CPU."""


@dataclass(kw_only=True)
class EngineConfig:
    """DeepSpeed."""

    stage: Literal[0, 1, 2, 3] = 3
    """ZeRO stage: 0 replicates all, 1 shards optimizer states, 2 gradients too, 3 parameters too."""

    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Type of parameters and activations in forward and backward. Master weights and optimizer states are
    fp32 in all."""

    accumulation: int = 1
    """Micro-batches per data-parallel rank in one optimizer step."""

    ds_config: str | None = None
    """DeepSpeed JSON file to start from, relative to the start folder or to this repository. Values that
    Hydra owns are "auto" there or must agree. None: the file of `ds_configs/` that fits stage and offload
    (`config/derive.py`)."""

    overrides: dict[str, Any] = field(default_factory=dict)
    """Further DeepSpeed settings, merged into the final JSON; those that this stack owns are refused."""

    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Where master weights and optimizer states live: 12 bytes a parameter, shared by all ranks."""

    offload_param: Literal["none", "cpu", "nvme"] = "none"
    """Where the sharded parameters live between uses (stage 3 only). `nvme` is refused: DeepSpeed 0.19 loses them."""

    cpu_optimizer: Literal["torch", "deepspeed"] = "torch"
    """AdamW on the host with `offload_optimizer`: `torch` is its fused kernel; `deepspeed` its CPUAdam, as fast (78 and
    73 ms for 50 M parameters on one core) and compiled at first use, which takes minutes and a C++ compiler."""

    nvme_path: str | None = None
    """Folder on a local NVMe disk; needed with `nvme`: 16 bytes a trained parameter with AdamW, shared by all ranks. Each run
    has its own folder there, and removes it at its normal end."""

    max_nonfinite_steps: int = 3
    """Steps in a row with a NaN or inf loss or gradient that are skipped before the run stops. 0: stop at the
    first. Under fp16 a step skipped by the loss scaler is not counted."""

    timeout_s: int = 1800
    """Seconds that a collective may wait for another rank before the run is stopped."""


@dataclass(kw_only=True)
class OptimConfig:
    """The optimizer."""

    name: Literal["adamw", "sgd"] = "adamw"
    """`adamw` (decoupled weight decay) for training; `sgd` without momentum for exactness tests."""

    lr: float = 1e-5
    """Peak learning rate."""

    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Adam's decay rates for the first and second moment. 0.95 is usual for language models."""

    eps: float = 1e-8
    """Added to the root of the second moment."""

    weight_decay: float = 0.1
    """Decay per step is lr x weight_decay, on matrices only: never on norms and biases."""

    clip: float = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it. 0: off."""


@dataclass(kw_only=True)
class ScheduleConfig:
    """Length of the run and course of the learning rate, in optimizer steps."""

    name: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """`wsd`: warmup, stable, then a linear decay over `decay_steps`."""

    steps: int | None = None
    """Optimizer steps of the run. None: `epochs` passes over the data."""

    epochs: int | None = None
    """Passes over the data; an incomplete last window is a smaller step. Give `steps` or `epochs`, not
    both."""

    warmup_steps: int = 0
    """Steps over which the rate rises linearly from 0 (`wsd`: from `min_lr_ratio`); step 0 is taken at the
    start value."""

    decay_steps: int | None = None
    """Steps of the final decay of `wsd`. None: a tenth of the run."""

    min_lr_ratio: float = 0.0
    """Rate at the end as a share of the peak, for `cosine` and `wsd`."""


@dataclass(kw_only=True)
class LogConfig:
    """What is shown and kept of a run."""

    every: int = 1
    """Optimizer steps between progress lines. The JSONL file holds every step."""

    eval_every: int = 0
    """Optimizer steps between evaluations on the held-out part. 0: only at the end."""

    eval_rows: int = 16
    """Rows evaluated, at most. 0: no evaluation."""

    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """Weights & Biases. `auto`: online if an API key is set, else offline."""

    project: str = "long-sequence"
    """W&B project."""

    entity: str | None = None
    """W&B team or user. None: the account's default."""

    tags: list[str] = field(default_factory=list)
    """W&B tags."""


@dataclass(kw_only=True)
class RunConfig:
    """One run."""

    name: str = "run"
    """Name of the run: its folder is `<out>/<name>`, the same on every rank and after a restart."""

    out: str = "runs"
    """Folder for run folders, relative to the folder the command was started in."""

    seed: int = 1234
    """Seed of initialisation, data order and dropout."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """Which model, from which weights."""

    data: DataConfig = field(default_factory=DataConfig)
    """Which text, and how rows are cut from it."""

    method: MethodConfig = field(default_factory=MethodConfig)
    """What is learned from it."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How ranks share the work."""

    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """Levers that save device memory."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    """DeepSpeed: sharding, precision, accumulation, offload."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer."""

    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Length of the run and course of the learning rate."""

    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """What is saved, and where a start goes on from."""

    faults: FaultsConfig = field(default_factory=FaultsConfig)
    """What happens to hung ranks, and to steps that would spoil the run."""

    log: LogConfig = field(default_factory=LogConfig)
    """What is shown, evaluated and sent to W&B."""

    site: SiteConfig = field(default_factory=SiteConfig)
    """The machine."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """The nodes that `launch/submit.py` asks for, and the life of a job on them."""

    plan: PlanConfig = field(default_factory=PlanConfig)
    """What the run does with its forecast."""
