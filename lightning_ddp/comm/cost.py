"""The cost of a collective: a time to start and a time a byte (Hockney, Parallel Computing 20, 1994)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_ddp.errors import ConfigurationError

__all__ = ["TransferCost"]


@dataclass(frozen=True, kw_only=True)
class TransferCost:
    """Seconds of a collective as a straight line over its bytes."""

    latency_s: float
    """Of a collective that carries nothing, in seconds."""
    seconds_per_byte: float
    """For each byte of the tensor that is reduced, in seconds."""

    def __post_init__(self) -> None:
        if self.latency_s < 0 or self.seconds_per_byte < 0:
            raise ConfigurationError(f"{self}: expected times of at least 0 seconds")

    def seconds(self, num_bytes: float) -> float:
        """Seconds that a collective of `num_bytes` takes.

        >>> TransferCost(latency_s=1e-3, seconds_per_byte=1e-6).seconds(2000)
        0.003
        """
        return self.latency_s + num_bytes * self.seconds_per_byte

    @classmethod
    def fit(cls, samples: Sequence[tuple[int, float]]) -> TransferCost:
        """The line with the least sum of squared relative errors, with no part of it below 0.

        Relative errors, as the samples cover sizes and so times of several magnitudes.

        Args:
            samples: bytes and seconds of collectives; seconds above 0.

        Raises:
            ConfigurationError: there is no sample, or one takes no time.

        >>> cost = TransferCost.fit([(0, 0.5), (100, 1.0), (300, 2.0)])
        >>> round(cost.latency_s, 9), round(cost.seconds_per_byte, 9)
        (0.5, 0.005)
        """
        if not samples or min(seconds for _, seconds in samples) <= 0:
            raise ConfigurationError(f"samples {list(samples)!r}: expected bytes with seconds above 0")
        # least squares of  latency / t + slope * n / t = 1
        rows = [(1 / seconds, num_bytes / seconds) for num_bytes, seconds in samples]
        aa, ab, bb = (
            sum(a * a for a, _ in rows),
            sum(a * b for a, b in rows),
            sum(b * b for _, b in rows),
        )
        a, b = sum(a for a, _ in rows), sum(b for _, b in rows)
        determinant = aa * bb - ab * ab
        if determinant > 1e-12 * aa * bb:
            latency_s = (a * bb - b * ab) / determinant
            slope = (b * aa - a * ab) / determinant
            if latency_s >= 0 and slope >= 0:
                return cls(latency_s=latency_s, seconds_per_byte=slope)
            if latency_s < 0:
                return cls(latency_s=0.0, seconds_per_byte=b / bb)
        return cls(latency_s=a / aa, seconds_per_byte=0.0)
