"""The Lightning side of uneven inputs: which calls of the Trainer keep the ranks in step.

What happens in such a step is in `parallel.uneven`.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Literal

import torch

from lightning_ddp._lightning import (
    DDPStrategy,
    LightningModule,
    ResultCollection,
    Trainer,
    bind_like,
    set_training_results,
)
from lightning_ddp.comm.group import Group
from lightning_ddp.ddp.snapshot import copy_states, put_states
from lightning_ddp.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning_ddp.ddp.lockstep import Lockstep

__all__ = ["UnevenFit", "UnevenInputs"]

UnevenInputs = Literal["error", "join"]
_UNEVEN_INPUTS = (None, "error", "join")


class UnevenFit(DDPStrategy):
    """Base of the strategy that lets ranks run out of training batches at different steps of `fit`."""

    _uneven_inputs: UnevenInputs | None
    _divide_by_initial_world_size: bool
    _lockstep: Lockstep | None = None

    if TYPE_CHECKING:

        def _joined_group(self) -> Group: ...

    def _choose_uneven_inputs(
        self, uneven_inputs: UnevenInputs | None, divide_by_initial_world_size: bool
    ) -> None:
        if uneven_inputs not in _UNEVEN_INPUTS:
            raise ConfigurationError(
                f"uneven_inputs={uneven_inputs!r}; there are {', '.join(map(repr, _UNEVEN_INPUTS))}"
            )
        if not divide_by_initial_world_size and uneven_inputs != "join":
            raise ConfigurationError('divide_by_initial_world_size=False needs uneven_inputs="join"')
        self._uneven_inputs = uneven_inputs
        self._divide_by_initial_world_size = divide_by_initial_world_size

    def _setup_uneven_inputs(self, trainer: Trainer) -> None:
        self._lockstep = None
        if self._uneven_inputs is not None:
            from lightning_ddp.ddp.lockstep import Lockstep  # a run that does not look does without

            self._lockstep = Lockstep(
                self._joined_group(),
                self.root_device,
                is_allowed=self._uneven_inputs == "join",
                divide_by_initial_world_size=self._divide_by_initial_world_size,
            )
            results = bind_like(trainer, _LockstepResults)(self._lockstep)
            set_training_results(trainer, results)

    def process_dataloader(self, dataloader: object) -> object:
        """With `uneven_inputs`, makes the training dataloader end on all ranks at once; communicates then.

        Raises:
            ConfigurationError: there are several training dataloaders, or only some ranks know the length of
                theirs, or `training_step` fetches its batches itself, or the run resumes inside an epoch.
        """
        if self._lockstep is None or not self._is_training():
            return dataloader
        assert self.lightning_module is not None
        _require_lockstep(self.lightning_module)
        return self._lockstep.wrap(dataloader)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Moves a batch. For one of training this begins the step. Does not communicate."""
        if self._lockstep is not None and self._is_training():
            self._lockstep.begin()
        return super().batch_to_device(batch, device, dataloader_idx)

    def _is_training(self) -> bool:
        return self.lightning_module is not None and self.lightning_module.trainer.training

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's `training_step` in the wrapper's forward."""
        if self._lockstep is None:
            return super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        with self._lockstep.step(self.lightning_module):
            return super().training_step(*args, **kwargs)

    def backward(
        self, closure_loss: torch.Tensor, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Runs backward through the precision plugin; with zeros on a rank that repeats its last batch."""
        if self._lockstep is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        closure_loss = self._lockstep.scale(closure_loss)
        closure_loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        self._lockstep.restore()
        return closure_loss

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any, decide so. A rank that repeats its last batch has no say in a step."""
        if self._lockstep is None or not self._lockstep.is_partial:
            return super().reduce_boolean_decision(decision, all)
        vote = torch.tensor(int(decision), device=self.root_device)
        self._lockstep.reduce(self._joined_group(), [vote], "min" if all else "max")
        return bool(vote)

    def teardown(self) -> None:
        """Forgets what was fetched. Does not communicate."""
        if self._lockstep is not None:
            self._lockstep.forget()
            self._lockstep = None
        super().teardown()


class _LockstepResults(ResultCollection):
    """What is logged in training, less what a rank logs in a step for which it has no batch of its own."""

    def __init__(self, lockstep: Lockstep) -> None:
        super().__init__(training=True)
        self._lockstep = lockstep

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        metric = self[key]
        # what is logged for the epoch comes after its last step
        is_replay = self._lockstep.turn.is_replay and not key.startswith("on_train_epoch")
        before = copy_states(metric) if is_replay else {}
        super().update_metrics(key, value, batch_size)
        put_states(metric, before)
        if metric.is_tensor and metric.meta.is_mean_reduction:
            # ranks differ in it, and the mean of integers is rounded
            metric.cumulated_batch_size = metric.cumulated_batch_size.to(metric.value.dtype)


def _require_lockstep(module: LightningModule) -> None:
    """Refuses ways of training in which the ranks cannot be kept in step."""
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise ConfigurationError(
            "uneven_inputs needs a training_step(batch, batch_idx): one with dataloader_iter fetches batches"
            " by itself, so it is not known which step a batch belongs to"
        )
    loop = module.trainer.fit_loop
    progress = loop.epoch_loop.batch_progress
    if loop.restarting and progress.current.ready and not progress.is_last_batch:
        raise ConfigurationError(
            f"uneven_inputs cannot resume inside an epoch, here after {progress.current.ready} batches: the"
            " checkpoint does not say which of them each rank has used. Resume from one saved at the end"
            " of an epoch."
        )
