"""`doctor --verify`: training of small models on this machine, compared to torch's DDP and to formulas.

A trial trains independently, from the same weights on all ranks, and has a verdict on each rank. Comparisons
come after communication, so that a rank that finds a difference does not leave the others waiting. A trial
that raises or hangs becomes a finding with its name, and later trials run in new processes. At the end a rank
of a script like a user's is killed. Over 500 lines, as all trials share models, verdicts and comparisons.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp import BucketedDDP
from lightning_ddp.averaging import available_averagers, build_averager
from lightning_ddp.hooks import available_hooks, build_hook
from lightning_ddp.tools import ToolError
from lightning_ddp.tools.command_line import paired_ratio, progress_bar
from lightning_ddp.tools.doctor.diagnosis import name_ranks
from lightning_ddp.tools.doctor.machine import Finding, Placement
from lightning_ddp.tools.doctor.references import AVERAGERS, Bucket, Claim, Rounds, hook_formula, mean_of
from lightning_ddp.tools.models import TrainingRun, build_workload, compute_loss
from lightning_ddp.tools.ranks import FAILURE_KEY, RankContext, host_store, run_ranks, synchronize, timed
from lightning_ddp.tools.scripts import run_to_fault

HOST_WAITS: Final = "host waits"
"""Name of the trial that checks whether the host waits for the device in a step."""

_BATCH_SIZE: Final = 8
_CAP_MB: Final = 0.015  # several buckets of models as small as these
_LR: Final = 0.05
_NUM_STEPS: Final = 6  # torch plans its buckets anew after the first, hooks compare themselves in two
_NUM_WATCHED: Final = 2  # one of them is the end of an averager's period
_NUM_HOOK_STEPS: Final = 7
_OVERFLOWS_AT: Final = 4
_NUM_GLOBAL_STEPS: Final = 2
_NUM_LOCAL_STEPS: Final = 7  # the last one is no end of a period
_DEVICE_NOISE: Final = 1e-6
"""Allowed difference of two backwards of the same weights and batch, relative to the largest gradient."""
_SPEED_S: Final = 4.0
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 40
_SLOW_RATIO: Final = 1.5

_WAITS_ALLOWED: Final[Mapping[str, tuple[int, str]]] = {
    f"hook {name}": (1, "reads once whether the step was finite on all ranks")
    for name in ("powersgd", "topk", "randomk", "sign")
}
"""Known waits of the host for the device in a steady step, with their reasons."""

_FLAGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "defaults": {},
    "gradient_as_bucket_view=False": {"gradient_as_bucket_view": False},
    "find_unused_parameters=True": {"find_unused_parameters": True},
    "static_graph=True": {"static_graph": True},
}
_CPU_FLAGS: Final[Mapping[str, Mapping[str, Any]]] = {"transport='gloo'": {"transport": "gloo"}}
_OURS_ALONE: Final = frozenset({"transport", "find_unused_parameters"})  # torch warns where none is unused


def _conv() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 7)),
    )


def _mlp() -> nn.Module:
    # odd sizes, so that a bucket which is not aligned shows
    layers: list[nn.Module] = []
    for width, following in ((33, 65), (65, 65), (65, 33)):
        layers += [nn.Linear(width, following), nn.LayerNorm(following), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(33, 7))


MODELS: Final[Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]] = {
    "conv": (_conv, (3, 8, 8)),
    "mlp": (_mlp, (33,)),
}
"""Small models with several buckets, and the shapes of their inputs, by name."""


@dataclass
class Verdict:
    """Result of a trial on this rank: its first problem, and the largest error otherwise."""

    problem: str | None = None
    """Description of the first problem; None without one."""
    largest: float = 0.0
    """Largest error, relative to its bound."""
    num_values: int = 0
    """Number of compared numbers."""
    figure: str | None = None
    """Text for the report instead of these; None for these."""
    is_slow: bool = False
    """True if a measured time deserves a warning."""

    def fail(self, problem: str) -> None:
        """Record a problem, unless there is one already."""
        self.problem = self.problem or problem

    def check(self, where: str, claim: Claim) -> None:
        """Compare numbers with their bounds; a non-finite number is a problem."""
        found, expected = claim.found.detach().double(), claim.expected.detach().double()
        bound = torch.as_tensor(claim.bound, dtype=torch.float64, device=found.device).expand_as(found)
        error = (found - expected).abs()
        self.num_values += found.numel()
        if not found.numel():
            return
        is_wrong = ~(error <= bound)
        if bool(is_wrong.any()):
            at = int((error - bound).nan_to_num(nan=math.inf, posinf=math.inf).flatten().argmax())
            self.fail(
                f"{where}: {claim.what} is {float(found.flatten()[at]):.6g} where"
                f" {float(expected.flatten()[at]):.6g} +/- {float(bound.flatten()[at]):.1g} is expected"
                f" ({int(is_wrong.sum())} of {found.numel()} numbers are wrong)"
            )
        else:
            share = torch.where(bound > 0, error / bound, 0.0)
            self.largest = max(self.largest, float(share.max()))

    def to_json(self) -> str:
        """Return the verdict as JSON for the parent process."""
        figure = self.figure or f"{self.num_values:,} numbers, largest error {self.largest:.0%} of its bound"
        return json.dumps({"problem": self.problem, "figure": figure, "is_slow": self.is_slow})


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Rank and device of this process."""

    rank: int
    size: int
    device: torch.device

    def build(self, model: str) -> nn.Module:
        """Build a model on the device, with the same weights on all ranks."""
        torch.manual_seed(0)
        return MODELS[model][0]().to(self.device)

    def batch(self, model: str, step: int) -> Tensor:
        """Make a batch, different on each rank and in each step."""
        generator = torch.Generator().manual_seed(1 + step * self.size + self.rank)
        return torch.randn(_BATCH_SIZE, *MODELS[model][1], generator=generator).to(self.device)

    def gather(self, row: Tensor) -> Tensor:
        """Gather the 1-D tensors of all ranks, one row per rank.

        Collective: all ranks must call it.
        """
        rows = [torch.empty_like(row) for _ in range(self.size)]
        dist.all_gather(rows, row.detach().contiguous())
        return torch.stack(rows)


Trial = Callable[[Ranks, Verdict], None]


def trials_of(device: str) -> dict[str, Trial]:
    """Return the trials for a device type by name, in running order."""
    flags = {**_FLAGS, **(_CPU_FLAGS if device == "cpu" else {})}
    found: dict[str, Trial] = {
        f"gradients, {name}": partial(_try_gradients, flags=given) for name, given in flags.items()
    }
    for name in available_hooks():
        found[f"hook {name}"] = partial(_try_hook, name=name)
    for name in available_averagers():
        found[f"averager {name}"] = partial(_try_averager, name=name)
    if device == "cuda":
        found[HOST_WAITS] = _try_host_waits
    found["step time"] = _try_step_time
    return found


def _verdict_key(name: str, rank: int) -> str:
    return f"verdict/{name}/{rank}"


def _run_trials(context: RankContext, names: Sequence[str]) -> None:
    """Run trials; store each verdict at once, so that those before a hang are not lost.

    Collective: all ranks must call it.
    """
    torch.backends.cudnn.deterministic = True
    ranks = Ranks(rank=context.rank, size=context.world_size, device=context.device)
    trials = trials_of(context.device.type)
    context.advance()
    for name in names:
        verdict = Verdict()
        trials[name](ranks, verdict)
        synchronize(context.device)
        context.store.set(_verdict_key(name, context.rank), verdict.to_json())
        dist.barrier()
        context.advance()


# ---------------------------------------------------------------------- gradients


def _local_gradients(module: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """Compute the gradients of this rank alone, without a change of the module."""
    alone = copy.deepcopy(module)
    alone.zero_grad(set_to_none=True)
    compute_loss(alone(batch)).backward()
    return {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}


def _wrap_torch(module: nn.Module, flags: Mapping[str, Any]) -> nn.Module:
    given = {"gradient_as_bucket_view": True, **flags}
    shared = {name: value for name, value in given.items() if name not in _OURS_ALONE}
    return DistributedDataParallel(module, bucket_cap_mb=_CAP_MB, **shared)


def _try_gradients(ranks: Ranks, verdict: Verdict, *, flags: Mapping[str, Any]) -> None:
    """Check that gradients are the mean of the ranks' own, and all results equal torch's DDP."""
    for model in MODELS:
        ours, theirs = ranks.build(model), ranks.build(model)
        wrappers = [BucketedDDP(ours, bucket_cap_mb=_CAP_MB, **flags), _wrap_torch(theirs, flags)]
        optimizers = [torch.optim.SGD(w.parameters(), lr=_LR, momentum=0.9) for w in wrappers]
        for step in range(_NUM_STEPS):
            batch = ranks.batch(model, step)
            alone = _local_gradients(ours, batch)
            for wrapper, optimizer in zip(wrappers, optimizers, strict=True):
                optimizer.zero_grad()
                compute_loss(wrapper(batch)).backward()
            _compare_gradients(ranks, verdict, f"{model}, step {step}", alone, ours, theirs)
            for optimizer in optimizers:
                optimizer.step()
        for wrapper in wrappers:
            wrapper.eval()
            wrapper(ranks.batch(model, 0))  # synchronizes the buffers
        expected = theirs.state_dict()
        for name, found in ours.state_dict().items():
            scale = float(expected[name].abs().max())
            _compare_with_torch(ranks, verdict, f"{model}, at the end, {name}", found, expected[name], scale)


def _compare_gradients(
    ranks: Ranks,
    verdict: Verdict,
    where: str,
    alone: Mapping[str, Tensor],
    ours: nn.Module,
    theirs: nn.Module,
) -> None:
    rows = ranks.gather(torch.cat([grad.flatten() for grad in alone.values()]))
    scale = float(rows.abs().max())
    pieces = rows.split([grad.numel() for grad in alone.values()], dim=1)
    both = zip(ours.named_parameters(), theirs.parameters(), pieces, strict=True)
    for (name, parameter), other, piece in both:
        grad, place = parameter.grad, f"{where}, {name}"
        if grad is None or other.grad is None:
            verdict.fail(f"{place}: there is no gradient")
            continue
        mean, bound = mean_of(piece)
        verdict.check(place, Claim("mean", grad.flatten(), mean, bound + _DEVICE_NOISE * scale))
        _compare_with_torch(ranks, verdict, place, grad, other.grad, scale)


def _compare_with_torch(
    ranks: Ranks, verdict: Verdict, where: str, found: Tensor, expected: Tensor, scale: float
) -> None:
    """Compare to torch: equal bits for up to two ranks, whose sums have one order; else a bound.

    The bound is relative to `scale`, the largest number of the kind, as terms of a sum may cancel.
    """
    is_exact = ranks.size <= 2 or not found.is_floating_point()
    claim = Claim("value beside torch's", found, expected, 0.0 if is_exact else 1e-5 * scale)
    verdict.check(where, claim)


# ---------------------------------------------------------------------- hooks


def _try_hook(ranks: Ranks, verdict: Verdict, *, name: str) -> None:
    """Check each step with the hook's formula; an overflow must affect all ranks, but not the state."""
    options, formula = hook_formula(name)
    for model in MODELS:
        wrapper = BucketedDDP(ranks.build(model), bucket_cap_mb=_CAP_MB)
        hook = build_hook({"name": name, **options}, wrapper.process_group, ranks.device)
        seen: list[tuple[tuple[str, ...], Tensor]] = []

        def watched(state: object, bucket: Any, hook: Any = hook, seen: Any = seen) -> Any:
            seen.append((bucket.names, bucket.buffer().clone()))
            return hook(state, bucket)

        wrapper.register_comm_hook(None, watched)
        parameters = dict(wrapper.module.named_parameters())
        optimizer = torch.optim.SGD(parameters.values(), lr=_LR)
        num_finite = 0
        for step in range(_NUM_HOOK_STEPS):
            where, batch = f"{model}, step {step}", ranks.batch(model, step)
            alone = _local_gradients(wrapper.module, batch)
            before = hook.state_dict()
            optimizer.zero_grad()
            seen.clear()
            with _overflow(wrapper, is_here=step == _OVERFLOWS_AT and ranks.rank == ranks.size - 1):
                compute_loss(wrapper(batch)).backward()
            after = hook.state_dict()
            if step == _OVERFLOWS_AT:
                if name != "noop":
                    _check_overflow(verdict, where, parameters, before, after)
                continue
            absent = parameters.keys() - {found for names, _ in seen for found in names}
            if absent:
                verdict.fail(f"{where}: no bucket has {', '.join(sorted(absent))}")
            for names, flat in seen:
                own = torch.cat([alone[n].flatten() for n in names])
                bound = _DEVICE_NOISE * float(own.abs().max())
                verdict.check(where, Claim("gradient in the bucket", flat, own, bound))
                bucket = Bucket(
                    options=options,
                    step=num_finite,
                    rank=ranks.rank,
                    rows=ranks.gather(flat + _residual(before, names, parameters)),
                    shapes=[parameters[n].shape for n in names],
                    found=torch.cat([_gradient(parameters[n]).flatten() for n in names]),
                    residual=_residual(after, names, parameters),
                )
                for claim in formula(bucket):
                    verdict.check(f"{where}, {names[0]} to {names[-1]}", claim)
                rows = ranks.gather(bucket.found)
                if name != "noop":
                    verdict.check(where, Claim("result beside rank 0's", bucket.found, rows[0], 0.0))
            num_finite += 1
            optimizer.step()


@contextmanager
def _overflow(wrapper: nn.Module, *, is_here: bool) -> Iterator[None]:
    """Make the first parameter's gradient, in the last bucket, infinite if `is_here`."""
    first = next(iter(wrapper.parameters()))
    handle = first.register_hook(lambda gradient: gradient * math.inf) if is_here else None
    yield
    if handle is not None:
        handle.remove()


def _check_overflow(
    verdict: Verdict,
    where: str,
    parameters: Mapping[str, Tensor],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
) -> None:
    first = next(iter(parameters.values()))
    if first.grad is None or bool(torch.isfinite(first.grad).all()):
        verdict.fail(f"{where}: a gradient that overflowed on one rank is finite on another")
    if before["step"] != after["step"]:
        verdict.fail(f"{where}: a step that overflowed was counted")
    kept, found = before.get("tensors", {}), after.get("tensors", {})
    for name in kept.keys() | found.keys():
        old, new = kept.get(name, {}), found.get(name, {})
        for key in old.keys() | new.keys():
            if key not in old or key not in new or not torch.equal(old[key], new[key]):
                word = {"error": "residual", "q": "factor"}.get(key, key)
                verdict.fail(f"{where}, {name}: a step that overflowed has changed the {word}")


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None  # backward has reduced the bucket
    return parameter.grad


def _residual(state: Mapping[str, Any], names: Sequence[str], parameters: Mapping[str, Tensor]) -> Tensor:
    """Return a hook's residuals of a bucket's parameters; zeros if none."""
    tensors = state.get("tensors", {})
    found = [tensors.get(name, {}).get("error", torch.zeros(parameters[name].numel())) for name in names]
    return torch.cat([piece.flatten() for piece in found]).to(parameters[names[0]].device)


# ---------------------------------------------------------------------- averagers


def _averager_options(name: str) -> Mapping[str, Any]:
    return AVERAGERS[name][0] if name in AVERAGERS else {"period": 2}


def _averager_spec(name: str, size: int) -> dict[str, Any]:
    spec = {"name": name, "start_step": _NUM_GLOBAL_STEPS, **_averager_options(name)}
    if "periods" in spec and (size <= 2 or size % 2):
        spec["periods"] = {2: 0}  # pairs would be all ranks, or leave one over
    return spec


def _try_averager(ranks: Ranks, verdict: Verdict, *, name: str) -> None:
    """Check parameters with the averager's formula after each step, and that ranks agree at the end."""
    for model in MODELS:
        module = ranks.build(model)
        wrapper = BucketedDDP(module, bucket_cap_mb=_CAP_MB)
        optimizer = torch.optim.SGD(module.parameters(), lr=_LR, momentum=0.9)
        spec = _averager_spec(name, ranks.size)
        averager = build_averager(spec, module, [optimizer], wrapper.process_group)
        rounds: Rounds | None = None
        for step in range(_NUM_GLOBAL_STEPS + _NUM_LOCAL_STEPS):
            where = f"{model}, step {step}"
            if not averager.averages_gradients and rounds is None:
                sizes = [p.numel() for p in module.parameters()]
                rounds = Rounds(options={**spec, "lr": _LR}, sizes=sizes, anchor=_flat(module).double())
            with nullcontext() if averager.averages_gradients else wrapper.no_sync():
                optimizer.zero_grad()
                compute_loss(wrapper(ranks.batch(model, step))).backward()
                optimizer.step()
            rows = ranks.gather(_flat(module)).double()
            averager.step(optimizer)
            if rounds is None:
                expected, bound = rows[0].expand_as(rows), 0.0
            elif name not in AVERAGERS:
                continue
            else:
                expected = AVERAGERS[name][1](rounds, step + 1 - _NUM_GLOBAL_STEPS, rows)
                bound = _rounding(rows)
            claim = Claim("parameters", _flat(module), expected[ranks.rank], bound)
            verdict.check(where, claim)
        _check_agreement(ranks, verdict, model, module, averager.agree)


def _flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def _rounding(rows: Tensor) -> float:
    """Return a bound of the rounding errors of a few operations on parameters."""
    return 1e-5 * float(rows.abs().max())


def _check_agreement(
    ranks: Ranks, verdict: Verdict, model: str, module: nn.Module, agree: Callable[[], object]
) -> None:
    rows = ranks.gather(_flat(module))
    before = {name: ranks.gather(buffer.flatten()) for name, buffer in module.named_buffers()}
    agree()
    where = f"{model}, at the end"
    claims = [Claim("agreed parameters", _flat(module), mean_of(rows)[0], _rounding(rows))]
    for name, buffer in module.named_buffers():
        values = before[name].double()
        if not buffer.is_floating_point():
            expected = values.amax(0)
        elif name.endswith("running_var"):  # that of the data of all ranks taken together
            means = before[name.replace("running_var", "running_mean")].double()
            expected = (values + (means - means.mean(0)).square()).mean(0)
        else:
            expected = values.mean(0)
        claims.append(Claim(f"buffer {name}", buffer.flatten(), expected, _rounding(values)))
    for claim in claims:
        verdict.check(where, claim)
        first = ranks.gather(claim.found)[0]
        verdict.check(where, Claim(f"{claim.what} beside rank 0's", claim.found, first, 0.0))


# ---------------------------------------------------------------------- waits of the host


def _try_host_waits(ranks: Ranks, verdict: Verdict) -> None:
    """Check that the host does not wait for the device in a steady step, except for known reasons."""
    counts = {}
    for subject, make_step in _steps_to_watch(ranks).items():
        step = make_step()
        for number in range(_NUM_STEPS):
            step(number)
        torch.cuda.synchronize(ranks.device)
        counts[subject] = _num_waits(step)
        torch.cuda.synchronize(ranks.device)
        allowed, reason = _WAITS_ALLOWED.get(subject, (0, "none is known"))
        if counts[subject] > allowed * _NUM_WATCHED:
            verdict.fail(
                f"{subject}: {_NUM_WATCHED} steady steps made the host wait for the device"
                f" {counts[subject]} times, but at most {allowed * _NUM_WATCHED} are expected ({reason})"
            )
    total = ", ".join(f"{subject} {count}" for subject, count in counts.items() if count)
    verdict.figure = f"{len(counts)} kinds, {_NUM_WATCHED} steps each; waits: {total or 'none'}"


def _num_waits(step: Callable[[int], None]) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for number in range(_NUM_STEPS, _NUM_STEPS + _NUM_WATCHED):
                step(number)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # Setting the mode warns too: it "does not yet detect all synchronizing operations".
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


def _steps_to_watch(ranks: Ranks) -> dict[str, Callable[[], Callable[[int], None]]]:
    return {
        **{name: partial(_step_of, ranks, flags) for name, flags in _FLAGS.items()},
        **{f"hook {name}": partial(_step_of, ranks, {}, hook=name) for name in available_hooks()},
        **{f"averager {n}": partial(_step_of, ranks, {}, averager=n) for n in available_averagers()},
    }


def _step_of(
    ranks: Ranks, flags: Mapping[str, Any], *, hook: str | None = None, averager: str | None = None
) -> Callable[[int], None]:
    """Build wrapper, optimizer and averager; return a function that does a step.

    Collective: all ranks must call it.
    """
    wrapper = BucketedDDP(ranks.build("mlp"), bucket_cap_mb=_CAP_MB, **flags)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=_LR)
    batches = [ranks.batch("mlp", number) for number in range(_NUM_STEPS + _NUM_WATCHED)]
    if hook is not None:
        spec = {"name": hook, **hook_formula(hook)[0]}
        wrapper.register_comm_hook(None, build_hook(spec, wrapper.process_group, ranks.device))
    averaging = None
    if averager is not None:
        spec = _averager_spec(averager, ranks.size)
        averaging = build_averager(spec, wrapper.module, [optimizer], wrapper.process_group)

    def step(number: int) -> None:
        is_local = averaging is not None and not averaging.averages_gradients
        with wrapper.no_sync() if is_local else nullcontext():
            optimizer.zero_grad()
            compute_loss(wrapper(batches[number])).backward()
            optimizer.step()
        if averaging is not None:
            averaging.step(optimizer)

    return step


# ---------------------------------------------------------------------- speed


def _try_step_time(ranks: Ranks, verdict: Verdict) -> None:
    """Time steps of this package's wrapper and of torch's in turns."""
    model = "transformer6" if ranks.device.type == "cuda" else "linear500"
    names = ("ours", "torch_ddp")
    runs = [TrainingRun(name, build_workload(model, rank=ranks.rank), ranks.device) for name in names]
    seconds = [[timed(run.step, ranks.device) for run in runs] for _ in range(3)]
    pace = torch.tensor([sum(seconds[-1])], device=ranks.device)
    dist.all_reduce(pace, dist.ReduceOp.MAX)
    num_rounds = int(min(_MOST_ROUNDS, max(_LEAST_ROUNDS, _SPEED_S / float(pace))))
    times = []
    for number in range(num_rounds):
        order = (0, 1) if number % 2 else (1, 0)
        found = {index: timed(runs[index].step, ranks.device) for index in order}
        times.append((found[0], found[1]))
    # a step is over when the slowest rank has ended it
    slowest = ranks.gather(torch.tensor(times, device=ranks.device).flatten()).amax(0).view(-1, 2)
    ours, theirs = slowest.t().tolist()
    ratio = paired_ratio(ours, theirs)
    verdict.is_slow = ratio > _SLOW_RATIO
    verdict.figure = (
        f"ours / torch's DDP {ratio:.3f}, median of {num_rounds} turns with {model}"
        f" ({statistics.median(ours) * 1e3:.1f} and {statistics.median(theirs) * 1e3:.1f} ms)"
    )


# ---------------------------------------------------------------------- start of the trials

KILLED = "killed rank"
"""Name of the check that kills a rank of a script."""

_STARTING = 4
"""Number of time limits that the start of processes may take, as a cold file cache makes it slow."""
_MOST_STARTS = 3
_DEFAULT_CPU_RANKS = 2
_MOST_TEXT = 300


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Settings of a verification."""

    world_size: int
    """Number of ranks, all on this machine."""
    device: str
    """'cpu' or 'cuda'."""
    timeout_s: float
    """Time limit of each trial in seconds."""
    preload: str | None = None
    """Python file that each rank runs first, or None."""
    only: tuple[str, ...] = ()
    """Beginnings of the names of the checks to run; empty for all."""

    @classmethod
    def of(cls, args: argparse.Namespace) -> Verification:
        """Read the options, with defaults: all GPUs if there are any, else two CPU ranks."""
        num_gpus = torch.cuda.device_count()
        device = args.device or ("cuda" if num_gpus else "cpu")
        default = max(num_gpus, 1) if device == "cuda" else _DEFAULT_CPU_RANKS
        return cls(
            world_size=args.processes or default,
            device=device,
            timeout_s=args.timeout_s,
            preload=args.preload,
            only=tuple(args.only),
        )

    def checks(self) -> list[str]:
        """Return the names of the checks, in order: the trials, then the others."""
        names = dict.fromkeys([*trials_of(self.device), HOST_WAITS, KILLED])
        return [name for name in names if not self.only or name.startswith(self.only)]


def refusal(placement: Placement) -> Finding | None:
    """Return a finding if this process was started with others and so cannot verify; else None."""
    if placement.world_size == 1:
        return None
    return Finding(
        "FAIL",
        "verify",
        f"{placement.world_size} processes have been started ({placement.starter}), but --verify starts"
        " those of one machine itself. Run `python -m lightning_ddp doctor --verify` once on each node,"
        " without torchrun, and with one task in srun; without --verify `doctor` checks all of them",
    )


def run_checks(wanted: Verification) -> list[Finding]:
    """Run all checks and return one finding for each; leave no process."""
    num_gpus = torch.cuda.device_count()
    if wanted.device == "cuda" and num_gpus < wanted.world_size:
        message = f"{wanted.world_size} ranks need as many GPUs, found {num_gpus}"
        return [Finding("FAIL", "verify", f"{message}: see --processes and --device cpu")]
    names = wanted.checks()
    if not names:
        return [Finding("FAIL", "verify", f"no check begins with {' or '.join(wanted.only)}")]
    trials = trials_of(wanted.device)
    remaining = [name for name in names if name in trials]
    findings: list[Finding] = []
    with progress_bar(len(names), "verify") as bar:
        for _ in range(_MOST_STARTS):
            if not remaining:
                break
            found = list(_try(wanted, remaining, bar))
            findings += found
            remaining = remaining[len(found) :]
        findings += [Finding("FAIL", name, f"not run, after {_MOST_STARTS} failures") for name in remaining]
        if HOST_WAITS in names and HOST_WAITS not in trials:
            message = "not applicable: a CPU has no device for the host to wait for"
            findings.append(Finding("PASS", HOST_WAITS, message))
        if KILLED in names:
            findings.append(_kill_a_rank(wanted))
    return findings


def _watcher(wanted: Verification, store: Any, bar: Any) -> Callable[[int], None]:
    """Return a callback that raises once a trial takes too long or a rank has failed."""
    has_started, since = False, time.monotonic()

    def look(count: int) -> None:
        nonlocal has_started, since
        if count:  # the first unit of progress is that of the start
            bar.update(count - (not has_started))
            has_started, since = True, time.monotonic()
        limit = wanted.timeout_s * (1 if has_started else _STARTING)
        if time.monotonic() - since > limit:
            raise ToolError(
                f"not finished after {limit:g} s: the ranks wait for each other, or still compute"
            )
        if store.check([FAILURE_KEY]):  # the process itself may hang in the end of its group
            raise ToolError(store.get(FAILURE_KEY).decode())

    return look


def _try(wanted: Verification, names: Sequence[str], bar: Any) -> Iterator[Finding]:
    """Run trials in new processes; yield a finding for each, up to a trial that stopped the ranks."""
    # Waits in the ranks must not time out before the deadline here.
    longest_s = wanted.timeout_s * (len(names) + 2 * _STARTING)
    store = host_store(longest_s)
    # A fork saves the imports, but CUDA, which the search for GPUs initializes, does not support it.
    start_method = "spawn" if wanted.device == "cuda" or torch.cuda.is_initialized() else "fork"
    problem: str | None = None
    try:
        run_ranks(
            _run_trials,
            tuple(names),
            world_size=wanted.world_size,
            device=wanted.device,
            timeout_s=longest_s,
            on_progress=_watcher(wanted, store, bar),
            store=store,
            preload=wanted.preload,
            start_method=start_method,
        )
    except ToolError as error:
        problem = _shorten(str(error))
    for name in names:
        ranks = range(wanted.world_size)
        keys = {r: _verdict_key(name, r) for r in ranks}
        verdicts = {r: json.loads(store.get(key)) for r, key in keys.items() if store.check([key])}
        missing = [rank for rank in ranks if rank not in verdicts]
        if missing:
            there = f"{name_ranks(missing)} did not finish: {problem}"
            yield Finding("FAIL", name, "; ".join([*_problems(verdicts), there]))
            return
        problems, first = _problems(verdicts), verdicts[0]
        if problems:
            yield Finding("FAIL", name, "; ".join(problems))
        elif first["is_slow"]:
            message = f"{first['figure']}. The machine may be busy; `bench step` measures more"
            yield Finding("WARN", name, message)
        else:
            yield Finding("PASS", name, first["figure"])


def _problems(verdicts: dict[int, dict[str, Any]]) -> list[str]:
    """Return the problems, each with its ranks."""
    found: dict[str, list[int]] = {}
    for rank, verdict in verdicts.items():
        if verdict["problem"] is not None:
            found.setdefault(verdict["problem"], []).append(rank)
    return [f"{name_ranks(ranks)}: {problem}" for problem, ranks in found.items()]


def _shorten(text: str) -> str:
    """Return the first line of an error, and the last, which has the exception."""
    lines = [line.strip() for line in text.strip().splitlines()]
    return (lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}")[:_MOST_TEXT]


def _kill_a_rank(wanted: Verification) -> Finding:
    """Kill a rank of a script; check that all others name it and all processes exit."""
    victim = wanted.world_size - 1
    if not victim:
        return Finding("PASS", KILLED, "not applicable: one rank has no peers")
    try:
        found = run_to_fault(
            "custom_ddp",
            wanted.world_size,
            fault="kill",
            victim=victim,
            timeout_s=wanted.timeout_s * _STARTING / 2,
            accelerator=wanted.device,
            preload=wanted.preload,
        )
    except ToolError as error:
        return Finding("FAIL", KILLED, _shorten(str(error)))
    expected = f"PeerFailure of {victim}"
    raised = {rank: found.raised.get(rank, "nothing") for rank in range(victim)}
    problems = [
        f"rank {rank} raised {what}, expected {expected}" for rank, what in raised.items() if what != expected
    ]
    if found.num_left:
        problems.append(f"{found.num_left} processes were left after {found.gone_s:.0f} s and were killed")
    if found.exit_code == 0:
        problems.append("the script ended with exit code 0")
    if problems:
        return Finding("FAIL", KILLED, f"rank {victim} was killed in training: {'; '.join(problems)}")
    return Finding(
        "PASS",
        KILLED,
        f"rank {victim} was killed in training; {name_ranks(range(victim))} raised PeerFailure that names"
        f" it within {max(found.learned_s):.2f} s, all processes had exited after {found.gone_s:.2f} s",
    )
