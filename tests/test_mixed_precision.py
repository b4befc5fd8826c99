"""`mixed_precision`: low precision from forward to the end of backward, full precision outside of it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from harness import on_ranks, run_threads
from models import filled, x_of
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision

from lightning_ddp import BucketedDDP
from lightning_ddp.errors import ConfigurationError

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


class Net(nn.Module):
    """Two layers and a buffer; notes the dtypes that forward sees."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 8)
        self.two = nn.Linear(8, 2)
        self.register_buffer("shift", torch.full((4,), 0.3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.dtypes = [x.dtype, self.one.weight.dtype, self.two.bias.dtype, self.shift.dtype]
        return self.two(torch.tanh(self.one(x - self.shift)))


def low_gradients(rank: int, step: int, config: Any) -> list[Tensor]:
    """What one rank alone computes in `param_dtype`: torch's DDP of this build needs CUDA for that."""
    module = filled(Net())
    module.to(config.param_dtype)
    module.shift = module.shift.to(config.buffer_dtype or F32)
    module(x_of(rank, step).to(config.param_dtype or F32)).square().sum().backward()
    return [p.grad for p in module.parameters()]


def mean_of(config: Any, step: int) -> list[Tensor]:
    """Halved and summed in `reduce_dtype`, as the bucket does; then in full precision."""
    dtype = config.reduce_dtype or config.param_dtype
    both = zip(low_gradients(0, step, config), low_gradients(1, step, config), strict=True)
    return [(a.to(dtype) * 0.5 + b.to(dtype) * 0.5).to(F32) for a, b in both]


CONFIGS = {
    "all bf16": _MixedPrecision(param_dtype=BF16, reduce_dtype=BF16, buffer_dtype=BF16),
    "all fp16": _MixedPrecision(param_dtype=F16, reduce_dtype=F16, buffer_dtype=F16),
    "reduced in fp32": _MixedPrecision(param_dtype=BF16, reduce_dtype=F32, buffer_dtype=BF16),
    "reduced in the parameters' dtype": _MixedPrecision(param_dtype=BF16, buffer_dtype=BF16),
    "reduced in bf16 alone": _MixedPrecision(reduce_dtype=BF16),
}


@pytest.mark.parametrize("options", [{"bucket_cap_mb": 1e-6}, {"gradient_as_bucket_view": False}], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
@on_ranks(2)
def test_gradients_are_the_mean_of_low_precision_ones_in_full_precision(rank, group, name, options) -> None:
    config = CONFIGS[name]
    model = BucketedDDP(filled(Net()), process_group=group, mixed_precision=config, **options)
    full = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        assert model(x_of(rank)).dtype == (config.param_dtype or F32), "also without a backward"
    assert [p.dtype for p in model.parameters()] == [F32] * 4
    assert all(map(torch.equal, full, model.parameters()))
    for step in range(3):
        model.zero_grad()
        output = model(x_of(rank, step))
        assert model.module.dtypes == [config.param_dtype or F32] * 3 + [config.buffer_dtype or F32]
        assert output.dtype == (config.param_dtype or F32)
        output.square().sum().backward()
        assert [p.dtype for p in model.parameters()] == [F32] * 4
        assert all(map(torch.equal, full, model.parameters()))
        for parameter, expected in zip(model.parameters(), mean_of(config, step), strict=True):
            assert parameter.grad.dtype == F32
            assert torch.equal(parameter.grad, expected)


def test_gradients_accumulate_over_no_sync() -> None:
    config = CONFIGS["reduced in fp32"]

    def rank_main(rank, world_size, group):
        model = BucketedDDP(filled(Net()), process_group=group, mixed_precision=config)
        dtypes = []
        for step in range(3):
            with model.no_sync() if step < 2 else nullcontext():
                model(x_of(rank, step)).square().sum().backward()
            dtypes += [p.dtype for p in model.parameters()] + [p.grad.dtype for p in model.parameters()]
        assert dtypes == [F32] * 24
        return [p.grad for p in model.parameters()]

    expected = [sum(grads) for grads in zip(*(mean_of(config, step) for step in range(3)), strict=True)]
    largest = max(e.abs().max().item() for e in expected)
    for found in run_threads(rank_main, 2):
        for grad, wanted in zip(found, expected, strict=True):
            # three gradients are added in bfloat16 (8 bits): each addition rounds by at most 2**-8
            torch.testing.assert_close(grad, wanted, rtol=2**-7, atol=largest * 2**-7)


@on_ranks(2)
def test_inputs_in_containers_are_cast_and_integers_are_not(rank, group) -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, inputs: dict[str, Any], *, scale: Tensor) -> Tensor:
            self.dtypes = [inputs["x"][0].dtype, inputs["x"][1].dtype, scale.dtype]
            return (inputs["x"][0] * self.weight * scale).sum()

    model = BucketedDDP(Takes(), process_group=group, mixed_precision=CONFIGS["all bf16"])
    inputs = {"x": [torch.ones(2), torch.ones(2, dtype=torch.int64)], "name": "text"}
    model(inputs, scale=torch.tensor(rank + 1.0)).backward()
    assert (model.module.dtypes, model.module.weight.grad.tolist()) == ([BF16, torch.int64, BF16], [1.5, 1.5])


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype", "buffer_dtype"])
@on_ranks(1)
def test_a_dtype_that_is_no_floating_point_one_is_named(group, name) -> None:
    with pytest.raises(ConfigurationError, match=rf"mixed_precision\.{name}=torch\.int32: expected a fl"):
        BucketedDDP(Net(), process_group=group, mixed_precision=_MixedPrecision(**{name: torch.int32}))
