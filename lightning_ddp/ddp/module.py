"""`BucketedDDP`: data parallelism over processes, with the reducer in Python."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from lightning_ddp._torch import (
    IGNORED_NAMES,
    IS_IGNORED,
    OPTIMIZERS_IN_BACKWARD,
    inside_forward,
    is_joining,
    run_eagerly,
    tell_dynamo,
    to_kwargs,
)
from lightning_ddp.comm.activity import Interrupt
from lightning_ddp.comm.collectives import broadcast_coalesced
from lightning_ddp.comm.group import Group, uploaded
from lightning_ddp.ddp.bucket import Bucket, ReducerOptions, bucket_caps_bytes, sparse_parameters
from lightning_ddp.ddp.buffers import Buffers, Moment, when_to_broadcast
from lightning_ddp.ddp.reducer import Reducer
from lightning_ddp.ddp.reduction import CommHook
from lightning_ddp.ddp.replica_hash import differing_state, state_of_optimizers
from lightning_ddp.ddp.wrapped_module import (
    MixedPrecision,
    ParameterPlaces,
    check_backend,
    check_device_ids,
    check_hook,
    check_process_group,
    trainable_parameters,
    verify_across_ranks,
)
from lightning_ddp.errors import CommHookError, ConfigurationError, UnsuitableModuleError, require
from lightning_ddp.shm.hosts import Hosts, Transport, check_transport, find_hosts
from lightning_ddp.telemetry.step_record import StepRecorder

_OF_THIS_PROCESS = (
    "_group",
    "_module_buffers",
    "_places",
    "_forward_notice",
    "_active_ranks",
    "reducer",
    "device_mesh",
)


class BucketedDDP(Joinable, torch.nn.Module):
    """Data-parallel wrapper that averages a module's gradients over a process group during backward.

    Drop-in replacement for `torch.nn.parallel.DistributedDataParallel`, with its names. Wrap the module after
    it is on its device; call the wrapper instead of the module; step the optimizer as with one process.

    After a synchronized backward pass `.grad` of every parameter holds the mean over the ranks. With
    `gradient_as_bucket_view` it is a view of a bucket: do not `detach_()` it. A second backward through it
    (`create_graph=True`) is an error. Names in the module's attribute `_ddp_params_and_buffers_to_ignore` are
    left alone. Parameters that `torch.func.functional_call` replaces for a forward are not averaged.

    `broadcast_buffers="auto"` gives the results of a copy of rank 0's buffers before each forward: BatchNorm
    layers in training mode only write their running statistics, so a copy before a layer evaluates is early
    enough. Until then the statistics of the other ranks are those of their own batches; `sync_buffers()`
    copies rank 0's at once. Modules with any other buffer take the copy before each forward.

    Args:
        module: Module on one device per process, or on several CUDA devices; the same on all ranks, with at
            least one parameter that requires a gradient. Its parameters must not be replaced afterwards.
        device_ids: For a module on one CUDA device, a list of that device, to which inputs of `forward` are
            moved; None to leave inputs alone.
        output_device: Device of the module, or None. Kept for torch's signature.
        dim: Only 0. Kept for torch's signature.
        broadcast_buffers: When rank 0's buffers are copied to all ranks: 'auto' (also None) before a forward
            that reads them, True before each forward, False never. BatchNorm reads its buffers in eval mode
            only. A forward after one without synchronization copies none; with False, construction does not
            either.
        init_sync: If True, construction compares the models of the ranks and broadcasts rank 0's state. If
            False, the caller guarantees that all ranks hold the same values.
        process_group: Process group of the ranks; None for the default group.
        bucket_cap_mb: Largest size of a bucket in MiB; None for 25. The first bucket has 1 MiB; with None
            and CPU ranks on several hosts the first buckets are smaller.
        find_unused_parameters: If True, parameters may take no part in the loss on some ranks or all. The
            graph of the outputs is searched after each forward. A parameter that no rank has used keeps its
            `.grad`; a parameter that some ranks have used gets the mean, with zeros from the others.
        check_reduction: Only False. Deprecated in torch, without effect.
        gradient_as_bucket_view: If True (also None), `.grad` is a view of the bucket after a synchronized
            backward pass. That saves a copy and the memory of one gradient per parameter.
        static_graph: If True, every step must have the graph of the first step, which is recorded there.
            Parameters may be unused, or get several gradients in one backward pass (re-entrant
            checkpointing); a graph that changes is an error.
        delay_all_reduce_named_params: Only None. Kept for torch's signature.
        param_to_hook_all_reduce: Only None. Kept for torch's signature.
        mixed_precision: torch's `_MixedPrecision`, or None for full precision. Parameters, inputs and buffers
            are in low precision from forward to the end of backward; gradients arrive in full precision.
        device_mesh: One-dimensional device mesh with the ranks, instead of `process_group`; or None.
        skip_all_reduce_unused_params: With `find_unused_parameters`, skip buckets whose parameters are all
            unused; all ranks must leave the same parameters unused.
        bucket_cap_mb_list: Largest sizes of the first bucket, the second bucket and so on, in MiB; None to
            use `bucket_cap_mb`. The last size holds for all further buckets.
        batched_grad_copy: No effect; kept for torch's signature.
        forward_sync_buffers: True or False as for `broadcast_buffers`; None to use that. Construction copies
            the buffers in both cases.
        interrupt: Failure that another thread may report, or None; every wait raises it within 0.1 s.
        transport: How gradients of CPU ranks travel: 'auto', 'shared_memory' or 'gloo'. 'auto' uses shared
            memory within a host, and gloo between one rank per host; the process group where shared memory is
            not available, and between ranks that are threads of one process. A thread reduces during the
            backward pass if a host has two processors per rank. 'shared_memory' is the same, or an error.
            'gloo' uses the process group.

    Raises:
        ConfigurationError: An argument cannot be used, or the group cannot reduce the module's gradients.
        UnsuitableModuleError: No parameter requires a gradient, or a parameter is uninitialized.
        RankMismatchError: The ranks hold different models.

    Construction communicates (all ranks call it), as do `forward` in training with buffers, and backward.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | Literal["auto"] | None = None,
        init_sync: bool = True,
        process_group: Any | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool | None = None,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any | None = None,
        device_mesh: Any | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[float] | None = None,
        batched_grad_copy: bool | None = None,
        forward_sync_buffers: bool | None = None,
        *,
        interrupt: Interrupt | None = None,
        transport: Transport = "auto",
    ) -> None:
        super().__init__()
        check_transport(transport)
        require(dim == 0, f"dim={dim}: expected 0, as inputs are scattered along dimension 0 only")
        require(not check_reduction, "check_reduction=True is deprecated and has no effect. Leave it out.")
        require(
            find_unused_parameters or not skip_all_reduce_unused_params,
            "skip_all_reduce_unused_params=True needs find_unused_parameters=True",
        )
        require(
            delay_all_reduce_named_params is None and param_to_hook_all_reduce is None,
            "delay_all_reduce_named_params and param_to_hook_all_reduce are not supported. Omit them.",
        )
        caps_bytes = bucket_caps_bytes(bucket_cap_mb, bucket_cap_mb_list)
        group = check_process_group(process_group, device_mesh)
        self.parameters_to_ignore = set(getattr(module, IGNORED_NAMES, ()))
        named = trainable_parameters(module, self.parameters_to_ignore)
        self.module = module
        self.device = named[0][1].device
        self.dim = dim
        self._passing_sync_batchnorm_handle(module)
        self.device_ids = check_device_ids(device_ids, output_device, [p for _, p in named])
        self.output_device = self.device_ids[0] if self.device_ids else None
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self._broadcast = when_to_broadcast(broadcast_buffers, forward_sync_buffers)
        self.forward_sync_buffers = self._broadcast is not False
        self.gradient_as_bucket_view = gradient_as_bucket_view is not False
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.mixed_precision = mixed_precision
        self.transport = transport
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.bucket_bytes_cap_list = list(caps_bytes) if bucket_cap_mb_list else []
        self.bucket_bytes_cap = max(caps_bytes)
        self._group = Group(group, interrupt, transport=transport)
        check_backend(self._group, module, named)
        token: str | None = None
        if init_sync:
            settings = {
                "find_unused_parameters": find_unused_parameters,
                "static_graph": static_graph,
                "skip_all_reduce_unused_params": skip_all_reduce_unused_params,
                "bucket_cap_mb": bucket_cap_mb,
                "bucket_cap_mb_list": bucket_cap_mb_list and list(bucket_cap_mb_list),
                "transport": transport,
                "reduce_dtype": str(getattr(mixed_precision, "reduce_dtype", None)),
            }
            token = verify_across_ranks(self._group, named, self.device, settings)
        ignored = frozenset(self.parameters_to_ignore)
        mixed = None if mixed_precision is None else MixedPrecision(mixed_precision, module, ignored)
        self._mixed = mixed
        self._options = ReducerOptions(
            caps_bytes=caps_bytes,
            are_caps_default=bucket_cap_mb is None and not bucket_cap_mb_list,
            # A low-precision parameter cannot hold a gradient in full precision.
            gradient_as_bucket_view=self.gradient_as_bucket_view and not (mixed and mixed.config.param_dtype),
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            dtype=mixed.reduce_dtype if mixed is not None else None,
        )
        self._connect(named, find_hosts(self._group, self.device), token)
        if init_sync:
            broadcast_coalesced(self._group, self.states())
            if forward_sync_buffers is not None or broadcast_buffers is not False:
                self._module_buffers.copy()

    def _connect(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        hosts: Hosts | None,
        token: str | None = None,
    ) -> None:
        """Create the reducer and other objects of this process and group; collective if ranks share hosts.

        Without a token that the ranks have agreed on, one counts the wrappers of this group.
        """
        ignored = frozenset(self.parameters_to_ignore)
        sparse = sparse_parameters(self.module.modules())
        self._module_buffers = Buffers(self._group, self.module, ignored, self._broadcast)
        self._places = ParameterPlaces(self.module, named)
        self._has_prepared = False
        self.authoritative_rank: int | None = None
        """Rank whose model all ranks copied at the end of the last `join()`; None before."""
        self._forward_notice: tuple[Any, torch.Tensor] | None = None
        self._active_ranks: Any | None = None
        self._divides_by_active = False
        self.reducer = Reducer(
            self._places.parameters,
            self._places.names,
            self._group,
            device=self.device,
            token=token or f"number {self._group.next_number('reducer')}",
            options=self._options,
            sparse=frozenset(i for i, (_, p) in enumerate(named) if id(p) in sparse),
            hosts=hosts,
            before_finish=self._mixed.restore_parameters if self._mixed is not None else None,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without parts tied to this process: group, reducer and hooks."""
        return {k: v for k, v in self.__dict__.items() if k not in _OF_THIS_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled or copied wrapper on the default process group, without communication.

        All ranks must restore the same state. A communication hook has to be registered again, and gradients
        are reduced through the process group.

        Raises:
            ConfigurationError: there is no default process group.
        """
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self._group = Group(check_process_group(None, None), transport=self.transport)
        self._connect(trainable_parameters(self.module, self.parameters_to_ignore), None)

    def _passing_sync_batchnorm_handle(self, module: torch.nn.Module) -> None:
        """Raise if `module` has SyncBatchNorm layers on the CPU; named as torch's own check."""
        layers = [n for n, m in module.named_modules() if isinstance(m, torch.nn.SyncBatchNorm)]
        if layers and self.device.type == "cpu":
            raise ConfigurationError(
                "SyncBatchNorm layers only work with GPU modules, but this module is on the CPU:"
                f" {', '.join(map(repr, layers))}. Leave out sync_batchnorm, or use BatchNorm."
            )

    @property
    def process_group(self) -> Any:
        """Process group over which gradients are averaged."""
        return self._group.process_group

    def update_process_group(self, process_group: Any) -> None:
        """Continue with the ranks of `process_group`, for example after losing a rank.

        The buckets are planned again; gradients are kept. The ranks must hold the same parameters. The owner
        of a communication hook must update the hook.

        Collective: all ranks must call it.
        """
        group = Group(process_group, self._group.interrupt, transport=self.transport)
        named = list(zip(self._places.names, self._places.parameters, strict=True))
        check_backend(group, self.module, named)
        before, recorder, buffers = self.reducer.reduction, self.reducer.recorder, self._module_buffers
        self.reducer.close()
        self._group = group
        self._connect(named, find_hosts(self._group, self.device))
        self.reducer.recorder = recorder
        self.require_forward_param_sync = True  # whatever each rank has done before
        self._module_buffers.hook, self._module_buffers.location = buffers.hook, buffers.location
        if before.hook is not None:
            self.reducer.set_hook(before.state, before.hook)

    def states(self) -> list[torch.Tensor]:
        """Return the parameters that this wrapper keeps equal on all ranks: all but the ignored ones."""
        ignored = self.parameters_to_ignore
        return [p for name, p in self.module.named_parameters() if name not in ignored]

    # ------------------------------------------------------------------ forward

    @run_eagerly
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; the next backward pass is synchronized unless inside `no_sync`."""
        tell_dynamo()
        if not self._has_prepared:
            self._prepare()
        is_training = torch.is_grad_enabled()
        if is_training and self.require_backward_grad_sync:
            self.reducer.failures.check_usable()
            self.reducer.recorder.start_forward()
        self._notify_joined(is_training)
        if is_training:
            self.reducer.rebuild()
        self._sync_buffers_if_due("before_forward")
        if self.device_ids:
            moved = to_kwargs(inputs, kwargs, self.device, False)
            inputs, kwargs = moved[0][0], moved[1][0]
        if self._mixed is not None:
            self._mixed.cast_parameters()
            inputs, kwargs = self._mixed.cast_inputs((inputs, kwargs))
        with inside_forward(self.bucket_bytes_cap):
            output = self.module(*inputs, **kwargs)
        if torch.is_grad_enabled():
            self.reducer.recorder.end_forward()
        self._sync_buffers_if_due("after_forward")
        self._module_buffers.note_forward()
        if self._mixed is not None:
            self._mixed.restore_after_backward(output)
        replaced = self._places.replaced()
        if replaced:
            self._places.expect_restored(output, replaced, self._group.rank)
        if len(replaced) < len(self._places.names):  # else functional_call has replaced all
            self.prepare_for_backward(output, absent=replaced)
        return output

    def _prepare(self) -> None:
        """Make optimizers that step during backward use averaged gradients; called in the first forward."""
        self._has_prepared = True
        params = self._places.parameters
        if not any(hasattr(p, OPTIMIZERS_IN_BACKWARD) for p in params):
            return
        from torch.distributed.optim.apply_optimizer_in_backward import (  # slow to import, rarely needed
            param_to_optim_hook_handle_map,
        )

        for parameter in params:  # torch's hooks would step on local gradients
            for handle in param_to_optim_hook_handle_map.get(parameter, []):
                handle.remove()
        self.reducer.after_bucket = _step_optimizers

    def prepare_for_backward(self, outputs: Any = None, *, absent: Iterable[int] = ()) -> None:
        """Make the next backward pass a synchronized one, unless inside `no_sync`.

        `forward` calls this method. Call it yourself before a backward pass whose loss was not computed by
        this wrapper's `forward`, as with manual optimization in Lightning.

        Args:
            outputs: Tensors, in nested containers, from which the backward pass starts.
            absent: Positions of parameters that get no gradient on any rank.
        """
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.require_forward_param_sync = True
            self._set_divisor()
            self.reducer.arm(outputs, absent)
        else:
            self.require_forward_param_sync = False

    # ------------------------------------------------------------------ buffers

    def _sync_buffers_if_due(self, where: Moment, *, has_input: bool = True) -> None:
        follows_sync = self.require_forward_param_sync
        if self._module_buffers.are_due(where, follows_sync=follows_sync, is_joining=is_joining(self)):
            self.sync_buffers(has_input=has_input)

    def sync_buffers(self, *, has_input: bool = True) -> None:
        """Copy rank 0's buffers to all ranks now, or run the buffer hook; nothing if broadcast_buffers=False.

        Inside `join()` they come from the highest rank that has input left (`has_input`).

        Collective: all ranks must call it.
        """
        src = self._agree_on_source(has_input) if is_joining(self) else 0
        self.reducer.futures += self._module_buffers.sync(src)
        self.reducer.recorder.sent_buffers()

    def register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[[Any, dict[str, torch.Tensor]], Any],
        *,
        location: Moment = "after_forward",
    ) -> None:
        """Register `hook(state, buffers)`, which replaces the copy of buffers from rank 0.

        Args:
            state: First argument of the hook.
            hook: Function that synchronizes the buffers, which it gets by qualified name and changes in
                place. Called on all ranks in each forward that follows a synchronized forward. It may return
                futures, for which the end of the next synchronized backward pass waits.
            location: When the hook is called: 'before_forward' or 'after_forward'.

        Raises:
            ConfigurationError: The location is invalid.
            TypeError: The hook is not callable.
        """
        if not callable(hook):
            raise TypeError(f"buffer hook {hook!r} must be callable")
        if location not in ("before_forward", "after_forward"):
            raise ConfigurationError(f"location={location!r}: expected 'before_forward' or 'after_forward'")
        self._module_buffers.hook, self._module_buffers.location = partial(hook, state), location

    # ------------------------------------------------------------------ synchronization

    @contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Return a context in which forwards, and their backward passes, accumulate gradients locally."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Register `hook(state, bucket)`, which reduces gradients instead of the built-in mean.

        Args:
            state: First argument of the hook.
            hook: Function that reduces a bucket, called on every rank once per full bucket, in launch order,
                in the backward thread. `bucket` has the methods of torch's `GradBucket`. The hook returns a
                `torch.futures.Future` of the reduced flat gradient: a tensor of the buffer's size and dtype
                (or a list with that tensor). The hook divides by the world size itself.

        Raises:
            TypeError: The hook is not callable.
            ConfigurationError: The hook's annotations are not those of a communication hook.
            CommHookError: A hook is registered already.
        """
        check_hook(hook)
        if self.reducer.reduction.hook is not None:
            raise CommHookError(
                "register_comm_hook or register_builtin_comm_hook can only be called once. A wrapper has one"
                " hook."
            )
        self.reducer.set_hook(state, hook)

    def check_replicas(self, *optimizers: torch.optim.Optimizer) -> dict[str, list[int]]:
        """Compare parameters, and the states of optimizers, bit for bit; return the names of what differs.

        Each name comes with the ranks outside the majority, or all ranks if there is none.

        Collective: all ranks must call it.
        """
        names = {id(p): name for name, p in self.module.named_parameters()}
        tensors, numbers = state_of_optimizers(optimizers, names)
        states = {names[id(p)]: p for p in self.states()}
        return differing_state(self._group, ({**states, **tensors}, numbers), self.device)

    def teardown(self) -> None:
        """Remove the hooks from the parameters, so that the module can be used without this wrapper."""
        self.reducer.close()

    def record_steps(self, num_steps: int = 256) -> StepRecorder:
        """Start recording computation and communication times of synchronized steps on this rank.

        Args:
            num_steps: Largest number of records. A second call drops the records of the first one.

        Returns:
            The recorder of this wrapper, with the `records`.

        Raises:
            ConfigurationError: The number is less than 1.
        """
        self.reducer.recorder.start(num_steps)
        return self.reducer.recorder

    def stop_recording(self) -> None:
        """Stop recording steps, and keep the existing records. Does not communicate."""
        self.reducer.recorder.stop()

    # ------------------------------------------------------------------ uneven inputs

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[None]:
        """Return a context for training loops in which ranks run out of inputs at different steps.

        A rank that leaves the loop takes part in the others' communication, with zeros, until all have
        left; then all ranks copy the model of the last one. Other collectives of the model, such as those of
        SyncBatchNorm, are not mirrored: use `throw_on_early_termination` with them. All ranks must enter.

        Args:
            divide_by_initial_world_size: If True, divide gradients by the number of ranks; if False, by the
                number of ranks that still have input. A communication hook divides by itself.
            enable: If False, the context has no effect.
            throw_on_early_termination: If True, all ranks raise RuntimeError when the first one runs out.

        Raises:
            ConfigurationError: There is no default process group, or `skip_all_reduce_unused_params` is True.
        """
        require(
            not (enable and self._options.skip_all_reduce_unused_params),
            "join() needs skip_all_reduce_unused_params=False, as a rank that has run out of inputs does not"
            " know which buckets the others skip",
        )
        if not dist.is_initialized():
            if not enable:
                return nullcontext()
            raise ConfigurationError(
                "join() needs torch.distributed.init_process_group, because torch's Join communicates"
                " through it"
            )
        options = {"divide_by_initial_world_size": divide_by_initial_world_size}
        context: AbstractContextManager[None] = Join([self], enable, throw_on_early_termination, **options)
        return context

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that runs on a rank that has joined; called by torch's `Join`."""
        self._divides_by_active = not kwargs.get("divide_by_initial_world_size", True)
        return _ShadowSteps(self)

    @property
    def join_device(self) -> torch.device:
        """Device of the tensors with which ranks announce that they have joined."""
        return self.device

    @property
    def join_process_group(self) -> Any:
        """Process group of the ranks that join."""
        return self.process_group

    def _notify_joined(self, is_training: bool) -> None:
        """Tell ranks without input, inside `join()`, that a forward starts, and if it trains and syncs."""
        self._active_ranks = None
        if not is_joining(self):
            return
        self._active_ranks = Join.notify_join_context(self)
        if self._forward_notice is not None:
            self._group.wait(self._forward_notice[0], self.device)
        kind = [float(is_training), float(is_training and self.require_backward_grad_sync)]
        notice = uploaded(torch.tensor(kind), self.device)
        self._forward_notice = (self._group.all_reduce(notice), notice)

    def _agree_on_source(self, is_candidate: bool) -> int:
        """Return the highest group rank among those that pass `is_candidate`; collective."""
        rank = uploaded(torch.tensor([self._group.rank if is_candidate else -1]), self.device)
        self._group.wait(self._group.all_reduce(rank, dist.ReduceOp.MAX), self.device)
        return int(rank.item())

    def _set_divisor(self) -> None:
        """Set the divisor of gradients: number of ranks or, if `join()` was told so, of those with input."""
        divisor = self._group.size
        if self._active_ranks is not None and self._divides_by_active:
            self._group.wait(self._active_ranks, self.device)
            divisor = int(self._active_ranks.result()[0].item())
        self.reducer.reduction.set_divisor(divisor)

    # ------------------------------------------------------------------ names that torch's library uses

    @property
    def broadcast_buffers(self) -> bool:
        """True if forwards copy rank 0's buffers to all ranks; the name that torch has for it."""
        return self.forward_sync_buffers

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return self.reducer.has_rebuilt

    @staticmethod
    def _get_data_parallel_params(module: torch.nn.Module, named_params: bool = False) -> Any:
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, IS_IGNORED):
                yield (name, parameter) if named_params else parameter

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn("static_graph is True already", stacklevel=2)
            return
        if self.reducer.step >= 0:
            raise UnsuitableModuleError(
                "static_graph should be called before training loop starts, but there were"
                f" {self.reducer.step + 1} backward passes. Pass static_graph=True to the constructor."
            )
        self.static_graph = True
        self._options = replace(self._options, static_graph=True)  # also for reducers to come
        self.reducer.make_static()


class _ShadowSteps(JoinHook):
    """Hook of torch's `Join`: a rank without input makes the same collectives as the others, in order."""

    def __init__(self, wrapper: BucketedDDP) -> None:
        self._wrapper = wrapper

    def main_hook(self) -> None:
        """Match the collectives of a step of ranks with input: plan buckets, sync buffers, reduce zeros."""
        wrapper, group = self._wrapper, self._wrapper._group
        notice = torch.zeros(2, device=wrapper.device)
        group.wait(group.all_reduce(notice), wrapper.device)
        is_training, is_synchronised = map(bool, notice.tolist())
        if is_training:
            wrapper.reducer.rebuild()
        wrapper._sync_buffers_if_due(wrapper._module_buffers.location, has_input=False)
        wrapper.require_forward_param_sync = is_synchronised
        if is_synchronised:
            wrapper.reducer.shadow_backward()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the model of the rank that ran out of input last to all ranks."""
        wrapper = self._wrapper
        src = wrapper.authoritative_rank = wrapper._agree_on_source(is_last_joiner)
        broadcast_coalesced(wrapper._group, wrapper.states(), src)
        if wrapper.forward_sync_buffers:
            wrapper._module_buffers.copy(src)


def _step_optimizers(bucket: Bucket) -> None:
    """Step the optimizers of a reduced bucket's parameters, and free the used gradients.

    torch's `_apply_optimizer_in_backward` attaches them. torch steps as soon as the local gradient is there;
    here the step waits for the mean, while later buckets are still being reduced.
    """
    for parameter in bucket.params:
        optimizers = getattr(parameter, OPTIMIZERS_IN_BACKWARD, None)
        if optimizers is not None and parameter.grad is not None:
            for optimizer in optimizers:
                optimizer.step()
            parameter.grad = None
