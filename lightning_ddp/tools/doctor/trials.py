"""Trials of `doctor --verify` in the ranks: training of a small model, compared to torch's DDP and formulas.

Comparisons come after communication, so that a rank that finds a difference leaves no other waiting. All that
is compared to is computed on the CPU, but for torch's DDP.
"""

from __future__ import annotations

import copy
import json
import math
import statistics
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp import BucketedDDP
from lightning_ddp.averaging import build_averager
from lightning_ddp.hooks import build_hook
from lightning_ddp.tools import ToolError
from lightning_ddp.tools.command_line import paired_ratio
from lightning_ddp.tools.models import TrainingRun, build_workload, compute_loss
from lightning_ddp.tools.ranks import RankContext, synchronize, timed

HOST_WAITS: Final = "host waits"
"""Name of the trial that checks whether the host waits for the device in a step."""

_CAP_MB: Final = 0.015  # several buckets of models as small as these
_LR: Final = 0.05
_NUM_STEPS: Final = 6  # torch plans its buckets anew after the first
_NUM_WATCHED: Final = 2  # one of them is the end of an averager's period
_NUM_HOOK_STEPS: Final = 7
_OVERFLOWS_AT: Final = 4
_NUM_GLOBAL_STEPS: Final = 2
_NUM_LOCAL_STEPS: Final = 7  # the last one is no end of a period
_NUM_WARM_UPS, _LEAST_TURNS, _MOST_TURNS = 3, 5, 40
_TURNS_S = 4.0
_SLOW_RATIO: Final = 1.5

_READ_ONCE: Final = frozenset({"hook powersgd", "hook topk", "hook randomk", "hook sign"})
"""Subjects whose host reads once in a step whether all values were finite on all ranks."""

_EPS: Final = 2.0**-23  # of float32
HOOKS: Final[Mapping[str, tuple[Mapping[str, Any], float, float]]] = {
    "allreduce": ({}, 0.0, 0.0),
    "noop": ({}, 0.0, 0.0),
    "fp16": ({}, 2**-10, 1e-5),
    "bf16": ({}, 2**-7, 0.0),
    "int8": ({}, 0.0, 1 / 127),
    "fp8": ({}, 1 / 8, 1e-4),
    "topk": ({"ratio": 0.25}, 0.0, 0.0),
    "randomk": ({"ratio": 0.25}, 0.0, 0.0),
    "sign": ({"block_size": 256}, 0.0, 0.0),
    "powersgd": ({"rank": 2, "start_step": 2, "min_compression": 2.0}, 0.0, 0.0),
}
"""Options of hooks by name, and the error of a mean by two roundings, one before the sum and one after it:
relative to the mean magnitude, and to the largest one."""

_PLAIN_OUTER: Final = {"period": 2, "outer_lr": 1.0, "outer_momentum": 0.0}
AVERAGERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "post_local_sgd": {"period": 2},
    "hierarchical_sgd": {"periods": {2: 0}},
    "slowmo": {"period": 2, "slow_lr": 1.0, "slow_momentum": 0.0},
    "diloco": _PLAIN_OUTER,
    "streaming_diloco": {**_PLAIN_OUTER, "num_fragments": 1, "delay": 1, "local_weight": 0.0},
}
"""Options by name with which an averager sets the parameters to their mean of each second local step, after
`delay` steps."""

_FLAGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "defaults": {},
    "gradient_as_bucket_view=False": {"gradient_as_bucket_view": False},
    "find_unused_parameters=True": {"find_unused_parameters": True},
    "static_graph=True": {"static_graph": True},
}


def _model() -> nn.Module:
    # Odd sizes, so that a bucket which is not aligned shows; no kink such as ReLU's, at which the CPU and a
    # device may take different sides.
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.GELU()),
        *(nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.GELU(), nn.Flatten()),
        *(nn.Linear(256, 65), nn.LayerNorm(65), nn.GELU(), nn.Linear(65, 33), nn.GELU(), nn.Linear(33, 7)),
    )


@dataclass
class Verdict:
    """Result of a trial on this rank: its first problem, or a text for the report."""

    problem: str | None = None
    figure: str | None = None
    """Text for the report; None for the numbers compared."""
    is_slow: bool = False
    """True if a measured time deserves a warning."""
    num_values: int = 0
    """Number of compared numbers."""
    largest: float = 0.0
    """Their largest error, relative to its bound."""

    def fail(self, problem: str) -> None:
        """Record a problem, unless there is one already."""
        self.problem = self.problem or problem

    def check(
        self,
        where: str,
        what: str,
        found: Tensor,
        expected: Tensor,
        bound: Tensor | float,
        module: nn.Module | None = None,
    ) -> None:
        """Record a problem if a number is farther from the expected one than its bound; count the numbers.

        They are those of all parameters of `module`, if given. A non-finite number is a problem.
        """
        found, expected = (tensor.detach().cpu().double() for tensor in (found, expected))
        bound = torch.as_tensor(bound, dtype=torch.float64).expand_as(found)
        error = (found - expected).abs()
        self.num_values += found.numel()
        is_wrong = ~(error <= bound)
        if bool(is_wrong.any()):
            at = int((error - bound).nan_to_num(nan=math.inf, posinf=math.inf).flatten().argmax())
            if module is not None:
                names = [name for name, p in module.named_parameters() for _ in range(p.numel())]
                where = f"{where}, {names[at]}"
            self.fail(
                f"{where}: {what} is {float(found.flatten()[at]):.6g} where"
                f" {float(expected.flatten()[at]):.6g} +/- {float(bound.flatten()[at]):.1g} is expected"
                f" ({int(is_wrong.sum())} of {found.numel()} numbers are wrong)"
            )
        else:
            self.largest = max(self.largest, float(torch.where(bound > 0, error / bound, 0.0).max()))


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Rank, number of ranks and device of this process, with functions that make models and batches."""

    rank: int
    size: int
    device: torch.device

    @property
    def noise(self) -> float:
        """Allowed difference of gradients from those computed on the CPU, relative to the largest one."""
        return 1e-6 if self.device.type == "cpu" else 1e-3

    def build(self) -> nn.Module:
        """Return the model of the trials on the device, with the same weights on all ranks."""
        torch.manual_seed(0)
        return _model().to(self.device)

    def batch(self, step: int) -> Tensor:
        """Return a random batch, different on each rank and in each step."""
        generator = torch.Generator().manual_seed(1 + step * self.size + self.rank)
        return torch.randn(8, 3, 8, 8, generator=generator).to(self.device)

    def gather(self, row: Tensor) -> Tensor:
        """Return the 1-D tensors of all ranks on the CPU, one row per rank.

        Collective: all ranks must call it.
        """
        own = row.detach().to(self.device).contiguous()
        rows = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(rows, own)
        return torch.stack(rows).cpu()


Trial = Callable[[Ranks, Verdict], None]


def trials_of(device: str) -> dict[str, Trial]:
    """Return the trial functions for a device type by name, in running order."""
    flags = _FLAGS if device == "cuda" else {**_FLAGS, "transport='gloo'": {"transport": "gloo"}}
    found: dict[str, Trial] = {f"gradients, {n}": partial(_try_gradients, flags=flags[n]) for n in flags}
    found |= {f"hook {name}": partial(_try_hook, name=name) for name in HOOKS}
    found |= {f"averager {name}": partial(_try_averager, name=name) for name in AVERAGERS}
    if device == "cuda":
        found[HOST_WAITS] = _try_host_waits
    found["step time"] = _try_step_time
    return found


def beginning_with(only: Sequence[str], names: Collection[str], what: str) -> list[str]:
    """Return names with a prefix in `only`, or all if that is empty; raise if a prefix fits no name."""
    unknown = [text for text in only if not any(name.startswith(text) for name in names)]
    if unknown:
        raise ToolError(f"no {what} begins with {' or '.join(unknown)}")
    return [name for name in names if not only or name.startswith(tuple(only))]


def verdict_key(name: str, rank: int) -> str:
    """Return the key under which a rank's verdict about a trial is in the store."""
    return f"verdict/{name}/{rank}"


def store_verdict(context: RankContext, name: str, verdict: Verdict) -> None:
    """Write this rank's verdict about a trial to the store as JSON; rank 0 restarts the time limit."""
    compared = f"{verdict.num_values:,} numbers, largest error {verdict.largest:.0%} of its bound"
    found = {"figure": verdict.figure or compared, "problem": verdict.problem, "is_slow": verdict.is_slow}
    context.store.set(verdict_key(name, context.rank), json.dumps(found))
    context.advance()


def run_trials(context: RankContext, names: Sequence[str]) -> None:
    """Run the named trials; store each verdict at once, so that those before a hang are not lost.

    Collective: all ranks must call it.
    """
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    ranks = Ranks(rank=context.rank, size=context.world_size, device=context.device)
    trials = trials_of(context.device.type)
    context.advance()
    for name in names:
        verdict = Verdict()
        trials[name](ranks, verdict)
        synchronize(context.device)
        store_verdict(context, name, verdict)
        dist.barrier()


# ---------------------------------------------------------------------- training


class _Training:
    """A wrapped model with its optimizer, and perhaps a hook or an averager of this package."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self.module: nn.Module = wrapper.module
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=_LR, momentum=0.9)
        self.hook: Any = None
        self.averager: Any = None

    def backward(self, batch: Tensor) -> None:
        """Run forward and backward; average gradients over ranks unless the averager trains locally."""
        is_local = self.averager is not None and not self.averager.averages_gradients
        with self.wrapper.no_sync() if is_local else nullcontext():
            self.optimizer.zero_grad()
            compute_loss(self.wrapper(batch)).backward()

    def step(self, batch: Tensor) -> None:
        """Train one step on a batch: backward, optimizer and, if there is one, the averager."""
        self.backward(batch)
        self.optimizer.step()
        if self.averager is not None:
            self.averager.step(self.optimizer)


def _ours(ranks: Ranks, *, flags: Mapping[str, Any] = {}, hook: str = "", averager: str = "") -> _Training:
    """Return a training of the trial model in this package's wrapper, with the named hook or averager.

    Collective: all ranks must call it.
    """
    training = _Training(BucketedDDP(ranks.build(), bucket_cap_mb=_CAP_MB, **flags))
    group = training.wrapper.process_group
    if hook:
        training.hook = build_hook({"name": hook, **HOOKS[hook][0]}, group, ranks.device)
        training.wrapper.register_comm_hook(None, training.hook)
    if averager:
        spec = {"name": averager, "start_step": _NUM_GLOBAL_STEPS, **AVERAGERS[averager]}
        training.averager = build_averager(spec, training.module, [training.optimizer], group)
    return training


def _mean_of(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of the ranks' rows in float64, and a bound of float32's rounding in any order."""
    wide = rows.double()
    return wide.mean(0), (len(rows) + 1) * _EPS * wide.abs().mean(0) + 1e-6 * _EPS


def _flat(tensors: Iterable[Any]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).cpu()


def _gradients(module: nn.Module) -> Tensor:
    return _flat(parameter.grad for parameter in module.parameters())


def _local_gradients(module: nn.Module, batch: Tensor) -> Tensor:
    """Return the gradients of this rank's batch alone, computed on the CPU; the module is not changed."""
    alone = copy.deepcopy(module).cpu()
    alone.zero_grad(set_to_none=True)
    compute_loss(alone(batch.cpu())).backward()
    return _gradients(alone)


# ---------------------------------------------------------------------- gradients


def _try_gradients(ranks: Ranks, verdict: Verdict, *, flags: Mapping[str, Any]) -> None:
    """Check averaged gradients against the ranks' mean, and gradients and final state against torch's DDP."""
    torchs: dict[str, Any] = {"gradient_as_bucket_view": True, "static_graph": False}
    torchs |= {name: flags[name] for name in flags.keys() & torchs.keys()}
    ours = _ours(ranks, flags=flags)
    theirs = _Training(DistributedDataParallel(ranks.build(), bucket_cap_mb=_CAP_MB, **torchs))
    # The sums of two ranks have one order; else the terms may cancel, so the bound is that of the largest.
    tolerance = 0.0 if ranks.size <= 2 else 1e-5
    for step in range(_NUM_STEPS):
        where, batch = f"step {step}", ranks.batch(step)
        rows = ranks.gather(_local_gradients(ours.module, batch))
        for training in (ours, theirs):
            training.backward(batch)
        found, scale = _gradients(ours.module), float(rows.abs().max())
        mean, bound = _mean_of(rows)
        verdict.check(where, "mean", found, mean, bound + ranks.noise * scale, ours.module)
        expected = _gradients(theirs.module)
        verdict.check(where, "value beside torch's", found, expected, tolerance * scale, ours.module)
        for training in (ours, theirs):
            training.optimizer.step()
    for training in (ours, theirs):
        training.wrapper.eval()
        training.wrapper(ranks.batch(0))  # synchronizes the buffers
    state = ours.module.state_dict()
    for name, expected in theirs.module.state_dict().items():
        limit = tolerance * float(expected.abs().max())
        verdict.check(f"at the end, {name}", "value beside torch's", state[name], expected, limit)


# ---------------------------------------------------------------------- hooks


def _try_hook(ranks: Ranks, verdict: Verdict, *, name: str) -> None:
    """Check that a hook's result and mean residuals add up to the mean of the gradients, within rounding.

    An overflow must affect all ranks, but not the state.
    """
    _, relative, of_largest = HOOKS[name]
    training = _ours(ranks, hook=name)
    module, hook = training.module, training.hook
    for step in range(_NUM_HOOK_STEPS):
        where, batch = f"step {step}", ranks.batch(step)
        alone = _local_gradients(module, batch)
        before = hook.state_dict()
        is_over = step == _OVERFLOWS_AT
        with _overflow(module) if is_over and ranks.rank == ranks.size - 1 else nullcontext():
            training.backward(batch)
        found, after = _gradients(module), hook.state_dict()
        if is_over:
            if name != "noop":
                _check_overflow(verdict, where, found, before, after)
            continue
        rows = ranks.gather(alone + _residual(before, module))
        expected, bound = _mean_of(rows) if name != "noop" else (rows[ranks.rank], torch.zeros(1))
        kept, kept_bound = _mean_of(ranks.gather(_residual(after, module)))
        rounding = 1.1 * (relative * rows.abs().mean(0) + of_largest * rows.abs().max())
        bound = bound + kept_bound + rounding + 4 * _EPS * found.abs() + ranks.noise * float(rows.abs().max())
        verdict.check(where, "gradient plus mean residual", found + kept, expected, bound, module)
        if not bool(found.any()):
            verdict.fail(f"{where}: the gradient is zero")
        first = ranks.gather(found)[0]
        if name != "noop":
            verdict.check(where, "result beside rank 0's", found, first, 0.0, module)
        training.optimizer.step()


@contextmanager
def _overflow(module: nn.Module) -> Iterator[None]:
    """Make the gradient of the first parameter, in the last bucket, infinite in this context."""
    handle = next(module.parameters()).register_hook(lambda gradient: gradient * math.inf)
    yield
    handle.remove()


def _check_overflow(
    verdict: Verdict, where: str, found: Tensor, before: Mapping[str, Any], after: Mapping[str, Any]
) -> None:
    if math.isfinite(found[0]):
        verdict.fail(f"{where}: a gradient that overflowed on one rank is finite on another")
    if before["step"] != after["step"]:
        verdict.fail(f"{where}: a step that overflowed was counted")
    if _values(before) != _values(after):
        verdict.fail(f"{where}: a step that overflowed has changed the state")


def _values(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the tensors of a hook's state as lists, which compare by value."""
    return {n: {k: t.tolist() for k, t in of.items()} for n, of in state.get("tensors", {}).items()}


def _residual(state: Mapping[str, Any], module: nn.Module) -> Tensor:
    """Return a hook's residuals of all parameters as one flat tensor; zeros if none."""
    kept = state.get("tensors", {})
    named = module.named_parameters()
    return _flat(kept.get(name, {}).get("error", torch.zeros(p.numel())) for name, p in named)


# ---------------------------------------------------------------------- averagers


def _try_averager(ranks: Ranks, verdict: Verdict, *, name: str) -> None:
    """Check parameters after each step with the averager's formula, and that ranks agree at the end."""
    training = _ours(ranks, averager=name)
    module, averager = training.module, training.averager
    means: dict[int, Tensor] = {}  # by the local step in which the averager has to apply them
    for local_step in range(1 - _NUM_GLOBAL_STEPS, 1 + _NUM_LOCAL_STEPS):
        is_local = not averager.averages_gradients
        training.backward(ranks.batch(_NUM_GLOBAL_STEPS + local_step))
        training.optimizer.step()
        rows = ranks.gather(_flat(module.parameters())).double()
        averager.step(training.optimizer)
        if is_local and local_step % 2 == 0:
            means[local_step + AVERAGERS[name].get("delay", 0)] = rows.mean(0)
        expected, bound = rows[ranks.rank if is_local else 0], 0.0
        if local_step in means:
            expected, bound = means[local_step], _rounding(rows)
        verdict.check(f"local step {local_step}", "parameters", _flat(module.parameters()), expected, bound)
    rows = ranks.gather(_flat(module.parameters()))
    averager.agree()
    expected, bound = _mean_of(rows)[0], _rounding(rows)
    verdict.check("at the end", "agreed parameters", _flat(module.parameters()), expected, bound)
    for key, found in module.state_dict().items():
        first = ranks.gather(found.flatten())[0]
        verdict.check("at the end", f"{key} beside rank 0's", found.flatten(), first, 0.0)


def _rounding(rows: Tensor) -> float:
    """Return an upper bound of the rounding errors of a few operations on parameters."""
    return 1e-5 * float(rows.abs().max())


# ---------------------------------------------------------------------- waits of the host


def _try_host_waits(ranks: Ranks, verdict: Verdict) -> None:
    """Check that the host does not wait for the device in a steady step, except for known reasons."""
    subjects: dict[str, dict[str, Any]] = {name: {"flags": flags} for name, flags in _FLAGS.items()}
    subjects |= {f"hook {name}": {"hook": name} for name in HOOKS}
    subjects |= {f"averager {name}": {"averager": name} for name in AVERAGERS}
    batches = [ranks.batch(number) for number in range(_NUM_STEPS + _NUM_WATCHED)]
    counts = {}
    for subject, options in subjects.items():
        training = _ours(ranks, **options)
        for batch in batches[:_NUM_STEPS]:
            training.step(batch)
        torch.cuda.synchronize(ranks.device)
        counts[subject] = _num_waits(training, batches[_NUM_STEPS:])
        torch.cuda.synchronize(ranks.device)
        allowed = _NUM_WATCHED if subject in _READ_ONCE else 0
        if counts[subject] > allowed:
            verdict.fail(
                f"{subject}: {_NUM_WATCHED} steady steps made the host wait for the device"
                f" {counts[subject]} times, but at most {allowed} are expected"
            )
    total = ", ".join(f"{subject} {count}" for subject, count in counts.items() if count)
    verdict.figure = f"{len(counts)} kinds, {_NUM_WATCHED} steps each; waits: {total or 'none'}"


def _num_waits(training: _Training, batches: Sequence[Tensor]) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for batch in batches:
                training.step(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # Setting the mode warns too: it "does not yet detect all synchronizing operations".
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


# ---------------------------------------------------------------------- speed


def _try_step_time(ranks: Ranks, verdict: Verdict) -> None:
    """Time steps of this package's wrapper and of torch's in turns; put their ratio into `verdict`."""
    model = "transformer6" if ranks.device.type == "cuda" else "linear500"
    names = ("ours", "torch_ddp")
    runs = [TrainingRun(name, build_workload(model, rank=ranks.rank), ranks.device) for name in names]
    seconds = [[timed(run.step, ranks.device) for run in runs] for _ in range(_NUM_WARM_UPS)]
    pace = float(ranks.gather(torch.tensor([sum(seconds[-1])])).max())
    num_turns = int(min(_MOST_TURNS, max(_LEAST_TURNS, _TURNS_S / pace)))
    times = []
    for number in range(num_turns):
        order = (0, 1) if number % 2 else (1, 0)
        found = {index: timed(runs[index].step, ranks.device) for index in order}
        times.append((found[0], found[1]))
    # a step is over when the slowest rank has ended it
    slowest = ranks.gather(torch.tensor(times).flatten()).amax(0).view(-1, 2)
    ours, theirs = slowest.t().tolist()
    ratio = paired_ratio(ours, theirs)
    verdict.is_slow = ratio > _SLOW_RATIO
    verdict.figure = (
        f"ours / torch's DDP {ratio:.3f}, median of {num_turns} turns with {model}"
        f" ({statistics.median(ours) * 1e3:.1f} and {statistics.median(theirs) * 1e3:.1f} ms)"
    )
