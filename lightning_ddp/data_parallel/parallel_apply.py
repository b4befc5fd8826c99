"""Runs the replicas of a module at the same time, one thread each, under the caller's settings of torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from lightning_ddp.data_parallel.scatter import Device, as_device, named_tensors
from lightning_ddp.errors import ConfigurationError, ReplicaError

__all__ = ["parallel_apply"]


class _CallerState:
    """The thread-local settings of torch in the thread that creates it, for other threads to take on."""

    def __init__(self, devices: Sequence[torch.device | None]) -> None:
        used = {device for device in devices if device is not None}
        self._inference = torch.is_inference_mode_enabled()
        self._grad = torch.is_grad_enabled()
        self._cache = torch.is_autocast_cache_enabled()
        types = sorted({"cpu", "cuda", *(device.type for device in used)} - {"meta"})
        self._autocast = [(t, torch.get_autocast_dtype(t)) for t in types if torch.is_autocast_enabled(t)]
        self._streams = {d: torch.cuda.current_stream(d) for d in used if d.type == "cuda"}

    @contextmanager
    def applied(self, device: torch.device | None) -> Generator[None, None, None]:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self._cache))
            if device in self._streams:
                stack.enter_context(torch.cuda.device(device))
                stack.enter_context(torch.cuda.stream(self._streams[device]))
            yield


def parallel_apply(
    replicas: Sequence[Callable[..., Any]],
    inputs: Sequence[Any],
    kwargs: Sequence[Mapping[str, Any]] | None = None,
    devices: Sequence[Device] | None = None,
) -> list[Any]:
    """Runs each replica on its inputs, in a thread each (one replica: in this thread); outputs in order.

    The caller's grad and inference mode, autocast and current CUDA streams hold in the threads, where the
    replica's device is current. The CPU's random numbers are drawn from one generator, in any order.

    Args:
        replicas: modules or functions.
        inputs: for each a tuple or list of positional arguments, or the only one.
        kwargs: for each its keyword arguments.
        devices: for each its device; None for that of the first tensor in its arguments.

    Raises:
        ConfigurationError: the arguments differ in length.
        Exception: the first one in replica order, after all threads have ended: of the replica's type with
            the replica's index in the message, or `ReplicaError` where that type cannot be built from a
            message. The original is its `__cause__`.
    """
    kwargs = [{}] * len(replicas) if kwargs is None else kwargs
    if not len(replicas) == len(inputs) == len(kwargs) == len(replicas if devices is None else devices):
        raise ConfigurationError(
            f"expected inputs, kwargs and devices for each of {len(replicas)} replicas; got {len(inputs)}"
            f" inputs, {len(kwargs)} kwargs and {'no' if devices is None else len(devices)} devices"
        )
    args = [tuple(i) if isinstance(i, (list, tuple)) else (i,) for i in inputs]
    if devices is not None:
        return _run_all(replicas, args, kwargs, [as_device(device) for device in devices])
    tensors = [next(named_tensors(both, ""), None) for both in zip(args, kwargs, strict=True)]
    return _run_all(replicas, args, kwargs, [found and found[1].device for found in tensors])


def _run_all(
    replicas: Sequence[Callable[..., Any]],
    args: Sequence[tuple[Any, ...]],
    kwargs: Sequence[Mapping[str, Any]],
    devices: Sequence[torch.device | None],
) -> list[Any]:
    state = _CallerState(devices)
    outputs: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}

    def run(index: int) -> None:
        try:
            with state.applied(devices[index]):
                outputs[index] = replicas[index](*args[index], **kwargs[index])
        except BaseException as error:  # noqa: BLE001 (whatever ended the thread is raised by the caller)
            errors[index] = error

    if len(replicas) == 1:
        run(0)
    else:
        _run_in_threads(run, len(replicas))
    if not errors:
        return [outputs[index] for index in range(len(replicas))]
    index = min(errors)
    error = errors[index]
    outputs.clear()
    errors.clear()  # the traceback holds `run`, which holds `errors`: a circle would keep the replicas alive
    if not isinstance(error, Exception):
        raise error  # such as SystemExit, whose argument is no message
    raise _with_index(error, index, devices[index]) from error


def _run_in_threads(run: Callable[[int], None], num_threads: int) -> None:
    started = []
    try:
        for index in range(num_threads):
            thread = threading.Thread(target=run, args=(index,), name=f"replica {index}")
            thread.start()
            started.append(thread)
    finally:
        for thread in started:
            thread.join()


def _with_index(error: Exception, index: int, device: torch.device | None) -> Exception:
    place = f"replica {index}" + (f" on {device}" if device is not None else "")
    kind = type(error)
    try:
        rebuilt = kind(f"{place}: {error}")
        if type(rebuilt) is kind and place in str(rebuilt):
            return rebuilt
    except Exception:  # noqa: BLE001, S110 (its constructor takes something else, and may do anything)
        pass
    return ReplicaError(f"{place} raised {kind.__name__}: {error}")
