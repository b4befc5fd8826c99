"""A benchmark that SIGTERM ends leaves no process, folder or namespace behind."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
from harness import RunningScript, start_script
from harness.namespaces import can_shape_links

from lightning_ddp.tools import held_back, unwinds_at_sigterm

DEADLINE_S = 240.0


def sessions_of(script: RunningScript) -> list[int]:
    """The script that is measured: the process with a session of its own."""
    found = []
    for one in script.processes():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            found += [one.pid] if os.getsid(one.pid) == one.pid != script.pid else []
    return found


def namespaces_of(script: RunningScript) -> list[Path]:
    """The names of the namespaces, once both ranks have entered theirs."""
    inodes, found = set(), []
    for one in script.processes():
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
    [(["failures"], sessions_of), (["hooks", "--links", "100"], namespaces_of)],
    ids=["script", "link"],
)
def test_sigterm_removes_what_a_benchmark_has_made(arguments, find, tmp_path: Path) -> None:
    if find is namespaces_of and not can_shape_links():
        pytest.skip("needs network namespaces (root)")
    env, made = {"TMPDIR": str(tmp_path)}, []
    with start_script("lightning_ddp", ["bench", *arguments], env, fresh=True, is_module=True) as script:
        script.wait_until(lambda: made.extend(find(script)) or made, DEADLINE_S)
        assert list(tmp_path.iterdir()), "it has no scratch folder"
        os.kill(script.pid, signal.SIGTERM)
        result = script.wait(DEADLINE_S)  # raises if a process is left
    assert result.returncode == 143, result.stderr
    assert "ended by SIGTERM\n" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())
    assert find is sessions_of or not [path for path in made if path.exists()]


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
