"""The user's program in a child process of a run with Hydra: its job comes from the parent process.

Run by its path as `child.py DESCRIPTOR {script PATH | module NAME} ARGUMENTS...`, with the job in the file
DESCRIPTOR: run as a module it would import the package, and that torch, before the user's program does.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ != "__main__":  # as `__main__`, this file loads them and itself by their full names below
    # Only so: `from lightning_ddp.hydra_jobs import jobs` would import the package.
    from lightning_ddp.hydra_jobs.jobs import (
        Handover,
        jobs,
        patch_resolvers,
        read_handover,
        task_name,
        unpack,
        without_files,
    )


def _load_early() -> None:
    """Load three modules under their full names, without importing the package, and with it torch."""
    package = Path(__file__).resolve().parents[1]
    for name in ("errors", "hydra_jobs.jobs", "hydra_jobs.child"):
        path = package.joinpath(*name.split(".")).with_suffix(".py")
        spec: Any = importlib.util.spec_from_file_location(f"lightning_ddp.{name}", path)
        sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])


def run_program(descriptor: int, kind: str, program: str) -> None:
    """Run the user's program as `__main__`, with a `hydra.main` that takes its job from the parent."""
    with handed_job(descriptor):
        if kind == "module":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        elif Path(program).is_file():
            _run_script(program)
        else:  # a folder with a __main__.py
            runpy.run_path(program, run_name="__main__")


@contextlib.contextmanager
def handed_job(descriptor: int) -> Iterator[None]:
    """Replace `hydra.main`, so that the program run in this context takes the job of its parent process.

    The process exits in the job's function. A program that ends without a call of it is a SystemExit.
    """
    job = read_handover(descriptor)
    jobs().compositions = job.compositions
    _replace_main(job)
    yield
    if job.task is not None:
        sys.exit(
            f"lightning_ddp: the program ended in this child process without a call of {job.task}, which the"
            " launching process was running. Call it on all ranks, under `if __name__ == '__main__':`."
        )


def _replace_main(job: Handover) -> None:
    import hydra
    from omegaconf import base

    patch_resolvers(base)
    original = hydra.main

    @functools.wraps(original)
    def main(*args: Any, **kwargs: Any) -> Callable[[Callable[[Any], Any]], Any]:
        original(*args, **kwargs)  # sets the version whose behavior Hydra has

        def decorate(task_function: Callable[[Any], Any]) -> Any:
            @functools.wraps(task_function)
            def run_handed(cfg_passthrough: Any = None) -> Any:
                """Run the parent's job, if of this function, and exit; given a config, only call it."""
                if cfg_passthrough is not None:
                    return task_function(cfg_passthrough)
                if job.task == task_name(task_function):
                    _run(job, task_function)
                    sys.exit(0)
                return None

            return run_handed

        return decorate

    hydra.main = sys.modules["hydra.main"].main = main  # type: ignore[attr-defined]


def _run(job: Handover, task_function: Callable[[Any], Any]) -> None:
    from hydra._internal.hydra import Hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.plugins import Plugins
    from hydra.core.utils import JobRuntime, setup_globals
    from omegaconf import open_dict, read_write

    if job.search_path is not None:
        Plugins.instance()  # registers the kinds of sources in the search path
        Hydra.create_main_hydra2(task_name=job.name, config_search_path=job.search_path)
    else:
        setup_globals()
        JobRuntime.instance().set("name", job.name)
    config = unpack(job.config)
    HydraConfig.instance().set_config(config)
    task_config = copy.deepcopy(config)
    with read_write(task_config), open_dict(task_config):
        del task_config["hydra"]
    _log_to_console(config)
    if job.working_dir is not None:
        os.chdir(job.working_dir)
    task_function(task_config)


def _log_to_console(config: Any) -> None:
    """Configure logging as Hydra does for the job, without its log file, which only rank 0 writes."""
    from hydra.core.utils import configure_log
    from omegaconf import OmegaConf

    settings: Any = config.hydra.job_logging
    if settings is not None:
        plain = OmegaConf.to_container(settings, resolve=True)
        settings = OmegaConf.create(without_files(plain))
    configure_log(settings, config.hydra.verbose)


def _run_script(path: str) -> None:
    """Run a file in the module `__main__`, where pickle looks for its classes."""
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    main = sys.modules["__main__"]
    for name in [name for name in vars(main) if not name.startswith("__") or name == "__annotations__"]:
        delattr(main, name)
    main.__file__, main.__doc__, main.__cached__ = path, None, None  # type: ignore[attr-defined]
    exec(code, vars(main))


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the folder of this file
    _descriptor, _kind, _program, *_arguments = sys.argv[1:]
    _load_early()
    sys.argv = [_program, *_arguments]
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd() if _kind == "module" else str(Path(_program).parent))
    # Use the loaded module of the full name: an import here would import the package.
    sys.modules["lightning_ddp.hydra_jobs.child"].run_program(int(_descriptor), _kind, _program)
