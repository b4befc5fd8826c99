"""In the process that uses Hydra: notes what it composes, and ends a run with the job that it belongs to.

Nothing here imports Hydra. What it changes in Hydra it changes when the user's script imports that.
"""

from __future__ import annotations

import copy
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lightning_ddp.launch import resolved
from lightning_ddp.launch.import_hook import after_import

if TYPE_CHECKING:  # a script without Hydra does not import it, which takes 2 ms
    from lightning_ddp.launch.hydra_job import Composition, HandedJob, Handover

__all__ = [
    "JobEnd",
    "OnComposed",
    "handover",
    "install",
    "job_config",
    "job_folder",
    "job_program",
    "original_folder",
    "publish_to",
]

JobEnd = Callable[[BaseException | None], BaseException | None]
"""Called at the end of each job with its exception, or None; returns what the job then fails with."""


class OnComposed(Protocol):
    """Called with what Hydra has composed for a job or a sweep, before it makes a directory."""

    def __call__(self, config: Any, *, is_sweep: bool) -> None: ...


_SEEDS = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")


@dataclass
class _Composed:
    config_name: str | None
    overrides: list[str]
    config: Any


_task: Any = None
_composed: list[_Composed] = []
_variables: dict[str, str | None] = {}
_publish: Callable[[str, bytes], None] | None = None
_num_published: dict[tuple[str | None, ...], int] = {}


def install(on_composed: OnComposed, on_job_start: Callable[[Any], None], on_job_end: JobEnd) -> None:
    """Has the jobs of this process noted, from now on and once Hydra is imported.

    Args:
        on_composed: called in each job, and at the beginning of a sweep.
        on_job_start: called with the configuration of a job, when Hydra has written its files.
        on_job_end: ends the run of the job, in the job's thread.
    """
    if _is_child():
        return
    after_import("omegaconf.base", resolved.install)
    after_import("hydra.core.hydra_config", lambda module: _watch_jobs(module, on_composed))
    after_import("hydra._internal.callbacks", lambda module: _watch_sweeps(module, on_composed))
    after_import("hydra._internal.callbacks", lambda module: _watch_tasks(module, on_job_start, on_job_end))
    after_import("hydra._internal.hydra", _watch_compositions)


def _is_child() -> bool:
    """Whether this is a child of a run, whose Hydra is changed already or will be."""
    child = sys.modules.get("lightning_ddp.launch.hydra_child")
    return child is not None and child.is_prepared()


def _watch_jobs(module: types.ModuleType, on_composed: OnComposed) -> None:
    kind: Any = module.HydraConfig
    original = kind.set_config

    def set_config(self: Any, cfg: Any) -> None:
        resolved.attach(cfg)  # before the job copies it: the copies share the cache
        if not _is_child():  # forked after the package was imported
            on_composed(cfg, is_sweep=False)
        original(self, cfg)

    kind.set_config = set_config


def _watch_sweeps(module: types.ModuleType, on_composed: OnComposed) -> None:
    kind: Any = module.Callbacks
    original = kind.on_multirun_start

    def on_multirun_start(self: Any, config: Any, **kwargs: Any) -> None:
        on_composed(config, is_sweep=True)
        resolved.detach(config)  # each job is to have answers of its own, from what Hydra copies
        original(self, config, **kwargs)

    kind.on_multirun_start = on_multirun_start


def _watch_tasks(module: types.ModuleType, on_begin: Callable[[Any], None], on_job_end: JobEnd) -> None:
    kind: Any = module.Callbacks
    start, end = kind.on_job_start, kind.on_job_end

    def on_job_start(self: Any, config: Any, *, task_function: Any, **kwargs: Any) -> None:
        global _task
        _task = task_function
        _variables.update({name: os.environ.get(name) for name in _SEEDS})
        on_begin(config)
        start(self, config, task_function=task_function, **kwargs)

    def on_job_end_and_ours(self: Any, config: Any, job_return: Any, **kwargs: Any) -> None:
        _end_job(job_return, on_job_end)
        end(self, config, job_return, **kwargs)

    kind.on_job_start, kind.on_job_end = on_job_start, on_job_end_and_ours


def _end_job(job_return: Any, on_job_end: JobEnd) -> None:
    from hydra.core.utils import JobStatus

    global _task
    has_failed = job_return.status == JobStatus.FAILED
    error = on_job_end(job_return._return_value if has_failed else None)
    if error is not None:
        job_return.return_value = error
        job_return.status = JobStatus.FAILED
    _task = None
    _composed.clear()
    restore(_variables)
    _variables.clear()


def restore(variables: dict[str, str | None]) -> None:
    """Sets environment variables back to what they were; None for not set."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _watch_compositions(module: types.ModuleType) -> None:
    kind: Any = module.Hydra
    original = kind.compose_config

    def compose_config(
        self: Any, config_name: str | None, overrides: list[str], *args: Any, **kwargs: Any
    ) -> Any:
        config = original(self, config_name, overrides, *args, **kwargs)
        if not kwargs.get("from_shell", True):  # the Compose API, and not `hydra.main`
            resolved.attach(config)
            _note_composition(_Composed(config_name, list(overrides), copy.deepcopy(config)))
        return config

    kind.compose_config = compose_config


def _note_composition(composed: _Composed) -> None:
    if _publish is None:
        _composed.append(composed)
        return
    from lightning_ddp.launch.hydra_job import composition_key

    same = (composed.config_name, *composed.overrides)
    number = _num_published.get(same, 0)
    _num_published[same] = number + 1
    key = composition_key(composed.config_name, composed.overrides, number)
    _publish(key, _hand(composed).config.to_bytes())


def publish_to(publish: Callable[[str, bytes], None] | None) -> None:
    """From now on what `hydra.compose` returns is published for children that run already.

    Args:
        publish: called with a key and a value; None once there are no children.
    """
    global _publish
    _publish = publish
    _num_published.clear()


def _hand(composed: _Composed) -> Composition:
    from lightning_ddp.launch.hydra_job import Composition, HandedConfig

    config = HandedConfig.of(composed.config, f"what hydra.compose({composed.config_name!r}) returned")
    return Composition(config_name=composed.config_name, overrides=composed.overrides, config=config)


# ---------------------------------------------------------------------- for the launcher


def handover() -> Handover | None:
    """What the children of this process have to know; None where Hydra is not used.

    Raises:
        ConfigurationError: a configuration does not pickle; names the key.
    """
    job = _handed_job()
    if job is None and not _has_composed():
        return None
    from lightning_ddp.launch.hydra_job import Handover

    return Handover(job=job, compositions=[_hand(composed) for composed in _composed])


def _has_composed() -> bool:
    utils = sys.modules.get("hydra.core.utils")
    return utils is not None and utils.JobRuntime.instance().get("name") != "UNKNOWN_NAME"


def _hydra_config() -> Any:
    """The node `hydra` of the job that this process runs; None outside of jobs."""
    module = sys.modules.get("hydra.core.hydra_config")
    if module is None or not module.HydraConfig.initialized():
        return None
    if _task is None and _frame_of_job() is None:  # a script has set it, after a call of the Compose API
        return None
    return module.HydraConfig.get()


def job_config() -> Any:
    """What Hydra has composed for the job of this process, with the node `hydra`; None outside of jobs."""
    hydra = _hydra_config()
    if hydra is None:
        return None
    given, frame = hydra._get_parent(), _frame_of_job()
    cache = resolved.attach(given)
    if frame is not None:
        _share_cache(frame.f_locals.get("task_cfg"), cache)
    return given


def _handed_job() -> HandedJob | None:
    hydra = _hydra_config()
    if hydra is None:
        return None
    from hydra import version
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.utils import JobRuntime

    from lightning_ddp.launch.hydra_job import HandedConfig, HandedJob, task_name

    given, task = job_config(), _running_task()
    instance = GlobalHydra.instance().hydra
    chdir = hydra.job.chdir
    moves = chdir if chdir is not None else not version.base_at_least("1.2")
    return HandedJob(
        task=task_name(task),
        name=JobRuntime.instance().get("name"),
        config=HandedConfig.of(given, "the configuration"),
        search_path=None if instance is None else instance.config_loader.get_search_path(),
        working_dir=hydra.runtime.output_dir if moves else None,
    )


def job_program() -> tuple[str, str] | None:
    """What the user runs, where this job's function has come here in a pickle; else None.

    As in a worker of hydra-joblib-launcher or hydra-submitit-launcher, which runs a program of its own.

    Returns:
        `("script", path)` or `("module", name)`.
    """
    if _hydra_config() is None:
        return None
    task, main = _running_task(), sys.modules["__main__"]
    given = getattr(getattr(task, "func", task), "__globals__", {})
    file, package = given.get("__file__"), given.get("__package__")
    if file is None or given.get("__name__") != "__main__" or file == getattr(main, "__file__", None):
        return None
    stem = os.path.splitext(os.path.basename(file))[0]
    return ("module", f"{package}.{stem}") if package else ("script", file)


def _running_task() -> Any:
    frame = _frame_of_job()
    return _task if frame is None else frame.f_locals["task_function"]


def _frame_of_job() -> types.FrameType | None:
    """The call of Hydra's `run_job` that this thread is in."""
    utils = sys.modules["hydra.core.utils"]
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not utils.run_job.__code__:
        frame = frame.f_back
    return frame


def _share_cache(task_config: Any, cache: resolved.JobCache) -> None:
    """For a package that was imported inside of a job, whose configuration was copied before."""
    present = getattr(getattr(task_config, "_metadata", None), "resolver_cache", cache)
    if present is not cache:
        for name, answers in present.items():
            cache[name].update(answers)
        resolved.attach(task_config, cache)


def original_folder() -> str | None:
    """Where the user has started the program of this job; None outside of jobs."""
    hydra = _hydra_config()
    return None if hydra is None else str(hydra.runtime.cwd)


def job_folder() -> str | None:
    """The output directory of this job; None outside of jobs."""
    hydra = _hydra_config()
    return None if hydra is None else str(hydra.runtime.output_dir)
