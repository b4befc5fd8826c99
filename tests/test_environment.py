"""Nodes of a job from the variables of each engine; errors where script and engine contradict each other."""

from __future__ import annotations

import os
from typing import Any

import pytest
from harness import srun
from pytorch_lightning.plugins.environments import LightningEnvironment, SLURMEnvironment

from lightning_ddp.errors import ConfigurationError
from lightning_ddp.launch.environment import is_slurm_node, nodes_of, settle_nodes

HAND = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29511", "NODE_RANK": "1"}
TRAIN_JOB = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
    "JOB_COMPLETION_INDEX": "1",
}
AUTO = {**TRAIN_JOB, "PET_NPROC_PER_NODE": "auto"}
STARTED = {**TRAIN_JOB, "LOCAL_RANK": "1", "WORLD_SIZE": "4", "NODE_RANK": "1"}
PYTORCH_JOB = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "2", "RANK": "1"}
PROCESSES_OF_PODS = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "WORLD_SIZE": "16"}
"""Of a PyTorchJob with `nprocPerNode: "8"`."""
INDEXED_JOB = {"JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "job-0.svc", "MASTER_PORT": "29511"}
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
}
BY_HEAD = {**SKYPILOT, "MASTER_ADDR": "head", "MASTER_PORT": "1234"}
SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "0"}
SLURM_TASK = {**HAND, "LIGHTNING_DDP_NODES": "2 SLURM_NNODES"}
"""As `run` leaves it."""
SRUN = srun(2, 1, node=1, nodes="gpu-[1-2]")


@pytest.fixture
def set_env(monkeypatch: pytest.MonkeyPatch) -> Any:
    names = {*HAND, *TRAIN_JOB, *PYTORCH_JOB, *SKYPILOT, *SAGEMAKER, *SLURM_TASK, *SRUN, "LOCAL_RANK"}
    for name in names:  # set first, so that what the function adds is taken back
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def set_all(variables: dict[str, str]) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_all


@pytest.mark.parametrize(
    ("variables", "script", "expected", "meeting"),
    [
        pytest.param({}, {}, (1, 1), None, id="nothing"),
        pytest.param(HAND, {"num_nodes": 2}, (2, 1), "10.0.0.1:29511", id="by-hand"),
        pytest.param(TRAIN_JOB, {}, (2, 2), "job-node-0-0.job:29500", id="TrainJob"),
        pytest.param(AUTO, {"num_devices": 4}, (2, 4), "job-node-0-0.job:29500", id="TrainJob-auto"),
        pytest.param(PYTORCH_JOB, {}, (2, 1), "job-master-0:23456", id="PyTorchJob"),
        pytest.param(
            {**PYTORCH_JOB, **PROCESSES_OF_PODS}, {}, (2, 8), "job-master-0:23456", id="PyTorchJob-processes"
        ),
        pytest.param(INDEXED_JOB, {"num_nodes": 2}, (2, 1), "job-0.svc:29511", id="indexed-Job"),
        pytest.param(INDEXED_JOB, {}, (1, 1), None, id="indexed-Job-of-a-sweep"),
        pytest.param({**INDEXED_JOB, "PET_NNODES": "2"}, {}, (2, 1), "job-0.svc:29511", id="indexed-Job-PET"),
        pytest.param(SKYPILOT, {"num_devices": 8}, (2, 8), "10.0.0.1:29500", id="SkyPilot"),
        pytest.param(BY_HEAD, {"num_nodes": 2}, (2, 1), "head:1234", id="SkyPilot-other-address"),
        pytest.param(SAGEMAKER, {}, (2, 1), "algo-1:29500", id="SageMaker"),
        pytest.param(SLURM_TASK, {}, (2, 1), "10.0.0.1:29511", id="SLURM-task-per-node"),
        pytest.param(STARTED, {}, (2, 2), "job-node-0-0.job:29500", id="rank-that-a-launcher-started"),
    ],
)
def test_numbers_come_from_the_engine_where_the_script_leaves_them_open(
    set_env, variables: dict[str, str], script: dict[str, int], expected: tuple[int, int], meeting: str | None
) -> None:
    set_env(variables)
    given = {"num_nodes": 1, "num_devices": 1, **script}
    assert settle_nodes(**given, is_open=True) == expected
    if meeting is not None:
        assert f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}" == meeting
        assert os.environ["NODE_RANK"] == "1"
    again = settle_nodes(**given, is_open=True)  # a second Trainer, and a process started from here
    assert again == expected
    assert "RANK" not in os.environ


@pytest.mark.parametrize(
    ("variables", "script", "named"),
    [
        (TRAIN_JOB, {"num_nodes": 4}, ("num_nodes=4", "PET_NNODES=2", "Kubeflow TrainJob")),
        (SKYPILOT, {"num_nodes": 4}, ("num_nodes=4", "SKYPILOT_NUM_NODES=2")),
        (PYTORCH_JOB, {"num_nodes": 4}, ("num_nodes=4", "WORLD_SIZE=2")),
        (SAGEMAKER, {"num_nodes": 4}, ("num_nodes=4", "hosts in SM_HOSTS=2")),
        (SLURM_TASK, {"num_nodes": 4}, ("num_nodes=4", "SLURM_NNODES=2")),
        (TRAIN_JOB, {"num_devices": 4}, ("devices=4", "PET_NPROC_PER_NODE=2")),
        ({**TRAIN_JOB, "NODE_RANK": "0"}, {}, ("NODE_RANK=0", "PET_NODE_RANK=1")),
        ({**SKYPILOT, "NODE_RANK": "0"}, {}, ("NODE_RANK=0", "SKYPILOT_NODE_RANK=1")),
        ({**TRAIN_JOB, **SKYPILOT, "PET_NNODES": "4"}, {}, ("PET_NNODES=4", "SKYPILOT_NUM_NODES=2")),
        ({**PYTORCH_JOB, "PET_NNODES": "4"}, {}, ("PET_NNODES=4", "WORLD_SIZE=2")),
        (
            {**PYTORCH_JOB, **PROCESSES_OF_PODS, "PET_NNODES": "4"},
            {"num_devices": 8},
            ("PET_NNODES=4", "WORLD_SIZE / PET_NPROC_PER_NODE=2"),
        ),
        ({**TRAIN_JOB, "PET_NODE_RANK": "2"}, {}, ("PET_NODE_RANK=2", "PET_NNODES=2")),
        ({**SAGEMAKER, "SM_CURRENT_HOST": "algo-3"}, {}, ("SM_CURRENT_HOST=algo-3", "algo-1")),
        ({**TRAIN_JOB, "PET_NNODES": "1:4"}, {}, ("PET_NNODES=1:4", "a range")),
        ({**TRAIN_JOB, "PET_NODE_RANK": "first"}, {}, ("PET_NODE_RANK=first", "a number")),
    ],
)
def test_a_contradiction_names_both_sides(
    set_env, variables: dict[str, str], script: dict[str, int], named: tuple[str, ...]
) -> None:
    set_env(variables)
    with pytest.raises(ConfigurationError) as raised:
        settle_nodes(**{"num_nodes": 1, "num_devices": 1, **script}, is_open=False)
    for part in named:
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("variables", "num_devices", "is_node"),
    [
        pytest.param({}, 2, True, id="task-per-node"),
        pytest.param({}, 1, False, id="task-per-node-of-one-device"),
        pytest.param({"SLURM_NTASKS": "4"}, 2, False, id="task-per-device"),
        pytest.param({"SLURM_STEP_ID": ""}, 2, False, id="without-srun"),
        pytest.param({"SLURM_STEP_ID": "", "SLURM_NTASKS": "1", "SLURM_NNODES": "1"}, 2, True, id="alone"),
        pytest.param({"SLURM_NTASKS": "", "LIGHTNING_DDP_NODES": "2 SLURM_NNODES"}, 1, True, id="under-run"),
    ],
)
def test_a_task_of_slurm_is_a_node_where_it_is_the_only_one_of_several_devices(
    set_env, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], num_devices: int, is_node: bool
) -> None:
    set_env({**SRUN, **variables})
    for name in [name for name, value in variables.items() if not value]:
        monkeypatch.delenv(name)
    assert is_slurm_node(SLURMEnvironment(), num_devices) is is_node
    assert ("SLURM_NTASKS" in os.environ) is not is_node
    assert not is_slurm_node(LightningEnvironment(), num_devices)


def test_the_names_of_the_engines_that_were_found() -> None:
    assert nodes_of({})[1] == []
    assert nodes_of({**TRAIN_JOB, **SKYPILOT})[1] == ["Kubeflow TrainJob", "SkyPilot"]
    assert nodes_of({**PYTORCH_JOB, "LOCAL_RANK": "0"})[1] == []
