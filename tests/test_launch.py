"""The launcher: children start at once, none outlives its parent, and one that dies ends the run by name."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
from harness import run_script

from lightning_ddp.comm.interrupt import Interrupt
from lightning_ddp.errors import ConfigurationError, RendezvousError
from lightning_ddp.launch import rendezvous
from lightning_ddp.launch.children import ChildExit, Children

DEADLINE_S = 180

VICTIM = """
import os, signal, sys
import pytorch_lightning as pl
from pytorch_lightning.demos.boring_classes import BoringModel
import lightning_ddp

victim, kind, strategy, devices = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
if "in-background" in sys.argv and "LOCAL_RANK" not in os.environ:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell script does for what it starts with &

class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and self.trainer.global_rank == victim:
            print("FAULT FIRED", flush=True)
            if kind == "raise":
                raise ValueError("expected 3 channels, got 1")
            if kind == "exit":
                os._exit(3)
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)

class Witness(pl.Callback):
    def on_exception(self, trainer, module, exception):
        print(f"WITNESS rank {trainer.global_rank} {type(exception).__name__}", flush=True)

if __name__ == "__main__":
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Witness()],
    )
    trainer.fit(Model())
"""

DEATHS = {
    "raise": "exited with code 1",
    "exit": "exited with code 3",
    "kill": "was killed by SIGKILL",
}


@pytest.mark.parametrize("kind", DEATHS)
@pytest.mark.parametrize("devices", [2, 3])
def test_a_child_that_dies_ends_the_run_with_its_rank(kind, devices) -> None:
    victim = devices - 1
    result = run_script(VICTIM, [str(victim), kind, "custom_ddp", str(devices)], timeout_s=DEADLINE_S)
    assert result.returncode == 1
    assert result.stdout.count("FAULT FIRED") == 1
    assert "WITNESS rank 0 PeerFailure" in result.stdout
    assert f"PeerFailure: rank {victim} (host {socket.gethostname()}, pid " in result.stderr
    if kind == "raise":
        assert result.stderr.rstrip().endswith("ValueError: expected 3 channels, got 1")
        assert f"WITNESS rank {victim} ValueError" in result.stdout
    else:
        assert f"the process {DEATHS[kind]}" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("place", ["in-foreground", "in-background"])
def test_children_unwind_when_the_launching_rank_fails(place) -> None:
    result = run_script(VICTIM, ["0", "raise", "custom_ddp", "3", place], timeout_s=DEADLINE_S)
    assert result.returncode == 1
    assert "ValueError: expected 3 channels, got 1" in result.stderr
    for rank in (1, 2):
        assert f"WITNESS rank {rank} PeerFailure" in result.stdout
    assert result.stderr.rstrip().endswith("ValueError: expected 3 channels, got 1")


@pytest.mark.parametrize(("kind", "code"), [("exit", 3), ("kill", -9)])
def test_children_do_not_outlive_a_launching_rank_that_dies(kind, code) -> None:
    arguments = ["0", kind, "custom_ddp", "2"]
    result = run_script(VICTIM, arguments, timeout_s=DEADLINE_S, leftover_grace_s=30.0)
    assert result.returncode == code
    assert result.stdout.count("FAULT FIRED") == 1


@pytest.mark.parametrize("strategy", ["custom_ddp_spawn", "custom_ddp_fork"])
@pytest.mark.parametrize("kind", DEATHS)
def test_a_worker_process_that_dies_ends_the_run_with_its_rank(strategy, kind) -> None:
    result = run_script(VICTIM, ["1", kind, strategy, "2"], timeout_s=DEADLINE_S)
    assert result.returncode == 1
    assert result.stdout.count("FAULT FIRED") == 1
    assert "PeerFailure: rank 1 (host " in result.stderr
    if kind == "raise":
        assert "ValueError: expected 3 channels, got 1" in result.stderr
    else:
        assert f"the process {DEATHS[kind]}" in result.stderr


RECONCILE = """
import sys
import pytorch_lightning as pl
from pytorch_lightning.demos.boring_classes import BoringModel
import lightning_ddp

class Model(BoringModel):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 3 and self.global_rank == 1:
            self.trainer.strategy.reconciliate_processes("Traceback of mine\\nthe disk is full")

if __name__ == "__main__":
    pl.Trainer(
        strategy="custom_ddp", accelerator="cpu", devices=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(Model())
"""


def test_reconciliate_processes_ends_the_run_with_its_trace() -> None:
    result = run_script(RECONCILE, timeout_s=DEADLINE_S)
    assert result.returncode == 1
    report = result.stderr.rpartition("lightning_ddp: ")[2]
    assert report.startswith("rank 1 (node 0, host ")
    assert report.rstrip().endswith("Traceback of mine\nthe disk is full")


def test_the_environment_switches_reconciliation_off() -> None:
    result = run_script(
        VICTIM, ["1", "kill", "custom_ddp", "2"], {"PL_RECONCILE_PROCESS": "0"}, timeout_s=DEADLINE_S
    )
    assert result.returncode == 1
    assert "lightning_ddp: rank" not in result.stderr
    assert "WITNESS rank 0" in result.stdout  # told by its own launcher, or by the broken connection


HANG = """
import os, sys, threading
import pytorch_lightning as pl
from pytorch_lightning.demos.boring_classes import BoringModel
import lightning_ddp

class Model(BoringModel):
    def on_train_start(self):
        os.write(1, b"READY %d" % os.getpid() + os.linesep.encode())  # one write: two ranks share the pipe
        threading.Event().wait()

if __name__ == "__main__":
    pl.Trainer(
        strategy=sys.argv[1], accelerator="cpu", devices=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(Model())
"""


@pytest.mark.parametrize("strategy", ["custom_ddp", "custom_ddp_spawn", "custom_ddp_fork"])
def test_processes_vanish_with_a_launcher_that_is_killed(strategy, tmp_path) -> None:
    script = tmp_path / "hang.py"
    script.write_text(HANG)
    launcher = subprocess.Popen(
        [sys.executable, str(script), strategy], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert launcher.stdout is not None
        pids = [int(launcher.stdout.readline().split()[1]) for _ in range(2)]
        ranks = [psutil.Process(pid) for pid in pids if pid != launcher.pid]
        assert ranks
        launcher.kill()
        launcher.wait(DEADLINE_S)
        _, alive = psutil.wait_procs(ranks, timeout=60)
        assert not alive
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait(DEADLINE_S)
        launcher.stdout.close()


TRAIN = """
import os, sys
import pytorch_lightning as pl
from pytorch_lightning.demos.boring_classes import BoringModel
import lightning_ddp

if __name__ == "__main__":
    trainer = pl.Trainer(
        strategy="custom_ddp", accelerator="cpu", devices=2, max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(BoringModel())
    words = "TRAINED", trainer.global_rank, os.environ["MASTER_PORT"], sys.argv[1:]
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # one write: the other rank prints as well
"""


def test_a_named_port_in_use_is_an_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run_script(TRAIN, env={"MASTER_PORT": str(port)}, timeout_s=DEADLINE_S)
    assert result.returncode == 1
    assert f"RendezvousError: port {port} on 127.0.0.1, named by MASTER_PORT, is in use" in result.stderr
    assert "TRAINED" not in result.stdout


def test_without_a_named_port_a_free_one_is_taken_and_arguments_reach_the_children() -> None:
    result = run_script(TRAIN, ["--x", "a b"], timeout_s=DEADLINE_S).check()
    lines = sorted(line for line in result.stdout.splitlines() if line.startswith("TRAINED"))
    assert len(lines) == 2
    assert {line.split()[2] for line in lines} != {"29500"}
    assert len({line.split()[2] for line in lines}) == 1
    assert all("['--x', 'a b']" in line for line in lines)


def test_forkserver_trains_as_well(tmp_path) -> None:
    script = TRAIN.replace(
        'strategy="custom_ddp"', 'strategy=lightning_ddp.CustomDDPStrategy(start_method="forkserver")'
    )
    script = script.replace('os.environ["MASTER_PORT"]', "trainer.world_size")
    result = run_script(script, timeout_s=DEADLINE_S).check()
    assert "TRAINED 0 2 []" in result.stdout


def test_processes_that_slurm_started_are_joined_and_none_is_added(tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(2):
            variables = {
                "SLURM_NTASKS": "2",
                "SLURM_NTASKS_PER_NODE": "2",
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank),
                "SLURM_NODEID": "0",
                "SLURM_NODELIST": "localhost",
                "SLURM_JOB_ID": "1",
                "SLURM_JOB_NAME": "train",
                "MASTER_PORT": str(port),
            }
            process = subprocess.Popen(
                [sys.executable, str(script)],
                env={**os.environ, **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            ranks.append(stack.enter_context(process))  # closes its pipe
            stack.callback(process.kill)
        outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    for rank, output in enumerate(outputs):
        assert output.count("TRAINED") == 1
        assert f"TRAINED {rank} {port} []" in output


def test_a_module_is_run_again_as_a_module(tmp_path) -> None:
    package = tmp_path / "some_app"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text("from some_app import __path__\n" + TRAIN)
    result = subprocess.run(
        [sys.executable, "-m", "some_app.train"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("TRAINED") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("devices=0, strategy='custom_ddp'", "`Trainer(devices=0)` value is not a valid input"),
        ("devices=2, strategy='custom_dpp'", "custom_dpp"),
        (
            "devices=2, strategy=lightning_ddp.CustomDDPStrategy(buckets=3)",
            "unexpected keyword argument 'buckets'",
        ),
    ],
)
def test_bad_arguments_are_named_and_nothing_is_left(arguments, message) -> None:
    script = f"import lightning_ddp\nlightning_ddp.Trainer(accelerator='cpu', logger=False, {arguments})"
    result = run_script(script, timeout_s=DEADLINE_S)
    assert result.returncode == 1
    assert message in result.stderr


BAD_MODEL = """
import torch
import pytorch_lightning as pl
from pytorch_lightning.demos.boring_classes import BoringModel
import lightning_ddp, os, sys

class Model(BoringModel):
    def __init__(self):
        super().__init__()
        if sys.argv[1] == "frozen":
            self.requires_grad_(False)
        if sys.argv[1] == "lazy":
            self.extra = torch.nn.LazyLinear(4)
        if sys.argv[1] == "different":
            self.extra = torch.nn.Linear(3 + int(os.environ.get("LOCAL_RANK", 0)), 4)
        if sys.argv[1] == "unused":
            self.first, self.second = torch.nn.Linear(3, 4), torch.nn.Linear(4, 3)

if __name__ == "__main__":
    pl.Trainer(
        strategy="custom_ddp", accelerator="cpu", devices=2, max_steps=3, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(Model())
"""


@pytest.mark.parametrize(
    ("kind", "messages"),
    [
        ("frozen", ["Model has no parameter that requires a gradient"]),
        ("lazy", ["uninitialised (lazy) parameters: extra.weight, extra.bias"]),
        (
            "different",
            [
                "the models differ",
                "rank 0 has 'extra.weight' with shape [4, 3]",
                "rank 1 has 'extra.weight' with shape [4, 4]",
            ],
        ),
        (
            "unused",
            [
                "backward 0 ended, but these parameters got no gradient",
                "rank 0: first.weight, first.bias, second.weight, second.bias",
                "rank 1: first.weight, first.bias, second.weight, second.bias",
                "find_unused_parameters=True",
            ],
        ),
    ],
)
def test_a_model_that_cannot_be_trained_is_an_error_that_names_the_cause(kind, messages) -> None:
    result = run_script(BAD_MODEL, [kind], timeout_s=DEADLINE_S)
    assert result.returncode == 1
    for message in messages:
        assert message in result.stderr


def test_several_nodes_need_a_port_that_all_know() -> None:
    with pytest.raises(ConfigurationError, match="num_nodes=2, but no port is named: set MASTER_ADDR"):
        rendezvous.host_store("127.0.0.1", num_nodes=2, node_rank=0, port=None)


def test_a_store_on_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            RendezvousError, match=f"port {port} on 127.0.0.1, named by MASTER_PORT, is in use"
        ):
            rendezvous.HostedStore("127.0.0.1", port)


def test_a_malformed_port_is_named(monkeypatch) -> None:
    for text in ("abc", "0", "70000", "-1"):
        monkeypatch.setenv("MASTER_PORT", text)
        with pytest.raises(ConfigurationError, match=f"MASTER_PORT='{text}' is no port number"):
            rendezvous.named_port()


def test_the_first_failing_child_is_reported_once_and_at_once() -> None:
    interrupt = Interrupt()
    seen: list[ChildExit] = []

    def on_failure(child: ChildExit) -> None:
        seen.append(child)
        interrupt.set(RuntimeError("child"))

    children = Children(on_failure)
    for rank in (1, 2):
        children.start(rank, [sys.executable, "-c", "import signal; signal.pause()"], dict(os.environ))
    start = time.monotonic()
    children.send_signal(signal.SIGTERM)
    failure = children.first_failure(wait_s=20)
    assert failure is not None
    assert failure.code == -signal.SIGTERM
    assert children.join(20)
    assert seen == [failure]
    assert isinstance(interrupt.error, RuntimeError)
    assert time.monotonic() - start < 20


def test_stopping_children_lets_them_finish_and_then_kills(tmp_path) -> None:
    failures: list[ChildExit] = []
    children = Children(failures.append)
    start = "import pathlib, signal, sys\nsignal.signal(signal.SIGINT, signal.{handler})\n"
    ready = "pathlib.Path(sys.argv[1]).touch()"
    polite = start.format(handler="default_int_handler")
    polite += f"try:\n    {ready}\n    signal.pause()\nexcept KeyboardInterrupt:\n    sys.exit(5)"
    deaf = start.format(handler="SIG_IGN") + f"{ready}\nsignal.pause()\nsignal.pause()"
    marks = [tmp_path / "polite", tmp_path / "deaf"]
    for rank, (source, mark) in enumerate(zip((polite, deaf), marks, strict=True), start=1):
        children.start(rank, [sys.executable, "-c", source, str(mark)], dict(os.environ))
    deadline = time.monotonic() + DEADLINE_S
    while not all(mark.exists() for mark in marks):
        assert time.monotonic() < deadline
    children.stop(grace_s=3.0)
    assert [proc.returncode for proc in children.procs] == [5, -signal.SIGKILL]
    assert failures == []
