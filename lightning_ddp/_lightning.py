"""The one place that knows the names of Lightning's modules and all of its private names.

Lightning comes as `pytorch_lightning` and as `lightning.pytorch`, with separate classes and registries. The
one that the user has already imported is used; otherwise `pytorch_lightning`, otherwise `lightning.pytorch`.

What is said here of private names holds for Lightning 2.5 to 2.6, as `tests/test_private_names.py` tells. One
that is gone is an `UnsupportedVersionError`: of a module when this one is imported, of an object where it is
asked for. Methods that Lightning itself calls (`_configure_launcher` ...) are overridden where they belong.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_ddp.errors import UnsupportedVersionError

if TYPE_CHECKING:
    ROOT: str
    _VERSION: str

    from lightning_fabric.plugins.collectives.torch_collective import default_pg_timeout as default_pg_timeout
    from lightning_fabric.utilities.distributed import (
        _set_num_threads_if_needed as set_num_threads_if_needed,
    )
    from lightning_fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
    from lightning_fabric.utilities.seed import reset_seed as reset_seed
    from pytorch_lightning import LightningModule as LightningModule
    from pytorch_lightning import Trainer as Trainer
    from pytorch_lightning.accelerators import Accelerator as Accelerator
    from pytorch_lightning.accelerators import CUDAAccelerator as CUDAAccelerator
    from pytorch_lightning.callbacks import Callback as Callback
    from pytorch_lightning.plugins import AsyncCheckpointIO as AsyncCheckpointIO
    from pytorch_lightning.plugins import CheckpointIO as CheckpointIO
    from pytorch_lightning.plugins import Precision as Precision
    from pytorch_lightning.plugins.environments import ClusterEnvironment as ClusterEnvironment
    from pytorch_lightning.plugins.environments import LightningEnvironment as LightningEnvironment
    from pytorch_lightning.plugins.environments import SLURMEnvironment as SLURMEnvironment
    from pytorch_lightning.strategies import DDPStrategy as DDPStrategy
    from pytorch_lightning.strategies import StrategyRegistry as StrategyRegistry
    from pytorch_lightning.strategies.launchers import (
        _MultiProcessingLauncher as MultiProcessingLauncher,
    )
    from pytorch_lightning.strategies.launchers import (
        _SubprocessScriptLauncher as SubprocessScriptLauncher,
    )
    from pytorch_lightning.strategies.strategy import _ForwardRedirection as ForwardRedirection
    from pytorch_lightning.trainer.call import _interrupt as interrupt_trainer
    from pytorch_lightning.trainer.connectors.logger_connector.result import (
        _ResultCollection as ResultCollection,
    )
    from pytorch_lightning.trainer.states import TrainerFn as TrainerFn
    from pytorch_lightning.utilities.exceptions import SIGTERMException as SIGTERMException
    from pytorch_lightning.utilities.exceptions import _TunerExitException as TunerExitException
else:
    # our name -> (module below the root, name there); "fabric:" is the other package of the same family
    _NAMES = {
        "Accelerator": ("accelerators", "Accelerator"),
        "AsyncCheckpointIO": ("plugins", "AsyncCheckpointIO"),
        "Callback": ("callbacks", "Callback"),
        "CUDAAccelerator": ("accelerators", "CUDAAccelerator"),
        "CheckpointIO": ("plugins", "CheckpointIO"),
        "ClusterEnvironment": ("plugins.environments", "ClusterEnvironment"),
        "DDPStrategy": ("strategies", "DDPStrategy"),
        "ForwardRedirection": ("strategies.strategy", "_ForwardRedirection"),
        "LightningEnvironment": ("plugins.environments", "LightningEnvironment"),
        "LightningModule": ("", "LightningModule"),
        "MultiProcessingLauncher": ("strategies.launchers", "_MultiProcessingLauncher"),
        "Precision": ("plugins", "Precision"),
        "ResultCollection": ("trainer.connectors.logger_connector.result", "_ResultCollection"),
        "SLURMEnvironment": ("plugins.environments", "SLURMEnvironment"),
        "SIGTERMException": ("utilities.exceptions", "SIGTERMException"),
        "StrategyRegistry": ("strategies", "StrategyRegistry"),
        "SubprocessScriptLauncher": ("strategies.launchers", "_SubprocessScriptLauncher"),
        "Trainer": ("", "Trainer"),
        "TrainerFn": ("trainer.states", "TrainerFn"),
        "TunerExitException": ("utilities.exceptions", "_TunerExitException"),
        "default_pg_timeout": ("fabric:plugins.collectives.torch_collective", "default_pg_timeout"),
        "interrupt_trainer": ("trainer.call", "_interrupt"),
        "optimizers_to_device": ("fabric:utilities.optimizer", "_optimizers_to_device"),
        "reset_seed": ("fabric:utilities.seed", "reset_seed"),
        "set_num_threads_if_needed": ("fabric:utilities.distributed", "_set_num_threads_if_needed"),
    }

    def _choose_root() -> str:
        for root in ("pytorch_lightning", "lightning.pytorch"):
            if root in sys.modules:
                return root
        return "pytorch_lightning" if importlib.util.find_spec("pytorch_lightning") else "lightning.pytorch"

    ROOT = _choose_root()
    _FABRIC = "lightning_fabric" if ROOT == "pytorch_lightning" else "lightning.fabric"
    _VERSION = importlib.import_module(ROOT).__version__

__all__ = [
    "Accelerator",
    "AsyncCheckpointIO",
    "CUDAAccelerator",
    "Callback",
    "CheckpointIO",
    "ClusterEnvironment",
    "DDPStrategy",
    "ForwardRedirection",
    "LightningEnvironment",
    "LightningModule",
    "MultiProcessingLauncher",
    "Precision",
    "ResultCollection",
    "SIGTERMException",
    "SLURMEnvironment",
    "StrategyRegistry",
    "SubprocessScriptLauncher",
    "Trainer",
    "TrainerFn",
    "TunerExitException",
    "at_step_boundaries",
    "batches_that_stepped",
    "check_can_start_children",
    "choose_backend",
    "default_pg_timeout",
    "interrupt_trainer",
    "layer_sync",
    "note_sigterm",
    "optimizers_to_device",
    "replace_signal_handlers",
    "reset_seed",
    "running_hook",
    "set_launcher",
    "set_num_threads_if_needed",
    "set_redirection",
    "set_training_results",
    "teardown_trainer",
    "trainer_of",
]


def _unsupported(owner: str, name: str) -> UnsupportedVersionError:
    package = ROOT.partition(".")[0].replace("_", "-")
    return UnsupportedVersionError(
        f"{package} {_VERSION} has no `{name}` in {owner}. lightning_ddp builds on it, and knows Lightning"
        f" 2.5 to 2.6: pip install '{package}>=2.5,<2.7', or a newer lightning_ddp"
    )


def _get(owner: Any, name: str) -> Any:
    """A private attribute of one of Lightning's objects."""
    try:
        return getattr(owner, name)
    except AttributeError:
        raise _unsupported(type(owner).__qualname__, name) from None


def _set(owner: Any, name: str, value: Any) -> None:
    """Changes a private attribute; one that Lightning does not have would change nothing."""
    _get(owner, name)
    setattr(owner, name, value)


def _import(module: str, name: str) -> Any:
    """A name of one of Lightning's modules."""
    try:
        return getattr(importlib.import_module(module), name)
    except (AttributeError, ImportError) as error:
        raise _unsupported(module, name) from error


if not TYPE_CHECKING:
    for _ours, (_module, _theirs) in _NAMES.items():
        _root, _, _path = _module.rpartition(":")
        globals()[_ours] = _import(".".join(filter(None, (_FABRIC if _root else ROOT, _path))), _theirs)


# ---------------------------------------------------------------------- the Trainer and its loops


def teardown_trainer(trainer: Trainer) -> None:
    """Ends strategy, loops, loggers and signal handlers, as Lightning does on an exception: `_teardown`."""
    _get(trainer, "_teardown")()


def set_training_results(trainer: Trainer, results: ResultCollection) -> None:
    """Lets `trainer` collect in `results` what is logged while it trains: `_results` of its loop."""
    _set(trainer.fit_loop.epoch_loop, "_results", results)


def batches_that_stepped(trainer: Trainer) -> int:
    """The step under which Lightning logs, counting several optimizers as one: `_batches_that_stepped`."""
    number: int = _get(trainer.fit_loop.epoch_loop, "_batches_that_stepped")
    return number


def at_step_boundaries(trainer: Trainer, check: Callable[[], None]) -> None:
    """Has `check` called before each batch of training is fetched, in the place of Lightning's own check.

    That is `_broadcast_sigterm_tensor`, which asks all ranks for a signal with a collective in every step.
    Lightning 2.5.0 and 2.5.1 have none there.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    if tuple(map(int, re.findall(r"\d+", _VERSION)[:3])) >= (2, 5, 2):
        _set(loop, "_broadcast_sigterm_tensor", check)
        return
    advance = loop.advance

    def check_and_advance(data_fetcher: Any) -> None:
        check()
        advance(data_fetcher)

    loop.advance = check_and_advance


def replace_signal_handlers(trainer: Trainer, *, on_sigterm: Any, on_requeue: Any) -> Any:
    """Has Lightning register other handlers than its own; returns the one that saves and requeues a job.

    They are `_sigterm_notifier_fn` and `_slurm_sigusr_handler_fn` of `Trainer._signal_connector`, which looks
    them up when a run begins, after the strategy's `setup`.
    """
    connector = _get(trainer, "_signal_connector")
    requeue = _get(connector, "_slurm_sigusr_handler_fn")
    _set(connector, "_sigterm_notifier_fn", on_sigterm)
    _set(connector, "_slurm_sigusr_handler_fn", on_requeue)
    return requeue


def note_sigterm(trainer: Trainer) -> None:
    """Sets what `Trainer.received_sigterm` tells: an attribute of `_signal_connector`."""
    _set(_get(trainer, "_signal_connector"), "received_sigterm", True)


# ---------------------------------------------------------------------- the module


def trainer_of(module: LightningModule) -> Trainer | None:
    """The Trainer that a module is attached to: `_trainer`; the public name raises where there is none."""
    trainer: Trainer | None = _get(module, "_trainer")
    return trainer


def running_hook(module: LightningModule) -> str | None:
    """The hook or step that Lightning runs of a module, such as `training_step`: `_current_fx_name`."""
    name: str | None = _get(module, "_current_fx_name")
    return name


# ---------------------------------------------------------------------- the strategy and its launcher


def set_launcher(strategy: DDPStrategy, launcher: Any) -> None:
    """Sets what `Strategy.launcher` returns: `_launcher`."""
    _set(strategy, "_launcher", launcher)


def set_redirection(strategy: DDPStrategy, redirection: ForwardRedirection) -> None:
    """Sets by which way the steps of a module go through its wrapper's forward: `_forward_redirection`."""
    _set(strategy, "_forward_redirection", redirection)


def layer_sync(strategy: DDPStrategy) -> Any:
    """What replaces BatchNorm with `Trainer(sync_batchnorm=True)`, else None: `_layer_sync`."""
    return _get(strategy, "_layer_sync")


def choose_backend(strategy: DDPStrategy) -> str:
    """Decides on the backend, the user's or that of the device, which `process_group_backend` tells then.

    `_get_process_group_backend` chooses it, and `_process_group_backend` keeps it.
    """
    backend: str = _get(strategy, "_get_process_group_backend")()
    _set(strategy, "_process_group_backend", backend)
    return backend


def check_can_start_children(launcher: SubprocessScriptLauncher) -> None:
    """Refuses to start processes in a process that was started itself: `_check_can_spawn_children`."""
    _get(launcher, "_check_can_spawn_children")()
