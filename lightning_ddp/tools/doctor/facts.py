"""Facts about a process and its machine, gathered as JSON values that ranks can send to each other."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["gather_facts"]

_PACKAGES = ("torch", "pytorch-lightning", "lightning", "hydra-core", "lightning_ddp")
_SHARED_MEMORY = Path("/dev/shm")
_LIMITS = {"open files": "RLIMIT_NOFILE", "processes": "RLIMIT_NPROC", "locked memory": "RLIMIT_MEMLOCK"}
_PREFIXES = ("SLURM_", "TORCHELASTIC_", "MASTER_", "NCCL_", "GLOO_", "PL_", "LIGHTNING_DDP_", "OMP_", "CUDA_")
_NAMES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "NODE_RANK",
)
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def gather_facts(env: Mapping[str, str], *, rank: int, local_rank: int) -> dict[str, Any]:
    """Versions, devices, limits, shared memory and the variables that matter. Does not communicate.

    Args:
        env: environment variables; those that look like secrets are left out.
        rank: of this process.
        local_rank: on its node.
    """
    has_cuda = torch.cuda.is_available()
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if has_cuda else []
    return {
        "rank": rank,
        "local_rank": local_rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "devices": devices,
        "backend": "nccl" if has_cuda and dist.is_nccl_available() else "gloo",
        "nccl": ".".join(map(str, torch.cuda.nccl.version()))
        if has_cuda and dist.is_nccl_available()
        else None,
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "shared_memory": _shared_memory(),
        "limits": {name: _limit(constant) for name, constant in _LIMITS.items()},
        "variables": _variables(env),
        "executable": sys.executable,
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _shared_memory() -> dict[str, int] | None:
    if not _SHARED_MEMORY.is_dir():
        return None
    usage = shutil.disk_usage(_SHARED_MEMORY)
    return {"total": usage.total, "free": usage.free}


def _limit(constant: str) -> int | None:
    """The soft limit; None for unlimited."""
    soft, _ = resource.getrlimit(getattr(resource, constant))
    return None if soft == resource.RLIM_INFINITY else soft


def _variables(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(env.items())
        if (name in _NAMES or name.startswith(_PREFIXES)) and not any(word in name for word in _SECRET)
    }
