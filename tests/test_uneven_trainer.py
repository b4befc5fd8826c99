"""`uneven_inputs` through the Trainer, in real processes, beside a simulation of both ranks in one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_script
from harness.uneven_script import BATCH_SIZE, CASES, NUM_EPOCHS, NUM_FEATURES, batches
from torch import Tensor, nn

pytestmark = pytest.mark.xdist_group("uneven_trainer")  # they share what the fixtures make
SCRIPT = Path(__file__).with_name("harness") / "uneven_script.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TIMEOUT_S = 170
REFUSED = {
    "error_mode": (
        "UnevenInputsError",
        "ranks [0] have run out of training batches, but the others have more",
    ),
    "two_loaders": ("ConfigurationError", "supports one training dataloader"),
    "dataloader_iter": ("ConfigurationError", "with dataloader_iter fetches batches itself"),
    "sized_on_rank_zero": ("ConfigurationError", "has no length on ranks [1], but has one on the others"),
    "resumed_inside_an_epoch": ("ConfigurationError", "cannot resume inside an epoch, here after 2 batches"),
}


def launch(cases: Sequence[str], folder: Path, **options: Any) -> list[dict[str, Any]]:
    """The results of rank 0 and of rank 1, by case."""
    out = folder / "results"
    args = [",".join(cases), str(out)]
    run_script(SCRIPT, args, timeout_s=TIMEOUT_S, cwd=folder, **options).check()
    return [torch.load(out.with_suffix(f".{rank}.pt")) for rank in range(2)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    return launch(
        [name for name in CASES if name not in {*REFUSED, "error_mode_even"}],
        tmp_path_factory.mktemp("uneven"),
    )


@pytest.fixture(scope="module")
def refused(tmp_path_factory) -> list[dict[str, Any]]:
    # one script with many failures: with reconciliation the first one would end it
    env = {"LIGHTNING_DDP_SUPERVISION": "0"}
    return launch(
        [*REFUSED, "error_mode_even"], tmp_path_factory.mktemp("refused"), env=env, launcher=TORCHRUN
    )


@dataclass(kw_only=True)
class Simulation:
    """Both ranks in one process: a rank without a batch adds nothing to the mean of the gradients."""

    num_batches: Sequence[Sequence[int]]
    accumulate: int = 1
    batch_size: int = BATCH_SIZE
    is_over_active: bool = False
    has_scheduler: bool = True
    weight: Tensor = field(default_factory=lambda: torch.full((1, NUM_FEATURES), 0.1))
    bias: Tensor = field(default_factory=lambda: torch.zeros(1))
    seen: list[dict[str, float]] = field(default_factory=list)
    epochs: list[list[dict[str, float]]] = field(default_factory=list)
    steps: int = 0

    def run(self) -> Simulation:
        parameters = [self.weight.clone().requires_grad_(), self.bias.clone().requires_grad_()]
        optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        for epoch in self.num_batches:
            self.epoch(epoch, parameters, optimizer)
            if self.has_scheduler:
                optimizer.param_groups[0]["lr"] *= 0.5
        self.weight, self.bias = (parameter.detach() for parameter in parameters)
        self.momentum = [optimizer.state[parameter]["momentum_buffer"] for parameter in parameters]
        return self

    def epoch(self, num_batches: Sequence[int], parameters: list[Tensor], optimizer: Any) -> None:
        losses: list[list[float]] = [[], []]
        data = [batches(rank, n, self.batch_size) for rank, n in enumerate(num_batches)]
        optimizer.zero_grad()
        for step in range(max(num_batches)):
            active = [rank for rank in range(2) if step < num_batches[rank]]
            start, stop = step * self.batch_size, (step + 1) * self.batch_size
            for rank in active:
                inputs, targets = (tensor[start:stop] for tensor in data[rank])
                loss = squared_error(parameters, inputs, targets)
                losses[rank].append(loss.item())
                (loss / self.accumulate / (len(active) if self.is_over_active else 2)).backward()
            now = [losses[rank][-1] for rank in active]
            self.seen.append(
                {"loss_step": sum(now) / len(now), "largest_step": max(now), "smallest_step": min(now)}
            )
            if (step + 1) % self.accumulate == 0 or step + 1 == max(num_batches):
                optimizer.step()
                optimizer.zero_grad()
                self.steps += 1
        every = losses[0] + losses[1]
        held_out = [t.split(BATCH_SIZE) for t in batches(7, 2)]
        val_losses = [squared_error(parameters, *batch).item() for batch in zip(*held_out, strict=True)]
        together = {
            "loss_epoch": sum(every) / len(every),
            "largest_epoch": max(every),
            "smallest_epoch": min(every),
            "batches": float(len(every)),
            "val_loss": sum(val_losses) / 2,
        }
        nothing = float("nan")
        self.epochs.append(
            [{**together, "local": sum(mine) / len(mine) if mine else nothing} for mine in losses]
        )


def squared_error(parameters: Sequence[Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
    return (nn.functional.linear(inputs, *parameters) - targets).square().mean()


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def require_one_model(results: Sequence[dict[str, Any]]) -> None:
    first, second = results
    assert torch.equal(first["weight"], second["weight"])
    assert torch.equal(first["bias"], second["bias"])
    assert first["optimizer"]["param_groups"] == second["optimizer"]["param_groups"]
    states = [result["optimizer"]["state"] for result in results]
    assert states[0].keys() == states[1].keys()
    assert states[0]
    for index, state in states[0].items():
        assert torch.equal(state["momentum_buffer"], states[1][index]["momentum_buffer"])
    assert first["steps"] == second["steps"]


SIMULATIONS = {
    "sized": {"num_batches": [[3, 5]] * NUM_EPOCHS},
    "unsized": {"num_batches": [[3, 5]] * NUM_EPOCHS},
    "limited": {"num_batches": [[3, 4]] * NUM_EPOCHS},
    "accumulated": {"num_batches": [[5, 3]] * NUM_EPOCHS, "accumulate": 2},
    "over_active": {"num_batches": [[3, 5]] * NUM_EPOCHS, "is_over_active": True},
    "single_samples": {"num_batches": [[3, 4]] * NUM_EPOCHS, "batch_size": 1},
    "manual": {"num_batches": [[3, 5]] * NUM_EPOCHS, "has_scheduler": False},
    "none_in_second_epoch": {"num_batches": [[2, 3], [0, 2]]},
    "checkpointed": {"num_batches": [[3, 5]] * NUM_EPOCHS},
}


@pytest.mark.parametrize("case", SIMULATIONS)
def test_weights_and_optimizer_are_those_of_the_simulation_on_all_ranks(case, ranks):
    expected = Simulation(**SIMULATIONS[case]).run()
    require_one_model([results[case] for results in ranks])
    result = ranks[0][case]
    close(result["weight"], expected.weight)
    close(result["bias"], expected.bias)
    close([state["momentum_buffer"] for state in result["optimizer"]["state"].values()], expected.momentum)
    assert result["steps"] == expected.steps


@pytest.mark.parametrize("case", SIMULATIONS)
def test_logged_values_leave_out_repeated_batches(case, ranks):
    expected = Simulation(**SIMULATIONS[case]).run()
    for rank, results in enumerate(ranks):
        close(results[case]["seen"], expected.seen)
        close(results[case]["epochs"], [epoch[rank] for epoch in expected.epochs])
        assert results[case]["ranks"] == 1.0, "what is logged for the epoch is of all ranks"


def test_the_simulations_differ():
    weights = [Simulation(**SIMULATIONS[case]).run().weight for case in SIMULATIONS]
    assert len({tuple(weight[0].tolist()) for weight in weights}) == len(SIMULATIONS) - 2


def test_resuming_from_a_checkpoint_of_validation_equals_going_on(ranks):
    for results in ranks:
        assert results["checkpointed"]["files"] == ["epoch=0-step=5.ckpt", "epoch=1-step=10.ckpt"]
        assert torch.equal(results["checkpointed"]["again"]["weight"], results["checkpointed"]["weight"])


def test_validating_and_fitting_again_after_it(ranks):
    expected = Simulation(num_batches=[[3, 5]] * NUM_EPOCHS).run()
    again = Simulation(num_batches=[[3, 5]], weight=expected.weight, bias=expected.bias).run()
    for results in ranks:
        close(results["fit_and_validate"]["validate"][0]["val_loss"], expected.epochs[-1][0]["val_loss"])
        close(results["fit_and_validate"]["again"], again.weight)


def test_buffers_and_metrics_are_those_of_a_ranks_own_batches(ranks):
    for rank, num_batches in enumerate([5, 3]):
        norm, again = (nn.BatchNorm1d(NUM_FEATURES, affine=False) for _ in range(2))
        inputs = batches(rank, num_batches)[0].split(BATCH_SIZE)
        for batch in inputs:
            hidden = norm(batch)
            again(hidden)
            again(hidden)  # checkpointing runs it a second time in backward
        buffers = ranks[rank]["stateful"]["buffers"]
        assert buffers["norm.num_batches_tracked"] == num_batches
        assert buffers["again.num_batches_tracked"] == 2 * num_batches
        for name, module in (("norm", norm), ("again", again)):
            close(buffers[f"{name}.running_mean"], module.running_mean)
            close(buffers[f"{name}.running_var"], module.running_var)
        close(buffers["last"], inputs[-1][0, :1])
        mean, collected = ranks[rank]["stateful"]["epochs_of_metrics"]
        close(mean, ranks[rank]["stateful"]["epochs"][0]["local"])
        close(collected, [batch[0, 0].item() for batch in inputs])


def test_a_rank_that_has_run_out_has_no_say_in_decisions(ranks):
    # in the last step rank 1 repeats: "all" is what rank 0 says, and so is "any"
    assert [results["stateful"]["votes"] for results in ranks] == [[True, False]] * 2


def test_ranks_seeded_alike_go_on_drawing_alike(ranks):
    choices = [results["random_depth"]["choices"] for results in ranks]
    assert choices[0] == choices[1]
    assert len(choices[0]) == 9 * NUM_EPOCHS
    assert set(choices[0]) == {0, 1}
    require_one_model([results["random_depth"] for results in ranks])


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_right_is_an_error_on_every_rank(case, refused):
    kind, message = REFUSED[case]
    for results in refused:
        assert results[case].get("error") == kind, results[case]
        assert message in results[case]["message"]


def test_error_mode_changes_nothing_where_ranks_have_as_many(refused):
    expected = Simulation(num_batches=[[3, 3]] * NUM_EPOCHS).run()
    for results in refused:
        assert results["error_mode_even"].get("error") is None, results["error_mode_even"]
        close(results["error_mode_even"]["weight"], expected.weight)
