"""Typed classes for OmegaConf: for the strategy, the Trainer, each hook and averager.

They are made from options: names, types, defaults and descriptions, read from the code that defines them.
They are attributes of this module, so that a composed configuration pickles.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, make_dataclass
from datetime import timedelta
from typing import Any, Literal, Union

from lightning_ddp._lightning import lightnings
from lightning_ddp.averaging import available_averagers, averager_options
from lightning_ddp.ddp.module import BucketedDDP
from lightning_ddp.hooks import available_hooks, hook_options
from lightning_ddp.strategy import CustomDDPStrategy
from lightning_ddp.supervise.settings import RecoverySettings, ReplaceSettings
from lightning_ddp.trainer import Trainer

_PRIMITIVES = (bool, int, float, str)

REQUIRED = "???"
"""OmegaConf's marker for an option without a default."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One configuration option."""

    name: str
    type: Any
    """Type for OmegaConf; `Any` if it has none for the annotation; `timedelta` is kept."""
    default: Any
    """Default value; `REQUIRED` if there is none."""
    description: str
    """Description in one paragraph, without line ends."""
    choices: tuple[Any, ...] = ()
    """Valid values (of the types in `choice_types`), if they are known."""
    choice_types: tuple[type, ...] = ()

    @property
    def is_duration(self) -> bool:
        """True if the option is a `timedelta`, or None."""
        return timedelta in (self.type, *typing.get_args(self.type))


def _type_of(annotation: Any) -> tuple[Any, tuple[Any, ...], tuple[type, ...]]:
    """Return the type for OmegaConf, the valid values, and the types to which these apply.

    >>> _type_of(Literal["a", "b"] | None)
    (str | None, ('a', 'b'), (<class 'str'>,))
    >>> _type_of(float | timedelta)[0]
    typing.Any
    """
    members = _members(annotation)
    choices = tuple(value for m in members if typing.get_origin(m) is Literal for value in typing.get_args(m))
    choice_types = tuple(dict.fromkeys(type(value) for value in choices))
    plain = [m for m in members if typing.get_origin(m) is not Literal and m is not types.NoneType]
    kinds = list(dict.fromkeys([*plain, *choice_types]))
    is_optional = types.NoneType in members
    kind = _as_config_type(kinds[0]) if len(kinds) == 1 else None
    if kind is None:
        if not kinds or not all(kind in _PRIMITIVES for kind in kinds):
            return Any, (), ()
        if float in kinds and int not in kinds:  # in a union OmegaConf does not accept an int as float
            kinds.append(int)
        kind = Union[tuple(kinds)]  # noqa: UP007 (a tuple of types that is not known here)
    choice_types = tuple(t for t in choice_types if t not in plain)
    return (kind | None if is_optional else kind), (choices if choice_types else ()), choice_types


def _members(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return [member for part in typing.get_args(annotation) for member in _members(part)]
    return [annotation]


def _as_config_type(kind: Any) -> Any:
    """Return OmegaConf's type for a single type; None if it has none."""
    if kind in _PRIMITIVES or kind is timedelta:
        return kind
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(origin, type) and all(argument in _PRIMITIVES for argument in arguments):
        if issubclass(origin, Sequence):
            return list[arguments]  # type: ignore[valid-type]  # a type that is not known here
        if issubclass(origin, Mapping):  # a key is text on the command line, but may be a number in YAML
            return dict[Any, arguments[1]]  # type: ignore[valid-type]  # the same
    return None


# ---------------------------------------------------------------------- sources of options


def options_of_signature(owner: type, *, without: Sequence[str] = ()) -> list[Option]:
    """Return the arguments of a class, except `without`, described by `Args:` in its docstring.

    The docstring of `BucketedDDP` describes those that are passed on to it.
    """
    hints = typing.get_type_hints(owner.__init__)  # type: ignore[misc]  # of this very class
    described = {
        name: text
        for kind in (BucketedDDP, owner)
        for name, text in _described_arguments(inspect.getdoc(kind) or "").items()
    }
    return [
        _option(name, hints.get(name, Any), parameter.default, described.get(name, ""))
        for name, parameter in inspect.signature(owner).parameters.items()
        if name not in without and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]


def options_of_dataclass(owner: type) -> list[Option]:
    """Return the fields of a dataclass, described by the strings below them."""
    hints = typing.get_type_hints(owner)
    described: dict[str, str] = {}
    for kind in reversed(owner.__mro__):
        if dataclasses.is_dataclass(kind):
            described |= _described_fields(kind)
    return [
        _option(field.name, hints[field.name], field.default, described.get(field.name, ""))
        for field in dataclasses.fields(owner)
        if field.init
    ]


def _option(name: str, annotation: Any, default: Any, description: str) -> Option:
    members = _members(annotation)
    if timedelta in members and float in members:  # seconds where the default is a number, else the parts
        members.remove(timedelta if isinstance(default, float) else float)
    kind, choices, choice_types = _type_of(Union[tuple(members)])  # noqa: UP007 (a tuple)
    is_required = default in (MISSING, inspect.Parameter.empty)
    return Option(
        name=name,
        type=kind,
        default=REQUIRED if is_required else default,
        description=description,
        choices=choices,
        choice_types=choice_types,
    )


def _described_arguments(docstring: str) -> dict[str, str]:
    """Return descriptions by argument, from the `Args:` section of a Google docstring.

    >>> _described_arguments('''Does.
    ...
    ... Args:
    ...     first: of two
    ...         lines.
    ...     second: one.
    ...
    ... Raises:
    ...     ValueError: never.
    ... ''')
    {'first': 'of two lines.', 'second': 'one.'}
    """
    section = re.search(r"^Args:\n((?:[ ]{4}.*\n?|\n(?=[ ]{4}))+)", docstring, re.MULTILINE)
    text = textwrap.dedent(section[1]) if section else ""
    entries = re.findall(r"^\*{0,2}(\w+): (.*(?:\n[ ]+.*)*)", text, re.MULTILINE)
    return {name: " ".join(description.split()) for name, description in entries}


def _described_fields(owner: type) -> dict[str, str]:
    """Return the strings below the fields of this class, without its bases, by field."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(tree, ast.ClassDef)
    described = {}
    for statement, following in zip(tree.body, tree.body[1:], strict=False):
        is_field = isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        if is_field and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            described[statement.target.id] = " ".join(str(following.value.value).split())  # type: ignore[attr-defined]
    return described


# ---------------------------------------------------------------------- classes made from options

SET_BY_THE_TRAINER = ("accelerator", "parallel_devices", "precision_plugin")
"""Arguments of the strategy that the Trainer sets, not the user."""


@dataclass
class Duration:
    """A `datetime.timedelta` in a configuration, or None if no part is given; the parts add up."""

    _target_: str = "lightning_ddp.conf.schema.duration"
    days: float | None = None
    """Days of the duration; None for 0."""
    hours: float | None = None
    """Hours of the duration; None for 0."""
    minutes: float | None = None
    """Minutes of the duration; None for 0."""
    seconds: float | None = None
    """Seconds of the duration; None for 0."""


def duration(**parts: float | None) -> timedelta | None:
    """Convert a `Duration` to a `timedelta`; None if no part is given.

    >>> duration(minutes=1.5, seconds=None)
    datetime.timedelta(seconds=90)
    >>> duration(minutes=None) is None
    True
    """
    given = {name: value for name, value in parts.items() if value is not None}
    return timedelta(**given) if given else None


@dataclass(frozen=True, kw_only=True)
class Schema:
    """An OmegaConf class and the options from which it is made."""

    name: str
    """Path in the ConfigStore, below `lightning_ddp/schema`."""
    cls: type
    options: tuple[Option, ...]
    """Options that a user may set."""
    description: str


def _config_field(option: Option) -> tuple[str, Any, Any]:
    kind, default = option.type, option.default
    if option.is_duration:
        minutes = None if default is None else default.total_seconds() / 60
        return option.name, Any, field(default_factory=lambda: Duration(minutes=minutes))
    if isinstance(default, (list, dict)):
        return option.name, kind, field(default_factory=lambda: type(default)(default))
    return option.name, kind, default


def _make(
    name: str, options: Sequence[Option], description: str, *, class_name: str, constants: dict[str, str]
) -> Schema:
    """Create a class at module level, where pickle finds it."""
    fields: list[Any] = [(key, str, value) for key, value in constants.items()]
    fields += [_config_field(option) for option in options]
    cls = make_dataclass(class_name, fields, namespace={"__doc__": description, "__module__": __name__})
    globals()[class_name] = cls
    return Schema(name=name, cls=cls, options=tuple(options), description=description)


def _make_for(owner: type, name: str, options: Sequence[Option]) -> Schema:
    """Create the schema of an object that Hydra instantiates."""
    return _make(
        name,
        options,
        (inspect.getdoc(owner) or "").partition("\n")[0],
        class_name=f"{owner.__name__}Config",
        constants={"_target_": f"lightning_ddp.{owner.__name__}", "_convert_": "all"},
    )


def _make_group(
    group: str, kind: str, options: Mapping[str, type | None], descriptions: Mapping[str, str]
) -> dict[str, Schema]:
    """Create the schemas of the named values of a strategy argument."""
    return {
        name: _make(
            f"{group}/{name}",
            [] if owner is None else options_of_dataclass(owner),
            descriptions[name],
            class_name="".join(part.capitalize() for part in name.split("_")) + f"{kind}Config",
            constants={"name": name},
        )
        for name, owner in options.items()
    }


STRATEGY = _make_for(
    CustomDDPStrategy, "strategy", options_of_signature(CustomDDPStrategy, without=SET_BY_THE_TRAINER)
)
TRAINER = _make_for(
    Trainer,
    "trainer",  # that of Lightning in this installation, and what is added to it
    options_of_signature(lightnings("Trainer")) + options_of_signature(Trainer, without=("self",)),
)
HOOKS = _make_group("ddp_comm_hook", "Hook", hook_options(), available_hooks())
AVERAGERS = _make_group("model_averaging", "Averager", averager_options(), available_averagers())
ON_FAILURE = _make_group(
    "on_failure",
    "OnFailure",
    {"stop": None, "shrink": RecoverySettings, "replace": ReplaceSettings},
    {
        "stop": "End the run on all ranks.",
        "shrink": "Continue with the remaining ranks.",
        "replace": "Continue with the remaining ranks, and start a new process for each lost rank.",
    },
)
DURATION = Schema(
    name="duration",
    cls=Duration,
    options=tuple(option for option in options_of_dataclass(Duration) if option.name != "_target_"),
    description="A duration, as a value of `timeout` and `stall_timeout`.",
)


def all_schemas() -> dict[type, Schema]:
    """Return every schema by its class."""
    schemas = (STRATEGY, TRAINER, DURATION, *HOOKS.values(), *AVERAGERS.values(), *ON_FAILURE.values())
    return {schema.cls: schema for schema in schemas}
