"""On a CUDA device: gradients equal torch's, mixed precision, side streams, and a backward that never waits.

One device is enough: one rank with nccl, and two ranks that share it over gloo.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp import BucketedDDP
from lightning_ddp.__main__ import main
from lightning_ddp.ddp.replica_hash import StateHasher, state_of_optimizers
from lightning_ddp.telemetry.step_record import StepRecord

pytestmark = [
    pytest.mark.gpu,
    # counts through NVML, so that ranks can still be forked
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="there is no CUDA device"),
]

NUM_STEPS = 5
CUDA = torch.device("cuda", 0)


class Net(nn.Module):
    """Convolution, BatchNorm and linear layers, in several buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(16 * 36, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))


@contextmanager
def nccl_group(rank: int, world_size: int) -> Iterator[Any]:
    """A group of this rank alone: one device takes part in a nccl group once."""
    groups = [dist.new_group([r], backend="nccl") for r in range(world_size)]
    yield groups[rank]
    dist.destroy_process_group(groups[rank])


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(8, 3, 8, 8, generator=generator).to(CUDA)


def train(
    wrap: Callable[..., nn.Module], rank: int, group: Any, *, is_scaled: bool = False, **options: Any
) -> list[Tensor]:
    """The gradients of all steps and the weights at the end."""
    torch.cuda.set_device(CUDA)
    torch.backends.cudnn.deterministic = True
    torch.manual_seed(0)
    model = wrap(Net().to(CUDA), process_group=group, bucket_cap_mb=0.1, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", enabled=is_scaled)
    found = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16, enabled=is_scaled):
            loss = model(batch(rank, step)).square().mean()
        scaler.scale(loss).backward()
        found += [p.grad.clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
    return found + [p.detach().clone() for p in model.parameters()]


def differing(ours: list[Tensor], theirs: list[Tensor]) -> list[int]:
    assert len(ours) == len(theirs)
    return [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if not torch.equal(a, b)]


def compare_on_nccl(rank: int, world_size: int, options: dict[str, Any]) -> list[int]:
    with nccl_group(rank, world_size) as group:
        ours = train(BucketedDDP, rank, group, **options)
        return differing(ours, train(DistributedDataParallel, rank, group, **options))


@pytest.mark.parametrize(
    "options", [{}, {"static_graph": True}, {"find_unused_parameters": True}, {"is_scaled": True}]
)
def test_one_rank_with_nccl_equals_torch(options):
    assert run_ranks(compare_on_nccl, 1, options) == [[]]


def compare_on_gloo(rank: int, world_size: int, options: dict[str, Any]) -> list[int]:
    ours = train(BucketedDDP, rank, dist.group.WORLD, **options)
    return differing(ours, train(DistributedDataParallel, rank, dist.group.WORLD, **options))


@pytest.mark.parametrize("options", [{}, {"is_scaled": True}, {"find_unused_parameters": True}])
def test_two_ranks_that_share_a_device_over_gloo_equal_torch(options):
    assert run_ranks(compare_on_gloo, 2, options) == [[], []]


def train_on_side_stream(rank: int, world_size: int) -> list[int]:
    with nccl_group(rank, world_size) as group:
        expected = train(BucketedDDP, rank, group)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = train(BucketedDDP, rank, group)
        torch.cuda.current_stream().wait_stream(stream)
        return differing(found, expected)


def test_training_on_a_side_stream_changes_nothing():
    assert run_ranks(train_on_side_stream, 1) == [[]]


def recorded_steps(rank: int, world_size: int) -> list[StepRecord]:
    torch.cuda.set_device(CUDA)
    with nccl_group(rank, world_size) as group:
        model = BucketedDDP(Net().to(CUDA), process_group=group, bucket_cap_mb=0.1)
        recorder = model.record_steps()
        for step in range(4):
            model(batch(rank, step)).square().mean().backward()
            torch.cuda.synchronize()
        return list(recorder.records)


def test_steps_are_recorded_on_the_device() -> None:
    (records,) = run_ranks(recorded_steps, 1)
    assert len(records) >= 3, "a record is there once the device has finished the step"
    for record in records:
        assert record.forward_start <= record.forward_end <= record.backward_end <= record.comm_end
        for bucket in record.buckets:
            assert bucket.ready <= bucket.launched <= bucket.done
        assert 0 <= record.slack_ns < 60 * 10**9


def backward_without_waiting(rank: int, world_size: int) -> float:
    torch.cuda.set_device(CUDA)
    with nccl_group(rank, world_size) as group:
        model = BucketedDDP(Net().to(CUDA), process_group=group, bucket_cap_mb=0.1)
        model.record_steps()  # must not wait either
        for step in range(3):  # buckets are planned anew before the second one
            model(batch(rank, step)).square().mean().backward()
        loss = model(batch(rank, 3)).square().mean()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")  # any call that waits for the device raises
        try:
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return float(loss)


def test_backward_does_not_wait_for_the_device():
    (loss,) = run_ranks(backward_without_waiting, 1)
    assert loss > 0


def mode_that_is_to_notice(rank: int, world_size: int) -> None:
    tensor = torch.ones((), device=CUDA)
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchroniz"):
        tensor.item()


def test_groups_are_aborted_and_ranks_killed_on_one_gpu(tmp_path):
    """Of one rank with each implementation of NCCL, and of two ranks that share the device over gloo."""
    arguments = ["--device", "cuda", "--processes", "1", "--full", str(tmp_path / "found")]
    assert (
        main(
            ["doctor", "--verify", *arguments, "--only", "abort", "nothing", "memory", "exception", "SIGKILL"]
        )
        == 0
    )
    items = json.loads((tmp_path / "found.json").read_text())["items"]
    passed = {item["check"] for item in items if item["level"] == "PASS"}
    assert {f"{name}, gloo" for name in ("6 abort of all groups", "22 exception", "23 SIGKILL")} <= passed
    assert "7 nothing destroyed after it, nccl-legacy" in passed


def test_the_check_for_waiting_notices_it():
    run_ranks(mode_that_is_to_notice, 1)


def hashes_of(device: str, net: nn.Module) -> list[tuple[int, ...]]:
    """The values of all slices of a cycle, taken with three more, after a step."""
    copied = copy.deepcopy(net).to(device)
    optimizer = torch.optim.SGD(copied.parameters(), lr=0.0, momentum=0.9)
    for p in copied.parameters():
        p.grad = p.detach().clone()
    optimizer.step()
    names = {id(p): name for name, p in copied.named_parameters()}
    tensors, numbers = state_of_optimizers([optimizer], names)
    hasher = StateHasher(lambda: ({**dict(copied.named_parameters()), **tensors}, numbers), 16, 1 << 20)
    hasher.hash_next(0)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for step in range(1, len(hasher.cycle)):
            hasher.hash_next(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    for step in range(3):
        hasher.hash_next(step)
    found = [hasher.find(number)[0] for number in range(1, len(hasher.cycle) + 1)]
    return [hashed.values for hashed in found if hashed is not None]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_hashes_on_a_device_are_those_of_the_cpu_and_the_host_does_not_wait() -> None:
    net = Net()
    on_cpu, on_device = (hashes_of(device, net) for device in ("cpu", "cuda"))
    assert len(on_cpu) > 3
    assert on_cpu == on_device
