"""Identity of a communication hook: its name, and what has to be the same about it on all ranks."""

from __future__ import annotations

import functools
import hashlib
from types import CodeType
from typing import Any

__all__ = ["describe_hook", "describe_state", "hook_name"]

_PLAIN = (bool, int, float, str, bytes, type(None))


def hook_name(hook: Any) -> str:
    """The name by which people know a hook: its own, or that of the function.

    >>> from lightning_ddp.hooks.sign import Sign
    >>> hook_name(Sign.__new__(Sign)), hook_name(functools.partial(print, end=""))
    ('sign', 'print')
    """
    while isinstance(hook, functools.partial):
        hook = hook.func
    own = getattr(hook, "name", None)
    return own if isinstance(own, str) else str(getattr(hook, "__qualname__", type(hook).__qualname__))


def describe_hook(hook: Any) -> str:
    """A hook's name with its options, or with a digest of its code; the same text for the same hook."""
    if hook is None:
        return "none"
    options = getattr(hook, "options", None)
    if isinstance(getattr(hook, "name", None), str) and options is not None:
        return f"{hook_name(hook)} ({options})"
    arguments = []
    while isinstance(hook, functools.partial):
        given = [*enumerate(hook.args), *sorted(hook.keywords.items())]
        arguments += [f"{key}={value!r}" for key, value in given if isinstance(value, _PLAIN)]
        hook = hook.func
    code = getattr(hook, "__code__", None) or getattr(type(hook).__call__, "__code__", None)
    digest = _digest(code) if isinstance(code, CodeType) else "-"
    module = getattr(hook, "__module__", "")
    return f"{module}.{hook_name(hook)} ({', '.join([*arguments, f'code {digest}'])})"


def describe_state(state: Any) -> str:
    """The settings in the state of one of torch's hooks; '' for any other, which may differ between ranks.

    >>> from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
    >>> describe_state(PostLocalSGDState(None, None, start_localSGD_iter=5))
    'PostLocalSGDState(iter=0, post_local_gradient_allreduce=True, start_localSGD_iter=5)'
    """
    if not type(state).__module__.startswith("torch.") or not hasattr(state, "__slots__"):
        return ""
    values = {key: getattr(state, key, None) for key in sorted(state.__slots__)}
    listed = ", ".join(f"{k}={v!r}" for k, v in values.items() if isinstance(v, _PLAIN) and v is not None)
    return f"{type(state).__name__}({listed})"


def _digest(code: CodeType) -> str:
    """Of instructions, names and plain constants; not of paths, which may differ between hosts."""
    parts = [repr(code.co_code), repr(code.co_names)]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            parts.append(_digest(constant))
        elif isinstance(constant, _PLAIN):
            parts.append(repr(constant))
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:8]
