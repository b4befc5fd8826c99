"""Hydra's job in this process, its handover to children, and agreement of ranks that compose their own.

All copies of a job's configuration share one cache of the values of its resolvers, which is handed over with
it; interpolations stay interpolations. What `hydra.compose` has returned is handed over as well.

Under torchrun and srun each rank composes its job: all use rank 0's values, and only it writes files. Under
torchrun they agree before Hydra makes a directory. Elsewhere they do when the process group is made; values
that a rank has read before, and that differ, are reported.

A child loads this module before the user's script, which decides when torch is imported.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import os
import pickle
import pkgutil
import sys
import tempfile
import types
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, NamedTuple

from lightning_ddp.errors import ConfigurationError, RankMismatchError

STARTER = str(Path(__file__).with_name("child.py"))
"""Program that runs the user's program in a child process."""
_COMPOSED_WITHIN = timedelta(seconds=120)
_SEEDS = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
_KEY = "lightning_ddp/hydra_job"
_SHOWN = 5
_ZERO_ON_RANK_0 = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"),
    *("GROUP_RANK", "PET_NODE_RANK", "SKYPILOT_NODE_RANK"),
)
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
"""Name in a cache for values that OmegaConf does not cache, by the full key, the resolver, its arguments."""

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
    """Set a `JobCache` as the resolver cache of a root DictConfig, and return that cache.

    Without `cache`, keep an existing `JobCache`, or make one with the values that OmegaConf has cached.
    """
    present = config._metadata.resolver_cache
    if cache is None:
        cache = present if isinstance(present, JobCache) else JobCache(present)
    config._metadata.resolver_cache = cache
    return cache


def detach(config: Any) -> None:
    """Replace a configuration's `JobCache` by a plain dict, without values that OmegaConf does not cache."""
    known = {name: dict(values) for name, values in attach(config).items() if name != BY_PLACE}
    config._metadata.resolver_cache = defaultdict(dict, known)


def answer_all(config: Any) -> None:
    """Resolve every interpolation in `config`, to fill its resolver cache; skip those that fail."""
    for _, node in nodes_of(config):
        if node._is_interpolation():
            with contextlib.suppress(Exception):  # it fails again where the user reads it
                node._dereference_node()


def patch_resolvers(base: types.ModuleType) -> None:
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

    A value that does not pickle is a ConfigurationError with its key, and `what` for the whole.
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
    """Return the `Handover` that `to_file` wrote to a file, read from its beginning; close the descriptor."""
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


# ---------------------------------------------------------------------- the jobs of this process


def restore(variables: dict[str, str | None]) -> None:
    """Set environment variables to the given values, and remove those whose value is None."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


class Jobs:
    """State of this process's Hydra jobs, which run one after the other, and of its Compose API calls."""

    def __init__(self) -> None:
        self.task: Any = None
        """Function of the job; None outside jobs."""
        self.shared: Any = None
        """Configuration of the latest job whose values are shared by the ranks."""
        self.num_shared = 0
        self.withheld: tuple[Any, Any] | None = None
        """Hydra's settings of files, removed on ranks other than 0 until the job begins; else None."""
        self.compositions: list[Composition] | None = None
        """Compositions of the parent that a child has not requested yet; None in other processes."""
        self.open_store: Callable[[timedelta], Any] | None = None
        """Function that opens the store with later compositions, in a process that joined; else None."""
        self._composed: list[tuple[str | None, list[str], Any]] = []
        self._end_run: Callable[[BaseException | None], BaseException | None] | None = None
        self._publish: Callable[[str, bytes], None] | None = None
        self._num_since_launch: Counter[str] = Counter()
        self._variables: dict[str, str | None] = {}

    # ------------------------------------------------------------------ for Hydra

    def begin(self, task: Any, given: Any = None) -> None:
        """Record a Hydra job's function and seeds; put resolver values of its config `given` in JobCache."""
        self.task = task
        self._variables = {name: os.environ.get(name) for name in _SEEDS}
        if given is not None:
            answers = attach(self.config())
            for name, known in given._metadata.resolver_cache.items():
                answers[name].update(known)
            attach(given, answers)

    def end(self, error: BaseException | None) -> BaseException | None:
        """End a Hydra job and its ranks' run; return the exception with which the job fails, or None."""
        if self._end_run is not None:
            error = self._end_run(error)
        self.task = None
        self._composed.clear()
        restore(self._variables)
        self._variables = {}
        return error

    # ------------------------------------------------------------------ the Compose API

    def composed(self, config_name: str | None, overrides: list[str], compose: Callable[[], Any]) -> Any:
        """Return the result of a `hydra.compose` call: in a child the parent's result, else a new one."""
        config = self._handed(config_name, overrides)
        if config is None:
            config = compose()
            attach(config)
            if self._publish is None:
                self._composed.append((config_name, list(overrides), copy.deepcopy(config)))
            else:
                packed = _pack(config_name, overrides, config)[2]
                self._publish(self._next_key(config_name, overrides), packed)
        return config

    def _handed(self, config_name: str | None, overrides: list[str]) -> Any:
        if self.compositions is None:
            return None
        for composition in self.compositions:
            if composition[:2] == (config_name, list(overrides)):
                self.compositions.remove(composition)
                return unpack(composition[2])
        if self.open_store is None:
            return None
        store = self.open_store(_COMPOSED_WITHIN)
        try:
            return unpack(store.get(self._next_key(config_name, overrides)))
        except RuntimeError as error:  # torch's DistStoreError
            warnings.warn(
                f"rank 0 has not called hydra.compose({config_name!r}, {overrides!r}) within"
                f" {_COMPOSED_WITHIN.total_seconds():g} s, so this rank composes its own configuration"
                f" ({error})",
                stacklevel=6,
            )
            return None

    def _next_key(self, config_name: str | None, overrides: list[str]) -> str:
        """Count a `hydra.compose` call; return its result's key in the store: arguments and that count."""
        call = repr((config_name, list(overrides)))
        self._num_since_launch[call] += 1
        return f"lightning_ddp/composition/{self._num_since_launch[call]} {call}"

    def publish_to(self, publish: Callable[[str, bytes], None] | None) -> None:
        """Set the function that sends later `hydra.compose` results, by key, to running children; or None."""
        self._publish = publish
        self._num_since_launch.clear()

    # ------------------------------------------------------------------ for the launcher

    def handover(self, end_run: Callable[[BaseException | None], BaseException | None]) -> Handover | None:
        """Return the Hydra job and `hydra.compose` results for child processes; None without Hydra.

        `end_run` is called at the end of the present job with its error or None, and returns the error with
        which the job fails, or None.
        """
        self._end_run = end_run
        utils = sys.modules.get("hydra.core.utils")
        is_used = utils is not None and utils.JobRuntime.instance().get("name") != "UNKNOWN_NAME"
        if self.task is None and not is_used:
            return None
        compositions = [_pack(*composed) for composed in self._composed]
        if self.task is None:
            return Handover(compositions)
        from hydra import version
        from hydra.core.global_hydra import GlobalHydra
        from hydra.core.utils import JobRuntime

        config = self.config()
        instance = GlobalHydra.instance().hydra
        chdir = config.hydra.job.chdir
        moves = chdir if chdir is not None else not version.base_at_least("1.2")
        return Handover(
            compositions,
            task=task_name(self.task),
            name=JobRuntime.instance().get("name"),
            config=pack(config, "the configuration"),
            search_path=None if instance is None else instance.config_loader.get_search_path(),
            working_dir=config.hydra.runtime.output_dir if moves else None,
        )

    def config(self) -> Any:
        """Return the composed configuration of the Hydra job, with the node `hydra`; None outside jobs."""
        if self.task is None:
            return None
        from hydra.core.hydra_config import HydraConfig

        hydra: Any = HydraConfig.get()
        config = hydra._get_parent()
        attach(config)
        return config

    def program(self) -> tuple[str, str] | None:
        """Return ("script", path) or ("module", name) in a worker that unpickled its job, else None.

        Such are the workers of hydra-joblib-launcher and hydra-submitit-launcher.
        """
        given = getattr(inspect.unwrap(getattr(self.task, "func", self.task)), "__globals__", {})
        file, package = given.get("__file__"), given.get("__package__")
        is_here = file == vars(sys.modules["__main__"]).get("__file__")
        if file is None or is_here or given.get("__name__") != "__main__":
            return None
        return ("module", f"{package}.{Path(file).stem}") if package else ("script", file)

    def runtime(self, name: str) -> str | None:
        """Return a directory of the Hydra job, `cwd` (at its start) or `output_dir`; None outside jobs."""
        return None if self.task is None else str(self.config().hydra.runtime[name])


@functools.cache
def jobs() -> Jobs:
    """Return this process's only `Jobs` object, as Hydra has one job at a time in a process."""
    return Jobs()


def _pack(config_name: str | None, overrides: list[str], config: Any) -> Composition:
    return config_name, overrides, pack(config, f"what hydra.compose({config_name!r}) returned")


# ---------------------------------------------------------------------- ranks that compose by themselves


def share_job(store: Any, *, rank: int) -> None:
    """Replace resolver values of this Hydra job by rank 0's, unless torchrun ranks already agreed on them.

    Collective: all ranks must call it.

    Raises:
        RankMismatchError: this rank composed another configuration than rank 0; the message has the lines.
    """
    config = jobs().config()
    if config is None or config is jobs().shared:
        return
    differing = _read_rank_0(store, config, rank)
    if differing:
        warnings.warn(
            f"rank {rank}: these values of the configuration were read before the ranks were connected, and"
            f" differ from rank 0's: {'; '.join(differing[:_SHOWN])}. Rank 0's values are used from now on."
            " Let hydra.run.dir and other shared values depend on something that all ranks have in common,"
            " such as ${oc.env:SLURM_JOB_ID}, or start the ranks with torchrun, under which they agree"
            " first.",
            stacklevel=2,
        )


def agree(config: Any) -> None:
    """Replace resolver values in a Hydra configuration that each torchrun rank has composed by rank 0's.

    Changes nothing but the cache elsewhere. Raises as `share_job` does.

    Collective: all ranks must call it.
    """
    attach(config)  # before the job copies it: the copies share the cache
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # by torchrun
        import torch.distributed as dist  # late, because a job without training may not need it

        from lightning_ddp.comm.barrier import store_of_attempt

        agents = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        store = store_of_attempt(agents, rank=_rank(), world_size=int(os.environ["WORLD_SIZE"]))
        _read_rank_0(store, config, _rank())


def _rank() -> int:
    """Return this process's rank under torchrun; elsewhere 0 on rank 0 (or its node), else more than 0."""
    # torchrun numbers the nodes by itself, so SLURM_PROCID may be another number
    names = ("RANK",) if {"RANK", "LOCAL_RANK"} <= os.environ.keys() else _ZERO_ON_RANK_0
    return max(int(os.environ.get(name) or 0) for name in names)


def _read_rank_0(store: Any, config: Any, rank: int) -> list[str]:
    """Publish rank 0's resolver values in the store, or adopt them; return descriptions of differences."""
    jobs().shared, jobs().num_shared = config, jobs().num_shared + 1
    key, cache = f"{_KEY}/{jobs().num_shared}", attach(config)
    if rank == 0:
        answer_all(config)
        store.set(key, pickle.dumps((_text_of(config), cache.to_portable())))
        return []
    text, known = pickle.loads(store.get(key))
    mine, theirs = _text_of(config).splitlines(), text.splitlines()
    if mine != theirs:
        only_here = [line.strip() for line in mine if line not in theirs][:_SHOWN]
        only_there = [line.strip() for line in theirs if line not in mine][:_SHOWN]
        raise RankMismatchError(
            f"rank {rank} composed another configuration than rank 0: here {only_here}, on rank 0"
            f" {only_there}. Start the program with the same arguments and files on all nodes."
        )
    differing = []
    for name, values in known.items():
        for place, value in values.items():
            here = cache[name].get(place, value)
            if here != value:
                what = f"`{place[0]}`" if name == BY_PLACE else f"${{{name}:{','.join(place)}}}"
                differing.append(f"{what} ({here!r} here, {value!r} there)")
        cache[name].update(values)
    return differing


def _text_of(config: Any) -> str:
    """Return the user's part of a configuration as YAML, with unresolved interpolations."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.masked_copy(config, [key for key in config if key != "hydra"]))


def withhold_files(config: Any) -> None:
    """Disable `.hydra` and log files of a Hydra job on ranks above 0, until `give_files_back`."""
    from omegaconf import OmegaConf

    if _rank() > 0:
        node = config.hydra.job_logging  # copied, as setting a value changes the existing node
        job_logging = None if node is None else OmegaConf.to_container(node)
        jobs().withheld = config.hydra.output_subdir, job_logging
        _set_files(config.hydra, None, without_files(copy.deepcopy(job_logging)))


def give_files_back() -> None:
    """Restore the settings of Hydra's output files that `withhold_files` removed, for the job to read."""
    from hydra.core.hydra_config import HydraConfig

    withheld, jobs().withheld = jobs().withheld, None
    if withheld is not None:
        for hydra in (jobs().config().hydra, HydraConfig.get()):
            _set_files(hydra, *withheld)


def _set_files(hydra: Any, output_subdir: Any, job_logging: Any) -> None:
    from omegaconf import open_dict, read_write

    with read_write(hydra), open_dict(hydra):
        hydra.output_subdir, hydra.job_logging = output_subdir, job_logging
