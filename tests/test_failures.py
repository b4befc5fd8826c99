"""A rank fails, in any way at any moment: every rank ends, runs its finalisers, and names the right cause.

By default every fault meets every moment, with victims and world sizes taken in turn; `--all-faults` runs
all combinations. The time from the fault to `PeerFailure` on the survivors is printed at the end.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.preloaded import Preloaded, PreloadedResult, preloaded

FAULTS = ("exception", "exit", "kill", "segv", "stop", "memory")
MOMENTS = ("sanity", "forward", "backward", "optimizer", "validation", "checkpoint", "loader", "teardown")
TIMEOUT_S = 60.0
LATENCY_S = 2.0
STALL_LATENCY_S = 6.0
EXIT_CODES = {"exit": 3, "kill": -9, "segv": -11}
EXCEPTIONS = {"exception": "ValueError", "memory": "MemoryError"}

latencies: list[float] = []


def cells() -> Iterator[Any]:
    """(fault, victim is the last rank, moment, world size); those of the default run are unmarked."""
    for number, (fault, moment) in enumerate(itertools.product(FAULTS, MOMENTS)):
        for is_last, world_size in itertools.product((False, True), (2, 4)):
            # one of the four combinations for each pair, shifted so that all of them meet all moments
            turn = (number + number // len(MOMENTS)) % 4
            is_default = (is_last, world_size) == ((turn & 1) == 1, 4 if turn & 2 else 2)
            victim = world_size - 1 if is_last else 0
            yield pytest.param(
                fault,
                victim,
                moment,
                world_size,
                id=f"{fault}-rank{victim}of{world_size}-{moment}",
                marks=() if is_default else pytest.mark.all_faults,
            )


@pytest.fixture(scope="module")
def process() -> Iterator[Preloaded]:
    with preloaded("fault_script") as process:
        yield process
    if latencies:
        print(
            f"\nfault to PeerFailure on {len(latencies)} survivors:"
            f" median {statistics.median(latencies):.3f} s, worst {max(latencies):.3f} s"
        )


def read_notes(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.name: json.loads(path.read_text()) for path in folder.glob("*-[0-9]")}


@pytest.mark.parametrize(("fault", "victim", "moment", "world_size"), list(cells()))
def test_a_fault_ends_all_ranks_with_its_cause(process, tmp_path, fault, victim, moment, world_size) -> None:
    result = process.run(
        [fault, str(victim), moment, str(world_size), str(tmp_path), "custom_ddp"], timeout_s=TIMEOUT_S
    )
    context = f"{result.stdout}\n{result.stderr}"
    notes = read_notes(tmp_path)
    assert [name for name in notes if name.startswith("fired")] == [f"fired-{victim}"], context
    assert result.left == [], context
    assert result.exit_code == expected_exit_code(fault, victim, moment), context
    survivors = set(range(world_size)) - {victim}
    # an exception of a loader's worker becomes the rank's own when the rank asks for that batch
    is_late = moment == "loader" and fault in EXCEPTIONS
    start = notes[f"on_exception-{victim}" if is_late else f"fired-{victim}"]["time"]
    for rank in survivors:
        seen = notes[f"on_exception-{rank}"]
        assert seen["kind"] == "PeerFailure", context
        assert seen["rank"] == victim, context
        assert notes[f"finalize-{rank}"]["status"] == "failed"
        assert f"finally-{rank}" in notes
        check_cause(seen, fault, victim, moment)
        latency = seen["time"] - start
        if fault != "stop":
            latencies.append(latency)
        assert latency < (STALL_LATENCY_S if fault == "stop" else LATENCY_S)
    check_victim(notes, fault, victim, moment)
    check_report(result, fault, victim, moment)
    if 0 in survivors and moment not in ("sanity", "teardown"):
        assert (tmp_path / "on_exception_checkpoint.ckpt").exists(), "rank 0 saved no checkpoint"


def expected_exit_code(fault: str, victim: int, moment: str) -> int:
    """Of the launching process: 1, unless it is the victim and dies of the fault itself."""
    return EXIT_CODES[fault] if victim == 0 and fault in EXIT_CODES and moment != "loader" else 1


def check_cause(seen: dict[str, Any], fault: str, victim: int, moment: str) -> None:
    if moment == "loader" and fault in EXIT_CODES:
        # torch's own words, unless the rank was just then receiving from the worker
        assert seen["exception_type"] in ("RuntimeError", "ConnectionResetError", "EOFError")
        assert "DataLoader worker" in seen["message"] or seen["exception_type"] != "RuntimeError"
    elif fault in EXCEPTIONS:
        assert seen["exception_type"] == EXCEPTIONS[fault]
    elif fault == "stop":
        assert "said nothing for 2 s" in seen["message"] or "no progress" in seen["message"]
    elif victim == 0:  # nobody who is left has waited for it
        assert "gone without a word" in seen["message"]
    else:
        assert seen["exit_code"] == EXIT_CODES[fault]


def check_victim(notes: dict[str, dict[str, Any]], fault: str, victim: int, moment: str) -> None:
    """A victim that can still run code unwinds as well."""
    if fault in EXCEPTIONS:
        assert notes[f"on_exception-{victim}"]["kind"] == EXCEPTIONS[fault]
    if fault in EXCEPTIONS or fault == "stop" or moment == "loader":
        assert f"finally-{victim}" in notes
        assert notes[f"finalize-{victim}"]["status"] == "failed"


def check_report(result: PreloadedResult, fault: str, victim: int, moment: str) -> None:
    """The report is the last thing on the screen, where the launching process could print one."""
    if result.exit_code != 1:
        assert f"rank {victim} (host" in result.stderr
        return
    _, _, report = result.stderr.rpartition("lightning_ddp: ")
    assert report.startswith(f"rank {victim} (node 0, host ")
    if fault in EXCEPTIONS:
        assert "Traceback of rank" in report
        assert report.rstrip().splitlines()[-1].startswith(f"{EXCEPTIONS[fault]}: ")
