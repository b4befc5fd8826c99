"""Named variants: one string of the Trainer stands for the strategy with some of its arguments."""

from __future__ import annotations

import difflib
import functools
import inspect
from typing import Any

from lightning_ddp._lightning import StrategyRegistry
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.strategy import CustomDDPStrategy

__all__ = [
    "BUILTIN",
    "available_variants",
    "register_builtin_variants",
    "register_variant",
    "variant_arguments",
]

BUILTIN: dict[str, tuple[str, dict[str, Any]]] = {
    "custom_ddp": ("re-runs the script in child processes; bucketed all-reduce in Python", {}),
    "custom_ddp_spawn": ("custom_ddp in spawned processes", {"start_method": "spawn"}),
    "custom_ddp_fork": ("custom_ddp in forked processes", {"start_method": "fork"}),
    "custom_ddp_find_unused_parameters_true": (
        "custom_ddp that searches for parameters without a gradient in every step",
        {"find_unused_parameters": True},
    ),
    "custom_ddp_find_unused_parameters_false": (
        "custom_ddp that reports parameters without a gradient as an error",
        {"find_unused_parameters": False},
    ),
    "custom_ddp_fp16": ("gradients sent in float16: half the bytes", {"ddp_comm_hook": "fp16"}),
    "custom_ddp_bf16": ("gradients sent in bfloat16: half the bytes", {"ddp_comm_hook": "bf16"}),
    "custom_ddp_int8": (
        "gradients sent in 8 bits with a scale for every 256: about a quarter of the bytes",
        {"ddp_comm_hook": "int8"},
    ),
    "custom_ddp_powersgd": (
        "low-rank gradients with error feedback: rank 4, after 100 steps of the plain mean",
        {"ddp_comm_hook": {"name": "powersgd", "rank": 4, "start_step": 100}},
    ),
    "custom_ddp_topk": (
        "the largest 1 % of the gradients with error feedback; the part falls to that over 100 steps",
        {"ddp_comm_hook": {"name": "topk", "ratio": 0.01, "warmup_steps": 100}},
    ),
    "custom_ddp_post_local_sgd": (
        "averaged gradients for 100 steps, then local steps and averaged parameters every 8",
        {"model_averaging": {"name": "post_local_sgd", "start_step": 100, "period": 8}},
    ),
    "custom_ddp_hierarchical_sgd": (
        "averaged gradients for 100 steps, then parameters averaged in pairs of ranks every 4 and among all"
        " every 16",
        {"model_averaging": {"name": "hierarchical_sgd", "start_step": 100, "periods": {4: 2, 16: 0}}},
    ),
    "custom_ddp_slowmo": (
        "averaged gradients for 100 steps, then local steps and a slow momentum of 0.5 every 12",
        {"model_averaging": {"name": "slowmo", "start_step": 100, "period": 12}},
    ),
    "custom_ddp_diloco": (
        "local steps, and every 100 an outer step with Nesterov momentum (rate 0.7, momentum 0.9)",
        {"model_averaging": {"name": "diloco", "period": 100}},
    ),
    "custom_ddp_notebook": ("custom_ddp for notebooks: forked processes", {"start_method": "fork"}),
}
"""The variants of this package: name -> (description, arguments of `CustomDDPStrategy`)."""


def register_variant(name: str, *, description: str = "", **strategy_kwargs: Any) -> None:
    """Makes `Trainer(strategy=name)` mean `CustomDDPStrategy(**strategy_kwargs)`.

    Call it in every process, before the Trainer is made; at the top of the script is right. Does not
    communicate. Registering the same arguments again under a name changes nothing.

    Args:
        name: lower case, as Lightning lower-cases what users pass; unused so far.
        description: one line for `available_variants`.
        **strategy_kwargs: arguments of `CustomDDPStrategy`.

    Raises:
        ConfigurationError: the name is not lower case, empty, or taken by another strategy.
        TypeError: `CustomDDPStrategy` has no such argument.
    """
    if not name or name != name.lower() or name != name.strip():
        raise ConfigurationError(
            f"strategy name {name!r}: use lower case without spaces around it, as Lightning lower-cases what"
            " users pass to the Trainer and would never find it"
        )
    known = _strategy_arguments()
    for argument in strategy_kwargs:
        if argument not in known:
            close = difflib.get_close_matches(argument, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}"
            raise TypeError(f"CustomDDPStrategy has no argument {argument!r}{hint}")
    present = dict(StrategyRegistry).get(name)
    if present is not None:
        if present["strategy"] is CustomDDPStrategy and present["init_params"] == strategy_kwargs:
            return
        raise ConfigurationError(
            f"strategy name {name!r} is taken: {present['description'] or 'no description'}"
        )
    StrategyRegistry.register(name, CustomDDPStrategy, description=description, **strategy_kwargs)


@functools.cache
def _strategy_arguments() -> list[str]:
    return list(inspect.signature(CustomDDPStrategy).parameters)


def available_variants() -> dict[str, str]:
    """The names under which `CustomDDPStrategy` is registered, with their descriptions, sorted by name."""
    return {
        name: entry["description"]
        for name, entry in sorted(StrategyRegistry.items())
        if entry["strategy"] is CustomDDPStrategy
    }


def variant_arguments(name: str) -> dict[str, Any]:
    """The arguments of `CustomDDPStrategy` for which a registered name stands.

    Raises:
        KeyError: no such name is registered.
    """
    return dict(StrategyRegistry[name]["init_params"])


def register_builtin_variants() -> None:
    """Registers the variants of this package. `import lightning_ddp` calls it."""
    for name, (description, arguments) in BUILTIN.items():
        register_variant(name, description=description, **arguments)
