"""Faster imports in child processes: what runs there before the user's script.

Importing torch and Lightning makes some hundred thousand objects that stay, and Python's cyclic garbage
collector walks through all of them again and again: a second of the five that the imports take. Until the
run of a child begins, when it does little else but import, the collector comes a hundred times less often.

Python imports the first module `sitecustomize` that it finds at its start: the launcher puts the one of this
folder first on the search path of its children. It passes on to the one that is found without it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping

__all__ = ["begin_run", "child_environment", "keep_files"]

_PATH_VARIABLE = "PYTHONPATH"
_MODULE = "_lightning_ddp_prelude"
"""Under which `sitecustomize` is known in a child."""


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child that is to import quickly.

    Args:
        environment: what it would be without that.
    """
    if sys.flags.ignore_environment or sys.flags.no_site:  # nor would the child look there
        return dict(environment)
    path = [os.path.abspath(os.path.dirname(__file__)), environment.get(_PATH_VARIABLE)]
    return {**environment, _PATH_VARIABLE: os.pathsep.join(filter(None, path))}


def begin_run() -> None:
    """In a child the garbage collector comes as often as usual from here on. Does nothing elsewhere."""
    prelude = sys.modules.pop(_MODULE, None)
    if prelude is not None:
        prelude.restore()


def keep_files(files: Mapping[int, int]) -> None:
    """In a process that has been forked on Linux, closes all files but some.

    Args:
        files: number that a file is to have -> number that it has.
    """
    import fcntl  # which Windows has not

    above = max(files, default=2) + 1
    held = {number: fcntl.fcntl(present, fcntl.F_DUPFD, above) for number, present in files.items()}
    for present in [int(name) for name in os.listdir("/proc/self/fd")]:
        if present not in held.values():
            with contextlib.suppress(OSError):  # the one that has listed them
                os.close(present)
    for number, present in held.items():
        os.dup2(present, number)
        os.close(present)
