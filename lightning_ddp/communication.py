"""The hook and the averager of one run: checked arguments, wiring to a wrapper, state in checkpoints.

State that is the same on all ranks is in the checkpoint under "lightning_ddp". Residuals and the optimizer
state of local training differ between ranks, and are too large to be gathered on rank 0: each rank writes its
own to `<checkpoint>.rank<r>.<token>.pt`. A checkpoint without these files loads; that state starts from
scratch.

Each save has a new token, which is in the checkpoint. So replacing the checkpoint replaces the files with
it, atomically. All ranks have written their files before that. After it rank 0 removes the files of earlier
saves, and files of a run that was killed in between, of all ranks. Names are those of rank 0: Lightning names
checkpoints, and chooses which to remove, by logged values, which may differ between ranks.
"""

from __future__ import annotations

import functools
import re
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec  # type: ignore[import-untyped]  # has no stubs
import torch

from lightning_ddp.catalogue import hook_name
from lightning_ddp.comm import all_gather_objects, barrier, broadcast_nested
from lightning_ddp.comm.group import Group
from lightning_ddp.errors import ConfigurationError

if TYPE_CHECKING:  # a run without hook and averager does not import them, which takes 10 ms
    from lightning_ddp.averaging import Averager, AveragerPlan
    from lightning_ddp.hooks import Hook, HookPlan, StatefulHook


STATE_KEY = "lightning_ddp"  # key of the package's state in a checkpoint
STATE_FORMAT = 1  # version of the dictionary that `Communication.shared_state` returns
_TOKEN_CHARACTERS = 8
_ERROR_CHARACTERS = 200
_PLAIN = (bool, int, float, str, bytes, type(None))


class Equal(Enum):
    """Enumeration of what is equal on all ranks after an optimizer step: all, only parameters, nothing."""

    ALL = auto()
    PARAMETERS = auto()
    NOTHING = auto()


HookSpec = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | Callable[..., Any]
"""Hook by name, by name and options, as a list (outer to inner), or a function with torch's signature."""


def _no_scaler() -> None:
    """Return None, for "no loss scaler"; a named function, as strategies are pickled."""


class Communication:
    """Checked communication hook and averager of one run, from the arguments of a strategy."""

    def __init__(
        self,
        hook: HookSpec | None = None,
        hook_state: object | None = None,
        wrapper: Callable[..., Any] | None = None,
        averaging: str | Mapping[str, Any] | None = None,
        period: int | None = None,
    ) -> None:
        if hook is None and wrapper is not None:
            raise ConfigurationError("ddp_comm_wrapper wraps a hook. Pass ddp_comm_hook as well.")
        if period is not None or type(hook_state).__name__ == "PostLocalSGDState":
            raise ConfigurationError(
                "PostLocalSGDState and model_averaging_period are not supported. Use model_averaging={'name':"
                " 'post_local_sgd', 'start_step': ..., 'period': ...}, which does the same."
            )
        self._hook_plan: HookPlan | None = None
        self._function: Callable[..., Any] | None = None
        if hook is not None and not callable(hook):
            from lightning_ddp.hooks import parse_hook, registered_hook

            hook = registered_hook(hook) or hook
        if hook is not None and not callable(hook):
            self._hook_plan = parse_hook(hook)
            if hook_state is not None:
                raise ConfigurationError(
                    f"ddp_comm_state has no effect with the hook {self._hook_plan.name!r}, which keeps its"
                    " own state. Leave it out."
                )
        else:
            self._function = hook
        self._hook_state = hook_state
        self._wrapper = wrapper
        self.averager_plan: AveragerPlan | None = None
        if averaging is not None:
            from lightning_ddp.averaging import parse_averager

            self.averager_plan = parse_averager(averaging)
        self.hook: Hook | None = None  # the registered hook, if it was given by name
        self._stateful: StatefulHook | None = None
        self.averager: Averager | None = None
        self._model: Any = None
        self._scaler: Callable[[], Any] = _no_scaler
        self._loss_scale: Callable[[], Any] = _no_scaler

    # ------------------------------------------------------------------ wiring

    @property
    def kind(self) -> str | None:
        """Name of the requested built-in hook, 'function' for a function of the user's, None for no hook."""
        return self._hook_plan.name if self._hook_plan else "function" if self._function else None

    @property
    def synchronises_backward(self) -> bool:
        """True, also in accumulation, unless ranks train locally and average no gradients within nodes."""
        return not self.is_local or self._averages_in_nodes

    @property
    def _averages_in_nodes(self) -> bool:
        options = self.averager_plan.options if self.averager_plan is not None else None
        return bool(getattr(options, "intra_node_gradients", False))

    def register(
        self,
        model: Any,
        group: Group,
        device: torch.device,
        *,
        node_size: int,
        loss_scale: Callable[[], float | torch.Tensor],
        scaler: Callable[[], Any] = _no_scaler,
    ) -> None:
        """Build the hook and register it with `model`, a `BucketedDDP`; all ranks must call it.

        `node_size` is the number of ranks on a node. Jobs of the hook call `loss_scale`, which returns the
        loss scale of mixed precision. Raises ConfigurationError if ranks have different hooks or averagers.
        """
        self._model = model
        self._scaler, self._loss_scale = scaler, loss_scale
        self.averager = None  # of an earlier run
        hook: Callable[..., Any] | None = self._function
        if self._hook_plan is not None:
            from lightning_ddp.hooks import StatefulHook, build_hook

            self.hook = hook = build_hook(self._hook_plan, group, device)
            self.hook.loss_scale = loss_scale
            self._stateful = hook if isinstance(hook, StatefulHook) else None
        if hook is not None and self._wrapper is not None:
            hook = self._wrapper(hook)
        self._check_agreement(hook, group, device)
        if self._averages_in_nodes:
            from lightning_ddp.averaging.local_sgd import NodeGradients

            hook = NodeGradients(hook, group, node_size, device, lambda: not self.is_local)
        if hook is not None:
            model.register_comm_hook(self._hook_state, hook)

    def _check_agreement(self, hook: Callable[..., Any] | None, group: Group, device: torch.device) -> None:
        """Raise ConfigurationError if ranks have different hooks or averagers; all ranks must call it."""
        plan, averaging = self._hook_plan, str(self.averager_plan)
        name = plan.name if plan is not None else hook_name(hook) if hook is not None else "none"
        mine = (name, str(plan) if plan is not None else _describe(hook), averaging)
        everyone = all_gather_objects(group, mine, device)
        first_name, first_hook, first_averaging = everyone[0]
        for rank, (other_name, other, other_averaging) in enumerate(everyone):
            if other != first_hook:
                raise ConfigurationError(
                    "the ranks have different communication hooks, so their collectives would not match from"
                    f" bucket 0 on: {other_name!r} on rank {rank}, {first_name!r} on rank 0. Rank {rank} has"
                    f" {other}, rank 0 has {first_hook}. Use the same hook on all ranks."
                )
            if other_averaging != first_averaging:
                raise ConfigurationError(
                    "the ranks have different model averaging, so they would average at different times:"
                    f" rank {rank} has {other_averaging}, rank 0 has {first_averaging}. Use the same averager"
                    " on all ranks."
                )

    def start(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        group: Group,
        *,
        keeps_rounds: bool = False,
    ) -> None:
        """Build the averager, if configured; with `keeps_rounds` its failed rounds can be repeated.

        Collective: all ranks must call it.
        """
        factor = float(getattr(self.hook.options, "momentum", 0.0)) if self.hook is not None else 0.0
        groups = [each for optimizer in optimizers for each in optimizer.param_groups]
        if factor and any(g.get("momentum", 0) or g.get("betas", (0,))[0] for g in groups):
            raise ConfigurationError(
                f"momentum={factor} of the communication hook and momentum of the optimizer (for Adam, the"
                " first of betas) would both be applied. Set one of them to 0."
            )
        if self.averager_plan is not None:
            from lightning_ddp.averaging import build_averager

            self.averager = build_averager(self.averager_plan, module, optimizers, group)
            self.averager.keeps_rounds = keeps_rounds
            self._follow()

    def before_step(self) -> None:
        """Tell the averager, if any, that an optimizer is about to take a step."""
        if self.averager is not None:
            self.averager.before_step()

    def after_step(self, optimizer: torch.optim.Optimizer, *, was_skipped: bool) -> None:
        """Make the averager, if any, count an optimizer step, and average if due; all ranks must call it."""
        if self.averager is not None:
            self.averager.step(optimizer, was_skipped=was_skipped)
            self._follow()

    def _follow(self) -> None:
        self._model.require_backward_grad_sync = self.synchronises_backward

    def agree(self, others: Sequence[torch.nn.Module] = ()) -> bool:
        """Average parameters, buffers, and models made of them, if ranks may differ, as `Averager.agree`."""
        return self.averager is not None and self.averager.agree(others)

    def drop_lost_averager(self, group: Group) -> None:
        """Drop the averager if its process group is not that of `group`, as after a fit that has failed."""
        if self.averager is not None and self.averager.group.process_group is not group.process_group:
            self.averager = None

    # ------------------------------------------------------------------ other ranks

    def halt(self) -> None:
        """Stop all communication of hook and averager, after ranks were lost; return once none runs."""
        if self.hook is not None:
            self.hook.channel.halt()
        if self.averager is not None:
            self.averager.halt()

    def rejoin(self, group: Group, device: torch.device) -> None:
        """Move hook and averager to the ranks of `group`, after `halt`; all ranks must call it."""
        if self.hook is not None and self._hook_plan is not None:
            from lightning_ddp.hooks import build_hook

            built = build_hook(self._hook_plan, group, device)
            self.hook.channel, self.hook.wire = built.channel, built.wire
        if self.averager is not None:
            self.averager.rejoin(group)

    def settle_others(self) -> None:
        """Make this process, which has joined, send pending exchanges again, as the others do in `rejoin`."""
        if self.averager is not None:
            self.averager.settle_others()

    @property
    def is_local(self) -> bool:
        """True in local training, in which gradients are not averaged over all ranks."""
        return self.averager is not None and not self.averager.averages_gradients

    @property
    def has_met(self) -> bool:
        """True unless a local step was taken since all ranks averaged parameters; True without averager."""
        return self.averager is None or self.averager.has_met

    @property
    def equal_after_step(self) -> Equal:
        """Kind of state (`Equal`) that is the same on all ranks after the last optimizer step."""
        if self.kind == "noop" or (self.averager is not None and not self.averager.is_same):
            return Equal.NOTHING
        return Equal.PARAMETERS if self.is_local else Equal.ALL

    @property
    def why_unequal(self) -> str | None:
        """Reason why replicas differ by design, in all of a run or in its local training; None for none."""
        if self.kind == "noop":
            return "the hook 'noop' averages no gradients"
        if self.averager is not None and self.averager.mixes_rounds:
            return f"{self.averager.name!r} leaves each rank a part of its own parameters in local training"
        return None

    def replicated_state(self) -> dict[str, torch.Tensor]:
        """Return tensors that must be equal on all ranks, by name: CPU hook state, and GPU loss scale."""
        found = self._stateful.shared_tensors() if self._stateful is not None else {}
        scale = self._loss_scale()
        return {**found, "loss scale": scale} if isinstance(scale, torch.Tensor) else found

    @property
    def keeps_optimizer(self) -> bool:
        """True if a rank that copies another rank's parameters to catch up keeps its own optimizer state."""
        return self.averager is not None and self.is_local and self.averager.options.optimizer_state == "keep"

    def mark(self) -> Any:
        """Return hook and averager state for `restore`; call it after a step that left nothing unaveraged."""
        hook = self._stateful.mark() if self._stateful is not None else None
        return hook, self.averager.mark() if self.averager is not None else None

    def restore(self, mark: Any) -> None:
        hook, averager = mark
        if self._stateful is not None:
            self._stateful.restore(hook)
        if self.averager is not None:
            self.averager.restore(averager)
            self._follow()

    def copy_state(self, group: Group, source: int, device: torch.device, *, is_behind: bool) -> None:
        """Copy hook and averager state from `source` to ranks one step behind; all ranks must call it."""
        is_source = group.rank == source
        if self._stateful is not None:
            mine = _pick(self._stateful, shared=True) if is_source else None
            shared = broadcast_nested(group, mine, source, device, label="state of a hook")
            if is_behind:
                self._stateful.finish(shared)
        if self.averager is not None:
            mine = self.averager.for_others() if is_source else None
            shared = broadcast_nested(group, mine, source, device, label="state of an averager")
            if is_behind:
                self.averager.catch_up(shared)
                self._follow()

    # ------------------------------------------------------------------ checkpoints

    def save(
        self,
        checkpoint: MutableMapping[str, Any],
        path: str | Path,
        group: Group,
        device: torch.device,
        write: Callable[[dict[str, Any], str], None],
    ) -> None:
        """Add state equal on all ranks to a checkpoint; write this rank's own to a file; wait for all files.

        Ranks may pass different paths; the files of all are beside that of rank 0, which writes the
        checkpoint.

        Collective: all ranks must call it, with synchronized parameters.
        """
        added: dict[str, Any] = {}
        self.add_shared(added, path, group.size)
        if not added:
            return
        state = added[STATE_KEY]
        mine = state["token"], state["name"], str(path)
        state["token"], state["name"], path = broadcast_nested(group, mine, 0, device)
        own = self._own_state()
        state["has_rank_files"] = any(all_gather_objects(group, bool(own), device))
        if state["has_rank_files"]:
            header = {"format": STATE_FORMAT, "token": state["token"], "rank": group.rank}
            write({**header, "world_size": group.size, **own}, rank_file(path, group.rank, state["token"]))
            barrier(group, device, "files of the ranks")
        checkpoint.update(added)

    def add_shared(self, checkpoint: MutableMapping[str, Any], path: str | Path, world_size: int) -> None:
        """Add hook and averager state that is equal on all ranks to a checkpoint, without communication."""
        if self.has_state:
            header = {"token": uuid.uuid4().hex, "name": Path(path).name, "has_rank_files": False}
            checkpoint[STATE_KEY] = {**self.shared_state(world_size), **header}

    def resume(
        self,
        checkpoint: Mapping[str, Any],
        path: str | Path | None,
        group: Group,
        names: Iterable[str],
        read: Callable[[str], dict[str, Any]],
    ) -> list[str]:
        """Restore what `save` has saved, without communication; return a sentence per item not restored.

        `path` is None if unknown; `names` are those of the parameters. `read` reads a dict from a path, and
        raises FileNotFoundError if there is no file.
        """
        shared = checkpoint.get(STATE_KEY)
        if shared is None:
            if not self.has_state:
                return []
            self._start_over()
            return ["the checkpoint has no state of hooks or averagers, so they start from scratch"]
        own = _read_own(shared, path, group, read) if shared["has_rank_files"] else None
        if isinstance(own, str):
            note = f"rank {group.rank}: residuals and optimizer state of its own start from scratch: {own}"
            return [note, *self.load(shared, None, names)]
        return self.load(shared, own, names)

    def _start_over(self) -> None:
        if self._stateful is not None:
            self._stateful.start_over()
        if self.averager is not None:
            self.averager.start_over()
            self._follow()

    @property
    def has_state(self) -> bool:
        return self.averager is not None or self._stateful is not None

    def shared_state(self, world_size: int) -> dict[str, Any]:
        """Return hook and averager state equal on all ranks, for a checkpoint. Call `agree` first."""
        state: dict[str, Any] = {"format": STATE_FORMAT, "world_size": world_size}
        if self._stateful is not None:
            state["hook"] = _pick(self._stateful, shared=True)
        if self.averager is not None:
            state["averager"] = self.averager.state_dict()
        return state

    def _own_state(self) -> dict[str, Any]:
        """Return the state that differs between ranks: residuals, and in local training the optimizers."""
        state: dict[str, Any] = {}
        if self._stateful is not None:
            hook = _pick(self._stateful, shared=False)
            if hook["tensors"]:
                state["hook"] = hook
        if self.averager is not None and self.is_local:
            state["optimizers"] = [track.optimizer.state_dict() for track in self.averager.tracks]
            if self._scaler() is not None:  # each rank skips the steps in which its own gradients overflow
                state["scaler"] = self._scaler().state_dict()
        return state

    def load(
        self, shared: Mapping[str, Any], own: Mapping[str, Any] | None, names: Iterable[str]
    ) -> list[str]:
        """Restore hook and averager from shared and own state; return a sentence per item not restored."""
        if shared.get("format") != STATE_FORMAT:
            raise ConfigurationError(
                f"checkpoint['lightning_ddp'] has format {shared.get('format')!r}, but this release reads"
                f" {STATE_FORMAT}"
            )
        own = own or {}
        notes: list[str] = []
        if "hook" in shared and self._stateful is not None:
            state = _merge(shared["hook"], own.get("hook", {}))
            notes += self._stateful.load_state_dict(state, names)
        elif "hook" in shared:
            name = shared["hook"]["name"]
            notes.append(f"state of hook {name!r} was dropped, because the run does not use this hook")
        if "averager" in shared and self.averager is not None:
            notes += self.averager.load_state_dict(shared["averager"])
            for track, saved in zip(self.averager.tracks, own.get("optimizers", []), strict=False):
                track.optimizer.load_state_dict(saved)
            if "scaler" in own and self._scaler() is not None:
                self._scaler().load_state_dict(own["scaler"])
            self._follow()
        elif "averager" in shared:
            name = shared["averager"]["name"]
            notes.append(
                f"state of averager {name!r} was dropped, because the run does not use this averager"
            )
        return notes


def rank_file(checkpoint: str | Path, rank: int, token: str) -> str:
    """Return the path of the file beside a checkpoint that holds one rank's own state.

    >>> rank_file("runs/last.ckpt", 3, "0123456789abcdef")
    'runs/last.ckpt.rank3.01234567.pt'
    """
    return f"{checkpoint}.rank{rank}.{token[:_TOKEN_CHARACTERS]}.pt"


def remove_rank_files(checkpoint: str | Path, *, keep: Collection[str] = ()) -> None:
    """Remove the files of all ranks beside a checkpoint, except those with a token in `keep`."""
    system, path = fsspec.core.url_to_fs(str(checkpoint))
    folder, _, name = path.rpartition("/")
    kept = {token[:_TOKEN_CHARACTERS] for token in keep}
    pattern = re.compile(re.escape(name) + r"\.rank\d+\.(\w+)\.pt")
    system.invalidate_cache()  # other ranks have written there
    with suppress(FileNotFoundError):  # the folder is gone with the checkpoint
        for entry in system.ls(folder, detail=False):
            found = pattern.fullmatch(entry.rpartition("/")[2])
            if found is not None and found[1] not in kept:
                system.rm(entry)


def _describe(hook: Any) -> str:
    """Return the text by which ranks compare hooks (functions or objects): name, options, plain arguments."""
    if hook is None:
        return "none"
    is_named = isinstance(getattr(hook, "name", None), str) and getattr(hook, "options", None) is not None
    options = [str(hook.options)] if is_named else []  # else of a class of the user's, in no known form
    while isinstance(hook, functools.partial):
        given = [*enumerate(hook.args), *sorted(hook.keywords.items())]
        options += [f"{key}={value!r}" for key, value in given if isinstance(value, _PLAIN)]
        hook = hook.func
    return f"{getattr(hook, '__module__', '')}.{hook_name(hook)} ({', '.join(options)})"


def _pick(hook: StatefulHook, *, shared: bool) -> dict[str, Any]:
    """Return a hook's state with only the tensors equal on all ranks, or with only the rank's own ones."""
    state = hook.state_dict()
    chosen = {
        name: {key: value for key, value in values.items() if (key in hook.shared_keys) == shared}
        for name, values in state["tensors"].items()
    }
    return {**state, "tensors": {name: values for name, values in chosen.items() if values}}


def _merge(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    tensors = {name: dict(values) for name, values in shared["tensors"].items()}
    for name, values in own.get("tensors", {}).items():
        tensors.setdefault(name, {}).update(values)
    return {**shared, "tensors": tensors}


def _read_own(
    shared: Mapping[str, Any], path: str | Path | None, group: Group, read: Callable[[str], dict[str, Any]]
) -> dict[str, Any] | str:
    """Return the content of this rank's file beside a checkpoint, or the reason why there is none."""
    if shared["world_size"] != group.size:
        return f"they were saved by {shared['world_size']} ranks, but the run has {group.size}"
    if path is None:
        return "the path of the checkpoint is not known"
    # A link or a copy of the checkpoint has a different name than its files.
    places = (path, Path(path).parent / shared["name"], Path(path).resolve())
    candidates = dict.fromkeys(rank_file(place, group.rank, shared["token"]) for place in places)
    problem = f"{next(iter(candidates))} is missing"
    for candidate in candidates:
        try:
            own = read(candidate)
            if (own["token"], own["rank"]) == (shared["token"], group.rank):
                return own
            problem = f"{candidate} belongs to rank {own['rank']}, or to another checkpoint"
        except FileNotFoundError:
            continue
        except Exception as error:  # noqa: BLE001 (torch and pickle raise many kinds for a damaged file)
            text = f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]
            problem = f"{candidate} cannot be read ({text})"
    return problem
