"""Refusals, before training starts, of what cannot continue exactly without a rank."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lightning_ddp._lightning import is_fitting, loaders_of
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.supervise.settings import RecoverySettings, ReplaceSettings

if TYPE_CHECKING:  # a run without an averager does not import them
    from lightning_ddp.averaging import AveragerPlan

__all__ = ["check_arguments", "check_next_run", "check_training"]


def _refuse(what: str, why: str, instead: str) -> None:
    raise ConfigurationError(
        f"with {what} training cannot continue after the loss of a rank, because {why}. Use {instead}, or"
        " on_failure='stop'."
    )


def check_arguments(
    settings: RecoverySettings,
    *,
    start_method: str,
    uneven_inputs: str | None,
    hook: str | None,
    hook_has_state: bool,
    averager: AveragerPlan | None,
) -> None:
    """Raise a ConfigurationError if arguments of the strategy ask for what cannot continue without a rank."""
    if isinstance(settings, ReplaceSettings) and start_method != "popen":
        _refuse(
            f"start_method={start_method!r} and new processes",
            "those processes run the script again, or are forks of a process that has imported it",
            "start_method='popen', with `python -m lightning_ddp run` to replace any rank, or"
            " on_failure='shrink'",
        )
    if uneven_inputs == "error":
        _refuse(
            "uneven_inputs='error'",
            "some ranks may have one batch less when the rest of an epoch is redistributed",
            "uneven_inputs='join' or None",
        )
    if uneven_inputs is not None and (averager is not None or settings.batch == "global"):
        _refuse(
            "uneven_inputs and " + ("model_averaging" if averager is not None else "batch='global'"),
            "ranks that take local steps, or share one batch, do not run out of batches together",
            "uneven_inputs=None",
        )
    if hook == "noop":
        _refuse("the hook 'noop'", "each rank trains a model of its own", "another hook of available_hooks()")
    if hook_has_state:
        _refuse(
            "ddp_comm_state",
            "changes of this state within a step cannot be undone",
            "a hook by its name in available_hooks()",
        )
    if averager is not None and getattr(averager.options, "intra_node_gradients", False):
        _refuse(
            "intra_node_gradients=True",
            "nodes may have different numbers of ranks after a loss",
            "model_averaging='diloco'",
        )
    if averager is not None and settings.batch == "global":
        _refuse("batch='global'", "local training has no batch of all ranks", "batch='rank'")


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
    """Raise a ConfigurationError if the Trainer, or the place where it runs, does so."""
    if num_nodes > 1 and start_method != "popen":
        _refuse(
            f"num_nodes={num_nodes} and start_method={start_method!r}",
            "on the other nodes, the process that waits for its ranks ends all of them when one has died",
            "start_method='popen'",
        )
    if is_external:
        _refuse(
            "processes of torchrun or SLURM",
            "these end all ranks when one has died",
            "`python train.py`, which starts the processes itself",
        )
    if device_type not in ("cpu", "cuda"):
        _refuse(
            f"devices of type {device_type!r}",
            "this package does not know when their collectives have ended",
            "Trainer(accelerator='cpu')",
        )
    if device_type != "cpu" and is_averaging:
        _refuse(
            f"model_averaging on devices of type {device_type!r}",
            "an abort would leave only some parameters averaged",
            "Trainer(accelerator='cpu')",
        )
    if not trainer.lightning_module.automatic_optimization:
        _refuse(
            "manual optimization",
            "a batch with several optimizer steps may be committed in part",
            "automatic_optimization=True",
        )
    for config in trainer.lr_scheduler_configs:
        end = getattr(config.scheduler, "total_steps", None)
        if end is None or settings.batch != "rank":
            continue
        if config.interval == "epoch" and trainer.max_epochs is not None and trainer.max_epochs >= 0:
            continue  # of which there are as many with any number of ranks
        most = _most_steps(trainer, settings.min_world_size)
        if most >= (end + 1) * config.frequency:  # torch raises at the first one after the end
            _refuse(
                f"{type(config.scheduler).__name__} and batch='rank'",
                f"it ends after {end} steps, and an epoch has more steps with fewer ranks: with"
                f" {settings.min_world_size} ranks from the beginning "
                + ("there is no end" if math.isinf(most) else f"the fit takes {most:.0f}"),
                f"batch='global', or Trainer(max_steps={end * config.frequency}), or a larger min_world_size",
            )


def _most_steps(trainer: Any, num_ranks: int) -> float:
    """Return how many optimizer steps a fit takes at most, which may go on with so few ranks at any time.

    It takes the most if there are so few from its beginning: each step uses the samples of one batch of each
    rank. All ranks call it; it communicates, unless the dataloaders of training are set up.
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
    """Return how many batches of an epoch, dealt to `world_size` ranks now, each of so few ranks has."""
    few = min(num_ranks, world_size)
    if loader.batch_size is None:  # it has a batch sampler
        return math.ceil((len(loader) + 1) * world_size / few)
    size: int = loader.batch_size
    share = math.ceil(max(len(loader.sampler) * world_size, len(loader.dataset)) / few)
    return share // size if loader.drop_last else math.ceil(share / size)


def check_next_run(trainer: Any, *, generation: int, is_same: bool) -> None:
    """Raise a ConfigurationError if a script that has lost ranks goes on with what needs all of them.

    Args:
        trainer: the Trainer that is to run.
        generation: number of the run's present generation.
        is_same: True if it is the Trainer whose fit has lost ranks.
    """
    if generation and (is_fitting(trainer) or not is_same):
        raise ConfigurationError(
            "on_failure: this script has lost ranks in a fit, and a second fit, or another Trainer, would"
            " need all ranks. Save what the first fit has trained, and start the next fit in a new"
            " program. validate and test still work with the Trainer that has lost the ranks."
        )
