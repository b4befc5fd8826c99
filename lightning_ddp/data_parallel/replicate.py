"""Data parallelism within one process: replicate -> scatter -> parallel_apply -> gather.

One thread a device runs a replica of the module on its chunk of the batch. The replicas' parameters carry
a gradient edge to the original's, where the gradients are summed, so nothing here communicates across
processes; `BucketedDDP(DataParallel(module, devices))` adds that. After torch's C++ `data_parallel`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp._torch import buffers_of, children_of, is_compiled, parameters_of, shallow_replica
from lightning_ddp.data_parallel.parallel_apply import parallel_apply
from lightning_ddp.data_parallel.scatter import Device, as_device, as_devices, gather, scatter, scatter_kwargs
from lightning_ddp.errors import ConfigurationError

__all__ = ["DataParallel", "data_parallel", "replicate"]


class _Copies(torch.autograd.Function):
    """One tensor -> a copy for each device; backward sums the copies' gradients on the tensor's device.

    One node a parameter, so that `BucketedDDP` gets each gradient early and can tell which are unused.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, devices: list[torch.device]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # a replica without a gradient adds nothing, not dense zeros
        ctx.device = tensor.device
        return tuple(tensor.to(device, copy=True) for device in devices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        total = None
        for grad in grads:
            if grad is not None:
                moved = grad.to(ctx.device)
                total = moved if total is None else total + moved  # out of place: differentiable itself
        return total, None


def replicate(module: nn.Module, devices: Sequence[Device]) -> list[nn.Module]:
    """Copies of `module`, one a device, whose gradients flow back into it.

    Called by one thread, before each forward. Under `torch.no_grad` the replicas are detached.

    A replica shares hooks and plain attributes with the original; what its forward assigns to itself is lost.
    Its parameters are plain attributes, no leaves: `replica.parameters()` yields nothing. A tensor shared
    within the module is shared within the replica. Buffers are copied, but the first replica on the device of
    a buffer has the buffer itself: in-place updates (BatchNorm's running statistics) reach the original.

    Args:
        module: on any device.
        devices: an int is a CUDA device; may repeat, each replica has its own tensors.

    Raises:
        ConfigurationError: no devices, a device that does not exist, or a scripted or compiled module.
    """
    targets = as_devices(devices)
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule) or is_compiled(part):
            raise ConfigurationError(
                f"{name or 'the module'} is a {type(part).__name__}: scripted and compiled modules are bound"
                " to their own parameters and cannot be replicated. Pass the module that they were made from."
            )
    copies = {id(parameter): _copies(parameter, targets) for parameter in module.parameters()}
    for buffer in module.buffers():
        if buffer.device in targets:
            own = targets.index(buffer.device)
            others = _copies(buffer, targets[:own] + targets[own + 1 :])
            copies[id(buffer)] = [*others[:own], buffer, *others[own:]]
        else:
            copies[id(buffer)] = _copies(buffer, targets)
    return [_replica(module, copies, index, {}) for index in range(len(targets))]


def _copies(tensor: Tensor, devices: list[torch.device]) -> list[Tensor]:
    return list(_Copies.apply(tensor, devices)) if devices else []  # type: ignore[no-untyped-call] # torch's


def _replica(
    module: nn.Module, copies: Mapping[int, Sequence[Tensor]], index: int, made: dict[int, nn.Module]
) -> nn.Module:
    if id(module) in made:
        return made[id(module)]
    made[id(module)] = replica = shallow_replica(module)
    for name, child in children_of(module).items():
        children_of(replica)[name] = None if child is None else _replica(child, copies, index, made)
    for name, parameter in parameters_of(module).items():
        if parameter is None:
            parameters_of(replica)[name] = None
        else:
            setattr(replica, name, copies[id(parameter)][index])
    for name, buffer in buffers_of(module).items():
        buffers_of(replica)[name] = None if buffer is None else copies[id(buffer)][index]
    return replica


def data_parallel(
    module: nn.Module,
    inputs: Any,
    devices: Sequence[Device] | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Runs `module` on chunks of the inputs, one a device, and joins the outputs; differentiable.

    Called by one thread. Gradients are those of the module on the whole batch, unless it mixes samples:
    BatchNorm normalises each chunk by itself, and the running statistics are those of replica 0.
    With one device the module itself runs, without replicas and threads.

    Args:
        module: with its parameters and buffers on `devices[0]`.
        inputs: a tuple of positional arguments, or the only one; None for none. See `scatter`.
        devices: an int is a CUDA device; may repeat. None for all CUDA devices, or the CPU without any.
        output_device: where the outputs are gathered; None for `devices[0]`.
        dim: the dimension of the batch, in inputs and outputs.
        module_kwargs: keyword arguments, scattered as `inputs`.

    Raises:
        ConfigurationError: a parameter or buffer is elsewhere, or as `replicate`, `scatter`, `gather`.
        Exception: what a replica raised, see `parallel_apply`.
    """
    targets = as_devices(devices)
    target = targets[0] if output_device is None else as_device(output_device)
    _check_placement(module, targets[0])
    args = () if inputs is None else inputs if isinstance(inputs, tuple) else (inputs,)
    pieces, kwargs = scatter_kwargs(args, module_kwargs, targets, dim)
    if len(targets) == 1:
        output = module(*pieces[0], **kwargs[0])
        return output if target == targets[0] else scatter(output, [target])[0]
    used = targets[: len(pieces)]
    return gather(parallel_apply(replicate(module, used), pieces, kwargs, used), target, dim)


def _check_placement(module: nn.Module, device: torch.device) -> None:
    for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in named:
            if tensor.device != device:
                raise ConfigurationError(
                    f"{kind} {name} is on {tensor.device}; expected all parameters and buffers on {device},"
                    f" the first of the devices: move the module there first, as with module.to('{device}')"
                )


class DataParallel(nn.Module):
    """`data_parallel` as a module, for use in place of `module`; keys of its `state_dict` begin `module.`.

    Does not communicate across processes. `BucketedDDP(DataParallel(module, devices))` does: several
    processes with several devices each.

    Args:
        module: its parameters and buffers are on the first device when `forward` is called.
        device_ids: ints for CUDA devices, names or `torch.device`s; may repeat, as in `["cpu", "cpu"]`.
            None for all CUDA devices, or the CPU without any.
        output_device: where the outputs are gathered; None for the first device.
        dim: the dimension of the batch, in inputs and outputs.
        devices: another name of `device_ids`.

    Raises:
        ConfigurationError: both names were used, no devices, or one that does not exist.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        *,
        devices: Sequence[Device] | None = None,
    ) -> None:
        super().__init__()
        if device_ids is not None and devices is not None:
            raise ConfigurationError(f"device_ids={device_ids} and devices={devices}: the same; pass one")
        self.module = module
        self.devices = as_devices(device_ids if devices is None else devices)
        self.output_device = self.devices[0] if output_device is None else as_device(output_device)
        self.dim = dim

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module on chunks of the inputs; see `data_parallel`."""
        return data_parallel(self.module, inputs, self.devices, self.output_device, self.dim, kwargs)
