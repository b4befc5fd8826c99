"""Named variants: strings for the Trainer that stand for the strategy with some of its arguments."""

from __future__ import annotations

import difflib
import inspect
from functools import cache, partial
from typing import Any

from lightning_ddp._lightning import FABRICS, ROOTS, explain_refusals
from lightning_ddp.errors import ConfigurationError, unknown_argument
from lightning_ddp.fabric import CustomFabricStrategy
from lightning_ddp.import_hook import after_import
from lightning_ddp.strategy import CustomDDPStrategy

BUILTIN: dict[str, tuple[str, dict[str, Any]]] = {
    "custom_ddp": ("data-parallel training; runs the script again in child processes", {}),
    "custom_ddp_spawn": ("custom_ddp in spawned processes", {"start_method": "spawn"}),
    "custom_ddp_fork": ("custom_ddp in forked processes", {"start_method": "fork"}),
    "custom_ddp_notebook": ("custom_ddp for notebooks: forked processes", {"start_method": "fork"}),
    "custom_ddp_shrink": ("continues with the remaining ranks when a rank is lost", {"on_failure": "shrink"}),
    "custom_ddp_replace": (
        "continues when a rank is lost, and starts a new process to replace it",
        {"on_failure": "replace"},
    ),
    "custom_ddp_fp16": ("gradients sent in float16: half the bytes", {"ddp_comm_hook": "fp16"}),
    "custom_ddp_bf16": ("gradients sent in bfloat16: half the bytes", {"ddp_comm_hook": "bf16"}),
    "custom_ddp_int8": (
        "gradients sent in 8 bits with one scale per 256 values: about a quarter of the bytes",
        {"ddp_comm_hook": "int8"},
    ),
    "custom_ddp_powersgd": (
        "low-rank gradients with error feedback: rank 2, after 10 steps with the plain mean",
        {"ddp_comm_hook": "powersgd"},
    ),
    "custom_ddp_topk": (
        "the largest 1 % of the gradients with error feedback, after a warm-up of 100 steps",
        {"ddp_comm_hook": {"name": "topk", "ratio": 0.01, "warmup_steps": 100}},
    ),
    "custom_ddp_post_local_sgd": (
        "averaged gradients for 100 steps, then local steps and averaged parameters every 8 steps",
        {"model_averaging": {"name": "post_local_sgd", "start_step": 100, "period": 8}},
    ),
    "custom_ddp_hierarchical_sgd": (
        "averaged gradients for 100 steps, then parameters averaged in pairs of ranks every 4 steps and over"
        " all ranks every 16",
        {"model_averaging": {"name": "hierarchical_sgd", "start_step": 100, "periods": {4: 2, 16: 0}}},
    ),
    "custom_ddp_slowmo": (
        "averaged gradients for 100 steps, then local steps and a slow momentum of 0.5 every 12 steps",
        {"model_averaging": {"name": "slowmo", "start_step": 100, "period": 12}},
    ),
    "custom_ddp_diloco": (
        "local steps, and an outer step with Nesterov momentum (rate 0.7, momentum 0.9) every 100 steps",
        {"model_averaging": {"name": "diloco", "period": 100}},
    ),
}
"""The variants of this package: name -> (description, arguments of `CustomDDPStrategy`)."""
for _name in ("custom_ddp", "custom_ddp_spawn", "custom_ddp_fork", "custom_ddp_notebook"):
    for _ending, _searches, _what in (
        ("true", True, "that searches for unused parameters in every step"),
        ("false", False, "in which a parameter without a gradient is an error"),
    ):
        _arguments = {**BUILTIN[_name][1], "find_unused_parameters": _searches}
        BUILTIN[f"{_name}_find_unused_parameters_{_ending}"] = (f"{_name} {_what}", _arguments)

_variants: dict[str, tuple[str, dict[str, Any]]] = {}  # the registered variants, as above
_joined: list[tuple[Any, type]] = []
"""Registries of the imported namespaces, each with the strategy class to register there."""


def register_variant(name: str, *, description: str = "", **strategy_kwargs: Any) -> None:
    """Register `name` so that `Trainer(strategy=name)` means `CustomDDPStrategy(**strategy_kwargs)`.

    Call it in every process, before the Trainer is made, for example at the top of the script. Registering
    the same arguments again under a name has no effect.

    Args:
        name: An unused name in lower case, as Lightning lower-cases the names that users pass.
        description: One line for `available_variants`.
        **strategy_kwargs: Arguments of `CustomDDPStrategy`.

    Raises:
        ConfigurationError: The name is empty, not lower case, or taken by another strategy.
        TypeError: `CustomDDPStrategy` has no such argument.
    """
    if not isinstance(name, str) or not name or name != name.lower() or name != name.strip():
        raise ConfigurationError(
            f"strategy name {name!r}: expected lower case without surrounding spaces. Lightning lower-cases"
            " the names that users pass to the Trainer."
        )
    known = _arguments_of(CustomDDPStrategy)
    for argument in strategy_kwargs:
        if argument not in known:
            raise unknown_argument("CustomDDPStrategy()", argument, known)
    if name in _variants and _variants[name][1] == strategy_kwargs:
        return
    taken = [_variants[name][0]] if name in _variants else []
    taken += [registry[name]["description"] for registry, _ in _joined if name in registry]
    if taken:
        raise ConfigurationError(f"strategy name {name!r} is taken: {taken[0] or 'no description'}")
    _variants[name] = description, strategy_kwargs
    for registry, strategy in _joined:
        _add(name, registry, strategy)


def _add(name: str, registry: Any, strategy: type) -> None:
    """Register a variant with a Lightning registry, unless the strategy lacks one of its arguments."""
    description, arguments = _variants[name]
    if name in registry:  # else register_variant has said so
        raise ConfigurationError(
            f"register_variant({name!r}) was called before Lightning was imported, which has a strategy of"
            " this name. Use another one."
        )
    if arguments.keys() <= {*_arguments_of(strategy)}:
        registry.register(name, strategy, description=description, **arguments)


@cache
def _arguments_of(strategy: type) -> list[str]:
    """Return the names of a strategy's arguments; cached, as inspecting them takes 0.1 ms."""
    return list(inspect.signature(strategy).parameters)


def _join(module: Any, registry: str, strategy: type) -> None:
    """Register all variants with a newly imported Lightning package; `module` is its `strategies`."""
    module.DDPStrategy.register(strategy)  # which derives from a placeholder
    for name in _variants:
        _add(name, getattr(module, registry), strategy)
    _joined.append((getattr(module, registry), strategy))


def available_variants() -> dict[str, str]:
    """Return the registered strategy names with their descriptions, sorted by name."""
    return {name: description for name, (description, _) in sorted(_variants.items())}


def variant_arguments(name: str) -> dict[str, Any]:
    """Return the strategy arguments for which a registered name stands; raise KeyError for others."""
    return dict(_variants[name][1])


def register_builtin_variants() -> None:
    """Register this package's variants with each Lightning package, now or when it is imported."""
    for name, (description, arguments) in BUILTIN.items():
        register_variant(name, description=description, **arguments)
    join_fabric = partial(_join, registry="STRATEGY_REGISTRY", strategy=CustomFabricStrategy)
    join = partial(_join, registry="StrategyRegistry", strategy=CustomDDPStrategy)
    explain = partial(explain_refusals, explain=_explain_refusal)
    for root in FABRICS:
        after_import(f"{root}.strategies", join_fabric)
        after_import(f"{root}.connector", partial(explain_refusals, explain=_explain_refusal_of_fabric))
    for root in ROOTS:
        after_import(f"{root}.strategies", join)
        after_import(f"{root}.trainer.connectors.accelerator_connector", explain)


def _explain_refusal(error: Exception, strategy: Any, plugins: Any) -> str | None:
    """Return a better message for a strategy that a Trainer has rejected; None to keep Lightning's."""
    if isinstance(strategy, str):
        known = {name for registry, _ in _joined for name in registry}
        meant = difflib.get_close_matches(strategy.lower(), sorted(known), n=1)
        if meant and meant[0] in _variants and strategy.lower() not in known:
            return f"there is no strategy {strategy!r}; did you mean {meant[0]!r}?"
    if isinstance(strategy, CustomDDPStrategy):
        words = str(error).replace("strategy='ddp_notebook'", "strategy='custom_ddp_notebook'")
        return words if words != str(error) else None
    if _is_class_of_ours(strategy):
        return (
            f"strategy={strategy.__name__} is a class. Pass an instance, strategy={strategy.__name__}(), or"
            " the name of a variant, strategy='custom_ddp'."
        )
    for plugin in plugins if isinstance(plugins, list | tuple) else [plugins]:
        is_variant = isinstance(plugin, str) and plugin in _variants
        if is_variant or isinstance(plugin, CustomDDPStrategy) or _is_class_of_ours(plugin):
            return (
                "since Lightning 1.6 a strategy is not a plugin. Instead of plugins= use"
                " strategy=CustomDDPStrategy(...), or the name of a variant, strategy='custom_ddp'."
            )
    return None


def _explain_refusal_of_fabric(error: Exception, strategy: Any, plugins: Any) -> str | None:
    """Return a better message for a strategy that Fabric has rejected; None to keep Lightning's."""
    _, arguments = _variants.get(str(strategy).lower(), ("", {}))
    missing = sorted(arguments.keys() - {*_arguments_of(CustomFabricStrategy)})
    if missing:
        return f"the strategy {strategy!r} is for the Trainer, as Fabric has no {', '.join(missing)}"
    return _explain_refusal(error, strategy, plugins)


def _is_class_of_ours(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, CustomDDPStrategy)
