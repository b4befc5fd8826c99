"""Write one HTML page about a recorded run: steps, communication that nothing hides, late ranks,
ranks that were lost or have joined, bytes.

Reads the folder that `CommunicationMonitor(timeline=folder)` has written. The page holds all it needs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path

from lightning_ddp.errors import ConfigurationError
from lightning_ddp.telemetry.lateness import lateness
from lightning_ddp.telemetry.picture import COLOURS, LABELS
from lightning_ddp.telemetry.recording import Change, Recording, load_folder
from lightning_ddp.telemetry.timeline import Lane, lanes_of
from lightning_ddp.tools import ToolError
from lightning_ddp.tools.arguments import output_path

Series = Mapping[str, Sequence[tuple[int, float]]]
"""Name -> step and value."""

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `report`."""
    parser.add_argument("folder", type=Path, help="recordings of a run, one file a rank")
    parser.add_argument(
        "--page",
        type=output_path,
        default=Path("report.html"),
        metavar="PATH",
        help="HTML page to write (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the page; returns the exit status, 0.

    Raises:
        ToolError: the folder holds no recordings, or none with a step.
    """
    recordings = load_recordings(args.folder)
    if not all(recording.steps for recording in recordings):
        raise ToolError(f"{args.folder}: a rank has recorded no step")
    args.page.write_text(page(recordings, title=args.folder.resolve().name), encoding="utf-8")
    print(f"page: {args.page}")
    return 0


def load_recordings(folder: Path) -> list[Recording]:
    """The recordings in a folder, by rank.

    Raises:
        ToolError: it holds none, or one that cannot be read.
    """
    try:
        return load_folder(folder)
    except ConfigurationError as error:
        raise ToolError(str(error)) from error


def changes_of(recordings: Sequence[Recording]) -> Sequence[Change]:
    """When the run went on with other ranks: what the rank has that was there longest."""
    return max((recording.changes for recording in recordings), key=len)


def page(recordings: Sequence[Recording], *, title: str) -> str:
    """The page about a run.

    Args:
        recordings: of its ranks, with a step each.
        title: of the run.
    """
    ranks = recordings[:_MOST_RANKS]
    late = _late_ms(recordings)
    first, last = recordings[0].steps[0].step, recordings[0].steps[-1].step
    size = recordings[0].world_size
    missing = f"; {size - len(recordings)} ranks have no file" if size > len(recordings) else ""
    exposed = {f"rank {r.rank}": [(s.step, 1e3 * s.exposed_s) for s in r.steps] for r in ranks}
    sent = {"gradients": [(step.step, step.num_bytes / _MB) for step in recordings[0].steps]}
    changes = changes_of(recordings)
    at = [change.step for change in changes]
    parts = [
        _table(recordings, late),
        _history(changes),
        _chart(
            "Time of a step, from forward to forward",
            "ms",
            {f"rank {r.rank}": _times_ms(r) for r in ranks},
            at,
        ),
        _chart("Communication after backward, which nothing hides", "ms", exposed, at),
        _chart(
            "How much later than the first rank each one had its gradients",
            "ms",
            {f"rank {r.rank}": late[r.rank] for r in ranks},
            at,
        ),
        _chart("Gradients that are averaged in a step (a hook may send less)", "MB", sent, at),
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
    """Rank -> step and how much later than the first rank it had its gradients."""
    common = sorted(set.intersection(*({step.step for step in r.steps} for r in recordings)))
    slacks = {r.rank: {s.step: s.slack_ns for s in r.steps} for r in recordings}
    us = {r: [v and v // 1000 for v in (by[n] for n in common)] for r, by in slacks.items()}
    late = lateness(common[0], us).late_us if common else {r.rank: [] for r in recordings}
    return {
        rank: [(n, v / _US_PER_MS) for n, v in zip(common, values, strict=True) if v is not None]
        for rank, values in late.items()
    }


def _table(recordings: Sequence[Recording], late: Mapping[int, Sequence[tuple[int, float]]]) -> str:
    rows = []
    for recording in recordings:
        columns = (
            [ms for _, ms in _times_ms(recording)],
            [1e3 * step.exposed_s for step in recording.steps],
            [ms for _, ms in late[recording.rank]],
            [step.num_bytes / _MB for step in recording.steps],
        )
        cells = "".join(f"<td>{statistics.median(c):.2f}</td>" if c else "<td>-</td>" for c in columns)
        rows.append(f"<tr><td>{recording.rank}</td><td>{escape(recording.host)}</td>{cells}</tr>")
    names = ("rank", "host", "step (ms)", "exposed communication (ms)", "late (ms)", "gradients (MB)")
    head = "".join(f"<th>{name}</th>" for name in names)
    return f"<p>Medians over the recorded steps.</p><table><tr>{head}</tr>{''.join(rows)}</table>"


def _history(changes: Sequence[Change]) -> str:
    """The ranks that were lost and have joined, a row for each time that the run went on."""
    if not changes:
        return ""
    rows = []
    for change in changes:
        ranks = (", ".join(map(str, ranks)) or "-" for ranks in (change.lost_ranks, change.joined_ranks))
        sizes = f"{change.old_world_size} to {change.new_world_size}"
        cells = (change.step, sizes, *ranks, f"{change.seconds:.2f}", change.why)
        rows.append(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in cells)}</tr>")
    names = ("from step", "ranks", "lost", "joined", "lost time (s)", "why")
    head = "".join(f"<th>{name}</th>" for name in names)
    seconds = sum(change.seconds for change in changes)
    return (
        f"<h2>Ranks that were lost or have joined ({seconds:.2f} s lost)</h2>"
        f"<table><tr>{head}</tr>{''.join(rows)}</table>"
        "<p>Ranks are numbered as they were before (lost) and are since (joined). A dashed line in the charts"
        " is a step from which other ranks went on.</p>"
    )


def _chart(title: str, unit: str, series: Series, changes: Sequence[int] = ()) -> str:
    """A line for each series over the steps, and a dashed one where the ranks have changed."""
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
    """The last steps: of each rank a row of what it computes, and rows of buckets."""
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
