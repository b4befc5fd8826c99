"""A user's program, which trains, fails, pauses and takes notes as the JSON object in its argument says."""

from __future__ import annotations

import ctypes
import itertools
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_ddp

if TYPE_CHECKING:
    from harness import RunningScript

warnings.filterwarnings("ignore")
SCRIPT = Path(__file__)
STEPS = 12
ALL = -2
"""As a rank that something happens to: all ranks."""
FAULT_STEP, PAUSE_STEP = 2, 4
SIGNALS = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a test wants."""

    folder: Path
    """For notes and checkpoints."""
    strategy: str | dict[str, Any] = field(default_factory=dict)
    """A name, or the arguments of `CustomDDPStrategy`; times are in seconds."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """More arguments of the Trainer."""
    fault: str = ""
    """What happens to `rank`, at `moment`."""
    rank: int = -1
    """-1 for all ranks at once."""
    moment: str = "forward"
    gathers: bool = False
    """Whether `rank` waits there until all others have come to that moment, and so taken the same steps."""
    stuck: str = ""
    """What keeps `stuck_rank` from ending when the fault comes, which waits for that."""
    stuck_rank: int = -1
    quits: int = -1
    """The rank whose `on_exception` ends its process."""
    catches: bool = False
    """Whether it expects a `ValueError` around `fit`, and notes it."""
    fits_again: bool = False
    """Whether it fits once more then, without the fault, in the folder `again`."""
    leaves: int | None = None
    """The rank that raises what it has caught instead."""
    pause: str = ""
    """Where every rank notes that it is ready, and waits for a file `go`."""
    step_s: float = 0.0
    """How long each step takes at least, on `rank` or, without one, on all."""
    checkpoint: str | None = None
    """Where it goes on."""
    monitors: bool = False
    """Whether communication is measured."""
    is_in_background: bool = False
    """Whether it ignores SIGINT when it begins, as what a shell script starts with `&` does."""
    validates: bool = False
    """Whether it validates when it has been fitted."""


class Untellable(Exception):
    """Whose text nobody can read."""

    def __str__(self) -> str:
        raise KeyError("template")


RAISED: dict[str, Callable[[], Exception]] = {
    **dict.fromkeys(("exception", "late"), lambda: ValueError("expected 3 channels, got 1")),
    "long": lambda: ValueError("漢" * 7_000 + "\U0001f600" * 7_000),
    "untellable": Untellable,
    "memory": lambda: MemoryError("cannot allocate 80 GiB"),
}
"""Fault -> what the victim raises."""


def order(folder: Path, **more: Any) -> list[str]:
    """The argument of the script; `more` are fields of `Order`."""
    return [json.dumps({"folder": str(folder), **more})]


def note(folder: Path, rank: int, event: str, /, **more: Any) -> None:
    """Leaves a file `<event>-<rank>` that says when it happened."""
    part = folder / f"{event}-{rank}.part"
    part.write_text(json.dumps({"time": time.time(), "pid": os.getpid(), **more}))
    part.rename(folder / f"{event}-{rank}")


def read_notes(folder: Path) -> dict[str, dict[str, Any]]:
    """`<event>-<rank>` -> what was noted."""
    return {path.name: json.loads(path.read_text()) for path in folder.glob("*-[0-9]")}


def wait_for_notes(run: RunningScript, folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """All notes, once there are those of these names."""
    run.wait_until(lambda: set(names) <= read_notes(folder).keys())
    return read_notes(folder)


class Stream:
    """A loader whose position a checkpoint keeps: a resumed run goes on with the next batch."""

    def __init__(self, rank: int) -> None:
        self.rank, self.position = rank, 0

    def __iter__(self) -> Any:
        while self.position < STEPS:
            self.position += 1
            yield torch.full((2, 4), float(self.position * 3 + self.rank) / STEPS)
        self.position = 0

    def __len__(self) -> int:
        return STEPS

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Items(Dataset[Tensor]):
    """Items that a loader's own process fetches."""

    def __init__(self, on_item: Any) -> None:
        self.on_item, self.num_items = on_item, 0

    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, index: int) -> Tensor:
        self.num_items += 1
        if self.num_items == 2 * FAULT_STEP + 1:
            self.on_item("loader")
        return torch.ones(4)


class Model(pl.LightningModule):
    def __init__(self, order: Order) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)])
        self.order = order
        self.losses: dict[int, float] = {}
        self.has_paused = False

    def configure_callbacks(self) -> Any:
        """Called before the ranks meet, or know which ones they are."""
        if self.order.fault.startswith("early") and self.order.rank in (ALL, int(os.environ["LOCAL_RANK"])):
            if self.order.fault == "early exception":
                self.fail("exception")
            os._exit(0)
        return []

    def reach(self, moment: str) -> None:
        """Lets happen what is to happen here."""
        is_victim = self.order.rank in (-1, self.global_rank)
        if moment == self.order.moment and self.order.gathers:
            note(self.order.folder, self.global_rank, "reached")
            while is_victim and len(list(self.order.folder.glob("reached-[0-9]"))) < self.trainer.world_size:
                threading.Event().wait(0.01)
        if moment == self.order.moment and is_victim and self.order.fault:
            while self.order.stuck and not (self.order.folder / f"stuck-{self.order.stuck_rank}").exists():
                threading.Event().wait(0.01)
            note(self.order.folder, self.global_rank, "fired")
            while self.order.rank == -1 and len(list(self.order.folder.glob("fired-[0-9]"))) < 2:
                threading.Event().wait(0.01)
            self.fail(self.order.fault)
        elif moment == "forward" and self.order.fault == "shape":
            self.trainer.strategy.reduce(torch.ones(2))

    def stick(self, how: str) -> None:
        """Never ends."""
        if how == "thread":
            threading.Thread(target=threading.Event().wait, args=(600,)).start()
        note(self.order.folder, self.global_rank, "stuck")
        if how == "lock":
            mutex = ctypes.create_string_buffer(64)
            while True:  # the second time it waits for itself, and for ever, with the interpreter's lock
                ctypes.PyDLL(None).pthread_mutex_lock(mutex)
        if how == "sum":
            sum(itertools.repeat(0))
        if how == "expression":
            re.match(r"(a+)+$", "a" * 60 + "b")

    def fail(self, fault: str) -> None:
        if fault == "late":
            threading.Event().wait(2.0 * self.global_rank)
        if fault in RAISED:
            raise RAISED[fault]()
        if fault == "exit":
            os._exit(3)
        if fault == "told":
            self.trainer.strategy.reconciliate_processes("Traceback of mine\nthe disk is full")
        elif fault == "log":
            self.log("mine", torch.ones(()), sync_dist=True)
        elif fault == "barrier":
            self.trainer.strategy.barrier("mine alone")
        elif fault == "shape":  # while the other rank reduces something else
            self.trainer.strategy.reduce(torch.ones(3))
        elif fault.startswith("fork"):
            child = os.fork()
            if child == 0 and fault == "fork and leave":
                sys.exit(5)
            if child == 0:
                raise ValueError("in a process that user code has forked")
            _, status = os.waitpid(child, 0)
            note(self.order.folder, self.global_rank, "forked", code=os.waitstatus_to_exitcode(status))
        elif fault == "process and leave":
            process: Any = multiprocessing.get_context("fork").Process(target=sys.exit, args=(5,))
            process.start()
            process.join()
            note(self.order.folder, self.global_rank, "forked", code=process.exitcode)
        elif fault == "hang":
            threading.Event().wait(60)
        else:
            os.kill(os.getpid(), SIGNALS[fault])
            threading.Event().wait(0.5)  # a signal to oneself is there before this; SIGSTOP stops it here

    def pause(self, moment: str) -> None:
        if moment == self.order.pause and not self.has_paused:
            self.has_paused = True
            ours = {name: text for name, text in os.environ.items() if name.startswith("LIGHTNING_DDP_")}
            note(self.order.folder, self.global_rank, "ready", **ours)
            while not (self.order.folder / "go").exists():
                threading.Event().wait(0.01)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        step = self.trainer.global_step
        if self.order.step_s and self.order.rank in (-1, self.global_rank):
            threading.Event().wait(self.order.step_s)
        if step == FAULT_STEP and self.global_rank == self.order.stuck_rank:
            self.stick(self.order.stuck)
        if step == FAULT_STEP:
            self.reach("forward")
        if step == PAUSE_STEP:
            self.pause("fit")
        hidden = self.layers[:3](batch)
        if step == FAULT_STEP and self.order.moment == "backward":
            hidden.register_hook(lambda grad: self.reach("backward"))
        loss = (self.layers[3:](hidden) - 1).square().mean()
        self.losses[step] = float(loss)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.global_step == FAULT_STEP:
            self.reach("optimizer")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if self.trainer.sanity_checking:
            self.reach("sanity")
        else:
            self.reach("validation")
            self.pause("validation")
        self.log("val", self.layers(batch).mean(), sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        is_attached = self._trainer is not None  # not so in a process that has only started the ranks
        if is_attached and self.trainer.state.status != "interrupted":
            self.reach("checkpoint")

    def teardown(self, stage: str) -> None:
        if self.order.moment == "ending":  # the others have nothing left to do in `fit`
            note(self.order.folder, self.global_rank, "torn")
            others = [f"torn-{rank}" for rank in range(self.trainer.world_size)]
            while (
                self.global_rank == self.order.rank
                and not set(others) <= read_notes(self.order.folder).keys()
            ):
                threading.Event().wait(0.01)
            threading.Event().wait(0.5 if self.global_rank == self.order.rank else 0)
            self.reach("ending")
        self.reach("teardown")
        if self.order.moment == "teardown":
            threading.Event().wait(60)  # the others are still in their own teardown

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    def train_dataloader(self) -> Any:
        if self.order.moment == "loader":
            return DataLoader(Items(self.reach), batch_size=2, num_workers=1)
        return Stream(self.global_rank)

    def val_dataloader(self) -> Any:
        return DataLoader(torch.ones(8, 4), batch_size=2)


class Notes(Logger):
    """Notes the last value of each metric (how late a rank was is known some steps later), and the end."""

    name, version = "notes", 0

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.metrics: dict[str, float] = {}

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.metrics |= metrics
        note(self.folder, rank_zero_only.rank, "metrics", **self.metrics)

    def finalize(self, status: str) -> None:
        note(self.folder, rank_zero_only.rank, "finalize", status=status)


class Witness(pl.Callback):
    """Notes the end of the training, or the exception; then hangs, where there is a file for it, or quits."""

    def __init__(self, folder: Path, quits: int) -> None:
        self.folder, self.quits = folder, quits

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        note(self.folder, trainer.global_rank, "trained", step=trainer.global_step)

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        names = ("rank", "message", "exception_type", "exit_code")
        fields = {name: getattr(exception, name, None) for name in names}
        note(self.folder, trainer.global_rank, "on_exception", kind=type(exception).__name__, **fields)
        if trainer.global_rank == self.quits:
            os._exit(7)
        if (self.folder / "hang").exists():
            note(self.folder, trainer.global_rank, "hanging")
            threading.Event().wait(600)
        if (self.folder / f"hold{trainer.global_rank}").exists():
            module.stick("sum")


def strategy_of(order: Order) -> Any:
    if isinstance(order.strategy, str):
        return order.strategy
    times = ("timeout", "stall_timeout")
    arguments = {
        name: timedelta(seconds=value) if name in times else value for name, value in order.strategy.items()
    }
    return lightning_ddp.CustomDDPStrategy(**arguments)


def main(order: Order) -> None:
    folder = order.folder
    rank = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_PROCID", 0)))
    callbacks = [Witness(folder, order.quits), OnExceptionCheckpoint(folder, "stopped")]
    if order.monitors:
        callbacks.append(
            lightning_ddp.callbacks.CommunicationMonitor(
                every_n_steps=2, straggler_patience=4, timeline=folder / "timeline"
            )
        )
    options = {"devices": 2, "max_epochs": 1, "val_check_interval": 4, "num_sanity_val_steps": 1}
    options |= {"log_every_n_steps": 1, "enable_progress_bar": False, "enable_model_summary": False}
    options["accelerator"] = "cpu"
    options |= order.trainer
    trainer = pl.Trainer(
        strategy=strategy_of(order),
        logger=Notes(folder),
        use_distributed_sampler=False,
        default_root_dir=folder,
        callbacks=[*callbacks, ModelCheckpoint(folder / "checkpoints")],
        **options,
    )
    if order.is_in_background and "LOCAL_RANK" not in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if order.pause:  # a handler of the user's own is still called
        signal.signal(signal.SIGTERM, lambda number, frame: note(folder, rank, "sigterm"))
    model = Model(order)
    note(folder, rank, "begun")
    before = set(os.environ)
    try:
        trainer.fit(model, ckpt_path=order.checkpoint)
        note(folder, trainer.global_rank, "fitted", variables=sorted(set(os.environ) - before))
        if order.validates:
            trainer.validate(model, verbose=False)
    except ValueError as error:
        if not order.catches:
            raise
        note(folder, rank, "caught", kind=type(error).__name__, message=str(error))
        if rank == order.leaves:
            raise
        if order.fits_again:
            again = folder / "again"  # where Lightning finds no checkpoint of the first time
            again.mkdir(exist_ok=True)
            main(replace(order, folder=again, fault="", fits_again=False))
    finally:
        note(
            folder,
            trainer.global_rank,
            "finally",
            step=trainer.global_step,
            losses=json.dumps(model.losses),
            weights=[p.sum().item() for p in model.parameters()],
            port=os.environ.get("MASTER_PORT"),
            arguments=sys.argv[2:],
        )


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    main(Order(**{**given, "folder": Path(given["folder"])}))
