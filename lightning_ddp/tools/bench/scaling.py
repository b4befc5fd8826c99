"""Step time and efficiency with more ranks, predicted from recorded steps and a fitted link.

Two ranks here record a model of `bench step` without communication, time collectives alone, and measure the
hooks; or the steps are recorded ones of a user. Steps of the two ranks are predicted and measured as well.
"""

from __future__ import annotations

import argparse
import ast
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from lightning_ddp.averaging import parse_averager
from lightning_ddp.ddp.bucket import bucket_caps_bytes
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.hooks import parse_hook
from lightning_ddp.telemetry.timeline import load_folder
from lightning_ddp.tools import ToolError
from lightning_ddp.tools.bench import Benchmark, Result
from lightning_ddp.tools.bench.hooks import NONE, HookSettings, median, merge_ranks, time_hooks
from lightning_ddp.tools.command_line import add_shared, format_table, positive_float, positive_int
from lightning_ddp.tools.drawing import save_panels
from lightning_ddp.tools.models import MODEL_NAMES, MODELS_HELP
from lightning_ddp.tools.perf_model import (
    HookCost,
    Link,
    Prediction,
    StepProfile,
    TransferCost,
    predict,
    predict_averager,
)
from lightning_ddp.tools.ranks import RankContext, run_ranks, timed
from lightning_ddp.tools.recorded_run import RecordSettings, record_steps

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
    recorded = None
    if args.from_timeline is not None:
        if None in (args.latency_us, args.gbit):
            raise ToolError("--from-timeline needs the network. Pass --latency-us and --gbit")
        recorded = StepProfile.from_recordings(load_folder(args.from_timeline))

    here = calibrate(args, specs)
    hop = here.link.hop
    if args.latency_us is not None:
        hop = replace(hop, latency_s=args.latency_us / 1e6)
    if args.gbit is not None:
        hop = replace(hop, seconds_per_byte=8e-9 / args.gbit)
    link = here.link if recorded is None else Link(hop=hop)
    link = replace(link, hop=hop, algorithm=args.algorithm)
    profile = recorded or here.profile
    contenders: dict[str, Callable[[int], Prediction]] = {
        text: partial(predict, profile, link, hook=hook) for text, hook in here.hooks.items()
    }
    contenders |= {text: partial(predict_averager, profile, plan, link) for text, plan in plans.items()}
    for cap_mb in args.bucket_caps_mb:
        buckets = profile.rebucketed(bucket_caps_bytes(cap_mb))
        contenders[f"bucket_cap_mb={cap_mb:g}"] = partial(predict, buckets, link)
    return Result(
        settings={k: v for k, v in vars(args).items() if v is None or isinstance(v, (int, float, str, list))},
        extra={
            "steps": str(args.from_timeline or args.model),
            "hop": asdict(link.hop),
            "predictions": {name: [asdict(of(n)) for n in args.ranks] for name, of in contenders.items()},
            "checks_ms": here.checks_ms,
        },
    )


# ---------------------------------------------------------------------- measured here


class Calibration(NamedTuple):
    """Measurements of two ranks on this machine: steps without communication, their link, costs of hooks."""

    profile: StepProfile
    link: Link
    hooks: dict[str, HookCost | None]
    checks_ms: dict[str, tuple[float, float]]
    """Predicted and measured milliseconds of a step, by hook."""


def calibrate(args: argparse.Namespace, specs: dict[str, Any]) -> Calibration:
    """Measure steps, hooks and the link of two ranks on this machine; `specs` are None without a hook."""
    with tempfile.TemporaryDirectory(prefix="lightning_ddp_scaling_") as folder:
        timing = HookSettings(model=args.model, hooks={**specs, _NO_EXCHANGE: "noop"}, num_rounds=args.steps)
        settings = RecordSettings(args.model, folder, args.steps, communicates=False), timing
        options = {"device": args.device, "timeout_s": args.timeout_s, "mbit": args.link}
        found = run_ranks(_calibrate, settings, world_size=_NUM_RANKS, **options)
        profile = StepProfile.from_recordings(load_folder(Path(folder)))
    link = fit_link([row for rank in found for row in rank["probes"]], is_cpu=args.device == "cpu")
    rows = merge_ranks([rank["rows"] for rank in found])
    profile = profile.scaled(median(rows[_NO_EXCHANGE], "seconds") / profile.compute_s)  # the load may differ
    hooks, checks_ms = {}, {}
    for text, spec in specs.items():
        hooks[text] = None if spec is None else _hook_cost(spec["name"], rows[text], profile.num_bytes)
        predicted_s = predict(profile, link, _NUM_RANKS, hooks[text]).step_s
        checks_ms[text] = 1e3 * predicted_s, 1e3 * median(rows[text], "seconds")
    return Calibration(profile, link, hooks, checks_ms)


def _hook_cost(name: str, rows: Sequence[Mapping[str, float]], num_bytes: int) -> HookCost:
    sent, codec_s = (median(rows, key) / num_bytes for key in ("counted_bytes", "codec_seconds"))
    return HookCost(size_ratio=sent, codec_s=codec_s, gathers=name in _GATHERING)


def fit_link(probes: Sequence[Sequence[float]], *, is_cpu: bool) -> Link:
    """Return a link model fitted to timed all-reduces of two ranks: each two messages of half the bytes."""
    medians = {
        size: statistics.median(seconds for num_bytes, seconds, _ in probes if num_bytes == size)
        for size in _PROBE_BYTES
    }
    line, largest = TransferCost.fit(list(medians.items())), max(_PROBE_BYTES)
    cpu_s = statistics.median(of_cpu for num_bytes, _, of_cpu in probes if num_bytes == largest)
    hop = replace(line, latency_s=line.latency_s / 2)
    if not is_cpu:
        return Link(hop=hop)
    cores = (os.cpu_count() or 1) / _NUM_RANKS
    return Link(hop=hop, num_in_flight=_GLOO_IN_FLIGHT, cpu_seconds_per_byte=cpu_s / largest, cores=cores)


def _calibrate(context: RankContext, settings: tuple[RecordSettings, HookSettings]) -> dict[str, Any]:
    recording, hooks = settings
    record_steps(context, recording)
    probes = [_probe(size, context.device) for _ in range(_NUM_PROBES) for size in _PROBE_BYTES]
    return {"probes": probes, "rows": time_hooks(context, hooks)}


def _probe(size: int, device: torch.device) -> tuple[float, float, float]:
    """Run an all-reduce of `size` bytes; return its bytes, seconds and CPU seconds."""
    tensor = torch.zeros(size // 4, device=device)
    dist.all_reduce(torch.zeros(_BURST_BYTES // 4, device=device))  # uses up the credit of an idle link
    cpu_s = time.process_time()
    seconds = timed(partial(dist.all_reduce, tensor), device)
    return float(size), seconds, time.process_time() - cpu_s


# ---------------------------------------------------------------------- tables and picture


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
