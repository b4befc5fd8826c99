"""Bytes of hooks, and times of a step on slow links.

On links of given speeds between two network namespaces, the contenders take turns with a step of the model
with 67 MB of gradients; bytes are counted by the hook and by the kernel.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist

from lightning_ddp.comm.group import Group
from lightning_ddp.communication import Communication
from lightning_ddp.tools.bench import Benchmark, Result
from lightning_ddp.tools.command_line import (
    add_shared,
    format_table,
    paired_ratio,
    positive_float,
)
from lightning_ddp.tools.models import OURS, TORCH_DEFAULT, TrainingRun, build_workload
from lightning_ddp.tools.namespaces import read_sent_bytes
from lightning_ddp.tools.ranks import RankContext, run_ranks, shuffled, timed

Rows = Mapping[str, Sequence[Mapping[str, float]]]
"""Figures of each round, by contender."""

LINK_HOOKS: Final[Mapping[str, Any]] = {
    OURS: None,
    TORCH_DEFAULT: None,
    "bf16": "bf16",
    "int8": "int8",
    "powersgd": {"name": "powersgd", "start_step": 0},
    "topk_1pc": {"name": "topk", "ratio": 0.01},
    "sign": "sign",
}
"""Specifications of the hooks to time on links, by contender; None for a wrapper without a hook."""

_NUM_WARMUP_STEPS: Final = 3  # buckets are rebuilt after the first, and low-rank factors settle


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--links",
        nargs="+",
        type=positive_float,
        default=[100.0, 1000.0],
        metavar="MBIT",
        help="link speeds in Mbit/s, which need root (default: 100 1000)",
    )
    add_shared(parser, rounds=5, timeout_s=7200.0)


def _measure(args: argparse.Namespace) -> Result:
    links = {f"{mbit:g}": _time_link(args, mbit) for mbit in args.links}
    samples = {
        f"linear16, {mbit} Mbit/s": {name: [1e3 * row["seconds"] for row in of] for name, of in rows.items()}
        for mbit, rows in links.items()
    }
    return Result(
        samples=samples,
        references=OURS,
        settings={"rounds": args.rounds, "links": args.links},
        extra={"links": links},
    )


def _time_link(args: argparse.Namespace, mbit: float) -> Rows:
    settings = LinkSettings(model="linear16", hooks=LINK_HOOKS, num_rounds=args.rounds)
    return merge_ranks(run_ranks(time_on_link, settings, world_size=2, timeout_s=args.timeout_s, mbit=mbit))


def merge_ranks(per_rank: Sequence[Rows]) -> dict[str, list[dict[str, float]]]:
    """Return for each round and figure the largest value of the ranks.

    >>> merge_ranks([{"a": [{"seconds": 1.0}]}, {"a": [{"seconds": 2.0}]}])
    {'a': [{'seconds': 2.0}]}
    """
    return {
        name: [
            {key: max(row[key] for row in rows) for key in rows[0]}
            for rows in zip(*(ranks[name] for ranks in per_rank), strict=True)
        ]
        for name in per_rank[0]
    }


# ---------------------------------------------------------------------- tables


def _format(result: Result) -> str:
    parts = []
    for mbit, rows in result.extra["links"].items():
        parts += [f"\n16 x Linear(1024), two ranks, {mbit} Mbit/s in each direction", format_link(rows)]
    return "\n".join(parts)


def format_link(rows: Rows) -> str:
    """Format the table of one link."""

    def median(entries: Sequence[Mapping[str, float]], key: str, factor: float) -> float:
        return factor * statistics.median(row[key] for row in entries)

    seconds = {name: [row["seconds"] for row in entries] for name, entries in rows.items()}
    figures = (("kernel_bytes", 1e-6), ("counted_bytes", 1e-6), ("codec_seconds", 1e3))
    table: list[tuple[str | float, ...]] = [
        (
            name,
            median(entries, "seconds", 1e3),
            paired_ratio(seconds[OURS], seconds[name]),
            *(median(entries, key, factor) for key, factor in figures),
        )
        for name, entries in rows.items()
    ]
    headers = ("contender", "step ms", "speed-up", "MB by kernel", "MB by hook", "codec ms")
    return format_table(headers, table)


# ---------------------------------------------------------------------- code of the ranks


@dataclass(frozen=True, kw_only=True)
class LinkSettings:
    """Settings of `time_on_link`, which measures in rounds in which contenders take turns."""

    model: str
    hooks: Mapping[str, Any]
    """Specifications of hooks, by contender; None for a wrapper without a hook."""
    num_rounds: int


def time_on_link(context: RankContext, settings: LinkSettings) -> dict[str, list[dict[str, float]]]:
    """Time steps of all contenders, which take turns.

    Collective: all ranks must call it.

    Returns:
        For each contender one entry per round: seconds, bytes counted by the kernel and by the hook, codec
        seconds.
    """
    runs: dict[str, tuple[TrainingRun, Communication]] = {}
    for name, hook in settings.hooks.items():
        wrapper = TORCH_DEFAULT if name == TORCH_DEFAULT else OURS
        run = TrainingRun(wrapper, build_workload(settings.model, rank=context.rank), context.device)
        communication = Communication(hook)
        if wrapper == OURS:
            communication.register(
                run.wrapped, Group(dist.group.WORLD), context.device, node_size=1, loss_scale=lambda: 1.0
            )
        for _ in range(_NUM_WARMUP_STEPS):
            run.step()
        runs[name] = run, communication

    def counts(communication: Communication) -> dict[str, float]:
        """Return bytes sent by the kernel and by the hook, and seconds of encoding and decoding."""
        channel = communication.hook.channel if communication.hook is not None else None
        return {
            "kernel_bytes": read_sent_bytes() or 0,
            "counted_bytes": channel.num_bytes_sent if channel else 0,
            "codec_seconds": channel.busy_s - channel.wait_s if channel else 0.0,
        }

    rows: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for number in range(settings.num_rounds):
        for name in shuffled(list(runs), seed=number):
            run, communication = runs[name]
            before = counts(communication)
            seconds = timed(run.step, context.device)
            dist.barrier()  # after it the peer has received all bytes that are counted here
            changes = {key: value - before[key] for key, value in counts(communication).items()}
            rows[name].append({"seconds": seconds, **changes})
    return rows


HOOKS: Final = Benchmark(
    name="hooks",
    summary="Bytes sent by hooks, and time of steps on slow links.",
    unit="ms",
    options=_options,
    measure=_measure,
    table=_format,
    title="a step; the ratio is ours / contender",
)
