"""The Lightning side of hooks and averagers: optimizer steps, one model on all ranks, checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import fsspec  # type: ignore[import-untyped]  # has no stubs
import torch

import lightning_ddp.rank_files as rank_files
from lightning_ddp._lightning import AsyncCheckpointIO, DDPStrategy, LightningModule
from lightning_ddp.comm.group import Group
from lightning_ddp.communication import Communication
from lightning_ddp.errors import MissingGradientError

if TYPE_CHECKING:
    from lightning_ddp.ddp.module import BucketedDDP

__all__ = ["CommunicatingFit", "as_wrapper"]

_log = logging.getLogger("lightning_ddp")
_UNUSED = (
    "It looks like your LightningModule has parameters that were not used in the loss of training_step. Where"
    ' that is meant to be: Trainer(strategy="custom_ddp_find_unused_parameters_true"), or'
    " CustomDDPStrategy(find_unused_parameters=True)."
)


def as_wrapper(model: object) -> BucketedDDP | None:
    """`model` if it is the wrapper that fitting puts around a module, else None."""
    # the engine is imported where a model is wrapped, when the other processes have been started
    from lightning_ddp.ddp.module import BucketedDDP

    return model if isinstance(model, BucketedDDP) else None


class CommunicatingFit(DDPStrategy):
    """Base of the strategy that steps, averages, saves and resumes with hooks and averagers."""

    _communication: Communication
    _resumed_from: Any = None
    _tokens: Mapping[str, str] = {}  # checkpoint -> token of its latest saving

    if TYPE_CHECKING:

        def _joined_group(self) -> Group: ...
        def _is_alone(self) -> bool: ...

    def _scaler(self) -> Any:
        """Who decides on the factor of the loss under mixed precision; None for nobody."""
        return getattr(self.precision_plugin, "scaler", None)

    def _loss_scale(self) -> float:
        """The present factor of the loss under mixed precision. The host waits for the device to know it."""
        scaler = self._scaler()
        return float(scaler.get_scale()) if scaler is not None else 1.0

    def _loss_scale_of_gradients(self) -> float | torch.Tensor:
        """The same for what is done with gradients: on a device it stays there."""
        scaler = self._scaler()
        if scaler is None or self.root_device.type == "cpu":
            return self._loss_scale()
        scale: torch.Tensor = scaler.scale(torch.ones((), device=self.root_device))
        return scale

    def _agree(self) -> None:
        """Gives all ranks one model; a rank whose peers have failed keeps its own."""
        if not self._is_alone():
            self._communication.agree()

    def backward(
        self, closure_loss: torch.Tensor, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Runs backward through the precision plugin; communicates unless gradients accumulate."""
        try:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        except MissingGradientError as error:
            error.add_hint(_UNUSED)
            raise

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Takes a step; with model averaging, counts it and averages if it is time (then communicates)."""
        averager = self._communication.averager
        if isinstance(optimizer, torch.optim.LBFGS) and self._communication.averages_gradients:
            closure = partial(self._mean_loss, closure)
        # in local training a step counts also if the loss scaler skips it
        is_asked = averager is not None and averager.averages_gradients
        before = self._loss_scale() if is_asked else 1.0
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if averager is not None:  # a loss scaler that skips a step lowers its scale
            self._communication.after_step(optimizer, was_skipped=is_asked and self._loss_scale() < before)
        return output

    def _mean_loss(self, closure: Callable[[], Any]) -> Any:
        """The loss that belongs to averaged gradients. Communicates.

        An optimizer that decides by the loss how often it calls its closure decides alike on all ranks then;
        else the ranks' collectives would not match.
        """
        loss = closure()
        if loss is None:
            return None
        return self.reduce(torch.as_tensor(loss, device=self.root_device).detach().clone())

    def on_validation_start(self) -> None:
        """Makes the ranks validate one model. All ranks call it."""
        self._agree()
        super().on_validation_start()

    def on_train_end(self) -> None:
        """Leaves all ranks with one model, BatchNorm statistics included. All ranks call it."""
        self._agree()
        wrapper = as_wrapper(self.model)
        if wrapper is not None:
            wrapper.sync_buffers()
        super().on_train_end()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state; with model averaging all ranks call it and agree on the parameters before."""
        self._agree()
        return super().lightning_module_state_dict()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Writes the checkpoint, and with hooks or averagers that remember something a file of each rank.

        All ranks call it; with such files it communicates. See `rank_files`.
        """
        files: Any = self.checkpoint_io
        is_async = isinstance(files, AsyncCheckpointIO)
        if "optimizer_states" in checkpoint and not self._is_alone():
            if is_async:  # its thread might write them after the checkpoint
                files = files.checkpoint_io

            def write(state: dict[str, Any], path: str) -> None:
                files.save_checkpoint(state, path, storage_options=storage_options)

            group = self._joined_group()
            rank_files.save_state(self._communication, checkpoint, filepath, group, self.root_device, write)
        super().save_checkpoint(checkpoint, filepath, storage_options)
        state = checkpoint.get(rank_files.KEY)
        if state is None or self._is_alone():
            return
        self.barrier("checkpoint with files of the ranks")
        keep = {state["token"]}
        if is_async and str(filepath) in self._tokens:  # the checkpoint may still be that one
            keep.add(self._tokens[str(filepath)])
        self._remove_rank_files(filepath, keep=keep)
        self._tokens = {**self._tokens, str(filepath): state["token"]}

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Reads a checkpoint; its place is kept for the files of the ranks beside it."""
        self._resumed_from = checkpoint_path
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        if rank_files.KEY in loaded:
            self._tokens = {**self._tokens, str(checkpoint_path): loaded[rank_files.KEY]["token"]}
        return loaded

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a checkpoint and this rank's file beside it."""
        super().remove_checkpoint(filepath)
        if self._communication.has_state:
            self._remove_rank_files(filepath)

    def _remove_rank_files(self, checkpoint: Any, *, keep: Collection[str] = ()) -> None:
        """Removes this rank's files beside a checkpoint but those of some savings."""
        system, path = fsspec.core.url_to_fs(str(checkpoint))
        folder, _, name = path.rpartition("/")
        kept = {rank_files.rank_file(name, self.global_rank, token) for token in keep}
        with suppress(FileNotFoundError):  # the folder is gone with the checkpoint
            for entry in system.ls(folder, detail=False):
                file = entry.rpartition("/")[2]
                if rank_files.is_of_rank(file, name, self.global_rank) and file not in kept:
                    system.rm(entry)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restores the optimizers, the hook and the averager; logs what could not be kept.

        Outside of a run, as in the main process after one in spawned processes, there are optimizers alone.
        """
        super().load_optimizer_state_dict(checkpoint)
        if self._is_alone():
            return
        assert self.lightning_module is not None
        names = [name for name, _ in self.lightning_module.named_parameters()]
        notes = rank_files.load_state(
            self._communication,
            dict(checkpoint),
            self._resumed_from,
            self._joined_group(),
            names,
            self.checkpoint_io.load_checkpoint,
        )
        for note in notes:
            _log.warning("resuming from %s: %s", self._resumed_from, note)
