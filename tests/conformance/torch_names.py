"""Private names of torch's DistributedDataParallel that only torch's tests, and ours beside them, reach for.

Importing this gives them to our classes, as thin forms of what these do. Names that torch's library uses of a
wrapper are in the package itself (`lightning_ddp/ddp/module.py`).
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import distributed as torch_ddp

from conformance import substitution
from lightning_ddp._torch import IGNORED_NAMES, IS_IGNORED
from lightning_ddp.comm.collectives import broadcast_coalesced
from lightning_ddp.ddp.bucket import BucketLayout, sparse_parameters
from lightning_ddp.ddp.gradients import BackwardFailures
from lightning_ddp.ddp.module import BucketedDDP
from lightning_ddp.ddp.reducer import Reducer
from lightning_ddp.ddp.wrapped_module import MixedPrecision, trainable_parameters
from lightning_ddp.errors import BackwardOrderError, ConfigurationError
from lightning_ddp.telemetry.step_record import StepRecord

_DTYPE_NAMES = {"float32": "float", "float64": "double"}
_VARIABLES = (
    *("MASTER_ADDR", "MASTER_PORT", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES"),
    *("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
)
_GLOO_THREADS = 2
_NUM_FIRST = 10
_MOST_STEPS = 10_000
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

    def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        named = trainable_parameters(self.module, self.parameters_to_ignore)
        sparse = sparse_parameters(self.module.modules())
        return [p for _, p in named], [id(p) in sparse for _, p in named]

    def _build_debug_param_to_name_mapping(self, parameters: Sequence[torch.Tensor]) -> dict[int, str]:
        names = {id(p): n for n, p in trainable_parameters(self.module, self.parameters_to_ignore)}
        places = {id(p): i for i, p in enumerate(parameters)}
        lost = [name for key, name in names.items() if key not in places]
        if lost:
            raise ConfigurationError(f"Param with name {lost[0]} is none of the parameters given")
        if len(names) != len(places):
            raise ConfigurationError(
                f"Expected param to name mapping for {len(places)} parameters; the module has {len(names)}"
            )
        return {places[key]: name for key, name in names.items()}

    # ------------------------------------------------------------------ buffers

    def _register_buffer_comm_hook(self, state: Any, hook: Any, comm_hook_location: Any = None) -> None:
        before = torch_ddp._BufferCommHookLocation.PRE_FORWARD
        location = "before_forward" if comm_hook_location == before else "after_forward"
        self.register_buffer_comm_hook(state, hook, location=location)

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[torch.Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        tensors = list(self._module_buffers.named().values()) if bufs is None else bufs
        broadcast_coalesced(self._group, tensors, authoritative_rank)

    # ------------------------------------------------------------------ hooks and optimizers

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hooks = {
            dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
            dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        builtin = hooks[comm_hook_type]

        def hook(state: Any, bucket: Any) -> Any:
            return builtin(state, bucket)

        hook.__qualname__ = str(comm_hook_type)
        self.register_comm_hook(self.process_group, hook)

    def _register_fused_optim(
        self, optim: type, *args: Any, optim_params: Iterable[torch.Tensor] | None = None, **kwargs: Any
    ) -> None:
        from torch.distributed.algorithms._optimizer_overlap import _as_overlapped_optim

        try:
            _as_overlapped_optim(optim, optim_params, *args, **kwargs).register_ddp(self)
        except NotImplementedError as error:
            raise ConfigurationError(f"{optim} cannot step during backward") from error

    # ------------------------------------------------------------------ changes after construction

    def _update_process_group(self, new_process_group: Any) -> None:
        if new_process_group is not dist.GroupMember.NON_GROUP_MEMBER:
            self.update_process_group(new_process_group)

    def _remove_autograd_hooks(self) -> None:
        self.teardown()

    def _check_reducer_finalized(self) -> None:
        backward = self.reducer._backward
        if backward is not None and backward.is_running:
            raise BackwardOrderError(f"backward {backward.step} ended before all buckets were reduced")

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Nothing to set: outputs are handed on as they are, never cloned."""

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            raise ConfigurationError(
                f"DDP runtime logging sample rate {sample_rate}: it should be equal or greater than 1"
            )
        _told(self)["sample_rate"] = sample_rate
        _times(self)

    @property
    def _authoritative_rank(self) -> int | None:
        return self.authoritative_rank

    # ------------------------------------------------------------------ logging

    @property
    def logger(self) -> Any:
        """A C++ logger for functions of torch that take one; what they report is in the logging data."""
        return _logger_for(self)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        group, reducer, told = self._group, self.reducer, _told(self)
        params, hook, backend = reducer.layout.params, reducer.reduction.hook, group.backend(self.device)
        error = told.get("error") or _errors_of_logger(self)
        modules = list(self.module.modules())
        dtypes = {str(p.dtype).removeprefix("torch.") for p in params}
        data = {
            "module_name": type(self.module).__name__,
            "rank": group.rank,
            "world_size": group.size,
            "backend_name": backend,
            "device_ids": ", ".join(map(str, self.device_ids or ())),
            "output_device": -1 if self.output_device is None else self.output_device,
            "broadcast_buffers": int(self.forward_sync_buffers),
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(told["asked_for_views"]),
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "bucket_sizes": told["bucket_sizes"],
            "dtypes": ", ".join(sorted({_DTYPE_NAMES.get(name, name) for name in dtypes})),
            "num_parameter_tensors": len(params),
            "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in params),
            "has_sync_bn": int(any(isinstance(m, torch.nn.SyncBatchNorm) for m in modules)),
            "join_uneven_inputs": int(told.get("has_joined", False)),
            "has_rebuilt_buckets": int(reducer.has_rebuilt),
            "num_buckets_reduced": told.get("num_reduced", 0),
            "iteration": 0,
            "gloo_num_threads": _GLOO_THREADS,
            **{name.lower(): os.environ.get(name, "N/A") for name in _VARIABLES},
        }
        if hook is not None:
            data["comm_hook"] = getattr(hook, "__qualname__", type(hook).__name__)
        if error:
            data.update(has_error=1, error=error)
        if reducer.has_rebuilt:
            data["rebuilt_bucket_sizes"] = _bucket_sizes(reducer)
            order = vars(reducer.layout)["order"]
            data["prev_iteration_grad_ready_order_indices"] = ", ".join(map(str, order))
            data["rebuilt_per_bucket_param_indices"] = ", ".join(
                " ".join(map(str, bucket.spec.indices)) for bucket in reducer.buckets
            )
        return {**data, **_times(self)}


def _told(wrapper: Any) -> dict[str, Any]:
    """What the functions below have noted of a wrapper."""
    told: dict[str, Any] = wrapper.__dict__.setdefault("_told_to_torch", {})
    return told


def _bucket_sizes(reducer: Reducer) -> str:
    return ", ".join(str(b.spec.numel * b.spec.dtype.itemsize) for b in reducer.buckets)


def _times(wrapper: Any) -> dict[str, int]:
    """Times of the last timed step and their means; the first call begins to record them.

    Steps count from 1. The first ten are timed, and one in the sample rate; torch publishes the figures of a
    step with the forward after it.
    """
    recorder, rate = wrapper.reducer.recorder, _told(wrapper).get("sample_rate", 100)
    if not recorder.records.maxlen:
        recorder.start(_MOST_STEPS)
    published = [(record.step + 1, record) for record in list(recorder.records)[:-1]]
    timed = [(n, record) for n, record in published if n <= _NUM_FIRST or n % rate == 0]
    if not timed:
        return {}
    (number, last), lengths = timed[-1], [_lengths(record) for _, record in timed]
    return {
        "iteration": number,
        **lengths[-1],
        **{f"avg_{name}": sum(each[name] for each in lengths) // len(lengths) for name in lengths[-1]},
        "forward_compute_time_start": last.forward_start,
        "backward_compute_time_start": last.backward_start,
        "backward_comm_time_start": last.buckets[0].launched,
        "backward_compute_time_end": last.backward_end,
        "backward_comm_time_end": last.comm_end,
    }


def _lengths(step: StepRecord) -> dict[str, int]:
    """Durations of the parts of a step in nanoseconds."""
    launched = step.buckets[0].launched
    return {
        "forward_compute_time": step.backward_start - step.forward_start,
        "backward_compute_time": step.backward_end - step.backward_start,
        "backward_comm_time": step.comm_end - launched,
        "backward_compute_comm_overlap_time": max(0, step.backward_end - launched),
    }


def _is_static(reducer: Any) -> bool:
    return bool(vars(reducer).get("_is_absent_static", True))


_loggers: weakref.WeakKeyDictionary[Any, tuple[Any, Any, Any]] = weakref.WeakKeyDictionary()


def _logger_for(wrapper: Any) -> Any:
    """torch's functions that take a logger want the C++ one, which needs a C++ reducer, of an idle tensor."""
    if wrapper not in _loggers:
        idle = torch.nn.Parameter(torch.zeros(1))
        reducer = dist.Reducer([idle], [[0]], [4], wrapper.process_group)
        _loggers[wrapper] = (dist.Logger(reducer), reducer, idle)
    return _loggers[wrapper][0]


def _errors_of_logger(wrapper: Any) -> str | None:
    if wrapper not in _loggers:
        return None
    errors: str | None = _loggers[wrapper][0]._get_ddp_logging_data().strs_map.get("error")
    return errors


class OfReducer:
    """Names that `Reducer` gets."""

    def _ddp_graph_static(self) -> bool:
        return _is_static(self)

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
        asked = bool(keywords.get("gradient_as_bucket_view"))
        _told(wrapper).update(asked_for_views=asked, bucket_sizes=_bucket_sizes(wrapper.reducer))
        vars(wrapper.reducer.failures)["told"] = vars(wrapper.reducer)["told"] = _told(wrapper)


def _note_error(owner: Any, result: Any, *_arguments: Any, **_keywords: Any) -> None:
    told = _told(owner) if isinstance(owner, BucketedDDP) else vars(owner).get("told", {})
    if isinstance(result, Exception):
        told["error"] = str(result)


def _note_join(wrapper: Any, _result: Any, **_keywords: Any) -> None:
    _told(wrapper)["has_joined"] = True


def _note_backward(reducer: Any, _result: Any, state: Any) -> None:
    absent, before = frozenset(reducer._gradients.absent()), vars(reducer).get("_absent_before")
    vars(reducer)["_is_absent_static"] = _is_static(reducer) and before in (None, absent)
    vars(reducer)["_absent_before"] = absent
    num_reduced = sum(not bucket.is_skipped and bucket.flat.numel() > 0 for bucket in reducer.buckets)
    vars(reducer).get("told", {}).update(num_reduced=num_reduced)


def _note_plan(layout: Any, _result: Any, order: Sequence[int]) -> None:
    vars(layout)["order"] = list(order)


_around(BucketedDDP, "__init__", _note_construction)
_around(BucketedDDP, "join_hook", _note_join)
_around(Reducer, "_close_buckets", _note_backward)
_around(BucketLayout, "plan", _note_plan)
for _name in ("register_comm_hook", "_set_static_graph", "_set_ddp_runtime_logging_sample_rate"):
    _around(BucketedDDP, _name, _note_error)
for _name in ("check_usable", "missing", "ready_twice", "freed_gradient"):
    _around(BackwardFailures, _name, _note_error)
