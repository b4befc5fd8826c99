"""Facts about a process and its machine, gathered as JSON values that ranks can send to each other."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from lightning_ddp.tools.report import installed_version

_PACKAGES = ("torch", "pytorch-lightning", "lightning", "hydra-core", "lightning_ddp")
_SHARED_MEMORY = "/dev/shm"
_LIMITS = {"open files": "RLIMIT_NOFILE", "processes": "RLIMIT_NPROC", "locked memory": "RLIMIT_MEMLOCK"}
_PREFIXES = ("SLURM_", "TORCHELASTIC_", "MASTER_", "NCCL_", "GLOO_", "PL_", "LIGHTNING_DDP_", "OMP_", "CUDA_")
_NAMES = (
    "NODE_RANK",
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
)
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def gather_facts(env: Mapping[str, str], *, rank: int, local_rank: int) -> dict[str, Any]:
    """Versions, devices, limits, shared memory and the variables that matter. Does not communicate.

    Variables of `env` that look like secrets are left out.
    """
    has_cuda = torch.cuda.is_available()
    has_nccl = has_cuda and dist.is_nccl_available()
    usage = shutil.disk_usage(_SHARED_MEMORY) if os.path.isdir(_SHARED_MEMORY) else None
    limits = {name: resource.getrlimit(getattr(resource, constant))[0] for name, constant in _LIMITS.items()}
    return {
        "rank": rank,
        "local_rank": local_rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: installed_version(name) for name in _PACKAGES},
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count() * has_cuda)],
        "backend": "nccl" if has_nccl else "gloo",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "shared_memory": {"total": usage.total, "free": usage.free} if usage is not None else None,
        "limits": {name: None if soft == resource.RLIM_INFINITY else soft for name, soft in limits.items()},
        "variables": {
            name: value
            for name, value in sorted(env.items())
            if (name in _NAMES or name.startswith(_PREFIXES)) and not any(word in name for word in _SECRET)
        },
        "executable": sys.executable,
    }
