"""`RayCustomDDPStrategy`: this package's strategy for the workers of Ray Train."""

from __future__ import annotations

import functools
from typing import Any

import torch

from lightning_ddp._lightning import bind_like
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.strategy import CustomDDPStrategy


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
