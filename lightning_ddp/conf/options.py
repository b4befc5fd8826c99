"""Options for Hydra: names, types, defaults and descriptions, read from the code that owns them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from datetime import timedelta
from typing import Any, Literal, Union

__all__ = ["REQUIRED", "Option", "options_of_dataclass", "options_of_signature", "type_of_annotation"]

_PRIMITIVES = (bool, int, float, str)

REQUIRED = "???"
"""Default of an option that has none, in OmegaConf's spelling."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One thing to configure."""

    name: str
    type: Any
    """As OmegaConf understands it; `Any` where it has no type for the annotation; `timedelta` is kept."""
    default: Any
    """`REQUIRED` if there is none."""
    description: str
    """One paragraph, without line ends."""
    choices: tuple[Any, ...] = ()
    """The only values (of the types in `choice_types`), where they are known."""
    choice_types: tuple[type, ...] = ()

    @property
    def is_duration(self) -> bool:
        """Whether it is a `timedelta`, or None."""
        return timedelta in (self.type, *typing.get_args(self.type))


def type_of_annotation(annotation: Any) -> tuple[Any, tuple[Any, ...], tuple[type, ...]]:
    """The type for OmegaConf, the choices among its values, and the types to which the choices apply.

    >>> type_of_annotation(Literal["a", "b"] | None)
    (typing.Optional[str], ('a', 'b'), (<class 'str'>,))
    >>> type_of_annotation(float | timedelta)[0]
    typing.Any
    """
    members = _members(annotation)
    choices = tuple(value for m in members if typing.get_origin(m) is Literal for value in typing.get_args(m))
    choice_types = tuple(dict.fromkeys(type(value) for value in choices))
    plain = [m for m in members if typing.get_origin(m) is not Literal and m is not types.NoneType]
    kinds = list(dict.fromkeys([*plain, *choice_types]))
    is_optional = types.NoneType in members
    if len(kinds) == 1 and _is_expressible(kinds[0]):
        kind = _as_config_type(kinds[0])
    elif kinds and all(kind in _PRIMITIVES for kind in kinds):
        if float in kinds and int not in kinds:  # in a union OmegaConf takes no int for a float
            kinds.append(int)
        kind = Union[tuple(kinds)]  # noqa: UP007 (a tuple of types that is not known here)
    else:
        return Any, (), ()
    choice_types = tuple(t for t in choice_types if t not in plain)
    return (kind | None if is_optional else kind), (choices if choice_types else ()), choice_types


def _members(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return [member for part in typing.get_args(annotation) for member in _members(part)]
    return [annotation]


def _is_expressible(kind: Any) -> bool:
    if kind in _PRIMITIVES or kind is timedelta:
        return True
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    return _container(origin) is not None and all(argument in _PRIMITIVES for argument in arguments)


def _container(origin: Any) -> Any:
    if not isinstance(origin, type):
        return None
    return list if issubclass(origin, Sequence) else dict if issubclass(origin, Mapping) else None


def _as_config_type(kind: Any) -> Any:
    container = _container(typing.get_origin(kind))
    arguments = typing.get_args(kind)
    if container is dict:  # a key is text on the command line, and may be a number in YAML
        return dict[Any, arguments[1]]  # type: ignore[valid-type]  # a type that is not known here
    return kind if container is None else container[arguments]


# ---------------------------------------------------------------------- where options come from


def options_of_signature(owner: type, *, without: Sequence[str] = ()) -> list[Option]:
    """The arguments of a class; their descriptions are those of `Args:` in its docstring.

    Args:
        owner: the class.
        without: arguments that are left out.
    """
    hints = typing.get_type_hints(owner.__init__)  # type: ignore[misc]  # of this very class
    described = _described_arguments(inspect.getdoc(owner) or "")
    return [
        _option(name, hints.get(name, Any), parameter.default, described.get(name, ""))
        for name, parameter in inspect.signature(owner).parameters.items()
        if name not in without and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]


def options_of_dataclass(owner: type) -> list[Option]:
    """The fields of a dataclass; their descriptions are the strings below them."""
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
    kind, choices, choice_types = type_of_annotation(annotation)
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
    """Argument -> description, from the `Args:` of a Google docstring.

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
    """Field -> the string that stands below it, of this class alone."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(tree, ast.ClassDef)
    described = {}
    for statement, following in zip(tree.body, tree.body[1:], strict=False):
        is_field = isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        if is_field and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            described[statement.target.id] = " ".join(str(following.value.value).split())  # type: ignore[attr-defined]
    return described
