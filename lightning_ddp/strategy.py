"""`CustomDDPStrategy`: what Lightning calls, in the order in which it calls it. Wiring, no algorithm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

from lightning_ddp._lightning import (
    Accelerator,
    CheckpointIO,
    ClusterEnvironment,
    DDPStrategy,
    ForwardRedirection,
    LightningModule,
    Precision,
    Trainer,
    TrainerFn,
    default_pg_timeout,
    optimizers_to_device,
    reset_seed,
)
from lightning_ddp.comm import collectives
from lightning_ddp.comm.group import Group
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.launch.launcher import MultiprocessLauncher, ScriptLauncher
from lightning_ddp.launch.rendezvous import join_default_group
from lightning_ddp.parallel.module import BucketedDDP
from lightning_ddp.parallel.states import broadcast_coalesced

__all__ = ["CustomDDPPlugin", "CustomDDPStrategy"]

T = TypeVar("T")
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
_START_METHODS = ("popen", "spawn", "fork", "forkserver")


class CustomDDPStrategy(DDPStrategy):
    """Data-parallel training in several processes, with this package's launcher, waits and reducer.

    A subclass of Lightning's `DDPStrategy` with its arguments and those of `BucketedDDP`. There is no
    `**kwargs`: an unknown name is a TypeError.

    Args:
        accelerator: set by the Trainer.
        parallel_devices: devices of this node, one a process; set by the Trainer.
        cluster_environment: tells ranks and addresses; None to detect it.
        checkpoint_io: how checkpoints are read and written; None for Lightning's.
        precision_plugin: set by the Trainer.
        ddp_comm_state: first argument of `ddp_comm_hook`. A torch `PostLocalSGDState` together with
            `model_averaging_period` switches on torch's periodic model averaging, as in Lightning.
        ddp_comm_hook: `hook(state, bucket)` that reduces the buckets, on CPU and CUDA; None for the mean.
        ddp_comm_wrapper: wraps the hook, for example torch's `fp16_compress_wrapper`.
        model_averaging_period: optimizer steps between two averagings of the parameters.
        process_group_backend: 'gloo', 'nccl' ...; None for nccl on CUDA and gloo elsewhere.
        timeout: of collectives.
        start_method: 'popen' re-runs the script in child processes; 'spawn', 'fork' and 'forkserver' run the
            Trainer's function in new processes.
        bucket_cap_mb: cap of a bucket in MiB; None for 25. The first bucket has 1 MiB.
        gradient_as_bucket_view: whether `.grad` is a view of the bucket after backward.
        find_unused_parameters: whether parameters may take no part in the loss; searched for in every step.
        static_graph: whether every step has the graph of the first one, unused parameters included.
        broadcast_buffers: whether rank 0's buffers are copied to all ranks before each forward.
        init_sync: whether wrapping verifies the model across ranks and broadcasts rank 0's state.

    Raises:
        ConfigurationError: an argument cannot be used.
        TypeError: an argument is unknown.
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: StartMethod = "popen",
        *,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = True,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
    ) -> None:
        if start_method not in _START_METHODS:
            raise ConfigurationError(
                f"start_method={start_method!r}; there are {', '.join(map(repr, _START_METHODS))}"
            )
        if ddp_comm_hook is None and ddp_comm_wrapper is not None:
            raise ConfigurationError("ddp_comm_wrapper wraps a hook: pass ddp_comm_hook as well")
        if isinstance(ddp_comm_state, PostLocalSGDState) != (model_averaging_period is not None):
            raise ConfigurationError(
                "post-local SGD needs both ddp_comm_state=PostLocalSGDState(...) and model_averaging_period"
            )
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_wrapper=ddp_comm_wrapper,
            model_averaging_period=model_averaging_period,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=gradient_as_bucket_view,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            broadcast_buffers=broadcast_buffers,
            init_sync=init_sync,
        )
        self._forward_redirection = _ManualOptimizationRedirection()
        self._group: Group | None = None

    # ------------------------------------------------------------------ set-up

    def _configure_launcher(self) -> None:
        if self._start_method == "popen":
            assert self.cluster_environment is not None  # set by the Trainer just before
            self._launcher = ScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            self._launcher = MultiprocessLauncher(self, start_method=self._start_method)

    def setup_distributed(self) -> None:
        """Joins the process group of the run. All ranks call it; returns once all have."""
        reset_seed()
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        assert self.cluster_environment is not None  # set by the Trainer
        group = join_default_group(
            self._process_group_backend,
            environment=self.cluster_environment,
            timeout=self._timeout,
            device=self.root_device,
        )
        interrupt = self._launcher.interrupt if isinstance(self._launcher, ScriptLauncher) else None
        self._group = Group(group, interrupt)

    def setup(self, trainer: Trainer) -> None:
        """Places the model, wraps it for fitting, creates optimizers. All ranks call it; communicates."""
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if is_fitting:
            self.configure_ddp()
            self.setup_optimizers(trainer)
        else:  # nothing to reduce, so no wrapper; yet all ranks must evaluate one model
            states = [*self.model.parameters(), *self.model.buffers()]
            broadcast_coalesced(self._joined_group(), states)
        self.setup_precision_plugin()
        if is_fitting:
            optimizers_to_device(self.optimizers, self.root_device)
            if isinstance(self._ddp_comm_state, PostLocalSGDState):
                self._enable_model_averaging()

    def _setup_model(self, model: torch.nn.Module) -> BucketedDDP:  # type: ignore[override]
        """Wraps `model`; unlike torch's class, ours is no subclass of DistributedDataParallel."""
        group = self._joined_group()
        device_ids = self.determine_ddp_device_ids()
        # as torch advises, wrap on a side stream: the backward of the first step may be captured
        stream = torch.cuda.stream(torch.cuda.Stream()) if device_ids else contextlib.nullcontext()
        with stream:
            return BucketedDDP(
                model,
                device_ids=device_ids,
                process_group=group.process_group,
                interrupt=group.interrupt,
                **self._ddp_kwargs,
            )

    def _register_ddp_hooks(self) -> None:
        """Registers the communication hook, on every device type."""
        if self._ddp_comm_hook is None:
            return
        assert isinstance(self.model, BucketedDDP)
        hook = self._ddp_comm_hook
        if self._ddp_comm_wrapper is not None:
            hook = self._ddp_comm_wrapper(hook)
        self.model.register_comm_hook(self._ddp_comm_state, hook)

    # ------------------------------------------------------------------ steps

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """With manual optimisation, makes the coming backward a synchronised one."""
        if isinstance(self.model, BucketedDDP) and not self._is_automatic():
            self.model.prepare_for_backward(closure_loss)

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Nothing: the reducer has finished when backward returns."""

    def _is_automatic(self) -> bool:
        return self.lightning_module is None or self.lightning_module.automatic_optimization

    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Gradients of backwards in here stay on their rank; Lightning uses it for accumulation."""
        if isinstance(self.model, BucketedDDP):
            with self.model.no_sync():
                yield
        else:
            yield

    # ------------------------------------------------------------------ collectives

    def _joined_group(self) -> Group:
        if self._group is None:
            raise ConfigurationError(
                "the process group does not exist yet: it is made when the Trainer launches"
            )
        return self._group

    def _group_of(self, group: Any | None) -> Group:
        joined = self._joined_group()
        if group is None or group is dist.group.WORLD:
            return joined
        return Group(group, joined.interrupt)

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Returns once all ranks have called it; before the launch it does nothing."""
        if self._group is not None:
            collectives.barrier(self._group, self.root_device)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """The object that rank `src` passed, on all ranks; before the launch, the object itself."""
        if self._group is None:
            return obj
        received: T = collectives.broadcast_object(self._group, obj, src, self.root_device)
        return received

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor, or every tensor of nested dicts, lists and tuples, over the ranks.

        In place, with one collective for all tensors of a dtype. The mean of integers is computed in floating
        point and written back as integers, as Lightning does. What is no tensor is returned as it is.

        Args:
            tensor: a tensor or a nested container, of the same form on all ranks.
            group: a process group; None for all ranks.
            reduce_op: 'sum', 'mean' (or 'avg'), 'min', 'max', 'product', or a `ReduceOp`.

        Raises:
            ConfigurationError: the name of the operation is unknown.
        """
        leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(tensor) if isinstance(leaf, torch.Tensor)]
        if self._group is not None and leaves:
            collectives.all_reduce_coalesced(self._group_of(group), leaves, reduce_op)
        return tensor

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
        return collectives.all_gather(self._group_of(group), tensor, sync_grads=sync_grads)

    # ------------------------------------------------------------------ end

    def teardown(self) -> None:
        """Unwraps the model and lets go of its gradients' buckets. Does not communicate."""
        if isinstance(self.model, BucketedDDP):
            self.model.teardown()
            self.model = self.lightning_module
        super().teardown()


CustomDDPPlugin = CustomDDPStrategy
"""The strategy under its name from the time when Lightning called strategies plugins."""


class _ManualOptimizationRedirection(ForwardRedirection):
    """Keeps the wrapper's forward from arming the reducer when backward has already run inside it."""

    def on_after_inner_forward(
        self, wrapper_module: torch.nn.Module, original_module: LightningModule
    ) -> None:
        if isinstance(wrapper_module, BucketedDDP) and not original_module.automatic_optimization:
            wrapper_module.require_backward_grad_sync = False

    def on_after_outer_forward(
        self, wrapper_module: torch.nn.Module, original_module: LightningModule
    ) -> None:
        if isinstance(wrapper_module, BucketedDDP) and not original_module.automatic_optimization:
            wrapper_module.require_backward_grad_sync = True
