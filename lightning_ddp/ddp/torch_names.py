"""Names of torch's DistributedDataParallel that torch's library, or code written for it, uses of a wrapper.

Its optimizer hooks and `ZeroRedundancyOptimizer` use names that are no part of the documented interface; and
`_set_static_graph` was how to say so before the argument. What only torch's own tests use is no part of the
package: `tests/conformance/torch_names.py`.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from lightning_ddp._torch import IS_IGNORED
from lightning_ddp.ddp import torch_messages as torch_words
from lightning_ddp.errors import UnsuitableModuleError

__all__ = ["TorchNames"]


class TorchNames:
    """Base of `BucketedDDP` that carries them."""

    if TYPE_CHECKING:
        _log: Any
        forward_sync_buffers: bool
        reducer: Any
        static_graph: bool

    @property
    def broadcast_buffers(self) -> bool:
        """The old name of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return bool(self.reducer.has_rebuilt)

    @staticmethod
    def _get_data_parallel_params(module: torch.nn.Module, named_params: bool = False) -> Any:
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, IS_IGNORED):
                yield (name, parameter) if named_params else parameter

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn("static_graph is True already", stacklevel=2)
            return
        with self._log.errors_noted():
            if self.reducer.step >= 0:
                raise UnsuitableModuleError(
                    f"static_graph {torch_words.STATIC_GRAPH_TOO_LATE}; there were"
                    f" {self.reducer.step + 1} backwards."
                    " Pass static_graph=True to the constructor."
                )
        self.static_graph = True
        self.reducer.make_static()
