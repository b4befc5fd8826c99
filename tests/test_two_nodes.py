"""Two nodes, each a network namespace of its own: a process, a launcher, a link or a node is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import RUN, RunningScript, ScriptResult, exhaustive, slow, start_script
from harness.ledger import Ledger, fault, replacing, start_node
from harness.namespaces import ADDRESSES, INTERFACES, NAMESPACES, by_hand, ip, losing, two_namespaces
from user_script import SCRIPT, order, read_notes, wait_for_notes

HEARTBEAT_S = 4.0
"""Where it is what finds out; else the default: a busy machine may let a process rest for long."""
END_S = HEARTBEAT_S + 60  # 5 s is what is promised; a busy machine takes longer to end an interpreter
UNDER_RUN = {"launcher": RUN}
SHORT_HEARTBEAT = pytest.mark.parametrize(
    "nodes", [{"heartbeat_timeout_s": HEARTBEAT_S}], ids=[""], indirect=True
)


class Nodes:
    """A run of two nodes with two ranks each; the folders of their notes are not shared by the product."""

    def __init__(self, folder: Path, launchers: list[RunningScript]) -> None:
        self.folder, self.launchers = folder, launchers
        self.pids: dict[int, int] = {}
        for rank in range(4):
            name = f"ready-{rank}"
            node = rank // 2
            notes = wait_for_notes(launchers[node], folder / f"node{node}", [name])
            self.pids[rank] = notes[name]["pid"]

    def end(self, node: int) -> ScriptResult:
        """How the launcher of a node ended, after which none of its processes was left."""
        return self.launchers[node].wait(END_S)

    def on_exception(self) -> dict[int, dict[str, Any]]:
        notes = read_notes(self.folder / "node0") | read_notes(self.folder / "node1")
        return {int(name[-1]): content for name, content in notes.items() if name.startswith("on_exception-")}


@pytest.fixture
def nodes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    options = dict(getattr(request, "param", {}))
    launcher = options.pop("launcher", ())
    with two_namespaces(), contextlib.ExitStack() as stack:
        launchers = []
        for node, namespace in enumerate(NAMESPACES):
            folder = tmp_path / f"node{node}"
            folder.mkdir()
            (folder / "go").touch()
            arguments = order(
                folder,
                pause="fit",
                step_s=0.05,
                strategy={"failure_grace_s": 60.0, **options},
                trainer={"num_nodes": 2, "max_epochs": -1, "limit_val_batches": 0},
            )
            env = {**by_hand(node), "GLOO_SOCKET_IFNAME": INTERFACES[node]}
            script = start_script(SCRIPT, arguments, env, namespace=namespace, launcher=launcher)
            launchers.append(stack.enter_context(script))
        yield Nodes(tmp_path, launchers)


@pytest.mark.parametrize(
    ("nodes", "rank"),
    [
        pytest.param({}, 2, id="python-2"),
        pytest.param({}, 3, id="python-3"),
        *(slow(UNDER_RUN, rank, id=f"run-{rank}") for rank in (0, 2)),
    ],
    indirect=["nodes"],
)
def test_a_process_killed_on_either_node_ends_both(nodes, rank) -> None:
    """Rank 2 is the first process of its node, whose end nobody who is left has waited for."""
    os.kill(nodes.pids[rank], signal.SIGKILL)
    reports = [nodes.end(node).stderr.rpartition("lightning_ddp: ")[2] for node in range(2)]
    seen = nodes.on_exception()
    for other in set(range(4)) - {rank}:
        assert seen[other]["rank"] == rank
        if rank == 2:
            assert "died without a report" in seen[other]["message"]
        else:
            assert seen[other]["exit_code"] == -signal.SIGKILL
    if rank != 2:
        assert all(report.startswith(f"rank {rank} (node {rank // 2}") for report in reports)


@SHORT_HEARTBEAT
def test_a_link_that_is_cut_ends_both_nodes_with_the_right_cause(nodes) -> None:
    ip("-n", NAMESPACES[1], "link", "set", INTERFACES[1], "down")
    for node in range(2):
        nodes.end(node)
    for rank, seen in nodes.on_exception().items():
        assert "is unreachable: no heartbeat" in seen["message"], seen
        assert seen["rank"] in ((2, 3) if rank < 2 else (0,))
    assert len(nodes.on_exception()) == 4


@pytest.mark.slow
@SHORT_HEARTBEAT
def test_the_first_node_lost_ends_the_second(nodes) -> None:
    # a node that loses power says nothing to anybody: so its link goes first
    ip("-n", NAMESPACES[0], "link", "set", INTERFACES[0], "down")
    for rank in (0, 1):
        os.kill(nodes.pids[rank], signal.SIGKILL)
    nodes.end(1)
    seen = nodes.on_exception()
    for rank in (2, 3):
        assert seen[rank]["rank"] == 0
        assert "node 0 is unreachable" in seen[rank]["message"]


@contextlib.contextmanager
def shrinking(
    folder: Path, launcher: tuple[str, ...] = (), **order: Any
) -> Iterator[tuple[RunningScript, RunningScript]]:
    """A run of two nodes with two ranks each, which go on when some are lost."""
    first, second = (start_node(node, folder, launcher, **order) for node in range(2))
    with two_namespaces(), first as of_first, second as of_second:
        yield of_first, of_second


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), exhaustive(RUN)], ids=["python", "run"])
def test_ranks_of_both_nodes_are_lost_and_the_others_go_on(launcher, tmp_path) -> None:
    """The last one is the launching process of the second node."""
    faults = [fault(3, "forward", 2, how="stop"), fault(1, "between buckets", 4), fault(2, "forward", 6)]
    with shrinking(tmp_path, launcher, faults=faults, stall_s=6.0, trainer={}) as (first, second):
        assert first.wait().returncode == 0, first.output()
        assert second.wait().returncode != 0, second.output()
    ledger = Ledger(tmp_path)
    ledger.check([0])
    found = {}
    for entry in ledger.changes:
        dealt = entry["dealt_to"]
        place = (*entry["node_and_local_rank"], dealt["rank"], dealt["num_replicas"])
        found[entry["place"], entry["sizes"][1]] = place
    assert found == {
        (0, 3): (0, 0, 0, 3),
        (1, 3): (0, 1, 1, 3),
        (2, 3): (1, 0, 2, 3),
        (0, 2): (0, 0, 0, 2),
        (2, 2): (1, 0, 1, 2),
        (0, 1): (0, 0, 0, 1),
    }


@pytest.mark.slow
@pytest.mark.parametrize("lost", [{0, 1}, exhaustive({1}), exhaustive({0})], ids=["both", "second", "first"])
def test_the_node_with_the_control_server_goes_on_when_the_link_is_cut_and_the_other_one_ends(
    lost, tmp_path
) -> None:
    order = {"strategy": {"heartbeat_timeout_s": HEARTBEAT_S}, "step_s": 0.1, "trainer": {"max_epochs": 4}}
    with shrinking(tmp_path, samples=96, **order) as (first, second):
        first.wait_until(lambda: 3 in Ledger(tmp_path).by_step())
        with losing(lost):
            first.wait_until(lambda: bool(Ledger(tmp_path).changes))
        # nobody of the other node disturbs
        assert first.wait().returncode == 0, first.output()
        assert second.wait(END_S).returncode == 1, second.output()
        assert "node 0 is unreachable" in second.output() or "rank 0" in second.output()
    ledger = Ledger(tmp_path)
    assert ledger.ended == [0, 1]
    assert {tuple(entry["sizes"]) for entry in ledger.changes} == {(4, 2)}
    assert all("node 1 is unreachable" in entry["cause"] for entry in ledger.changes)
    for entries in ledger.by_step().values():
        assert len({entry["parameters"] for entry in entries}) == 1
    assert not list(tmp_path.glob("**/emergency*"))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), exhaustive(RUN)], ids=["python", "run"])
def test_a_rank_of_another_node_is_replaced_by_the_launcher_there(launcher, tmp_path) -> None:
    """One that is killed; then the new one stands still, and the launcher kills it."""
    faults = [fault(3, "forward", 3), fault(3, "forward", None, generation=2, how="stop")]
    order = replacing(4, faults=faults, stall_s=6.0, plain=True)
    with shrinking(tmp_path, launcher, **order) as (first, second):
        for script in (first, second):
            assert script.wait().returncode == 0, first.output() + second.output()
    ledger = Ledger(tmp_path)
    ledger.check_members(4)
    assert ledger.sizes_of(3) == [[3, 4], [3, 4]]
    assert ledger.sizes_of(2) == [[4, 3], [3, 4]] * 2


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("launcher", "lost"), [((), {0, 1}), (RUN, {1}), ((), {0})], ids=["both", "second", "first"]
)
def test_a_node_whose_link_was_cut_ends_and_joins_when_that_has_healed(launcher, lost, tmp_path) -> None:
    order = replacing(2, strategy={"heartbeat_timeout_s": HEARTBEAT_S}, step_s=0.1, plain=True)
    with shrinking(tmp_path, launcher, **order) as (first, second), contextlib.ExitStack() as stack:
        first.wait_until(lambda: 3 in Ledger(tmp_path).by_step())
        with losing(lost):
            first.wait_until(lambda: bool(Ledger(tmp_path).changes))
        assert second.wait(END_S).returncode == 1, second.output()
        assert "This node can join again" in second.output()
        again = stack.enter_context(start_node(1, tmp_path, launcher, **order))
        for script in (first, again):
            assert script.wait().returncode == 0, first.output() + again.output()
    ledger = Ledger(tmp_path)
    ledger.entries = [entry for entry in ledger.entries if entry["event"] != "excepts"]
    ledger.check_members(4)


def leave(node: int, *words: str) -> subprocess.CompletedProcess[str]:
    """`python -m lightning_ddp leave`, called on a node."""
    enter = ("ip", "netns", "exec", NAMESPACES[node])
    command = [*enter, sys.executable, "-m", "lightning_ddp", "leave", *words]
    env = {**os.environ, **by_hand(node)}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "how"),
    [((), "signal"), ((), "command"), exhaustive(RUN, "signal")],
    ids=["python, signal", "python, command", "run, signal"],
)
def test_a_node_leaves_and_the_others_go_on(launcher, how, tmp_path) -> None:
    """By SIGTERM to the process that the user has started there, or by the command."""
    strategy = {"on_preemption": "leave" if how == "signal" else "stop"}
    order = {
        "step_s": 0.1,
        "until_generation": 1,
        "until_size": 2,
        "trainer": {"min_epochs": 2, "max_epochs": 999},
    }
    with shrinking(tmp_path, launcher, strategy=strategy, **order) as (first, second):
        first.wait_until(lambda: 3 in Ledger(tmp_path).by_step())
        if how == "signal":
            os.kill(second.pid, signal.SIGTERM)
        else:
            for words, why in (
                (["--node", "0"], "needs its first node"),
                (
                    ["--node", "7", f"{ADDRESSES[0]}:29511"],
                    "no rank of node 7 is in the run; expected node 0 or 1",
                ),
                ([f"{ADDRESSES[0]}:1"], "no run that can continue without lost nodes is at"),
            ):
                refused = leave(0, *words)
                assert refused.returncode == 2
                assert why in refused.stderr
            asked = leave(1)
            assert "rank 2, 3 of node 1 leaves the run" in asked.stdout, asked.stderr
        assert second.wait().returncode == 0, second.output()
        assert first.wait().returncode == 0, first.output()
        assert first.output().count("was asked to leave") == 2
    ledger = Ledger(tmp_path)
    ledger.check([0, 1])
    told = [(*e["sizes"], *e["lost"], e["cause"], e["retried"]) for e in ledger.changes]
    assert told == [(4, 2, 2, 3, "None", False)] * 2


@pytest.mark.slow
def test_a_node_that_has_left_comes_back_by_the_same_command(tmp_path) -> None:
    order = replacing(2, strategy={"on_preemption": "leave"}, plain=True)
    with shrinking(tmp_path, **order) as (first, second):
        first.wait_until(lambda: 3 in Ledger(tmp_path).by_step())
        os.kill(second.pid, signal.SIGTERM)
        assert second.wait().returncode == 0, second.output()
        with start_node(1, tmp_path, **order) as again:
            assert again.wait().returncode == 0, again.output()
            assert first.wait().returncode == 0, first.output()
    ledger = Ledger(tmp_path)
    ledger.check_members(4)
    assert {entry["cause"] for entry in ledger.changes} == {"None"}
