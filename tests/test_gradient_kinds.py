"""Gradients that are no dense fp32 tensors: sparse, complex, of no elements, 16-bit, undefined."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from comparison import assert_all_as_torch, grads_of, state_of
from harness import on_ranks, run_ranks
from models import filled
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from lightning_ddp import BucketedDDP
from lightning_ddp.averaging.local_sgd import NodeGradients
from lightning_ddp.comm.group import Group
from lightning_ddp.errors import BackwardOrderError
from lightning_ddp.hooks import build_hook

NUM_ROWS = 14
VIEW, NO_VIEW = ({"gradient_as_bucket_view": is_view} for is_view in (True, False))
LAYOUTS: list[dict[str, Any]] = [VIEW, NO_VIEW, {"bucket_cap_mb": 1e-6, **VIEW}]


def steps_of(rank: int, _: int, wrap: Any, make: type[nn.Module], options: dict[str, Any]) -> Any:
    """Gradients of each step, and the parameters that SGD makes of them."""
    module = filled(make())
    model = wrap(module, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        model(module.inputs(rank, step)).backward()
        seen.append(grads_of(module))
        optimizer.step()
    return seen, state_of(module)


# ---------------------------------------------------------------- sparse


class SparseText(nn.Module):
    kind: type[nn.Module] = nn.Embedding

    def __init__(self) -> None:
        super().__init__()
        self.rows = self.kind(NUM_ROWS, 3, sparse=True)
        self.head = nn.Linear(3, 1)

    @staticmethod
    def inputs(rank: int, step: int) -> Tensor:
        # some rows on both ranks, some twice, others on one rank only
        generator = torch.Generator().manual_seed(10 * step + rank)
        return torch.randint(4 * rank, 4 * rank + 6, (2, 4), generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rows(tokens)).square().sum()


class SparseBags(SparseText):
    kind = nn.EmbeddingBag


@pytest.mark.parametrize("world_size", [2, 3])
def test_sparse_embeddings_that_use_other_rows_on_each_rank(world_size) -> None:
    # at 3 ranks sums are rounded in another order than torch's
    rtol = 0.0 if world_size == 2 else 1e-5
    cases = [*product((SparseText, SparseBags), LAYOUTS)]
    for by_rank in assert_all_as_torch(steps_of, world_size, cases, rtol=rtol, atol=rtol):
        for grads, _ in by_rank:
            assert all("rows.weight (sparse)" in step for step in grads), "it must stay sparse"


def sparse_accumulation(rank, world_size, wrap, options):
    module = SparseText()
    model = wrap(filled(module), **options)
    seen = []
    for step in range(3):
        module.zero_grad()
        with model.no_sync():
            with model.no_sync():
                model(module.inputs(rank, 10 * step)).backward()
            model(module.inputs(rank, 10 * step + 1)).backward()
        seen.append(grads_of(module))
        model(module.inputs(rank, 10 * step + 9)).backward()
        seen.append(grads_of(module))
    return seen


def test_sparse_gradients_that_accumulated_in_no_sync() -> None:
    assert_all_as_torch(sparse_accumulation, 2, [(options,) for options in LAYOUTS])


class TwoTables(nn.Module):
    """Uses the tables that it is told to, with one row each."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Embedding(4, 1, sparse=True)
        self.right = nn.Embedding(4, 1, sparse=True)

    def forward(self, row: int, use: str) -> Tensor:
        return sum(getattr(self, name)(torch.tensor([row])).sum() * 2 for name in use.split())


@on_ranks(2)
def test_a_sparse_parameter_that_one_rank_alone_used(rank, group) -> None:
    left = [1.0, 1.0, 0.0, 0.0]
    expected = [[left, [1.0, 0.0, 0.0, 0.0]], [left, None], [left, [0.0, 1.0, 0.0, 0.0]]]
    model = BucketedDDP(TwoTables(), process_group=group, find_unused_parameters=True)
    seen = []
    for uses in (("left right", "left"), ("left", "left"), ("left", "left right")):
        model.zero_grad()
        model(rank, uses[rank]).backward()
        grads = [model.module.left.weight.grad, model.module.right.weight.grad]
        seen.append([None if g is None else g.to_dense().flatten().tolist() for g in grads])
    assert seen == expected


@on_ranks(2)
def test_a_dense_gradient_of_a_sparse_embedding_is_named_on_every_rank(group) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(NUM_ROWS, 3, sparse=True)

        def forward(self, tokens: Tensor) -> Tensor:
            return (self.rows(tokens) @ self.rows.weight.t()).sum()

    model = BucketedDDP(Tied(), process_group=group)
    with pytest.raises(BackwardOrderError, match=r"'rows\.weight' has a dense gradient.*sparse=True"):
        model(torch.tensor([[1, 2]])).backward()


def sparse_steps_with_hooks(rank: int, _: int) -> None:
    group = torch.distributed.group.WORLD
    for name in ("allreduce", "int8", "topk", "noop", "in nodes"):
        plain, hooked, alone = (filled(SparseText()) for _ in range(3))
        models = [BucketedDDP(plain), BucketedDDP(hooked)]
        hook: Any = NodeGradients(None, Group(group), 2, torch.device("cpu"), lambda: False)
        if name != "in nodes":
            hook = build_hook(name, group)
        models[1].register_comm_hook(None, hook)
        for step in range(3):
            for model in (*models, alone):
                model.zero_grad()
                model(SparseText.inputs(rank, step)).backward()
            expected = (alone if name == "noop" else plain).rows.weight.grad
            assert hooked.rows.weight.grad.to_dense().equal(expected.to_dense()), name
            if name == "topk":
                assert hook.state_dict()["step"] == step + 1


def test_hooks_leave_sparse_gradients_uncompressed() -> None:
    run_ranks(sparse_steps_with_hooks, 2)


# ---------------------------------------------------------------- complex, no elements, 16 bits


def complex_steps_with_a_hook_of_torch(rank: int, _: int, wrap: Any, options: dict[str, Any]) -> Any:
    module = filled(nn.Linear(3, 2, dtype=torch.complex64))
    model = wrap(module, **options)
    model.register_comm_hook(None, allreduce_hook)
    seen = []
    for step in range(3):
        module.zero_grad()
        model(torch.full((1, 3), rank + 1j * step)).abs().sum().backward()
        seen.append(grads_of(module))
    return seen


def test_a_hook_of_torch_averages_complex_gradients() -> None:
    assert_all_as_torch(complex_steps_with_a_hook_of_torch, 2, [(options,) for options in LAYOUTS])


class AllKinds(nn.Module):
    """Gradients of each kind in one model, so that their buckets are launched among each other."""

    def __init__(self) -> None:
        super().__init__()
        self.text = SparseText()
        self.empty_first = nn.Parameter(torch.zeros(0))
        self.matrix = nn.Parameter(torch.zeros(3, 4, dtype=torch.complex64))
        self.phase = nn.Parameter(torch.zeros((), dtype=torch.complex64))
        self.single = nn.Linear(3, 2)
        self.empty_middle = nn.Parameter(torch.zeros(0, 5))
        self.in_double = nn.Linear(3, 1, dtype=torch.float64)
        self.in_half = nn.Sequential(*(nn.Linear(n, m, dtype=torch.float16) for n, m in ((3, 7), (7, 3))))
        self.in_bfloat = nn.Sequential(*(nn.Linear(n, m, dtype=torch.bfloat16) for n, m in ((3, 7), (7, 3))))
        self.empty_double = nn.Parameter(torch.zeros(2, 0, dtype=torch.float64))

    def inputs(self, rank: int, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(10 * step + rank)
        numbers = torch.randn(5, 4, dtype=torch.complex64, generator=generator)
        return self.text.inputs(rank, step), numbers

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        tokens, numbers = inputs
        x = (numbers @ self.matrix.t() * self.phase).abs()
        layers = (self.single, self.in_double, self.in_half, self.in_bfloat)
        outputs = [layer(x.to(next(layer.parameters()).dtype)) for layer in layers]
        nothing = self.empty_first.sum() + self.empty_middle.sum() + self.empty_double.sum()
        return sum(torch.tanh(y).double().square().sum() for y in outputs) + self.text(tokens) + nothing


def test_all_kinds_of_gradients_in_one_model() -> None:
    kinds = {torch.float32, torch.float64, torch.complex64, torch.float16, torch.bfloat16}
    for by_rank in assert_all_as_torch(steps_of, 2, [(AllKinds, options) for options in LAYOUTS]):
        for grads, _ in by_rank:
            assert {g.dtype for g in grads[-1].values()} == kinds
            assert all(g.abs().max() > 0 for step in grads for g in step.values() if g.numel())


# ---------------------------------------------------------------- undefined


class MaybeUndefined(nn.Module):
    """Two layers; behind the first one autograd loses the gradient where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3, bias=False)
        self.b = nn.Linear(3, 1, bias=False)
        self.is_undefined = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.is_undefined:
            x = torch._C._functions.UndefinedGrad()(x)
        return self.b(x).sum()


def undefined_gradients(rank, world_size, wrap, undefined_on, options):
    module = filled(MaybeUndefined())
    model = wrap(module, **options)
    seen = []
    for step in range(4):
        module.zero_grad()
        module.is_undefined = step > 0 and rank in undefined_on
        model(torch.full((2, 3), step + rank + 1.0)).backward()
        seen.append(grads_of(module))
    return seen


def test_undefined_gradients_count_as_zeros() -> None:
    finds_unused = {"find_unused_parameters": True, **NO_VIEW}
    cases = [*product(((0,), (1,), (0, 1)), [*LAYOUTS, finds_unused])]
    for by_rank in assert_all_as_torch(undefined_gradients, 2, cases):
        assert all(seen[0]["a.weight"].abs().max() > 0 for seen in by_rank)
