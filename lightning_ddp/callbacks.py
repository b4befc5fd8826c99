"""Callbacks for Lightning's Trainer."""

from __future__ import annotations

import logging
import socket
import statistics
import threading
from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_ddp._lightning import Callback, LightningModule, Trainer, batches_that_stepped
from lightning_ddp.ddp.module import BucketedDDP
from lightning_ddp.elastic import WorldChange
from lightning_ddp.errors import ConfigurationError, cause_of
from lightning_ddp.launch.job_context import job_context
from lightning_ddp.telemetry.step_record import StepRecord, StepRecorder
from lightning_ddp.telemetry.timeline import (
    Change,
    Lateness,
    Recording,
    SlowRanks,
    lateness,
    median_late,
    save,
)

__all__ = ["CommunicationMonitor", "WorldChange"]

_log = logging.getLogger("lightning_ddp")
_TOPIC = "slack"
_MOST_WINDOWS = 8
_MOST_STEPS = 5000  # their numbers, of up to 11 digits, fit into one message of 60 KiB
_MOST_LOGGED_RANKS = 16
_NS_PER_US = 1_000
_NS_PER_MS = 1_000_000
_MB = 1_000_000


class CommunicationMonitor(Callback):
    """Log what communication costs, and name ranks that make the others wait.

    Every `every_n_steps` synchronized steps it passes medians over these steps to all loggers, under names
    that begin with `communication/`: the time of a step, the communication that backward hides and that it
    does not hide, the size and rate of the reduced gradients, and how late each rank had its gradients.
    Lateness is measured before the collectives, after which all ranks are equally late, and relative to their
    common ends, so that clocks of hosts need not agree. It is exact up to the time of a message between
    ranks, and lags by one interval.

    The ranks exchange one number per step, once per interval, over the control channel, without a
    collective. Without the control channel (LIGHTNING_DDP_SUPERVISION=0) and with one process there is no
    lateness. Steps without synchronization (`accumulate_grad_batches`, local training) are not counted.

    Args:
        every_n_steps: Number of steps in an interval, at most 5000; the same on all ranks.
        straggler_patience: Number of consecutive late steps after which rank 0 warns about a rank; it warns
            again whenever this number has doubled.
        straggler_threshold: Delay after the median rank, as a fraction of a step, from which a rank counts as
            late.
        timeline: Folder to which each rank writes its last steps at the end of the fit, or None for no
            files. The files `rank<r>.json` are also written if the fit fails;
            `python -m lightning_ddp timeline <folder>` draws them. Use one folder per run. On nodes without
            a common disk, copy the files together.

    Raises:
        ConfigurationError: A number is out of range, or, in `fit`, the strategy is another one.
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        *,
        straggler_patience: int = 100,
        straggler_threshold: float = 0.1,
        timeline: str | Path | None = None,
    ) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("straggler_patience", straggler_patience)):
            if value < 1:
                raise ConfigurationError(f"{name}={value}: expected a number of steps from 1")
        if every_n_steps > _MOST_STEPS:
            raise ConfigurationError(
                f"every_n_steps={every_n_steps}: expected at most {_MOST_STEPS}, as the ranks exchange a"
                " number for each step of an interval in one message"
            )
        if not straggler_threshold > 0:
            raise ConfigurationError(
                f"straggler_threshold={straggler_threshold}: expected a fraction of a step above 0"
            )
        self.every_n_steps, self.straggler_patience = every_n_steps, straggler_patience
        self.straggler_threshold = straggler_threshold
        self.timeline = None if timeline is None else Path(timeline)
        self.recorder: StepRecorder | None = None
        """Recorder of this rank's last steps, during the fit and after it; None before."""
        self._wrapped: BucketedDDP | None = None
        self._exchange: _Exchange | None = None
        self._changes: list[Change] = []
        self._first_step = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = trainer.strategy.model
        if not isinstance(model, BucketedDDP):
            raise ConfigurationError(
                "CommunicationMonitor needs the strategy 'custom_ddp' or one of its variants, but the"
                f" Trainer has {type(trainer.strategy).__name__}"
            )
        self._wrapped = model
        self._changes, self._first_step = [], trainer.global_step
        self.recorder = model.record_steps(max(256, 2 * self.every_n_steps))
        self._begin_exchange(trainer)

    def _begin_exchange(self, trainer: Trainer) -> None:
        self._records: list[StepRecord] = []
        self._slow = SlowRanks(self.straggler_patience)
        self._exchange = _Exchange(trainer.world_size, is_first=trainer.is_global_zero)

    def on_world_changed(self, trainer: Trainer, pl_module: LightningModule, change: WorldChange) -> None:
        if self.recorder is None or self._exchange is None:
            return
        step = change.step - self._first_step
        self.recorder.begin_again(step)
        self.recorder.take()
        self._exchange.close()
        self._begin_exchange(trainer)  # without the partial interval, which ranks may have counted otherwise
        cause = "" if change.cause is None else cause_of(change.cause).strip().partition("\n")[0]
        values = {field.name: getattr(change, field.name) for field in fields(Change)}
        self._changes.append(Change(**{**values, "step": step, "cause": cause}))

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Log communication metrics once per interval, and send this rank's delays to rank 0."""
        if self.recorder is None or self._exchange is None:
            return
        if len(self._records) + self.recorder.num_new < self.every_n_steps:
            return
        self._records += self.recorder.take()
        while len(self._records) >= self.every_n_steps:
            records = self._records[: self.every_n_steps]
            del self._records[: self.every_n_steps]
            self._exchange.tell(records)
            metrics = summarize(records)
            for known in self._exchange.collect():
                metrics.update(_straggler_metrics(known))
                self._warn(known, metrics["step_ms"], self._exchange.hosts)
            named = {f"communication/{name}": value for name, value in metrics.items()}
            for logger in trainer.loggers:
                logger.log_metrics(named, step=batches_that_stepped(trainer))

    def _warn(self, known: Lateness, step_ms: float, hosts: dict[int, str]) -> None:
        for slow in self._slow.add(known, limit_us=self.straggler_threshold * step_ms * 1e3):
            _log.warning(
                "rank %d (host %s) has been late for %d steps in a row: %.1f ms after the median rank,"
                " %.0f %% of a step of %.1f ms. All ranks wait for it.",
                *(slow.rank, hosts.get(slow.rank, "?"), slow.num_steps, slow.late_us / 1e3),
                *(slow.late_us / (10 * step_ms), step_ms),
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_fit_end(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._wrapped is not None:
            self._wrapped.stop_recording()
            self._wrapped = None
            self._save_timeline(trainer)
        if self._exchange is not None:
            self._exchange.close()

    def _save_timeline(self, trainer: Trainer) -> None:
        if self.timeline is None or self.recorder is None:
            return
        recording = Recording(
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            host=socket.gethostname(),
            steps=list(self.recorder.records),
            changes=self._changes,
        )
        try:
            save(self.timeline, recording)
        except OSError as error:  # a picture is not worth a run that has just ended
            _log.warning("rank %d: the timeline could not be written: %s", trainer.global_rank, error)


def summarize(records: Sequence[StepRecord]) -> dict[str, float]:
    """Return metrics of successive steps for loggers, mostly medians, by name without prefix."""
    starts = [r.backward_start if r.forward_start is None else r.forward_start for r in records]
    steps = [(b - a) / _NS_PER_MS for a, b in pairwise(starts)]
    busy_s = sum(record.communication_s for record in records)
    num_bytes = sum(record.num_bytes for record in records)
    whole_ms = (records[-1].comm_end - starts[-1]) / _NS_PER_MS  # where there is no second step
    metrics = {
        "step_ms": statistics.median(steps or [whole_ms]),
        "exposed_ms": 1e3 * statistics.median(record.exposed_s for record in records),
        "gradient_mb_per_step": num_bytes / len(records) / _MB,
    }
    overlaps = [record.overlap for record in records if record.overlap is not None]
    if overlaps:
        metrics["overlap_percent"] = 100 * statistics.median(overlaps)
        metrics["bandwidth_gb_per_s"] = num_bytes / busy_s / 1e9
    return metrics


def _straggler_metrics(known: Lateness) -> dict[str, float]:
    late_ms = {rank: late_us / 1e3 for rank, late_us in median_late(known).items()}
    if len(late_ms) > _MOST_LOGGED_RANKS:
        return {"straggler_ms/max": max(late_ms.values())}
    return {f"straggler_ms/rank{rank}": late_ms[rank] for rank in sorted(late_ms)}


class _Exchange:
    """Exchange over the control channel of how late each rank's gradients were, collected on rank 0."""

    def __init__(self, world_size: int, *, is_first: bool) -> None:
        self.hosts: dict[int, str] = {}  # rank -> host name, as far as ranks have said so
        self._world_size = world_size
        self._windows: dict[int, dict[int, list[int | None]]] = {}
        self._lock = threading.Lock()
        self._inspector = job_context().control.inspector
        if is_first:
            self._inspector.listen(_TOPIC, self._hear)

    def tell(self, records: Sequence[StepRecord]) -> None:
        if self._world_size > 1:
            slacks = [None if (ns := record.slack_ns) is None else ns // _NS_PER_US for record in records]
            value = {"first": records[0].step, "us": slacks, "host": socket.gethostname()[:80]}
            self._inspector.tell(0, _TOPIC, value)

    def _hear(self, rank: int, value: Any) -> None:
        """Store how late a rank's gradients were in an interval; runs in the control channel's thread."""
        with self._lock:
            self.hosts[rank] = value["host"]
            self._windows.setdefault(value["first"], {})[rank] = value["us"]
            while len(self._windows) > _MOST_WINDOWS:  # a rank never reported this interval
                del self._windows[min(self._windows)]

    def collect(self) -> list[Lateness]:
        """Return, and drop, the lateness of all ranks in each interval that all have reported, in order."""
        with self._lock:
            firsts = sorted(self._windows)
            whole = [first for first in firsts if len(self._windows[first]) == self._world_size]
            return [lateness(self._windows.pop(first)) for first in whole]

    def close(self) -> None:
        self._inspector.listen(_TOPIC, None)
