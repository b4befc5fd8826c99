"""The control channel: who failed first is decided once, strangers change nothing, all stop together."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import socket
import struct
import subprocess
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, fields, is_dataclass, replace
from enum import StrEnum
from types import SimpleNamespace
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch.distributed as dist
from harness import last_screen, run_ranks, slow

from lightning_ddp.errors import CollectiveError, ConfigurationError, PeerFailure, RendezvousError
from lightning_ddp.launch import recovery_client
from lightning_ddp.launch.failure_handler import FailureHandler
from lightning_ddp.launch.job_context import JobContext
from lightning_ddp.launch.recovery_client import RecoveryClient
from lightning_ddp.supervise.client import ControlClient, ServerAddress, ask
from lightning_ddp.supervise.failure_detection import (
    ECHO_WAIT_S,
    EXIT_WAIT_S,
    RootCauseTracker,
    StallWatch,
)
from lightning_ddp.supervise.failure_record import FailureRecord, Identity, Where, render, write_error_file
from lightning_ddp.supervise.orders import Order, Progress, RankPhase, Report, Task, Wish, WishKind
from lightning_ddp.supervise.processes import Roster
from lightning_ddp.supervise.protocol import (
    LIMIT_BYTES,
    VERSION,
    DrainNode,
    DrainNodeReply,
    Failed,
    Failure,
    Hello,
    Message,
    ProtocolError,
    SendValue,
    Unpacker,
    pack,
)
from lightning_ddp.supervise.rank_state import RankState
from lightning_ddp.supervise.server import ControlServer
from lightning_ddp.supervise.settings import RecoverySettings, SupervisionSettings

TOKEN = "0123456789abcdef"
DEADLINE_S = 20.0
TRAINED = Progress(step=3, is_clean=True, is_trying=False, phase=0)


def gone(rank: int) -> FailureRecord:
    return FailureRecord(rank=rank, message="gone")


def raised(rank: int) -> FailureRecord:
    return FailureRecord(rank=rank, message="3 channels", exception_type="ValueError")


def frame(values: Any) -> bytes:
    """Any JSON as the channel would carry it."""
    data = json.dumps(values).encode()
    return struct.pack(">I", len(data)) + data


def bad_record(**wrong: Any) -> bytes:
    return frame({"kind": "failed", "record": {**asdict(raised(1)), "time": 0.0, **wrong}})


def hello(rank: int, token: str = TOKEN, pid: int = 1) -> bytes:
    return pack(Hello(token, Identity(rank=rank, node_rank=0, host="h", pid=pid)))


def report(number: int = 1, **facts: Any) -> Report:
    """What a rank says that trains, if `facts` say nothing else."""
    state = RankState(0, is_new=False)
    state.begin_run("fit")
    said = state.news(Where, is_due=True)
    assert said is not None
    return replace(said, number=number, **facts)


BYE = pack(report(10**401, phase=RankPhase.ENDED))
"""Newer than all else that a rank may say."""
STOP = Wish(WishKind.STOP, 15)


# ---------------------------------------------------------------------- messages


def leave(watch: ControlClient, *args: Any) -> None:
    """Leaves a run, as `DesyncReporter.leave` ends it."""
    watch.leave_run(lambda: watch.update(RankState.end_run), *args)


def test_messages_survive_any_cut_of_the_stream() -> None:
    messages = [SendValue(i, "ü" * i, {"n": [i]}) for i in range(20)]
    stream = b"".join(map(pack, messages))
    for seed in range(20):
        unpacker, received, position = Unpacker(), [], 0
        cuts = random.Random(seed)
        while position < len(stream):
            size = cuts.randint(1, 50)
            received += unpacker.feed(stream[position : position + size])
            position += size
        assert received == messages


def test_a_field_with_its_default_is_not_sent_but_the_version_is() -> None:
    who, wish = Identity(rank=0, node_rank=0, host="h"), Wish(WishKind.LEAVE, 15)
    messages = [Order(), Report(heard=3, wish=wish, where=Where(step=0)), Hello(TOKEN, who)]
    sent = [json.loads(pack(message)[4:]) for message in messages]
    assert sent[:2] == [
        {"kind": "order"},
        {"kind": "report", "heard": 3, "wish": {"kind": "leave", "signal": 15}, "where": {"step": 0}},
    ]
    assert sent[2] == {
        "kind": "hello",
        "token": TOKEN,
        "identity": {"rank": 0, "node_rank": 0, "host": "h", "pid": os.getpid()},
        "version": VERSION,
    }
    assert Unpacker().feed(b"".join(map(frame, sent))) == messages


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (struct.pack(">I", LIMIT_BYTES + 1), f"a message of {LIMIT_BYTES + 1} bytes"),
        (b"GET / HTTP/1.1\r\n\r\n", "a message of 1195725856 bytes"),
        (struct.pack(">I", 3) + b"abc", "no JSON"),
        (struct.pack(">I", 2) + b"[]", "no object with a known kind"),
        (frame({"kind": 1.0}), "no object with a known kind"),
        (frame({"kind": "drain_node", "node": "1"}), "drain_node.node='1'"),
        (frame({"kind": "drain_node", "node": True}), "drain_node.node=True"),
        (frame({"kind": "drain_node"}), "drain_node has no node"),
        (frame({"kind": "report", **asdict(report()), "phase": "flying"}), "report.phase='flying'"),
        (frame({"kind": "report", **asdict(report()), "wish": {"kind": []}}), "report.wish.kind=\\[]"),
        (bad_record(rank=None), "failed.record.rank=None"),
        (bad_record(message=3), "failed.record.message=3"),
        (bad_record(time="now"), "failed.record.time='now'"),
        (bad_record(pid=1.5), "failed.record.pid=1.5"),
        (struct.pack(">I", 2) + b"\xff\xfe", "no JSON"),
        (struct.pack(">I", 60000) + b"[" * 60000, "nested too deeply"),
    ],
)
def test_bytes_that_are_no_message_are_refused(data, message) -> None:
    with pytest.raises(ProtocolError, match=message):
        Unpacker().feed(data)


def test_a_message_over_the_limit_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match=f"the limit is {LIMIT_BYTES}"):
        pack(SendValue(0, "x", "x" * LIMIT_BYTES))


# ---------------------------------------------------------------------- records


def test_a_record_becomes_the_error_and_the_report() -> None:
    try:
        raise ValueError("expected 3 channels")
    except ValueError as error:
        record = FailureRecord.of_exception(
            error, Identity(rank=2, node_rank=1, host="gpu-07", pid=41), Where(step=18, phase="training_step")
        )
    again = sent(record)
    assert again == record
    failure = again.to_error()
    assert isinstance(failure, PeerFailure)
    assert (failure.rank, failure.node_rank, failure.step, failure.phase) == (2, 1, 18, "training_step")
    assert str(failure).startswith("rank 2 (host gpu-07, pid 41) failed at step 18 in training_step:")
    assert "This rank was healthy" in str(failure)
    assert "This rank was healthy" not in str(again.to_error(healthy_rank=2))
    lines = render(record).splitlines()
    assert lines[0].startswith("lightning_ddp: rank 2 (node 1, host gpu-07, pid 41) failed first")
    assert lines[1:3] == ["  step 18 in training_step", "  ValueError: expected 3 channels"]
    assert lines[-1] == "ValueError: expected 3 channels"


def test_a_report_leaves_out_frames_of_packages_but_the_last() -> None:
    def of_the_user(text: str) -> object:
        return json.loads("{")

    try:
        json.loads("[1]", parse_int=of_the_user)
    except ValueError as error:
        record = FailureRecord.of_exception(error, Identity(rank=1, node_rank=0), Where())
    _, *places = re.findall(r"in \w+$|\.\.\. .*$", render(record), re.MULTILINE)  # the first is this function
    assert places == ["... 3 frames of python", "in of_the_user", "... 2 frames of python", "in raw_decode"]


def sent(record: FailureRecord) -> FailureRecord:
    """What arrives at the other side."""
    (message,) = Unpacker().feed(pack(Failed(record)))
    assert isinstance(message, Failed)
    return message.record


@pytest.mark.parametrize("character", ["x", "\n", "漢", "\U0001f600", "\udc80", "x漢"])
def test_texts_of_any_characters_fit_into_a_message(character) -> None:
    names = ("message", "traceback", "host", "phase", "exception_type", "exception_class")
    record = FailureRecord(rank=1, **dict.fromkeys(names, "A" + character * 50_000 + "Z"))
    told = sent(record)
    assert told.message.startswith("A" + character * 1_000)
    assert told.traceback is not None
    assert told.traceback.endswith(character * 2_000 + "Z")
    pack(Failure(told))  # as the server sends it on


@pytest.mark.parametrize(
    "message",
    [
        "\x01" * 20_000,
        "€" * 10_000,
        "".join(f"line {number}\n" for number in range(5_000)),
        "x" * 8_000,
        "x" * 8_001,
    ],
    ids=["control characters", "euros", "lines", "that fits", "that does not"],
)
def test_the_last_screen_of_a_report_has_rank_step_and_class_whatever_the_message(tmp_path, message) -> None:
    try:
        raise ValueError(message) from OSError(message)
    except ValueError as error:
        where = Where(step=18, phase="training_step")
        record = sent(FailureRecord.of_exception(error, Identity(rank=2, node_rank=0), where))
    shown = message if len(message) == 8_000 else None
    if shown is None:
        *lines, note = record.message.split("\n")
        assert (len(lines), {*map(len, lines)} <= {*range(201)}) == (40, True)
        told, whole = "".join(lines), message.replace("\x01", "\\x01")
        assert whole.replace("\n", "").startswith(told)
        num_breaks = 40 if "\n" in message else 0
        assert note == f"... {len(whole) - len(told) - num_breaks} characters left out"
    write_error_file(str(tmp_path / "error"), record, is_cause=True)
    trace = json.loads((tmp_path / "error").read_text())["message"]["extraInfo"]["py_callstack"]
    for text in (render(record), str(record.to_error(0)), trace):
        assert "in test_the_last_screen" in text, "the frames stay"
        assert not re.search(r"[^\n -~€]", text)
        screen = last_screen(text)
        assert "rank 2 failed first at step 18 in training_step: ValueError" in screen
    assert render(record).count(record.message) == 2, "that of the error and of its cause"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heartbeat_timeout_s": 1}, "heartbeat_timeout_s=1: expected at least 2 seconds"),
        ({"heartbeat_timeout_s": float("nan")}, "heartbeat_timeout_s=nan"),
        ({"failure_grace_s": 0}, "failure_grace_s=0: expected seconds above 0"),
    ],
)
def test_settings_out_of_range(arguments, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SupervisionSettings(**arguments)


# ---------------------------------------------------------------------- the verdict


def killed(rank: int) -> FailureRecord:
    return FailureRecord(rank=rank, message="was killed by SIGKILL", exit_code=-9)


VANISHED, RAISED, ECHOED = ("vanished", gone(1), 0.0), ("accuse", raised(0)), ("echo", raised(0), 0.0)


@pytest.mark.parametrize(
    ("events", "certain_at", "rank", "message"),
    [
        ([RAISED, ("accuse", raised(1)), VANISHED], 0.0, 0, "3 channels"),
        ([VANISHED, ("exited", killed(1), 0.1)], 0.0, 1, "was killed by SIGKILL"),
        ([VANISHED], EXIT_WAIT_S, 1, "gone"),
        ([VANISHED, RAISED], 0.0, 1, "gone"),
        ([VANISHED, RAISED, ("set_aside", gone(1)), ("exited", killed(0), 0.1)], 0.0, 0, "3 channels"),
        ([ECHOED, ("vanished", gone(1), 0.1)], 0.1 + EXIT_WAIT_S, 1, "gone"),
        ([ECHOED, ("exited", killed(0), 0.1)], ECHO_WAIT_S, 0, "3 channels"),
    ],
    ids=[
        "an exception is certain at once, and stays the first",
        "one that vanished, with its exit code",
        "one that vanished, after a moment",
        "one that vanished before another one raised",
        "one that raised later is the next where the others continue",
        "an echo gives way to what it echoes",
        "an echo of nothing",
    ],
)
def test_the_first_failure(events, certain_at, rank, message) -> None:
    verdict = RootCauseTracker()
    for event, *arguments in events:
        getattr(verdict, event)(*arguments)
    assert certain_at == 0.0 or verdict.decide(certain_at - 0.01) is None
    first = verdict.decide(certain_at)
    assert first is not None
    assert (first.rank, first.message) == (rank, message)
    assert verdict.deadline() is None


# ---------------------------------------------------------------------- server and watches


class Run:
    """A server, and watches of simulated ranks in this process."""

    def __init__(self, world_size: int, **settings: Any) -> None:
        self.settings = SupervisionSettings(failure_grace_s=5.0, **settings)
        self.server = ControlServer("127.0.0.1", token=TOKEN, world_size=world_size, settings=self.settings)
        self.world_size = world_size
        self.watches: list[ControlClient] = []
        self.ranks: list[FailureHandler] = []  # what their main threads do at step boundaries

    @property
    def address(self) -> ServerAddress:
        return ServerAddress(
            host="127.0.0.1",
            port=self.server.port,
            token=TOKEN,
            identity=Identity(rank=0, node_rank=0),
            period_s=self.settings.report_period_s(self.world_size),
        )

    def connect(self, rank: int) -> ControlClient:
        children: Any = None
        ours = FailureHandler(children)

        def learn(record: FailureRecord) -> None:
            ours.interrupt.set(record.to_error())

        identity = Identity(rank=rank, node_rank=0, pid=1000 + rank)
        ours.watch = ControlClient(self.address, identity, self.settings, on_failure=learn)
        ours.watch.update(begin_fit)
        self.ranks.append(ours)
        self.watches.append(ours.watch)
        return ours.watch

    def connect_all(self) -> None:
        for rank in range(self.world_size):
            self.connect(rank)
        for watch in self.watches:
            watch.wait_for_all(DEADLINE_S, lambda: None)

    def close(self) -> None:
        for watch in self.watches:
            watch.close()
        self.server.close()


def begin_fit(state: RankState) -> None:
    state.begin_run("fit")


def running(world_size: int, **settings: Any) -> closing[Run]:
    return closing(Run(world_size, **settings))


def test_a_rank_stalls_only_when_all_have_come() -> None:
    timeout_s = 0.4
    with running(2, stall_timeout_s=timeout_s) as run:
        first = run.connect(0)
        assert first.wait_for_verdict(3 * timeout_s) is None
        assert run.server.first_failure is None
        run.connect(1)
        assert "no progress within stall_timeout=0.4 s" in verdict_of(first).message


def test_a_process_that_was_stopped_itself_does_not_take_the_server_for_silent(monkeypatch) -> None:
    stopped_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + stopped_s)
    monkeypatch.setattr("lightning_ddp.supervise.client.time", clock)
    with running(2, stall_timeout_s=DEADLINE_S) as run:
        run.connect_all()
        watch = run.watches[0]
        stopped_s = 10 * DEADLINE_S
        while watch._heard_at < clock.monotonic() - DEADLINE_S and watch.failure is None:
            watch.wait_for_order()
        assert watch.failure is None


@pytest.mark.parametrize(("timeout_s", "num_ranks"), [(20.0, 4), (20.0, 16_384), (300.0, 4_096), (0.4, 2)])
def test_a_rank_is_silent_for_the_timeout_and_not_for_less(timeout_s, num_ranks) -> None:
    """It has said hello, and stops just before it would have reported."""
    roster = Roster(2)
    rank, other = (
        roster.add(Identity(rank=rank, node_rank=0, pid=rank), 0.0, is_launcher=False) for rank in range(2)
    )
    interval_s = SupervisionSettings(stall_timeout_s=timeout_s).report_period_s(num_ranks)
    watch = StallWatch(timeout_s, interval_s)
    watch.begin(0.0)
    assert interval_s <= min(timeout_s / 4, SupervisionSettings().failure_grace_s / 3)
    rank.heard_at = rank.moved_at = 1.0
    stops_at, now, found = 1.0 + 0.99 * interval_s, 0.0, None
    while found is None:
        assert now < 1.0 + 3 * timeout_s
        other.heard_at = other.moved_at = now
        found_at, found = now, watch.find(roster.members, now)
        now = watch.next_look()
    assert (found[0], found[1].message[:32]) == (rank, "the process has not answered for")
    assert found_at > stops_at + timeout_s
    assert num_ranks > 64 or found_at <= stops_at + timeout_s + 1.0


def verdict_of(watch: ControlClient) -> FailureRecord:
    """The first failure, which comes."""
    record = watch.wait_for_verdict(DEADLINE_S)
    assert record is not None
    return record


def connected(run: Run) -> socket.socket:
    """A connection to the server that says nothing yet."""
    return socket.create_connection(("127.0.0.1", run.server.port), timeout=DEADLINE_S)


def wait_until(watch: ControlClient, condition: Callable[[RankState], bool]) -> None:
    """Until the orders that a process hears have led to something."""
    deadline = time.monotonic() + DEADLINE_S
    while not watch.update(condition):
        watch.wait_for_order()
        assert time.monotonic() < deadline


def end_run(run: Run) -> None:
    """All ranks end a run together."""
    for watch in run.watches:
        watch.update(RankState.end_run)
    for watch in run.watches:
        wait_until(watch, RankState.has_ended_everywhere)


def test_a_rank_that_is_gone_between_two_runs_is_a_failure_of_the_next() -> None:
    with running(3) as run:
        run.connect_all()
        end_run(run)
        run.watches[1]._connection.shutdown(socket.SHUT_RDWR)
        assert run.watches[1].wait_for_verdict(DEADLINE_S)  # its end is read, of both sides
        assert run.watches[0].wait_for_verdict(4 * EXIT_WAIT_S) is None
        run.watches[0].update(lambda state: state.begin_run("test"))
        record = verdict_of(run.watches[0])
        assert (record.rank, record.message[:16]) == (1, "the process died")


def test_who_asks_something_of_the_server_is_no_rank_that_is_gone() -> None:
    with running(2) as run:
        run.connect_all()
        end_run(run)
        assert isinstance(ask(run.address, DrainNode(1), timeout_s=DEADLINE_S), DrainNodeReply)
        for watch in run.watches:
            watch.update(begin_fit)
        end_run(run)
        assert run.watches[0].wait_for_verdict(4 * EXIT_WAIT_S) is None


def test_that_all_have_ended_a_run_is_known_before_a_failure_after_it(monkeypatch) -> None:
    """Although the thread that leaves is slower than the failure."""
    with running(2) as run:
        run.connect_all()
        first, second = run.watches
        known_before: list[FailureRecord | None] = []
        leaves = threading.Event()

        def wait_for_order() -> None:
            leaves.set()
            assert second.wait_for_verdict(DEADLINE_S) is not None

        monkeypatch.setattr(second, "wait_for_order", wait_for_order)
        when_all_left = lambda: known_before.append(second.failure)  # noqa: E731
        thread = threading.Thread(target=leave, args=(second, DEADLINE_S, when_all_left))
        thread.start()
        assert leaves.wait(DEADLINE_S)
        assert known_before == []
        leave(first, DEADLINE_S)
        first.report(raised(0), is_echo=False)
        thread.join()
        assert set(known_before) == {None}


def test_a_server_that_closes_is_no_failure_and_one_that_vanishes_is() -> None:
    with running(2) as run:
        run.connect_all()
        run.server.close()
        for watch in run.watches:
            wait_until(watch, lambda state, watch=watch: watch.has_been_left)
            assert watch.failure is None
    with running(2) as run:
        run.connect_all()
        for peer in list(run.server._connections.peers):
            peer.connection.shutdown(socket.SHUT_RDWR)
        record = verdict_of(run.watches[1])
        assert record.rank == 0
        run.server._control._verdict.first = record  # it has lost everybody: not what this test is about


def test_a_rank_hears_that_its_launcher_on_another_node_is_gone() -> None:
    heard = threading.Event()
    with running(2) as run, subprocess.Popen(["sleep", f"{DEADLINE_S}"]) as launcher:
        run.connect(0)
        who, parent = (Identity(rank=r, node_rank=1, pid=pid) for r, pid in ((1, 1001), (-1, launcher.pid)))
        more: Any = {"on_failure": lambda record: heard.set(), "parent": parent}
        run.watches.append(ControlClient(run.address, who, run.settings, **more))
        run.watches[0].wait_for_all(DEADLINE_S, lambda: None)
        launcher.kill()
        assert heard.wait(DEADLINE_S)


def test_missing_ranks_are_named() -> None:
    with running(3) as run:
        run.connect(0)
        run.connect(2)
        with pytest.raises(RendezvousError, match=r"not all ranks have arrived; connected are \[0, 2\]"):
            run.watches[0].wait_for_all(0.2, lambda: None)


def test_a_rank_that_waits_for_others_hears_that_the_server_has_closed() -> None:
    with running(2) as run:
        run.connect(0)
        assert run.watches[0].who_is_here() == [0]
        run.server.close()
        with pytest.raises(RendezvousError, match="the control server has closed, as the program of rank 0"):
            run.watches[0].wait_for_all(DEADLINE_S, lambda: None)


def test_a_rank_does_not_wait_for_ever_for_another_run_of_rank_0() -> None:
    session = JobContext()
    session.num_failed = 1
    with pytest.raises(RendezvousError, match=r"rank 0 has not begun another run within 0.1 s"):
        session.find_server(dist.HashStore(), 0.1)


def test_a_failure_frees_a_rank_that_is_held() -> None:
    with running(2) as run, connected(run) as mute:
        run.connect(0)
        mute.sendall(hello(1) + pack(report()))  # and it never says how far it is
        run.watches[0].wait_for_all(DEADLINE_S, lambda: None)
        run.watches[0].ask(STOP)
        wait_until(run.watches[0], lambda state: state.task is Task.HOLD)
        passed: list[Any] = []

        def train() -> None:
            try:
                passed.append(run.ranks[0].reached_step_boundary())
            except PeerFailure as error:
                passed.append(error.rank)

        held = threading.Thread(target=train, daemon=True)
        held.start()
        held.join(0.2)
        assert held.is_alive()
        assert passed == []
        mute.sendall(pack(Failed(raised(1))))
        held.join(DEADLINE_S)
        assert passed == [1]


def test_a_rank_that_may_enter_the_next_generation_hears_that_the_job_has_failed_meanwhile() -> None:
    with running(3, recovery=RecoverySettings()) as run:
        run.connect_all()
        first, second, lost = run.watches
        lost._connection.shutdown(socket.SHUT_RDWR)
        for watch in (first, second):
            wait_until(watch, lambda state: state.is_called)
            watch.update(RankState.stop)
            watch.update(lambda state: state.answer(TRAINED))
        wait_until(first, lambda state: state.task is Task.ENTER)
        second.report(raised(1), is_echo=False)
        record, ours = verdict_of(first), JobContext().control
        ours.watch, ours.calls = first, RecoveryClient(ours.interrupt, ours.alarm, first, DEADLINE_S)
        try:
            ours._learned(record)
            with pytest.raises(PeerFailure, match="3 channels"):
                ours.calls.wait_for_generation(TRAINED, ours.check_end)
            assert ours.end_limit.is_set, "whatever it does before"
        finally:
            ours.restore_handlers()


def test_an_error_on_the_device_is_explained_by_a_recovery_that_is_over_when_its_thread_looks(monkeypatch):
    error = CollectiveError("NCCL: remote process exited", label="gradients", rank=0, waited_s=0.1)
    with running(3, recovery=RecoverySettings()) as run:
        run.connect_all()
        first, second, lost = run.watches
        ours = JobContext().control
        calls = RecoveryClient(ours.interrupt, ours.alarm, first, DEADLINE_S)
        has_looked, may_look = threading.Event(), threading.Event()

        def pause(_: float) -> None:
            has_looked.set()
            assert may_look.wait(DEADLINE_S)

        clock = SimpleNamespace(sleep=pause, monotonic=time.monotonic)
        monkeypatch.setattr(recovery_client, "time", clock)
        found: list[bool] = []
        watching = threading.Thread(target=lambda: found.append(calls.is_call(error)), daemon=True)
        watching.start()
        assert has_looked.wait(DEADLINE_S)
        monkeypatch.undo()
        lost._connection.shutdown(socket.SHUT_RDWR)
        recover(first, second)
        may_look.set()
        watching.join(DEADLINE_S)
        assert found == [True]


def recover(*watches: ControlClient) -> None:
    """The main threads of these ranks stop, and enter the next generation."""
    for watch in watches:
        wait_until(watch, lambda state: state.is_called)
        watch.update(RankState.stop)
        watch.update(lambda state: state.answer(TRAINED))
    for watch in watches:
        wait_until(watch, lambda state: state.task is Task.ENTER)
        watch.update(RankState.enter_next)
        watch.update(RankState.settle)


def test_a_variable_that_was_set_twice_in_a_run_is_what_it_was_before(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    ours = JobContext().control
    ours.enter("fit")
    for size in "32":
        ours.set_while_running({"WORLD_SIZE": size})
        assert os.environ["WORLD_SIZE"] == size
    ours.leave()
    assert os.environ["WORLD_SIZE"] == "4"


@contextmanager
def open_files(num: int) -> Iterator[None]:
    """A soft limit of so many open files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num, before[1]))
    try:
        yield
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (num, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def simulate_ranks(rank: int, _: int, port: int, num_ranks: int) -> dict[str, Any]:
    """Connects all ranks of a run from one process; the last one fails. What it took, and who is named."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with ExitStack() as stack:
        start, cpu = time.monotonic(), time.process_time()
        connections = []
        for number in range(num_ranks):
            host = f"127.0.0.{1 + number % 4}"  # the kernel has half of the port numbers for each
            connection = stack.enter_context(socket.create_connection((host, port), timeout=60.0))
            reset = struct.pack("ii", 1, 0)  # when it is closed, so that the kernel need not remember it
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            connection.sendall(hello(number, pid=number))
            connections.append((connection, Unpacker()))

        def read_until(is_it: Callable[[Any], bool]) -> list[Any]:
            found = []
            for connection, unpacker in connections:
                messages: list[Message] = []
                while not any(map(is_it, messages)):
                    messages += unpacker.feed(connection.recv(65536))
                found.append(messages[-1])
            return found

        read_until(lambda message: isinstance(message, Order) and message.task is Task.RUN)
        connecting = time.monotonic() - start, time.process_time() - cpu
        said = pack(report())
        for connection, _ in connections:
            connection.sendall(said)
        threading.Event().wait(3.0)  # nothing happens: that is measured on the other side
        start, cpu = time.monotonic(), time.process_time()
        failed = replace(raised(num_ranks - 1), traceback="x" * 12_000)
        connections[-1][0].sendall(pack(Failed(failed)))
        named = {message.record.rank for message in read_until(lambda m: isinstance(m, Failure))}
        told = time.monotonic() - start, time.process_time() - cpu
        return {"connected": connecting, "told": told, "named": named}


@pytest.mark.parametrize("num_ranks", [1_000, slow(16_384)])
def test_many_ranks_cost_little(num_ranks) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard < num_ranks + 1_024:
        pytest.skip(f"at most {hard} open files")
    with open_files(512):  # fewer than ranks
        server = ControlServer(
            "127.0.0.1", token=TOKEN, world_size=num_ranks, settings=SupervisionSettings(), any_interface=True
        )
        try:
            before = time.process_time()
            (found,) = run_ranks(
                simulate_ranks, 1, server.port, num_ranks, process_group=False, timeout_s=240.0
            )
            server_s = time.process_time() - before
        finally:
            server.close()
    before = time.process_time()
    for number in range(num_ranks):
        Unpacker().feed(hello(number, pid=number) + pack(report()))
    once_s = time.process_time() - before
    (connected_s, connecting_s), (told_s, telling_s) = found["connected"], found["told"]
    print(
        f"\n{num_ranks:,} ranks: connected in {connected_s:.2f} s, told of a failure in {told_s:.2f} s; CPU"
        f" time of the server {server_s:.2f} s, of the ranks {connecting_s:.2f} + {telling_s:.2f} s; to pack"
        f" and read what they say {once_s:.2f} s"
    )
    assert found["named"] == {num_ranks - 1}
    assert server_s < 6 * once_s, "quadratic, or a thread that polls"


# ---------------------------------------------------------------------- strangers

GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "oversized": struct.pack(">I", 2**31) + b"x" * 1000,
    "no json": struct.pack(">I", 4) + b"\x80\x04N.",
    "no hello": pack(Failed(raised(1))),
    "wrong token": hello(1, token="x"),
    "no token": frame({"kind": "hello", "identity": asdict(Identity(rank=1, node_rank=0))}),
    "odd token": frame({"kind": "hello", "token": ["x"], "identity": asdict(Identity(rank=1, node_rank=0))}),
    "random": random.Random(0).randbytes(200_000),
    "nothing": b"",
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_a_stranger_is_hung_up_on_and_changes_nothing(kind) -> None:
    with running(2) as run:
        run.connect_all()
        with connected(run) as stranger:
            try:
                stranger.sendall(GARBAGE[kind])
                with suppress(OSError):  # ENOTCONN where it has been hung up on already
                    stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(1) == b""
            except (ConnectionResetError, BrokenPipeError):
                stranger.close()  # hung up on in the middle of what it sent
        assert run.server.first_failure is None
        run.watches[1].report(raised(1), is_echo=False)
        assert verdict_of(run.watches[0]).rank == 1


@pytest.mark.parametrize(
    ("rank", "version", "words"),
    [
        (
            1,
            VERSION + 1,
            f"it speaks version {VERSION + 1} of the control protocol, and the server version {VERSION}."
            " Install the same lightning_ddp",
        ),
        (0, VERSION, "there is no place for rank 0: check NODE_RANK"),
    ],
    ids=["another version", "no place"],
)
def test_a_first_process_that_the_run_cannot_have_is_told_so_and_refused(rank, version, words) -> None:
    with running(2) as run, connected(run) as other:
        run.connect(0)
        assert run.watches[0].who_is_here() == [0]  # before the other one can take its place
        who = Identity(rank=rank, node_rank=0, host="h", pid=2)
        other.sendall(pack(Hello(TOKEN, who, version=version)))
        data = b""
        while received := other.recv(65536):
            data += received
        (told,) = Unpacker().feed(data)
        assert isinstance(told, Failure)
        assert told.record.rank == rank
        assert told.record.message.startswith(words)
        assert run.watches[0].who_is_here() == [0]
        assert run.server.first_failure is None


def test_idle_strangers_leave_the_trainer_its_descriptors_and_the_ranks_their_places() -> None:
    with open_files(256), running(2) as run, ExitStack() as stack:
        run.connect(0)
        idle = [stack.enter_context(connected(run)) for _ in range(160)]
        assert idle[0].recv(1) == b""  # the oldest gives way
        run.connect(1)
        for watch in run.watches:
            watch.wait_for_all(DEADLINE_S, lambda: None)
        assert len(run.server._connections.strangers) < 100
        assert run.server.first_failure is None


def test_a_process_without_descriptors_does_not_spin_and_goes_on_when_there_are_some() -> None:
    with running(2) as run, ExitStack() as stack:
        run.connect(0)
        connection = stack.enter_context(socket.socket())
        taken: list[int] = []
        with open_files(len(os.listdir("/proc/self/fd")) + 20):
            with suppress(OSError):
                while True:
                    taken.append(os.dup(0))
            connection.connect(("127.0.0.1", run.server.port))
            connection.sendall(hello(1) + BYE)
            before = time.process_time()
            threading.Event().wait(0.5)
            assert time.process_time() - before < 0.25
            assert not run.watches[0].has_met
            for descriptor in taken:
                os.close(descriptor)
            run.watches[0].wait_for_all(DEADLINE_S, lambda: None)


NONSENSE: list[Any] = [None, True, -1, 10**400, 1e999, "x", "\x1b]0;x\x07", [], [[]], {}, [1, "2", None, {}]]


def spoiled(value: Any, values: random.Random) -> Any:
    """What a message is made of, with some parts replaced."""
    if values.random() < 0.2:
        return values.choice([*NONSENSE, 0, 1, 2, "0-2"])
    if isinstance(value, dict):
        return {key: spoiled(part, values) for key, part in value.items()}
    return [spoiled(part, values) for part in value] if isinstance(value, list | tuple) else value


def example(hint: Any) -> Any:
    """Something of the type of a field, as JSON."""
    origin, arguments = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        hints = get_type_hints(hint, include_extras=True)
        return {field.name: example(hints[field.name]) for field in fields(hint)}
    if origin in (Annotated, Union, types.UnionType, Literal):
        return arguments[0] if origin is Literal else example(arguments[0])
    if origin is tuple:
        return [example(of) for of in arguments if of is not ...]
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return next(iter(hint)).value
    if origin is dict:
        return {"1": example(arguments[1])}
    return {int: 2, str: "0-2", bool: True, float: 1.5}.get(hint, "x")


@pytest.mark.parametrize("kind", sorted(Message.kinds))
def test_whatever_a_process_says_at_whatever_time_no_thread_of_the_others_dies(kind) -> None:
    values = random.Random(0)
    whole = {**example(Message.kinds[kind]), "kind": kind}
    assert Unpacker().feed(frame(whole)), "an example that the protocol refuses"
    messages = [whole] + [
        {name: value if name == "kind" else spoiled(value, values) for name, value in whole.items()}
        for _ in range(15)
    ]
    with running(2 + len(messages), stall_timeout_s=60.0) as run, ExitStack() as stack:
        run.connect(0)
        others = [stack.enter_context(connected(run)) for _ in messages]
        for rank, other in enumerate(others, 2):
            other.sendall(hello(rank, pid=rank))
        deadline = time.monotonic() + DEADLINE_S
        while run.watches[0].who_is_here() != [0, *range(2, run.world_size)]:
            assert time.monotonic() < deadline
        for number, (other, message) in enumerate(zip(others, messages, strict=True)):
            if number == len(messages) // 2:  # so many have spoken before all have come
                run.connect(1)
                for watch in run.watches:  # unless the run has failed
                    wait_until(watch, lambda state, watch=watch: state.has_met or watch.failure is not None)
            with suppress(OSError):  # it has been hung up on
                other.sendall(frame(message) + BYE)
                other.shutdown(socket.SHUT_WR)
                while other.recv(65536):
                    pass
        assert run.server._thread.is_alive()
        assert [watch._thread.is_alive() for watch in run.watches] == [True] * 2
        run.watches[0].report(raised(0), is_echo=False)
        for watch in run.watches:
            assert "control channel" not in verdict_of(watch).message


def test_a_message_of_the_server_that_cannot_be_read_is_a_failure_and_no_silence() -> None:
    with running(1) as run:
        run.connect_all()
        (peer,) = run.server._connections.peers
        peer.connection.sendall(frame({"kind": "order", "number": None}))
        assert verdict_of(run.watches[0]).message == "control channel: ProtocolError: order.number=None"


def test_texts_of_failures_do_not_control_the_terminal() -> None:
    forged = {"message": "\x1b]0;owned\x07 a\tb\r\nc \x9b2J", "host": "\x1b[2J"}
    forged["traceback"] = "\x1b[31mred\u202e"
    report = render(sent(replace(raised(1), **forged)))
    assert "\\x1b]0;owned\\x07 a\tb\\r\nc \\x9b2J" in report
    assert "host \\x1b[2J" in report
    assert "\\x1b[31mred\\u202e" in report


@pytest.mark.parametrize("ended", [0, 1])
def test_a_rank_that_has_unwound_for_a_signal_may_exit(ended) -> None:
    with running(2) as run:
        run.connect(0)
        with connected(run) as other:
            other.sendall(hello(1) + pack(report(phase=RankPhase.FINISHED, ended=ended)))
            run.watches[0].wait_for_all(DEADLINE_S, lambda: None)
        found = run.watches[0].wait_for_verdict(DEADLINE_S if not ended else 4 * EXIT_WAIT_S)
        assert (found is None) == bool(ended)


def test_a_rank_that_reads_nothing_is_hung_up_on_and_costs_the_server_no_more_memory() -> None:
    with running(2) as run, socket.create_connection(("127.0.0.1", run.server.port)) as mute:
        run.connect(0)
        mute.sendall(hello(1))
        run.watches[0].wait_for_all(DEADLINE_S, lambda: None)
        data = SendValue(1, "too much", "x" * 60_000)
        deadline = time.monotonic() + DEADLINE_S
        while run.watches[0].who_is_here() != [0] and time.monotonic() < deadline:
            run.watches[0].post(data)
            assert run.watches[0].flush(DEADLINE_S)
        assert run.watches[0].who_is_here() == [0]
        found = run.watches[0].wait_for_verdict(4 * EXIT_WAIT_S)
        assert found is None, "what it missed it says itself, or its launcher"
        num_received = 0
        while received := mute.recv(1 << 20):
            num_received += len(received)
        assert num_received > 0
        run.watches[0].report(raised(0), is_echo=False)
        assert run.watches[0].wait_for_verdict(DEADLINE_S) == run.server.first_failure is not None


@pytest.mark.parametrize("has_token", [True, False])
def test_the_token_is_in_the_environment_or_in_the_store(monkeypatch, has_token) -> None:
    store = dist.HashStore()
    if has_token:
        monkeypatch.setenv("LIGHTNING_DDP_TOKEN", TOKEN)
    session = JobContext()
    server = session.open_server(
        "127.0.0.1", store, world_size=2, num_nodes=2, settings=SupervisionSettings()
    )
    try:
        assert (TOKEN.encode() in store.get("lightning_ddp/control_server")) is False
        assert server.token == (TOKEN if has_token else session.find_server(store, DEADLINE_S).token)
        if has_token:
            monkeypatch.delenv("LIGHTNING_DDP_TOKEN")
        else:
            monkeypatch.setenv("LIGHTNING_DDP_TOKEN", TOKEN)
        words = "set for rank 0 but not here" if has_token else "set here but not for rank 0"
        with pytest.raises(ConfigurationError, match=f"LIGHTNING_DDP_TOKEN is {words}"):
            session.find_server(store, DEADLINE_S)
    finally:
        server.close()


def test_the_interface_of_the_address_is_bound_and_the_port_is_freed() -> None:
    run = Run(1)
    assert run.server._connections._listener.getsockname()[0] == "127.0.0.1"
    port = run.server.port
    run.close()
    with socket.create_server(("127.0.0.1", port)):
        assert True
    with pytest.raises(RendezvousError, match=r"cannot listen on 192\.0\.2\.1"):
        ControlServer("192.0.2.1", token=TOKEN, world_size=1, settings=SupervisionSettings())
