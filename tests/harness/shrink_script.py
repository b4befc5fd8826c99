"""A user's program that trains with `on_failure="shrink"`, loses ranks, and keeps a ledger of what it did."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
import warnings
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, Dataset, DistributedSampler, SequentialSampler

import lightning_ddp
import lightning_ddp.callbacks
from lightning_ddp._lightning import loop_counters
from lightning_ddp.elastic import regroup
from lightning_ddp.launch.job_context import job_context
from lightning_ddp.launch.rendezvous import join_default_group

warnings.filterwarnings("ignore")
ORDER: dict[str, Any] = json.loads(sys.argv[1])
FOLDER = Path(ORDER["folder"])
NOTED: set[str] = set()
ON_DEVICE = "SIMULATED_CUDA" in os.environ
if ON_DEVICE:
    import simcuda
NUM_SAMPLES = ORDER.get("samples", 96)
IS_NEW = "LIGHTNING_DDP_JOIN" in os.environ
"""Whether this process comes in the place of a lost one."""


def place() -> int:
    """The first rank of this process; -1 for one that only waits for its ranks."""
    if "LOCAL_RANK" not in os.environ and "start_method" in ORDER.get("strategy", {}):
        return -1
    node_rank, local_rank = (int(os.environ.get(name, "0")) for name in ("NODE_RANK", "LOCAL_RANK"))
    return node_rank * int(ORDER.get("devices", 4)) + local_rank


def die_if(moment: str, step: int) -> None:
    """The fault of this place, if this is its moment."""
    for fault in ORDER.get("faults", []):
        if (fault["place"], fault["moment"]) == (place(), moment) and fault["step"] in (step, None):
            if fault.get("generation", generation()) != generation() or fault.get("new", IS_NEW) != IS_NEW:
                continue
            if fault.get("how") == "leaves":
                ask_to_leave(fault.get("signal", "SIGTERM"))
                return
            if "after" in fault:  # which is a step ahead then
                wait_for("commits", fault["after"], step)
            note(event="dies")
            if fault.get("how") == "raise":
                raise ValueError("a picture is broken")
            if fault.get("how") == "exit":
                os._exit(fault.get("code", 0))
            if fault.get("how") == "preempted":
                os.kill(os.getppid(), signal.SIGTERM)  # rank 0
            os.kill(os.getpid(), signal.SIGSTOP if fault.get("how") == "stop" else signal.SIGKILL)


def ask_to_leave(name: str) -> None:
    """What a scheduler does, once: the process that it signals leaves at the next step boundary."""
    if "is asked" not in NOTED:
        note(event="is asked", generation=generation())
        os.kill(os.getpid(), getattr(signal, name))


def generation() -> int:
    """How often the run has gone on without ranks that it lost."""
    calls = job_context().control.calls
    return calls.state.generation if calls is not None else 0


def die_as_new(moment: str) -> None:
    """The fault of the first processes that come in the place of a lost one and get as far as this."""
    number = ORDER.get("new_faults", []).count(moment) if IS_NEW else 0
    if any(is_first(f"died-{moment}-{turn}") for turn in range(number)):
        note(event="dies", moment=moment)
        os.kill(os.getpid(), signal.SIGKILL)


def is_first(name: str) -> bool:
    """Whether no process has been here before."""
    try:
        os.close(os.open(FOLDER / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def wait_for(
    event: str, place: int | str = "*", step: int | None = None, within_s: float | None = None
) -> None:
    """Until a process, or the one of a place, has noted this, in a step; `within_s` if it need not."""

    def is_there(path: Path) -> bool:
        entries = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return any(entry["event"] == event and step in (None, entry.get("step")) for entry in entries)

    deadline = time.monotonic() + (within_s or 120)
    while not any(map(is_there, FOLDER.glob(f"ledger-{place}"))):
        if time.monotonic() >= deadline:
            assert within_s is not None
            return
        time.sleep(0.02)


def follow_end() -> None:
    """Notes with what this process leaves the others, if it comes too late."""
    end = os._exit

    def end_noted(code: int) -> Any:
        note(event="leaves", code=code)
        end(code)

    os._exit = end_noted


def chaos_is_over() -> bool:
    """Whether no more faults come, which began with the run."""
    begun = FOLDER / "begun"
    begun.touch(exist_ok=True)
    return time.time() > float(begun.read_text() or time.time()) + ORDER["chaos"]["seconds"]


def takes_steps(place: int) -> bool:
    """Whether the process there has taken a step since another one has died there."""
    _, died, since = (FOLDER / f"ledger-{place}").read_text().rpartition('"event": "dies"')
    return '"event": "commits"' in since and (not died or '"event": "starts"' in since)


class Chaos(threading.Thread):
    """After a random time, a random fault of this process."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        begun = FOLDER / "begun"
        if not IS_NEW:
            begun.write_text(str(time.time()))
        number = (FOLDER / f"ledger-{place()}").read_text().count('"starts"')
        self._random = random.Random(f"{ORDER['chaos']['seed']}/{place()}/{number}")
        self.raises = False

    def run(self) -> None:
        time.sleep(self._random.expovariate(1 / (ORDER["chaos"]["mean_s"] * ORDER["devices"])))
        kind = self._random.choice(["kill", "kill", "stop", "exit", "raise"])
        with (FOLDER / "begun").open() as turns:
            fcntl.flock(turns, fcntl.LOCK_EX)  # with all members a run has lost all that it has
            while not chaos_is_over() and not any(map(takes_steps, set(range(ORDER["devices"])) - {place()})):
                time.sleep(0.2)
            if chaos_is_over():
                return
            note(event="dies", kind=kind)
        if kind == "raise" and place() != 0:
            self.raises = True
        elif kind == "exit":
            os._exit(self._random.choice([0, 1, 77]))
        else:
            os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)


CHAOS: list[Chaos] = []


class Deadly:
    """Kills the process that sends it to others."""

    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def note(**entry: Any) -> None:
    """A line in this place's ledger."""
    NOTED.add(entry["event"])
    entry = {"place": place(), "time": time.time(), **entry}
    descriptor = os.open(FOLDER / f"ledger-{entry['place']}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, (json.dumps(entry) + "\n").encode())
    os.close(descriptor)


def of_device(tensor: Tensor) -> Tensor:
    """On the CPU, without a word of it to the checker of simulated devices."""
    with simcuda.unchecked() if tensor.is_cuda else nullcontext():
        return tensor.cpu()


def hash_of(tensors: Any) -> str:
    """Of all bits of some tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        values = tensor.detach().contiguous().view(-1).view(torch.uint8)
        digest.update(of_device(values).numpy().tobytes())
    return digest.hexdigest()[:16]


def state_before(trainer: Any, module: Any) -> dict[str, Any]:
    """What a step changes and has to find again when it is done again."""
    loop, hook = trainer.fit_loop.epoch_loop, trainer.strategy._communication.hook
    hook_step = hook.state_dict().get("step") if hook is not None else None
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return {
        "random": hash_of([torch.get_rng_state(), *([torch.cuda.get_rng_state()] if ON_DEVICE else [])]),
        "python": random.random(),
        "buffers": hash_of(module.buffers()),
        "weights": hash_of(module.parameters()),
        "logged": {
            key: [float(x) for x in metric.metric_state.values()] for key, metric in loop._results.items()
        },
        "counters": [dict(vars(counter)) for counter in loop_counters(trainer)],
        "hook": [hook_step, hash_of_hook(hook, shared=False)],
        "scaler": None if scaler is None else scaler.state_dict(),
    }


def is_repeated(trainer: Any) -> bool:
    """Whether this place has run out of samples, and repeats its last batch."""
    lockstep = trainer.strategy._lockstep
    return lockstep is not None and lockstep.turn.is_replay


def hash_of_hook(hook: Any, *, shared: bool) -> str:
    """Of the tensors that a hook remembers, or of those alone that are the same on all ranks."""
    tensors = hook.state_dict().get("tensors", {}) if hook is not None else {}
    keys = [(name, key) for name in sorted(tensors) for key in sorted(tensors[name])]
    return hash_of(tensors[name][key] for name, key in keys if not shared or key in hook.shared_keys)


class Samples(Dataset[Any]):
    """Numbered samples."""

    module: Any = None

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        if self.module is not None:
            die_if("loader", self.module.global_step)
            if index == ORDER.get("poison"):
                note(event="dies")
                os._exit(3)
        generator = torch.Generator().manual_seed(index)
        kind = torch.float64 if ORDER.get("double") else torch.float32
        return torch.randn(8, generator=generator, dtype=kind), index


class SharpnessAware(torch.optim.SGD):
    """Takes its gradients where the loss is highest nearby: calls the closure twice, with other weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure()
        (group,) = self.param_groups
        uphill = [0.05 * torch.sign(parameter.grad) for parameter in group["params"]]
        for parameter, ascent in zip(group["params"], uphill, strict=True):
            parameter.add_(ascent)
        loss = closure()
        for parameter, ascent in zip(group["params"], uphill, strict=True):
            parameter.sub_(ascent)
        super().step()
        return loss


class Model(pl.LightningModule):
    """Dropout, batch normalisation, and a bucket for nearly each parameter."""

    last_batch: Any = None

    def __init__(self) -> None:
        super().__init__()
        is_plain = ORDER.get("plain", False)
        self.net = nn.Sequential(
            nn.Linear(8, 16),
            nn.Identity() if is_plain else nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Dropout(0.0 if is_plain else 0.2),
            nn.Linear(16, 16),
            nn.Linear(16, 1),
        )
        self.net[4].weight.register_hook(lambda grad: die_if("between buckets", self.global_step))
        self.net[0].weight.register_hook(lambda grad: die_if("last bucket", self.global_step))

    def be_late(self) -> None:
        """Has this place fall asleep once its last bucket is on its way, so that others are a step ahead.

        After forward: hooks that are registered before it run before a bucket is full.
        """
        arrived: list[Tensor] = []

        def sleep(parameter: Tensor) -> None:
            arrived.append(parameter)
            if len(arrived) == 2:
                note(event="sleeps")
                time.sleep(ORDER.get("late_s", 20.0))  # a backward on a device is not interrupted

        for parameter in self.net[0].parameters():
            parameter.register_post_accumulate_grad_hook(sleep)

    def on_before_backward(self, loss: Tensor) -> None:
        if ORDER.get("late") == [place(), self.global_step]:
            self.be_late()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if "keeps" in ORDER:
            dist.all_reduce(torch.ones(1), group=self.kept[ORDER["keeps"]])
        if [place(), self.global_step] in ORDER.get("slow", []) and is_first(f"slow-{self.global_step}"):
            time.sleep(1)
        self.num_forwards = self.num_forwards + 1 if self.last_batch is batch else 1
        self.last_batch = batch
        if ORDER.get("sends") == self.global_step and not generation():
            last = int(ORDER["devices"]) - 1
            self.sent = dist.broadcast(torch.ones(50_000_000), src=last, async_op=True)
            time.sleep(0.01)  # the last place is lost with a part of it on its way
        die_if("forward" if self.num_forwards == 1 else "second forward", self.global_step)
        if CHAOS and CHAOS[0].raises:
            raise ValueError("a picture is broken")
        time.sleep(ORDER.get("step_s", 0.0))
        loss = self.net(batch[0]).square().mean() + self.net[0].weight.square().mean()
        if self.global_step == ORDER.get("overflows"):
            loss = loss * torch.inf
        self.log("loss", loss, on_step=True, on_epoch=True)
        die_if("before the first bucket", self.global_step)
        return loss

    def on_fit_start(self) -> None:
        if "keeps" in ORDER:
            self.kept = {"new": dist.new_group([0, 1], group_desc="of mine"), "world": dist.group.WORLD}
        die_if("fit start", 0)
        die_as_new("journal")
        if "told" in ORDER:
            self.told = self.trainer.strategy.broadcast(f"of {place()}" if not IS_NEW else None)
            note(event="is told", text=self.told)

    def on_train_start(self) -> None:
        die_if("train start", 0)
        if "agrees" in ORDER:
            self.trainer.strategy.barrier("begin")

    def on_train_epoch_start(self) -> None:
        die_if("epoch start", self.global_step)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        die_if("sanity check" if self.trainer.sanity_checking else "validation", self.global_step)
        self.log("val", self.net(batch[0]).mean(), sync_dist=True)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if ORDER.get("adds_group") == self.global_step:
            self.trainer.optimizers[0].add_param_group({"params": self.net[5].parameters(), "lr": 0.02})

    def on_validation_end(self) -> None:
        """Where one place dies while another one is late: place 0 may go on to its next step."""
        if ORDER.get("late_in_validation") == self.global_step and place() and not generation():
            wait_for("tries", 0, self.global_step, within_s=2.0)
            die_if("validation end", self.global_step)
            wait_for("changes", within_s=60.0)  # which interrupts this

    def on_train_epoch_end(self) -> None:
        die_if("epoch end", self.global_step)
        self.log("end of epoch", 1.0, sync_dist=True)

    def setup(self, stage: str) -> None:
        time.sleep(ORDER.get("new_s", 0.0) * IS_NEW)
        die_as_new("setup")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        die_as_new("receiving")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        die_if("checkpoint", self.global_step)
        sending = FOLDER / "sending"
        if ORDER.get("dies_sending") == place() and not sending.exists():
            sending.touch()
            checkpoint["deadly"] = Deadly()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            note(event="test begins", is_deaf=job_context().control.alarm._guard.name == "DEFERRED")
        self.log("test", batch[1].float().mean(), sync_dist=True, batch_size=len(batch[1]))

    def on_after_backward(self) -> None:
        die_if("after backward", self.global_step)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        die_if("optimizer", self.global_step)

    def configure_optimizers(self) -> Any:
        name = ORDER.get("optimizer", "AdamW")
        kind = SharpnessAware if name == "SharpnessAware" else getattr(torch.optim, name)
        trained = self.net[:5] if "adds_group" in ORDER else self
        optimizer = kind(trained.parameters(), lr=0.01)
        if "estimates" in ORDER:
            note(event="estimates", steps=self.trainer.estimated_stepping_batches)
        kind, options = ORDER.get("scheduler", ["ExponentialLR", {"gamma": 0.9}])
        scheduler = getattr(torch.optim.lr_scheduler, kind)(optimizer, **options)
        config = {"scheduler": scheduler, "interval": "step"}
        if kind == "ReduceLROnPlateau":
            config.update(interval="epoch", monitor="val", strict=False)
        return {"optimizer": optimizer, "lr_scheduler": config}


class Ledger(pl.Callback):
    """Each attempt of a batch, and each batch of a committed step."""

    generation = step = world_size = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if place() == 0 and trainer.global_step == ORDER.get("saves"):
            torch.save([module.net.state_dict(), trainer.optimizers[0].state_dict()], FOLDER / "state.pt")
        self.generation = generation()
        self.step = trainer.global_step
        self.world_size = trainer.world_size  # a batch that is over may be finished after ranks were lost
        note(
            event="tries",
            generation=self.generation,
            step=trainer.global_step,
            batch=batch_idx,
            epoch=trainer.current_epoch,
            ids=batch[1].tolist(),
            repeats=is_repeated(trainer),
            before=state_before(trainer, module),
            hook=hash_of_hook(trainer.strategy._communication.hook, shared=True),
        )

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer = trainer.optimizers[0]
        kept, _ = tree_flatten([list(state.values()) for state in optimizer.state.values()])
        moments = [value for value in kept if isinstance(value, Tensor)]
        note(
            event="commits",
            generation=self.generation,
            step=self.step,
            batch=batch_idx,
            epoch=trainer.current_epoch,
            ids=batch[1].tolist(),
            rank=trainer.global_rank,
            world_size=self.world_size,
            lr=optimizer.param_groups[0]["lr"],
            loss=float(outputs["loss"]),
            val=float(trainer.callback_metrics.get("val", 0.0)),
            parameters=hash_of(module.parameters()),
            optimizer=hash_of(moments),
            outer=outer_state(trainer),
            average=weights_of(trainer, module)[1],
        )
        die_if("batch end", trainer.global_step)
        die_as_new("first step")

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        note(event="weighs", step=trainer.global_step, weights=weights_of(trainer, module))

    on_validation_end = on_validation_start

    def on_world_changed(self, trainer: Any, module: Any, change: Any) -> None:
        note(
            event="changes",
            sizes=[change.old_world_size, change.new_world_size],
            ranks=[change.old_rank, change.new_rank],
            modules=len(sys.modules),
            node_and_local_rank=[trainer.node_rank, trainer.local_rank],
            dealt_to=trainer.strategy.distributed_sampler_kwargs,
            lost=list(change.lost_ranks),
            joined=list(change.joined_ranks),
            step=change.step,
            seconds=change.seconds,
            retried=change.retried,
            cause=str(change.cause),
            held=[
                len(os.listdir("/proc/self/fd")),
                threading.active_count(),
                len(os.listdir("/proc/self/task")),
                Path("/proc/self/maps").read_text().count("/memfd:"),
            ],
            rss_mib=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20,
            processes=len(Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split()),
        )

    def on_train_start(self, trainer: Any, module: Any) -> None:
        note(event="starts", is_new=IS_NEW)
        die_as_new("train start")
        if "chaos" in ORDER:
            CHAOS.append(Chaos())
            CHAOS[0].start()
        if ORDER.get("late_in_round") == place():
            be_late_in_round(trainer)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        note(event="ends epoch", epoch=trainer.current_epoch, batches=trainer.num_training_batches)
        size = ORDER.get("until_size", ORDER.get("devices", 4) * trainer.num_nodes)
        whole = trainer.world_size == size
        if "chaos" in ORDER:
            trainer.should_stop = trainer.strategy.broadcast(whole and chaos_is_over())
        if "until_generation" in ORDER and whole and self.generation >= ORDER["until_generation"]:
            trainer.should_stop = True

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        note(event="excepts", text=str(exception))

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        if "is asked" in NOTED:
            note(event="is torn down", value=trainer.strategy.broadcast(place()))


def be_late_in_round(trainer: Any) -> None:
    """Has this place wait at the end of the round after its sixth step, which is over for the others."""
    averager = trainer.strategy._communication.averager
    do_round = averager.round

    def wait(track: Any) -> None:
        do_round(track)
        if track.num_steps == 6:
            note(event="waits")
            trainer.strategy.barrier("late")

    averager.round = wait


def outer_state(trainer: Any) -> str:
    """What an averager keeps that is the same on all ranks."""
    averager = trainer.strategy._communication.averager
    outer = averager.for_others()["outer"] if averager is not None else {}
    return hash_of(value for name in sorted(outer) for value in outer[name].values())


def weights_of(trainer: Any, module: Any) -> list[str]:
    """Hashes of the model, and of moving averages that a callback has."""
    models = [getattr(callback, "_average_model", None) for callback in trainer.callbacks]
    averages = [average for model in models if model is not None for average in model.parameters()]
    return [hash_of(module.state_dict().values()), hash_of(averages)]


def more_callbacks() -> list[Any]:
    """Those of Lightning, if the order says so."""
    if not ORDER.get("callbacks"):
        return []
    weight_averaging = getattr(pl.callbacks, "EMAWeightAveraging", None)  # since 2.6
    return [
        *([weight_averaging(decay=0.5)] if weight_averaging else []),
        ModelCheckpoint(FOLDER, "{step}", every_n_train_steps=2, save_top_k=-1),
        EarlyStopping("val", patience=100),
    ]


class MeetingStore(dist.Store):
    """Where ranks meet again; one of them dies there, once the others wait for it."""

    def __init__(self, store: Any, step: int) -> None:
        super().__init__()
        self.store, self.step = store, step

    def set(self, key: str, value: Any) -> None:
        self.die_if("before it can be reached")
        self.store.set(key, value)
        self.die_if("once it could be reached")

    def get(self, key: str) -> Any:
        note(event="waits", generation=generation())
        return self.store.get(key)

    def wait(self, keys: Any, *timeout: Any) -> None:
        note(event="waits", generation=generation())
        self.store.wait(keys, *timeout)

    def die_if(self, moment: str) -> None:
        """The fault, when all others have come."""
        deadline = time.monotonic() + 60
        faults = [(fault["place"], fault["moment"], fault["step"]) for fault in ORDER["faults"]]
        if (place(), moment, self.step) in faults:
            while len(self.waiting()) < len(job_context().control.calls.state.members) - 1:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            die_if(moment, self.step)

    def waiting(self) -> set[int]:
        """Places that wait in this generation."""
        lines = [line for path in FOLDER.glob("ledger-*") for line in path.read_text().splitlines()]
        entries = [entry for entry in map(json.loads, lines) if entry["event"] == "waits"]
        return {entry["place"] for entry in entries if entry["generation"] == generation()}


class Strategy(lightning_ddp.CustomDDPStrategy):
    """With moments at which the ranks that are left meet."""

    def _meet_again(self, form: Any) -> Any:
        step = self.lightning_module.global_step
        die_if("regroup", step)
        if any("reached" in fault["moment"] for fault in ORDER.get("faults", [])):
            regroup.join_default_group = lambda backend, store, **options: join_default_group(
                backend, MeetingStore(store, step), **options
            )
        return super()._meet_again(form)


def new_trainer() -> pl.Trainer:
    stall_timeout = timedelta(seconds=ORDER["stall_s"]) if "stall_s" in ORDER else None
    saving = []
    if "checkpoints" in ORDER:
        saving.append(pl.callbacks.ModelCheckpoint(**{"dirpath": FOLDER / "saved", **ORDER["checkpoints"]}))
    if "accumulates" in ORDER:
        scheduled = {int(epoch): number for epoch, number in ORDER["accumulates"].items()}
        saving.append(pl.callbacks.GradientAccumulationScheduler(scheduled))
    if ORDER.get("records"):
        saving.append(lightning_ddp.callbacks.CommunicationMonitor(4, timeline=FOLDER / "timeline"))
    strategy = Strategy(
        stall_timeout=stall_timeout,
        **{"bucket_cap_mb_list": [0.0001], "on_failure": "shrink", **ORDER.get("strategy", {})},
    )
    return pl.Trainer(
        accelerator="gpu" if ON_DEVICE else "cpu",
        devices=ORDER.get("devices", 4),
        strategy=strategy,
        callbacks=[Ledger(), *saving, *more_callbacks()] if "ends" not in NOTED else [],
        logger=pl.loggers.CSVLogger(FOLDER / "logs") if ORDER.get("logs") else False,
        plugins=MixedPrecision("16-mixed", "cuda" if ON_DEVICE else "cpu") if "overflows" in ORDER else None,
        enable_checkpointing=bool(saving or more_callbacks()),
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 2, "num_sanity_val_steps": 0, **ORDER.get("trainer", {})},
    )


class Drawn(SequentialSampler):
    """Another order each time it is asked for one, of the global generator."""

    def __iter__(self) -> Any:
        return iter(torch.randperm(len(self)).tolist())


class InTurn(DistributedSampler[Any]):
    """Deals each sample once, so that the last ranks may have one less."""

    def __iter__(self) -> Any:
        return iter(range(self.rank, len(self.dataset), self.num_replicas))

    def __len__(self) -> int:
        return len(range(self.rank, len(self.dataset), self.num_replicas))


def new_loader(data: Any) -> DataLoader[Any]:
    how = {"sampler": Drawn(data)} if "draws" in ORDER else {"shuffle": True}
    if ORDER.get("deals") == "in turn":
        place_count = int(ORDER.get("devices", 4))
        how = {"sampler": InTurn(data, place_count, max(0, place()), shuffle=False)}
    return DataLoader(data, batch_size=4, **how, **ORDER.get("loader", {}))


def main() -> None:
    """A fit, and what the order says of after it."""
    die_as_new("begin")
    if IS_NEW:
        follow_end()
        if ORDER.get("new_is_late"):
            wait_for("ends")
    pl.seed_everything(1, verbose=False)
    data, model = Samples(), Model()
    data.module = model
    if ORDER.get("double"):
        model.double()
    trainer = new_trainer()
    loader = new_loader(data)
    evaluated = DataLoader(Samples(), batch_size=4) if ORDER.get("validates") else None
    if "hooks" in ORDER:

        def prepare(name: str, make: Any) -> Any:
            note(event="makes", name=name, epoch=trainer.current_epoch)
            if "told" in ORDER:
                trainer.strategy.broadcast(name)
            die_if(f"{name} dataloader", 0)
            return make()

        model.train_dataloader = lambda: prepare("train", lambda: new_loader(data))
        model.val_dataloader = lambda: prepare("val", lambda: DataLoader(Samples(), batch_size=4))
        loader = evaluated = None
    try:
        trainer.fit(model, loader, evaluated, ckpt_path=ORDER.get("resumes"))
    except SystemExit:
        note(event="unwinds")
        raise
    except Exception:
        if "catches" not in ORDER:
            raise
        ORDER["faults"].clear()
        trainer.fit(model, loader, evaluated)
    if "more_epochs" in ORDER:
        assert trainer.fit_loop.max_epochs is not None
        trainer.fit_loop.max_epochs += ORDER["more_epochs"]
        trainer.fit(model, loader, evaluated)
    saving = trainer.checkpoint_callback
    if ORDER.get("double"):
        torch.save(model.state_dict(), FOLDER / f"end-{place()}.pt")
    note(
        event="ends",
        step=trainer.global_step,
        parameters=hash_of(model.parameters()),
        metrics=sorted(trainer.callback_metrics),
        best=saving.best_model_path if saving is not None else None,
        last=saving.last_model_path if saving is not None else None,
    )
    if ON_DEVICE:
        note(event="finds", reports=simcuda.summary(("race", "free")))
    if ORDER.get("new_is_late") and place() == 0:
        wait_for("leaves")
    if "tests" in ORDER:
        (means,) = trainer.test(model, DataLoader(Samples(), batch_size=4), verbose=False)
        note(event="tests", mean=means["test"], world_size=trainer.world_size)
    if "fits" in ORDER:
        trainer.callbacks.clear()
        (trainer if ORDER["fits"] == "again" else new_trainer()).fit(model, loader)


if __name__ == "__main__":
    main()
    if ORDER.get("codes"):
        note(event="codes", codes=[child.wait() for child in job_context().children.procs])
