"""Let the CPU stand in for CUDA devices, so that PyTorch's CUDA-only DDP tests run without a GPU.

Every CUDA device that a test names becomes the CPU, `device_ids` are dropped before they reach DDP, and the
decorators that skip for want of a GPU do nothing. The test's logic is left: gradients, buffers, hooks, join,
logging, errors; no devices, streams or overlap.

Where it can, it changes what the test module alone sees (`adapt`): a stand-in for `torch` whose factories,
`torch.cuda` and `torch.device` know the CPU only. What changes for the class under test as well (`install`):

- `Tensor.cuda/.to`, `Module.cuda/.to`: a CUDA device means the CPU;
- `init_process_group`, `new_group`: "nccl" means "gloo"; `init_device_mesh`: "cuda" means "cpu";
- `SyncBatchNorm.forward`: an implementation for any device, below;
- `torch.Stream`, `torch.Event`, `torch.accelerator.current_stream`: do nothing;
- the class's constructor drops `device_ids` and `output_device`, and torch's own class takes SyncBatchNorm
  in a CPU module, which it refuses otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import types
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.cuda.nccl
import torch.distributed as dist
import torch.distributed.device_mesh
from torch import Tensor, nn
from torch.nn.functional import batch_norm

CPU = torch.device("cpu")
NUM_CLAIMED_GPUS = 4
# torch skips tests for these reasons, which need not hold here
REVIVED = ("flakiness", "NVIDIA internal CI")
IMAGE_SIZE = 32
"""In place of the 1000 of test_ddp_uneven_inputs, which convolves for hours on a CPU."""
FACTORIES = """
    arange as_tensor empty empty_like eye full full_like linspace ones ones_like rand rand_like randint randn
    randn_like randperm tensor zeros zeros_like
""".split()  # noqa: SIM905


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Around the import of torch's test module: nothing is skipped for want of a GPU."""
    from torch.testing._internal import common_distributed, common_utils

    def keep(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        return lambda test: test

    skip_if, skip = common_utils.skip_but_pass_in_sandcastle_if, common_utils.skip_but_pass_in_sandcastle

    def is_revived(reason: object) -> bool:
        return any(text in str(reason) for text in REVIVED)

    patches = {
        common_distributed: {
            "skip_if_lt_x_gpu": keep,
            "nccl_skip_if_lt_x_gpu": keep,
            "skip_if_no_gpu": lambda test: test,
            "requires_nccl": keep,
            "requires_nccl_version": keep,
            "requires_accelerator_dist_backend": keep,
            "init_multigpu_helper": lambda world_size, backend: {i: [i] for i in range(world_size)},
        },
        common_utils: {
            "skip_but_pass_in_sandcastle_if": lambda condition, reason: skip_if(
                condition and not is_revived(reason), reason
            ),
            "skip_but_pass_in_sandcastle": lambda reason: keep() if is_revived(reason) else skip(reason),
            "IS_LINUX": False,  # some are skipped on Linux for being flaky there
        },
        dist: {"is_nccl_available": lambda: True},
        torch.cuda.nccl: {"version": lambda: (2, 20, 0)},
    }
    with contextlib.ExitStack() as stack:
        for module, replacements in patches.items():
            stack.enter_context(unittest.mock.patch.multiple(module, **replacements))
        yield


def adapt(module: types.ModuleType) -> None:
    """Gives torch's test module, once it is imported, the view of torch that has no CUDA devices."""
    replaced: dict[str, Any] = {
        "torch": _torch_without_cuda(),
        "GradScaler": functools.partial(torch.amp.GradScaler, "cpu"),
        "autocast": functools.partial(torch.amp.autocast, "cpu"),
        "DDPUnevenTestInput": _with_small_images(module.DDPUnevenTestInput),
    }
    for name, replacement in replaced.items():
        assert hasattr(module, name), f"torch's tests no longer use {name}"
        setattr(module, name, replacement)


def install(under_test: type[nn.Module]) -> None:
    """Changes torch and the class under test for the rest of this process."""
    for owner in (Tensor, nn.Module):
        owner.to = _on_the_cpu(owner.to)  # type: ignore[method-assign]
        owner.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    for module in (dist, dist.distributed_c10d):
        module.init_process_group = _over_gloo(module.init_process_group)
        module.new_group = _over_gloo(module.new_group)
    make_mesh = torch.distributed.device_mesh.init_device_mesh
    torch.distributed.device_mesh.init_device_mesh = lambda kind, *args, **kwargs: make_mesh(
        "cpu", *args, **kwargs
    )
    nn.SyncBatchNorm.forward = _forward_of_sync_batch_norm  # type: ignore[method-assign]
    torch.Stream = torch.Event = torch.accelerator.current_stream = _Idle  # type: ignore[misc, assignment]
    _drop_device_ids(under_test)
    if hasattr(under_test, "_passing_sync_batchnorm_handle"):
        under_test._passing_sync_batchnorm_handle = _do_nothing


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass


class _Idle:
    """A stream, an event, or the context manager of one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Idle:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _do_nothing


class _Instead(types.ModuleType):
    """A module of which some names are replaced."""

    def __init__(self, real: types.ModuleType, **replaced: Any) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(replaced, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)


class _DeviceMeta(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch.device)


class _Device(metaclass=_DeviceMeta):
    """`torch.device` as test code sees it."""

    def __new__(cls, *args: Any, **kwargs: Any) -> torch.device:  # type: ignore[misc]
        return CPU if args and _is_cuda(args[0]) else torch.device(*args, **kwargs)


def _torch_without_cuda() -> types.ModuleType:
    current = [0]

    def set_device(device: object) -> None:
        current[0] = device if isinstance(device, int) else 0

    idle = ("Stream", "Event", "stream", "device", "current_stream", "default_stream")
    nothing = ("synchronize", "manual_seed", "manual_seed_all", "empty_cache")
    cuda = _Instead(
        torch.cuda,
        current_device=lambda: current[0],
        set_device=set_device,
        device_count=lambda: NUM_CLAIMED_GPUS,
        **dict.fromkeys(idle, _Idle),
        **dict.fromkeys(nothing, _do_nothing),
    )
    factories = {name: _with_device_on_the_cpu(getattr(torch, name)) for name in FACTORIES}
    return _Instead(torch, cuda=cuda, device=_Device, **factories)


def _with_device_on_the_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Tensor:
        return make(*args, **kwargs | ({"device": CPU} if _is_cuda(kwargs.get("device")) else {}))

    return made


def _on_the_cpu(to: Callable[..., Any]) -> Callable[..., Any]:
    def moved(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return to(self, *(CPU if _is_cuda(arg) else arg for arg in args), **kwargs)

    return moved


def _over_gloo(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") == "nccl":
            kwargs["backend"] = "gloo"
        for name in ("device_id", "pg_options"):
            kwargs.pop(name, None)
        return make(*("gloo" if arg == "nccl" else arg for arg in args), **kwargs)

    return made


def _with_small_images(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **kwargs: Any) -> Any:
        images = kwargs.get("inp")
        if isinstance(images, Tensor) and images.dim() == 4:
            kwargs["inp"] = images[..., :IMAGE_SIZE, :IMAGE_SIZE].contiguous()
        return make(*args, **kwargs)

    return made


def _drop_device_ids(class_: type[nn.Module]) -> None:
    init = class_.__init__

    @functools.wraps(init)
    def without(
        self: Any,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if device_ids is not None and len(device_ids) <= 1:  # more than one is an error, and stays one
            device_ids = None
        init(self, module, device_ids, None, *args, **kwargs)

    class_.__init__ = without  # type: ignore[method-assign]


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group, total = group, values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _SumOverRanks.apply(grad, ctx.group), None


def _normalize_by_all_ranks(
    x: Tensor, mean_out: Tensor | None, var_out: Tensor | None, momentum: float, eps: float, group: Any
) -> Tensor:
    """Batch normalization by the statistics of all ranks' batches, whose sums autograd follows to them."""
    dims = [dim for dim in range(x.dim()) if dim != 1]
    count = x.new_tensor([x.numel() // x.size(1)])
    sums = _SumOverRanks.apply(torch.cat([x.sum(dims), x.square().sum(dims), count]), group)
    n = sums[-1].clamp(min=1)
    mean = sums[: x.size(1)] / n
    var = (sums[x.size(1) : -1] / n - mean.square()).clamp(min=0)
    if mean_out is not None and var_out is not None:
        unbiased = var * n / (n - 1).clamp(min=1)
        for kept, found in ((mean_out, mean), (var_out, unbiased)):
            kept.mul_(1 - momentum).add_(found.detach().to(kept.dtype), alpha=momentum)
    shape = [1, -1] + [1] * (x.dim() - 2)
    return (x - mean.view(shape)) * (var + eps).rsqrt().view(shape)


def _forward_of_sync_batch_norm(self: Any, x: Tensor) -> Tensor:
    self._check_input_dim(x)
    self._check_non_zero_input_channels(x)
    momentum = 0.0 if self.momentum is None else self.momentum
    if self.training and self.track_running_stats:
        self.num_batches_tracked.add_(1)
        if self.momentum is None:
            momentum = 1.0 / self.num_batches_tracked.item()
    is_kept = not self.training or self.track_running_stats
    mean, var = (self.running_mean, self.running_var) if is_kept else (None, None)
    group = self.process_group or (dist.group.WORLD if dist.is_initialized() else None)
    if self.training and group and dist.get_world_size(group) > 1:
        out = _normalize_by_all_ranks(x.double(), mean, var, momentum, self.eps, group)
        shape = [1, -1] + [1] * (x.dim() - 2)
        out = out if self.weight is None else out * self.weight.double().view(shape)
        return (out if self.bias is None else out + self.bias.double().view(shape)).to(x.dtype)
    by_batch = self.training or (self.running_mean is None and self.running_var is None)
    return batch_norm(x, mean, var, self.weight, self.bias, by_batch, momentum, self.eps)
