"""The launcher: children start at once, none outlives its parent, and one that dies ends the run by name."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness import RUN, TRAINS, free_port, run_script, slow, start_script
from pytorch_lightning.plugins.environments import LightningEnvironment
from torch.multiprocessing import ProcessRaisedException
from user_script import SCRIPT, STEPS, order, read_notes, wait_for_notes

from lightning_ddp.errors import ConfigurationError, RendezvousError
from lightning_ddp.launch import job_context as contexts
from lightning_ddp.launch import rendezvous
from lightning_ddp.launch.children import Children
from lightning_ddp.launch.launcher import _failure_of, node_rank_of
from lightning_ddp.launch.zygote import Launch, Program
from lightning_ddp.supervise.failure_record import GONE, FailureRecord, Identity
from lightning_ddp.supervise.settings import SupervisionSettings

DEADLINE_S = 180.0
LONGEST_END_S = 60.0
"""Where a rank is to end at once; after `failure_grace_s` it would in any case."""


def require_trained(folder: Path, num_ranks: int = 2) -> list[dict[str, Any]]:
    """What each rank noted at its end; all have made all steps, and have the same weights."""
    notes = read_notes(folder)
    ends = [notes[f"finally-{rank}"] for rank in range(num_ranks)]
    assert [end["step"] for end in ends] == [STEPS] * num_ranks
    assert all(end["weights"] == ends[0]["weights"] for end in ends)
    assert not any(name.startswith("on_exception") for name in notes)
    return ends


def test_the_message_of_a_function_that_failed_may_have_several_lines() -> None:
    trace = """

-- Process 1 terminated with the following error:
Traceback (most recent call last):
  File "train.py", line 3, in load
    raise ValueError("the picture is broken\\nsecond: line\\n  detail: 7")
    ^^^^^
ValueError: the picture is broken
second: line
  detail: 7
"""
    record = _failure_of(ProcessRaisedException(trace, 1, 77), 4, 2)
    assert (record.exception_type, record.rank, record.node_rank, record.pid) == ("ValueError", 5, 2, 77)
    assert record.message == "the picture is broken\nsecond: line\n  detail: 7"


@pytest.mark.parametrize(
    "launcher", [(), slow(("-m", "cProfile", "-o", os.devnull))], ids=["python", "cProfile"]
)
def test_a_script_is_run_again_with_its_arguments_and_a_free_port_is_taken(launcher, tmp_path) -> None:
    arguments = [*order(tmp_path), "--x", "a b"]
    run_script(SCRIPT, arguments, timeout_s=DEADLINE_S, launcher=launcher).check()
    ends = require_trained(tmp_path)
    assert [end["arguments"] for end in ends] == [["--x", "a b"]] * 2
    assert {end["port"] for end in ends} != {"29500"}
    assert ends[0]["port"] == ends[1]["port"]
    assert ends[0]["pid"] != ends[1]["pid"]
    left = set(read_notes(tmp_path)["fitted-0"]["variables"])
    assert left <= {"LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "WORLD_SIZE"}, (
        "more than what tells another Trainer that this is rank 0"
    )


@pytest.mark.parametrize("launcher", [(), (*RUN, "--preload", "imported_once")], ids=["python", "run"])
def test_a_module_is_run_as_a_module_and_under_run_others_are_imported_before(tmp_path, launcher) -> None:
    package, site = tmp_path / "some_app", tmp_path / "site"
    package.mkdir()
    site.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(SCRIPT.read_text() + "\nfrom . import __path__\n")
    (site / "imported_once.py").write_text("print('imported once', flush=True)")
    options: Any = {"is_module": True, "cwd": tmp_path, "timeout_s": DEADLINE_S, "launcher": launcher}
    env = {"PYTHONPATH": str(site)}
    result = run_script("some_app.train", order(tmp_path), env, **options).check()
    assert result.stdout.count("imported once") == bool(launcher)
    require_trained(tmp_path)


LOOKS_BEFORE_IT_FORKS = """
import os, runpy, sys, time
import psutil

def num_connections():
    established = psutil.Process().net_connections("tcp")
    return sum(connection.status == psutil.CONN_ESTABLISHED for connection in established)

def look_and_fork():
    global at_first
    at_first = at_first or num_connections()
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline and children:
        assert num_connections() <= at_first, "a process communicates before all have been forked"
        time.sleep(0.01)
    pid = fork()
    children.append(pid)
    return pid

at_first, children, fork, os.fork = 0, [], os.fork, look_and_fork
"""


def test_forkserver_makes_processes_as_well(tmp_path) -> None:
    """The other ways: `test_mission`, every name."""
    strategy = {"start_method": "forkserver"}
    run_script(SCRIPT, order(tmp_path, strategy=strategy), timeout_s=DEADLINE_S).check()
    notes = read_notes(tmp_path)
    assert [notes[f"trained-{rank}"]["step"] for rank in range(2)] == [STEPS] * 2
    assert notes["trained-0"]["pid"] != notes["trained-1"]["pid"]


@pytest.mark.parametrize("what", ["custom_ddp_fork", "doctor --verify"])
def test_no_forked_process_communicates_before_all_have_been_forked(what, tmp_path) -> None:
    """The store in their parent may hold a lock of the C library then, which they would inherit for ever."""
    script = tmp_path / "script.py"
    if what == "custom_ddp_fork":
        rest = order(tmp_path, strategy=what, trainer={"devices": 3})
        script.write_text(LOOKS_BEFORE_IT_FORKS + f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n")
    else:
        rest = [*what.split(), "--device=cpu", "--processes=3", "--only=gradients, defaults"]
        script.write_text(
            LOOKS_BEFORE_IT_FORKS + "from lightning_ddp.__main__ import main\nsys.exit(main(sys.argv[1:]))\n"
        )
    run_script(script, rest, timeout_s=DEADLINE_S).check()
    if what == "custom_ddp_fork":
        notes = read_notes(tmp_path)
        assert [notes[f"trained-{rank}"]["step"] for rank in range(3)] == [STEPS] * 3


@pytest.mark.parametrize(
    ("strategy", "launcher", "are_stopped"),
    [
        ("custom_ddp", (), False),
        ("custom_ddp_spawn", (), False),
        ("custom_ddp", RUN, False),
        slow("custom_ddp", RUN, True),
    ],
)
def test_processes_vanish_with_a_launcher_that_is_killed(strategy, launcher, are_stopped, tmp_path) -> None:
    arguments = order(tmp_path, strategy=strategy, pause="fit")
    with start_script(SCRIPT, arguments, launcher=launcher) as script:
        notes = wait_for_notes(script, tmp_path, ["ready-0", "ready-1"])
        pids = {notes[f"ready-{rank}"]["pid"] for rank in range(2)} - {script.pid}
        assert pids
        for pid in pids if are_stopped else ():
            os.kill(pid, signal.SIGSTOP)
        os.kill(script.pid, signal.SIGKILL)
        assert script.wait(DEADLINE_S, leftover_grace_s=60.0).returncode == -signal.SIGKILL


STUCK = [
    ("custom_ddp", (), "main", "expression"),
    ("custom_ddp", RUN, "main", "lock"),
    ("custom_ddp", RUN, "rank 0", "lock"),
    ("custom_ddp_spawn", (), "main", "lock"),
    ("custom_ddp_fork", (), "main", "lock"),
]


@pytest.mark.slow
def test_processes_that_cannot_hear_of_their_launchers_death_end_all_the_same(tmp_path) -> None:
    """All of them at the same time: the guard has patience for 20 s."""
    with contextlib.ExitStack() as stack:
        scripts = []
        for number, (strategy, launcher, killed, stuck) in enumerate(STUCK):
            folder = tmp_path / str(number)
            folder.mkdir()
            arguments = order(folder, strategy=strategy, stuck=stuck, stuck_rank=1)
            script = stack.enter_context(start_script(SCRIPT, arguments, launcher=launcher))
            notes = wait_for_notes(script, folder, ["stuck-1", "begun-0"])
            pid = script.pid if killed == "main" else notes["begun-0"]["pid"]
            scripts.append((script, pid, notes["stuck-1"]["pid"]))
        start = time.monotonic()
        for _, pid, _ in scripts:
            os.kill(pid, signal.SIGKILL)
        for script, _, stuck_pid in scripts:
            result = script.wait(DEADLINE_S, leftover_grace_s=90.0)
            assert time.monotonic() - start < 23.0
            assert result.returncode == -signal.SIGKILL
            assert f"rank 1 (pid {stuck_pid}) did not react to a failure, and was killed" in result.stderr
            assert "in stick" in result.stderr[-4000:], "the line that holds it"


@pytest.mark.parametrize(
    "cells", [[(0, 0, signal.SIGTERM), (1, 2, signal.SIGINT)], slow([(0, 1, signal.SIGTERM)])]
)
def test_a_signal_ends_a_rank_that_waits_for_another_node(cells, tmp_path) -> None:
    """Of several jobs at the same time: a rank says after 5 s what it waits for."""
    ports = {0: str(free_port()), 1: "1"}  # at which nobody listens
    waited = {0: "all 4 ranks; connected so far: [0, 1]", 1: "the store of the run at 127.0.0.1:"}
    strategy = {"failure_grace_s": 2 * LONGEST_END_S}
    with contextlib.ExitStack() as stack:
        scripts = []
        for node_rank, rank, _ in cells:
            folder = tmp_path / str(rank)
            folder.mkdir()
            env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": ports[node_rank], "NODE_RANK": str(node_rank)}
            arguments = order(folder, strategy=strategy, trainer={"num_nodes": 2}, pause="before")
            scripts.append(stack.enter_context(start_script(SCRIPT, arguments, env)))
        for script, (node_rank, rank, number) in zip(scripts, cells, strict=True):
            pids = wait_for_notes(script, tmp_path / str(rank), ["begun-0", "begun-1"])
            words = f"has waited 5 s for {waited[node_rank]}"
            script.wait_until(lambda script=script, words=words: words in script.output())
            os.kill(pids[f"begun-{rank % 2}"]["pid"], number)
            result = script.wait(LONGEST_END_S)
            if rank % 2 == 0:
                assert result.returncode == -number, result.stderr
                continue
            assert result.returncode == 1
            report = result.stderr.rpartition("lightning_ddp: ")[2]
            assert report.startswith(f"rank {rank} (node 0, host "), result.stderr
            assert f"the process was killed by {number.name}" in report, result.stderr


BETWEEN_RUNS = f"""{TRAINS}
from lightning_ddp.launch.desync_reporter import DesyncReporter
from lightning_ddp.launch.job_context import job_context

def state():
    ours = [name for name in os.environ if "LIGHTNING_DDP" in name or "GLOO" in name]
    return sorted(thread.name for thread in threading.enumerate() if not thread.daemon), ours

def tell(when):
    print("rank", f"{{rank}}, {{when}}:", "as before" if state() == before else state(), flush=True)

def fit():
    ours = trainer(max_epochs=1, limit_train_batches=2)
    ours.fit(BoringModel())
    tell("fitted")
    ours.validate(BoringModel(), verbose=False)
    tell("validated")

def fail():
    if how == "raise":
        raise ValueError("no such column: 'age'")
    if how == "leave":
        os._exit(3)
    if how:
        os.kill(os.getpid(), getattr(signal, how))

rank, before = int(os.environ.get("LOCAL_RANK", 0)), state()
victim, how, has_more = int(sys.argv[1]), sys.argv[2], sys.argv[3] != "end"
heard = []
if sys.argv[3] == "handle":
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
if sys.argv[3] == "slow" and rank != victim:
    leave = DesyncReporter.leave
    DesyncReporter.leave = lambda self: (leave(self), time.sleep(1))
try:
    fit()
    if rank == victim:
        fail()
    if sys.argv[3] == "handle" and rank == victim:
        print("the script's handler has heard", heard, flush=True)
    if sys.argv[3] == "wait" and rank != victim:
        print("heard meanwhile:", job_context().control.wait_for_verdict(30).rank, flush=True)
    if has_more:
        fit()
except lightning_ddp.PeerFailure as failure:
    print("heard", failure, flush=True)
    raise
print("ended well", flush=True)
"""


@pytest.mark.parametrize("launcher", [(), slow(RUN)], ids=["own", "run"])
def test_between_two_runs_nothing_holds_the_process_and_sigterm_is_the_scripts_own(launcher) -> None:
    arguments = ["1", "SIGTERM", "handle"]
    result = run_script(BETWEEN_RUNS, arguments, timeout_s=DEADLINE_S, launcher=launcher).check()
    for rank, when in itertools.product(range(2), ("fitted", "validated")):
        assert result.stdout.count(f"rank {rank}, {when}: as before") == 2, result.stdout
    assert result.stdout.count("the script's handler has heard [15]") == 1, result.stdout


@pytest.mark.parametrize(
    ("victim", "how", "then", "words"),
    [
        (0, "raise", "slow", "ValueError: no such column: 'age'"),
        (1, "SIGKILL", "end", "the process was killed by SIGKILL"),
        (1, "SIGKILL", "wait", "the process was killed by SIGKILL"),
        slow(0, "SIGKILL", "wait", GONE),
        slow(0, "leave", "more", GONE),
        slow(1, "leave", "more", "the process exited with code 3"),
    ],
)
def test_who_fails_between_two_runs_is_named(victim, how, then, words) -> None:
    """At the beginning of the next one, or at the end of the launching process; who waits hears at once.

    A rank that is slow to leave a run has left it once all have ended it: it learns of this in its next run.
    """
    result = run_script(BETWEEN_RUNS, [str(victim), how, then], timeout_s=DEADLINE_S)
    context = f"{result.stdout}\n{result.stderr}"
    assert f"rank {1 - victim}, validated: as before" in result.stdout, context
    if then != "end":
        assert f"heard rank {victim} (host " in result.stdout, context
    if then == "wait":
        assert f"heard meanwhile: {victim}" in result.stdout, context
    assert result.stdout.count("ended well") == (then == "end"), context
    if victim == 0 and how != "raise":
        assert result.returncode == (3 if how == "leave" else -signal.Signals[how]), context
        return
    assert result.returncode == 1, context
    report = result.stderr.rpartition("lightning_ddp: ")[2]
    assert report.startswith(f"rank {victim} (node 0, host "), context
    assert words in report, context


BEFORE_THE_NEXT_RUN = f"""{TRAINS}
from lightning_ddp.launch.job_context import job_context

class Model(BoringModel):
    def configure_callbacks(self):
        if number == 1 and rank == 1:
            raise ValueError("no such column: 'age'")
        return []

rank = int(os.environ.get("LOCAL_RANK", 0))
for number in range(3):
    if number == 1 and rank == 0:
        job_context().control.wait_for_verdict(30)  # while it is between two runs
    try:
        trainer(max_epochs=1, limit_train_batches=2).fit(Model())
        print("rank", f"{{rank}}, run {{number}}: fitted", flush=True)
    except ValueError as error:
        print("rank", f"{{rank}}, run {{number}}: {{type(error).__name__}}", flush=True)
"""


def test_a_failure_that_is_heard_between_two_runs_and_caught_does_not_end_the_third() -> None:
    result = run_script(BEFORE_THE_NEXT_RUN, timeout_s=DEADLINE_S).check()
    said = {"rank 0, run 1: PeerFailure", "rank 1, run 1: ValueError"}
    said |= {f"rank {rank}, run {number}: fitted" for rank in range(2) for number in (0, 2)}
    assert said <= set(result.stdout.splitlines()), result.stdout + result.stderr


TWO_STRATEGIES = f"""{TRAINS}
for options in ({{"stall_timeout": 60}}, {{"failure_grace_s": 5}}, {{"failure_grace_s": 5}}):
    trainer(lightning_ddp.CustomDDPStrategy(**options), max_steps=1).fit(BoringModel())
"""


def test_options_of_a_later_strategy_that_have_no_effect_are_named_once() -> None:
    result = run_script(TWO_STRATEGIES, timeout_s=DEADLINE_S).check()
    assert result.stderr.count("options of this strategy have no effect") == 1, result.stderr
    assert ": failure_grace_s stays 30.0, stall_timeout stays 60. " in result.stderr


AFTER_A_FIT = f"""{TRAINS}
before, devices = set(os.environ), int(sys.argv[1])
ours, model = trainer(devices=devices, max_steps=1), BoringModel()
ours.fit(model)
references = [weakref.ref(kept) for kept in (ours, ours.strategy, model)]
del ours, model
gc.collect()
print("alive:", [type(kept()).__name__ for kept in references if kept() is not None], flush=True)
if devices == 1:
    names = [name for name in set(os.environ) - before if "LIGHTNING_DDP" in name or "GLOO" in name]
    print("left:", [thread.name for thread in threading.enumerate()], names)
"""


@pytest.mark.parametrize("devices", [1, 2])
def test_after_a_run_nothing_keeps_its_trainer_alive_and_a_lone_rank_has_no_thread(devices) -> None:
    result = run_script(AFTER_A_FIT, [str(devices)], timeout_s=DEADLINE_S).check()
    assert result.stdout.count("alive: []") == devices
    assert devices > 1 or "left: ['MainThread'] []" in result.stdout


BEFORE_THEY_MEET = f"""
import os, sys, time
from pathlib import Path
if os.environ.get("LOCAL_RANK", "0") == "1":
    Path(sys.argv[1], "begun").touch()
    time.sleep(600)
{TRAINS}
Path(sys.argv[1], "first").write_text(str(os.getpid()))
trainer(max_steps=1).fit(BoringModel())
"""


@pytest.mark.parametrize(
    ("launcher", "victim"),
    [((), "rank 0"), (RUN, "supervisor"), (RUN, "rank 0")],
    ids=["python", "run, supervisor", "run, rank 0"],
)
def test_a_child_that_has_not_met_the_others_dies_with(launcher, victim, tmp_path) -> None:
    """Under `run` from its start; as a new interpreter once it has imported the package."""
    text = BEFORE_THEY_MEET if launcher else f"import lightning_ddp\n{BEFORE_THEY_MEET}"
    with start_script(text, [str(tmp_path)], launcher=launcher) as script:
        script.wait_until((tmp_path / "begun").exists)
        pid = script.pid if victim == "supervisor" else int((tmp_path / "first").read_text())
        os.kill(pid, signal.SIGKILL)
        assert script.wait(DEADLINE_S, leftover_grace_s=30.0).returncode == -signal.SIGKILL


FAILS_BEFORE_IT_CONNECTS = f"""{TRAINS}
from lightning_ddp.launch.job_context import job_context

class Model(BoringModel):
    def configure_callbacks(self):
        server = job_context().control.server
        while server is not None and not server.identities:
            time.sleep(0.01)
        if server is not None:
            raise ValueError("no such column: 'age'")
        return []

trainer(devices=1, num_nodes=2, max_steps=1).fit(Model())
"""


def test_ranks_of_another_node_hear_that_rank_0_has_failed_before_it_had_connected() -> None:
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    nodes = [env | {"NODE_RANK": str(node)} for node in range(2)]
    with contextlib.ExitStack() as stack:
        started = [start_script(FAILS_BEFORE_IT_CONNECTS, env=node) for node in nodes]
        for script in [stack.enter_context(node) for node in started]:
            result = script.wait(DEADLINE_S)
            assert result.returncode == 1
            report = result.stderr.rpartition("lightning_ddp: ")[2]
            assert report.startswith("rank 0 (node 0, host "), result.stderr
            assert "ValueError: no such column: 'age'" in report


WHILE_IT_STARTS = f"""{TRAINS}
if __name__ == "__main__":
    trainer(lightning_ddp.CustomDDPStrategy(start_method="spawn"), max_steps=1).fit(BoringModel())
else:
    open(f"{{sys.argv[1]}}/begun-{{os.getpid()}}", "w").close()
    while len(os.listdir(sys.argv[1])) < 3:
        time.sleep(0.01)
"""


def test_a_process_that_still_starts_when_its_launcher_is_killed_ends_by_itself(tmp_path) -> None:
    """One in the place of a lost one has no guard that would end it."""
    with start_script(WHILE_IT_STARTS, [str(tmp_path)]) as script:
        script.wait_until(lambda: len(os.listdir(tmp_path)) == 2)
        os.kill(script.pid, signal.SIGKILL)
        (tmp_path / "go").touch()
        assert script.wait(DEADLINE_S, leftover_grace_s=10.0).returncode == -signal.SIGKILL


ALONE = f"""{TRAINS}
from pytorch_lightning.plugins import TorchCheckpointIO

class Slow(TorchCheckpointIO):
    def remove_checkpoint(self, path):
        time.sleep(1.0)  # the launching process looks ten times a second for those that have ended early
        super().remove_checkpoint(path)

class Model(BoringModel):
    def on_train_start(self):
        if sys.argv[2:] == ["leave"]:
            os._exit(0)

if __name__ == "__main__":
    strategy = lightning_ddp.CustomDDPStrategy(start_method=sys.argv[1], checkpoint_io=Slow())
    trainer(strategy, devices=1, max_steps=2).fit(Model())
    print("fitted", flush=True)
"""


@pytest.mark.parametrize("start_method", [slow("spawn"), "fork"])
def test_a_single_process_may_end_well_before_its_results_are_taken(start_method) -> None:
    result = run_script(ALONE, [start_method], timeout_s=DEADLINE_S).check()
    assert result.stdout.endswith("fitted\n"), result.stderr


def test_a_single_process_that_leaves_ends_the_run() -> None:
    result = run_script(ALONE, ["fork", "leave"], timeout_s=DEADLINE_S)
    assert result.returncode == 1
    assert "PeerFailure: rank 0 (" in result.stderr


LEAVES_NOTHING = f"""
import atexit, gc, multiprocessing, os, psutil, tempfile
tempfile.tempdir = None  # where this is a fork, that of another process

def tell_what_is_walked():  # registered first, called last
    is_started, is_worker = multiprocessing.parent_process(), multiprocessing.current_process().daemon
    kind = "worker" if is_worker else "rank" if is_started else "main"
    os.write(1, f"{{kind}} walks {{len(gc.get_objects())}} and not {{gc.get_freeze_count()}}\\n".encode())

atexit.register(tell_what_is_walked)
{TRAINS}
from pytorch_lightning.demos.boring_classes import RandomDataset
from pytorch_lightning.plugins import TorchCheckpointIO

class Data(RandomDataset):
    def __getitem__(self, index):
        if index >= 12 and sys.argv[2] == "worker":
            raise ValueError("no such sample")
        return super().__getitem__(index)

class Full(TorchCheckpointIO):
    def save_checkpoint(self, *args, **options):
        super().save_checkpoint(*args, **options)
        if sys.argv[2] == "results":
            raise OSError("no space left on device")

if __name__ == "__main__":
    strategy = lightning_ddp.CustomDDPStrategy(start_method=sys.argv[1], checkpoint_io=Full())
    data = torch.utils.data.DataLoader(Data(32, 24), 2, num_workers=int(sys.argv[3]))
    try:
        trainer(strategy, max_epochs=1).fit(BoringModel(), data)
        print("fitted", flush=True)
    except lightning_ddp.PeerFailure as failure:
        print("caught", failure.exception_type, flush=True)
    guards = [child.pid for child in psutil.Process().children() if "guard" in " ".join(child.cmdline())]
    print("left:", os.listdir(tempfile.gettempdir()) + guards, flush=True)
"""


@pytest.mark.parametrize(
    ("start_method", "fault", "num_workers", "end"),
    [
        slow("spawn", "none", 1, "fitted"),
        ("fork", "worker", 2, "caught ValueError"),
        ("fork", "results", 0, "caught OSError"),
    ],
)
def test_no_temporary_file_is_left_and_no_import_is_walked_through_at_the_end(
    start_method, fault, num_workers, end, tmp_path, tmp_path_factory
) -> None:
    scratch = tmp_path_factory.mktemp("tmp")  # a short name: the path of a socket has 107 characters at most
    env = {"TMPDIR": str(scratch), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    arguments = [start_method, fault, str(num_workers)]
    is_fresh = start_method == "spawn"  # forks end without a walk
    result = run_script(LEAVES_NOTHING, arguments, env, timeout_s=DEADLINE_S, fresh=is_fresh).check()
    assert f"{end}\nleft: []\n" in result.stdout, result.stdout + result.stderr
    assert list(scratch.iterdir()) == []
    assert "nanobind" not in result.stderr  # which reports, since torch 2.15, what is not collected
    if not is_fresh or any(kind.__module__ == "nanobind" for kind in type.__subclasses__(type)):
        return
    ends = re.findall(r"(rank|worker) walks (\d+) and not (\d+)", result.stdout)
    assert {kind for kind, *_ in ends} >= {"rank", "worker"}, result.stdout
    assert all(int(walked) < int(left_out) / 4 for _, walked, left_out in ends), result.stdout


WITH_DEATH_SIGNAL = """
import ctypes, pathlib, signal, sys, time
assert ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0) == 0  # PR_SET_PDEATHSIG
folder = pathlib.Path(sys.argv[1])
folder.joinpath("ready").touch()
while not folder.joinpath("go").exists():
    time.sleep(0.01)
"""


def children_of(
    source: str, *arguments: str, num: int = 1, logs: Path | None = None
) -> tuple[Children, list[FailureRecord]]:
    """Children that will run a text, and what is told of their ends."""
    ended: list[FailureRecord] = []
    children = Children(ended.append)
    program = Program("script", "-c", [source, *arguments])
    children.launch = Launch(
        program=program,
        cwd=os.getcwd(),
        logs=logs,
        environment=dict(os.environ),
        first_rank=0,
        node_rank=0,
        num_ranks=1 + num,
        world_size=1 + num,
        is_later=False,
        goes_on=False,
        grace_s=1.0,
    )
    return children, ended


def test_children_outlive_the_thread_that_has_started_them(tmp_path) -> None:
    children, ended = children_of(WITH_DEATH_SIGNAL, str(tmp_path))

    def start() -> None:
        children.start_all()
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join(DEADLINE_S)
    (tmp_path / "go").touch()
    children.end(DEADLINE_S)
    assert [record.exit_code for record in ended] == [0]


def test_a_replacement_that_is_asked_for_again_is_started_once_and_its_end_told_again(tmp_path) -> None:
    children, ended = children_of(WITH_DEATH_SIGNAL, str(tmp_path))
    children.start_all()
    for _ in range(2):
        children.start_again(1, 1)
    assert len(children.procs) == 2
    (tmp_path / "go").touch()
    children.end(DEADLINE_S)
    assert sorted(record.exit_code for record in ended) == [-signal.SIGKILL, 0]
    children.start_again(1, 1)
    assert [record.exit_code for record in ended[2:]] == [0]


def test_children_unwind_when_the_launching_rank_of_a_job_in_the_background_fails(tmp_path) -> None:
    options = {"trainer": {"devices": 3}, "is_in_background": True}
    arguments = order(tmp_path, fault="exception", rank=0, **options)
    result = run_script(SCRIPT, arguments, timeout_s=DEADLINE_S)
    assert result.returncode == 1
    notes = read_notes(tmp_path)
    assert [notes[f"on_exception-{rank}"]["kind"] for rank in (1, 2)] == ["PeerFailure"] * 2
    assert {"finally-1", "finally-2"} <= notes.keys()
    assert result.stderr.rstrip().endswith("ValueError: expected 3 channels, got 1")


OWN_LAUNCHER = f"""{TRAINS}
from pytorch_lightning.strategies.launchers import _SubprocessScriptLauncher

class Strategy(lightning_ddp.CustomDDPStrategy):
    def _configure_launcher(self):
        arguments = self.cluster_environment, self.num_processes, self.num_nodes
        self._launcher = _SubprocessScriptLauncher(*arguments)

ours = trainer(Strategy(), max_steps=2, limit_val_batches=1)
ours.fit(BoringModel())
ours.validate(BoringModel(), verbose=False)
print("trained", ours.world_size, flush=True)
"""


def test_a_strategy_with_a_launcher_of_the_users_trains_and_validates() -> None:
    assert run_script(OWN_LAUNCHER, timeout_s=DEADLINE_S).check().stdout.count("trained 2\n") == 2


UNUSED = f"""{TRAINS}
class Model(BoringModel):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 4), torch.nn.Linear(4, 3)

if __name__ == "__main__":
    trainer(max_steps=3).fit(Model())
"""
DIFFERENT = UNUSED.replace("Linear(3, 4)", "Linear(3 + int(os.environ.get('LOCAL_RANK', 0)), 4)")
WITHOUT_GUARD = f"""{TRAINS}
trainer(lightning_ddp.CustomDDPStrategy(start_method=sys.argv[1])).fit(BoringModel())
"""
UNPICKLABLE = f"""{TRAINS}
if __name__ == "__main__":
    model = BoringModel()
    model.layer.extra = ["a", lambda x: x]
    trainer(lightning_ddp.CustomDDPStrategy(start_method=sys.argv[1])).fit(model)
"""
WRONG: dict[str, tuple[str, list[str]]] = {
    "models differ": (
        DIFFERENT,
        [
            "the models differ",
            "rank 0 has 'first.weight' with shape [4, 3]",
            "rank 1 has 'first.weight' with shape [4, 4]",
        ],
    ),
    "no gradient": (
        UNUSED,
        [
            "backward 0 ended, but these parameters got no gradient",
            "rank 0: first.weight, first.bias, second.weight, second.bias",
            "rank 1: first.weight, first.bias, second.weight, second.bias",
            "find_unused_parameters=True",
            "Parameter at index 2 with name first.weight",
            "Parameter indices which did not receive grad for rank 0: 2 3 4 5",
            "It looks like your LightningModule has parameters that were not used",
            'strategy="custom_ddp_find_unused_parameters_true"',
        ],
    ),
    "no guard": (
        WITHOUT_GUARD,
        [
            """an `if __name__ == "__main__"` clause""",
            "PeerFailure: rank ",
            "the process exited with code 1; its output is above",
        ],
    ),
    "not picklable": (
        UNPICKLABLE,
        [
            "ConfigurationError: start_method='spawn' sends the model",
            "but they do not pickle: Can't pickle <function <lambda> at ",
            'strategy="custom_ddp"',
        ],
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_script_that_cannot_train_ends_with_an_error_that_names_the_cause(what) -> None:
    script, messages = WRONG[what]
    result = run_script(script, ["spawn"], timeout_s=DEADLINE_S)
    assert result.returncode == 1
    for message in messages:
        assert message in result.stderr
    assert what != "no guard" or "MASTER_PORT" not in result.stderr


@pytest.mark.parametrize(
    ("known", "missing"), [("MASTER_ADDR", "MASTER_PORT"), ("MASTER_PORT", "MASTER_ADDR")]
)
def test_several_nodes_need_an_address_that_all_know(monkeypatch, known, missing) -> None:
    monkeypatch.setenv(known, "29500" if known == "MASTER_PORT" else "10.0.0.1")
    monkeypatch.delenv(missing, raising=False)
    with pytest.raises(ConfigurationError, match=f"num_nodes=2, but {missing} is not set"):
        rendezvous.Rendezvous().host(LightningEnvironment(), None, num_nodes=2, node_rank=0)


@pytest.mark.parametrize("variable", ["NODE_RANK", "GROUP_RANK"])
def test_a_node_that_the_run_does_not_have_is_an_error(variable, monkeypatch) -> None:
    monkeypatch.delenv("NODE_RANK", raising=False)
    monkeypatch.setenv(variable, "1")
    message = rf"{variable}=1, but the nodes of Trainer\(num_nodes=1\) are counted from 0"
    with pytest.raises(ConfigurationError, match=message):
        node_rank_of(LightningEnvironment(), 1)


@pytest.mark.parametrize("what", ["alive", "zombie"])
def test_a_parent_variable_that_is_left_over_does_not_end_a_program_in_silence(what) -> None:
    script = "import lightning_ddp, os; print(os.environ.get('LIGHTNING_DDP_PARENT_PID'))"
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        pid = os.getpid() if what == "alive" else ended.pid  # nor is this process the parent of the script
        result = run_script(script, env={"LIGHTNING_DDP_PARENT_PID": str(pid)}, timeout_s=DEADLINE_S)
    if what == "alive":
        assert (result.returncode, result.stdout) == (0, "None\n")
    else:
        assert result.returncode == 1
        assert f"the process that LIGHTNING_DDP_PARENT_PID={pid} names has ended" in result.stderr
        assert "unset that variable" in result.stderr


@pytest.mark.parametrize("who", ["launcher", "another node", "torchrun"])
def test_a_first_node_whose_name_cannot_be_resolved_is_named(who, monkeypatch, capsys) -> None:
    monkeypatch.setattr(rendezvous, "_RESOLVED_WITHIN_S", 0.2)
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    monkeypatch.setenv("MASTER_PORT", "29500")
    meet: dict[str, Callable[[], Any]] = {
        "launcher": lambda: rendezvous.open_store("no-such-host.invalid", 29500),
        "another node": lambda: rendezvous.run_store("no-such-host.invalid:29500/1", None),
        "torchrun": lambda: rendezvous.Rendezvous().find(LightningEnvironment(), None),
    }
    with pytest.raises(RendezvousError, match="MASTER_ADDR=no-such-host\\.invalid cannot be resolved on "):
        meet[who]()
    assert "MASTER_ADDR=no-such-host.invalid cannot be resolved yet: " in capsys.readouterr().err


def test_a_malformed_port_is_named(monkeypatch) -> None:
    for text in ("abc", "0", "70000", "-1"):
        monkeypatch.setenv("MASTER_PORT", text)
        with pytest.raises(ConfigurationError, match=f"MASTER_PORT='{text}': expected a port number"):
            rendezvous.Rendezvous().host(LightningEnvironment(), None, num_nodes=1, node_rank=0)


def test_each_end_of_a_child_is_reported_at_once() -> None:
    children, ended = children_of("import signal; signal.pause()", num=2)
    children.start_all()
    children.send_signal(signal.SIGTERM)
    children.end(DEADLINE_S)
    assert sorted(record.rank for record in ended) == [1, 2]
    assert {record.exit_code for record in ended} == {-signal.SIGTERM}
    assert children.first_failure() in ended


def test_the_end_of_a_child_is_reported_also_when_its_log_has_been_removed(tmp_path) -> None:
    source = "import os, sys; os.unlink(sys.argv[1]); sys.exit(3)"
    children, ended = children_of(source, str(tmp_path / "1.log"), logs=tmp_path)
    children.start_all()
    children.end(DEADLINE_S)
    assert [(record.exit_code, record.traceback) for record in ended] == [(3, None)]


def test_a_process_that_cannot_be_started_for_a_lost_one_is_reported_as_ended(tmp_path, capsys) -> None:
    """In the thread of the control server, which an exception would end."""
    children, ended = children_of("")
    children.start_all()
    assert children.join(DEADLINE_S)
    children.launch = replace(children.launch, cwd=str(tmp_path / "missing"))
    children.start_again(1, 1)
    children.end(DEADLINE_S)
    assert [(record.rank, record.start, record.exit_code) for record in ended] == [(1, None, 0), (1, 1, 1)]
    assert "another process for rank 1: it could not be started: [Errno 2]" in capsys.readouterr().err


def test_a_forked_process_disowns_the_session_of_its_parent(monkeypatch) -> None:
    monkeypatch.setattr(contexts, "_context", None)
    ours = contexts.job_context()
    ours.rendezvous.host(LightningEnvironment(), None, num_nodes=1, node_rank=0)
    who, settings = Identity(rank=0, node_rank=0), SupervisionSettings()
    store = ours.rendezvous.hosted
    server = ours.open_server("127.0.0.1", store, world_size=1, num_nodes=1, settings=settings)
    listener = server._connections._listener
    try:
        ours.connect(store, who, settings, timeout_s=DEADLINE_S)
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of threads
            child = os.fork()
        if child == 0:
            is_closed = {listener.fileno(), ours.control.watch._connection.fileno()} == {-1}
            theirs = contexts.job_context()
            is_new = theirs is not ours and theirs is contexts.job_context()
            is_new &= theirs.rendezvous.where is None
            os._exit(int(is_closed) + 2 * ours.control.is_over + 4 * is_new)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1 + 2 + 4
        assert contexts.job_context() is ours
        assert ours.control.watch.flush()
        assert (listener.fileno() == -1, ours.control.is_over) == (False, False)
    finally:
        ours.end(None)


STATES = """
import json, os, sys, time
from hydra_app.training import fit, state_of_process

def num_threads():
    return len(os.listdir("/proc/self/task"))  # those of a store as well

def state(most_threads):
    deadline = time.monotonic() + 60.0
    while num_threads() > most_threads and time.monotonic() < deadline:
        time.sleep(0.01)  # the system's may end a moment after Python's
    return {**state_of_process(), "variables": dict(os.environ), "system_threads": num_threads()}

if __name__ == "__main__":
    before = num_threads()
    states = [state(before)]
    for lr in (0.1, -0.1):  # the second is refused, in the new processes
        try:
            fit(lr, strategy=sys.argv[1])
        except ValueError as error:
            assert "Invalid learning rate" in str(error)
        else:
            assert lr > 0
        states.append(state(before))
    print("STATES", json.dumps(states))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("strategy", ["custom_ddp_notebook", slow("custom_ddp_spawn")])
def test_nothing_of_a_fit_stays_in_a_process_that_only_waits_for_the_ranks(strategy) -> None:
    env = {"PYTHONPATH": str(SCRIPT.parent)}
    result = run_script(STATES, [strategy], env, timeout_s=DEADLINE_S).check()
    before, *after = json.loads(result.stdout.partition("STATES ")[2].splitlines()[0])
    for state in after:
        assert state == before


def test_children_that_do_not_end_in_time_are_killed_and_named(capsys) -> None:
    source = "import os, signal; os.environ['LOCAL_RANK'] == '2' and signal.pause()"
    children, ended = children_of(source, num=2)
    children.start_all()
    while not ended:
        time.sleep(0.01)
    children.end(0.0)
    assert [process.returncode for process in children.procs] == [0, -signal.SIGKILL]
    assert capsys.readouterr().err == (
        f"lightning_ddp: rank 2 (pid {children.procs[1].pid}) did not end, and was killed\n"
    )
    assert [record.rank for record in ended] == [1], "an end that is no news"
