"""Run PyTorch's DDP tests, each in processes forked from this one, which has imported them and the classes.

    python -m conformance.runner [--cpu-for-cuda]

A line of JSON on its input names a test, its options and the class; a line on its output is the outcome.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import tempfile
import traceback
import unittest
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.processes import die_with_parent

from conformance import Outcome

# read by torch's modules when they are imported
os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": "2", "INIT_METHOD": "env://", "OMP_NUM_THREADS": "1"}
os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "TORCHINDUCTOR_COMPILE_THREADS": "1"}

STACKS_BEFORE_THE_END_S = 8
"""How long before the deadline torch's harness gives up itself, and writes the stacks of the ranks."""
LONGEST_LOG = 20_000


def serve() -> None:
    """Answers orders until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what an import may print is no answer
    die_with_parent()
    with_cpu_for_cuda = "--cpu-for-cuda" in sys.argv[1:]

    from conformance import cpu_for_cuda, substitution, suite, torch_names  # noqa: F401 (inherited by each test)

    cases = suite.load(cpu_for_cuda=with_cpu_for_cuda)
    print("ready", file=answers)
    for line in sys.stdin:
        outcome = run_in_a_fork(cases, with_cpu_for_cuda, json.loads(line))
        print(json.dumps(asdict(outcome)), file=answers)
    os._exit(0)  # nothing to tidy up, and taking apart what was imported takes seconds


def run_in_a_fork(cases: type[unittest.TestCase], with_cpu_for_cuda: bool, order: dict[str, Any]) -> Outcome:
    """Runs one test in a process that leads its own session; nothing of that session is left."""
    with tempfile.TemporaryDirectory(prefix="conformance-", ignore_cleanup_errors=True) as folder:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.setsid()
                die_with_parent()
                outcome = run(cases, with_cpu_for_cuda, order, Path(folder))
                Path(folder, "outcome").write_text(json.dumps(asdict(outcome)))
                code = 0
            except BaseException:  # noqa: BLE001 (reported in the log, whatever it is)
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        ended = os.pidfd_open(pid)
        in_time = bool(select.select([ended], [], [], order["timeout_s"])[0])
        os.close(ended)
        os.killpg(pid, signal.SIGKILL)  # with the ranks; the leader is not reaped: the number is its own
        os.waitpid(pid, 0)
        log = Path(folder, "log").read_text(errors="replace")[-LONGEST_LOG:]
        if not in_time:
            return Outcome(status="timed out", error=log)
        found = Path(folder, "outcome")
        if not found.exists():
            return Outcome(status="failed", error=f"the process of the test died\n{log}")
        return Outcome(**json.loads(found.read_text()))


def run(
    cases: type[unittest.TestCase], with_cpu_for_cuda: bool, order: dict[str, Any], folder: Path
) -> Outcome:
    """Runs one test in this process, which is lost for any other."""
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    scratch = folder / "scratch"
    (scratch / "barrier").mkdir(parents=True)
    os.environ |= {"TMPDIR": str(scratch), "TEMP_DIR": str(scratch), "WORLD_SIZE": str(order["world_size"])}
    tempfile.tempdir = None

    from torch.testing._internal import common_distributed

    from conformance import cpu_for_cuda
    from conformance.substitution import substitute

    substituted = substitute(order["class_"])
    if with_cpu_for_cuda:
        cpu_for_cuda.install(substituted)
    common_distributed.TIMEOUT_OVERRIDE.clear()
    common_distributed.TIMEOUT_DEFAULT = order["timeout_s"] - STACKS_BEFORE_THE_END_S
    if not hasattr(cases, order["name"]):
        return Outcome(status="failed", error="torch has no such test")
    result = unittest.TestResult()
    cases(order["name"]).run(result)
    if result.errors or result.failures:
        return Outcome(status="failed", error="\n".join(text for _, text in result.errors + result.failures))
    if result.skipped:
        return Outcome(status="skipped", error=result.skipped[0][1])
    if result.unexpectedSuccesses:
        return Outcome(status="failed", error="unexpected success")
    return Outcome(status="passed")


if __name__ == "__main__":
    serve()
