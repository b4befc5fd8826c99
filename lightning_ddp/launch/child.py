"""Runs the user's program as a child process of a run that uses Hydra.

    python child.py DESCRIPTOR script PATH ARGUMENTS...
    python child.py DESCRIPTOR module NAME ARGUMENTS...

Run by its path, and not as a module of the package: importing the package imports torch and Lightning, and
it is for the user's program to say when. Before that program begins, Hydra is prepared to hand over the job
of the launching process (which lies in the inherited file DESCRIPTOR) instead of composing one.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
_LOADED_EARLY = ("errors", "launch.import_hook", "launch.resolved", "launch.hydra_job", "launch.hydra_child")


def _load_early() -> None:
    """Loads some modules of the package under their own names, and not the package."""
    for name in _LOADED_EARLY:
        full = f"lightning_ddp.{name}"
        path = _FOLDER.parent.joinpath(*name.split(".")).with_suffix(".py")
        spec = importlib.util.spec_from_file_location(full, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[full] = module
        spec.loader.exec_module(module)


def _run_script(path: str) -> None:
    """Runs a file in the module `__main__`, where pickle looks for the classes that it defines."""
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    main = sys.modules["__main__"]
    for name in [name for name in vars(main) if not name.startswith("__") or name == "__annotations__"]:
        delattr(main, name)
    main.__file__, main.__doc__, main.__cached__ = path, None, None  # type: ignore[attr-defined]
    exec(code, vars(main))


def _main() -> None:
    is_safe_path = bool(getattr(sys.flags, "safe_path", False))
    if not is_safe_path:
        del sys.path[0]  # the folder of this file
    descriptor, kind, program, *arguments = sys.argv[1:]
    _load_early()
    # by their full names, under which they are loaded already: nothing here may import the package
    from lightning_ddp.launch.hydra_child import prepare, require_job

    prepare(int(descriptor))
    sys.argv = [program, *arguments]
    if not is_safe_path:
        sys.path.insert(0, os.getcwd() if kind == "module" else str(Path(program).parent))
    if kind == "module":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    elif Path(program).is_file():
        _run_script(program)
    else:  # a folder with a __main__.py
        runpy.run_path(program, run_name="__main__")
    require_job()


if __name__ == "__main__":
    _main()
