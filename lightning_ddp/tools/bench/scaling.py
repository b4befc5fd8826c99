"""Step time and efficiency with more ranks, predicted from recorded steps and a fitted link.

Two ranks here record a model of `bench step` without communication, time collectives alone, and measure the
hooks; or the steps are recorded ones of a user. Steps of the two ranks are predicted and measured as well.

A `StepProfile` has the computation of the ranks, from recorded steps; a `Link` the cost of a collective.
`schedule` puts the buckets on the link, one after the other, and all predictions follow from it.
"""

from __future__ import annotations

import argparse
import ast
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch
import torch.distributed as dist

from lightning_ddp.averaging import AveragerPlan, parse_averager
from lightning_ddp.averaging.local_sgd import HierarchicalSGDOptions
from lightning_ddp.ddp.bucket import bucket_caps_bytes
from lightning_ddp.encoding.mean import CHUNK_NUMEL
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.hooks import parse_hook
from lightning_ddp.telemetry.timeline import Recording, load_folder
from lightning_ddp.tools import ToolError
from lightning_ddp.tools.bench import Benchmark, Result
from lightning_ddp.tools.bench.step import NONE, median, merge_ranks, time_hooks
from lightning_ddp.tools.command_line import (
    add_shared,
    format_table,
    positive_float,
    positive_int,
    save_panels,
)
from lightning_ddp.tools.models import MODEL_NAMES, MODELS_HELP
from lightning_ddp.tools.ranks import RankContext, run_ranks, timed
from lightning_ddp.tools.recorded_run import record_steps

_HOOKS: Final = (NONE, "bf16", "int8", "powersgd:rank=4", "topk:ratio=0.01")
_AVERAGERS: Final = ("post_local_sgd:period=8", "streaming_diloco:period=100")
_CAPS_MB: Final = (1.0, 5.0, 25.0, 100.0)
_RANKS: Final = tuple(2**power for power in range(13))
_GATHERING: Final = ("topk", "sign")
"""Hooks whose ranks get the data of each rank."""
_NO_EXCHANGE: Final = "computation"  # measured in turns with the hooks
_NUM_RANKS: Final = 2  # that measure
_NUM_PROBES: Final = 6
_BURST_BYTES: Final = 1_048_576
_PROBE_BYTES: Final = (4_096, 65_536, 262_144, 1_048_576, 4_194_304)
_GLOO_IN_FLIGHT: Final = 2  # threads of a gloo group of torch
_NS_PER_S = 1e9
_CHUNK_BYTES = 4 * CHUNK_NUMEL
_SIZE_RATIO = {"fp32": 1.0, "bf16": 0.5, "int8": 0.25 + 1 / 256}
"""Size of outer gradients relative to float32; int8 has a 4-byte scale for 256 elements."""

# ---------------------------------------------------------------------- computation of the ranks


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """Times of one step, each of the slowest rank, in seconds since its forward began."""

    backward_start_s: float
    """Time at which the first gradient is computed."""
    ready: tuple[tuple[int, float], ...]
    """Bytes of each bucket, and time at which its last gradient is computed; in launch order."""
    backward_end_s: float
    """Time at which all gradients are computed."""
    rest_s: float
    """Duration from the end of the collectives to the next forward: `.grad`, optimizer, next batch."""

    @property
    def compute_s(self) -> float:
        """Duration of a step without communication, in seconds."""
        return self.backward_end_s + self.rest_s

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for num_bytes, _ in self.ready)

    @classmethod
    def from_recordings(cls, recordings: Sequence[Recording]) -> StepProfile:
        """Return the median over steps of the slowest rank's times, from some ranks' recordings of one run.

        A collective begins once the slowest rank has called it, so the latest time of all ranks counts. Steps
        with other buckets than the last one, and steps that some ranks lack, are left out.
        """
        by_rank = [_moments_of(recording) for recording in recordings]
        common = set(by_rank[0]).intersection(*by_rank[1:])
        if not common:
            raise ConfigurationError(
                "the ranks have recorded no two consecutive steps in common. Record more steps"
                " (CommunicationMonitor)"
            )
        steps = ([moments[number] for moments in by_rank] for number in common)
        slowest = [[max(column) for column in zip(*ranks, strict=True)] for ranks in steps]
        start, end, rest, *ready = (statistics.median(column) for column in zip(*slowest, strict=True))
        sizes = [bucket.num_bytes for bucket in recordings[0].steps[-1].buckets]
        return cls(
            backward_start_s=start,
            ready=tuple(zip(sizes, accumulate(ready, max), strict=True)),
            backward_end_s=max(end, *ready),
            rest_s=max(0.0, rest),
        )

    def scaled(self, factor: float) -> StepProfile:
        """Return this step on ranks that compute `factor` times as long."""
        start, end, rest = (factor * s for s in (self.backward_start_s, self.backward_end_s, self.rest_s))
        ready = tuple((num_bytes, factor * s) for num_bytes, s in self.ready)
        return replace(self, backward_start_s=start, ready=ready, backward_end_s=end, rest_s=rest)

    def rebucketed(self, caps_bytes: Sequence[int]) -> StepProfile:
        """Return this step with its gradients in buckets of `caps_bytes` bytes, the last size repeated.

        Gradients are assumed to arrive evenly between the known moments.
        """
        sizes: list[int] = []
        while (rest := self.num_bytes - sum(sizes)) > 0:
            sizes.append(min(rest, caps_bytes[min(len(sizes), len(caps_bytes) - 1)]))
        known = [(0, self.backward_start_s)]
        known += zip(accumulate(n for n, _ in self.ready), (s for _, s in self.ready), strict=True)
        moments = (_interpolate(known, reached) for reached in accumulate(sizes))
        return replace(self, ready=tuple(zip(sizes, moments, strict=True)))


def _moments_of(recording: Recording) -> dict[int, list[float]]:
    """Return times of a rank's backward and buckets in seconds, by step; leave out incomplete steps.

    Since its forward: begin and end of backward; then from the last bucket to the next forward; each `ready`.
    """
    sizes = [bucket.num_bytes for step in recording.steps[-1:] for bucket in step.buckets]
    found = {}
    for step, after in pairwise(recording.steps):
        ready, done = ([getattr(b, name) for b in step.buckets] for name in ("ready", "done"))
        moments = [step.forward_start, step.backward_start, step.backward_end, *ready, *done]
        is_complete = None not in (*moments, after.forward_start) and after.step == step.step + 1
        if is_complete and sizes and sizes == [bucket.num_bytes for bucket in step.buckets]:
            start, end, *of_buckets = ((m - step.forward_start) / _NS_PER_S for m in moments[1:])
            rest = (after.forward_start - max(step.backward_end, *done)) / _NS_PER_S
            found[step.step] = [start, end, rest, *of_buckets[: len(sizes)]]
    return found


def _interpolate(known: Sequence[tuple[int, float]], reached: int) -> float:
    for (low, early), (high, late) in pairwise(known):
        if low < high and reached <= high:
            return early + (reached - low) / (high - low) * (late - early)
    return known[-1][1]


# ---------------------------------------------------------------------- cost of a collective


def fit_line(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fit `latency + bytes * slope` to samples by relative least squares; return both, not negative.

    Relative errors, as the samples (bytes, seconds) span several magnitudes.
    """
    if not samples or min(seconds for _, seconds in samples) <= 0:
        raise ConfigurationError(f"samples {list(samples)!r}: expected bytes with seconds above 0")
    # least squares of  latency / t + slope * n / t = 1
    rows = [(1 / seconds, num_bytes / seconds) for num_bytes, seconds in samples]
    a, b = map(sum, zip(*rows, strict=True))
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        latency_s, slope = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
        if latency_s < 0:
            return 0.0, b / bb
        if slope >= 0:
            return latency_s, slope
    return a / aa, 0.0


class HookCost(NamedTuple):
    """Cost of a hook with two ranks: bytes sent, and seconds to encode and decode, per byte of gradients."""

    size_ratio: float
    codec_s: float
    gathers: bool
    """True if a rank sends and decodes the data of all ranks, which does not shrink when it is summed."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """Model of a full-duplex link between neighboring ranks; all links are equal.

    A message takes its latency plus a time per byte (Hockney, Parallel Computing 20, 1994).
    """

    latency_s: float
    seconds_per_byte: float
    algorithm: Literal["ring", "tree"] = "ring"
    """`ring`: 2 (N-1) hops with 1/N of the bytes each, as in gloo, and in NCCL with large tensors. `tree`:
    two binary trees that share the bytes, 2 log2(N) hops, as in NCCL with many ranks; not for gathers."""
    num_in_flight: int = 1
    """Number of collectives in progress at once, whose bytes pass the link one after the other."""
    cpu_seconds_per_byte: float = 0.0
    """CPU seconds of a rank per byte that it sends: kernel, gloo and the sum."""
    cores: float = math.inf
    """Cores of a rank, shared by backward, the hook and the CPU work of sending; infinity if they do not
    compete, as on a GPU with its own network card."""

    def costs(self, num_bytes: float, num_ranks: int, hook: HookCost | None) -> tuple[float, float, float]:
        """Return a bucket's seconds of encoding and latency, its seconds on the link, and its CPU seconds."""
        others = num_ranks - 1
        num_hops, sent, codec_s = 2.0 * others, 2 * others / num_ranks * num_bytes, 0.0
        if hook is not None and others:
            sent, codec_s = sent * hook.size_ratio, hook.codec_s * num_bytes
        if hook is not None and hook.gathers:
            num_hops, sent, codec_s = others, sent * num_ranks / 2, codec_s * num_ranks / 2
        elif self.algorithm == "tree":
            num_hops = 2.0 * math.ceil(math.log2(num_ranks))
        cpu_s = sent * self.cpu_seconds_per_byte
        link_s = max(sent * self.seconds_per_byte, cpu_s)  # no faster than the CPU
        return codec_s + num_hops * self.latency_s, link_s, codec_s + cpu_s


def schedule(
    ready: Sequence[tuple[float, float]], link: Link, num_ranks: int, hook: HookCost | None = None
) -> tuple[list[float], float]:
    """Simulate the collectives of equal ranks; return the end of each, and a rank's CPU seconds for all.

    `ready` has the bytes of each collective, and the second from which it may begin. A hook has one thread,
    which handles one bucket after the other.
    """
    num_in_flight = link.num_in_flight if hook is None else 1
    done_s, total_cpu_s = [0.0] * num_in_flight, 0.0
    for num_bytes, ready_s in ready:
        before_s, link_s, cpu_s = link.costs(num_bytes, num_ranks, hook)
        begun_s = max(ready_s, done_s[-num_in_flight]) + before_s
        done_s.append(max(begun_s, done_s[-1]) + link_s)
        total_cpu_s += cpu_s
    return done_s[num_in_flight:], total_cpu_s


# ---------------------------------------------------------------------- duration of a step


def predict(profile: StepProfile, link: Link, num_ranks: int, hook: HookCost | None = None) -> float:
    """Return the predicted seconds of a step if the reducer, or a hook, averages the gradients."""
    done_s, cpu_s = schedule(profile.ready, link, num_ranks, hook)
    end_s = max(profile.backward_end_s, done_s[-1], (profile.backward_end_s + cpu_s) / link.cores)
    return end_s + profile.rest_s


def predict_averager(profile: StepProfile, plan: AveragerPlan, link: Link, num_ranks: int) -> float:
    """Return the predicted mean seconds of a step if ranks train locally, with parameters averaged by `plan`.

    Parameters are assumed to have as many bytes as gradients. The averager's own arithmetic, buffers and
    averaged optimizer state are not included.
    """
    options = plan.options
    num_fragments = getattr(options, "num_fragments", 1)
    size_ratio = _SIZE_RATIO[getattr(options, "encoding", "fp32")]
    num_bytes = int(size_ratio * profile.num_bytes / num_fragments)
    chunks = [(min(_CHUNK_BYTES, num_bytes - at), 0.0) for at in range(0, num_bytes, _CHUNK_BYTES)]
    done_s, _ = schedule(chunks, link, num_ranks)
    hidden_s = getattr(options, "delay", 0) * profile.compute_s
    exposed_s: float = max(0.0, done_s[-1] - hidden_s) * num_fragments / options.period
    return profile.compute_s + exposed_s


# ---------------------------------------------------------------------- measured here


class Calibration(NamedTuple):
    """Measurements of two ranks on this machine: steps without communication, their link, costs of hooks."""

    profile: StepProfile
    link: Link
    hooks: dict[str, HookCost | None]
    checks_ms: dict[str, tuple[float, float]]
    """Predicted and measured milliseconds of a step, by hook."""


def calibrate(args: argparse.Namespace, specs: dict[str, Any]) -> Calibration:
    """Measure steps, link and hooks with two ranks on this machine; a spec of None stands for no hook."""
    with tempfile.TemporaryDirectory(prefix="lightning_ddp_scaling_") as folder:
        arguments = args.model, folder, args.steps, {**specs, _NO_EXCHANGE: "noop"}
        options = {"device": args.device, "timeout_s": args.timeout_s, "mbit": args.link}
        found = run_ranks(_calibrate, *arguments, world_size=_NUM_RANKS, **options)
        profile = StepProfile.from_recordings(load_folder(Path(folder)))
    link = fit_link([row for rank in found for row in rank["probes"]], is_cpu=args.device == "cpu")
    rows = merge_ranks([rank["rows"] for rank in found])
    profile = profile.scaled(median(rows[_NO_EXCHANGE], "seconds") / profile.compute_s)  # the load may differ
    hooks, checks_ms = {}, {}
    for text, spec in specs.items():
        hooks[text] = None if spec is None else _hook_cost(spec["name"], rows[text], profile.num_bytes)
        predicted_s = predict(profile, link, _NUM_RANKS, hooks[text])
        checks_ms[text] = 1e3 * predicted_s, 1e3 * median(rows[text], "seconds")
    return Calibration(profile, link, hooks, checks_ms)


def _hook_cost(name: str, rows: Sequence[Mapping[str, float]], num_bytes: int) -> HookCost:
    sent, codec_s = (median(rows, key) / num_bytes for key in ("counted_bytes", "codec_seconds"))
    return HookCost(size_ratio=sent, codec_s=codec_s, gathers=name in _GATHERING)


def fit_link(probes: Sequence[Sequence[float]], *, is_cpu: bool) -> Link:
    """Fit a link model to timed all-reduces of two ranks, each taken as two messages of half the bytes."""
    medians = {
        size: statistics.median(seconds for num_bytes, seconds, _ in probes if num_bytes == size)
        for size in _PROBE_BYTES
    }
    both_s, seconds_per_byte = fit_line(list(medians.items()))
    link, largest = Link(latency_s=both_s / 2, seconds_per_byte=seconds_per_byte), max(_PROBE_BYTES)
    if not is_cpu:
        return link
    cpu_s = statistics.median(of_cpu for num_bytes, _, of_cpu in probes if num_bytes == largest)
    cores = (os.cpu_count() or 1) / _NUM_RANKS
    return replace(link, num_in_flight=_GLOO_IN_FLIGHT, cpu_seconds_per_byte=cpu_s / largest, cores=cores)


def _calibrate(
    context: RankContext, model: str, folder: str, num_steps: int, hooks: Mapping[str, Any]
) -> dict[str, Any]:
    record_steps(context, model, folder, num_steps, communicates=False)
    probes = [_probe(size, context.device) for _ in range(_NUM_PROBES) for size in _PROBE_BYTES]
    return {"probes": probes, "rows": time_hooks(context, model, hooks, num_steps)}


def _probe(size: int, device: torch.device) -> tuple[float, float, float]:
    """Run an all-reduce of `size` bytes; return its bytes, seconds and CPU seconds."""
    tensor = torch.zeros(size // 4, device=device)
    dist.all_reduce(torch.zeros(_BURST_BYTES // 4, device=device))  # uses up the credit of an idle link
    cpu_s = time.process_time()
    seconds = timed(partial(dist.all_reduce, tensor), device)
    return float(size), seconds, time.process_time() - cpu_s


# ---------------------------------------------------------------------- the command


def _options(parser: argparse.ArgumentParser) -> None:
    text = f"model to train: {MODELS_HELP} (default: %(default)s)"
    parser.add_argument("--model", choices=MODEL_NAMES, metavar="MODEL", default="transformer6", help=text)
    text = "folder that CommunicationMonitor(timeline=FOLDER) has written, to predict for its steps"
    parser.add_argument("--from-timeline", type=Path, metavar="FOLDER", help=text)
    add_shared(parser, device="cpu", timeout_s=900.0)
    for name, metavar, text in (
        ("--latency-us", "US", "latency of a message in microseconds (default: as between the ranks here)"),
        ("--gbit", "GBIT", "Gbit/s in each direction (default: as between the ranks here)"),
        ("--link", "MBIT", "put the ranks here into two network namespaces on such a link (Linux, as root)"),
    ):
        parser.add_argument(name, type=positive_float, metavar=metavar, help=text)
    text = "algorithm of all-reduces (default: %(default)s)"
    parser.add_argument("--algorithm", choices=("ring", "tree"), default="ring", help=text)
    text = "recorded steps (default: %(default)s)"
    parser.add_argument("--steps", type=positive_int, default=10, metavar="N", help=text)
    for name, metavar, kind, default, text in (
        ("--ranks", "N", positive_int, _RANKS, "numbers of ranks"),
        ("--hooks", "HOOK", str, _HOOKS, "hooks to compare, as NAME or NAME:option=value,option=value"),
        ("--averagers", "AVERAGER", str, _AVERAGERS, "averagers to compare, in the same form"),
        ("--bucket-caps-mb", "MIB", positive_float, _CAPS_MB, "values of bucket_cap_mb to compare, in MiB"),
    ):
        shown = " ".join(str(value).removesuffix(".0") for value in default)
        text = f"{text} (default: {shown})"
        parser.add_argument(name, nargs="*", type=kind, default=list(default), metavar=metavar, help=text)


def parse_contender(text: str) -> dict[str, Any]:
    """Return name and options of a hook or an averager, given such as `powersgd:rank=4,start_step=0`."""
    name, _, options = text.partition(":")
    try:
        pairs = (pair.split("=") for pair in options.split(",") if pair)
        return {"name": name, **{key: ast.literal_eval(value) for key, value in pairs}}
    except (SyntaxError, ValueError) as error:
        message = f"{text!r}: expected NAME:option=value,option=value; text in quotes"
        raise ConfigurationError(message) from error


def _measure(args: argparse.Namespace) -> Result:
    specs = {text: None if text == NONE else parse_contender(text) for text in args.hooks}
    for spec in filter(None, specs.values()):
        parse_hook(spec)  # refuses mistakes before anything is measured
    plans = {text: parse_averager(parse_contender(text)) for text in args.averagers}
    if any(isinstance(plan.options, HierarchicalSGDOptions) for plan in plans.values()):
        raise ConfigurationError("hierarchical_sgd: links between groups are not modeled")
    recorded = None
    if args.from_timeline is not None:
        if None in (args.latency_us, args.gbit):
            raise ToolError("--from-timeline needs the network. Pass --latency-us and --gbit")
        recorded = StepProfile.from_recordings(load_folder(args.from_timeline))

    here = calibrate(args, specs)
    given: dict[str, Any] = {"algorithm": args.algorithm}
    if args.latency_us is not None:
        given["latency_s"] = args.latency_us / 1e6
    if args.gbit is not None:
        given["seconds_per_byte"] = 8e-9 / args.gbit
    link = replace(here.link, **given) if recorded is None else Link(**given)
    profile = recorded or here.profile
    contenders: dict[str, Callable[[int], float]] = {
        text: partial(predict, profile, link, hook=hook) for text, hook in here.hooks.items()
    }
    contenders |= {text: partial(predict_averager, profile, plan, link) for text, plan in plans.items()}
    for cap_mb in args.bucket_caps_mb:
        buckets = profile.rebucketed(bucket_caps_bytes(cap_mb))
        contenders[f"bucket_cap_mb={cap_mb:g}"] = partial(predict, buckets, link)

    def of_ranks(step_s: Callable[[int], float], num_ranks: int) -> dict[str, float]:
        seconds = step_s(num_ranks)
        return {"num_ranks": num_ranks, "step_s": seconds, "efficiency": profile.compute_s / seconds}

    return Result(
        settings={k: v for k, v in vars(args).items() if v is None or isinstance(v, (int, float, str, list))},
        extra={
            "steps": str(args.from_timeline or args.model),
            "hop": {"latency_s": link.latency_s, "seconds_per_byte": link.seconds_per_byte},
            "predictions": {name: [of_ranks(of, n) for n in args.ranks] for name, of in contenders.items()},
            "checks_ms": here.checks_ms,
        },
    )


def _format(result: Result) -> str:
    settings: Any = result.settings
    headers, predictions = list(map(str, settings["ranks"])), result.extra["predictions"]
    blocks = []
    for title, key, factor in (("efficiency, %", "efficiency", 100), ("step, ms", "step_s", 1e3)):
        rows = [(name, *(f"{factor * p[key]:.1f}" for p in of)) for name, of in predictions.items()]
        blocks.append(f"{title}, by ranks\n{format_table(('contender', *headers), rows)}")
    checks = [(name, *ms, ms[0] / ms[1]) for name, ms in result.extra["checks_ms"].items()]
    table = format_table(("contender", "predicted ms", "measured ms", "ratio"), checks)
    blocks.append(f"{settings['model']}, two ranks on the link between them here\n{table}")
    hop = result.extra["hop"]
    blocks.append(
        f"steps: {result.extra['steps']}; a message: {1e6 * hop['latency_s']:.1f} us"
        f" + {1e9 * hop['seconds_per_byte']:.3g} ns per byte, {settings['algorithm']}\n"
        "assumed: equal ranks and links without stragglers or other jobs, hooks as fast as on this machine,"
        " averagers without arithmetic of their own"
    )
    return "\n\n".join(blocks)


def _draw(result: Result, path: Path, *, unit: str, title: str) -> None:
    """Draw the predicted efficiency over the number of ranks, with a line per contender; save the picture."""

    def draw_panel(axes: Any) -> None:
        ticks: Any = result.settings["ranks"]
        for name, predictions in result.extra["predictions"].items():
            axes.plot(ticks, [100 * p["efficiency"] for p in predictions], marker=".", label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, list(map(str, ticks)), rotation=45)
        axes.set(xlabel="ranks", ylabel=f"efficiency ({unit})", ylim=(0, 102))
        axes.legend(fontsize=8)

    save_panels(path, {result.extra["steps"]: draw_panel}, title=title)


SCALING: Final = Benchmark(
    name="scaling",
    summary="Predict step time and efficiency with more ranks, hooks and buckets, from measured steps.",
    unit="%",
    options=_options,
    measure=_measure,
    table=_format,
    draw=_draw,
    title="speed of N ranks / N times that of one",
)
