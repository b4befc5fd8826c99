"""Commands about recorded steps: `timeline` draws the last ones, `report` writes a page about the run.

Both read the folder that `CommunicationMonitor(timeline=folder)` has written. Without a folder, `timeline`
records a model of `bench step` in new processes.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_ddp.hooks import build_hook
from lightning_ddp.telemetry.timeline import (
    COLOURS,
    LABELS,
    Change,
    Lane,
    Recording,
    chrome_trace,
    draw,
    lanes_of,
    lateness,
    load_folder,
    save,
)
from lightning_ddp.tools import ToolError
from lightning_ddp.tools.command_line import add_shared, output_path, positive_int
from lightning_ddp.tools.models import MODEL_NAMES, MODELS_HELP, OURS, TrainingRun, build_workload
from lightning_ddp.tools.ranks import RankContext, run_ranks, synchronize

Series = Mapping[str, Sequence[tuple[int, float]]]
"""Steps and values, by name of the series."""

_NS_PER_MS, _US_PER_MS, _MB = 1e6, 1e3, 1e6
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 920, 220, 70, 10, 40
_INKS = ("#2874a6", "#e67e22", "#1e8449", "#c0392b", "#7d3c98", "#17a589", "#7f8c8d", "#b7950b")
_MOST_RANKS, _NUM_STEPS, _ROW = 8, 4, 18
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:960px;margin:2em auto;color:#222}"
    "table{border-collapse:collapse}"
    "td,th{padding:.2em 1em .2em 0;text-align:right;border-bottom:1px solid #ddd}"
    "svg{display:block}svg text{font:12px system-ui,sans-serif;fill:#333}"
    ".key{display:inline-block;width:.8em;height:.8em;margin:0 .3em 0 1em}"
)
_NUM_WARMUP_STEPS = 5


def changes_of(recordings: Sequence[Recording]) -> Sequence[Change]:
    """Return the changes of ranks in a run, from the recording with the most changes."""
    return max((recording.changes for recording in recordings), key=len)


# ---------------------------------------------------------------------- the last steps


class Timeline:
    """Draw recorded steps: computation of each rank, buckets in transit, and exposed communication.

    Writes a trace for chrome://tracing or Perfetto, and a PNG or SVG.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options of `timeline`."""
        parser.add_argument(
            "folder",
            nargs="?",
            type=Path,
            help="folder that CommunicationMonitor(timeline=FOLDER) has written",
        )
        for name, default, what in (
            ("--trace", Path("timeline.json"), "Chrome trace file to write"),
            ("--picture", Path("timeline.png"), "PNG or SVG file to write"),
        ):
            text = f"{what} (default: %(default)s)"
            parser.add_argument(name, type=output_path, default=default, metavar="PATH", help=text)
        text = "number of last steps to show, common to all ranks (default: %(default)s)"
        parser.add_argument("--steps", type=positive_int, default=4, metavar="N", help=text)
        text = f"without a folder, the model to train: {MODELS_HELP} (default: %(default)s)"
        parser.add_argument("--model", choices=MODEL_NAMES, default="linear16", help=text)
        add_shared(parser, world_size=2, device="cpu", timeout_s=300.0)

    def run(self, args: argparse.Namespace) -> int:
        """Write trace and picture, and print one line per rank; return the exit status 0."""
        with tempfile.TemporaryDirectory() as scratch:
            folder = args.folder
            if folder is None:
                folder = Path(scratch)
                settings = RecordSettings(model=args.model, folder=scratch, num_steps=args.steps)
                options = {"world_size": args.world_size, "device": args.device, "timeout_s": args.timeout_s}
                run_ranks(record_steps, settings, **options)
            recordings = load_folder(folder)
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
                f"rank {recording.rank} ({recording.host}): {busy_ms:.1f} ms per step of bucket"
                f" communication, {exposed_ms:.1f} ms of it after backward"
            )
        missing = recordings[0].world_size - len(recordings)
        if missing:
            print(f"{missing} of {recordings[0].world_size} ranks have no file in {folder}")
        print(f"trace: {args.trace} (chrome://tracing, ui.perfetto.dev)\npicture: {args.picture}")
        return 0


@dataclass(frozen=True, kw_only=True)
class RecordSettings:
    """Settings of `record_steps`."""

    model: str
    folder: str
    """Folder for the files of the ranks."""
    num_steps: int
    """Number of recorded steps."""
    communicates: bool = True
    """True to average gradients; False to record the computation of each rank alone."""


def record_steps(context: RankContext, settings: RecordSettings) -> list[list[tuple[int, ...]]]:
    """Train, and write the last steps of this rank.

    Returns the shapes of the parameters of each bucket, if gradients are not averaged.

    Collective: all ranks must call it.
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


# ---------------------------------------------------------------------- the page of a run


class Report:
    """Write one HTML page about a recorded run: steps, exposed communication, late and lost ranks, bytes."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options of `report`."""
        parser.add_argument(
            "folder", type=Path, help="folder that CommunicationMonitor(timeline=FOLDER) has written"
        )
        text = "HTML page to write (default: %(default)s)"
        parser.add_argument(
            "--page", type=output_path, default=Path("report.html"), metavar="PATH", help=text
        )

    def run(self, args: argparse.Namespace) -> int:
        """Write the page; return the exit status 0."""
        recordings = load_folder(args.folder)
        if not all(recording.steps for recording in recordings):
            raise ToolError(f"{args.folder}: a rank has recorded no step")
        args.page.write_text(page(recordings, title=args.folder.resolve().name), encoding="utf-8")
        print(f"page: {args.page}")
        return 0


def page(recordings: Sequence[Recording], *, title: str) -> str:
    """Return the HTML page of a run from its ranks' recordings, which must each have a step."""
    ranks = recordings[:_MOST_RANKS]
    late = _late_ms(recordings)
    first, last = recordings[0].steps[0].step, recordings[0].steps[-1].step
    size = recordings[0].world_size
    missing = f"; {size - len(recordings)} ranks have no file" if size > len(recordings) else ""
    exposed = {f"rank {r.rank}": [(s.step, 1e3 * s.exposed_s) for s in r.steps] for r in ranks}
    sent = {"gradients": [(step.step, step.num_bytes / _MB) for step in recordings[0].steps]}
    changes = changes_of(recordings)
    charts: tuple[tuple[str, str, Series], ...] = (
        ("Time of a step, from forward to forward", "ms", {f"rank {r.rank}": _times_ms(r) for r in ranks}),
        ("Exposed communication, after backward", "ms", exposed),
        (
            "Delay of each rank's gradients after those of the first rank",
            "ms",
            {f"rank {r.rank}": late[r.rank] for r in ranks},
        ),
        ("Gradients that are averaged in a step (a hook may send less)", "MB", sent),
    )
    parts = [
        _table(recordings, late),
        _history(changes),
        *(_chart(title, unit, series, [change.step for change in changes]) for title, unit, series in charts),
        _timeline(lanes_of(ranks, num_steps=_NUM_STEPS)),
    ]
    heading = f"Run {escape(title)}: {size} ranks, steps {first} to {last}{missing}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{heading}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{heading}</h1>{''.join(parts)}</body></html>\n"
    )


def _times_ms(recording: Recording) -> list[tuple[int, float]]:
    return [
        (step.step, (after.forward_start - step.forward_start) / _NS_PER_MS)
        for step, after in pairwise(recording.steps)
        if after.step == step.step + 1 and None not in (step.forward_start, after.forward_start)
    ]


def _late_ms(recordings: Sequence[Recording]) -> dict[int, list[tuple[int, float]]]:
    """Return steps and delays of each rank's gradients after the first rank's, in ms, by rank."""
    common = sorted(set.intersection(*({step.step for step in r.steps} for r in recordings)))
    slacks = {r.rank: {s.step: s.slack_ns for s in r.steps} for r in recordings}
    us = {r: [v and v // 1000 for v in (by[n] for n in common)] for r, by in slacks.items()}
    late = lateness(common[0], us).late_us if common else {r.rank: [] for r in recordings}
    return {
        rank: [(n, v / _US_PER_MS) for n, v in zip(common, values, strict=True) if v is not None]
        for rank, values in late.items()
    }


def _rows(names: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in names)
    lines = ("".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _table(recordings: Sequence[Recording], late: Mapping[int, Sequence[tuple[int, float]]]) -> str:
    rows = []
    for recording in recordings:
        columns = (
            [ms for _, ms in _times_ms(recording)],
            [1e3 * step.exposed_s for step in recording.steps],
            [ms for _, ms in late[recording.rank]],
            [step.num_bytes / _MB for step in recording.steps],
        )
        cells = (f"{statistics.median(column):.2f}" if column else "-" for column in columns)
        rows.append((recording.rank, recording.host, *cells))
    names = ("rank", "host", "step (ms)", "exposed communication (ms)", "late (ms)", "gradients (MB)")
    return f"<p>Medians over the recorded steps.</p>{_rows(names, rows)}"


def _history(changes: Sequence[Change]) -> str:
    """Return a table of lost and joined ranks, with a row per change."""
    if not changes:
        return ""
    rows = []
    for change in changes:
        ranks = (", ".join(map(str, ranks)) or "-" for ranks in (change.lost_ranks, change.joined_ranks))
        sizes = f"{change.old_world_size} to {change.new_world_size}"
        rows.append((change.step, sizes, *ranks, f"{change.seconds:.2f}", change.why))
    seconds = sum(change.seconds for change in changes)
    return (
        f"<h2>Ranks that were lost or have joined ({seconds:.2f} s lost)</h2>"
        f"{_rows(('from step', 'ranks', 'lost', 'joined', 'lost time (s)', 'why'), rows)}"
        "<p>Ranks are numbered as they were before (lost) and are since (joined). A dashed line in the charts"
        " is a step from which other ranks went on.</p>"
    )


def _chart(title: str, unit: str, series: Series, changes: Sequence[int] = ()) -> str:
    """Return a chart with a line per series over the steps, and a dashed line at changes of ranks."""
    points = [point for values in series.values() for point in values]
    if not points:
        return ""
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    top = max(y for _, y in points) or 1.0
    right, base = _WIDTH - 20, _HEIGHT - _BOTTOM

    def x_of(step: float) -> float:
        return _LEFT + (right - _LEFT) * (step - low) / max(high - low, 1)

    def y_of(value: float) -> float:
        return base - (base - _TOP) * value / top

    drawn = [
        f'<line x1="{_LEFT}" x2="{right}" y1="{y_of(v):.1f}" y2="{y_of(v):.1f}" stroke="#ddd"/>'
        f'<text x="{_LEFT - 8}" y="{y_of(v) + 4:.1f}" text-anchor="end">{v:.3g}</text>'
        for v in (0.0, top / 2, top)
    ]
    for step in sorted({low, (low + high) // 2, high}):
        drawn.append(f'<text x="{x_of(step):.1f}" y="{base + 16}" text-anchor="middle">{step}</text>')
    drawn.append(f'<text x="{(_LEFT + right) / 2}" y="{base + 34}" text-anchor="middle">step</text>')
    drawn += [
        f'<line x1="{x_of(step):.1f}" x2="{x_of(step):.1f}" y1="{_TOP}" y2="{base}" stroke="#555"'
        ' stroke-dasharray="4 3"/>'
        for step in changes
        if low <= step <= high
    ]
    keys = {name: _INKS[i % len(_INKS)] for i, name in enumerate(series)}
    for name, values in series.items():
        line = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in values)
        drawn.append(f'<polyline points="{line}" fill="none" stroke="{keys[name]}" stroke-width="1.5"/>')
    return f"<h2>{title} ({unit})</h2>{_legend(keys)}{_svg(_HEIGHT, drawn)}"


def _timeline(lanes: Sequence[Lane]) -> str:
    """Return a picture of the last steps, with a row of computation and rows of buckets per rank."""
    whole = max((span.end_ns for lane in lanes for span in lane.spans), default=0)
    if not whole:
        return ""
    right, drawn, top = _WIDTH - 20, [], 0
    for lane in lanes:
        drawn.append(f'<text x="0" y="{top + _ROW - 5}">rank {lane.rank}</text>')
        for span in lane.spans:
            x, width = (_LEFT + (right - _LEFT) * t / whole for t in (span.start_ns, span.end_ns))
            drawn.append(
                f'<rect x="{x:.1f}" y="{top + span.row * _ROW}" width="{max(width - x, 0.5):.1f}"'
                f' height="{_ROW - 3}" fill="{COLOURS[span.kind]}"><title>{span.name}, step {span.step}:'
                f" {(span.end_ns - span.start_ns) / _NS_PER_MS:.2f} ms</title></rect>"
            )
        top += lane.num_rows * _ROW + 10
    drawn.append(f'<text x="{_LEFT}" y="{top + 12}">0 ms</text>')
    drawn.append(f'<text x="{right}" y="{top + 12}" text-anchor="end">{whole / _NS_PER_MS:.1f} ms</text>')
    legend = _legend({LABELS[kind]: colour for kind, colour in COLOURS.items()})
    return f"<h2>The last {_NUM_STEPS} steps on one time axis</h2>{legend}{_svg(top + 20, drawn)}"


def _legend(keys: Mapping[str, str]) -> str:
    items = (f'<span class="key" style="background:{ink}"></span>{name}' for name, ink in keys.items())
    return f"<p>{''.join(items)}</p>"


def _svg(height: int, drawn: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}">{"".join(drawn)}</svg>'
