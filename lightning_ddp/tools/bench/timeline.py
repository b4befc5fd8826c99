"""A picture of steps: what each rank computes, which buckets are on their way, and what nothing hides.

Draws the folder that `CommunicationMonitor(timeline=folder)` has written; without one, it records a model of
`bench step` in processes of its own. Writes a trace for chrome://tracing or Perfetto, and a PNG or SVG.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from lightning_ddp.tools.bench.arguments import MODEL_NAMES, output_path, positive_float, positive_int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``timeline``."""
    parser.add_argument("folder", nargs="?", type=Path, help="recordings of a run, one file a rank")
    for name, default, what in (
        ("--trace", "timeline.json", "Chrome trace to write"),
        ("--picture", "timeline.png", "PNG or SVG to write"),
    ):
        help_text = f"{what} (default: {default})"
        parser.add_argument(name, type=output_path, default=Path(default), metavar="PATH", help=help_text)
    parser.add_argument(
        "--steps",
        type=positive_int,
        default=4,
        metavar="N",
        help="the last steps that all ranks have are shown (default: %(default)s)",
    )
    recorded = parser.add_argument_group("without a folder")
    recorded.add_argument(
        "--model", choices=MODEL_NAMES, default="linear16", help="what is trained (default: %(default)s)"
    )
    recorded.add_argument(
        "--world-size", "--devices", type=positive_int, default=2, metavar="N", help="processes (default: 2)"
    )
    recorded.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    recorded.add_argument("--timeout-s", type=positive_float, default=300.0, metavar="S")


def run(args: argparse.Namespace) -> int:
    """Write trace and picture, and say in a line a rank what they show.

    Returns:
        The exit status, 0.

    Raises:
        BenchmarkError: the folder holds no recordings, or a process that records fails.
    """
    from lightning_ddp.errors import ConfigurationError
    from lightning_ddp.observe.picture import draw
    from lightning_ddp.observe.recording import load_folder
    from lightning_ddp.observe.timeline import chrome_trace, lanes_of
    from lightning_ddp.tools.bench import BenchmarkError

    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder
        if folder is None:
            folder = Path(scratch)
            _record(args, folder)
        try:
            recordings = load_folder(folder)
        except ConfigurationError as error:
            raise BenchmarkError(str(error)) from error
    lanes = lanes_of(recordings, num_steps=args.steps)
    if not any(lane.spans for lane in lanes):
        raise BenchmarkError("the ranks have no step in common")
    args.trace.write_text(json.dumps(chrome_trace(lanes)))
    draw(lanes, args.picture)
    for recording in recordings:
        steps = recording.steps[-args.steps :]
        exposed_ms = 1e3 * sum(step.exposed_s for step in steps) / len(steps)
        busy_ms = 1e3 * sum(step.communication_s for step in steps) / len(steps)
        print(
            f"rank {recording.rank} ({recording.host}): {busy_ms:.1f} ms a step with buckets on their way,"
            f" {exposed_ms:.1f} ms of them after backward"
        )
    missing = recordings[0].world_size - len(recordings)
    if missing:
        print(f"{missing} of {recordings[0].world_size} ranks have no file in {folder}")
    print(f"trace: {args.trace} (chrome://tracing, ui.perfetto.dev)\npicture: {args.picture}")
    return 0


def _record(args: argparse.Namespace, folder: Path) -> None:
    from lightning_ddp.tools.bench.processes import run_ranks
    from lightning_ddp.tools.bench.recorders import RecordSettings, record_steps

    settings = RecordSettings(model=args.model, folder=str(folder), num_steps=args.steps)
    run_ranks(
        record_steps, settings, world_size=args.world_size, device=args.device, timeout_s=args.timeout_s
    )
