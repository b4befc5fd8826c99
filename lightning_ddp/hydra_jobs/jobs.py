"""Hydra's job in this process: its compositions, its handover to children, its values on all ranks.

If each process composes by itself (torchrun, srun), all ranks use rank 0's values. Under torchrun they do so
before Hydra makes a directory, so all ranks have the same one. Elsewhere they do so when the process group is
made; values that a rank has read before that, and that differ, are reported. Only rank 0 writes `.hydra`
and the job's log file.
"""

from __future__ import annotations

import copy
import functools
import gc
import hashlib
import os
import pickle
import sys
import types
import warnings
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_ddp.errors import RankMismatchError
from lightning_ddp.hydra_jobs.handover import (
    Composition,
    HandedJob,
    Handover,
    answer_all,
    attach,
    pack,
    task_name,
    unpack,
    without_files,
)

__all__ = ["STARTER", "agree_before_job", "give_files_back", "jobs", "restore", "share_job"]

STARTER = str(Path(__file__).with_name("child.py"))
"""Program that runs the user's program in a child process."""
_COMPOSED_WITHIN = timedelta(seconds=120)
_SEEDS = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
_KEY = "lightning_ddp/hydra_job"
_SHOWN = 5
_ZERO_ON_RANK_0 = ("NODE_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")


def restore(variables: dict[str, str | None]) -> None:
    """Restore environment variables; None for one that was not set."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


class Jobs:
    """State of this process's jobs, which run one after the other, and of its Compose API calls."""

    def __init__(self) -> None:
        self.is_running = False
        self.task: Any = None
        """Function of the job; None if unknown, as the job imported this package and is not of a sweep."""
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
        self._late: Any = None
        self._end_run: Callable[[BaseException | None], BaseException | None] | None = None
        self._publish: Callable[[str, bytes], None] | None = None
        self._num_since_launch: Counter[str] = Counter()
        self._variables: dict[str, str | None] = {}

    # ------------------------------------------------------------------ for Hydra

    def begin(self, task: Any) -> None:
        """Record the begin of a job, just before its function `task` (None if unknown) is called."""
        self.is_running, self.task = True, task
        self._variables = {name: os.environ.get(name) for name in _SEEDS}

    def begin_late(self, result: Any, task: Any) -> None:
        """Record the begin of a job that imported this package and whose end is not reported.

        `result` is Hydra's result of the job, whose status shows the end.
        """
        self.begin(task)
        self._late = result
        answers = attach(self.config())
        for name, known in result.cfg._metadata.resolver_cache.items():
            answers[name].update(known)
        attach(result.cfg, answers)  # the user's copy of the configuration

    def end(self, error: BaseException | None) -> BaseException | None:
        """End a job and its run; return the error with which the job fails, or None."""
        if self._end_run is not None:
            error = self._end_run(error)
        self.is_running, self.task = False, None
        self._composed.clear()
        restore(self._variables)
        self._variables = {}
        return error

    def end_late_one(self) -> None:
        """End the run of a job from `begin_late`, before the next job begins."""
        from hydra.core.utils import JobStatus

        late, self._late = self._late, None
        if late is not None:
            error = self.end(late._return_value if late.status is JobStatus.FAILED else None)
            if error is not None:
                late.return_value, late.status = error, JobStatus.FAILED

    # ------------------------------------------------------------------ the Compose API

    def note(self, config_name: str | None, overrides: list[str], config: Any) -> None:
        """Pass a result of `hydra.compose` to the children; to running children through the store."""
        attach(config)
        composed = (config_name, list(overrides), config)
        if self._publish is None:
            self._composed.append(copy.deepcopy(composed))
        else:
            self._publish(self._next_key(config_name, overrides), _pack(*composed)[2])

    def handed(self, config_name: str | None, overrides: list[str]) -> Any:
        """Return the parent's result of this `hydra.compose` call in a child, or None."""
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
                stacklevel=4,
            )
            return None

    def _next_key(self, config_name: str | None, overrides: list[str]) -> str:
        """Return the key in the store for the next result of this `hydra.compose` call."""
        call = repr((config_name, list(overrides)))
        self._num_since_launch[call] += 1
        place = f"{self._num_since_launch[call]} {call}"
        return "lightning_ddp/composition/" + hashlib.sha256(place.encode()).hexdigest()

    def publish_to(self, publish: Callable[[str, bytes], None] | None) -> None:
        """Publish later results of `hydra.compose`, by a key, for running children; None to stop."""
        self._publish = publish
        self._num_since_launch.clear()

    # ------------------------------------------------------------------ for the launcher

    def handover(self, end_run: Callable[[BaseException | None], BaseException | None]) -> Handover | None:
        """Return the job and compositions for the children; None if Hydra is not used.

        Args:
            end_run: called at the end of the present job with its error or None; returns the error with
                which the job fails, or None.

        Raises:
            ConfigurationError: a configuration does not pickle; the message has the key.
        """
        self._end_run = end_run
        utils = sys.modules.get("hydra.core.utils")
        is_used = utils is not None and utils.JobRuntime.instance().get("name") != "UNKNOWN_NAME"
        if not (self.is_running or is_used):
            return None
        compositions = [_pack(*composed) for composed in self._composed]
        return Handover(job=self._handed_job() if self.is_running else None, compositions=compositions)

    def _handed_job(self) -> HandedJob:
        from hydra import version
        from hydra.core.global_hydra import GlobalHydra
        from hydra.core.utils import JobRuntime

        config = self.config()
        instance = GlobalHydra.instance().hydra
        chdir = config.hydra.job.chdir
        moves = chdir if chdir is not None else not version.base_at_least("1.2")
        return HandedJob(
            task=None if self.task is None else task_name(self.task),
            name=JobRuntime.instance().get("name"),
            config=pack(config, "the configuration"),
            search_path=None if instance is None else instance.config_loader.get_search_path(),
            working_dir=config.hydra.runtime.output_dir if moves else None,
        )

    def config(self) -> Any:
        """Return the job's composed configuration, with the node `hydra`; None outside jobs."""
        if not self.is_running:
            return None
        from hydra.core.hydra_config import HydraConfig

        hydra: Any = HydraConfig.get()
        config = hydra._get_parent()
        attach(config)
        return config

    def program(self) -> tuple[str, str] | None:
        """Return the user's program, ("script", path) or ("module", name), if this process runs another.

        That is so in a worker of hydra-joblib-launcher or hydra-submitit-launcher, which unpickles the job's
        function.
        """
        if not self.is_running:
            return None
        functions = [getattr(self.task, "func", self.task)]
        if self.task is None:
            functions = [each for each in gc.get_objects() if type(each) is types.FunctionType]
        main = vars(sys.modules["__main__"])
        name = sys.modules["hydra.core.utils"].JobRuntime.instance().get("name")
        for function in functions:
            given = getattr(function, "__globals__", main)
            file, package = given.get("__file__"), given.get("__package__")
            if file is None or given.get("__name__") != "__main__" or file == main.get("__file__"):
                continue
            stem = os.path.splitext(os.path.basename(file))[0]
            if self.task is not None or stem == name:
                return ("module", f"{package}.{stem}") if package else ("script", file)
        return None

    def runtime(self, name: str) -> str | None:
        """Return a path of the job, `cwd` (of the start) or `output_dir`; None outside jobs."""
        return None if not self.is_running else str(self.config().hydra.runtime[name])


@functools.cache
def jobs() -> Jobs:
    """Return the state of Hydra's jobs, a singleton, as Hydra has one job at a time in a process."""
    return Jobs()


def _pack(config_name: str | None, overrides: list[str], config: Any) -> Composition:
    return config_name, overrides, pack(config, f"what hydra.compose({config_name!r}) returned")


# ---------------------------------------------------------------------- ranks that each compose


def share_job(store: Any, *, rank: int) -> None:
    """Make this process's job use rank 0's values, on ranks that composed their job themselves.

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


def agree_before_job(config: Any, *, is_sweep: bool) -> None:
    """Prepare a job: let only rank 0 write files; under torchrun use rank 0's values.

    Communicates under torchrun only; raises as `share_job` does.

    Collective: all ranks must call it.

    Args:
        config: composed configuration with the node `hydra`; changed in place.
        is_sweep: True for the configuration of a sweep, from which its jobs are composed.
    """
    attach(config)  # before the job copies it: the copies share the cache
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        rank = int(os.environ["RANK"])
        _read_rank_0(_store_of_agents(rank), config, rank)
    else:
        rank = max(int(os.environ.get(name) or 0) for name in _ZERO_ON_RANK_0)
    if rank > 0 and not is_sweep:
        hydra = config.hydra
        jobs().withheld = (hydra.output_subdir, _plain(hydra.job_logging))
        _set_files(hydra, None, without_files(_plain(hydra.job_logging)))


def _store_of_agents(rank: int) -> Any:
    import torch.distributed as dist  # late, because a job without training may not need it

    from lightning_ddp.comm.barrier import store_of_attempt

    agents = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return store_of_attempt(agents, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))


def _read_rank_0(store: Any, config: Any, rank: int) -> list[str]:
    """Adopt rank 0's values; return descriptions of values that this process has read differently."""
    jobs().shared, jobs().num_shared = config, jobs().num_shared + 1
    key, cache = f"{_KEY}/{jobs().num_shared}", attach(config)
    if rank == 0:
        answer_all(config)
        store.set(key, pickle.dumps((_text_of(config), *cache.to_portable())))
        return []
    text, cached, answers = pickle.loads(store.get(key))
    _require_same(_text_of(config), text, rank)
    differing = [
        f"`{place[0]}` ({cache.answers[place]!r} here, {value!r} there)"
        for place, value in answers.items()
        if place in cache.answers and cache.answers[place] != value
    ]
    for name, values in cached.items():
        differing += [
            f"${{{name}:{','.join(key)}}} ({cache[name][key]!r} here, {value!r} there)"
            for key, value in values.items()
            if cache[name].get(key, value) != value
        ]
        cache[name].update(values)
    cache.answers.update(answers)
    return differing


def _text_of(config: Any) -> str:
    """Return the user's part of a configuration as YAML, with unresolved interpolations."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.masked_copy(config, [key for key in config if key != "hydra"]))


def _require_same(here: str, there: str, rank: int) -> None:
    if here == there:
        return
    mine, theirs = here.splitlines(), there.splitlines()
    only_here = [line.strip() for line in mine if line not in theirs][:_SHOWN]
    only_there = [line.strip() for line in theirs if line not in mine][:_SHOWN]
    raise RankMismatchError(
        f"rank {rank} composed another configuration than rank 0: here {only_here}, on rank 0 {only_there}."
        " Start the program with the same arguments and files on all nodes."
    )


def _plain(node: Any) -> Any:
    """Copy a node to plain containers, as setting a value changes the existing node."""
    from omegaconf import OmegaConf

    return None if node is None else OmegaConf.to_container(node)


def give_files_back() -> None:
    """Restore the settings of files that `agree_before_job` has removed, for the job to read."""
    from hydra.core.hydra_config import HydraConfig

    withheld, jobs().withheld = jobs().withheld, None
    if withheld is not None:
        for hydra in (jobs().config().hydra, HydraConfig.get()):
            _set_files(hydra, *withheld)


def _set_files(hydra: Any, output_subdir: Any, job_logging: Any) -> None:
    from omegaconf import open_dict, read_write

    with read_write(hydra), open_dict(hydra):
        hydra.output_subdir, hydra.job_logging = output_subdir, job_logging
