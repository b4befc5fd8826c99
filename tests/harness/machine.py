"""Machines with another number of processors than this one."""

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_ddp.comm import hosts

__all__ = ["host_with"]


@contextmanager
def host_with(num_processors: int) -> Iterator[None]:
    """In here wrappers are made as on a host of which each rank may use `num_processors`, the same ones."""
    real = hosts._processors
    hosts._processors = lambda: frozenset(range(num_processors))
    try:
        yield
    finally:
        hosts._processors = real
