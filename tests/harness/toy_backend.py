"""A third-party backend as somebody might write it in Python: three collectives, through a store."""

from __future__ import annotations

import io
import threading
from typing import Any

import torch
import torch.distributed as dist

_FOLDS = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}


class ToyWork(dist.Work):
    """One collective, done in a thread of its own."""

    def __init__(self, job: Any, tensors: Any) -> None:
        super().__init__()
        self._future: torch.futures.Future[Any] = torch.futures.Future()

        def run() -> None:
            try:
                job()
                self._future.set_result(tensors)
            except RuntimeError as error:
                self._future.set_exception(error)

        threading.Thread(target=run, daemon=True, name="toy collective").start()

    def get_future(self) -> Any:
        return self._future

    def is_completed(self) -> bool:
        return self._future.done()

    def wait(self, timeout: Any) -> bool:  # torch's own tests write it so: their caller is in C++
        self._future.wait()
        return True


class ToyGroup(dist.ProcessGroup):
    """All-reduce, broadcast and all-gather; everything else is missing."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._store = store
        self._num_calls = 0

    def getBackendName(self) -> str:
        return "toy"

    def _start(self, job: Any, tensors: Any) -> ToyWork:
        self._num_calls += 1
        number = self._num_calls
        return ToyWork(lambda: job(number), tensors)

    def _publish(self, number: int, tensor: torch.Tensor) -> None:
        buffer = io.BytesIO()
        torch.save(tensor.detach(), buffer)
        self._store.set(f"{number}/{self.rank()}", buffer.getvalue())

    def _fetch(self, number: int, rank: int) -> torch.Tensor:
        tensor: torch.Tensor = torch.load(io.BytesIO(self._store.get(f"{number}/{rank}")))
        return tensor

    def allreduce(self, tensors: Any, options: Any = None) -> ToyWork:
        (tensor,) = tensors
        op = dist.ReduceOp.SUM if options is None else options.reduceOp
        fold = next(function for known, function in _FOLDS.items() if op == known)

        def job(number: int) -> None:
            self._publish(number, tensor)
            result = self._fetch(number, 0)
            for rank in range(1, self.size()):
                result = fold(result, self._fetch(number, rank))
            with torch.no_grad():
                tensor.copy_(result)

        return self._start(job, tensors)

    def broadcast(self, tensors: Any, options: Any = None) -> ToyWork:
        (tensor,) = tensors
        src = 0 if options is None else options.rootRank

        def job(number: int) -> None:
            if src == self.rank():
                self._publish(number, tensor)
            else:
                with torch.no_grad():
                    tensor.copy_(self._fetch(number, src))

        return self._start(job, tensors)

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> ToyWork:
        def job(number: int) -> None:
            self._publish(number, inputs[0])
            for rank, output in enumerate(outputs[0]):
                output.copy_(self._fetch(number, rank))

        return self._start(job, outputs)


def create(store: Any, rank: int, size: int, timeout: Any) -> ToyGroup:
    """What `torch.distributed.Backend.register_backend` wants."""
    return ToyGroup(store, rank, size)


def register() -> None:
    """Makes 'toy' a backend of this process."""
    if "toy" not in dist.Backend.backend_list:
        dist.Backend.register_backend("toy", create, devices=["cpu"])
