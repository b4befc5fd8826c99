"""Mixed precision inside the wrapper: parameters, inputs and buffers in low precision during a step.

Outside of a step parameters are in full precision, and gradients arrive so. The configuration is that of
torch's DDP (`_MixedPrecision`, experimental there).
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_ddp._torch import queue_callback, tree_map
from lightning_ddp.ddp.gradients import find_tensors
from lightning_ddp.errors import ConfigurationError


class MixedPrecision:
    """Mixed precision: swaps parameters for low-precision copies and back; construction casts the buffers."""

    def __init__(self, config: Any, module: torch.nn.Module, ignored: frozenset[str] = frozenset()) -> None:
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            dtype = getattr(config, name, None)
            if dtype is not None and not dtype.is_floating_point:
                raise ConfigurationError(f"mixed_precision.{name}={dtype}: expected a floating-point dtype")
        self.config = config
        self.reduce_dtype: torch.dtype | None = config.reduce_dtype or config.param_dtype
        """Dtype in which gradients are reduced; None for that of each parameter."""
        self._params = [
            p for name, p in module.named_parameters() if name not in ignored and p.is_floating_point()
        ]
        self._full: list[torch.Tensor] = []  # full-precision data while parameters hold copies
        for name, buffer in module.named_buffers() if config.buffer_dtype is not None else ():
            if name not in ignored and buffer.is_floating_point():
                buffer.data = buffer.to(config.buffer_dtype)

    def cast_parameters(self) -> None:
        """Replace the data of parameters and gradients by low-precision copies, before a forward."""
        dtype = self.config.param_dtype
        if dtype is not None and not self._full:
            self._full = [p.data for p in self._params]
            for p in self._params:
                self._swap(p, p.data.to(dtype))

    def restore_parameters(self) -> None:
        """Restore parameters and gradients in full precision, after a backward."""
        full, self._full = self._full, []
        for p, data in zip(self._params, full, strict=False):  # none if they are in full precision already
            self._swap(p, data)

    @staticmethod
    def _swap(parameter: Any, data: torch.Tensor) -> None:
        grad = parameter.grad
        parameter.grad = None  # must have the parameter's dtype at any time
        parameter.data = data
        if grad is not None:
            parameter.grad = grad.to(data.dtype)
            if grad.is_cuda:  # allocated on another stream maybe, which would reuse the memory too early
                grad.record_stream(torch.cuda.current_stream(grad.device))

    def restore_after_backward(self, outputs: Any) -> None:
        """Restore parameters at the end of a backward from `outputs`, or now if no backward can follow."""
        tensors = [t for t in find_tensors(outputs) if t.requires_grad]
        if not tensors:
            self.restore_parameters()

        def start(_grad: torch.Tensor) -> None:
            queue_callback(self.restore_parameters)

        for tensor in tensors:
            tensor.register_hook(start)

    def cast_inputs(self, inputs: Any) -> Any:
        """Return `inputs` with floating-point tensors in nested containers cast to `param_dtype`."""
        dtype = self.config.param_dtype

        def low(leaf: Any) -> Any:
            is_float = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
            return leaf.to(dtype) if is_float else leaf

        return inputs if dtype is None else tree_map(low, inputs)
