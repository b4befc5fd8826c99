"""What `on_failure="shrink"` cannot do exactly is refused before training starts, with the reason."""

from __future__ import annotations

from typing import Any

from lightning_ddp._lightning import is_fitting
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.supervise.settings import RecoverySettings

__all__ = ["check_arguments", "check_next_run", "check_training"]


def _refuse(what: str, why: str, instead: str) -> None:
    raise ConfigurationError(
        f"on_failure='shrink' with {what}: {why}. Write {instead}, or on_failure='stop'."
    )


def check_arguments(
    settings: RecoverySettings,
    *,
    start_method: str,
    uneven_inputs: str | None,
    has_hook: bool,
    has_averager: bool,
) -> None:
    """Looks at the arguments of the strategy.

    Raises:
        ConfigurationError: what they ask for cannot go on without a rank.
    """
    if start_method != "popen":
        _refuse(
            f"start_method={start_method!r}",
            "torch.multiprocessing ends all processes when one has died",
            "start_method='popen'",
        )
    if uneven_inputs is not None:
        _refuse(
            "uneven_inputs",
            "the steps of the ranks are agreed over the group that has lost one",
            "uneven_inputs=None",
        )
    if has_hook:
        _refuse(
            "ddp_comm_hook", "what the hook remembers of a step cannot be undone yet", "ddp_comm_hook=None"
        )
    if has_averager:
        _refuse("model_averaging", "in local training the ranks are not at one step", "model_averaging=None")
    if settings.batch != "rank":
        _refuse(
            f"batch={settings.batch!r}",
            "the gradients of batches of different sizes are not weighted yet",
            "batch='rank'",
        )


def check_training(trainer: Any, *, num_nodes: int, is_external: bool, device_type: str) -> None:
    """Looks at the Trainer and where it runs.

    Raises:
        ConfigurationError: as `check_arguments`.
    """
    if num_nodes > 1:
        _refuse(
            f"num_nodes={num_nodes}",
            "a lost process of another host cannot be ended from here yet",
            "Trainer(num_nodes=1)",
        )
    if is_external:
        _refuse(
            "processes of torchrun or SLURM",
            "those end all ranks when one has died",
            "`python train.py`, which starts them itself",
        )
    if device_type != "cpu":
        _refuse(
            f"devices of type {device_type!r}",
            "communicators of NCCL are not made anew yet",
            "Trainer(accelerator='cpu')",
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        _refuse(
            "a GradScaler",
            "the scale that a step has changed cannot be put back yet",
            "precision='bf16-mixed'",
        )
    if not trainer.lightning_module.automatic_optimization:
        _refuse(
            "manual optimisation",
            "a batch with several optimizer steps may be committed by half",
            "automatic_optimization=True",
        )
    if trainer.limit_train_batches != 1.0 or trainer.overfit_batches:
        _refuse(
            "limit_train_batches or overfit_batches",
            "they count batches of the ranks there were at first",
            "max_steps, or a torch.utils.data.Subset",
        )
    if trainer.reload_dataloaders_every_n_epochs:
        _refuse(
            "reload_dataloaders_every_n_epochs",
            "samplers of new loaders are not followed yet",
            "reload_dataloaders_every_n_epochs=0",
        )


def check_next_run(trainer: Any, *, generation: int, is_same: bool) -> None:
    """Looks at what follows in a script that has lost ranks.

    Args:
        trainer: what is to run.
        generation: how often the run has gone on without ranks that it lost.
        is_same: whether it is the Trainer whose fit has gone on.

    Raises:
        ConfigurationError: it needs the ranks there were at first.
    """
    if generation and (is_fitting(trainer) or not is_same):
        raise ConfigurationError(
            "on_failure='shrink': this script has lost ranks in a fit, and begins another fit, or another"
            " Trainer, which would need all of them. Save what the first fit has trained, and begin the next"
            " one in a new program; validate and test go on with the Trainer that has lost the ranks."
        )
