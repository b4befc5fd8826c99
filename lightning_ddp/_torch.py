"""Every private name of torch and torchmetrics that the package uses; no other file has any.

Functions and classes of torch are bound to names here without a wrapper, so that calls cost nothing
extra. `tests/test_private_names.py` checks each of them.
"""

from __future__ import annotations

import ctypes
import math
import operator
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.utils
from torch.utils._pytree import keystr as keystr
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

_F = TypeVar("_F", bound=Callable[..., Any])
_TorchDDP: Any = torch.nn.parallel.DistributedDataParallel
_Gloo: Any = dist.ProcessGroupGloo  # torch's annotations lack its options
_Fake: Any = torch._C._distributed_c10d.FakeProcessGroup

# ---------------------------------------------------------------------- tensors and autograd

Future: Any = torch._C.Future
"""Class of futures from `get_future()` of a work; the public `torch.futures.Future` derives from it."""
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
is_profiling = torch.autograd._profiler_enabled
preserve_version_counters: Any = torch.autograd._unsafe_preserve_version_counter
_engine: Any = torch.autograd.Variable._execution_engine
queue_callback: Callable[[Callable[[], None]], None] = _engine.queue_callback
"""Function that, called from an autograd hook, queues a callback for the end of this backward."""
use_count: Callable[[torch.Tensor], int] = operator.methodcaller("_use_count")
"""Function that returns the number of C++ references to a tensor; 1 is its Python object."""
gradient_hooks_of: Callable[[torch.Tensor], Mapping[int, Any] | None]
gradient_hooks_of = operator.attrgetter("_post_accumulate_grad_hooks")

_ENGINE_KEY = "context"


@contextmanager
def without_engine_context() -> Generator[None, None, None]:
    """Hide the autograd engine's thread-local state from collectives started in this context.

    A work copies the thread's state, which since torch 2.13 holds a Python object during backward. When
    gloo's thread drops the last copy it takes the GIL. If the interpreter is exiting just then, that aborts
    the process (`terminate called without an active exception`, SIGABRT).
    """
    remove = getattr(torch._C, "_remove_obj_from_tls", None)
    if remove is None or not torch._C._is_key_in_tls(_ENGINE_KEY):
        yield
        return
    context = torch._C._get_obj_in_tls(_ENGINE_KEY)
    remove(_ENGINE_KEY)
    try:
        yield
    finally:
        torch._C._stash_obj_in_tls(_ENGINE_KEY, context)


# ---------------------------------------------------------------------- modules and metrics

children_of: Callable[[torch.nn.Module], dict[str, torch.nn.Module | None]]
parameters_of: Callable[[torch.nn.Module], dict[str, torch.nn.Parameter | None]]
buffers_of: Callable[[torch.nn.Module], dict[str, torch.Tensor | None]]
children_of, parameters_of, buffers_of = map(operator.attrgetter, ("_modules", "_parameters", "_buffers"))

OPTIMIZERS_IN_BACKWARD = "_in_backward_optimizers"
"""Attribute of a parameter with its optimizers from `_apply_optimizer_in_backward`."""
UPDATE_COUNT, COMPUTED = "_update_count", "_computed"
"""Attributes of a torchmetrics metric: its number of updates, and its cached result."""


to_kwargs = torch.distributed.utils._to_kwargs


def is_compiled(module: torch.nn.Module) -> bool:
    """Return True if the module is a result of `torch.compile`."""
    return "_orig_mod" in children_of(module)


def shallow_replica(module: torch.nn.Module) -> torch.nn.Module:
    """Return a shallow copy of a module with own dicts, no parameters: torch's for `DataParallel`."""
    replica: torch.nn.Module = module._replicate_for_data_parallel()
    replica.__dict__.pop("_compiled_call_impl", None)  # of `module.compile()`: bound to the original
    return replica


def end_of_schedule(scheduler: Any) -> float:
    """Return the number of steps after which an LR scheduler, or a part of it, raises; infinity for none."""
    ends = [end_of_schedule(part) for part in getattr(scheduler, "_schedulers", ())]
    milestones = getattr(scheduler, "_milestones", ())  # of a SequentialLR, whose last part has no end there
    if ends and milestones:
        ends = [milestones[-1] + ends[-1]]
    return min([*ends, getattr(scheduler, "total_steps", None) or math.inf])


# ---------------------------------------------------------------------- process groups

is_joining: Callable[[Any], bool] = operator.attrgetter("_join_config.enable")
"""Function that returns True if a `Joinable` is inside `Join`."""
default_store: Callable[[], Any] = dist.distributed_c10d._get_default_store


def known_groups() -> Mapping[Any, tuple[str, Any]]:
    """Return the process groups that torch knows, with the backend and the store of each."""
    known: Mapping[Any, tuple[str, Any]] = dist.distributed_c10d._world.pg_map
    return known


def never_destroy(objects: Iterable[object]) -> None:
    """Keep objects alive beyond the interpreter's exit, by an extra reference.

    In a fork torch's destructors would wait for threads that do not exist there.
    """
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def keep_sockets_in(folder: str) -> None:
    """Set the folder of the sockets over which this process and its children share tensors.

    Their own folders stay behind where torch ends a process by a signal.
    """
    vars(torch.multiprocessing.current_process())["_config"]["tempdir"] = folder


def name_of_group(process_group: Any) -> str:
    return str(dist.distributed_c10d._world.pg_names[process_group])


def count_groups_anew() -> None:
    """Reset torch's count of process groups: the next default group gets the name of the first.

    Otherwise a process in which the creation of a group failed would give the next group another name
    than the other processes.
    """
    dist.distributed_c10d._world.group_count = 0


def forget_groups() -> None:
    """Make torch forget all process groups without their shutdown."""
    dist.distributed_c10d._world.pg_names.clear()  # destroy_process_group shuts down those that are in it
    dist.destroy_process_group()


REFUSAL = "collective operation error"
"""Text in the errors of a group whose collectives are refused."""


def refuse_collectives(process_group: Any) -> None:
    """Make each collective of a group raise at once, if torch has a backend for that."""
    options: Any = _Fake.Options()
    if not hasattr(options, "error_on_collective"):
        return
    options.error_on_collective = True
    refusing = _Fake._create_internal(process_group.rank(), process_group.size(), options)
    for device in process_group._device_types:
        process_group._register_backend(device, dist.ProcessGroup.BackendType.CUSTOM, refusing)


def backend_of(process_group: Any, device: torch.device) -> Any:
    """Return the backend for `device` in a process group; a single backend is returned as it is."""
    get_backend = getattr(process_group, "_get_backend", None)
    return process_group if get_backend is None else get_backend(device)


def timeout_of(backend: Any) -> timedelta | None:
    """Return the timeout of a backend's collectives; None if unknown."""
    timeout: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout


def set_timeout(backend: Any, timeout: timedelta) -> None:
    in_public = getattr(backend, "set_timeout", None)  # absent in older versions of torch
    (in_public or backend._set_default_timeout)(timeout)


@contextmanager
def with_timeout(process_group: Any, timeout: timedelta | None) -> Generator[None, None, None]:
    """Give collectives that are started in this context another timeout; None for the group's."""
    if timeout is None:
        yield
        return
    changed = []
    for backend in _backends_of(process_group):
        before = timeout_of(backend)
        if before is not None:
            with suppress(RuntimeError):  # a third-party backend
                set_timeout(backend, timeout)
                changed.append((backend, before))
    try:
        yield
    finally:
        for backend, before in changed:
            set_timeout(backend, before)


def _backends_of(process_group: Any) -> Iterable[Any]:
    if not isinstance(process_group, dist.ProcessGroup):
        return [process_group]
    if type(process_group) is not dist.ProcessGroup:
        return []  # a group in Python
    return [process_group._get_backend(device) for device in process_group._device_types]


def new_gloo(store: Any, rank: int, size: int, devices: Any, timeout: timedelta) -> Any:
    """Return a new gloo backend that torch does not register; `devices` are its network devices."""
    options = _Gloo._Options()
    options._devices, options._timeout = devices, timeout
    return _Gloo(store, rank, size, options)


def gloo_like(other: Any, store: Any, rank: int, size: int) -> Any:
    """Return a new gloo backend that torch does not register, with network devices and timeout of `other`."""
    return new_gloo(store, rank, size, other.options._devices, other.options._timeout)


def new_nccl(kind: Any, store: Any, rank: int, size: int, timeout: timedelta, *device: Any) -> Any:
    """Return a new NCCL backend of class `kind`, not registered in torch; pass on `device`, if given."""
    options = kind.Options()
    options._timeout = timeout
    return kind(store, rank, size, options, *device)


def has_communicator(backend: Any) -> bool:
    """Return False if an NCCL backend has yet to make its communicator; True if unknown."""
    is_initialized: Callable[[], bool] = getattr(backend, "_is_initialized", lambda: True)
    return is_initialized()


def all_gather_flat(process_group: Any, gathered: torch.Tensor, flat: torch.Tensor) -> Any:
    """Start an all-gather into one tensor; return its `Work` handle."""
    return process_group._allgather_base(gathered, flat)


def root_of_mesh(mesh: Any) -> Any:
    """Return the root device mesh of which this mesh is a part; the mesh itself if unknown."""
    return mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh


# ---------------------------------------------------------------------- DDP and the compiler

IGNORED_NAMES = "_ddp_params_and_buffers_to_ignore"
"""Attribute of a module with the qualified names of ignored parameters and buffers."""
IS_IGNORED = "_ddp_ignored"  # attribute that marks an ignored parameter or buffer


def run_eagerly(function: _F) -> _F:
    """Exclude `function` from torch.compile, but not the functions that it calls.

    Like `torch.compiler.disable(recursive=False)`, without importing the compiler, which takes seconds.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    frames: Any = torch._C._dynamo.eval_frame
    strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, strategy)
    return function


class _SeenByDynamo:
    """Stand-in for this package's DDP wrapper, from which torch.compile reads the bucket size."""

    is_told = False  # True once this package is excluded from compilation in this process

    def __init__(self, bucket_bytes: int) -> None:
        # The compiler assumes a first bucket of 1 MiB, and refuses one that is larger than the others.
        self.bucket_bytes_cap = max(bucket_bytes, dist._DEFAULT_FIRST_BUCKET_BYTES)


@run_eagerly
def tell_dynamo() -> None:
    """Exclude this package from torch.compile if the compiler is imported by now; else do nothing."""
    if not _SeenByDynamo.is_told and "torch._dynamo" in sys.modules:
        _SeenByDynamo.is_told = True
        torch._dynamo.trace_rules.add(__name__.partition(".")[0])


@contextmanager
def inside_forward(bucket_bytes: int) -> Generator[None, None, None]:
    """Make torch.compile split graphs at a wrapper's buckets, during its forward in this context."""
    before = _TorchDDP._active_ddp_module
    _TorchDDP._active_ddp_module = _SeenByDynamo(bucket_bytes)
    try:
        yield
    finally:
        _TorchDDP._active_ddp_module = before
