"""Subclasses of Hydra's classes, which report jobs and compositions to `jobs`, and find the groups in `conf`.

Existing objects of Hydra get such a class, because a running sweep holds the same loader. A program that asks
for none of the package's groups, neither by its defaults nor by its search path, composes the same
configuration as without the package: `strategy`, `trainer` and `launcher` may be keys or groups of its own.
"""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource
from hydra._internal.defaults_list import create_defaults_list
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import RunMode
from omegaconf import OmegaConf

from lightning_ddp.hydra_jobs.handover import detach
from lightning_ddp.hydra_jobs.jobs import agree_before_job, give_files_back, jobs

__all__ = ["JobHydra", "JobLoader", "Task", "extend"]

_FOLDER = Path(__file__).parents[1] / "conf"
_PROVIDER = "lightning_ddp"
_PACKAGE = "lightning_ddp.conf"
_GROUPS = ("strategy", "trainer", "launcher")


def extend(hydra: Hydra, *, is_late: bool) -> None:
    """Change the classes of a `Hydra` and its loader, perhaps within a job or a composition."""
    if type(hydra) is Hydra:
        hydra.__class__ = JobHydra
    if type(hydra.config_loader) is ConfigLoaderImpl:
        hydra.config_loader.__class__ = JobLoader
    if is_late:
        _register_long_names()
    if not is_late or not HydraConfig.initialized():
        return
    # Hydra keeps no reference to the present job or its sweep, so search all objects.
    objects = gc.get_objects()
    task = None
    for each in objects:
        if issubclass(type(each), Launcher) and getattr(each, "task_function", None) is not None:
            task, each.task_function = each.task_function, Task(each.task_function)
    for each in objects:
        if type(each) is JobReturn and each.status is JobStatus.UNKNOWN:
            jobs().begin_late(each, task)


# ---------------------------------------------------------------------- jobs


class Task:
    """A job's function that reports begin and end to `jobs`; unpickling it imports the package."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function = function

    def __call__(self, config: Any) -> Any:
        jobs().begin(self._function)
        give_files_back()
        try:
            result = self._function(config)
        except Exception as error:
            jobs().end(error)
            raise
        failure = jobs().end(None)
        if failure is not None:
            raise failure
        return result


class JobHydra(Hydra):
    """Hydra that reports its jobs and compositions to `jobs`."""

    _is_of_run = False
    """True if the next composition is for a run, and not for something else, such as `--cfg`."""

    def run(self, config_name: str | None, task_function: Any, *args: Any, **kwargs: Any) -> Any:
        self._is_of_run = True
        return super().run(config_name, Task(task_function), *args, **kwargs)

    def multirun(self, config_name: str | None, task_function: Any, *args: Any, **kwargs: Any) -> Any:
        self._is_of_run = True
        return super().multirun(config_name, Task(task_function), *args, **kwargs)

    def compose_config(
        self, config_name: str | None, overrides: list[str], run_mode: RunMode, *args: Any, **kwargs: Any
    ) -> Any:
        is_of_run, self._is_of_run = self._is_of_run, False
        is_api = not kwargs.get("from_shell", True)
        config = jobs().handed(config_name, overrides) if is_api else None
        if config is not None:
            return config
        config = super().compose_config(config_name, overrides, run_mode, *args, **kwargs)
        if is_api:
            jobs().note(config_name, overrides, config)
        if is_of_run:
            is_sweep = run_mode == RunMode.MULTIRUN
            agree_before_job(config, is_sweep=is_sweep)
            if is_sweep:  # each job must resolve values separately, and Hydra copies the configuration
                detach(config)
        return config


# ---------------------------------------------------------------------- compositions


class JobLoader(ConfigLoaderImpl):
    """Hydra's loader with the package's groups, if a composition asks for them."""

    _taking_part: frozenset[str] = frozenset()
    """Groups that the latest composition has asked for; `_PROVIDER` for groups below that name."""

    def load_sweep_config(self, master_config: Any, sweep_overrides: list[str]) -> Any:
        jobs().end_late_one()
        config = super().load_sweep_config(master_config, sweep_overrides)
        agree_before_job(config, is_sweep=False)
        return config

    def _parse_overrides_and_create_caching_repo(self, config_name: str | None, overrides: list[str]) -> Any:
        parsed, repository = super()._parse_overrides_and_create_caching_repo(config_name, overrides)
        if config_name is not None or overrides:  # not for options of a group: help, completion, glob
            self._taking_part = _asked_for(repository, config_name, parsed)
        _add_groups(repository, self._taking_part)
        return parsed, repository


@functools.cache
def _register_long_names() -> None:
    """Register the groups below `lightning_ddp/` in Hydra's ConfigStore.

    Not as `strategy`, `trainer` and `launcher`: Hydra 1 uses an entry of its store as the schema of a file of
    the same name, so a user's `trainer/gpu.yaml` could not be composed any more.
    """
    for path in sorted(_FOLDER.rglob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        package = re.match(r"# @package (\S+)", text)
        ConfigStore.instance().store(
            group=f"{_PROVIDER}/{path.parent.relative_to(_FOLDER).as_posix()}",
            name=path.stem,
            node=OmegaConf.create(text),
            package=package[1] if package else None,
            provider=_PROVIDER,
        )


def _asked_for(repository: Any, config_name: str | None, overrides: Any) -> frozenset[str]:
    """Return the package's groups that a composition uses."""
    has_path = any(_is_ours(source) for source in repository.get_sources())
    has_long_name = any(override.key_or_group.startswith(f"{_PROVIDER}/") for override in overrides)
    asked = frozenset((_GROUPS if has_path else ()) + ((_PROVIDER,) if has_long_name or has_path else ()))
    while True:
        _add_groups(repository, asked)
        try:
            found = create_defaults_list(
                repo=repository,
                config_name=config_name,
                overrides_list=overrides,
                prepend_hydra=True,
                skip_missing=True,
            )
        except Exception as error:  # noqa: BLE001 (it is raised again in the composition)
            lacking = _asked_by_error(error, repository, overrides)
        else:
            lacking = _asked_by_nothing(found, repository)
        if lacking <= asked:
            return asked
        asked |= lacking


def _asked_by_error(error: BaseException, repository: Any, overrides: Any) -> Set[str]:
    """Return the package's group that is missing in the list of defaults, as a set.

    Empty for a choice on the command line in a group of the program itself.
    """
    group, _, choice = (getattr(error, "missing_cfg_file", None) or "").rpartition("/")
    is_chosen = any((each.key_or_group, each.value()) == (group, choice) for each in overrides)
    return set() if is_chosen and repository.group_exists(group) else _top_of_ours(group)


def _asked_by_nothing(found: Any, repository: Any) -> Set[str]:
    """Return the package's groups named without a choice, as in `strategy: null`."""
    choices = found.overrides.known_choices.items()
    groups = [key.partition("@")[0] for key, choice in choices if choice in (None, "???")]
    return {top for group in groups if not repository.group_exists(group) for top in _top_of_ours(group)}


def _top_of_ours(group: str) -> Set[str]:
    top = group.partition("/")[0]
    return {top} if top == _PROVIDER or (top in _GROUPS and (_FOLDER / group).is_dir()) else set()


def _add_groups(repository: Any, groups: Set[str]) -> None:
    """Add the package's groups to a repository, after the user's files and before the store.

    Hydra requires that the store is last.
    """
    sources = repository.get_sources()
    has_path = any(_is_ours(source) for source in sources)
    sources[:] = [source for source in sources if not isinstance(source, _Groups)]
    if groups:
        _register_long_names()
        sources[-1].store = ConfigStore.instance()  # Hydra's copy of the store is older
    if groups and not has_path:
        sources.insert(-1, _Groups(groups))
    for place in [place for place, config in repository.cache.items() if config is None]:
        del repository.cache[place]


def _is_ours(source: Any) -> bool:
    """Return True if the source is the package `conf`, named by the user's search path."""
    return source.scheme() == "pkg" and source.path == _PACKAGE and not isinstance(source, _Groups)


class _Groups(ImportlibResourcesConfigSource):
    """The folder of `conf` as a source with the requested groups only."""

    def __init__(self, groups: Set[str]) -> None:
        super().__init__(_PROVIDER, f"pkg://{_PACKAGE}")
        self._groups = groups

    def is_group(self, config_path: str) -> bool:
        return self._takes_part(config_path) and super().is_group(config_path)

    def is_config(self, config_path: str) -> bool:
        return self._takes_part(config_path) and super().is_config(config_path)

    def list(self, config_path: str, results_filter: Any) -> Any:
        found = super().list(config_path, results_filter)
        return found if config_path else [name for name in found if self._takes_part(name)]

    def _takes_part(self, config_path: str) -> bool:
        return not config_path or config_path.partition("/")[0] in self._groups
