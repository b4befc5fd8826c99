"""A benchmark that SIGTERM ends leaves no process, folder or namespace behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness.namespaces import can_shape_links

from lightning_ddp.tools import held_back, unwinds_at_sigterm
from lightning_ddp.tools.scripts import PACKAGE_ROOT

DEADLINE_S = 240


def wait_for(find: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (found := find()):
        assert time.monotonic() < deadline, "what was waited for has not happened"
        time.sleep(0.02)
    return found


def running(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE  # whose new parent has not looked yet
    except psutil.NoSuchProcess:
        return True


def script_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The script that is measured: the process with a session of its own."""
    found = []
    for one in running(process):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            found += [one] if os.getsid(one.pid) == one.pid else []
    return found


def namespaces_of(process: subprocess.Popen[bytes]) -> list[Path]:
    """The names of the namespaces, once both ranks have entered theirs."""
    inodes, found = set(), []
    for one in running(process):
        with contextlib.suppress(FileNotFoundError):  # such as `ip`, which has ended meanwhile
            inodes.add(os.stat(f"/proc/{one.pid}/ns/net").st_ino)
    for path in Path("/var/run/netns").glob("*"):
        with contextlib.suppress(FileNotFoundError):  # another test's
            found += [path] if path.stat().st_ino in inodes else []
    return found if len(found) == 2 else []


@pytest.mark.slow
@pytest.mark.xdist_group("namespaces")
@pytest.mark.parametrize(
    ("arguments", "find"),
    [
        (["failures"], script_of),
        (["hooks", "--links", "100"], namespaces_of),
    ],
    ids=["script", "link"],
)
def test_sigterm_removes_what_a_benchmark_has_made(arguments, find, tmp_path: Path) -> None:
    if find is namespaces_of and not can_shape_links():
        pytest.skip("needs network namespaces (root)")
    scratch, output = tmp_path / "scratch", tmp_path / "output"
    scratch.mkdir()
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "lightning_ddp", "bench", *arguments],
            cwd=PACKAGE_ROOT,
            env={**os.environ, "TMPDIR": str(scratch)},
            stdout=stream,
            stderr=stream,
        )
    try:
        made = wait_for(lambda: find(process))
        children = running(process)
        assert list(scratch.iterdir()), "it has no scratch folder"
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 143, output.read_text()
        assert output.read_text().endswith("ended by SIGTERM\n")
        # all are killed but the resource tracker of `multiprocessing`, which ends when it hears no more
        wait_for(lambda: all(map(is_gone, children)))
        assert not list(scratch.iterdir())
        assert find is not namespaces_of or not [path for path in made if path.exists()]
    finally:
        for one in [*running(process), process] if process.poll() is None else []:
            one.kill()
        process.wait()


def test_what_is_being_started_is_finished_before_sigterm_ends_it() -> None:
    before, steps = signal.getsignal(signal.SIGTERM), []

    def start() -> None:
        with held_back():
            signal.raise_signal(signal.SIGTERM)
            steps.append("started")
        steps.append("not reached")

    with pytest.raises(SystemExit, match="143"), unwinds_at_sigterm():
        start()
    assert steps == ["started"]
    assert signal.getsignal(signal.SIGTERM) == before
