"""Turns: of several crews of processes one works while the others wait, so that they share the processors."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch.distributed import Store

__all__ = ["Turns"]


class Turns:
    """Numbered turns of work, one after the other. Who waits for a turn sleeps.

    All processes ask for the same turns in the same order, each saying which are its own.

    Args:
        store: Shared by all processes.
        crew_size: How many processes have one turn together.
    """

    def __init__(self, store: Store, crew_size: int) -> None:
        self._store = store
        self._crew_size = crew_size
        self._next = 0

    @contextmanager
    def take(self, *, is_mine: bool) -> Generator[bool, None, None]:
        """The next turn: waits for the end of the one before if this process has part in it.

        Args:
            is_mine: Whether it has.

        Yields:
            The same; the caller leaves the turn to the others if not.

        Raises:
            RuntimeError: If the turn before does not end within the timeout of the store.
        """
        number = self._next
        self._next += 1
        if not is_mine:
            yield False
            return
        if number:
            self._store.wait([_key(number - 1)])
        yield True
        if self._store.add(f"{_key(number)}/count", 1) == self._crew_size:
            self._store.set(_key(number), "over")


def _key(number: int) -> str:
    return f"turn/{number}"
