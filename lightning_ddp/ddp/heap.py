"""Keeps the C library from giving memory back to the kernel that the next gradient needs.

When gradients are views of buckets, what autograd allocates for each is freed as soon as it is copied. glibc
returns large free memory at the top of its heap to the kernel, so that every gradient would be paid for with
new pages, which costs more than the copy. How much it keeps depends on the largest block that the process has
freed so far (`M_MMAP_THRESHOLD` in mallopt(3)): up to 32 MiB, for which it keeps 64 MiB.
"""

from __future__ import annotations

import torch

__all__ = ["keep_freed_memory"]

_LARGEST_BYTES = 32 * 1024 * 1024 - 128 * 1024


def keep_freed_memory() -> None:
    """Frees one large block that was never written to, so that glibc keeps as much as it ever does.

    Costs no memory. Without effect where MALLOC_TRIM_THRESHOLD_ and the like are set, and elsewhere.
    """
    torch.empty(_LARGEST_BYTES, dtype=torch.uint8)
