"""The plan that ends a backward soonest, against all plans there are."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ddp.comm.cost import TransferCost
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.tools.perf_model.planning import BackwardTimes, best_boundaries, safe_boundaries


@st.composite
def backward_times(draw: st.DrawFn) -> BackwardTimes:
    """Up to seven gradients of any size, in any order; a link between very fast and very slow."""
    times = st.floats(0, 10)
    gradients = draw(st.lists(st.tuples(times, st.integers(0, 1000)), min_size=1, max_size=7))
    return BackwardTimes(
        ready_s=tuple(ready_s for ready_s, _ in gradients),
        num_bytes=tuple(num_bytes for _, num_bytes in gradients),
        backward_s=max(ready_s for ready_s, _ in gradients) + draw(st.floats(0, 1)),
        cost=TransferCost(latency_s=draw(st.floats(0, 2)), seconds_per_byte=draw(st.floats(0, 0.01))),
        launch_s=draw(st.floats(0, 0.5)),
    )


def all_plans(size: int) -> list[tuple[int, ...]]:
    inner = range(1, size)
    return [(*cuts, size) for count in range(size) for cuts in combinations(inner, count)]


@settings(deadline=None)
@given(backward_times())
def test_no_plan_ends_sooner_and_none_with_fewer_buckets_ends_as_soon(times: BackwardTimes) -> None:
    ends = best_boundaries(times, tolerance=0.0)
    finish_s = times.finish_s(ends)
    for other in all_plans(len(times.ready_s)):
        assert finish_s <= times.finish_s(other) + 1e-9
        if len(other) < len(ends):
            assert times.finish_s(other) > finish_s - 1e-9


@pytest.mark.slow
@settings(deadline=None)
@given(backward_times())
def test_a_plan_with_fewer_buckets_is_taken_if_it_ends_a_little_later(times: BackwardTimes) -> None:
    soonest_s = min(map(times.finish_s, all_plans(len(times.ready_s))))
    ends = best_boundaries(times, tolerance=0.2)
    assert times.finish_s(ends) <= 1.2 * soonest_s + 1e-9
    for other in all_plans(len(times.ready_s)):
        if len(other) < len(ends):
            assert times.finish_s(other) > 1.2 * soonest_s - 1e-9


def test_the_time_of_a_plan_is_that_of_the_closed_form() -> None:
    times = BackwardTimes(
        ready_s=(1.0, 2.0, 3.0, 9.0),
        num_bytes=(10, 10, 10, 10),
        backward_s=10.0,
        cost=TransferCost(latency_s=0.5, seconds_per_byte=0.1),
        launch_s=0.25,
    )
    assert times.finish_s([4]) == 9.0 + 0.5 + 4.0
    # the second one waits for the link, the third one for its gradient, which two launches have held up
    assert times.finish_s([1, 3, 4]) == (9.0 + 2 * 0.25) + 0.5 + 1.0
    assert times.finish_s([1, 2, 3, 4]) == (9.0 + 3 * 0.25) + 0.5 + 1.0
    fast = BackwardTimes(
        ready_s=(1.0, 2.0),
        num_bytes=(10, 10),
        backward_s=5.0,
        cost=TransferCost(latency_s=0.0, seconds_per_byte=0.0),
        launch_s=0.25,
    )
    assert fast.finish_s([1, 2]) == 5.5


@pytest.mark.slow
def test_a_safe_plan_stays_good_where_the_transport_is_slower_than_measured() -> None:
    times = BackwardTimes(
        ready_s=tuple(range(1, 101)),
        num_bytes=(10,) * 100,
        backward_s=100.0,
        cost=TransferCost(latency_s=0.01, seconds_per_byte=0.04),
    )
    soonest, safe = best_boundaries(times), safe_boundaries(times)
    slow = times.slowed(4)
    assert soonest[0] > 20  # as all is hidden, it may begin late
    assert slow.finish_s(soonest) > 1.1 * slow.finish_s(best_boundaries(slow))
    assert times.finish_s(safe) < 1.03 * times.finish_s(soonest)
    assert slow.finish_s(safe) < 1.03 * slow.finish_s(best_boundaries(slow))


def test_a_gradient_that_comes_late_holds_up_the_buckets_behind_it() -> None:
    times = BackwardTimes(
        ready_s=(8.0, 1.0),
        num_bytes=(1, 1),
        backward_s=8.0,
        cost=TransferCost(latency_s=1.0, seconds_per_byte=0.0),
    )
    assert times.finish_s([1, 2]) == 10.0
    assert best_boundaries(times) == (2,)


@pytest.mark.parametrize("sizes", [[4224] * 1000, [1, 10_000] * 700, [0] * 300 + [100] * 300 + [0] * 300])
def test_thousands_of_parameters_get_a_plan_that_hides_what_can_be_hidden(sizes: list[int]) -> None:
    total = sum(sizes)
    times = BackwardTimes(
        ready_s=tuple(i / len(sizes) for i in range(len(sizes))),
        num_bytes=tuple(sizes),
        backward_s=1.0,
        cost=TransferCost(latency_s=1e-4, seconds_per_byte=0.5 / total),
        launch_s=1e-5,
    )
    ends = best_boundaries(times)
    assert ends[-1] == len(sizes)
    assert list(ends) == sorted(set(ends))
    assert len(ends) <= 64
    assert 1.0 <= times.finish_s(ends) < 1.05 < times.finish_s([len(sizes)])


@pytest.mark.parametrize(("ready_s", "num_bytes"), [((), ()), ((1.0,), (1, 2))])
def test_times_and_sizes_that_do_not_belong_together_are_refused(ready_s, num_bytes) -> None:
    with pytest.raises(ConfigurationError, match=f"{len(ready_s)} ready times for {len(num_bytes)} sizes"):
        BackwardTimes(
            ready_s=ready_s,
            num_bytes=num_bytes,
            backward_s=1.0,
            cost=TransferCost(latency_s=0.0, seconds_per_byte=0.0),
        )
