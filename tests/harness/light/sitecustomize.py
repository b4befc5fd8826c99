"""Makes Python take some packages for not installed. It imports this module at its start, if it finds it.

torchmetrics, which Lightning imports, imports SciPy and matplotlib where they are installed. That is a
quarter of the time that a script of a test takes to start, for what hardly any of them uses.

In a script of a test on simulated CUDA devices, and in its children, it also registers those devices.
"""

import os
import sys
from importlib.machinery import PathFinder

_HIDDEN = frozenset(os.environ.get("HIDDEN_PACKAGES", "").split(","))


class _HidingPathFinder(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.partition(".")[0] in _HIDDEN:
            return None
        return super().find_spec(fullname, path, target)

    @classmethod
    def find_distributions(cls, context):
        if context.name in _HIDDEN:
            return iter(())
        return super().find_distributions(context)


sys.meta_path[sys.meta_path.index(PathFinder)] = _HidingPathFinder
if "SIMULATED_CUDA" in os.environ and "simcuda" not in sys.modules:
    from pathlib import Path

    import simcuda

    simcuda.start(Path(os.environ["SIMULATED_CUDA"]))
