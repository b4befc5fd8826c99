"""A rank is killed, the others go on, and a new process takes its place while they train."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict
from typing import Any

import pytest
import torch
from harness import RUN, exhaustive, run_script
from harness.ledger import fault, logged_rows, replace, require_same, train
from test_shrink import CELLS, HOOKS, MOMENTS


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), RUN], ids=["python", "run"])
def test_a_lost_rank_is_replaced_while_the_others_train(launcher, tmp_path) -> None:
    ledger = replace(tmp_path, fault(1, "forward", 3), launcher=launcher, told=True)
    ledger.check_members(3)
    assert [ledger.sizes_of(place) for place in range(3)] == [[[3, 2], [2, 3]], [[2, 3]], [[3, 2], [2, 3]]]
    joined = [entry for entry in ledger.changes if entry["joined"]]
    assert {(tuple(entry["joined"]), entry["cause"], entry["retried"]) for entry in joined} == {
        ((1,), "None", False)
    }
    assert {entry["text"] for entry in ledger.of("is told")} == {"of 0"}
    assert len(ledger.of("is told")) == 4
    before, after = (entry["modules"] for entry in ledger.of("changes", 0))
    assert after - before < 20  # nobody imports while all wait


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moments", "num_generations"),
    [
        (["setup", "receiving"], 4),
        (["train start", "first step"], 6),
        exhaustive(["begin"] * 5, 2),
        exhaustive(["journal"] * 5, 2),
    ],
    ids=str,
)
def test_a_new_process_that_dies_delays_nobody_and_is_replaced(moments, num_generations, tmp_path) -> None:
    """In each phase: before it has met the others, with a part of their state, and as a member."""
    order = {"new_faults": moments, "until_generation": num_generations, "told": True}
    ledger = replace(tmp_path, fault(1, "forward", 3), launcher=RUN, **order)
    ledger.check_members(3)
    assert [entry["moment"] for entry in ledger.of("dies") if "moment" in entry] == moments


@pytest.mark.slow
def test_a_new_process_has_the_results_of_a_part_of_the_setup_that_was_repeated_once(tmp_path) -> None:
    kill = fault(1, "train dataloader", 0, new=False)
    ledger = replace(tmp_path, kill, launcher=RUN, hooks=True, told=True)
    ledger.check_members(3)
    assert [entry["name"] for entry in ledger.of("makes", 0)].count("train") == 2


@pytest.mark.slow
@pytest.mark.parametrize("uneven_inputs", [None, "join"])
def test_a_new_process_makes_dataloaders_anew_when_the_others_do(uneven_inputs, tmp_path) -> None:
    """Those of the epoch in which it joins, and then with the others."""
    order = {"trainer": {"reload_dataloaders_every_n_epochs": 1}, "hooks": True, "plain": True}
    order["strategy"] = {"uneven_inputs": uneven_inputs}
    ledger = replace(tmp_path, fault(1, "forward", 10), launcher=RUN, **order)
    ledger.check_members(3)
    (joined,) = {entry["step"] for entry in ledger.changes if entry["joined"]}
    begun = next(entry["epoch"] for entry in ledger.commits if entry["step"] >= joined)
    for name in ("train", "val"):
        made = [
            [entry["epoch"] for entry in ledger.of("makes", place) if entry["name"] == name]
            for place in (0, 1)
        ]
        assert made[1][-1] == made[0][-1] >= begun


@pytest.mark.slow
def test_a_process_that_has_joined_repeats_a_validation_without_another(tmp_path) -> None:
    kills = fault(1, "forward", 2), fault(2, "validation", None, generation=2)
    ledger = replace(tmp_path, *kills, launcher=RUN, validates=True)
    ledger.check_members(3)
    assert ledger.sizes_of(1) == [[2, 3], [3, 2], [2, 3]]


@pytest.mark.slow
def test_a_global_batch_is_that_of_a_run_without_losses(tmp_path) -> None:
    """Split unevenly over fewer and then over more again: the parameters are those of an undisturbed run."""
    options = {"name": "replace", "batch": "global"}
    order = {"plain": True, "double": True, "strategy": {"on_failure": options}, "devices": 4, "samples": 81}
    folders = [tmp_path / name for name in ("disturbed", "undisturbed")]
    for folder in folders:
        folder.mkdir()
    disturbed = replace(folders[0], fault(1, "forward", 2), launcher=RUN, **order)
    disturbed.check_members(4, rates="any", num_samples=81)
    num_epochs = 1 + max(entry["epoch"] for entry in disturbed.commits)
    order.update(trainer={"max_epochs": num_epochs}, until_generation=99)
    undisturbed = replace(folders[1], launcher=RUN, **order)
    assert len(disturbed.by_step()) == len(undisturbed.by_step())
    ends = [torch.load(folder / "end-0.pt") for folder in folders]
    for name, value in ends[0].items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(value, ends[1][name], rtol=1e-9, atol=1e-9)
    assert disturbed.sizes_of(0) == [[4, 3], [3, 4]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "seconds", "stall_s"), [(1, 20, 4.0), exhaustive(2, 600, 1.0), exhaustive(3, 600, 1.0)]
)
def test_random_faults_of_all_ranks_cost_no_step_and_no_sample(seed, seconds, stall_s, tmp_path) -> None:
    """Killed, stopped, ended by an exit code, an exception: rank 0 as well, on average each 4 s."""
    print(f"seed {seed}")
    options = {"name": "replace", "max_recoveries": 1000, "exceptions": True}
    ledger = replace(
        tmp_path,
        launcher=RUN,
        devices=4,
        stall_s=stall_s,
        timeout_s=seconds + 1440.0,
        until_generation=10**6,
        chaos={"seed": seed, "mean_s": 4.0, "seconds": seconds},
        samples=1200,
        plain=True,  # BatchNorm is spared a batch of one by samples that are repeated
        strategy={"on_failure": options},
        scheduler=["ConstantLR", {"factor": 1.0}],
    )
    ledger.check_members(4, rates="any", num_samples=1200)
    kinds = Counter(entry["kind"] for entry in ledger.of("dies"))
    assert kinds.total() >= 1 + seconds // 60
    times = sorted(max(entry["time"] for entry in entries) for entries in ledger.by_step().values())
    gaps = [after - before for before, after in itertools.pairwise(times)]
    goodput = len(gaps) * statistics.median(gaps) / sum(gaps)
    print(f"{dict(kinds)}, {len(times)} steps, goodput {goodput:.0%}")


@pytest.mark.exhaustive
def test_fifty_losses_leave_no_descriptor_thread_arena_or_process_behind(tmp_path) -> None:
    kills = [fault(1 + i % 3, MOMENTS[i % 4 + 3], None, generation=2 * i) for i in range(50)]
    strategy = {"on_failure": {"name": "replace", "max_recoveries": 1000}}
    order = {"devices": 4, "timeout_s": 2000.0, "scheduler": ["ConstantLR", {"factor": 1.0}]}
    ledger = replace(tmp_path, *kills, launcher=RUN, strategy=strategy, **order)
    ledger.check_members(4, rates="any")
    changes = ledger.of("changes", 0)
    assert sum(len(entry["lost"]) for entry in changes) == len(kills)
    whole = [entry for entry in changes if entry["sizes"][1] == 4]
    first, last = whole[2:12], whole[-10:]
    print([entry["held"] for entry in whole], [round(entry["rss_mib"]) for entry in whole])
    for name in ("held", "processes"):
        assert max(entry[name] for entry in last) <= max(entry[name] for entry in first), name
    grown = min(entry["rss_mib"] for entry in last) - min(entry["rss_mib"] for entry in first)
    assert grown < 10, [entry["rss_mib"] for entry in whole]


PLAIN = """
import sys
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

path, devices, max_epochs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2),
            nn.Linear(16, 16), nn.Linear(16, 1),
        )

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def on_train_start(self):
        kept = torch.load(path, weights_only=True)
        assert self.global_step == kept["global_step"], self.global_step
        for name, value in self.state_dict().items():
            assert torch.equal(value, kept["state_dict"][name]), name
        rate = self.optimizers().param_groups[0]["lr"]
        assert rate == kept["optimizer_states"][0]["param_groups"][0]["lr"]

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

if __name__ == "__main__":
    trainer = pl.Trainer(
        accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto", max_epochs=max_epochs,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(96, 8)), batch_size=4), ckpt_path=path)
    assert "lightning_ddp" not in sys.modules
    if trainer.is_global_zero:
        print(f"ended in epoch {trainer.current_epoch} at step {trainer.global_step}")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("size", "num_ranks"), [(2, 1), exhaustive(3, 2)], ids=["shrunk", "grown"])
def test_a_checkpoint_of_a_run_that_shrank_and_grew_goes_on_with_any_number_of_ranks(
    size, num_ranks, tmp_path
) -> None:
    """In plain Lightning, in processes without this package, and with it."""
    saving = {"every_n_train_steps": 2, "save_top_k": -1, "filename": "{step}"}
    ledger = replace(tmp_path, fault(1, "forward", 3), launcher=RUN, checkpoints=saving)
    ledger.check_members(3)
    # saved after a step, so that it has one more
    saved = {int(path.stem.removeprefix("step=")): path for path in (tmp_path / "saved").glob("*.ckpt")}
    first = {step: entries[0] for step, entries in ledger.by_step().items() if entries[0]["generation"]}
    begun = min(step for step in saved if step - 1 in first and first[step - 1]["world_size"] == size)
    path = str(saved[begun])
    num_epochs = torch.load(path, weights_only=True)["epoch"] + 2
    result = run_script(PLAIN, [path, str(num_ranks), str(num_epochs)]).check()
    plain = [line for line in result.stdout.splitlines() if line.startswith("ended")]
    assert plain, result.stdout
    folder = tmp_path / "resumed"
    folder.mkdir()
    resumed = train(folder, devices=num_ranks, resumes=path, trainer={"max_epochs": num_epochs})
    assert len(resumed.by_step()[begun]) == num_ranks
    assert plain == [f"ended in epoch {num_epochs} at step {max(resumed.by_step()) + 1}"]


@pytest.mark.slow
def test_rank_0_is_replaced_as_well_and_who_sends_the_state_may_die(tmp_path) -> None:
    """Under `run` it ends with code 0; the lowest that is left dies as it sends its state to a new one."""
    # both may join in the fourth generation, or one in the fifth
    order = {"dies_sending": 1, "until_generation": 4}
    ledger = replace(tmp_path, fault(0, "forward", 3, how="exit"), launcher=RUN, **order)
    ledger.check_members(3)
    assert (tmp_path / "sending").exists()
    assert {tuple(entry["lost"]) for entry in ledger.of("changes", 2)} >= {(0,)}


@pytest.mark.slow
def test_a_launching_process_that_is_no_rank_starts_new_ones_in_all_places(tmp_path) -> None:
    """That of rank 0 as well, which goes on with the loggers."""
    kills = [fault(1, "forward", 3), fault(0, "forward", None, generation=2), fault(2, "batch end", None)]
    kills[2]["generation"] = 4
    order = {"logs": True, "trainer": {"log_every_n_steps": 1}, "plain": True}
    ledger = replace(tmp_path, *kills, launcher=RUN, **order)
    ledger.check_members(3)
    rows = logged_rows(tmp_path)
    logged, taken = [int(row["step"]) for row in rows if row["loss_step"]], range(len(ledger.by_step()))
    assert logged == sorted(logged)
    assert set(logged) <= set(taken)
    assert len(set(taken) - set(logged)) <= 2, "of the step in which rank 0 was lost"
    assert len(logged) - len(set(logged)) <= 2
    counts = [float(row["recovery/count"]) for row in rows if row["recovery/count"]]
    assert sorted(set(counts)) == [1, 2, 3], "losses, whoever is rank 0; none for those that join"


@pytest.mark.slow
def test_too_few_ranks_wait_for_new_ones(tmp_path) -> None:
    """They wait where they are, and longer than `stall_timeout`."""
    strategy = {"on_failure": {"name": "replace", "min_world_size": 3, "wait_s": 120.0}}
    ledger = replace(tmp_path, fault(1, "forward", 3, generation=0), strategy=strategy, stall_s=3.0)
    assert {entry["world_size"] for entry in ledger.commits} == {3}
    ledger.check_members(3)
    assert ledger.sizes_of(0) == [[3, 2], [2, 3]]


@pytest.mark.slow
def test_a_new_process_that_comes_after_the_last_step_ends_with_code_0(tmp_path) -> None:
    """And no other one is started, although the script goes on."""
    order = {"until_generation": 0, "trainer": {"max_epochs": 1}, "step_s": 0.0, "new_is_late": True}
    ledger = replace(tmp_path, fault(1, "forward", 7), tests=True, **order)
    assert sorted(ledger.ended) == [0, 2]
    assert [(entry["place"], entry["code"]) for entry in ledger.of("leaves")] == [(1, 0)]
    assert [entry["sizes"] for entry in ledger.changes] == [[3, 2], [3, 2]]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name if name == "powersgd" else exhaustive(name) for name in HOOKS])
def test_a_new_process_has_what_a_hook_shares(name, tmp_path) -> None:
    order = {"strategy": {"ddp_comm_hook": HOOKS[name]}, "optimizer": "SGD"}
    ledger = replace(tmp_path, fault(1, "between buckets", 3), launcher=RUN, **order)
    ledger.check_members(3)
    assert "from scratch" not in ledger.output
    hooks = defaultdict(set)
    for entry in ledger.of("tries"):
        hooks[entry["generation"], entry["step"]].add(entry["hook"])
    assert {len(found) for found in hooks.values()} == {1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["streaming_diloco", *map(exhaustive, ("post_local_sgd", "slowmo", "hierarchical_sgd", "diloco"))],
)
def test_a_new_process_joins_local_training_at_a_round(name, tmp_path) -> None:
    """Rounds follow steps 5, 8 and so on. It has the outer state of the others from then on.

    One is lost while the others have taken different numbers of steps, and they are in the last one of a
    round when the new process comes.
    """
    options: dict[str, Any] = {"name": name, "period": 3, "start_step": 3}
    if name == "hierarchical_sgd":
        options = {"name": name, "periods": {1: 2, 3: 0}, "start_step": 3}
    if name == "streaming_diloco":  # joined where a fragment is applied
        options = {"name": name, "period": 4, "num_fragments": 2, "start_step": 3}
    size = 4 if name == "hierarchical_sgd" else 3
    order = {"strategy": {"model_averaging": options}, "devices": size, "slow": [[1, 6], [1, 8]]}
    ledger = replace(tmp_path, fault(2, "forward", 7), launcher=RUN, new_s=0.5, **order)
    ledger.check_all_ended(size)
    (step,) = {entry["step"] for entry in ledger.changes if entry["joined"]}
    is_streaming = name == "streaming_diloco"
    assert step % 3 == 0 or is_streaming
    for number, entries in ledger.by_step().items():
        if number >= step:
            assert {entry["place"] for entry in entries} == set(range(size))
            require_same(entries, ["outer", *["parameters"] * (number % 3 == 2 and not is_streaming)])


@pytest.mark.exhaustive
def test_a_new_process_joins_where_ranks_may_run_out_of_batches(tmp_path) -> None:
    order = {"samples": 97, "plain": True, "deals": "in turn", "strategy": {"uneven_inputs": "join"}}
    ledger = replace(tmp_path, fault(1, "between buckets", 8), launcher=RUN, **order)
    ledger.check_members(3, num_samples=97, most_repeated=0)
    assert any(entry["repeats"] for entry in ledger.of("tries"))


BESIDE = {
    "validation, checkpoints, sanity check": (
        {
            "validates": True,
            "checkpoints": {"every_n_train_steps": 3, "save_top_k": -1},
            "trainer": {"num_sanity_val_steps": 2, "val_check_interval": 0.5},
        },
        {},
    ),
    **{name: cell for name, cell in CELLS.items() if "scale" in name or "accumulation" in name},
}


@pytest.mark.slow
def test_a_new_process_has_what_callbacks_have_changed(tmp_path) -> None:
    """Accumulation since the second epoch, and a save that waits for a validation."""
    saving = {"monitor": "val", "every_n_train_steps": 8, "save_top_k": -1, "filename": "{step}"}
    trainer = {"max_epochs": 3, "check_val_every_n_epoch": 2}
    order = {"validates": True, "checkpoints": saving, "accumulates": {0: 1, 1: 2}, "trainer": trainer}
    order.update(step_s=0.3, until_generation=99)
    ledger = replace(tmp_path, fault(1, "forward", 9), launcher=RUN, **order)
    ledger.check_all_ended(3)
    for entries in ledger.by_batch():
        require_same(entries)


@pytest.mark.exhaustive
@pytest.mark.parametrize("cell", BESIDE)
def test_a_new_process_has_what_lightning_has_beside_a_step(cell, tmp_path) -> None:
    order, checks = BESIDE[cell]
    ledger = replace(tmp_path, fault(1, "between buckets", 3), launcher=RUN, **order)
    if "window" not in checks:
        ledger.check_members(3)
        return
    ledger.check_all_ended(3)  # a step has several batches
    for entries in ledger.by_batch():
        require_same(entries)
