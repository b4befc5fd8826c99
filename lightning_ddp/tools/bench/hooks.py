"""Bytes of hooks, and times of a step on slow links.

On links of given speeds between two network namespaces, the contenders take turns with a step of the model
with 67 MB of gradients; bytes are counted by the hook and by the kernel.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch.distributed as dist

from lightning_ddp.comm.group import Group
from lightning_ddp.hooks import StatefulHook, build_hook
from lightning_ddp.tools.bench import Benchmark, Result
from lightning_ddp.tools.command_line import add_shared, format_table, positive_float
from lightning_ddp.tools.models import OURS_GLOO, TORCH_DEFAULT, TrainingRun, build_workload
from lightning_ddp.tools.namespaces import read_sent_bytes
from lightning_ddp.tools.ranks import RankContext, run_ranks, shuffled, timed

NONE: Final = "none"
CONTENDERS: Final[Mapping[str, Any]] = {
    NONE: None,
    TORCH_DEFAULT: None,
    "bf16": "bf16",
    "int8": "int8",
    "powersgd": "powersgd",
    "topk_1pc": {"name": "topk", "ratio": 0.01},
    "sign": "sign",
}
"""Specifications of the hooks to time on links, by contender; None for a wrapper without a hook."""

_MODEL: Final = "linear16"
_NUM_WARMUP_STEPS: Final = 3  # buckets are rebuilt after the first, and low-rank factors settle
_SETTLED_STEP: Final = 10**9  # after the warm-up of every hook
_FIGURES: Final = {
    "MB by kernel": ("kernel_bytes", 1e-6),
    "MB by hook": ("counted_bytes", 1e-6),
    "codec ms": ("codec_seconds", 1e3),
}
"""Keys of figures of a step, and the factors of their units, by column."""

Rows = Mapping[str, Sequence[Mapping[str, float]]]
"""Figures of each round, by contender."""


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
    settings = HookSettings(model=_MODEL, hooks=CONTENDERS, num_rounds=args.rounds)
    options = {"world_size": 2, "timeout_s": args.timeout_s}
    links, samples = {}, {}
    for mbit in args.links:
        link = f"{_MODEL}, {mbit:g} Mbit/s"
        links[link] = merge_ranks(run_ranks(time_hooks, settings, mbit=mbit, **options))
        samples[link] = {name: [1e3 * row["seconds"] for row in of] for name, of in links[link].items()}
    given = {"rounds": args.rounds, "links": args.links}
    return Result(samples=samples, references=NONE, settings=given, extra={"links": links})


def merge_ranks(per_rank: Sequence[Rows]) -> dict[str, list[dict[str, float]]]:
    """Return, for each contender, round and figure, the largest value of the ranks."""
    return {
        name: [
            {key: max(row[key] for row in rows) for key in rows[0]}
            for rows in zip(*(ranks[name] for ranks in per_rank), strict=True)
        ]
        for name in per_rank[0]
    }


def median(rows: Sequence[Mapping[str, float]], key: str) -> float:
    return statistics.median(row[key] for row in rows)


def format_links(result: Result) -> str:
    parts = []
    for link, comparisons in result.comparisons.items():
        table: list[tuple[str | float, ...]] = []
        for name, of in comparisons.items():
            rows = result.extra["links"][link][name]
            figures = (factor * median(rows, key) for key, factor in _FIGURES.values())
            table.append((name, of.median, of.ratio, *figures))
        headers = ("contender", "step ms", "speed-up", *_FIGURES)
        parts.append(f"two ranks, {link} in each direction\n{format_table(headers, table)}")
    return "\n\n".join(parts)


class HookSettings(NamedTuple):
    """Settings of `time_hooks`: model, hook specifications by contender, number of rounds."""

    model: str
    hooks: Mapping[str, Any]
    num_rounds: int


def time_hooks(context: RankContext, settings: HookSettings) -> dict[str, list[dict[str, float]]]:
    """Time steps with each hook, in turns, without shared memory; return the figures of this rank.

    Collective: all ranks must call it.

    Returns:
        For each contender one entry per round: seconds, bytes counted by the kernel (0 without a shaped link)
        and by the hook, codec seconds.
    """
    runs: dict[str, tuple[TrainingRun, Any]] = {}
    for name, spec in settings.hooks.items():
        wrapper = TORCH_DEFAULT if name == TORCH_DEFAULT else OURS_GLOO
        run = TrainingRun(wrapper, build_workload(settings.model, rank=context.rank), context.device)
        hook = None
        if spec is not None:
            hook = build_hook(spec, Group(dist.group.WORLD, transport="gloo"), context.device)
            if isinstance(hook, StatefulHook):
                hook.step = _SETTLED_STEP
            wrapped: Any = run.wrapped
            wrapped.register_comm_hook(None, hook)
        for _ in range(_NUM_WARMUP_STEPS):
            run.step()
        runs[name] = run, hook

    def counts(hook: Any) -> dict[str, float]:
        return {
            "kernel_bytes": read_sent_bytes() or 0,
            "counted_bytes": hook.channel.num_bytes_sent if hook else 0,
            "codec_seconds": hook.channel.busy_s - hook.channel.wait_s if hook else 0.0,
        }

    rows: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for number in range(settings.num_rounds):
        for name in shuffled(list(runs), seed=number):
            run, hook = runs[name]
            before = counts(hook)
            seconds = timed(run.step, context.device)
            dist.barrier()  # after it the peer has received all bytes that are counted here
            changes = {key: value - before[key] for key, value in counts(hook).items()}
            rows[name].append({"seconds": seconds, **changes})
    return rows


HOOKS: Final = Benchmark(
    name="hooks",
    summary="Bytes sent by hooks, and time of steps on slow links.",
    unit="ms",
    options=_options,
    measure=_measure,
    table=format_links,
    title="a step; the ratio is that without a hook / contender",
)
