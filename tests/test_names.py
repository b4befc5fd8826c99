"""Names: variants, the Trainer's old spellings, and both of Lightning's namespaces."""

from __future__ import annotations

import math
import re
from datetime import timedelta

import pytest
import pytorch_lightning as pl
import torch
from harness import run_script
from pytorch_lightning.strategies import DDPStrategy, ParallelStrategy, StrategyRegistry
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd

import lightning_ddp
from lightning_ddp import CustomDDPStrategy, available_variants, register_variant, variants
from lightning_ddp.__main__ import main
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.variants import BUILTIN

LOCAL_SGD = local_sgd.PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=20)
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


@pytest.fixture
def variant_name():
    name = "custom_ddp_for_a_test"
    yield name
    for registry in (variants._variants, *(registry for registry, _ in variants._joined)):
        registry.pop(name, None)


@pytest.fixture
def four_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


def test_each_of_lightnings_names_for_ddp_has_its_twin() -> None:
    names = [
        name for name in StrategyRegistry if re.fullmatch(r"ddp(_spawn|_fork|_notebook)?(_find_.*)?", name)
    ]
    assert len(names) == 12
    for name in names:
        theirs = StrategyRegistry[name]["init_params"].items()
        expected = {key: value for key, value in theirs if value != "popen"}
        assert StrategyRegistry[f"custom_{name}"]["init_params"] == expected


def test_the_command_lists_names_arguments_and_descriptions(capsys) -> None:
    assert main(["variants"]) == 0
    header, _, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["name", "arguments", "description"]
    rows = {line.split()[0]: line for line in lines}
    assert list(rows) == list(available_variants()) == sorted(rows)
    assert all(available_variants().values())
    for name, (description, arguments) in BUILTIN.items():
        assert rows[name].endswith(description)
        assert all(f"{key}={value!r}" in rows[name] for key, value in arguments.items())


def test_the_string_selects_our_strategy_with_its_arguments(variant_name, monkeypatch) -> None:
    given = {"bucket_cap_mb": 2, "start_method": "spawn"}
    register_variant(variant_name, description="small buckets", **given)
    assert available_variants()[variant_name] == "small buckets"
    calls, construct = [], CustomDDPStrategy.__init__

    def recorded(self, **arguments):
        calls.append(arguments)
        construct(self, **arguments)

    monkeypatch.setattr(CustomDDPStrategy, "__init__", recorded)
    trainer = pl.Trainer(strategy=variant_name, accelerator="cpu", devices=2, **QUIET)
    for kind in (CustomDDPStrategy, lightning_ddp.CustomDDPPlugin, DDPStrategy, ParallelStrategy):
        assert isinstance(trainer.strategy, kind)
    assert calls == [given]


def test_registering_the_same_again_is_allowed_and_another_is_not(variant_name) -> None:
    register_variant(variant_name, bucket_cap_mb=2)
    register_variant(variant_name, bucket_cap_mb=2)
    with pytest.raises(ConfigurationError, match=f"strategy name '{variant_name}' is taken"):
        register_variant(variant_name, bucket_cap_mb=3)
    with pytest.raises(ConfigurationError, match="strategy name 'ddp' is taken"):
        register_variant("ddp")


def test_a_name_of_lightning_is_refused_also_where_it_is_imported_later() -> None:
    script = "import lightning_ddp\nlightning_ddp.register_variant('ddp')\nimport pytorch_lightning"
    result = run_script(script, fresh=True)
    assert result.returncode == 1
    assert "ConfigurationError: register_variant('ddp') was called before Lightning" in result.stderr


@pytest.mark.parametrize("name", ["Custom_DDP", "", " custom", 5])
def test_a_name_that_lightning_could_never_find_is_refused(name) -> None:
    with pytest.raises(ConfigurationError, match="expected lower case"):
        register_variant(name)


def test_an_unknown_argument_names_the_closest() -> None:
    with pytest.raises(TypeError, match=r"argument 'bucket_cap_mbs'; did you mean 'bucket_cap_mb'\?"):
        register_variant("custom_ddp_x", bucket_cap_mbs=3)
    with pytest.raises(TypeError, match=r"argument 'bucket_cap'; did you mean 'bucket_cap_mb'\?"):
        CustomDDPStrategy(bucket_cap=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'size'; expected accelerator, "):
        CustomDDPStrategy(size=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "custom-ddp"}, "no strategy 'custom-ddp'; did you mean 'custom_ddp'?"),
        ({"strategy": "Custom_DDP_fp61"}, "did you mean 'custom_ddp_fp16'?"),
        ({"strategy": CustomDDPStrategy}, "strategy=CustomDDPStrategy is a class"),
        (
            {"plugins": [CustomDDPStrategy()]},
            "Instead of plugins= use strategy=CustomDDPStrategy(...)",
        ),
        ({"plugins": "custom_ddp"}, "or the name of a variant, strategy='custom_ddp'"),
        # not ours
        ({"strategy": "ddp_spwan"}, "You selected an invalid strategy name: `strategy='ddp_spwan'`"),
        ({"plugins": [3]}, "Found invalid type for plugin 3"),
        ({"plugins": [{}]}, "Found invalid type for plugin {}"),
    ],
)
def test_what_a_trainer_refuses_is_said_in_words_that_help(arguments, message) -> None:
    with pytest.raises((ValueError, MisconfigurationException), match=re.escape(message)):
        pl.Trainer(accelerator="cpu", devices=2, **QUIET, **arguments)


def test_a_notebook_is_told_the_variant_for_notebooks(monkeypatch) -> None:
    monkeypatch.setattr("pytorch_lightning.trainer.connectors.accelerator_connector._IS_INTERACTIVE", True)
    with pytest.raises(MisconfigurationException, match=r"`Trainer\(strategy='custom_ddp_notebook'\)`"):
        pl.Trainer(strategy="custom_ddp", accelerator="cpu", devices=2, **QUIET)
    pl.Trainer(strategy="custom_ddp_notebook", accelerator="cpu", devices=2, **QUIET)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"start_method": "thread"},
            "start_method='thread': expected 'popen', 'spawn', 'fork' or 'forkserver'",
        ),
        ({"ddp_comm_wrapper": lambda hook: hook}, "ddp_comm_wrapper wraps a hook"),
        ({"ddp_comm_hook": "bf16", "ddp_comm_state": object()}, "ddp_comm_state has no effect with the hook"),
        (
            {"ddp_comm_hook": local_sgd.post_localSGD_hook, "ddp_comm_state": LOCAL_SGD},
            "PostLocalSGDState .* not supported",
        ),
        ({"model_averaging_period": 4}, "model_averaging_period are not supported"),
        ({"broadcast_buffers": "never"}, "broadcast_buffers='never': expected 'auto', True or False"),
        ({"process_group_backend": "glo"}, "unknown backend 'glo'; expected "),
        ({"timeout": "60"}, "timeout='60': expected a datetime.timedelta or seconds"),
        ({"stall_timeout": math.nan}, "stall_timeout=nan: expected a datetime.timedelta or seconds"),
        ({"failure_grace_s": None}, "failure_grace_s=None: expected a datetime.timedelta or seconds"),
        ({"transport": "tcp"}, "transport='tcp': expected 'auto', 'gloo'"),
        ({"debug": "info"}, "debug='info': expected None or 'detail'"),
        ({"uneven_inputs": "joined"}, "uneven_inputs='joined': expected None, 'error' or 'join'"),
        ({"divide_by_initial_world_size": False}, "divide_by_initial_world_size=False needs uneven_inputs="),
        (
            {"divide_by_initial_world_size": False, "uneven_inputs": "error"},
            "divide_by_initial_world_size=False needs uneven_inputs=",
        ),
    ],
)
def test_arguments_that_cannot_take_effect_raise(arguments, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        CustomDDPStrategy(**arguments)


@pytest.mark.parametrize("duration", [90, 90.0, timedelta(seconds=90)])
def test_a_duration_is_a_timedelta_or_seconds(duration) -> None:
    names = ("timeout", "heartbeat_timeout_s", "failure_grace_s", "stall_timeout")
    strategy = CustomDDPStrategy(
        **dict.fromkeys(names, duration), on_failure={"name": "replace", "wait_s": duration}
    )
    settings = strategy._supervision
    assert strategy._group_timeout == strategy._timeout == timedelta(seconds=90)
    assert settings.heartbeat_timeout_s == settings.failure_grace_s == settings.stall_timeout_s == 90
    assert settings.recovery.wait_s == 90


@pytest.mark.filterwarnings("ignore:GPU available but not used")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"gpus": 2}, ("cuda", [0, 1])),
        ({"gpus": -1}, ("cuda", [0, 1, 2, 3])),
        ({"gpus": [0, 3]}, ("cuda", [0, 3])),
        ({"gpus": "0,3"}, ("cuda", [0, 3])),
        ({"gpus": "2,"}, ("cuda", [2])),
        ({"gpus": "3"}, ("cuda", [0, 1, 2])),
        ({"gpus": "-1"}, ("cuda", [0, 1, 2, 3])),
        # none: one process on the CPU
        ({"gpus": 0}, ("cpu", [0])),
        ({"gpus": []}, ("cpu", [0])),
        ({"gpus": "0"}, ("cpu", [0])),
        # beside or instead of Lightning's own
        ({"gpus": 2, "num_processes": 2, "accelerator": "cuda"}, ("cuda", [0, 1])),
        ({"num_processes": 3}, ("cpu", [0, 1, 2])),
        ({"devices": 2}, ("cuda", [0, 1])),
        ({"devices": 2, "accelerator": "cpu"}, ("cpu", [0, 1])),
    ],
)
def test_gpus_in_all_their_spellings(four_gpus, arguments, expected) -> None:
    trainer = lightning_ddp.Trainer(strategy="custom_ddp", **QUIET, **arguments)
    assert (trainer.strategy.root_device.type, trainer.device_ids) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpus": 8}, "gpus=8, but this machine has 4 GPUs"),
        ({"gpus": "0,4"}, r"gpus=\[0, 4\], but this machine has 4 GPUs"),
        ({"gpus": -2}, "gpus=-2: expected a number of GPUs, -1 for all"),
        ({"gpus": "a,b"}, "gpus='a,b': expected"),
        ({"gpus": ""}, "gpus='': expected"),
        ({"gpus": True}, "gpus=True: expected"),
        ({"gpus": 1.5}, "gpus=1.5: expected"),
        ({"gpus": [0, -1]}, r"gpus=\[0, -1\]: expected"),
        ({"gpus": [1, 1]}, "an index appears twice"),
        # contradictions
        ({"gpus": 2, "devices": 2}, "gpus=2 and devices=2 mean the same"),
        ({"num_processes": 2, "devices": 3}, "num_processes=2 and devices=3 mean the same"),
        ({"gpus": 2, "accelerator": "cpu"}, "gpus=2 means accelerator='gpu', but accelerator='cpu'"),
        (
            {"num_processes": 2, "accelerator": "gpu"},
            "num_processes=2 means accelerator='cpu', but accelerator='gpu'",
        ),
        ({"gpus": 2, "num_processes": 3}, "one process on each of 2 GPUs, but num_processes=3"),
        ({"num_processes": 0}, "num_processes=0: expected a number of processes from 1"),
    ],
)
def test_malformed_and_contradictory_spellings(four_gpus, arguments, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        lightning_ddp.Trainer(**arguments)


def test_without_gpus_the_spelling_for_the_cpu_is_named(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for gpus, number in ((2, 2), (-1, 2), ("0,1,2", 3)):
        with pytest.raises(ConfigurationError, match=f"has 0 GPUs; for .* pass num_processes={number}"):
            lightning_ddp.Trainer(gpus=gpus)


MOST_MODULES = 60
"""Of the package, that its import may load; each costs 0.1 to 3 ms."""
MOST_OTHER_MODULES = 3
"""Of other packages, that it may load where Lightning has been imported."""


ONLY_LIGHTNING = "import lightning_ddp\nimport lightning as pl"
BOTH = "import pytorch_lightning\nimport lightning_ddp\nimport lightning as pl"
BOTH_THE_OTHER = "import lightning\nimport lightning_ddp\nimport pytorch_lightning as pl"


@pytest.mark.parametrize(
    ("imports", "expected"),
    [
        pytest.param("import pytorch_lightning as pl", "pytorch_lightning", marks=pytest.mark.exhaustive),
        ("import lightning.pytorch as pl", "lightning"),
        pytest.param(
            "import lightning_ddp\nimport pytorch_lightning as pl",
            "pytorch_lightning",
            marks=pytest.mark.slow,
        ),
        pytest.param(ONLY_LIGHTNING, "lightning", marks=pytest.mark.slow),
    ],
)
def test_the_namespace_that_the_user_imports_is_used(imports, expected) -> None:
    script = f"""
import inspect, sys
{imports}
before = {{*sys.modules}}
signature, asked = inspect.signature, []
inspect.signature = lambda of, **options: asked.append(of) or signature(of, **options)
import lightning_ddp
assert len(asked) == len({{*asked}}), "a signature takes 0.1 ms, and there are many variants"
ours = {{name for name in sys.modules if name.startswith("lightning_ddp.")}}
assert len(ours) <= {MOST_MODULES}, sorted(ours)
others = {{*sys.modules}} - before - {{*ours, "lightning_ddp"}}
assert len(others) <= {MOST_OTHER_MODULES}, sorted(others)
for expensive in ("hydra", "lightning_ddp.ddp.module", "lightning_ddp.tools"):
    assert expensive not in sys.modules, expensive
assert "available_hooks" in dir(lightning_ddp.hooks) and "hooks" in dir(lightning_ddp)
assert {{*lightning_ddp.__all__}} <= {{*dir(lightning_ddp)}}
from lightning_ddp import *
assert DataParallel is lightning_ddp.DataParallel
assert all(callable(globals()[name]) for name in lightning_ddp.__all__)  # and no room of the same name
from lightning_ddp.callbacks import CommunicationMonitor, WorldChange
assert "lightning_ddp.elastic.recovery" not in sys.modules, "what recovers is imported where it may be needed"
assert BucketedDDP.__module__ == "lightning_ddp.ddp.module"
assert not hasattr(lightning_ddp, "no_such_name")
assert issubclass(lightning_ddp.Trainer, pl.Trainer)
trainer = pl.Trainer(strategy="custom_ddp", accelerator="cpu", devices=2, logger=False)
assert isinstance(trainer.strategy, lightning_ddp.CustomDDPStrategy)
for callback in (lightning_ddp.callbacks.CommunicationMonitor(), lightning_ddp.Trainer(logger=False)):
    modules = {{c.__module__.split(".")[0] for c in type(callback).__mro__}}
    (base,) = modules & {{"lightning", "pytorch_lightning"}}
    assert base == {expected!r}
    other = {{"lightning": "pytorch_lightning", "pytorch_lightning": "lightning.pytorch"}}[{expected!r}]
    assert other not in sys.modules
"""
    run_script(script, fresh=True).check()


IN_BOTH = """
import copy, pickle, sys
IMPORTS
from lightning_ddp import CustomDDPStrategy, _lightning

class Mine(CustomDDPStrategy):
    def __init__(self, size=3, **arguments):
        super().__init__(bucket_cap_mb=size, **arguments)

base = sys.modules[pl.Trainer.__module__.removesuffix(".trainer.trainer")].strategies.DDPStrategy
quiet = dict(accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
assert issubclass(Mine, base) and issubclass(Mine, base.__mro__[2])
lightning_ddp.register_variant("custom_ddp_later", bucket_cap_mb=2)
for strategy in ("custom_ddp", "custom_ddp_later", CustomDDPStrategy(), Mine(size=4)):
    used = pl.Trainer(strategy=strategy, **quiet).strategy
    assert type(used).__mro__.index(base) > type(used).__mro__.index(CustomDDPStrategy)
    launchers = sys.modules[base.__module__.replace("ddp", "launchers")]
    assert isinstance(used.launcher, launchers._SubprocessScriptLauncher)
for twin in (pickle.loads(pickle.dumps(used)), copy.deepcopy(used)):
    assert type(twin) is type(used)
    assert twin._wrapper_options == used._wrapper_options
assert type(used).__name__ == "Mine"
"""


@pytest.mark.parametrize(
    "imports", [BOTH, BOTH_THE_OTHER, "import lightning, pytorch_lightning\n" + ONLY_LIGHTNING]
)
def test_with_both_imported_a_strategy_becomes_one_of_the_trainers(imports) -> None:
    run_script(IN_BOTH.replace("IMPORTS", imports)).check()


TRAINED = """
import sys
IMPORTS
import torch

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum() * (1 + self.trainer.global_rank)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self):
        assert isinstance(self.trainer.strategy, lightning_ddp.CustomDDPStrategy)
        assert not {"hydra", "omegaconf"} & set(sys.modules), "the script does not use them"
        weights = self.all_gather(self.layer.weight.detach())
        assert weights.shape[0] == 2 and torch.equal(weights[0], weights[1])
        roots = [root for root in ("lightning.pytorch", "pytorch_lightning") if root in sys.modules]
        print("trained with", *roots, flush=True)

if __name__ == "__main__":
    strategy = lightning_ddp.CustomDDPStrategy(start_method=sys.argv[1])
    options = dict(accelerator="cpu", devices=2, max_steps=2, logger=False, enable_checkpointing=False)
    trainer = pl.Trainer(strategy=strategy, enable_progress_bar=False, enable_model_summary=False, **options)
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2))
"""


@pytest.mark.parametrize(
    ("imports", "start_method"),
    [
        *((BOTH, start_method) for start_method in ("popen", "spawn", "fork")),
        *(pytest.param(ONLY_LIGHTNING, each, marks=pytest.mark.slow) for each in ("popen", "spawn")),
        pytest.param(BOTH_THE_OTHER, "popen", marks=pytest.mark.slow),
    ],
)
def test_each_start_method_trains_with_the_namespace_of_the_trainer(imports, start_method) -> None:
    is_alone = imports == ONLY_LIGHTNING
    result = run_script(TRAINED.replace("IMPORTS", imports), [start_method], fresh=is_alone).check()
    roots = "lightning.pytorch" if is_alone else "lightning.pytorch pytorch_lightning"
    assert result.stdout.count(f"trained with {roots}\n") == 2
