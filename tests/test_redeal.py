"""What a recovery refuses, puts back and deals anew, in one process."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import socket
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.distributed import DistributedSamplerWrapper
from pytorch_lightning.callbacks import LearningRateFinder
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from pytorch_lightning.utilities.types import LRSchedulerConfig
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from lightning_ddp import CustomDDPStrategy
from lightning_ddp._lightning import limit_epoch
from lightning_ddp._torch import end_of_schedule
from lightning_ddp.comm.teardown import abort_groups, remember_connections
from lightning_ddp.elastic.redeal import Dealer, DealtSampler
from lightning_ddp.elastic.refusals import check_training
from lightning_ddp.elastic.step_ledger import RandomStates, put_scale
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.supervise.settings import RecoverySettings, ReplaceSettings

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # between Lightning and torch


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"uneven_inputs": "error"}, "some ranks may have one batch less"),
        ({"uneven_inputs": "join", "model_averaging": "diloco"}, "do not run out of batches together"),
        ({"ddp_comm_hook": "noop"}, "a model of its own"),
        ({"ddp_comm_hook": print, "ddp_comm_state": 1}, "cannot be undone"),
        (
            {"model_averaging": {"name": "post_local_sgd", "intra_node_gradients": True}},
            "different numbers of ranks",
        ),
        ({"on_failure": {"name": "shrink", "min_worldsize": 2}}, "did you mean 'min_world_size'"),
        ({"on_failure": {"name": "shrink", "max_recoveries": 0}}, "at least 1"),
        ({"on_failure": {"name": "replace", "spares": 1}}, "no option 'spares'"),
        ({"on_failure": "shrnk"}, "expected 'stop', 'shrink'"),
        ({"on_failure": {"name": "stop", "min_world_size": 2}}, "has no options"),
        ({"on_failure": {"name": "replace", "wait_s": -1}}, "wait_s=-1: expected seconds"),
        *(
            ({"on_failure": "replace", "start_method": method}, "start_method='popen', with `.* run`")
            for method in ("spawn", "forkserver", "fork")
        ),
    ],
    ids=str,
)
def test_what_cannot_be_exact_is_refused_at_once(arguments, reason) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        CustomDDPStrategy(**{"on_failure": "shrink", **arguments})


QUIET = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
HERE = {"num_nodes": 1, "start_method": "popen", "is_external": False}
WHERE = {**HERE, "device_type": "cpu", "is_averaging": False}


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ({"num_nodes": 2, "start_method": "spawn"}, "ends all of them when one has died"),
        ({"is_external": True}, "torchrun or SLURM"),
        ({"device_type": "mps"}, "when their collectives have ended"),
        ({"device_type": "cuda", "is_averaging": True}, "only some parameters averaged"),
    ],
    ids=str,
)
def test_a_trainer_that_cannot_be_exact_is_refused_as_training_starts(place, reason) -> None:
    trainer = pl.Trainer(**QUIET)
    trainer.strategy.connect(pl.LightningModule())
    with pytest.raises(ConfigurationError, match=f"{reason}.*on_failure='stop'"):
        check_training(trainer, RecoverySettings(), **WHERE | place)


def test_new_processes_are_refused_beside_a_callback_that_tries_some_steps() -> None:
    trainer = pl.Trainer(**QUIET, callbacks=[LearningRateFinder()])
    trainer.strategy.connect(pl.LightningModule())
    check_training(trainer, RecoverySettings(), **WHERE)
    with pytest.raises(ConfigurationError, match="LearningRateFinder and new processes"):
        check_training(trainer, ReplaceSettings(), **WHERE)


def test_an_abort_ends_what_a_group_opens_and_nothing_that_a_server_of_this_process_accepts() -> None:
    with contextlib.ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_server(("127.0.0.1", 0)) as elsewhere, remember_connections():
            peer = stack.enter_context(socket.create_connection(server.getsockname()))
            accepted, _ = server.accept()
            stack.enter_context(accepted)
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            of_a_thread, of_a_child = map(stack.enter_context, socket.socketpair())
            abort_groups()  # while the group is being made
            assert peer.recv(1) == b""
            assert elsewhere.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        stranger = stack.enter_context(socket.create_connection(server.getsockname()))
        with remember_connections():
            kept, _ = server.accept()
            stack.enter_context(kept)
        abort_groups()
        stranger.sendall(b"x")
        assert kept.recv(1) == b"x"
        stack.enter_context(socket.create_connection(listener.getsockname()))
        of_a_thread.sendall(b"x")
        assert of_a_child.recv(1) == b"x"


def test_random_numbers_are_drawn_again_from_where_they_were_at_the_last_boundary() -> None:
    """Also the second normal number of a pair."""

    def draw(num_normal: int) -> tuple[Any, ...]:
        normal = numpy.random.randn(num_normal).tolist()
        return random.random(), random.gauss(0, 1), torch.rand(2).tolist(), normal

    before = states = RandomStates()
    for num_normal in (3, 1, 3, 0, 3):
        states = RandomStates(states)
        drawn = draw(num_normal)
        for _ in range(2):
            states.restore()
            assert draw(num_normal) == drawn
    before.restore()


def test_a_scaler_forgets_a_step_that_has_begun() -> None:
    scaler = torch.amp.GradScaler(device="cpu", init_scale=8.0, growth_interval=1)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for _ in range(2):
        put_scale(scaler, {**scaler.state_dict(), "scale": 8.0, "_growth_tracker": 0})
        parameter.grad = scaler.scale(parameter.detach().clone())
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert parameter.item() == 0
    assert scaler.get_scale() == 16


@pytest.mark.parametrize(
    ("most", "options", "settings", "loader", "interval"),
    [
        (192, {}, {}, {}, "step"),
        (96, {}, {"min_world_size": 2}, {}, "step"),
        (48, {}, {"min_world_size": 9}, {}, "step"),
        (96, {"accumulate_grad_batches": 2}, {}, {}, "step"),
        (100, {"max_steps": 100}, {}, {}, "step"),
        (24, {"limit_train_batches": 12}, {}, {}, "step"),
        (48, {"limit_train_batches": 0.25}, {}, {}, "step"),
        (108, {}, {}, {"batch_size": 7, "drop_last": True}, "step"),
        (110, {}, {}, {"batch_size": 7}, "step"),
        (2, {}, {}, {}, "epoch"),
        (math.inf, {"max_epochs": -1}, {}, {}, "epoch"),
        (math.inf, {"max_epochs": -1}, {}, {}, "step"),
    ],
    ids=str,
)
def test_a_schedule_that_ends_is_refused_where_few_ranks_can_reach_its_end(
    most, options, settings, loader, interval
) -> None:
    """Of 384 samples, in batches of 4 on 4 ranks, in 2 epochs: 192 steps with one rank from the beginning."""
    trainer = pl.Trainer(strategy="custom_ddp", devices=4, **QUIET | {"max_epochs": 2} | options)
    trainer.strategy.connect(pl.LightningModule())
    sampler = DistributedSampler(range(384), 4, 0)
    batches = DataLoader(range(384), sampler=sampler, **{"batch_size": 4, **loader})
    trainer.fit_loop._combined_loader = CombinedLoader(batches)
    trainer.fit_loop.max_batches = len(batches)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)

    def check(total_steps: int, **more: Any) -> None:
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=total_steps)
        trainer.strategy.lr_scheduler_configs = [LRSchedulerConfig(schedule, interval=interval)]
        check_training(trainer, RecoverySettings(**settings, **more), **WHERE)

    if most < math.inf:
        check(most)
    if interval == "step" or most == math.inf:
        end, found = (10_000, "there is no end") if most == math.inf else (most - 1, f" {most}")
        check(end, batch="global")
        with pytest.raises(ConfigurationError, match=rf"OneCycleLR.* ends after {end} steps.*{found}"):
            check(end)


@pytest.mark.parametrize(("kind", "end"), [("OneCycleLR", 4), ("SequentialLR", 7), ("ChainedScheduler", 4)])
def test_the_end_of_a_schedule_is_that_of_its_part(kind, end) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    schedules = torch.optim.lr_scheduler
    constant = schedules.ConstantLR(optimizer)
    schedule: Any = schedules.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
    if kind == "SequentialLR":
        schedule = schedules.SequentialLR(optimizer, [constant, schedule], milestones=[3])
    elif kind == "ChainedScheduler":
        schedule = schedules.ChainedScheduler([constant, schedule])
    assert end_of_schedule(schedule) == end
    for _ in range(end):
        optimizer.step()
        schedule.step()
    with pytest.raises(ValueError, match="specified number of total steps is 4"):
        schedule.step()
    assert end_of_schedule(constant) == math.inf


@pytest.mark.parametrize("fills", [True, False])
def test_a_rest_is_dealt_once_to_each_number_of_ranks(fills) -> None:
    """Ranks are lost after a few batches, again and again: each sample is used once."""

    def of_dataset(size: int, rank: int) -> Any:
        return DistributedSampler(range(97), size, rank, seed=3)

    def of_sampler(size: int, rank: int) -> Any:
        return DistributedSamplerWrapper(SequentialSampler(range(97)), num_replicas=size, rank=rank)

    kinds = (of_dataset, of_sampler)
    for sizes, make in itertools.product(([4, 3, 2, 1], [5, 2], [3, 2, 2]), kinds):
        samplers = [DealtSampler(make(sizes[0], rank), 4, fills=fills) for rank in range(sizes[0])]
        for rank, sampler in enumerate(samplers):
            sampler.set_epoch(1)
            sampler.check()
            undealt = make(sizes[0], rank)
            undealt.set_epoch(1)
            assert list(sampler) == list(undealt)
        used: Counter[int] = Counter()
        for number, size in enumerate(sizes):
            shares = [list(sampler) for sampler in samplers[:size]]
            assert len({len(share) for share in shares}) == 1 or not fills
            assert list(map(len, samplers[:size])) == list(map(len, shares))
            assert {sampler.most for sampler in samplers[:size]} == {max(map(len, shares))}
            if number + 1 == len(sizes):
                used.update(index for share in shares for index in share)
                break
            used.update(index for share in shares for index in share[:8])
            for rank, sampler in enumerate(samplers[: sizes[number + 1]]):
                sampler.deal(2 * (number + 1), rank, sizes[number + 1])
        assert set(used) == set(range(97))
        assert used.total() - 97 < (sizes[-1] if fills else 1)


class Chunks(DistributedSampler):
    """Deals the first samples to the first rank, and so on."""

    def __iter__(self) -> Any:
        return iter(range(self.rank * self.num_samples, (self.rank + 1) * self.num_samples))


class Dice(SequentialSampler):
    """Draws by a generator that nobody else knows."""

    dice = random.Random(3)

    def __iter__(self) -> Any:
        return iter(self.dice.sample(range(96), 96))


def test_samplers_whose_rest_nobody_knows_are_refused_and_others_are_left_as_they_were() -> None:
    own = RandomSampler(range(96), generator=torch.Generator().manual_seed(5))
    for inner in (
        Chunks(range(96), 3, 1),
        DistributedSamplerWrapper(Dice(range(96)), num_replicas=3, rank=1),
        DistributedSamplerWrapper(own, num_replicas=3, rank=1),
    ):
        with pytest.raises(ConfigurationError, match=r"does not give one order.*on_failure='stop'"):
            DealtSampler(inner, 4).check()
    drawn = WeightedRandomSampler([1.0, 2.0] * 48, 96)
    sampler = DealtSampler(DistributedSamplerWrapper(drawn, num_replicas=3, rank=1), 4)
    states = []
    for draw in (sampler.check, lambda: None):
        torch.manual_seed(7)
        draw()
        states.append(list(sampler))
    assert states[0] == states[1]


class Sorted(BatchSampler):
    """Has samples of like size in a batch: of two batches each."""

    def __iter__(self) -> Any:
        order = list(self.sampler)
        windows = (sorted(order[at : at + 2 * self.batch_size]) for at in range(0, len(order), 8))
        return (window[at : at + 4] for window in windows for at in (0, 4))


class Successive(Sorted):
    __iter__ = BatchSampler.__iter__


class Tokens(Sorted):
    """Has as many samples in a batch as fit in."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        del self.batch_size


def dealer_of(rank: int, mode: str = "max_size_cycle", kind: Any = BatchSampler, **lengths: int) -> Any:
    """The dealer of one of two ranks, of data loaders with so many samples."""
    loaders = {}
    for name, length in lengths.items():
        samples = DistributedSampler(range(length), 2, rank, seed=3)
        loaders[name] = DataLoader(
            range(length), batch_sampler=kind(samples, 4 if name == "alone" else 1, False)
        )
    loop = SimpleNamespace(_combined_loader=CombinedLoader(loaders, mode))
    trainer: Any = SimpleNamespace(world_size=2, lightning_module=torch.nn.Module(), fit_loop=loop)
    trainer.limit_train_batches, trainer.val_check_interval, trainer.val_check_batch = 1.0, 1.0, None
    dealer = Dealer(trainer, keeps_global=False, fills=True)
    for loader in loaders.values():
        dealer.adopt(loader)
    return dealer


@pytest.mark.parametrize("kind", [Sorted, Tokens])
def test_batches_that_are_not_successive_samples_are_refused(kind) -> None:
    dealer_of(1, kind=Successive, alone=97)
    with pytest.raises(ConfigurationError, match=f"{kind.__name__} cannot be .*on_failure='stop'"):
        dealer_of(1, kind=kind, alone=96)


@pytest.mark.parametrize(
    ("mode", "num_before", "num_in_all"),
    [
        ("min_size", 5, 5 + 6),
        ("max_size", 5, 5 + 30),
        ("max_size", 12, 12 + 16),
        ("max_size_cycle", 5, 5 + 30),
        ("max_size_cycle", 8, 8 + 24),
        ("max_size_cycle", 12, 12 + 16),
        ("max_size_cycle", 19, 19 + 2),
    ],
)
def test_each_of_several_loaders_is_dealt_from_where_it_is(mode, num_before, num_in_all) -> None:
    """One of two ranks is lost, once the shorter loader has begun again or before; another one joins."""
    dealers = [dealer_of(rank, mode, a=16, b=40) for rank in range(2)]
    used: dict[str, list[int]] = {"a": [], "b": []}

    def train(dealer: Any, num_batches: int) -> None:
        for batch, _, _ in itertools.islice(dealer._trainer.fit_loop._combined_loader, num_batches):
            for name in used:
                used[name] += [] if batch[name] is None else batch[name].tolist()

    for dealer in dealers:
        train(dealer, num_before)
    first, second = dealers
    first.deal(num_before, 0, 1)
    limit_epoch(first._trainer, num_before)
    assert first._trainer.fit_loop.max_batches == num_in_all
    second.load(first.state())
    for dealer in (second, first):  # as it would be dealt if that one were alone
        dealer.deal(num_before, 0, 1)
        limit_epoch(dealer._trainer, num_before)
        assert dealer._trainer.fit_loop.max_batches == num_in_all
    train(first, num_in_all - num_before)
    counts = {name: Counter(samples) for name, samples in used.items()}
    longest = "a" if mode == "min_size" else "b"
    assert set(counts[longest].values()) == {1}
    assert len(counts[longest]) == {"a": 16, "b": 40}[longest]
    assert max(counts["a"].values()) - min(counts["a"].values()) <= 1, "each round has all of them"
    assert len(counts["a"]) == 16


def test_a_fraction_of_an_epoch_that_has_become_shorter_ends_at_the_next_batch() -> None:
    trainer = dealer_of(0, a=40)._trainer
    trainer.limit_train_batches = 0.5
    for num_used, num_batches in ((0, 10), (15, 17), (25, 26)):
        limit_epoch(trainer, num_used)
        assert trainer.fit_loop.max_batches == num_batches


def test_a_batch_of_one_sample_gets_another_one_for_batch_normalisation() -> None:
    """Of 97 samples 16 are used; the rest, and all in the next epoch, are dealt to fewer ranks."""
    for size, batch, lengths in ((3, 4, (27, 33 + 1)), (2, 4, (41 + 1, 49 + 1)), (3, 26, (27 + 1, 33))):
        for avoids_one in (False, True):
            sampler = DealtSampler(DistributedSampler(range(97), 4, 0), batch, avoids_one=avoids_one)
            sampler._num_used = 16
            sampler.deal(0, 0, size)
            found = [len(sampler), len(list(sampler))]
            sampler.set_epoch(1)
            found += [len(sampler), len(list(sampler))]
            plain = [math.ceil(81 / size), math.ceil(97 / size)]
            expected = lengths if avoids_one else plain
            assert found == [expected[0]] * 2 + [expected[1]] * 2
