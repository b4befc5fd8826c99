"""On simulated CUDA devices a rank that never comes to a collective is found, though no host waits for it."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import pytorch_lightning as pl
import simcuda
import torch
import torch.distributed as dist

from lightning_ddp import CustomDDPStrategy
from lightning_ddp.comm import Group, sibling_group, sub_group, teardown
from lightning_ddp.errors import CollectiveError

TIMEOUT_S = 6.0
FAULT_AT = 3


class Net(pl.LightningModule):
    """Rank 1 does something wrong at batch `FAULT_AT`."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.used = torch.nn.Linear(8, 4)
        self.other = torch.nn.Linear(8, 4)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        fault = self.fault if self.global_rank == 1 and batch_idx == FAULT_AT else None
        if fault == "late":
            threading.Event().wait(10 * TIMEOUT_S)
        loss = self.used(batch).square().mean()
        return loss if fault == "missing" else loss + self.other(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Witness(pl.Callback):
    """What a run has raised: the kind of the error, and its text."""

    raised: tuple[str, str] | None = None

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.raised = (type(exception).__name__, str(exception))


def _fit(rank: int, world_size: int, fault: str) -> tuple[str, str] | None:
    witness = Witness()
    trainer = pl.Trainer(
        strategy=CustomDDPStrategy(timeout=timedelta(seconds=TIMEOUT_S), bucket_cap_mb=0.0001),
        accelerator="cuda",
        devices=world_size,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[witness],
    )
    try:
        trainer.fit(Net(fault), torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=4))
    except BaseException:  # noqa: BLE001 (the callback has it)
        return witness.raised
    return None


def _timeouts(rank: int, world_size: int) -> list[timedelta]:
    device = torch.device("cuda", rank)
    world = Group(dist.group.WORLD)
    groups = [world, sibling_group(world, device), sub_group(world, [0, 1], device)]
    return [group.process_group._get_backend(device).options._timeout for group in groups]


def test_groups_that_are_made_of_another_one_have_its_timeout(simulated_ranks):
    assert simulated_ranks.run(_timeouts, 2, timeout_s=77.0) == [[timedelta(seconds=154)] * 3] * 2


def _leave_with_views(rank: int, world_size: int) -> bool:
    group = Group(dist.group.WORLD)
    kept = torch.ones(4, device=torch.device("cuda", rank))
    group.all_reduce(kept).wait()
    views = kept.chunk(2)  # as gradients are views of their bucket
    return teardown.are_let_go() and len(views) == 2


def test_no_process_waits_at_its_exit_for_what_nccl_has_sent(simulated_ranks):
    assert simulated_ranks.run(_leave_with_views, 2) == [True, True]


def _wait_in_vain(rank: int, world_size: int) -> str:
    device = torch.device("cuda", rank)
    group = Group(dist.group.WORLD)
    group.all_reduce(torch.ones(3, device=device)).wait()
    group.wait_device(device)
    simcuda.break_groups("NCCL error: remote process exited")
    with pytest.raises(
        CollectiveError, match="ended without its results: NCCL's watchdog reports COMM_ERROR"
    ):
        group.wait_device(device)
    return "raised"


def test_a_wait_of_the_host_does_not_take_what_has_failed_for_done(simulated_ranks):
    assert simulated_ranks.run(_wait_in_vain, 2) == ["raised"] * 2


def outcomes(ranks: Any, fault: str) -> list[Any]:
    return ranks.run_outcomes(_fit, 2, fault, process_group=False, timeout_s=120.0)


def test_a_rank_that_is_late_is_named_when_the_deadline_has_passed(simulated_ranks):
    first, second = outcomes(simulated_ranks, "late")
    kind, text = first.value
    assert kind == "CollectiveTimeoutError"
    assert text.startswith("rank 0: averaging of gradients, backward 3 has not ended 5.")
    assert "past its deadline of 5 s; missing: rank 1\n" in text
    assert "rank 0 waits in averaging of gradients, backward 3 at step 3" in text
    assert "rank 1 waits for no collective at step 3 in training_step" in text
    kind, text = second.value
    assert kind == "PeerFailure"
    assert "rank 0" in text
    assert "missing: rank 1" in text


def test_a_gradient_that_one_rank_lacks_is_named_with_what_all_ranks_lack(simulated_ranks):
    first, second = outcomes(simulated_ranks, "missing")
    kind, text = second.value
    assert kind == "MissingGradientError"
    assert "  rank 0: none missing\n  rank 1: other.weight, other.bias\n" in text
    kind, text = first.value
    assert kind in ("MissingGradientError", "PeerFailure"), "the news of rank 1's end may be sooner"
    assert "  rank 0: none missing\n  rank 1: other.weight, other.bias\n" in text
