"""A rank is killed, and training goes on: real processes, SIGKILL, and a ledger of what each rank did."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections import defaultdict
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import exhaustive, run_ranks, slow, store_elsewhere
from harness.ledger import EPOCHS, SAMPLES, fault, hash_of, logged_rows, require_same, train
from torch import nn

from lightning_ddp import BucketedDDP
from lightning_ddp.comm.activity import Interrupt
from lightning_ddp.elastic.recovery import _forget_frames
from lightning_ddp.elastic.regroup import meet_again
from lightning_ddp.errors import LightningDDPError, PeerFailure
from lightning_ddp.launch.step_stop import PREEMPTED

MOMENTS = (
    "loader",
    "forward",
    "before the first bucket",
    "between buckets",
    "last bucket",
    "after backward",
    "optimizer",
    "batch end",
    "validation",
    "checkpoint",
    "epoch end",
    "sanity check",
)
STEP = {"validation": 6, "checkpoint": 4, "epoch end": 6, "sanity check": 0}
"""At which step a moment comes; 3 for the others."""


HOOKS = {
    **{name: name for name in ("allreduce", "fp16", "bf16", "int8", "fp8")},
    "powersgd": {"name": "powersgd", "start_step": 1},
    "batched powersgd": {"name": "powersgd", "start_step": 1, "batched": True},
    "topk": {"name": "topk", "ratio": 0.1, "momentum": 0.9},
    "randomk in int8": ["int8", {"name": "randomk", "ratio": 0.1, "momentum": 0.9}],
    "sign": {"name": "sign", "momentum": 0.9},
}


CELLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a scale that overflows": ({"overflows": 2}, {}),
    "accumulation, EMA, checkpoints, workers": (
        {
            "callbacks": True,
            "validates": True,
            "loader": {"num_workers": 1, "persistent_workers": True},
            "trainer": {"accumulate_grad_batches": 2},
            "scheduler": ["ReduceLROnPlateau", {"patience": 0, "threshold": 100.0}],
        },
        {"window": 2, "rates": "any"},
    ),
    "max_steps and val_check_interval": (
        {
            "validates": True,
            "estimates": True,
            "trainer": {"max_steps": 6, "val_check_interval": 3},
            "scheduler": ["OneCycleLR", {"max_lr": 0.1, "total_steps": 6}],
        },
        {"rates": "any", "is_whole": False},
    ),
    "limit_train_batches": ({"trainer": {"limit_train_batches": 5}}, {"is_whole": False}),
    "new loaders, each epoch, of a sampler that draws": (
        {"draws": True, "hooks": True, "trainer": {"reload_dataloaders_every_n_epochs": 1}},
        {},
    ),
    "windows of two batches and a rate of each step": (
        {"trainer": {"accumulate_grad_batches": 2}},
        {"window": 2},
    ),
    "a parameter group that the step has added": ({"adds_group": 2}, {}),
}


EXCEPTIONS = {"on_failure": {"name": "shrink", "exceptions": True}}
LOST: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # gloo wakes no thread that waits for the rest of a message, and a group waits for its threads
    "while it sends": (fault(2, "forward", 3), {"sends": 3, "strategy": {"transport": "gloo"}}),
    # some when the optimizer has moved the weights already
    "in a second backward": (fault(1, "second forward", 3), {"optimizer": "SharpnessAware"}),
    "in a second backward of the first step": (fault(1, "second forward", 0), {"optimizer": "LBFGS"}),
    "in the last batch of the last epoch": (fault(2, "between buckets", 15), {}),
    "with code 0": (fault(2, "forward", 3, how="exit"), {}),
    "stopped": (fault(2, "forward", 3, how="stop"), {"stall_s": 5.0}),
    "by an exception": (fault(2, "forward", 3, how="raise"), {"strategy": EXCEPTIONS}),
    "by an exception in validation": (
        fault(2, "validation", 8, how="raise"),
        {"validates": True, "strategy": EXCEPTIONS},
    ),
    **{
        moment: (fault(2, moment, 0), {"hooks": True})
        for moment in ("fit start", "train start", "val dataloader")
    },
    **{
        f"with hook {name}": (
            fault(2, ("last bucket", "between buckets", "before the first bucket")[number % 3], 3),
            {"strategy": {"ddp_comm_hook": hook}, "optimizer": "SGD"},
        )
        for number, (name, hook) in enumerate(HOOKS.items())
    },
    **{
        cell: (fault(1, ("between buckets", "optimizer")[number % 2], 2), order)
        for number, (cell, (order, _)) in enumerate(CELLS.items())
    },
}
"""How one of three ranks is lost, and what else the order says."""
TIERS = {
    **dict.fromkeys(LOST, pytest.mark.slow),
    **dict.fromkeys(("while it sends", "in a second backward"), ()),
    # hooks without a state, and the same state in another shape
    **{f"with hook {name}": pytest.mark.exhaustive for name in ("allreduce", "fp16", "bf16", "fp8")},
    "with hook batched powersgd": pytest.mark.exhaustive,
    "with code 0": pytest.mark.exhaustive,  # as rank 0 is lost in test_replace
    "train start": pytest.mark.exhaustive,
}


@pytest.mark.parametrize("how", [pytest.param(how, marks=TIERS[how]) for how in LOST])
def test_the_others_go_on_without_a_rank_that_is_lost(how, tmp_path) -> None:
    lost, order = LOST[how]
    _, checks = CELLS.get(how, ({}, {}))
    ledger = train(tmp_path, devices=3, faults=[lost], **order)
    ledger.check([place for place in range(3) if place != lost["place"]], **checks)
    assert {tuple(entry["sizes"]) for entry in ledger.changes} == {(3, 2)}
    num_steps = len(ledger.by_step())
    if lost["step"] == 0 or lost["moment"] == "second forward" or "sends" in order:
        assert {entry["step"] for entry in ledger.changes} == {lost["step"]}
    if lost["moment"] == "second forward":
        again = [entry["step"] for entry in ledger.of("tries", 0) if entry["generation"] == 1]
        assert again[0] == lost["step"], "it begins with the weights it had"
    if lost.get("how") == "raise":
        assert all("ValueError: a picture is broken" in entry["cause"] for entry in ledger.changes)
    if "callbacks" in order:
        saved = [tmp_path / f"step={step}.ckpt" for step in range(2, num_steps + 1, 2)]
        assert sorted(tmp_path.glob("*.ckpt")) == sorted(saved)
    if not checks.get("is_whole", True):
        assert num_steps == (6 if "max_steps" in how else 2 * 5)


@pytest.mark.parametrize("fits", ["again", slow("with another Trainer")])
def test_two_of_three_go_on_and_test_what_they_have_trained_and_no_other_fit_begins(fits, tmp_path) -> None:
    order = {"devices": 3, "faults": [fault(1, "forward", 3)], "tests": True, "fits": fits, "logs": True}
    ledger = train(tmp_path, refusal="ConfigurationError: on_failure: this script has lost", **order)
    ledger.check([0, 2])
    assert {(entry["world_size"], entry["mean"]) for entry in ledger.of("tests")} == {(2, (SAMPLES - 1) / 2)}
    assert [entry["is_deaf"] for entry in ledger.of("test begins")] == [False, False]
    rows = [row for row in logged_rows(tmp_path) if row["recovery/count"]]
    assert [(row["recovery/count"], row["recovery/world_size"], row["step"]) for row in rows] == [
        ("1.0", "2.0", "3")
    ]


def test_a_signal_to_stop_holds_for_those_that_are_left(tmp_path) -> None:
    ledger = train(tmp_path, code=PREEMPTED, devices=3, faults=[fault(2, "loader", 3, how="preempted")])
    assert [entry["place"] for entry in ledger.of("excepts")] == [0, 1]
    (steps,) = {max(entry["step"] for entry in ledger.commits if entry["place"] == place) for place in (0, 1)}
    assert steps <= 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "place"),
    [
        pytest.param(*cell, marks=() if i % 3 == i // 3 % 3 else pytest.mark.exhaustive)
        for i, cell in enumerate(itertools.product(MOMENTS, (1, 2, 3)))
    ],
)
def test_the_others_go_on_at_the_step_that_was_interrupted(moment, place, tmp_path) -> None:
    trainer = {"num_sanity_val_steps": 2 * (moment == "sanity check")}
    order = {"validates": moment in STEP, "checkpoints": {"every_n_train_steps": 2}, "trainer": trainer}
    ledger = train(tmp_path, faults=[fault(place, moment, STEP.get(moment, 3))], **order)
    ledger.check([other for other in range(4) if other != place])
    assert {tuple(entry["sizes"]) for entry in ledger.changes} == {(4, 3)}
    assert {tuple(entry["lost"]) for entry in ledger.changes} == {(place,)}
    for other in set(range(4)) - {place}:
        ends = [entry["epoch"] for entry in ledger.of("ends epoch") if entry["place"] == other]
        assert sorted(set(ends)) == [0, 1]
        assert len(ends) <= 2 + (moment == "epoch end")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start_method", "place"),
    [("spawn", 0), ("fork", 0), exhaustive("spawn", 2), exhaustive("forkserver", 0)],
)
def test_the_process_that_waits_for_its_ranks_gets_what_the_lowest_of_those_left_has(
    start_method, place, tmp_path
) -> None:
    order = {"devices": 3, "strategy": {"start_method": start_method}, "checkpoints": {"monitor": "val"}}
    moments = {0: "between buckets", 2: "optimizer"}
    how = {} if start_method == "spawn" else {"how": "exit"}
    ledger = train(tmp_path, faults=[fault(place, moments[place], 3, **how)], validates=True, **order)
    ledger.check([other for other in range(3) if other != place])
    (result,) = ledger.of("ends")
    assert result["place"] == -1
    *_, last = ledger.by_step().values()
    assert result["parameters"] == last[0]["parameters"]
    assert {"loss_epoch", "val", "end of epoch"} <= set(result["metrics"])
    assert Path(result["best"]).is_file()


@pytest.mark.slow
def test_hooks_that_may_not_be_called_twice_end_the_run_where_they_wait_for_a_lost_rank(tmp_path) -> None:
    text = "cannot continue: "
    ledger = train(tmp_path, text, devices=3, agrees=True, faults=[fault(2, "train start", 0)])
    assert len(ledger.of("starts")) == 3
    assert ledger.commits == []


def test_what_the_frames_of_an_error_held_goes_with_them_without_the_garbage_collector() -> None:
    held: list[weakref.ref[Any]] = []

    def communicate() -> None:
        group = torch.zeros(1)
        held.append(weakref.ref(group))
        try:
            raise RuntimeError("Connection closed by peer")
        except RuntimeError as error:
            first = error  # a cycle: the error, its frames, and this one with its variables
            raise LightningDDPError("all_reduce failed") from first

    gc.disable()
    try:
        try:
            communicate()
        except LightningDDPError as error:
            _forget_frames(error, None)
        assert held[0]() is None
    finally:
        gc.enable()


@pytest.mark.slow
def test_one_recovery_after_the_other_holds_no_more_than_the_first(tmp_path) -> None:
    kills = [fault(place, MOMENTS[place % 4 + 3], 2 * (6 - place)) for place in range(5, 0, -1)]
    ledger = train(tmp_path, devices=6, faults=kills)
    ledger.check([0])
    assert ledger.sizes_of(0) == [[6, 5], [5, 4], [4, 3], [3, 2], [2, 1]]
    held = [entry["held"] for entry in ledger.of("changes", 0)]
    # threads of the groups before may still be about to end
    most = [max(each) for each in zip(*held[:-1], strict=True)]
    assert all(after <= before for before, after in zip(most, held[-1], strict=True)), held


@pytest.mark.slow
def test_two_that_are_killed_while_the_others_meet_or_as_soon_as_they_have_are_left_behind(tmp_path) -> None:
    first = fault(4, "forward", 1), fault(3, "regroup", 1)
    second = fault(2, "forward", 3), fault(1, "forward", 3, generation=3)
    ledger = train(tmp_path, devices=5, faults=[*first, *second])
    ledger.check([0])
    assert len(ledger.of("dies")) == 4
    changes = [(*entry["sizes"], *entry["lost"]) for entry in ledger.of("changes", 0)]
    assert changes == [(5, 3, 3, 4), (3, 2, 2), (2, 1, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("moments", [("forward", "forward"), ("checkpoint", "optimizer")], ids=str)
def test_two_that_are_killed_at_one_step_are_left_behind(moments, tmp_path) -> None:
    faults = [fault(place, moment, 4) for place, moment in zip((1, 3), moments, strict=True)]
    ledger = train(tmp_path, faults=faults, checkpoints={"every_n_train_steps": 2})
    ledger.check([0, 2])
    assert ledger.sizes_of(0) in ([[4, 2]], [[4, 3], [3, 2]]), "one recovery if the second is seen in time"
    assert len(list((tmp_path / "saved").glob("*.ckpt"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("keeps", ["new", exhaustive("world")])
def test_a_process_group_that_was_kept_from_before_is_refused(keeps, tmp_path) -> None:
    """The lost rank was a member of the second, and not of the first."""
    faults = [fault(2, "before the first bucket", 2)]
    words = "Do not keep torch.distributed.group.WORLD"
    ledger = train(tmp_path, words, devices=3, keeps=keeps, faults=faults)
    assert any("was created before ranks were lost" in entry["text"] for entry in ledger.of("excepts"))


def test_who_meets_the_others_again_learns_of_a_failure_where_the_store_is_gone() -> None:
    """torch tries to reach it until the store's timeout, of minutes."""
    with store_elsewhere() as (known, _):
        store = dist.TCPStore("127.0.0.1", known.port, is_master=False, timeout=timedelta(seconds=2))
    control = SimpleNamespace(calls=SimpleNamespace(), interrupt=Interrupt())
    session: Any = SimpleNamespace(store=store, control=control)
    timer = threading.Timer(0.5, control.interrupt.set, [PeerFailure(rank=-1, message="it is gone")])
    timer.start()
    limit, device = timedelta(seconds=10), torch.device("cpu")
    with pytest.raises(PeerFailure, match="it is gone"):
        meet_again(session, "gloo", 2, timeout=None, meet_within=limit, device=device)
    for thread in {*threading.enumerate()} - {threading.current_thread()}:
        if thread is timer or thread.name == "lightning_ddp call":
            thread.join()


@pytest.mark.slow
def test_ranks_that_wait_for_one_to_connect_go_on_when_it_is_killed(tmp_path) -> None:
    """Before and after it has said where it is reached, which is where gloo waits for 15 s."""
    faults = [fault(4, "forward", 1), fault(3, "once it could be reached", 1)]
    faults += [fault(2, "forward", 3), fault(1, "before it can be reached", 3)]
    ledger = train(tmp_path, devices=5, faults=faults, stall_s=4.0)
    ledger.check([0])
    assert len(ledger.of("dies")) == 4
    assert max(entry["seconds"] for entry in ledger.changes) < 10
    changes = [(*entry["sizes"], *entry["lost"]) for entry in ledger.of("changes", 0)]
    assert changes == [(5, 3, 3, 4), (3, 1, 1, 2)]


@pytest.mark.slow
def test_a_sample_that_ends_whoever_reads_it_ends_the_run(tmp_path) -> None:
    """The second time it comes to another rank, in the next step as there are fewer ranks."""
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(1))
    strategy = {**EXCEPTIONS, "emergency_checkpoint": str(tmp_path)}
    train(tmp_path, "step 4 failed twice in the same way", strategy=strategy, poison=int(order[3 * 16 + 14]))
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["emergency-step=4.ckpt"]


@pytest.mark.slow
def test_the_last_step_is_saved_where_the_others_do_not_go_on(tmp_path) -> None:
    limits = {"name": "shrink", "min_world_size": 3}
    strategy = {"on_failure": limits, "emergency_checkpoint": str(tmp_path / "last")}
    order = {"devices": 3, "strategy": strategy}
    ledger = train(tmp_path, "fewer than min_world_size", faults=[fault(1, "forward", 3)], **order)
    checkpoint = torch.load(tmp_path / "last" / "emergency-step=3.ckpt", weights_only=False)
    assert checkpoint["global_step"] == 3
    commits = ledger.of("commits", 0)
    names = [name for name in checkpoint["state_dict"] if "running" not in name and "num_batches" not in name]
    assert hash_of(checkpoint["state_dict"][name] for name in names) == commits[-1]["parameters"]


@pytest.mark.slow
def test_a_rank_that_is_a_step_behind_copies_the_state(tmp_path) -> None:
    """Rank 3 dies once rank 0 has taken its step; rank 1 has its means on the way, and sleeps."""
    order = {"late": [1, 3], "strategy": {"transport": "gloo", "ddp_comm_hook": HOOKS["powersgd"]}}
    ledger = train(tmp_path, faults=[fault(3, "optimizer", 3, after=0)], **order)
    ledger.check([0, 1, 2])
    ledger.check_behind()


@pytest.mark.slow
def test_a_validation_at_whose_end_a_rank_is_late_is_repeated_by_all(tmp_path) -> None:
    """Rank 1 is late where rank 2 dies; rank 0 would go on to the next step."""
    order = {"validates": True, "late_in_validation": 4, "trainer": {"val_check_interval": 4}}
    ledger = train(tmp_path, devices=3, faults=[fault(2, "validation end", 4)], **order)
    ledger.check([0, 1])
    for entries in ledger.by_step().values():
        require_same(entries, ["val"])


@pytest.mark.slow
def test_weights_that_a_callback_swaps_for_validation_are_in_their_places_after_it(tmp_path) -> None:
    order = {"devices": 3, "validates": True, "callbacks": True}
    ledger = train(tmp_path, faults=[fault(1, "validation", 8)], **order)
    ledger.check([0, 2], rates="any")
    weighed = defaultdict(list)
    for entry in ledger.of("weighs"):
        weighed[entry["place"], entry["step"]].append(tuple(entry["weights"]))
    assert {place: len(weighed[place, 8]) for place in range(3)} == {0: 3, 1: 1, 2: 3}
    assert all(len(set(weights)) == 1 for weights in weighed.values())


@pytest.mark.slow
def test_no_sample_is_repeated_where_ranks_may_run_out_of_batches(tmp_path) -> None:
    """Of 48 samples no batch is left over; then 49 are dealt to three ranks, of which one has a batch more.

    In that last step the others repeat theirs, and one of them is killed.
    """
    faults = [fault(3, "between buckets", 3), fault(1, "forward", 7), fault(2, "optimizer", 12)]
    order = {"samples": 97, "plain": True, "deals": "in turn", "estimates": True}
    ledger = train(tmp_path, faults=faults, strategy={"uneven_inputs": "join"}, **order)
    assert ledger.ended == [0]
    assert ledger.of("excepts") == []
    steps = ledger.check_steps("any")
    for entries in steps.values():
        require_same(entries)
    assert any(entry["repeats"] for entry in ledger.of("tries"))
    ledger.check_samples(steps, num_samples=97, most_repeated=0)


def test_a_trainer_fits_again_after_a_failure_that_the_script_has_caught(tmp_path) -> None:
    faults = [fault(1, "forward", 3, how="raise")]
    ledger = train(tmp_path, devices=2, catches=True, faults=faults)
    assert ledger.ended == [0, 1]
    assert len(ledger.of("excepts")) == 2
    assert {entry["step"] for entry in ledger.of("ends")} == {3 + EPOCHS * SAMPLES // 8}


@pytest.mark.slow
def test_a_validation_in_an_accumulation_window_is_repeated_with_the_window(tmp_path) -> None:
    trainer = {"accumulate_grad_batches": 2, "val_check_interval": 3}
    order = {"devices": 3, "validates": True, "trainer": trainer}
    ledger = train(tmp_path, faults=[fault(1, "validation", 1)], **order)
    ledger.check([0, 2], window=2)
    again = [entry["batch"] for entry in ledger.of("tries") if entry["generation"] == 1]
    assert again[0] == 2, "the gradients of the first batch of the window are gone"


def repeat_without_losses(rank: int, world_size: int, folder: Path, batches: list[list[Any]]) -> str:
    """The steps of a run by those that were left of it, from its state before the step that was lost."""
    net = nn.Sequential(
        nn.Linear(8, 16), nn.Identity(), nn.ReLU(), nn.Identity(), nn.Linear(16, 16), nn.Linear(16, 1)
    )
    model = BucketedDDP(net, bucket_cap_mb_list=[0.0001])
    optimizer = torch.optim.AdamW(net.parameters())
    for loaded, state in zip((net, optimizer), torch.load(folder / "state.pt"), strict=True):
        loaded.load_state_dict(state)
    for ids in batches[rank]:
        samples = [torch.randn(8, generator=torch.Generator().manual_seed(index)) for index in ids]
        optimizer.zero_grad()
        (model(torch.stack(samples)).square().mean() + net[0].weight.square().mean()).backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.9
    return hash_of(net.parameters())


def test_those_that_are_left_train_as_if_they_had_been_alone_since_the_step_before(tmp_path) -> None:
    ledger = train(tmp_path, devices=3, faults=[fault(1, "between buckets", 3)], plain=True, saves=3)
    ledger.check([0, 2])
    batches = [[e["ids"] for e in ledger.commits if e["generation"] and e["rank"] == rank] for rank in (0, 1)]
    (found,) = set(run_ranks(repeat_without_losses, 2, tmp_path, batches))
    assert found == ledger.commits[-1]["parameters"]


LOCAL = [
    pytest.param(name, *moment, marks=pytest.mark.exhaustive if (place + number) % 3 else ())
    for place, name in enumerate(
        ("post_local_sgd", "slowmo", "diloco", "hierarchical_sgd", "streaming_diloco")
    )
    for number, moment in enumerate(
        [("forward", 7), ("between buckets", 2), ("optimizer", 8), ("batch end", 6)]
    )
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "moment", "step"), LOCAL)
def test_local_training_goes_back_to_the_last_round_and_uses_each_sample_once(
    name, moment, step, tmp_path
) -> None:
    """Rounds follow steps 5, 8 and so on; the loss at step 2 comes before local training.

    The loss of neighbours meets the third rank alone, or in a round of two.
    """
    options, lost = {"name": name, "period": 3, "start_step": 3}, 2
    if name == "hierarchical_sgd":
        options, lost = {"name": name, "periods": {1: 2, 3: 0}, "start_step": 3}, 3
    if name == "streaming_diloco":  # an exchange begins after step 4, 6 ..., and ends one step later
        options = {"name": name, "period": 4, "num_fragments": 2, "start_step": 3}
    order = {"devices": lost + 1, "strategy": {"model_averaging": options}, "slow": [[1, step - 1]]}
    if moment == "batch end" and name != "streaming_diloco":
        order["late_in_round"] = 1
    ledger = train(tmp_path, faults=[fault(lost, moment, step)], **order)
    assert len(ledger.of("waits")) == ("late_in_round" in order)
    ledger.check_rounds(lost, lambda n: n < 3 or (n % 3 == 2 and name != "streaming_diloco"))


@pytest.mark.slow
def test_a_rank_finishes_a_round_only_when_all_ranks_can(tmp_path) -> None:
    """Without buffers nothing but the exchange that began three steps before makes it wait for the others."""
    options = {"name": "streaming_diloco", "period": 8, "num_fragments": 2, "delay": 3, "start_step": 3}
    order = {"devices": 3, "strategy": {"model_averaging": options}, "plain": True}
    order.update(samples=192, slow=[[1, 7]])
    ledger = train(tmp_path, faults=[fault(2, "forward", 10)], **order)
    ledger.check_rounds(2, lambda number: number < 3, num_samples=192)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "moment", "step"),
    [
        ("post_local_sgd", "validation", 6),
        ("diloco", "checkpoint", 4),
        ("slowmo", "forward", 5),
        exhaustive("streaming_diloco", "checkpoint", 4),
    ],
)
def test_a_round_ends_where_the_ranks_agree_for_validation_or_a_checkpoint(
    name, moment, step, tmp_path
) -> None:
    """No step before that is undone. Those after it are, with all that their batches have changed."""
    options = {"name": name, "period": 4, "start_step": 0}
    order = {"devices": 3, "callbacks": True, "validates": True, "strategy": {"model_averaging": options}}
    order["trainer"] = {"val_check_interval": 3}
    order["scheduler"] = ["StepLR", {"step_size": 3, "gamma": 0.5}]
    if name == "streaming_diloco":
        options["num_fragments"] = 2
    ledger = train(tmp_path, faults=[fault(2, moment, step)], **order)
    is_common = (lambda number: False) if name == "streaming_diloco" else (lambda number: number % 4 == 3)
    ledger.check_rounds(2, is_common, rate=lambda step: 0.01 * 0.5 ** ((step + 1) // 3))
    (change,) = ledger.of("changes", 0)
    assert step - 2 <= change["step"] <= step
