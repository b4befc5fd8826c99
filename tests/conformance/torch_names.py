"""Private names of torch's DistributedDataParallel that only torch's tests, and ours beside them, reach for.

Importing this gives them to our classes, as thin forms of what these do. Names that torch's library uses of a
wrapper are in the package itself (`lightning_ddp/ddp/module.py`).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import distributed as torch_ddp

from conformance import substitution
from lightning_ddp._torch import IGNORED_NAMES, IS_IGNORED
from lightning_ddp.comm.gather_scatter import broadcast_coalesced
from lightning_ddp.ddp.bucket import sparse_parameters
from lightning_ddp.ddp.mixed_precision import MixedPrecision
from lightning_ddp.ddp.module import BucketedDDP
from lightning_ddp.ddp.module_checks import trainable_parameters
from lightning_ddp.ddp.reducer import Reducer
from lightning_ddp.errors import BackwardOrderError, ConfigurationError

_DTYPE_NAMES = {
    "float32": "float",
    "float64": "double",
    "float16": "c10::Half",
    "bfloat16": "c10::BFloat16",
    "complex64": "c10::complex<float>",
    "complex128": "c10::complex<double>",
}
_VARIABLES = {
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
    "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
}
_BACKEND_VARIABLES = {
    "gloo": {"gloo_socket_ifname": "GLOO_SOCKET_IFNAME", "gloo_device_transport": "GLOO_DEVICE_TRANSPORT"},
    "nccl": {
        "nccl_socket_ifname": "NCCL_SOCKET_IFNAME",
        "nccl_blocking_wait": "TORCH_NCCL_BLOCKING_WAIT",
        "nccl_async_error_handling": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "nccl_debug": "NCCL_DEBUG",
        "nccl_nthreads": "NCCL_NTHREADS",
        "nccl_ib_timeout": "NCCL_IB_TIMEOUT",
    },
}
_MOMENTS = {
    "forward_compute_time_start": "forward_start",
    "backward_compute_time_start": "backward_start",
    "backward_comm_time_start": "comm_start",
    "backward_compute_time_end": "backward_end",
    "backward_comm_time_end": "comm_end",
}
_GLOO_THREADS = 2
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
        broadcast_coalesced(self._group, tensors, authoritative_rank, bucket_size or _BROADCAST_BYTES)

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
        with self._errors_noted():
            if sample_rate < 1:
                raise ConfigurationError(
                    f"DDP runtime logging sample rate {sample_rate}: it should be equal or greater than 1"
                )
            self.reducer.recorder.sample_rate = sample_rate

    @property
    def _authoritative_rank(self) -> int | None:
        return self.authoritative_rank

    # ------------------------------------------------------------------ logging

    @property
    def logger(self) -> Any:
        """A C++ logger for functions of torch that take one; what they report is in the logging data."""
        return _logger_for(self)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        reducer, recorder, data = self.reducer, self.reducer.recorder, self.logging_data()
        error = data.pop("error") or _errors_of_logger(self)
        hook = data.pop("comm_hook")
        torch_data = {
            k: int(v) if isinstance(v, bool) else v for k, v in data.items() if not k.endswith("_s")
        }
        torch_data.update(
            device_ids=", ".join(map(str, data["device_ids"] or ())),
            output_device=-1 if data["output_device"] is None else data["output_device"],
            gradient_as_bucket_view=int(self.asked_for_views),
            bucket_sizes=", ".join(map(str, data["bucket_sizes"])),
            dtypes=", ".join(sorted(_DTYPE_NAMES.get(name, name) for name in data["dtypes"])),
            iteration=recorder.last_timed[0] if recorder.last_timed is not None else 0,
            **_variables(_VARIABLES),
            **_variables(_BACKEND_VARIABLES.get(data["backend_name"], {})),
        )
        if data["backend_name"] == "gloo":
            torch_data["gloo_num_threads"] = _GLOO_THREADS
        if hook is not None:
            torch_data["comm_hook"] = hook
        if error:
            torch_data.update(has_error=1, error=error)
        if reducer.has_rebuilt:
            torch_data.update(
                rebuilt_bucket_sizes=", ".join(map(str, data["rebuilt_bucket_sizes"])),
                rebuilt_per_bucket_param_indices=", ".join(
                    " ".join(map(str, bucket.spec.indices)) for bucket in reducer.buckets
                ),
                prev_iteration_grad_ready_order_indices=", ".join(map(str, reducer.order)),
            )
        if recorder.last_timed is not None:
            torch_data["can_set_static_graph"] = int(reducer.is_absent_static)
            _, step = recorder.last_timed
            for phase, mean_ns in recorder.mean_ns.items():
                torch_data[f"{phase}_time"] = step.phase_ns(phase)
                torch_data[f"avg_{phase}_time"] = int(mean_ns)
            for name, moment in _MOMENTS.items():
                torch_data[name] = getattr(step, moment)
        return torch_data


def _variables(names: dict[str, str]) -> dict[str, str]:
    return {name: os.environ.get(variable, "N/A") for name, variable in names.items()}


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
        return bool(self.is_absent_static)

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
