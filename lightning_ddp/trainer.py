"""Lightning's Trainer, with the spellings that Lightning 2 dropped: `gpus=` and `num_processes=`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_ddp._lightning import Trainer as LightningTrainer
from lightning_ddp._lightning import bind, loaded_roots, num_cuda_devices
from lightning_ddp.errors import ConfigurationError

_GPUS_FORMS = 'a number of GPUs, -1 for all, a list of indices, or a string such as "4", "0,3" or "-1"'


class Trainer(LightningTrainer):
    """Lightning's Trainer with the arguments `gpus=` and `num_processes=` of Lightning 1.5.

    From `lightning.pytorch` if that is imported and `pytorch_lightning` is not.

    Args:
        *args: Arguments of Lightning's Trainer.
        gpus: number of GPUs, -1 for all, a list of indices, or a string: "4" is a number, "0,3" and "2," are
            indices, "-1" is all. 0 and None mean none. Stands for `accelerator="gpu", devices=...`.
        num_processes: number of CPU processes. Stands for `accelerator="cpu", devices=...`.
        **kwargs: Arguments of Lightning's Trainer.

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
    """Return `Trainer`, below Lightning's own class if that has been imported."""
    return next((bind(Trainer, root) for root in loaded_roots()), Trainer)


def _translate(
    gpus: int | str | Sequence[int] | None, num_processes: int | None, given: dict[str, Any]
) -> dict[str, Any]:
    """Return Lightning 2's arguments for `gpus` and `num_processes`."""
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
    devices = None if gpus is None else _parse_gpus(gpus)
    if devices is None:
        _check_accelerator(given, "cpu", used[0])
        return {"accelerator": "cpu", "devices": num_processes or 1}
    if num_processes is not None and num_processes != len(devices):
        raise ConfigurationError(
            f"gpus={gpus!r} means one process on each of {len(devices)} GPUs, but"
            f" num_processes={num_processes}"
        )
    _check_accelerator(given, "gpu", used[0])
    return {"accelerator": given.get("accelerator", "gpu"), "devices": devices}


def _check_accelerator(given: dict[str, Any], expected: str, used: str) -> None:
    accelerator = given.get("accelerator", "auto")
    allowed = ("auto", expected, "cuda") if expected == "gpu" else ("auto", expected)
    if isinstance(accelerator, str) and accelerator not in allowed:
        raise ConfigurationError(f"{used} means accelerator={expected!r}, but accelerator={accelerator!r}")


def _parse_gpus(gpus: int | str | Sequence[int]) -> list[int] | None:
    """Return the indices of the GPUs to use; None for no GPU."""
    if isinstance(gpus, str):
        gpus = _parse_text(gpus)
    available = num_cuda_devices()
    if isinstance(gpus, int) and not isinstance(gpus, bool):
        if gpus < -1:
            raise ConfigurationError(f"gpus={gpus}: expected {_GPUS_FORMS}")
        if gpus == 0:
            return None
        count = available if gpus == -1 else gpus
        if count > available or count == 0:
            wanted = "all" if gpus == -1 else gpus
            raise ConfigurationError(f"gpus={wanted!r}, {_lack(available, num_wanted=count)}")
        return list(range(count))
    if not isinstance(gpus, (list, tuple)) or any(type(i) is not int or i < 0 for i in gpus):
        raise ConfigurationError(f"gpus={gpus!r}: expected {_GPUS_FORMS}")
    if not gpus:
        return None
    if len(set(gpus)) != len(gpus):
        raise ConfigurationError(f"gpus={list(gpus)}: an index appears twice")
    if max(gpus) >= available:
        raise ConfigurationError(f"gpus={list(gpus)}, {_lack(available, num_wanted=len(gpus))}")
    return list(gpus)


def _parse_text(text: str) -> int | list[int]:
    parts = [part.strip() for part in text.split(",")]
    try:
        if len(parts) == 1:
            return int(parts[0])
        return [int(part) for part in parts if part]
    except ValueError:
        raise ConfigurationError(f"gpus={text!r}: expected {_GPUS_FORMS}") from None


def _lack(available: int, *, num_wanted: int) -> str:
    here = f"but this machine has {available} GPU" + ("" if available == 1 else "s")
    hint = f"; for processes on the CPU pass num_processes={num_wanted or 2}"
    return here if available else here + hint
