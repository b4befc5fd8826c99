"""Configuration groups: what they compose to, what they refuse and how, and that they agree with the code."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import pickle
import re
import tomllib
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import hydra
import pytest
from harness import run_script
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf

import lightning_ddp
from lightning_ddp.averaging import averager_options, parse_averager
from lightning_ddp.conf.check import explain
from lightning_ddp.conf.pages import FOLDER, strategy_pages
from lightning_ddp.conf.schema import (
    AVERAGERS,
    HOOKS,
    ON_FAILURE,
    SET_BY_THE_TRAINER,
    STRATEGY,
    all_schemas,
)
from lightning_ddp.hooks import catalogue, hook_options, parse_hook, register_hook
from lightning_ddp.supervise.settings import parse_on_failure
from lightning_ddp.variants import BUILTIN, variant_arguments

ROOT = Path(__file__).resolve().parents[1]
PRIMARY = "lightning_ddp_test"
SHORT_NAMES = {name: name.removeprefix("custom_ddp_") for name in BUILTIN}


def composed(*overrides: str) -> Any:
    defaults = [{"trainer": "cpu"}, {"strategy": "custom_ddp"}, {"launcher": "local"}, "_self_"]
    ConfigStore.instance().store(name=PRIMARY, node={"defaults": defaults, "batch": 32})
    with hydra.initialize(version_base="1.3", config_path=None):
        return hydra.compose(PRIMARY, list(overrides))


def message_of(*overrides: str) -> str:
    with pytest.raises(HydraException) as raised:
        composed(*overrides)
    return str(raised.value)


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


def test_the_generated_files_are_those_that_the_code_describes():
    on_disk = {str(p.relative_to(FOLDER)): p.read_text() for p in FOLDER.glob("strategy/**/*.yaml")}
    assert on_disk == strategy_pages(), "run `python -m lightning_ddp.conf.pages`"


def test_every_argument_of_the_strategy_is_an_option_with_its_default_and_a_description():
    parameters = dict(inspect.signature(lightning_ddp.CustomDDPStrategy).parameters)
    options = {option.name: option for option in STRATEGY.options}
    assert set(options) == set(parameters) - set(SET_BY_THE_TRAINER)
    assert {name: option.default for name, option in options.items()} == {
        name: parameters[name].default for name in options
    }
    assert [name for name, option in options.items() if not option.description] == []
    assert options["start_method"].choices == ("popen", "spawn", "fork", "forkserver")
    assert (options["bucket_cap_mb"].type, options["init_sync"].type) == (float | None, bool)


@pytest.mark.parametrize(("schemas", "owners"), [(HOOKS, hook_options()), (AVERAGERS, averager_options())])
def test_every_option_of_a_hook_or_averager_is_there_with_its_default_and_a_description(schemas, owners):
    assert set(schemas) == set(owners)
    for name, owner in owners.items():
        fields = {f.name: f for f in dataclasses.fields(owner) if f.init}
        assert {option.name for option in schemas[name].options} == set(fields)
        assert {field.name for field in dataclasses.fields(schemas[name].cls)} == {"name", *fields}
        for option in schemas[name].options:
            default = fields[option.name].default
            assert option.default == ("???" if default is dataclasses.MISSING else default)
            assert option.description


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_a_file_makes_the_strategy_that_the_variant_of_its_name_makes(name, constructed):
    strategy = hydra.utils.instantiate(composed(f"strategy={SHORT_NAMES[name]}").strategy)
    assert isinstance(strategy, lightning_ddp.CustomDDPStrategy)
    lightning_ddp.CustomDDPStrategy(**variant_arguments(name))
    found, expected = constructed
    assert found == expected


def test_every_hook_and_averager_can_be_chosen_and_is_that_of_the_code():
    for name in HOOKS:
        node = composed(f"strategy/ddp_comm_hook={name}").strategy.ddp_comm_hook
        assert parse_hook(OmegaConf.to_container(node)) == parse_hook(name)
    for node in (
        composed("strategy=powersgd").strategy,
        OmegaConf.create(variant_arguments("custom_ddp_powersgd")),
    ):
        assert parse_hook(OmegaConf.to_container(node)["ddp_comm_hook"]) == parse_hook("powersgd")
    for name in AVERAGERS:
        node = composed(f"strategy/model_averaging={name}").strategy.model_averaging
        spec = {"name": name, "periods": {4: 2, 16: 0}} if name == "hierarchical_sgd" else name
        assert parse_averager(OmegaConf.to_container(node)) == parse_averager(spec)
    for name in ON_FAILURE:
        node = composed(f"strategy/on_failure={name}").strategy.on_failure
        assert parse_on_failure(OmegaConf.to_container(node)) == parse_on_failure(name)
    node = composed("strategy/on_failure=shrink", "strategy.on_failure.min_world_size=2").strategy.on_failure
    assert parse_on_failure(OmegaConf.to_container(node)).min_world_size == 2
    assert "did you mean 'min_world_size'" in message_of(
        "strategy=shrink", "strategy.on_failure.min_worldsize=2"
    )


def test_the_files_are_package_data():
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = configuration["tool"]["setuptools"]["package-data"]["lightning_ddp"]
    shipped = {path for pattern in patterns for path in FOLDER.parent.glob(pattern)}
    files = set(FOLDER.rglob("*.yaml"))
    assert len(files) >= 30
    assert files <= shipped


# ---------------------------------------------------------------------- composition


def test_a_trainer_is_built_with_the_chosen_strategy_and_plain_values(constructed):
    config = composed(
        "trainer.max_epochs=3",
        "trainer.logger=false",
        "strategy=powersgd",
        "strategy.ddp_comm_hook.rank=3",
        "strategy.stall_timeout=90",
        "strategy.timeout.minutes=10",
        "strategy.bucket_cap_mb_list=[1,2.5]",
    )
    trainer = hydra.utils.instantiate(config.trainer)
    assert type(trainer) is lightning_ddp.Trainer
    assert (trainer.max_epochs, trainer.num_devices) == (3, 2)
    assert isinstance(trainer.strategy, lightning_ddp.CustomDDPStrategy)
    (given,) = constructed
    assert given["ddp_comm_hook"] == parse_hook({"name": "powersgd", "rank": 3})
    assert (given["timeout"], given["stall_timeout"]) == (timedelta(minutes=10), 90)
    assert given["bucket_cap_mb_list"] == [1, 2.5]
    assert type(given["bucket_cap_mb_list"]) is list


def test_a_registered_hook_is_chosen_by_its_name(monkeypatch):
    monkeypatch.setattr(catalogue, "_registered", {})
    assert "unknown communication hook 'mine'" in message_of("strategy.ddp_comm_hook=mine")
    register_hook("mine", message_of)
    strategy = hydra.utils.instantiate(composed("strategy.ddp_comm_hook=mine").strategy)
    assert strategy._communication._function is message_of


@pytest.mark.parametrize(("text", "value"), [("50", 50), ("2.5", 2.5), ("null", None)])
def test_the_cap_of_buckets_is_a_number_of_either_type(text, value, constructed):
    hydra.utils.instantiate(composed(f"strategy.bucket_cap_mb={text}").strategy)
    assert constructed[0]["bucket_cap_mb"] == value


def test_options_are_typed_and_survive_a_pickle_and_a_copy():
    config = composed("strategy=powersgd", "strategy/model_averaging=diloco")
    for other in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert other == config
        assert OmegaConf.get_type(other.strategy) is STRATEGY.cls
        assert OmegaConf.get_type(other.strategy.ddp_comm_hook) is HOOKS["powersgd"].cls


@pytest.mark.parametrize(
    ("overrides", "periods"),
    [
        (["+strategy.model_averaging.periods.8=4"], {4: 2, 8: 4, 16: 0}),
        (["strategy.model_averaging.periods.4=3"], {4: 3, 16: 0}),
        (["~strategy.model_averaging.periods.4", "+strategy.model_averaging.periods={2: 2}"], {2: 2, 16: 0}),
    ],
)
def test_periods_can_be_added_changed_and_removed_on_the_command_line(overrides, periods, constructed):
    hydra.utils.instantiate(composed("strategy=hierarchical_sgd", *overrides).strategy)
    assert constructed[0]["model_averaging"].options.periods == periods


def test_hooks_may_be_given_as_text_as_a_list_and_as_a_function(constructed):
    for given, name in (("bf16", "bf16"), ("[bf16,{name:powersgd,rank:4}]", "bf16+powersgd")):
        hydra.utils.instantiate(composed(f"strategy.ddp_comm_hook={given}").strategy)
        assert constructed[-1]["ddp_comm_hook"].name == name
    path = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook"
    given = f"{{_target_:hydra.utils.get_method,path:{path}}}"
    hydra.utils.instantiate(composed(f"strategy.ddp_comm_hook={given}").strategy)
    assert constructed[-1]["ddp_comm_hook"].__name__ == "fp16_compress_hook"


def test_the_groups_can_be_placed_below_other_keys_and_taken_from_the_store_by_their_long_names():
    config = composed("+lightning_ddp/strategy@trainer.strategy=powersgd", "~strategy")
    assert OmegaConf.get_type(config.trainer.strategy) is STRATEGY.cls
    assert OmegaConf.get_type(config.trainer.strategy.ddp_comm_hook) is HOOKS["powersgd"].cls
    assert "strategy" not in config
    assert composed("~strategy").trainer.strategy == "auto"


def test_launchers(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
    config = composed("launcher=torchrun", "trainer=multi_node")
    assert (config.trainer.devices, config.trainer.num_nodes) == (4, 3)
    launcher = {"nodes": 1, "tasks_per_node": 1, "timeout_min": 60, "cpus_per_task": None}
    missing = MissingConfigException("no file", "hydra/launcher/submitit_slurm", ["basic"])
    assert "pip install hydra-submitit-launcher" in explain(missing, {"launcher"})
    repo = ConfigStore.instance().repo["hydra"]["launcher"]
    monkeypatch.setitem(repo, "submitit_slurm.yaml", None)
    ConfigStore.instance().store(group="hydra/launcher", name="submitit_slurm", node=launcher)
    with hydra.initialize(version_base="1.3", config_path=None):
        config = hydra.compose(
            PRIMARY, ["launcher=slurm", "trainer=multi_node", "trainer.devices=8"], return_hydra_config=True
        )
    assert (config.hydra.launcher.nodes, config.hydra.launcher.tasks_per_node) == (2, 8)


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("override", "path", "meant"),
    [
        ("strategy.bucket_cap=4", "strategy.bucket_cap", "'bucket_cap_mb'"),
        ("+strategy.static_grph=true", "strategy.static_grph", "'static_graph'"),
        ("strategy.ddp_comm_hook.rnak=4", "strategy.ddp_comm_hook.rnak", "'rank'"),
        ("+strategy.ddp_comm_hook.rnak=4", "strategy.ddp_comm_hook.rnak", "'rank'"),
        ("strategy.ddp_comm_hook.rank=four", "strategy.ddp_comm_hook.rank", "Integer"),
        ("strategy.ddp_comm_hook.rank=0", "strategy.ddp_comm_hook", "at least 1"),
        ("strategy.ddp_comm_hook.warm_start=3.5", "strategy.ddp_comm_hook.warm_start", "bool"),
        ("strategy.ddp_comm_hook=[bf16,topk]", "strategy.ddp_comm_hook", "strategy=custom_ddp"),
        (
            "strategy=topk strategy/ddp_comm_hook=powersgd",
            "strategy.ddp_comm_hook.ratio",
            "(In 'strategy/topk'.)",
        ),
        ("strategy.ddp_comm_hook=powersdg", "strategy.ddp_comm_hook", "'powersgd'"),
        ("strategy.model_averaging=dilocco", "strategy.model_averaging", "'diloco'"),
        (
            "strategy.model_averaging={name:slowmo,slow_mometum:0.1}",
            "strategy.model_avera",
            "'slow_momentum'",
        ),
        ("strategy.start_method=spwan", "strategy.start_method", "'spawn'"),
        ("strategy.broadcast_buffers=atuo", "strategy.broadcast_buffers", "'auto'"),
        ("strategy.bucket_cap_mb=25MB", "strategy.bucket_cap_mb", "Float"),
        ("strategy.bucket_cap_mb_list=[1,two]", "strategy.bucket_cap_mb_list[1]", "Float"),
        ("strategy.timeout.minuets=3", "strategy.timeout.minuets", "'minutes'"),
        ("strategy.stall_timeout.minutes=soon", "strategy.stall_timeout.minutes", "Float"),
        ("trainer.max_epoch=3", "trainer.max_epoch", "'max_epochs'"),
        ("trainer.max_epochs=many", "trainer.max_epochs", "Integer"),
        ("strategy=powersdg", "strategy", "'powersgd'"),
        ("strategy/ddp_comm_hook=topkk", "strategy/ddp_comm_hook", "'topk'"),
        ("strategy/ddp_com_hook=topk", "strategy/ddp_com_hook", "'strategy/ddp_comm_hook'"),
        ("trainer=gpus", "trainer", "'gpu'"),
    ],
)
def test_a_wrong_option_is_refused_with_its_path_and_what_was_meant(override, path, meant):
    is_choice = override.startswith(("strategy=", "trainer="))
    message = message_of(*([] if is_choice else ["strategy=powersgd"]), *override.split())
    assert message.startswith(path), message
    assert meant in message


def test_errors_of_the_users_own_options_are_hydras():
    assert "Could not override 'bacth'" in message_of("bacth=3")


def test_a_value_that_only_the_job_can_resolve_is_not_refused():
    config = composed("strategy=powersgd", "strategy.ddp_comm_hook.rank=${oc.env:LIGHTNING_DDP_NO_SUCH}")
    assert OmegaConf.is_interpolation(config.strategy.ddp_comm_hook, "rank")


# ---------------------------------------------------------------------- when Hydra is imported

LAZY = """
import sys
import lightning_ddp
unwanted = [name for name in sys.modules if name.split(".")[0] in ("hydra", "omegaconf", "hydra_plugins")]
assert not unwanted, unwanted
import hydra
from hydra.core.config_store import ConfigStore
assert "lightning_ddp" not in ConfigStore.instance().repo
ConfigStore.instance().store(name="main", node={"defaults": [{"strategy": "custom_ddp"}]})

@hydra.main(version_base=None, config_path=None, config_name="main")
def main(config):
    assert "strategy" in ConfigStore.instance().repo["lightning_ddp"]
    print("rank", config.strategy.ddp_comm_hook.rank)

main()
"""

SEARCH_PATH = """
import pathlib
import hydra

for wrong in ("strategy.ddp_comm_hook.rnak=3", "strategy.ddp_comm_hook.rank=0"):
    with hydra.initialize_config_dir(str(pathlib.Path(__file__).parent), version_base=None):
        try:
            hydra.compose("main", [wrong])
        except hydra.errors.HydraException as error:
            print(error)

@hydra.main(version_base=None, config_path=".", config_name="main")
def main(config):
    print("rank", config.strategy.ddp_comm_hook.rank, config.trainer.mine)

main()
"""

QUIET = ("hydra.output_subdir=null", "hydra.run.dir=.", "hydra.sweep.dir=.", "hydra.sweep.subdir=.")


def test_hydra_is_imported_by_the_script_alone_and_then_knows_the_groups():
    result = run_script(LAZY, ["-m", "strategy=powersgd", "strategy.ddp_comm_hook.rank=3,5", *QUIET]).check()
    assert [line for line in result.stdout.splitlines() if line.startswith("rank")] == ["rank 3", "rank 5"]


def test_a_script_that_names_the_search_path_need_not_import_the_package(tmp_path):
    (tmp_path / "app.py").write_text(SEARCH_PATH)
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "cpu.yaml").write_text("mine: true\n")  # comes before ours
    (tmp_path / "main.yaml").write_text(
        "defaults: [{trainer: cpu}, {strategy: powersgd}, _self_]\n"
        "hydra: {searchpath: ['pkg://lightning_ddp.conf']}\n"
        "strategy: {ddp_comm_hook: {rank: 7}}\n"
    )
    sweep = ["-m", "strategy.start_method=fork,spawn,popen", *QUIET]
    result = run_script(tmp_path / "app.py", sweep, cwd=tmp_path).check()
    lines = [line for line in result.stdout.splitlines() if not line.startswith("[")]
    assert lines[0].startswith(
        "strategy.ddp_comm_hook.rnak: ddp_comm_hook powersgd has no option 'rnak'; did"
    )
    assert lines[1].startswith("strategy.ddp_comm_hook: communication hook 'powersgd': rank=0")
    assert lines[2:] == ["rank 7 True"] * 3


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
from omegaconf import OmegaConf
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


def write_files(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text)


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
        **({"strategy/mine.yaml": "ddp_comm_hook: {name: mine}\n"} if "mine" in expected else {}),
    }
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


def test_schemas_are_made_once():
    assert len(all_schemas()) == len(HOOKS) + len(AVERAGERS) + len(ON_FAILURE) + 3
