"""Averages of what is no parameter: running statistics, other buffers, optimizer state."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from lightning_ddp.comm import all_gather_objects
from lightning_ddp.encoding.chunks import average_
from lightning_ddp.encoding.mean import PlainWire
from lightning_ddp.encoding.side_stream import Channel

__all__ = ["average_buffers", "average_optimizer_state"]


def average_buffers(channel: Channel, module: torch.nn.Module) -> None:
    """Makes a module's buffers the same on all ranks. A job of the channel; communicates.

    The running variance of a normalisation becomes that of all ranks' data taken together: the mean of the
    variances plus the variance of the means. Other floating-point buffers are averaged; of integers, such as
    counts of batches, the largest is taken.
    """
    means, variances = [], []
    for layer in module.modules():
        mean, variance = getattr(layer, "running_mean", None), getattr(layer, "running_var", None)
        if isinstance(mean, torch.Tensor) and isinstance(variance, torch.Tensor):
            means.append(mean)
            variances.append(variance)
    wire = PlainWire(channel)
    before = [mean.clone() for mean in means]
    known = {id(t) for t in [*means, *variances]}
    rest = [b for b in module.buffers() if id(b) not in known]
    average_(wire, [*means, *(b for b in rest if b.is_floating_point())])
    for own, mean, variance in zip(before, means, variances, strict=True):
        variance.add_((own - mean).square_())
    average_(wire, variances)
    integers = [b for b in rest if not b.is_floating_point() and not b.is_complex()]
    for dtype in sorted({b.dtype for b in integers}, key=str):
        same = [b for b in integers if b.dtype == dtype]
        wide = torch.cat([b.reshape(-1).to(torch.int64) for b in same])
        channel.all_reduce(wide, dist.ReduceOp.MAX)
        for buffer, values in zip(same, wide.split([b.numel() for b in same]), strict=True):
            buffer.copy_(values.view(buffer.shape))


def average_optimizer_state(
    channel: Channel, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]
) -> None:
    """Averages the floating-point tensors that an optimizer keeps for its parameters. Communicates.

    A job of a channel. Step counts stay. A parameter that had no gradient on some rank has no state there:
    then the other ranks keep theirs.

    Args:
        channel: the ranks.
        optimizer: its state is changed in place.
        parameters: those of the optimizer, by name, in one order on all ranks.
    """
    found = {
        (name, key): value
        for name, parameter in parameters.items()
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == parameter.shape
        if key != "step"
    }
    layouts = all_gather_objects(channel.group, list(found), channel.device)
    everywhere = set(layouts[0]).intersection(*map(set, layouts[1:]))
    average_(PlainWire(channel), [value for key, value in found.items() if key in everywhere])
