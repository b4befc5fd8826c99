"""The plan that ends a backward soonest, against all plans there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ddp.tools import perf_model
from lightning_ddp.tools.perf_model import TransferCost


@dataclass(frozen=True, kw_only=True)
class Backward:
    """When gradients are there, their sizes, and what it costs to reduce them."""

    ready_s: tuple[float, ...]
    num_bytes: tuple[int, ...]
    backward_s: float
    latency_s: float
    seconds_per_byte: float

    def finish_s(self, ends: Sequence[int]) -> float:
        """Until all buckets of a plan are reduced, one after the other."""
        sent, ready = [0, *accumulate(self.num_bytes)], list(accumulate(self.ready_s, max))
        finish_s = 0.0
        for start, end in pairwise([0, *ends]):
            duration_s = self.latency_s + self.seconds_per_byte * (sent[end] - sent[start])
            finish_s = max(finish_s, ready[end - 1]) + duration_s
        return max(finish_s, self.backward_s)

    def best(self, tolerance: float = 0.01) -> tuple[int, ...]:
        cost = TransferCost(latency_s=self.latency_s, seconds_per_byte=self.seconds_per_byte)
        given = (self.ready_s, self.num_bytes, self.backward_s, cost)
        return perf_model.best_boundaries(*given, tolerance=tolerance)


@st.composite
def backwards(draw: st.DrawFn) -> Backward:
    """Up to seven gradients of any size, in any order; a link between very fast and very slow."""
    times = st.floats(0, 10)
    gradients = draw(st.lists(st.tuples(times, st.integers(0, 1000)), min_size=1, max_size=7))
    return Backward(
        ready_s=tuple(ready_s for ready_s, _ in gradients),
        num_bytes=tuple(num_bytes for _, num_bytes in gradients),
        backward_s=max(ready_s for ready_s, _ in gradients) + draw(st.floats(0, 1)),
        latency_s=draw(st.floats(0, 2)),
        seconds_per_byte=draw(st.floats(0, 0.01)),
    )


def all_plans(size: int) -> list[tuple[int, ...]]:
    inner = range(1, size)
    return [(*cuts, size) for count in range(size) for cuts in combinations(inner, count)]


@settings(deadline=None)
@given(backwards())
def test_no_plan_ends_sooner_and_none_with_fewer_buckets_ends_as_soon(times: Backward) -> None:
    ends = times.best(tolerance=0.0)
    finish_s = times.finish_s(ends)
    for other in all_plans(len(times.ready_s)):
        assert finish_s <= times.finish_s(other) + 1e-9
        if len(other) < len(ends):
            assert times.finish_s(other) > finish_s - 1e-9


@pytest.mark.slow
@settings(deadline=None)
@given(backwards())
def test_a_plan_with_fewer_buckets_is_taken_if_it_ends_a_little_later(times: Backward) -> None:
    soonest_s = min(map(times.finish_s, all_plans(len(times.ready_s))))
    ends = times.best(tolerance=0.2)
    assert times.finish_s(ends) <= 1.2 * soonest_s + 1e-9
    for other in all_plans(len(times.ready_s)):
        if len(other) < len(ends):
            assert times.finish_s(other) > 1.2 * soonest_s - 1e-9


def test_a_gradient_that_comes_late_holds_up_the_buckets_behind_it() -> None:
    times = Backward(
        ready_s=(8.0, 1.0), num_bytes=(1, 1), backward_s=8.0, latency_s=1.0, seconds_per_byte=0.0
    )
    assert times.finish_s([1, 2]) == 10.0
    assert times.best() == (2,)


@pytest.mark.parametrize("sizes", [[4224] * 1000, [1, 10_000] * 700, [0] * 300 + [100] * 300 + [0] * 300])
def test_thousands_of_parameters_get_a_plan_that_hides_what_can_be_hidden(sizes: list[int]) -> None:
    times = Backward(
        ready_s=tuple(i / len(sizes) for i in range(len(sizes))),
        num_bytes=tuple(sizes),
        backward_s=1.0,
        latency_s=1e-4,
        seconds_per_byte=0.5 / sum(sizes),
    )
    ends = times.best()
    assert ends[-1] == len(sizes)
    assert list(ends) == sorted(set(ends))
    assert len(ends) <= 64
    assert 1.0 <= times.finish_s(ends) < 1.05 < times.finish_s([len(sizes)])
