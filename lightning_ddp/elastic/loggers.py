"""Loggers of a rank 0 that is lost: who takes its place goes on with the same version, file and rows."""

from __future__ import annotations

import csv
import functools
from collections.abc import Callable
from typing import Any

from lightning_ddp._lightning import (
    Trainer,
    append_to_csv,
    batches_that_stepped,
    logger_version,
    set_logger_version,
)

__all__ = ["Loggers"]

Row = tuple[dict[str, Any], int | None]
"""Metrics and step, as `Logger.log_metrics` gets them."""


class Loggers:
    """Of one fit. All ranks have one, as each may become rank 0.

    Lightning writes each row at once, so that what a lost rank 0 has not written is what it would have logged
    of its last step. The other ranks, on which Lightning computes the same rows, keep those of two steps.

    Args:
        trainer: whose.
        broadcast: an object of rank 0 to all ranks. Communicates, now.
        is_joining: whether another process is rank 0 yet, even if this one is to be.
    """

    def __init__(self, trainer: Trainer, broadcast: Callable[[Any], Any], *, is_joining: bool) -> None:
        self._trainer = trainer
        versions = broadcast([logger_version(logger) for logger in trainer.loggers])
        self._kept: list[tuple[Any, Row, int]] = []  # logger, row, steps that were committed then
        self._written: dict[int, list[Row]] = {}  # logger -> rows in its file that may be logged again
        self._committed = 0
        self._writes = trainer.is_global_zero and not is_joining
        for logger, version in zip(trainer.loggers, versions, strict=True):
            set_logger_version(logger, version)  # which the others would choose anew, beside that of rank 0
            log = functools.partial(self._log, logger, logger.log_metrics)
            vars(logger)["log_metrics"] = log  # of this object, which callbacks and modules call as well

    def _log(
        self,
        logger: Any,
        log: Callable[..., None],
        metrics: dict[str, Any],
        step: int | None = None,
        **more: Any,
    ) -> None:
        row = dict(metrics), step
        if not self._writes:
            self._kept.append((logger, row, self._committed))
        elif not self._is_written(logger, row):
            log(metrics, step, **more)

    def _is_written(self, logger: Any, row: Row) -> bool:
        """Whether the rank 0 that is lost has written this row; asked once for each of them."""
        metrics, step = row
        rows = self._written.get(id(logger), [])
        for written in rows:
            if step == written[1] and metrics.keys() <= written[0].keys():
                rows.remove(written)
                return True
        return False

    # ------------------------------------------------------------------ told by the recovery

    def begin(self, committed: int) -> int:
        """A part of the loops begins. Rank 0 has written what comes before the last finished step.

        Args:
            committed: steps of all ranks that are finished.

        Returns:
            How many rows are kept, for `undo`.
        """
        self._committed = committed
        self._kept = [kept for kept in self._kept if kept[2] >= committed - 1]
        return len(self._kept)

    def undo(self, num_kept: int) -> None:
        """That part is done again, and logs again."""
        del self._kept[num_kept:]

    def take_over(self) -> None:
        """Ranks have new numbers: this process may be rank 0 now, which another was."""
        was_writing, self._writes = self._writes, self._trainer.is_global_zero
        if was_writing or not self._writes:
            return
        kept, self._kept = self._kept, []
        known = [step for _, (_, step), _ in kept if step is not None]
        since = min([batches_that_stepped(self._trainer), *known])
        for logger in self._trainer.loggers:
            self._written[id(logger)] = rows_of(append_to_csv(logger) or "", since)
        for logger, (metrics, step), _ in kept:
            logger.log_metrics(metrics, step)
        for logger in {id(logger): logger for logger, _, _ in kept}.values():
            logger.save()


def rows_of(text: str, since: int) -> list[Row]:
    """The rows of the last steps in a file of metrics, a line that was cut off left out.

    >>> rows_of("loss,step,val\\n0.5,1,\\n0.4,2,\\n,2,0.1\\n0.3", since=2)
    [({'loss': '0.4'}, 2), ({'val': '0.1'}, 2)]
    """
    found: list[Row] = []
    for row in csv.DictReader(text.splitlines()):
        step = row.pop("step", None) or ""
        if step.isdigit() and int(step) >= since:
            found.append(({key: value for key, value in row.items() if value}, int(step)))
    return found
