"""After an error that a user may catch, the next steps are right, or refused with the reason."""

from __future__ import annotations

import threading

import pytest
import torch
from harness import run_threads
from torch import nn

from lightning_ddp import BucketedDDP
from lightning_ddp.comm.activity import Interrupt
from lightning_ddp.errors import MissingGradientError

NUM_STEPS = 5
FAULTY_STEP = 2


class TwoHeads(nn.Module):
    """Adds up the heads that it is told to use."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 2)
        self.right = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, use: str) -> torch.Tensor:
        return sum(getattr(self, name)(x).sum() for name in use.split("+"))


def mean_input(step: int) -> float:
    return (1.0 + step) * 1.5  # ranks 0 and 1 have the factors 1 and 2


def input_of(rank: int, step: int) -> torch.Tensor:
    return torch.full((1, 4), (1.0 + step) * (rank + 1))


def test_steps_after_a_gradient_that_all_ranks_missed_are_right() -> None:
    late = threading.Event()

    def rank_main(rank, world_size, group):
        model = BucketedDDP(TwoHeads(), process_group=group)
        raised = []
        for step in range(NUM_STEPS):
            model.zero_grad()
            loss = model(input_of(rank, step), "left" if step == FAULTY_STEP else "left+right")
            if step == FAULTY_STEP + 1 and rank == 1:
                assert not late.wait(0.6)  # only slow: the other rank looks for reports meanwhile
            try:
                loss.backward()
            except MissingGradientError as error:
                raised.append((step, error.step))
                continue
            assert model.module.right.weight.grad.unique().tolist() == [mean_input(step)]
        return raised

    assert run_threads(rank_main, 2) == [[(FAULTY_STEP, FAULTY_STEP)]] * 2


def test_steps_after_a_gradient_that_one_rank_missed_are_refused_with_the_reason() -> None:
    def rank_main(rank, world_size, group):
        # a bucket for each parameter: the ranks differ in what they have launched
        model = BucketedDDP(TwoHeads(), process_group=group, bucket_cap_mb=1e-6)
        model(input_of(rank, 0), "left+right").backward()
        with pytest.raises(MissingGradientError, match=r"rank 1: right\.weight, right\.bias"):
            model(input_of(rank, 1), "left" if rank == 1 else "left+right").backward()
        with pytest.raises(MissingGradientError, match="backward 1 ended"):
            model(input_of(rank, 2), "left+right")

    run_threads(rank_main, 2, collective_s=3.0)


class OneShot(Interrupt):
    """An interrupt that raises once, as a signal handler does."""

    def check(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error


@pytest.mark.parametrize("interrupted_step", [0, 1, 3])
def test_steps_after_an_interrupted_wait_are_right(interrupted_step) -> None:
    caught = threading.Event()

    def rank_main(rank, world_size, group):
        interrupt = OneShot()
        model = BucketedDDP(TwoHeads(), process_group=group, interrupt=interrupt if rank == 0 else None)
        for step in range(NUM_STEPS):
            model.zero_grad()
            loss = model(input_of(rank, step), "left+right")
            if step != interrupted_step:
                loss.backward()
                assert model.module.right.weight.grad.unique().tolist() == [mean_input(step)]
            elif rank == 0:
                threading.Timer(0.2, interrupt.set, [TimeoutError("enough")]).start()
                with pytest.raises(TimeoutError, match="enough"):
                    loss.backward()
                caught.set()
            else:
                assert caught.wait(20)
                loss.backward()
        return True

    assert run_threads(rank_main, 2) == [True, True]
