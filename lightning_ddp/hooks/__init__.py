"""Communication hooks: compressed and other reductions of a bucket's gradients over the ranks."""

from lightning_ddp.hooks.base import Hook, HookOptions, StatefulHook
from lightning_ddp.hooks.catalogue import (
    HookPlan,
    available_hooks,
    build_hook,
    hook_options,
    parse_hook,
    register_hook,
    registered_hook,
)

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
