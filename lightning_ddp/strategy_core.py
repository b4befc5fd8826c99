"""`StrategyCore`: what the strategies of the Trainer and of Fabric have in common.

Options, the launcher, the process group, the wrapper with its hook, collectives. What Lightning calls in the
Trainer alone is in `strategy.py`, what it calls in Fabric in `fabric.py`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import torch
import torch.distributed as dist

from lightning_ddp._lightning import bind_like, choose_backend, set_launcher
from lightning_ddp._torch import tree_leaves
from lightning_ddp.comm import all_gather, all_reduce_coalesced, barrier, broadcast_nested
from lightning_ddp.comm.group import Group
from lightning_ddp.communication import Communication
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.launch.init_method import check_meeting_place
from lightning_ddp.shm.hosts import Transport, check_transport
from lightning_ddp.supervise.settings import ReconcileSettings

if TYPE_CHECKING:
    from lightning_ddp.ddp.module import BucketedDDP
    from lightning_ddp.launch.session import Session

__all__ = ["Debug", "StartMethod", "StrategyCore"]

T = TypeVar("T")
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
Debug = Literal["detail"]
_START_METHODS = get_args(StartMethod)
_DEBUG_LEVELS = (None, "detail")


class StrategyCore:
    """Base of a strategy, before Lightning's own class among its bases."""

    _session: Session | None = None
    _group: Group | None = None
    _reconcile_settings: ReconcileSettings
    _wrapper_options: dict[str, Any]

    if TYPE_CHECKING:  # Lightning's
        root_device: Any
        cluster_environment: Any
        num_nodes: Any
        num_processes: Any

        def _scaler(self) -> Any:
            """Who decides on the factor of the loss under mixed precision; None for nobody."""

    # ------------------------------------------------------------------ options

    def _take_options(
        self,
        *,
        process_group_backend: str | None,
        timeout: timedelta | None,
        stall_timeout: timedelta | None,
        start_method: StartMethod,
        transport: Transport,
        init_method: str | None,
        store: dist.Store | None,
        debug: Debug | None,
    ) -> None:
        """Checks the options of a run, and keeps them.

        Raises:
            ConfigurationError: one of them cannot be used.
        """
        check_transport(transport)
        if process_group_backend is not None:
            from lightning_ddp.launch.rendezvous import require_backend

            require_backend(process_group_backend)
        for name, duration in (("timeout", timeout), ("stall_timeout", stall_timeout)):
            if not (duration is None or isinstance(duration, timedelta)):
                raise ConfigurationError(
                    f"{name}={duration!r}: expected a datetime.timedelta, such as timedelta(minutes=5)"
                )
        if start_method not in _START_METHODS:
            raise ConfigurationError(
                f"start_method={start_method!r}; there are {', '.join(map(repr, _START_METHODS))}"
            )
        check_meeting_place(init_method, store, start_method)
        if debug not in _DEBUG_LEVELS:
            raise ConfigurationError(f"debug={debug!r}; there are {', '.join(map(repr, _DEBUG_LEVELS))}")
        self._init_method, self._given_store, self._debug = init_method, store, debug
        self._transport, self._group_timeout, self._chosen_start_method = transport, timeout, start_method

    def _take_wrapper_options(self, **options: Any) -> None:
        """Checks the options of `BucketedDDP`, and keeps them; None leaves those of the second row to it.

        Raises:
            ConfigurationError: one of them cannot be used.
        """
        from lightning_ddp.ddp.reducer_options import bucket_caps_bytes, check_broadcast_buffers

        check_broadcast_buffers(options["broadcast_buffers"])
        bucket_caps_bytes(
            options["bucket_cap_mb"], options["bucket_cap_mb_list"]
        )  # says what is wrong, at once
        options["skip_all_reduce_unused_params"] = options["skip_all_reduce_unused_params"] or None
        optional = (
            "bucket_cap_mb_list",
            "batched_grad_copy",
            "forward_sync_buffers",
            "skip_all_reduce_unused_params",
        )
        self._wrapper_options = {
            name: value for name, value in options.items() if name not in optional or value is not None
        }

    # ------------------------------------------------------------------ launch and set-up

    def _configure_launcher(self) -> None:
        from lightning_ddp.launch.launcher import MultiprocessLauncher, ScriptLauncher

        launcher: ScriptLauncher | MultiprocessLauncher
        if self._chosen_start_method == "popen":
            assert self.cluster_environment is not None  # set by the Trainer just before
            launcher = bind_like(self, ScriptLauncher)(
                self.cluster_environment,
                self.num_processes,
                self.num_nodes,
                self._reconcile_settings,
                self._init_method,
                self._group_timeout,
            )
        else:
            launcher = bind_like(self, MultiprocessLauncher)(
                self, self._chosen_start_method, self._reconcile_settings, self._init_method
            )
        set_launcher(self, launcher)

    def _join(self, session: Session) -> None:
        """Joins the process group of the run. All ranks call it; returns once all have."""
        from lightning_ddp.launch.init_process_group import join_run

        group = join_run(
            session,
            choose_backend(self),
            environment=self.cluster_environment,
            num_nodes=self.num_nodes,
            timeout=self._group_timeout,
            device=self.root_device,
            settings=self._reconcile_settings,
            init_method=self._init_method,
            given_store=self._given_store,
        )
        session.control.inspector.set_deadline(self._group_timeout)
        session.control.inspector.compare_before_each(self._debug == "detail" and not session.is_joining)
        self._group = Group(group, session.control.interrupt, transport=self._transport)

    def _wrap(self, model: torch.nn.Module) -> BucketedDDP:
        """Wraps `model` in this package's DDP. All ranks call it; communicates."""
        from lightning_ddp.ddp.module import BucketedDDP

        group = self._joined_group()
        # on the current stream: torch's class needs another one for graph capture, as it keeps AccumulateGrad
        # nodes, which run on the stream on which they were made; ours keeps none of them
        return BucketedDDP(
            model,
            device_ids=None if self.root_device.type == "cpu" else [self.root_device.index],
            process_group=group.process_group,
            raises_at_once=True,
            interrupt=group.interrupt,
            transport=self._transport,
            **self._wrapper_options,
        )

    def _register_hook(self, wrapper: BucketedDDP, communication: Communication) -> None:
        """Registers the communication hook, on every device type. All ranks call it; communicates."""
        communication.register(
            wrapper,
            self._joined_group(),
            self.root_device,
            node_size=self.num_processes,
            loss_scale=self._loss_scale_of_gradients,
            scaler=self._scaler,
        )

    def _loss_scale(self) -> float:
        """The present factor of the loss under mixed precision. The host waits for the device to know it."""
        scaler = self._scaler()
        return float(scaler.get_scale()) if scaler is not None else 1.0

    def _loss_scale_of_gradients(self) -> float | torch.Tensor:
        """The same for what is done with gradients: on a device it stays there."""
        scaler = self._scaler()
        if scaler is None or self.root_device.type == "cpu":
            return self._loss_scale()
        scale: torch.Tensor = scaler.scale(torch.ones((), device=self.root_device))
        return scale

    # ------------------------------------------------------------------ collectives

    def _joined_group(self) -> Group:
        if self._group is None:
            raise ConfigurationError(
                "the process group does not exist yet: it is made when the Trainer or Fabric launches"
            )
        return self._group

    def _group_of(self, group: Any | None) -> Group:
        joined = self._joined_group()
        if group is None or group is dist.group.WORLD:
            return joined
        if isinstance(group, Group):
            return group
        if not isinstance(group, dist.ProcessGroup):  # what new_group returns to the ranks outside
            raise ConfigurationError("this rank is not in the group that was passed")
        return Group(group, joined.interrupt, transport=joined.transport)

    def _is_alone(self) -> bool:
        """Whether nobody would answer: before the launch, and once this rank unwinds from a failure."""
        return self._group is None or (self._session is not None and self._session.control.is_over)

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Returns once all ranks have called it; before the launch and after a failure it does nothing."""
        if self._group is not None and not self._is_alone():
            barrier(self._group, self.root_device, name)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """The object that rank `src` passed, on all ranks; before the launch and after a failure `obj`.

        Tensors in it travel as tensors, not pickled, and arrive on the CPU or on this rank's own device.
        """
        if self._group is None or self._is_alone():
            return obj
        received: T = broadcast_nested(self._group, obj, src, self.root_device, label="broadcast")
        return received

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor, or every tensor of nested dicts, lists and tuples, over the ranks.

        In place, with one collective for all tensors of a dtype. The mean of integers is computed in floating
        point and written back as integers, as Lightning does. What is no tensor is returned as it is.

        Args:
            tensor: a tensor or a nested container, of the same form on all ranks.
            group: a process group, or a `comm.Group` such as `comm.node_group` makes; None for all ranks.
            reduce_op: 'sum', 'mean' (or 'avg'), 'min', 'max', 'product', or a `ReduceOp`.

        Raises:
            ConfigurationError: the name of the operation is unknown.
        """
        leaves = [leaf for leaf in tree_leaves(tensor) if isinstance(leaf, torch.Tensor)]
        if self._group is None or not leaves or self._is_alone():
            return tensor
        self._reduce(self._group_of(group), leaves, reduce_op)
        return tensor

    def _reduce(self, group: Group, tensors: list[torch.Tensor], reduce_op: Any) -> None:
        all_reduce_coalesced(group, tensors, reduce_op)

    def all_reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """The same as `reduce`, under Fabric's name."""
        return self.reduce(tensor, group, reduce_op)

    def all_gather(
        self, tensor: torch.Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> torch.Tensor:
        """The tensors of all ranks, stacked along a new first dimension, in rank order.

        Args:
            tensor: the same shape and dtype on all ranks.
            group: a process group; None for all ranks.
            sync_grads: whether gradients flow back to the ranks that contributed.
        """
        if self._group is None:
            return tensor
        if self._is_alone():
            return tensor.unsqueeze(0)
        return all_gather(self._group_of(group), tensor, sync_grads=sync_grads)

    # ------------------------------------------------------------------ end

    def reconciliate_processes(self, trace: str) -> None:
        """Ends the run on all ranks, with `trace` as the reason; Lightning 1.5 had it under this name.

        Any rank may call it, alone. All ranks, this one included, raise `PeerFailure` in their main thread.

        Args:
            trace: a formatted traceback, or any text; its last line is the message.
        """
        if self._session is not None:
            self._session.control.fail(trace)
