"""Who is stuck where: a table and one sentence, found over the control channel."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RUN, TRAINS, exhaustive, run_script, run_threads, slow, start_script
from torch import nn
from user_script import SCRIPT, order, read_notes, wait_for_notes

from lightning_ddp import BucketedDDP, comm
from lightning_ddp.comm.activity import Activity, Interrupt, Lane
from lightning_ddp.comm.group import Group
from lightning_ddp.encoding.side_stream import Channel
from lightning_ddp.errors import CollectiveMismatchError, CollectiveTimeoutError
from lightning_ddp.launch.desync_reporter import DesyncReporter
from lightning_ddp.supervise.client import ControlClient, ServerAddress
from lightning_ddp.supervise.desync import ANSWER_WAIT_S, DesyncDetector, explain, join_ranks, split_ranks
from lightning_ddp.supervise.failure_record import Identity, Where
from lightning_ddp.supervise.guard import stack_of
from lightning_ddp.supervise.processes import Process, Roster
from lightning_ddp.supervise.protocol import (
    LIMIT_BYTES,
    CollectiveApproved,
    CollectiveFingerprint,
    DiagnoseRequest,
    Diagnosis,
    GroupStatus,
    RankStatus,
    StatusReply,
    StatusRequest,
    Unpacker,
    pack,
)
from lightning_ddp.supervise.server import ControlServer
from lightning_ddp.supervise.settings import SupervisionSettings
from lightning_ddp.telemetry.timeline import load_folder

CPU = torch.device("cpu")
TOKEN = "0123456789abcdef"
DEADLINE_S = 20.0
TIMEOUT_S = 120.0


class Member:
    """A rank in a thread, with its end of the control channel."""

    def __init__(self, server: ControlServer, rank: int, process_group: Any) -> None:
        self.interrupt = Interrupt()
        self.step, self.phase = 120, "training_step"
        self.inspector = DesyncReporter(self.interrupt, lambda: Where(step=self.step, phase=self.phase))
        address = ServerAddress(
            host="127.0.0.1", port=server.port, token=TOKEN, identity=Identity(rank=0, node_rank=0)
        )
        self.watch = ControlClient(
            address,
            Identity(rank=rank, node_rank=0),
            SupervisionSettings(),
            on_failure=lambda record: None,
            on_message=self.inspector.on_message,
        )
        self.inspector.attach(self.watch)
        self.watch.wait_for_all(DEADLINE_S, lambda: None)
        self.inspector.enter("fit")
        self.group = Group(process_group, self.interrupt)

    def barrier(self, name: str) -> None:
        comm.barrier(self.group, CPU, name)


def play(
    part: Callable[[Member, int], Any],
    world_size: int,
    *,
    is_detailed: bool = False,
    deadline_s: float = 60.0,
) -> list[BaseException | None]:
    """What each rank raises when all play their part; a rank stays connected until all have."""
    server = ControlServer("127.0.0.1", token=TOKEN, world_size=world_size, settings=SupervisionSettings())
    done = threading.Barrier(world_size)
    raised: list[BaseException | None] = [None] * world_size

    def rank_main(rank: int, world_size: int, process_group: Any) -> None:
        member = Member(server, rank, process_group)
        member.inspector.compare_before_each(is_detailed)
        member.inspector.deadline_s = deadline_s
        try:
            part(member, rank)
        except (CollectiveTimeoutError, CollectiveMismatchError, RuntimeError) as error:
            raised[rank] = error
        finally:
            done.wait(DEADLINE_S)
            member.watch.close()

    try:
        run_threads(rank_main, world_size)
    finally:
        server.close()
    return raised


# ---------------------------------------------------------------------- a deadline passes


def play_without(
    absent: int, world_size: int, wait: Callable[[Member], Any], prepare: Callable[[Member], Any]
) -> list[BaseException | None]:
    """One rank does not come, once it has prepared something; the others wait until their deadline."""
    seen = threading.Event()

    def part(member: Member, rank: int) -> None:
        if rank == absent:
            kept = prepare(member)
            assert seen.wait(DEADLINE_S)
            del kept
            return
        try:
            wait(member)
        finally:
            seen.set()

    return play(part, world_size, deadline_s=0.4)


def test_a_barrier_that_misses_its_deadline_names_the_missing_rank_and_where_it_is() -> None:
    def prepare(member: Member) -> None:
        member.phase, member.step = "validation", 121

    first, second, third = play_without(2, 3, lambda member: member.barrier("val_end"), prepare)
    assert third is None
    error = next(e for e in (first, second) if isinstance(e, CollectiveTimeoutError))
    assert error.missing == (2,)
    assert "barrier 'val_end' has not ended" in str(error)
    assert "past its deadline of 0.4 s; missing: rank 2" in str(error)
    lines = str(error).splitlines()
    assert lines[1].startswith(
        "  ranks 0-1 wait in barrier 'val_end' at step 120 in training_step; rank 2 waits for"
    )
    assert "rank 2 waits for no collective at step 121 in validation (test_stuck.py:" in lines[1]
    assert "in part)" in lines[1]
    assert lines[2].split() == ["rank", "state", "for"]
    assert [line.split()[0] for line in lines[3:6]] == ["0", "1", "2"]


def test_a_rank_that_skips_a_collective_or_calls_another_one_is_told_apart() -> None:
    def part(member: Member, rank: int) -> None:
        member.barrier("start")
        if rank == 1:
            member.phase = "validation"
            member.barrier("val_end")
        else:  # the same tensor: gloo adds them up without noticing
            token = torch.zeros(1, dtype=torch.int32)
            member.group.wait(member.group.all_reduce(token, label="reduce of bucket 4"), CPU)
            member.barrier("val_end")

    (error,) = [e for e in play(part, 2, deadline_s=0.4) if e is not None]
    assert isinstance(error, CollectiveTimeoutError)
    assert error.rank == 0
    assert (
        "as collective 2 of world rank 0 called reduce of bucket 4: all_reduce of [1] int32 at step 120 in"
        " training_step; rank 1 called barrier 'val_end': all_reduce of [1] int32 at step 120 in validation"
    ) in str(error)


def test_a_group_without_rank_0_whose_ranks_wait_in_different_calls_is_told_soon(monkeypatch) -> None:
    """It is asked again and again, as a call counts that a rank has waited in for a second."""
    monkeypatch.setattr("lightning_ddp.comm.activity._LOOK_AFTER_S", 0.2)
    interrupts: dict[int, Interrupt] = {}

    def part(member: Member, rank: int) -> None:
        interrupts[rank] = member.interrupt
        pair = comm.sub_group(member.group, [1, 2], CPU)
        if pair is None:
            return
        try:  # each waits for the other
            pair.wait(pair.broadcast(torch.ones(1), src=1 - pair.rank), CPU)
        finally:
            interrupts[3 - rank].set(RuntimeError("the other one knows"))

    first, second, third = play(part, 3)
    assert first is None
    assert isinstance(second, CollectiveMismatchError)
    assert str(third) == "the other one knows"


def test_a_rank_that_waits_for_one_that_has_come_to_the_end_is_told(monkeypatch) -> None:
    monkeypatch.setattr("lightning_ddp.supervise.client._LOOK_AGAIN_S", 0.2)
    failures = []

    def part(member: Member, rank: int) -> None:
        member.barrier("both")
        if rank == 1:
            member.watch.leave_run(member.inspector.leave, DEADLINE_S)
            failures.append(member.watch.failure)
        member.barrier("epoch_end")

    assert play(part, 2) == [None, None]
    (failure,) = failures
    assert failure is not None
    assert failure.rank == 0
    assert failure.message.startswith(
        "rank 0 waits in barrier 'epoch_end' at step 120 in training_step; rank 1"
    )
    assert "has finished fit" in failure.message


def test_a_hooks_own_thread_that_waits_is_seen() -> None:
    def wait(member: Member) -> None:
        channel = Channel(member.group, CPU)
        channel.wait(channel.submit(lambda: channel.all_gather(torch.ones(8))))

    error, _ = play_without(1, 2, wait, lambda member: Channel(member.group, CPU))
    assert isinstance(error, CollectiveTimeoutError)
    assert error.missing == (1,)
    assert "all_gather has not ended" in str(error) or "communication hook has not ended" in str(error)
    assert "of world, channel 1)" in str(error)


# ---------------------------------------------------------------------- before each collective


def step(member: Member, width: int, dtype: torch.dtype = torch.float32) -> None:
    tensor = torch.ones(width, dtype=dtype)
    member.group.wait(member.group.all_reduce(tensor, label="reduce of bucket 0"), CPU)
    assert tensor.sum().item() == width * member.group.size


def test_what_matches_passes_and_is_computed() -> None:
    def part(member: Member, rank: int) -> None:
        channel = Channel(member.group, CPU)
        for number in range(3):
            step(member, 4)
            future = channel.submit(lambda: channel.all_reduce(torch.ones(2)))
            assert comm.broadcast_nested(member.group, {"n": number}, 0, CPU) == {"n": number}
            assert channel.wait(future).tolist() == [3.0, 3.0]
            assert comm.all_gather(member.group, torch.full((2,), rank)).tolist() == [[0, 0], [1, 1], [2, 2]]
        member.inspector.leave()
        member.barrier("between two runs")
        member.inspector.enter("test")
        member.barrier("in the next one")

    assert play(part, 3, is_detailed=True) == [None, None, None]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (
            lambda m, r: step(m, 4 + r),
            "all_reduce of [4] float32 {here}; rank 1 called reduce of bucket 0: all_reduce of [5]",
        ),
        (
            lambda m, r: step(m, 4, torch.float64 if r else torch.float32),
            "all_reduce of [4] float32 {here}; rank 1 called reduce of bucket 0: all_reduce of [4] float64",
        ),
        (
            lambda m, r: step(m, 1, torch.int32) if r else m.barrier("epoch_end"),
            "barrier 'epoch_end': all_reduce of [1] int32 {here}; rank 1 called reduce of bucket 0",
        ),
        (
            lambda m, r: m.group.broadcast(torch.ones(2), src=r),
            "broadcast from 0 of [2] float32 {here}; rank 1 called broadcast from 1 of [2]",
        ),
    ],
    ids=["shape", "dtype", "order", "source"],
)
def test_what_differs_is_an_error_before_anything_is_sent(what, words) -> None:
    sent: list[int] = []

    def part(member: Member, rank: int) -> None:
        member.barrier("start")
        process_group = member.group.process_group
        before = process_group._get_backend(CPU)._get_sequence_number_for_group()
        try:
            what(member, rank)
        finally:
            sent.append(process_group._get_backend(CPU)._get_sequence_number_for_group() - before)

    errors = play(part, 2, is_detailed=True)
    assert [type(error) for error in errors] == [CollectiveMismatchError] * 2
    assert sent == [0, 0]
    for rank, error in enumerate(errors):
        assert str(error).startswith(
            f"rank {rank}: the ranks are about to call different collectives; none of them"
        )
        assert "as collective 2 of world rank 0 called " in str(error)
        assert words.format(here="at step 120 in training_step") in str(error)


def test_two_groups_in_different_orders_are_an_error() -> None:
    others = [Activity() for _ in range(2)]

    def part(member: Member, rank: int) -> None:
        activity = member.interrupt.activity
        second = activity.add(others[rank], "group 5", range(2))
        first = activity.lanes[0]
        for lane in (first, second) if rank == 0 else (second, first):
            member.inspector.compare(lane.next("all_reduce", (torch.ones(1),), f"of {lane.name}"))

    errors = play(part, 2, is_detailed=True)
    error = next(e for e in errors if isinstance(e, CollectiveMismatchError))
    assert "rank 0 is about to start of world at step 120" in str(error)
    assert "rank 1 is about to start of group 5 at step 120" in str(error)


def test_a_rank_that_finishes_its_run_leaves_nobody_waiting_for_it() -> None:
    def part(member: Member, rank: int) -> None:
        member.barrier("start")
        if rank == 1:
            member.inspector.leave()
        else:
            member.barrier("epoch_end")

    error, _ = play(part, 2, is_detailed=True)
    assert isinstance(error, CollectiveMismatchError)
    assert error.missing == (1,)
    assert (
        "rank 0 is about to start barrier 'epoch_end' at step 120 in training_step; rank 1 has finished fit"
        " at step 120" in str(error)
    )


def test_the_reducers_buckets_are_compared_by_name() -> None:
    def part(member: Member, rank: int) -> None:
        model = BucketedDDP(
            nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))),
            process_group=member.group.process_group,
            bucket_cap_mb=0.0001,
            interrupt=member.interrupt,
        )
        model(torch.ones(2, 4)).sum().backward()
        if rank == 1:
            member.barrier("val_end")
        model(torch.ones(2, 4)).sum().backward()

    errors = play(part, 2, is_detailed=True)
    assert [type(error) for error in errors] == [CollectiveMismatchError] * 2
    assert "rank 1 called barrier 'val_end'" in str(errors[0])
    lanes = [text for text in str(errors[0]).split(";") if "rank 0 called" in text]
    assert lanes, str(errors[0])


# ---------------------------------------------------------------------- the parts, without processes


def test_ranks_in_words() -> None:
    for ranks in ([0], [0, 1, 2, 5], [3, 7, 9], range(1000)):
        assert split_ranks(join_ranks(ranks)) == set(ranks)
    for text in ("", "1-", "a", "0-9999999", "1, , 2", "-4", "0, " * 100):
        assert split_ranks(text) is None


def status(rank: int, state: str, label: str | None = None, number: int = 7, **more: Any) -> RankStatus:
    group = GroupStatus(name="world", ranks="0-3", number=number, calls={number: label or "x"})
    values = {"rank": rank, "state": state, "label": label, "step": 120, "groups": (group,), **more}
    if state in ("waits", "starts"):
        values = {"group": "world", "number": number, **values}
    return RankStatus(**values)


def test_the_mismatch_is_one_sentence() -> None:
    statuses = {rank: status(rank, "waits", "reduce of bucket 4", for_s=30.0 + rank) for rank in range(3)}
    statuses[3] = status(3, "waits", "barrier 'val_end'", number=6, phase="validation", for_s=2.0)
    found = explain(statuses, 0, "world", 7)
    assert found.missing == (3,)
    assert found.sentence == (
        "ranks 0-2 wait in reduce of bucket 4 at step 120;"
        " rank 3 waits in barrier 'val_end' at step 120 in validation"
    )
    rows = [line.split() for line in found.table.splitlines()]
    assert [row[0] for row in rows] == ["rank", "0", "1", "2", "3"]
    assert [row[-2:] for row in rows[1:]] == [["30.0", "s"], ["31.0", "s"], ["32.0", "s"], ["2.0", "s"]]
    assert "(collective 6 of world)" in found.table


def test_all_in_the_same_collective_points_at_the_link() -> None:
    statuses = {rank: status(rank, "waits", "reduce of bucket 4") for rank in range(4)}
    found = explain(statuses, 2)
    assert found.missing == ()
    assert (
        "ranks 0-3 wait in reduce of bucket 4 at step 120. All ranks have called the same collective"
        in found.sentence
    )


WAITING = status(0, "waits", "a: all_reduce of [1] int32", for_s=5.0)


@pytest.mark.parametrize(
    ("other", "is_contradiction"),
    [
        (status(1, "waits", "b: all_reduce of [2] int32", for_s=1.5), True),
        (status(1, "waits", "b: all_reduce of [1] int32", for_s=1.5), False),
        (status(1, "waits", "b: all_reduce of [2] int32", for_s=0.5), False),
        (status(1, "runs", "b: all_reduce of [2] int32", for_s=1.5), False),
        (status(1, "waits", "b: all_reduce of [2] int32", number=8, for_s=1.5), False),
    ],
)
def test_ranks_contradict_where_they_wait_in_different_calls_of_one_number(other, is_contradiction) -> None:
    assert explain({0: WAITING, 1: other}, 0, "world", 7).is_contradiction == is_contradiction


def members_of(num: int) -> dict[int, Process]:
    """As many ranks that have connected."""
    roster = Roster(num)
    return {
        rank: roster.add(Identity(rank=rank, node_rank=0, pid=rank), 0.0, is_launcher=False)
        for rank in range(num)
    }


def test_silent_and_gone_ranks_are_named() -> None:
    members = members_of(3)
    inspection = DesyncDetector(3, members)
    members[2].is_connected = False
    letters = inspection.handle(0, DiagnoseRequest("world", 7), 10.0)
    assert letters == [(0, StatusRequest(1)), (1, StatusRequest(1))]
    answer = StatusReply(1, status(0, "waits", "barrier"))
    assert inspection.handle(0, answer, 10.0) == []
    assert inspection.deadline() == 10.0 + ANSWER_WAIT_S
    assert inspection.due(10.0) == []
    ((rank, found),) = inspection.due(10.0 + ANSWER_WAIT_S)
    assert rank == 0
    assert isinstance(found, Diagnosis)
    assert found.findings.missing == (1, 2)
    assert "rank 1 does not answer: it is stopped, or" in found.findings.sentence
    assert "rank 2 is gone" in found.findings.sentence
    assert inspection.deadline() is None


@pytest.mark.parametrize("has_started", [True, False])
def test_a_collective_that_all_have_started_may_end_and_one_that_a_blocked_rank_has_not_never_does(
    has_started,
) -> None:
    inspection = DesyncDetector(3, members_of(3))
    inspection.handle(0, CollectiveFingerprint("world", "0-2", 8, "x"), 0.0)
    inspection.handle(2, CollectiveFingerprint("odd", "0, 2", 4, "x"), 0.0)
    found = inspection.due(inspection.deadline())
    pair = [GroupStatus(name="pair", ranks="1-2", number=number, calls={}) for number in (2, 3)]
    later = ("pair", 3, False) if has_started else ("odd", 4, True)
    for rank, blocked_on in enumerate((("world", 8, True), ("pair", 3, False), later)):
        groups = () if rank == 0 else (pair[rank == 1 or has_started],)
        said = RankStatus(rank=rank, state="waits", groups=groups, blocked_on=(blocked_on,))
        assert {type(message) for _, message in found} <= {StatusRequest}
        found = inspection.handle(rank, StatusReply(1, said), 1.0)
    assert [rank for rank, _ in found] == ([] if has_started else [0, 2])


def test_who_waits_for_a_job_of_another_thread_is_blocked_by_the_collective_in_it() -> None:
    activity, begun, ends = Activity(), threading.Event(), threading.Event()
    entry = Lane("world", range(2)).next("all_reduce", [], "mean")

    def job() -> None:
        activity.busy.add(threading.get_ident())
        with activity.waiting("mean", entry):
            begun.set()
            ends.wait(60)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(job)
        begun.wait(60)
        with activity.waiting("a hook's job", is_for_job=True):
            assert activity.blocked_on() == [("world", entry.number, False)]
        with activity.waiting("a lock of the user"):
            assert activity.blocked_on() == [], "it may go on"
        ends.set()


def test_a_thousand_ranks_are_compared_in_messages_of_bounded_size() -> None:
    inspection = DesyncDetector(1000, members_of(1000))
    lane = Lane("world", range(1000))
    tensors = [torch.empty(0, *([1] * 60)) for _ in range(500)]
    text = lane.next("all_reduce", tensors, "x" * 10_000).text()
    start = time.monotonic()
    for number in range(1, 6):
        call = CollectiveFingerprint("world", "0-999", number, text[:200])
        letters = []
        for rank in range(1000):
            assert letters == []
            letters = inspection.handle(rank, call, 0.0)
        assert letters == [(rank, CollectiveApproved("world", number)) for rank in range(1000)]
    print(f"\n1,000 ranks: {(time.monotonic() - start) / 5 * 1e3:.1f} ms of the server a compared collective")
    letters = inspection.handle(999, CollectiveFingerprint("world", "0-999", 6, "other"), 0.0)
    letters = inspection.handle(0, CollectiveFingerprint("world", "0-999", 6, text[:200]), 0.0)
    assert {m for _, m in letters} == {StatusRequest(1)}
    found = []
    for rank in range(1000):
        said = StatusReply(1, status(rank, "runs", at="y" * 10_000, phase=f"p{rank}" * 100, number=6))
        (message,) = Unpacker().feed(pack(said))  # cuts what is too long
        found += inspection.handle(rank, message, 0.0)
    assert [rank for rank, _ in found] == [0, 999]
    assert all(len(pack(m)) < LIMIT_BYTES / 4 for _, m in found)


# ---------------------------------------------------------------------- a Trainer with two processes


POWERSGD = {"name": "powersgd", "start_step": 2, "rank": 1, "min_compression": 1}
AVERAGING = {"name": "post_local_sgd", "start_step": 4, "period": 2}


def test_a_fit_in_which_the_ranks_agree_is_not_disturbed(tmp_path) -> None:
    weights = []
    for debug in ("detail", None):
        folder = tmp_path / f"debug-{debug}"
        folder.mkdir()
        strategy = {"debug": debug, "ddp_comm_hook": POWERSGD, "model_averaging": AVERAGING}
        arguments = order(folder, strategy=strategy, trainer={"max_epochs": 2}, validates=True)
        run_script(SCRIPT, arguments, timeout_s=TIMEOUT_S).check()
        weights += [read_notes(folder)[f"finally-{rank}"]["weights"] for rank in range(2)]
    assert weights == [weights[0]] * 4


def test_a_rank_that_leaves_the_path_ends_the_run_with_the_sentence(tmp_path) -> None:
    strategy = {"ddp_comm_hook": POWERSGD, "debug": "detail"}
    arguments = order(tmp_path, strategy=strategy, fault="shape", rank=1)
    result = run_script(SCRIPT, arguments, timeout_s=TIMEOUT_S)
    assert result.returncode == 1, result.stderr
    _, _, report = result.stderr.rpartition("lightning_ddp: ")
    assert "rank 0 called all_reduce SUM of [2] float32 at step 2 in training_step; rank 1 called" in report
    kinds = {read_notes(tmp_path)[f"on_exception-{rank}"]["kind"] for rank in range(2)}
    assert kinds <= {"CollectiveMismatchError", "CollectiveTimeoutError", "CommHookError", "PeerFailure"}


@pytest.mark.parametrize(
    ("fault", "moment", "victim", "strategy"),
    [
        ("log", "validation", 0, "custom_ddp"),
        slow("barrier", "forward", 1, "custom_ddp"),
        slow("barrier", "forward", 0, "custom_ddp"),
        slow("log", "validation", 1, "custom_ddp_spawn"),
    ],
)
def test_a_collective_that_one_rank_alone_calls_is_named_with_the_others(
    tmp_path, fault, moment, victim, strategy
) -> None:
    """Sizes that do not fit, which gloo ends a process for, and ranks that would wait for ever."""
    arguments = order(tmp_path, strategy=strategy, fault=fault, moment=moment, rank=victim)
    result = run_script(SCRIPT, arguments, timeout_s=TIMEOUT_S)
    assert result.returncode == 1, result.stderr
    report = result.stderr.rpartition("lightning_ddp: " if strategy == "custom_ddp" else "PeerFailure: ")[2]
    sentence = next(line for line in report.splitlines() if " of world " in line)
    mine = "barrier 'mine alone'" if fault == "barrier" else "all_reduce SUM of [] float32"
    assert re.search(rf"rank {victim} called {re.escape(mine)}.* at step \d", sentence), report
    assert re.search(rf"rank {1 - victim} called .* at step \d", sentence), report
    assert 'debug="detail"' in report
    assert "EnforceNotMet" not in result.stderr
    assert "died without a report" not in result.stderr
    assert {"on_exception-0", "on_exception-1", "finalize-0", "finalize-1"} <= read_notes(tmp_path).keys()


def test_a_slow_rank_is_logged_and_named(tmp_path) -> None:
    arguments = order(
        tmp_path,
        step_s=0.25,
        rank=1,
        monitors=True,
        trainer={"limit_train_batches": 8, "val_check_interval": 8},
    )
    result = run_script(SCRIPT, arguments, timeout_s=TIMEOUT_S).check()
    metrics = read_notes(tmp_path)["metrics-0"]
    assert {"step_ms", "exposed_ms", "overlap_percent", "gradient_mb_per_step", "bandwidth_gb_per_s"} <= {
        name.removeprefix("communication/") for name in metrics
    }
    assert metrics["communication/straggler_ms/rank1"] > metrics["communication/straggler_ms/rank0"]
    assert metrics["communication/gradient_mb_per_step"] == 6 * (4 * 4 + 4) * 4 / 1e6
    late = re.findall(r"rank (\d) \(host .*has been late for (\d+) steps in a row: ", result.stderr)
    assert {rank for rank, _ in late} == {"1"}
    assert all(int(num_steps) >= 4 for _, num_steps in late)
    recordings = load_folder(tmp_path / "timeline")
    assert [[step.step for step in recording.steps] for recording in recordings] == [list(range(8))] * 2


# ---------------------------------------------------------------------- a rank that holds its interpreter


HELD_STALL_S, HELD_GRACE_S = 4.0, 2.0
LINES = {"sum": "sum(itertools.repeat(0))", "expression": 're.match(r"(a+)+$", "a" * 60 + "b")'}


@pytest.mark.parametrize(
    ("launcher", "rank", "how", "is_asked_to_stop"),
    [
        ((), 0, "sum", False),
        exhaustive((), 1, "expression", False),
        slow((), 1, "sum", True),
        slow(RUN, 0, "expression", False),
        exhaustive(RUN, 1, "sum", False),
    ],
)
def test_a_rank_that_holds_its_interpreter_is_ended_by_its_own_timer(
    tmp_path, launcher, rank, how, is_asked_to_stop
) -> None:
    """Also where SIGTERM asks it to stop. (While another rank fails: test_failures.)"""
    strategy = {"stall_timeout": HELD_STALL_S, "failure_grace_s": HELD_GRACE_S}
    arguments = order(tmp_path, stuck=how, stuck_rank=rank, strategy=strategy)
    with start_script(SCRIPT, arguments, launcher=launcher) as script:
        stuck = wait_for_notes(script, tmp_path, [f"stuck-{rank}"])[f"stuck-{rank}"]
        if is_asked_to_stop:
            os.kill(stuck["pid"], signal.SIGTERM)
        result = script.wait(TIMEOUT_S)  # and nothing is left
        took_s = time.time() - stuck["time"]
    assert result.returncode != 0
    assert took_s < HELD_STALL_S + HELD_GRACE_S + 3.0, result.stderr
    end = result.stderr[-4000:]
    assert f"lightning_ddp: rank {rank} (" in end, result.stderr
    assert LINES[how] in end, result.stderr
    if not is_asked_to_stop:
        report = end.rpartition("lightning_ddp: ")[2]
        assert report.startswith(f"rank {rank} (node 0, host "), end
        assert "the process has not answered for 4 s: " in report
        assert (LINES[how] if how == "sum" else "return _compile(pattern, flags).match(string)") in report
        seen = read_notes(tmp_path)[f"on_exception-{1 - rank}"]
        assert (seen["kind"], seen["rank"]) == ("PeerFailure", rank)


@pytest.mark.parametrize(
    ("launcher", "rank"),
    [((), 0), slow(RUN, 1), exhaustive((), 1), exhaustive(RUN, 0)],
)
def test_who_failed_is_told_last_where_a_survivor_holds_its_interpreter(tmp_path, launcher, rank) -> None:
    (tmp_path / f"hold{rank}").touch()
    strategy = {"failure_grace_s": HELD_GRACE_S}
    arguments = order(tmp_path, strategy=strategy, fault="exception", rank=1 - rank)
    result = run_script(SCRIPT, arguments, timeout_s=TIMEOUT_S, launcher=launcher)
    assert result.returncode == 1
    assert f"stuck-{rank}" in read_notes(tmp_path)
    report = result.stderr.rpartition("lightning_ddp: ")[2]
    assert report.startswith(f"rank {1 - rank} (node 0, host "), result.stderr
    assert "\n  step 2 in training_step\n  ValueError: expected 3 channels, got 1\n" in report
    assert report.rstrip().endswith("ValueError: expected 3 channels, got 1")


AFTER_A_FIT = f"""{TRAINS}
import ctypes
from datetime import timedelta
strategy = lightning_ddp.CustomDDPStrategy(stall_timeout=timedelta(seconds=2), failure_grace_s=0.5)
trainer(strategy, max_steps=2).fit(BoringModel())
if os.environ["LOCAL_RANK"] == "1":
    ctypes.PyDLL(None).usleep(4_000_000)
    print("went on", flush=True)
"""


@pytest.mark.slow
def test_a_script_may_hold_the_interpreter_after_a_fit() -> None:
    assert run_script(AFTER_A_FIT, timeout_s=TIMEOUT_S).check().stdout.count("went on\n") == 1


SHOWS_ITS_STACK = """
import os, sys, time
from lightning_ddp.supervise import guard
guard.permit_stack()
def wait_in_here():
    print("ready", flush=True)
    {wait}
wait_in_here()
import faulthandler
faulthandler.unregister(guard._stack_signal())  # as at the end of the interpreter
os.kill(os.getpid(), guard._stack_signal())
print("lives", flush=True)
"""


@pytest.mark.parametrize("wait", ["sys.stdin.read()", "import ctypes; ctypes.PyDLL(None).usleep(3_000_000)"])
def test_a_process_shows_its_stack_whatever_it_does_and_lives(wait) -> None:
    command = [sys.executable, "-c", SHOWS_ITS_STACK.replace("{wait}", wait)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        stack = stack_of(process.pid)
        assert process.communicate()[0] == "lives\n"
    assert stack is not None
    assert [line.rpartition(", in ")[2] for line in stack.splitlines()[::2]] == ["<module>", "wait_in_here"]
    assert stack_of(process.pid) is None


def test_a_stopped_process_is_not_asked_for_its_stack() -> None:
    command = [sys.executable, "-c", SHOWS_ITS_STACK.replace("{wait}", "sys.stdin.read()")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            assert stack_of(process.pid) is None
            status = Path(f"/proc/{process.pid}/status").read_text()
        finally:
            process.kill()
    assert re.findall(r"(?:SigPnd|ShdPnd):\s*(\w+)", status) == ["0" * 16] * 2, "a signal that waits for it"
