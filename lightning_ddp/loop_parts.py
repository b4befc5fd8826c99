"""Parts of Lightning's loops that the strategy replaces: the forward redirection, the logged results."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DistributedSampler

from lightning_ddp._lightning import (
    ForwardRedirection,
    LightningModule,
    ResultCollection,
    Trainer,
    loaders_of,
)
from lightning_ddp.communication import Communication
from lightning_ddp.ddp.buffers import copy_states, put_states
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.strategy_core import as_wrapper

if TYPE_CHECKING:  # imported late, as most runs do not need it
    from lightning_ddp.ddp.lockstep import Lockstep


class ManualOptimizationRedirection(ForwardRedirection):
    """Forward redirection that turns gradient synchronization off inside a manual `training_step`."""

    def __init__(self, communication: Communication) -> None:
        super().__init__()
        self._communication = communication

    def on_after_inner_forward(self, wrapper_module: torch.nn.Module, original_module: Any) -> None:
        self._set_sync(wrapper_module, original_module, is_on=False)

    def on_after_outer_forward(self, wrapper_module: torch.nn.Module, original_module: Any) -> None:
        self._set_sync(wrapper_module, original_module, is_on=self._communication.synchronises_backward)

    def _set_sync(self, wrapper_module: torch.nn.Module, original_module: Any, *, is_on: bool) -> None:
        wrapper = as_wrapper(wrapper_module)
        if wrapper is not None and not original_module.automatic_optimization:
            wrapper.require_backward_grad_sync = is_on


class LockstepResults(ResultCollection):
    """Logged training values, without those that a rank logs while it repeats its last batch."""

    def __init__(self, lockstep: Lockstep) -> None:
        super().__init__(training=True)
        self._lockstep = lockstep

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        metric = self[key]
        # Values for the epoch are logged after its last step.
        is_replay = self._lockstep.turn.is_replay and not key.startswith("on_train_epoch")
        before = copy_states(metric) if is_replay else {}
        super().update_metrics(key, value, batch_size)
        put_states(metric, before)
        if metric.is_tensor and metric.meta.is_mean_reduction:
            # The batch size differs between ranks, and the mean of integers would be rounded.
            metric.cumulated_batch_size = metric.cumulated_batch_size.to(metric.value.dtype)


def require_lockstep(module: LightningModule) -> None:
    """Raise ConfigurationError where `uneven_inputs` cannot work: `dataloader_iter`, a resume in an epoch."""
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise ConfigurationError(
            "uneven_inputs needs a training_step(batch, batch_idx). A training_step with dataloader_iter"
            " fetches batches itself, so it is not known which step a batch belongs to."
        )
    loop = module.trainer.fit_loop
    progress = loop.epoch_loop.batch_progress
    if loop.restarting and progress.current.ready and not progress.is_last_batch:
        raise ConfigurationError(
            f"uneven_inputs cannot resume inside an epoch, here after {progress.current.ready} batches,"
            " because the checkpoint does not contain which batches each rank has used. Resume from a"
            " checkpoint of the end of an epoch."
        )


def shared_facts(trainer: Trainer, deals_batches: bool) -> dict[str, Any]:
    """Return values that must be equal on all ranks of a fit, by name, for the replica check.

    With `deals_batches` the ranks may have different numbers of batches.
    """
    facts: dict[str, Any] = {"global_step": trainer.global_step, "current_epoch": trainer.current_epoch}
    if not deals_batches:
        facts["number of training batches"] = trainer.num_training_batches
    for index, loader in enumerate(loaders_of(trainer.fit_loop)):
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, DistributedSampler):  # in which all ranks shuffle alike
            facts[f"seed of the sampler of dataloader {index}"] = sampler.seed
            facts[f"epoch of the sampler of dataloader {index}"] = sampler.epoch
    return facts
