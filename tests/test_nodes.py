"""Where processes are: several nodes, clusters, many jobs at once, and places that are described wrongly."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from harness import RUN, RunningScript, slow, srun, start_script
from harness.namespaces import ADDRESSES, ADDRESSES_6, INTERFACES, NAMESPACES, by_hand, two_namespaces
from test_hydra import TESTS, Node, Note, Run, starts

TRAIN = TESTS / "hydra_app" / "train.py"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2")
PORT = 29511
NUM_JOBS = 8
TIMEOUT_S = 150.0
NOBODY = "192.0.2.1"  # an address that RFC 5737 keeps for examples


pytestmark = pytest.mark.xdist_group("nodes")  # they share what the fixtures make

FIT = """
import json, sys
from datetime import timedelta
import pytorch_lightning as pl
from hydra_app.training import fit, note
from pytorch_lightning.plugins.environments import KubeflowEnvironment
import lightning_ddp

if __name__ == "__main__":
    name, options, gate = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
    if gate:
        open(gate).close()  # a named pipe: waits until somebody writes
    if "timeout_s" in options:
        timeout = timedelta(seconds=options.pop("timeout_s"))
        options["strategy"] = lightning_ddp.CustomDDPStrategy(timeout=timeout)
    if options.pop("is_kubeflow", False):
        options["plugins"] = KubeflowEnvironment()
    pl.seed_everything(7)  # as the program of the other tests
    note(name, fit(**options))
"""


@pytest.fixture(scope="module")
def network() -> Iterator[None]:
    with two_namespaces():
        yield


def start_fit(
    folder: Path,
    name: str,
    env: dict[str, str] | None = None,
    namespace: str | None = None,
    gate: str = "",
    launcher: Sequence[str] = (),
    **options: Any,
) -> AbstractContextManager[RunningScript]:
    variables = {**(env or {}), "NOTES": str(folder), "PYTHONPATH": str(TESTS)}
    arguments = [name, json.dumps(options), gate]
    return start_script(FIT, arguments, variables, namespace=namespace, launcher=launcher)


def notes_in(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.stem.rpartition("-")[0]: json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.fixture(scope="module")
def single_node(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The weights that four ranks on one node train."""
    folder = tmp_path_factory.mktemp("single")
    with start_fit(folder, "it", lr=0.25, devices=4) as run:
        run.wait(TIMEOUT_S).check()
    notes = notes_in(folder)
    weights: list[float] = notes["it-0"]["weights"]
    assert all(notes[f"it-{rank}"]["weights"] == weights for rank in range(4))
    return weights


def require_two_nodes(notes: dict[int, Note], weights: list[float]) -> None:
    assert sorted(notes) == list(range(4))
    for rank, note in notes.items():
        assert (note["world_size"], note["interface"]) == (4, INTERFACES[rank // 2])
        # the ranks of a node are summed first: rounding differs in the last digits of float32
        assert note["weights"] == pytest.approx(weights, rel=1e-6)
        for key in ("values", "raw", "weights"):
            assert note[key] == notes[0][key], key


@starts
def test_a_launcher_on_each_node_trains_what_one_node_does(network, single_node, tmp_path, launcher) -> None:
    nodes = [
        Node(
            launcher=launcher,
            namespace=NAMESPACES[node],
            env=by_hand(node),
            cwd=f"disk {node}",
        )
        for node in range(2)
    ]
    run = Run(tmp_path, TRAIN, ["lr=0.25", "num_nodes=2"], nodes=nodes).check()
    (notes,) = run.jobs().values()
    require_two_nodes(notes, single_node)
    assert notes[3]["parent"] == notes[2]["parent" if launcher else "pid"]
    folders = [Path(notes[rank]["output_dir"]) for rank in (0, 2)]
    for folder, rank in zip(folders, (1, 3), strict=True):
        assert [path.name for path in (folder / "ranks").iterdir()] == [f"{rank}.log"]
    assert run.folders(".hydra") == run.folders("train.log") == [folders[0]]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs a kernel with IPv6")
@pytest.mark.parametrize(
    ("where", "strategy"),
    [
        ("loopback", "custom_ddp"),
        ("link", "custom_ddp"),
        slow("link", "custom_ddp_spawn"),
    ],
)
def test_nodes_meet_at_an_address_of_ipv6(network, tmp_path, where, strategy) -> None:
    address = "::1" if where == "loopback" else ADDRESSES_6[0]
    env = {"MASTER_ADDR": address, "MASTER_PORT": str(PORT)}
    namespaces = NAMESPACES if where == "link" else NAMESPACES[:1] * 2
    fit_on_both(tmp_path, env, "NODE_RANK", namespaces, strategy=strategy)


def fit_on_both(
    folder: Path, env: dict[str, str], rank: str, namespaces: Sequence[str] = NAMESPACES, **options: Any
) -> list[dict[str, Any]]:
    """What a rank on each node notes, which all know by the variable `rank`: they have the same weights."""
    with contextlib.ExitStack() as stack:
        runs = [
            stack.enter_context(
                start_fit(
                    folder, "it", {**env, rank: str(node)}, namespace, devices=1, num_nodes=2, **options
                )
            )
            for node, namespace in enumerate(namespaces)
        ]
        for run in runs:
            run.wait(TIMEOUT_S).check()
    notes = notes_in(folder)
    assert notes["it-0"]["weights"] == notes["it-1"]["weights"]
    return [notes["it-0"], notes["it-1"]]


def test_torchrun_with_a_c10d_rendezvous_trains_what_one_node_does(network, single_node, tmp_path) -> None:
    nodes = [
        Node(
            namespace=NAMESPACES[node],
            launcher=(
                *TORCHRUN,
                "--nnodes=2",
                "--rdzv-backend=c10d",
                f"--rdzv-conf=is_host={node == 0}",
                f"--rdzv-endpoint={ADDRESSES[0]}:{PORT}",
                f"--local-addr={ADDRESSES[node]}",
            ),
        )
        for node in range(2)
    ]
    run = Run(tmp_path, TRAIN, ["-m", "lr=0.25,0.5", "num_nodes=2"], nodes=nodes).check()
    assert sorted(run.jobs()) == ["job-0", "job-1"]
    jobs = [run.jobs()[f"job-{number}"] for number in range(2)]
    for number, notes in enumerate(jobs):
        require_two_nodes(notes, single_node if number == 0 else notes[0]["weights"])
        for key in ("hydra", "output_dir", "first_draw", "port"):
            assert all(note[key] == notes[0][key] for note in notes.values()), key
        log = Path(notes[0]["output_dir"], "train.log").read_text()
        assert "a line of rank 0" in log
        assert log.count("a line of rank") == 1
    assert [notes[3]["values"]["lr"] for notes in jobs] == [0.25, 0.5]
    assert jobs[0][0]["values"]["drawn"] != jobs[1][0]["values"]["drawn"]
    assert len(run.folders(".hydra")) == 2
    assert len(run.folders("multirun.yaml")) == 1


def test_torchrun_starts_all_again_after_a_failure(network, tmp_path) -> None:
    static = (f"--master-port={PORT}", "--master-addr=127.0.0.1", "--nnodes=1", "--max-restarts=1")
    node = Node(namespace=NAMESPACES[0], launcher=(*TORCHRUN, *static))
    run = Run(tmp_path, TRAIN, ["fault=first attempt", "num_fits=2"], nodes=[node]).check()
    assert run.result.stderr.count("FAULT FIRED") == 1
    (notes,) = run.jobs().values()
    for key in ("values", "raw", "hydra", "output_dir", "weights"):
        assert notes[0][key] == notes[1][key], key


SLURM = """
import ctypes, os

rank = os.environ.get("SUBMITIT_LOCAL_GLOBALID")
if rank is not None:  # in a task that submitit has started: what srun sets, and the node that it runs on
    node, local_rank = divmod(int(rank), 2)
    os.environ.update(
        SLURM_NTASKS="4", SLURM_NTASKS_PER_NODE="2", SLURM_NNODES="2", SLURM_PROCID=rank, SLURM_STEP_ID="0",
        SLURM_LOCALID=str(local_rank), SLURM_NODEID=str(node), SLURM_NODELIST="10.197.31.[1-2]",
        SLURM_JOB_ID="117", SLURM_JOB_NAME="train",
    )
    with open("/run/netns/" + os.environ["NAMESPACES"].split()[node]) as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), 0x40000000) != 0:  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), "setns")
"""


def test_tasks_of_slurm_that_submitit_has_submitted_train_what_one_node_does(
    network, single_node, tmp_path
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SLURM)
    node = Node(env={"NAMESPACES": " ".join(NAMESPACES), "PYTHONPATH": str(tmp_path / "site")})
    submitit = ["hydra/launcher=submitit_local", "hydra.launcher.tasks_per_node=4"]
    run = Run(
        tmp_path, "hydra_app.train", ["-m", *submitit, "lr=0.25", "num_nodes=2"], is_module=True, nodes=[node]
    )
    run.check()
    (notes,) = run.jobs().values()
    require_two_nodes(notes, single_node)
    for key in ("hydra", "output_dir", "port"):
        assert all(note[key] == notes[0][key] for note in notes.values()), key
    (folder,) = run.folders(".hydra")
    assert str(folder) == notes[0]["output_dir"]
    assert (folder / "train.log").read_text().count("a line of rank") == 1


def test_many_jobs_that_start_at_the_same_moment_all_finish_without_a_port(tmp_path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with contextlib.ExitStack() as stack:
        runs = [
            stack.enter_context(start_fit(tmp_path, f"job{number}", gate=str(gate), lr=(number + 1) / 100))
            for number in range(NUM_JOBS)
        ]
        opened = os.open(gate, os.O_RDWR)  # stays open: one that comes late passes as well
        stack.callback(os.close, opened)
        for run in runs:
            run.wait(TIMEOUT_S).check()
    notes = notes_in(tmp_path)
    assert sorted(notes) == sorted(f"job{number}-{rank}" for number in range(NUM_JOBS) for rank in range(2))
    weights = []
    for number in range(NUM_JOBS):
        first, second = notes[f"job{number}-0"], notes[f"job{number}-1"]
        assert (first["port"], first["weights"]) == (second["port"], second["weights"])
        weights.append(first["weights"][0])
    assert len(set(weights)) == NUM_JOBS
    assert weights in (sorted(weights), sorted(weights, reverse=True))  # a job's own learning rate


def test_pods_of_kubeflow_are_joined(network, tmp_path) -> None:
    env = {"KUBERNETES_PORT": "tcp://127.0.0.1:443", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT)}
    notes = fit_on_both(tmp_path, {**env, "WORLD_SIZE": "2"}, "RANK", is_kubeflow=True)
    assert [note["interface"] for note in notes] == list(INTERFACES)


MASTER = {"MASTER_ADDR": NOBODY, "MASTER_PORT": str(PORT)}
WRONG = {
    "no node rank": (MASTER, 2, ["num_nodes=2, but NODE_RANK is not set", "NODE_RANK=0 on the node"]),
    "address of another node": (
        {**MASTER, "NODE_RANK": "0"},
        2,
        [f"MASTER_ADDR={NOBODY} (port {PORT}) is not an address of this host, which is node 0", "interface"],
    ),
    "address where nobody listens": (
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "NODE_RANK": "1"},
        2,
        ["cannot reach the launcher's store at 127.0.0.1, port 1", "interface lo with address 127.0.0.1"],
    ),
    "port in use": (
        {"MASTER_PORT": "{taken}"},
        1,
        [
            "RendezvousError: port {taken} on 127.0.0.1, named by MASTER_PORT, is in use by another process",
            "Use a free port, or unset MASTER_PORT on a single node",
        ],
    ),
    "tasks of slurm": (
        srun(1, 3),
        1,
        [
            "SLURM has started 3 tasks (SLURM_NTASKS) on 1 node (SLURM_NNODES)",
            "Trainer(devices=2, num_nodes=1) needs 2",
            "#SBATCH --ntasks-per-node=2",
            "devices=3, num_nodes=1",
        ],
    ),
}


@pytest.mark.parametrize(("what", "launcher"), [*((what, ()) for what in WRONG), ("port in use", RUN)])
def test_a_place_that_is_described_wrongly_is_an_error_and_no_hang(tmp_path, what, launcher) -> None:
    env, num_nodes, messages = WRONG[what]
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        env = {name: value.format(taken=taken) for name, value in env.items()}
        options: dict[str, Any] = {"timeout_s": 2.0, "num_nodes": num_nodes, "launcher": launcher}
        with start_fit(tmp_path, "wrong", env, **options) as run:
            result = run.wait(TIMEOUT_S)
    assert result.returncode == 1
    assert not notes_in(tmp_path)
    for message in messages:
        assert message.format(taken=taken) in result.stderr, result.stderr[-4000:]
