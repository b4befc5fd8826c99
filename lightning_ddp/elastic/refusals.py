"""Refusals, before training starts, of what cannot continue exactly without a rank."""

from __future__ import annotations

import math
from typing import Any

from lightning_ddp._lightning import is_fitting, loaders_of
from lightning_ddp._torch import end_of_schedule
from lightning_ddp.comm.nccl import is_nccl, recovery_problem
from lightning_ddp.communication import Communication
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.launch.rendezvous import backend_names
from lightning_ddp.supervise.settings import RecoverySettings, ReplaceSettings


def _refuse(what: str, why: str, instead: str) -> None:
    raise ConfigurationError(
        f"with {what} training cannot continue after the loss of a rank, because {why}. Use {instead}, or"
        " on_failure='stop'."
    )


def check_arguments(
    settings: RecoverySettings,
    communication: Communication,
    hook_state: object | None,
    *,
    start_method: str,
    uneven_inputs: str | None,
) -> None:
    """Raise ConfigurationError if with these strategy arguments a fit cannot continue without a lost rank."""
    averager = communication.averager_plan
    is_global, is_local = settings.batch == "global", averager is not None
    if isinstance(settings, ReplaceSettings) and start_method != "popen":
        _refuse(
            f"start_method={start_method!r} and new processes",
            "those processes run the script again, or are forks of a process that has imported it",
            "start_method='popen', with `python -m lightning_ddp run` to replace any rank, or 'shrink'",
        )
    if uneven_inputs == "error":
        _refuse("uneven_inputs='error'", "some ranks may have one batch less then", "uneven_inputs='join'")
    if uneven_inputs is not None and (is_local or is_global):
        _refuse(
            "uneven_inputs and " + ("model_averaging" if is_local else "batch='global'"),
            "ranks that take local steps, or share one batch, do not run out of batches together",
            "uneven_inputs=None",
        )
    if communication.kind == "noop":
        _refuse("the hook 'noop'", "each rank trains a model of its own", "another hook")
    if communication.kind == "function" and hook_state is not None:
        _refuse("ddp_comm_state", "its changes within a step cannot be undone", "a hook by its name")
    if averager is not None and getattr(averager.options, "intra_node_gradients", False):
        why = "nodes may have different numbers of ranks after a loss"
        _refuse("intra_node_gradients=True", why, "model_averaging='diloco'")
    if is_local and is_global:
        _refuse("batch='global'", "local training has no batch of all ranks", "batch='rank'")


def check_backend(backend: str) -> None:
    """Raise ConfigurationError if an abort of `backend`, in torch's spelling, would end the process."""
    problem = next(filter(None, map(recovery_problem, filter(is_nccl, backend_names(backend)))), None)
    if problem is not None:
        raise ConfigurationError(f"on_failure: training cannot continue after the loss of a rank: {problem}.")


def check_training(
    trainer: Any,
    settings: RecoverySettings,
    *,
    num_nodes: int,
    start_method: str,
    is_external: bool,
    device_type: str,
    is_averaging: bool,
) -> None:
    """Raise a ConfigurationError if a Trainer's `fit` could not continue after the loss of a rank."""
    if num_nodes > 1 and start_method != "popen":
        what = f"num_nodes={num_nodes} and start_method={start_method!r}"
        why = "on the other nodes, the launching process ends all of them when one has died"
        _refuse(what, why, "start_method='popen'")
    if is_external:
        why = "these end all ranks when one has died"
        _refuse("processes of torchrun or SLURM", why, "`python train.py`")
    if device_type not in ("cpu", "cuda"):
        why = "this package does not know when their collectives have ended"
        _refuse(f"devices of type {device_type!r}", why, "Trainer(accelerator='cpu')")
    if device_type != "cpu" and is_averaging:
        what = f"model_averaging on devices of type {device_type!r}"
        _refuse(what, "an abort would leave only some parameters averaged", "Trainer(accelerator='cpu')")
    if not trainer.lightning_module.automatic_optimization:
        why = "a batch with several optimizer steps may be committed in part"
        _refuse("manual optimization", why, "automatic_optimization=True")
    finders = [type(each).__name__ for each in trainer.callbacks if hasattr(each, "lr_find")]
    if finders and isinstance(settings, ReplaceSettings):
        why = "a new process could not repeat what it has tried"
        _refuse(f"{finders[0]} and new processes", why, "a program of its own for it, or 'shrink'")
    for config in trainer.lr_scheduler_configs if settings.batch == "rank" else ():
        _check_schedule(trainer, config, settings.min_world_size)


def _check_schedule(trainer: Any, config: Any, num_ranks: int) -> None:
    """Raise ConfigurationError if a fit on `num_ranks` ranks may take more steps than its LR schedule has."""
    end = end_of_schedule(config.scheduler)
    has_max_epochs = trainer.max_epochs is not None and trainer.max_epochs >= 0
    if math.isinf(end) or (config.interval == "epoch" and has_max_epochs):
        return
    most = _most_steps(trainer, num_ranks)
    if most >= (end + 1) * config.frequency:  # torch raises at the first one after the end
        _refuse(
            f"{type(config.scheduler).__name__} and batch='rank'",
            f"it ends after {end} steps, and an epoch has more steps with fewer ranks: with {num_ranks} ranks"
            " from the beginning " + ("there is no end" if math.isinf(most) else f"the fit takes {most:.0f}"),
            f"batch='global', or Trainer(max_steps={end * config.frequency}), or a larger min_world_size",
        )


def _most_steps(trainer: Any, num_ranks: int) -> float:
    """Return the largest possible number of optimizer steps of a fit: with `num_ranks` ranks from its start.

    All ranks call it; it communicates, unless the dataloaders of training are set up.
    """
    limit: float = math.inf if trainer.max_steps < 0 else trainer.max_steps
    if trainer.max_epochs is None or trainer.max_epochs < 0:
        return limit
    if not loaders_of(trainer.fit_loop):
        trainer.fit_loop.setup_data()
    if math.isinf(trainer.num_training_batches):
        return limit
    world_size = trainer.world_size
    num_batches = max(_most_batches(each, world_size, num_ranks) for each in loaders_of(trainer.fit_loop))
    some = trainer.limit_train_batches
    num_batches = min(num_batches, some) if isinstance(some, int) else int(num_batches * some)
    varies = any(hasattr(each, "going_to_accumulate_grad_batches") for each in trainer.callbacks)
    window = 1 if varies else trainer.accumulate_grad_batches
    return min(limit, float(math.ceil(num_batches / window) * trainer.max_epochs))


def _most_batches(loader: Any, world_size: int, num_ranks: int) -> int:
    """Return the most batches per epoch of a rank if `num_ranks` ranks, not `world_size`, share them."""
    few = min(num_ranks, world_size)
    if loader.batch_size is None:  # it has a batch sampler
        return math.ceil((len(loader) + 1) * world_size / few)
    size: int = loader.batch_size
    share = math.ceil(max(len(loader.sampler) * world_size, len(loader.dataset)) / few)
    return share // size if loader.drop_last else math.ceil(share / size)


def check_next_run(trainer: Any, *, is_same: bool) -> None:
    """Raise ConfigurationError if a script that has lost ranks fits again, or uses another Trainer."""
    if is_fitting(trainer) or not is_same:
        raise ConfigurationError(
            "on_failure: this script has lost ranks in a fit, and a second fit, or another Trainer, would"
            " need all ranks. Save what the first fit has trained, and start the next fit in a new"
            " program. validate and test still work with the Trainer that has lost the ranks."
        )
