"""Step time and efficiency with more ranks, and the buckets to use, predicted from recorded steps.

Records a model of `bench step` without communication, or reads the folder that
`CommunicationMonitor(timeline=folder)` has written, and plays the step with any number of ranks: each bucket
becomes ready, is encoded, and passes a link with a latency and a bandwidth. The sizes of the buckets that end
the step soonest are printed as a `bucket_cap_mb_list`.
"""

from __future__ import annotations

import argparse
import ast
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_ddp.errors import ConfigurationError
from lightning_ddp.tools import ToolError
from lightning_ddp.tools.arguments import (
    add_device_argument,
    add_models_argument,
    add_timeout_argument,
    positive_float,
    positive_int,
)
from lightning_ddp.tools.bench.benchmark import Benchmark, Result
from lightning_ddp.tools.report import format_table, progress_bar

if TYPE_CHECKING:
    from lightning_ddp.comm.cost import TransferCost
    from lightning_ddp.tools.bench.calibration import LinkCost
    from lightning_ddp.tools.perf_model import BucketPlan, HookModel, Network, Prediction, StepProfile
    from lightning_ddp.tools.perf_model.profile import Shapes

NONE: Final = "none"
"""The reducer without a hook."""
_HOOKS: Final = (NONE, "bf16", "int8", "powersgd:rank=4", "topk:ratio=0.01")
_AVERAGERS: Final = ("post_local_sgd:period=8", "streaming_diloco:period=100")
_RANKS: Final = tuple(2**power for power in range(13))
_NUM_RANKS: Final = 2  # that record
_NUM_PROBES: Final = 5
_GLOO_IN_FLIGHT: Final = 2  # threads of a gloo group of torch


def _options(parser: argparse.ArgumentParser) -> None:
    subject = parser.add_argument_group("what is trained")
    add_models_argument(parser, ("transformer6",))
    subject.add_argument(
        "--from-timeline",
        type=Path,
        metavar="FOLDER",
        help="recordings of a run of yours, instead of a model; needs --latency-us and --gbit",
    )
    subject.add_argument(
        "--steps", type=positive_int, default=10, metavar="N", help="recorded steps (default: %(default)s)"
    )
    add_device_argument(parser)
    subject.add_argument(
        "--cores-per-rank",
        type=positive_float,
        metavar="N",
        help="that a rank's computing and communication share (default: half of this machine's for a model on"
        " the CPU, else no limit)",
    )
    network = parser.add_argument_group("network (default: as between two processes of this machine)")
    network.add_argument("--latency-us", type=positive_float, metavar="US", help="of a message between nodes")
    network.add_argument("--gbit", type=positive_float, metavar="GBIT", help="Gbit/s between nodes, each way")
    network.add_argument("--node-latency-us", type=positive_float, metavar="US", help="within a node")
    network.add_argument("--node-gbit", type=positive_float, metavar="GBIT", help="Gbit/s within a node")
    network.add_argument("--ranks-per-node", type=positive_int, default=1, metavar="N", help="default: 1")
    network.add_argument("--algorithm", choices=("ring", "tree", "hierarchical"), default="ring")
    network.add_argument(
        "--ranks",
        nargs="+",
        type=positive_int,
        metavar="N",
        help="numbers of ranks (default: powers of two up to 4096; for the buckets as many as have recorded)",
    )
    contenders = parser.add_argument_group("contenders, as NAME or NAME:option=value,option=value")
    contenders.add_argument("--hooks", nargs="*", default=list(_HOOKS), metavar="HOOK")
    contenders.add_argument("--averagers", nargs="*", default=list(_AVERAGERS), metavar="AVERAGER")
    contenders.add_argument(
        "--bucket-caps-mb",
        nargs="+",
        type=positive_float,
        metavar="MB",
        help="bucket plans to compare (default: the recorded one)",
    )
    add_timeout_argument(parser, 900.0)


@dataclass(frozen=True, kw_only=True)
class ModelFigures:
    """What is known about a model without communication."""

    profile: StepProfile
    buckets: tuple[Shapes, ...]
    """Shapes of the parameters of each bucket."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A contender's predictions over the numbers of ranks."""

    subject: str
    """Model and bucket plan."""
    contender: str
    predictions: tuple[Prediction, ...]


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
        if None in (keyword.arg for keyword in call.keywords):
            raise SyntaxError
        given = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ConfigurationError(
            f"{text!r}: expected NAME:option=value,option=value; text in quotes"
        ) from error
    return {"name": name, **given}


def _measure(args: argparse.Namespace) -> Result:
    try:
        return _predict(args)
    except ConfigurationError as error:
        raise ToolError(str(error)) from error


def _predict(args: argparse.Namespace) -> Result:
    """Records or reads, traces and predicts."""
    from lightning_ddp.averaging import parse_averager
    from lightning_ddp.hooks import parse_hook
    from lightning_ddp.tools.perf_model import plain_model, predict_averager, predict_hook

    hooks = {text: None if text == NONE else parse_hook(parse_contender(text)) for text in args.hooks}
    averagers = {text: parse_averager(parse_contender(text)) for text in args.averagers}
    plans = {text: plan for text, plan in hooks.items() if plan is not None}
    if args.from_timeline is not None:
        _network(args, None)  # refuses what is missing before hooks are traced, which takes a while
    recorded, probed, world_size = _record(args) if args.from_timeline is None else _read(args)
    network = _network(args, probed)
    cores = args.cores_per_rank or _default_cores(args)
    figures = _replanned(args, recorded) if args.bucket_caps_mb else recorded
    curves = []
    with progress_bar(len(figures) * (len(hooks) + len(averagers)), "bench scaling") as bar:
        for subject, found in figures.items():
            profile = found.profile
            traced = _traced(args, found, plans)
            for text in args.hooks:
                hook = traced[text] if text != NONE else plain_model([size for size, _ in profile.ready])
                rows = [predict_hook(profile, hook, network, n, cores=cores) for n in args.ranks or _RANKS]
                curves.append(Curve(subject=subject, contender=text, predictions=tuple(rows)))
                bar.update()
            for text, plan in averagers.items():
                rows = [predict_averager(profile, plan, network, n) for n in args.ranks or _RANKS]
                curves.append(Curve(subject=subject, contender=text, predictions=tuple(rows)))
                bar.update()
    return Result(
        settings={name: value for name, value in vars(args).items() if _is_plain(value)},
        extra={
            "network": asdict(network),
            "note": _note(args, network, cores),
            "predictions": [asdict(curve) for curve in curves],
            "bucket_plans": _recommend(recorded, network, args.ranks or [world_size], cores),
        },
    )


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, list))


def _recommend(
    figures: dict[str, ModelFigures], network: Network, nums_ranks: Sequence[int], cores: float
) -> dict[str, list[dict[str, Any]]]:
    """The buckets that end a step of each subject soonest, for each number of ranks but one."""
    from lightning_ddp.tools.perf_model import recommend_buckets

    def plan(found: ModelFigures, num_ranks: int) -> BucketPlan:
        shapes = [shape for bucket in found.buckets for shape in bucket]
        return recommend_buckets(found.profile, shapes, network, num_ranks, cores=cores)

    return {
        subject: [asdict(plan(found, number)) for number in nums_ranks if number > 1]
        for subject, found in figures.items()
    }


def _default_cores(args: argparse.Namespace) -> float:
    if args.from_timeline is not None or args.device != "cpu":
        return float("inf")
    return (os.cpu_count() or 1) / _NUM_RANKS


_Recorded = tuple[dict[str, "ModelFigures"], "LinkCost | None", int]
"""What is known of each subject and of the link, and how many ranks have recorded."""


def _record(args: argparse.Namespace) -> _Recorded:
    """Lets two ranks train the models without communication; then they probe the link between them."""
    from lightning_ddp.telemetry.recording import load_folder
    from lightning_ddp.tools.bench.calibration import CalibrationSettings, LinkCost, calibrate
    from lightning_ddp.tools.perf_model import StepProfile
    from lightning_ddp.tools.ranks import run_ranks

    models, figures = tuple(dict.fromkeys(args.models)), {}
    with (
        tempfile.TemporaryDirectory(prefix="lightning_ddp_scaling_") as scratch,
        progress_bar(len(models), "bench scaling: recording") as bar,
    ):
        settings = CalibrationSettings(
            models=models, num_steps=args.steps, num_probes=_NUM_PROBES, folder=scratch
        )
        options = {"world_size": _NUM_RANKS, "device": args.device, "timeout_s": args.timeout_s}
        results = run_ranks(calibrate, settings, on_progress=bar.update, **options)
        for model in models:
            profile = StepProfile.from_recordings(load_folder(Path(scratch, model)))
            buckets = tuple(tuple(map(tuple, bucket)) for bucket in results[0]["shapes"][model])
            figures[model] = ModelFigures(profile=profile, buckets=buckets)
    return figures, LinkCost.of([result["probes"] for result in results]), _NUM_RANKS


def _read(args: argparse.Namespace) -> _Recorded:
    """Takes the steps of a run of the user's, with matrices as large as the buckets."""
    from lightning_ddp.telemetry.recording import load_folder
    from lightning_ddp.tools.perf_model import StepProfile, square_shapes

    recordings = load_folder(args.from_timeline)
    profile = StepProfile.from_recordings(recordings)
    buckets = tuple(square_shapes(size) for size, _ in profile.ready)
    figures = ModelFigures(profile=profile, buckets=buckets)
    return {args.from_timeline.name: figures}, None, recordings[0].world_size


def _replanned(args: argparse.Namespace, figures: dict[str, ModelFigures]) -> dict[str, ModelFigures]:
    """The figures with each bucket plan that is asked for."""
    from lightning_ddp.ddp.reducer_options import bucket_caps_bytes
    from lightning_ddp.tools.perf_model import cut_into_buckets
    from lightning_ddp.tools.perf_model.profile import num_bytes_of

    replanned = {}
    for name, found in figures.items():
        shapes = tuple(shape for bucket in found.buckets for shape in bucket)
        for cap_mb in args.bucket_caps_mb:
            buckets = tuple(cut_into_buckets(shapes, bucket_caps_bytes(cap_mb)))
            sizes = [num_bytes_of(bucket) for bucket in buckets]
            sizes[-1] += found.profile.num_bytes - sum(sizes)  # what is less than an element
            profile = found.profile.rebucketed(sizes)
            replanned[f"{name}, {cap_mb:g} MiB"] = replace(found, profile=profile, buckets=buckets)
    return replanned


def _traced(args: argparse.Namespace, found: ModelFigures, hooks: dict[str, Any]) -> dict[str, HookModel]:
    """What hooks do that have run here, with the buckets of these figures."""
    import torch

    from lightning_ddp.tools.perf_model import trace_hook

    device, num_runs = torch.device(args.device), min(args.steps, 5)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in each rank
    try:
        return {
            text: trace_hook(plan, found.buckets, device=device, num_runs=num_runs)
            for text, plan in hooks.items()
        }
    finally:
        torch.set_num_threads(num_threads)


def _network(args: argparse.Namespace, probed: LinkCost | None) -> Network:
    from lightning_ddp.tools.perf_model import Network

    local = probed.hop if probed is not None else None
    hop = _hop(args.latency_us, args.gbit, local)
    if hop is None:
        raise ToolError("--from-timeline needs the network: give --latency-us and --gbit")
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
    from lightning_ddp.comm.cost import TransferCost

    if latency_us is None and gbit is None:
        return default
    if default is None and (latency_us is None or gbit is None):
        raise ToolError("a latency without a speed, or a speed without a latency: give both")
    cost = default or TransferCost(latency_s=0.0, seconds_per_byte=0.0)
    return TransferCost(
        latency_s=latency_us / 1e6 if latency_us is not None else cost.latency_s,
        seconds_per_byte=8e-9 / gbit if gbit is not None else cost.seconds_per_byte,
    )


def _note(args: argparse.Namespace, network: Network, cores: float) -> str:
    """What the predictions rest on."""
    is_read = args.from_timeline is not None
    names = ("latency_us", "gbit", "node_latency_us", "node_gbit", "bucket_caps_mb", "cores_per_rank")
    given = [f"{name}={getattr(args, name)}" for name in names if getattr(args, name) is not None]
    lines = [
        f"a hop between nodes: {1e6 * network.hop.latency_s:.1f} us and"
        f" {8e-9 / network.hop.seconds_per_byte:.3g} Gbit/s, {args.algorithm},"
        f" {args.ranks_per_node} ranks a node",
        "measured: steps "
        + (f"in {args.from_timeline}" if is_read else "of two ranks here without communication")
        + ", hooks alone on this machine"
        + (" with square matrices as large as the buckets" if is_read else "")
        + ("" if args.gbit and args.latency_us else ", collectives between two processes of this machine"),
        "given: " + (", ".join(given) or "nothing"),
        f"assumed: equal ranks without stragglers, {cores:g} cores a rank, a link that is this rank's alone,"
        " averagers without arithmetic of their own",
    ]
    return "\n".join(lines)


# ---------------------------------------------------------------------- tables and the picture

_Row = dict[str, Any]


def _efficiency(prediction: _Row) -> float:
    return float(100 * prediction["compute_s"] / prediction["step_s"])


def _format(result: Result) -> str:
    """For each subject three tables over the numbers of ranks, and the buckets; then what they rest on."""
    figures: tuple[tuple[str, Callable[[_Row], float]], ...] = (
        ("efficiency, %", _efficiency),
        ("step, ms", lambda p: 1e3 * p["step_s"]),
        ("communication that nothing hides, ms a step", lambda p: 1e3 * p["exposed_s"]),
    )
    curves: list[_Row] = result.extra["predictions"]
    blocks = []
    for subject in dict.fromkeys(curve["subject"] for curve in curves):
        mine = [curve for curve in curves if curve["subject"] == subject]
        ranks = [str(p["num_ranks"]) for p in mine[0]["predictions"]]
        for title, figure in figures:
            rows = [(c["contender"], *(f"{figure(p):.1f}" for p in c["predictions"])) for c in mine]
            table = format_table(("contender", *ranks), rows)
            blocks.append(f"{subject}: {title}, by ranks\n{table}\n")
    for subject, plans in result.extra["bucket_plans"].items():
        for plan in plans:
            blocks.append(
                f"{subject}, {plan['num_ranks']} ranks without a hook:"
                f" bucket_cap_mb_list={list(plan['caps_mb'])}\n  a step takes {1e3 * plan['step_s']:.1f} ms,"
                f" with the recorded buckets {1e3 * plan['recorded_s']:.1f} ms\n"
            )
    return "\n".join([*blocks, result.extra["note"]])


def _draw(result: Result, path: Path, *, unit: str, title: str) -> None:
    """A panel a subject: efficiency against ranks, a line a contender."""
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]  # an optional dependency

    curves: list[_Row] = result.extra["predictions"]
    subjects = list(dict.fromkeys(curve["subject"] for curve in curves))
    figure = Figure(figsize=(6.5 * len(subjects), 4.5), layout="constrained")
    panels = figure.subplots(1, len(subjects), squeeze=False)[0]
    for axes, subject in zip(panels, subjects, strict=True):
        mine = [curve for curve in curves if curve["subject"] == subject]
        ticks = [p["num_ranks"] for p in mine[0]["predictions"]]
        for curve in mine:
            efficiency = [_efficiency(p) for p in curve["predictions"]]
            axes.plot(ticks, efficiency, marker=".", label=curve["contender"])
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(number) for number in ticks], rotation=45)
        axes.set(xlabel="ranks", ylabel=f"efficiency ({unit})", title=subject, ylim=(0, 102))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


SCALING: Final = Benchmark(
    name="scaling",
    summary="Step time and efficiency with more ranks, and the buckets to use, predicted from steps.",
    unit="%",
    options=_options,
    measure=_measure,
    table=_format,
    draw=_draw,
    title="speed of N ranks / N times that of one",
)
