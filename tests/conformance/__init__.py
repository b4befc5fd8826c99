"""Run PyTorch's own tests of DistributedDataParallel, from the installed wheel, on a class of its interface.

`TorchTests` holds a process that has imported those tests (`runner.py`). Each test runs in processes forked
from it, with the class under test in the place of torch's (`substitution.py`). 11 of the tests need no GPU
and run as they are (`as_they_are.txt`). For 98 more the CPU stands in for CUDA devices (`cpu_for_cuda.py`,
`cpu_for_cuda.txt`): they test no devices, streams or overlap. All of both lists pass with torch's own class.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

FOLDER = Path(__file__).resolve().parent
KNOWN_TORCH = ("2.13",)
"""Releases of torch whose tests the two lists are for."""
OURS = "lightning_ddp:BucketedDDP"
STARTED_AFTER_S = 120.0
"""Deadline for the imports of the process."""
STOPPING_S = 30.0
"""How long after a test's own deadline the process may take to answer that it was missed."""


@dataclass(frozen=True, kw_only=True)
class TorchTest:
    """A test of torch's, as a line of a list: `NAME [world_size=N] [timeout_s=S]`."""

    name: str
    world_size: int = 2
    timeout_s: int = 120


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one test."""

    status: Literal["passed", "failed", "skipped", "timed out"]
    error: str = ""
    """The traceback of a failure, the reason of a skip, or without those what the ranks wrote."""


def read_list(name: str) -> list[TorchTest]:
    """The tests in a list of this folder; `#` begins a comment."""
    lines = [line.split("#")[0].split() for line in (FOLDER / name).read_text().splitlines()]
    return [
        TorchTest(name=words[0], **{key: int(value) for key, value in (w.split("=") for w in words[1:])})
        for words in lines
        if words
    ]


class TorchTests:
    """A process that runs tests of torch's one after another. To be closed.

    Args:
        cpu_for_cuda: whether the CPU stands in for CUDA devices.
    """

    def __init__(self, *, cpu_for_cuda: bool) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "conformance.runner", *(["--cpu-for-cuda"] if cpu_for_cuda else [])],
            cwd=FOLDER.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        try:
            self._answer(STARTED_AFTER_S)
        except BaseException:
            self.close()
            raise

    def run(self, test: TorchTest, class_: str = OURS) -> Outcome:
        """Runs one test with `module:Class` in the place of torch's class."""
        assert self._process.stdin is not None
        order = {"name": test.name, "world_size": test.world_size, "timeout_s": test.timeout_s}
        self._process.stdin.write(json.dumps({**order, "class_": class_}).encode() + b"\n")
        self._process.stdin.flush()
        return Outcome(**json.loads(self._answer(test.timeout_s + STOPPING_S)))

    def close(self) -> None:
        """Ends the process, and the test that it may be running."""
        with self._process, self._log:  # closes its input, at which it ends
            pass

    def _answer(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            self._process.kill()
            self._log.seek(0)
            raise RuntimeError(
                f"no answer from the process that runs torch's tests: {self._log.read()[-3000:]!r}"
            )
        return line
