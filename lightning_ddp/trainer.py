"""Classes made on first use: Lightning's Trainer with `gpus=`, and the strategy for Ray Train's Trainer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from lightning_ddp._lightning import Trainer as LightningTrainer
from lightning_ddp._lightning import bind, bind_like, lightnings, loaded_roots
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.strategy import CustomDDPStrategy


class Trainer(LightningTrainer):
    """Lightning's Trainer with the arguments `gpus=` and `num_processes=` of Lightning 1.5.

    From `lightning.pytorch` if that is imported and `pytorch_lightning` is not.

    Args:
        gpus: number of GPUs, -1 for all, a list of indices, or a string: "4" is a number, "0,3" and "2," are
            indices, "-1" is all. 0 and None mean none. Stands for `accelerator="gpu", devices=...`.
        num_processes: number of CPU processes. Stands for `accelerator="cpu", devices=...`.
        *args, **kwargs: Arguments of Lightning's Trainer.

    Raises:
        ConfigurationError: two spellings of one thing, a malformed value, or more GPUs than there are.
    """

    def __init__(
        self,
        *args: Any,
        gpus: int | str | Sequence[int] | None = None,
        num_processes: int | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.update(_translate(gpus, num_processes, kwargs))
        super().__init__(*args, **kwargs)


def trainer_class() -> type[Trainer]:
    """Return our `Trainer`, as subclass of `lightning`'s or `pytorch_lightning`'s, whichever is imported."""
    return next((bind(Trainer, root) for root in loaded_roots()), Trainer)


def _translate(
    gpus: int | str | Sequence[int] | None, num_processes: int | None, given: dict[str, Any]
) -> dict[str, Any]:
    """Return Lightning 2's `accelerator` and `devices` for the arguments `gpus` and `num_processes`."""
    old = {"gpus": gpus, "num_processes": num_processes}
    used = [f"{name}={value!r}" for name, value in old.items() if value is not None]
    if not used:
        return {}
    if given.get("devices", "auto") != "auto":
        raise ConfigurationError(
            f"{used[0]} and devices={given['devices']!r} mean the same. Pass one of them."
        )
    if num_processes is not None and (type(num_processes) is not int or num_processes < 1):
        raise ConfigurationError(f"num_processes={num_processes!r}: expected a number of processes from 1")
    indices = [] if gpus is None else _parse_gpus(gpus)
    if indices and num_processes not in (None, len(indices)):
        raise ConfigurationError(
            f"gpus={gpus!r} means one process on each of {len(indices)} GPUs, but"
            f" num_processes={num_processes}"
        )
    expected, allowed = ("gpu", ("auto", "gpu", "cuda")) if indices else ("cpu", ("auto", "cpu"))
    accelerator = given.get("accelerator", expected)
    if isinstance(accelerator, str) and accelerator not in allowed:
        raise ConfigurationError(f"{used[0]} means accelerator={expected!r}, but accelerator={accelerator!r}")
    if not indices:
        return {"accelerator": "cpu", "devices": num_processes or 1}
    return {"accelerator": accelerator, "devices": indices}


def _parse_gpus(gpus: int | str | Sequence[int]) -> list[int]:
    malformed = ConfigurationError(
        f"gpus={gpus!r}: expected a number of GPUs, -1 for all, a list of indices, or a string such as"
        ' "4", "0,3" or "-1"'
    )
    if isinstance(gpus, str):
        try:
            gpus = [int(part) for part in gpus.split(",") if part.strip()] if "," in gpus else int(gpus)
        except ValueError:
            raise malformed from None
    available = int(lightnings("CUDAAccelerator").auto_device_count())
    if type(gpus) is int and gpus >= -1:
        count = available if gpus == -1 else gpus
        if count > available or (gpus == -1 and available == 0):
            raise _lacking("all" if gpus == -1 else gpus, available, count)
        return list(range(count))
    if not isinstance(gpus, (list, tuple)) or any(type(index) is not int or index < 0 for index in gpus):
        raise malformed
    if len(set(gpus)) != len(gpus):
        raise ConfigurationError(f"gpus={list(gpus)}: an index appears twice")
    if max(gpus, default=-1) >= available:
        raise _lacking(list(gpus), available, len(gpus))
    return list(gpus)


def _lacking(gpus: Any, available: int, num_wanted: int) -> ConfigurationError:
    here = f"but this machine has {available} GPU" + ("" if available == 1 else "s")
    hint = "" if available else f"; for processes on the CPU pass num_processes={num_wanted or 2}"
    return ConfigurationError(f"gpus={gpus!r}, {here}{hint}")


@functools.cache
def ray_strategy_class() -> type[CustomDDPStrategy]:
    """Return `RayCustomDDPStrategy`, a subclass of this package's strategy and of Ray's own.

    `ray.train.lightning.prepare_trainer` accepts subclasses of its strategies only. Ray starts the workers,
    and makes their process group before it calls the training function; ranks and devices are Ray's.
    """
    # an optional dependency
    from ray.train.lightning import RayDDPStrategy  # type: ignore[import-not-found,unused-ignore]

    ours: Any = bind_like(RayDDPStrategy, CustomDDPStrategy)

    class RayCustomDDPStrategy(ours, RayDDPStrategy):  # type: ignore[misc]
        """Strategy for `ray.train.torch.TorchTrainer`: arguments of `CustomDDPStrategy`, ranks of Ray.

        Args:
            **kwargs: As `CustomDDPStrategy`. Ray's `TorchConfig` has the backend and the timeout.

        Raises:
            ConfigurationError: `on_failure` is not "stop": Ray ends all workers when one fails.
        """

        def __init__(self, **kwargs: Any) -> None:
            if kwargs.get("on_failure", "stop") != "stop":
                raise ConfigurationError(
                    f"on_failure={kwargs['on_failure']!r}: Ray Train ends all workers when one fails. Set"
                    " FailureConfig(max_failures=...) to start them again from the last checkpoint, or start"
                    " the script with `python -m lightning_ddp run`, without Ray"
                )
            super().__init__(**kwargs)

        @property
        def root_device(self) -> torch.device:
            """Device that Ray gave to this worker."""
            device: torch.device = RayDDPStrategy.root_device.fget(self)
            return device

    RayCustomDDPStrategy.__qualname__ = "RayCustomDDPStrategy"
    return RayCustomDDPStrategy
