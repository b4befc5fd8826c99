"""Queue of jobs with collectives in a separate group and thread, in one order, with counted bytes.

A compressing hook needs several dependent collectives per bucket. Started from callbacks, those of two
buckets could get into different orders on different ranks. The separate group keeps collectives of the engine
and of the user from getting between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from lightning_ddp._torch import all_gather_flat
from lightning_ddp.comm.group import JOB_MARK, Group, sibling_group
from lightning_ddp.errors import LightningDDPError
from lightning_ddp.shm.shared_memory import open_staging
from lightning_ddp.shm.worker import Deferred, Worker

Wait = Callable[[], torch.Tensor]
_Job = Callable[[], torch.Tensor | None]
_HALT_S = 10.0


class Channel:
    """Queue of functions with collectives, run in order in a thread, or at once if there is no own group.

    If torch does not know the group, and the group has no store, there is no separate group, and `submit`
    runs a job at once. The collectives here are for jobs; they count the bytes that this rank sends when the
    backend uses a ring (as gloo and NCCL do for large tensors).

    Collective: all ranks must construct it.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group = sibling_group(group, device)
        """Separate group of the channel, for jobs."""
        self._has_own_group = self.group is not group
        self.device = device
        self.rank = group.rank
        self.size = group.size
        self.num_bytes_sent = 0
        self.busy_s = 0.0
        """Duration of all jobs in seconds, waits included."""
        self.wait_s = 0.0
        """Duration of waits for collectives in jobs, in seconds."""
        self._worker = Worker("lightning_ddp channel", self.group)
        self._failure: Exception | None = None
        self._staging = cache(partial(open_staging, self.group, device))
        """Function that returns the ranks' shared memory or None; its first call, in a job, communicates."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    # ------------------------------------------------------------------ jobs

    def wait(self, future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        """Wait for the future that `submit` returned, and return its value; raise the error of the job."""
        since = time.monotonic()
        self.group.wait_done(future)
        result = future.wait()
        self.group.watch_device(self.device, "exchange of parameters", since)
        return result

    def submit(self, job: _Job) -> torch.futures.Future[torch.Tensor]:
        """Queue a job, in the same order on all ranks; return the future of its result.

        On CUDA the job runs on the channel's stream, after the work queued on the current stream, and a
        stream that waits for the future continues after all work that the job has queued. Once a job has
        failed, later jobs fail with the same error, as the ranks no longer agree on the next collective.
        """
        devices: list[int | str | torch.device] | None = [self.device] if self._stream is not None else None
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        setattr(future, JOB_MARK, True)
        event = torch.cuda.current_stream(self.device).record_event() if self._stream is not None else None
        run = partial(self._run, job, future, event)
        if self._has_own_group:
            self._worker.submit(run)
        else:
            run()
        return future

    def halt(self) -> None:
        """Stop the channel, once an interrupt is set: fail queued jobs, and wait until no job runs.

        Thread-safe.
        """
        self._failure = self._failure or LightningDDPError("the ranks of this channel form a new group")
        if not self._worker.end(_HALT_S):
            raise LightningDDPError(f"a job of the channel still runs {_HALT_S} s after a rank was lost")

    def _run(self, job: _Job, future: torch.futures.Future[torch.Tensor], event: Any) -> None:
        if self._failure is not None:
            self._fail(future, self._failure)
            return
        try:
            with torch.no_grad(), torch.cuda.stream(self._stream):
                if self._stream is not None:
                    torch.cuda.set_device(self.device)
                    self._stream.wait_event(event)
                start = time.perf_counter()
                result = job()
                self.busy_s += time.perf_counter() - start
                if result is None:
                    result = torch.empty(0, device=self.device)
                elif result.device.type != self.device.type:
                    raise RuntimeError(
                        f"a job of the channel on {self.device} returned a tensor on {result.device}, so its"
                        " queued work cannot be waited for. Return a tensor of that device, or None."
                    )
                future.set_result(result)
        except (LightningDDPError, RuntimeError) as error:
            self._fail(future, error)
        except Exception as error:  # noqa: BLE001 (any error is passed to the waiting thread)
            wrapped = RuntimeError(f"{type(error).__name__}: {error}")
            wrapped.__cause__ = error
            self._fail(future, wrapped)

    def _fail(self, future: torch.futures.Future[torch.Tensor], error: Exception) -> None:
        self._failure = self._failure or error
        future.set_exception(error)  # type: ignore[arg-type]  # torch annotates it as a value

    # ------------------------------------------------------------------ collectives, for jobs

    def empties(self, count: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return `count` 1-D tensors that are all-reduced with the fewest copies, for the present job."""
        staging = self._staging()
        lent = staging.lend(count, numel, dtype) if staging is not None else None
        return lent or [torch.empty(numel, dtype=dtype, device=self.device) for _ in range(count)]

    def start_all_reduce(self, tensor: torch.Tensor, op: Any = None) -> Wait:
        """Start to reduce a contiguous tensor in place (default: sum); return a function that awaits it.

        A sparse tensor can be summed where the backend supports that; its bytes are not counted.
        """
        if tensor.is_sparse:
            return self._started(self.group.all_reduce(tensor, op), tensor, 0.0, tensor)
        staging = self._staging() if op is None else None
        if staging is None:
            work = self.group.all_reduce(tensor, op)
        else:
            begin = partial(Deferred, partial(staging.all_reduce, tensor))
            work = self.group.start("all_reduce", (tensor,), begin)
        return self._started(work, tensor, 2 * (self.size - 1) / self.size, tensor)

    def all_reduce(self, tensor: torch.Tensor, op: Any = None) -> torch.Tensor:
        """Reduce a contiguous tensor in place over the ranks (default: sum) and return it."""
        return self.start_all_reduce(tensor, op)()

    def start_all_to_all(self, rows: torch.Tensor) -> Wait:
        """Start to send row r of (size, k) to rank r; return a function that waits for the received rows."""
        received = torch.empty_like(rows)
        begin = partial(self.group.process_group.alltoall_base, received, rows, [], [])
        work = self.group.start("all_to_all", (rows,), begin)
        return self._started(work, received, (self.size - 1) / self.size, rows)

    def _started(self, work: Any, result: torch.Tensor, factor: float, sent: torch.Tensor) -> Wait:
        """Count a collective's bytes, `factor` times those of a tensor; return a function that awaits it."""
        self.num_bytes_sent += round(factor * sent.numel() * sent.element_size())

        def finish() -> torch.Tensor:
            start = time.perf_counter()
            self.group.wait(work, self.device)
            self.wait_s += time.perf_counter() - start
            return result

        return finish

    def start_all_gather(self, tensor: torch.Tensor) -> Wait:
        gathered = tensor.new_empty(self.size * tensor.numel())
        flat = tensor.view(-1)
        begin = partial(all_gather_flat, self.group.process_group, gathered, flat)
        work = self.group.start("all_gather", (flat,), begin)
        return self._started(work, gathered.view(self.size, *tensor.shape), self.size - 1, tensor)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the stacked tensors of all ranks, in rank order: shape (size, *tensor.shape)."""
        return self.start_all_gather(tensor)()

    def read(self, tensor: torch.Tensor) -> Any:
        """Return the number in a one-element tensor; the wait for the device raises failures of ranks."""
        if self._stream is None:
            return tensor.item()
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        self.group.wait_device(self.device)
        return copy.item()
