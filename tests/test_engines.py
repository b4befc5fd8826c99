"""Two nodes, as each engine starts them: namespaces with the variables that it sets; and Ray's workers."""

from __future__ import annotations

import contextlib
import json
import signal
import site
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import RUN, RunningScript, srun, start_script
from harness.engine_script import NUM_SAMPLES
from harness.ledger import Ledger, replacing, start_node
from harness.namespaces import ADDRESSES, INTERFACES, NAMESPACES, two_namespaces
from harness.scripts import ROOT, environment

SCRIPTS = ROOT / "tests" / "harness"
PORT = "29512"
MASTER = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": PORT}
BOTH = {"devices": 2, "num_nodes": 2}


def train_job(node: int) -> dict[str, str]:
    return {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "2",
        "PET_NODE_RANK": str(node),
        "PET_MASTER_ADDR": ADDRESSES[0],
        "PET_MASTER_PORT": PORT,
        "JOB_COMPLETION_INDEX": str(node),
    }


def pytorch_job(node: int) -> dict[str, str]:
    return {**MASTER, "WORLD_SIZE": "2", "RANK": str(node)}


def pytorch_job_of_processes(node: int) -> dict[str, str]:
    """With `nprocPerNode: "2"`, by which the operator multiplies."""
    numbers = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": str(node), "WORLD_SIZE": "4"}
    return {**pytorch_job(node), **numbers}


def vertex(node: int) -> dict[str, str]:
    return {**pytorch_job(node), "CLUSTER_SPEC": '{"cluster": {"workerpool0": ["a:1"]}}'}


def indexed_job(node: int) -> dict[str, str]:
    return {**MASTER, "JOB_COMPLETION_INDEX": str(node)}


def skypilot(node: int) -> dict[str, str]:
    return {
        "SKYPILOT_NODE_RANK": str(node),
        "SKYPILOT_NODE_IPS": "\n".join(ADDRESSES),
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "0",
    }


def slurm(node: int, local_rank: int | None = None) -> dict[str, str]:
    """One task of srun: the node, or one of two ranks there."""
    return srun(2, 1 if local_rank is None else 2, node, local_rank or 0, "10.197.31.[1-2]")


def torchrun(node: int) -> tuple[str, ...]:
    address = (f"--node-rank={node}", f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}")
    return ("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", *address)


Way = tuple[Callable[[int], list[dict[str, str]]], Callable[[int], tuple[str, ...]], dict[str, int]]


def a_node(variables: Callable[[int], dict[str, str]], launcher: tuple[str, ...], **trainer: int) -> Way:
    """One process per node."""
    return lambda node: [variables(node)], lambda _: launcher, trainer


# by hand: `test_nodes`, a launcher on each node
WAYS: dict[str, Way] = {
    "torchrun": (lambda _: [{}], torchrun, BOTH),
    "srun, a task a device": (lambda node: [slurm(node, rank) for rank in (0, 1)], lambda _: (), BOTH),
    "srun, a task a node": a_node(slurm, RUN, devices=2),
    "srun, a task a node, python": a_node(slurm, (), devices=2),
    "PyTorchJob, python": a_node(pytorch_job, (), devices=2),
    "PyTorchJob, run": a_node(pytorch_job, RUN, **BOTH),
    "PyTorchJob, open": a_node(pytorch_job_of_processes, RUN),
    "TrainJob": a_node(train_job, RUN, **BOTH),
    "TrainJob, open": a_node(train_job, RUN),
    "TrainJob, open, python": a_node(train_job, ()),
    "indexed Job": a_node(indexed_job, RUN, **BOTH),
    "SkyPilot": a_node(skypilot, RUN, devices=2),
    "Vertex AI": a_node(vertex, (), devices=2),
}


@pytest.mark.slow
@pytest.mark.xdist_group("namespaces")
@pytest.mark.parametrize("way", WAYS)
def test_each_way_of_starting_two_nodes_trains_each_sample_once(way: str, tmp_path: Path) -> None:
    variables, launcher, trainer = WAYS[way]
    order = json.dumps({"folder": str(tmp_path), "trainer": trainer})
    with two_namespaces(), contextlib.ExitStack() as stack:
        scripts = [
            stack.enter_context(
                start_script(
                    SCRIPTS / "engine_script.py",
                    [order],
                    {**env, "GLOO_SOCKET_IFNAME": INTERFACES[node]},
                    namespace=NAMESPACES[node],
                    launcher=launcher(node),
                )
            )
            for node in range(2)
            for env in variables(node)
        ]
        for script in scripts:
            script.wait(120).check()
    notes = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(4)]
    assert [note["rank"] for note in notes] == [0, 1, 2, 3]
    assert [(note["node_rank"], note["local_rank"]) for note in notes] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {(note["world_size"], note["num_nodes"], note["num_devices"]) for note in notes} == {(4, 2, 2)}
    assert sorted(sample for note in notes for sample in note["samples"]) == list(range(NUM_SAMPLES))
    assert all(note["weights"] == notes[0]["weights"] for note in notes)


@pytest.mark.slow
@pytest.mark.xdist_group("namespaces")
@pytest.mark.parametrize(
    ("variables", "launcher"),
    [(train_job, RUN), (slurm, RUN), (lambda node: None, ())],
    ids=["TrainJob", "SLURM", "python"],
)
def test_a_pod_that_is_killed_comes_back_by_the_same_command(
    variables: Callable[[int], dict[str, str] | None], launcher: tuple[str, ...], tmp_path: Path
) -> None:
    def start(node: int) -> contextlib.AbstractContextManager[RunningScript]:
        return start_node(node, tmp_path, launcher, variables(node), **replacing(2, plain=True))

    with two_namespaces(), start(0) as first, contextlib.ExitStack() as stack:
        with start(1) as second:
            first.wait_until(lambda: 3 in Ledger(tmp_path).by_step())
            for process in second.processes():
                with contextlib.suppress(psutil.NoSuchProcess):  # the first takes others along
                    process.kill()
            assert second.wait(60).returncode == -signal.SIGKILL
        first.wait_until(lambda: bool(Ledger(tmp_path).changes))
        again = stack.enter_context(start(1))
        for script in (first, again):
            assert script.wait(240).returncode == 0, script.output()
    Ledger(tmp_path).check_members(4)


# ---------------------------------------------------------------------- Ray Train

RAY = "ray[train]==2.60.0"
RAY_ORDERS = {
    "both": {"strategies": ["ray", "ours"]},
    "raise": {"strategies": ["ours"], "fault": "raise"},
    "kill": {"strategies": ["ours"], "fault": "kill"},
}


@pytest.fixture(scope="module")
def ray_notes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """How each training ended, in an interpreter that has Ray beside the packages of this one."""
    folder = tmp_path_factory.mktemp("ray")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    (there,) = folder.glob("venv/lib/python*/site-packages")
    (there / "beside.pth").write_text("\n".join([*site.getsitepackages(), str(ROOT)]))
    # pip is one of the packages beside; of the files of Ray few are imported
    install = [python, "-m", "pip", "install", "--quiet", "--no-compile", RAY]
    subprocess.run(install, check=True, timeout=240)
    command = [python, SCRIPTS / "ray_script.py", folder, json.dumps(RAY_ORDERS)]
    options: Any = {"env": environment({}), "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, check=False, **options)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return json.loads((folder / "notes.json").read_text())


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_workers_train_to_the_weights_of_ray_s_own_strategy(ray_notes: dict[str, Any]) -> None:
    ours, rays = ray_notes["both"]["ours"], ray_notes["both"]["ray"]
    assert ours["world_size"] == rays["world_size"] == 2
    assert ours["weights"] == pytest.approx(rays["weights"], rel=1e-6)
    assert ray_notes["both"]["epochs"] == 2  # that the callback has reported, of ours at last
    assert ray_notes["both"]["checkpoint"]


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize(("fault", "how"), [("raise", "a picture is broken"), ("kill", "killed by a signal")])
def test_a_failed_worker_is_named_in_ray_s_error(ray_notes: dict[str, Any], fault: str, how: str) -> None:
    """By the other worker's `PeerFailure`, as Ray shows the end of each worker."""
    error = ray_notes[fault]["error"].partition("[Rank 1 Error Snippet]")[0]
    assert "rank 1 " in error
    assert how in error
