"""A failure ends the run, and a rank that is left saves the last step: plain Lightning goes on from there."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from harness import TORCHRUN, ScriptResult, exhaustive, run_script, start_script
from pytorch_lightning.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from pytorch_lightning.plugins.io import AsyncCheckpointIO
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader, Dataset
from user_script import FAULT_STEP, SCRIPT, STEPS, order, read_notes, wait_for_notes

from lightning_ddp import CustomDDPStrategy
from lightning_ddp.comm.activity import Interrupt
from lightning_ddp.communication import Communication
from lightning_ddp.elastic.emergency import EmergencyObserver, save_on_failure
from lightning_ddp.errors import ConfigurationError, PeerFailure
from lightning_ddp.supervise.interrupt_guard import InterruptGuard

pytestmark = pytest.mark.filterwarnings("ignore")


def run_user(folder: Path, launcher: Any = (), **more: Any) -> ScriptResult:
    folder.mkdir(exist_ok=True)
    return run_script(SCRIPT, order(folder, **{"trainer": {"devices": 3}, **more}), launcher=launcher)


def losses_of(folder: Path) -> dict[int, float]:
    """Of rank 0."""
    noted = json.loads(read_notes(folder)["finally-0"]["losses"])
    return {int(step): loss for step, loss in noted.items()}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("reference")
    run_user(folder, strategy="ddp").check()
    return losses_of(folder)


def check_report(result: ScriptResult, saved: Path) -> None:
    """The report is the last thing on the screen, and names the checkpoint."""
    report = result.stderr.replace(" failed first at step", "").rpartition(" failed")[2]
    assert f"The last step was saved to {saved}\n" in report, f"{result.stdout}\n{result.stderr}"


@pytest.mark.slow
def test_where_the_launching_process_is_killed_a_rank_that_is_left_reports_the_checkpoint(tmp_path) -> None:
    with start_script(SCRIPT, order(tmp_path, strategy="custom_ddp_spawn", pause="fit")) as script:
        wait_for_notes(script, tmp_path, ["ready-0", "ready-1"])
        os.kill(script.pid, signal.SIGKILL)
        result = script.wait(leftover_grace_s=60.0)
    saved = tmp_path / "emergency" / "emergency-step=4.ckpt"
    assert saved.exists()
    check_report(result, saved)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "victim", "moment", "fault", "step"),
    [
        ("popen", 0, "forward", "kill", FAULT_STEP),
        ("popen", 2, "optimizer", "exit", FAULT_STEP + 1),
        ("spawn", 2, "forward", "exception", FAULT_STEP),
        exhaustive("fork", 2, "backward", "kill", FAULT_STEP),
        ("torchrun", 0, "forward", "kill", FAULT_STEP),
    ],
)
def test_the_last_step_is_saved_and_plain_lightning_goes_on(
    start, victim, moment, fault, step, tmp_path, reference
) -> None:
    strategy = {"start_method": start} if start != "torchrun" else {}
    launcher = (*TORCHRUN[:-1], "3") if start == "torchrun" else ()
    fails = {"fault": fault, "rank": victim, "moment": moment, "gathers": True}
    result = run_user(tmp_path, launcher, strategy=strategy, **fails)
    context = f"{result.stdout}\n{result.stderr}"
    is_launcher_dead = (start, victim, fault) == ("popen", 0, "kill")
    assert result.returncode == (-signal.SIGKILL if is_launcher_dead else 1), context
    saved = tmp_path / "emergency" / f"emergency-step={step}.ckpt"
    assert result.stderr.count(f"emergency checkpoint: {saved}") == 1, context
    assert list(tmp_path.glob("**/emergency-*")) == [saved], context
    if start != "torchrun":
        check_report(result, saved)
    strategy, devices = ("auto", 1) if victim == 0 else ("ddp", 3)
    resumed = tmp_path / "resumed"
    run_user(resumed, strategy=strategy, checkpoint=str(saved), trainer={"devices": devices}).check()
    found = losses_of(resumed)
    assert list(found) == list(range(step, STEPS))
    same = found if devices == 3 else [step]  # one device sees the samples of rank 0 alone
    assert [found[k] for k in same] == pytest.approx([reference[k] for k in same])


# ---------------------------------------------------------------------- at each moment, in one process


class Told(SingleDeviceStrategy):
    """Tells of its steps as ours does."""

    observer: EmergencyObserver
    control: Any
    saved: str | None = None

    def backward(self, closure_loss: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().backward(self.observer.begin_backward(closure_loss), *args, **kwargs)
        self.observer.end_backward()
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        self.observer.end_step()
        return output

    def on_exception(self, exception: BaseException) -> None:
        self.control.is_over = True
        self.saved = self.control.save_last()


class Samples(Dataset[Any]):
    """Eight of them."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        num_batches = self.model.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if num_batches == 5 and self.model.moment == "loader":
            raise Stopped
        return torch.arange(4.0) + index


class Stopped(Exception):
    """In the place of a failure of another rank."""


class Model(pl.LightningModule):
    """Stops at a moment of batch 5, the second of a window of two; or of the one before, or an epoch."""

    def __init__(self, moment: str = "", is_manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(4, 1)
        self.moment, self.automatic_optimization = moment, not is_manual
        self.steps: list[tuple[int, int, float]] = []

    def reach(self, moment: str) -> None:
        if moment == self.moment and self.trainer.fit_loop.epoch_loop.batch_progress.total.ready >= 6:
            raise Stopped

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.reach("forward")
        if self.current_epoch == 1:
            self.reach("first of an epoch")
        loss = (self.net(batch) - 1).square().mean()
        if not self.automatic_optimization:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward((self.net(batch) - 1).square().mean())
                optimizer.step()
                self.reach("among optimizer steps")
        return loss

    def on_after_backward(self) -> None:
        self.reach("backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.reach("before the update")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.steps.append((self.global_step, batch_idx, rate))
        self.reach("batch end")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.reach("validation")

    def on_train_epoch_end(self) -> None:
        self.reach("epoch end")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if not self.automatic_optimization:
            return optimizer, torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Half(torch.optim.SGD):
    """Stops in the middle of its fifth step."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        closure()
        self.num_steps += 1
        if self.num_steps == 5:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1)
            raise Stopped
        return super().step()


def fit(
    root: Path, model: Model, window: int, strategy: Any = "auto", checkpoint: Any = None, **options: Any
) -> Any:
    folder = options.pop("folder", str(root))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        default_root_dir=root,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing="callbacks" in options,
        num_sanity_val_steps=0,
        max_epochs=2,
        accumulate_grad_batches=window,
        val_check_interval=2,
        **options,
    )
    if isinstance(strategy, Told):
        control: Any = SimpleNamespace(alarm=InterruptGuard(), interrupt=Interrupt(), is_over=False)
        strategy.control = control
        control.alarm._claim_signal = lambda: None  # nobody rings here
        control.alarm.arm()  # as in a run
        context: Any = SimpleNamespace(control=control)
        strategy.observer = EmergencyObserver(trainer, Communication(), context)
        save_on_failure(strategy.observer.ledger, folder, control)
    trainer.fit(model, DataLoader(Samples(model)), DataLoader(torch.ones(2, 4)), ckpt_path=checkpoint)
    return trainer


def stopped(root: Path, model: Model, window: int = 1, error: Any = Stopped, **options: Any) -> Told:
    """The strategy of a fit that an error ends."""
    strategy = Told(torch.device("cpu"))
    with pytest.raises(error):
        fit(root, model, window, strategy, **options)
    return strategy


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[tuple[int, int, float]]]:
    """Window -> the steps of a run that nothing happens to."""
    models = {1: Model(), 2: Model()}
    for window, model in models.items():
        fit(tmp_path_factory.mktemp("whole"), model, window)
    return {window: model.steps for window, model in models.items()}


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(
    ("moment", "batches"),
    [
        ("loader", {1: 5, 2: 4}),
        ("forward", {1: 5, 2: 4}),
        ("first of an epoch", {1: 8, 2: 8}),
        ("backward", {1: 5, 2: 4}),
        ("before the update", {1: 5, 2: 4}),
        ("batch end", {1: 6, 2: 6}),
        ("validation", {1: 6, 2: 6}),
        ("epoch end", {1: 8, 2: 8}),
    ],
)
def test_a_run_that_is_stopped_at_any_moment_goes_on_as_if_it_had_not_been(
    moment, batches, window, tmp_path, whole
) -> None:
    path = stopped(tmp_path, Model(moment), window).saved
    assert path == str(tmp_path / f"emergency-step={batches[window] // window}.ckpt")
    again = Model()
    trainer = fit(tmp_path / "again", again, window, checkpoint=path)
    assert trainer.global_step == 16 // window
    assert again.steps == whole[window][batches[window] :]
    loop = trainer.fit_loop.epoch_loop
    assert loop._batches_that_stepped == 16 // window


def test_it_lies_beside_the_checkpoints_and_replaces_none_of_another_run(tmp_path) -> None:
    (checkpoints := tmp_path / "checkpoints").mkdir()
    for name in ("emergency-step=5.ckpt", "emergency-step=5-v1.ckpt", "emergency-step=5-v2.ckpt"):
        callbacks = [OnExceptionCheckpoint(tmp_path / "other" / name), ModelCheckpoint(checkpoints)]
        saved = stopped(tmp_path, Model("forward"), folder=None, callbacks=callbacks).saved
        assert saved == str(tmp_path / "emergency" / name)
    assert list(checkpoints.glob("*mergency*")) == []


def test_it_is_there_at_once_though_other_checkpoints_are_written_in_a_thread(tmp_path) -> None:
    saved = stopped(tmp_path, Model("forward"), plugins=[AsyncCheckpointIO()]).saved
    assert list(tmp_path.glob("emergency-*")) == [Path(saved)]


def test_half_a_step_is_not_saved(tmp_path, capsys) -> None:
    stopped(tmp_path, Model("among optimizer steps", is_manual=True))
    assert "between the optimizer steps of a batch" in capsys.readouterr().err

    model = Model()
    model.configure_optimizers = lambda: Half(model.parameters(), lr=0.1)  # type: ignore[method-assign]
    strategy = stopped(tmp_path, model)
    assert strategy.control.alarm._guard.name == "DEFERRED"
    assert "an optimizer step or an average of parameters was interrupted" in capsys.readouterr().err
    assert list(tmp_path.glob("emergency-*")) == []


def test_the_failure_is_raised_when_the_step_is_whole(tmp_path) -> None:
    model = Model()

    def hear(optimizer: Any) -> None:
        if model.global_step == 4:
            model.trainer.strategy.control.interrupt.set(PeerFailure(rank=1, message="gone"))

    model.on_before_optimizer_step = hear  # type: ignore[method-assign]
    strategy = stopped(tmp_path, model, error=PeerFailure)
    assert [step for step, _, _ in model.steps] == [1, 2, 3, 4]
    assert strategy.saved == str(tmp_path / "emergency-step=5.ckpt")


def test_a_hook_that_raises_saves_nothing_and_hides_nothing(tmp_path, capsys) -> None:
    def fail(checkpoint: Any) -> None:
        raise ValueError("no space left")

    model = Model("forward")
    model.on_save_checkpoint = fail  # type: ignore[method-assign]
    stopped(tmp_path, model)
    assert "no emergency checkpoint: ValueError: no space left" in capsys.readouterr().err


def test_a_folder_or_yes_or_no() -> None:
    with pytest.raises(ConfigurationError, match="expected True, False or a folder"):
        CustomDDPStrategy(emergency_checkpoint=3)  # type: ignore[arg-type]
