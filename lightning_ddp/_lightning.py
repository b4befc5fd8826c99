"""All names of Lightning's modules, and all of its private names.

Lightning comes as `pytorch_lightning` and as `lightning.pytorch`, with separate classes and registries.
Neither is imported here: `bind` makes a class that derives from the placeholders below into one with the
bases of the Lightning in use. `tests/test_private_names.py` checks the private names, of 2.5 to 2.6.
"""

from __future__ import annotations

import csv
import functools
import importlib.util
import inspect
import re
import sys
import types
from abc import ABC
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_ddp.errors import UnsupportedVersionError, unknown_argument

if TYPE_CHECKING:
    from lightning_fabric import strategies as _fabric_strategies
    from pytorch_lightning import LightningModule as LightningModule
    from pytorch_lightning import Trainer as Trainer
    from pytorch_lightning.accelerators import Accelerator as Accelerator
    from pytorch_lightning.callbacks import Callback as Callback
    from pytorch_lightning.plugins import AsyncCheckpointIO as AsyncCheckpointIO
    from pytorch_lightning.plugins import CheckpointIO as CheckpointIO
    from pytorch_lightning.plugins import Precision as Precision
    from pytorch_lightning.plugins.environments import ClusterEnvironment as ClusterEnvironment
    from pytorch_lightning.plugins.environments import LightningEnvironment as LightningEnvironment
    from pytorch_lightning.plugins.environments import SLURMEnvironment as SLURMEnvironment
    from pytorch_lightning.strategies import DDPStrategy as DDPStrategy
    from pytorch_lightning.strategies import launchers as _launchers
    from pytorch_lightning.strategies import strategy as _strategy
    from pytorch_lightning.trainer.connectors.logger_connector import result as _result

    FabricDDPStrategy = _fabric_strategies.DDPStrategy
    ForwardRedirection = _strategy._ForwardRedirection
    MultiProcessingLauncher = _launchers._MultiProcessingLauncher
    ResultCollection = _result._ResultCollection
    SubprocessScriptLauncher = _launchers._SubprocessScriptLauncher

C = TypeVar("C", bound=type)

ROOTS = ("pytorch_lightning", "lightning.pytorch")  # namespaces of Lightning
FABRICS = {"lightning_fabric": ROOTS[0], "lightning.fabric": ROOTS[1]}
"""Namespaces of Fabric, each with the namespace of Lightning that builds on it."""

# By our name: module below the root, and its name there; "fabric:" is the Fabric package of the same family.
_BASES = {
    "Callback": ("callbacks", "Callback"),
    "DDPStrategy": ("strategies", "DDPStrategy"),
    "FabricDDPStrategy": ("fabric:strategies", "DDPStrategy"),
    "ForwardRedirection": ("strategies.strategy", "_ForwardRedirection"),
    "MultiProcessingLauncher": ("strategies.launchers", "_MultiProcessingLauncher"),
    "ResultCollection": ("trainer.connectors.logger_connector.result", "_ResultCollection"),
    "SubprocessScriptLauncher": ("strategies.launchers", "_SubprocessScriptLauncher"),
    "Trainer": ("", "Trainer"),
}
_KINDS = {
    "Accelerator": ("accelerators", "Accelerator"),
    "AsyncCheckpointIO": ("plugins", "AsyncCheckpointIO"),
    "CheckpointIO": ("plugins", "CheckpointIO"),
    "ClusterEnvironment": ("plugins.environments", "ClusterEnvironment"),
    "LightningEnvironment": ("plugins.environments", "LightningEnvironment"),
    "LightningModule": ("", "LightningModule"),
    "Precision": ("plugins", "Precision"),
    "SLURMEnvironment": ("plugins.environments", "SLURMEnvironment"),
}
_OTHERS = {
    "FabricFunctionLauncher": ("fabric:strategies.launchers", "_MultiProcessingLauncher"),
    "FabricScriptLauncher": ("fabric:strategies.launchers", "_SubprocessScriptLauncher"),
    "unshare": ("fabric:strategies.launchers.multiprocessing", "_disable_module_memory_sharing"),
    "CSVLogger": ("loggers", "CSVLogger"),
    "CSVWriter": ("loggers.csv_logs", "ExperimentWriter"),
    "CUDAAccelerator": ("accelerators", "CUDAAccelerator"),
    "GlobalStateSnapshot": ("strategies.launchers.multiprocessing", "_GlobalStateSnapshot"),
    "SIGTERMException": ("utilities.exceptions", "SIGTERMException"),
    "TunerExitException": ("utilities.exceptions", "_TunerExitException"),
    "call_callback_hooks": ("trainer.call", "_call_callback_hooks"),
    "call_module_hook": ("trainer.call", "_call_lightning_module_hook"),
    "call_teardown_hook": ("trainer.call", "_call_teardown_hook"),
    "check_bad_cuda_fork": ("fabric:strategies.launchers.multiprocessing", "_check_bad_cuda_fork"),
    "check_missing_main_guard": ("fabric:strategies.launchers.multiprocessing", "_check_missing_main_guard"),
    "interrupt_trainer": ("trainer.call", "_interrupt"),
    "optimizers_to_device": ("fabric:utilities.optimizer", "_optimizers_to_device"),
    "reset_seed": ("fabric:utilities.seed", "reset_seed"),
    "set_num_threads_if_needed": ("fabric:utilities.distributed", "_set_num_threads_if_needed"),
}


# ---------------------------------------------------------------------- the two namespaces


def read_rank_again(rank: int, local_rank: int) -> None:
    """Overwrite the rank cached in Lightning's `rank_zero_only` by `rank`, torchmetrics' by `local_rank`."""
    told = {"lightning_utilities.core.rank_zero": rank, "torchmetrics.utilities.prints": local_rank}
    for name, number in told.items():
        if name in sys.modules:
            sys.modules[name].rank_zero_only.rank = number


def loaded_roots() -> list[str]:
    return [root for root in ROOTS if hasattr(sys.modules.get(root), "Trainer")]


def _root_in_use() -> str:
    """Return the name of the imported Lightning package, else the installed; first of `ROOTS` if both."""
    for root in loaded_roots():
        return root
    return ROOTS[0] if importlib.util.find_spec(ROOTS[0]) else ROOTS[1]


def _root_of(owner: object) -> str | None:
    """Return the name of the Lightning package from which an object or class derives; None for others."""
    for kind in owner.__mro__ if isinstance(owner, type) else type(owner).__mro__:
        for name, root in {**dict(zip(ROOTS, ROOTS, strict=True)), **FABRICS}.items():
            if f"{kind.__module__}.".startswith(f"{name}."):
                return root
    return None


def lightnings(name: str, root: str | None = None) -> Any:
    """Return Lightning's class or function listed here as `name`, from package `root` or that in use."""
    return _names_of(root or _root_in_use())[name]


@functools.cache
def _names_of(root: str) -> dict[str, Any]:
    fabric = next(name for name, family in FABRICS.items() if family == root)
    found = {}
    for ours, (module, theirs) in {**_BASES, **_KINDS, **_OTHERS}.items():
        family, _, path = module.rpartition(":")
        found[ours] = _import(".".join(filter(None, (fabric if family else root, path))), theirs)
    return found


def _import(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (AttributeError, ImportError) as error:
        raise _unsupported(module, name) from error


def _version(root: str) -> str:
    return str(importlib.import_module(root).__version__)


def _unsupported(where: str, name: str, root: str | None = None) -> UnsupportedVersionError:
    root = root or _root_in_use()
    package = root.partition(".")[0].replace("_", "-")
    return UnsupportedVersionError(
        f"{package} {_version(root)} has no `{name}` in {where}, which lightning_ddp needs. Lightning 2.5"
        f" and 2.6 are supported: pip install '{package}>=2.5,!=2.6.2,!=2.6.3,<2.7', or use a newer"
        " lightning_ddp"
    )


def _get(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        raise _unsupported(type(owner).__qualname__, name, _root_of(owner)) from None


def _set(owner: Any, name: str, value: Any) -> None:
    """Set an existing private attribute; raise UnsupportedVersionError if this Lightning does not have it."""
    _get(owner, name)
    setattr(owner, name, value)


# ---------------------------------------------------------------------- placeholders for Lightning's classes


class _Unbound(ABC):
    """Base of placeholders for Lightning's base classes; a subclass is written once for both packages.

    Calling such a subclass makes an instance of the class that `bind` makes from it; so does unpickling.
    """

    _root: str | None = None
    """Namespace of a class that `bind` has made, and of its subclasses; None for other classes."""
    _written: Any  # original class of a class that `bind` has made
    _stands_for: str  # a name in `_BASES`, of a placeholder

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        parameters = inspect.signature(cls.__init__).parameters if kwargs else {}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            known = list(parameters)[1:]  # without `self`
            for argument in kwargs:
                if argument not in known:
                    raise unknown_argument(f"{cls.__name__}()", argument, known)
        return _new(bind(cls, cls._root or _root_in_use()))

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        written = vars(type(self)).get("_written")
        return reduced if written is None else (_restore, (written, self._root), *reduced[2:])


def _new(bound: Any) -> Any:
    return super(_Unbound, bound).__new__(bound)


def _restore(written: type, root: str) -> Any:
    return _new(bind(written, root))


def bind(cls: C, root: str) -> C:
    """Return a cached variant of `cls` with base classes of Lightning package `root`, not placeholders."""
    written: Any = vars(cls).get("_written", cls)
    if written._root is not None:  # a user's subclass of a bound class
        return cls
    return _bind(written, root)  # type: ignore[no-any-return]


@functools.cache
def _bind(written: Any, root: str) -> Any:
    stand_ins = [vars(kind)["_stands_for"] for kind in written.__mro__ if "_stands_for" in vars(kind)]
    about = {name: getattr(written, name) for name in ("__module__", "__qualname__", "__doc__")}
    return types.new_class(
        written.__name__,
        (written, *(lightnings(name, root) for name in stand_ins)),
        exec_body=lambda space: space.update({**about, "_written": written, "_root": root}),
    )


def bind_like(owner: object, cls: C) -> C:
    """Return `cls` with base classes from the Lightning package of `owner`, by `bind`."""
    return bind(cls, _root_of(owner) or _root_in_use())


def adopt(strategy: Any, by: object) -> None:
    """Change a strategy's class, in place, to its variant for the Lightning package that `by` is from."""
    if (root := _root_of(by)) is not None:
        strategy.__class__ = bind(type(strategy), root)


def explain_refusals(module: Any, explain: Callable[[Exception, Any, Any], str | None]) -> None:
    """Patch a connector of Lightning or Fabric to give better messages where it refuses our strategies.

    `explain` gets the error, the strategy and `plugins=`; it returns the message, or None to keep theirs.
    """
    names = ("_AcceleratorConnector", "_Connector")  # optional, as it only improves messages
    kind = next((getattr(module, name) for name in names if hasattr(module, name)), None)
    for name in ("_check_config_and_set_final_flags", "_lazy_init_strategy"):
        if hasattr(kind, name):
            setattr(kind, name, _explained(getattr(kind, name), explain))


def _explained(method: Callable[..., Any], explain: Callable[..., str | None]) -> Callable[..., Any]:
    @functools.wraps(method)
    def explained(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            strategy = kwargs.get("strategy", getattr(self, "strategy", None))
            words = explain(error, strategy, kwargs.get("plugins"))
            if words is None:
                raise
            raise type(error)(words) from error

    return explained


class _Kind(ABC):
    """Base of placeholders for `isinstance` checks, true for the classes of both Lightning packages."""

    _stands_for: str  # a name in `_KINDS`

    @classmethod
    def __subclasshook__(cls, subclass: type) -> Any:
        name = vars(cls).get("_stands_for")
        is_one = any(_names_of(root)[name] in subclass.__mro__ for root in loaded_roots() if name)
        return is_one or NotImplemented


if not TYPE_CHECKING:
    for _base, _names in ((_Unbound, _BASES), (_Kind, _KINDS)):
        for _name in _names:
            globals()[_name] = type(_base)(_name, (_base,), {"__module__": __name__, "_stands_for": _name})


# ---------------------------------------------------------------------- functions and exceptions


def _function(name: str) -> Callable[..., Any]:
    """Return a function that calls Lightning's function `name`, from the package of its first argument."""
    return lambda *args, **kwargs: lightnings(name, _root_of(next(iter(args), None)))(*args, **kwargs)


def _reader(path: str) -> Callable[[Any], Any]:
    """Return a function that returns the attribute at a dotted `path` below its argument."""
    return lambda owner: functools.reduce(_get, path.split("."), owner)


def _writer(path: str) -> Callable[[Any, Any], None]:
    """Return a function that sets the attribute at a dotted `path` below its first argument."""
    *parts, name = path.split(".")
    return lambda owner, value: _set(functools.reduce(_get, parts, owner), name, value)


check_bad_cuda_fork = _function("check_bad_cuda_fork")
"""Refuse to fork a process that has used CUDA."""
check_missing_main_guard = _function("check_missing_main_guard")
interrupt_trainer = _function("interrupt_trainer")
optimizers_to_device = _function("optimizers_to_device")
reset_seed = _function("reset_seed")
set_num_threads_if_needed = _function("set_num_threads_if_needed")
unshare = _function("unshare")


def capture_globals() -> Any:
    """Return torch's flags and the states of all random generators, which a spawned process takes over."""
    return lightnings("GlobalStateSnapshot").capture()


def sigterm_exception(trainer: Trainer) -> Any:
    """Return Lightning's exception class that ends the loops of a Trainer on SIGTERM."""
    return lightnings("SIGTERMException", _root_of(trainer))


def silent_end(trainer: Trainer) -> Any:
    """Return an exception that ends a fit on one rank with teardown hooks, but no `on_exception`."""
    return lightnings("TunerExitException", _root_of(trainer))()


def stop_exceptions() -> tuple[type[BaseException], ...]:
    """Return the exception classes by which Lightning ends a run without a failure."""
    names = ("SIGTERMException", "TunerExitException")
    return tuple(lightnings(name, root) for root in loaded_roots() for name in names)


# ---------------------------------------------------------------------- the Trainer and its loops


def is_fitting(trainer: Trainer) -> bool:
    """Return True if the Trainer runs `fit`, validation within it included."""
    return bool(trainer.state.fn == "fit")


def teardown_trainer(trainer: Trainer) -> None:
    """Tear down a Trainer's strategy, loops, loggers and signal handlers, by calling its `_teardown`."""
    _get(trainer, "_teardown")()


def end_after_teardown(trainer: Trainer) -> None:
    """Make a Trainer's `_teardown` raise `SystemExit(0)` at its end, so that the process ends with 0."""

    def tear_down_and_end(teardown: Callable[[], None]) -> None:
        teardown()
        raise SystemExit(0)

    _wrap(trainer, "_teardown", tear_down_and_end)


def end_silently(trainer: Trainer) -> None:
    """Call a Trainer's teardown hooks and tear it down, as Lightning does on a `silent_end` exception."""
    lightnings("call_teardown_hook", _root_of(trainer))(trainer)
    teardown_trainer(trainer)


set_training_results = _writer("fit_loop.epoch_loop._results")
"""Set the object in which a Trainer collects values that are logged in training."""
training_results = _reader("fit_loop.epoch_loop._results")
"""Return the dict of values logged in this training epoch of a Trainer."""
callback_metrics = _reader("_logger_connector._callback_metrics")
"""Return the dict behind `Trainer.callback_metrics`."""
batches_that_stepped = _reader("fit_loop.epoch_loop._batches_that_stepped")
"""Return a Trainer's step for logging, which counts several optimizers as one."""
set_batches_that_stepped = _writer("fit_loop.epoch_loop._batches_that_stepped")
train_reload_epoch = _reader("fit_loop._last_train_dl_reload_epoch")
"""Return the epoch in which a Trainer created its training dataloaders last."""
set_train_reload_epoch = _writer("fit_loop._last_train_dl_reload_epoch")
val_reload_epoch = _reader("fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch")
set_val_reload_epoch = _writer("fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch")
running_hook = _reader("_current_fx_name")
"""Return the hook or step of a module that Lightning runs at present, or None."""
set_launcher = _writer("_launcher")
set_redirection = _writer("_forward_redirection")
"""Set the object that redirects a module's steps through the wrapper of a strategy."""
layer_sync = _reader("_layer_sync")
"""Return the plugin of `Trainer(sync_batchnorm=True)` from a strategy, else None."""


def wrap_steps(trainer: Trainer, steps: Any) -> None:
    """Replace methods of a Trainer's loops by methods of `steps`, which get the original and arguments."""
    outer: Any = trainer.fit_loop
    for loop in (outer, outer.epoch_loop.val_loop):
        _wrap(loop, "setup_data", functools.partial(_set_up_whole, loop))
    _wrap(outer.epoch_loop, "advance", steps.advance)
    _wrap(outer.epoch_loop, "on_advance_end", steps.end_advance)
    _wrap(outer, "on_advance_start", steps.start_epoch)
    _wrap(outer, "setup_data", steps.repeat)
    _wrap(outer, "on_run_end", steps.end_run)
    _wrap(outer, "on_advance_end", steps.repeat)
    _wrap(trainer, "_run_sanity_check", steps.check_sanity)


def _wrap(owner: Any, name: str, function: Any) -> None:
    """Replace a method of an object by a function that gets the original method as first argument."""
    method = _get(owner, name)
    setattr(owner, name, functools.update_wrapper(functools.partial(function, method), method))


FIRST_BARRIERS = ("_CheckpointConnector.resume_end", "run-stage")
"""Names of the barriers of a fit between the hooks `on_fit_start` and the first data."""


def _set_up_whole(loop: Any, set_up: Callable[[], None]) -> None:
    """Call a loop's `setup_data`; if that raises, drop the loop's dataloaders, so that it makes new ones."""
    try:
        set_up()
    except BaseException:
        forget_loaders(loop)
        raise


def validates_now(trainer: Trainer) -> bool:
    """Return True if a validation follows the present batch: `_should_check_val_fx` of the loop."""
    fetcher = _get(trainer.fit_loop, "_data_fetcher")
    return bool(_get(trainer.fit_loop.epoch_loop, "_should_check_val_fx")(fetcher))


def loop_counters(trainer: Trainer) -> list[Any]:
    """Return Lightning's progress trackers of training batches, optimizer steps and scheduler steps."""
    loop: Any = trainer.fit_loop.epoch_loop
    steps = loop.automatic_optimization.optim_progress.optimizer
    counted = (loop.batch_progress, steps.step, steps.zero_grad, loop.scheduler_progress)
    return [tracker for progress in counted for tracker in (progress.total, progress.current)]


def loaders_of(loop: Any) -> list[Any]:
    """Return the dataloaders of a training or evaluation loop: those of its `_combined_loader`."""
    combined = _get(loop, "_combined_loader")
    return [] if combined is None else list(combined.flattened)


def loaders_mode(trainer: Trainer) -> str:
    """Return how a Trainer combines its training dataloaders, such as "max_size_cycle"."""
    return str(_get(_get(trainer.fit_loop, "_combined_loader"), "_mode"))


def forget_loaders(loop: Any) -> None:
    """Make a training or evaluation loop create its dataloaders again: reset `_combined_loader`."""
    _set(loop, "_combined_loader", None)


def loaders_made(trainer: Trainer) -> list[Any]:
    """Return the loaders of training and validation, and the epochs they were made in, for `put_loaders`."""
    loops = trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop
    loaders = [_get(loop, "_combined_loader") for loop in loops]
    return [*loaders, train_reload_epoch(trainer), val_reload_epoch(trainer)]


def put_loaders(trainer: Trainer, made: list[Any]) -> None:
    """Set the loaders, and the epochs they were made in, to those that `loaders_made` has returned."""
    for loop, loader in zip((trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop), made, strict=False):
        _set(loop, "_combined_loader", loader)
    set_train_reload_epoch(trainer, made[2])
    set_val_reload_epoch(trainer, made[3])


def limit_epoch(trainer: Trainer, num_used: int = 0) -> None:
    """Set the length of this training epoch: `num_used` and the loaders' batches, up to Trainer limits."""
    loop: Any = trainer.fit_loop
    limit, shared = trainer.limit_train_batches, min if loaders_mode(trainer) == "min_size" else max
    num_batches = num_used + shared(len(loader) for loader in loaders_of(loop))
    least = min(num_batches, num_used + 1)  # a fraction of fewer than there were may be over already
    num_batches = min(num_batches, limit) if isinstance(limit, int) else max(least, int(num_batches * limit))
    loop.max_batches = num_batches
    loop._combined_loader.limits = [num_batches] * len(loop._combined_loader.flattened)
    if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch not in (None, float("inf")):
        trainer.val_check_batch = max(1, int(num_batches * trainer.val_check_interval))


def limit_validation(trainer: Trainer) -> None:
    """Recompute the number of validation batches after a change of the samplers: `_max_batches`."""
    loop: Any = trainer.fit_loop.epoch_loop.val_loop
    limit: Any = trainer.limit_val_batches
    for index, loader in enumerate(loaders_of(loop)):
        if hasattr(getattr(loader, "sampler", None), "num_replicas"):
            length = len(loader)
            limited = min(length, limit) if isinstance(limit, int) else int(length * limit)
            _get(loop, "_max_batches")[index] = limited


def saved_last(callback: Any) -> int | None:
    """Return the step of a `ModelCheckpoint`'s last save, `_last_global_step_saved`; None for others."""
    return getattr(callback, "_last_global_step_saved", None)


def saving_state(callback: Any) -> dict[str, Any]:
    """Return a `ModelCheckpoint`'s last save, and whether one is deferred, by their names; else {}."""
    names = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
    return {name: getattr(callback, name) for name in names if hasattr(callback, name)}


def set_saving_state(callback: Any, state: dict[str, Any]) -> None:
    """Set a `ModelCheckpoint`'s attributes to those that `saving_state` has returned."""
    for name, value in state.items():
        _set(callback, name, value)


def fetch_anew(trainer: Trainer, num_fetched: int) -> None:
    """Drop prefetched batches and iterate the loaders anew, with `num_fetched` batches counted as used."""
    fetcher = _get(trainer.fit_loop, "_data_fetcher")
    limit_epoch(trainer, num_fetched)
    iter(fetcher)
    fetcher.fetched = num_fetched
    fetcher.length = trainer.fit_loop.max_batches
    fetcher.done = fetcher.fetched >= fetcher.length


def restore_checkpoint(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Restore model, callbacks and training state from a checkpoint of `dump_checkpoint`, after `setup`."""
    connector = _get(trainer, "_checkpoint_connector")
    _set(connector, "_loaded_checkpoint", checkpoint)
    connector.restore_model()
    connector.restore_datamodule()
    connector.restore_callbacks()
    connector.restore_training_state()
    connector._loaded_checkpoint = {}


def load_loops(trainer: Trainer, state: dict[str, Any]) -> None:
    """Load a state saved inside an epoch into the training loops, and clear their flags of a resumed run."""
    trainer.fit_loop.load_state_dict(state)
    _go_on_in_epoch(trainer.fit_loop)


def _go_on_in_epoch(loop: Any) -> None:
    for name in ("_restarting", "_loaded_from_state_dict", "_resuming_from_checkpoint"):
        _set(loop, name, False)
    loop.reset_restart_stage()
    for part in vars(loop).values():
        if hasattr(part, "_resuming_from_checkpoint"):
            _go_on_in_epoch(part)


def enter_epoch(trainer: Trainer) -> None:
    """Clear the restart flags of the epoch loop and its validation, so that an epoch begins as a new one."""
    loop: Any = trainer.fit_loop.epoch_loop
    for part in (loop, loop.val_loop):
        _set(part, "_restarting", False)


def finish_batch(trainer: Trainer, batch: Any, output: Any) -> None:
    """Run what `_TrainingEpochLoop.advance` does after the optimizer step: schedulers, hooks, counters."""
    loop: Any = trainer.fit_loop.epoch_loop
    connector = _get(trainer, "_logger_connector")
    finish_step(trainer)
    kind = loop.automatic_optimization.output_result_cls
    outputs = kind.from_training_step_output(output, trainer.accumulate_grad_batches).asdict()
    for name in ("call_callback_hooks", "call_module_hook"):
        call = lightnings(name, _root_of(trainer))
        call(trainer, "on_train_batch_end", outputs, batch, loop.batch_idx)
    connector.on_batch_end()
    loop.batch_progress.increment_completed()
    connector.update_train_step_metrics()


def complete_steps(trainer: Trainer) -> None:
    """Count the optimizer step in progress as completed in the training loop's counters."""
    loop: Any = trainer.fit_loop.epoch_loop
    steps = loop.automatic_optimization.optim_progress.optimizer.step
    for tracker in (steps.total, steps.current):
        tracker.completed = tracker.ready


def finish_step(trainer: Trainer) -> None:
    """Count an optimizer step and step the schedulers, unless that is done already."""
    loop: Any = trainer.fit_loop.epoch_loop
    progress = loop.batch_progress
    complete_steps(trainer)
    if progress.total.processed < progress.total.ready:
        if progress.total.started < progress.total.ready:
            progress.increment_started()
        progress.increment_processed()
        loop.update_lr_schedulers("step", update_plateau_schedulers=False)
        if loop._num_ready_batches_reached():
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)


def settle_counters(trainer: Trainer, *, is_committed: bool, num_stepped: int) -> None:
    """Set the counters of an interrupted fit so that a resumed one continues after the last step.

    They become those that Lightning saves in `on_train_batch_end`, in an interrupted validation, which
    starts again, or at the begin or end of an epoch. A batch that is not committed is undone.
    """
    outer: Any = trainer.fit_loop
    loop = outer.epoch_loop
    progress, epoch = loop.batch_progress, outer.epoch_progress.current
    if is_committed:
        finish_step(trainer)
    else:  # batches since the last optimizer step count as not begun
        over = progress.current.completed % trainer.accumulate_grad_batches
        for tracker in (progress.total, progress.current):
            tracker.completed -= over
            tracker.ready = tracker.started = tracker.processed = tracker.completed
        progress.is_last_batch = False
        steps = loop.automatic_optimization.optim_progress.optimizer
        for tracker in (steps.step.total, steps.step.current, steps.zero_grad.total, steps.zero_grad.current):
            tracker.ready = tracker.completed
    if epoch.processed == epoch.started:
        return
    if trainer.validating and is_committed:
        evaluated = loop.val_loop.batch_progress
        evaluated.reset()
        evaluated.increment_ready()
        evaluated.increment_started()
    elif progress.current.ready:
        for tracker in (progress.total, progress.current):
            tracker.completed = tracker.ready - 1
    else:  # Lightning adds one where it assumes a preceding validation
        num_stepped = loop._batches_that_stepped - int(validates_now(trainer))
    loop._batches_that_stepped = num_stepped


def before_batches(trainer: Trainer, function: Callable[[], object]) -> None:

    def call_and_advance(advance: Any, data_fetcher: Any) -> None:
        function()
        advance(data_fetcher)

    _wrap(trainer.fit_loop.epoch_loop, "advance", call_and_advance)


def before_updates(trainer: Trainer, function: Callable[[], None]) -> None:
    """Register a function to run just before each parameter update, after Lightning's hooks and clipping."""

    def call(after_closure: Any, *arguments: Any) -> None:
        after_closure(*arguments)
        function()

    _wrap(trainer.precision_plugin, "_after_closure", call)


def after_schedulers(trainer: Trainer, function: Callable[[], None]) -> None:
    """Register a function to run after the schedulers of each batch, before the hooks of the batch's end."""
    loop: Any = trainer.fit_loop.epoch_loop

    def update_and_call(update: Any, interval: str, update_plateau_schedulers: bool) -> None:
        update(interval, update_plateau_schedulers=update_plateau_schedulers)
        is_last = interval == "epoch" or not loop._num_ready_batches_reached()
        if is_last and not update_plateau_schedulers:
            function()

    _wrap(loop, "update_lr_schedulers", update_and_call)


def loader_states(trainer: Trainer) -> list[Any]:
    return list(_get(trainer.fit_loop, "_combined_loader")._state_dicts())


def dump_checkpoint(trainer: Trainer, states: list[Any] | None = None) -> dict[str, Any]:
    """Return a checkpoint dict as Lightning writes it, with `states` as the states of the dataloaders."""
    checkpoint: dict[str, Any] = _get(trainer, "_checkpoint_connector").dump_checkpoint(weights_only=False)
    if states:
        checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = states
    return checkpoint


def at_step_boundaries(trainer: Trainer, check: Callable[[], object]) -> None:
    """Register `check` to run, with several ranks, before each batch, instead of Lightning's SIGTERM sync."""
    loop: Any = trainer.fit_loop.epoch_loop
    # Lightning 2.5.0 and 2.5.1 exchange no signals.
    if tuple(map(int, re.findall(r"\d+", _version(_root_of(trainer) or _root_in_use()))[:3])) >= (2, 5, 2):
        _set(loop, "_broadcast_sigterm_tensor", check)
        return
    before_batches(trainer, check)


def replace_signal_handlers(trainer: Trainer, *, on_sigterm: Any, on_requeue: Any) -> Any:
    """Replace the handlers that Lightning registers when a run begins; return its own for SLURM's requeue."""
    connector = _get(trainer, "_signal_connector")
    requeue = _get(connector, "_slurm_sigusr_handler_fn")
    _set(connector, "_sigterm_notifier_fn", on_sigterm)
    _set(connector, "_slurm_sigusr_handler_fn", on_requeue)
    return requeue


def note_sigterm(trainer: Trainer) -> None:
    """Make `Trainer.received_sigterm` True: an attribute of `_signal_connector`."""
    _set(_get(trainer, "_signal_connector"), "received_sigterm", True)


# ---------------------------------------------------------------------- loggers, the module


def logger_version(logger: Any) -> Any:
    """Return the version of a logger that chooses it on first access (`_version`); None for others."""
    return logger.version if "_version" in vars(logger) else None


def set_logger_version(logger: Any, version: Any) -> None:
    """Set a logger's version to that of another process's logger, unless that is None."""
    if version is not None:
        _set(logger, "_version", version)


def append_to_csv(logger: Any) -> None:
    """Make a `CSVLogger` continue the file of another process, which a new writer would delete."""
    root = _root_of(logger)
    if root is None or not isinstance(logger, lightnings("CSVLogger", root)):
        return
    kind = lightnings("CSVWriter", root)
    _get(kind, "_check_log_dir_exists")
    writer: Any = type(kind.__name__, (kind,), {"_check_log_dir_exists": lambda self: None})(logger.log_dir)
    _set(logger, "_experiment", writer)
    files, path = _get(writer, "_fs"), writer.metrics_file_path
    if files.isfile(path):
        with files.open(path, "r", newline="") as file:
            writer.metrics_keys = next(csv.reader(file), [])


# ---------------------------------------------------------------------- the strategy and its launcher


def pass_for_fabrics(launcher: Any) -> None:
    """Make a launcher pass `isinstance` checks for Fabric's launcher of the same kind."""
    kind = "Function" if isinstance(launcher, MultiProcessingLauncher) else "Script"
    lightnings(f"Fabric{kind}Launcher", _root_of(launcher)).register(type(launcher))


def choose_backend(strategy: Any) -> str:
    """Return the user's backend or the device's default, and set it as `process_group_backend`."""
    backend = str(_get(strategy, "_get_process_group_backend")())
    _set(strategy, "_process_group_backend", backend)
    return backend


def check_can_start_children(launcher: SubprocessScriptLauncher) -> None:
    """Raise RuntimeError if this process's local rank is not 0, or the launcher has children already."""
    _get(launcher, "_check_can_spawn_children")()
