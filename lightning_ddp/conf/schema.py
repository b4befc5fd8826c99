"""Typed classes for OmegaConf, made of the options: for the strategy, the Trainer, each hook and averager.

They are attributes of this module, so that a composed configuration pickles.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field, make_dataclass
from datetime import timedelta
from typing import Any

from lightning_ddp._lightning import lightnings
from lightning_ddp.averaging import available_averagers, averager_options
from lightning_ddp.conf.options import Option, options_of_dataclass, options_of_signature
from lightning_ddp.hooks import available_hooks, hook_options
from lightning_ddp.strategy import CustomDDPStrategy
from lightning_ddp.supervise.settings import RecoverySettings, ReplaceSettings
from lightning_ddp.trainer import Trainer

__all__ = ["AVERAGERS", "HOOKS", "ON_FAILURE", "STRATEGY", "TRAINER", "Schema", "all_schemas"]

SET_BY_THE_TRAINER = ("accelerator", "parallel_devices", "precision_plugin")
"""Arguments of the strategy that are none of the user's."""


@dataclass
class Duration:
    """A `datetime.timedelta` in a configuration, or None if no part is given; the parts add up."""

    _target_: str = "lightning_ddp.conf.schema.duration"
    days: float | None = None
    hours: float | None = None
    minutes: float | None = None
    seconds: float | None = None

    @classmethod
    def of(cls, value: timedelta | None) -> Duration:
        """In minutes."""
        return cls(minutes=None if value is None else value.total_seconds() / 60)


def duration(**parts: float | None) -> timedelta | None:
    """What Hydra makes of a `Duration`.

    >>> duration(minutes=1.5, seconds=None)
    datetime.timedelta(seconds=90)
    >>> duration(minutes=None) is None
    True
    """
    given = {name: value for name, value in parts.items() if value is not None}
    return timedelta(**given) if given else None


@dataclass(frozen=True, kw_only=True)
class Schema:
    """A class for OmegaConf and the options that it is made of."""

    name: str
    """Where it lies in the ConfigStore, below `lightning_ddp/schema`."""
    cls: type
    options: tuple[Option, ...]
    description: str


def _config_field(option: Option) -> tuple[str, Any, Any]:
    kind, default = option.type, option.default
    if option.is_duration:
        return option.name, Duration | None, field(default_factory=lambda: Duration.of(default))
    if isinstance(default, (list, dict)):
        return option.name, kind, field(default_factory=lambda: type(default)(default))
    return option.name, kind, default


def _make(
    name: str, options: Iterable[Option], description: str, *, class_name: str, constants: dict[str, str]
) -> Schema:
    """Makes a class that a pickle finds here."""
    kept = tuple(options)
    fields: list[Any] = [(key, str, value) for key, value in constants.items()]
    fields += [_config_field(option) for option in kept]
    cls = make_dataclass(class_name, fields, namespace={"__doc__": description, "__module__": __name__})
    globals()[class_name] = cls
    return Schema(name=name, cls=cls, options=kept, description=description)


def _target(owner: type) -> dict[str, str]:
    return {"_target_": f"lightning_ddp.{owner.__name__}", "_convert_": "all"}


def _class_name(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _trainer_options() -> list[Option]:
    """Those of Lightning's Trainer of this installation, and the two that are added to it."""
    added = [o for o in options_of_signature(Trainer) if o.name != "self"]
    return [*options_of_signature(lightnings("Trainer")), *added]


STRATEGY = _make(
    "strategy",
    options_of_signature(CustomDDPStrategy, without=SET_BY_THE_TRAINER),
    (inspect.getdoc(CustomDDPStrategy) or "").partition("\n")[0],
    class_name="CustomDDPStrategyConfig",
    constants=_target(CustomDDPStrategy),
)
TRAINER = _make(
    "trainer",
    _trainer_options(),
    (inspect.getdoc(Trainer) or "").partition("\n")[0],
    class_name="TrainerConfig",
    constants=_target(Trainer),
)
HOOKS = {
    name: _make(
        f"ddp_comm_hook/{name}",
        options_of_dataclass(options),
        available_hooks()[name],
        class_name=f"{_class_name(name)}HookConfig",
        constants={"name": name},
    )
    for name, options in hook_options().items()
}
AVERAGERS = {
    name: _make(
        f"model_averaging/{name}",
        options_of_dataclass(options),
        available_averagers()[name],
        class_name=f"{_class_name(name)}AveragerConfig",
        constants={"name": name},
    )
    for name, options in averager_options().items()
}


ON_FAILURE = {
    name: _make(
        f"on_failure/{name}",
        options,
        description,
        class_name=f"{_class_name(name)}OnFailureConfig",
        constants={"name": name},
    )
    for name, options, description in (
        ("stop", [], "The run ends on all ranks."),
        ("shrink", options_of_dataclass(RecoverySettings), "Goes on with the ranks that are left."),
        ("replace", options_of_dataclass(ReplaceSettings), "The same, with a new process in each place."),
    )
}


DURATION = Schema(
    name="duration",
    cls=Duration,
    options=tuple(option for option in options_of_dataclass(Duration) if option.name != "_target_"),
    description="A time span.",
)


def all_schemas() -> dict[type, Schema]:
    """Every schema, by its class."""
    schemas = (STRATEGY, TRAINER, DURATION, *HOOKS.values(), *AVERAGERS.values(), *ON_FAILURE.values())
    return {schema.cls: schema for schema in schemas}


def known_keys(schema: Schema) -> list[str]:
    """The keys of a schema that a user may set, constants aside."""
    constants = {"_target_", "_convert_", "name"}
    return [f.name for f in dataclasses.fields(schema.cls) if f.name not in constants]
