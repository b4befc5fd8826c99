"""Checks of a composed Hydra configuration: dotted path, problem, and the closest name that is valid."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from typing import Any

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    ConfigTypeError,
    OmegaConfBaseException,
    ValidationError,
)

from lightning_ddp.averaging import parse_averager
from lightning_ddp.conf.schema import STRATEGY, Option, Schema, all_schemas
from lightning_ddp.errors import ConfigurationError, closest
from lightning_ddp.hooks import parse_hook, registered_hook
from lightning_ddp.hydra_jobs.handover import ancestors, nodes_of
from lightning_ddp.supervise.settings import parse_on_failure, parse_on_preemption

_SUBGROUPS = ("strategy/ddp_comm_hook", "strategy/model_averaging", "strategy/on_failure")
_CONSTANTS = ("name", "_target_", "_convert_", "_recursive_", "_partial_")
_CHECKED = {
    "ddp_comm_hook": lambda spec: registered_hook(spec) or parse_hook(spec),
    "model_averaging": parse_averager,
    "on_failure": parse_on_failure,
    "on_preemption": parse_on_preemption,
}


def check_composed(config: Any) -> None:
    """Check every node with a schema of this package, and hooks and averagers wherever specified.

    Raises:
        ConfigCompositionException: something is wrong; the message has its path and the closest valid name.
    """
    problems = [
        problem for path, node, schema in _our_nodes(config) for problem in _problems(path, node, schema)
    ]
    if problems:
        raise ConfigCompositionException("\n".join(problems))


def explain(error: HydraException, groups: Set[str]) -> str | None:
    """Return a better message for a Hydra error about this package's options or `groups`, else None."""
    if isinstance(error, MissingConfigException):
        return _explain_missing_choice(error, groups)
    group = re.match(r"Could not override '((\w+)/[\w/]+)'", str(error))
    if group and group[2] in groups and group[1] not in _SUBGROUPS:
        return f"{group[1]}: there is no such group{closest(group[1], _SUBGROUPS, lists_all=True)}"
    cause = error.__cause__ or error.__context__  # the latter for values in a file
    if not isinstance(cause, OmegaConfBaseException):
        return None
    file = re.match(r"In '([^']+)'", str(error))
    message = _explain_value(cause)
    return f"{message} (In '{file[1]}'.)" if file and message else message


def _explain_value(cause: OmegaConfBaseException) -> str | None:
    schema = _schema_above(cause.parent_node)
    if schema is None:
        return None
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)):
        is_ours = OmegaConf.get_type(cause.parent_node) is schema.cls
        return _unknown(str(cause.full_key), str(cause.key), schema) if is_ours else None
    option = _find_option(str(cause.full_key), schema)
    described = f" Meaning: {option.description}" if option is not None and option.description else ""
    if isinstance(cause, ValidationError):
        return f"{cause.full_key}: {str(cause.msg or cause).splitlines()[0]}.{described}"
    if isinstance(cause, ConfigTypeError) and str(cause.full_key).endswith(tuple(_CHECKED)):
        return (
            f"{cause.full_key}: the chosen strategy has its own options there, which a list cannot replace."
            " Start with strategy=custom_ddp."
        )
    return None


# ---------------------------------------------------------------------- nodes


def _our_nodes(config: Any) -> Iterator[tuple[str, DictConfig, Schema]]:
    """Iterate over nodes with a schema of this package, with their paths; do not resolve anything."""
    for path, node in nodes_of(config):
        schema = None if OmegaConf.is_interpolation(node) else _schema_of(node)
        if schema is not None:
            yield path, node, schema


def _schema_of(node: Any) -> Schema | None:
    is_dict = isinstance(node, DictConfig)
    return all_schemas().get(OmegaConf.get_type(node)) if is_dict else None  # type: ignore[arg-type]  # any type


def _schema_above(node: Any) -> Schema | None:
    return next(filter(None, map(_schema_of, ancestors(node))), None)


def _find_option(full_key: str, schema: Schema) -> Option | None:
    parts = full_key.replace("[", ".").split(".")
    return next((option for option in schema.options if option.name in parts), None)


# ---------------------------------------------------------------------- problems


def _problems(path: str, node: DictConfig, schema: Schema) -> Iterator[str]:
    for key in _unknown_keys(node, schema):
        yield _unknown(f"{path}.{key}", key, schema)
    for option in schema.options:
        if option.choices and option.name in {*node} and not OmegaConf.is_interpolation(node, option.name):
            value = node.get(option.name)
            if type(value) in option.choice_types and value not in option.choices:
                hint = closest(str(value), [str(choice) for choice in option.choices], lists_all=True)
                yield f"{path}.{option.name}: {value!r} is no choice{hint}"
    if schema is STRATEGY:
        for name, parse in _CHECKED.items():
            problem = _parse_problem(node, name, parse)
            if problem:
                yield f"{path}.{name}: {problem}"


def _unknown_keys(node: DictConfig, schema: Schema) -> list[str]:
    return [str(key) for key in node if key not in {*(option.name for option in schema.options), *_CONSTANTS}]


def _parse_problem(node: DictConfig, name: str, parse: Any) -> str | None:
    """Return the error of parsing a specification; None if valid, or dependent on later values."""
    if name not in {*node} or OmegaConf.is_interpolation(node, name):
        return None
    child = None if OmegaConf.is_missing(node, name) else node[name]
    if child is None:
        return None
    if any(_unknown_keys(inner, schema) for _, inner, schema in _our_nodes(node)):
        return None  # reported for the inner node
    try:
        spec = OmegaConf.to_container(node, resolve=True, throw_on_missing=False)[name]  # type: ignore[index, call-overload]
    except OmegaConfBaseException:
        return None  # an interpolation that can be resolved in the job only, such as ${hydra:...}
    if isinstance(spec, dict) and ("_target_" in spec or "???" in spec.values()):
        return None  # a user's function, or a value that is not set yet
    try:
        parse(spec)
    except ConfigurationError as error:
        return str(error)
    return None


def _unknown(full_key: str, key: str, schema: Schema) -> str:
    hint = closest(key, [option.name for option in schema.options], lists_all=True)
    return f"{full_key}: {schema.name.replace('/', ' ')} has no option {key!r}{hint}"


def _explain_missing_choice(error: MissingConfigException, groups: Set[str]) -> str | None:
    group, _, choice = (error.missing_cfg_file or "").rpartition("/")
    if group == "hydra/launcher" and choice == "submitit_slurm" and "launcher" in groups:
        return f"{error}\nThe SLURM launcher is a separate package: pip install hydra-submitit-launcher"
    if group.partition("/")[0] not in groups or not error.options:
        return None
    return f"{group}: there is no {choice!r}{closest(str(choice), list(error.options), lists_all=True)}"
