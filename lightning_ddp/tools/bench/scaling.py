"""Step time and efficiency with more ranks, and the buckets to use, predicted from recorded steps.

Records a model of `bench step` without communication and times collectives alone, or reads the folder that
`CommunicationMonitor(timeline=folder)` has written, and simulates the step with any number of ranks: each
bucket becomes ready, is encoded, and passes a link with a latency and a bandwidth. The sizes of the buckets
for the shortest step are printed as a `bucket_cap_mb_list`.
"""

from __future__ import annotations

import argparse
import ast
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from lightning_ddp.averaging import parse_averager
from lightning_ddp.comm.group import Group
from lightning_ddp.ddp.layout import bucket_caps_bytes
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.hooks import parse_hook
from lightning_ddp.telemetry.timeline import load_folder
from lightning_ddp.tools import ToolError
from lightning_ddp.tools.bench import Benchmark, Result
from lightning_ddp.tools.command_line import (
    add_shared,
    format_table,
    positive_float,
    positive_int,
    progress_bar,
)
from lightning_ddp.tools.drawing import save_panels
from lightning_ddp.tools.hook_program import HookModel, Shapes, plain_model, trace_hook
from lightning_ddp.tools.perf_model import (
    Network,
    Prediction,
    StepProfile,
    TransferCost,
    cut_sizes,
    num_bytes_of,
    predict_averager,
    predict_hook,
    recommend_buckets,
    square_shapes,
)
from lightning_ddp.tools.ranks import RankContext, run_ranks, shuffled
from lightning_ddp.tools.recorded_run import RecordSettings, record_steps

NONE: Final = "none"
"""Name of the reducer without a hook."""
_HOOKS: Final = (NONE, "bf16", "int8", "powersgd:rank=4", "topk:ratio=0.01")
_AVERAGERS: Final = ("post_local_sgd:period=8", "streaming_diloco:period=100")
_RANKS: Final = tuple(2**power for power in range(13))
_NUM_RANKS: Final = 2  # that record
_NUM_PROBES: Final = 5
_GLOO_IN_FLIGHT: Final = 2  # threads of a gloo group of torch
_PROBE_BYTES = (4_096, 65_536, 262_144, 1_048_576, 4_194_304, 8_388_608)
_PROBE_BLOCK_BYTES = 2_097_152
_MOST_IN_BLOCK = 16


def _options(parser: argparse.ArgumentParser) -> None:
    subject = parser.add_argument_group("model to train")
    add_shared(subject, models=["transformer6"], device="cpu", timeout_s=900.0)
    subject.add_argument(
        "--from-timeline",
        type=Path,
        metavar="FOLDER",
        help="folder that CommunicationMonitor(timeline=FOLDER) has written, instead of a model; needs"
        " --latency-us and --gbit",
    )
    subject.add_argument(
        "--steps", type=positive_int, default=10, metavar="N", help="recorded steps (default: %(default)s)"
    )
    network = parser.add_argument_group("network (default: that between two processes of this machine)")
    for name, text in (
        ("--latency-us", "latency of a message between nodes in microseconds"),
        ("--gbit", "Gbit/s between nodes, in each direction"),
        ("--node-latency-us", "latency of a message within a node in microseconds"),
        ("--node-gbit", "Gbit/s within a node"),
    ):
        metavar = name.rpartition("-")[2].upper()
        network.add_argument(name, type=positive_float, metavar=metavar, help=text)
    network.add_argument(
        "--ranks-per-node",
        type=positive_int,
        default=1,
        metavar="N",
        help="ranks of a node (default: %(default)s)",
    )
    network.add_argument(
        "--algorithm",
        choices=("ring", "tree", "hierarchical"),
        default="ring",
        help="algorithm of all-reduces (default: %(default)s)",
    )
    network.add_argument(
        "--ranks",
        nargs="+",
        type=positive_int,
        metavar="N",
        help="numbers of ranks (default: powers of two up to 4096; with --bucket-caps-mb, the recorded"
        " number)",
    )
    contenders = parser.add_argument_group("contenders, as NAME or NAME:option=value,option=value")
    for name, kinds, what in (("--hooks", _HOOKS, "hooks"), ("--averagers", _AVERAGERS, "averagers")):
        contenders.add_argument(
            name,
            nargs="*",
            default=list(kinds),
            metavar=what[:-1].upper(),
            help=f"{what} to compare (default: {' '.join(kinds)})",
        )
    contenders.add_argument(
        "--bucket-caps-mb",
        nargs="+",
        type=positive_float,
        metavar="MIB",
        help="values of bucket_cap_mb, in MiB, to compare (default: the recorded buckets)",
    )


def parse_contender(text: str) -> dict[str, Any]:
    """Parse a specification of a hook or an averager from the command line.

    >>> parse_contender("powersgd:rank=4,start_step=0")
    {'name': 'powersgd', 'rank': 4, 'start_step': 0}
    >>> parse_contender("hierarchical_sgd:periods={2: 8, 16: 0}")
    {'name': 'hierarchical_sgd', 'periods': {2: 8, 16: 0}}

    Raises:
        ConfigurationError: the options are not of that form.
    """
    name, _, options = text.partition(":")
    try:
        call = ast.parse(f"f({options})", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise SyntaxError
        given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        if None in given:
            raise SyntaxError
    except (SyntaxError, ValueError) as error:
        raise ConfigurationError(
            f"{text!r}: expected NAME:option=value,option=value; text in quotes"
        ) from error
    return {"name": name, **given}  # type: ignore[dict-item]  # None was refused


def _measure(args: argparse.Namespace) -> Result:
    """Record or read steps, trace hooks, and predict."""
    hooks = {text: None if text == NONE else parse_hook(parse_contender(text)) for text in args.hooks}
    averagers = {text: parse_averager(parse_contender(text)) for text in args.averagers}
    if args.from_timeline is not None:
        _network(args, None)  # refuse missing options before hooks are traced, which takes a while
    recorded, probed, world_size = _record(args) if args.from_timeline is None else _read(args)
    network = _network(args, probed)
    # Two ranks on the CPU share its cores.
    is_limited = args.from_timeline is None and args.device == "cpu"
    cores = (os.cpu_count() or 1) / _NUM_RANKS if is_limited else float("inf")
    figures = _replanned(args, recorded) if args.bucket_caps_mb else recorded
    curves: list[_Row] = []
    with progress_bar(len(figures) * (len(hooks) + len(averagers)), "bench scaling") as bar:

        def add(subject: str, contender: str, predict: Callable[[int], Prediction]) -> None:
            rows = [asdict(predict(number)) for number in args.ranks or _RANKS]
            curves.append({"subject": subject, "contender": contender, "predictions": rows})
            bar.update()

        for subject, of in figures.items():
            for text, hook_plan in hooks.items():
                model = _trace(args, of, hook_plan)
                add(subject, text, partial(predict_hook, of.profile, model, network, cores=cores))
            for text, plan in averagers.items():
                add(subject, text, partial(predict_averager, of.profile, plan, network))
    numbers = [number for number in args.ranks or [world_size] if number > 1]
    plans: dict[str, list[_Row]] = {}
    for subject, of in recorded.items():
        found = (recommend_buckets(of.profile, of.shapes, network, number, cores=cores) for number in numbers)
        plans[subject] = list(map(asdict, found))
    return Result(
        settings={k: v for k, v in vars(args).items() if v is None or isinstance(v, (int, float, str, list))},
        extra={"network": asdict(network), "predictions": curves, "bucket_plans": plans}
        | {"note": _note(args, network, cores)},
    )


@dataclass(frozen=True, kw_only=True)
class _Figures:
    """Profile and buckets of a model without communication."""

    profile: StepProfile
    buckets: tuple[Shapes, ...]
    """Shapes of the parameters of each bucket."""

    @property
    def shapes(self) -> Shapes:
        return tuple(shape for bucket in self.buckets for shape in bucket)


_Recorded = tuple[dict[str, _Figures], "LinkCost | None", int]
"""Figures by subject, the cost of the link, and the number of ranks that recorded."""


def _record(args: argparse.Namespace) -> _Recorded:
    """Train the models on two ranks without communication, then measure the link between them."""
    models, figures = tuple(dict.fromkeys(args.models)), {}
    with (
        tempfile.TemporaryDirectory(prefix="lightning_ddp_scaling_") as scratch,
        progress_bar(len(models), "bench scaling: recording") as bar,
    ):
        settings = {"num_steps": args.steps, "communicates": False}
        recordings = [RecordSettings(model=m, folder=str(Path(scratch, m)), **settings) for m in models]
        options = {"world_size": _NUM_RANKS, "device": args.device, "timeout_s": args.timeout_s}
        results = run_ranks(_calibrate, recordings, on_progress=bar.update, **options)
        for model, shapes in zip(models, results[0]["shapes"], strict=True):
            profile = StepProfile.from_recordings(load_folder(Path(scratch, model)))
            buckets = tuple(tuple(map(tuple, bucket)) for bucket in shapes)
            figures[model] = _Figures(profile=profile, buckets=buckets)
    return figures, LinkCost.of([result["probes"] for result in results]), _NUM_RANKS


def _read(args: argparse.Namespace) -> _Recorded:
    """Read the steps of a user's run, with matrices as large as the buckets."""
    recordings = load_folder(args.from_timeline)
    profile = StepProfile.from_recordings(recordings)
    figures = _Figures(profile=profile, buckets=tuple(square_shapes(size) for size, _ in profile.ready))
    return {args.from_timeline.name: figures}, None, recordings[0].world_size


def _replanned(args: argparse.Namespace, figures: dict[str, _Figures]) -> dict[str, _Figures]:
    """Return the figures with each requested bucket plan."""
    replanned = {}
    for name, found in figures.items():
        shapes = found.shapes
        for cap_mb in args.bucket_caps_mb:
            ends = cut_sizes([num_bytes_of((shape,)) for shape in shapes], bucket_caps_bytes(cap_mb))
            buckets = tuple(shapes[start:end] for start, end in pairwise([0, *ends]))
            sizes = [num_bytes_of(bucket) for bucket in buckets]
            sizes[-1] += found.profile.num_bytes - sum(sizes)  # the rest of less than an element
            profile = found.profile.rebucketed(sizes)
            replanned[f"{name}, {cap_mb:g} MiB"] = replace(found, profile=profile, buckets=buckets)
    return replanned


def _trace(args: argparse.Namespace, found: _Figures, plan: Any) -> HookModel:
    """Trace a hook on this machine, with the buckets of these figures."""
    if plan is None:
        return plain_model([size for size, _ in found.profile.ready])
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in each rank
    try:
        return trace_hook(plan, found.buckets, device=torch.device(args.device), num_runs=min(args.steps, 5))
    finally:
        torch.set_num_threads(num_threads)


def _network(args: argparse.Namespace, probed: LinkCost | None) -> Network:
    local = probed.hop if probed is not None else None
    hop = _hop(args.latency_us, args.gbit, local)
    if hop is None:
        raise ToolError("--from-timeline needs the network. Pass --latency-us and --gbit")
    is_cpu = args.device == "cpu"
    return Network(
        hop=hop,
        ranks_per_node=args.ranks_per_node,
        node_hop=_hop(args.node_latency_us, args.node_gbit, local),
        algorithm=args.algorithm,
        num_in_flight=_GLOO_IN_FLIGHT if is_cpu else 1,
        cpu_seconds_per_byte=probed.cpu_seconds_per_byte if probed is not None and is_cpu else 0.0,
    )


def _hop(latency_us: float | None, gbit: float | None, default: TransferCost | None) -> TransferCost | None:
    if latency_us is None and gbit is None:
        return default
    if default is None and (latency_us is None or gbit is None):
        raise ToolError("a latency needs a speed, and a speed needs a latency. Pass both")
    cost = default or TransferCost(latency_s=0.0, seconds_per_byte=0.0)
    return TransferCost(
        latency_s=latency_us / 1e6 if latency_us is not None else cost.latency_s,
        seconds_per_byte=8e-9 / gbit if gbit is not None else cost.seconds_per_byte,
    )


def _note(args: argparse.Namespace, network: Network, cores: float) -> str:
    """Describe the inputs and assumptions of the predictions."""
    folder = args.from_timeline
    names = ("latency_us", "gbit", "node_latency_us", "node_gbit", "bucket_caps_mb")
    given = [f"{name}={getattr(args, name)}" for name in names if getattr(args, name) is not None]
    steps = "of two ranks here without communication" if folder is None else f"in {folder}"
    hooks = "" if folder is None else " with square matrices as large as the buckets"
    probes = "" if args.gbit and args.latency_us else ", collectives between two processes of this machine"
    return (
        f"a hop between nodes: {1e6 * network.hop.latency_s:.1f} us and"
        f" {8e-9 / network.hop.seconds_per_byte:.3g} Gbit/s, {args.algorithm},"
        f" {args.ranks_per_node} ranks a node\n"
        f"measured: steps {steps}, hooks alone on this machine{hooks}{probes}\n"
        f"given: {', '.join(given) or 'nothing'}\n"
        f"assumed: equal ranks without stragglers, {cores:g} cores a rank, a link that is this rank's alone,"
        " averagers without arithmetic of their own"
    )


_Row = dict[str, Any]


def _efficiency(prediction: _Row) -> float:
    return float(100 * prediction["compute_s"] / prediction["step_s"])


def _by_subject(result: Result) -> dict[str, list[_Row]]:
    found: dict[str, list[_Row]] = {}
    for curve in result.extra["predictions"]:
        found.setdefault(curve["subject"], []).append(curve)
    return found


def _format(result: Result) -> str:
    """Format three tables over the numbers of ranks and the buckets per subject, then the note."""
    figures: tuple[tuple[str, Callable[[_Row], float]], ...] = (
        ("efficiency, %", _efficiency),
        ("step, ms", lambda p: 1e3 * p["step_s"]),
        ("exposed communication, ms per step", lambda p: 1e3 * p["exposed_s"]),
    )
    blocks = []
    for subject, curves in _by_subject(result).items():
        ranks = [str(p["num_ranks"]) for p in curves[0]["predictions"]]
        for title, figure in figures:
            rows = [(c["contender"], *(f"{figure(p):.1f}" for p in c["predictions"])) for c in curves]
            table = format_table(("contender", *ranks), rows)
            blocks.append(f"{subject}: {title}, by ranks\n{table}\n")
    for subject, plans in result.extra["bucket_plans"].items():
        for plan in plans:
            caps = list(plan["caps_mb"])
            new_ms, old_ms = 1e3 * plan["step_s"], 1e3 * plan["recorded_s"]
            blocks.append(
                f"{subject}, {plan['num_ranks']} ranks without a hook: bucket_cap_mb_list={caps}\n"
                f"  a step takes {new_ms:.1f} ms, with the recorded buckets {old_ms:.1f} ms\n"
            )
    return "\n".join([*blocks, result.extra["note"]])


def _draw(result: Result, path: Path, *, unit: str, title: str) -> None:
    """Draw a panel per subject: efficiency over ranks, with a line per contender."""

    def draw_panel(axes: Any, curves: Sequence[_Row]) -> None:
        ticks = [p["num_ranks"] for p in curves[0]["predictions"]]
        for curve in curves:
            efficiency = [_efficiency(p) for p in curve["predictions"]]
            axes.plot(ticks, efficiency, marker=".", label=curve["contender"])
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(number) for number in ticks], rotation=45)
        axes.set(xlabel="ranks", ylabel=f"efficiency ({unit})", ylim=(0, 102))
        axes.legend(fontsize=8)

    panels = {subject: partial(draw_panel, curves=curves) for subject, curves in _by_subject(result).items()}
    save_panels(path, panels, title=title)


@dataclass(frozen=True, kw_only=True)
class LinkCost:
    """Cost of a message between two ranks."""

    hop: TransferCost
    cpu_seconds_per_byte: float
    """CPU seconds of a rank per byte of an all-reduce."""

    @classmethod
    def of(cls, probes: Sequence[Sequence[Sequence[float]]]) -> LinkCost:
        """Fit the probes of two ranks, where an all-reduce is two messages with half of the bytes each."""
        rows = list(chain.from_iterable(probes))

        def median(size: float, column: int) -> float:
            return statistics.median(row[column] for row in rows if row[0] == size)

        sizes = sorted({row[0] for row in rows})
        line = TransferCost.fit([(int(size), median(size, 1)) for size in sizes])
        largest, cpu_s = sizes[-1], median(sizes[-1], 2)
        return cls(hop=replace(line, latency_s=line.latency_s / 2), cpu_seconds_per_byte=cpu_s / largest)


def _calibrate(context: RankContext, recordings: Sequence[RecordSettings]) -> dict[str, Any]:
    """Record each model without communication, then time collectives.

    Returns "shapes", of the parameters of each bucket of each model, and "probes", see `_probe`.

    Collective: all ranks must call it.
    """
    shapes = []
    for settings in recordings:
        shapes.append(record_steps(context, settings))
        context.advance()
    probes = [row for number in range(_NUM_PROBES) for row in _probe(context.device, number)]
    return {"shapes": shapes, "probes": probes}


def _probe(device: torch.device, seed: int) -> list[list[float]]:
    group = Group(dist.group.WORLD)
    rows = []
    for size in shuffled(_PROBE_BYTES, seed=seed):
        tensor = torch.zeros(size // 4, device=device)
        count = max(1, min(_MOST_IN_BLOCK, _PROBE_BLOCK_BYTES // size))
        dist.barrier()
        group.wait(group.all_reduce(tensor), device)  # uses up the burst credit of an idle link
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            group.wait(group.all_reduce(tensor), device)
        seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu
        rows.append([float(size), seconds / count, cpu_s / count])
    return rows


SCALING: Final = Benchmark(
    name="scaling",
    summary="Predict step time and efficiency with more ranks, and the buckets to use, from measured steps.",
    unit="%",
    options=_options,
    measure=_measure,
    table=_format,
    draw=_draw,
    title="speed of N ranks / N times that of one",
)
