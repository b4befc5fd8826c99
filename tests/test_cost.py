"""The straight line that stands for the cost of a collective."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ddp.errors import ConfigurationError
from lightning_ddp.tools.perf_model import TransferCost

SIZES = [0, 4096, 1 << 20, 1 << 24]


@settings(deadline=None)
@given(latency_s=st.floats(1e-6, 1e-1), rate=st.floats(1e6, 1e11))
def test_a_line_is_found_again(latency_s: float, rate: float) -> None:
    exact = TransferCost(latency_s=latency_s, seconds_per_byte=1 / rate)
    fitted = TransferCost.fit([(size, exact.seconds(size)) for size in SIZES])
    for size in SIZES:
        assert fitted.seconds(size) == pytest.approx(exact.seconds(size), rel=1e-6)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1 << 30), st.floats(1e-6, 1e3)), min_size=1, max_size=8))
def test_no_part_is_negative_whatever_was_measured(samples: list[tuple[int, float]]) -> None:
    cost = TransferCost.fit(samples)
    assert cost.latency_s >= 0
    assert cost.seconds_per_byte >= 0


def test_one_sample_tells_the_latency_alone() -> None:
    assert TransferCost.fit([(1000, 0.25)]) == TransferCost(latency_s=0.25, seconds_per_byte=0.0)


def test_times_that_fall_with_the_size_give_their_level() -> None:
    cost = TransferCost.fit([(0, 2.0), (1000, 1.0)])
    assert cost.seconds_per_byte == 0.0
    assert 1.0 <= cost.latency_s <= 2.0


@pytest.mark.parametrize("samples", [[], [(10, 0.0)]])
def test_samples_without_time_are_refused(samples: list[tuple[int, float]]) -> None:
    with pytest.raises(ConfigurationError, match="seconds above 0"):
        TransferCost.fit(samples)
