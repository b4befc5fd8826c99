"""Draw recorded steps: what each rank computes, which buckets are on their way, and what nothing hides.

Draws the folder that `CommunicationMonitor(timeline=folder)` has written; without one, it records a model of
`bench step` in processes of its own. Writes a trace for chrome://tracing or Perfetto, and a PNG or SVG.
"""

from __future__ import annotations

import argparse
import json
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_ddp.errors import ConfigurationError
from lightning_ddp.hooks import build_hook
from lightning_ddp.telemetry.picture import draw
from lightning_ddp.telemetry.recording import Recording, load_folder, save
from lightning_ddp.telemetry.timeline import chrome_trace, lanes_of
from lightning_ddp.tools import ToolError
from lightning_ddp.tools.arguments import add_shared, output_path, positive_int
from lightning_ddp.tools.contenders import OURS, TrainingRun
from lightning_ddp.tools.models import MODEL_NAMES, build_workload
from lightning_ddp.tools.ranks import RankContext, run_ranks, synchronize

_NUM_WARMUP_STEPS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `timeline`."""
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
    parser.add_argument(
        "--model",
        choices=MODEL_NAMES,
        default="linear16",
        help="what is trained without a folder (default: %(default)s)",
    )
    add_shared(parser, world_size=2, device="cpu", timeout_s=300.0)


def run(args: argparse.Namespace) -> int:
    """Write trace and picture, and say in a line a rank what they show; returns the exit status, 0.

    Raises:
        ToolError: the folder holds no recordings, or a process that records fails.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder
        if folder is None:
            folder = Path(scratch)
            settings = RecordSettings(model=args.model, folder=scratch, num_steps=args.steps)
            options = {"world_size": args.world_size, "device": args.device, "timeout_s": args.timeout_s}
            run_ranks(record_steps, settings, **options)
        try:
            recordings = load_folder(folder)
        except ConfigurationError as error:
            raise ToolError(str(error)) from error
    lanes = lanes_of(recordings, num_steps=args.steps)
    if not any(lane.spans for lane in lanes):
        raise ToolError("the ranks have no step in common")
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


@dataclass(frozen=True, kw_only=True)
class RecordSettings:
    """What `record_steps` trains."""

    model: str
    folder: str
    """Where each rank leaves its file."""
    num_steps: int
    """Steps that are kept."""
    communicates: bool = True
    """Whether gradients are averaged; else the recording is of what each rank computes."""


def record_steps(context: RankContext, settings: RecordSettings) -> list[list[tuple[int, ...]]]:
    """Train, and write the last steps of this rank; all ranks, communicates.

    Returns:
        Shapes of the parameters of each bucket, where gradients are not averaged.
    """
    training = TrainingRun(OURS, build_workload(settings.model, rank=context.rank), context.device)
    wrapped: Any = training.wrapped
    shapes: dict[int, list[tuple[int, ...]]] = {}
    hook = build_hook("noop", wrapped.process_group, context.device)

    def look(state: object, bucket: Any) -> Any:
        shapes[bucket.index()] = [tuple(parameter.shape) for parameter in bucket.parameters()]
        return hook(None, bucket)

    if not settings.communicates:
        wrapped.register_comm_hook(None, look)
    recorder = wrapped.record_steps(settings.num_steps)
    for _ in range(_NUM_WARMUP_STEPS + settings.num_steps):
        training.step()
        synchronize(context.device)  # on CUDA a step is kept once the device has finished it
    size, steps = context.world_size, list(recorder.records)
    recording = Recording(rank=context.rank, world_size=size, host=socket.gethostname(), steps=steps)
    save(Path(settings.folder), recording)
    return [found for _, found in sorted(shapes.items())]
