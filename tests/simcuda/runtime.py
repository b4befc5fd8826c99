"""Gives torch's own Python of CUDA the functions of C++ that only a build for CUDA has.

`torch.cuda` itself is not changed: its devices, streams, events, memory and random numbers run as in a CUDA
build, on these functions, which `install` puts into `torch._C` when `torch.cuda` is about to be imported.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.abc
import os
import sys
import warnings
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

_MEMORY = 80 * 2**30
_CUDA = 1  # the number of this kind of device in streams

_library: Any = None
_started_in: int | None = None


class Installer(importlib.abc.MetaPathFinder):
    """Calls `install` as soon as `torch.cuda` is imported, which looks for the functions when it is."""

    def __init__(self, library: Any) -> None:
        global _library
        _library = library

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torch.cuda":
            sys.meta_path.remove(self)
            install(sys.modules["torch._C"])


def num_devices() -> int:
    """How many there are: up to eight."""
    return int(os.environ.get("SIMULATED_CUDA_DEVICES", "2"))


def install(c: ModuleType) -> None:
    """Args: c: `torch._C` of a build for the CPU."""

    class CudaStreamBase(c.Stream):  # type: ignore[name-defined]
        def __new__(
            cls,
            priority: int = 0,
            stream_id: int = 0,
            device_index: int = 0,
            device_type: int = 0,
            stream_ptr: int = 0,
        ) -> Any:
            if device_type:
                return super().__new__(
                    cls, stream_id=stream_id, device_index=device_index, device_type=device_type
                )
            return super().__new__(cls, device=_current(), priority=priority)

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

    class CudaEventBase(c.Event):  # type: ignore[name-defined]
        def __new__(
            cls,
            enable_timing: bool = False,
            blocking: bool = False,
            interprocess: bool = False,
            external: bool = False,
        ) -> Any:
            event = super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)
            # torch.Event takes the time between objects of its own class alone
            event._twin = c.Event("cuda", enable_timing=True) if enable_timing else None
            return event

        def record(self, stream: Any) -> None:
            super().record(stream)
            if self._twin is not None:
                self._twin.record(stream)

        def elapsed_time(self, end: Any) -> float:
            if self._twin is None or end._twin is None:
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            return self._twin.elapsed_time(end._twin)

        @property
        def cuda_event(self) -> int:
            return self.event_id

    def _current() -> Any:
        import torch

        return torch.device("cuda", get_device())

    def get_device() -> int:
        return c._accelerator_getDeviceIndex()

    def exchange_device(index: int) -> int:
        before = get_device()
        if index >= 0:
            c._accelerator_setDeviceIndex(index)
        return before if index >= 0 else -1

    def describe(stream: Any) -> tuple[int, int, int]:
        return stream.stream_id, stream.device_index, stream.device_type

    def get_current_stream(index: int) -> tuple[int, int, int]:
        return describe(c._accelerator_getStream(index))

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        # as CUDA's, it makes the device of the stream the current one
        c._accelerator_setStream(
            c.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
        )

    sync_debug_mode = 0

    def set_sync_debug_mode(mode: int) -> None:
        nonlocal sync_debug_mode
        if mode:  # in CUDA's words, of which a part is that of a wait
            warnings.warn(
                "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing"
                " operations",
                stacklevel=2,
            )
        sync_debug_mode = mode

    def init() -> None:
        global _started_in
        import torch

        _started_in = os.getpid()
        torch.cuda.default_generators = tuple(_nccl().default_generator(i) for i in range(num_devices()))
        torch.cuda._get_device_properties = _properties

    functions: dict[str, Any] = {
        "_has_cuda": True,
        "_CudaStreamBase": CudaStreamBase,
        "_CudaEventBase": CudaEventBase,
        "_CudaDeviceProperties": DeviceProperties,
        "_CUDAGraph": object,
        "_graph_pool_handle": lambda: (0, 0),
        "_cudart": _Cudart(),
        "_cuda_init": init,
        "_cuda_isInBadFork": lambda: _started_in not in (None, os.getpid()),
        "_cuda_getDeviceCount": num_devices,
        "_cuda_getDevice": get_device,
        "_cuda_setDevice": c._accelerator_setDeviceIndex,
        "_cuda_exchangeDevice": exchange_device,
        "_cuda_maybeExchangeDevice": exchange_device,
        "_cuda_canDeviceAccessPeer": lambda device, peer: True,
        "_cuda_getArchFlags": lambda: "sm_80",
        "_cuda_synchronize": lambda: c._accelerator_synchronizeDevice(get_device()),
        "_cuda_getCurrentStream": get_current_stream,
        "_cuda_getCurrentRawStream": lambda index: get_current_stream(index)[0],
        "_cuda_getDefaultStream": lambda index: (0, index, _CUDA),
        "_cuda_setStream": set_stream,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_emptyCache": lambda: None,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_clearCublasWorkspaces": lambda: None,
        "_cuda_memoryStats": lambda index: {"allocated_bytes": {"all": {"current": _bytes_allocated(index)}}},
        "_cuda_resetAccumulatedMemoryStats": lambda index: None,
        "_cuda_resetPeakMemoryStats": lambda index: None,
        "_cuda_setMemoryFraction": lambda fraction, index: None,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_set_sync_debug_mode": set_sync_debug_mode,
        "_cuda_get_sync_debug_mode": lambda: sync_debug_mode,
        "_nccl_version": lambda: (2 << 32) | (27 << 16) | 5,
        "_nccl_version_suffix": lambda: b"",
    }
    for name, function in functions.items():
        setattr(c, name, function)


class DeviceProperties(SimpleNamespace):
    """Of a device that no GPU is."""


def _properties(index: int) -> DeviceProperties:
    return DeviceProperties(
        name="simulated",
        major=8,
        minor=0,
        total_memory=_MEMORY,
        multi_processor_count=1,
        warp_size=32,
        is_integrated=False,
        is_multi_gpu_board=False,
        gcnArchName="",
        uuid=f"simulated-{index}",
    )


class _Cudart:
    """What `torch.cuda.cudart()` returns."""

    @staticmethod
    def cudaMemGetInfo(index: int) -> tuple[int, int]:
        return _MEMORY - _bytes_allocated(index), _MEMORY

    cudaError = SimpleNamespace(success=0)


def _bytes_allocated(index: int) -> int:
    _library.simcuda_bytes_allocated.restype = ctypes.c_uint64
    return _library.simcuda_bytes_allocated(index)


# ---- storages


def install_storages() -> None:
    """Lets Python make a storage on a device, as `torch.load` does."""
    import torch

    make = torch.UntypedStorage.__new__

    def new(cls: Any, *args: Any, device: Any = None, **named: Any) -> Any:
        if device is not None and torch.device(device).type == "cuda" and args:
            return torch.empty(args[0], dtype=torch.uint8, device=device).untyped_storage()
        return make(cls, *args, **named, **({} if device is None else {"device": device}))

    torch.UntypedStorage.__new__ = staticmethod(new)


# ---- NCCL


def _nccl() -> Any:
    return sys.modules["simnccl"]


def install_nccl(module: ModuleType) -> None:
    """Makes `torch.distributed` know the backend `nccl`.

    Args:
        module: the library with the simulated `ProcessGroupNCCL`.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import constants, distributed_c10d

    sys.modules["simnccl"] = module
    for name in ("ProcessGroupNCCL", "ProcessGroupNCCL2"):
        made = getattr(module, name)
        made.__module__ = "torch.distributed.distributed_c10d"
        for namespace in (torch._C._distributed_c10d, distributed_c10d, dist):
            setattr(namespace, name, made)
    # this version of torch makes the group of `nccl` there
    options = {"Options": module.ProcessGroupNCCL.Options}
    distributed_c10d.ProcessGroupNCCL = _ChosenClass("ProcessGroupNCCL", (), options)
    distributed_c10d._NCCL_AVAILABLE = True
    for namespace in (constants, distributed_c10d):
        namespace.default_pg_nccl_timeout = timedelta(minutes=10)
    torch.cuda._device_count_nvml = lambda: -1  # it counts the devices of the machine


class _ChosenClass(type):
    """What `nccl` means: the first class, or with TORCH_DIST_USE_NCCL2=1 the second."""

    def __call__(cls, *args: Any, **named: Any) -> Any:
        is_second = os.environ.get("TORCH_DIST_USE_NCCL2") == "1"
        return (_nccl().ProcessGroupNCCL2 if is_second else _nccl().ProcessGroupNCCL)(*args, **named)

    def __instancecheck__(cls, made: Any) -> bool:
        return isinstance(made, (_nccl().ProcessGroupNCCL, _nccl().ProcessGroupNCCL2))


# ---- operators that only CUDA has: softmax of halves in float, and what SyncBatchNorm is made of


def install_operators() -> Any:
    """Registers them; keep what it returns."""
    import torch

    library = torch.library.Library("aten", "IMPL", "CUDA")
    for name in ("_softmax", "_log_softmax"):
        forward = getattr(torch.ops.aten, name).out
        backward = getattr(torch.ops.aten, f"{name}_backward_data").out
        library.impl(name, functools.partial(_softmax, forward))
        library.impl(f"{name}_backward_data", functools.partial(_softmax_backward, backward))
    for function in (
        batch_norm_stats,
        batch_norm_gather_stats_with_counts,
        batch_norm_elemt,
        batch_norm_backward_reduce,
        batch_norm_backward_elemt,
    ):
        library.impl(function.__name__, function)
    return library


def _softmax(out: Any, input: Any, dim: int, half_to_float: bool) -> Any:
    values = input.float() if half_to_float else input
    return out(values, dim, False, out=values.new_empty(values.shape))


def _softmax_backward(out: Any, grad: Any, output: Any, dim: int, input_dtype: Any) -> Any:
    target = grad.new_empty(grad.shape)
    name = out._schema.arguments[-1].name
    return out(grad, output, dim, grad.dtype, **{name: target}).to(input_dtype)


def _channels(values: Any, like: Any) -> Any:
    return values.view([1, -1] + [1] * (like.dim() - 2))


def _others(tensor: Any) -> list[int]:
    return [d for d in range(tensor.dim()) if d != 1]


def batch_norm_stats(input: Any, eps: float) -> Any:
    """Mean and inverse standard deviation of each channel, of this rank's rows."""
    values = input.float()
    return values.mean(_others(input)), (values.var(_others(input), unbiased=False) + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    input: Any,
    mean: Any,
    invstd: Any,
    running_mean: Any,
    running_var: Any,
    momentum: float,
    eps: float,
    counts: Any,
) -> Any:
    """Those of all ranks' rows; moves the running ones along."""
    weights = counts.view(-1, 1).to(mean.dtype)
    total = weights.sum()
    of_all = (mean * weights).sum(0) / total
    variances = invstd.pow(-2) - eps
    variance = ((variances + (mean - of_all).square()) * weights).sum(0) / total
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(momentum * of_all)
    if running_var is not None:
        running_var.mul_(1 - momentum).add_(momentum * variance * total / (total - 1))
    return of_all, (variance + eps).rsqrt()


def batch_norm_elemt(input: Any, weight: Any, bias: Any, mean: Any, invstd: Any, eps: float) -> Any:
    """The normalised input."""
    normal = (input.float() - _channels(mean, input)) * _channels(invstd, input)
    if weight is not None:
        normal = normal * _channels(weight, input)
    if bias is not None:
        normal = normal + _channels(bias, input)
    return normal.to(input.dtype)


def batch_norm_backward_reduce(
    grad: Any, input: Any, mean: Any, invstd: Any, weight: Any, input_g: bool, weight_g: bool, bias_g: bool
) -> Any:
    """This rank's sums for the gradients."""
    grads, centred = grad.float(), input.float() - _channels(mean, input)
    sum_dy = grads.sum(_others(input))
    sum_dy_xmu = (grads * centred).sum(_others(input))
    return (
        sum_dy if input_g else None,
        sum_dy_xmu if input_g else None,
        (sum_dy_xmu * invstd).to(weight.dtype) if weight_g and weight is not None else None,
        sum_dy.to(weight.dtype) if bias_g and weight is not None else None,
    )


def batch_norm_backward_elemt(
    grad: Any, input: Any, mean: Any, invstd: Any, weight: Any, sum_dy: Any, sum_dy_xmu: Any, count: Any
) -> Any:
    """The gradient of the input, from the sums of all ranks."""
    total = count.sum().to(sum_dy.dtype)
    centred = input.float() - _channels(mean, input)
    slope = _channels(invstd.square() * sum_dy_xmu / total, input)
    factor = invstd if weight is None else invstd * weight
    result = (grad.float() - _channels(sum_dy / total, input) - centred * slope) * _channels(factor, input)
    return result.to(input.dtype)
