"""Runs one tier of the tests, keeps its output, and runs what has failed once more, alone.

    python .ci/tier.py NAME COMMAND [ARGUMENT ...]

COMMAND ends with pytest; ARGUMENT ... are pytest's for the second run. A machine that stands still for a
moment fails a test of real processes, and a defect fails twice: up to three tests run again, more at once are
no accident. `python .ci/tier.py` prints one line: how many have failed once in all tiers, and which. Each is
a defect all the same, of the test or of the package.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

OUT = Path(".ci/out")
"""Folder of `NAME.log`, with the duration of each test, and of the names of tests that failed once."""
FAILED_ONCE = OUT / "failed_once"
RECORD = Path(".pytest_cache/v/cache/lastfailed")
NUM_REPEATED = 3
NUM_SHOWN = 50
"""Number of durations to print, longest first; the log has all."""


def run(name: str, command: str, arguments: list[str]) -> int:
    """Run a tier; return 0 if all tests passed, or at most three only when they ran again."""
    OUT.mkdir(parents=True, exist_ok=True)
    RECORD.unlink(missing_ok=True)  # of an earlier run
    code = run_logged(command, OUT / f"{name}.log")
    failed = failed_tests()
    if code != 1 or not failed:  # 1 is pytest's for tests that failed, and that of others for much else
        return code
    print(f"FAILED, {len(failed)} of tier {name}:", *failed, sep="\n    ", flush=True)
    if len(failed) > NUM_REPEATED:
        return code
    RECORD.unlink()
    code = subprocess.call(["pytest", *arguments, "-n", "0", *failed])
    twice = failed_tests()
    with FAILED_ONCE.open("a") as file:
        file.writelines(f"{test}\n" for test in failed if test not in twice)
    return code


def run_logged(command: str, log: Path) -> int:
    """Run a shell command; copy its output to the screen and, with all durations, to `log`."""
    options = f"{os.environ.get('PYTEST_ADDOPTS', '')} --durations=0".strip()
    process = subprocess.Popen(
        ["bash", "-c", command],
        env={**os.environ, "PYTEST_ADDOPTS": options},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    with log.open("w") as file, process:
        assert process.stdout is not None
        num_durations = 0
        for line in process.stdout:
            file.write(line)
            is_duration = bool(re.match(r"\d+\.\d+s (setup|call|teardown) ", line))
            num_durations += is_duration
            if not is_duration or num_durations <= NUM_SHOWN:
                print(line, end="", flush=True)
    return process.returncode


def failed_tests() -> list[str]:
    """Return the failed tests in pytest's record, without the groups that xdist appends to names."""
    if not RECORD.exists():
        return []
    return sorted(re.sub(r"@[^]@]*$", "", test) for test in json.loads(RECORD.read_text()))


def summary() -> str:
    """Return the last line of the output."""
    tests = FAILED_ONCE.read_text().splitlines() if FAILED_ONCE.exists() else []
    return f"failed once: {len(tests)}" + (f" ({'; '.join(tests)})" if tests else "")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(summary())
    else:
        sys.exit(run(sys.argv[1], sys.argv[2], sys.argv[3:]))
