"""`CustomFabricStrategy`: the methods that Lightning's Fabric calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from lightning_ddp._lightning import CheckpointIO, ClusterEnvironment, FabricDDPStrategy, pass_for_fabrics
from lightning_ddp.communication import STATE_KEY, Communication, HookSpec, remove_rank_files
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.shm.hosts import Transport
from lightning_ddp.strategy_core import Debug, StartMethod, StrategyCore, as_wrapper

if TYPE_CHECKING:
    from lightning_ddp.ddp.module import BucketedDDP


class CustomFabricStrategy(StrategyCore, FabricDDPStrategy):
    """Strategy of `Fabric(strategy="custom_ddp")`: this package's launcher, supervision, reducer and hooks.

    Subclass of Fabric's `DDPStrategy`. Each model of `fabric.setup` has its own hook, and its own averager
    over the optimizers that are set up with it. The run lasts from `fabric.launch()` to the end of the
    script, or of the Hydra job that starts the ranks: if one rank fails in it, all ranks end.

    Args:
        accelerator: Set by Fabric, as are `parallel_devices`, `precision` and `checkpoint_io`.
        **kwargs: `checkpoint_io` to `debug` have the same names and meaning as in `CustomDDPStrategy`.

    Raises:
        ConfigurationError: An argument cannot be used.
        TypeError: An argument is unknown.
    """

    def __init__(
        self,
        accelerator: Any | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Any | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: HookSpec | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = default_pg_timeout,
        start_method: StartMethod = "popen",
        *,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = True,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        broadcast_buffers: bool | Literal["auto"] = "auto",
        init_sync: bool = True,
        forward_sync_buffers: bool | None = None,
        bucket_cap_mb_list: list[float] | None = None,
        batched_grad_copy: bool | None = None,
        skip_all_reduce_unused_params: bool = False,
        heartbeat_timeout_s: timedelta | float = 15.0,
        failure_grace_s: timedelta | float = 30.0,
        stall_timeout: timedelta | float | None = None,
        model_averaging: str | Mapping[str, Any] | None = None,
        transport: Transport = "auto",
        init_method: str | None = None,
        store: dist.Store | None = None,
        debug: Debug | None = None,
        replica_check: str | Mapping[str, Any] = "warn",
    ) -> None:
        options = self._take_options(locals())
        self._communicates = (ddp_comm_hook, ddp_comm_state, ddp_comm_wrapper, model_averaging)
        self._averages = Communication(*self._communicates).averager_plan is not None  # and checks them
        self._set_up: list[tuple[BucketedDDP, Communication, list[torch.optim.Optimizer]]] = []
        self._num_steps_taken = 0
        super().__init__(precision=precision, **options)
        self._backward_sync_control: Any = self  # has the one method of that

    # ------------------------------------------------------------------ launch and set-up

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        pass_for_fabrics(self.launcher)

    def _setup_distributed(self) -> None:
        from lightning_ddp.launch.job_context import ScriptRun, job_context

        self._set_world_ranks()
        context = job_context()
        self._join(context)
        context.control.restore_sigterm()
        if self._runs_script:  # and not a function that a launcher runs
            ScriptRun(context.control).begin()
        self._start_replica_check(self._replicas)

    def _replicas(self) -> list[Any]:
        from lightning_ddp.replica_check import Replica

        return [Replica(*each) for each in self._set_up]

    def _num_steps(self) -> int:
        self._num_steps_taken += 1
        return self._num_steps_taken

    def setup_module(self, module: torch.nn.Module) -> Any:
        """Wrap a model, with its own communication hook; all ranks must call it."""
        wrapper, communication = self._wrap(module), Communication(*self._communicates)
        self._register_hook(wrapper, communication)
        self._set_up.append((wrapper, communication, []))
        return wrapper

    def setup_module_and_optimizers(self, module: torch.nn.Module, optimizers: Any, *scheduler: Any) -> Any:
        """Wrap a model; build its averager, if configured, over these optimizers; all ranks must call it.

        Since 2.6 Fabric hands a scheduler over, and expects it back.
        """
        wrapper = self.setup_module(module)
        _, communication, owned = self._set_up[-1]
        owned.extend(optimizers)
        communication.start(module, optimizers, self._joined_group())
        return wrapper, optimizers, *scheduler

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return `optimizer` unchanged; raise ConfigurationError with averaging, which needs its model."""
        if self._averages:
            raise ConfigurationError(
                "model_averaging needs to know the model of each optimizer. Use model, optimizer ="
                " fabric.setup(model, optimizer) instead of setup_module and setup_optimizers."
            )
        return optimizer

    # ------------------------------------------------------------------ steps

    def _scaler(self) -> Any:
        return getattr(self.precision, "scaler", None)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Take a step; with model averaging, count it and average if it is due (then communicates)."""
        owners = [c for _, c, owned in self._set_up if any(optimizer is each for each in owned)]
        return self._step(owners, optimizer, partial(super().optimizer_step, optimizer, **kwargs))

    def no_backward_sync(self, module: torch.nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Return a context that, if `enabled`, defers averaging gradients to the next backward after it."""
        if not enabled:
            return nullcontext()
        wrapper = as_wrapper(module)
        if wrapper is None:
            raise TypeError(
                "no_backward_sync needs the model that fabric.setup has returned (wrapped in BucketedDDP),"
                f" but got a {type(module).__name__}"
            )
        return wrapper.no_sync()

    # ------------------------------------------------------------------ checkpoints

    def get_module_state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        """Return the state of the model itself, without the wrapper."""
        wrapper = as_wrapper(module)
        return super().get_module_state_dict(wrapper.module if wrapper else module)

    def load_module_state_dict(
        self, module: torch.nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        """Load a state dict into the model itself, without the wrapper."""
        wrapper = as_wrapper(module)
        super().load_module_state_dict(wrapper.module if wrapper else module, state_dict, strict)

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Write a checkpoint with the state of a model's hook and averager, as in `CustomDDPStrategy`.

        Collective: all ranks must call it. In local training they synchronize first.
        """
        _, communication = self._set_up_of(state)
        if communication is not None and not self._is_alone():
            communication.agree()
            state = dict(state)
            group, write = self._joined_group(), self.checkpoint_io.save_checkpoint
            communication.save(state, path, group, self.root_device, write)
        super().save_checkpoint(path, state, storage_options, filter)
        if STATE_KEY in state:
            self.barrier("checkpoint with files of the ranks")
            if self.is_global_zero:
                remove_rank_files(path, keep={state[STATE_KEY]["token"]})

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint into the objects in `state`, hook and averager; return what remains of it."""
        remainder: dict[str, Any] = super().load_checkpoint(path, state, *args, **kwargs)
        wrapper, communication = self._set_up_of(state if isinstance(state, dict) else {})
        if communication is not None and not self._is_alone():
            self._load_state(communication, wrapper.module, remainder, path)
            remainder.pop(STATE_KEY, None)
        return remainder

    def _set_up_of(self, state: Mapping[str, Any]) -> tuple[Any, Communication | None]:
        """Return (wrapper, `Communication`) of the model in `state` with hook or averager state, or Nones."""
        found = [
            (wrapper, communication)
            for wrapper, communication, _ in self._set_up
            if communication.has_state and any(value is wrapper for value in state.values())
        ]
        if len(found) > 1:
            raise ConfigurationError(
                f"a checkpoint has {len(found)} models whose hook or averager has state, but only one is"
                " supported. Save each model in its own file."
            )
        return found[0] if found else (None, None)
