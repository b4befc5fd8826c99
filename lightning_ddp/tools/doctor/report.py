"""Report of the doctor: lays the verdict out as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lightning_ddp.tools.doctor.checks import Finding, worst
from lightning_ddp.tools.doctor.measure import Line, Timing
from lightning_ddp.tools.report import format_table

__all__ = ["format_json", "format_report"]

_ADVICE = {
    "PASS": "nothing stands in the way of a run",
    "WARN": "a run can start; see the lines with WARN",
    "FAIL": "a run would fail; see the lines with FAIL",
}


def format_report(
    answers: Sequence[Mapping[str, Any]],
    timings: Sequence[Timing],
    line: Line | None,
    findings: Sequence[Finding],
) -> str:
    """Ranks, times and the line through them, then the findings; the last line is the verdict."""
    parts = [_ranks(answers)]
    if timings:
        parts.append(_times(answers, timings, line))
    width = max(len(finding.check) for finding in findings)
    parts.append("\n".join(f"{f.level}  {f.check.ljust(width)}  {f.message}" for f in findings))
    verdict = worst(findings)
    parts.append(f"{verdict}: {_ADVICE[verdict]}")
    return "\n\n".join(parts)


def format_json(
    answers: Sequence[Mapping[str, Any]],
    timings: Sequence[Timing],
    line: Line | None,
    findings: Sequence[Finding],
) -> str:
    """The same for programs."""
    document = {
        "verdict": worst(findings),
        "findings": [asdict(finding) for finding in findings],
        "ranks": list(answers),
        "all_reduce": {
            "timings": [asdict(timing) for timing in timings],
            "line": None if line is None else asdict(line),
        },
    }
    return json.dumps(document, indent=2)


def _ranks(answers: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            str(answer["rank"]),
            str(answer["host"]),
            str(answer["pid"]),
            answer["devices"][answer["local_rank"]]
            if answer["local_rank"] < len(answer["devices"])
            else f"CPU ({answer['num_cpus']} cores)",
            str(answer["backend"]),
            str(answer.get("interface") or "-"),
            f"{answer['clock']['offset_s'] * 1e3:+.2f}" if "clock" in answer else "-",
        )
        for answer in answers
    ]
    table = format_table(("rank", "host", "pid", "device", "backend", "interface", "clock (ms)"), rows)
    variables = "\n".join(f"  {name}={value}" for name, value in answers[0]["variables"].items())
    return f"{table}\n\nVariables of rank {answers[0]['rank']}:\n{variables or '  none'}"


def _times(answers: Sequence[Mapping[str, Any]], timings: Sequence[Timing], line: Line | None) -> str:
    world_size = len(answers)
    rows = [
        (
            _size(timing.num_bytes),
            timing.seconds * 1e3,
            timing.num_bytes / timing.seconds / 1e9,
            line.seconds(timing.num_bytes) * 1e3 if line is not None else float("nan"),
        )
        for timing in timings
    ]
    table = format_table(("all-reduce", "ms", "GB/s", "line (ms)"), rows)
    text = (
        f"float32 over {answers[0]['measured_on']}, {world_size} ranks, median of the slowest rank:\n{table}"
    )
    if line is None:
        return text
    return (
        f"{text}\ntime = {line.latency_s * 1e3:.3f} ms + size / {line.bytes_per_s / 1e9:.3g} GB/s, wrong by"
        f" {line.relative_error:.0%} in the median. As a ring of 2 (p - 1) messages of size / p:"
        f" {line.message_latency_s(world_size) * 1e6:.0f} us a message,"
        f" {line.link_bytes_per_s(world_size) / 1e9:.3g} GB/s a link."
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"
