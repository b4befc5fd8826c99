"""Options of a reducer, checked once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lightning_ddp.ddp.plan import MIB
from lightning_ddp.errors import ConfigurationError

__all__ = [
    "DEFAULT_CAP_MB",
    "ReducerOptions",
    "bucket_caps_bytes",
    "check_broadcast_buffers",
]

DEFAULT_CAP_MB = 25
"""Cap of a bucket in MiB, where the user names none."""

_FIRST_CAP_BYTES = MIB
_NETWORK_CAPS_BYTES = (MIB // 8, MIB // 4, MIB // 2)
_EARLY_COPY_BYTES = 256 * 1024
_NEVER = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class ReducerOptions:
    """How gradients are bucketed and what is expected of a backward."""

    caps_bytes: tuple[int, ...]
    """Caps of the first bucket of a dtype and device, the second ...; the last holds for all that follow."""
    are_caps_default: bool = False
    """Whether nobody asked for these caps."""
    gradient_as_bucket_view: bool = True
    """Whether `.grad` becomes a view of the bucket."""
    find_unused_parameters: bool = False
    """Whether parameters may be without a gradient, on some ranks or on all; the graph is searched."""
    static_graph: bool = False
    """Whether every step has the graph of the first one."""
    skip_all_reduce_unused_params: bool = False
    """Whether a bucket of which this rank used nothing is not reduced; so on all ranks alike."""
    raises_at_once: bool = True
    """Whether parameters that all ranks miss in the first backward are an error there; else a warning there
    and an error in the next step, as late as torch's."""
    early_copy_bytes: int = _EARLY_COPY_BYTES
    """From this size on a gradient is copied into its bucket at once, while it is in the cache, and its own
    memory is freed; the smaller ones of a bucket go in one multi-tensor copy when the last has arrived."""
    dtype: torch.dtype | None = None
    """Type in which floating-point gradients are reduced; None for that of the parameter."""

    def __post_init__(self) -> None:
        if not self.caps_bytes or min(self.caps_bytes) <= 0:
            raise ConfigurationError(f"caps of buckets {self.caps_bytes}: expected sizes in bytes above 0")

    def for_network(self) -> ReducerOptions:
        """The same where gradients travel between hosts, with smaller first buckets if nobody named sizes.

        A network is slow beside a backward on the CPU, and idle until the first bucket is full: so the first
        MiB goes in three parts, each twice as large as the one before.
        """
        if not self.are_caps_default:
            return self
        return replace(self, caps_bytes=(*_NETWORK_CAPS_BYTES, self.caps_bytes[-1]))

    @staticmethod
    def early_copy_for(batched_grad_copy: bool | None) -> int:
        """The threshold for torch's argument: True for one copy a bucket, False for one copy a gradient."""
        return {True: _NEVER, False: 0, None: _EARLY_COPY_BYTES}[batched_grad_copy]


def check_broadcast_buffers(value: object) -> None:
    """Refuses what torch's argument `broadcast_buffers` cannot be.

    Raises:
        ConfigurationError: it is something else.
    """
    if value not in (None, "auto", True, False):
        raise ConfigurationError(f"broadcast_buffers={value!r}: one of 'auto', True, False")


def bucket_caps_bytes(cap_mb: float | None, caps_mb: list[float] | None = None) -> tuple[int, ...]:
    """The caps for torch's arguments `bucket_cap_mb` and `bucket_cap_mb_list`, in bytes.

    The first bucket has at most 1 MiB, so that communication starts early, unless `caps_mb` names its size.

    Raises:
        ConfigurationError: a size is not above 0, or no number.

    >>> bucket_caps_bytes(None)
    (1048576, 26214400)
    >>> bucket_caps_bytes(0.5)
    (524288, 524288)
    >>> bucket_caps_bytes(None, [1, 2])
    (1048576, 2097152)
    """
    if isinstance(cap_mb, str):
        raise ConfigurationError(
            f"bucket_cap_mb={cap_mb!r}: expected a size in MiB, or None for {DEFAULT_CAP_MB} MiB"
        )
    sizes_mb = list(caps_mb or []) or [DEFAULT_CAP_MB if cap_mb is None else cap_mb]
    if min(sizes_mb) <= 0:
        name = f"bucket_cap_mb_list={caps_mb}" if caps_mb else f"bucket_cap_mb={cap_mb}"
        raise ConfigurationError(f"{name}: expected sizes in MiB above 0")
    sizes = tuple(int(size * MIB) for size in sizes_mb)
    return sizes if caps_mb else (min(_FIRST_CAP_BYTES, sizes[0]), sizes[0])
