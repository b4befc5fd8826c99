"""Generator of the YAML files of the group `strategy` from the options.

`python -m lightning_ddp.conf.pages` writes the files; a test compares them with this module's output.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_ddp.conf.schema import AVERAGERS, HOOKS, ON_FAILURE, REQUIRED, STRATEGY, Option, Schema
from lightning_ddp.variants import BUILTIN

FOLDER = Path(__file__).parent
_WIDTH = 108
_BASE = "custom_ddp"
_SUBGROUPS: Mapping[str, Mapping[str, Schema]] = {
    "ddp_comm_hook": HOOKS,
    "model_averaging": AVERAGERS,
    "on_failure": ON_FAILURE,
}
_EXAMPLES: Mapping[str, Any] = {"periods": {4: 2, 16: 0}}
"""Values for options that have no default."""


def strategy_pages() -> dict[str, str]:
    """Return the content of every generated file, by its path below this folder."""
    pages = {f"strategy/{_BASE}.yaml": _base_page()}
    for name, (description, arguments) in BUILTIN.items():
        if name != _BASE:
            short = name.removeprefix(f"{_BASE}_")
            pages[f"strategy/{short}.yaml"] = _variant_page(name, description, arguments)
    for group, schemas in _SUBGROUPS.items():
        for name, schema in schemas.items():
            pages[f"strategy/{group}/{name}.yaml"] = _option_page(group, schema)
    return pages


def _base_page() -> str:
    lines = [
        *_comment(f"{STRATEGY.description} The fields of `lightning_ddp.CustomDDPStrategy`."),
        *_comment(
            "`strategy/ddp_comm_hook=NAME` and `strategy/model_averaging=NAME` choose a hook and an averager"
            " with their own options, `strategy/on_failure=NAME` what happens when a rank fails, as in"
            " `strategy/ddp_comm_hook=powersgd strategy.ddp_comm_hook.rank=4`."
        ),
        *_defaults("strategy", {}),
        "",
    ]
    for option in STRATEGY.options:
        if option.name not in _SUBGROUPS:
            lines += _documented(option, option.default)
    return _text(lines)


def _variant_page(name: str, description: str, arguments: Mapping[str, Any]) -> str:
    chosen: dict[str, str] = {}
    values: dict[str, Any] = {}
    for argument, value in arguments.items():
        if argument in _SUBGROUPS:
            entry = {"name": value} if isinstance(value, str) else dict(value)
            chosen[argument] = entry.pop("name")
            if entry:
                values[argument] = entry
        else:
            values[argument] = value
    head = [*_comment(f"`{name}`: {description}."), *_defaults("strategy", chosen)]
    return _text([*head, *(["", *_yaml(values)] if values else [])])


def _option_page(group: str, schema: Schema) -> str:
    lines = [
        *_comment(schema.description),
        "defaults:",
        f"  - /lightning_ddp/schema/{group}@_here_: {schema.name.rpartition('/')[2]}",
        "  - _self_",
        *([""] if schema.options else []),
    ]
    for option in schema.options:
        lines += _documented(option, _EXAMPLES.get(option.name, option.default))
    return _text(lines)


def _defaults(schema: str, chosen: Mapping[str, str]) -> list[str]:
    choices = [f"  - {group}: {chosen.get(group, 'null')}" for group in _SUBGROUPS]
    return ["defaults:", f"  - /lightning_ddp/schema@_here_: {schema}", *choices, "  - _self_"]


def _documented(option: Option, value: Any) -> list[str]:
    description = option.description[:1].upper() + option.description[1:]
    if option.is_duration:
        description += " The parts (days, hours, minutes, seconds) add up."
        value = {"minutes": None if value is None else value.total_seconds() / 60}
    assert value != REQUIRED, f"{option.name} needs an example"
    return [*_comment(description), *_yaml({option.name: value})]


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _yaml(values: Mapping[Any, Any], indent: str = "") -> Iterator[str]:
    for key, value in values.items():
        key = key if isinstance(key, str) else f'"{key}"'  # text, as on the command line
        if isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _yaml(value, indent + "  ")
        else:
            yield f"{indent}{key}: {value if isinstance(value, str) else json.dumps(value)}"


def _text(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the generated files."""
    for path, content in strategy_pages().items():
        target = FOLDER / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
