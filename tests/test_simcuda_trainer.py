"""`Trainer(strategy="custom_ddp", gpus=2)` and `gpus=8` on simulated CUDA devices train as Lightning's `ddp`.

Every run starts its processes by our launcher. They fit with our strategy, and then in the same way with
Lightning's, on the same devices. A rank that dies, or never comes to a collective, is named.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import warnings
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import simcuda
import torch
import torch.distributed as dist
from harness import ScriptResult, run_script
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from test_failures import SCRIPT, check_cause, expected_exit_code
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from user_script import order, read_notes

import lightning_ddp
from lightning_ddp.comm import Group, sibling_group, sub_group, teardown
from lightning_ddp.errors import CollectiveError

# one worker, as each fit is run once and looked at by several tests
pytestmark = pytest.mark.xdist_group("simulated ranks")

NUM_EPOCHS, NUM_BATCHES, BATCH_SIZE = 2, 6, 4
DEADLINE_S = 120
NUM_STEADY = 4
"""The last batches of an epoch, in which nothing is set up any more."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    trainer: dict[str, Any] = field(default_factory=dict)
    """Arguments of both Trainers."""
    strategy: dict[str, Any] = field(default_factory=dict)
    """Arguments of our strategy."""
    is_settled: bool = True
    """Whether the host waits for the device once the model is wrapped."""
    is_made_on_device: bool = False
    """Whether the parameters come into being on the device, as with `init_module` and `configure_model`."""
    num_ranks: int = 2
    num_batches: tuple[int, int] = (NUM_BATCHES, NUM_BATCHES)
    """Of even and odd ranks."""
    overflows: bool = False
    """Whether the loss of rank 1 is infinite in the third batch."""
    has_reference: bool = True
    """Whether Lightning's `ddp` can do the same."""
    is_resumed: bool = False
    """Whether it is fitted once more, from the checkpoint of the first epoch."""


AVERAGING = {"name": "post_local_sgd", "start_step": 2, "period": 2}
FITS = {
    "plain": Fit(is_resumed=True),
    "accumulated": Fit(trainer={"accumulate_grad_batches": 2}),
    "clipped": Fit(trainer={"gradient_clip_val": 0.05}),
    "bf16-mixed": Fit(trainer={"precision": "bf16-mixed"}),
    "16-mixed": Fit(trainer={"precision": "16-mixed"}, overflows=True, is_resumed=True),
    "16-mixed, 8 ranks": Fit(trainer={"precision": "16-mixed"}, overflows=True, num_ranks=8),
    "sync_batchnorm": Fit(trainer={"sync_batchnorm": True}),
    "not_settled": Fit(is_settled=False),
    "made_on_device": Fit(is_made_on_device=True, is_settled=False),
    "powersgd, 16-mixed": Fit(
        trainer={"precision": "16-mixed"},
        strategy={"ddp_comm_hook": {"name": "powersgd", "start_step": 1}},
        overflows=True,
        has_reference=False,
        is_resumed=True,
    ),
    "post_local_sgd": Fit(strategy={"model_averaging": AVERAGING}, has_reference=False, is_resumed=True),
    "uneven_inputs": Fit(
        trainer={"use_distributed_sampler": False},
        strategy={"uneven_inputs": "join"},
        num_batches=(NUM_BATCHES, NUM_BATCHES - 2),
        has_reference=False,
    ),
}


NAMES = [pytest.param(name, marks=[pytest.mark.slow] * (fit.num_ranks > 2)) for name, fit in FITS.items()]


# ---------------------------------------------------------------- the script


class Model(pl.LightningModule):
    """Two layers with BatchNorm between them, trained with momentum."""

    def __init__(self, fit: Fit) -> None:
        super().__init__()
        self.fit_options = fit
        self.layers = nn.Sequential()
        if not fit.is_made_on_device:
            self.layers = made_layers()
        self.validated: list[float] = []

    def configure_model(self) -> None:
        if not len(self.layers):
            with self.trainer.strategy.root_device:
                self.layers = made_layers()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = mse_loss(self.layers(batch[0]), batch[1])
        is_third = (self.trainer.current_epoch, batch_idx) == (0, 2)
        overflows = self.fit_options.overflows and self.global_rank == 1 and is_third
        return loss * float("inf") if overflows else loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", mse_loss(self.layers(batch[0]), batch[1]), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.validated.append(self.trainer.callback_metrics["val_loss"].item())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def made_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 3))


class Checker(Callback):
    """Notes what the checker of the device reports, in the whole fit and from batch to batch."""

    def __init__(self, *, is_settled: bool) -> None:
        self.is_settled = is_settled
        self.start = self.end_of_batch = len(simcuda.report)
        self.batches: list[list[simcuda.Report]] = []
        self.num_hashed = 0
        """Steps after which the replica check has hashed a part of the state."""

    def on_train_end(self, trainer: pl.Trainer, *args: Any) -> None:
        check = getattr(trainer.strategy, "_replica_check", None)
        self.num_hashed = check._hasher.num_hashed if check is not None else 0

    def on_fit_start(self, *args: Any) -> None:
        if self.is_settled:
            torch.cuda.synchronize()

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches.append(simcuda.report[self.end_of_batch :])
        self.end_of_batch = len(simcuda.report)

    def found(self) -> dict[str, Counter[str]]:
        steady = [report for batch in self.batches[-NUM_STEADY:] for report in batch]
        return simcuda.counted(simcuda.report[self.start :], steady)


def loader(num_batches: int, shuffle: bool) -> DataLoader[Any]:
    inputs = torch.randn(num_batches * BATCH_SIZE, 6, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs[:, :3] / 4), BATCH_SIZE, shuffle=shuffle)


def fitted(fit: Fit, strategy: str, folder: Path, resume: Path | None = None) -> dict[str, Any]:
    """Fits once; what came out of it."""
    checkpoint = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    checker = Checker(is_settled=fit.is_settled)
    arguments = {
        "max_epochs": NUM_EPOCHS,
        "callbacks": [checkpoint, checker],
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        **fit.trainer,
    }
    if strategy == "ddp":
        trainer = pl.Trainer(strategy="ddp", accelerator="gpu", devices=fit.num_ranks, **arguments)
    else:
        ours = lightning_ddp.CustomDDPStrategy(**fit.strategy) if fit.strategy else "custom_ddp"
        trainer = lightning_ddp.Trainer(strategy=ours, gpus=fit.num_ranks, **arguments)
    pl.seed_everything(7, verbose=False)
    model = Model(fit)
    if resume is not None:
        nn.init.zeros_(model.layers[0].weight)  # must come from the checkpoint
    is_uneven = len(set(fit.num_batches)) > 1
    # an even number of batches is dealt out by Lightning
    dealt_out = fit.num_ranks * fit.num_batches[0]
    num_batches = fit.num_batches[trainer.global_rank] if is_uneven else dealt_out
    trainer.fit(model, loader(num_batches, not is_uneven), loader(4, False), ckpt_path=resume)
    return {
        "device": str(trainer.strategy.root_device),
        "wrapper": type(trainer.strategy).__name__,
        "global_step": trainer.global_step,
        "state": {name: value.detach().cpu() for name, value in model.state_dict().items()},
        "validated": model.validated,
        "scaler": trainer.precision_plugin.state_dict(),
        "num_hashed": checker.num_hashed,
        **checker.found(),
    }


def main(name: str, folder: Path) -> None:
    warnings.filterwarnings("ignore")
    fit = FITS[name]
    answer = {"ours": fitted(fit, "custom_ddp", folder / "ours")}
    if fit.is_resumed:
        answer["resumed"] = fitted(fit, "custom_ddp", folder / "resumed", folder / "ours" / "epoch=0.ckpt")
    if fit.has_reference:
        answer["ddp"] = fitted(fit, "ddp", folder / "ddp")
    torch.save(answer, folder / f"result-{os.environ.get('LOCAL_RANK', '0')}")


# ---------------------------------------------------------------- the promises


@pytest.fixture(scope="module")
def answers(simulated_cuda, nccl, tmp_path_factory):
    """What the ranks answered to a name of `FITS`; each is run once."""

    @functools.cache
    def run(name: str) -> list[dict[str, dict[str, Any]]]:
        folder = tmp_path_factory.mktemp("fit")
        num_ranks = FITS[name].num_ranks
        env = {"SIMULATED_CUDA": str(simulated_cuda), "SIMULATED_CUDA_DEVICES": str(num_ranks)}
        run_script(Path(__file__), [name, str(folder)], env, timeout_s=DEADLINE_S).check()
        return [torch.load(folder / f"result-{rank}", weights_only=False) for rank in range(num_ranks)]

    return run


def assert_same(ours: dict[str, Any], reference: dict[str, Any]) -> None:
    for key in ("global_step", "scaler"):
        assert ours[key] == reference[key]
    assert ours["state"].keys() == reference["state"].keys()
    for name, value in reference["state"].items():
        torch.testing.assert_close(ours["state"][name], value, rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_no_two_streams_conflict_and_no_memory_is_freed_that_a_stream_may_still_use(name, answers):
    for answer in answers(name):
        assert answer["ours"]["race"] == answer["ours"]["free"] == {}


@pytest.mark.parametrize("name", NAMES)
def test_state_is_hashed_on_the_device_after_each_step_with_equal_replicas(name, answers):
    for answer in answers(name):
        num_hashed, num_steps = answer["ours"]["num_hashed"], answer["ours"]["global_step"]
        if name == "post_local_sgd":
            num_steps = AVERAGING["start_step"] + (num_steps - AVERAGING["start_step"]) // AVERAGING["period"]
        assert num_hashed == num_steps


GRADIENT_SCALER = (1, "torch/amp/grad_scaler.py")  # its step asks whether the gradients are finite
ALLOWED_WAITS = {
    "16-mixed": GRADIENT_SCALER,
    "16-mixed, 8 ranks": GRADIENT_SCALER,
    "powersgd, 16-mixed": GRADIENT_SCALER,  # the hook itself asks beside the training
    # torch's layer looks for ranks without a batch
    "sync_batchnorm": (3, "torch/nn/modules/_functions.py"),
    # asks the other ranks whether they have a batch
    "uneven_inputs": (1, "lightning_ddp/ddp/lockstep.py"),
}
"""How often the host has to wait between two batches, and the file in which it does."""


@pytest.mark.parametrize("name", NAMES)
def test_no_steady_step_makes_the_host_wait(name, answers):
    number, file = ALLOWED_WAITS.get(name, (0, ""))
    for answer in answers(name):
        waits = answer["ours"]["sync"]
        assert [line for line in waits if not line.endswith(file)] == []
        assert bool(number) <= waits.total() <= NUM_STEADY * number, waits
        if "ddp" in answer:
            assert waits.total() <= answer["ddp"]["sync"].total()


@pytest.mark.parametrize("name", [name for name in NAMES if FITS[name.values[0]].has_reference])
def test_what_is_trained_and_validated_equals_lightnings_ddp(name, answers):
    for rank, answer in enumerate(answers(name)):
        assert answer["ours"]["device"] == answer["ddp"]["device"] == f"cuda:{rank}"
        assert_same(answer["ours"], answer["ddp"])
        assert answer["ours"]["validated"] == answer["ddp"]["validated"]
        assert len(answer["ours"]["validated"]) == NUM_EPOCHS


@pytest.mark.parametrize("name", [name for name in NAMES if name.values[0].startswith("16-mixed")])
def test_an_overflow_on_one_rank_halves_the_loss_scale_of_all(name, answers):
    assert {answer["ours"]["scaler"]["scale"] for answer in answers(name)} == {2.0**15}


@pytest.mark.slow
def test_processes_that_the_launcher_starts_by_their_command_line_train_the_same(
    simulated_cuda, tmp_path, answers
):
    variables = {"SIMULATED_CUDA": str(simulated_cuda)}
    run_script(Path(__file__), ["plain", str(tmp_path)], variables, fresh=True).check()
    for rank, answer in enumerate(answers("plain")):
        assert_same(torch.load(tmp_path / f"result-{rank}", weights_only=False)["ours"], answer["ours"])


@pytest.mark.parametrize("name", [name for name in NAMES if FITS[name.values[0]].is_resumed])
def test_a_resumed_fit_equals_the_undisturbed_one(name, answers):
    for answer in answers(name):
        assert_same(answer["resumed"], answer["ours"])
        assert answer["resumed"]["validated"] == answer["ours"]["validated"][1:]


# ---------------------------------------------------------------- failures


def run_user(devices: Path, folder: Path, **more: Any) -> ScriptResult:
    arguments = order(folder, trainer={"accelerator": "gpu", "devices": 2}, **more)
    return run_script(SCRIPT, arguments, {"SIMULATED_CUDA": str(devices)}, timeout_s=DEADLINE_S)


@pytest.mark.parametrize(("fault", "victim"), [("exception", 0), ("kill", 1)])
def test_a_rank_that_dies_is_named_and_nothing_hangs(simulated_cuda, tmp_path, fault, victim):
    moment = "backward"
    result = run_user(simulated_cuda, tmp_path, fault=fault, rank=victim, moment=moment)
    context = f"{result.stdout}\n{result.stderr}"
    assert result.returncode == expected_exit_code(fault, victim, moment), context
    seen = read_notes(tmp_path)[f"on_exception-{1 - victim}"]
    assert (seen["kind"], seen["rank"]) == ("PeerFailure", victim), context
    check_cause(seen, fault, victim, moment, is_launcher=victim == 0)


WAITS_ON_THE_HOST = {"name": "powersgd", "start_step": 2, "rank": 1, "min_compression": 1}


@pytest.mark.parametrize("hook", [None, WAITS_ON_THE_HOST], ids=["device", "host"])
def test_a_rank_that_is_late_is_named_when_the_deadline_passes(simulated_cuda, tmp_path, hook):
    strategy = {"timeout": 3.0, "failure_grace_s": 20.0, "ddp_comm_hook": hook}
    result = run_user(simulated_cuda, tmp_path, strategy=strategy, fault="hang", rank=1)
    assert result.returncode == 1, result.stderr
    _, _, report = result.stderr.rpartition("lightning_ddp: ")
    assert "rank 1 waits for no collective at step 2 in training_step (user_script.py:" in report
    if hook is None:
        first, second = (read_notes(tmp_path)[f"on_exception-{rank}"] for rank in range(2))
        assert (first["kind"], second["kind"]) == ("CollectiveTimeoutError", "PeerFailure")
        late = r"rank 0: averaging of gradients, backward 2 has not ended .* past its deadline of 2 s; "
        assert re.search(f"{late}missing: rank 1\n", result.stderr), result.stderr
        assert "rank 0 waits in averaging of gradients, backward 2 at step 2" in second["message"]
        assert "missing: rank 1" in second["message"]


class Lacking(pl.LightningModule):
    """Has no gradient for a layer on rank 1, in the third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.other = nn.Linear(8, 4), nn.Linear(8, 4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.used(batch).square().mean()
        lacks = (self.global_rank, batch_idx) == (1, 3)
        return loss if lacks else loss + self.other(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit_lacking(rank: int, world_size: int) -> None:
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    strategy = lightning_ddp.CustomDDPStrategy(bucket_cap_mb=0.0001)
    trainer = pl.Trainer(strategy=strategy, accelerator="cuda", devices=world_size, max_epochs=1, **quiet)
    trainer.fit(Lacking(), DataLoader(torch.randn(64, 8), batch_size=4))


def test_a_gradient_that_one_rank_lacks_is_named_with_what_all_ranks_lack(simulated_ranks):
    first, second = simulated_ranks.run_outcomes(fit_lacking, 2, process_group=False, timeout_s=DEADLINE_S)
    assert second.exception_type == "MissingGradientError"
    assert first.exception_type in ("MissingGradientError", "PeerFailure"), "news of rank 1 may be sooner"
    for outcome in (first, second):
        assert "  rank 0: none missing\n  rank 1: other.weight, other.bias\n" in outcome.message


# ---------------------------------------------------------------- groups


def timeouts(rank: int, world_size: int) -> list[timedelta]:
    device = torch.device("cuda", rank)
    world = Group(dist.group.WORLD)
    groups = [world, sibling_group(world, device), sub_group(world, [0, 1], device)]
    return [group.process_group._get_backend(device).options._timeout for group in groups]


def test_groups_that_are_made_of_another_one_have_its_timeout(simulated_ranks):
    assert simulated_ranks.run(timeouts, 2, timeout_s=77.0) == [[timedelta(seconds=154)] * 3] * 2


def leave_with_views(rank: int, world_size: int) -> bool:
    group = Group(dist.group.WORLD)
    kept = torch.ones(4, device=torch.device("cuda", rank))
    group.all_reduce(kept).wait()
    views = kept.chunk(2)  # as gradients are views of their bucket
    return teardown.are_let_go() and len(views) == 2


def test_no_process_waits_at_its_exit_for_what_nccl_has_sent(simulated_ranks):
    assert simulated_ranks.run(leave_with_views, 2) == [True, True]


def wait_in_vain(rank: int, world_size: int) -> str:
    device = torch.device("cuda", rank)
    group = Group(dist.group.WORLD)
    group.all_reduce(torch.ones(3, device=device)).wait()
    group.wait_device(device)
    simcuda.break_groups("NCCL error: remote process exited")
    with pytest.raises(
        CollectiveError, match="ended without its results: NCCL's watchdog reports COMM_ERROR"
    ):
        group.wait_device(device)
    return "raised"


def test_a_wait_of_the_host_does_not_take_what_has_failed_for_done(simulated_ranks):
    assert simulated_ranks.run(wait_in_vain, 2) == ["raised"] * 2


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
