"""A backward that fails: missing gradients are named on every rank; later steps are right, or refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from harness import on_ranks, run_ranks, run_threads
from models import MLP, Branches, batch, build
from models import grads_by_branch as grads
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_ddp import BucketedDDP
from lightning_ddp.comm.activity import Interrupt
from lightning_ddp.ddp import gradients
from lightning_ddp.errors import MissingGradientError

ALL = ("a", "b", "c")
ONE_BUCKET_EACH_MB = 1e-6
PENDING_S = 6.0  # how long a collective that one rank has left keeps the group


def x_of(rank: int) -> Tensor:
    return torch.full((1, 3), rank + 1.0)


def missing_in(used_by_rank: tuple[tuple[str, ...], ...]) -> dict[int, tuple[str, ...]]:
    return {r: tuple(f"{n}.weight" for n in ALL if n not in used) for r, used in enumerate(used_by_rank)}


# ---------------------------------------------------------------- parameters without a gradient

USED = {  # what each of two ranks uses in the faulty step
    "both alike": (("a", "b"), ("a", "b")),
    "both alike, one left": (("c",), ("c",)),
    "both nothing": ((), ()),
    "rank 0 the last": (ALL, ("a", "b")),
    "rank 1 the first": (("b", "c"), ALL),
    "different ones": (("a",), ("b", "c")),
    "one nothing": ((), ALL),
}
OPTIONS = {
    "view": {},
    "no view": {"gradient_as_bucket_view": False},
    "one bucket each": {"bucket_cap_mb": ONE_BUCKET_EACH_MB},
    "hook": {"bucket_cap_mb": ONE_BUCKET_EACH_MB},
}
CASES = [(used, options, step) for used in USED for options in ("view", "one bucket each") for step in (0, 2)]
CASES += [(used, options, 2) for used in ("both alike", "different ones") for options in ("no view", "hook")]


def faulty_step(rank, world_size, group, used_by_rank, options, faulty):
    """What the error of that step names, and what the next forward raises; or the gradients of that step."""
    model = BucketedDDP(Branches(), process_group=group, **OPTIONS[options])
    if options == "hook":
        model.register_comm_hook(
            None, lambda state, bucket: group.allreduce([bucket.buffer().div_(world_size)]).get_future()
        )
    for _ in range(faulty):
        model(x_of(rank), ALL).backward()
    model.zero_grad()
    loss = model(x_of(rank), used_by_rank[rank])
    with pytest.raises(MissingGradientError, match=f"^rank {rank}: backward {faulty} ended") as caught:
        loss.backward()
    text, missing, can_continue = str(caught.value), caught.value.missing, caught.value.can_continue
    del caught  # it keeps the frame, and the process group with a pending collective, alive
    assert "find_unused_parameters=True" in text
    assert "requires_grad=False" in text
    if missing[rank]:
        places = " ".join(str(ALL.index(name[0])) for name in missing[rank])
        assert text.endswith(f"Parameter indices which did not receive grad for rank {rank}: {places}")
    if not can_continue:
        with pytest.raises(MissingGradientError, match=f"backward {faulty} ended"):
            model(x_of(rank), ALL)
        return missing, "refused"
    unused = [getattr(model.module, name).weight for name in ALL if name not in used_by_rank[rank]]
    assert [parameter.grad for parameter in unused] == [None] * len(unused)
    model.zero_grad()
    model(x_of(rank), ALL).backward()
    return missing, grads(model)


@pytest.fixture(scope="module")
def faulty_runs() -> Iterator[dict[Any, Any]]:
    """All cases at once: a collective that one rank has left pending holds its group to its time limit."""
    with ThreadPoolExecutor(len(CASES)) as pool:
        yield {
            (used, options, step): pool.submit(
                run_threads, faulty_step, 2, USED[used], options, step, collective_s=PENDING_S
            )
            for used, options, step in CASES
        }


@pytest.mark.xdist_group("missing gradients")
@pytest.mark.parametrize(("used", "options", "step"), CASES)
def test_a_missing_gradient_is_an_error_on_every_rank_in_that_step(faulty_runs, used, options, step) -> None:
    answers = faulty_runs[used, options, step].result()
    assert [missing for missing, _ in answers] == [missing_in(USED[used])] * 2
    has_one_bucket, (first, second) = "bucket_cap_mb" not in OPTIONS[options], USED[used]
    has_started_alike = first == second or (has_one_bucket and ALL not in (first, second))
    assert [then for _, then in answers] == [[1.5] * 3 if has_started_alike else "refused"] * 2


def missing_in_processes(rank, world_size):
    model = BucketedDDP(Branches())
    model(x_of(rank), ALL).backward()
    with pytest.raises(MissingGradientError) as caught:
        model(x_of(rank), ALL if rank != 1 else ("a", "c")).backward()
    return caught.value.missing


def test_one_of_three_processes_without_a_gradient_stops_all() -> None:
    answers = run_ranks(missing_in_processes, 3, timeout_s=30)
    assert answers == [missing_in((ALL, ("a", "c"), ALL))] * 3


@on_ranks(2)
def test_a_missing_gradient_next_to_one_that_is_switched_off_is_still_an_error(rank, group) -> None:
    model = BucketedDDP(Branches(), process_group=group)
    model.module.c.requires_grad_(False)
    unwrapped = model.module  # the loss is no output of the wrapper, so no output tells of its backward
    model.prepare_for_backward()
    with pytest.raises(MissingGradientError, match=r"rank 0: b\.weight\n"):
        unwrapped(x_of(rank), ("a",)).backward()


def test_a_rank_that_does_not_report_is_waited_for_once(monkeypatch) -> None:
    monkeypatch.setattr(gradients, "_REPORT_DEADLINE_S", 0.5)

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
    assert seconds >= 0.5


@on_ranks(2)
def test_wrappers_that_have_not_compared_their_models_do_not_read_each_others_reports(rank, group) -> None:
    first, second = (BucketedDDP(Branches(), process_group=group, init_sync=False) for _ in range(2))
    loss = first(x_of(rank), ("a",))
    with pytest.raises(MissingGradientError):
        loss.backward()
    second.reducer.failures.watch(step=0, num_launched=0)(1.0)  # raises if a rank has reported a gradient
    second(x_of(rank), ALL).backward()
    assert grads(second) == [1.5] * 3


# ---------------------------------------------------------------- waits and exceptions of the user


class OneShot(Interrupt):
    """An interrupt that raises once, as a signal handler does."""

    def check(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error


@pytest.mark.parametrize("interrupted_step", [0, 1, 3])
@on_ranks(2)
def test_steps_after_an_interrupted_wait_are_right(rank, group, event, interrupted_step) -> None:
    interrupt = OneShot()
    model = BucketedDDP(Branches(), process_group=group, interrupt=interrupt if rank == 0 else None)
    for step in range(5):
        model.zero_grad()
        loss = model(x_of(rank) * step, ALL)
        if step != interrupted_step:
            loss.backward()
            assert grads(model) == [1.5 * step] * 3
        elif rank == 0:
            threading.Timer(0.2, interrupt.set, [TimeoutError("enough")]).start()
            with pytest.raises(TimeoutError, match="enough"):
                loss.backward()
            event.set()
        else:
            assert event.wait(20)
            loss.backward()


class UserError(Exception):
    """Raised by the user's code in backward."""


def fail(grad: Tensor) -> None:
    raise UserError("not finite")


def mlp_gradients(model: nn.Module, module: nn.Module, rank: int, step: int) -> list[Tensor]:
    inputs, labels = batch("mlp", rank, step)
    cross_entropy(model(inputs), labels).backward()
    return [p.grad.clone() for p in module.parameters()]


@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize("bucket_cap_mb", [None, 0.01, ONE_BUCKET_EACH_MB])
@pytest.mark.parametrize("faulty_step", [0, 1, 2])
@on_ranks(2)
def test_a_step_after_an_exception_in_backward_is_clean(
    rank, group, faulty_step, bucket_cap_mb, as_view
) -> None:
    module = build("mlp", seed=7)
    options = {"bucket_cap_mb": bucket_cap_mb, "gradient_as_bucket_view": as_view}
    model = BucketedDDP(module, process_group=group, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        if step == faulty_step:
            # gradients of the last layers are there, some buckets are on their way, then it raises
            handle = module.layers[0].weight.register_hook(fail)
            with pytest.raises(UserError, match="not finite"):
                mlp_gradients(model, module, rank, step)
            handle.remove()
            continue
        alone = MLP()
        alone.load_state_dict(module.state_dict())
        expected = mlp_gradients(alone, alone, rank, step)
        for grad in expected:
            group.allreduce([grad.div_(2)]).wait()
        found = mlp_gradients(model, module, rank, step)
        assert all(map(torch.equal, found, expected))
        optimizer.step()
