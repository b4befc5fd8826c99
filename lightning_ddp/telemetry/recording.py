"""The recorded steps of one rank as a file: written by the rank, read where all of them are drawn."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_ddp.errors import ConfigurationError
from lightning_ddp.telemetry.step_record import BucketRecord, StepRecord

__all__ = ["Change", "Recording", "load_folder", "save"]

_VERSION = 1
_STEP_FIELDS = ("step", "forward_start", "forward_end", "backward_start", "backward_end", "comm_end")
_BUCKET_FIELDS = ("index", "num_bytes", "ready", "launched", "done", "begun")
_NAME = re.compile(r"rank(\d+)\.json")


@dataclass(frozen=True, kw_only=True)
class Change:
    """Ranks were lost, or have joined, and the run went on."""

    step: int
    """The first one with the new ranks, counted as the recorded steps are."""
    old_world_size: int
    new_world_size: int
    lost_ranks: Sequence[int]
    """As they were numbered before."""
    joined_ranks: Sequence[int]
    """As they are numbered since."""
    seconds: float
    """That this rank lost by it."""
    cause: str
    """In a line; empty where nothing has failed."""

    @property
    def why(self) -> str:
        """The cause; or that nothing has failed."""
        return self.cause or ("asked to leave" if self.lost_ranks else "new processes")


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What the last steps of one rank did."""

    rank: int
    world_size: int
    host: str
    steps: Sequence[StepRecord]
    """In their order; moments in nanoseconds of the rank's own clock."""
    changes: Sequence[Change] = ()
    """Of its ranks."""


def save(folder: Path, recording: Recording) -> Path:
    """Writes `folder/rank<r>.json`, and the folder if it does not exist. Does not communicate.

    Raises:
        OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank{recording.rank}.json"
    document = {
        "version": _VERSION,
        "rank": recording.rank,
        "world_size": recording.world_size,
        "host": recording.host,
        "changes": list(map(asdict, recording.changes)),
        "steps": [
            {
                **{name: getattr(step, name) for name in _STEP_FIELDS},
                "buckets": [[getattr(bucket, name) for name in _BUCKET_FIELDS] for bucket in step.buckets],
            }
            for step in recording.steps
        ],
    }
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document))
    part.replace(path)
    return path


def load_folder(folder: Path) -> list[Recording]:
    """The recordings of a folder, in rank order. Ranks may be missing, as on the other nodes' disks.

    Raises:
        ConfigurationError: there is none, one cannot be read, or they are of runs of different sizes.
    """
    found = sorted(_files(folder))
    if not found:
        raise ConfigurationError(
            f"{folder} holds no recording (rank0.json, rank1.json ...):"
            " CommunicationMonitor(timeline=folder) writes them at the end of a fit"
        )
    recordings = [_load(path) for _, path in found]
    sizes = {recording.world_size for recording in recordings}
    if len(sizes) > 1:
        raise ConfigurationError(
            f"{folder} holds recordings of runs with {' and '.join(map(str, sorted(sizes)))} ranks; use a"
            " folder of its own for each run"
        )
    return recordings


def _files(folder: Path) -> Iterable[tuple[int, Path]]:
    for path in folder.glob("rank*.json"):
        match = _NAME.fullmatch(path.name)
        if match is not None:
            yield int(match[1]), path


def _load(path: Path) -> Recording:
    try:
        document = json.loads(path.read_text())
        if document["version"] != _VERSION:
            raise ConfigurationError(
                f"{path} has format {document['version']}, this version reads format {_VERSION}"
            )
        return Recording(
            rank=int(document["rank"]),
            world_size=int(document["world_size"]),
            host=str(document["host"]),
            steps=[_step(step) for step in document["steps"]],
            changes=tuple(Change(**change) for change in document.get("changes", ())),
        )
    except (KeyError, TypeError, ValueError, OSError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"{path} is no recording: {type(error).__name__}: {error}") from error


def _step(values: dict[str, Any]) -> StepRecord:
    step = StepRecord(**{name: values[name] for name in _STEP_FIELDS})
    step.buckets = [BucketRecord(*bucket) for bucket in values["buckets"]]
    return step
