"""Breaks the harness on purpose: whatever becomes of a rank, the right rank is reported, and none is left."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from harness import (
    ProcessLeftBehind,
    RankFailed,
    ScriptFailed,
    run_ranks,
    run_ranks_outcomes,
    run_script,
    run_threads,
    run_threads_outcomes,
    start_script,
)

pytest_plugins = ["pytester"]
SLEEPER = "import signal; signal.pause()"


class Explosive:
    def __reduce__(self):
        return (int, ("no number",))


def raises():
    raise ValueError("the flux is wrong")


def crashes_when_it_has_answered():
    dist.is_initialized = lambda: os._exit(4)  # asked at the end


ENDS = [
    (lambda: "a result", "returned", None, ""),
    (raises, "raised", None, "ValueError: the flux is wrong\n(.|\n)*in raises"),
    (lambda: os._exit(3), "died", 3, "exit code 3"),
    (lambda: os._exit(0), "died", 0, "exit code 0"),
    (lambda: os.kill(os.getpid(), signal.SIGKILL), "died", -signal.SIGKILL, "killed by SIGKILL"),
    (lambda: lambda: None, "raised", None, "[Cc]an't (pickle|get local)|lambda"),
    (Explosive, "raised", None, "no number"),  # cannot be unpickled
    (lambda: sys.exit(5), "raised", None, "SystemExit: 5"),
    (crashes_when_it_has_answered, "died", 4, "answered, but then ended with exit code 4"),
]
"""What each rank does, its status, the exit code of its process, and what its report says."""


def end(rank, world_size):
    return ENDS[rank][0]()


def test_every_rank_that_gives_no_result_is_reported_with_what_became_of_it():
    failed = r"8 of 9 ranks failed \(1, 2, 3, 4, 5, 6, 7, 8\)(.|\n)*the flux is wrong(.|\n)*SIGKILL"
    with pytest.raises(RankFailed, match=failed) as caught:
        run_ranks(end, len(ENDS), process_group=False)
    assert sorted(caught.value.failures) == list(range(1, len(ENDS)))
    for outcome, (_, status, exit_code, text) in zip(caught.value.outcomes, ENDS, strict=True):
        assert (outcome.status, outcome.exit_code) == (status, exit_code)
        assert re.search(text, outcome.describe()), outcome.describe()


def hangs_on_rank_1(rank, world_size):
    if rank == 1:
        wait_for_a_godot()
    return rank


def wait_for_a_godot():
    threading.Event().wait()


def test_a_rank_that_hangs_is_reported_with_its_stack_and_killed():
    started = time.monotonic()
    with pytest.raises(RankFailed, match=r"1 of 2 ranks failed \(1\)(.|\n)*hung(.|\n)*wait_for_a_godot"):
        run_ranks(hangs_on_rank_1, 2, timeout_s=1.0)
    assert 1.0 <= time.monotonic() - started < 10


def rank_0_waits_for_a_dead_peer(rank, world_size):
    if rank == 1:
        raise ValueError("the cause")
    dist.all_reduce(torch.ones(1))


def test_a_rank_that_fails_because_its_peer_failed_is_reported_beside_the_cause():
    with pytest.raises(RankFailed, match=r"2 of 2 ranks failed(.|\n)*the cause") as caught:
        run_ranks(rank_0_waits_for_a_dead_peer, 2)
    kinds = {rank: failure.exception_type for rank, failure in caught.value.failures.items()}
    assert kinds == {0: "RuntimeError", 1: "ValueError"}  # the connection of rank 0 broke
    # outcomes keep failed ranks connected, so that a hang shows
    outcomes = run_ranks_outcomes(rank_0_waits_for_a_dead_peer, 2, timeout_s=1.5)
    assert [outcome.status for outcome in outcomes] == ["hung", "raised"]
    assert "all_reduce" in outcomes[0].traceback


LEFT_BY_A_RANK = f"{SLEEPER}  # other tests have such processes as well, at the same time"


def leaves_a_process(rank, world_size):
    return subprocess.Popen([sys.executable, "-c", LEFT_BY_A_RANK]).pid


def test_a_rank_that_leaves_a_process_fails_the_run_and_the_process_is_killed():
    with pytest.raises(ProcessLeftBehind, match=r"left 2 process\(es\) behind: pid \d+.*signal\.pause"):
        run_ranks(leaves_a_process, 2)
    assert not [p for p in psutil.process_iter(["cmdline"]) if LEFT_BY_A_RANK in (p.info["cmdline"] or [])]


def fails_in_a_thread(rank, world_size, group, how):
    if rank == 1 and how == "raises":
        raises()
    if rank == 1 and how == "hangs":
        group.allreduce([torch.ones(1)]).wait()
    return rank


def test_a_thread_that_raises_or_hangs_in_a_collective_is_reported():
    with pytest.raises(RankFailed, match=r"1 of 3 ranks failed \(1\)(.|\n)*the flux is wrong") as caught:
        run_threads(fails_in_a_thread, 3, "raises")
    assert list(caught.value.failures) == [1]
    assert [caught.value.outcomes[rank].value for rank in (0, 2)] == [0, 2]
    outcomes = run_threads_outcomes(fails_in_a_thread, 2, "hangs", timeout_s=0.5)
    assert [outcome.status for outcome in outcomes] == ["returned", "hung"]
    assert "group.allreduce" in outcomes[1].traceback


# ---------------------------------------------------------------------- scripts


STARTS = pytest.mark.parametrize("fresh", [False, True], ids=["forked", "fresh"])


@STARTS
def test_a_script_gives_its_output_and_exit_code_and_has_its_environment_but_not_that_of_a_rank(
    fresh, monkeypatch
):
    monkeypatch.setenv("LOCAL_RANK", "7")
    source = (
        "import os, sys\n"
        "print('out', *sys.argv[1:], os.environ.get('LOCAL_RANK'), os.environ['COLOR'])\n"
        "print('err', file=sys.stderr)\n"
        "sys.exit(3)\n"
    )
    result = run_script(source, ["a", "b"], env={"COLOR": "green"}, fresh=fresh)
    assert (result.returncode, result.stdout, result.stderr) == (3, "out a b None green\n", "err\n")
    with pytest.raises(ScriptFailed, match=r"exit code 3(.|\n)*out a b(.|\n)*err"):
        result.check()


@STARTS
def test_a_script_that_hangs_shows_its_stack_and_is_killed(fresh):
    source = f"import os\nprint(os.getpid(), flush=True)\ndef stuck():\n    {SLEEPER}\nstuck()\n"
    with pytest.raises(ScriptFailed, match=r"did not end within 1.0 s(.|\n)*in stuck") as caught:
        run_script(source, timeout_s=1.0, fresh=fresh)
    pid = int(str(caught.value).split("--- stdout\n")[1].split()[0])
    assert not psutil.pid_exists(pid)


@STARTS
@pytest.mark.parametrize("new_session", [False, True])
def test_a_script_that_leaves_a_process_fails_and_the_process_is_killed(fresh, new_session, tmp_path):
    source = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEPER!r}], start_new_session={new_session})\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
    )
    with pytest.raises(ProcessLeftBehind, match=r"left 1 process\(es\) behind: pid \d+.*signal\.pause"):
        run_script(source, leftover_grace_s=0.2, fresh=fresh)
    assert not psutil.pid_exists(int(Path(tmp_path, "pid").read_text()))


SEEN = """
import json, os, signal, subprocess, sys

def seen():
    signals = signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2
    return {
        "argv": sys.argv,
        "main": [__name__, __file__, __spec__ and __spec__.name, vars(sys.modules["__main__"]) is globals()],
        "path": sys.path,
        "folder": os.getcwd(),
        "environment": {k: v for k, v in os.environ.items() if k not in ("LC_CTYPE", "KMP_INIT_AT_FORK")},
        "handlers": [str(signal.getsignal(number)) for number in signals],
        "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "is_in_group_of_parent": os.getpgid(0) == os.getpgid(os.getppid()),
        "threads": len(os.listdir("/proc/self/task")),
        "files": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1],
        "imported": sorted({"lightning_ddp", "hydra", "omegaconf"} & set(sys.modules)),
        "buffers": sys.stdout.write_through,
    }

if len(sys.argv) == 2:  # what another one has started
    os.write(int(sys.argv[1]), b"written to the file")
    is_parent = os.getppid() == int(sys.stdin.readline())
    print(json.dumps({**seen(), "is_parent": is_parent}))
    sys.exit(5)
print(json.dumps(seen()))
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.signal(signal.SIGUSR2, lambda *_: None)
os.environ["MINE"] = "ü"
os.mkdir("below")
reading, writing = os.pipe()
for how in [[__file__], ["-u", __file__], ["-m", "seen"]]:
    child = subprocess.run(
        [sys.executable, *how, str(writing)], input=str(os.getpid()), pass_fds=[writing], capture_output=True,
        text=True, cwd="below", env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    written = os.read(reading, 99).decode()
    print(json.dumps([json.loads(child.stdout), child.stderr, child.returncode, written]))
"""


def test_a_fork_sees_what_a_fresh_interpreter_sees_and_so_do_those_that_it_starts(tmp_path):
    found = []
    for fresh in (True, False):
        folder = tmp_path / "work"
        folder.mkdir()
        (folder / "seen.py").write_text(SEEN)
        lines = run_script(folder / "seen.py", cwd=folder, fresh=fresh).check().stdout.splitlines()
        found.append([json.loads(line) for line in lines])
        shutil.rmtree(folder)
    fresh, forked = found
    assert forked == fresh
    main, *children = forked
    assert (main["leads"], main["threads"], main["imported"]) == ([True, True], 1, [])
    for child, error, code, written in children:
        assert (error, code, written) == ("", 5, "written to the file")
        assert child["is_parent"]
        assert child["environment"]["MINE"] == "ü"
        assert (child["leads"], child["is_in_group_of_parent"]) == ([False, False], True)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("raise ValueError('wrong')", 1),
        ("sys.exit('a word')", 1),
        ("sys.exit(300)", 44),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("threading.Thread(target=lambda: print('a thread')).start()", 0),
        ("def f(:", 1),
    ],
)
def test_a_fork_ends_as_a_fresh_interpreter_does(end, code, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        "import atexit, os, signal, sys, threading\n"
        "atexit.register(lambda: print('at exit', getattr(sys, 'last_value', None)))\n"
        f"{end}\n"
    )
    fresh, forked = run_script(path, fresh=True), run_script(path)
    assert forked == fresh
    assert forked.returncode == code


def test_lightning_knows_the_rank_of_a_fork():
    source = "import pytorch_lightning as pl, torchmetrics.utilities.prints as t\n"
    source += "print(pl.utilities.rank_zero_only.rank, t.rank_zero_only.rank)"
    assert run_script(source, env={"LOCAL_RANK": "1"}).check().stdout == "1 1\n"


def test_a_started_script_that_nobody_waits_for_is_killed():
    with start_script(SLEEPER) as script:
        (process,) = script.processes()
        assert process.pid == script.pid
    assert not psutil.pid_exists(script.pid)


LEAKY = """
import os, signal, subprocess, sys, threading
import torch.distributed as dist

release = threading.Event()

def test_environment():
    os.environ["LEAKED"] = "1"

def test_process_group():
    assert "LEAKED" not in os.environ
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

def test_thread():
    assert not dist.is_initialized()
    threading.Thread(target=release.wait, args=(60,), name="forgotten").start()

def test_child():
    release.set()
    global child
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])

def test_clean():
    assert child.poll() is not None
"""


def test_a_test_that_leaks_fails_and_does_not_disturb_the_next(pytester, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    conftest = Path(__file__).with_name("conftest.py").read_text()
    pytester.makeconftest(conftest.replace("_ENDING_GRACE_S = 2.0", "_ENDING_GRACE_S = 0.2"))
    pytester.makepyfile(LEAKY)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=60)
    result.assert_outcomes(passed=5, errors=4)
    result.stdout.fnmatch_lines(
        [
            "*ERROR*::test_environment - *changed environment variables*LEAKED*",
            "*ERROR*::test_process_group - *left a default process group*",
            "*ERROR*::test_thread - *left non-daemon threads*forgotten*",
            "*ERROR*::test_child - *left child processes*signal.pause*",
        ]
    )


# ---------------------------------------------------------------------- .ci/tier.py

TIER = Path(__file__).parents[1] / ".ci" / "tier.py"
FAILING_ONCE = """
import pathlib, pytest, time

@pytest.mark.xdist_group("a group")
@pytest.mark.parametrize("number", range({num_tests}))
def test_number(number):
    seen = pathlib.Path(f"seen-{{number}}")
    is_first = not seen.exists()
    seen.touch()
    time.sleep(0.01)  # shorter ones are not shown
    assert number >= {num_failing} or not is_first{or_never}
"""


def run_tier(folder, name, num_failing, *, twice=False, workers=0, num_tests=6):
    """Runs a tier of tests of its own, of which the first ones fail once or `twice`."""
    or_never = " and False" if twice else ""
    source = FAILING_ONCE.format(num_failing=num_failing, or_never=or_never, num_tests=num_tests)
    (folder / f"test_{name}.py").write_text(source)
    for seen in folder.glob("seen-*"):
        seen.unlink()
    command = f"pytest -n {workers} --dist loadgroup test_{name}.py"
    env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p xdist"}  # others take a second
    return run_script(TIER, [name, command], env, cwd=folder, fresh=True)


def test_what_fails_once_in_a_tier_runs_again_and_is_counted_over_all_tiers(tmp_path):
    """The durations of all tests are kept, and the longest are shown."""
    assert run_script(TIER, cwd=tmp_path, fresh=True).check().stdout == "failed once: 0\n"
    shown = run_tier(tmp_path, "first", 1, workers=1, num_tests=60).check().stdout
    assert shown.count("s call ") == 50
    assert (tmp_path / ".ci" / "out" / "first.log").read_text().count("s call ") == 60
    run_tier(tmp_path, "slow", 2).check()
    tests = ["test_first.py::test_number[0]", "test_slow.py::test_number[0]", "test_slow.py::test_number[1]"]
    line = run_script(TIER, cwd=tmp_path, fresh=True).check().stdout
    assert line == f"failed once: 3 ({'; '.join(tests)})\n"


def test_a_tier_fails_whose_test_fails_twice_or_where_more_than_three_fail_at_once(tmp_path):
    for number, twice in ((1, True), (4, False)):
        result = run_tier(tmp_path, "first", number, twice=twice)
        assert result.returncode == 1
        assert f"FAILED, {number} of tier first:" in result.stdout
    assert run_script(TIER, cwd=tmp_path, fresh=True).stdout == "failed once: 0\n"
    result = run_script(TIER, ["first", "exit 1"], cwd=tmp_path, fresh=True)
    assert (result.returncode, result.stdout) == (1, ""), "nothing failed that could run again"
