"""Hooks and averagers through Lightning's Trainer on two processes: wiring, agreement, resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from given_gradients import Run, random_grads
from harness import on_ranks, run_script, run_threads
from harness.communication_script import RESUMED, Network, loader

from lightning_ddp import BucketedDDP
from lightning_ddp.comm.group import Group
from lightning_ddp.communication import Communication, rank_file
from lightning_ddp.errors import ConfigurationError

pytestmark = pytest.mark.xdist_group("communication_trainer")  # they share what the fixtures make
SCRIPT = Path(__file__).parent / "harness" / "communication_script.py"
CPU = torch.device("cpu")
POWERSGD = {"name": "powersgd", "start_step": 0, "min_compression": 1}


def run_case(case: str, folder: Path, *options: str) -> list[Any]:
    run_script(SCRIPT, [case, str(folder), *options], timeout_s=180).check()
    return [torch.load(folder / f"result.{rank}") for rank in range(2)]


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a["state"].keys() == b["state"].keys()
    for name, tensor in a["state"].items():
        torch.testing.assert_close(b["state"][name], tensor, rtol=0, atol=0)


# ---------------------------------------------------------------- wiring


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resumed")
    return folder, run_case("resumed", folder)


def test_parameters_are_apart_between_rounds_and_agree_at_the_end_and_in_validation(resumed):
    """Four batches of four an epoch and rank, two steps an epoch."""
    answers = [answer["accumulated"] for answer in resumed[1]]
    for answer in answers:
        spread = [value > 0 for value in answer["spread"]]
        # steps 1 and 2 with averaged gradients, step 3 alone, step 4 ends with a round
        assert spread == [False, False, False, False, False, True, True, False]
    assert_same(*answers)
    assert answers[0]["validated"].equal(answers[1]["validated"])


@pytest.mark.parametrize("period", [3, 4])  # the last step is of a round, or not
def test_models_that_callbacks_make_of_local_parameters_agree_where_they_are_used(period, tmp_path):
    answers = run_case("averaged", tmp_path, str(period))
    assert_same(*answers)
    for answer in answers:
        assert answer["validated"].equal(answers[0]["validated"])
        assert answer["saved"].equal(answer["validated"])
        assert answer["state"]["layers.0.weight"].equal(answer["validated"][-1])


def test_after_a_caught_failure_in_local_training_all_ranks_validate_the_model_of_rank_0(tmp_path):
    first, second = run_case("failed", tmp_path)
    assert not first["fitted"].equal(second["fitted"])
    for answer in (first, second):
        assert answer["validated"].equal(first["fitted"][None])


@on_ranks(1)
def test_momentum_is_not_applied_twice(group):
    run, communication = hooked(group, {"name": "topk", "momentum": 0.9})
    optimizer = torch.optim.SGD(run.module.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ConfigurationError, match="would both be applied"):
        communication.start(run.module, [optimizer], Group(group))
    optimizer = torch.optim.Adam(run.module.parameters(), betas=(0.0, 0.99))
    communication.start(run.module, [optimizer], Group(group))


@on_ranks(2)
def test_hooks_that_differ_between_ranks_are_named_when_they_are_registered(rank, group):
    communication = Communication(("fp16", "bf16")[rank])
    model = BucketedDDP(torch.nn.Linear(1, 1), process_group=group)
    named = r"'bf16' on rank 1, 'fp16' on rank 0\. Rank 1 has bf16\(\), rank 0 has fp16\(\)"
    with pytest.raises(ConfigurationError, match=f"the ranks have different communication hooks.*{named}"):
        communication.register(model, Group(group), CPU, node_size=2, loss_scale=lambda: 1.0)


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_equals_the_undisturbed_one_bit_for_bit(name, resumed):
    folder, answers = resumed
    answers = [answer[name] for answer in answers]
    for answer in answers:
        assert_same(answer["undisturbed"], answer["resumed"])
        assert answer["resumed"]["spread"] == answer["undisturbed"]["spread"][4:]
        is_apart = "model_averaging" in RESUMED[name] and name != "node"  # there is one node
        assert any(answer["undisturbed"]["spread"][4:]) == is_apart
    assert_same(answers[0]["resumed"], answers[1]["resumed"])
    checkpoint = torch.load(folder / name / "epoch=0.ckpt")  # with torch's safe loader
    assert checkpoint["lightning_ddp"]["format"] == 1
    assert ("hook" in checkpoint["lightning_ddp"]) == ("ddp_comm_hook" in RESUMED[name])


@pytest.mark.parametrize("killed", ["last.ckpt", pytest.param("last.ckpt.rank1.*", marks=pytest.mark.slow)])
def test_a_run_that_is_killed_while_it_overwrites_its_checkpoint_resumes_bit_for_bit(
    killed, resumed, tmp_path
):
    assert run_script(SCRIPT, ["killed", str(tmp_path), killed], timeout_s=60).returncode != 0
    for answer, expected in zip(run_case("continued", tmp_path), resumed[1], strict=True):
        assert_same(expected["sign"]["undisturbed"], answer)
    token = torch.load(tmp_path / "last.ckpt")["lightning_ddp"]["token"]
    files = sorted(path.name for path in tmp_path.glob("last.ckpt*"))
    assert files == ["last.ckpt", *(f"last.ckpt.rank{rank}.{token[:8]}.pt" for rank in range(2))]


def test_an_asynchronous_checkpoint_keeps_the_files_of_the_one_before(resumed, tmp_path):
    for answer, expected in zip(run_case("continued", tmp_path, "async"), resumed[1], strict=True):
        assert_same(expected["sign"]["undisturbed"], answer)
    token = torch.load(tmp_path / "last.ckpt")["lightning_ddp"]["token"]
    for rank in range(2):
        files = [path.name for path in tmp_path.glob(f"last.ckpt.rank{rank}.*")]
        assert len(files) == 2
        assert f"last.ckpt.rank{rank}.{token[:8]}.pt" in files


def test_values_that_only_their_rank_has_logged_leave_the_files_of_all_ranks_with_their_checkpoint(tmp_path):
    """By them the name of the checkpoint differs between ranks, or the one that is removed for a better."""
    run_case("logged", tmp_path)
    kept = {
        "named": ["epoch=0-v=1.ckpt", "epoch=1-v=2.ckpt", "epoch=2-v=0.ckpt"],
        "best": ["epoch=0-step=4.ckpt", "epoch=2-step=12.ckpt"],
    }
    for folder, names in kept.items():
        expected = {*names}
        for name in names:
            token = torch.load(tmp_path / folder / name)["lightning_ddp"]["token"]
            files = [rank_file(name, rank, token) for rank in range(2)]
            assert [torch.load(tmp_path / folder / file)["rank"] for file in files] == [0, 1]
            expected |= {*files}
        assert {path.name for path in (tmp_path / folder).iterdir()} == expected


def test_each_rank_has_its_own_loss_scale_in_local_training_and_keeps_it(resumed):
    scalers = [answer["scaled"] for answer in resumed[1]]
    for answer in scalers:
        assert answer["resumed"]["scaler"] == answer["undisturbed"]["scaler"]
    # eight steps: rank 0 grows after the third and the sixth; rank 1 skips the second and the sixth,
    # and grows after the fifth
    found = [(a["resumed"]["scaler"]["scale"], a["resumed"]["scaler"]["_growth_tracker"]) for a in scalers]
    assert found == [(2.0**12, 2), (2.0**9, 2)]
    for tensor in scalers[0]["resumed"]["state"].values():
        assert tensor.isfinite().all()


@pytest.mark.filterwarnings("ignore")  # Lightning's own, about loaders and folders
def test_a_checkpoint_loads_in_plain_lightning_and_torch(resumed):
    path = resumed[0] / "post_local_sgd" / "epoch=0.ckpt"
    saved = torch.load(path)
    model = Network()
    model.load_state_dict(saved["state_dict"])
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False
    )
    trainer.fit(model, loader(), ckpt_path=path)
    assert trainer.current_epoch == 2


def saved_by_threads(folder: Path, world_size: int) -> list[dict[str, Any]]:
    def rank_main(rank, _, group):
        run, communication = hooked(group)
        run.step(random_grads(rank, 0))
        checkpoint: dict[str, Any] = {}
        communication.save(checkpoint, folder / "a.ckpt", Group(group), CPU, torch.save)
        return checkpoint

    return run_threads(rank_main, world_size)


def hooked(group: Any, spec: Any = POWERSGD) -> tuple[Run, Communication]:
    communication = Communication(spec)
    run = Run(group, "noop")
    run.model.reducer.set_hook(None, None)
    communication.register(run.model, Group(group), CPU, node_size=1, loss_scale=lambda: 1.0)
    run.hook = communication.hook
    return run, communication


def test_with_other_ranks_residuals_are_reset_and_the_rest_is_kept(tmp_path):
    checkpoint = saved_by_threads(tmp_path, 2)[0]

    def rank_main(rank, _, group):
        run, communication = hooked(group)
        notes = communication.resume(checkpoint, tmp_path / "a.ckpt", Group(group), [], torch.load)
        return notes, run.hook.step, sorted(run.state("q")), run.state("error")

    for rank, (notes, step, factors, errors) in enumerate(run_threads(rank_main, 3)):
        (note,) = notes
        assert note.startswith(f"rank {rank}: residuals and optimizer state of its own start from scratch")
        assert "saved by 2 ranks, but the run has 3" in note
        assert step == 1
        assert factors == ["first", "second", "third"]
        assert errors == {}


def test_a_copy_of_a_checkpoint_beside_it_finds_the_files_of_its_ranks(tmp_path):
    checkpoint = saved_by_threads(tmp_path, 2)[0]

    def rank_main(rank, _, group):
        run, communication = hooked(group)
        notes = communication.resume(checkpoint, tmp_path / "copy.ckpt", Group(group), [], torch.load)
        return notes, run.state("error").keys()

    assert run_threads(rank_main, 2) == [([], {"first", "second", "third"})] * 2


def broken(file: Path, files: list[Path], what: str) -> str:
    """Breaks the file of a rank; returns the words that say so."""
    if what == "missing":
        file.unlink()
        return "is missing"
    if what == "torn":
        file.write_bytes(file.read_bytes()[:200])
        return "cannot be read ("
    if what == "not a file of ours":
        torch.save([1], file)
        return "cannot be read (TypeError"
    if what == "of another checkpoint":
        torch.save(torch.load(file) | {"token": "other"}, file)
    else:
        file.write_bytes(next(other for other in files if other != file).read_bytes())
    return "or to another checkpoint"


@pytest.mark.parametrize(
    "what", ["missing", "torn", "not a file of ours", "of another checkpoint", "of another rank"]
)
def test_a_file_that_cannot_be_used_is_named_and_the_rest_is_kept(what, tmp_path):
    checkpoint, path = saved_by_threads(tmp_path, 2)[0], tmp_path / "a.ckpt"
    files = [Path(rank_file(path, rank, checkpoint["lightning_ddp"]["token"])) for rank in range(2)]
    words = broken(files[1], files, what)

    def rank_main(rank, _, group):
        run, communication = hooked(group)
        notes = communication.resume(checkpoint, path, Group(group), [], torch.load)
        loaded = run.hook.step, run.state("error")
        notes += communication.resume({}, path, Group(group), [], torch.load)
        assert (run.hook.step, run.state("error")) == (0, {})
        return notes, *loaded

    (notes, step, errors), (broken_notes, broken_step, broken_errors) = run_threads(rank_main, 2)
    begins_anew = "the checkpoint has no state of hooks or averagers, so they start from scratch"
    assert notes == [begins_anew]
    assert errors
    assert broken_notes[1:] == [begins_anew]
    assert broken_notes[0].startswith(
        f"rank 1: residuals and optimizer state of its own start from scratch: {files[1]}"
    )
    assert words in broken_notes[0]
    assert (step, broken_step) == (1, 1)
    assert broken_errors == {}
