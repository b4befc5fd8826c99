"""Classification of an exception of this rank: its own failure, or a consequence of another rank's."""

from __future__ import annotations

import os
import re
import traceback
from enum import Enum, auto

import torch.distributed as dist

import lightning_ddp.comm as comm
import lightning_ddp.encoding as encoding
import lightning_ddp.shm as shm
from lightning_ddp.comm.nccl import LOST_CONNECTION, is_own_error
from lightning_ddp.encoding import side_stream
from lightning_ddp.errors import CollectiveError, LightningDDPError, PeerFailure
from lightning_ddp.supervise.failure_record import text_of

_FROM_GLOO = re.compile(r"\[[^\]]*/gloo/[^\]]*:\d+\]")
_COMMUNICATE = tuple(os.path.dirname(str(room.__file__)) + os.sep for room in (comm, shm, encoding, dist))
_RUNS_JOBS = side_stream.__file__
"""File of a room that communicates which runs the user's code as well."""


class Cause(Enum):
    """Cause of an exception: this rank's own code, another rank's failure, or an error of a backend."""

    OWN = auto()
    """Code of this rank."""
    PEER = auto()
    """The failure of another rank, which interrupted this one."""
    LOST_CONNECTION = auto()
    """A backend, in words of a connection that broke: an echo of another rank's failure, mostly."""
    BACKEND = auto()
    """A backend, in other words: an echo only where groups were aborted because of a failure."""


def cause_of_error(error: BaseException) -> Cause:
    """Return the cause of an exception: own code, another rank, a lost connection, or the backend."""
    text = text_of(error)
    while not isinstance(error, PeerFailure) and isinstance(error, LightningDDPError):
        if not isinstance(error.__cause__, RuntimeError):
            break
        error = error.__cause__
    if isinstance(error, PeerFailure):
        return Cause.PEER
    if not _is_of_backend(error, text) or is_own_error(text):
        return Cause.OWN
    return Cause.LOST_CONNECTION if LOST_CONNECTION.search(text) else Cause.BACKEND


def _is_of_backend(error: BaseException, text: str) -> bool:
    """Return True if an exception was raised by a call that communicates, not by the user's own code."""
    if isinstance(error, LightningDDPError):
        return type(error) is CollectiveError  # those derived from it say more
    if not isinstance(error, RuntimeError):
        return False
    if isinstance(error, dist.DistError) or _FROM_GLOO.search(text):
        return True
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(file.startswith(_COMMUNICATE) and file != _RUNS_JOBS for file in files)


def interruption_behind(error: BaseException, interruption: BaseException | None) -> PeerFailure | None:
    """Return the `PeerFailure` that interrupted this rank and led to `error`; None if there is none."""
    cause: BaseException | None = error if isinstance(error, Exception) else None
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, PeerFailure) and (cause is error or cause is interruption):
            return cause
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    return None
