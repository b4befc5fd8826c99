"""Comparison of new communication hooks between ranks, through the store, before they send.

Collectives that do not match lead to an unspecific error of the backend, a wrong sum, or a hang. So in the
first backwards of a hook the ranks rendezvous before each collective that the hook starts over all of them,
which starts only if it is the same on all ranks. The number of collectives is not compared: a callback of a
future runs in another thread, or in this thread if the future is complete already, which may differ between
ranks with the same hook.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lightning_ddp._torch import TorchDispatchMode, name_of_operator, pop_mode, push_mode, tree_leaves
from lightning_ddp.catalogue import describe_hook, describe_state
from lightning_ddp.comm.group import Group, InThread

_NUM_STEPS = 2
"""Backwards in which hooks are compared: two, as buckets are rebuilt after the first."""
_CHECKED = frozenset(
    {
        *("c10d::allreduce_", "c10d::allreduce_coalesced_", "c10d::broadcast_", "c10d::reduce_"),
        *("c10d::allgather_", "c10d::_allgather_base_", "c10d::reduce_scatter_"),
        "c10d::_reduce_scatter_base_",
    }
)
"""Collectives to which all ranks must pass the same sizes and dtypes."""
_MOST_TENSORS = 8
_POLL_S = 0.01
_LONGEST_POST_S = 2.0
_AGREED, _OPEN = "agreed", "open"
_STARTS, _ENDS = "starts ", "ends its part of the bucket"

OnSlice = Callable[[float], None]


class HookAgreement:
    """Comparison of one hook between ranks, through the store only.

    All ranks must call `launching` for the same buckets in the same order. Without a store, or with one
    rank, nothing is compared. The prefix of the keys is the same on all ranks, different for every
    registered hook. The timeout is that of the backend for the device.
    """

    def __init__(self, group: Group, prefix: str, device: torch.device, state: Any, hook: Any) -> None:
        self._group = group
        self._store = group.store if group.size > 1 else None
        self._prefix = f"lightning_ddp/hook/{prefix}"
        self._device = device
        self._identity: str | None = f"hook {describe_hook(hook)} {describe_state(state)}".rstrip()
        self._num_launches = 0
        self._num_meetings = 0  # since the launch of this bucket
        self._is_open = False
        self._steps: set[int] = set()

    def is_over(self, step: int) -> bool:
        """Return True if the ranks no longer compare the hook in backward `step`."""
        if self._store is None:
            return True
        if len(self._steps) < _NUM_STEPS:
            self._steps.add(step)
        return step not in self._steps

    @contextmanager
    def launching(self, on_slice: OnSlice) -> Generator[None, None, None]:
        """Compare the hook's actions in this context between ranks; waits call `on_slice`.

        Raises:
            Disagreement: the actions differ, or the hook raised on another rank.
        """
        self._num_launches += 1
        self._num_meetings, self._is_open = 0, False
        if self._identity is not None:
            identity, self._identity = self._identity, None
            self.meet(f"has the {identity}", on_slice)
        try:
            with _Observer(self._group, lambda what: self.meet(what, on_slice)):
                yield
        except Disagreement:
            raise
        except Exception as error:
            raised = {"rank": self._group.rank, "what": f"raised {type(error).__name__}: {error}"}
            InThread(lambda _: self._post(raised), _LONGEST_POST_S).wait(lambda _: None)
            raise
        self.meet(_ENDS, on_slice)

    def meet(self, what: str, on_slice: OnSlice) -> None:
        """Wait until all ranks have reached this point with the same `what`.

        If one rank starts a collective where another rank has ended its part, nothing more is compared in
        this bucket.
        """
        if self._is_open:
            return
        rank, key = self._group.rank, self._key()

        def come(thread: InThread[Any]) -> Any:
            store: Any = self._store
            mine = json.dumps({"rank": rank, "what": what})
            first = json.loads(store.compare_set(f"{key}/first", "", mine))
            both = (first["what"], what)
            if _ENDS in both and any(text.startswith(_STARTS) for text in both):
                self._post(_OPEN)
            elif first["what"] != what:
                self._post({**first, "other_rank": rank, "other": what})
            elif store.add(f"{key}/count", 1) == self._group.size:
                self._post(_AGREED)
            is_over = partial(store.check, [f"{key}/verdict"])
            thread.until(is_over, _POLL_S, "not all ranks reached this bucket")
            return json.loads(store.get(f"{key}/verdict"))

        def look(waited_s: float) -> None:
            self._group.check()
            on_slice(waited_s)

        thread = InThread(come, self._group.timeout_s(self._device))
        thread.wait(look)
        if isinstance(thread.error, TimeoutError):
            raise Disagreement(str(thread.error)) from thread.error
        self._is_open = thread.result == _OPEN
        if thread.result not in (_AGREED, _OPEN):
            raise Disagreement(_explain(thread.result))
        self._num_meetings += 1

    def _key(self) -> str:
        return f"{self._prefix}/{self._num_launches}/{self._num_meetings}"

    def _post(self, verdict: Any) -> None:
        """Publish the verdict of the present comparison, unless another rank has published it."""
        self._store.compare_set(f"{self._key()}/verdict", "", json.dumps(verdict))  # type: ignore[union-attr]


class Disagreement(Exception):
    """Difference of a hook between ranks; its text becomes a part of a `CommHookError`."""


class _Observer(TorchDispatchMode):
    """Dispatch mode that reports each collective that this thread is about to start over all ranks.

    torch's own `__enter__` also sets a flag of the process, which stays set if two threads overlap. With it
    `torch.compile` compiles nothing, and torch 2.10 never compiles a skipped function later. So only this
    thread's modes are changed.
    """

    def __init__(self, group: Group, tell: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._size = group.size
        self._tell = tell

    def __enter__(self) -> _Observer:
        push_mode(self)
        return self

    def __exit__(self, *error: object) -> None:
        pop_mode()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of_operator(func)
        if name in _CHECKED and self._spans_all([*args, *kwargs.values()]):
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            sizes = [f"{t.numel()} elements of {t.dtype}" for t in tensors[:_MOST_TENSORS]]
            if len(tensors) > _MOST_TENSORS:
                sizes.append(f"{sum(t.numel() for t in tensors)} in {len(tensors)} tensors")
            self._tell(f"{_STARTS}{name.removeprefix('c10d::').strip('_')} of {', '.join(sizes)}")
        return func(*args, **kwargs)

    def _spans_all(self, arguments: list[Any]) -> bool:
        """Return True if the process group among the arguments has as many ranks as the whole group."""
        for argument in arguments:
            if isinstance(argument, torch.ScriptObject):
                with suppress(RuntimeError):  # it is something else, such as a reduce operation
                    return bool(dist.ProcessGroup.unbox(argument).size() == self._size)
        return False


def _explain(verdict: dict[str, Any]) -> str:
    if "other" not in verdict:
        return f"cannot continue: on rank {verdict['rank']} it {verdict['what']}"
    return (
        f"differs between ranks: rank {verdict['rank']} {verdict['what']}, rank {verdict['other_rank']}"
        f" {verdict['other']}. All ranks need the same hook with the same options, which starts the same"
        " collectives with the same sizes and types on all ranks"
    )
