"""Command line: `python -m lightning_ddp`.

Two tables list the commands: `_COMMANDS` for the top level, with the docstrings' first lines as help, and
`_BENCHMARKS` for the commands under `bench`. A command is any module or object with
`add_arguments(parser)` and `run(args) -> int`.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_ddp.errors import ConfigurationError
from lightning_ddp.launch.commands import Leave, Run
from lightning_ddp.tools import ToolError, doctor, unwinds_at_sigterm
from lightning_ddp.tools.bench.runs import FAILURES, LAUNCH, RECOVERY
from lightning_ddp.tools.bench.scaling import SCALING
from lightning_ddp.tools.bench.step import HOOKS, STEP
from lightning_ddp.tools.command_line import format_table
from lightning_ddp.tools.recorded_run import Report, Timeline


class Variants:
    """List the registered strategy names, their arguments and what each one does."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add no arguments to the parser: the command has no options."""

    def run(self, args: argparse.Namespace) -> int:
        from lightning_ddp.variants import available_variants, variant_arguments

        rows = []
        for name, description in available_variants().items():
            arguments = " ".join(f"{key}={value!r}" for key, value in variant_arguments(name).items())
            rows.append((name, arguments, description))
        print(format_table(("name", "arguments", "description"), rows))
        return 0


_COMMANDS: Mapping[str, Any] = {
    "run": Run(),
    "leave": Leave(),
    "variants": Variants(),
    "doctor": doctor,
    "timeline": Timeline(),
    "report": Report(),
}
_BENCHMARKS = (STEP, LAUNCH, FAILURES, RECOVERY, HOOKS, SCALING)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; parsed arguments hold the chosen command's function as `run`."""
    parser = argparse.ArgumentParser(
        prog="python -m lightning_ddp", description="Run programs; inspect and measure lightning_ddp."
    )
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, command in _COMMANDS.items():
        _add_command(commands, name, command, (inspect.getdoc(command) or "").partition("\n")[0])
    summary = "Measure this package beside torch and Lightning."
    bench = commands.add_parser("bench", help=summary, description=summary)
    benches = bench.add_subparsers(dest="bench", metavar="benchmark", required=True)
    for benchmark in _BENCHMARKS:
        _add_command(benches, benchmark.name, benchmark, benchmark.summary)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status: 0, or 1 or 2 for a failure; `run` exits as its program does.

    SIGTERM ends a benchmark with 143, when it has removed what it had made; a usage error exits with 2.
    """
    args = build_parser().parse_args(argv)
    # The doctor has nothing to clean up, unless --verify starts a script whose rank it kills; its waits for
    # other ranks are in C++, where no signal handler runs.
    is_program = args.command == "run"
    leaves_nothing = is_program or (args.command == "doctor" and not args.verify)
    expected = () if is_program else (ToolError, ConfigurationError)
    try:
        with contextlib.nullcontext() if leaves_nothing else unwinds_at_sigterm():
            status: int = args.run(args)
    except expected as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return status


def _add_command(
    parsers: argparse._SubParsersAction[argparse.ArgumentParser], name: str, command: Any, summary: str
) -> None:
    parser = parsers.add_parser(name, help=summary, description=summary)
    command.add_arguments(parser)
    parser.set_defaults(run=command.run)


if __name__ == "__main__":
    sys.exit(main())
