"""A process is asked to leave, and the others go on: nothing has failed, and nothing is done again."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from harness import RUN, exhaustive, run_script, slow, start_script
from harness.ledger import SAMPLES, SCRIPT, Entry, Ledger, fault, logged_rows, replacing, train
from test_shrink import STEP

from lightning_ddp import CustomDDPStrategy
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.launch.step_stop import PREEMPTED


def leaves(place: int, moment: str, step: int | None, **more: Any) -> Entry:
    return fault(place, moment, step, how="leaves", **more)


def leave(folder: Path, *faults: Entry, **order: Any) -> Ledger:
    """Steps take longer than it takes to agree on a boundary: else the last one may be before that."""
    strategy = {"on_preemption": "leave", **order.pop("strategy", {})}
    return train(folder, faults=faults, **{"step_s": 0.1, "strategy": strategy, **order})


@pytest.mark.parametrize(
    "moment", ["forward", slow("validation"), exhaustive("loader"), exhaustive("batch end")]
)
def test_a_rank_leaves_at_the_next_boundary(moment, tmp_path) -> None:
    step = STEP.get(moment, 3)
    order = {"validates": moment == "validation", "codes": True}
    ledger = leave(tmp_path, leaves(2, moment, step), **order)
    ledger.check_leaving([2], [0, 1, 3])
    assert {(tuple(e["sizes"]), tuple(e["lost"]), *e["ranks"]) for e in ledger.changes} == {
        ((4, 3), (2,), 0, 0),
        ((4, 3), (2,), 1, 1),
        ((4, 3), (2,), 3, 2),
    }
    assert [entry["codes"] for entry in ledger.of("codes", 0)] == [[0, 0, 0]]
    assert [entry["place"] for entry in ledger.of("unwinds")] == [2]
    assert "left: rank 2" in ledger.output
    assert "was asked to leave" in ledger.output


@pytest.mark.slow
def test_a_rank_that_dies_while_another_one_has_left_is_the_cause_of_the_change(tmp_path) -> None:
    """Nobody was interrupted by its loss: all had stopped already."""
    ledger = leave(tmp_path, leaves(2, "forward", 3), fault(3, "regroup", None))
    assert {(tuple(e["sizes"]), tuple(e["lost"])) for e in ledger.changes} == {((4, 2), (2, 3))}
    assert all("was killed by SIGKILL" in entry["cause"] for entry in ledger.changes)


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "start_method"), [(RUN, "popen"), ((), "spawn")], ids=["run", "spawn"])
def test_rank_0_leaves_and_its_loggers_go_on(launcher, start_method, tmp_path) -> None:
    """One log folder, in which no row is lost; the script gets what the next one has."""
    strategy = {"start_method": start_method}
    order = {"devices": 3, "logs": True, "checkpoints": {"every_n_train_steps": 4, "save_top_k": -1}}
    ledger = leave(tmp_path, leaves(0, "forward", 3), launcher=launcher, strategy=strategy, **order)
    ledger.check_leaving([0], [1, 2])
    assert recovery_counts(tmp_path) == ["0.0"]
    assert [path.name for path in tmp_path.glob("logs/*/*")] == ["version_0"]
    assert len(list(tmp_path.glob("saved/*.ckpt"))) == len(ledger.by_step()) // 4


def recovery_counts(folder: Path) -> list[str]:
    """`recovery/count` in the file of the logger, row by row."""
    return [row["recovery/count"] for row in logged_rows(folder) if row.get("recovery/count")]


@pytest.mark.parametrize("launcher", [(), slow(RUN)], ids=["python", "run"])
def test_a_new_process_takes_the_place_of_one_that_has_left(launcher, tmp_path) -> None:
    place = 0 if launcher else 1
    order = replacing(2, devices=3, logs=True, step_s=0.1)
    ledger = leave(tmp_path, leaves(place, "forward", 3, generation=0), launcher=launcher, **order)
    ledger.check_members(3)
    assert [ledger.sizes_of(other) for other in range(3) if other != place] == [[[3, 2], [2, 3]]] * 2
    assert {(entry["cause"], entry["retried"]) for entry in ledger.changes} == {("None", False)}
    assert len(ledger.of("is torn down")) == 1
    assert set(recovery_counts(tmp_path)) == {"0.0"}, "nobody has failed"


@pytest.mark.slow
def test_two_leave_one_after_the_other_and_a_third_is_killed_while_all_gather(tmp_path) -> None:
    """The first one gathers all where another dies; it leaves after that has been made good."""
    faults = leaves(3, "forward", 2), leaves(2, "forward", 6), fault(1, "forward", 6)
    ledger = leave(tmp_path, *faults)
    ledger.check([0])
    assert sorted(entry["place"] for entry in ledger.of("is torn down")) == [2, 3]
    assert [entry["lost"] for entry in ledger.of("changes", 0)] == [[3], [1], [1]]
    causes = [entry["cause"] for entry in ledger.of("changes", 0)]
    assert [cause == "None" for cause in causes] == [True, False, True]


@pytest.mark.slow
def test_a_rank_leaves_the_second_fit_of_a_trainer(tmp_path) -> None:
    """Which no new process can join, as it would have to repeat the first one."""
    order = {"devices": 3, "trainer": {"max_epochs": 1}, "more_epochs": 1}
    ledger = leave(tmp_path, leaves(2, "forward", 10), strategy={"on_failure": "replace"}, **order)
    assert ledger.output.count("no process can join this fit") == 1
    assert ledger.ended == [0, 1]
    assert ledger.of("excepts") == []
    assert [entry["place"] for entry in ledger.of("is torn down")] == [2]
    assert {(tuple(entry["sizes"]), entry["cause"]) for entry in ledger.changes} == {((3, 2), "None")}


def test_all_stop_where_too_few_would_stay(tmp_path) -> None:
    """As SIGTERM stops a run."""
    options = {"name": "shrink", "min_world_size": 3}
    order = {"devices": 3, "strategy": {"on_failure": options}}
    ledger = leave(tmp_path, leaves(1, "forward", 3), code=PREEMPTED, **order)
    assert sorted(entry["place"] for entry in ledger.of("excepts")) == [0, 1, 2]
    assert ledger.of("changes") == []
    assert len({max(e["step"] for e in ledger.commits if e["place"] == place) for place in range(3)}) == 1
    assert "but fewer than min_world_size" in ledger.output


@pytest.mark.slow
def test_the_notice_to_the_supervisor_of_the_first_node_stops_all(tmp_path) -> None:
    """Which holds what the other ranks need, so that its ranks cannot leave."""
    order = {"folder": str(tmp_path), "devices": 3, "step_s": 0.1, "strategy": {"on_preemption": "leave"}}
    order |= {"trainer": {"max_epochs": 999}}
    with start_script(SCRIPT, [json.dumps(order)], launcher=RUN) as run:
        run.wait_until(lambda: 3 in Ledger(tmp_path).by_step())
        os.kill(run.pid, signal.SIGTERM)
        assert run.wait().returncode == PREEMPTED, run.output()
    ledger = Ledger(tmp_path)
    assert sorted(entry["place"] for entry in ledger.of("excepts")) == [0, 1, 2]
    assert ledger.changes == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["post_local_sgd", exhaustive("diloco")])
def test_a_rank_leaves_local_training_at_a_round(name, tmp_path) -> None:
    """Rounds follow steps 5, 8 and so on: nothing of the leaver's steps is lost."""
    options = {"name": name, "period": 3, "start_step": 3}
    order = {"strategy": {"model_averaging": options}, "trainer": {"max_epochs": 3}}
    ledger = leave(tmp_path, leaves(2, "forward", 7), **order)
    assert ledger.ended == [0, 1, 3]
    assert ledger.of("excepts") == []
    (step,) = {entry["step"] for entry in ledger.changes}
    assert step in (9, 12)  # the next round, or the one after that
    assert max(entry["step"] for entry in ledger.commits if entry["place"] == 2) == step - 1
    used = Counter(i for entry in ledger.of("tries") if entry["epoch"] == 0 for i in entry["ids"])
    assert set(used) == set(range(SAMPLES))


def test_a_signal_of_the_scheduler_is_the_notice_and_sigterm_stops_all(tmp_path) -> None:
    order = {"devices": 3, "strategy": {"on_preemption": {"name": "leave", "signal": "SIGUSR1"}}}
    faults = leaves(2, "forward", 2, signal="SIGUSR1"), leaves(1, "forward", None, generation=1)
    ledger = leave(tmp_path, *faults, code=PREEMPTED, **order)
    assert [entry["sizes"] for entry in ledger.changes] == [[3, 2]] * 2
    assert [entry["place"] for entry in ledger.of("excepts")] == [0, 1]
    assert [entry["place"] for entry in ledger.of("is torn down")] == [2]


FINDER = """
import os
import signal
import pytorch_lightning as pl
from pytorch_lightning.demos.boring_classes import BoringModel
from lightning_ddp import CustomDDPStrategy

class Model(BoringModel):
    lr, has_found = 0.1, False

    def on_fit_start(self):
        self.has_found = True

    def training_step(self, batch, batch_idx):
        if self.has_found and (self.global_rank, self.trainer.world_size, batch_idx) == (1, 2, 5):
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)

if __name__ == "__main__":
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, max_epochs=4, enable_checkpointing=False, logger=False,
        enable_progress_bar=False, callbacks=[pl.callbacks.LearningRateFinder(num_training_steps=6)],
        strategy=CustomDDPStrategy(on_failure="shrink", on_preemption="leave"),
    )
    trainer.fit(Model())
    print(f"ends at {trainer.global_step}")
"""


@pytest.mark.slow
def test_a_rank_leaves_a_fit_that_has_tried_learning_rates_before() -> None:
    result = run_script(FINDER).check()
    assert "ends at" in result.stdout
    assert "2 -> 1 ranks" in result.stderr


def test_leaving_needs_others_that_go_on() -> None:
    with pytest.raises(ConfigurationError, match="requires the other ranks to continue"):
        CustomDDPStrategy(on_preemption="leave")
    with pytest.raises(ConfigurationError, match="signal='SIGKILL': expected 'SIGTERM'"):
        CustomDDPStrategy(on_failure="shrink", on_preemption={"name": "leave", "signal": "SIGKILL"})
    with pytest.raises(ConfigurationError, match="expected 'stop' or 'leave'"):
        CustomDDPStrategy(on_preemption="go")
