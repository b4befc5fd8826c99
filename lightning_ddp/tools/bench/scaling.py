"""Step time and efficiency with more ranks, predicted from recorded steps and measured link and hooks.

Records a model of `bench step` without communication, or reads the folder that
`CommunicationMonitor(timeline=folder)` has written, and plays the step with any number of ranks: each bucket
becomes ready, is encoded, and passes a link with a latency and a bandwidth. `--validate` compares predictions
with steps that are measured between two namespaces.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_ddp.errors import ConfigurationError
from lightning_ddp.tools.bench import BenchmarkError
from lightning_ddp.tools.bench.arguments import MODEL_NAMES, output_path, positive_float, positive_int
from lightning_ddp.tools.bench.predicting import NONE, Curve, predict
from lightning_ddp.tools.bench.report import describe_environment, format_table
from lightning_ddp.tools.bench.validation import CASES, format_outcomes, outcomes_document, validate

if TYPE_CHECKING:
    from lightning_ddp.tools.perf_model import Prediction

_HOOKS: Final = (NONE, "bf16", "int8", "powersgd:rank=4", "topk:ratio=0.01")
_AVERAGERS: Final = ("post_local_sgd:period=8", "streaming_diloco:period=100")
_RANKS: Final = tuple(2**power for power in range(13))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``bench scaling``."""
    subject = parser.add_argument_group("what is trained")
    subject.add_argument(
        "--models",
        "--model",
        nargs="+",
        choices=MODEL_NAMES,
        default=["transformer6"],
        metavar="MODEL",
        help=f"models to record, any of {', '.join(MODEL_NAMES)} (default: transformer6)",
    )
    subject.add_argument(
        "--from-timeline",
        type=Path,
        metavar="FOLDER",
        help="recordings of a run of yours, instead of a model",
    )
    subject.add_argument(
        "--steps", type=positive_int, default=10, metavar="N", help="recorded steps (default: %(default)s)"
    )
    subject.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where models and hooks run"
    )
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
        default=list(_RANKS),
        metavar="N",
        help="numbers of ranks (default: powers of two up to 4096)",
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
    checked = parser.add_argument_group("validation")
    checked.add_argument(
        "--validate",
        action="store_true",
        help="compare predictions with steps measured between two namespaces, at fixed settings; needs root",
    )
    checked.add_argument(
        "--links",
        nargs="+",
        type=positive_float,
        choices=sorted(CASES),
        default=sorted(CASES),
        metavar="MBIT",
        help=f"of {', '.join(f'{mbit:g}' for mbit in sorted(CASES))} Mbit/s (default: all)",
    )
    checked.add_argument(
        "--rounds", type=positive_int, default=20, metavar="N", help="timed steps (default: %(default)s)"
    )
    parser.add_argument("--timeout-s", type=positive_float, default=900.0, metavar="S", help="of each part")
    parser.add_argument("--json", type=output_path, metavar="PATH", help="write all figures to this file")
    parser.add_argument(
        "--plot", type=output_path, metavar="PATH", help="draw efficiency against ranks (PNG, SVG or PDF)"
    )


def run(args: argparse.Namespace) -> int:
    """Predict, or validate; print the tables and write the files that were asked for.

    Returns:
        The exit status, 0.

    Raises:
        BenchmarkError: an option cannot be used, the folder holds no recordings, a rank fails, or links
            cannot be shaped.
    """
    if args.validate:
        outcomes = validate(args.links, args.rounds, args.timeout_s)
        print(format_outcomes(outcomes))
        _write_json(args, {"rounds": args.rounds, "validation": outcomes_document(outcomes)})
        return 0
    try:
        curves, network, note = predict(args)
    except ConfigurationError as error:
        raise BenchmarkError(str(error)) from error
    print(format_curves(curves))
    print(note)
    document = {"network": asdict(network), "note": note, "predictions": [asdict(curve) for curve in curves]}
    _write_json(args, document)
    if args.plot is not None:
        draw(curves, args.plot)
        print(f"picture: {args.plot}")
    return 0


def format_curves(curves: Sequence[Curve]) -> str:
    """Lay out, for each subject, three tables over the numbers of ranks."""
    figures: tuple[tuple[str, Callable[[Prediction], float]], ...] = (
        ("efficiency, %", lambda p: 100 * p.efficiency),
        ("step, ms", lambda p: 1e3 * p.step_s),
        ("communication that nothing hides, ms a step", lambda p: 1e3 * p.exposed_s),
    )
    blocks = []
    for subject in dict.fromkeys(curve.subject for curve in curves):
        mine = [curve for curve in curves if curve.subject == subject]
        ranks = [str(p.num_ranks) for p in mine[0].predictions]
        for title, figure in figures:
            rows = [(c.contender, *(f"{figure(p):.1f}" for p in c.predictions)) for c in mine]
            blocks.append(f"{subject}: {title}, by ranks\n{format_table(('contender', *ranks), rows)}\n")
    return "\n".join(blocks)


def _write_json(args: argparse.Namespace, document: dict[str, Any]) -> None:
    if args.json is None:
        return
    whole = {"benchmark": "scaling", "environment": describe_environment(), **document}
    args.json.write_text(json.dumps(whole, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Draw a panel a subject: efficiency against ranks, a line a contender."""
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]  # an optional dependency

    subjects = list(dict.fromkeys(curve.subject for curve in curves))
    figure = Figure(figsize=(6.5 * len(subjects), 4.5), layout="constrained")
    panels = figure.subplots(1, len(subjects), squeeze=False)[0]
    for axes, subject in zip(panels, subjects, strict=True):
        mine = [curve for curve in curves if curve.subject == subject]
        for curve in mine:
            ranks = [p.num_ranks for p in curve.predictions]
            efficiency = [100 * p.efficiency for p in curve.predictions]
            axes.plot(ranks, efficiency, marker=".", label=curve.contender)
        ticks = [p.num_ranks for p in mine[0].predictions]
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(number) for number in ticks], rotation=45)
        axes.set(xlabel="ranks", ylabel="efficiency (%)", title=subject, ylim=(0, 102))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
