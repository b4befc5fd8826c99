"""A rank fails, in any way at any moment: every rank ends, runs its finalisers, and names the right cause.

By default each fault and each moment is met at least once, `--slow` meets each fault at four moments and each
moment with three faults, and `--exhaustive` each with each.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RUN, TORCHRUN, TRAINS, ScriptResult, last_screen, run_script, slow, start_script
from test_hydra import starts
from user_script import ALL, SCRIPT, STEPS, order, read_notes, wait_for_notes

from lightning_ddp.comm import group
from lightning_ddp.encoding import mean, side_stream
from lightning_ddp.errors import CollectiveError, CollectiveTimeoutError, CommHookError, PeerFailure
from lightning_ddp.launch import child_process
from lightning_ddp.launch.job_context import JobContext
from lightning_ddp.launch.recovery_client import Cause, cause_of_error
from lightning_ddp.shm import shared_memory
from lightning_ddp.supervise.failure_record import GONE, FailureRecord, Identity
from lightning_ddp.supervise.interrupt_guard import InterruptGuard
from lightning_ddp.supervise.protocol import Failed, Hello, pack
from lightning_ddp.telemetry.timeline import load_folder

FAULTS = ("exception", "exit", "kill", "segv", "stop", "memory")
MOMENTS = ("sanity", "forward", "backward", "optimizer", "validation", "checkpoint", "loader", "teardown")
LAUNCHERS: dict[str, tuple[str, ...]] = {"python": (), "run": RUN}
VICTIMS = {"python": [(0, 2), (1, 2), (0, 4), (3, 4)], "run": [(0, 3), (1, 3), (2, 3)]}
"""How ranks are started -> a victim, and of how many."""
FIRST_TIER = {
    ("python", "exception", "loader", (3, 4)),
    ("python", "exit", "teardown", (0, 2)),
    ("python", "kill", "backward", (0, 2)),
    ("python", "kill", "optimizer", (3, 4)),
    ("python", "segv", "sanity", (1, 2)),
    ("python", "stop", "validation", (1, 2)),
    ("python", "memory", "checkpoint", (0, 2)),
    ("run", "kill", "backward", (0, 3)),
    ("run", "exit", "forward", (2, 3)),
}
TIMEOUT_S = 120.0
LONG_S = 60.0
"""How long a process may take to end, where that is not what is tested."""
SOON_S = 30.0
"""Until a survivor knows. On an idle machine it takes a tenth of a second; a busy one may take longer."""
SHORT_S = 2.0
"""What a process gets to end where one does not."""
STALL_S = 4.0
"""Above what a busy machine keeps a process waiting for."""
EXIT_CODES = {"exit": 3, "kill": -9, "segv": -11}
EXCEPTIONS = {"exception": "ValueError", "memory": "MemoryError"}


def cells() -> Iterator[Any]:
    """(launcher, fault, moment, victim, world size); those of the default run are unmarked.

    `--slow` adds, with one victim and under python or `run`, each other moment of a stop and an exit, and
    half of those of faults of which two are alike; `--exhaustive` the rest.
    """
    faults, moments = enumerate(FAULTS), list(enumerate(MOMENTS))
    met = {(fault, moment) for _, fault, moment, _ in FIRST_TIER}
    for (i, fault), (j, moment), start in itertools.product(faults, moments, LAUNCHERS):
        has_like = fault not in ("stop", "exit")  # a fault that ends a process in the same way
        is_turn = (i + j) % 2 == (start == "run") and (fault, moment) not in met
        is_turn = is_turn and not (has_like and (i + j // 2) % 2)
        for number, victim in enumerate(VICTIMS[start]):
            is_slow = is_turn and number == (i + j) // 2 % len(VICTIMS[start])
            tier = pytest.mark.slow if is_slow else pytest.mark.exhaustive
            yield pytest.param(
                LAUNCHERS[start],
                fault,
                moment,
                *victim,
                id=f"{start}-{fault}-rank{victim[0]}of{victim[1]}-{moment}",
                marks=() if (start, fault, moment, victim) in FIRST_TIER else tier,
            )


def run_user(
    folder: Path, env: dict[str, str] | None = None, launcher: Sequence[str] = (), **more: Any
) -> ScriptResult:
    return run_script(SCRIPT, order(folder, **more), env, TIMEOUT_S, launcher=launcher)


@pytest.mark.parametrize(("launcher", "fault", "moment", "victim", "world_size"), list(cells()))
def test_a_fault_ends_all_ranks_with_its_cause(tmp_path, launcher, fault, moment, victim, world_size) -> None:
    stall = {"stall_timeout": STALL_S} if fault == "stop" else {}
    strategy = {"bucket_cap_mb": 0.0001, "failure_grace_s": LONG_S, **stall}
    where = {"fault": fault, "rank": victim, "moment": moment, "trainer": {"devices": world_size}}
    result = run_user(tmp_path, launcher=launcher, strategy=strategy, **where)
    context = f"{result.stdout}\n{result.stderr}"
    notes = read_notes(tmp_path)
    assert [name for name in notes if name.startswith("fired")] == [f"fired-{victim}"], context
    assert result.returncode == expected_exit_code(fault, victim, moment), context
    survivors = set(range(world_size)) - {victim}
    # an exception of a loader's worker becomes the rank's own when the rank asks for that batch
    is_late = moment == "loader" and fault in EXCEPTIONS
    start = notes[f"on_exception-{victim}" if is_late else f"fired-{victim}"]["time"]
    for rank in survivors:
        seen = notes[f"on_exception-{rank}"]
        assert seen["kind"] == "PeerFailure", context
        assert seen["rank"] == victim, context
        assert {f"finalize-{rank}", f"finally-{rank}"} <= notes.keys(), context
        assert notes[f"finalize-{rank}"]["status"] == "failed"
        check_cause(seen, fault, victim, moment, is_launcher=victim == 0 and not launcher)
        assert seen["time"] - start < SOON_S
    check_victim(notes, fault, victim, moment)
    if launcher or result.returncode == 1:
        check_report(result, fault, victim, moment)
    else:
        assert f"rank {victim} (host" in result.stderr
    if 0 in survivors and moment not in ("sanity", "teardown"):
        assert (tmp_path / "stopped.ckpt").exists(), "rank 0 saved no checkpoint"


def expected_exit_code(fault: str, victim: int, moment: str) -> int:
    """Of the launching process: 1, unless it is the victim and dies of the fault itself."""
    return EXIT_CODES[fault] if victim == 0 and fault in EXIT_CODES and moment != "loader" else 1


def check_cause(seen: dict[str, Any], fault: str, victim: int, moment: str, is_launcher: bool) -> None:
    if moment == "loader" and fault in EXIT_CODES:
        # torch's own words, unless the rank was just then receiving from the worker
        assert seen["exception_type"] in ("RuntimeError", "ConnectionResetError", "EOFError")
        assert "DataLoader worker" in seen["message"] or seen["exception_type"] != "RuntimeError"
    elif fault in EXCEPTIONS:
        assert seen["exception_type"] == EXCEPTIONS[fault]
    elif fault == "stop":
        assert f"not answered for {STALL_S:g} s" in seen["message"] or "no progress" in seen["message"]
    elif is_launcher:  # nobody who is left has waited for it
        assert "died without a report" in seen["message"]
    else:
        assert seen["exit_code"] == EXIT_CODES[fault]


def check_victim(notes: dict[str, dict[str, Any]], fault: str, victim: int, moment: str) -> None:
    """A victim that can still run code unwinds as well."""
    if fault in EXCEPTIONS:
        assert notes[f"on_exception-{victim}"]["kind"] == EXCEPTIONS[fault]
    if fault in EXCEPTIONS or fault == "stop" or moment == "loader":
        assert f"finally-{victim}" in notes
        assert notes[f"finalize-{victim}"]["status"] == "failed"


def check_report(result: ScriptResult, fault: str, victim: int, moment: str) -> None:
    """The report is the last thing on the screen."""
    _, _, report = result.stderr.rpartition("lightning_ddp: ")
    assert report.startswith(f"rank {victim} (node 0, host ")
    if fault in EXCEPTIONS:
        assert "Traceback of rank" in report
        assert f"{EXCEPTIONS[fault]}: " in report.rstrip().splitlines()[-1]
    elif fault in EXIT_CODES and moment != "loader":
        how = {"exit": "exited with code 3", "kill": "was killed by SIGKILL", "segv": "was killed by SIGSEGV"}
        assert f"the process {how[fault]}" in report


@starts
def test_the_failure_is_reported_where_the_launching_process_is_gone(tmp_path, launcher) -> None:
    """The guard prints what the rank has handed to it, or under `run` the supervisor."""
    result = run_user(tmp_path, launcher=launcher, fault="exception", rank=1, quits=0)
    assert result.returncode == 7, result.stderr
    check_report(result, "exception", 1, "forward")


def test_gloo_does_not_end_a_process_that_unwinds_from_a_failure() -> None:
    """Its thread finds the connections broken, and aborts the process when this returns."""
    ours = JobContext().control
    ours._settings = replace(ours._settings, failure_grace_s=0.3)
    ours.interrupt.set(FailureRecord(rank=0, message="gone").to_error(1))
    start = time.monotonic()
    ours._gloo_failed()
    assert time.monotonic() - start >= 0.3
    ours.restore_handlers()


@pytest.mark.parametrize(
    ("strategy", "fault"),
    [
        ("custom_ddp_fork", "exception"),
        ("custom_ddp_spawn", "exit"),
        slow("custom_ddp_spawn", "kill"),
    ],
)
def test_a_worker_process_that_dies_ends_the_run_with_its_rank(tmp_path, strategy, fault) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    arguments = order(tmp_path, strategy=strategy, fault=fault, rank=1)
    is_fresh = (strategy, fault) == ("custom_ddp_fork", "exception")
    result = run_script(SCRIPT, arguments, {"TMPDIR": str(scratch)}, TIMEOUT_S, fresh=is_fresh)
    assert result.returncode == 1
    assert list(scratch.iterdir()) == [], "torch writes the exceptions of processes into files"
    assert "PeerFailure: rank 1 (host " in result.stderr
    assert read_notes(tmp_path)["on_exception-0"]["rank"] == 1
    words = {"exception": "ValueError: expected 3 channels, got 1", "exit": "the process exited with code 3"}
    assert words.get(fault, "the process was killed by SIGKILL") in result.stderr


@pytest.mark.parametrize(("strategy", "victim"), [("custom_ddp", 0), ("custom_ddp_spawn", 1)])
def test_no_rank_has_left_fit_when_another_fails_in_its_last_hook(tmp_path, strategy, victim) -> None:
    result = run_user(tmp_path, strategy=strategy, fault="exception", rank=victim, moment="ending")
    assert result.returncode == 1
    notes = read_notes(tmp_path)
    assert not [name for name in notes if name.startswith("fitted")], "a script went on as if all were well"
    seen = notes[f"on_exception-{1 - victim}"]
    assert (seen["kind"], seen["rank"]) == ("PeerFailure", victim)
    _, _, report = result.stderr.rpartition(
        "lightning_ddp: " if strategy == "custom_ddp" else "PeerFailure: "
    )
    assert report.startswith(f"rank {victim} (")
    assert "ValueError: expected 3 channels, got 1" in report


@pytest.mark.parametrize(
    ("start", "stuck", "fault", "victim", "stuck_rank", "world_size"),
    [
        ("popen", "lock", "exception", 1, 2, 3),
        ("popen", "expression", "exception", 1, 0, 2),
        ("spawn", "thread", "exception", 1, 1, 2),
        slow("popen", "lock", "exception", 0, 1, 2),
        slow("popen", "thread", "exception", 0, 0, 2),
        slow("spawn", "expression", "exception", 1, 0, 2),
        slow("run", "expression", "exception", 1, 0, 2),
        slow("run", "expression", "exception", 0, 1, 2),
        slow("run", "expression", "kill", 0, 1, 2),
    ],
)
def test_a_process_that_never_ends_is_ended(
    tmp_path, start, stuck, fault, victim, stuck_rank, world_size
) -> None:
    options = {"start_method": "popen" if start == "run" else start, "failure_grace_s": SHORT_S}
    arguments = {"fault": fault, "rank": victim, "stuck": stuck, "stuck_rank": stuck_rank}
    launcher = RUN if start == "run" else ()
    result = run_user(
        tmp_path, launcher=launcher, strategy=options, trainer={"devices": world_size}, **arguments
    )
    is_killed = fault == "kill" or (start != "spawn" and stuck_rank == 0 and stuck != "thread")
    assert result.returncode == (-signal.SIGKILL if is_killed else 1)
    if stuck == "expression" and start != "spawn":
        assert time.time() - read_notes(tmp_path)[f"stuck-{stuck_rank}"]["time"] < SHORT_S + 3.0
        assert f"lightning_ddp: rank {stuck_rank} (" in result.stderr
        assert 're.match(r"(a+)+$", "a" * 60 + "b")' in result.stderr, "the line that holds it"
    if fault == "exception":
        assert "ValueError: expected 3 channels, got 1" in result.stderr
    if start != "spawn":
        report = result.stderr.rpartition("lightning_ddp: ")[2]
        assert report.startswith(f"rank {victim} (node 0, host "), result.stderr
        assert fault == "kill" or report.rstrip().endswith("ValueError: expected 3 channels, got 1")


@pytest.mark.parametrize(("fault", "fresh"), [("kill", False), slow("exception", True), slow("long", False)])
def test_torchrun_reports_the_rank_that_failed_first(fault, fresh, tmp_path) -> None:
    """It sends no signal: each rank raises."""
    arguments = order(tmp_path, fault=fault, rank=1)
    result = run_script(SCRIPT, arguments, timeout_s=TIMEOUT_S, launcher=TORCHRUN, fresh=fresh)
    assert result.returncode == 1
    notes = read_notes(tmp_path)
    assert [name for name in notes if name.startswith("fired")] == ["fired-1"]
    assert (notes["on_exception-0"]["kind"], notes["on_exception-0"]["rank"]) == ("PeerFailure", 1)
    root = result.stderr[result.stderr.index("Root Cause (first observed failure)") :]
    assert re.search(r"rank +: 1 \(local_rank: 1\)", root), root
    if fault == "long":
        screen = last_screen(result.stderr)
        assert "rank 1 failed first at step 2 in training_step: ValueError" in screen
    else:
        assert ("ValueError: expected 3 channels, got 1" if fault == "exception" else "SIGKILL") in root


EXITS_EARLY = "the process exited with code 0 before it had joined the others"
RAISES_EARLY = "ValueError: expected 3 channels, got 1"


@pytest.mark.parametrize(
    ("fault", "strategy", "victim", "launcher"),
    [
        ("early", "custom_ddp", 1, ()),
        ("early", "custom_ddp_spawn", ALL, ()),
        ("early exception", "custom_ddp_spawn", 1, ()),
        slow("early", "custom_ddp", 0, RUN),
        slow("early", "custom_ddp", 1, RUN),
        slow("early", "custom_ddp_spawn", 1, ()),
        slow("early exception", {"start_method": "forkserver"}, 1, ()),
    ],
)
def test_a_rank_that_ends_before_it_has_joined_ends_the_run(
    tmp_path, fault, strategy, victim, launcher
) -> None:
    """With code 0; or it raises, whereupon torch ends the others, which are no cause."""
    result = run_user(tmp_path, launcher=launcher, strategy=strategy, fault=fault, rank=victim)
    assert result.returncode == 1
    report = result.stderr.rpartition("lightning_ddp: " if strategy == "custom_ddp" else "PeerFailure: ")[2]
    assert report.startswith(("rank 0 (", "rank 1 (") if victim == ALL else f"rank {victim} (")
    assert (EXITS_EARLY if fault == "early" else RAISES_EARLY) in report


@pytest.mark.parametrize(
    ("fault", "strategy", "rank"),
    [
        ("fork", "custom_ddp", 0),
        ("fork", "custom_ddp_spawn", 1),
        slow("fork and leave", "custom_ddp", 0),
        slow("process and leave", "custom_ddp", 1),
        slow("process and leave", "custom_ddp_spawn", 1),
    ],
)
def test_a_process_that_user_code_forks_fails_alone_and_may_leave_by_sys_exit(
    tmp_path, fault, strategy, rank
) -> None:
    """Its interpreter ends, though it has groups and stores of the rank, without their threads."""
    arguments = order(tmp_path, strategy=strategy, fault=fault, rank=rank)
    is_fresh = "leave" in fault  # then the end is Python's own
    result = run_script(SCRIPT, arguments, timeout_s=TIMEOUT_S, fresh=is_fresh)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    notes = read_notes(tmp_path)
    code = notes[f"forked-{rank}"]["code"]  # of the process
    assert {notes[f"trained-{r}"]["step"] for r in range(2)} == {STEPS}
    assert "failed first" not in result.stderr
    if fault == "fork":
        assert notes[f"on_exception-{rank}"]["kind"] == "ValueError"
        assert f"on_exception-{1 - rank}" not in notes
    else:
        assert code == 5


@pytest.mark.parametrize("strategy", ["custom_ddp", slow("custom_ddp_spawn")])
def test_who_reads_the_store_cannot_stop_the_run(tmp_path, strategy) -> None:
    with start_script(SCRIPT, order(tmp_path, strategy=strategy, pause="fit")) as run:
        variables = wait_for_notes(run, tmp_path, ["ready-0", "ready-1"])["ready-1"]
        address, _, number = variables["LIGHTNING_DDP_STORE"].rpartition("/")
        host, _, port = address.rpartition(":")
        store = dist.PrefixStore(f"run{number}", dist.TCPStore(host, int(port), is_master=False))
        entry = store.get("lightning_ddp/control_server").decode().split("\n")
        failed = pack(Failed(FailureRecord(rank=1, message="forged")))
        for token in ["", *entry]:
            with socket.create_connection((host, int(entry[1])), timeout=TIMEOUT_S) as connection:
                hello = Hello(token, Identity(rank=1, node_rank=0))
                with suppress(ConnectionError):  # hung up on already
                    connection.sendall(pack(hello) + failed)
                    assert connection.recv(1) == b""
        assert variables["LIGHTNING_DDP_TOKEN"] not in entry
        (tmp_path / "go").touch()
        run.wait(TIMEOUT_S).check()


@pytest.mark.slow
@pytest.mark.parametrize(("start_method", "rank"), [("popen", 0), ("spawn", 1)])
def test_a_rank_that_is_stopped_holds_the_others_up_until_the_timeout(tmp_path, start_method, rank) -> None:
    strategy = {"start_method": start_method, "timeout": 8.0, "failure_grace_s": LONG_S}
    result = run_user(tmp_path, strategy=strategy, fault="stop", moment="backward", rank=rank)
    context = f"{result.stdout}\n{result.stderr}"
    notes = read_notes(tmp_path)
    assert result.returncode == 1, context
    seen = notes[f"on_exception-{1 - rank}"]
    # where processes are spawned the launching one notes the same failure as rank 0's
    assert "CollectiveTimeoutError" in (seen["kind"], seen["exception_type"]), context
    assert seen["time"] - notes[f"fired-{rank}"]["time"] < 8.0 + SOON_S
    assert f"; missing: rank {rank}\n" in result.stderr, "also where the server is in the stopped process"
    assert f"finalize-{rank}" in notes, "what was stopped has been continued, and has ended"


def test_reconciliate_processes_ends_the_run_with_its_trace(tmp_path) -> None:
    result = run_user(tmp_path, fault="told", rank=1)
    assert result.returncode == 1
    report = result.stderr.rpartition("lightning_ddp: ")[2]
    assert report.startswith("rank 1 (node 0, host ")
    assert report.rstrip().endswith("Traceback of mine\nthe disk is full")


@starts
def test_the_environment_switches_reconciliation_off(tmp_path, launcher) -> None:
    result = run_user(tmp_path, {"LIGHTNING_DDP_SUPERVISION": "0"}, launcher, fault="kill", rank=1)
    assert result.returncode == 1
    assert "failed first" not in result.stderr
    assert "on_exception-0" in read_notes(tmp_path)  # told by its own launcher, or by the broken connection


@pytest.mark.parametrize(
    ("fault", "victim", "strategy"),
    [
        ("long", 1, "custom_ddp"),
        ("untellable", 1, "custom_ddp"),
        slow("untellable", 0, "custom_ddp"),
        slow("untellable", 1, "custom_ddp_spawn"),
    ],
)
def test_an_exception_whose_text_is_long_or_cannot_be_had_is_told(tmp_path, fault, victim, strategy) -> None:
    result = run_user(tmp_path, strategy=strategy, fault=fault, rank=victim)
    assert result.returncode == 1
    survivor = read_notes(tmp_path)[f"on_exception-{1 - victim}"]
    assert (survivor["kind"], survivor["rank"]) == ("PeerFailure", victim), result.stderr
    assert survivor["exception_type"] == ("ValueError" if fault == "long" else "Untellable")
    told = survivor["message"].replace("\n", "")
    assert told.startswith("漢" * 1_500 if fault == "long" else "(its message is not available")
    report = result.stderr.rpartition("lightning_ddp: " if strategy == "custom_ddp" else "PeerFailure: ")[2]
    assert report.startswith(f"rank {victim} ("), result.stderr
    if fault == "long":
        screen = last_screen(result.stderr)
        assert f"rank {victim} failed first at step 2 in training_step: ValueError" in screen


@pytest.mark.parametrize(
    ("fault", "launcher"), [("exception", ()), ("late", ()), slow("late", TORCHRUN), slow("exception", RUN)]
)
def test_what_all_ranks_raise_is_caught_as_what_it_is_and_the_script_fits_again(
    tmp_path, fault, launcher
) -> None:
    options = {"catches": True, "fits_again": True, "monitors": True}
    result = run_user(tmp_path, launcher=launcher, fault=fault, **options).check()
    assert len(load_folder(tmp_path / "timeline")) == 2, "of the steps before the failure"
    kinds = {"ValueError"} if fault == "exception" else {"ValueError", "PeerFailure"}
    notes = read_notes(tmp_path)
    assert {notes[f"caught-{rank}"]["kind"] for rank in range(2)} == kinds, result.stderr
    assert "failed first" not in result.stderr
    notes = read_notes(tmp_path / "again")
    assert notes["trained-0"]["step"] == notes["trained-1"]["step"] == STEPS
    assert notes["finally-0"]["weights"] == notes["finally-1"]["weights"]


@starts
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_ends_while_the_other_fits_again_is_named(tmp_path, victim, launcher) -> None:
    options = {"catches": True, "fits_again": True, "leaves": victim}
    strategy = {"failure_grace_s": SHORT_S}
    result = run_user(tmp_path, launcher=launcher, strategy=strategy, fault="exception", **options)
    assert result.returncode == 1
    assert not {"trained-0", "trained-1"} & read_notes(tmp_path / "again").keys()


def hook_error() -> CommHookError:
    error = CommHookError("communication hook 'mine' raised RuntimeError: gloo is slow")
    error.__cause__ = RuntimeError("gloo is slow")
    return error


CLOSED = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:41592"
)


@pytest.mark.parametrize(
    ("error", "is_of_backend"),
    [
        (RuntimeError("this model was exported for nccl"), False),
        (RuntimeError("the data server: connection refused"), False),
        (hook_error(), False),
        (CollectiveTimeoutError("nccl", label="x", rank=0, waited_s=1.0), False),
        (CollectiveError(CLOSED, label="x", rank=0, waited_s=1.0), True),
        (RuntimeError(CLOSED), True),
        (torch.distributed.DistNetworkError("Broken pipe"), True),
    ],
)
def test_only_what_a_backend_has_raised_may_be_an_echo(error, is_of_backend) -> None:
    assert (cause_of_error(error) is not Cause.OWN) == is_of_backend


@pytest.mark.parametrize(
    ("module", "is_of_backend"),
    [(group, True), (shared_memory, True), (mean, True), (side_stream, False), (dist, True), (json, False)],
)
def test_what_a_module_that_communicates_raises_may_be_an_echo(module, is_of_backend) -> None:
    code = compile("raise RuntimeError('the other side is gone')", module.__file__, "exec")
    with pytest.raises(RuntimeError) as raised:
        exec(code)
    assert (cause_of_error(raised.value) is not Cause.OWN) == is_of_backend


def test_worker_processes_fail_with_the_users_exceptions(tmp_path) -> None:
    run_user(tmp_path, strategy="custom_ddp_notebook", fault="exception", rank=0, catches=True).check()
    caught = read_notes(tmp_path)["caught-0"]
    assert caught["kind"] == "PeerFailure"
    assert caught["message"].startswith("rank 0 (host ")
    assert "healthy" not in caught["message"]


def test_a_rank_hears_of_the_end_of_its_launcher_whose_process_id_is_gone_already(monkeypatch) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", ""])
    launcher.wait()
    monkeypatch.setattr(os, "getppid", lambda: launcher.pid)  # it ends between this and what is sent to it
    for name in ("_launcher", "_parent"):
        monkeypatch.setattr(child_process, name, launcher.pid)
    ours = JobContext().control
    record = FailureRecord.of_identity(Identity(rank=0, node_rank=0, pid=launcher.pid), GONE)

    def be_interrupted() -> None:
        ours._learned(record)
        threading.Event().wait(SOON_S)

    ours.alarm.arm()
    try:
        with pytest.raises(PeerFailure):
            be_interrupted()
    finally:
        ours.restore_handlers()


@contextmanager
def alarmed(*, is_final: bool, is_deferred: bool = False) -> Iterator[tuple[InterruptGuard, list[float]]]:
    """A guard whose alarm sounds, and when it has aborted something."""
    guard, aborted = InterruptGuard(), []
    guard.arm(is_deferred=is_deferred)
    try:
        error = PeerFailure(rank=1, message="gone")
        guard.sound(error, lambda: aborted.append(time.monotonic()), is_final=is_final)
        yield guard, aborted
    finally:
        guard.release()


def be_interrupted(guard: InterruptGuard) -> None:
    try:
        threading.Event().wait(SOON_S)
    finally:
        guard.silence()


def test_the_alarm_of_a_recovery_aborts_until_the_main_thread_has_taken_it() -> None:
    with alarmed(is_final=False, is_deferred=True) as (guard, aborted):
        guard.silence()  # it has stopped, and may be blocked in C++ where it connects to others
        while len(aborted) < 2:
            threading.Event().wait(0.05)
        guard.take()
        number = len(aborted)
        threading.Event().wait(0.7)
        assert len(aborted) == number


def test_the_alarm_of_a_recovery_waits_for_a_step_to_be_whole() -> None:
    with alarmed(is_final=False, is_deferred=True) as (guard, _):
        threading.Event().wait(1.3)
        assert guard._guard.name == "DEFERRED"
        threading.Timer(0.3, guard.defer, [False]).start()
        with pytest.raises(PeerFailure):
            be_interrupted(guard)


def test_the_alarm_of_the_end_waits_a_second_and_is_over_with_the_run() -> None:
    with alarmed(is_final=True, is_deferred=True) as (guard, aborted):
        start = time.monotonic()
        with pytest.raises(PeerFailure):
            be_interrupted(guard)
        assert time.monotonic() - start > 0.9
        threading.Event().wait(0.7)
        assert len(aborted) == 1


HANDLER_RAISES = f"""{TRAINS}
def raise_once(number, frame):
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    raise RuntimeError("a worker was killed")

def signal_itself(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_name == "end" and code.co_filename.endswith("failure_handler.py"):
        sys.setprofile(None)
        os.kill(os.getpid(), signal.SIGUSR1)

class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 1:
            signal.signal(signal.SIGUSR1, raise_once)
            sys.setprofile(signal_itself)
            raise ValueError("bad sample")
        return super().training_step(batch, batch_idx)

trainer(lightning_ddp.CustomDDPStrategy(failure_grace_s=20.0), max_epochs=1).fit(Model())
"""


def test_a_failure_is_reported_where_the_handler_of_a_signal_raises_meanwhile() -> None:
    """As that of torch's loaders does, when a worker is killed that has broken a connection."""
    result = run_script(HANDLER_RAISES, timeout_s=TIMEOUT_S)
    assert result.returncode == 1
    assert "rank 1 failed first at step 1 in training_step: ValueError: bad sample" in last_screen(
        result.stderr
    )
