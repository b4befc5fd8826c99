"""Communication hooks: compressed and other reductions of a bucket's gradients over the ranks.

Hooks by name: check of a specification without processes, and construction for a group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_ddp.catalogue import Catalogue
from lightning_ddp.comm.group import Group
from lightning_ddp.encoding.mean import EncodedWire, Wire
from lightning_ddp.encoding.side_stream import Channel
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.hooks.base import Hook, HookOptions, StatefulHook

__all__ = [
    "Hook",
    "HookOptions",
    "HookPlan",
    "StatefulHook",
    "available_hooks",
    "build_hook",
    "hook_options",
    "parse_hook",
    "register_hook",
    "registered_hook",
]

_HOOKS: Catalogue[Hook] = Catalogue(
    "communication hook",
    Hook,
    remark=". Pass a function of your own by itself, and wrap it with ddp_comm_wrapper.",
)
_registered: dict[str, tuple[Callable[..., Any], str]] = {}
"""User's functions with torch's signature, and their descriptions, by name."""


def register_hook(name: str, hook: Callable[..., Any], *, description: str = "") -> None:
    """Register a communication hook, a function `hook(state, bucket)`, as `ddp_comm_hook=name`.

    Call it in every process before the strategy is made, for example at the top of the script. Registering
    the same function again has no effect.

    Args:
        name: name of the hook for strategies, `register_variant` and Hydra; not a name of this package.
        hook: called as `hook(state, bucket)`; returns a future of the bucket's averaged gradients, 1-D.
        description: one line for `available_hooks`.

    Raises:
        ConfigurationError: the name is empty or taken, or `hook` is not callable.
    """
    if not name or not callable(hook):
        raise ConfigurationError(f"register_hook({name!r}, {hook!r}): expected a name and a function")
    is_taken = name in _HOOKS.names() or _registered.get(name, (hook,))[0] is not hook
    if is_taken:
        raise ConfigurationError(f"the communication hook {name!r} exists already. Use another name.")
    _registered[name] = hook, description


def registered_hook(spec: Any) -> Callable[..., Any] | None:
    """Return the function registered under the name in a specification of hooks; None if there is none.

    Raises:
        ConfigurationError: such a hook is given options, or combined with another hook.
    """
    entries = [spec] if isinstance(spec, str | Mapping) else spec if isinstance(spec, list | tuple) else []
    names = [entry.get("name") if isinstance(entry, Mapping) else entry for entry in entries]
    own = [name for name in names if isinstance(name, str) and name in _registered]
    if own and (len(entries) > 1 or (isinstance(spec, Mapping) and len(spec) > 1)):
        raise ConfigurationError(
            f"ddp_comm_hook {spec!r}: {own[0]!r}, from register_hook, takes no options and cannot be combined"
        )
    return _registered[own[0]][0] if own else None


def available_hooks() -> dict[str, str]:
    """Return the names of all hooks with their descriptions, sorted by name.

    >>> sorted(available_hooks())[:3]
    ['allreduce', 'bf16', 'fp16']
    """
    own = {name: description for name, (_, description) in _registered.items()}
    return dict(sorted({**_HOOKS.descriptions(), **own}.items()))


def hook_options() -> dict[str, type[HookOptions]]:
    """Return the options of each hook by its name: a dataclass whose fields are the options.

    >>> hook_options()["powersgd"](rank=4).rank
    4
    """
    return _HOOKS.options()


@dataclass(frozen=True, kw_only=True)
class HookPlan:
    """A checked hook specification: hooks with their options, outer to inner."""

    entries: tuple[tuple[str, HookOptions], ...]
    """Names and options. All entries except the last encode the values that the last entry sends."""

    @property
    def name(self) -> str:
        """Names of the hooks, outer to inner, joined by '+'."""
        return "+".join(name for name, _ in self.entries)

    def __str__(self) -> str:
        """Return the names with all options, the same text for the same plan.

        >>> print(parse_hook(["bf16", {"name": "randomk", "ratio": 0.1}]))
        bf16(), randomk(momentum=0.0, nesterov=False, start_step=0, ratio=0.1, seed=0)
        """
        return ", ".join(
            f"{name}({', '.join(f'{key}={value!r}' for key, value in vars(options).items())})"
            for name, options in self.entries
        )


def parse_hook(spec: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]) -> HookPlan:
    """Check a hook specification and return it as a plan, without communication.

    >>> parse_hook(["bf16", {"name": "powersgd", "rank": 4}]).name
    'bf16+powersgd'

    Args:
        spec: a name; a mapping with `name` and options; or a list of them, outer to inner.

    Raises:
        ConfigurationError: a name, an option, a value or the combination cannot be used.
    """
    if isinstance(spec, (str, Mapping)):
        spec = [spec]
    if not isinstance(spec, Sequence) or not spec:
        raise ConfigurationError(
            f"communication hook {spec!r}: expected a name, a mapping with 'name', or a list of them"
        )
    entries = tuple(map(_HOOKS.parse, spec))
    _check_composition([name for name, _ in entries])
    return HookPlan(entries=entries)


def _check_composition(names: Sequence[str]) -> None:
    *outer, inner = names
    encoders = [name for name in _HOOKS.names() if _HOOKS[name].make_codec is not None]
    takers = [name for name in _HOOKS.names() if _HOOKS[name].takes_wire]
    for name in outer:
        if name not in encoders:
            raise ConfigurationError(
                f"communication hook {name!r} cannot be wrapped around {inner!r}. Only"
                f" {', '.join(encoders)} can be, as they encode the values that another hook sends."
            )
    if len(outer) > 1:
        raise ConfigurationError(
            f"communication hooks {', '.join(map(repr, outer))} around {inner!r}: values are encoded once,"
            " so only one of them can be used"
        )
    if outer and inner in encoders:
        raise ConfigurationError(
            f"communication hook {outer[0]!r} around {inner!r}: both encode the same numbers; choose one"
        )
    if outer and inner not in takers:
        raise ConfigurationError(
            f"communication hook {outer[0]!r} cannot be wrapped around {inner!r}, which sends no"
            f" floating-point tensors to encode. It can be wrapped around {', '.join(takers)}."
        )


def build_hook(
    spec: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | HookPlan,
    process_group: Any,
    device: torch.device | None = None,
) -> Hook:
    """Build the hook of a specification, to pass to `BucketedDDP.register_comm_hook(None, hook)`.

    Collective: all ranks must call it.

    Args:
        spec: specification as for `parse_hook`, or its result.
        process_group: process group of the wrapper (`model.process_group`), or a `Group` of it.
        device: device of the gradients; None for the CPU.

    Raises:
        ConfigurationError: the specification cannot be used.
    """
    plan = spec if isinstance(spec, HookPlan) else parse_hook(spec)
    group = process_group if isinstance(process_group, Group) else Group(process_group)
    channel = Channel(group, device or torch.device("cpu"))
    (encoder, encoder_options), (name, options) = plan.entries[0], plan.entries[-1]
    wire = Wire(channel)
    make_codec = _HOOKS[encoder].make_codec
    if make_codec is not None:
        wire = EncodedWire(channel, make_codec(encoder_options))
    return _HOOKS[name](channel, wire, options)
