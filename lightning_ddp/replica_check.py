"""The replica check of a run: ranks hash what has to be equal, and the control server compares."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lightning_ddp.communication import Communication, Equal
from lightning_ddp.ddp.replica_hash import State, StateHasher, state_of_optimizers
from lightning_ddp.launch.failure_handler import FailureHandler
from lightning_ddp.supervise.protocol import StateHashes, StateValues
from lightning_ddp.supervise.settings import ReplicaCheckSettings

if TYPE_CHECKING:  # the wrapper is imported late
    from lightning_ddp.ddp.module import BucketedDDP

_log = logging.getLogger("lightning_ddp")

_MOST_SHOWN = 3
_MOST_EVENTS = 8


class Replica(NamedTuple):
    """A model of this rank, wrapped for DDP, with its hook, averager and optimizers."""

    wrapper: BucketedDDP
    communication: Communication
    optimizers: Sequence[torch.optim.Optimizer]


class ReplicaCheck:
    """Hasher of this rank's parameters and optimizer states; the control server compares the ranks' hashes.

    `facts` returns numbers that have to be equal on all ranks, by name.
    """

    def __init__(
        self,
        control: FailureHandler,
        settings: ReplicaCheckSettings,
        replicas: Callable[[], Sequence[Replica]],
        facts: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._control, self._replicas, self._facts = control, replicas, facts
        limit = settings.mb_per_step
        most_bytes = None if limit is None else max(8, int(limit * 1024 * 1024))
        self._hasher = StateHasher(self._read, settings.cycle_steps, most_bytes)
        self._present: Sequence[Replica] = []  # models of the present cycle
        self._scope: list[Equal] = []
        self._trained: frozenset[str] = frozenset()
        """Names of the parameters that were compared in the last cycle."""
        self._events: deque[tuple[int, str]] = deque(maxlen=_MOST_EVENTS)
        """Changes of what is trained, with the step before which they were seen."""
        self._step = 0
        watch = control.watch
        self._series = 0, watch.state.begun if watch is not None else 0
        """Generation and run whose hashes are numbered together."""
        if watch is not None:
            watch.attachment = self._hashes
            control.inspector.state_values = self._values

    def after_step(self, step: int) -> None:
        """Hash a slice of this rank's state after `step` optimizer steps, unless it may differ by design."""
        self._present = self._present or self._replicas()
        scope = [each.communication.equal_after_step for each in self._present]
        is_on_device = bool(scope) and self._present[0].wrapper.device.type == "cuda"
        if Equal.NOTHING in scope or (is_on_device and torch.cuda.is_current_stream_capturing()):
            return
        generation = self._control.calls.state.generation if self._control.calls is not None else 0
        if generation != self._series[0]:  # all ranks continue after the same step
            self._hasher.begin()  # first: nothing of another series is sent under the new name
            self._series = generation, 0
        if scope != self._scope:
            self._scope = scope
            self._hasher.begin_cycle()
        self._step = step
        self._hasher.hash_next(step)
        if self._hasher.num_hashed == 1:
            _log.info("replica_check: the state is compared once in %d steps", len(self._hasher.cycle))

    def release(self) -> None:
        """Drop references to the models at the end of the run; hashes made so far stay available."""
        self._replicas, self._facts, self._present = list, dict, []
        self._hasher.release()

    # ------------------------------------------------------------------ what is compared

    def _read(self) -> State:
        """Return tensors and numbers that must be equal on all ranks, at the start of a cycle of hashes."""
        tensors: dict[str, Tensor] = {}
        numbers = dict(self._facts())
        replicas = self._present = self._replicas()
        averaged: set[str] = set()
        trained: list[str] = []
        for position, (wrapper, communication, optimizers) in enumerate(replicas):
            prefix = f"model {position}: " if len(replicas) > 1 else ""
            updated = {id(p) for optimizer in optimizers for g in optimizer.param_groups for p in g["params"]}
            reduced = set(wrapper.reducer.layout.names)
            averaged |= {prefix + name for name in reduced}
            names = {
                id(p): prefix + name
                for name, p in wrapper.module.named_parameters()
                if name not in wrapper.parameters_to_ignore and (name in reduced or id(p) in updated)
            }
            trained += names.values()
            tensors |= {names[id(p)]: p for p in wrapper.module.parameters() if id(p) in names}
            state, options = state_of_optimizers(optimizers, names)
            numbers |= {prefix + name: value for name, value in options.items() if "parameter group" in name}
            if communication.equal_after_step is Equal.ALL:
                numbers |= {prefix + name: value for name, value in options.items()}
                state |= communication.replicated_state()
                tensors |= {prefix + name: tensor for name, tensor in state.items()}
        self._note(trained, averaged)
        return tensors, numbers

    def _note(self, trained: Sequence[str], averaged: set[str]) -> None:
        """Note which parameters started training since the last cycle of hashes, for the server's reports."""
        new = [name for name in trained if name not in self._trained]
        if self._trained and new:
            local = [name for name in new if name not in averaged]
            text = f"{_listed(new)} joined training before step {self._step}"
            if local:
                text += (
                    f"; no gradient of {_listed(local)} is averaged over the ranks, as none was required"
                    " when the model was wrapped"
                )
            self._events.append((self._step, text))
        self._trained = frozenset(trained)

    # ------------------------------------------------------------------ in the thread of the channel

    def _hashes(self) -> StateHashes | None:
        series = self._series
        fresh = self._hasher.take_fresh()
        return StateHashes(*series, fresh) if fresh else None

    def _values(self, number: int) -> StateValues:
        answer = partial(StateValues, *self._series, number)
        found, before = self._hasher.find(number)
        if found is None:
            return answer(0, None, (), (), can_be_copied=False, notes=())
        notes = tuple(text for step, text in list(self._events) if before is None or step > before)
        return answer(
            found.step, before, found.names, found.values, can_be_copied=found.is_state, notes=notes
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return ", ".join(names[:_MOST_SHOWN]) + more
