"""Every private name of torch and torchmetrics that the package uses: no other file has one.

Where torch has a function or a class for it, the name here is that object itself, which costs no more to
call. `tests/test_private_names.py` has a canary for each.
"""

from __future__ import annotations

import ctypes
import operator
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.utils
import torch.utils._python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

_F = TypeVar("_F", bound=Callable[..., Any])
_TorchDDP: Any = torch.nn.parallel.DistributedDataParallel
_Gloo: Any = dist.ProcessGroupGloo  # torch's annotations leave its options out
_Fake: Any = torch._C._distributed_c10d.FakeProcessGroup

# ---------------------------------------------------------------------- tensors and autograd

Future: Any = torch._C.Future
"""What `get_future()` of a work returns; the public `torch.futures.Future` derives from it."""
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
is_profiling = torch.autograd._profiler_enabled
preserve_version_counters: Any = torch.autograd._unsafe_preserve_version_counter
_engine: Any = torch.autograd.Variable._execution_engine
queue_callback: Callable[[Callable[[], None]], None] = _engine.queue_callback
"""From a hook: has something called at the end of this backward."""
push_mode, pop_mode = torch.utils._python_dispatch._push_mode, torch.utils._python_dispatch._pop_mode
"""A dispatch mode of this thread alone begins, and ends."""
use_count: Callable[[torch.Tensor], int] = operator.methodcaller("_use_count")
"""How many hold a tensor in C++; 1 is its Python object."""
version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""Grows with each change of a tensor in place."""
gradient_hooks_of: Callable[[torch.Tensor], Mapping[int, Any] | None]
gradient_hooks_of = operator.attrgetter("_post_accumulate_grad_hooks")
name_of_operator: Callable[[Any], str] = operator.attrgetter("_schema.name")
"""What a dispatch mode is called for, such as 'c10d::allreduce_'."""

_ENGINE_KEY = "context"


@contextmanager
def without_engine_context() -> Generator[None, None, None]:
    """Hides from a collective that starts in here what the autograd engine keeps for its threads.

    A work copies the thread's state, and since torch 2.13 that holds a Python object during backward. When
    gloo's own thread drops the last copy it takes the GIL, and if the interpreter is ending just then, that
    kills the process (`terminate called without an active exception`, SIGABRT).
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
"""Attribute of a parameter: the optimizers that `_apply_optimizer_in_backward` has made for it."""
UPDATE_COUNT, COMPUTED = "_update_count", "_computed"
"""Attributes of a metric of torchmetrics: how many updates it has had, and what it has computed of them."""


to_kwargs = torch.distributed.utils._to_kwargs


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether it is what `torch.compile` has made of a module."""
    return "_orig_mod" in children_of(module)


def shallow_replica(module: torch.nn.Module) -> torch.nn.Module:
    """A copy with dicts of its own and without parameters; `nn.LSTM` and others override how it is made."""
    replica: torch.nn.Module = module._replicate_for_data_parallel()
    replica.__dict__.pop("_compiled_call_impl", None)  # of `module.compile()`: bound to the original
    return replica


# ---------------------------------------------------------------------- process groups

REDUCE_SCATTER_FLAT = "_reduce_scatter_base"
is_joining: Callable[[Any], bool] = operator.attrgetter("_join_config.enable")
"""Whether a `Joinable` is inside of `Join`."""


def known_groups() -> Mapping[Any, tuple[str, Any]]:
    """The process groups that torch knows, with the backend and the store of each."""
    known: Mapping[Any, tuple[str, Any]] = dist.distributed_c10d._world.pg_map
    return known


def never_destroy(objects: Iterable[object]) -> None:
    """Keep objects beyond the end of the interpreter: in a fork torch's destructors wait for lost threads."""
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def keep_sockets_in(folder: str) -> None:
    """Put the sockets over which this process and its children share tensors into a folder.

    Their own folders stay behind where torch ends a process by a signal.
    """
    vars(torch.multiprocessing.current_process())["_config"]["tempdir"] = folder


def name_of_group(process_group: Any) -> str:
    """What torch calls a group that it knows."""
    return str(dist.distributed_c10d._world.pg_names[process_group])


def count_groups_anew() -> None:
    """Has the next default group be named as the first one: torch does so only when one is destroyed.

    A process that could not make one would name the next one otherwise than those that could.
    """
    dist.distributed_c10d._world.group_count = 0


def refuse_collectives(process_group: Any) -> None:
    """Has each collective of a group fail at once, where torch has a backend that does."""
    options: Any = _Fake.Options()
    if not hasattr(options, "error_on_collective"):
        return
    options.error_on_collective = True
    refusing = _Fake._create_internal(process_group.rank(), process_group.size(), options)
    for device in process_group._device_types:
        process_group._register_backend(device, dist.ProcessGroup.BackendType.CUSTOM, refusing)


def backend_of(process_group: Any, device: torch.device) -> Any:
    """What serves `device` in a process group; a single backend is its own."""
    get_backend = getattr(process_group, "_get_backend", None)
    return process_group if get_backend is None else get_backend(device)


def error_of(process_group: Any, device: torch.device) -> str | None:
    """What the backend's own watchdog has found, such as 'COMM_ERROR'; None for nothing."""
    try:
        get_error = getattr(backend_of(process_group, device), "get_error", None)  # new in torch 2.7
        found = get_error() if get_error is not None else None
    except RuntimeError:  # a backend that does not tell, or none for such devices
        return None
    name = str(getattr(found, "name", "SUCCESS"))
    return None if name == "SUCCESS" else name


def timeout_of(backend: Any) -> timedelta | None:
    """After how long it gives a collective up; None where it does not tell."""
    timeout: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout


def set_timeout(backend: Any, timeout: timedelta) -> None:
    """Changes after how long it gives a collective up."""
    in_public = getattr(backend, "set_timeout", None)  # which an older torch does not have
    (in_public or backend._set_default_timeout)(timeout)


def new_gloo(store: Any, rank: int, size: int, devices: Any, timeout: timedelta) -> Any:
    """A gloo backend that torch does not know of; `devices` are those of its connections."""
    options = _Gloo._Options()
    options._devices, options._timeout = devices, timeout
    return _Gloo(store, rank, size, options)


def gloo_like(other: Any, store: Any, rank: int, size: int) -> Any:
    """The same, with the devices and the timeout of another one."""
    return new_gloo(store, rank, size, other.options._devices, other.options._timeout)


def new_nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """An NCCL backend that torch does not know of."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def all_gather_flat(process_group: Any, gathered: torch.Tensor, flat: torch.Tensor) -> Any:
    """Starts an all-gather into one tensor; returns its work."""
    return process_group._allgather_base(gathered, flat)


def reduce_scatter_flat(process_group: Any, part: torch.Tensor, flat: torch.Tensor, options: Any) -> Any:
    """Starts a reduce-scatter of one tensor; returns its work."""
    return process_group._reduce_scatter_base(part, flat, options)


def root_of_mesh(mesh: Any) -> Any:
    """The whole mesh that this one is a part of; itself where torch does not tell."""
    return mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh


# ---------------------------------------------------------------------- DDP and the compiler

IGNORED_NAMES = "_ddp_params_and_buffers_to_ignore"
"""Attribute of a module: qualified names of what is left alone."""
IS_IGNORED = "_ddp_ignored"
"""Attribute that such a parameter or buffer has."""


def run_eagerly(function: _F) -> _F:
    """Lets torch.compile leave `function` alone and compile what it calls.

    As `torch.compiler.disable(recursive=False)`, without importing the compiler, which takes seconds.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    frames: Any = torch._C._dynamo.eval_frame
    strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, strategy)
    return function


class _SeenByDynamo:
    """What torch.compile reads of the wrapper in whose forward it compiles."""

    is_told = False
    """Whether this process's compiler has been told about the package."""

    def __init__(self, bucket_bytes: int) -> None:
        # it takes the first bucket to have 1 MiB, and refuses to make it larger than the others
        self.bucket_bytes_cap = max(bucket_bytes, dist._DEFAULT_FIRST_BUCKET_BYTES)


@run_eagerly
def tell_dynamo() -> None:
    """Lets torch.compile leave all code of this package alone, once the compiler is there."""
    if not _SeenByDynamo.is_told and "torch._dynamo" in sys.modules:
        _SeenByDynamo.is_told = True
        torch._dynamo.trace_rules.add(__name__.partition(".")[0])


@contextmanager
def inside_forward(bucket_bytes: int) -> Generator[None, None, None]:
    """While a wrapper's forward runs: torch.compile splits the graph at its buckets."""
    before = _TorchDDP._active_ddp_module
    _TorchDDP._active_ddp_module = _SeenByDynamo(bucket_bytes)
    try:
        yield
    finally:
        _TorchDDP._active_ddp_module = before
