"""Knowledge of NCCL in torch, with a row per implementation of the backend 'nccl'.

torch 2.14 has a second one, `nccl2`, behind TORCH_DIST_USE_NCCL2=1. Since torch 2.15 'nccl' means `nccl2`,
and the first one, behind TORCH_DIST_USE_NCCL2=0, is called `nccl-legacy`. What both have in common:

* After an abort nothing is destroyed: all ranks abort all communicators, each in a thread, and torch forgets
  the groups (`teardown.destroy_groups`). NCCL 2.31 waits in a destroy for ranks that have aborted.
* Collectives after an abort raise.
* `WATCHDOG_VARIABLES` keep the watchdog from ending a process whose peer is gone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_ddp._torch import backend_of, has_communicator, new_nccl

CHOICE_VARIABLE = "TORCH_DIST_USE_NCCL2"
"""Variable of torch that chooses what 'nccl' means: 1 for `nccl2`, 0 for the first implementation."""
MEMORY_VARIABLE = "DDP_DISABLE_COMM_MEM"
"""Variable of torch that keeps gradient buckets in plain memory, if it is 1."""
WATCHDOG_VARIABLES = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}
"""Variables of torch, with the values by which a process survives the loss of a peer."""

LOST_CONNECTION = re.compile(r"connection (closed|reset|refused)|broken pipe|gloo|nccl", re.IGNORECASE)
"""Words of a backend whose connection has broken."""
_TIMEOUT = re.compile(r"timed out|timeout", re.IGNORECASE)
_OWN_ERROR = re.compile(r"Duplicate GPU|is bound to device|Expected .*tensor on |Tensors must")
"""Words in errors of NCCL that a rank itself has caused, though no peer is lost."""


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One of torch's backends for NCCL: its names and how it differs from the others."""

    name: str
    """Name by which torch makes this one, whatever 'nccl' means."""
    class_name: str
    """Name of the class in `torch.distributed`."""
    since: tuple[int, int]
    """First torch in which 'nccl' means this one, unless `CHOICE_VARIABLE` says otherwise."""
    takes_device: bool = False
    """True if its constructor takes the device, without which it takes that of LOCAL_RANK."""
    ends_process_in: tuple[tuple[int, int], ...] = ()
    """Versions of torch in which an abort ends the process."""


IMPLEMENTATIONS = (
    Implementation(
        name="nccl2",
        class_name="ProcessGroupNCCL2",
        since=(2, 15),
        takes_device=True,
        ends_process_in=((2, 14),),  # pytorch#192105
    ),
    Implementation(name="nccl-legacy", class_name="ProcessGroupNCCL", since=(0, 0)),
)
"""All implementations, the newest first."""


def is_nccl(backend: str) -> bool:
    """Return True if a backend with this name is one of torch's backends for NCCL.

    >>> is_nccl("nccl2"), is_nccl("gloo")
    (True, False)
    """
    return backend.lower().startswith("nccl")


def implementation_of(backend: Any) -> Implementation | None:
    """Return the row of `IMPLEMENTATIONS` for a backend object of NCCL; None for gloo and others."""
    name = type(getattr(backend, "wrapped_pg", backend)).__name__
    return next((each for each in IMPLEMENTATIONS if each.class_name == name), None)


def needs_device(process_group: Any, device: torch.device) -> bool:
    """Return True if a new group must be given its device, as its backend would take another one."""
    with suppress(RuntimeError):  # no backend for the device
        found = implementation_of(backend_of(process_group, device))
        return found is not None and found.takes_device
    return False


def default_implementation(name: str = "nccl") -> Implementation:
    """Return which of torch's two NCCL backends it makes for a name, such as 'nccl'.

    Torch reads `CHOICE_VARIABLE` when it is imported; this reads it now.
    """
    second, first = IMPLEMENTATIONS
    value = os.environ.get(CHOICE_VARIABLE)
    is_chosen = value != "0" if _version() >= second.since else value == "1"
    is_second = is_chosen if name == "nccl" else name != first.name
    return second if is_second and hasattr(dist, second.class_name) else first


def _version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def recovery_problem(name: str) -> str | None:
    """Return why an abort of the backend with this name ends the process; None if the process survives."""
    found = default_implementation(name)
    if _version() not in found.ends_process_in:
        return None
    return (
        f"in torch {torch.__version__} an abort of {found.name} ends the process. Set {CHOICE_VARIABLE}=0 and"
        " use 'nccl', or install torch 2.15"
    )


def version_problem(version: Sequence[int]) -> str | None:
    """Return what a version of NCCL breaks after an abort; None if nothing is known.

    >>> version_problem((2, 28, 5)), version_problem((2, 28, 9))
    ('a process that makes a communicator after an abort may crash (2.28.3 to 2.28.8)', None)
    """
    found = tuple(version[:3])
    if (2, 28, 3) <= found <= (2, 28, 8):
        return "a process that makes a communicator after an abort may crash (2.28.3 to 2.28.8)"
    return "an abort may not return (before 2.25)" if found < (2, 25) else None


def is_timeout(text: str) -> bool:
    """Return True if the text of a backend's error says that a collective has timed out."""
    return _TIMEOUT.search(text) is not None


def is_own_error(text: str) -> bool:
    """Return True if the text of an error of NCCL shows a mistake of this rank, such as a wrong device."""
    return "NCCL" in text and _OWN_ERROR.search(text) is not None


def error_of(process_group: Any, device: torch.device) -> str | None:
    """Return the name of the error that the backend's watchdog has found, such as 'COMM_ERROR', or None.

    After an abort `nccl2` has this error; the first implementation has none.
    """
    try:
        get_error = getattr(backend_of(process_group, device), "get_error", None)
        found = get_error() if get_error is not None else None
    except RuntimeError:  # not supported by the backend, or no backend for the device
        return None
    name = str(getattr(found, "name", "SUCCESS"))
    return None if name == "SUCCESS" else name


def connect(store: Any, rank: int, size: int, timeout: timedelta, device: torch.device) -> Any:
    """Return a new NCCL backend on `device`, not registered with torch, of the kind that 'nccl' means.

    Collective: all ranks must call it.
    """
    found = default_implementation()
    made = new_nccl(
        getattr(dist, found.class_name), store, rank, size, timeout, *([device] if found.takes_device else [])
    )
    made.eager_connect_single_device(device)
    return made


# ---------------------------------------------------------------------- memory of buckets


def memory_problem(process_group: Any, device: torch.device, *, may_abort: bool = False) -> str | None:
    """Return why torch, not the backend, allocates the memory of buckets; None if the backend does.

    Memory that is registered with NCCL is sent without a copy, and reduced by an NVLink switch. The answer is
    the same on all ranks with the same variables and kind of device.

    Args:
        may_abort: True if the process is to survive an abort of the group.
    """
    if os.environ.get(MEMORY_VARIABLE, "0") == "1":
        return f"{MEMORY_VARIABLE}=1"
    if may_abort:
        return "on_failure, as it is not known whether registered memory survives an abort"
    try:
        backend = backend_of(process_group, device)
        supports = getattr(backend, "supports_tensor_alloc", None)
        is_there = implementation_of(backend) is not None and supports is not None and supports(device)
        if is_there and not has_communicator(backend):
            return "the communicator is not made yet. Pass device_id to init_process_group"
    except RuntimeError:  # no backend for the device
        is_there = False
    return None if is_there else "the backend allocates no memory for this device"


def allocate(process_group: Any, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros in memory that the backend has registered; only where `memory_problem` is None."""
    flat: torch.Tensor = backend_of(process_group, device).allocate_tensor(numel, dtype=dtype, device=device)
    return flat.zero_()
