"""A Hydra job as other ranks get it: its configuration, with the values of its resolvers.

All copies of a job's configuration share one cache of values, which is handed over with it; interpolations
stay interpolations. A child loads this module before the user's script, which decides when torch is imported.
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
from typing import IO, Any, NamedTuple

from lightning_ddp.errors import ConfigurationError

_OF_THE_CONFIGURATION = {  # resolvers that depend on the configuration only, which all ranks share
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

BY_PLACE = ""
"""Name in a cache, as of a resolver, for values of resolvers that OmegaConf does not cache.

Their keys are the node's full key, the resolver and its arguments.
"""

Composition = tuple[str | None, list[str], bytes]
"""Arguments of a call of `hydra.compose`, and its packed result."""


def nodes_of(container: Any) -> Iterator[tuple[str, Any]]:
    """Yield the full key and the node of each OmegaConf node below a container, parents before children."""
    content = container._content
    if not isinstance(content, dict | list):  # None, '???' or an interpolation
        return
    for key, node in content.items() if isinstance(content, dict) else enumerate(content):
        yield container._get_full_key(key), node
        if hasattr(node, "_content"):
            yield from nodes_of(node)


# ---------------------------------------------------------------------- answers of resolvers


class JobCache(defaultdict[str, dict[Any, Any]]):
    """Replacement of OmegaConf's resolver cache (resolver -> arguments -> value), shared by its copies."""

    def __init__(self, cache: dict[str, dict[Any, Any]]) -> None:
        super().__init__(dict, {name: dict(values) for name, values in cache.items()})

    def __copy__(self) -> JobCache:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> JobCache:
        return self

    def __reduce__(self) -> tuple[Any, ...]:  # a launcher may send the job's result to another process
        return type(self), (self.to_portable(),)

    def to_portable(self) -> dict[str, dict[Any, Any]]:
        """Return the cache as a dict, without unpicklable values, which each rank resolves itself."""
        kept: dict[str, dict[Any, Any]] = {name: {} for name in self}
        for name, values in self.items():
            for key, value in values.items():
                with contextlib.suppress(Exception):  # classes may raise any error
                    pickle.dumps((key, value))
                    kept[name][key] = value
        return kept


def attach(config: Any, cache: JobCache | None = None) -> JobCache:
    """Set a `JobCache` as the resolver cache of a DictConfig without parent, and return that cache.

    Without `cache`, keep an existing `JobCache`, or make one with the values that OmegaConf has cached.
    """
    present = config._metadata.resolver_cache
    if cache is None:
        cache = present if isinstance(present, JobCache) else JobCache(present)
    config._metadata.resolver_cache = cache
    return cache


def detach(config: Any) -> None:
    """Replace a configuration's `JobCache` by OmegaConf's cache, dropping what only the former holds."""
    known = {name: dict(values) for name, values in attach(config).items() if name != BY_PLACE}
    config._metadata.resolver_cache = defaultdict(dict, known)


def answer_all(config: Any) -> None:
    """Resolve every interpolation in `config`, to fill its resolver cache; skip those that fail."""
    for _, node in nodes_of(config):
        if node._is_interpolation():
            with contextlib.suppress(Exception):  # it fails again where the user reads it
                node._dereference_node()


def install(base: types.ModuleType) -> None:
    """Patch `omegaconf.base` once, so that calls of resolvers read and fill a `JobCache`."""
    original = base.Container._evaluate_custom_resolver
    if hasattr(original, "original"):
        return

    def evaluate(self: Any, **call: Any) -> Any:
        cache, name = self._get_root()._metadata.resolver_cache, call["inter_type"]
        if not isinstance(cache, JobCache) or _looks_at_the_configuration(self, name):
            return original(self, **call)
        arguments = call["inter_args"]
        if not all(isinstance(value, str | int | float | bool | None) for value in arguments):
            arguments = call["inter_args_str"]
        place, answers = (self._get_full_key(call["key"]), name, arguments), cache[BY_PLACE]
        if place not in answers:
            answers[place] = original(self, **call)
        return answers[place]

    evaluate.original = original  # type: ignore[attr-defined]
    base.Container._evaluate_custom_resolver = evaluate


def _looks_at_the_configuration(container: Any, name: str) -> bool:
    """Return True if a resolver reads the configuration, which may change, so that it is not cached."""
    if name in _OF_THE_CONFIGURATION:
        return True
    wrapper = container._resolvers.get(name)
    names = getattr(getattr(wrapper, "__code__", None), "co_freevars", ())
    cells = getattr(wrapper, "__closure__", None) or ()
    return any(cell.cell_contents for free, cell in zip(names, cells, strict=True) if free in _PASSED)


# ---------------------------------------------------------------------- as bytes


def pack(config: Any, what: str) -> bytes:
    """Call all resolvers of a DictConfig, and return it pickled with their values.

    Its classes may be defined in the user's script.

    Raises:
        ConfigurationError: a value does not pickle; the message has its key and `what` for the whole.
    """
    cache = attach(config)
    answer_all(config)
    bare = copy.deepcopy(config)
    bare._metadata.resolver_cache = defaultdict(dict)
    try:
        return _dumps((bare, cache.to_portable()))
    except Exception as error:
        raise ConfigurationError(_describe_unpicklable(bare, what, error)) from error


def unpack(packed: bytes) -> Any:
    """Return the DictConfig that `pack` has pickled, with a `JobCache` of the resolvers' values."""
    config, known = pickle.loads(packed)
    attach(config, JobCache(known))
    return config


class Handover(NamedTuple):
    """The Hydra job and `hydra.compose` results that a child process gets from its parent process."""

    compositions: list[Composition]
    """Compositions, in the order in which the parent process made them."""
    task: str | None = None
    """Name of the job's function by `task_name`; None outside of `hydra.main`, then the rest is empty."""
    name: str = ""
    """Hydra's name of the application."""
    config: bytes = b""
    """The composed configuration with the node `hydra`, packed."""
    search_path: Any = None
    """Hydra's ConfigSearchPath, which the Compose API needs inside a job, or None."""
    working_dir: str | None = None
    """Working directory of the job if `hydra.job.chdir` is set, else None."""

    def to_file(self) -> IO[bytes]:
        """Write this job to an anonymous file and return it; the last process to close it deletes it."""
        file = tempfile.TemporaryFile(prefix="lightning_ddp-job-")  # noqa: SIM115 (the launcher closes it)
        # Not as an object of a class of the package: pickle would import the package to find it.
        file.write(pickle.dumps(tuple(self)))
        file.flush()
        return file


def read_handover(descriptor: int) -> Handover:
    """Return the `Handover` in a file of `to_file`, and close it; its shared position does not matter."""
    content = pickle.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
    os.close(descriptor)
    return Handover(*content)


class _Pickler(pickle.Pickler):
    """Pickler that refers to a class by its name, also if the name is bound to another class by now.

    Hydra executes the modules of its plugins again if they have been imported already, as in a worker of
    hydra-joblib-launcher. The configuration that the worker got has the classes of the first execution.
    """

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, type):
            return NotImplemented
        name = f"{value.__module__}:{value.__qualname__}"
        with contextlib.suppress(AttributeError, ImportError, ValueError):  # pickle has the better error
            if pkgutil.resolve_name(name) is not value:
                return pkgutil.resolve_name, (name,)
        return NotImplemented


def _dumps(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def task_name(function: Any) -> str:
    """Return a function's name with its module, the same on all ranks, such as `__main__.train`."""
    inner = getattr(function, "func", function)  # of a functools.partial
    return f"{inner.__module__}.{getattr(inner, '__qualname__', type(inner).__qualname__)}"


def without_files(settings: Any) -> Any:
    """Replace file handlers in `logging.config.dictConfig` settings by console or null ones; return them."""
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
        except Exception as reason:  # noqa: BLE001 (classes may raise any error)
            return (
                f"{what} cannot be passed to the child processes, because the value of `{key}`, a"
                f" {type(value).__qualname__}, does not pickle: {reason}. Put a description of it into the"
                " configuration, such as a name, and make the object in your function."
            )
    return f"{what} cannot be passed to the child processes, because it does not pickle: {error}"
