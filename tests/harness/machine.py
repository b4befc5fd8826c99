"""Ports of this machine that are free, and machines with another number of processors than this one."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_ddp.shm import hosts


@contextmanager
def host_with(num_processors: int) -> Iterator[None]:
    """In here wrappers are made as on a host of which each rank may use `num_processors`, the same ones."""
    real = hosts._processors
    hosts._processors = lambda: frozenset(range(num_processors))
    try:
        yield
    finally:
        hosts._processors = real


def free_port() -> int:
    """One below those that the kernel hands out by itself, so that nobody is given it meanwhile."""
    for port in range(20000 + os.getpid() % 10000, 32000):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")
