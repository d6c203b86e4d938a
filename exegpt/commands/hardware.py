"""What this machine has: read once, at the start of a command."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from exegpt.errors import ConfigError
from exegpt.profiler.sheet import GpuSheet
from exegpt.settings import ClusterSettings, RunDtype
from exegpt.specs import ClusterSpec, Dtype

# Share of the memory found that a job may use; the rest is for the system and for page caches.
CPU_MEMORY_SHARE = 0.8
CUDA_MEMORY_SHARE = 0.9

# Workers on a machine without GPUs: two, so that a schedule has something to schedule over.
CPU_WORKERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Devices of this machine. `memory_bytes` is of one GPU, or of the whole machine on CPU."""

    device_type: str
    name: str
    num_devices: int
    memory_bytes: int
    native_bfloat16: bool


def detect_hardware(device_type: str | None = None) -> Hardware:
    """GPUs if the driver lists any, else the CPU; `device_type` asks for one of the two.

    Raises
    ------
    ConfigError
        If CUDA is asked for and there is none.
    """
    gpus = _gpus()
    if device_type == "cuda" and not gpus:
        raise ConfigError("cluster.device=cuda: nvidia-smi lists no GPU here; use cluster.device=cpu or null")
    if gpus and device_type != "cpu":
        names = {name for name, _, _ in gpus}
        memory = min(memory for _, memory, _ in gpus)
        # Tensor cores multiply bfloat16 from compute capability 8.0 on.
        native = all(capability >= 8.0 for _, _, capability in gpus)
        return Hardware(
            device_type="cuda",
            name="/".join(sorted(names)),
            num_devices=len(gpus),
            memory_bytes=int(memory * CUDA_MEMORY_SHARE),
            native_bfloat16=native,
        )
    cores = len(os.sched_getaffinity(0))
    model, flags = _cpu()
    return Hardware(
        device_type="cpu",
        name=f"{model}, {cores} cores",
        num_devices=cores,
        memory_bytes=int(_cpu_memory_bytes() * CPU_MEMORY_SHARE),
        native_bfloat16="amx_bf16" in flags or "avx512_bf16" in flags,
    )


def _gpus() -> list[tuple[str, int, float]]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return []
    rows = [line.split(", ") for line in done.stdout.splitlines() if line.count(", ") == 2]
    return [(name, int(mib) * 2**20, float(capability)) for name, mib, capability in rows]


def _cpu() -> tuple[str, frozenset[str]]:
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = frozenset(fields.get("flags", fields.get("Features", "")).split())
    # Processors of one name differ in what they multiply fast, so the widest units are part of it.
    widest = next((f for f in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if f in flags), "scalar")
    return f"{fields.get('model name', 'CPU')} {widest}", flags


def _cpu_memory_bytes() -> int:
    """Memory of the machine, or of the container if that is less."""
    limits = [psutil.virtual_memory().total]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = Path(path).read_text().strip() if Path(path).exists() else "max"
        if text.isdigit():
            limits.append(int(text))
    return min(limits)


def make_cluster(settings: ClusterSettings, hardware: Hardware) -> ClusterSpec:
    """The cluster of a job on this machine (or on several like it).

    Raises
    ------
    ConfigError
        If more ranks per node are asked for than there are devices.
    """
    default = (
        hardware.num_devices if hardware.device_type == "cuda" else min(CPU_WORKERS, hardware.num_devices)
    )
    ranks = settings.gpus_per_node or default
    if ranks > hardware.num_devices:
        unit = "GPUs" if hardware.device_type == "cuda" else "CPU cores"
        raise ConfigError(
            f"cluster.gpus_per_node={ranks}: this machine has {hardware.num_devices} {unit} "
            f"({hardware.name}); "
            f"allowed are 1..{hardware.num_devices}"
        )
    shared = 1 if hardware.device_type == "cuda" else ranks
    return ClusterSpec(
        name=settings.name,
        num_nodes=settings.num_nodes,
        gpus_per_node=ranks,
        memory_bytes=settings.memory_bytes or hardware.memory_bytes // shared,
        device=hardware.name,
        device_type=hardware.device_type,
        price_per_gpu_hour=settings.price_per_gpu_hour,
    )


def catalogued_cluster(settings: ClusterSettings, sheet: GpuSheet) -> ClusterSpec:
    """A cluster of GPUs known by their data sheet; nothing of this machine is looked at."""
    assert settings.gpus_per_node is not None
    return ClusterSpec(
        name=settings.name,
        num_nodes=settings.num_nodes,
        gpus_per_node=settings.gpus_per_node,
        memory_bytes=settings.memory_bytes or int(sheet.memory_bytes * CUDA_MEMORY_SHARE),
        device=sheet.name,
        device_type="cuda",
        price_per_gpu_hour=settings.price_per_gpu_hour,
        is_local=False,
    )


def absent_reason(cluster: ClusterSpec, sheet: GpuSheet, hardware: Hardware) -> str | None:
    """Why a catalogued cluster is not what this machine has; None if it is."""
    if hardware.name not in sheet.driver_names:
        known = " or ".join(sheet.driver_names) or "none: its sheet has no driver_names"
        return f"this machine has {hardware.name}, not {sheet.name} (nvidia-smi: {known})"
    if cluster.gpus_per_node > hardware.num_devices:
        return f"this machine has {hardware.num_devices} of the {cluster.gpus_per_node} GPUs of a node"
    return None


def threads_per_rank(cluster: ClusterSpec, hardware: Hardware) -> int:
    """CPU threads of one rank; ranks share the cores of their node."""
    cores = len(os.sched_getaffinity(0)) if hardware.device_type == "cuda" else hardware.num_devices
    return max(cores // cluster.gpus_per_node, 1)


def choose_dtype(wanted: RunDtype, hardware: Hardware | None) -> Dtype:
    """The element type of a run; `auto` is bfloat16 where the device multiplies it natively.

    Without `hardware` it is a catalogued GPU's, and all of these do.
    """
    if wanted is RunDtype.auto:
        return Dtype.bfloat16 if hardware is None or hardware.native_bfloat16 else Dtype.float32
    return Dtype(wanted.value)
