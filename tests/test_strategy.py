"""The strategy's collectives, beside those of Lightning's own strategy in the same processes."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from harness import TRAINS, run_ranks, run_script, run_threads
from pytorch_lightning.demos.boring_classes import BoringModel
from pytorch_lightning.plugins.environments import LightningEnvironment
from pytorch_lightning.strategies import DDPStrategy

from lightning_ddp import CustomDDPStrategy
from lightning_ddp.comm.group import Group
from lightning_ddp.errors import ConfigurationError

CPUS = [torch.device("cpu")] * 2


def joined(strategy: DDPStrategy, rank: int, world_size: int) -> DDPStrategy:
    """The strategy as a Trainer leaves it after the launch, in a process that has a group already."""
    environment = LightningEnvironment()
    environment.set_global_rank(rank)
    environment.set_world_size(world_size)
    strategy.cluster_environment = environment
    if isinstance(strategy, CustomDDPStrategy):
        strategy._group = Group(dist.group.WORLD)
    return strategy


def reductions(rank, world_size):
    ours = joined(CustomDDPStrategy(parallel_devices=CPUS), rank, world_size)
    theirs = joined(DDPStrategy(parallel_devices=CPUS), rank, world_size)
    inputs = [torch.tensor([1.5, -2.0]) * (rank + 1), torch.tensor([1, 4]) + rank, torch.tensor(rank + 1.0)]
    seen = []
    for op in ("mean", "avg", "sum", "min", "max", dist.ReduceOp.SUM):
        for tensor in inputs:
            mine = tensor.clone()
            result = ours.reduce(mine, reduce_op=op)
            expected = theirs.reduce(tensor.clone(), reduce_op=op)
            assert result is mine, "in place, as Lightning does"
            assert result.dtype == expected.dtype
            assert torch.equal(result, expected), (op, tensor)
            seen.append(result.tolist())
    for flag in (True, False, rank == 0):
        for need_all in (True, False):
            assert ours.reduce_boolean_decision(flag, all=need_all) == theirs.reduce_boolean_decision(
                flag, all=need_all
            )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Lightning calls a function that torch deprecates
        expected = theirs.all_gather(inputs[0])
    assert torch.equal(ours.all_gather(inputs[0]), expected)
    for src in range(world_size):
        assert ours.broadcast({"from": rank}, src=src) == {"from": src}
    ours.barrier("named")
    reduced = ours.reduce({"a": inputs[2], "b": [inputs[1], "text", None, 7]}, reduce_op="sum")
    assert (reduced["a"].item(), reduced["b"][0].tolist(), reduced["b"][1:]) == (3, [3, 9], ["text", None, 7])
    with pytest.raises(ConfigurationError, match="reduce_op='median': expected avg"):
        ours.reduce(torch.ones(1), reduce_op="median")
    tensor = torch.tensor([rank + 1.0], requires_grad=True)
    (ours.all_gather(tensor, sync_grads=True) * torch.tensor([[2.0], [5.0]])).sum().backward()
    assert tensor.grad.item() == (4.0, 10.0)[rank], "gradients are sent back"
    return seen


def test_collectives_agree_with_lightnings_and_reach_into_containers() -> None:
    first, second = run_ranks(reductions, 2)
    assert first == second
    assert first[0] == [2.25, -3.0]


def test_before_the_launch_collectives_do_nothing() -> None:
    strategy = CustomDDPStrategy(parallel_devices=CPUS)
    strategy.barrier()
    assert strategy.broadcast("alone") == "alone"
    assert strategy.reduce(torch.ones(2)).tolist() == [1.0, 1.0]
    assert strategy.all_gather(torch.ones(2)).tolist() == [1.0, 1.0]
    with pytest.raises(ConfigurationError, match="the process group does not exist yet"):
        strategy._setup_model(torch.nn.Linear(1, 1))


def manual_gradients(rank, world_size, group, keeps):
    """Of a module whose two backwards have the gradients 1 and 10 on rank 0, 3 and 30 on rank 1."""
    strategy = CustomDDPStrategy(parallel_devices=CPUS)
    strategy._group = Group(group)
    module = BoringModel()
    module.automatic_optimization = False
    module.layer = torch.nn.Linear(1, 1, bias=False)
    strategy.connect(module)
    strategy.configure_ddp()
    weight, seen = module.layer.weight, []
    for value, enabled in ((1.0, keeps), (10.0, False)):
        with strategy.no_backward_sync(enabled=enabled):
            loss = (weight * value * (2 * rank + 1)).sum()
            strategy.pre_backward(loss)
            loss.backward()
        seen.append(weight.grad.item())
    strategy.model.teardown()
    return seen


@pytest.mark.parametrize(("keeps", "expected"), [(True, [[1, 22], [3, 22]]), (False, [[2, 22], [2, 22]])])
def test_manual_gradients_stay_on_their_rank_and_are_averaged_with_the_next(keeps, expected) -> None:
    assert run_threads(manual_gradients, 2, keeps) == expected


def test_no_backward_sync_is_refused_with_automatic_optimisation() -> None:
    strategy = CustomDDPStrategy(parallel_devices=CPUS)
    with strategy.no_backward_sync():
        pass  # before there is a wrapper there is nothing to block

    def rank_main(rank, world_size, group):
        strategy._group = Group(group)
        strategy.connect(BoringModel())
        strategy.configure_ddp()
        with strategy.no_backward_sync(enabled=False):
            pass
        with (
            pytest.raises(ConfigurationError, match="no_backward_sync is for manual optimization"),
            strategy.no_backward_sync(),
        ):
            pass
        strategy.model.teardown()

    run_threads(rank_main, 1)


LBFGS = f"""{TRAINS}
from datetime import timedelta
from torch.utils.data import DataLoader

class Model(pl.LightningModule):
    def __init__(self, is_manual):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = not is_manual
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.num_calls = []

    def loss(self, batch):
        self.num_calls[-1] += 1
        return (self.layers(batch).squeeze(1) - batch.sum(1).mul(3).sin()).square().mean()

    def training_step(self, batch, batch_idx):
        if self.automatic_optimization:
            return self.loss(batch)
        optimizer = self.optimizers()
        def closure():
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss
        optimizer.step(closure)

    def on_train_batch_start(self, batch, batch_idx):
        self.num_calls.append(0)

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), line_search_fn="strong_wolfe")

if __name__ == "__main__":
    batches = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
    for is_manual in (False, True):
        ours = trainer(lightning_ddp.CustomDDPStrategy(timeout=timedelta(seconds=20)), max_steps=4)
        model = Model(is_manual)
        ours.fit(model, DataLoader(batches, batch_size=8))
        sums = [p.sum().item() for p in model.parameters()]
        print("RANK", ours.global_rank, is_manual, model.num_calls, sums, flush=True)
"""


def test_lbfgs_calls_its_closure_equally_often_on_all_ranks() -> None:
    lines = [line for line in run_script(LBFGS).check().stdout.splitlines() if "RANK" in line]
    ranks = [sorted(line.split(maxsplit=2)[2] for line in lines if f"RANK {rank}" in line) for rank in (0, 1)]
    assert len(ranks[0]) == 2
    assert ranks[0] == ranks[1]


RESTORED = f"""{TRAINS}
if __name__ == "__main__":
    strategy = lightning_ddp.CustomDDPStrategy(start_method="fork", ddp_comm_hook="topk")
    ours, model = trainer(strategy, max_steps=2, enable_checkpointing=True), BoringModel()
    ours.fit(model)
    checkpoint = torch.load(ours.checkpoint_callback.best_model_path)
    assert checkpoint["lightning_ddp"]
    strategy.optimizers = [torch.optim.SGD(model.parameters(), lr=7.0)]
    strategy.load_optimizer_state_dict(checkpoint)
    print("RATE", strategy.optimizers[0].param_groups[0]["lr"])
    try:
        ours.fit(model)
    except NotImplementedError as error:
        print(error)
"""


def test_after_a_fit_in_forked_processes_the_main_process_restores_its_optimizers_and_fits_no_more(
    tmp_path,
) -> None:
    said = run_script(RESTORED, cwd=tmp_path).check().stdout
    assert "RATE 0.1" in said
    assert "trainer.fit() twice with start_method='fork' is not supported" in said
