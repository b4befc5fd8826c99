"""The private names of torch, Lightning, Hydra and OmegaConf that the package uses: all in one table.

A dependency that drops one fails here, with its version and the places of use. Whether the names do what they
are used for, the tests of those features find; here is only what no other test would find.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import inspect
import pkgutil
import queue
import random
import re
import signal
import sys
from array import array
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from lightning_fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
from pytorch_lightning.demos.boring_classes import BoringModel
from pytorch_lightning.strategies import DDPStrategy

import lightning_ddp
from lightning_ddp import _lightning
from lightning_ddp._torch import root_of_mesh, without_engine_context
from lightning_ddp.errors import UnsupportedVersionError

PACKAGE = Path(lightning_ddp.__file__).parent
DEPENDENCIES = ("torch", "pytorch_lightning", "lightning_fabric", "hydra", "omegaconf", "torchmetrics")
CONNECTORS = "pytorch_lightning.trainer.connectors"
LAUNCHERS = "pytorch_lightning.strategies.launchers"

# dependencies warn of each other, in versions that are not the pinned ones
pytestmark = pytest.mark.filterwarnings("ignore")

NAMES = {
    "torch": "_foreach_add_ _foreach_copy_ _foreach_mul_",
    "torch.Tensor": "_post_accumulate_grad_hooks _use_count",
    "torch._C": "?_get_obj_in_tls ?_is_key_in_tls ?_remove_obj_from_tls ?_stash_obj_in_tls",
    "torch._C._distributed_c10d.FakeProcessGroup": "_create_internal",
    "torch._C._dynamo.eval_frame": "?_FrameAction ?_FrameExecStrategy",
    "torch/_dynamo/eval_frame.py": "_orig_mod _torchdynamo_disable",
    "torch.autograd": "_profiler_enabled _unsafe_preserve_version_counter",
    "torch.autograd.Variable": "_execution_engine",
    "torch.distributed": "_DEFAULT_FIRST_BUCKET_BYTES",
    "torch.distributed.ProcessGroup": """
        _allgather_base _device_types _get_backend ?_is_initialized _register_backend""",
    "torch.distributed.ProcessGroupGloo": "_Options ?_set_default_timeout",
    "torch.distributed.ProcessGroupGloo._Options": "_devices _timeout",
    "torch.distributed.algorithms.join.Joinable": "_join_config",
    "torch.distributed.device_mesh.DeviceMesh": "?_get_root_mesh",
    "torch.distributed.distributed_c10d": "_get_default_store _world",
    "torch.distributed.optim.apply_optimizer_in_backward": "_in_backward_optimizers",
    "torch.distributed.utils": "_to_kwargs",
    "torch/optim/lr_scheduler.py": "_milestones _schedulers",
    "torch.nn.Module": "_buffers _compiled_call_impl _modules _parameters _replicate_for_data_parallel",
    "torch.nn.parallel.distributed": "_ddp_ignored _ddp_params_and_buffers_to_ignore",
    "torch.nn.parallel.DistributedDataParallel": """
        _active_ddp_module _get_data_parallel_params _has_rebuilt_buckets _set_static_graph""",
    "torch.utils._pytree": "keystr tree_flatten_with_path tree_leaves tree_map tree_unflatten",
    "torchmetrics.Metric": "_computed _update_count",
    "lightning_fabric.strategies.DDPStrategy": "_backward_sync_control _set_world_ranks _setup_distributed",
    "lightning_fabric.strategies.launchers.multiprocessing": """
        _check_bad_cuda_fork _check_missing_main_guard _disable_module_memory_sharing""",
    "lightning_fabric.utilities.distributed": "_set_num_threads_if_needed",
    "lightning_fabric.utilities.optimizer": "_optimizers_to_device",
    "pytorch_lightning.LightningModule": "_current_fx_name",
    "pytorch_lightning.Trainer": """
        _checkpoint_connector _fit_impl _logger_connector _run_sanity_check _signal_connector _teardown""",
    "pytorch_lightning.callbacks.ModelCheckpoint": """
        _defer_save_until_validation _last_checkpoint_saved _last_global_step_saved""",
    "pytorch_lightning.loggers.CSVLogger": "_experiment _version",
    "pytorch_lightning.loggers.csv_logs.ExperimentWriter": "_check_log_dir_exists _fs",
    "pytorch_lightning.loops.evaluation_loop._EvaluationLoop": """
        _combined_loader _last_val_dl_reload_epoch _max_batches""",
    "pytorch_lightning.loops.fit_loop._FitLoop": """
        _combined_loader _data_fetcher _last_train_dl_reload_epoch _loaded_from_state_dict _restarting
        _resuming_from_checkpoint""",
    "pytorch_lightning.loops.training_epoch_loop._TrainingEpochLoop": """
        _batches_that_stepped ?_broadcast_sigterm_tensor _num_ready_batches_reached _results
        _should_check_val_fx""",
    "pytorch_lightning.plugins.precision.Precision": "_after_closure",
    "pytorch_lightning.strategies.DDPStrategy": """
        _configure_launcher _forward_redirection _get_process_group_backend _launcher _layer_sync
        _process_group_backend _register_ddp_hooks _setup_model""",
    "pytorch_lightning.strategies.strategy": "_ForwardRedirection",
    f"{LAUNCHERS}._MultiProcessingLauncher": """
        _collect_rank_zero_results _recover_results_in_main_process _wrapping_function""",
    f"{LAUNCHERS}._SubprocessScriptLauncher": "_check_can_spawn_children",
    f"{LAUNCHERS}.multiprocessing": "_GlobalStateSnapshot",
    "pytorch_lightning.trainer.call": """
        _call_callback_hooks _call_lightning_module_hook _call_teardown_hook _interrupt""",
    "lightning_fabric.connector": "_Connector",
    f"{CONNECTORS}.accelerator_connector._AcceleratorConnector": """
        _check_config_and_set_final_flags _lazy_init_strategy""",
    f"{CONNECTORS}.checkpoint_connector._CheckpointConnector": "_loaded_checkpoint",
    f"{CONNECTORS}.logger_connector.logger_connector._LoggerConnector": "_callback_metrics",
    f"{CONNECTORS}.logger_connector.result": "_ResultCollection",
    f"{CONNECTORS}.signal_connector._SignalConnector": "_sigterm_notifier_fn _slurm_sigusr_handler_fn",
    "pytorch_lightning.utilities.combined_loader.CombinedLoader": "_mode _state_dicts",
    "pytorch_lightning.utilities.exceptions": "_TunerExitException",
    "hydra._internal.callbacks": "Callbacks",
    "hydra._internal.config_loader_impl.ConfigLoaderImpl": "_parse_overrides_and_create_caching_repo",
    "hydra._internal.core_plugins.importlib_resources_config_source": "ImportlibResourcesConfigSource",
    "hydra._internal.defaults_list": "create_defaults_list",
    "hydra._internal.hydra": "ConfigLoaderImpl Hydra",
    "hydra.core.utils.JobReturn": "_return_value",
    "omegaconf.DictConfig": """
        _content _dereference_node _get_full_key _get_parent _get_root _is_interpolation _metadata _resolvers
        _value""",
    "omegaconf.base.Container": "_evaluate_custom_resolver",
}
"""Class, module or file -> names that it has, or its source; a version may lack one with a `?` in front."""
PLACES = {
    "_lightning.py": ("pytorch_lightning", "lightning_fabric"),
    "_torch.py": ("torch", "torchmetrics"),
    "hydra_jobs/": ("hydra", "omegaconf"),
}
"""Where in the package -> the dependencies whose private names stand there."""
OF_PYTHON = {
    *("_SubParsersAction", "_asdict", "_callback", "_config", "_current_frames", "_exit", "_fields"),
    *("_initializing", "_run_exitfuncs", "_run_module_as_main", "_shutdown", "_ZSt13set_terminatePFvvE"),
}


@functools.cache
def source_of(owner: Any) -> str:
    """The text of a class or module; none of what is written in C++, or made by a function."""
    try:
        return inspect.getsource(owner)
    except (OSError, TypeError):
        return ""


@pytest.mark.parametrize("owner", NAMES)
def test_a_dependency_has_the_private_names_that_are_used(owner) -> None:
    package = re.split(r"\W", owner)[0]
    if owner.endswith(".py"):  # whose import would take seconds
        found, text = None, (Path(torch.__file__).parents[1] / owner).read_text("utf-8")
    else:
        found = pkgutil.resolve_name(owner)
        text = "".join(map(source_of, found.__mro__ if isinstance(found, type) else [found]))
    names = [name for name in NAMES[owner].split() if not name.startswith("?")]
    lacking = {
        name: [path for path, ours in TEXTS.items() if re.search(rf"\b{name}\b", ours)]
        for name in names
        if not hasattr(found, name) and not re.search(rf"\b{name}\b", text)
    }
    version = importlib.import_module(package).__version__
    assert lacking == {}, f"{package} {version} is not as lightning_ddp needs it; the names are used there"


# ---------------------------------------------------------------------- the table is true

PRIVATE = r"_(?!_|lightning_ddp)\w+(?<!__)\b"
TEXTS = {
    str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))
}


def table_places() -> dict[str, set[str]]:
    """Private name of the table -> where it may stand."""
    places: dict[str, set[str]] = defaultdict(set)
    for owner, names in NAMES.items():
        for name in re.findall(rf"\b{PRIVATE}", f"{owner} {names}"):
            places[name] |= {place for place, of in PLACES.items() if re.split(r"\W", owner)[0] in of}
    return places


def used(text: str) -> set[str]:
    """Private names read of something but `self`, imported from elsewhere, or in a text of names alone."""
    names = set(re.findall(rf"(?<!\bself)(?<!\bcls)(?<!\blightning_ddp)\.({PRIVATE})", text))
    words = re.findall(r"""(?<!suffix\()["']([\w.]+)["']""", text)
    words += re.findall(r"^ *(?:from|import) (?!lightning_ddp)(.*)", text, re.MULTILINE)
    return names.union(*(re.findall(rf"\b{PRIVATE}", each) for each in words))


def defined(text: str) -> set[str]:
    """Private names that a file makes: functions, classes, variables, attributes, arguments."""
    made = re.findall(rf"\b(?:def|class|as) ({PRIVATE})", text)
    made += re.findall(rf"(?:\bself\.|\bcls\.|^ *|, |\()({PRIVATE})(?= *[:=,])", text, re.MULTILINE)
    return set(made)


def known_to(path: str) -> set[str]:
    """What a file defines, and the files of the package that it imports."""
    names = defined(TEXTS[path])
    imports = re.findall(r"from lightning_ddp\.?([\w.]*) import ([^(\n]+|\([^)]*\))", TEXTS[path])
    for module, imported in imports:
        for name in ("", *re.findall(r"\w+", imported)):
            stem = "/".join(filter(None, (*module.split("."), name)))
            for each in (f"{stem}.py", f"{stem}/__init__.py"):
                names |= defined(TEXTS.get(each, ""))
    return names


@functools.cache
def inherited() -> set[tuple[str, str]]:
    """Private names that a class of the package shares with a base of a dependency, and their modules."""
    found = set()
    imports = re.compile(
        r"^(?:from|import) (?:lightning_ddp\._lightning|torch|hydra|omegaconf)\b", re.MULTILINE
    )
    for path in filter(lambda path: imports.search(TEXTS[path]), TEXTS):
        name = f"lightning_ddp/{path}".removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for kind in list(vars(importlib.import_module(name)).values()):
            if not isinstance(kind, type) or kind.__module__ != name:
                continue
            if issubclass(kind, _lightning._Unbound):
                kind = _lightning.bind(kind, "pytorch_lightning")
            theirs = [base for base in kind.__mro__ if base.__module__.partition(".")[0] in DEPENDENCIES]
            text = "\n".join(map(source_of, theirs))
            for ours in (base for base in kind.__mro__ if base.__module__.startswith("lightning_ddp.")):
                own = re.findall(rf"(?:\bself\.|\bcls\.|\bsuper\(\)\.|\bdef )({PRIVATE})", source_of(ours))
                shared = rf'(?:self\.|cls\.|def |"|^    )({"|".join(set(own)) or "$^"})\b'
                found |= {(name, ours.__module__) for name in re.findall(shared, text, re.MULTILINE)}
    return found


def test_every_private_name_is_in_the_table_and_stands_in_the_place_of_its_dependency() -> None:
    places = table_places()
    strays = {
        f"{name}: {path}"
        for path, text in TEXTS.items()
        for name in used(text) - known_to(path) - OF_PYTHON
        if not path.startswith(tuple(places.get(name, ())))
    }
    strays |= {f"{name}: {module} (inherited)" for name, module in inherited() if name not in places}
    assert strays == set()


def test_every_name_of_the_table_is_used() -> None:
    words = set(re.findall(r"\w+", "\n".join(TEXTS.values())))
    assert set(re.findall(rf"\b{PRIVATE}", "\n".join(NAMES.values()))) - words == set()


def test_names_are_found_however_they_are_used() -> None:
    for file, name in (
        ("_torch.py", "_use_count"),  # called by a text
        ("_torch.py", "_join_config"),  # in one of several names
        ("_lightning.py", "_interrupt"),
        ("hydra_jobs/jobs.py", "_evaluate_custom_resolver"),  # patched
        ("hydra_jobs/compositions.py", "_internal"),  # in the name of a module
    ):
        assert name in used(TEXTS[file]), name
    assert ("_wrapping_function", "lightning_ddp.launch.launcher") in inherited(), "overridden"


# ---------------------------------------------------------------------- torch


@pytest.mark.skipif(torch.__version__ < "2.13", reason="there is nothing to put away before torch 2.13")
def test_what_backward_keeps_in_its_thread_can_be_put_away_and_back() -> None:
    """In backward the thread's state has a "context", which can be removed and put back."""
    seen = []

    def look(_: torch.Tensor) -> None:
        seen.append(torch._C._get_obj_in_tls("context"))
        with without_engine_context():
            seen.append(torch._C._is_key_in_tls("context"))
        seen.append(torch._C._get_obj_in_tls("context"))

    loss = torch.ones(1, requires_grad=True).sum()
    loss.register_hook(look)
    loss.backward()
    before, is_kept, after = seen
    assert before is after is not None
    assert not is_kept


def test_the_memory_of_pythons_and_numpys_generator_is_what_they_tell_as_their_state() -> None:
    """Else the cheap comparison at each step boundary is not used, and the states are copied."""
    python: Any = random.getstate.__self__  # type: ignore[attr-defined]
    assert python.random == random.random
    _, (*key, position), _ = python.getstate()
    told = array("I", [position, *key]).tobytes()
    assert ctypes.string_at(id(python) + object.__basicsize__, len(told)) == told
    generator = numpy.random.get_bit_generator()
    _, numbers, place, *_ = numpy.random.get_state()
    told = numbers.tobytes() + place.to_bytes(4, sys.byteorder)
    assert ctypes.string_at(generator.ctypes.state_address, len(told)) == told


def test_a_part_of_a_mesh_knows_the_whole() -> None:
    """Which is its own root; where torch does not tell, a part could not be refused."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    whole = dist.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    assert root_of_mesh(whole) == whole
    if hasattr(whole, "_get_root_mesh"):
        assert root_of_mesh(whole["dp"]) == whole != whole["dp"]
    dist.destroy_process_group()


# ---------------------------------------------------------------------- Lightning


def new_trainer(**options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(**{**quiet, "accelerator": "cpu", "devices": 1, **options})


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_something_is_called_between_the_hooks_before_an_update_and_the_update(precision: str) -> None:
    """Once for each update: gradients are there, and parameters are as before."""
    called: list[str] = []
    before: list[torch.Tensor] = []

    class Model(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            before.append(self.layer.weight.detach().clone())
            return super().training_step(batch, batch_idx)

        def on_before_optimizer_step(self, *arguments: Any) -> None:
            called.append("hook")

    def look() -> None:
        weight = model.layer.weight
        assert weight.grad is not None
        called.append("before" if torch.equal(weight, before[-1]) else "after")

    model = Model()
    trainer = new_trainer(max_steps=2, limit_val_batches=0, precision=precision, accumulate_grad_batches=2)
    _lightning.before_updates(trainer, look)
    trainer.fit(model)
    assert called == ["hook", "before"] * 2


def test_the_handlers_of_signals_are_the_ones_that_were_put_in(monkeypatch) -> None:
    """They are looked up when they are registered, and registered for SIGTERM and SLURM's signal."""
    monkeypatch.setenv("SLURM_NTASKS", "1")
    trainer = new_trainer(plugins=[SLURMEnvironment(requeue_signal=signal.SIGUSR1)])
    called = []
    requeue = _lightning.replace_signal_handlers(
        trainer,
        on_sigterm=lambda *arguments: called.append("SIGTERM"),
        on_requeue=lambda *arguments: called.append("requeue"),
    )
    inspect.signature(requeue).bind(int(signal.SIGUSR1), None)
    trainer._signal_connector.register_signal_handlers()
    try:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.getsignal(number)(number, None)
    finally:
        trainer._signal_connector.teardown()
    assert called == ["SIGTERM", "requeue"]


def test_a_spawned_process_draws_as_the_launching_one(monkeypatch) -> None:
    """Its random numbers are what the last argument of the function that it runs says."""
    for name in ("LOCAL_RANK", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "0")  # which it sets itself
    strategy = DDPStrategy(parallel_devices=[torch.device("cpu")], cluster_environment=LightningEnvironment())
    launcher = _lightning.MultiProcessingLauncher(strategy, start_method="spawn")
    state, results = _lightning.capture_globals(), queue.SimpleQueue()
    for _ in range(2):
        launcher._wrapping_function(0, None, random.random, (), {}, results, state)
    assert results.get() == results.get()


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (_lightning.layer_sync, "_layer_sync"),  # as all that is read
        (lambda o: _lightning.set_launcher(o, None), "_launcher"),  # as all that is replaced
        (lambda o: _lightning.at_step_boundaries(o, print), "_broadcast_sigterm_tensor"),
        (lambda o: _lightning._import("pytorch_lightning.trainer.call", "_gone"), "_gone"),
        (lambda o: _lightning._import("pytorch_lightning.gone", "Trainer"), "Trainer"),
    ],
)
def test_a_name_that_is_gone_is_an_error_with_the_version(monkeypatch, call, name) -> None:
    monkeypatch.setattr(_lightning, "_version", lambda root: "2.7.0rc1")
    other = SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(advance=print)))
    with pytest.raises(
        UnsupportedVersionError, match=rf"^pytorch-lightning 2\.7\.0rc1 has no `{name}` in .* 2\.5 and 2\.6"
    ):
        call(other)
    assert set(vars(other)) == {"fit_loop"}
