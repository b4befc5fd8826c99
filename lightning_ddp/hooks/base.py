"""Base classes of communication hooks: one job per bucket, state by parameter name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from lightning_ddp._torch import foreach_add_
from lightning_ddp.comm.group import uploaded
from lightning_ddp.encoding.mean import Wire
from lightning_ddp.encoding.side_stream import Channel
from lightning_ddp.errors import ConfigurationError

STATE_FORMAT = 1
"""Version of the dictionary that `Hook.state_dict` returns."""


@dataclass(frozen=True, kw_only=True)
class HookOptions:
    """Base class of the options of a hook. Each subclass checks its values in `__post_init__`."""


@dataclass(kw_only=True)
class Part:
    """One bucket while a hook reduces it: flat gradient, names and shapes of its parameters, loss scale."""

    buffer: torch.Tensor
    """Flat gradient of the bucket (1-D), which receives the result; complex numbers as pairs."""
    names: tuple[str, ...]
    """Qualified parameter names, in the order of their elements in the buffer."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the parameters, slowest dimension in memory first; the last of complex ones is 2."""
    absent: frozenset[int]
    """Positions of the parameters without a gradient on this rank: no new one, none from `no_sync`."""
    index: int
    is_last: bool
    loss_scale: float | torch.Tensor
    """Factor by which the loss, and so the gradients, are scaled; a device tensor if the host does not have
    the value."""
    present: tuple[bool, ...] = ()
    """True for each parameter of which at least one rank has a gradient. The same on all ranks."""
    flat: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """Gradient divided by the loss scale (1-D), in float32, or in float64 for float64 gradients."""

    def slices(self) -> list[torch.Tensor]:
        """Return views of `flat`, one per parameter (1-D)."""
        return list(self.flat.split(self.sizes))

    def present_slices(self, flat: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Return name and slice of each parameter that has a gradient on at least one rank."""
        found = zip(self.names, flat.split(self.sizes), self.present, strict=True)
        return [(name, piece) for name, piece, is_present in found if is_present]

    @property
    def sizes(self) -> list[int]:
        """Number of elements of each parameter in the bucket."""
        return [int(torch.Size(shape).numel()) for shape in self.shapes]


class Hook:
    """A communication hook: `hook(state, bucket)` returns a future of the bucket's mean over the ranks.

    Register it with `BucketedDDP.register_comm_hook(None, hook)` on all ranks. It is called in the thread of
    backward, and reduces in the thread of its channel. One hook serves one wrapper.
    """

    name: ClassVar[str]
    Options: ClassVar[type[HookOptions]] = HookOptions
    make_codec: ClassVar[Any] = None
    """Function of the options that returns a `Codec` of sent values; such a hook may wrap another one."""
    takes_wire: ClassVar[bool] = False
    """True if another hook, which has `make_codec`, may encode the values that this hook sends."""

    def __init__(self, channel: Channel, wire: Wire, options: HookOptions) -> None:
        self.channel = channel
        self.wire = wire
        self.options = options
        self.loss_scale: Callable[[], float | torch.Tensor] = lambda: 1.0
        """Function that returns the present loss scale of mixed precision; called in each bucket's job."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.options})"

    def __call__(self, state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Queue the reduction of a full bucket and return its future; `state` is not used."""
        parameters, buffer = bucket.parameters(), bucket.buffer()
        if buffer.is_sparse:
            return self.channel.submit(lambda: self.run_sparse(buffer))
        is_complex = buffer.is_complex()
        part = Part(
            buffer=torch.view_as_real(buffer).view(-1) if is_complex else buffer,
            names=self._names(bucket, len(parameters)),
            shapes=tuple(_memory_shape(p) for p in parameters),
            absent=frozenset(getattr(bucket, "absent", ())) - getattr(bucket, "accumulated", set()),
            index=bucket.index(),
            is_last=bucket.is_last(),
            loss_scale=1.0,
        )

        def job() -> torch.Tensor:
            part.loss_scale = self.loss_scale()
            result = self.run(part)
            return torch.view_as_complex(result.view(-1, 2)) if is_complex else result

        return self.channel.submit(job)

    def _names(self, bucket: Any, num_parameters: int) -> tuple[str, ...]:
        return tuple(getattr(bucket, "names", ())) or ("",) * num_parameters

    def run(self, part: Part) -> torch.Tensor:
        """Average a bucket's buffer over the ranks in place and return it; runs in the channel's thread."""
        result = self.wire.mean(part.buffer)
        if result.data_ptr() != part.buffer.data_ptr():
            part.buffer.copy_(result)
        return part.buffer

    def run_sparse(self, gradient: torch.Tensor) -> torch.Tensor:
        """Average a sparse gradient, which is a bucket of its own, uncompressed; as `run`."""
        return Wire(self.channel).mean(gradient)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict` of this hook on this rank; call it between steps only."""
        return {"format": STATE_FORMAT, "name": self.name, "options": asdict(self.options), "step": 0}

    def load_state_dict(self, state: dict[str, Any], names: Iterable[str] = ()) -> list[str]:
        """Restore a state of this rank; return one sentence for each item that could not be restored.

        State of parameters that are not in `names` is dropped, unless `names` is empty.

        Raises:
            ConfigurationError: the format is not known.
        """
        found = state.get("format")
        if found != STATE_FORMAT:
            raise ConfigurationError(
                f"state of communication hook {self.name!r} has format {found!r}, but this release reads"
                f" {STATE_FORMAT}"
            )
        if state["name"] != self.name:
            return [f"state of hook {state['name']!r} was dropped, because the run uses {self.name!r}"]
        return []


class StatefulHook(Hook):
    """A hook that keeps state from step to step, by parameter name.

    Unlike bucket numbers, names are stable: through the rebuild after the first step, another bucket size, a
    new process. A step is a transaction: its changes take effect if all its buckets are finite on all ranks.
    Otherwise a bucket that is not finite goes through the same arithmetic as zeros, its gradient becomes NaN
    on every rank, so that all ranks skip the step, and the state does not change. Residuals are kept in
    float32, divided by the loss scale.

    On a device the host learns whether all values were finite in a job after the step, for which training
    does not wait.

    Subclasses implement `reduce`, read with `recall`, write with `remember` and pass received values to
    `check_finite`.
    """

    shared_keys: ClassVar[frozenset[str]] = frozenset()
    """Kinds of state that are the same on all ranks; all other kinds differ."""

    def __init__(self, channel: Channel, wire: Wire, options: HookOptions) -> None:
        super().__init__(channel, wire, options)
        self.step = 0
        """Number of synchronized backwards with finite gradients so far."""
        self._state: dict[str, dict[str, torch.Tensor]] = {}
        self._pending: dict[str, dict[str, torch.Tensor]] = {}
        self._previous_index = -1
        self.is_deferred = channel.device.type != "cpu"
        """True if the host knows only after a step whether all values were finite."""
        self._is_bucket_spoiled = torch.zeros((), dtype=torch.bool)
        """True if a value of the present bucket was not finite."""
        self._are_spoiled: list[torch.Tensor] = []
        self._settling: torch.futures.Future[torch.Tensor] | None = None

    def __call__(self, state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        future = super().__call__(state, bucket)
        if bucket.is_last() and (self.is_deferred or bucket.buffer().is_sparse):
            self._settling = self.channel.submit(self._settle)
        return future

    def reduce(self, part: Part) -> torch.Tensor:
        """Average the gradients `part.flat` of a bucket over the ranks, compressed; return the mean.

        Parameters that are not `part.present` hold zeros and must keep their state.

        Collective: all ranks must call it.
        """
        raise NotImplementedError

    def check_finite(self, payload: torch.Tensor) -> torch.Tensor:
        """Return `payload` unchanged; if not all is finite, the bucket becomes NaN, the step is dropped."""
        self._is_bucket_spoiled |= ~_is_finite(payload)
        return payload

    # ------------------------------------------------------------------ memory

    def recall(self, name: str, key: str, numel: int | None = None) -> torch.Tensor | None:
        """Return the stored state `key` of parameter `name`; None if there is none of size `numel`."""
        value = self._state.get(name, {}).get(key)
        fits = value is not None and numel in (None, value.numel())
        return value if fits else None

    def shared_tensors(self) -> dict[str, torch.Tensor]:
        """Return state that must be equal on all ranks, by name; {} on a GPU, where it may still change."""
        if self.is_deferred:
            return {}
        return {
            f"{key} of {name} in the hook {self.name}": value
            for name, values in self._state.items()
            for key, value in values.items()
            if key in self.shared_keys
        }

    def remember(self, name: str, key: str, value: torch.Tensor) -> None:
        """Set the state `key` of parameter `name` to `value` when this step ends, unless it is dropped."""
        self._pending.setdefault(name, {})[key] = value

    def add_errors(self, part: Part) -> None:
        """Add the residuals of earlier steps, that is what was not sent, to the gradients of a bucket."""
        slices = part.present_slices(part.flat)
        pairs = [(piece, self.recall(name, "error", piece.numel())) for name, piece in slices]
        found = [(piece, error) for piece, error in pairs if error is not None]
        if found:
            foreach_add_([piece for piece, _ in found], [error for _, error in found])

    def remember_slices(self, part: Part, key: str, flat: torch.Tensor) -> None:
        """Store a flat tensor, such as the residual, by parameter, for those with a gradient on some rank."""
        for name, piece in part.present_slices(flat):
            self.remember(name, key, piece)

    # ------------------------------------------------------------------ one bucket

    def _names(self, bucket: Any, num_parameters: int) -> tuple[str, ...]:
        names = getattr(bucket, "names", None)
        if not names:
            raise ConfigurationError(
                f"communication hook {self.name!r} keeps its state by parameter name, but this bucket"
                f" ({type(bucket).__name__}) has no `names`. Use it with lightning_ddp.BucketedDDP."
            )
        return tuple(names)

    def run(self, part: Part) -> torch.Tensor:
        """Reduce one bucket in the communication thread; to NaN on all ranks if a gradient is not finite."""
        if part.index <= self._previous_index:
            self._end_step()  # the last bucket of the previous step was not launched
        self._previous_index = part.index
        dtype = part.buffer.dtype
        part.flat = part.buffer.to(torch.promote_types(dtype, torch.float32), copy=True)
        is_scaled = isinstance(part.loss_scale, torch.Tensor) or part.loss_scale != 1.0
        if is_scaled:
            part.flat.div_(part.loss_scale)
        self._agree(part)
        self._fill_if_spoiled(part.flat, 0.0)
        result = self.reduce(part)
        if is_scaled:
            result.mul_(part.loss_scale)
        if result.data_ptr() != part.buffer.data_ptr():
            part.buffer.copy_(result)
        self._fill_if_spoiled(part.buffer, torch.nan)
        if dtype == torch.float16:
            self._is_bucket_spoiled |= ~_is_finite(part.buffer)
        self._are_spoiled.append(self._is_bucket_spoiled)
        part.flat = torch.empty(0)
        if part.is_last and not self.is_deferred:
            self._end_step()
        return part.buffer

    def _fill_if_spoiled(self, tensor: torch.Tensor, value: float) -> None:
        if self.is_deferred or self._is_bucket_spoiled:
            tensor.masked_fill_(self._is_bucket_spoiled, value)

    def _agree(self, part: Part) -> None:
        """Exchange with all ranks which parameters have a gradient, and whether all gradients are finite."""
        has_gradient = [position not in part.absent for position in range(len(part.names))]
        flags = uploaded(torch.tensor([False, *has_gradient], dtype=torch.uint8), part.flat.device)
        slices = part.slices()
        # `.grad` of an absent parameter, if any, is a mean of an earlier backward, the same on all ranks.
        old = {position: slices[position].clone() for position in part.absent}
        for position in old:
            slices[position].zero_()
        flags[0] = ~_is_finite(part.flat)
        self.channel.all_reduce(flags, dist.ReduceOp.MAX)
        self._is_bucket_spoiled = flags[0].bool()
        # Without absent parameters on this rank all are present, and the host need not wait.
        part.present = tuple(map(bool, flags[1:].tolist() if part.absent else has_gradient))
        for position, mean in old.items():
            if part.present[position]:  # other ranks have added to it
                slices[position].copy_(mean)

    def _settle(self) -> None:
        """Make a step's values, if finite, the hook's state, unless already done; in the channel's thread."""
        if self._previous_index >= 0:
            self._end_step()

    def _end_step(self) -> None:
        """End a step: make the values that it stored the hook's state, or drop them if one is not finite."""
        flags = self._are_spoiled
        if not (flags and self.channel.read(torch.stack(flags).any())):
            self.commit(self._pending)
            self.step += 1
        self._forget_step()

    def _forget_step(self) -> None:
        self._pending, self._are_spoiled, self._previous_index = {}, [], -1

    def commit(self, pending: dict[str, dict[str, torch.Tensor]]) -> None:
        """Make values stored in a finite step the hook's state; states that `mark` returned stay valid."""
        changed = {name: {**self._state.get(name, {}), **values} for name, values in pending.items()}
        self._state = {**self._state, **changed}

    def _wait_until_settled(self) -> None:
        """Wait until the values of the last step are committed or dropped; for use between steps."""
        if self._previous_index >= 0:  # the last bucket of the step was not launched
            self._settling = self.channel.submit(self._settle)
        if self._settling is not None:
            self.channel.group.wait_done(self._settling)
            self._settling = None

    # ------------------------------------------------------------------ undo

    def mark(self) -> Any:
        """Return the state, for `restore`; not a copy, as steps replace tensors and never modify them."""
        self._wait_until_settled()
        return self.step, self._state

    def restore(self, mark: Any) -> None:
        """Return to a state from `mark`; call it only while no bucket is being reduced."""
        self.step, self._state = mark
        self._forget_step()

    def start_over(self) -> None:
        """Drop all state; call it between steps."""
        self._wait_until_settled()
        self.restore((0, {}))

    def finish(self, shared: Mapping[str, Any]) -> None:
        """Complete an interrupted step that another rank completed, from its state shared by all ranks."""
        if self.step < shared["step"]:
            self.commit(self._pending)
        self._forget_step()
        self.step = shared["step"]
        self.commit(_copied(shared["tensors"], self.channel.device))

    # ------------------------------------------------------------------ checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Return the step and state tensors by parameter name, copied to the CPU; call it between steps."""
        self._wait_until_settled()
        tensors = _copied(self._state, torch.device("cpu"))
        return {**super().state_dict(), "step": self.step, "tensors": tensors}

    def load_state_dict(self, state: dict[str, Any], names: Iterable[str] = ()) -> list[str]:
        notes = super().load_state_dict(state, names)
        if notes:
            return notes
        self._wait_until_settled()
        known, tensors = set(names), state["tensors"]
        dropped = [n for n in tensors if known and n not in known and not n.startswith("bucket:")]
        kept = {name: values for name, values in tensors.items() if name not in dropped}
        self._state = _copied(kept, self.channel.device)
        self._pending = {}
        self.step = int(state["step"])
        if dropped:
            notes.append(
                f"state of hook {self.name!r} was dropped for unknown parameters:"
                f" {', '.join(sorted(dropped))}"
            )
        changed = {k: v for k, v in state["options"].items() if asdict(self.options).get(k) != v}
        if changed:
            notes.append(f"hook {self.name!r} was saved with other options: {changed}")
        return notes


def _copied(
    tensors: Mapping[str, Mapping[str, torch.Tensor]], device: torch.device
) -> dict[str, dict[str, torch.Tensor]]:
    return {
        name: {key: value.detach().to(device, copy=True) for key, value in values.items()}
        for name, values in tensors.items()
    }


def _is_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Return a bool tensor on the device, True if all elements are finite; one pass, no temporary."""
    if not tensor.numel():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    low, high = torch.aminmax(tensor)
    return torch.isfinite(low) & torch.isfinite(high)


def _memory_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the sizes of a dense tensor in the order of its dimensions in memory, slowest first.

    A complex number is a last dimension of two.

    >>> _memory_shape(torch.empty(3, 5).t())
    (3, 5)
    """
    strides = parameter.stride()
    order = sorted(range(parameter.dim()), key=lambda d: strides[d], reverse=True)
    return (*(parameter.shape[d] for d in order), *([2] if parameter.is_complex() else []))
