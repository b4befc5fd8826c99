"""Copies tensors of the CPU to a device without making the host wait."""

from __future__ import annotations

import torch

__all__ = ["uploaded"]


def uploaded(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the CPU on `device`, at its turn in the current stream; on the CPU itself.

    From pageable memory CUDA copies only when the stream has run so far, and the host waits for it. Pinned
    memory it reads later; torch keeps that until then.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
