"""In a child process: Hydra gets the launching process's job, and composes, creates and sweeps nothing.

Loaded before the user's script, and independent of torch and Lightning (see `hydra_job`).
"""

from __future__ import annotations

import copy
import os
import sys
import types
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from lightning_ddp.launch.hydra_job import (
    Composition,
    HandedConfig,
    HandedJob,
    composition_key,
    read_handover,
    task_name,
    without_files,
)
from lightning_ddp.launch.import_hook import after_import
from lightning_ddp.launch.resolved import install as keep_answers

__all__ = ["is_prepared", "prepare", "require_job"]

_COMPOSED_WITHIN = timedelta(seconds=120)

_job: HandedJob | None = None
_compositions: list[Composition] = []
_is_prepared = False
_num_asked: dict[tuple[str | None, ...], int] = {}


def is_prepared() -> bool:
    """Whether this process is a child that was handed what Hydra composed."""
    return _is_prepared


def prepare(descriptor: int) -> None:
    """Reads what the launching process hands over, and changes Hydra as soon as it is imported."""
    global _job, _is_prepared
    handover = read_handover(descriptor)
    _is_prepared = True
    _job = handover.job
    _compositions.extend(handover.compositions)
    early = [name for name in sys.modules if name.startswith("lightning_ddp.")]
    for package in ("lightning_ddp", "lightning_ddp.launch"):
        after_import(package, lambda module: _bind(module, early))
    after_import("omegaconf.base", keep_answers)
    after_import("hydra.main", _replace_run)
    after_import("hydra._internal.hydra", _replace_composition)


def _bind(package: types.ModuleType, early: list[str]) -> None:
    """Makes modules that were loaded before their package attributes of it, as importing them would have."""
    for name in early:
        owner, _, leaf = name.rpartition(".")
        if owner == package.__name__:
            setattr(package, leaf, sys.modules[name])


def require_job() -> None:
    """Called when the script has ended, which it does inside of its job, if it has one.

    Raises:
        SystemExit: the script has not called the function whose job was handed over.
    """
    if _job is not None:
        sys.exit(
            f"lightning_ddp: the program ended in this child process without a call of {_job.task}, which the"
            " launching process was running. Call it on all ranks, under `if __name__ == '__main__':`."
        )


def _replace_run(module: Any) -> None:
    def run_handed(*args: Any, task_function: Callable[[Any], Any], **kwargs: Any) -> None:
        """In the place of Hydra's: runs the job, and ends this process with it. Other jobs are not ours."""
        if _job is None or task_name(task_function) != _job.task:
            return
        _run(_job, task_function)
        sys.exit(0)

    module._run_hydra = run_handed


def _run(job: HandedJob, task_function: Callable[[Any], Any]) -> None:
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.utils import _flush_loggers, setup_globals
    from omegaconf import open_dict, read_write

    _restore_globals(job, setup_globals)
    config = job.config.unpack()
    HydraConfig.instance().set_config(config)
    task_config = copy.deepcopy(config)
    with read_write(task_config), open_dict(task_config):
        del task_config["hydra"]
    _log_to_console(config)
    if job.working_dir is not None:
        os.chdir(job.working_dir)
    try:
        task_function(task_config)
    finally:
        _flush_loggers()


def _restore_globals(job: HandedJob, setup_globals: Callable[[], None]) -> None:
    from hydra._internal.hydra import Hydra
    from hydra.core.plugins import Plugins
    from hydra.core.utils import JobRuntime

    if job.search_path is not None:
        Plugins.instance()  # registers the kinds of places that the path may lead to
        Hydra.create_main_hydra2(task_name=job.name, config_search_path=job.search_path)
    else:
        setup_globals()
        JobRuntime.instance().set("name", job.name)


def _log_to_console(config: Any) -> None:
    """Configures logging as the job does, less its log file: that is rank 0's."""
    from hydra.core.utils import configure_log
    from omegaconf import OmegaConf

    settings: Any = config.hydra.job_logging
    if settings is not None:
        settings = OmegaConf.create(without_files(OmegaConf.to_container(settings, resolve=True)))
    configure_log(settings, config.hydra.verbose)


def _replace_composition(module: types.ModuleType) -> None:
    original = module.Hydra.compose_config

    def compose_config(
        self: Any, config_name: str | None, overrides: list[str], *args: Any, **kwargs: Any
    ) -> Any:
        for handed in _compositions:
            if (handed.config_name, list(handed.overrides)) == (config_name, overrides):
                _compositions.remove(handed)
                return handed.config.unpack()
        found = _composed_since_launch(config_name, overrides)
        if found is not None:
            return found.unpack()
        return original(self, config_name, overrides, *args, **kwargs)

    module.Hydra.compose_config = compose_config


def _composed_since_launch(config_name: str | None, overrides: list[str]) -> HandedConfig | None:
    """What the launching process has composed after it had started this one; None before the ranks met."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return None
    from lightning_ddp.launch.rendezvous import STORE_VARIABLE, run_store

    number = _num_asked.get((config_name, *overrides), 0)
    _num_asked[(config_name, *overrides)] = number + 1
    store = run_store(os.environ[STORE_VARIABLE], _COMPOSED_WITHIN)
    try:
        return HandedConfig.from_bytes(store.get(composition_key(config_name, overrides, number)))
    except RuntimeError as error:  # torch's DistStoreError
        warnings.warn(
            f"rank 0 has not called hydra.compose({config_name!r}, {overrides!r}) within"
            f" {_COMPOSED_WITHIN.total_seconds():g} s, so this rank composes by itself ({error})",
            stacklevel=3,
        )
        return None
