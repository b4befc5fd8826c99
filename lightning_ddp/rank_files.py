"""Checkpoint state of hooks and averagers: in the checkpoint, and in a file beside it for each rank.

What is the same on all ranks is in the checkpoint under "lightning_ddp". Residuals and the optimizer state of
local training differ between ranks, and are too large to be gathered on rank 0: each rank writes its own to
`<checkpoint>.rank<r>.<token>.pt`. A checkpoint without these files loads; that state starts from scratch.

Each save has a new token, which is in the checkpoint. So replacing the checkpoint replaces the files with
it, atomically. All ranks have written their files before that. After it they remove the files of earlier
saves, and files of a run that was killed in between.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]  # has no stubs
import torch

from lightning_ddp.comm import all_gather_objects, barrier, broadcast_nested
from lightning_ddp.comm.group import Group
from lightning_ddp.communication import Communication

KEY = "lightning_ddp"  # key of the package's state in a checkpoint
_TOKEN_CHARACTERS = 8
_ERROR_CHARACTERS = 200


def rank_file(checkpoint: str | Path, rank: int, token: str) -> str:
    """Return the path of the file beside a checkpoint that holds one rank's own state.

    >>> rank_file("runs/last.ckpt", 3, "0123456789abcdef")
    'runs/last.ckpt.rank3.01234567.pt'
    """
    return f"{checkpoint}.rank{rank}.{token[:_TOKEN_CHARACTERS]}.pt"


def save_state(
    communication: Communication,
    checkpoint: MutableMapping[str, Any],
    path: str | Path,
    group: Group,
    device: torch.device,
    write: Callable[[dict[str, Any], str], None],
) -> None:
    """Add shared hook and averager state to a checkpoint; return once all ranks have written their files.

    Collective: all ranks must call it, with synchronized parameters.
    """
    if not communication.has_state:
        return
    state = communication.shared_state(group.size)
    state["token"] = broadcast_nested(group, uuid.uuid4().hex, 0, device)
    state["name"] = Path(path).name
    own = communication.own_state()
    state["has_rank_files"] = any(all_gather_objects(group, bool(own), device))
    if state["has_rank_files"]:
        header = {"format": state["format"], "token": state["token"], "rank": group.rank}
        write({**header, "world_size": group.size, **own}, rank_file(path, group.rank, state["token"]))
        barrier(group, device, "files of the ranks")
    checkpoint[KEY] = state


def add_shared(
    communication: Communication, checkpoint: MutableMapping[str, Any], path: str, world_size: int
) -> None:
    """Add the shared hook and averager state to a checkpoint that one rank writes without the others."""
    if communication.has_state:
        header = {"token": uuid.uuid4().hex, "name": Path(path).name, "has_rank_files": False}
        checkpoint[KEY] = {**communication.shared_state(world_size), **header}


def load_state(
    communication: Communication,
    checkpoint: MutableMapping[str, Any],
    path: str | Path | None,
    group: Group,
    names: Iterable[str],
    read: Callable[[str], dict[str, Any]],
) -> list[str]:
    """Restore the hook and averager state that `save_state` has saved, without communication.

    Args:
        communication: hook and averager of the resuming run.
        checkpoint: the checkpoint that was loaded from `path`, which is None if unknown.
        names: qualified names of the parameters.
        read: reads a dict from a path; raises FileNotFoundError if there is no file.

    Returns:
        One sentence for each item that could not be restored.
    """
    shared = checkpoint.get(KEY)
    if shared is None:
        begins = "the checkpoint has no state of hooks or averagers, so they start from scratch"
        return [begins] if communication.has_state else []
    own = _read_own(shared, path, group, read) if shared["has_rank_files"] else None
    if isinstance(own, str):
        note = f"rank {group.rank}: residuals and optimizer state of its own start from scratch: {own}"
        return [note, *communication.load(shared, None, names)]
    return communication.load(shared, own, names)


def remove_files(checkpoint: str | Path, rank: int, *, keep: Collection[str] = ()) -> None:
    """Remove one rank's files beside a checkpoint, except those with a token in `keep`."""
    system, path = fsspec.core.url_to_fs(str(checkpoint))
    folder, _, name = path.rpartition("/")
    kept = {rank_file(name, rank, token) for token in keep}
    with suppress(FileNotFoundError):  # the folder is gone with the checkpoint
        for entry in system.ls(folder, detail=False):
            file = entry.rpartition("/")[2]
            is_of_rank = file.startswith(f"{name}.rank{rank}.") and file.endswith(".pt")
            if is_of_rank and file not in kept:
                system.rm(entry)


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
