"""Record of a failure, its report, and the generations of a job that continued."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
import traceback as traceback_module
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from lightning_ddp.errors import PeerFailure, cause_of, with_ending

GONE = "the process died without a report (killed by a signal, or ended by os._exit)"
"""Message of a process whose connection closed."""

_LONGEST = {"message": 9_000, "traceback": 36_000, "checkpoint": 4_100}
_LONGEST |= dict.fromkeys(("host", "phase", "exception_type", "exception_class"), 300)
"""Most characters of each text; together they fit into a message of the channel."""
_MOST_LINES = 40
_MOST_SHOWN = 20  # most generations in a report
_LATER_S = 60  # seconds added to a survivor's error: torchelastic reports the earliest error of a node

_LINE = re.compile(r"[^\n]{1,200}\n?|\n")
_FRAME = re.compile(r'^  File "(.+)", line \d+, in .*\n(?:    .*\n)*', re.MULTILINE)
_SITE_PACKAGE = re.compile(r"[/\\](?:site|dist)-packages[/\\](\w+)")
_FOLDERS = {str(Path(__file__).parents[1]): "lightning_ddp", str(Path(os.__file__).parent): "python"}
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_ASCII_CONTROL_CHARACTERS = bytes(code for code in range(128) if _CONTROL_CHARACTERS.match(chr(code)))


def describe_exit(code: int) -> str:
    """Return a phrase on how a process ended: its exit code, or the signal that killed it."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Identity of a process of the job: rank, node, host, process id and how often its rank was restarted."""

    rank: int  # global rank; -1 for a launching process that is no rank
    node_rank: int
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    start: int | None = None
    """Number of the `Start` in its slot that it follows; 0 for the launcher of a node that is back; None for
    first processes."""


@dataclass(frozen=True, kw_only=True)
class Where:
    step: int | None = None  # global step; None outside of training
    phase: str | None = None  # hook or stage that runs
    waits_for: str | None = None  # awaited collective
    count: int = 0  # number that grows while the rank makes progress

    def in_words(self) -> str:
        """Return a phrase such as ` at step 3 in training_step`; empty if neither step nor phase is known."""
        step = f" at step {self.step}" if self.step is not None else ""
        return step + (f" in {self.phase}" if self.phase else "")


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """Record of a process's failure: who, message, step, phase, traceback, exit code, checkpoint and time."""

    rank: int
    message: str
    node_rank: int | None = None
    host: str | None = None
    pid: int | None = None
    start: int | None = None  # number of the start, of `Identity`
    step: int | None = None
    phase: str | None = None
    exception_type: str | None = None
    exception_class: str | None = None
    traceback: str | None = None
    exit_code: int | None = None
    checkpoint: str | None = None  # path where a remaining rank has saved the last step
    time: float = field(default_factory=time.time)  # time of detection, in seconds since the epoch

    def __post_init__(self) -> None:
        """Shorten the record's texts and escape their control characters: their senders are not trusted."""
        for name, longest in _LONGEST.items():
            text = getattr(self, name)
            if text is not None:
                object.__setattr__(self, name, _cut(_escaped(text), longest, keeps_end=name == "traceback"))

    @classmethod
    def of_exception(cls, error: BaseException, identity: Identity, where: Where) -> FailureRecord:
        kind = type(error)
        return cls.of_identity(
            identity,
            shortened(text_of(error)),
            step=where.step,
            phase=where.phase,
            exception_type=kind.__name__,
            exception_class=f"{kind.__module__}:{kind.__qualname__}",
            traceback=traceback_of(error),
        )

    @classmethod
    def of_identity(cls, identity: Identity, message: str, **more: Any) -> FailureRecord:
        return cls(**vars(identity), message=message, **more)

    def to_error(self, healthy_rank: int | None = None, *, is_rank: bool = True) -> PeerFailure:
        """Return this failure as a `PeerFailure`, to raise in rank `healthy_rank` or in a launcher."""
        left_out = ("start", "checkpoint", "time")
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}
        if self.checkpoint is not None:
            values["message"] += f"\n  The last step was saved to {self.checkpoint}"
        return PeerFailure(**values, is_own=healthy_rank == self.rank if is_rank else None)

    def with_exit(self, exit_code: int, description: str) -> FailureRecord:
        """Return a copy with an exit code, and with `description` as message if no cause was known before."""
        if self.exception_type is not None or self.message not in ("", GONE):
            return replace(self, exit_code=exit_code)
        return replace(self, exit_code=exit_code, message=description)


def _escaped(text: str) -> str:
    if text.isascii() and len(text.encode().translate(None, _ASCII_CONTROL_CHARACTERS)) == len(text):
        return text  # nearly always, and ten times as fast: 16,384 ranks read one record at once
    return _CONTROL_CHARACTERS.sub(lambda found: ascii(found[0])[1:-1], text)


def _cut(text: str, longest: int, *, keeps_end: bool) -> str:
    if len(text) <= longest:
        return text
    return f"... {text[4 - longest :]}" if keeps_end else f"{text[: longest - 4]} ..."


def text_of(error: BaseException) -> str:
    """Return the message of an exception as a string, even if its `__str__` raises."""
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001 (the user's own method, which may raise anything)
        return f"(its message is not available, because __str__ raises {type(failure).__name__})"


def shortened(message: str) -> str:
    r"""Return a message, or its first 40 lines of 200 characters and the number of characters left out.

    >>> shortened("1\n" * 50).splitlines()[39:]
    ['1', '... 20 characters left out']
    """
    text = _escaped(message)
    lines = [found[0] for found in islice(_LINE.finditer(text), _MOST_LINES + 1)]
    if len(lines) <= _MOST_LINES:
        return message
    kept = lines[:_MOST_LINES]
    left_out = len(text) - sum(map(len, kept))
    return "\n".join([*(line.rstrip("\n") for line in kept), f"... {left_out} characters left out"])


def traceback_of(error: BaseException) -> str:
    """Format an exception as Python does, with the messages of it and of its causes shortened."""
    text = "".join(traceback_module.format_exception(error))
    for message in sorted({text_of(link) for link in chain_of(error)}, key=len, reverse=True):
        if (shorter := shortened(message)) != message:
            text = text.replace(message, shorter)
    return text


def chain_of(error: BaseException) -> list[BaseException]:
    """Return an exception with all its causes and contexts, and the members of exception groups."""
    found: dict[int, BaseException] = {}
    left = [error]
    while left:
        link = left.pop()
        if id(link) not in found:
            found[id(link)] = link
            members = link.exceptions if isinstance(link, BaseExceptionGroup) else ()
            left += [other for other in (link.__cause__, link.__context__, *members) if other is not None]
    return list(found.values())


# ---------------------------------------------------------------------- the report


def render(record: FailureRecord) -> str:
    """Return the text to print about a job's failure: who failed first, where and how, and the traceback."""
    name = f"rank {record.rank}" if record.rank >= 0 else "the launching process"
    facts = {"node": record.node_rank, "host": record.host, "pid": record.pid, "exit code": record.exit_code}
    text = (
        f"lightning_ddp: {name} ({_facts(facts)}) failed first, and all ranks were stopped because of it.\n"
    )
    if record.step is not None or record.phase:
        step = f"step {record.step}" if record.step is not None else ""
        text += f"  {' in '.join(filter(None, (step, record.phase)))}\n"
    text += f"  {cause_of(record, is_whole=not record.traceback)}\n"
    if record.checkpoint:
        text += f"  The last step was saved to {record.checkpoint}\n"
    if record.traceback:
        text += f"Traceback of {name}:\n{_folded(record.traceback).rstrip()}\n"
    return with_ending(text, record)


def _folded(traceback: str) -> str:
    """Return a traceback in which frames of installed packages are summed up, except the last frame."""
    pieces: list[tuple[str, str]] = []  # package, or "" for what is kept; text
    end = 0
    for frame in _FRAME.finditer(traceback):
        pieces.append(("", traceback[end : frame.start()]))
        end = frame.end()
        is_followed = traceback.startswith(("  File ", "  [Previous "), end)
        pieces.append((_package_of(frame[1]) if is_followed else "", frame[0]))
    text = ""
    for is_left_out, group in groupby(filter(itemgetter(1), pieces), lambda piece: bool(piece[0])):
        packages, frames = zip(*group, strict=True)
        is_short = not is_left_out or len(frames) == 1
        note = f"  ... {len(frames)} frames of {', '.join(dict.fromkeys(packages))}\n"
        text += "".join(frames) if is_short else note
    return text + traceback[end:]


def _package_of(file: str) -> str:
    """Return the name of the installed package to which a file belongs; "" for a file of the user."""
    found = _SITE_PACKAGE.search(file)
    if found:
        return found[1]
    return next((name for folder, name in _FOLDERS.items() if file.startswith(folder + os.sep)), "")


def write_error_file(path: str, record: FailureRecord, *, is_cause: bool) -> None:
    """Write a failure as JSON to torchelastic's error file; `is_cause` if it is this process's own."""
    text = cause_of(record) if is_cause else render(record)
    trace = record.traceback if is_cause and record.traceback else text
    more = {
        "py_callstack": with_ending(trace, record),  # which is what is printed
        "timestamp": str(int(record.time) + (0 if is_cause else _LATER_S)),
    }
    part = Path(f"{path}.{os.getpid()}.part")  # renamed when complete: the agent may be reading
    part.write_text(json.dumps({"message": {"message": text, "extraInfo": more}}))
    part.replace(path)


# ---------------------------------------------------------------------- the history of a job


class History:
    """Log of how the ranks of a job changed as it continued after failures: who left and who joined."""

    def __init__(self) -> None:
        self._generations: list[tuple[str, str]] = []  # change of each, and who has left and joined
        self._lost_s = 0.0
        self._left: dict[int, FailureRecord] = {}
        self._since: float | None = None  # time of the first loss since all continued

    def lost(self, slot: int, record: FailureRecord, now: float) -> None:
        self._left.setdefault(slot, record)
        self._since = now if self._since is None else self._since

    def formed(
        self, step: int, before: Sequence[int], after: Sequence[int], now: float, healed: Sequence[int] = ()
    ) -> None:
        """Log a change of ranks from `before` to `after` (initial ranks); `healed` ranks copied a state."""
        self._since = now if self._since is None else self._since
        left = [self._left[slot] for slot in before if slot not in after and slot in self._left]
        self._left.clear()
        joined = [str(rank) for rank, slot in enumerate(after) if slot not in before]
        who = f"; left: {', '.join(map(_who, left))}" if left else ""
        who += f"; joined: rank {', '.join(joined)}" if joined else ""
        who += f"; healed: rank {', '.join(map(str, healed))}" if healed else ""
        self._generations.append((f"step {step}: {len(before)} -> {len(after)} ranks", who))

    def went_on(self, now: float) -> None:
        """Record that all ranks continue after the last change, and how many seconds it took."""
        if self._since is not None and self._generations:
            change, who = self._generations[-1]
            self._generations[-1] = f"{change} after {now - self._since:.2f} s", who
            self._lost_s += now - self._since
            self._since = None

    def tell(self) -> str:
        """Return all changes of ranks as a text to print, and clear them; empty if nothing has happened."""
        generations, self._generations = self._generations, []
        if not generations:
            return ""
        number = len(generations)
        times = f"{number} time{'s' if number > 1 else ''}"
        lines = [f"lightning_ddp: this run continued {times} with other ranks, {self._lost_s:.2f} s lost:"]
        if number > _MOST_SHOWN:
            lines.append(f"  ... {number - _MOST_SHOWN} more before")
        lines += [f"  {change}{who}" for change, who in generations[-_MOST_SHOWN:]]
        return "\n".join(lines) + "\n"


def _who(record: FailureRecord) -> str:
    line = cause_of(record).strip().partition("\n")[0].partition("; its output")[0]
    where = _facts({"host": record.host, "pid": record.pid})
    return f"rank {record.rank} ({where}) {line.removeprefix('the process ')}"


def _facts(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
