"""A Hydra job as it is handed from the process that composed it to the others of its run.

This module and those that it imports are also loaded by a child before the user's script runs: they import
neither torch nor Lightning, so that the script still decides when that happens, and from which package.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import pkgutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import IO, Any

from lightning_ddp.errors import ConfigurationError
from lightning_ddp.hydra_jobs.nodes import nodes_of
from lightning_ddp.hydra_jobs.resolver_cache import JobCache, answer_all, attach

__all__ = [
    "Composition",
    "HandedJob",
    "Handover",
    "pack",
    "read_handover",
    "task_name",
    "unpack",
    "without_files",
]

_OF_ANY_HANDLER = ("level", "formatter", "filters")

Composition = tuple[str | None, list[str], bytes]
"""Arguments of a call of `hydra.compose`, and what it returned, packed."""


def pack(config: Any, what: str) -> bytes:
    """Asks all resolvers, and packs a DictConfig with their answers; its classes may be of the user's script.

    Args:
        config: without parent; its `JobCache` is shared with the copies that the user holds.
        what: what it is called in an error.

    Raises:
        ConfigurationError: a value does not pickle; names its key.
    """
    cache = attach(config)
    answer_all(config)
    bare = copy.deepcopy(config)
    bare._metadata.resolver_cache = defaultdict(dict)
    try:
        return _dumps((bare, *cache.to_portable()))
    except Exception as error:
        raise ConfigurationError(_describe_unpicklable(bare, what, error)) from error


def unpack(packed: bytes) -> Any:
    """The DictConfig that `pack` has packed, with a `JobCache` that knows the answers."""
    config, *known = pickle.loads(packed)
    attach(config, JobCache(*known))
    return config


@dataclass(frozen=True, kw_only=True)
class HandedJob:
    """One job of Hydra: one call of the user's function."""

    task: str | None
    """The function, as `task_name` calls it; None for the first one that the script calls."""
    name: str
    """Hydra's name of the application."""
    config: bytes
    """What was composed, with the node `hydra`, packed."""
    search_path: Any
    """Hydra's ConfigSearchPath, or None; the Compose API needs it inside of a job."""
    working_dir: str | None
    """Where the job runs, if `hydra.job.chdir` is set."""


@dataclass(frozen=True, kw_only=True)
class Handover:
    """All that a child process gets from the process that starts it."""

    job: HandedJob | None
    """The job that the run belongs to; None outside of `hydra.main`."""
    compositions: list[Composition]
    """In the order in which the launching process has made them."""

    def to_file(self) -> IO[bytes]:
        """A file without a name, for the children to inherit; it is gone when the last one closes it."""
        file = tempfile.TemporaryFile(prefix="lightning_ddp-job-")  # noqa: SIM115 (the launcher closes it)
        # not as an object of a class of ours: pickle would import the package to find it
        file.write(pickle.dumps((None if self.job is None else asdict(self.job), self.compositions)))
        file.flush()
        return file


def read_handover(descriptor: int) -> Handover:
    """What `to_file` wrote. The descriptor is shared with other processes, and so is its position."""
    size = os.fstat(descriptor).st_size
    parts, position = [], 0
    while position < size:
        parts.append(os.pread(descriptor, size - position, position))
        position += len(parts[-1])
    os.close(descriptor)
    job, compositions = pickle.loads(b"".join(parts))
    return Handover(job=None if job is None else HandedJob(**job), compositions=compositions)


class _Pickler(pickle.Pickler):
    """Takes a class by its name, also where that is another one by now.

    Hydra executes the modules of its plugins again when they have been imported already, as in a worker of
    hydra-joblib-launcher: the classes of the configuration that the worker got are of the first time.
    """

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, type):
            return NotImplemented
        name = f"{value.__module__}:{value.__qualname__}"
        try:
            is_other = pkgutil.resolve_name(name) is not value
        except (AttributeError, ImportError, ValueError):  # pickle says it better
            return NotImplemented
        return (pkgutil.resolve_name, (name,)) if is_other else NotImplemented


def _dumps(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def task_name(function: Any) -> str:
    """What a function is called on all ranks, such as `__main__.train`."""
    inner = getattr(function, "func", function)  # of a functools.partial
    return f"{inner.__module__}.{getattr(inner, '__qualname__', type(inner).__qualname__)}"


def without_files(settings: Any) -> Any:
    """The settings of `logging.config.dictConfig`, with what goes to files on the console, or nowhere."""
    handlers = settings.get("handlers") or {}
    files = {name for name, handler in handlers.items() if "filename" in handler}
    kind = "logging.NullHandler" if len(files) < len(handlers) else "logging.StreamHandler"
    for name in files:
        kept = {key: value for key, value in handlers[name].items() if key in _OF_ANY_HANDLER}
        handlers[name] = {**kept, "class": kind}
    return settings


def _describe_unpicklable(config: Any, what: str, error: Exception) -> str:
    for key, value in _leaves(config):
        try:
            _dumps(value)
        except Exception as reason:  # noqa: BLE001 (classes raise what they like)
            return (
                f"{what} cannot be handed to the child processes: the value of `{key}`, a"
                f" {type(value).__qualname__}, does not pickle: {reason}. Put what describes it into the"
                " configuration, such as a name, and make the object in your function."
            )
    return f"{what} cannot be handed to the child processes: it does not pickle: {error}"


def _leaves(config: Any) -> Iterator[tuple[str, Any]]:
    for key, node in nodes_of(config):
        if not hasattr(node, "_content"):
            yield key, node._value()
        elif isinstance(node._metadata.object_type, type) and node._metadata.object_type not in (dict, list):
            yield key, node._metadata.object_type
