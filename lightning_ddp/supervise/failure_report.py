"""Report of a failure: on the screen, and in the file that torchelastic reads."""

from __future__ import annotations

import json
import os
import re
from itertools import groupby
from pathlib import Path

from lightning_ddp.supervise.failure_record import FailureRecord

__all__ = ["render", "write_error_file"]

_LATER_S = 60
"""torchelastic reports the earliest of a node; a survivor must not be taken for the cause."""

_FRAME = re.compile(r'^  File "(.+)", line \d+, in .*\n(?:    .*\n)*', re.MULTILINE)
_SITE_PACKAGE = re.compile(r"[/\\](?:site|dist)-packages[/\\](\w+)")
_FOLDERS = {str(Path(__file__).parents[1]): "lightning_ddp", str(Path(os.__file__).parent): "python"}


def render(record: FailureRecord) -> str:
    """The report for people: who failed first, where, how, with the traceback last."""
    name = f"rank {record.rank}" if record.rank >= 0 else "the launching process"
    facts = {"node": record.node_rank, "host": record.host, "pid": record.pid, "exit code": record.exit_code}
    where = ", ".join(f"{key} {value}" for key, value in facts.items() if value is not None)
    lines = [f"lightning_ddp: {name} ({where}) failed first, and all ranks were stopped because of it."]
    if record.step is not None or record.phase:
        step = f"step {record.step}" if record.step is not None else ""
        lines.append("  " + " in ".join(filter(None, (step, record.phase))))
    cause = f"{record.exception_type}: {record.message}" if record.exception_type else record.message
    lines.append(f"  {cause}")
    if record.checkpoint:
        lines.append(f"  The last step was saved: {record.checkpoint}")
    if record.traceback:
        lines.append(f"Traceback of {name}:\n{_shortened(record.traceback).rstrip()}")
    return "\n".join(lines) + "\n"


def _shortened(traceback: str) -> str:
    """A traceback in which one line stands for the frames of packages before one of the user, or the last."""
    pieces: list[tuple[str, str]] = []  # package, or "" for what is kept; text
    end = 0
    for frame in _FRAME.finditer(traceback):
        pieces.append(("", traceback[end : frame.start()]))
        end = frame.end()
        is_followed = traceback.startswith(("  File ", "  [Previous "), end)
        pieces.append((_package_of(frame[1]) if is_followed else "", frame[0]))
    pieces.append(("", traceback[end:]))
    pieces = [piece for piece in pieces if piece[1]]
    return "".join(_piece(kind, list(group)) for kind, group in groupby(pieces, lambda piece: bool(piece[0])))


def _package_of(file: str) -> str:
    """The installed package that a file belongs to; "" for one of the user's."""
    found = _SITE_PACKAGE.search(file)
    if found:
        return found[1]
    return next((name for folder, name in _FOLDERS.items() if file.startswith(folder + os.sep)), "")


def _piece(is_left_out: bool, pieces: list[tuple[str, str]]) -> str:
    if not is_left_out or len(pieces) == 1:
        return "".join(text for _, text in pieces)
    return f"  ... {len(pieces)} frames of {', '.join(dict.fromkeys(package for package, _ in pieces))}\n"


def write_error_file(path: str, record: FailureRecord, *, is_cause: bool) -> None:
    """Writes the file in which torchelastic's agent looks for the error of one of its processes.

    Args:
        path: the value of TORCHELASTIC_ERROR_FILE.
        record: the first failure.
        is_cause: whether it happened in this process; the agent reports the earliest one of its node.
    """
    cause = f"{record.exception_type}: {record.message}" if record.exception_type else record.message
    text = cause if is_cause else render(record)
    data = {
        "message": {
            "message": text,
            "extraInfo": {
                "py_callstack": record.traceback if is_cause and record.traceback else text,
                "timestamp": str(int(record.time) + (0 if is_cause else _LATER_S)),
            },
        }
    }
    part = Path(f"{path}.{os.getpid()}.part")  # renamed when complete: the agent may be reading
    part.write_text(json.dumps(data))
    part.replace(path)
