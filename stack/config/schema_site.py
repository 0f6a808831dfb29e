"""The `site` section of the schema: the machine. See `schema.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True)
class SiteConfig:
    """The machine: for MFU in training, and for the forecast (`launch/plan.py`). Numbers carry their source in the YAML.

    Rates are of one device and one way, in GB/s or TB/s of 10^9 or 10^12 bytes. Shares are parts of a peak that long
    kernels reach. None: not known, so what follows from it is not forecast.
    """

    name: str = "auto"
    """Label of the site."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: the GPU if there is one, else the CPU over gloo."""

    peak_tflops: float | None = None
    """Dense bf16 peak of one device, in TFLOPS. None: looked up by the device's name; unknown devices show no
    MFU."""

    card: str | None = None
    """The device in words, for tables."""

    memory_gib: float | None = None
    """GiB of device memory that a process can use: what `torch.cuda.mem_get_info` calls total."""

    memory_tb_s: float | None = None
    """Peak rate of the device's memory, TB/s."""

    gpus_a_node: int | None = None
    """Devices of one node, which share its host memory."""

    nodes: int | None = None
    """Nodes there are: `search=min_gpus` stays within them. None: no bound."""

    host_memory_gib: float | None = None
    """GiB of host memory of one node."""

    host_memory_gb_s: float | None = None
    """Rate of a node's host memory, GB/s over all its devices: what an optimizer on the host is bound by."""

    link_gb_s: float | None = None
    """Between devices of a node, GB/s: what large collectives reach, not what the link is named after."""

    network_gb_s: float | None = None
    """Between nodes, GB/s of one device."""

    host_link_gb_s: float | None = None
    """Between a device and host memory, GB/s with page-locked memory."""

    disk_gb_s: float | None = None
    """Of a node's local disk, GB/s, for what lean layers spill."""

    gemm_share: float = 0.62
    """Share of the peak that large matrix products reach. 0.62: see conf/site/h100x8.yaml."""

    attention_share: float = 0.325
    """Share of the peak that FlashAttention 2 (and torch's sdpa) reaches on causal FLOPs, forward and backward."""

    attention3_share: float = 0.55
    """The same of `model.attention=flash_attention_3`."""

    memory_share: float = 0.75
    """Share of the memory's peak rate that element-wise kernels reach."""

    context_gib: float = 0.6
    """GiB of CUDA's context and loaded kernels, of each process."""

    communicator_gib: float = 0.5
    """GiB of one NCCL communicator's buffers for gathers and reductions, on one device."""

    exchange_gib: float = 0.44
    """GiB of NCCL's buffers for the all-to-all of sequence parallelism, for each other device of the node. 0.44: 8 H100
    took 3.28 GB more behind the first all-to-all (github.com/NVIDIA/nccl/issues/1685)."""

    reserve_share: float = 0.03
    """What the allocator holds beyond live tensors, as a share of them, with expandable segments."""
