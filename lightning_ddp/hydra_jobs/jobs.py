"""Hydra's job in this process: what `hydra.compose` has returned in it, and its handover to children."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_ddp.hydra_jobs.handover import Composition, Handover, attach, pack, task_name, unpack

STARTER = str(Path(__file__).with_name("child.py"))
"""Program that runs the user's program in a child process."""
_COMPOSED_WITHIN = timedelta(seconds=120)
_SEEDS = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")


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
        """Record the start of a Hydra job, with the seeds in the environment.

        Args:
            task: function of the job.
            given: configuration that a function which has begun was given, and may have read; else None.
        """
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
        """Return the key in the store for the next result of this `hydra.compose` call."""
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

        Args:
            end_run: called at the end of the present job with its error or None; returns the error with
                which the job fails, or None.

        Raises:
            ConfigurationError: a configuration does not pickle; the message has the key.
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
        """Return kind and path of the user's program if a Hydra launcher's worker runs it; else None.

        That is ("script", path) or ("module", name) in a worker of hydra-joblib-launcher or
        hydra-submitit-launcher, which unpickles the job's function.
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
