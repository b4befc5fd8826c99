"""What a process takes over that comes into the place of another one: results, state, files of loggers.

A process that joins runs the script while the others train, and nobody answers what its set-up communicates:
rank 0 keeps the results in the run's store, where a `Journal` reads them in order. At a step boundary it gets
a `Handover`: what plain Lightning saves in a checkpoint, with what hooks and averagers share and with what of
the data is used. Where rank 0 is lost, who becomes rank 0 goes on with its `Loggers`.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lightning_ddp._lightning import (
    Trainer,
    append_to_csv,
    callback_metrics,
    dump_checkpoint,
    has_validation_loaders,
    load_loops,
    logger_version,
    restore_checkpoint,
    saved_last,
    set_logger_version,
    set_saved_last,
)
from lightning_ddp.communication import Communication
from lightning_ddp.elastic.redeal import Dealer
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.launch.job_context import JobContext

__all__ = ["MAIN", "VALIDATION", "Handover", "Journal", "Loggers", "seed_generators"]

MAIN, VALIDATION = "main", "validation"
"""Parts, each with an order of its own: the loaders of validation are made at different times."""
_CHUNK_BYTES = 4 * 1024 * 1024
_LOOK_EVERY_S = 0.02


class Journal:
    """What the ranks of a run tell each other before their first epoch, kept for processes that join later.

    What is read from the store is pickled, and only believed if it is signed with the secret of the run.

    Args:
        session: of this process, which reads what rank 0 has written if it joins.
        rank: its own, or the one that it is to have.
    """

    def __init__(self, session: JobContext, rank: int) -> None:
        self._session = session
        self._is_reader = session.is_joining
        self._is_writer = rank == 0 and not session.is_joining
        self._secret = (session.rendezvous.token or "").encode()
        self._part: str | None = MAIN
        self._ended: set[str] = set()
        self._count: Counter[str] = Counter()

    @property
    def _store(self) -> Any:
        """Each generation reaches it by a connection of its own."""
        return self._session.store

    @contextmanager
    def part(self, name: str | None) -> Generator[None, None, None]:
        """What communicates in here belongs to another part; None for none."""
        before, self._part = self._part, name
        try:
            yield
        finally:
            self._part = before

    def end(self, name: str) -> None:
        """A part is complete: what follows communicates in all processes."""
        if name in self._ended:
            return
        self._ended.add(name)
        if self._is_writer:
            self._store.set(_key(name, "end"), str(self._count[name]))

    def is_complete(self, name: str) -> bool:
        """Whether rank 0 has written all of a part."""
        return bool(self._store.check([_key(name, "end")]))

    @property
    def is_read(self) -> bool:
        """Whether what communicates now is answered by what is written."""
        return self._is_reader and self._part is not None and self._part not in self._ended

    def result(self, kind: str, call: Callable[[], Any]) -> Any:
        """What a collective of some kind returns, by itself or as it is written.

        Raises:
            ConfigurationError: rank 0 has called something of another kind here.
        """
        name = self._part
        if name is None or name in self._ended:
            return call()
        number = self._count[name]
        self._count[name] += 1
        if self.is_read:
            return self._read(name, number, kind)
        value = call()
        if self._is_writer:
            self._write(name, number, pickle.dumps((kind, value)))
        return value

    def _write(self, name: str, number: int, data: bytes) -> None:
        chunks = [data[start : start + _CHUNK_BYTES] for start in range(0, len(data), _CHUNK_BYTES)]
        for index, chunk in enumerate(chunks):
            self._store.set(_key(name, number, index), chunk)
        self._store.set(_key(name, number), f"{len(chunks)} {self._sign(name, number, data)}")

    def _read(self, name: str, number: int, kind: str) -> Any:
        found = None
        while found is None:
            if self._store.check([_key(name, number)]):
                found = self._store.get(_key(name, number)).decode()
            elif self.is_complete(name) and int(self._store.get(_key(name, "end"))) <= number:
                self._refuse(number, kind, "nothing more before its first epoch")
            else:
                self._session.control.check_whether_late()
                time.sleep(_LOOK_EVERY_S)
        num_chunks, signature = found.split()
        data = b"".join(self._store.get(_key(name, number, index)) for index in range(int(num_chunks)))
        if not hmac.compare_digest(signature, self._sign(name, number, data)):
            raise ConfigurationError(
                "the store of the run has results that are not signed with the secret of the run"
            )
        written, value = pickle.loads(data)
        if written != kind:
            self._refuse(number, kind, written)
        return value

    def _sign(self, name: str, number: int, data: bytes) -> str:
        return hmac.new(self._secret, f"{name}/{number}/".encode() + data, hashlib.sha256).hexdigest()

    def _refuse(self, number: int, kind: str, other: str) -> None:
        raise ConfigurationError(
            f"on_failure='replace': in a replacement process the script's set-up calls {kind} as collective"
            f" number {number}, where rank 0 has called {other}. Set-up must be the same in each process,"
            " and not depend on files that the run itself has written."
        )


def _key(*parts: object) -> str:
    return "/".join(("lightning_ddp", "journal", *map(str, parts)))


@dataclass(frozen=True)
class Handover:
    """The state of a member at a step boundary, for a process that joins there.

    That one takes it over as a run that resumes does, but for the loops: Lightning resumes in an epoch as if
    it had been interrupted, and would skip or repeat a batch. So their counters are set.
    """

    checkpoint: dict[str, Any]
    """As Lightning saves it."""
    shared: dict[str, Any] | None
    """Of hook and averager."""
    dealt: list[Any]
    """What of the data is used."""
    num_batches: int
    """Of this epoch, that are used."""
    metrics: dict[str, Any]
    """What callbacks monitor."""
    saved: list[int | None]
    """At which step each callback that saves checkpoints has done so last."""
    should_stop: bool
    num_recoveries: int
    """After failures, that loggers have been told of."""
    validates: bool
    """Whether the loaders of validation are set up, for which the ranks communicate."""

    @classmethod
    def of(
        cls, trainer: Trainer, communication: Communication, dealer: Dealer, *, num_recoveries: int
    ) -> Handover:
        """What this rank has. All members call it, as hooks of a checkpoint may communicate."""
        checkpoint = dump_checkpoint(trainer)
        has_state = communication.has_state
        return cls(
            checkpoint=checkpoint,
            shared=communication.shared_state(trainer.world_size) if has_state else None,
            dealt=dealer.state(),
            num_batches=int(trainer.fit_loop.epoch_loop.batch_progress.current.completed),
            metrics=dict(callback_metrics(trainer)),
            saved=[saved_last(callback) for callback in trainer.callbacks],  # type: ignore[attr-defined]
            should_stop=bool(trainer.should_stop),
            num_recoveries=num_recoveries,
            validates=has_validation_loaders(trainer),
        )

    def restore(self, trainer: Trainer, communication: Communication) -> None:
        """Takes over all but the loops. Does not communicate."""
        restore_checkpoint(trainer, dict(self.checkpoint))
        if self.shared is not None:
            names = [name for name, _ in trainer.lightning_module.named_parameters()]
            communication.load(self.shared, None, names)
        callback_metrics(trainer).update(self.metrics)
        for callback, step in zip(trainer.callbacks, self.saved, strict=True):  # type: ignore[attr-defined]
            if step is not None:
                set_saved_last(callback, step)
        trainer.should_stop = self.should_stop

    def restore_loops(self, trainer: Trainer, dealer: Dealer) -> None:
        """Sets the counters of the loops, inside of the epoch."""
        load_loops(trainer, self.checkpoint["loops"]["fit_loop"])
        dealer.load(self.dealt)


def seed_generators(*, seed: int, rank: int, step: int) -> None:
    """Seeds the global generators of random numbers, other than on any other rank or at any other step."""
    digest = hashlib.sha256(f"{seed}/{rank}/{step}".encode()).digest()
    number = int.from_bytes(digest[:4], "little")
    torch.manual_seed(number)
    random.seed(number)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number)


class Loggers:
    """The loggers of one fit. All ranks have one, as each may become rank 0.

    Rows that a lost rank 0 has not written are lost, and those of a step that is repeated come twice.

    Args:
        trainer: the Trainer of the fit. Its strategy communicates, now.
        is_joining: True if another process is rank 0 yet, even if this one is to be.
    """

    def __init__(self, trainer: Trainer, *, is_joining: bool) -> None:
        self._trainer = trainer
        self._writes = trainer.is_global_zero and not is_joining
        versions = trainer.strategy.broadcast([logger_version(logger) for logger in trainer.loggers])
        for logger, version in zip(trainer.loggers, versions, strict=True):
            set_logger_version(logger, version)  # which the others would choose anew, beside that of rank 0

    def take_over(self) -> None:
        """Continue the files of a lost rank 0, if this process has its rank now."""
        was_writing, self._writes = self._writes, self._trainer.is_global_zero
        if self._writes and not was_writing:
            for logger in self._trainer.loggers:
                append_to_csv(logger)
