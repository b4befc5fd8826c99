"""Names: variants, the Trainer's old spellings, and both of Lightning's namespaces."""

from __future__ import annotations

import pytest
import pytorch_lightning as pl
from harness import run_script
from pytorch_lightning.accelerators import CUDAAccelerator
from pytorch_lightning.strategies import DDPStrategy, ParallelStrategy, StrategyRegistry

import lightning_ddp
from lightning_ddp import CustomDDPStrategy, available_variants, register_variant
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.trainer import _parse_gpus, _translate

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


@pytest.fixture
def variant_name():
    name = "custom_ddp_for_a_test"
    yield name
    StrategyRegistry.pop(name, None)


@pytest.fixture
def four_gpus(monkeypatch):
    monkeypatch.setattr(CUDAAccelerator, "auto_device_count", staticmethod(lambda: 4))


def test_builtin_variants_are_registered_with_descriptions() -> None:
    variants = available_variants()
    assert {"custom_ddp", "custom_ddp_spawn", "custom_ddp_fork", "custom_ddp_notebook"} <= set(variants)
    assert all(variants.values())
    assert list(variants) == sorted(variants)


def test_the_string_selects_our_strategy_with_its_arguments(variant_name) -> None:
    register_variant(variant_name, description="small buckets", bucket_cap_mb=2, start_method="spawn")
    assert available_variants()[variant_name] == "small buckets"
    trainer = pl.Trainer(strategy=variant_name, accelerator="cpu", devices=2, **QUIET)
    assert type(trainer.strategy) is CustomDDPStrategy
    assert isinstance(trainer.strategy, DDPStrategy)
    assert isinstance(trainer.strategy, ParallelStrategy)
    assert trainer.strategy._ddp_kwargs["bucket_cap_mb"] == 2
    assert trainer.strategy.launcher._start_method == "spawn"


def test_registering_the_same_again_is_allowed_and_another_is_not(variant_name) -> None:
    register_variant(variant_name, bucket_cap_mb=2)
    register_variant(variant_name, bucket_cap_mb=2)
    with pytest.raises(ConfigurationError, match=f"strategy name '{variant_name}' is taken"):
        register_variant(variant_name, bucket_cap_mb=3)
    with pytest.raises(ConfigurationError, match="strategy name 'ddp' is taken"):
        register_variant("ddp")


@pytest.mark.parametrize("name", ["Custom_DDP", "", " custom"])
def test_a_name_that_lightning_could_never_find_is_refused(name) -> None:
    with pytest.raises(ConfigurationError, match="use lower case"):
        register_variant(name)


def test_an_unknown_argument_names_the_closest() -> None:
    with pytest.raises(TypeError, match=r"no argument 'bucket_cap_mbs'; did you mean 'bucket_cap_mb'\?"):
        register_variant("custom_ddp_x", bucket_cap_mbs=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'bucket_size'"):
        CustomDDPStrategy(bucket_size=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"start_method": "thread"},
            "start_method='thread'; there are 'popen', 'spawn', 'fork', 'forkserver'",
        ),
        ({"ddp_comm_wrapper": lambda hook: hook}, "ddp_comm_wrapper wraps a hook"),
        ({"model_averaging_period": 4}, "post-local SGD needs both"),
        ({"debug": "info"}, "debug='info'; there are None, 'detail'"),
        ({"uneven_inputs": "joined"}, "uneven_inputs='joined'; there are None, 'error', 'join'"),
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


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (2, [0, 1]),
        (-1, [0, 1, 2, 3]),
        ([0, 3], [0, 3]),
        ("0,3", [0, 3]),
        ("2,", [2]),
        ("3", [0, 1, 2]),
        ("-1", [0, 1, 2, 3]),
        (0, None),
        ([], None),
        ("0", None),
    ],
)
def test_gpus_in_all_their_spellings(four_gpus, gpus, expected) -> None:
    assert _parse_gpus(gpus) == expected


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        (8, "gpus=8, but this machine has 4 GPUs"),
        ("0,7", r"gpus=\[0, 7\], but this machine has 4 GPUs"),
        (-2, "gpus=-2: expected a number of GPUs, -1 for all"),
        ("a,b", "gpus='a,b': expected"),
        ("", "gpus='': expected"),
        (True, "gpus=True: expected"),
        (1.5, "gpus=1.5: expected"),
        ([0, -1], r"gpus=\[0, -1\]: expected"),
        ([1, 1], "an index appears twice"),
    ],
)
def test_malformed_gpus(four_gpus, gpus, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        _parse_gpus(gpus)


def test_gpus_stand_for_accelerator_and_devices(four_gpus) -> None:
    assert _translate(2, None, {}) == {"accelerator": "gpu", "devices": [0, 1]}
    assert _translate(2, 2, {"accelerator": "cuda"}) == {"accelerator": "cuda", "devices": [0, 1]}
    assert _translate(None, 3, {}) == {"accelerator": "cpu", "devices": 3}
    assert _translate(0, None, {}) == {"accelerator": "cpu", "devices": 1}
    assert _translate(None, None, {"devices": 2}) == {}


@pytest.mark.parametrize(
    ("gpus", "num_processes", "given", "message"),
    [
        (2, None, {"devices": 2}, "gpus=2 and devices=2 say the same thing"),
        (None, 2, {"devices": 3}, "num_processes=2 and devices=3 say the same thing"),
        (2, None, {"accelerator": "cpu"}, "gpus=2 means accelerator='gpu', but accelerator='cpu'"),
        (None, 2, {"accelerator": "gpu"}, "num_processes=2 means accelerator='cpu', but accelerator='gpu'"),
        (2, 3, {}, "gpus=2 is one process on each of 2 GPUs, but num_processes=3"),
        (None, 0, {}, "num_processes=0: expected a number of processes from 1"),
    ],
)
def test_contradictory_spellings(four_gpus, gpus, num_processes, given, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        _translate(gpus, num_processes, given)


def test_trainer_takes_the_old_spellings() -> None:
    trainer = lightning_ddp.Trainer(strategy="custom_ddp", num_processes=2, **QUIET)
    assert isinstance(trainer, pl.Trainer)
    assert (trainer.num_devices, trainer.accelerator.__class__.__name__) == (2, "CPUAccelerator")
    available = CUDAAccelerator.auto_device_count()
    with pytest.raises(ConfigurationError, match=rf"gpus=64, but this machine has {available} GPU"):
        lightning_ddp.Trainer(strategy="custom_ddp", gpus=64)


LOADED_BY_THE_IMPORT = {
    "_lightning",
    "comm",
    "communicating_fit",
    "communication",
    "conf",
    "conf.store",
    "errors",
    "launch",
    "launch.hydra_parent",
    "launch.import_hook",
    "launch.init_method",
    "launch.job_events",
    "launch.orphans",
    "launch.resolved",
    "parallel",
    "parallel.snapshot",
    "reconcile",
    "reconcile.settings",
    "strategy",
    "trainer",
    "uneven_fit",
    "variants",
}
"""Modules below the package, with all of `comm` and `communication`; each costs 0.1 to 3 ms."""


@pytest.mark.parametrize(
    ("imports", "expected"),
    [
        ("import pytorch_lightning as pl", "pytorch_lightning"),
        ("import lightning.pytorch as pl", "lightning"),
        ("import lightning_ddp\nimport pytorch_lightning as pl", "pytorch_lightning"),
    ],
)
def test_the_namespace_that_the_user_imported_is_used(imports, expected) -> None:
    pytest.importorskip("lightning", reason="the test requirements install it")
    script = f"""
import sys
{imports}
import lightning_ddp
loaded = {{name.partition(".")[2] for name in sys.modules if name.startswith("lightning_ddp.")}}
needed = {{name for name in loaded if not name.startswith(("comm.", "communication."))}}
assert needed == {LOADED_BY_THE_IMPORT!r}, needed ^ {LOADED_BY_THE_IMPORT!r}
assert "available_hooks" in dir(lightning_ddp.hooks) and "hooks" in dir(lightning_ddp)
assert {{*lightning_ddp.__all__}} <= {{*dir(lightning_ddp)}}
from lightning_ddp import *
assert DataParallel is lightning_ddp.DataParallel
assert BucketedDDP.__module__ == "lightning_ddp.parallel.module"
assert not hasattr(lightning_ddp, "no_such_name")
base = next(c for c in lightning_ddp.CustomDDPStrategy.__mro__ if c.__name__ == "DDPStrategy")
assert base.__module__.split(".")[0] == {expected!r}
other = {{"lightning": "pytorch_lightning", "pytorch_lightning": "lightning.pytorch"}}[{expected!r}]
assert other not in sys.modules
trainer = pl.Trainer(strategy="custom_ddp", accelerator="cpu", devices=2, logger=False)
assert type(trainer.strategy) is lightning_ddp.CustomDDPStrategy
assert isinstance(lightning_ddp.Trainer(logger=False), pl.Trainer)
"""
    run_script(script).check()
