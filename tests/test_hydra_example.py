"""`examples/hydra`: its experiments compose, two processes train, a sweep becomes a table and a picture."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Any

import hydra
import pytest
from harness import run_script
from omegaconf import OmegaConf
from PIL import Image

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "hydra"
SHORT = ("trainer.enable_progress_bar=false", "trainer.val_check_interval=3", "trainer.max_steps=6")


def composed(*overrides: str) -> Any:
    with hydra.initialize_config_dir(str(FOLDER / "conf"), version_base="1.3"):
        return hydra.compose("config", list(overrides), return_hydra_config=True)


def load_module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted(FOLDER.glob("conf/experiment/*.yaml")), ids=lambda p: p.stem)
def test_every_experiment_composes_and_its_sweep_names_strategies_that_exist(path):
    config = composed(f"+experiment={path.stem}")
    swept = OmegaConf.to_container(config.hydra.sweeper.params or OmegaConf.create())
    for strategy in swept.get("strategy", "custom_ddp").split(","):
        assert composed(f"+experiment={path.stem}", f"strategy={strategy}").strategy._target_


def test_the_lines_of_the_guide_compose():
    lines = (FOLDER.parents[1] / "lightning_ddp/docs/guides/hydra.md").read_text().splitlines()
    commands = [shlex.split(line) for line in lines if re.match(r"[^#`]*\bexamples/hydra/train\.py\b", line)]
    assert len(commands) == 6
    for words in commands:
        given = words[words.index("examples/hydra/train.py") + 1 :]
        # the launcher of SLURM is a package of its own
        overrides = [word.partition(",")[0] for word in given if word not in ("-m", "launcher=slurm")]
        assert composed(*overrides).strategy._target_


def test_the_network_follows_the_data_and_the_groups_of_the_package_are_found(monkeypatch):
    config = composed("data=text", "optimizer=sgd", "strategy=powersgd", "strategy.ddp_comm_hook.rank=2")
    assert config.model._target_ == "tasks.character_model"
    assert config.strategy.ddp_comm_hook.rank == 2
    assert config.optimizer.momentum == 0.9
    monkeypatch.syspath_prepend(FOLDER)
    network = hydra.utils.instantiate(composed("model.width=4").model)
    tasks = importlib.import_module("tasks")
    assert [p.shape for p in network.parameters()] == [p.shape for p in tasks.digit_network(4).parameters()]
    assert tasks.CharacterModel(5, width=8, num_layers=1).head.weight.shape == (5, 8)


def test_a_sweep_of_two_processes_leaves_one_result_that_collect_reads(tmp_path):
    text = ["data=text", "data.num_val_rows=64", "model.width=16", "model.num_layers=1"]
    args = ["-m", *text, "strategy=bf16", "strategy.start_method=spawn", *SHORT, "hydra.sweep.dir=sweep"]
    result = run_script(FOLDER / "train.py", args, cwd=tmp_path, timeout_s=300).check()
    (path,) = tmp_path.rglob("result.json")
    assert path == tmp_path / "sweep" / "0" / "result.json"
    assert len(re.findall(r"accuracy [\d.]+ %, see ", result.stdout)) == 1
    document = json.loads(path.read_text())
    assert (document["data"], document["strategy"], document["world_size"]) == ("text", "bf16", 2)
    assert [point["step"] for point in document["curve"]] == [3, 6]
    assert all(0 < point["val_loss"] < 10 for point in document["curve"])
    collect = load_module("collect")
    (row,) = collect.tabulate(collect.group_seeds(collect.read_results([tmp_path]))).splitlines()[2:]
    # data, run, seeds, ranks, steps, accuracy, loss, seconds
    data, _, *numbers = row.split()
    assert (data, *numbers[:3]) == ("text", "1", "2", "6")
    assert float(numbers[4]) == pytest.approx(document["curve"][-1]["val_loss"], abs=0.001)


def test_results_become_a_table_of_means_over_the_seeds_and_a_picture(tmp_path, monkeypatch, capsys):
    collect = load_module("collect")
    monkeypatch.setattr("sys.argv", ["collect.py", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"no result\.json below"):
        collect.main()
    runs = (("a=1,b=2", 2, 0.25), ("a=1,b=3", 2, 0.5), ("a=1,b=2", 2, 0.75), ("a=1,b=2", 4, 0.125))
    for i, (name, world_size, accuracy) in enumerate(runs):
        point = {"step": 6, "val_loss": 2 * accuracy, "val_accuracy": accuracy}
        curve = [{**point, "step": 3, "val_accuracy": 0.0}, point]
        document = {"data": "digits", "world_size": world_size, "steps": 6, "seconds": 1.0, "curve": curve}
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "result.json").write_text(json.dumps({**document, "name": name}))
    collect.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:-1]]
    assert [(row[1], row[2], float(row[5]), float(row[6])) for row in rows] == [
        ("b=2,ranks=2", "2", 50.0, 1.0),
        ("b=3,ranks=2", "1", 50.0, 1.0),
        ("b=2,ranks=4", "1", 12.5, 0.25),
    ]
    with Image.open(tmp_path / "results.png") as picture:
        assert picture.width > 1000
        assert len(set(picture.convert("L").resize((200, 100)).tobytes())) > 20, "the picture is blank"
