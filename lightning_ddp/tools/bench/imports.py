"""Time that ``import lightning_ddp`` adds to that of Lightning, in fresh processes that take turns."""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from lightning_ddp.tools.bench import BenchmarkError
from lightning_ddp.tools.bench.scripts import compiled_package

__all__ = ["ALONE", "WITH_OURS", "added_ms", "time_imports"]

ALONE: Final = "alone"
"""Lightning's import by itself."""

WITH_OURS: Final = "with lightning_ddp"
"""Lightning's import and this package's after it."""

_NAMESPACES: Final = ("pytorch_lightning", "lightning")

_SCRIPT: Final = """\
import importlib, json, sys, time

sys.path.insert(0, sys.argv[2])
start = time.perf_counter()
importlib.import_module(sys.argv[1])
between = time.perf_counter()
importlib.import_module("lightning_ddp")
print(json.dumps([between - start, time.perf_counter() - start]))
"""


def time_imports(
    num_rounds: int, *, timeout_s: float, advance: Callable[[], object] = lambda: None
) -> dict[str, dict[str, list[float]]]:
    """Import Lightning and then this package in fresh processes, one after the other.

    Both names of Lightning take turns, where they are installed. A first round fills the file cache and is
    not counted.

    Args:
        num_rounds: Processes of each name that count.
        timeout_s: Deadline of each process in seconds.
        advance: Called after each process.

    Returns:
        ``"import <name>"`` -> `ALONE` and `WITH_OURS` -> seconds of each round.

    Raises:
        BenchmarkError: If a process fails or its deadline passes.
    """
    names = installed_namespaces()
    samples = {f"import {name}": {ALONE: list[float](), WITH_OURS: list[float]()} for name in names}
    with compiled_package() as package_root:
        for round_index in range(num_rounds + 1):
            for name in names if round_index % 2 else reversed(names):
                alone, with_ours = _time_import(name, package_root, timeout_s)
                if round_index > 0:
                    samples[f"import {name}"][ALONE].append(alone)
                    samples[f"import {name}"][WITH_OURS].append(with_ours)
                advance()
    return samples


def installed_namespaces() -> list[str]:
    """Return the names under which Lightning can be imported here."""
    return [name for name in _NAMESPACES if importlib.util.find_spec(name) is not None]


def added_ms(rounds: Mapping[str, Sequence[float]]) -> float:
    """Return the median over the rounds of what this package's import adds, in milliseconds.

    >>> added_ms({"alone": [1.0, 2.0, 1.0], "with lightning_ddp": [1.25, 2.5, 1.5]})
    500.0
    """
    return 1e3 * statistics.median(
        total - alone for alone, total in zip(rounds[ALONE], rounds[WITH_OURS], strict=True)
    )


def _time_import(name: str, package_root: Path, timeout_s: float) -> tuple[float, float]:
    command = [sys.executable, "-c", _SCRIPT, name, str(package_root)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise BenchmarkError(f"import {name} was still running after {timeout_s:g} s") from error
    if done.returncode != 0:
        raise BenchmarkError(f"import {name} failed with status {done.returncode}:\n{done.stderr[-4000:]}")
    alone, with_ours = json.loads(done.stdout.splitlines()[-1])
    return alone, with_ours
