"""Hydra's loader and callbacks, extended: they report jobs and compositions, and find the groups in `conf`.

Importing this module patches Hydra. The import of Hydra causes it, or unpickling an object of our classes.
A program whose defaults and search path name none of these groups is composed as without the package: there
`strategy`, `trainer` and `launcher` may be keys or groups of its own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Set
from pathlib import Path
from typing import Any

from hydra._internal import hydra as hydra_module
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobReturn, JobStatus, run_job

from lightning_ddp.hydra_jobs.jobs import agree, detach, give_files_back, jobs, withhold_files

_FOLDER = Path(__file__).parents[1] / "conf"
_PROVIDER = "lightning_ddp"
_PACKAGE = "lightning_ddp.conf"
_GROUPS = frozenset(["strategy", "trainer", "launcher", _PROVIDER])
"""Groups of the package. The last one has all others below it, for programs with groups of their names."""


def _extend_hydra() -> None:
    """Replace Hydra's config loader and callbacks by this package's subclasses, also in objects in use."""
    module: Any = hydra_module
    module.ConfigLoaderImpl, module.Callbacks = JobLoader, JobCallbacks
    living = GlobalHydra.instance().hydra
    if living is not None:
        _exchange(living.config_loader, ConfigLoaderImpl, JobLoader)
    job = _job_in_progress()
    if job is not None:
        context, result = job["hydra_context"], job.get("ret")
        _exchange(context.config_loader, ConfigLoaderImpl, JobLoader)
        _exchange(context.callbacks, Callbacks, JobCallbacks)
        if result is not None and result.status is JobStatus.UNKNOWN:
            jobs().begin(job["task_function"], result.cfg)


def _exchange(instance: Any, kind: type, subclass: type) -> None:
    if type(instance) is kind:
        instance.__class__ = subclass


def _job_in_progress() -> dict[str, Any] | None:
    """Return the local variables of a running call of Hydra's `run_job`, in any thread; None without one."""
    for frame in sys._current_frames().values():
        caller: Any = frame
        while caller is not None:
            if caller.f_code is run_job.__code__:
                return dict(caller.f_locals)
            caller = caller.f_back
    return None


class JobCallbacks(Callbacks):
    """Hydra's callbacks, extended to report starts and ends of jobs to `jobs()` and share rank 0's values."""

    def __init__(self, config: Any = None) -> None:
        if config is not None:
            agree(config)
        super().__init__(config)

    def on_run_start(self, config: Any, **kwargs: Any) -> None:
        withhold_files(config)
        super().on_run_start(config, **kwargs)

    def on_multirun_start(self, config: Any, **kwargs: Any) -> None:
        detach(config)  # each job must resolve values separately, and Hydra copies the configuration
        super().on_multirun_start(config, **kwargs)

    def on_job_start(self, config: Any, *, task_function: Any, **kwargs: Any) -> None:
        super().on_job_start(config, task_function=task_function, **kwargs)
        jobs().begin(task_function)
        give_files_back()

    def on_job_end(self, config: Any, job_return: JobReturn, **kwargs: Any) -> None:
        error = jobs().end(job_return._return_value if job_return.status is JobStatus.FAILED else None)
        if error is not None:
            job_return.return_value, job_return.status = error, JobStatus.FAILED
        super().on_job_end(config, job_return, **kwargs)


class JobLoader(ConfigLoaderImpl):
    """Hydra's configuration loader, with this package's config groups if a composition asks for them."""

    _asked: Set[str] = frozenset()
    """Groups that the latest composition has asked for."""

    def load_configuration(  # type: ignore[override]  # Hydra passes keywords
        self, config_name: str | None, overrides: list[str], *, from_shell: bool = True, **kwargs: Any
    ) -> Any:
        load = super().load_configuration
        compose = functools.partial(load, config_name, overrides, from_shell=from_shell, **kwargs)
        return compose() if from_shell else jobs().composed(config_name, overrides, compose)

    def load_sweep_config(self, master_config: Any, sweep_overrides: list[str]) -> Any:
        config = super().load_sweep_config(master_config, sweep_overrides)
        agree(config)
        withhold_files(config)
        return config

    def _parse_overrides_and_create_caching_repo(self, config_name: str | None, overrides: list[str]) -> Any:
        parsed, repository = super()._parse_overrides_and_create_caching_repo(config_name, overrides)
        if config_name is not None or overrides:  # not for options of a group: help, completion, glob
            self._asked = _asked_for(repository, config_name, parsed)
        _add_groups(repository, self._asked)
        return parsed, repository


# ---------------------------------------------------------------------- groups of the package


def _asked_for(repository: Any, config_name: str | None, overrides: Any) -> Set[str]:
    """Return the names of this package's config groups that a composition uses."""
    if _has_path(repository):
        return _GROUPS
    asked = {_PROVIDER for override in overrides if override.key_or_group.startswith(f"{_PROVIDER}/")}
    while True:
        _add_groups(repository, asked)
        named = _lacking(repository, config_name, overrides)
        tops = {top for group in named if (top := _top_of_ours(group)) is not None}
        if tops <= asked:
            return asked
        asked |= tops


def _top_of_ours(group: str) -> str | None:
    top = group.partition("/")[0]
    return top if top == _PROVIDER or (top in _GROUPS and (_FOLDER / group).is_dir()) else None


def _lacking(repository: Any, config_name: str | None, overrides: Any) -> Set[str]:
    """Return config groups that the defaults list names and the program lacks, or whose file it lacks."""
    try:
        found = create_defaults_list(
            repository, config_name, overrides, prepend_hydra=True, skip_missing=True
        )
    except Exception as error:  # noqa: BLE001 (it is raised again in the composition)
        group, _, choice = (getattr(error, "missing_cfg_file", None) or "").rpartition("/")
        is_chosen = any((each.key_or_group, each.value()) == (group, choice) for each in overrides)
        return set() if is_chosen and repository.group_exists(group) else {group}
    choices = found.overrides.known_choices.items()
    without_choice = {key.partition("@")[0] for key, choice in choices if choice in (None, "???")}
    return {group for group in without_choice if not repository.group_exists(group)}


def _add_groups(repository: Any, groups: Set[str]) -> None:
    """Set this package's groups in a Hydra repository to `groups`, between user files and ConfigStore."""
    sources = repository.get_sources()
    sources[:] = [source for source in sources if not isinstance(source, _Groups)]
    if groups:
        sources.insert(-1, _Groups({_PROVIDER, *(() if _has_path(repository) else groups)}))
    for place in [place for place, config in repository.cache.items() if config is None]:
        del repository.cache[place]


def _has_path(repository: Any) -> bool:
    """Return True if the user's Hydra search path includes this package's configuration folder."""
    paths = [source.full_path() for source in repository.get_sources() if not isinstance(source, _Groups)]
    return f"pkg://{_PACKAGE}" in paths


class _Groups(ImportlibResourcesConfigSource):
    """Hydra configuration source of this package's folder `conf`, limited to the requested groups.

    `lightning_ddp/` is a name of the folder itself. Its files are in no ConfigStore: Hydra 1 uses an entry of
    its store as the schema of a file of the same name, so a user's `trainer/gpu.yaml` could not be composed.
    """

    def __init__(self, groups: Set[str]) -> None:
        super().__init__(_PROVIDER, f"pkg://{_PACKAGE}")
        self._folder = ImportlibResourcesConfigSource(_PROVIDER, f"pkg://{_PACKAGE}")
        self._groups = {"", *groups}

    def _path(self, config_path: str) -> str | None:
        """Return a config's path within this package's folder `conf`; None outside of requested groups."""
        top, _, rest = config_path.partition("/")
        return None if top not in self._groups else rest if top == _PROVIDER else config_path

    def is_group(self, config_path: str) -> bool:
        path = self._path(config_path)
        return path is not None and self._folder.is_group(path)

    def is_config(self, config_path: str) -> bool:
        path = self._path(config_path)
        return path is not None and self._folder.is_config(path)

    def load_config(self, config_path: str) -> Any:
        return self._folder.load_config(str(self._path(config_path)))

    def list(self, config_path: str, results_filter: Any) -> Any:
        found = self._folder.list(str(self._path(config_path)), results_filter)
        return found if config_path else sorted(self._groups & {*found, _PROVIDER}) if found else []


_extend_hydra()
