"""What the ranks tell each other before their first epoch, kept for processes that join later.

A script's set-up communicates: the folder of the logs is broadcast, lengths of loaders are added up. A
process that comes in the place of a lost rank runs the same script while the others train, and nobody answers
it. So rank 0 keeps the results, in the run's store, and a process that joins reads them there, in order.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from lightning_ddp.errors import ConfigurationError

__all__ = ["MAIN", "VALIDATION", "Journal"]

MAIN, VALIDATION = "main", "validation"
"""Parts, each with an order of its own: the loaders of validation are made at different times."""
_CHUNK_BYTES = 4 * 1024 * 1024
_LOOK_EVERY_S = 0.02


class Journal:
    """Of one run.

    Args:
        store: tells the store of the run, which each generation reaches by a connection of its own.
        secret: of the run; what is read from the store is pickled, and only believed if it is signed with it.
        is_reader: whether this process reads what rank 0 has written.
        is_writer: whether it is rank 0.
        check: called while a result is waited for; raises where the run ends.
    """

    def __init__(
        self,
        store: Callable[[], Any],
        secret: str,
        *,
        is_reader: bool,
        is_writer: bool,
        check: Callable[[], None],
    ) -> None:
        self._store, self._secret, self._check = store, secret.encode(), check
        self._is_reader, self._is_writer = is_reader, is_writer
        self._part: str | None = MAIN
        self._ended: set[str] = set()
        self._count: Counter[str] = Counter()

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
            self._store().set(_key(name, "end"), str(self._count[name]))

    def is_complete(self, name: str) -> bool:
        """Whether rank 0 has written all of a part."""
        return bool(self._store().check([_key(name, "end")]))

    @property
    def is_read(self) -> bool:
        """Whether what communicates now is answered by what is written."""
        return self._is_reader and self._part is not None and self._part not in self._ended

    def result(self, kind: str, call: Callable[[], Any]) -> Any:
        """What a collective returns, by itself or as it is written.

        Args:
            kind: which collective, the same for all ranks.
            call: does it.

        Raises:
            ConfigurationError: rank 0 has called something else here.
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
            self._store().set(_key(name, number, index), chunk)
        head = f"{len(chunks)} {self._sign(name, number, data)}"
        self._store().set(_key(name, number), head)

    def _read(self, name: str, number: int, kind: str) -> Any:
        found = None
        while found is None:
            if self._store().check([_key(name, number)]):
                found = self._store().get(_key(name, number)).decode()
            elif self.is_complete(name) and int(self._store().get(_key(name, "end"))) <= number:
                self._refuse(number, kind, "nothing more before its first epoch")
            else:
                self._check()
                time.sleep(_LOOK_EVERY_S)
        num_chunks, signature = found.split()
        data = b"".join(self._store().get(_key(name, number, index)) for index in range(int(num_chunks)))
        if not hmac.compare_digest(signature, self._sign(name, number, data)):
            raise ConfigurationError("the store of the run holds results that are not signed with its secret")
        written, value = pickle.loads(data)
        if written != kind:
            self._refuse(number, kind, written)
        return value

    def _sign(self, name: str, number: int, data: bytes) -> str:
        return hmac.new(self._secret, f"{name}/{number}/".encode() + data, hashlib.sha256).hexdigest()

    def _refuse(self, number: int, kind: str, other: str) -> None:
        raise ConfigurationError(
            f"on_failure='replace': in the place of a lost rank the script's set-up calls {kind} as its"
            f" collective number {number}, and rank 0 has called {other} there. It has to be the same in each"
            " process, and not depend on files that the run itself has written."
        )


def _key(*parts: object) -> str:
    return "/".join(("lightning_ddp", "journal", *map(str, parts)))
