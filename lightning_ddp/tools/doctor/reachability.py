"""Look-ups and connections, each with a deadline."""

from __future__ import annotations

import errno
import functools
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from lightning_ddp.errors import LightningDDPError
from lightning_ddp.launch.interface import interfaces, route_to

T = TypeVar("T")
_RETRY_S = 0.2


class DeadlinePassed(LightningDDPError, TimeoutError):
    """A step took longer than it may. Its thread may still be blocked."""


def within(seconds: float, what: str, step: Callable[[], T]) -> T:
    """Runs a step that may block in C code, in a thread, and waits for it no longer than `seconds`.

    Raises:
        DeadlinePassed: it has not ended; its thread is a daemon and does not keep the process.
        Exception: what the step raised.
    """
    outcome: list[tuple[bool, Any]] = []

    def run() -> None:
        try:
            outcome.append((True, step()))
        except BaseException as error:  # noqa: BLE001 (raised again in the thread that waits)
            outcome.append((False, error))

    thread = threading.Thread(target=run, name=what, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise DeadlinePassed(f"{what} did not end within {seconds:g} s")
    has_returned, value = outcome[0]
    if not has_returned:
        raise value
    return value  # type: ignore[no-any-return]  # what the step returned


@functools.cache
def resolve(host: str, timeout_s: float) -> str:
    """The address of a host name, IPv4 where there is one. Looked up once.

    Raises:
        OSError: there is none.
        DeadlinePassed: the name server does not answer.
    """
    look_up = functools.partial(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
    found = within(timeout_s, f"looking up {host!r}", look_up)
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


def addresses() -> dict[str, str]:
    """Interface -> an address of it, IPv4 where there is one."""
    found: dict[str, str] = {}
    for name, address in interfaces():
        if name not in found or (":" in found[name] and ":" not in address):
            found[name] = address
    return found


def interface_to(address: str) -> str | None:
    """The interface by which the kernel would send to an address; None if it knows no way. Sends nothing."""
    try:
        name, own = route_to(address)
    except OSError:
        return None
    return name or own


def connect_problem(address: str, port: int, timeout_s: float) -> str | None:
    """Why no connection can be made, in words; None if one can."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(timeout_s)
        try:
            probe.connect((address, port))
        except TimeoutError:
            return f"no answer within {timeout_s:g} s; a firewall may drop the packets, or the host is down"
        except OSError as error:
            if error.errno == errno.ECONNREFUSED:
                return "the host answers, but nothing listens there (yet)"
            return error.strerror or str(error)
    return None


def wait_until_reached(address: str, port: int, timeout_s: float) -> str | None:
    """Tries to connect until somebody listens; returns why nobody has in time, None once somebody does."""
    deadline = time.monotonic() + timeout_s
    while True:
        problem = connect_problem(address, port, max(0.1, deadline - time.monotonic()))
        if problem is None or time.monotonic() + _RETRY_S > deadline:
            return problem
        time.sleep(_RETRY_S)
