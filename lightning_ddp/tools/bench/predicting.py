"""How ``bench scaling`` comes to its predictions: recordings, traced hooks and a network from the options."""

from __future__ import annotations

import argparse
import ast
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_ddp.errors import ConfigurationError
from lightning_ddp.tools.bench import BenchmarkError
from lightning_ddp.tools.bench.report import progress_bar
from lightning_ddp.tools.bench.validation import GLOO_IN_FLIGHT

if TYPE_CHECKING:
    from lightning_ddp.comm.cost import TransferCost
    from lightning_ddp.tools.bench.calibration import Measured, ModelFigures
    from lightning_ddp.tools.perf_model import HookModel, Network, Prediction, StepProfile

NONE: Final = "none"
"""The reducer without a hook."""
_NUM_RANKS = 2
_NUM_PROBES = 5


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A contender's predictions over the numbers of ranks."""

    subject: str
    """Model and bucket plan."""
    contender: str
    predictions: tuple[Prediction, ...]


def parse_contender(text: str) -> dict[str, Any]:
    """A specification of a hook or an averager from the command line.

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
        is_call = isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        if (
            not isinstance(call, ast.Call)
            or not is_call
            or call.args
            or None in (k.arg for k in call.keywords)
        ):
            raise SyntaxError
        given = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ConfigurationError(
            f"{text!r}: expected NAME:option=value,option=value; text in quotes"
        ) from error
    return {"name": name, **given}


def predict(args: argparse.Namespace) -> tuple[list[Curve], Network, str]:
    """Records or reads, traces and predicts what the options of ``bench scaling`` ask for.

    Returns:
        The curves; the network; and what they rest on, in words.

    Raises:
        BenchmarkError: an option cannot be used, or a rank fails.
        ConfigurationError: the same, of a hook, an averager or the recordings.
    """
    from lightning_ddp.averaging import parse_averager
    from lightning_ddp.hooks import parse_hook
    from lightning_ddp.tools.perf_model import predict_averager, predict_hook

    hooks = {text: None if text == NONE else parse_hook(parse_contender(text)) for text in args.hooks}
    averagers = {text: parse_averager(parse_contender(text)) for text in args.averagers}
    plans = {text: plan for text, plan in hooks.items() if plan is not None}
    if args.from_timeline is not None:
        _network(args, None)  # refuses what is missing before hooks are traced, which takes a while
    figures, probed = _record(args, plans) if args.from_timeline is None else _read(args, plans)
    network = _network(args, probed)
    cores = args.cores_per_rank or _default_cores(args)
    curves = []
    with progress_bar(len(figures) * (len(hooks) + len(averagers)), "bench scaling") as bar:
        for subject, found in figures.items():
            for text in args.hooks:
                hook = found.hooks[text] if text != NONE else _plain(found.profile)
                rows = [predict_hook(found.profile, hook, network, n, cores=cores) for n in args.ranks]
                curves.append(Curve(subject=subject, contender=text, predictions=tuple(rows)))
                bar.update()
            for text, plan in averagers.items():
                rows = [predict_averager(found.profile, plan, network, n) for n in args.ranks]
                curves.append(Curve(subject=subject, contender=text, predictions=tuple(rows)))
                bar.update()
    return curves, network, _note(args, network, cores)


def _plain(profile: StepProfile) -> HookModel:
    from lightning_ddp.tools.perf_model import plain_model

    return plain_model([size for size, _ in profile.ready])


def _default_cores(args: argparse.Namespace) -> float:
    if args.from_timeline is not None or args.device != "cpu":
        return float("inf")
    return (os.cpu_count() or 1) / _NUM_RANKS


def _record(args: argparse.Namespace, hooks: dict[str, Any]) -> tuple[dict[str, ModelFigures], Measured]:
    """Lets two ranks train the models and trace the hooks; with the default network, also probes it."""
    from lightning_ddp.tools.bench.calibration import CalibrationSettings, Measured, calibrate, load_figures
    from lightning_ddp.tools.bench.processes import run_ranks

    models = tuple(dict.fromkeys(args.models))
    with tempfile.TemporaryDirectory(prefix="lightning_ddp_scaling_") as scratch:
        settings = CalibrationSettings(
            models=models,
            hooks=hooks if args.bucket_caps_mb is None else {},
            num_steps=args.steps,
            num_probes=_NUM_PROBES,
            folder=scratch,
        )
        with progress_bar(len(models), "bench scaling: recording") as bar:
            results = run_ranks(
                calibrate,
                settings,
                world_size=_NUM_RANKS,
                device=args.device,
                timeout_s=args.timeout_s,
                on_progress=bar.update,
            )
        rests = [result["rests"] for result in results]
        figures = {model: load_figures(Path(scratch), model, rests) for model in models}
    return _replanned(args, figures, hooks), Measured.of([result["probes"] for result in results])


def _read(args: argparse.Namespace, hooks: dict[str, Any]) -> tuple[dict[str, ModelFigures], Measured | None]:
    """Takes the steps of a run of the user's; hooks run here, with matrices as large as the buckets."""
    from lightning_ddp.observe.recording import load_folder
    from lightning_ddp.tools.bench.calibration import ModelFigures
    from lightning_ddp.tools.perf_model import StepProfile, square_shapes

    profile = StepProfile.from_recordings(load_folder(args.from_timeline))
    buckets = tuple(square_shapes(size) for size, _ in profile.ready)
    figures = {args.from_timeline.name: ModelFigures(profile=profile, buckets=buckets, hooks={})}
    if args.bucket_caps_mb is None:
        figures = {name: _traced(args, found, hooks) for name, found in figures.items()}
    return _replanned(args, figures, hooks), None


def _replanned(
    args: argparse.Namespace, figures: dict[str, ModelFigures], hooks: dict[str, Any]
) -> dict[str, ModelFigures]:
    """The figures with each bucket plan that is asked for; hooks are traced with its buckets."""
    if args.bucket_caps_mb is None:
        return figures
    from lightning_ddp.parallel.options import bucket_caps_bytes
    from lightning_ddp.tools.bench.calibration import ModelFigures
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
            plan = ModelFigures(profile=profile, buckets=buckets, hooks={})
            replanned[f"{name}, {cap_mb:g} MiB"] = _traced(args, plan, hooks)
    return replanned


def _traced(args: argparse.Namespace, found: ModelFigures, hooks: dict[str, Any]) -> ModelFigures:
    import torch

    from lightning_ddp.tools.bench.calibration import ModelFigures
    from lightning_ddp.tools.perf_model import trace_hook

    device = torch.device(args.device)
    traced = {
        text: trace_hook(plan, found.buckets, device=device, num_runs=min(args.steps, 5))
        for text, plan in hooks.items()
    }
    return ModelFigures(profile=found.profile, buckets=found.buckets, hooks=traced)


def _network(args: argparse.Namespace, probed: Measured | None) -> Network:
    from lightning_ddp.tools.perf_model import Network

    local = probed.hop if probed is not None else None
    hop = _hop(args.latency_us, args.gbit, local)
    if hop is None:
        raise BenchmarkError("--from-timeline needs the network: give --latency-us and --gbit")
    return Network(
        hop=hop,
        ranks_per_node=args.ranks_per_node,
        node_hop=_hop(args.node_latency_us, args.node_gbit, local),
        algorithm=args.algorithm,
        num_in_flight=GLOO_IN_FLIGHT if args.device == "cpu" else 1,
        cpu_seconds_per_byte=probed.cpu_seconds_per_byte
        if probed is not None and args.device == "cpu"
        else 0.0,
    )


def _hop(latency_us: float | None, gbit: float | None, default: TransferCost | None) -> TransferCost | None:
    from lightning_ddp.comm.cost import TransferCost

    if latency_us is None and gbit is None:
        return default
    if default is None and (latency_us is None or gbit is None):
        raise BenchmarkError("a latency without a speed, or a speed without a latency: give both")
    latency_s = default.latency_s if default is not None else 0.0
    seconds_per_byte = default.seconds_per_byte if default is not None else 0.0
    return TransferCost(
        latency_s=latency_us / 1e6 if latency_us is not None else latency_s,
        seconds_per_byte=8e-9 / gbit if gbit is not None else seconds_per_byte,
    )


def _note(args: argparse.Namespace, network: Network, cores: float) -> str:
    """What the predictions rest on."""
    is_read = args.from_timeline is not None
    lines = [
        f"a hop between nodes: {1e6 * network.hop.latency_s:.1f} us and"
        f" {8e-9 / network.hop.seconds_per_byte:.3g} Gbit/s, {args.algorithm},"
        f" {args.ranks_per_node} ranks a node",
        "measured: steps "
        + (f"in {args.from_timeline}" if is_read else "of two ranks here without communication")
        + ", hooks alone on this machine"
        + (" with square matrices as large as the buckets" if is_read else "")
        + ("" if args.gbit and args.latency_us else ", collectives between two processes of this machine"),
        "given: " + (", ".join(_given(args)) or "nothing"),
        f"assumed: equal ranks without stragglers, {cores:g} cores a rank, a link that is this rank's alone,"
        " averagers without arithmetic of their own",
    ]
    return "\n".join(lines)


def _given(args: argparse.Namespace) -> list[str]:
    names = ("latency_us", "gbit", "node_latency_us", "node_gbit", "bucket_caps_mb", "cores_per_rank")
    return [f"{name}={getattr(args, name)}" for name in names if getattr(args, name) is not None]
