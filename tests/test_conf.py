"""Configuration groups: what they compose to, what they refuse, and that they agree with the code."""

from __future__ import annotations

import functools
import inspect
import pkgutil
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import hydra
import pytest
from harness import run_script
from hydra.core.config_store import ConfigStore
from hydra.errors import InstantiationException
from omegaconf import OmegaConf
from test_reference import ON_FAILURE, REPLICA_CHECK, SET_BY_THE_TRAINER, options

import lightning_ddp
from lightning_ddp._lightning import lightnings
from lightning_ddp.averaging import averager_options, parse_averager
from lightning_ddp.hooks import hook_options, parse_hook
from lightning_ddp.supervise.settings import parse_on_failure
from lightning_ddp.variants import BUILTIN, variant_arguments

FOLDER = Path(lightning_ddp.__file__).parent / "conf"
PRIMARY = "lightning_ddp_test"
OTHERS = ({"trainer": "cpu"}, {"launcher": "local"})
NO_DEFAULT = {"periods": {"4": 2, "16": 0}}


def composed(*overrides: str, others: Sequence[dict[str, str]] = OTHERS, **options: Any) -> Any:
    defaults = [{"strategy": "custom_ddp"}, *others, "_self_"]
    ConfigStore.instance().store(name=PRIMARY, node={"defaults": defaults, "batch": 32})
    with hydra.initialize(version_base="1.3", config_path=None):
        return hydra.compose(PRIMARY, list(overrides), **options)


def strategy_of(*overrides: str) -> Any:
    return hydra.utils.instantiate(composed(*overrides, others=()).strategy)


@pytest.fixture
def constructed(monkeypatch) -> list[dict[str, Any]]:
    """What each strategy was made with since the test began: every argument, hooks and averagers as plans."""
    calls, construct = [], lightning_ddp.CustomDDPStrategy.__init__

    @functools.wraps(construct)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        bound = inspect.signature(construct).bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = {name: value for name, value in bound.arguments.items() if name not in SET_BY_THE_TRAINER}
        if given["ddp_comm_hook"] is not None and not callable(given["ddp_comm_hook"]):
            given["ddp_comm_hook"] = parse_hook(given["ddp_comm_hook"])
        if given["model_averaging"] is not None:
            given["model_averaging"] = parse_averager(given["model_averaging"])
        given["on_failure"] = parse_on_failure(given["on_failure"])
        calls.append({name: value for name, value in given.items() if name != "self"})

    monkeypatch.setattr(lightning_ddp.CustomDDPStrategy, "__init__", recorded)
    return calls


# ---------------------------------------------------------------------- agreement with the code


def contents(group: str) -> dict[str, dict[str, Any]]:
    """The files of a group that has no defaults, by name."""
    files = FOLDER.glob(f"{group}/*.yaml")
    return {path.stem: OmegaConf.to_container(OmegaConf.load(path)) for path in files}


def test_the_arguments_are_those_of_the_code_with_their_defaults():
    parameters = inspect.signature(lightning_ddp.CustomDDPStrategy).parameters
    given = hydra.utils.instantiate({**contents("strategy/base")["arguments"], "_target_": "builtins.dict"})
    assert given == {
        name: parameter.default for name, parameter in parameters.items() if name not in SET_BY_THE_TRAINER
    }
    parameters = inspect.signature(lightnings("Trainer")).parameters
    given = contents("trainer/base")["arguments"]
    only_newer = {"enable_autolog_hparams", "model_registry"}
    assert given.keys() | only_newer >= parameters.keys() >= given.keys() - {"_target_", "_convert_"}
    differing = {name for name in parameters if name in given and given[name] != parameters[name].default}
    assert differing == {"strategy"}


@pytest.mark.parametrize(
    ("group", "owners"),
    [
        ("ddp_comm_hook", hook_options()),
        ("model_averaging", averager_options()),
        ("on_failure", {name: owner for name, (owner, _) in ON_FAILURE.items()}),
        ("replica_check", {name: owner for name, (owner, _) in REPLICA_CHECK.items()}),
    ],
)
def test_a_file_of_a_hook_averager_or_reaction_has_its_options_with_their_defaults(group, owners):
    assert contents(f"strategy/{group}") == {
        name: {"name": name}
        | {
            option: NO_DEFAULT.get(option, default)
            for option, default, _ in ([] if owner is None else options(owner))
        }
        for name, owner in owners.items()
    }


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_a_file_makes_the_strategy_that_the_variant_of_its_name_makes(name, constructed):
    strategy = strategy_of(f"strategy={name.removeprefix('custom_ddp_')}")
    assert isinstance(strategy, lightning_ddp.CustomDDPStrategy)
    lightning_ddp.CustomDDPStrategy(**variant_arguments(name))
    found, expected = constructed
    assert found == expected


# ---------------------------------------------------------------------- composition


def test_a_trainer_is_built_with_the_chosen_strategy_and_plain_values(constructed):
    caps = "strategy.bucket_cap_mb_list=[1,2.5]"
    trainer = hydra.utils.instantiate(composed("trainer.max_epochs=3", "trainer.logger=false", caps).trainer)
    assert type(trainer) is lightning_ddp.Trainer
    assert (trainer.max_epochs, trainer.num_devices) == (3, 2)
    assert isinstance(trainer.strategy, lightning_ddp.CustomDDPStrategy)
    assert constructed[0]["bucket_cap_mb_list"] == [1, 2.5]
    assert type(constructed[0]["bucket_cap_mb_list"]) is list


PERIODS = "strategy=hierarchical_sgd {}strategy.model_averaging.periods"
FUNCTION = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook"


@pytest.mark.parametrize(
    ("overrides", "argument", "expected"),
    [
        ("strategy.timeout.minutes=10", "timeout", timedelta(minutes=10)),
        ("strategy.timeout=10", "timeout", 10),
        ("strategy.stall_timeout=90", "stall_timeout", 90),
        ("strategy.bucket_cap_mb=2.5", "bucket_cap_mb", 2.5),
        ("strategy=powersgd strategy.ddp_comm_hook.rank=3", "ddp_comm_hook", {"name": "powersgd", "rank": 3}),
        ("strategy/ddp_comm_hook=topk", "ddp_comm_hook", "topk"),
        ("strategy.ddp_comm_hook=bf16", "ddp_comm_hook", "bf16"),
        ("strategy.ddp_comm_hook=[bf16,powersgd]", "ddp_comm_hook", ["bf16", "powersgd"]),
        (
            f"strategy.ddp_comm_hook={{_target_:hydra.utils.get_method,path:{FUNCTION}}}",
            "ddp_comm_hook",
            pkgutil.resolve_name(FUNCTION),
        ),
        ("strategy/model_averaging=slowmo", "model_averaging", "slowmo"),
        (f"{PERIODS.format('+')}.8=4", "model_averaging", {4: 2, 8: 4, 16: 0}),
        (f"{PERIODS.format('')}.4=3", "model_averaging", {4: 3, 16: 0}),
        (f"{PERIODS.format('~')}.4 +strategy.model_averaging.periods.2=2", "model_averaging", {2: 2, 16: 0}),
        (
            "strategy/on_failure=shrink strategy.on_failure.min_world_size=2",
            "on_failure",
            {"name": "shrink", "min_world_size": 2},
        ),
    ],
)
def test_an_override_is_an_argument_of_the_strategy(overrides, argument, expected, constructed):
    strategy_of(*overrides.split())
    if "periods" in overrides:
        expected = {"name": "hierarchical_sgd", "start_step": 100, "periods": expected}
    lightning_ddp.CustomDDPStrategy(**{argument: expected})
    found, meant = constructed
    assert found[argument] == meant[argument]


def test_the_groups_can_be_placed_below_other_keys_and_taken_by_their_long_names():
    config = composed("+lightning_ddp/strategy@trainer.strategy=powersgd", "~strategy")
    assert config.trainer.strategy._target_ == "lightning_ddp.CustomDDPStrategy"
    assert config.trainer.strategy.ddp_comm_hook.name == "powersgd"
    assert "strategy" not in config
    assert composed("~strategy").trainer.strategy == "auto"


def test_launchers(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
    config = composed("launcher=torchrun", "trainer=multi_node")
    assert (config.trainer.devices, config.trainer.num_nodes) == (4, 3)
    launcher = {"nodes": 1, "tasks_per_node": 1, "timeout_min": 60, "cpus_per_task": None}
    repo = ConfigStore.instance().repo["hydra"]["launcher"]
    monkeypatch.setitem(repo, "submitit_slurm.yaml", None)
    ConfigStore.instance().store(group="hydra/launcher", name="submitit_slurm", node=launcher)
    config = composed("launcher=slurm", "trainer=multi_node", "trainer.devices=8", return_hydra_config=True)
    assert (config.hydra.launcher.nodes, config.hydra.launcher.tasks_per_node) == (2, 8)


@pytest.mark.parametrize(
    ("overrides", "kind", "meant"),
    [
        ("+strategy.bucket_cap=4", "TypeError", "'bucket_cap_mb'"),
        ("+strategy.ddp_comm_hook.rnak=4", "ConfigurationError", "'rank'"),
        ("strategy.ddp_comm_hook.rank=0", "ConfigurationError", "at least 1"),
        ("strategy=topk strategy/ddp_comm_hook=powersgd", "ConfigurationError", "no option 'ratio'"),
        ("strategy.ddp_comm_hook=powersdg", "ConfigurationError", "'powersgd'"),
        ("strategy.model_averaging=dilocco", "ConfigurationError", "'diloco'"),
        ("strategy=shrink +strategy.on_failure.min_worldsize=2", "ConfigurationError", "'min_world_size'"),
        ("strategy.start_method=spwan", "ConfigurationError", "'spawn'"),
    ],
)
def test_a_wrong_option_is_refused_by_the_strategy_with_what_was_meant(overrides, kind, meant):
    with pytest.raises(InstantiationException) as raised:
        strategy_of("strategy=powersgd", *overrides.split())
    assert type(raised.value.__cause__).__name__ == kind
    assert meant in str(raised.value)


# ---------------------------------------------------------------------- how a program asks

APP = """IMPORT
import hydra

@hydra.main(version_base=None, config_path=".", config_name="main")
def main(config):
    print("rank", config.strategy.ddp_comm_hook.rank, config.trainer.mine, config.long.ddp_comm_hook.name)

main()
"""
QUIET = ("hydra.output_subdir=null", "hydra.run.dir=.", "hydra.sweep.dir=.", "hydra.sweep.subdir=.")


def write_files(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("statement", "search_path"),
    [("import lightning_ddp", ""), ("", "hydra: {searchpath: ['pkg://lightning_ddp.conf']}\n")],
    ids=["import", "search path"],
)
def test_a_program_imports_the_package_or_names_the_search_path(tmp_path, statement, search_path):
    main = "defaults: [{trainer: cpu}, {strategy: powersgd}, _self_]\nstrategy: {ddp_comm_hook: {rank: 7}}\n"
    files = {
        "app.py": APP.replace("IMPORT", statement),
        "main.yaml": main + search_path,
        "trainer/cpu.yaml": "mine: true\n",  # comes before ours
    }
    write_files(tmp_path, files)
    sweep = ["-m", "strategy.ddp_comm_hook.rank=3,5", "+lightning_ddp/strategy@long=bf16", *QUIET]
    result = run_script(tmp_path / "app.py", sweep, cwd=tmp_path).check()
    lines = [line for line in result.stdout.splitlines() if line.startswith("rank")]
    assert lines == ["rank 3 True bf16", "rank 5 True bf16"]


# ---------------------------------------------------------------------- who did not ask

PLAIN = """
strategy: ddp
trainer: {max_epochs: 3}
launcher: local
"""
GROUPED = """
defaults: [{trainer: default}, {optional launcher: local}, _self_]
strategy: ddp
"""
FILES = {
    "plain/main.yaml": PLAIN,
    "grouped/main.yaml": GROUPED,
    "grouped/trainer/default.yaml": "max_epochs: 3\n",
    "grouped/trainer/ddp.yaml": "defaults: [default]\nstrategy: ddp\n",
    "grouped/trainer/gpu.yaml": "defaults: [default]\naccelerator: mine\n",
}
FORMS = (
    "strategy=ddp_spawn",
    "strategy=null trainer=null launcher=slurm",
    "+x=1 ++strategy=a",
    "~strategy ~trainer ~launcher=local",
    "-m strategy=ddp,custom_ddp trainer.max_epochs=1,2 launcher=slurm",
    "--cfg job strategy={bucket_cap:4}",
    "--cfg hydra strategy=custom_ddp",
    "--help",
    "--info searchpath",
    "--info defaults",
    "--shell-completion query=bash",
    # errors
    "+strategy=custom_ddp",
    "strategy@trainer.strategy=powersgd",
    "strategy/ddp_comm_hook=topk",
    "trainer.max_epoch=3",
    # groups of its own that are called like ours
    "--config-path grouped trainer=ddp",
    "--config-path grouped trainer=multi_node",
    "--config-path grouped -m trainer=glob(*)",
    "--config-path grouped strategy=a launcher=slurm",
    "--config-path grouped --help",
)
NOT_ASKING = """
import os, sys
if sys.argv[1] == "import":
    import lightning_ddp
import hydra
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf
Plugins.instance()  # which looks for plugins, once for all forks
os.environ["COMP_LINE"] = "app.py strategy="

@hydra.main(version_base="1.3", config_path="plain", config_name="main")
def main(config):
    print(OmegaConf.to_yaml(config))

for form in FORMS:
    print("===", form, flush=True)
    pid = os.fork()
    if pid == 0:
        os.dup2(1, 2)
        sys.argv[1:] = [*form.split(), *([] if "--shell" in form else QUIET)]
        code = 1
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code
        finally:
            sys.stdout.flush()
            os._exit(code if isinstance(code, int) else 1)
    print("--- exit code", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.mark.slow
def test_importing_the_package_changes_nothing_for_a_program_with_such_keys_or_groups_of_its_own(tmp_path):
    script = f"FORMS, QUIET = {FORMS!r}, {QUIET!r}\n{NOT_ASKING}"
    write_files(tmp_path, {**FILES, "app.py": script})

    def printed(how: str) -> list[str]:
        result = run_script(tmp_path / "app.py", [how], {"HYDRA_FULL_ERROR": "0"}, cwd=tmp_path).check()
        return re.sub(r"\[[-\d]+ [\d:,]+\]", "[time]", result.stdout).split("=== ")[1:]

    with ThreadPoolExecutor(2) as pool:
        with_it, without = pool.map(printed, ("import", "no import"))
    assert len(without) == len(FORMS)
    assert with_it == without
    codes = [text.rpartition("--- exit code ")[2].strip() for text in without]
    assert codes == ["0"] * 11 + ["1"] * 4 + ["0", "1", "0", "1", "0"]


@pytest.mark.parametrize(
    ("main", "overrides", "expected"),
    [
        # a group that it names, and keys of its own beside it
        (
            "defaults: [{strategy: custom_ddp}, _self_]\nlauncher: a",
            ["strategy=powersgd", "launcher=b"],
            "powersgd",
        ),
        ("defaults: [{strategy: null}, _self_]", ["strategy=powersgd"], "powersgd"),
        ("defaults: [{strategy: '???'}, _self_]", ["strategy=powersgd"], "powersgd"),
        ("defaults: [{strategy@strategy: powersgd}, _self_]\nlauncher: a", ["launcher=b"], "powersgd"),
        ("defaults: [strategy/powersgd, _self_]\nlauncher: a", ["launcher=b"], "powersgd"),
        # one of a file that it uses
        ("defaults: [{strategy: null}, {experiment: ours}, _self_]", [], "powersgd"),
        ("defaults: [{trainer: default}, {strategy: custom_ddp}, _self_]", ["+experiment=ours"], "powersgd"),
        # a group of its own, of which it names a file that only the package has
        ("defaults: [{strategy: custom_ddp}, {trainer: gpu}, _self_]", ["strategy=mine"], "mine"),
        # one that is called like the package's: it has precedence
        ("defaults: [{strategy: custom_ddp}, {strategy@more: powersgd}, _self_]", [], "ours"),
        # by the long name
        ("launcher: a", ["+lightning_ddp/strategy@strategy=powersgd", "launcher=b"], "powersgd"),
        (
            "defaults: [{/lightning_ddp/strategy@strategy: powersgd}, _self_]\nlauncher: a",
            ["launcher=b"],
            "powersgd",
        ),
    ],
)
def test_a_group_takes_part_where_the_defaults_name_it(tmp_path, main, overrides, expected):
    experiment = "# @package _global_\ndefaults: [{override /strategy: powersgd}]\n"
    files = {
        "main.yaml": main,
        "experiment/ours.yaml": experiment,
        "trainer/default.yaml": "max_epochs: 3\n",
    }
    own = {"mine": "mine", "ours": "custom_ddp"}
    if expected in own:
        files[f"strategy/{own[expected]}.yaml"] = f"ddp_comm_hook: {{name: {expected}}}\n"
    write_files(tmp_path, files)
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
        config = hydra.compose("main", overrides)
    assert config.strategy.ddp_comm_hook.name == expected
    assert config.get("launcher", "b") == config.get("experiment", "b") == "b"


# ---------------------------------------------------------------------- LightningCLI

CLI = """
trainer:
  accelerator: cpu
  devices: 2
  logger: false
  strategy:
    class_path: lightning_ddp.CustomDDPStrategy
    init_args:
      ddp_comm_hook: {name: powersgd, rank: 3}
      model_averaging: {name: post_local_sgd, period: 4}
      timeout: "0:10:00"
      stall_timeout: "0:05:00"
      broadcast_buffers: auto
      uneven_inputs: join
      BUCKETS
"""


def test_lightning_cli_builds_the_strategy_from_its_yaml(tmp_path, capsys, monkeypatch, constructed):
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning 2.6 causes some
    from pytorch_lightning.cli import LightningCLI
    from pytorch_lightning.demos.boring_classes import BoringDataModule, BoringModel

    def run(buckets: str) -> Any:
        path = tmp_path / "config.yaml"
        path.write_text(CLI.replace("BUCKETS", buckets))
        monkeypatch.setattr("sys.argv", ["train.py", "--config", str(path)])
        return LightningCLI(BoringModel, BoringDataModule, run=False, seed_everything_default=False)

    assert isinstance(run("bucket_cap_mb: 10").trainer.strategy, lightning_ddp.CustomDDPStrategy)
    lightning_ddp.CustomDDPStrategy(
        ddp_comm_hook={"name": "powersgd", "rank": 3},
        model_averaging={"name": "post_local_sgd", "period": 4},
        timeout=timedelta(minutes=10),
        stall_timeout=timedelta(minutes=5),
        uneven_inputs="join",
        bucket_cap_mb=10,
    )
    found, expected = constructed
    assert found == expected
    for wrong, complaint in (("bucket_cap: 10", "bucket_cap"), ("bucket_cap_mb: ten", "bucket_cap_mb")):
        with pytest.raises(SystemExit, match="2"):
            run(wrong)
        assert complaint in capsys.readouterr().err
