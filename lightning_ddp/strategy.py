"""`CustomDDPStrategy`: the methods that Lightning calls, in calling order. Wiring, no algorithms."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.utils.data import DistributedSampler

from lightning_ddp._lightning import (
    FIRST_BARRIERS,
    Accelerator,
    AsyncCheckpointIO,
    CheckpointIO,
    ClusterEnvironment,
    DDPStrategy,
    ForwardRedirection,
    LightningModule,
    Precision,
    ResultCollection,
    Trainer,
    bind_like,
    choose_backend,
    forget_loaders,
    is_fitting,
    layer_sync,
    loaders_of,
    optimizers_to_device,
    read_rank_again,
    reset_seed,
    set_redirection,
    set_training_results,
)
from lightning_ddp.comm.group import Group
from lightning_ddp.communication import STATE_KEY, Communication, HookSpec, remove_rank_files
from lightning_ddp.ddp.buffers import copy_states, put_states
from lightning_ddp.elastic import StepObserver
from lightning_ddp.errors import ConfigurationError, MissingGradientError
from lightning_ddp.shm.hosts import Transport
from lightning_ddp.strategy_core import Debug, StartMethod, StrategyCore, UnevenInputs, as_wrapper
from lightning_ddp.supervise.settings import RecoverySettings, ReplaceSettings

if TYPE_CHECKING:
    # Imported late at run time: these imports take 25 ms, and other processes should be started before.
    from lightning_ddp.ddp.lockstep import Lockstep
    from lightning_ddp.ddp.module import BucketedDDP
    from lightning_ddp.elastic.recovery import Recovery
    from lightning_ddp.elastic.takeover import Journal
    from lightning_ddp.launch.step_stop import StepStop
    from lightning_ddp.supervise.orders import NewGeneration

T = TypeVar("T")
_UNUSED = (
    "It looks like your LightningModule has parameters that were not used in the loss of training_step. If"
    ' this is intended, use Trainer(strategy="custom_ddp_find_unused_parameters_true") or'
    " CustomDDPStrategy(find_unused_parameters=True)."
)


class CustomDDPStrategy(StrategyCore, DDPStrategy):
    """Strategy for data-parallel training, with this package's launcher, supervision and gradient reducer.

    Subclass of Lightning's `DDPStrategy`, with its arguments and those of `BucketedDDP`, which describes
    `bucket_cap_mb` to `skip_all_reduce_unused_params` and `transport`. There is no `**kwargs`: an unknown
    name is a TypeError.

    Args:
        accelerator: Set by the Trainer.
        parallel_devices: Devices of this node, one per process. Set by the Trainer.
        cluster_environment: Lightning's source of ranks and addresses; None to detect it.
        checkpoint_io: Lightning's plugin that reads and writes checkpoints; None for the default plugin.
        precision_plugin: Set by the Trainer.
        ddp_comm_state: First argument of a `ddp_comm_hook` that is a function.
        ddp_comm_hook: Communication hook that reduces the gradient buckets, on CPU and CUDA; None for the
            plain mean. A name of `hooks.available_hooks`, a mapping with `name` and options, a list of them
            (outer to inner), or a function `hook(state, bucket)`.
        ddp_comm_wrapper: Function that wraps the hook, for example torch's `fp16_compress_wrapper`.
        model_averaging_period: Only None; use `model_averaging`, which has the period as an option.
        process_group_backend: Backend of the process group, such as 'gloo' or 'nccl'; None for nccl on CUDA
            and gloo elsewhere.
        timeout: Time limit of a collective; None for the backend's default. A `timedelta` or seconds.
        start_method: How the processes of a node start: 'popen', 'spawn', 'fork' or 'forkserver'. 'popen'
            runs the script again in child processes; the others run the Trainer's function in new processes.
        uneven_inputs: What `fit` does when a rank runs out of training batches before the other ranks:
            'join', 'error' or None. With 'join' that rank repeats its last batch with zero gradients until
            all have run out. With 'error' all ranks raise at that step. With None nothing is checked, and
            the others hang.
        divide_by_initial_world_size: With uneven_inputs='join', divide gradients by the number of all ranks;
            if False, by the number of ranks that still have batches.
        heartbeat_timeout_s: Seconds without a heartbeat after which a node counts as lost (at least 2).
        failure_grace_s: Seconds that a process has to exit after a failure, before its stacks are printed
            and it is killed.
        stall_timeout: Longest time without progress of a rank that waits for no other rank, after which it
            counts as failed; None for no limit. A `timedelta` or seconds, longer than the longest step,
            validation batch or checkpoint.
        model_averaging: Local training with averaged parameters: a name of `averaging.available_averagers`,
            or a mapping with `name` and options; None to average gradients in every step.
        init_method: Address at which the processes rendezvous, `tcp://host:port` or `file:///path`; None for
            the launching process's store, or `env://` under torchrun and SLURM. On several nodes every form
            also needs MASTER_ADDR and MASTER_PORT, for the control channel.
        store: A `torch.distributed.Store` that all processes reach, made by the script in each process; None
            to use `init_method`. Needs start_method='popen'.
        debug: 'detail' compares every collective across ranks before it starts: purpose, shapes, dtypes and
            order. That costs a round trip each. None compares only collectives in which ranks have waited
            for 5 s.
        on_failure: What happens when a rank is lost: 'stop', 'shrink' or 'replace'. 'stop' ends the run on
            all ranks, 'shrink' continues the same `fit` with the remaining ranks, 'replace' also starts a new
            process for each lost rank. A mapping with `name` and options: `min_world_size`,
            `max_recoveries`, `batch`, `exceptions`; of 'replace' also `wait_s`.
        on_preemption: What happens when a rank gets SIGTERM: 'stop' or 'leave'. 'stop' stops all ranks at a
            step boundary, 'leave' lets that rank exit there with code 0 while the other ranks continue: it
            needs `on_failure` 'shrink' or 'replace'. A mapping with `name` and `signal`: the signal to react
            to instead of SIGTERM, such as 'SIGUSR1'.
        replica_check: What happens when parameters or optimizer states of the ranks differ: 'off', 'warn',
            'stop' or 'heal'. A part of them is compared bit for bit after each step. 'warn' prints which
            rank, parameter and step, 'stop' also ends the run, 'heal' copies the state of the majority to
            that rank: it needs `on_failure` 'shrink' or 'replace'. A mapping with `name` and options:
            `cycle_steps`, `mb_per_step`.
        emergency_checkpoint: If True, save the last step that all ranks completed before a failure ends a
            fit; a path is the folder. The file is `emergency-step=N.ckpt`. True uses a folder `emergency`
            beside that of the Trainer's checkpoints, and saves nothing if the Trainer makes none. On CUDA
            this needs `on_failure` 'shrink' or 'replace'.

    Raises:
        ConfigurationError: An argument cannot be used.
        TypeError: An argument is unknown.
    """

    _stopping: StepStop | None = None
    _lockstep: Lockstep | None = None
    _observer: StepObserver = StepObserver()
    _journal: Journal | None = None
    _world: tuple[int, int] | None = None  # rank and size, after a change of ranks
    _local_rank = 0  # used with `_world`
    _resumed_from: Any = None
    _tokens: Mapping[str, str] = {}  # checkpoint -> token of its latest save

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: HookSpec | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
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
        uneven_inputs: UnevenInputs | None = None,
        divide_by_initial_world_size: bool = True,
        heartbeat_timeout_s: timedelta | float = 15.0,
        failure_grace_s: timedelta | float = 30.0,
        stall_timeout: timedelta | float | None = None,
        model_averaging: str | Mapping[str, Any] | None = None,
        transport: Transport = "auto",
        init_method: str | None = None,
        store: dist.Store | None = None,
        debug: Debug | None = None,
        on_failure: str | Mapping[str, Any] = "stop",
        on_preemption: str | Mapping[str, Any] = "stop",
        replica_check: str | Mapping[str, Any] = "warn",
        emergency_checkpoint: bool | str | Path = True,
    ) -> None:
        options = self._take_options(locals())
        if not divide_by_initial_world_size and uneven_inputs != "join":
            raise ConfigurationError('divide_by_initial_world_size=False needs uneven_inputs="join"')
        if not isinstance(emergency_checkpoint, bool | str | Path):
            message = f"emergency_checkpoint={emergency_checkpoint!r}: expected True, False or a folder"
            raise ConfigurationError(message)
        self._emergency_checkpoint = emergency_checkpoint
        self._uneven_inputs = uneven_inputs
        self._divide_by_initial_world_size = divide_by_initial_world_size
        self._communication = Communication(
            ddp_comm_hook, ddp_comm_state, ddp_comm_wrapper, model_averaging, model_averaging_period
        )
        super().__init__(precision_plugin=precision_plugin, **options)
        recovery = self._supervision.recovery
        if self._supervision.preemption is not None and recovery is None:
            raise ConfigurationError(
                "on_preemption='leave' requires the other ranks to continue. Set on_failure='shrink' or"
                " on_failure='replace'."
            )
        if recovery is not None:
            from lightning_ddp.elastic.refusals import check_arguments

            check_arguments(
                recovery,
                self._communication,
                ddp_comm_state,
                start_method=start_method,
                uneven_inputs=uneven_inputs,
            )
        set_redirection(self, bind_like(self, ManualOptimizationRedirection)(self._communication))

    # ------------------------------------------------------------------ launch and set-up

    def setup_distributed(self) -> None:
        """Join the process group of the run; return once all ranks have joined."""
        from lightning_ddp.launch.job_context import job_context

        reset_seed()
        self.set_world_ranks()
        context, settings = job_context(), self._supervision.recovery
        calls = context.control.calls
        if calls is not None and calls.state.generation and self.lightning_module is not None:
            from lightning_ddp.elastic.refusals import check_next_run

            check_next_run(self.lightning_module.trainer, is_same=self._world is not None)
        if settings is not None and self.root_device.type == "cuda":
            from lightning_ddp.elastic.refusals import check_backend

            check_backend(choose_backend(self))
            context.control.outlive_watchdog()
        self._join(context)
        if self._journal is None and isinstance(settings, ReplaceSettings):
            from lightning_ddp.elastic.takeover import Journal

            if context.is_joining:  # until this process has joined, another process is rank 0
                read_rank_again(max(1, self.global_rank), self.local_rank)
            self._journal = Journal(context)

    def setup(self, trainer: Trainer) -> None:
        """Move the model to its device; to fit, wrap it and create optimizers; all ranks must call it."""
        assert self._context is not None
        from lightning_ddp.launch.step_stop import StepStop

        self.accelerator.setup(trainer)
        self._stopping = self._stopping or StepStop(self._context)
        self._stopping.attach(trainer)
        fits = is_fitting(trainer)
        batch_norm = layer_sync(self)
        if fits and batch_norm:
            self.model = batch_norm.apply(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if fits:
            self.configure_ddp()
            self.setup_optimizers(trainer)
            self._setup_observer(trainer)
            self._lockstep = None
            if self._uneven_inputs is not None:
                self._setup_uneven_inputs(trainer)
        else:  # nothing to reduce, so no wrapper, but all ranks must evaluate the same model
            from lightning_ddp.comm.collectives import broadcast_coalesced

            self._communication.drop_lost_averager(self._joined_group())
            states = [*self.model.parameters(), *self.model.buffers()]
            broadcast_coalesced(self._joined_group(), states)
        self.setup_precision_plugin()
        if fits:
            optimizers_to_device(self.optimizers, self.root_device)
            module, group, repeats = self.lightning_module, self._joined_group(), self._observer.repeats_steps
            self._communication.start(module, self.optimizers, group, keeps_rounds=repeats)
            self._start_replica_check(self._replicas, self._shared_facts)

    def _replicas(self) -> list[Any]:
        from lightning_ddp.replica_check import Replica

        wrapper = as_wrapper(self.model)
        return [] if wrapper is None else [Replica(wrapper, self._communication, self.optimizers)]

    def _shared_facts(self) -> dict[str, Any]:
        """Return values that must be equal on all ranks of a fit, by name, for the replica check."""
        trainer = self.lightning_module.trainer
        facts: dict[str, Any] = {"global_step": trainer.global_step, "current_epoch": trainer.current_epoch}
        if self._uneven_inputs is None and self._observer.dealer is None:
            facts["number of training batches"] = trainer.num_training_batches
        for index, loader in enumerate(loaders_of(trainer.fit_loop)):
            sampler = getattr(loader, "sampler", None)
            if isinstance(sampler, DistributedSampler):  # in which all ranks shuffle alike
                facts[f"seed of the sampler of dataloader {index}"] = sampler.seed
                facts[f"epoch of the sampler of dataloader {index}"] = sampler.epoch
        return facts

    def _num_steps(self) -> int:
        return int(self.lightning_module.trainer.global_step) + 1  # which counts it when it has returned

    def set_world_ranks(self) -> None:
        """Set this process's rank and the number of ranks in the cluster environment."""
        if self._world is None or self.cluster_environment is None:
            super().set_world_ranks()
            return
        rank, world_size = self._world
        self.cluster_environment.set_world_size(world_size)
        self.cluster_environment.set_global_rank(rank)

    @property
    def local_rank(self) -> int:
        """Local rank of this process on its node, counted over the remaining ranks."""
        return super().local_rank if self._world is None else self._local_rank

    @property
    def root_device(self) -> torch.device:
        """Device of this process, which stays the same when ranks are lost."""
        assert self.parallel_devices is not None
        return self.parallel_devices[super().local_rank % len(self.parallel_devices)]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Number of replicas and rank for a distributed sampler."""
        arguments = super().distributed_sampler_kwargs
        return arguments if self._world is None else {**arguments, "num_replicas": self._world[1]}

    def _setup_observer(self, trainer: Trainer) -> None:
        """Set up recovery of this fit from lost ranks, and its emergency checkpoint, if configured."""
        assert self._context is not None
        ours, settings = self._context.control, self._supervision.recovery
        if ours.calls is not None and settings is not None and not self._observer.repeats_steps:
            self._observer = self._new_recovery(trainer, settings)
        self._observer.begin_fit()
        # After an abort of NCCL, parameters may include partly averaged gradients, unless each update waits
        # for the gradients.
        is_exact = self.root_device.type == "cpu" or self._observer.repeats_steps
        folder = self._emergency_checkpoint
        if folder is False or ours.watch is None or not is_exact:
            return
        from lightning_ddp.elastic.emergency import EmergencyObserver, save_on_failure

        ledger = self._observer.ledger
        if ledger is None or (not self._observer.repeats_steps and ledger.trainer is not trainer):
            self._observer = EmergencyObserver(trainer, self._communication, self._context)
            ledger = self._observer.ledger
        save_on_failure(ledger, None if folder is True else str(folder), ours)

    def _new_recovery(self, trainer: Trainer, settings: RecoverySettings) -> Recovery:
        from lightning_ddp.elastic.recovery import Recovery
        from lightning_ddp.elastic.refusals import check_training

        assert self._context is not None
        assert self._stopping is not None
        check_training(
            trainer,
            settings,
            num_nodes=self.num_nodes,
            start_method=self._chosen_start_method,
            is_external=self._context.rendezvous.where is None,
            device_type=self.root_device.type,
            is_averaging=self._communication.averager_plan is not None,
        )
        return Recovery(
            self._context,
            trainer,
            self._communication,
            keeps_global=settings.batch == "global",
            is_uneven=self._uneven_inputs is not None,
            group=self._joined_group,
            meet=self._meet_again,
            stop=self._stopping,
            journal=self._journal,
        )

    def _meet_again(self, new: NewGeneration) -> None:
        """Create the process group after a change of ranks; move the model to it; all ranks must call it."""
        from lightning_ddp.elastic.regroup import meet_again, take_rank

        context = self._context
        assert context is not None
        rank, self._local_rank = take_rank(context, new, self.num_processes)
        self._world = rank, len(new.members)
        self.set_world_ranks()
        # Five times this is less than failure_grace_s, after which a rank counts as lost. Between nodes,
        # messages may take seconds.
        part = 10 if self.num_nodes == 1 else 1
        group = meet_again(
            context,
            choose_backend(self),
            len(new.members),
            timeout=self._group_timeout,
            meet_within=timedelta(seconds=self._supervision.failure_grace_s / part),
            device=self.root_device,
        )
        self._group = Group(group, context.control.interrupt, transport=self._transport)
        if (wrapper := as_wrapper(self.model)) is not None:
            wrapper.update_process_group(group)
        self._communication.rejoin(self._group, self.root_device)
        if self._lockstep is not None:
            self._lockstep.rejoin(self._group)
        if context.is_joining:
            context.is_joining = False
            context.control.inspector.compare_before_each(self._debug == "detail")

    def _setup_model(self, model: torch.nn.Module) -> BucketedDDP:  # type: ignore[override]
        return self._wrap(model)

    def _register_ddp_hooks(self) -> None:
        wrapper = as_wrapper(self.model)
        assert wrapper is not None
        self._register_hook(wrapper, self._communication)

    def _setup_uneven_inputs(self, trainer: Trainer) -> None:
        from lightning_ddp.ddp.lockstep import Lockstep  # late, as most runs do not need it

        self._lockstep = Lockstep(
            self._joined_group(),
            self.root_device,
            is_allowed=self._uneven_inputs == "join",
            divide_by_initial_world_size=self._divide_by_initial_world_size,
        )
        set_training_results(trainer, bind_like(trainer, LockstepResults)(self._lockstep))
        forget_loaders(trainer.fit_loop)  # already made if a schedule needed the number of steps

    def _scaler(self) -> Any:
        return getattr(self.precision_plugin, "scaler", None)

    # ------------------------------------------------------------------ training steps

    def process_dataloader(self, dataloader: object) -> object:
        """Return the dataloader; for training, adapt it to `uneven_inputs` and recovery from lost ranks."""
        if not self._is_training():
            return dataloader
        dealer = self._observer.dealer
        if dealer is not None:
            dataloader = dealer.adopt(dataloader)
        if self._lockstep is None:
            return dataloader
        if self._journal is None or not self._journal.is_read:  # who joins is told which samples are used
            _require_lockstep(self.lightning_module)
        if dealer is None:
            return self._lockstep.wrap(dataloader)
        most, spare = partial(dealer.most, dataloader), partial(dealer.spare, dataloader)
        return self._lockstep.wrap(dataloader, most, spare)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device; with `uneven_inputs`, note if it is new or a repeat of the last one."""
        if self._lockstep is not None and self._is_training():
            self._lockstep.begin()
        return super().batch_to_device(batch, device, dataloader_idx)

    def _is_training(self) -> bool:
        return self.lightning_module is not None and bool(self.lightning_module.trainer.training)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `training_step` in the wrapper's forward."""
        lockstep = self._lockstep
        with nullcontext() if lockstep is None else lockstep.step(self.lightning_module):
            output = super().training_step(*args, **kwargs)
        self._observer.end_forward(args[0], output)
        return output

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """Prepare the reduction of gradients in the next backward pass of manual optimization."""
        if (wrapper := as_wrapper(self.model)) is not None and not self._is_automatic():
            wrapper.prepare_for_backward(closure_loss)

    def backward(
        self, closure_loss: torch.Tensor, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Run backward (communicates); a rank that repeats its last batch contributes zero gradients."""
        if self._lockstep is not None:
            closure_loss = self._lockstep.scale(closure_loss)
        closure_loss = self._observer.begin_backward(closure_loss)
        try:
            closure_loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        except MissingGradientError as error:
            error.add_hint(_UNUSED)
            raise
        if self._lockstep is not None:
            self._lockstep.restore()
        self._observer.end_backward()
        return closure_loss

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Do nothing: the reducer has finished when backward returns."""

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Take a step; with model averaging, count it and average if it is due (then communicates)."""
        if isinstance(optimizer, torch.optim.LBFGS) and not self._communication.is_local:
            closure = partial(self._mean_loss, closure)
        take = partial(super().optimizer_step, optimizer, closure, model, **kwargs)
        output = self._step([self._communication], optimizer, take)
        self._observer.end_step()
        return output

    def _mean_loss(self, closure: Callable[[], Any]) -> Any:
        """Return the closure's loss averaged over the ranks, so that all call the closure equally often."""
        loss = closure()
        if loss is None:
            return None
        return self.reduce(torch.as_tensor(loss, device=self.root_device).detach().clone())

    def _is_automatic(self) -> bool:
        return self.lightning_module is None or bool(self.lightning_module.automatic_optimization)

    def block_backward_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Keep gradients of backward passes in this context on their rank (Lightning's accumulation)."""
        wrapper = as_wrapper(self.model)
        return nullcontext() if wrapper is None else wrapper.no_sync()

    def no_backward_sync(self, enabled: bool = True) -> AbstractContextManager[None]:
        """Keep gradients of `manual_backward` in this context on their rank, with manual optimization.

        They are averaged together with those of the next backward outside, which has to be the last before
        the optimizer step. All ranks must use it alike.

        Args:
            enabled: False for a context that changes nothing, as in
                `no_backward_sync(enabled=not is_last_micro_batch)`.

        Raises:
            ConfigurationError: optimization is automatic, so that backward comes after `training_step`.
        """
        if enabled and as_wrapper(self.model) is not None and self._is_automatic():
            raise ConfigurationError(
                "no_backward_sync is for manual optimization. With automatic optimization backward comes"
                " after training_step, where it has no effect. Use Trainer(accumulate_grad_batches=...)."
            )
        return self.block_backward_sync() if enabled else nullcontext()

    # ------------------------------------------------------------------ evaluation and end of training

    def on_validation_start(self) -> None:
        """Average parameters and buffers before validation, in local training; all ranks must call it."""
        self._agree()
        super().on_validation_start()

    def _check_evaluation(self) -> None:
        """Count an evaluation step as progress; outside `fit`, end the run if a signal asked for that."""
        if self._stopping is not None:
            self._stopping.check_evaluation()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._check_evaluation()
        return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self._check_evaluation()
        return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._check_evaluation()
        return super().predict_step(*args, **kwargs)

    def on_train_end(self) -> None:
        """Average parameters, in local training, and copy the buffers of rank 0; all ranks must call it."""
        self._agree()
        if (wrapper := as_wrapper(self.model)) is not None:
            wrapper.sync_buffers()
        super().on_train_end()

    def _agree(self) -> None:
        """Average the model over all ranks if they may differ; after a failure, leave it unchanged."""
        if not self._communication.is_local or self._is_alone():
            return
        from lightning_ddp.elastic.step_ledger import models_of_callbacks

        agree = partial(self._communication.agree, models_of_callbacks(self.lightning_module.trainer))
        if self._together(None, agree, lambda: False):
            self._observer.agree()

    # ------------------------------------------------------------------ checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model's state; with model averaging all ranks call it, to synchronize parameters."""
        self._agree()
        return super().lightning_module_state_dict()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Write the checkpoint, and a file per rank if hook or averager has state; all ranks must call it."""
        files: Any = self.checkpoint_io
        is_async = isinstance(files, AsyncCheckpointIO)
        if "optimizer_states" in checkpoint and not self._is_alone():
            if is_async:  # its thread might write the files after the checkpoint
                files = files.checkpoint_io
            arguments = (checkpoint, filepath, self._joined_group(), self.root_device)
            write = partial(files.save_checkpoint, storage_options=storage_options)
            save = partial(self._communication.save, *arguments, write)
            self._together(None, save, lambda: None)
        super().save_checkpoint(checkpoint, filepath, storage_options)
        state = checkpoint.get(STATE_KEY)
        if state is None or self._is_alone():
            return
        self.barrier("checkpoint with files of the ranks")
        keep = {state["token"]}
        if is_async and str(filepath) in self._tokens:  # the previous checkpoint may still be in place
            keep.add(self._tokens[str(filepath)])
        if self.is_global_zero:
            remove_rank_files(filepath, keep=keep)
        self._tokens = {**self._tokens, str(filepath): state["token"]}

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint, and keep its path to find the files of the ranks beside it."""
        self._resumed_from = checkpoint_path
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        if STATE_KEY in loaded:
            self._tokens = {**self._tokens, str(checkpoint_path): loaded[STATE_KEY]["token"]}
        return loaded

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove, on rank 0, a checkpoint and the files of all ranks beside it; nothing on other ranks."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero and self._communication.has_state:
            remove_rank_files(filepath)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore optimizers and, if ranks can communicate, hook and averager; log each item not restored."""
        super().load_optimizer_state_dict(checkpoint)
        if not self._is_alone():
            self._load_state(self._communication, self.lightning_module, dict(checkpoint), self._resumed_from)

    # ------------------------------------------------------------------ collectives

    def _is_alone(self) -> bool:
        """Return True if no other rank joins collectives: before launch, after a failure, finishing alone."""
        return self._observer.is_alone or super()._is_alone()

    def _together(self, kind: str | None, call: Callable[[], T], alone: Callable[[], T]) -> T:
        """Return a collective's result, while joining the one rank 0 recorded, or `alone()` after a loss."""
        if self._journal is not None and kind is not None:
            call = partial(self._journal.result, kind, call)
        return self._observer.together(call, alone)

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Wait until all ranks have called it; do nothing before launch, while joining, after a failure."""
        if self._journal is not None and self._journal.is_read:  # a barrier has no result
            return
        if name in FIRST_BARRIERS and self._is_training():
            self._observer.repeat(partial(super().barrier, name))
        else:
            super().barrier(name)

    def _reduce(self, group: Group, tensors: list[torch.Tensor], reduce_op: Any) -> None:
        """Reduce tensors in place over all ranks; with uneven inputs, over the ranks with a batch."""
        if self._lockstep is not None and self._lockstep.is_partial:
            self._lockstep.reduce(group, tensors, reduce_op)
        else:
            own = [tensor.clone() for tensor in tensors] if self._observer.repeats_steps else []

            def reduce() -> list[torch.Tensor]:
                super(CustomDDPStrategy, self)._reduce(group, tensors, reduce_op)
                return [tensor.cpu() for tensor in tensors] if self._journal is not None else tensors

            reduced = self._together("reduce", reduce, lambda: own)
            for tensor, value in zip(tensors, reduced, strict=True):
                if value is not tensor:
                    tensor.copy_(value)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return True if all ranks (any, with `all=False`) passed True, of those that still have batches."""
        if self._lockstep is None or not self._lockstep.is_partial:
            return super().reduce_boolean_decision(decision, all)
        vote = torch.tensor(int(decision), device=self.root_device)
        self._lockstep.reduce(self._joined_group(), [vote], "min" if all else "max")
        return bool(vote)

    # ------------------------------------------------------------------ end

    def teardown(self) -> None:
        """Unwrap the model; release its gradient buckets and batches."""
        if (wrapper := as_wrapper(self.model)) is not None:
            wrapper.teardown()
            self.model = self.lightning_module
        if self._lockstep is not None:
            self._lockstep.forget()
            self._lockstep = None
        if self._replica_check is not None:
            self._replica_check.release()
            self._replica_check = None
        super().teardown()


CustomDDPPlugin = CustomDDPStrategy
"""Name of the strategy from the time when Lightning called strategies plugins."""

# ---------------------------------------------------------------------- parts of Lightning's loops


class ManualOptimizationRedirection(ForwardRedirection):
    """Forward redirection by which the wrapper expects no backward after a manual `training_step`."""

    def __init__(self, communication: Communication) -> None:
        super().__init__()
        self._communication = communication

    def on_after_inner_forward(self, wrapper_module: torch.nn.Module, original_module: Any) -> None:
        self._set_sync(wrapper_module, original_module, is_on=False)

    def on_after_outer_forward(self, wrapper_module: torch.nn.Module, original_module: Any) -> None:
        self._set_sync(wrapper_module, original_module, is_on=self._communication.synchronises_backward)

    def _set_sync(self, wrapper_module: torch.nn.Module, original_module: Any, *, is_on: bool) -> None:
        wrapper = as_wrapper(wrapper_module)
        if wrapper is not None and not original_module.automatic_optimization:
            wrapper.require_backward_grad_sync = is_on


class LockstepResults(ResultCollection):
    """Logged training values, without those that a rank logs while it repeats its last batch."""

    def __init__(self, lockstep: Lockstep) -> None:
        super().__init__(training=True)
        self._lockstep = lockstep

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        metric = self[key]
        # Values for the epoch are logged after its last step.
        is_replay = self._lockstep.turn.is_replay and not key.startswith("on_train_epoch")
        before = copy_states(metric) if is_replay else {}
        super().update_metrics(key, value, batch_size)
        put_states(metric, before)
        if metric.is_tensor and metric.meta.is_mean_reduction:
            # The batch size differs between ranks, and the mean of integers would be rounded.
            metric.cumulated_batch_size = metric.cumulated_batch_size.to(metric.value.dtype)


def _require_lockstep(module: LightningModule) -> None:
    """Raise ConfigurationError where `uneven_inputs` cannot work: `dataloader_iter`, a resume in an epoch."""
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise ConfigurationError(
            "uneven_inputs needs a training_step(batch, batch_idx). A training_step with dataloader_iter"
            " fetches batches itself, so it is not known which step a batch belongs to."
        )
    loop = module.trainer.fit_loop
    progress = loop.epoch_loop.batch_progress
    if loop.restarting and progress.current.ready and not progress.is_last_batch:
        raise ConfigurationError(
            f"uneven_inputs cannot resume inside an epoch, here after {progress.current.ready} batches,"
            " because the checkpoint does not contain which batches each rank has used. Resume from a"
            " checkpoint of the end of an epoch."
        )
