"""Nodes of an OmegaConf configuration, found without resolving anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["ancestors", "nodes_of"]


def nodes_of(container: Any) -> Iterator[tuple[str, Any]]:
    """Every node below a container, with its full key; each container before what it holds."""
    content = container._content
    if not isinstance(content, dict | list):  # None, '???' or an interpolation
        return
    for key, node in content.items() if isinstance(content, dict) else enumerate(content):
        yield container._get_full_key(key), node
        if hasattr(node, "_content"):
            yield from nodes_of(node)


def ancestors(node: Any) -> Iterator[Any]:
    """A node, what contains it, and so on up to the root."""
    while node is not None:
        yield node
        node = node._get_parent()
