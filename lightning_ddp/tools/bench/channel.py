"""Time of a training step with and without the control channel, in turns within the same processes.

The contenders train copies of one model with this package's wrapper. `off` has no control channel. `on` has
the connection, its thread, the notes of every collective and the look at each step boundary, as in a fit.
`record` has a recorder of steps as well, as `CommunicationMonitor` uses it, and `detail` is debug="detail".
The connection is opened before each turn and closed after it. Beside the time on the clock stands that of the
CPU, over all threads of a rank, which other load on the machine disturbs less.
"""

from __future__ import annotations

import argparse
from typing import Final

from lightning_ddp.tools.bench.arguments import add_common_arguments, add_model_arguments, positive_int
from lightning_ddp.tools.bench.outputs import write_outputs
from lightning_ddp.tools.bench.report import compare, format_table, progress_bar

_REFERENCE: Final = "off"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``bench channel``."""
    add_common_arguments(parser, rounds=40, timeout_s=1800.0)
    add_model_arguments(parser)
    parser.add_argument(
        "--steps",
        type=positive_int,
        default=8,
        metavar="N",
        help="timed steps of each contender in a round (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and write the files that were asked for.

    Returns:
        The exit status, 0.

    Raises:
        BenchmarkError: If a rank fails or the deadline passes.
    """
    from lightning_ddp.tools.bench.processes import run_ranks
    from lightning_ddp.tools.bench.session import refuse_launched
    from lightning_ddp.tools.bench.step import reduce_ranks
    from lightning_ddp.tools.bench.switching import Switches, SwitchSettings, time_switched

    refuse_launched("channel")
    models = tuple(dict.fromkeys(args.models))
    contenders = (
        Switches(name=_REFERENCE, channel=False),
        Switches(name="on"),
        Switches(name="record", recorder=True),
        Switches(name="detail", comparison=True),
    )
    with progress_bar(len(models) * args.rounds, "bench channel") as bar:
        per_rank = run_ranks(
            time_switched,
            SwitchSettings(
                models=models, contenders=contenders, num_rounds=args.rounds, num_steps=args.steps
            ),
            world_size=args.world_size,
            device=args.device,
            timeout_s=args.timeout_s,
            on_progress=bar.update,
        )
    samples = reduce_ranks(per_rank)
    comparisons = {}
    rows = []
    for model, rounds in samples.items():
        comparisons[model] = compare(rounds, reference=_REFERENCE)
        for name, figures in comparisons[model].items():
            rows.append((model, name, figures.median, figures.iqr, 100 * (1 / figures.ratio - 1)))
    print(format_table(("time", "channel", "median ms", "IQR ms", "more than off %"), rows))
    write_outputs(
        args,
        benchmark="channel",
        unit="ms",
        settings={"rounds": args.rounds, "steps": args.steps, "world_size": args.world_size}
        | {"device": args.device},
        samples=samples,
        comparisons=comparisons,
        title=f"medians with quartiles; the ratio is {_REFERENCE} / channel",
    )
    return 0
