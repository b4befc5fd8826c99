"""`BucketedDDP`: data parallelism over processes, with the reducer in Python."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.utils import _to_kwargs

from lightning_ddp.comm.group import Group, Interrupt
from lightning_ddp.errors import ConfigurationError, UnsuitableModuleError
from lightning_ddp.parallel.buckets import MIB, ParameterSpec
from lightning_ddp.parallel.reducer import Reducer
from lightning_ddp.parallel.reduction import CommHook
from lightning_ddp.parallel.states import BufferSync, broadcast_coalesced, verify_across_ranks

__all__ = ["BucketedDDP"]

_FIRST_CAP_BYTES = MIB
_DEFAULT_CAP_MB = 25


class BucketedDDP(torch.nn.Module):
    """Averages a module's gradients over the ranks of a process group during backward.

    Usable wherever `torch.nn.parallel.DistributedDataParallel` is, with its names. Wrap the module after it
    is on its device; call the wrapper instead of the module; step the optimizer as with one process.

    After a synchronised backward `.grad` of every parameter holds the mean over the ranks. With
    `gradient_as_bucket_view` it is a view of a bucket: do not `detach_()` it.

    Args:
        module: on one device per process, the same on all ranks, with at least one parameter that requires
            a gradient. Its parameters must not be replaced afterwards.
        device_ids: for a module on one CUDA device, that device: inputs of `forward` are moved there.
            None (default) leaves inputs alone.
        output_device: kept for torch's signature; must be the device of the module, or None.
        dim: kept for torch's signature; only 0.
        broadcast_buffers: whether the buffers of rank 0 are copied to all ranks before each forward that
            follows a synchronised one.
        init_sync: whether construction verifies the parameters across ranks and broadcasts rank 0's
            parameters and buffers. If False, the caller vouches that all ranks hold the same values.
        process_group: the ranks; None for the default group.
        bucket_cap_mb: cap of a bucket in MiB (the first one has 1 MiB); None for 25.
        find_unused_parameters: whether parameters may take no part in the loss, on some ranks or on all. The
            graph of the outputs is searched after each forward. A parameter that no rank used keeps its
            `.grad`; one that some used gets the mean, with zeros from the others.
        check_reduction: deprecated in torch, without effect; only False.
        gradient_as_bucket_view: whether `.grad` is a view of the bucket after a synchronised backward,
            which saves a copy and the memory of one gradient per parameter.
        static_graph: whether every step has the graph of the first one. It is learned there: communication
            starts after that backward, later during it. Parameters may be unused, or get several gradients
            in one backward (re-entrant checkpointing); a graph that changes is an error.
        interrupt: a failure that another thread may report; every wait raises it within 0.1 s.

    Raises:
        ConfigurationError: an argument cannot be used.
        UnsuitableModuleError: no parameter requires a gradient, or one is lazy.
        RankMismatchError: the ranks hold different models.

    Construction communicates (all ranks call it), as do `forward` in training with buffers, and backward.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: Any | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        *,
        interrupt: Interrupt | None = None,
    ) -> None:
        super().__init__()
        if dim != 0:
            raise ConfigurationError(f"dim={dim}: inputs are scattered along dimension 0 only")
        if check_reduction:
            raise ConfigurationError(
                "check_reduction=True: deprecated in torch and without effect; leave it out"
            )
        if bucket_cap_mb is not None and bucket_cap_mb <= 0:
            raise ConfigurationError(f"bucket_cap_mb={bucket_cap_mb}: expected a size in MiB above 0")
        named = _trainable(module)
        self.module = module
        self.device = named[0][1].device
        self._passing_sync_batchnorm_handle(module)
        self.device_ids = _check_device_ids(device_ids, output_device, self.device)
        self.broadcast_buffers = broadcast_buffers
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._cap_bytes = int((_DEFAULT_CAP_MB if bucket_cap_mb is None else bucket_cap_mb) * MIB)
        self._group = Group(process_group if process_group is not None else _default_group(), interrupt)
        self._buffer_sync = BufferSync(self._group, module)
        token = "unverified"
        if init_sync:
            settings = {"find_unused_parameters": find_unused_parameters, "static_graph": static_graph}
            specs = [ParameterSpec.of(n, p) for n, p in named]
            token = verify_across_ranks(self._group, specs, self.device, settings)
            self._broadcast_state()
        self.reducer = self._make_reducer(named, token)

    def _make_reducer(self, named: Sequence[tuple[str, torch.nn.Parameter]], token: str) -> Reducer:
        return Reducer(
            [p for _, p in named],
            [n for n, _ in named],
            self._group,
            token=token,
            first_cap_bytes=min(_FIRST_CAP_BYTES, self._cap_bytes),
            cap_bytes=self._cap_bytes,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what belongs to this process: the group, the reducer and its hooks."""
        return {k: v for k, v in self.__dict__.items() if k not in ("_group", "_buffer_sync", "reducer")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a pickled or copied wrapper on the default process group. Does not communicate.

        All ranks are expected to restore the same. A communication hook has to be registered again.

        Raises:
            ConfigurationError: there is no default process group.
        """
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self._group = Group(_default_group())
        self._buffer_sync = BufferSync(self._group, self.module)
        self.reducer = self._make_reducer(_trainable(self.module), "restored")

    def _passing_sync_batchnorm_handle(self, module: torch.nn.Module) -> None:
        """Refuses synchronised batch normalisation on the CPU, at once; torch's name of that check."""
        layers = [n for n, m in module.named_modules() if isinstance(m, torch.nn.SyncBatchNorm)]
        if layers and self.device.type == "cpu":
            raise ConfigurationError(
                f"SyncBatchNorm layers only work with GPU modules, and this one is on the CPU:"
                f" {', '.join(map(repr, layers))}. Leave out sync_batchnorm, or use BatchNorm."
            )

    @property
    def process_group(self) -> Any:
        """The ranks over which gradients are averaged."""
        return self._group.process_group

    def _broadcast_state(self) -> None:
        broadcast_coalesced(self._group, list(self.module.parameters()))
        if self.broadcast_buffers:
            self._buffer_sync()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module; the next backward is synchronised unless inside `no_sync`."""
        if torch.is_grad_enabled():
            self.reducer.rebuild()
        if self.broadcast_buffers and self.require_forward_param_sync and self._buffer_sync:
            self._buffer_sync()
        if self.device_ids:
            moved = _to_kwargs(inputs, kwargs, self.device, False)
            inputs, kwargs = moved[0][0], moved[1][0]
        output = self.module(*inputs, **kwargs)
        self.prepare_for_backward(output)
        return output

    def prepare_for_backward(self, outputs: Any = None) -> None:
        """Makes the next backward a synchronised one, unless inside `no_sync`.

        `forward` calls it. Call it by hand before a backward whose loss was not computed by this wrapper's
        `forward`, as with manual optimisation in Lightning. Does not communicate.

        Args:
            outputs: what that backward starts from: tensors in nested containers.
        """
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.require_forward_param_sync = True
            self.reducer.arm(outputs)
        else:
            self.require_forward_param_sync = False

    @contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Gradients accumulate on each rank without communication, for backwards of forwards in here."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Lets `hook(state, bucket)` reduce the gradients instead of the built-in mean.

        Args:
            state: handed to the hook in each call.
            hook: called on every rank once for each full bucket, in launch order, in the thread of
                backward. `bucket` has the methods of torch's `GradBucket`. It returns a
                `torch.futures.Future` of the reduced flat gradient: a tensor of the buffer's size and
                dtype (or a list of that one tensor). The hook divides by the world size itself.

        Raises:
            ConfigurationError: the hook is not callable, or one is registered already.
        """
        if not callable(hook):
            raise ConfigurationError(f"comm hook {hook!r} is not callable")
        if self.reducer.has_hook:
            raise ConfigurationError("a communication hook is registered already; there can be one")
        self.reducer.set_hook(state, hook)

    def teardown(self) -> None:
        """Takes the hooks off the parameters, so that the module can be used without this wrapper."""
        self.reducer.remove_hooks()


def _trainable(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    lazy = [n for n, p in module.named_parameters() if isinstance(p, torch.nn.UninitializedParameter)]
    if lazy:
        raise UnsuitableModuleError(
            f"uninitialised (lazy) parameters: {', '.join(lazy)}. Run one forward pass with a sample batch"
            " before wrapping, so that they get their shapes."
        )
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    if not named:
        raise UnsuitableModuleError(
            f"{type(module).__name__} has no parameter that requires a gradient, so there is nothing to"
            " average: use it without a data-parallel wrapper, or set requires_grad=True on a parameter."
        )
    return named


def _default_group() -> Any:
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigurationError(
            "no process group: call torch.distributed.init_process_group first, or pass process_group="
        )
    return dist.group.WORLD


def _check_device_ids(
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
    device: torch.device,
) -> list[int] | None:
    given = [*(device_ids or []), *([output_device] if output_device is not None else [])]
    if not given:
        return None
    indices = {d if isinstance(d, int) else torch.device(d).index for d in given}
    if device.type == "cpu" or indices != {device.index}:
        raise ConfigurationError(
            f"device_ids={device_ids}, output_device={output_device}, but the module is on {device}: pass its"
            " one CUDA device, or None for a module on the CPU"
        )
    return [device.index]
