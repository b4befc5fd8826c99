"""Finds what keeps an object from being sent to a new process, for the error that says so."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from lightning_ddp._torch import MODULE_DICTS

__all__ = ["find_unpicklable"]

_MOST_LEVELS = 20


def find_unpicklable(roots: Mapping[str, Any]) -> str | None:
    """The innermost part that does not pickle, such as `model.transform`, its type and why; None for none.

    Args:
        roots: name -> what is sent.
    """
    found, parts = None, list(roots.items())
    for _ in range(_MOST_LEVELS):
        failing = next(((path, value, why) for path, value in parts if (why := _obstacle(value))), None)
        if failing is None:
            break
        path, value, why = failing
        found = f"`{path}`, a {type(value).__qualname__}: {why}"
        parts = list(_parts(path, value))
    return found


class _Probe(ForkingPickler):
    """Pickles as for a new process, without the contents of tensors."""

    def persistent_id(self, obj: object) -> str | None:
        is_plain = isinstance(obj, torch.Tensor) and (obj.is_leaf or not obj.requires_grad)
        return "tensor" if is_plain else None


def _obstacle(value: Any) -> str | None:
    try:
        _Probe(io.BytesIO()).dump(value)
    except Exception as error:  # noqa: BLE001 (classes raise what they like)
        # queues and locks of multiprocessing can be sent, though not just now
        return None if "through inheritance" in str(error) else str(error) or type(error).__name__
    return None


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"{path}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"{path}[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, partial):
        yield from _parts(path, (value.func, *value.args, *value.keywords.values()))
    else:
        for name, part in getattr(value, "__dict__", {}).items():
            if name in MODULE_DICTS and isinstance(value, torch.nn.Module):
                yield from ((f"{path}.{inner}", module) for inner, module in part.items())
            else:
                yield f"{path}.{name}", part
