"""The CUDA streams on which gradients come, and how what is done with all of them is ordered after each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["GradientStreams"]

_current_stream = torch.accelerator.current_stream  # asked once a gradient; does less than that of torch.cuda


class GradientStreams:
    """The streams on which one backward writes gradients of one device into one flat buffer.

    Autograd runs the hook of a gradient on the stream of the forward that used the parameter. After a forward
    on several streams those of one buffer therefore come on several, and whoever reads them all has to wait
    for each; with one stream there is nothing to wait for.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._index = device.index
        self._noted: dict[int, Any] = {}

    def clear(self) -> None:
        """A backward is to come."""
        self._noted.clear()

    def note(self) -> None:
        """The current stream has written, or holds a gradient that is still to be copied."""
        stream = _current_stream(self._index)
        self._noted[stream.stream_id] = stream

    def join(self) -> None:
        """Lets the current stream go on after all that has been noted. Does not wait on the host."""
        current = _current_stream(self._index)
        for number, stream in self._noted.items():
            if number != current.stream_id:
                current.wait_stream(stream)
        self._noted[current.stream_id] = current

    def keep(self, gradients: Sequence[torch.Tensor]) -> None:
        """Keeps the memory of gradients, however soon they are dropped, until the current stream has used it.

        Without that what was made on another stream could be used again there at once.
        """
        current = _current_stream(self._index)
        if any(number != current.stream_id for number in self._noted):
            for gradient in gradients:
                gradient.record_stream(current)
