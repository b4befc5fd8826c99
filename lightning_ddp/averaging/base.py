"""Base class of averagers: step counts, start of local training, and averages of the model's state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum, auto
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist

from lightning_ddp._torch import IGNORED_NAMES
from lightning_ddp.comm import all_gather_objects
from lightning_ddp.comm.group import Group
from lightning_ddp.encoding.mean import Wire, average_
from lightning_ddp.encoding.side_stream import Channel
from lightning_ddp.errors import ConfigurationError, require

STATE_FORMAT = 1
"""Version of the dictionary that `Averager.state_dict` returns."""


@dataclass(frozen=True, kw_only=True)
class AveragerOptions:
    """Options that all averagers have."""

    start_step: int = 0
    """Number of optimizer steps with averaged gradients before local training starts."""
    period: int = 8
    """Number of optimizer steps between two averages of the parameters."""
    optimizer_state: Literal["keep", "average", "reset"] = "keep"
    """Treatment of the optimizer's state (such as momentum) when parameters are averaged: 'keep', 'average'
    or 'reset'. 'keep' leaves each rank its own, 'average' averages it too, at least twice the traffic."""

    def __post_init__(self) -> None:
        require(self.start_step >= 0, f"start_step={self.start_step}: expected 0 or more")
        require(self.period >= 1, f"period={self.period}: expected at least 1")
        require(
            self.optimizer_state in ("keep", "average", "reset"),
            f"optimizer_state={self.optimizer_state!r}: expected 'keep', 'average' or 'reset'",
        )


class Standing(Enum):
    """Enumeration of how far the parameters of the ranks are equal."""

    SAME = auto()
    """They are the same on all ranks."""
    MET = auto()
    """All ranks took part in the last round, after which a part of the parameters may differ."""
    APART = auto()
    """Ranks have taken steps of their own since the last round."""


@dataclass(kw_only=True)
class Track:
    """Optimizer with its numbers of steps: since training began, and since local training began."""

    optimizer: torch.optim.Optimizer
    names: list[str] = field(default_factory=list)
    """Names of its parameters that are averaged."""
    num_steps: int = 0
    """Number of steps since the beginning of training."""
    num_local_steps: int = 0


class Averager:
    """Base of averagers: ranks train on their own gradients, and parameters are averaged periodically.

    The owner of the reducer reads `averages_gradients`. Steps are optimizer steps, independent of the number
    of backwards. Each optimizer has its own count, and its parameters are averaged separately, so that
    alternating optimizers are treated alike. All ranks must make the same calls, also for steps that loss
    scaling skipped.

    Collective: all ranks must construct it, with the same parameters and buffers.

    Raises:
        ConfigurationError: an optimizer shards its state over the ranks, or the options do not fit the ranks.
    """

    name: ClassVar[str]
    mixes_rounds: ClassVar[bool] = False
    """True if each rank keeps a part of its own parameters in a round."""
    Options: ClassVar[type[AveragerOptions]] = AveragerOptions

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        group: Group,
        options: AveragerOptions,
    ) -> None:
        refuse_sharded(optimizers)
        self.module = module
        self.group = group
        self.options = options
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.tracks = [Track(optimizer=optimizer) for optimizer in optimizers]
        self.find_parameters()
        self.check_ranks()
        device = next(iter(self.parameters.values())).device
        self.channel = Channel(group, device)
        self.wire = Wire(self.channel)
        self._is_local = False
        self._standing = Standing.SAME
        self.keeps_rounds = False
        """True if other ranks may repeat a failed round."""
        self.prepare()
        self._settle_phase()

    def check_ranks(self) -> None:
        """Raise `ConfigurationError` if options do not fit the number of ranks; by default do nothing."""

    def prepare(self) -> None:
        """Create what a subclass needs to communicate, at construction and in `rejoin`; here do nothing."""

    def find_parameters(self, known: Iterable[str] = ()) -> None:
        """Update which parameters are averaged: those that require a gradient, earlier ones, `known` ones.

        A parameter that requires no gradient any more is still averaged, as ranks may have trained it.
        Parameters that `BucketedDDP` ignores are left alone.
        """
        ignored = getattr(self.module, IGNORED_NAMES, ())
        known = {*self.parameters, *known}
        before = {id(p): name for name, p in self.parameters.items()}  # it may have moved, as by pruning
        found = [(name, p) for name, p in self.module.named_parameters() if name not in ignored]
        named = [(before.get(id(p), name), p) for name, p in found]
        self.parameters = {name: p for name, p in named if p.requires_grad or name in known}
        names = {id(p): name for name, p in self.parameters.items()}
        for track in self.tracks:
            keys = [id(p) for group in track.optimizer.param_groups for p in group["params"]]
            track.names = [names[key] for key in keys if key in names]

    # ------------------------------------------------------------------ steps

    @property
    def averages_gradients(self) -> bool:
        """True before local training, even inside `no_sync`: steps use gradients averaged over all ranks."""
        return not self._is_local

    @property
    def has_met(self) -> bool:
        """True unless a local step was taken since all ranks last averaged parameters."""
        return self._standing is not Standing.APART

    @property
    def is_same(self) -> bool:
        """True if, by this rank's count of steps and rounds, the parameters of all ranks are equal."""
        return self._standing is Standing.SAME

    def before_step(self) -> None:
        """Prepare for a step that an optimizer is about to take; nothing by default."""

    def step(self, optimizer: torch.optim.Optimizer, *, was_skipped: bool = False) -> None:
        """Count a step that `optimizer` has just taken, and average if it is due (then communicates).

        Args:
            optimizer: one of the averager's optimizers.
            was_skipped: True if loss scaling skipped the step. While gradients are averaged, all ranks skip
                together, and the step does not count. In the local phase ranks skip independently, so it
                counts; otherwise the ranks would average at different times.
        """
        track = next((track for track in self.tracks if track.optimizer is optimizer), None)
        if track is None:
            kind = type(optimizer).__name__
            raise ConfigurationError(f"averager {self.name!r}: this {kind} is not one of its optimizers")
        if was_skipped and not self._is_local:
            return
        track.num_steps += 1
        if self._is_local:
            track.num_local_steps += 1
            self._standing = Standing.APART
            self.after_local_step(track)
        else:
            self._settle_phase()

    def _settle_phase(self) -> None:
        """Start local training once all optimizers that are used have taken `start_step` steps."""
        counts = [track.num_steps for track in self.tracks if track.num_steps] or [0]
        if min(counts) >= self.options.start_step:
            self._is_local = True
            self.begin_local_phase()

    def start_over(self) -> None:
        """Begin again, with step counts of 0, from the present parameters, which are equal on all ranks."""
        for track in self.tracks:
            track.num_steps = track.num_local_steps = 0
        self._is_local, self._standing = False, Standing.SAME
        self._settle_phase()

    def begin_local_phase(self) -> None:
        """Initialize local training, once, while all ranks hold the same parameters; nothing by default."""

    def after_local_step(self, track: Track) -> None:
        """Run an averaging round if one is due after a local step: by default every `period` steps."""
        if track.num_local_steps % self.options.period == 0:
            self.finish_round(track)

    def finish_round(self, track: Track) -> None:
        """Run an averaging round now, due or not; record whether all ranks' parameters are equal after it."""
        self.find_parameters()
        self.round(track)
        self._standing = Standing.MET if self.mixes_rounds or len(self.tracks) > 1 else Standing.SAME

    def round(self, track: Track) -> None:
        """Average one optimizer's parameters and the buffers over all ranks; a subclass may do more."""
        self.average_parameters(track, self.channel)
        self.settle(track)

    def average_parameters(self, track: Track, channel: Channel) -> None:
        """Average the parameters of one optimizer over the ranks of a channel."""
        tensors = [self.parameters[name] for name in track.names]
        channel.wait(channel.submit(lambda: average_(Wire(channel), tensors)))

    # ------------------------------------------------------------------ agreement

    def agree(self, others: Sequence[torch.nn.Module] = ()) -> bool:
        """Average parameters and buffers; return True if the ranks may have differed, so that it was needed.

        For validation, checkpoints and the end of training. Does not change the schedule of rounds. `others`
        are modules that each rank made of its own parameters, such as moving averages, and may have copied
        back: they, and so all, may differ at any time of local training. They are averaged if all ranks have
        the same ones; a rank may keep one for itself.

        Collective: all ranks must call it.
        """
        extra = self._common(others) if self._is_local else []
        if self._standing is Standing.SAME and not extra:
            return False
        self.find_parameters()
        tensors = [*(p.detach() for p in self.parameters.values()), *extra]
        # where only agreed parameters are the same on all ranks, an interrupted average changes nothing
        is_copied = self.keeps_rounds and self.mixes_rounds
        averaged = [t.to(self.channel.device, copy=is_copied) for t in tensors]
        self.run(lambda: average_(self.wire, averaged))
        self.run(lambda: average_buffers(self.channel, self.module))
        for tensor, mean in zip(tensors, averaged, strict=True):
            if mean is not tensor:
                tensor.copy_(mean)
        self._standing = Standing.SAME
        return True

    def _common(self, modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
        """Return the tensors of modules that can be averaged if all ranks have such ones, else none."""
        known = (t.detach() for module in modules for t in (*module.parameters(), *module.buffers()))
        found = [tensor for tensor in known if _is_averaged(tensor)]
        mine = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in found]
        layouts: list[Any] = []
        group, device = self.channel.group, self.channel.device
        self.run(lambda: layouts.extend(all_gather_objects(group, mine, device)))
        return found if all(layout == mine for layout in layouts) else []

    def settle(self, track: Track) -> None:
        """Average buffers, and keep, average or reset the optimizer's state, at the end of a round."""
        if self.options.optimizer_state == "reset":
            for name in track.names:
                track.optimizer.state[self.parameters[name]].clear()
        elif self.options.optimizer_state == "average":
            parameters = {name: self.parameters[name] for name in track.names}
            self.run(lambda: average_optimizer_state(self.channel, track.optimizer, parameters))
        self.run(lambda: average_buffers(self.channel, self.module))

    def run(self, job: Callable[[], None]) -> None:
        """Run a function in the averager's communication thread and wait until it has returned."""
        self.channel.wait(self.channel.submit(job))

    # ------------------------------------------------------------------ other ranks

    def halt(self) -> None:
        """Stop the communication of this averager after ranks were lost; return once none is in progress."""
        self.channel.halt()

    def rejoin(self, group: Group) -> None:
        """Continue with the ranks of `group`, after ranks were lost.

        Collective: all ranks must call it.
        """
        self.group = group
        self.channel = Channel(group, self.channel.device)
        self.wire = Wire(self.channel)
        self.settle_others()
        self.prepare()

    def mark(self) -> Any:
        """Return a copy of the averager's state, such as step counts, without parameters, for `restore`."""
        return self._is_local, [(track.num_steps, track.num_local_steps) for track in self.tracks]

    def restore(self, mark: Any) -> None:
        """Reset step counts and other state to what `mark()` returned when no rank had unaveraged steps."""
        self._is_local, counts = mark
        for track, (num_steps, num_local_steps) in zip(self.tracks, counts, strict=True):
            track.num_steps, track.num_local_steps = num_steps, num_local_steps
        self.settle_others()

    def settle_others(self) -> None:
        """Record that no rank has taken local steps since the last average, once a loss is repaired."""
        self._standing = Standing.MET if self._is_local and self.mixes_rounds else Standing.SAME

    def for_others(self) -> dict[str, Any]:
        """Return the state that ranks which are one step or round behind need for `catch_up`."""
        return self.state_dict()

    def catch_up(self, state: dict[str, Any]) -> None:
        """Finish an interrupted step or round: load the state of the rank whose parameters were copied."""
        self.load_state_dict(state)
        self.settle_others()

    # ------------------------------------------------------------------ checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Return step counts and outer state, the same on all ranks, on the CPU. Call `agree` first."""
        return {
            "format": STATE_FORMAT,
            "name": self.name,
            "options": asdict(self.options),
            "is_local": self._is_local,
            "parameters": list(self.parameters),
            "steps": [(track.num_steps, track.num_local_steps) for track in self.tracks],
            "outer": {},
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Load a `state_dict()`; return one sentence for each item that could not be restored."""
        if state.get("format") != STATE_FORMAT:
            raise ConfigurationError(
                f"state of averager {self.name!r} has format {state.get('format')!r}, but this release"
                f" reads {STATE_FORMAT}"
            )
        if state["name"] != self.name:
            return [f"state of averager {state['name']!r} was dropped, because the run uses {self.name!r}"]
        notes = []
        if len(state["steps"]) == len(self.tracks):
            for track, (num_steps, num_local_steps) in zip(self.tracks, state["steps"], strict=True):
                track.num_steps, track.num_local_steps = num_steps, num_local_steps
        else:
            notes.append(
                f"step counts of averager {self.name!r} were reset: {len(state['steps'])} optimizers were"
                f" saved, but the run has {len(self.tracks)}"
            )
        self._is_local = bool(state["is_local"])
        self.find_parameters(state.get("parameters", ()))
        self._standing = Standing.SAME
        changed = {k: v for k, v in state["options"].items() if asdict(self.options).get(k) != v}
        if changed:
            notes.append(f"averager {self.name!r} was saved with other options: {changed}")
        return notes


def refuse_sharded(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raise `ConfigurationError` for optimizers that cannot be used with local training."""
    reasons = {
        "ZeroRedundancyOptimizer": "each rank holds the state of a part of the parameters only, so no rank"
        " could take a step by itself",
        "DistributedOptimizer": "its steps are taken on other processes, so no rank could take one by itself",
        "PostLocalSGDOptimizer": "it averages the parameters itself: pass the optimizer inside it",
    }
    for optimizer in optimizers:
        for kind in type(optimizer).__mro__:
            if kind.__name__ in reasons:
                raise ConfigurationError(
                    f"model averaging cannot work with {type(optimizer).__name__}: {reasons[kind.__name__]}"
                )


# ---------------------------------------------------------------------- buffers and optimizer state


def average_buffers(channel: Channel, module: torch.nn.Module) -> None:
    """Make a module's buffers equal on all ranks: means, maxima of integers; call it in a channel's thread.

    The running variance of a normalization becomes that of all ranks' data taken together: the mean of the
    variances plus the variance of the means. Other buffers of floating-point or complex numbers are averaged.
    Integers, such as counts of batches, become the largest value of all ranks. Buffers that `BucketedDDP`
    ignores are left alone.

    Collective: all ranks must call it.
    """
    ignored = getattr(module, IGNORED_NAMES, ())
    skipped = {id(b) for name, b in module.named_buffers() if name in ignored}
    means, variances = [], []
    for layer in module.modules():
        mean, variance = getattr(layer, "running_mean", None), getattr(layer, "running_var", None)
        if not (isinstance(mean, torch.Tensor) and isinstance(variance, torch.Tensor)):
            continue
        if skipped.isdisjoint([id(mean), id(variance)]):
            means.append(mean)
            variances.append(variance)
    wire = Wire(channel)
    before = [mean.clone() for mean in means]
    known = skipped | {id(t) for t in [*means, *variances]}
    rest = [b for b in module.buffers() if id(b) not in known]
    average_(wire, [*means, *filter(_is_averaged, rest)])
    for own, mean, variance in zip(before, means, variances, strict=True):
        variance.add_((own - mean).square_())
    average_(wire, variances)
    integers = [b for b in rest if not _is_averaged(b)]
    if integers:
        wide = torch.cat([b.reshape(-1).to(torch.int64) for b in integers])
        channel.all_reduce(wide, dist.ReduceOp.MAX)
        for buffer, values in zip(integers, wide.split([b.numel() for b in integers]), strict=True):
            buffer.copy_(values.view(buffer.shape))


def average_optimizer_state(
    channel: Channel, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]
) -> None:
    """Average an optimizer's state tensors, but for integers, over the ranks; call in a channel's thread.

    Step counts are unchanged. If a parameter has no state on some rank, because it had no gradient there,
    the other ranks keep their state.

    Collective: all ranks must call it.
    """
    found = {
        (name, key): value
        for name, parameter in parameters.items()
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, torch.Tensor) and _is_averaged(value) and value.shape == parameter.shape
        if key != "step"
    }
    layouts = all_gather_objects(channel.group, list(found), channel.device)
    everywhere = set(layouts[0]).intersection(*map(set, layouts[1:]))
    average_(Wire(channel), [value for key, value in found.items() if key in everywhere])


def _is_averaged(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
