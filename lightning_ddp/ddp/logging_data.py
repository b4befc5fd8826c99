"""DDP logging data: what a wrapper is made of and how long its steps take, as data and in the log."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lightning_ddp.comm.group import Group
from lightning_ddp.ddp.reducer import Reducer

__all__ = ["LoggingData"]

_logger = logging.getLogger("lightning_ddp")
_NS_PER_S = 1e9


class _Described(Protocol):
    """What the data tell about."""

    module: torch.nn.Module
    device: torch.device
    device_ids: list[int] | None
    output_device: int | None
    forward_sync_buffers: bool
    find_unused_parameters: bool
    static_graph: bool
    gradient_as_bucket_view: bool
    bucket_bytes_cap: int
    reducer: Reducer
    _group: Group


class LoggingData:
    """Collects the data of one wrapper.

    With `TORCH_DISTRIBUTED_DEBUG=INFO` they are logged (logger `lightning_ddp`) once, at construction; with
    `DETAIL` also whenever a step was timed.

    Args:
        wrapper: the `BucketedDDP`, its reducer made.
    """

    def __init__(self, wrapper: _Described) -> None:
        self._wrapper = wrapper
        self.join_uneven_inputs = False
        """Whether `join()` was used."""
        self.error: str | None = None
        """Text of the last error of this wrapper."""
        self.bucket_sizes = self._bucket_sizes()
        """Bytes of each bucket as constructed, in launch order."""
        if dist.get_debug_level() != dist.DebugLevel.OFF:
            _logger.info("constructed on rank %s: %s", wrapper._group.rank, self.collect())

    def publish(self) -> None:
        """New times are there."""
        if dist.get_debug_level() == dist.DebugLevel.DETAIL:
            _logger.info("times on rank %s: %s", self._wrapper._group.rank, self._times())

    @contextmanager
    def errors_noted(self) -> Generator[None, None, None]:
        """Keeps the text of what is raised in here."""
        try:
            yield
        except Exception as error:
            self.error = str(error)
            raise

    def _bucket_sizes(self) -> list[int]:
        return [b.spec.numel * b.spec.dtype.itemsize for b in self._wrapper.reducer.buckets]

    def _times(self) -> dict[str, Any]:
        means = self._wrapper.reducer.times.mean_ns
        return {f"avg_{phase}_time_s": mean / _NS_PER_S for phase, mean in means.items()}

    def collect(self) -> dict[str, Any]:
        """The data as of now; the keys are those of torch's DDP, the values plain Python ones."""
        wrapper, reducer = self._wrapper, self._wrapper.reducer
        params = reducer.layout.params
        _, hook = reducer.state_and_hook
        data: dict[str, Any] = {
            "module_name": type(wrapper.module).__name__,
            "rank": wrapper._group.rank,
            "world_size": wrapper._group.size,
            "backend_name": wrapper._group.backend(wrapper.device),
            "device_ids": wrapper.device_ids,
            "output_device": wrapper.output_device,
            "is_multi_device_module": len({p.device for p in params}) > 1,
            "broadcast_buffers": wrapper.forward_sync_buffers,
            "find_unused_parameters": wrapper.find_unused_parameters,
            "static_graph": wrapper.static_graph,
            "gradient_as_bucket_view": wrapper.gradient_as_bucket_view,
            "bucket_cap_bytes": wrapper.bucket_bytes_cap,
            "bucket_sizes": self.bucket_sizes,
            "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in params}),
            "num_parameter_tensors": len(params),
            "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in params),
            "has_sync_bn": any(isinstance(m, torch.nn.SyncBatchNorm) for m in wrapper.module.modules()),
            "comm_hook": getattr(hook, "__qualname__", type(hook).__name__) if hook is not None else None,
            "join_uneven_inputs": self.join_uneven_inputs,
            "has_rebuilt_buckets": reducer.has_rebuilt,
            "num_steps": reducer.step + 1,
            "num_buckets_reduced": reducer.num_reduced,
            "unused_parameter_size": sum(
                params[i].numel() * params[i].element_size() for i in reducer.absent or ()
            ),
            "error": self.error or reducer.failures.last_error,
        }
        if reducer.has_rebuilt:
            data["rebuilt_bucket_sizes"] = self._bucket_sizes()
        return {**data, **self._times()}
