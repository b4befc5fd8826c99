"""Predicted step times beside measured ones, on links between two namespaces."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from lightning_ddp.tools.bench.report import format_table, interquartile_range, progress_bar

_POWERSGD: Final = {"name": "powersgd", "rank": 4, "start_step": 0}
CASES: Final[Mapping[float, Sequence[tuple[str, str, Any]]]] = {
    100.0: (
        ("convbn40", "none", None),
        ("convbn40", "int8", "int8"),
        ("linear16", "powersgd_r4", _POWERSGD),
    ),
    300.0: (
        ("transformer6", "none", None),
        ("transformer6", "int8", "int8"),
        ("convbn40", "bf16", "bf16"),
    ),
    1000.0: (
        ("linear16", "none", None),
        ("linear16", "bf16", "bf16"),
        ("transformer6", "powersgd_r4", _POWERSGD),
    ),
}
"""Link speed in Mbit/s -> model, name and specification of a hook."""
TOLERANCE: Final = 0.15
GLOO_IN_FLIGHT: Final = 2
"""Threads of a gloo group of torch."""
_NUM_RANKS = 2
_NUM_PROBES = 5


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A case: predicted and measured seconds of a step."""

    model: str
    hook: str
    mbit: float
    predicted_s: float
    compute_s: float
    """Of the recorded step without communication."""
    measured_s: tuple[float, ...]
    """Of the slower rank, one a round."""
    latency_s: float
    """Of a message on the link, as measured."""
    seconds_per_byte: float
    """The same of each of its bytes."""

    @property
    def median_s(self) -> float:
        """Of the measured steps."""
        return statistics.median(self.measured_s)

    @property
    def error(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted_s / self.median_s - 1


def validate(mbits: Sequence[float], num_rounds: int, timeout_s: float) -> list[Outcome]:
    """Measures and predicts all cases of the given links, one link after the other.

    Raises:
        BenchmarkError: links cannot be shaped here, a rank fails or the deadline passes.
    """
    outcomes = []
    with progress_bar(len(mbits), "bench scaling --validate") as bar:
        for mbit in mbits:
            outcomes += _validate_link(mbit, CASES[mbit], num_rounds, timeout_s)
            bar.update()
    return outcomes


def _validate_link(
    mbit: float, cases: Sequence[tuple[str, str, Any]], num_rounds: int, timeout_s: float
) -> list[Outcome]:
    from lightning_ddp.tools.bench.calibration import LinkRunSettings, Measured, load_figures, run_on_link
    from lightning_ddp.tools.bench.links import burst_bytes, run_linked
    from lightning_ddp.tools.perf_model import Network, plain_model, predict_hook

    with tempfile.TemporaryDirectory(prefix="lightning_ddp_scaling_") as scratch:
        settings = LinkRunSettings(
            cases=tuple(cases), num_rounds=num_rounds, num_probes=_NUM_PROBES, folder=scratch
        )
        results = run_linked(run_on_link, settings, mbit, timeout_s)
        rests = [result["rests"] for result in results]
        figures = {model: load_figures(Path(scratch), model, rests) for model, _, _ in cases}
    link = Measured.of([result["probes"] for result in results], burst_bytes(mbit))
    network = Network(
        hop=link.hop, num_in_flight=GLOO_IN_FLIGHT, cpu_seconds_per_byte=link.cpu_seconds_per_byte
    )
    outcomes = []
    for index, (model, name, _) in enumerate(cases):
        profile = figures[model].profile
        hook = figures[model].hooks.get(name) or plain_model([size for size, _ in profile.ready])
        cores = (os.cpu_count() or 1) / _NUM_RANKS
        predicted = predict_hook(profile, hook, network, _NUM_RANKS, cores=cores)
        steps = zip(*(result["seconds"][index] for result in results), strict=True)
        outcomes.append(
            Outcome(
                model=model,
                hook=name,
                mbit=mbit,
                predicted_s=predicted.step_s,
                compute_s=profile.compute_s,
                measured_s=tuple(max(step) for step in steps),
                latency_s=link.hop.latency_s,
                seconds_per_byte=link.hop.seconds_per_byte,
            )
        )
    return outcomes


def format_outcomes(outcomes: Sequence[Outcome]) -> str:
    """Lay out the table, with what was measured and what was not under it."""
    rows = [
        (
            o.model,
            o.hook,
            f"{o.mbit:g}",
            1e3 * o.compute_s,
            1e3 * o.predicted_s,
            1e3 * o.median_s,
            1e3 * interquartile_range(o.measured_s),
            100 * o.error,
        )
        for o in outcomes
    ]
    headers = ("model", "hook", "Mbit/s", "compute ms", "predicted ms", "measured ms", "IQR ms", "error %")
    num_close = sum(abs(o.error) <= TOLERANCE for o in outcomes)
    worst = max((abs(o.error) for o in outcomes), default=0.0)
    links = {
        f"measured on the link of {o.mbit:g} Mbit/s: a message takes {1e6 * o.latency_s:.0f} us and"
        f" {8e-6 / o.seconds_per_byte:.1f} Mbit/s": None
        for o in outcomes
    }
    return "\n".join(
        [
            format_table(headers, rows),
            "",
            *links,
            f"{num_close} of {len(outcomes)} predictions within {TOLERANCE:.0%}; the worst: {worst:.1%}",
            "predicted from steps without communication, each hook alone without link or backward, and"
            " all-reduces alone on the link: no step that communicates is in a prediction",
        ]
    )


def outcomes_document(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """The outcomes for JSON."""
    return [{**asdict(o), "median_s": o.median_s, "error": o.error} for o in outcomes]
