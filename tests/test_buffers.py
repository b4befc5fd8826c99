"""Buffers: the numbers of a copy of rank 0's before each forward, without a collective where none is due."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from comparison import assert_all_as_torch, grads_of, state_of
from harness import on_ranks, run_ranks, run_threads
from torch import Tensor, nn

from lightning_ddp import BucketedDDP
from lightning_ddp.comm.group import Group
from lightning_ddp.errors import ConfigurationError


class Norms(nn.Module):
    """Layers of batch normalisation with different settings, whose statistics are all the buffers."""

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, bias=False)
        self.first = norm(4)
        self.average = nn.BatchNorm2d(4, momentum=None, affine=False)
        self.no_statistics = nn.BatchNorm2d(4, track_running_stats=False)
        self.last = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(self.conv(x)))
        x = self.no_statistics(self.average(x))
        return self.head(self.last(x.flatten(2)).mean(2))


class ShiftedNorm(nn.BatchNorm2d):
    """Reads a running statistic in training, as a subclass may."""

    def forward(self, x: Tensor) -> Tensor:
        shift = self.running_mean.clone().view(1, -1, 1, 1)
        return super().forward(x) + shift


class WithAverage(Norms):
    """Has one more buffer, an average of the inputs, which training reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average_input", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average_input.lerp_(x.mean(), 0.1)
        return super().forward(x - self.average_input.clone())


class Reassigned(Norms):
    """Puts a new tensor in the place of its buffer in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last_mean", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        before = self.last_mean
        self.last_mean = x.detach().mean() + 0
        return super().forward(x - before)


MAKERS = {
    "norms": Norms,
    "subclass": lambda: Norms(ShiftedNorm),
    "another buffer": WithAverage,
    "reassigned": Reassigned,
}
# a letter a forward: t trains, n in no_sync, e evaluates, f trains with the first layer frozen,
# F with all of them; `|` ends nothing and is for the eye
PROGRAMS = {
    "trains": "tttt",
    "evaluates between": "tt|ee|t|e|ttt|eee",
    "accumulates": "nnt|nnt|e|nnt",
    "frozen from the start": "FFF|e|FF",
    "frozen in part": "ff|e|ff|t|ff|e",
    "frozen later": "tt|FF|t|e|F|ff|e",
    "evaluates first": "e|t|e",
}


def run_program(rank, world_size, wrap, name, program, options) -> Any:
    """Outputs of every forward, gradients of every backward, and the state at the end."""
    torch.manual_seed(7)  # the same weights, but each rank its own statistics
    module = MAKERS[name]()
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.add_(rank / 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, for `broadcast_buffers`
        model = wrap(module, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    seen = []
    for kind in program.replace("|", ""):
        model.train(kind != "e")
        for layer in [module.first] if kind == "f" else list(module.children()) if kind == "F" else []:
            layer.eval()
        x = torch.randn(3, 2, 5, 5, generator=generator)
        if kind == "e":
            with torch.no_grad():
                seen.append(model(x))
            continue
        with model.no_sync() if kind == "n" else nullcontext():
            output = model(x)
            output.square().sum().backward()
        seen.append(output.detach())
        if kind != "n":
            seen.append(grads_of(module))
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        seen.append(model(x))
    parameters = {n for n, _ in module.named_parameters()}
    # buffers of the ranks whose copy is still due are compared by what evaluation makes of them
    state = {n: t for n, t in state_of(module).items() if n in parameters or rank == 0}
    return seen, state


def test_outputs_and_gradients_are_those_under_torch_in_every_forward() -> None:
    cases = [(name, program, {}) for name in MAKERS for program in PROGRAMS.values()]
    for by_rank in assert_all_as_torch(run_program, 2, cases):
        outputs, _ = by_rank[0]
        assert outputs[0].abs().max() > 0
        assert not torch.equal(outputs[0], by_rank[1][0][0]), "the ranks must have different inputs"


FLAGS = [
    {"broadcast_buffers": True},
    {"broadcast_buffers": False},
    {"forward_sync_buffers": True},
    {"forward_sync_buffers": False},
    {"broadcast_buffers": False, "init_sync": False},
]


def test_the_flags_have_torchs_meaning() -> None:
    programs = [PROGRAMS[name] for name in ("accumulates", "frozen later")]
    assert_all_as_torch(run_program, 2, [*product(("norms", "another buffer"), programs, FLAGS)])


# ---------------------------------------------------------------- what it costs


def collectives_by_forward(rank, name, program, options):
    """Collectives of each forward of the program, without those of its backward."""
    torch.manual_seed(7)
    model = BucketedDDP(MAKERS[name](), transport="gloo", **options)  # whose calls are counted
    generator = torch.Generator().manual_seed(rank)
    found = []
    with patch.object(Group, "start", autospec=True, side_effect=Group.start) as start:
        for kind in program.replace("|", ""):
            model.train(kind != "e")
            if kind == "F":
                model.module.eval()
            before = start.call_count
            output = model(torch.randn(3, 2, 5, 5, generator=generator))
            found.append(start.call_count - before)
            if kind != "e":
                output.square().sum().backward()
        assert start.call_count > sum(found), "backward must have been counted too"
    return found


SPENT = [
    # the second forward tells all ranks the order of the buckets
    ("norms", "tttt|ee|t|e|FF", {}, [0, 1, 0, 0, 1, 1, 0, 1, 1, 1]),
    ("norms", "ttF", {"broadcast_buffers": "auto"}, [0, 1, 1]),
    ("norms", "tttt", {"broadcast_buffers": True}, [1, 2, 1, 1]),
    ("norms", "tttt", {"forward_sync_buffers": True}, [1, 2, 1, 1]),
    ("norms", "ttt|e", {"broadcast_buffers": False}, [0, 1, 0, 0]),
    ("norms", "ttt|e", {"forward_sync_buffers": False}, [0, 1, 0, 0]),
    ("subclass", "ttt", {}, [1, 2, 1]),
    ("another buffer", "ttt", {}, [1, 2, 1]),
]


def collectives_by_program(rank, world_size):
    return [(*row[:3], collectives_by_forward(rank, *row[:3])) for row in SPENT]


def test_training_steps_of_batch_norms_spend_no_collective_on_buffers() -> None:
    assert run_ranks(collectives_by_program, 2) == [SPENT] * 2


# ---------------------------------------------------------------- statistics changed behind our back


def statistics_changed_elsewhere(rank, world_size, wrap, change):
    """The module is used without the wrapper between two forwards of it, each rank on its own."""
    torch.manual_seed(7)
    module = Norms()
    model = wrap(module)
    generator = torch.Generator().manual_seed(rank)

    def x() -> Tensor:
        return torch.randn(3, 2, 5, 5, generator=generator)

    model(x()).sum().backward()
    model.eval()
    model(x()).sum().backward()  # copies: all ranks are alike
    if change == "module":
        module.train()
        with torch.no_grad():
            module(x())
    else:
        with torch.no_grad():
            module.first.running_mean.fill_(rank + 1.0)
    module.eval()
    return model(x()).detach()


def test_statistics_that_changed_outside_of_the_wrapper_are_copied_before_they_are_read() -> None:
    assert_all_as_torch(statistics_changed_elsewhere, 2, [("module",), ("buffer",)])


def test_sync_buffers_copies_at_once() -> None:
    def rank_main(rank, world_size, group):
        model = BucketedDDP(nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)), process_group=group)
        model(torch.tensor([[1.0], [3.0]]) * (rank + 1)).sum().backward()
        own = model.module[0].running_mean.item()
        model.sync_buffers()
        return own, model.module[0].running_mean.item()

    (own_0, synced_0), (own_1, synced_1) = run_threads(rank_main, 2)
    assert (own_0, own_1) == pytest.approx((0.2, 0.4))
    assert synced_0 == synced_1 == own_0


@on_ranks(2)
def test_views_with_a_pending_conjugation_or_sign_are_copied(rank, group) -> None:
    module = nn.Linear(2, 2)
    for numel in (4, 2**18):  # together with others and alone
        numbers = torch.full((numel,), complex(1, rank))
        module.register_buffer(f"conjugate{numel}", numbers.conj())
        module.register_buffer(f"negative{numel}", torch.full((numel,), complex(1, rank)).conj().imag)
    BucketedDDP(module, process_group=group, init_sync=False).sync_buffers()
    for name, buffer in module.named_buffers():
        assert buffer.eq(0 if "negative" in name else 1).all(), name


# ---------------------------------------------------------------- ignored buffers


def ignored_buffers(rank, world_size, wrap, ignored):
    torch.manual_seed(7)
    module = WithAverage()
    module.average_input.fill_(rank + 1.0)
    module.first.running_mean.fill_(rank + 1.0)
    module._ddp_params_and_buffers_to_ignore = ignored
    model = wrap(module)
    generator = torch.Generator().manual_seed(rank)
    seen = [state_of(module)]
    for _ in range(2):
        model(torch.randn(3, 2, 5, 5, generator=generator)).square().sum().backward()
        model.eval()
        with torch.no_grad():
            seen.append(model(torch.ones(1, 2, 5, 5)))
        seen.append(state_of(module))
        model.train()
    return seen


def test_ignored_buffers_stay_each_ranks_own() -> None:
    names = ["average_input", "first.running_mean", "first.running_var"]
    answers = assert_all_as_torch(ignored_buffers, 2, [(names[:1],), (names,)])
    for by_rank in answers:
        assert [seen[0]["average_input"].item() for seen in by_rank] == [1.0, 2.0]
    assert [seen[0]["first.running_mean"][0].item() for seen in answers[0]] == [1.0, 1.0]
    assert [seen[0]["first.running_mean"][0].item() for seen in answers[1]] == [1.0, 2.0]


# ---------------------------------------------------------------- bad arguments


@on_ranks(1)
def test_both_flags_warn_and_the_newer_one_counts_and_bad_arguments_are_named(group) -> None:
    with pytest.warns(FutureWarning, match="=True is ignored, because forward_sync_buffers"):
        model = BucketedDDP(Norms(), process_group=group, broadcast_buffers=True, forward_sync_buffers=False)
    assert model.forward_sync_buffers is False
    with pytest.raises(ConfigurationError, match=r"broadcast_buffers='never': expected 'auto', True"):
        BucketedDDP(Norms(), process_group=group, broadcast_buffers="never")
    with pytest.raises(ConfigurationError, match=r"location='later': expected 'before_forward' or"):
        model.register_buffer_comm_hook(None, print, location="later")
    with pytest.raises(TypeError, match="buffer hook 3 must be callable"):
        model.register_buffer_comm_hook(None, 3)
