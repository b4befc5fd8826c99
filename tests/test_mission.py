"""What this package exists for, each promise once, as a user meets it: public names, scripts, real processes.

Nothing in here knows how the package does it, and no change of the package may change this file. Every run
is a script in a folder of its own; `run` requires of each that it leaves nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

import lightning_ddp
from lightning_ddp import available_variants

TESTS = Path(__file__).parent
DEADLINE_S = 240.0
LEFTOVERS_DEADLINE_S = 15.0

PYTHON = (sys.executable,)
RUN = (sys.executable, "-m", "lightning_ddp", "run")
"""The package's own launcher: it imports once and forks the ranks, which is what most runs in here do."""

USER = """
import json, os, signal, sys, warnings
from pathlib import Path

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import lightning_ddp
from lightning_ddp import BucketedDDP, CustomDDPStrategy, Trainer, register_variant

warnings.filterwarnings("ignore")
HERE = Path(__file__).parent
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
QUIET |= {"enable_model_summary": False, "num_sanity_val_steps": 0}
CPU = {"accelerator": "cpu", "devices": 2, "max_steps": 6, **QUIET}


def say(rank, /, **values):
    with open(HERE / f"said-{rank}", "a") as file:
        print(json.dumps(values), file=file)


def batches():
    return DataLoader(torch.randn(48, 8, generator=torch.Generator().manual_seed(1)), batch_size=4)


class Model(pl.LightningModule):
    def __init__(self, name=""):
        super().__init__()
        torch.manual_seed(2)
        self.name = name
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch):
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def on_train_start(self):
        self.devices = {str(parameter.device) for parameter in self.parameters()}
        self.backend = dist.get_backend()

    def on_fit_end(self):
        weights = [value for parameter in self.parameters() for value in parameter.flatten().tolist()]
        (device,) = self.devices
        say(
            self.global_rank, name=self.name, weights=weights, device=device, backend=self.backend,
            step=self.trainer.global_step, world_size=self.trainer.world_size, pid=os.getpid(),
            strategy=type(self.trainer.strategy).__name__,
        )
"""
"""The module `user`, which every script in here imports: a model, and a note of each rank for the test."""

Said = dict[int, list[dict[str, Any]]]
"""Rank -> what it has said, in its order."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A script that has ended, and left nothing."""

    exit_code: int
    said: Said
    output: str


def run(
    folder: Path,
    script: str,
    *args: str,
    start: Sequence[str] = RUN,
    exit_code: int = 0,
    variables: Mapping[str, str] | None = None,
) -> Ended:
    """Runs `script` with the module `user` beside it; it has to end with `exit_code` and to leave nothing."""
    for name, text in (("user.py", USER), ("train.py", f"from user import *\n{script}")):
        (folder / name).write_text(text)
    command = [*start, "train.py", *args]
    with nothing_is_left(folder) as environment, tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**environment, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(DEADLINE_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            out.seek(0)
            output = out.read()
            print(f"{' '.join(command)} ended with exit code {process.returncode}:\n{output}")
    assert process.returncode == exit_code
    said = {
        int(path.name.partition("-")[2]): [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("said-*"))
    }
    return Ended(exit_code=process.returncode, said=said, output=output)


@contextlib.contextmanager
def nothing_is_left(folder: Path) -> Iterator[dict[str, str]]:
    """The variables for a run in here, of which no process, shared memory or temporary file may be left."""
    about_ranks = ("LOCAL_", "NODE_", "MASTER_", "SLURM_", "TORCHELASTIC_", "PL_", "PYTEST_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(about_ranks)}
    before = shared_memory()
    with tempfile.TemporaryDirectory(prefix="mission-") as scratch:  # short: names of sockets are
        try:
            torchs_own = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "OMP_NUM_THREADS": "1"}
            yield {**inherited, **torchs_own, "TMPDIR": scratch}
            deadline = time.monotonic() + LEFTOVERS_DEADLINE_S
            while left := [*processes_with(scratch), *(shared_memory() - before), *files_in(scratch)]:
                assert time.monotonic() < deadline, f"left behind: {left}"
                time.sleep(0.05)
        finally:
            for process in processes_with(scratch):
                process.kill()


def files_in(scratch: str) -> list[str]:
    """All but the empty folder that Lightning's launcher of functions leaves, for `ddp_fork` as well."""
    return [str(path) for path in Path(scratch).iterdir() if not path.is_dir() or any(path.iterdir())]


def processes_with(scratch: str) -> list[psutil.Process]:
    """The living processes of a run, whoever their parent is by now."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_alive = process.status() != psutil.STATUS_ZOMBIE
            if is_alive and process.environ().get("TMPDIR") == scratch:
                found.append(process)
    return found


def shared_memory() -> set[str]:
    """Files in shared memory that no living process has mapped: their owner is gone."""
    files = {entry.inode(): entry.path for entry in os.scandir("/dev/shm")}
    for process in Path("/proc").glob("[0-9]*/maps") if files else ():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            lines = [line.split() for line in process.read_text().splitlines() if " /dev/shm/" in line]
            for number in {int(line[4]) for line in lines}:  # the name may be another one
                files.pop(number, None)
    return set(files.values())


def only(said: Said, num_ranks: int = 2) -> list[dict[str, Any]]:
    """What each of `num_ranks` ranks has said once, in their order."""
    assert sorted(said) == list(range(num_ranks))
    assert [len(lines) for lines in said.values()] == [1] * num_ranks
    return [said[rank][0] for rank in range(num_ranks)]


# ---- GPUs


GPUS = """
for gpus in json.loads(sys.argv[1]):
    trainer = Trainer(strategy="custom_ddp", gpus=gpus, max_steps=2, **QUIET)
    trainer.fit(Model(f"gpus={gpus!r}"), batches())
"""


@pytest.mark.parametrize(
    ("spellings", "indices"), [((8, -1), range(8)), (([0, 3], "0,3"), (0, 3))], ids=["all eight", "two"]
)
def test_one_rank_trains_on_each_gpu_that_the_trainer_is_given(simulated_cuda, tmp_path, spellings, indices):
    (tmp_path / "sitecustomize.py").write_text(
        f"import simcuda, pathlib; simcuda.start(pathlib.Path({str(simulated_cuda)!r}))"
    )
    path = os.pathsep.join([str(tmp_path), str(TESTS), os.environ.get("PYTHONPATH", "")])
    variables = {"SIMULATED_CUDA_DEVICES": "8", "PYTHONPATH": path}
    said = run(tmp_path, GPUS, json.dumps(spellings), variables=variables).said
    assert sorted(said) == list(range(len(indices)))
    for rank, index in enumerate(indices):
        assert [fit["name"] for fit in said[rank]] == [f"gpus={gpus!r}" for gpus in spellings]
        for fit in said[rank]:
            assert (fit["device"], fit["backend"], fit["step"]) == (f"cuda:{index}", "nccl", 2)
            assert fit["weights"] == said[0][0]["weights"]
    assert len({said[rank][0]["pid"] for rank in said}) == len(said)


@pytest.mark.parametrize("gpus", [8, -1, [0, 3], "0,3"])
def test_where_there_are_no_gpus_the_error_says_so_and_what_to_write_for_the_cpu(monkeypatch, gpus):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError, match=r"\b0 GPUs(.|\n)*num_processes="):
        lightning_ddp.Trainer(strategy="custom_ddp", gpus=gpus)


# ---- names


EXACT = {
    "custom_ddp" + start + search
    for start in ("", "_spawn", "_fork", "_notebook")
    for search in ("", "_find_unused_parameters_true", "_find_unused_parameters_false")
} | {"custom_ddp_shrink", "custom_ddp_replace"}
"""The names that train to the weights of `ddp`, bit for bit with two ranks."""

APPROXIMATE = {
    f"custom_ddp_{how}"
    for how in (
        *("fp16", "bf16", "int8", "powersgd", "topk"),
        *("post_local_sgd", "hierarchical_sgd", "slowmo", "diloco"),
    )
}
"""Those that send less, or more rarely; their ranks agree with each other."""

VARIANTS = """
if __name__ == "__main__":
    for name in sys.argv[1:]:
        pl.Trainer(strategy=name, **CPU).fit(Model(name), batches())
"""


def test_there_is_a_name_for_each_way_of_training():
    assert available_variants().keys() >= EXACT | APPROXIMATE
    assert all(available_variants().values()), "each with its description"


def names_started_by(how: str) -> list[str]:
    """`re-run`, `forked` (notebooks too) or `spawned`."""
    kinds = {"_spawn": "spawned", "_fork": "forked", "_notebook": "forked"}
    found = {name: [kind for part, kind in kinds.items() if part in name] for name in available_variants()}
    return [name for name, kind in found.items() if (kind or ["re-run"]) == [how]]


SPAWNED = names_started_by("spawned")


@pytest.mark.parametrize(
    ("names", "reference"),
    [
        pytest.param(names_started_by("re-run"), "ddp", id="the script runs again"),
        pytest.param(names_started_by("forked"), "ddp_fork", id="forked"),
        pytest.param(SPAWNED[:1], "ddp_fork", id="spawned"),
        pytest.param(SPAWNED[1:], "ddp_fork", id="spawned, the others", marks=pytest.mark.slow),
    ],
)
def test_every_name_trains_on_two_ranks_and_the_exact_ones_to_the_weights_of_ddp(tmp_path, names, reference):
    start = PYTHON if names[0] in SPAWNED else RUN
    said = run(tmp_path, VARIANTS, *names, reference, start=start).said
    assert sorted(said) == [0, 1]
    for lines in said.values():
        assert [fit["name"] for fit in lines] == [*names, reference]
    for first, second in zip(said[0], said[1], strict=True):
        name = first["name"]
        assert first["weights"] == second["weights"], name
        assert first["pid"] != second["pid"], name
        assert (first["step"], first["world_size"], first["device"]) == (6, 2, "cpu"), name
        assert first["strategy"] == ("DDPStrategy" if name == reference else "CustomDDPStrategy"), name
        if name in EXACT:
            assert first["weights"] == said[0][-1]["weights"], name


OWN_NAME = """
register_variant("custom_ddp_silent", description="sends nothing", ddp_comm_hook="noop")
trainer = pl.Trainer(strategy="custom_ddp_silent", **CPU)
trainer.fit(Model(lightning_ddp.available_variants()["custom_ddp_silent"]), batches())
"""


def test_a_name_that_the_user_registers_stands_for_the_strategy_with_its_arguments(tmp_path):
    first, second = only(run(tmp_path, OWN_NAME).said)
    assert first["name"] == "sends nothing"
    assert first["strategy"] == second["strategy"] == "CustomDDPStrategy"
    assert first["weights"] != second["weights"], "each rank has kept its own gradients"


# ---- Hydra


HYDRA = """
import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

OmegaConf.register_new_resolver("pid", os.getpid)

@hydra.main(version_base="1.3", config_path=None)
def main(cfg):
    trainer = pl.Trainer(strategy="custom_ddp", **{**CPU, "devices": cfg.devices, "num_nodes": cfg.nodes})
    trainer.fit(Model(f"lr {cfg.lr}"), batches())
    folder = HydraConfig.get().runtime.output_dir
    say(trainer.global_rank, lr=cfg.lr, made_by=cfg.made_by, folder=folder, node=trainer.node_rank)

if __name__ == "__main__":
    main()
"""
JOB = ("+made_by=${pid:}", "hydra.run.dir=out", "hydra.sweep.dir=out")


def jobs_of(said: Said) -> list[list[dict[str, Any]]]:
    """For each job what its two ranks have said at its end, and before that at the end of their fit."""
    assert sorted(said) == [0, 1]
    fits, ends = ([lines[part::2] for lines in said.values()] for part in (0, 1))
    for first, second in zip(*fits, strict=True):
        assert first["weights"] == second["weights"]
        assert (first["world_size"], first["step"]) == (2, 6)
    return [list(job) for job in zip(*ends, strict=True)]


@pytest.mark.parametrize(
    "start", [pytest.param(PYTHON, id="python"), pytest.param(RUN, id="run", marks=pytest.mark.slow)]
)
def test_all_ranks_run_the_job_that_hydra_has_composed_once(tmp_path, start):
    said = run(tmp_path, HYDRA, "+devices=2", "+nodes=1", "+lr=0.1", *JOB, start=start).said
    ((first, second),) = jobs_of(said)
    assert first == second
    assert first["made_by"] == said[0][0]["pid"], "resolved by the process that has composed the job"
    folder = tmp_path / "out"
    assert first["folder"] == str(folder)
    assert (folder / ".hydra" / "config.yaml").exists()
    assert [path.name for path in (folder / "ranks").iterdir()] == ["1.log"]


def test_each_job_of_a_sweep_trains_on_all_ranks_with_its_own_values_and_folder(tmp_path):
    said = run(tmp_path, HYDRA, "-m", "+devices=2", "+nodes=1", "+lr=0.1,0.2", *JOB).said
    jobs = jobs_of(said)
    assert all(first == second for first, second in jobs)
    assert [(first["lr"], first["folder"]) for first, _ in jobs] == [
        (0.1, str(tmp_path / "out" / "0")),
        (0.2, str(tmp_path / "out" / "1")),
    ]


def test_on_two_nodes_both_run_the_job_of_the_first(tmp_path):
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unbound_port())}
    folders = [tmp_path / "first", tmp_path / "second"]

    def node(number: int) -> Ended:
        folders[number].mkdir()
        variables = {**address, "NODE_RANK": str(number)}
        arguments = ("+devices=1", "+nodes=2", "+lr=0.1", *JOB)
        return run(folders[number], HYDRA, *arguments, start=PYTHON, variables=variables)

    with ThreadPoolExecutor(2) as nodes:
        first, second = nodes.map(node, range(2))
    ((of_first, of_second),) = jobs_of({**first.said, **second.said})
    assert (of_first["node"], of_second["node"]) == (0, 1)
    for key in ("lr", "made_by"):
        assert of_first[key] == of_second[key], key


def unbound_port() -> int:
    """One that the kernel hands out to nobody who asks for any, nor `harness` to another test."""
    for port in range(10_000 + os.getpid() % 5_000, 20_000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


# ---- gradients


BUCKETED = """
def train(wrap):
    torch.manual_seed(3)
    model = wrap(nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    draw = torch.Generator().manual_seed(dist.get_rank())
    gradients = []
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(6, 8, generator=draw)).square().mean().backward()
        gradients.append([parameter.grad.tolist() for parameter in model.parameters()])
        optimizer.step()
    return {"gradients": gradients, "weights": [parameter.tolist() for parameter in model.parameters()]}

def main(rank):
    dist.init_process_group("gloo", init_method=f"file://{HERE}/store", rank=rank, world_size=2)
    for wrapper in (BucketedDDP, nn.parallel.DistributedDataParallel):
        say(rank, **train(lambda module: wrapper(module, bucket_cap_mb=0.0005)))
    dist.destroy_process_group()

torch.multiprocessing.start_processes(main, nprocs=2, start_method="fork")
"""


def test_the_bucketed_ddp_has_the_gradients_and_weights_of_torchs_bit_for_bit_on_two_ranks(tmp_path):
    said = run(tmp_path, BUCKETED, start=PYTHON).said
    for ours, torchs in (said[0], said[1]):
        assert ours == torchs
    assert said[0] == said[1]


HOOKS = """
class Counting:  # an object that is called as torch's hooks are
    num_buckets = 0

    def __call__(self, state, bucket):
        self.num_buckets += 1
        state.append(bucket.buffer().numel())
        work = dist.all_reduce(bucket.buffer() / dist.get_world_size(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

hook, state = Counting(), []
strategies = {
    "none": CustomDDPStrategy(),
    "by name": CustomDDPStrategy(ddp_comm_hook="bf16"),
    "with options": CustomDDPStrategy(ddp_comm_hook={"name": "topk", "ratio": 1.0}),
    "as an object": CustomDDPStrategy(ddp_comm_hook=hook, ddp_comm_state=state),
}
for name, strategy in strategies.items():
    trainer = Trainer(strategy=strategy, **CPU)
    trainer.fit(Model(name), batches())
say(trainer.global_rank, name="counted", calls=hook.num_buckets, numbers=sum(state))
"""


def test_a_communication_hook_is_given_by_name_with_options_or_as_an_object(tmp_path):
    said = run(tmp_path, HOOKS).said
    first, second = ({line["name"]: line for line in said[rank]} for rank in (0, 1))
    assert first["counted"] == second["counted"]
    assert first["counted"]["calls"] >= 6
    assert first["counted"]["numbers"] == 6 * len(first["none"]["weights"]), "each gradient once a step"
    weights = {name: fit["weights"] for name, fit in first.items() if name != "counted"}
    assert all(second[name]["weights"] == value for name, value in weights.items())
    assert weights["as an object"] == weights["none"]
    assert weights["by name"] != weights["none"]
    assert weights["by name"] == pytest.approx(weights["none"], abs=0.02), "rounded to 16 bits"
    assert weights["with options"] == pytest.approx(weights["none"], abs=1e-5), "the largest are all"


LOCAL_SGD = """
class Two(pl.LightningModule):  # both gradients are 1 on rank 0 and 3 on rank 1
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.often, self.seldom = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def training_step(self, batch, batch_idx):
        loss = (self.often + self.seldom).sum() * (1 + 2 * self.global_rank)
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers if batch_idx % 2 else optimizers[:1]:
            optimizer.step()
        self.say()

    def say(self):
        say(self.global_rank, often=-self.often.item(), seldom=-self.seldom.item())

    def on_fit_end(self):
        self.say()

    def configure_optimizers(self):
        return [torch.optim.SGD([parameter], lr=1.0) for parameter in (self.often, self.seldom)]

averaging = {"name": "post_local_sgd", "start_step": 2, "period": 2}
trainer = Trainer(strategy=CustomDDPStrategy(model_averaging=averaging), **{**CPU, "max_steps": 9})
trainer.fit(Two(), batches())
"""


def test_post_local_sgd_averages_the_parameters_of_each_of_two_optimizers_by_its_own_steps(tmp_path):
    said = run(tmp_path, LOCAL_SGD).said
    averaged = [(2, 0), (4, 2)]  # the gradients, for two steps of an optimizer; then every two its parameter
    assert said == {
        rank: [{"often": often, "seldom": seldom} for often, seldom in steps]
        for rank, steps in enumerate(
            (
                [*averaged, (5, 2), (8, 4), (9, 4), (12, 5), (12, 6)],
                [*averaged, (7, 2), (8, 4), (11, 4), (12, 7), (12, 6)],
            )
        )
    }


COLLECTIVES = """
class Collectives(pl.Callback):
    def on_train_start(self, trainer, module):
        strategy, rank = trainer.strategy, trainer.global_rank
        answers = {"sent": [strategy.broadcast({"from": rank}, src=src) for src in (0, 1)]}
        for how in ("sum", "mean"):
            answers[how] = strategy.reduce(torch.tensor([1.0, 10.0]) * (rank + 1), reduce_op=how).tolist()
        if rank == 0:
            (HERE / "waiting").touch()
        else:
            while not (HERE / "waiting").exists():
                pass
            (HERE / "arrived").touch()
        strategy.barrier("all are here")
        say(rank, **answers, has_waited=(HERE / "arrived").exists())

class Quiet(Model):
    def on_fit_end(self):
        pass

Trainer(strategy="custom_ddp", callbacks=[Collectives()], **CPU).fit(Quiet(), batches())
"""


def test_the_strategy_broadcasts_reduces_and_has_ranks_wait_for_each_other(tmp_path):
    expected = {"sent": [{"from": 0}, {"from": 1}], "sum": [3.0, 30.0], "mean": [1.5, 15.0]}
    assert only(run(tmp_path, COLLECTIVES).said) == [{**expected, "has_waited": True}] * 2


# ---- failures


FAILING = """
class Failing(Model):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 2:
            if sys.argv[1] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the picture 4711.png is broken")
        return super().training_step(batch)

class Told(pl.Callback):
    def on_exception(self, trainer, module, error):
        seen = {key: getattr(error, key, None) for key in ("rank", "step", "exception_type")}
        is_peer = isinstance(error, lightning_ddp.PeerFailure)
        say(trainer.global_rank, **seen, is_peer=is_peer, text=str(error))

Trainer(strategy="custom_ddp", callbacks=[Told()], **{**CPU, "devices": 3}).fit(Failing(), batches())
"""


@pytest.mark.parametrize(
    ("fault", "start"),
    [
        pytest.param("exception", PYTHON, id="exception, python", marks=pytest.mark.slow),
        pytest.param("exception", RUN, id="exception, run"),
        pytest.param("kill", PYTHON, id="kill, python", marks=pytest.mark.slow),
        pytest.param("kill", RUN, id="kill, run"),
    ],
)
def test_a_rank_that_fails_is_named_on_all_others_and_last_on_the_screen(tmp_path, start, fault):
    ended = run(tmp_path, FAILING, fault, start=start, exit_code=1)
    if fault == "exception":
        survivors, step, kind = (0, 1, 2), 2, "ValueError"
        words = ("rank 1", "step 2", "training_step", "ValueError: the picture 4711.png is broken")
    else:
        survivors, step, kind = (0, 2), None, None
        words = ("rank 1", "SIGKILL")
    assert sorted(ended.said) == list(survivors)
    for told in (ended.said[0], ended.said[2]):
        (failure,) = told
        assert failure.pop("is_peer")
        assert words[-1].removeprefix("ValueError: ") in failure.pop("text")
        assert failure == {"rank": 1, "step": step, "exception_type": kind}
    report = ended.output.rpartition("lightning_ddp: ")[2]
    assert [text for text in words if text not in report] == []
    assert len(report) < 1500, "it is the last thing on the screen"
