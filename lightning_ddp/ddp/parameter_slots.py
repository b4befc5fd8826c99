"""Parameter slots: finds parameters that were replaced in their modules after wrapping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_ddp._torch import parameters_of
from lightning_ddp.ddp.gradients import find_tensors
from lightning_ddp.errors import UnsuitableModuleError

__all__ = ["ParameterPlaces"]


class ParameterPlaces:
    """Tells parameters that `torch.func.functional_call` replaces for one forward from those lost for good.

    A parameter that has moved within the module is still there: `torch.nn.utils.prune` registers the same one
    under another name, and what stands under the old name is computed from it.

    Args:
        module: the wrapped module.
        named: its parameters that are averaged, with their qualified names.
    """

    def __init__(self, module: torch.nn.Module, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        self.names = [name for name, _ in named]
        self._module = module
        self._places: list[tuple[dict[str, Any], str, torch.nn.Parameter]] = []
        for name, parameter in named:
            path, _, key = name.rpartition(".")
            self._places.append((parameters_of(module.get_submodule(path)), key, parameter))

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that belong there."""
        return [parameter for _, _, parameter in self._places]

    def replaced(self) -> list[int]:
        """Positions of parameters that the module does not hold now; others are put in its place."""
        gone = [i for i, (owner, key, p) in enumerate(self._places) if owner.get(key) is not p]
        return self._without_moved(gone) if gone else []

    def _without_moved(self, gone: Sequence[int]) -> list[int]:
        """Looks for parameters that are not in their places elsewhere in the module, and keeps where."""
        found = {
            id(p): (parameters_of(layer), key)
            for layer in self._module.modules()
            for key, p in parameters_of(layer).items()
        }
        for i in gone:
            parameter = self._places[i][2]
            if id(parameter) in found:
                self._places[i] = (*found[id(parameter)], parameter)
        return [i for i in gone if id(self._places[i][2]) not in found]

    def expect_restored(self, outputs: Any, replaced: Sequence[int], rank: int) -> None:
        """Makes a backward from `outputs` an error if the parameters are not back in their places by then.

        Args:
            outputs: what the forward returned: tensors in nested containers.
            replaced: positions of the parameters.
            rank: this rank, for the message.
        """

        def check(_grad: torch.Tensor) -> None:
            gone = [self.names[i] for i in sorted(set(replaced).intersection(self.replaced()))]
            if gone:
                raise UnsuitableModuleError(
                    f"rank {rank}: parameters were replaced after the module was wrapped, so that nothing"
                    f" averages their gradients: {', '.join(gone)}. Change a parameter in place (with"
                    " torch.no_grad(): p.copy_(...)), or wrap the module again."
                )

        for tensor in find_tensors(outputs):
            if tensor.requires_grad:
                tensor.register_hook(check)
