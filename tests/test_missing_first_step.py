"""Parameters without a gradient in the first backward: a warning where all ranks agree, then an error."""

from __future__ import annotations

import pickle
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from comparison import assert_as_torch
from harness import run_threads, store_elsewhere
from torch import Tensor, nn

from lightning_ddp import BucketedDDP
from lightning_ddp.comm.group import Group
from lightning_ddp.ddp import gradient_errors as missing
from lightning_ddp.errors import MissingGradientError, MissingGradientWarning

ALL = ("a", "b", "c")
DEADLINE_S = 20.0
PENDING_S = 5.0  # how long a collective that one rank has left keeps the group
LAYOUTS = [
    {"gradient_as_bucket_view": True},
    {"gradient_as_bucket_view": False},
    {"bucket_cap_mb": 1e-6},
]


class Branches(nn.Module):
    """The sum of the branches that it is told to take."""

    def __init__(self) -> None:
        super().__init__()
        for name in ALL:
            layer = nn.Linear(3, 1, bias=False)
            nn.init.ones_(layer.weight)
            setattr(self, name, layer)

    def forward(self, x: Tensor, use: tuple[str, ...]) -> Tensor:
        return torch.stack([getattr(self, name)(x).sum() for name in use]).sum()


def x_of(rank: int) -> Tensor:
    return torch.full((1, 3), rank + 1.0)


def grads(module: Any) -> list[float | None]:
    found = [p.grad for p in module.parameters()]
    return [None if g is None else g.unique().item() for g in found]


@pytest.fixture
def recorded_warnings() -> Any:
    """pytest makes warnings errors; here the first one has to be a warning, as it is for users.

    Filters are one list for all threads of the process, so that the ranks' warnings are all in it.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


@pytest.mark.parametrize("options", LAYOUTS, ids=["view", "no view", "small buckets"])
@pytest.mark.parametrize("used", [("a", "b"), ("c",), ("b",)], ids=str)
def test_what_all_ranks_miss_is_a_warning_for_each_rank_and_then_an_error(
    used, options, recorded_warnings
) -> None:
    missing = [f"{name}.weight" for name in ALL if name not in used]

    def rank_main(rank, world_size, group):
        model = BucketedDDP(Branches(), process_group=group, **options)
        model(x_of(rank), used).backward()
        seen = grads(model)
        for _ in range(2):  # it stays refused
            with pytest.raises(MissingGradientError) as caught:
                model(x_of(rank), ALL)
            assert not isinstance(caught.value, MissingGradientWarning)
            assert caught.value.missing == {0: tuple(missing), 1: tuple(missing)}
            assert (caught.value.rank, caught.value.step) == (rank, 0)
            text = str(caught.value)
            assert "Expected to have finished reduction in the prior iteration" in text
            positions = " ".join(str(ALL.index(name[0])) for name in missing)
            assert f"Parameter indices which did not receive grad for rank {rank}: {positions}\n" in text
        return seen

    assert run_threads(rank_main, 2) == [[1.5 if name in used else None for name in ALL]] * 2
    by_rank = {w.message.rank: w for w in recorded_warnings if w.category is MissingGradientWarning}
    assert sorted(by_rank) == [0, 1]
    for rank, warning in by_rank.items():
        text = str(warning.message)
        assert text.startswith(f"rank {rank}: backward 0 ended, but these parameters got no gradient:")
        assert [f"  rank {r}: {', '.join(missing)}" in text for r in range(2)] == [True, True]
        assert "The next step will raise an error." in text


def missing_in_the_first_step(rank, world_size, wrap):
    model = wrap(Branches())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MissingGradientWarning)
        model(x_of(rank), ("a", "b")).backward()
    found = []
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
            model(x_of(rank), ALL)
        found.append("refused")
    return found


def test_the_step_that_is_refused_is_the_one_that_torch_refuses() -> None:
    assert assert_as_torch(missing_in_the_first_step, 2) == [["refused"] * 2] * 2


def test_an_accumulated_gradient_of_a_missing_parameter_stays(recorded_warnings) -> None:
    def rank_main(rank, world_size, group):
        model = BucketedDDP(Branches(), process_group=group)
        with model.no_sync():
            model(x_of(rank), ALL).backward()
        model(x_of(rank), ("a", "b")).backward()
        return grads(model)

    assert run_threads(rank_main, 2) == [[3.0, 3.0, 1.0], [3.0, 3.0, 2.0]]


def test_as_an_error_the_warning_raises_in_the_first_backward_and_the_next_step_is_clean() -> None:
    def rank_main(rank, world_size, group):
        model = BucketedDDP(Branches(), process_group=group)
        loss = model(x_of(rank), ("a",))
        with pytest.raises(MissingGradientError, match=r"(?s)rank 0: b\.weight, c\.weight\n  rank 1: b\.w"):
            loss.backward()
        model.zero_grad()
        model(x_of(rank), ALL).backward()
        return grads(model)

    assert run_threads(rank_main, 2) == [[1.5] * 3] * 2


def test_raises_at_once_raises_in_the_first_backward(recorded_warnings) -> None:
    def rank_main(rank, world_size, group):
        model = BucketedDDP(Branches(), process_group=group, raises_at_once=True)
        loss = model(x_of(rank), ("a",))
        with pytest.raises(
            MissingGradientError, match=r"backward 0 ended(?s:.*)rank 1: b\.weight, c\.weight"
        ):
            loss.backward()
        model.zero_grad()
        model(x_of(rank), ALL).backward()
        return grads(model)

    assert run_threads(rank_main, 2) == [[1.5] * 3] * 2
    assert [w for w in recorded_warnings if w.category is MissingGradientWarning] == []


@pytest.mark.parametrize("raises_at_once", [False, True])
def test_where_the_ranks_differ_it_is_an_error_at_once(raises_at_once, recorded_warnings) -> None:
    def rank_main(rank, world_size, group, used_by_rank):
        model = BucketedDDP(Branches(), process_group=group, raises_at_once=raises_at_once)
        loss = model(x_of(rank), used_by_rank[rank])
        with pytest.raises(MissingGradientError, match=f"^rank {rank}: backward 0 ended") as caught:
            loss.backward()
        missing = caught.value.missing
        del caught  # it keeps the frame, and the process group with a pending collective, alive
        return missing

    # at once: a collective that one rank has left pending holds its group to its time limit
    cases = [(ALL, ("a", "b")), (("a",), ("b", "c")), (ALL, ("c",))]
    with ThreadPoolExecutor(len(cases)) as pool:
        runs = [pool.submit(run_threads, rank_main, 2, case, collective_s=PENDING_S) for case in cases]
    for case, run in zip(cases, runs, strict=True):
        expected = {r: tuple(f"{n}.weight" for n in ALL if n not in used) for r, used in enumerate(case)}
        assert run.result() == [expected] * 2
    assert [w for w in recorded_warnings if w.category is MissingGradientWarning] == []


@pytest.mark.parametrize("step", [1, 2])
def test_in_a_later_step_it_is_an_error_at_once(step, recorded_warnings) -> None:
    def rank_main(rank, world_size, group):
        model = BucketedDDP(Branches(), process_group=group)
        for _ in range(step):
            model(x_of(rank), ALL).backward()
        loss = model(x_of(rank), ("a", "b"))
        with pytest.raises(MissingGradientError, match=rf"backward {step} ended(?s:.*)rank 0: c\.weight"):
            loss.backward()
        model.zero_grad()
        model(x_of(rank), ALL).backward()
        return grads(model)

    assert run_threads(rank_main, 2) == [[1.5] * 3] * 2
    assert [w for w in recorded_warnings if w.category is MissingGradientWarning] == []


def test_a_static_graph_takes_what_it_lacks_for_unused(recorded_warnings) -> None:
    def rank_main(rank, world_size, group):
        model = BucketedDDP(Branches(), process_group=group, static_graph=True)
        for _ in range(2):
            model.zero_grad()
            model(x_of(rank), ("a", "b")).backward()
        return grads(model)

    assert run_threads(rank_main, 2) == [[1.5, 1.5, None]] * 2
    assert [w for w in recorded_warnings if w.category is MissingGradientWarning] == []


def test_with_a_comm_hook_the_warning_is_the_same(recorded_warnings) -> None:
    def rank_main(rank, world_size, group):
        model = BucketedDDP(Branches(), process_group=group)

        def average(state: Any, bucket: Any) -> Any:
            return group.allreduce([bucket.buffer().div_(world_size)]).get_future()

        model.register_comm_hook(None, average)
        model(x_of(rank), ("a", "c")).backward()
        return grads(model)

    assert run_threads(rank_main, 2) == [[1.5, None, 1.5]] * 2
    assert len([w for w in recorded_warnings if w.category is MissingGradientWarning]) == 2


def test_a_rank_that_does_not_report_is_waited_for_once(monkeypatch) -> None:
    monkeypatch.setattr("lightning_ddp.ddp.gradient_errors._REPORT_DEADLINE_S", 2.0)

    def rank_main(rank, world_size, group):
        model = BucketedDDP(Branches(), process_group=group)
        loss = model(x_of(rank), ("a",))
        if rank == 1:
            return None
        started = time.monotonic()
        with pytest.raises(MissingGradientError, match=r"rank 0: b\.weight, c\.weight\n  rank 1: no report"):
            loss.backward()
        return time.monotonic() - started

    seconds, _ = run_threads(rank_main, 2)
    assert 2.0 <= seconds < 3.5


# ---------------------------------------------------------------- steps that no rank takes part in


class Skips(Branches):
    """Its output is a loss that no parameter has a part in, where it is told to take no branch."""

    def forward(self, x: Tensor, use: tuple[str, ...]) -> Tensor:
        return super().forward(x, use) if use else torch.zeros((), requires_grad=True)


def with_skipped_steps(rank, world_size, wrap, options):
    model = wrap(Skips(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    seen = []
    for use in ((), ALL, (), (), ALL, ALL, ()):
        optimizer.zero_grad()
        model(x_of(rank), use).backward()
        seen.append(grads(model))
        optimizer.step()
    return [*seen, [p.detach().clone() for p in model.parameters()]]


@pytest.mark.parametrize("options", LAYOUTS, ids=["view", "no view", "small buckets"])
def test_a_step_that_uses_no_parameter_on_any_rank_does_what_it_does_under_torch(options) -> None:
    answer = assert_as_torch(with_skipped_steps, 2, options)
    assert answer[0][:3] == [[None] * 3, [1.5] * 3, [None] * 3]


@pytest.mark.parametrize("raises_at_once", [False, True])
@pytest.mark.parametrize("is_static", [False, True])
def test_what_was_accumulated_is_averaged_in_a_step_that_uses_no_parameter(is_static, raises_at_once) -> None:
    def rank_main(rank, world_size, group):
        launched = []

        def average(state: Any, bucket: Any) -> Any:
            launched.append(bucket.index())
            return group.allreduce([bucket.buffer().div_(world_size)]).get_future()

        model = BucketedDDP(
            Skips(), process_group=group, static_graph=is_static, raises_at_once=raises_at_once
        )
        model.register_comm_hook(None, average)
        model(x_of(rank), ALL).backward()
        seen = []
        for used in (ALL, ALL[: 1 + rank], ()):  # before the step that uses none
            model.zero_grad()
            launched.clear()
            if used:
                with model.no_sync():
                    model(x_of(rank), used).backward()
            model(x_of(rank), ()).backward()
            seen.append((grads(model), launched.copy()))
        return seen

    expected = [([1.5] * 3, [0]), ([1.5, 1.0, None], [0]), ([None] * 3, [])]
    assert run_threads(rank_main, 2) == [expected] * 2


def test_a_rank_that_is_late_for_a_step_that_uses_no_parameter_is_waited_for(monkeypatch) -> None:
    monkeypatch.setattr("lightning_ddp.ddp.gradient_errors._REPORT_DEADLINE_S", 0.2)
    has_waited = threading.Event()

    def rank_main(rank, world_size, group):
        model = BucketedDDP(Skips(), process_group=group)
        loss = model(x_of(rank), ())
        if rank == 1:
            assert not has_waited.wait(1.0)
        loss.backward()
        has_waited.set()
        model(x_of(rank), ALL).backward()
        return grads(model)

    assert run_threads(rank_main, 2) == [[1.5] * 3] * 2


@pytest.mark.parametrize("used", [ALL, ("a",)], ids=str)
def test_where_another_rank_uses_parameters_it_is_an_error_on_both(used, recorded_warnings) -> None:
    def rank_main(rank, world_size, group):
        model = BucketedDDP(Skips(), process_group=group)
        loss = model(x_of(rank), used if rank else ())
        with pytest.raises(MissingGradientError, match=f"^rank {rank}: backward 0 ended") as caught:
            loss.backward()
        missing = caught.value.missing
        del caught  # it keeps the frame, and the process group with a pending collective, alive
        return missing

    every = tuple(f"{name}.weight" for name in ALL)
    expected = {0: every, 1: tuple(name for name in every if name[0] not in used)}
    assert run_threads(rank_main, 2, collective_s=PENDING_S) == [expected] * 2


def test_the_warning_pickles_as_itself() -> None:
    error = MissingGradientError({0: ["a"], 1: ["a"]}, rank=1, world_size=2, step=0)
    again = pickle.loads(pickle.dumps(MissingGradientWarning.of(error)))
    assert type(again) is MissingGradientWarning
    assert (again.rank, again.missing, again.step) == (1, {0: ("a",), 1: ("a",)}, 0)
    assert str(again) == str(MissingGradientWarning.of(error))


def test_a_store_whose_process_is_stopped_holds_nobody_up(monkeypatch) -> None:
    monkeypatch.setattr(missing, "_REPORT_DEADLINE_S", 0.5)
    monkeypatch.setattr(missing.MissingGradients, "_longest_wait_s", lambda self: 0.5)

    def rank_main(rank, world_size, group, store, stop):
        board = missing.MissingGradients(Group(group, store=store), "token", torch.device("cpu"))
        look = board.watch(0, 1)
        look(1.0)
        stop()
        start = time.monotonic()
        for waited_s in (3.0, 6.0, 9.0):
            look(waited_s)
        error = board.report(0, ["a.weight"], 1)
        assert not board.is_skipped(1)
        return time.monotonic() - start, error.missing

    with store_elsewhere() as (store, stop):
        ((elapsed_s, found),) = run_threads(rank_main, 1, store, stop)
    assert elapsed_s < DEADLINE_S / 2
    assert found == {0: ("a.weight",)}
