"""Private names of torch's DistributedDataParallel that only torch's tests, and ours beside them, reach for.

Importing this gives them to our classes, as thin forms of what these do. Names that torch's library uses of a
wrapper are in the package itself (`lightning_ddp/ddp/module.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import distributed as torch_ddp

from conformance import substitution
from lightning_ddp._torch import IGNORED_NAMES, IS_IGNORED
from lightning_ddp.comm.collectives import broadcast_coalesced
from lightning_ddp.ddp.gradients import BackwardFailures
from lightning_ddp.ddp.module import BucketedDDP
from lightning_ddp.ddp.reducer import Reducer
from lightning_ddp.ddp.wrapped_module import MixedPrecision

_BROADCAST_BYTES = 250 * 1024 * 1024


class OfWrapper:
    """Names that `BucketedDDP` gets."""

    # ------------------------------------------------------------------ torch.compile

    @classmethod
    def _get_active_ddp_module(cls) -> Any:
        """The compiler asks our class for it where that is in the place of torch's, which has it."""
        return substitution.TORCHS._active_ddp_module

    # ------------------------------------------------------------------ parameters and buffers

    broadcast_bucket_size = _BROADCAST_BYTES

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: torch.nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        names = list(params_and_buffers_to_ignore)
        setattr(module, IGNORED_NAMES, names)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in names:
                setattr(tensor, IS_IGNORED, True)

    # ------------------------------------------------------------------ buffers

    def _register_buffer_comm_hook(self, state: Any, hook: Any, comm_hook_location: Any = None) -> None:
        before = torch_ddp._BufferCommHookLocation.PRE_FORWARD
        location = "before_forward" if comm_hook_location == before else "after_forward"
        self.register_buffer_comm_hook(state, hook, location=location)

    def _default_broadcast_coalesced(self, bufs: Sequence[torch.Tensor]) -> None:
        broadcast_coalesced(self._group, bufs, 0, _BROADCAST_BYTES)

    # ------------------------------------------------------------------ hooks and optimizers

    def _register_fused_optim(
        self, optim: type, *args: Any, optim_params: Iterable[torch.Tensor] | None = None, **kwargs: Any
    ) -> None:
        from torch.distributed.algorithms._optimizer_overlap import _as_overlapped_optim

        _as_overlapped_optim(optim, optim_params, *args, **kwargs).register_ddp(self)

    # ------------------------------------------------------------------ changes after construction

    def _update_process_group(self, new_process_group: Any) -> None:
        if new_process_group is not dist.GroupMember.NON_GROUP_MEMBER:
            self.update_process_group(new_process_group)

    def _remove_autograd_hooks(self) -> None:
        self.teardown()

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Nothing to set: outputs are handed on as they are, never cloned."""

    @property
    def _authoritative_rank(self) -> int | None:
        return self.authoritative_rank

    # ------------------------------------------------------------------ logging

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        told = _told(self)
        data = {
            "iteration": 0,
            "join_uneven_inputs": int(told.get("has_joined", False)),
            "has_rebuilt_buckets": int(self.reducer.has_rebuilt),
            "num_buckets_reduced": told.get("num_reduced", 0),
        }
        return data | ({"has_error": 1, "error": told["error"]} if "error" in told else {})


def _told(wrapper: Any) -> dict[str, Any]:
    """What the functions below have noted of a wrapper."""
    told: dict[str, Any] = wrapper.__dict__.setdefault("_told_to_torch", {})
    return told


class OfReducer:
    """Names that `Reducer` gets."""

    def _get_local_used_map(self) -> torch.Tensor:
        counts: torch.Tensor = self._gradients._sums[:-1]
        return counts


def _keep_precisions(self: Any, config: Any, module: torch.nn.Module, *ignored: frozenset[str]) -> None:
    """Construction of `MixedPrecision` that leaves two tensors on each parameter, of its two types."""
    _construct(self, config, module, *ignored)
    for parameter in self._params:
        parameter._mp_param = torch.empty(0, dtype=config.param_dtype or parameter.dtype)
        parameter._fp_param = parameter.data


_construct = MixedPrecision.__init__
MixedPrecision.__init__ = _keep_precisions
for _kind, _names in ((BucketedDDP, OfWrapper), (Reducer, OfReducer)):
    for _name, _value in vars(_names).items():
        if not _name.startswith("__"):
            setattr(_kind, _name, _value)


# ---------------------------------------------------------------------- what is noted for the logging data


def _around(kind: type, name: str, note: Callable[..., None]) -> None:
    """Let a method of a class call `note(self, result, *arguments)` when it is done, or with its error."""
    method = getattr(kind, name)

    @functools.wraps(method)
    def noting(self: Any, *arguments: Any, **keywords: Any) -> Any:
        try:
            result = method(self, *arguments, **keywords)
        except Exception as error:
            note(self, error, *arguments, **keywords)
            raise
        note(self, result, *arguments, **keywords)
        return result

    setattr(kind, name, noting)


def _note_construction(wrapper: Any, result: Any, *arguments: Any, **keywords: Any) -> None:
    if result is None:
        vars(wrapper.reducer.failures)["told"] = vars(wrapper.reducer)["told"] = _told(wrapper)


def _note_error(owner: Any, result: Any, *_arguments: Any, **_keywords: Any) -> None:
    told = _told(owner) if isinstance(owner, BucketedDDP) else vars(owner).get("told", {})
    if isinstance(result, Exception):
        told["error"] = str(result)


def _note_join(wrapper: Any, _result: Any, **_keywords: Any) -> None:
    _told(wrapper)["has_joined"] = True


def _note_backward(reducer: Any, _result: Any, state: Any) -> None:
    num_reduced = sum(not bucket.is_skipped and bucket.flat.numel() > 0 for bucket in reducer.buckets)
    vars(reducer).get("told", {}).update(num_reduced=num_reduced)


_around(BucketedDDP, "__init__", _note_construction)
_around(BucketedDDP, "join_hook", _note_join)
_around(Reducer, "_close_buckets", _note_backward)
for _name in ("register_comm_hook", "_set_static_graph"):
    _around(BucketedDDP, _name, _note_error)
for _name in ("check_usable", "missing", "ready_twice", "freed_gradient"):
    _around(BackwardFailures, _name, _note_error)
