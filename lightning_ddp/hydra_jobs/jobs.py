"""The process that uses Hydra: its job, what it has composed, and what its children get of both."""

from __future__ import annotations

import copy
import gc
import hashlib
import os
import sys
import types
import warnings
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_ddp.hydra_jobs.handover import Composition, HandedJob, Handover, pack, task_name, unpack
from lightning_ddp.hydra_jobs.resolver_cache import attach

__all__ = ["STARTER", "JobEnd", "jobs", "restore"]

JobEnd = Callable[[BaseException | None], BaseException | None]
"""Ends the run of a job that has raised something, or None; returns what the job then fails with."""

STARTER = str(Path(__file__).with_name("child.py"))
"""The program that runs the user's in a child."""
_COMPOSED_WITHIN = timedelta(seconds=120)
_SEEDS = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")


def restore(variables: dict[str, str | None]) -> None:
    """Sets environment variables back to what they were; None for not set."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


class _Jobs:
    """The jobs of this process, one after the other, and what the Compose API has composed in it."""

    schemas: Any
    """The module `conf.store`, which lies above this room."""

    def __init__(self) -> None:
        self.is_running = False
        self.task: Any = None
        """The function of the job; None for one that has imported this package, unless it is of a sweep."""
        self.shared: Any = None
        """The configuration of the latest job whose values the ranks have shared; see `shared_job`."""
        self.num_shared = 0
        self.withheld: tuple[Any, Any] | None = None
        """The settings by which Hydra would write files that are rank 0's."""
        self.compositions: list[Composition] | None = None
        """In a child: what it was handed, and has not asked for yet."""
        self.open_store: Callable[[timedelta], Any] | None = None
        """In a process that has joined its run: opens the store of what is composed from then on."""
        self._composed: list[tuple[str | None, list[str], Any]] = []
        self._late: Any = None
        self._end_run: JobEnd | None = None
        self._publish: Callable[[str, bytes], None] | None = None
        self._num_since_launch: Counter[str] = Counter()
        self._variables: dict[str, str | None] = {}

    # ------------------------------------------------------------------ for Hydra

    def begin(self, task: Any) -> None:
        """A job is about to call its function; None where nobody knows that."""
        self.is_running, self.task = True, task
        self._variables = {name: os.environ.get(name) for name in _SEEDS}

    def begin_late(self, result: Any, task: Any) -> None:
        """The job that runs has imported this package: its begin was not heard of, nor will its end be.

        Args:
            result: Hydra's JobReturn of it.
            task: its function, or None.
        """
        self.begin(task)
        self._late = result
        answers = attach(self.config())
        for name, known in result.cfg._metadata.resolver_cache.items():
            answers[name].update(known)
        attach(result.cfg, answers)  # what the user holds

    def end(self, error: BaseException | None) -> BaseException | None:
        """A job has ended, with `error` or None. Ends its run; returns what the job then fails with."""
        if self._end_run is not None:
            error = self._end_run(error)
        self.is_running, self.task = False, None
        self._composed.clear()
        restore(self._variables)
        self._variables = {}
        return error

    def end_late_one(self) -> None:
        """Ends the run of the job that `begin_late` has begun, as the next one is about to begin."""
        from hydra.core.utils import JobStatus

        late, self._late = self._late, None
        if late is not None:
            error = self.end(late._return_value if late.status is JobStatus.FAILED else None)
            if error is not None:
                late.return_value, late.status = error, JobStatus.FAILED

    # ------------------------------------------------------------------ the Compose API

    def note(self, config_name: str | None, overrides: list[str], config: Any) -> None:
        """Hands what `hydra.compose` returns to the children, to those that run already by a store."""
        attach(config)
        if self._publish is None:
            self._composed.append((config_name, list(overrides), copy.deepcopy(config)))
        else:
            key = self._next_key(config_name, overrides)
            self._publish(key, _pack(config_name, overrides, config)[2])

    def handed(self, config_name: str | None, overrides: list[str]) -> Any:
        """In a child what the launching process has composed; None for what it has not."""
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
                f" {_COMPOSED_WITHIN.total_seconds():g} s, so this rank composes by itself ({error})",
                stacklevel=4,
            )
            return None

    def _next_key(self, config_name: str | None, overrides: list[str]) -> str:
        """Where in the run's store a composition after the launch is, each time in another place."""
        call = repr((config_name, list(overrides)))
        self._num_since_launch[call] += 1
        place = f"{self._num_since_launch[call]} {call}"
        return "lightning_ddp/composition/" + hashlib.sha256(place.encode()).hexdigest()

    def publish_to(self, publish: Callable[[str, bytes], None] | None) -> None:
        """From now on what `hydra.compose` returns is published for children that run already.

        Args:
            publish: called with a key and a value; None once there are no children.
        """
        self._publish = publish
        self._num_since_launch.clear()

    # ------------------------------------------------------------------ for the launcher

    def handover(self, end_run: JobEnd) -> Handover | None:
        """What the children of this process have to know; None where Hydra is not used.

        Args:
            end_run: called at the end of the job that they are started in.

        Raises:
            ConfigurationError: a configuration does not pickle; names the key.
        """
        self._end_run = end_run
        utils = sys.modules.get("hydra.core.utils")
        if not self.is_running and (
            utils is None or utils.JobRuntime.instance().get("name") == "UNKNOWN_NAME"
        ):
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
        """What Hydra has composed for the job, with the node `hydra`; None outside of jobs."""
        if not self.is_running:
            return None
        from hydra.core.hydra_config import HydraConfig

        hydra: Any = HydraConfig.get()
        config = hydra._get_parent()
        attach(config)
        return config

    def program(self) -> tuple[str, str] | None:
        """What the user runs, where the job's function has come here in a pickle; else None.

        As in a worker of hydra-joblib-launcher or hydra-submitit-launcher, which runs a program of its own.

        Returns:
            `("script", path)` or `("module", name)`.
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
        """`cwd`, where the user has started the program, or `output_dir` of the job; None outside of jobs."""
        return None if not self.is_running else str(self.config().hydra.runtime[name])


jobs = _Jobs()
"""The state of Hydra's jobs is one for the process: Hydra itself has one job at a time, in its singletons."""


def _pack(config_name: str | None, overrides: list[str], config: Any) -> Composition:
    return config_name, overrides, pack(config, f"what hydra.compose({config_name!r}) returned")
