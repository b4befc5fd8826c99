"""Draws the lanes of ranks: compute above, buckets below, and what the rank waits for after backward."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_ddp.telemetry.timeline import Lane, Span

__all__ = ["COLOURS", "LABELS", "draw"]

_NS_PER_MS = 1_000_000
COLOURS = {
    "forward": "#7fb3d5",
    "backward": "#2874a6",
    "exposed": "#e74c3c",
    "queued": "#fdebd0",
    "bucket": "#f0b27a",
}
LABELS = {
    "forward": "forward",
    "backward": "backward",
    "exposed": "rank waits for buckets",
    "queued": "bucket waits for its turn, or for another rank",
    "bucket": "bucket is reduced",
}
_ROW_HEIGHT = 0.8
_NARROWEST_TEXT = 0.045  # part of the width that a name needs


def draw(lanes: Sequence[Lane], path: Path) -> None:
    """Draws all lanes over one time axis.

    Args:
        lanes: from the top down.
        path: its suffix says the format, such as .png or .svg.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]  # an optional dependency

    num_rows = sum(lane.num_rows + 1 for lane in lanes)
    figure = Figure(figsize=(14, 1.5 + 0.28 * num_rows), layout="constrained")
    axes = figure.subplots()
    whole_ms = max((span.end_ns for lane in lanes for span in lane.spans), default=0) / _NS_PER_MS or 1.0
    ticks: list[tuple[float, str]] = []
    top = 0
    for lane in lanes:
        for span in lane.spans:
            _draw_span(axes, span, top + span.row, whole_ms)
        ticks.append((top + lane.num_rows / 2 - 0.5, f"rank {lane.rank}\n{lane.host}"))
        top += lane.num_rows
        axes.axhline(top, color="0.8", linewidth=0.8)
        top += 1
    axes.set_xlim(0, whole_ms)
    axes.set_ylim(top - 0.5, -0.7)
    axes.set_yticks([y for y, _ in ticks], [text for _, text in ticks])
    axes.set_xlabel("milliseconds since the first forward that is shown")
    steps = sorted({span.step for lane in lanes for span in lane.spans})
    figure.suptitle(f"Steps {steps[0]} to {steps[-1]}: what each rank computes, and the way of its buckets")
    axes.legend(
        handles=[_sample(kind) for kind in LABELS], loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5
    )
    figure.savefig(path, dpi=150)


def _draw_span(axes: object, span: Span, y: float, whole_ms: float) -> None:
    start, width = span.start_ns / _NS_PER_MS, (span.end_ns - span.start_ns) / _NS_PER_MS
    colour = COLOURS[span.kind]
    axes.barh(y, width, left=start, height=_ROW_HEIGHT, color=colour, edgecolor="white", linewidth=0.3)  # type: ignore[attr-defined]
    if width > _NARROWEST_TEXT * whole_ms:
        text = span.kind if span.bucket is None else f"{span.bucket}: {_size(span.num_bytes)}"
        shade = "white" if span.kind in ("backward", "exposed") else "black"
        axes.text(start + width / 2, y, text, color=shade, ha="center", va="center", fontsize=7)  # type: ignore[attr-defined]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 100_000 else f"{num_bytes / 1e3:.1f} kB"


def _sample(kind: str) -> object:
    from matplotlib.patches import Patch  # type: ignore[import-not-found,unused-ignore]

    return Patch(color=COLOURS[kind], label=LABELS[kind])
