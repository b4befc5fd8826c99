"""Begin and end of a Hydra job; a script without Hydra imports nothing of it."""

from __future__ import annotations

from typing import Any

__all__ = ["agree_before_job", "end_job", "give_files_back"]


def agree_before_job(config: Any, *, is_sweep: bool) -> None:
    """See `shared_job.agree_before_job`."""
    from lightning_ddp.launch import shared_job

    shared_job.agree_before_job(config, is_sweep=is_sweep)


def give_files_back(config: Any) -> None:
    """See `shared_job.give_files_back`."""
    from lightning_ddp.launch import shared_job

    shared_job.give_files_back(config)


def end_job(error: BaseException | None) -> BaseException | None:
    """See `session.end_job`."""
    from lightning_ddp.launch import session

    return session.end_job(error)
