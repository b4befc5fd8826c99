"""Commands about recorded steps: `timeline` draws the last ones, `report` writes a page about the run.

Both read the folder that `CommunicationMonitor(timeline=folder)` has written. Without a folder, `timeline`
records a model of `bench step` in new processes.
"""

from __future__ import annotations

import argparse
import json
import math
import socket
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_ddp.hooks import build_hook
from lightning_ddp.telemetry.step_record import StepRecord
from lightning_ddp.telemetry.timeline import (
    Change,
    Lane,
    Recording,
    chrome_trace,
    lanes_of,
    lateness,
    load_folder,
    save,
)
from lightning_ddp.tools import ToolError
from lightning_ddp.tools.command_line import (
    add_shared,
    format_table,
    output_path,
    picture_path,
    positive_int,
    save_panels,
)
from lightning_ddp.tools.models import MODEL_NAMES, MODELS_HELP, OURS, TrainingRun, build_workload
from lightning_ddp.tools.ranks import RankContext, run_ranks, synchronize

Points = Sequence[tuple[int, float]]
"""Steps with a value of each."""

_FOLDER_HELP = "folder that CommunicationMonitor(timeline=FOLDER) has written"
_NS_PER_MS, _MB = 1e6, 1e6
_MOST_RANKS, _NUM_STEPS = 8, 4
_WIDTH = 13.0  # of a timeline in inches
_NARROWEST_TEXT = 0.045  # fraction of the width that a name needs
_NUM_WARMUP_STEPS = 5
_HOST_BOUND = 0.9
"""Share of a step's time from which on the host, which only queues, is what the GPU waits for."""
_FEW_BUCKETS, _SMALL_BUCKET_MB = 2, 4.0
KINDS: Mapping[str, tuple[str, str]] = {
    "forward": ("#aed6f1", "forward"),
    "backward": ("#5dade2", "backward"),
    "exposed": ("#e74c3c", "rank waits for buckets"),
    "queued": ("#fdebd0", "bucket waits for its turn, or for another rank"),
    "bucket": ("#f0b27a", "bucket is reduced"),
}
"""Colors and labels of spans, by kind."""


# ---------------------------------------------------------------------- the last steps


class Timeline:
    """Draw recorded steps: computation of each rank, buckets in transit, and exposed communication.

    Writes a trace for chrome://tracing or Perfetto, and a picture.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("folder", nargs="?", type=Path, help=_FOLDER_HELP)
        text = "Chrome trace file to write (default: %(default)s)"
        parser.add_argument("--trace", type=output_path, default="timeline.json", metavar="PATH", help=text)
        text = "PNG, SVG or PDF file to write (default: %(default)s)"
        parser.add_argument("--picture", type=picture_path, default="timeline.png", metavar="PATH", help=text)
        text = "number of last steps to show, common to all ranks (default: %(default)s)"
        parser.add_argument("--steps", type=positive_int, default=4, metavar="N", help=text)
        text = f"without a folder, the model to train: {MODELS_HELP} (default: %(default)s)"
        parser.add_argument("--model", choices=MODEL_NAMES, default="linear16", help=text)
        add_shared(parser, world_size=2, device="cpu", timeout_s=300.0)

    def run(self, args: argparse.Namespace) -> int:
        with tempfile.TemporaryDirectory() as scratch:
            folder = args.folder
            if folder is None:
                folder = Path(scratch)
                options = {"world_size": args.world_size, "device": args.device, "timeout_s": args.timeout_s}
                run_ranks(record_steps, args.model, scratch, args.steps, **options)
            recordings = load_folder(folder)
        lanes = lanes_of(recordings, num_steps=args.steps)
        draw_lanes(lanes, args.picture)
        args.trace.write_text(json.dumps(chrome_trace(lanes)))
        for recording in recordings:
            steps = recording.steps[-args.steps :]
            exposed_ms = 1e3 * statistics.mean(step.exposed_s for step in steps)
            busy_ms = 1e3 * statistics.mean(step.communication_s for step in steps)
            print(
                f"rank {recording.rank} ({recording.host}): {busy_ms:.1f} ms per step of bucket"
                f" communication, {exposed_ms:.1f} ms of it after backward"
            )
        missing = recordings[0].world_size - len(recordings)
        if missing:
            print(f"{missing} of {recordings[0].world_size} ranks have no file in {folder}")
        print(f"trace: {args.trace} (chrome://tracing, ui.perfetto.dev)\npicture: {args.picture}")
        return 0


def draw_lanes(lanes: Sequence[Lane], path: Path) -> None:
    """Draw the timelines of all ranks and save the picture: rows of computation and of buckets for each."""
    steps = [span.step for lane in lanes for span in lane.spans]
    if not steps:
        raise ToolError("the ranks have no step in common")
    title = f"Steps {min(steps)} to {max(steps)}: computation and bucket communication of each rank"
    height = 1.2 + 0.28 * sum(lane.num_rows + 1 for lane in lanes)
    save_panels(path, {"": partial(_draw_lanes, lanes)}, title=title, height=height, width=_WIDTH)


def _draw_lanes(lanes: Sequence[Lane], axes: Any) -> None:
    from matplotlib.patches import Patch  # type: ignore[import-not-found,unused-ignore]  # an optional dependency

    whole = max(span.end_ns for lane in lanes for span in lane.spans) / _NS_PER_MS
    ticks: dict[float, str] = {}
    top = 0
    for lane in lanes:
        for span in lane.spans:
            start, end, y = span.start_ns / _NS_PER_MS, span.end_ns / _NS_PER_MS, top + span.row
            axes.barh(y, end - start, left=start, color=KINDS[span.kind][0], edgecolor="white", linewidth=0.3)
            if end - start > _NARROWEST_TEXT * whole:
                bucket = span.bucket
                text = span.kind if bucket is None else f"{bucket.index}: {bucket.num_bytes / _MB:.2g} MB"
                axes.text((start + end) / 2, y, text, ha="center", va="center", fontsize=7)
        ticks[top + lane.num_rows / 2 - 0.5] = f"rank {lane.rank}\n{lane.host}"
        top += lane.num_rows + 1
    axes.set(xlim=(0, whole), ylim=(top - 0.5, -0.7), xlabel="ms since the first forward that is shown")
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.set_axisbelow(True)
    keys = [Patch(color=color, label=label) for color, label in KINDS.values()]
    axes.legend(handles=keys, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(keys))


def record_steps(
    context: RankContext, model: str, folder: str, num_steps: int, *, communicates: bool = True
) -> None:
    """Train a model, and write the times of this rank's last steps to a folder.

    Without `communicates` gradients are not averaged.
    Collective: all ranks must call it.
    """
    training = TrainingRun(OURS, build_workload(model, rank=context.rank), context.device)
    if not communicates:
        hook = build_hook("noop", training.wrapped.process_group, context.device)
        training.wrapped.register_comm_hook(None, hook)
    recorder = training.wrapped.record_steps(num_steps)
    for _ in range(_NUM_WARMUP_STEPS + num_steps):
        training.step()
        synchronize(context.device)  # on CUDA a step is kept once the device has finished it
    where: dict[str, Any] = {"rank": context.rank, "world_size": context.world_size}
    save(Path(folder), Recording(**where, host=socket.gethostname(), steps=list(recorder.records)))


# ---------------------------------------------------------------------- the page of a run


class Report:
    """Write one HTML page about a recorded run: steps, exposed communication, late and lost ranks, bytes."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("folder", type=Path, help=_FOLDER_HELP)
        text = "HTML page to write (default: %(default)s)"
        parser.add_argument("--page", type=output_path, default="report.html", metavar="PATH", help=text)

    def run(self, args: argparse.Namespace) -> int:
        recordings = load_folder(args.folder)
        if not all(recording.steps for recording in recordings):
            raise ToolError(f"{args.folder}: a rank has recorded no step")
        try:
            text = page(recordings, title=args.folder.resolve().name)
        except ModuleNotFoundError as error:
            raise ToolError(f"drawing needs {error.name}: pip install {error.name}") from error
        args.page.write_text(text, encoding="utf-8")
        print(f"page: {args.page}")
        return 0


def page(recordings: Sequence[Recording], *, title: str) -> str:
    """Return the HTML page of a run from its ranks' recordings, which must each have a step."""
    first, last = recordings[0].steps[0].step, recordings[0].steps[-1].step
    size = recordings[0].world_size
    missing = f"; {size - len(recordings)} ranks have no file" if size > len(recordings) else ""
    heading = f"Run {escape(title)}: {size} ranks, steps {first} to {last}{missing}"
    changes = max((recording.changes for recording in recordings), key=len)
    values = _values(recordings)
    steps = [change.step for change in changes if first <= change.step <= last]
    charts = {name: partial(_draw_series, of, steps) for name, of in values.items()}
    lanes = lanes_of(recordings[:_MOST_RANKS], num_steps=_NUM_STEPS)
    with tempfile.TemporaryDirectory() as scratch:
        pictures = [Path(scratch, "charts.svg"), Path(scratch, "timeline.svg")]
        save_panels(pictures[0], charts, title="", height=3.0)
        if any(lane.spans for lane in lanes):
            draw_lanes(lanes, pictures[1])
        drawn = [picture.read_text(encoding="utf-8") for picture in pictures if picture.exists()]
    advice = {recording.rank: host_advice(recording.steps) for recording in recordings}
    lines = "".join(f"<li>rank {rank}: {escape(text)}</li>" for rank, text in advice.items() if text)
    parts = [_medians(recordings, values)]
    parts += [f"<h2>GPUs that wait for the host</h2><ul>{lines}</ul>"] if lines else []
    parts += [_history(changes), *(svg[svg.index("<svg") :] for svg in drawn)]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{heading}</title><style>svg'
        f"{{width:100%;height:auto}}</style></head><body><h1>{heading}</h1>{''.join(parts)}</body></html>\n"
    )


def _values(recordings: Sequence[Recording]) -> dict[str, dict[int, Points]]:
    """Return the points (step, value) of each chart of the page: by title with the unit, then by rank."""
    by_rank = {recording.rank: recording.steps for recording in recordings}
    common = sorted(set.intersection(*({step.step for step in steps} for steps in by_rank.values())))
    slacks = {r: [step.slack_ns for step in steps if step.step in common] for r, steps in by_rank.items()}
    return {
        "step (ms)": {rank: _durations(steps) for rank, steps in by_rank.items()},
        "exposed communication (ms)": {
            r: [(s.step, 1e3 * s.exposed_s) for s in of] for r, of in by_rank.items()
        },
        "late (ms)": {
            rank: [(n, late / _NS_PER_MS) for n, late in zip(common, values, strict=True) if late is not None]
            for rank, values in lateness(slacks).items()
        },
        "averaged gradients (MB)": {
            r: [(s.step, s.num_bytes / _MB) for s in of] for r, of in by_rank.items()
        },
    }


def _durations(steps: Sequence[StepRecord]) -> Points:
    return [
        (step.step, (after.forward_start - step.forward_start) / _NS_PER_MS)
        for step, after in pairwise(steps)
        if after.step == step.step + 1 and None not in (step.forward_start, after.forward_start)
    ]


def _draw_series(by_rank: Mapping[int, Points], changes: Sequence[int], axes: Any) -> None:
    """Draw a line for each of the first ranks over the steps, and a dashed line at changes of ranks."""
    for rank, points in list(by_rank.items())[:_MOST_RANKS]:
        steps, values = [step for step, _ in points], [value for _, value in points]
        axes.plot(steps, values, linewidth=1.2, label=f"rank {rank}")
    for step in changes:
        axes.axvline(step, color="0.3", linestyle="--", linewidth=1)
    axes.set(xlabel="step", ylim=(0, None))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize="small", ncols=4)


def _medians(recordings: Sequence[Recording], values: Mapping[str, Mapping[int, Points]]) -> str:
    rows = []
    for recording in recordings:
        columns = ([value for _, value in by_rank[recording.rank]] for by_rank in values.values())
        cells = (f"{statistics.median(column):.2f}" if column else "-" for column in columns)
        rows.append((str(recording.rank), recording.host, *cells))
    table = format_table(("rank", "host", *values), rows)
    return f"<h2>Medians of the recorded steps</h2><pre>{escape(table)}</pre>"


def host_advice(steps: Sequence[StepRecord]) -> str | None:
    """Return why the GPU of recorded steps waits for the host, and what to set; None if it does not wait."""
    spans = [(s.host_ns, s.forward_start, s.comm_end) for s in steps if s.host_ns is not None]
    shares = [host / (end - start) for host, start, end in spans if None not in (start, end)]
    if not shares or statistics.median(shares) < _HOST_BOUND:
        return None
    last, causes = steps[-1], []
    num_buckets, num_mb = len(last.buckets), last.num_bytes / _MB
    if last.num_broadcasts:
        causes.append("forward broadcasts buffers: broadcast_buffers=False, if ranks may keep their own")
    if num_buckets > _FEW_BUCKETS and num_mb / num_buckets < _SMALL_BUCKET_MB:
        causes.append(f"{num_buckets} buckets for {num_mb:.1f} MB: bucket_cap_mb={math.ceil(num_mb)}")
    causes.append(
        "calls in each step that wait for the GPU, such as .item() or a printed loss: find them with"
        " torch.cuda.set_sync_debug_mode('warn'), and larger batches or torch.compile for many small kernels"
    )
    share = statistics.median(shares)
    return f"the host needs {share:.0%} of the time of a step, so the GPU waits for it. " + "; ".join(causes)


def _history(changes: Sequence[Change]) -> str:
    """Return as HTML a table of lost and joined ranks, with a row per change; '' without changes."""
    if not changes:
        return ""
    rows = []
    for change in changes:
        ranks = (", ".join(map(str, ranks)) or "-" for ranks in (change.lost_ranks, change.joined_ranks))
        sizes = f"{change.old_world_size} to {change.new_world_size}"
        why = change.cause or ("asked to leave" if change.lost_ranks else "new processes")
        rows.append((str(change.step), sizes, *ranks, f"{change.seconds:.2f}", why))
    names = ("from step", "ranks", "lost", "joined", "lost time (s)", "why")
    return (
        f"<h2>Ranks that were lost or have joined</h2><pre>{escape(format_table(names, rows))}</pre><p>Ranks"
        " are numbered as they were before (lost) and are since (joined). A dashed line in the charts is a"
        " step from which other ranks went on.</p>"
    )
