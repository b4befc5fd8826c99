"""A Hydra job as other ranks get it: its configuration, with all that its resolvers have answered.

OmegaConf asks a resolver (`${oc.env:USER}`, `${now:%H-%M}`, `${draw:}`) whenever a value is read, and keeps
the answers of some of them in a cache that belongs to the configuration. Here all copies of a job's
configuration share one cache, which also keeps the answers of the others. The rank that composed the
configuration hands the cache to the others together with it. Nothing else changes: interpolations stay
interpolations, and one that nobody could resolve fails where it is read.

A child loads this module before the user's script runs: it imports neither torch nor Lightning, so that the
script still decides when that happens, and from which package.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import pkgutil
import tempfile
import types
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from lightning_ddp.errors import ConfigurationError

__all__ = [
    "Composition",
    "HandedJob",
    "Handover",
    "ancestors",
    "answer_all",
    "attach",
    "detach",
    "install",
    "nodes_of",
    "pack",
    "read_handover",
    "task_name",
    "unpack",
    "without_files",
]

_OF_THE_CONFIGURATION = {  # resolvers that only look at the configuration, which all ranks share
    "hydra",
    "oc.create",
    "oc.decode",
    "oc.deprecated",
    "oc.dict.keys",
    "oc.dict.values",
    "oc.select",
    "python_version",
}
_PASSED = {"pass_parent", "pass_node", "pass_root"}
_OF_ANY_HANDLER = ("level", "formatter", "filters")

Place = tuple[str, str, tuple[Any, ...]]
Composition = tuple[str | None, list[str], bytes]
"""Arguments of a call of `hydra.compose`, and what it returned, packed."""


def nodes_of(container: Any) -> Iterator[tuple[str, Any]]:
    """Every node below a container, with its full key; each container before what it holds."""
    content = container._content
    if not isinstance(content, dict | list):  # None, '???' or an interpolation
        return
    for key, node in content.items() if isinstance(content, dict) else enumerate(content):
        yield container._get_full_key(key), node
        if hasattr(node, "_content"):
            yield from nodes_of(node)


def ancestors(node: Any) -> Iterator[Any]:
    """A node, what contains it, and so on up to the root."""
    while node is not None:
        yield node
        node = node._get_parent()


# ---------------------------------------------------------------------- answers of resolvers


class JobCache(defaultdict[str, Any]):
    """In the place of OmegaConf's resolver cache: name of a resolver -> arguments -> answer.

    Beside these it has answers of resolvers that OmegaConf does not cache, by the place in the configuration.
    """

    def __init__(self, cache: dict[str, dict[Any, Any]], answers: dict[Place, Any] | None = None) -> None:
        super().__init__(dict, {name: dict(values) for name, values in cache.items()})
        self.answers: dict[Place, Any] = dict(answers or {})

    def __copy__(self) -> JobCache:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> JobCache:
        return self

    def __reduce__(self) -> tuple[Any, ...]:  # a launcher may send the job's result to another process
        return type(self), self.to_portable()

    def to_portable(self) -> tuple[dict[str, dict[Any, Any]], dict[Place, Any]]:
        """The contents, less what cannot be pickled: of such an object each rank makes its own."""
        cache = {name: _that_pickle(values) for name, values in self.items()}
        return cache, _that_pickle(self.answers)


def _that_pickle(values: dict[Any, Any]) -> dict[Any, Any]:
    kept = {}
    for key, value in values.items():
        with contextlib.suppress(Exception):  # classes raise what they like
            pickle.dumps((key, value))
            kept[key] = value
    return kept


def attach(config: Any, cache: JobCache | None = None) -> JobCache:
    """Gives a DictConfig without parent a `JobCache`; returns it.

    Without `cache` it keeps the one that it has, or gets one that begins with what OmegaConf has cached.
    """
    present = config._metadata.resolver_cache
    if cache is None:
        cache = present if isinstance(present, JobCache) else JobCache(present)
    config._metadata.resolver_cache = cache
    return cache


def detach(config: Any) -> None:
    """Gives a configuration OmegaConf's own kind of cache back, with what that would hold."""
    known = {name: dict(values) for name, values in attach(config).items()}
    config._metadata.resolver_cache = defaultdict(dict, known)


def answer_all(config: Any) -> None:
    """Reads every interpolation in `config`, so that its cache holds all answers that can be had."""
    for _, node in nodes_of(config):
        if node._is_interpolation():
            with contextlib.suppress(Exception):  # it fails again, for the user, where it is read
                node._dereference_node()


def install(base: types.ModuleType) -> None:
    """Has OmegaConf look into `JobCache`s. Args: base: the module `omegaconf.base`. Idempotent."""
    original = base.Container._evaluate_custom_resolver
    if hasattr(original, "original"):
        return

    def evaluate(
        self: Any,
        key: Any,
        node: Any,
        inter_type: str,
        inter_args: tuple[Any, ...],
        inter_args_str: tuple[str, ...],
    ) -> Any:
        cache = self._get_root()._metadata.resolver_cache
        if not isinstance(cache, JobCache) or _looks_at_the_configuration(self, inter_type):
            return original(self, key, node, inter_type, inter_args, inter_args_str)
        is_plain = all(isinstance(value, str | int | float | bool | None) for value in inter_args)
        place = (self._get_full_key(key), inter_type, inter_args if is_plain else inter_args_str)
        if place not in cache.answers:
            cache.answers[place] = original(self, key, node, inter_type, inter_args, inter_args_str)
        return cache.answers[place]

    evaluate.original = original  # type: ignore[attr-defined]
    base.Container._evaluate_custom_resolver = evaluate


def _looks_at_the_configuration(container: Any, name: str) -> bool:
    """Whether a resolver is a function of the configuration: it is given nodes, and may follow changes."""
    if name in _OF_THE_CONFIGURATION:
        return True
    wrapper = container._resolvers.get(name)
    names = getattr(getattr(wrapper, "__code__", None), "co_freevars", ())
    cells = getattr(wrapper, "__closure__", None) or ()
    return any(cell.cell_contents for free, cell in zip(names, cells, strict=True) if free in _PASSED)


# ---------------------------------------------------------------------- as bytes


def pack(config: Any, what: str) -> bytes:
    """Asks all resolvers, and packs a DictConfig with their answers; its classes may be of the user's script.

    Raises `ConfigurationError` if a value does not pickle; names its key, and calls the whole `what`.
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
        file.write(pickle.dumps((None if self.job is None else vars(self.job), self.compositions)))
        file.flush()
        return file


def read_handover(descriptor: int) -> Handover:
    """What `to_file` wrote. The descriptor is shared with other processes, and so is its position."""
    job, compositions = pickle.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
    os.close(descriptor)
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
        with contextlib.suppress(AttributeError, ImportError, ValueError):  # pickle says it better
            if pkgutil.resolve_name(name) is not value:
                return pkgutil.resolve_name, (name,)
        return NotImplemented


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
    handlers = (settings or {}).get("handlers") or {}
    files = {name for name, handler in handlers.items() if "filename" in handler}
    kind = "logging.NullHandler" if len(files) < len(handlers) else "logging.StreamHandler"
    for name in files:
        kept = {key: value for key, value in handlers[name].items() if key in _OF_ANY_HANDLER}
        handlers[name] = {**kept, "class": kind}
    return settings


def _describe_unpicklable(config: Any, what: str, error: Exception) -> str:
    for key, node in nodes_of(config):
        value = node._metadata.object_type if hasattr(node, "_content") else node._value()
        try:
            _dumps(value)
        except Exception as reason:  # noqa: BLE001 (classes raise what they like)
            return (
                f"{what} cannot be passed to the child processes, because the value of `{key}`, a"
                f" {type(value).__qualname__}, does not pickle: {reason}. Put a description of it into the"
                " configuration, such as a name, and make the object in your function."
            )
    return f"{what} cannot be passed to the child processes, because it does not pickle: {error}"
