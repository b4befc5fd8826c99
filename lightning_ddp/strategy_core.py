"""`StrategyCore`: the common part of the strategies for the Trainer and for Fabric."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import torch
import torch.distributed as dist

from lightning_ddp._lightning import adopt, bind_like, choose_backend, lightnings, set_launcher
from lightning_ddp._torch import tree_leaves
from lightning_ddp.comm import all_gather, all_reduce_coalesced, barrier, broadcast_nested
from lightning_ddp.comm.group import Group
from lightning_ddp.communication import Communication
from lightning_ddp.errors import ConfigurationError, in_seconds, one_of
from lightning_ddp.launch.rendezvous import check_meeting_place, require_backend
from lightning_ddp.shm.hosts import check_transport
from lightning_ddp.supervise.settings import (
    SupervisionSettings,
    parse_on_failure,
    parse_on_preemption,
    parse_replica_check,
)

if TYPE_CHECKING:
    from lightning_ddp.ddp.module import BucketedDDP
    from lightning_ddp.launch.job_context import JobContext
    from lightning_ddp.launch.launcher import MultiprocessLauncher, ScriptLauncher
    from lightning_ddp.replica_check import Replica, ReplicaCheck

T = TypeVar("T")
_log = logging.getLogger("lightning_ddp")
FunctionMethod = Literal["spawn", "fork", "forkserver"]
"""Start methods that run a function of this process; all others run the script again."""
StartMethod = Literal["popen", FunctionMethod]
Debug = Literal["detail"]
UnevenInputs = Literal["error", "join"]
_CHOICES = {
    "start_method": get_args(StartMethod),
    "debug": (None, *get_args(Debug)),
    "uneven_inputs": (None, *get_args(UnevenInputs)),
}
_OF_LIGHTNING = (
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "process_group_backend",
    "timeout",
    "start_method",
)
_OF_WRAPPER = (
    "bucket_cap_mb",
    "gradient_as_bucket_view",
    "find_unused_parameters",
    "static_graph",
    "broadcast_buffers",
    "init_sync",
    "forward_sync_buffers",
    "bucket_cap_mb_list",
    "batched_grad_copy",
    "skip_all_reduce_unused_params",
    "transport",
)


class StrategyCore:
    """Base class shared by the strategies for Trainer and Fabric, before Lightning's own class in the MRO."""

    _context: JobContext | None = None
    _group: Group | None = None
    _supervision: SupervisionSettings
    _wrapper_options: dict[str, Any]
    _replica_check: ReplicaCheck | None = None

    if TYPE_CHECKING:  # Lightning's
        root_device: Any
        lightning_module: Any
        model: Any
        cluster_environment: Any
        num_nodes: Any
        num_processes: Any
        checkpoint_io: Any

        def _scaler(self) -> Any: ...

        def _num_steps(self) -> int: ...

    # ------------------------------------------------------------------ options

    def _take_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Check and keep the arguments of both strategies; return those for Lightning's class."""
        from lightning_ddp.ddp.bucket import bucket_caps_bytes
        from lightning_ddp.ddp.buffers import check_broadcast_buffers

        check_transport(given["transport"])
        if given["process_group_backend"] is not None:
            require_backend(given["process_group_backend"])
        timeout_s, stall_timeout_s = (
            None if given[name] is None else in_seconds(name, given[name])
            for name in ("timeout", "stall_timeout")
        )
        for name, choices in _CHOICES.items():
            if given.get(name, choices[0]) not in choices:
                raise ConfigurationError(f"{name}={given[name]!r}: expected {one_of(map(repr, choices))}")
        self._chosen_start_method = given["start_method"]
        sent_by = None if self._runs_script else self._chosen_start_method
        check_meeting_place(given["init_method"], given["store"], sent_by)
        check_broadcast_buffers(given["broadcast_buffers"])
        bucket_caps_bytes(given["bucket_cap_mb"], given["bucket_cap_mb_list"])  # raises early
        self._group_timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        self._supervision = SupervisionSettings(
            heartbeat_timeout_s=in_seconds("heartbeat_timeout_s", given["heartbeat_timeout_s"]),
            failure_grace_s=in_seconds("failure_grace_s", given["failure_grace_s"]),
            stall_timeout_s=stall_timeout_s,
            recovery=parse_on_failure(given.get("on_failure", "stop")),
            preemption=parse_on_preemption(given.get("on_preemption", "stop")),
            replicas=parse_replica_check(given["replica_check"]),
        )
        self._init_method, self._given_store = given["init_method"], given["store"]
        self._transport, self._debug = given["transport"], given["debug"]
        self._wrapper_options = {name: given[name] for name in _OF_WRAPPER}
        return {name: given[name] for name in _OF_LIGHTNING} | {"timeout": self._group_timeout}

    # ------------------------------------------------------------------ launch and set-up

    @property
    def accelerator(self) -> Any:
        """Lightning's accelerator; setting it rebinds the strategy to the accelerator's Lightning package."""
        return super().accelerator  # type: ignore[misc]  # of the class after this one

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        adopt(self, accelerator)
        lightnings_own: Any = super(StrategyCore, type(self))
        lightnings_own.accelerator.fset(self, accelerator)

    @property
    def _runs_script(self) -> bool:
        """True if each rank runs the script, False if a function of the script is sent to each rank."""
        return self._chosen_start_method not in get_args(FunctionMethod)

    def _settle_nodes(self) -> None:
        """Take node and device counts that the script leaves open from the cluster manager's environment."""
        from lightning_ddp.launch.environment import is_slurm_node, settle_nodes

        own: Any = self  # of the class after this one
        devices = own.parallel_devices or []
        if was_rank := is_slurm_node(self.cluster_environment, len(devices)):
            self.cluster_environment.auto_requeue = False  # the other ranks here would not get the signal
            self.cluster_environment = lightnings("LightningEnvironment")()
        elif type(self.cluster_environment).__name__ != "LightningEnvironment":
            return  # ranks that an engine has started, or the user's own environment
        available = self.accelerator.auto_device_count()
        settled = settle_nodes(self.num_nodes, len(devices), is_open=len(devices) == available)
        if settled == (self.num_nodes, len(devices)) and not was_rank:
            return
        self.num_nodes, num_devices = settled
        if num_devices != len(devices):
            is_cpu = devices[0].type == "cpu"
            if not is_cpu and num_devices > available:
                raise ConfigurationError(
                    f"the engine asks for {num_devices} devices of each node, but {available} are here"
                )
            own.parallel_devices = devices[:1] * num_devices if is_cpu else devices[:num_devices]
        environment = self.cluster_environment
        environment.set_world_size(self.num_nodes * num_devices)
        environment.set_global_rank(environment.node_rank() * num_devices + environment.local_rank())

    def _configure_launcher(self) -> None:
        from lightning_ddp.launch.launcher import MultiprocessLauncher, ScriptLauncher

        self._settle_nodes()
        launcher: ScriptLauncher | MultiprocessLauncher
        if self._runs_script:
            launcher = bind_like(self, ScriptLauncher)(
                self.cluster_environment,
                self.num_processes,
                self.num_nodes,
                self._supervision,
                self._init_method,
                self._group_timeout,
            )
        else:
            launcher = bind_like(self, MultiprocessLauncher)(
                self, self._chosen_start_method, self._supervision, self._init_method
            )
        set_launcher(self, launcher)

    def _join(self, context: JobContext) -> None:
        """Join the process group of the run; return once all ranks have joined."""
        from lightning_ddp.launch.job_context import Joining

        self._context = context
        joining = Joining(
            context=context,
            backend=choose_backend(self),
            environment=self.cluster_environment,
            num_nodes=self.num_nodes,
            timeout=self._group_timeout,
            device=self.root_device,
            settings=self._supervision,
            init_method=self._init_method,
            given_store=self._given_store,
        )
        group = joining.group()
        context.control.inspector.set_deadline(self._group_timeout)
        context.control.inspector.compare_before_each(self._debug == "detail" and not context.is_joining)
        self._group = Group(group, context.control.interrupt, transport=self._transport)

    def _wrap(self, model: torch.nn.Module) -> BucketedDDP:
        """Wrap `model` in this package's DDP; all ranks must call it."""
        from lightning_ddp.ddp.module import BucketedDDP

        group = self._joined_group()
        # On the current stream: torch's DDP needs a side stream for graph capture, because it keeps
        # AccumulateGrad nodes, which run on the stream on which they were made. This wrapper keeps none.
        return BucketedDDP(
            model,
            device_ids=None if self.root_device.type == "cpu" else [self.root_device.index],
            process_group=group.process_group,
            interrupt=group.interrupt,
            **self._wrapper_options,
        )

    def _register_hook(self, wrapper: BucketedDDP, communication: Communication) -> None:
        """Register the communication hook, on every device type; all ranks must call it."""
        communication.register(
            wrapper,
            self._joined_group(),
            self.root_device,
            node_size=self.num_processes,
            loss_scale=self._loss_scale_of_gradients,
            scaler=self._scaler,
        )

    def _step(self, communications: Sequence[Communication], optimizer: Any, take: Callable[[], Any]) -> Any:
        """Take an optimizer step; average parameters if due (communicates), hash for the replica check."""
        averaging = [each for each in communications if each.averager is not None]
        # in local training a step counts also if the loss scaler skips it, for which it lowers its scale
        is_asked = any(not each.is_local for each in averaging)
        before = self._loss_scale() if is_asked else 1.0
        for communication in averaging:
            communication.before_step()
        output = take()
        for communication in averaging:
            communication.after_step(optimizer, was_skipped=is_asked and self._loss_scale() < before)
        if self._replica_check is not None:
            self._replica_check.after_step(self._num_steps())
        return output

    def _start_replica_check(
        self, replicas: Callable[[], Sequence[Replica]], facts: Callable[[], Mapping[str, Any]] = dict
    ) -> None:
        """Start the replica check, or log why not; raise if 'stop' or 'heal' lacks the control channel."""
        settings, context = self._supervision.replicas, self._context
        self._replica_check, why = None, None
        if settings is None or context is None:
            return
        if self._joined_group().size == 1 and not context.is_joining:
            why = "there is one rank" if settings.name != "warn" else None
        elif context.control.watch is None:
            why = "LIGHTNING_DDP_SUPERVISION=0 has switched off the control channel"
            if settings.name != "warn":
                raise ConfigurationError(f"replica_check={settings.name!r} has no effect, because {why}")
        else:
            from lightning_ddp.replica_check import ReplicaCheck

            self._replica_check = ReplicaCheck(context.control, settings, replicas, facts)
            why = next(filter(None, (each.communication.why_unequal for each in replicas())), None)
        if why is not None and self._joined_group().rank == 0:
            _log.warning("replica_check: replicas are not compared, because %s", why)

    def _load_state(
        self, communication: Communication, module: torch.nn.Module, checkpoint: dict[str, Any], path: Any
    ) -> None:
        """Restore hook and averager from a checkpoint; log each item that could not be restored."""
        names = [name for name, _ in module.named_parameters()]
        group, read = self._joined_group(), self.checkpoint_io.load_checkpoint
        for note in communication.resume(checkpoint, path, group, names, read):
            _log.warning("resuming from %s: %s", path, note)

    def _loss_scale(self) -> float:
        """Return the current loss scale of mixed precision; the host waits for the device."""
        scaler = self._scaler()
        return float(scaler.get_scale()) if scaler is not None else 1.0

    def _loss_scale_of_gradients(self) -> float | torch.Tensor:
        """Return the loss scale, on a GPU as a device tensor, so that the host need not wait."""
        scaler = self._scaler()
        if scaler is None or self.root_device.type == "cpu":
            return self._loss_scale()
        scale: torch.Tensor = scaler.scale(torch.ones((), device=self.root_device))
        return scale

    # ------------------------------------------------------------------ collectives

    def _joined_group(self) -> Group:
        if self._group is None:
            raise ConfigurationError(
                "the process group does not exist yet; it is created when the Trainer or Fabric launches"
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
        """Return True if no other rank takes part in collectives: before launch and after a failure."""
        return self._group is None or (self._context is not None and self._context.control.is_over)

    def _together(self, kind: str | None, call: Callable[[], T], alone: Callable[[], T]) -> T:
        """Run a collective and return its result; a subclass may return `alone()` after a loss of ranks."""
        return call()

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Wait until all ranks have called `barrier`; do nothing before launch and after a failure."""
        if (group := self._group) is not None and not self._is_alone():
            self._together(None, lambda: barrier(group, self.root_device, name), lambda: None)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return the object that rank `src` passed; before launch and after a failure, return `obj`.

        Tensors in it are sent as tensors, not pickled, and arrive on the CPU or on this rank's own device.

        Collective: all ranks must call it.
        """
        if (group := self._group) is None or self._is_alone():
            return obj
        send: Callable[[], T] = partial(
            broadcast_nested, group, obj, src, self.root_device, label="broadcast"
        )
        return self._together("broadcast", send, lambda: obj)

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor, or every tensor of nested dicts, lists and tuples, over the ranks, in place.

        The mean of integers is computed in floating point and written back as integers, as in Lightning.

        Collective: all ranks must call it.

        Args:
            tensor: a tensor or a nested container, of the same form on all ranks.
            group: a process group, or a `comm.Group`; None for all ranks.
            reduce_op: 'sum', 'mean' (or 'avg'), 'min', 'max', 'product', or a `ReduceOp`.

        Raises:
            ConfigurationError: the name of the operation is unknown.
        """
        leaves = [leaf for leaf in tree_leaves(tensor) if isinstance(leaf, torch.Tensor)]
        if leaves and self._group is not None and not self._is_alone():
            self._reduce(self._group_of(group), leaves, reduce_op)
        return tensor

    def _reduce(self, group: Group, tensors: list[torch.Tensor], reduce_op: Any) -> None:
        all_reduce_coalesced(group, tensors, reduce_op)

    def all_reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce tensors over the ranks in place; Fabric's name for `reduce`."""
        return self.reduce(tensor, group, reduce_op)

    def all_gather(
        self, tensor: torch.Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> torch.Tensor:
        """Stack the tensors of all ranks, of one shape and dtype, along a new first dimension, in rank order.

        With `sync_grads` gradients flow back to the contributing ranks.
        """
        if self._group is None:
            return tensor
        if self._is_alone():
            return tensor.unsqueeze(0)
        over = self._group_of(group)
        gather = partial(all_gather, over, tensor, sync_grads=sync_grads)
        return self._together("all_gather", gather, lambda: tensor.unsqueeze(0))

    def reconciliate_processes(self, trace: str) -> None:
        """End the run on all ranks: all raise `PeerFailure` in their main thread (a method of Lightning 1.5).

        Any rank may call it, alone. The last line of `trace`, a traceback or any text, is the message.
        """
        if self._context is not None:
            self._context.control.fail(trace)


def as_wrapper(model: object) -> BucketedDDP | None:
    """Return `model` if it is a `BucketedDDP`, the wrapper that `_wrap` puts around a module; else None."""
    # Imported late: the other processes have been started when a model is wrapped.
    from lightning_ddp.ddp.module import BucketedDDP

    return model if isinstance(model, BucketedDDP) else None
