"""Hydra: every rank runs the job that the launching process has composed, in one output directory."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from harness import RUN, ScriptResult, run_script
from harness.scripts import ROOT
from omegaconf import OmegaConf

from lightning_ddp.hydra_jobs.jobs import Jobs, jobs, pack, unpack, withhold_files

TESTS = ROOT / "tests"
DEADLINE_S = 300.0
SHARED = ("values", "raw", "hydra", "flags", "name", "output_dir", "port", "weights", "cwd", "first_draw")
"""What all ranks of a job note alike."""

Note = dict[str, Any]

starts = pytest.mark.parametrize(
    "launcher", [(), pytest.param(RUN, marks=pytest.mark.slow)], ids=["python", "run"]
)
"""Python as the user starts it, and a supervisor that forks the ranks."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """How the program is started on one node."""

    launcher: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "."
    namespace: str | None = None


class Run:
    """A program that has been run in `folder`, on one node or more, and what its processes have noted."""

    def __init__(
        self,
        folder: Path,
        program: str | Path,
        args: Sequence[str] = (),
        *,
        is_module: bool = False,
        nodes: Sequence[Node] = (Node(),),
    ) -> None:
        self.folder = folder
        notes = folder / "notes"
        notes.mkdir()

        def run_on(node: Node) -> ScriptResult:
            path = os.pathsep.join(filter(None, [str(TESTS), node.env.get("PYTHONPATH")]))
            variables = {"NOTES": str(notes), "HYDRA_FULL_ERROR": "1", **node.env, "PYTHONPATH": path}
            cwd = folder / node.cwd
            cwd.mkdir(exist_ok=True)
            return run_script(
                program,
                args,
                variables,
                DEADLINE_S,
                launcher=node.launcher,
                is_module=is_module,
                cwd=cwd,
                namespace=node.namespace,
            )

        with ThreadPoolExecutor(len(nodes)) as pool:
            self.results = list(pool.map(run_on, nodes))
        self.result = self.results[0]
        self.notes: dict[str, dict[int, Note]] = defaultdict(dict)
        for path in sorted(notes.iterdir()):
            name, rank, _ = path.stem.rsplit("-", 2)
            assert rank == "x" or int(rank) not in self.notes[name], (
                f"two processes are rank {rank} of {name}"
            )
            self.notes[name][-1 if rank == "x" else int(rank)] = json.loads(path.read_text())

    def check(self) -> Run:
        for result in self.results:
            result.check()
        return self

    def jobs(self) -> dict[str, dict[int, Note]]:
        return {name: notes for name, notes in self.notes.items() if name.startswith("job-")}

    def folders(self, name: str) -> list[Path]:
        return sorted(path.parent for path in self.folder.rglob(name))


def require_one_job(notes: dict[int, Note], *, has_subfolder: bool = True) -> Path:
    """Checks what holds for each job on two ranks, and returns its output directory."""
    assert sorted(notes) == [0, 1]
    assert notes[0]["pid"] != notes[1]["pid"]
    for key in SHARED:
        assert notes[0][key] == notes[1][key], key
    values = notes[0]["values"]
    assert values["drawn"] == notes[0]["first_draw"]
    assert values["drawn"] != values["drawn_again"]
    assert values["read_twice"] == 2
    assert values["follows"] == values["text"]
    assert values["late"] == "late"
    assert (values["missing"], values["broken"]) == ("MissingMandatoryValue", "InterpolationKeyError")
    assert notes[0]["flags"] == [True, True]
    folder = Path(notes[0]["output_dir"])
    assert (folder / ".hydra" / "config.yaml").exists() is has_subfolder
    (log,) = (folder / "ranks").iterdir()
    assert log.name == "1.log"
    assert "printed by rank 1" in log.read_text()
    assert "[hydra_app][INFO] - a line of rank 1" in log.read_text()
    return folder


def test_a_class_whose_module_was_executed_again_is_handed_over_by_its_name(tmp_path, monkeypatch) -> None:
    """As Hydra does with a plugin that is imported already: in a worker of joblib, that of the launcher."""
    name = "plugin_of_a_test"
    (tmp_path / f"{name}.py").write_text(
        "import dataclasses\n@dataclasses.dataclass\nclass Conf:\n    n: int = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    first = importlib.import_module(name)
    config = OmegaConf.create({"hydra": {"launcher": first.Conf}})
    monkeypatch.delitem(sys.modules, name)
    second = importlib.import_module(name)
    received = unpack(pack(config, "the configuration"))
    assert received == config
    assert OmegaConf.get_type(config.hydra.launcher) is first.Conf
    assert OmegaConf.get_type(received.hydra.launcher) is second.Conf


TORCHRUN = {"RANK": "1", "LOCAL_RANK": "1", "TORCHELASTIC_USE_AGENT_STORE": "False"}


@pytest.mark.parametrize(
    ("variables", "is_first"),
    [
        ({}, True),
        (
            {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "SLURM_PROCID": "1"},
            True,
        ),  # it numbers the nodes
        (TORCHRUN, False),  # with a store of its own (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)
        ({"LOCAL_RANK": "1"}, False),
        ({"RANK": "1", "WORLD_SIZE": "2"}, False),  # a pod
        ({"SLURM_PROCID": "1"}, False),
        ({"SKYPILOT_NODE_RANK": "1"}, False),
        ({"GROUP_RANK": "1"}, False),
        ({"PET_NODE_RANK": "1"}, False),
    ],
)
def test_only_rank_0_writes_files_however_the_processes_were_started(
    variables, is_first, monkeypatch
) -> None:
    for name in {*TORCHRUN, "NODE_RANK", "SLURM_PROCID"} - variables.keys():
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(jobs(), "withheld", None)
    config = OmegaConf.create({"hydra": {"output_subdir": ".hydra", "job_logging": None}})
    withhold_files(config)
    assert config.hydra.output_subdir == (".hydra" if is_first else None)


ELSEWHERE = """
from pathlib import Path
import hydra
import pytorch_lightning as pl
from hydra.core.hydra_config import HydraConfig
from pytorch_lightning.demos.boring_classes import BoringModel
import lightning_ddp

@hydra.main(version_base="1.3", config_path=None)
def main(cfg):  # which does not mention the package
    trainer = pl.Trainer(strategy="custom_ddp", accelerator="cpu", devices=2, max_steps=2, barebones=True)
    trainer.fit(BoringModel())
    folder = Path(HydraConfig.get().runtime.output_dir)
    (folder / f"trained-{trainer.global_rank}").write_text(f"{cfg.x} of {trainer.world_size}")

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_late", "launcher"), [(False, RUN), (True, ())], ids=["imported first", "imported in the job"]
)
def test_a_job_that_submitit_runs_in_a_process_of_its_own_starts_its_ranks(
    tmp_path, is_late, launcher
) -> None:
    args = ["-m", "hydra/launcher=submitit_local", "+x=3,4", "hydra.sweep.dir=sweep"]
    program, line = ELSEWHERE, "import lightning_ddp\n"
    if is_late:
        program = program.replace(line, "").replace("    trainer =", f"    {line}    trainer =")
    (tmp_path / "app.py").write_text(program)
    options = {"timeout_s": DEADLINE_S, "cwd": tmp_path, "fresh": not launcher, "launcher": launcher}
    run_script(tmp_path / "app.py", args, **options).check()
    found = {
        str(path.relative_to(tmp_path / "sweep")): path.read_text() for path in tmp_path.rglob("trained-*")
    }
    jobs = ((0, 3), (1, 4))
    assert found == {f"{job}/trained-{rank}": f"{x} of 2" for job, x in jobs for rank in (0, 1)}


WITH_FABRIC = """
from pathlib import Path
import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from lightning_fabric import Fabric
import lightning_ddp

@hydra.main(version_base="1.3", config_path=None)
def main(cfg):
    fabric = Fabric(accelerator="cpu", devices=2, strategy="custom_ddp")
    fabric.launch()
    total = fabric.all_reduce(torch.tensor(cfg.x + fabric.global_rank), reduce_op="sum")
    folder = Path(HydraConfig.get().runtime.output_dir)
    (folder / f"sum-{fabric.global_rank}").write_text(str(int(total)))
    fabric.barrier()
    if fabric.global_rank == cfg.x - 2:
        raise ValueError(f"no rank likes {cfg.x}")

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(("xs", "fails"), [("0,1", False), pytest.param("1,2", True, marks=pytest.mark.slow)])
def test_the_run_of_fabric_ends_with_the_job_of_a_sweep(tmp_path, xs, fails) -> None:
    """Or else each process would wait for the other one: the child at its end, the launching one after it."""
    (tmp_path / "app.py").write_text(WITH_FABRIC)
    args = ["-m", f"+x={xs}", "hydra.sweep.dir=sweep"]
    result = run_script(tmp_path / "app.py", args, timeout_s=DEADLINE_S, cwd=tmp_path)
    context = f"{result.stdout}\n{result.stderr}"
    assert result.returncode == int(fails), context
    assert "was killed" not in result.stderr, context
    assert ("ValueError: no rank likes 2" in result.stderr) == fails, context
    for number, x in enumerate(map(int, xs.split(","))):
        folder = tmp_path / "sweep" / str(number)
        assert [(folder / f"sum-{rank}").read_text() for rank in range(2)] == [str(2 * x + 1)] * 2, context


@starts
def test_each_job_of_a_sweep_trains_once_with_its_own_values_and_leaves_nothing(tmp_path, launcher) -> None:
    run = Run(
        tmp_path,
        TESTS / "hydra_app" / "train.py",
        ["--multirun", "lr=0.1,0.2", "num_fits=2", "hydra.job.chdir=true"],
        nodes=[Node(launcher=launcher, env={"WHO": "someone"})],
    )
    run.check()
    jobs = run.jobs()
    assert sorted(jobs) == ["job-0", "job-1"]
    folders = [require_one_job(notes) for notes in jobs.values()]
    assert len(set(folders)) == 2
    assert len(run.folders(".hydra")) == len(run.folders("ranks")) == 2
    assert len(run.folders("multirun.yaml")) == 1
    assert [notes[0]["values"]["lr"] for notes in jobs.values()] == [0.1, 0.2]
    assert [notes[0]["cwd"] for notes in jobs.values()] == list(map(str, folders))
    assert all(notes[0]["values"]["user"] == "someone" for notes in jobs.values())
    assert all(notes[0]["values"]["rank_variable"] == "none" for notes in jobs.values())
    for key in ("drawn", "drawn_once"):
        assert len({notes[0]["values"][key] for notes in jobs.values()}) == 2
    # rank 0 is one process, each job has its own child and its own port
    assert len({notes[0]["pid"] for notes in jobs.values()}) == 1
    assert len({notes[1]["pid"] for notes in jobs.values()}) == 2
    assert len({notes[0]["port"] for notes in jobs.values()}) == 2
    parent = "parent" if launcher else "pid"
    assert all(notes[1]["parent"] == notes[0][parent] for notes in jobs.values())
    (end,) = run.notes["end"].values()
    moments = [*(notes[0]["before"] for notes in jobs.values()), end]
    # to the supervisor
    assert [before.pop("sockets") for before in moments] == [int(bool(launcher))] * 3
    first = moments[0]
    assert (first["variables"], first["is_initialized"]) == ({}, False)
    for later in moments:
        assert {key: later[key] for key in first} == first
    assert run.result.stdout.count("printed by rank 0") == 2
    assert "printed by rank 1" not in run.result.stdout + run.result.stderr


def test_a_job_s_overrides_folders_and_name_reach_all_ranks(tmp_path) -> None:
    more = tmp_path / "more conf"
    (more / "experiment").mkdir(parents=True)
    (more / "experiment" / "y.yaml").write_text("# @package _global_\nlr: 0.25\n")
    (more / "other.yaml").write_text("defaults: [config, _self_]\nitems: []\n")
    folder = tmp_path / "runs" / "lr=0.5,text=x y"
    run = Run(
        tmp_path,
        TESTS / "hydra_app" / "train.py",
        [
            "--config-dir",
            str(more),
            "--config-path",
            str(TESTS / "hydra_app" / "conf"),
            "--config-name=other",
            "+experiment=y",
            'text="it\'s a=b, \\"c\\" {d} ü→"',
            "items=[1,'two words',{k: 'v=w'}]",
            "+tree.b={c: [d, 'e=f']}",
            "hydra.output_subdir=null",
            f"hydra.run.dir='{folder}'",
            "hydra.job.chdir=false",
            "hydra.job.name='naïve'",
        ],
    )
    run.check()
    (notes,) = run.jobs().values()
    assert require_one_job(notes, has_subfolder=False) == folder
    assert notes[1]["values"]["text"] == 'it\'s a=b, "c" {d} ü→!'
    assert notes[1]["values"]["items"] == [1, "two words", {"k": "v=w"}]
    assert notes[1]["values"]["tree"] == {"a": 1, "b": {"c": ["d", "e=f"]}}
    assert notes[1]["values"]["lr"] == 0.25
    assert (notes[1]["name"], notes[1]["cwd"]) == ("naïve", str(tmp_path))
    assert not run.folders(".hydra")
    assert not (tmp_path / "outputs").exists()
    assert sorted(path.name for path in folder.iterdir()) == ["naïve.log", "ranks"]
    assert "a line of rank 1" not in (folder / "naïve.log").read_text()


LATE = """
import os
import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig

resolved = {name: f"${{{name}_of_a_test:}}" for name in ("cached", "drawn")}
ConfigStore.instance().store("late", {"number": 0, "before": "${now:%f}", "after": "${now:%S%f}", **resolved})

@hydra.main(version_base="1.3", config_path=None, config_name="late")
def main(cfg):
    seen = {"port_before": os.environ.get("MASTER_PORT"), "early": cfg.before}
    from hydra_app.training import OmegaConf, fit, note, random, values_of  # which imports the package
    draw = random.SystemRandom().random
    OmegaConf.register_new_resolver("cached_of_a_test", draw, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("drawn_of_a_test", draw, replace=True)
    chosen = hydra.compose(overrides=["+lightning_ddp/strategy@strategy=powersgd"]).strategy
    seen |= {**fit(), "values": values_of(cfg), "hook": chosen.ddp_comm_hook.name}
    note(f"job-{cfg.number}", {**seen, "output_dir": HydraConfig.get().runtime.output_dir})

if __name__ == "__main__":
    main()
"""


@starts
def test_a_job_that_imports_the_package_is_handed_over_as_well_and_its_run_ends_with_it(
    tmp_path, launcher
) -> None:
    run = Run(tmp_path, LATE, ["-m", "number=0,1"], nodes=[Node(launcher=launcher)]).check()
    jobs = list(run.jobs().values())
    assert len(jobs) == 2
    for number, notes in enumerate(jobs):
        assert sorted(notes) == [0, 1]
        assert notes[0]["values"] == notes[1]["values"]
        assert notes[0]["values"]["number"] == number
        assert notes[0]["values"]["before"] == notes[0]["early"]
        assert (notes[0]["port_before"], notes[0]["hook"], notes[1]["hook"]) == (None, "powersgd", "powersgd")
        assert (Path(notes[1]["output_dir"]) / "ranks" / "1.log").exists()
    assert jobs[0][0]["values"]["drawn"] != jobs[1][0]["values"]["drawn"]
    assert jobs[0][1]["pid"] != jobs[1][1]["pid"]
    assert len(run.folders(".hydra")) == 2


SWEEPER = """
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

class Doubling(Sweeper):
    \"\"\"Asks for one job at a time, and chooses the next one by what the last one returned.\"\"\"

    def setup(self, *, hydra_context, task_function, config):
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config)

    def sweep(self, arguments):
        lr, trouble = 0.125, ["bad=none", "bad=object", "bad=folder", "bad=none", "fault=last"]
        for number, override in enumerate(trouble):
            (done,) = self.launcher.launch([[*arguments, f"lr={lr}", override]], initial_job_idx=number)
            lr = 2 * done.return_value

ConfigStore.instance().store(
    group="hydra/sweeper", name="doubling", node={"_target_": "hydra_plugins.doubling.Doubling"})
"""


@starts
def test_an_adaptive_sweeper_goes_on_after_jobs_that_could_not_be_launched_and_ends_with_one_that_failed(
    tmp_path, launcher
) -> None:
    plugins = tmp_path / "plugins" / "hydra_plugins"
    plugins.mkdir(parents=True)
    (plugins / "doubling.py").write_text(SWEEPER)
    run = Run(
        tmp_path,
        "hydra_app.train",
        ["-m", "hydra/sweeper=doubling", "+experiment=x"],
        is_module=True,
        nodes=[Node(launcher=launcher, env={"PYTHONPATH": str(plugins.parent)})],
    )
    assert sorted(run.notes.pop("job-4")) == [0]  # the other rank has failed
    assert sorted(run.jobs()) == ["job-0", "job-3"]
    for notes in run.jobs().values():
        require_one_job(notes)
    assert [notes[1]["values"]["lr"] for notes in run.jobs().values()] == [0.125, 1.0]
    assert len(run.folders(".hydra")) == 5

    (unpicklable,), (unwritable,) = run.notes["error1"].values(), run.notes["error2"].values()
    assert unpicklable["lr"] == 0.25
    assert "the value of `bad`, a type, does not pickle" in unpicklable["message"]
    assert f"cannot be written to {tmp_path}/multirun/" in unwritable["message"]
    assert "hydra.sweep.dir" in unwritable["message"]
    for error in (unpicklable, unwritable):
        assert error["left"] == error["begun"]
    assert run.jobs()["job-3"][0]["before"]["variables"] == {}

    assert run.result.returncode == 1
    report = run.result.stderr.rpartition("lightning_ddp: ")[2]
    assert report.startswith("rank 1 (node 0, host ")
    assert report.rstrip().endswith("RuntimeError: raised when the training was over")


BROKEN = ELSEWHERE.replace(
    "import lightning_ddp\n",
    """import lightning_ddp
import os
if os.environ.get("LOCAL_RANK", "0") != "0":
    import there_is_no_such_module
""",
)


def test_a_child_that_cannot_import_the_script_is_named_with_its_output(tmp_path) -> None:
    run = Run(tmp_path, BROKEN)
    assert run.result.returncode == 1
    report = run.result.stderr.rpartition("lightning_ddp: ")[2]
    assert report.startswith("rank 1 (node 0, host ")
    assert f"the process exited with code 1; its output is in {tmp_path}/outputs/" in report
    assert report.rstrip().endswith("ModuleNotFoundError: No module named 'there_is_no_such_module'")
    assert "PeerFailure: rank 1" in run.result.stderr


COMPOSE = """
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra_app.training import fit, note, register_resolvers, values_of
from pathlib import Path
import hydra_app, os

register_resolvers()

def train(number, **options):
    # with the node `hydra`, as tests and notebooks use it
    cfg = compose("config", overrides=[f"lr={number / 4}"], return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    seen = fit(cfg.lr)
    values = values_of(cfg)
    del values["hydra"]
    note(f"fit-{number}", {**seen, "values": values})

if __name__ == "__main__":
    with initialize_config_dir(str(Path(hydra_app.__file__).parent / "conf"), version_base="1.3"):
        train(1)
        train(2)
"""


@starts
def test_a_script_with_the_compose_api_composes_the_same_on_all_ranks(tmp_path, launcher) -> None:
    run = Run(tmp_path, COMPOSE, nodes=[Node(launcher=launcher)])
    run.check()
    for number in (1, 2):
        notes = run.notes[f"fit-{number}"]
        assert sorted(notes) == [0, 1]
        assert notes[0]["values"] == notes[1]["values"]
        assert notes[1]["values"]["lr"] == number / 4
    assert run.notes["fit-1"][0]["values"]["drawn"] != run.notes["fit-2"][0]["values"]["drawn"]
    assert run.notes["fit-1"][1]["pid"] == run.notes["fit-2"][1]["pid"]
    assert not run.folders("ranks")


def test_compositions_after_a_launch_are_counted_from_that_launch_on() -> None:
    """By which the ranks of each job ask for them."""
    ours, keys = Jobs(), []
    for _ in range(2):
        ours.publish_to(lambda key, _: keys.append(key))
        ours.composed("config", ["lr=1"], lambda: OmegaConf.create({"lr": 1}))
        ours.publish_to(None)
    assert keys[0] == keys[1]


TEMPLATE = {
    "app.py": """
import sys
from pathlib import Path
import hydra
if "without" not in sys.argv:
    import lightning_ddp
sys.argv = [argument for argument in sys.argv if argument != "without"]
import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

class Model(BoringModel):
    def train_dataloader(self):
        rows = torch.randn(24, 32, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True)

    val_dataloader = test_dataloader = train_dataloader

    def test_step(self, batch, batch_idx):
        self.log("loss", self.loss(self(batch)), sync_dist=True)

@hydra.main(version_base="1.3", config_path="configs", config_name="train.yaml")
def main(cfg):
    L.seed_everything(cfg.seed, workers=True)
    model, trainer = hydra.utils.instantiate(cfg.model), hydra.utils.instantiate(cfg.trainer)
    if cfg.train:
        trainer.fit(model)
    trainer.test(model, ckpt_path="best" if cfg.train else cfg.ckpt_path, verbose=False)
    if trainer.is_global_zero:
        Path(cfg.paths.output_dir, "loss").write_text(trainer.callback_metrics["loss"].item().hex())

if __name__ == "__main__":
    main()
""",
    "configs/train.yaml": """
defaults: [_self_, {model: mine}, {trainer: default}, {experiment: null}, {optional local: default}]
paths: {output_dir: "${hydra:runtime.output_dir}"}
train: true
ckpt_path: null
seed: 5
""",
    "configs/model/mine.yaml": "_target_: __main__.Model\n",
    "configs/trainer/default.yaml": """
_target_: lightning.pytorch.trainer.Trainer
default_root_dir: ${paths.output_dir}
max_epochs: 2
accelerator: cpu
devices: 1
logger: false
enable_progress_bar: false
enable_model_summary: false
""",
    "configs/trainer/ddp.yaml": "defaults: [default]\nstrategy: ddp\ndevices: 2\n",
    "configs/experiment/x.yaml": "# @package _global_\ndefaults: [{override /trainer: ddp}]\nseed: 6\n",
}
"""A program of the form of a well-known template: groups of its own, `trainer` among them, of `lightning`."""


@pytest.mark.slow
def test_a_program_with_a_group_trainer_of_its_own_trains_alike_with_one_key_changed(tmp_path) -> None:
    for name, text in TEMPLATE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def run(folder: str, *overrides: str) -> list[str]:
        """Return the loss of each job."""
        args = [*overrides, f"hydra.run.dir={folder}", f"hydra.sweep.dir={folder}"]
        run_script(tmp_path / "app.py", args, timeout_s=DEADLINE_S, cwd=tmp_path).check()
        return [path.read_text() for path in sorted(tmp_path.glob(f"{folder}/**/loss"))]

    ours = "trainer.strategy=custom_ddp"
    trained = run("without", "without", "experiment=x")
    # on some processors a spawned process rounds otherwise, with Lightning's strategy too
    spawned = run("spawned", "without", "experiment=x", "trainer.strategy=ddp_spawn")
    assert run("ours", "experiment=x", ours) == trained
    assert run("sweep", "-m", "experiment=x", f"{ours},custom_ddp_spawn") == trained + spawned
    (checkpoint,) = tmp_path.glob("ours/**/*.ckpt")
    evaluate = ["trainer=ddp", "train=false", f"ckpt_path='{checkpoint}'"]
    assert run("evaluated", *evaluate, ours) == run("evaluated_by_ddp", *evaluate)
