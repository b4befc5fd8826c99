"""torch.compile around, inside and above the wrapper: eager's losses, and communication during backward."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
import torch
from harness import run_ranks
from models import done, x_of
from torch import Tensor, nn

from lightning_ddp import BucketedDDP

WIDTH = 600  # a layer has more than 1 MiB, below which torch splits no graph
LAYER_BYTES = 4 * WIDTH * (WIDTH + 1)
NUM_LAYERS = 4
ONE_LAYER_EACH_MB = LAYER_BYTES / 2**20


class Users(nn.Module):
    """A module with a forward that is not torch's."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def net() -> nn.Module:
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for _ in range(NUM_LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return Users(nn.Sequential(*layers))


def outside(module: nn.Module, options: dict[str, Any], backend: Any) -> tuple[nn.Module, Any]:
    model = BucketedDDP(module, **options)
    return model, torch.compile(model, backend=backend)


def inside(module: nn.Module, options: dict[str, Any], backend: Any) -> tuple[nn.Module, Any]:
    model = BucketedDDP(torch.compile(module, backend=backend), **options)
    return model, model


def above(module: nn.Module, options: dict[str, Any], backend: Any) -> tuple[nn.Module, Any]:
    model = BucketedDDP(module, **options)
    return model, torch.compile(lambda x: model(x * 1.0), backend=backend)


WAYS = {"outside": outside, "inside": inside, "above": above}


def single_threaded() -> None:
    """Compiling in this process alone: a rank must not leave workers behind."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    import torch._inductor.config as inductor

    inductor.compile_threads = 1  # it may have been imported already


def losses_of(rank: int, model: nn.Module, call: Any, num_steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = call(x_of(rank, step, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Counts:
    """A compiler that counts the graphs that it compiles."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: Any, inputs: Any, **keywords: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        self.num_graphs += 1
        return aot_eager(graph, inputs, **keywords)


def compiled_and_eager(rank, world_size, way, backend, options):
    single_threaded()
    backend = Counts() if backend == "counts" else backend
    eager = BucketedDDP(net(), **options)
    expected = losses_of(rank, eager, eager, 5)
    model, call = WAYS[way](net(), options, backend)
    found = losses_of(rank, model, call, 5)
    num_graphs = getattr(backend, "num_graphs", 0)
    return expected, found, [p.detach().clone() for p in model.parameters()], num_graphs


def assert_same_training(answers: list[Any]) -> list[int]:
    for expected, found, _, _ in answers:
        assert found == pytest.approx(expected, rel=1e-5)
        assert len(set(expected)) == 5, "it must train"
    assert answers[0][0] != answers[1][0], "the ranks have different data"
    for first, second in zip(answers[0][2], answers[1][2], strict=True):
        assert torch.equal(first, second)
    return [num_graphs for *_, num_graphs in answers]


@pytest.mark.parametrize(
    "way", ["outside", *(pytest.param(way, marks=pytest.mark.slow) for way in ("inside", "above"))]
)
def test_losses_are_those_of_eager_and_each_bucket_has_a_graph(way) -> None:
    options = {"bucket_cap_mb": ONE_LAYER_EACH_MB}
    answers = run_ranks(compiled_and_eager, 2, way, "counts", options, timeout_s=120)
    assert min(assert_same_training(answers)) >= NUM_LAYERS


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_losses_are_those_of_eager_with_inductor() -> None:
    assert_same_training(run_ranks(compiled_and_eager, 2, "outside", "inductor", {}, timeout_s=180))


def overlap(rank, world_size, way, options):
    """For each bucket: its parameters whose gradients were not there yet when it was launched."""
    single_threaded()
    module = net()
    names = [name for name, _ in module.named_parameters()]
    model, call = WAYS[way](module, options, "aot_eager")
    arrived: list[str] = []
    for name, parameter in zip(names, module.parameters(), strict=True):
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    still_missing: list[int] = []

    def hook(state, bucket):
        still_missing.append(len(names) - len(set(arrived)))
        return done(bucket.buffer())

    model.register_comm_hook(None, hook)
    for step in range(3):
        arrived.clear()
        still_missing.clear()
        call(x_of(rank, step, WIDTH)).square().mean().backward()
    return still_missing


@pytest.mark.slow
@pytest.mark.parametrize("way", ["outside", "above"])
def test_buckets_are_launched_while_the_compiled_backward_still_runs(way) -> None:
    """The graph is split at the buckets, as torch's own DDPOptimizer does for its DDP."""
    options = {"bucket_cap_mb": ONE_LAYER_EACH_MB}
    for still_missing in run_ranks(overlap, 2, way, options, timeout_s=120):
        assert len(still_missing) >= 3
        assert still_missing == sorted(still_missing, reverse=True)
        assert still_missing[0] >= 2 * (NUM_LAYERS - 2), "early buckets must not wait for the last layers"
        assert still_missing[-1] <= 1
