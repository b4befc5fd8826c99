"""Two nodes, each a network namespace of its own: a process, a launcher, a link or a node is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness.leftovers import find_processes, kill_processes, with_environment
from harness.namespaces import ADDRESSES, INTERFACES, NAMESPACES, ip, two_namespaces
from harness.scripts import MARK, ROOT, environment

HEARTBEAT_S = 4.0
END_S = HEARTBEAT_S + 30  # 5 s is what is promised; a busy machine takes longer to end an interpreter
DEADLINE_S = 180.0

TRAIN = """
import os, sys, threading, warnings
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import pytorch_lightning as pl
import torch
from fault_script import Notes, Witness
import lightning_ddp

warnings.filterwarnings("ignore")
folder = Path(sys.argv[1])

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            Notes(folder, self.global_rank).write("ready")
        threading.Event().wait(0.05)
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)

if __name__ == "__main__":
    trainer = pl.Trainer(
        strategy=lightning_ddp.CustomDDPStrategy(heartbeat_timeout_s=4.0, failure_grace_s=20.0),
        accelerator="cpu", devices=2, num_nodes=2, max_epochs=-1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Witness(folder)],
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(64, 4), batch_size=2))
"""


class Nodes:
    """A run of two nodes with two ranks each; the folders of their notes are not shared by the product."""

    def __init__(self, folder: Path) -> None:
        script = folder / "train.py"
        script.write_text(TRAIN)
        self.folder = folder
        self.launchers = []
        for node, name in enumerate(NAMESPACES):
            notes = folder / f"node{node}"
            notes.mkdir()
            variables = {
                "MASTER_ADDR": ADDRESSES[0],
                "MASTER_PORT": "29511",
                "NODE_RANK": str(node),
                "GLOO_SOCKET_IFNAME": INTERFACES[node],
            }
            with (folder / f"out{node}").open("wb") as out:
                self.launchers.append(
                    subprocess.Popen(
                        [
                            "ip",
                            "netns",
                            "exec",
                            name,
                            sys.executable,
                            str(script),
                            str(notes),
                            str(ROOT / "tests"),
                        ],
                        env=environment(variables, f"{folder}-{node}"),
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=out,
                        start_new_session=True,
                    )
                )

    def notes(self) -> dict[str, dict[str, Any]]:
        found = {}
        for path in self.folder.glob("node*/*-[0-9]"):
            found[path.name] = json.loads(path.read_text())
        return found

    def wait_until_training(self) -> dict[int, int]:
        deadline = time.monotonic() + DEADLINE_S
        while not {f"ready-{rank}" for rank in range(4)} <= self.notes().keys():
            threading.Event().wait(0.1)  # looks ten times a second; two interpreters are starting
            assert time.monotonic() < deadline, self.output()
            assert all(launcher.poll() is None for launcher in self.launchers), self.output()
        return {rank: self.notes()[f"ready-{rank}"]["pid"] for rank in range(4)}

    def processes(self, node: int) -> list[psutil.Process]:
        return find_processes(with_environment(MARK, f"{self.folder}-{node}"))

    def wait_for_end(self, node: int, within_s: float) -> float:
        start = time.monotonic()
        _, alive = psutil.wait_procs(self.processes(node), timeout=within_s)
        assert not alive, f"still there on node {node}: {alive}\n{self.output()}"
        seconds = time.monotonic() - start
        print(f"node {node}: all gone after {seconds:.1f} s (promised: {HEARTBEAT_S + 5:.0f} s)")
        return seconds

    def output(self) -> str:
        return "\n".join((self.folder / f"out{node}").read_text()[-6000:] for node in range(2))

    def end(self) -> None:
        for node in range(2):
            kill_processes(self.processes(node))
        for launcher in self.launchers:
            launcher.wait(10)


@pytest.fixture
def network() -> Iterator[None]:
    with two_namespaces():
        yield


@pytest.fixture
def nodes(network: None) -> Iterator[Nodes]:
    with tempfile.TemporaryDirectory(prefix="nodes-") as folder:
        nodes = Nodes(Path(folder))
        try:
            yield nodes
        finally:
            nodes.end()


def test_a_process_killed_on_the_second_node_ends_both(nodes) -> None:
    pids = nodes.wait_until_training()
    os.kill(pids[3], signal.SIGKILL)
    for node in range(2):
        nodes.wait_for_end(node, END_S)
    notes = nodes.notes()
    for rank in range(3):
        assert notes[f"on_exception-{rank}"]["rank"] == 3
        assert notes[f"on_exception-{rank}"]["exit_code"] == -9
    for node in range(2):
        assert (
            (nodes.folder / f"out{node}")
            .read_text()
            .rpartition("lightning_ddp: ")[2]
            .startswith("rank 3 (node 1")
        )


def test_the_second_node_s_launcher_killed_ends_both(nodes) -> None:
    pids = nodes.wait_until_training()
    os.kill(pids[2], signal.SIGKILL)  # rank 2 is the launching process of node 1
    for node in range(2):
        nodes.wait_for_end(node, END_S)
    notes = nodes.notes()
    for rank in (0, 1, 3):
        assert notes[f"on_exception-{rank}"]["rank"] == 2
        assert "gone without a word" in notes[f"on_exception-{rank}"]["message"]


def test_a_link_that_is_cut_ends_both_nodes_with_the_right_cause(nodes) -> None:
    nodes.wait_until_training()
    ip("-n", NAMESPACES[1], "link", "set", INTERFACES[1], "down")
    for node in range(2):
        nodes.wait_for_end(node, END_S)
    notes = nodes.notes()
    for rank in range(4):
        seen = notes[f"on_exception-{rank}"]
        assert "is unreachable: no heartbeat" in seen["message"], seen
        assert seen["rank"] in ((2, 3) if rank < 2 else (0,))


def test_the_first_node_lost_ends_the_second(nodes) -> None:
    pids = nodes.wait_until_training()
    # a node that loses power says nothing to anybody: so its link goes first
    ip("-n", NAMESPACES[0], "link", "set", INTERFACES[0], "down")
    for rank in (0, 1):
        os.kill(pids[rank], signal.SIGKILL)
    nodes.wait_for_end(1, END_S)
    notes = nodes.notes()
    for rank in (2, 3):
        assert notes[f"on_exception-{rank}"]["rank"] == 0
        assert "node 0 is unreachable" in notes[f"on_exception-{rank}"]["message"]
