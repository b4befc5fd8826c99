"""Put a class in the place of torch's DistributedDataParallel, in every module that names it.

Two classes here are wrong in one way each, to see that torch's tests find it.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch.nn.parallel.distributed

TORCHS = torch.nn.parallel.distributed.DistributedDataParallel


def substitute(class_: str) -> type[torch.nn.Module]:
    """Lets each global of a module that is torch's class be `module:Class` instead. Returns that class.

    The class's own package keeps torch's: it may well wrap it or derive from it.
    """
    own_name, name = class_.split(":")
    substitute_class: type[torch.nn.Module] = getattr(importlib.import_module(own_name), name)
    own_package = own_name.split(".")[0]
    for module_name, module in list(sys.modules.items()):
        if module is None or module_name == __name__ or module_name.split(".")[0] == own_package != "torch":
            continue
        for key, value in list(getattr(module, "__dict__", {}).items()):
            if value is TORCHS:
                setattr(module, key, substitute_class)
    return substitute_class


class NoSync(TORCHS):
    """Never averages gradients."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self.no_sync():
            return super().forward(*inputs, **kwargs)


class NoBuffers(TORCHS):
    """Never broadcasts buffers after construction."""

    def _sync_buffers(self) -> None:
        pass
