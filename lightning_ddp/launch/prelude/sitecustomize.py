"""Imported by Python at the start of a child; `child_process` says why. It imports nothing of the package."""

import gc
import os
import sys

_RARE = (100_000, 10, 10)
_USUAL = gc.get_threshold()


def restore() -> None:
    """Restore the usual garbage collection thresholds, unless somebody has set others meanwhile."""
    if gc.get_threshold() == _RARE:
        gc.set_threshold(*_USUAL)


def _leave_search_path() -> None:
    """Remove this folder from the module search path of this process and of those that it starts."""
    folder = os.path.dirname(__file__)
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    first, _, rest = os.environ.get("PYTHONPATH", "").partition(os.pathsep)
    if first == folder and rest:
        os.environ["PYTHONPATH"] = rest
    elif first == folder:
        del os.environ["PYTHONPATH"]


gc.set_threshold(*_RARE)
_leave_search_path()
sys.modules["_lightning_ddp_prelude"] = sys.modules.pop("sitecustomize")
__import__("sitecustomize")  # the user's; where there is none, Python expects this error
