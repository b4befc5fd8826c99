"""`python -m lightning_ddp doctor`: what it finds, what it says, and that it ends."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from harness import run_script, run_threads

from lightning_ddp.__main__ import main
from lightning_ddp.tools.doctor import _Examination, diagnosis, machine
from lightning_ddp.tools.doctor.machine import Finding, Plan, examine, gather_facts, place

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "8",
    "SLURM_NNODES": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_NODELIST": "gpu-[07-08]",
}
TRAIN_JOB = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "node-0"}
CONTROLLED = {*TORCHRUN, *SLURM, "NODE_RANK", "GLOO_SOCKET_IFNAME"}


@pytest.fixture(autouse=True)
def no_variables_of_a_launcher(monkeypatch):
    for name in CONTROLLED:
        monkeypatch.delenv(name, raising=False)


def answer(**changes: Any) -> dict[str, Any]:
    """What a healthy rank says of itself."""
    healthy = {"devices": [], "num_cpus": 64, "variables": {}}
    return {**gather_facts({}, rank=0, local_rank=0), **healthy, **changes}


def levels(findings: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.level for finding in findings if finding.level != "PASS"}


def text_of(findings: list[Finding], check: str) -> str:
    return " ".join(finding.message for finding in findings if finding.check == check)


# ---------------------------------------------------------------------- who started the process


@pytest.mark.parametrize(
    ("env", "starter", "ranks", "master", "advice"),
    [
        (TORCHRUN, "torchrun", (3, 1, 4, 2), ("node0", 29500), "Trainer(devices=2, num_nodes=2)"),
        # SLURM's address and port as Lightning takes them
        (SLURM, "slurm", (5, 1, 8, 2), ("gpu-07", 15000 + 4711), "Trainer(devices=4, num_nodes=2)"),
        (TRAIN_JOB, "script", (1, 0, 2, 2), ("node-0", 29500), "TrainJob: PET_NNODES=2, PET_NODE_RANK=1"),
        ({"SLURM_JOB_ID": "1"}, "nobody", (0, 0, 1, 1), (None, None), "Lightning starts processes itself"),
        ({**SLURM, "SLURM_JOB_NAME": "bash"}, "nobody", (0, 0, 1, 1), (None, None), "is interactive"),
    ],
)
def test_the_launcher_is_recognized_with_what_it_implies(env, starter, ranks, master, advice):
    here = place(env)
    assert here.starter == starter
    assert (here.rank, here.local_rank, here.world_size, here.num_nodes) == ranks
    assert (here.master_addr, here.master_port) == master
    assert here.has_agent_store == (starter == "torchrun")
    (finding,) = here.findings
    assert finding.level == "PASS"
    assert advice in finding.message


@pytest.mark.parametrize(
    ("env", "num_nodes", "complaint"),
    [
        ({**TORCHRUN, "MASTER_ADDR": ""}, None, "MASTER_ADDR not"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "2"}, None, "PET_NODE_RANK=2, but nodes are counted from 0"),
        ({**TORCHRUN, "RANK": "4"}, None, "RANK=4 is not below WORLD_SIZE=4"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "3"}, None, "2 nodes x 3 ranks are not WORLD_SIZE=4"),
        ({**TORCHRUN, "WORLD_SIZE": "four"}, None, "'four'"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "0"}, None, "by zero"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, None, "MASTER_PORT=70000"),
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}, None, "srun python"),
        ({**SLURM, "SLURM_NNODES": "0"}, None, "by zero"),
        ({**SLURM, "SLURM_NTASKS": "7"}, None, "--ntasks=7 cannot be divided evenly over --nodes=2"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, 2, "NODE_RANK not set"),
        ({}, 2, "NODE_RANK, MASTER_ADDR, MASTER_PORT not set"),
        ({"NODE_RANK": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, 2, "NODE_RANK=2 is not below --nodes 2"),
    ],
)
def test_variables_that_contradict_each_other_fail(env, num_nodes, complaint):
    placement = place(env, num_nodes)
    failed = [finding.message for finding in placement.findings if finding.level == "FAIL"]
    assert any(complaint in message for message in failed), failed


# ---------------------------------------------------------------------- checks


def test_a_healthy_run_passes_everything():
    assert levels(diagnosis.check_answers([answer(rank=0), answer(rank=1, local_rank=1)])) == {}


@pytest.mark.parametrize(
    ("changes", "check", "level", "says"),
    [
        ({"packages": {"torch": "1.0"}}, "versions", "FAIL", "rank 1: 1.0"),
        ({"python": "3.8.0"}, "versions", "WARN", "rank 1: 3.8.0"),
        ({"backend": "nccl"}, "devices", "FAIL", "rank 1: nccl"),
        ({"devices": ["A"], "local_rank": 1}, "devices", "FAIL", "local rank 1, but there are 1 GPUs"),
        ({"host": "small", "num_cpus": 0}, "CPU cores", "WARN", "small: 0 cores for 1 rank(s). Give"),
        (
            {"variables": {"LIGHTNING_DDP_SUPERVISION": "0"}},
            "variables",
            "WARN",
            "rank 1: LIGHTNING_DDP_SUPERVISION=0",
        ),
        ({"variables": {"NCCL_IB_DISABLE": "1"}}, "variables", "WARN", "NCCL_IB_DISABLE"),
    ],
)
def test_what_is_wrong_on_one_rank_is_found_and_named(changes, check, level, says):
    findings = diagnosis.check_answers([answer(rank=0), answer(rank=1, **{"local_rank": 1, **changes})])
    assert levels(findings)[check] == level
    assert says in text_of(findings, check)


def test_what_only_the_comparison_of_the_ranks_finds_is_a_failure_of_the_command(capsys):
    args: Any = SimpleNamespace(nodes=None, processes=2, full=None)
    examination = _Examination(args)
    measured = {"all_reduce": {"num_bytes": 1, "seconds": 1.0}, "measured_on": "gloo"}
    examination._answers = [answer(rank=0, **measured), answer(rank=1, packages={"torch": "1.0"}, **measured)]
    assert examination.report(as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "FAIL"


def test_no_secret_is_told():
    env = {"LIGHTNING_DDP_TOKEN": "a", "NCCL_API_KEY": "b", "SLURM_PASSWORD": "c", "NCCL_DEBUG": "INFO"}
    assert gather_facts(env, rank=0, local_rank=0)["variables"] == {"NCCL_DEBUG": "INFO"}


def test_what_other_ranks_have_found_on_their_own_is_reported_for_them():
    found = [
        {"level": "PASS", "check": "torchrun", "message": "4 ranks"},
        {"level": "PASS", "check": "master", "message": "node0, port 1, through eth0: answers"},
        {"level": "WARN", "check": "variables", "message": "the same everywhere"},
    ]
    wrong = {"level": "WARN", "check": "interface", "message": "GLOO_SOCKET_IFNAME=lo"}
    answers = [
        answer(rank=rank, findings=[*found, wrong] if rank > 1 else found, host=f"node{rank}")
        for rank in range(4)
    ]
    findings = diagnosis.check_answers(answers)
    assert text_of(findings, "master") == "ranks 1-3: reached"
    assert text_of(findings, "interface") == "ranks 2-3: GLOO_SOCKET_IFNAME=lo"
    assert levels(findings) == {"interface": "WARN"}


@pytest.mark.parametrize(
    ("named", "route", "num_nodes", "level", "says"),
    [
        (None, "eth0", 2, "PASS", "eth0 (10.0.0.1)"),
        (None, "lo", 1, "PASS", "lo"),
        (None, "lo", 2, "FAIL", "loopback"),
        ("eth7", "eth0", 2, "FAIL", "GLOO_SOCKET_IFNAME=eth7, but this host has lo (127.0.0.1), eth0"),
        ("lo", "eth0", 1, "WARN", "the master is reached by eth0"),
        (None, None, 2, "FAIL", "no interface leads to the master"),
    ],
)
def test_interfaces(named, route, num_nodes, level, says):
    found = {"lo": "127.0.0.1", "eth0": "10.0.0.1"}
    finding = diagnosis.check_interface(named, route, found, num_nodes=num_nodes)
    assert finding.level == level
    assert says in finding.message


@pytest.mark.parametrize(
    ("host", "seconds", "level"), [("here", 1.0, "PASS"), ("there", 0.1, "PASS"), ("there", 1.0, "WARN")]
)
def test_the_all_reduce_is_judged_by_its_bandwidth_between_hosts(host, seconds, level):
    timed = {"measured_on": "gloo", "all_reduce": {"num_bytes": 64 << 20, "seconds": seconds}}
    answers = [answer(rank=0, host="here", **timed), answer(rank=1, host=host, **timed)]
    finding = diagnosis.check_all_reduce(answers)
    assert finding.level == level
    assert f"{1e3 * seconds:.2f} ms, as a ring {0.537 / seconds:.3g} Gbit/s a link" in finding.message


# ---------------------------------------------------------------------- measuring


def examined_by_two() -> list[dict[str, Any]]:
    store, plan = dist.HashStore(), Plan(num_bytes=4096, timeout_s=10, interface="lo")

    def work(rank: int, world_size: int, group: Any) -> dict[str, Any]:
        return examine(store, plan, {}, rank=rank, local_rank=rank, world_size=world_size)

    return run_threads(work, 2)


def test_gpus_are_measured_only_where_every_rank_has_one(monkeypatch):
    """Here rank 0 of two has one: alone in NCCL it would wait for the other."""
    devices = {"backend": "nccl", "devices": ["A"]}
    monkeypatch.setattr(
        "lightning_ddp.tools.doctor.machine.gather_facts",
        lambda env, *, rank, local_rank: {**gather_facts(env, rank=rank, local_rank=local_rank), **devices},
    )
    answers = examined_by_two()
    assert [a["measured_on"] for a in answers] == ["gloo", "gloo"]
    assert "rank 1 on" in text_of(diagnosis.check_answers(answers), "devices")


def test_the_time_of_the_all_reduce_is_that_of_the_slowest_rank_on_all(monkeypatch):
    all_reduce = machine._all_reduce

    def take_longer_on_rank_1(group: Any, *arguments: Any) -> float:
        all_reduce(group, *arguments)
        return 1.0 + group.rank()

    monkeypatch.setattr(machine, "_all_reduce", take_longer_on_rank_1)
    assert [answer["all_reduce"]["seconds"] for answer in examined_by_two()] == [2.0, 2.0]


# ---------------------------------------------------------------------- the network, with deadlines


@contextmanager
def bound_port(*, listens: bool) -> Iterator[int]:
    """A port that nobody else is given; one on which nobody listens can still be listened on by name."""
    with closing(socket.socket()) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        if listens:
            holder.listen()
        yield holder.getsockname()[1]


@pytest.fixture
def set_master(monkeypatch) -> Callable[..., None]:
    def set_variables(rank: int, address: str, port: int) -> None:
        for name, value in (("NODE_RANK", rank), ("MASTER_ADDR", address), ("MASTER_PORT", port)):
            monkeypatch.setenv(name, str(value))

    return set_variables


def doctor(capsys: Any, *args: str) -> tuple[int, list[str]]:
    status = main(["doctor", "--timeout-s", "5", *args])
    return status, capsys.readouterr().out.splitlines()


def test_a_step_that_blocks_is_given_up_and_an_error_is_passed_on():
    with pytest.raises(machine.DeadlinePassed, match=r"waiting did not end within 0\.1 s"):
        machine.within(0.1, "waiting", lambda: threading.Event().wait(1))
    with pytest.raises(ZeroDivisionError, match="division"):
        machine.within(5, "dividing", lambda: 1 / 0)


def test_alone_everything_is_looked_at_and_nothing_fails(capsys):
    status, lines = doctor(capsys)
    assert status == 0
    names = {line.split("  ")[1].strip() for line in lines if line.startswith(("PASS  ", "WARN  "))}
    assert names == {"versions", "devices", "interface", "CPU cores", "all-reduce"}
    assert lines[-1].startswith(("PASS: ", "WARN: "))


def test_a_master_where_nothing_listens_fails_with_address_port_and_interface(capsys, set_master):
    with bound_port(listens=False) as port:
        set_master(1, "127.0.0.1", port)
        status, lines = doctor(capsys, "--timeout-s", "2")
    assert status == 1
    (line,) = [line for line in lines if line.startswith("FAIL  ")]
    assert f"rank 1 cannot reach 127.0.0.1, port {port}, through lo: " in line
    assert "nothing listens there" in line
    assert lines[-1].startswith("FAIL: ")


def test_a_master_is_waited_for(monkeypatch, capsys, set_master):
    with closing(socket.socket()) as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        set_master(1, "127.0.0.1", port)
        problems = []

        def connect_problem(*args: Any) -> str | None:
            problems.append(real(*args))
            server.listen()  # after the first attempt
            return problems[-1]

        real = machine.connect_problem
        monkeypatch.setattr(machine, "connect_problem", connect_problem)
        status, lines = doctor(capsys, "--timeout-s", "60")
    assert status == 0
    assert problems == ["the host answers, but nothing listens there (yet)", None]
    assert any(line.startswith("PASS  master") and f"port {port}" in line for line in lines)


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("127.0.0.1", "is in use by another process"),
        ("203.0.113.9", "is not an address of this host"),
    ],
)
def test_rank_0_says_why_it_cannot_be_the_master(address, complaint, capsys, set_master):
    with bound_port(listens=True) as port:
        set_master(0, address, port)
        status, lines = doctor(capsys)
    assert status == 1
    assert any(complaint in line and str(port) in line for line in lines if line.startswith("FAIL  "))


def test_a_free_port_is_opened_by_rank_0(capsys, set_master):
    with bound_port(listens=False) as port:
        set_master(0, "127.0.0.1", port)
        status, lines = doctor(capsys, "--timeout-s", "60", "--json")
    document = json.loads("\n".join(lines))
    assert (status, document["verdict"]) in {(0, "PASS"), (0, "WARN")}
    assert "port" in {finding["check"] for finding in document["findings"]}


def test_a_master_that_does_not_answer_fails_within_the_deadline(capsys, set_master):
    """Its queue is full, so that the kernel drops what asks for a connection."""
    with closing(socket.create_server(("127.0.0.1", 0), backlog=0)) as server:
        port = server.getsockname()[1]
        set_master(1, "127.0.0.1", port)
        with closing(socket.create_connection(("127.0.0.1", port))):
            status, lines = doctor(capsys, "--timeout-s", "2")
    assert status == 1
    (line,) = [line for line in lines if line.startswith("FAIL  ")]
    assert f"rank 1 cannot reach 127.0.0.1, port {port}, through lo: no answer within " in line


# ---------------------------------------------------------------------- with processes

LAUNCHED = """
import sys
from lightning_ddp.__main__ import main
sys.exit(main(["doctor", *sys.argv[1:]]))
"""


def test_under_torchrun_rank_0_reports_for_all_ranks():
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    args = ["--json", "--size-mb", "0.1", "--timeout-s", "60"]
    document = json.loads(run_script(LAUNCHED, args, launcher=launcher, timeout_s=240).check().stdout)
    assert document["verdict"] in ("PASS", "WARN")
    assert [rank["local_rank"] for rank in document["ranks"]] == [0, 1]
    assert len({rank["pid"] for rank in document["ranks"]}) == 2
    assert document["all_reduce"]["num_bytes"] == 104856
    assert document["all_reduce"]["seconds"] > 0
    assert {"torchrun", "all-reduce"} <= {f["check"] for f in document["findings"]}
    reached = [f["message"] for f in document["findings"] if f["check"] == "master"]
    assert sum("answers" in message for message in reached) == 1
    assert sum(message == "rank 1: reached" for message in reached) == 1


@pytest.mark.slow
def test_a_rank_whose_peers_do_not_come_ends_within_its_deadline():
    env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    with bound_port(listens=False) as port:
        result = run_script(
            LAUNCHED, ["--timeout-s", "4"], env={**env, "MASTER_PORT": str(port)}, timeout_s=240
        )
    assert result.returncode == 1
    assert f"rank 0 of 2 has the store at 127.0.0.1, port {port}, but does not find all" in result.stdout


@pytest.mark.slow
def test_local_ranks_are_started_and_measured(capsys):
    status = main(["doctor", "--processes", "2", "--size-mb", "0.1", "--timeout-s", "60"])
    out = capsys.readouterr().out
    assert status == 0, out
    assert "0.1 MiB of float32 over gloo, 2 ranks" in out
