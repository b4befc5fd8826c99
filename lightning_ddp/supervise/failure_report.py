"""Report of a failure: on the screen, and in the file that torchelastic reads."""

from __future__ import annotations

import json
import os
from pathlib import Path

from lightning_ddp.supervise.failure_record import FailureRecord

__all__ = ["render", "write_error_file"]

_LATER_S = 60
"""torchelastic reports the earliest of a node; a survivor must not be taken for the cause."""


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
    if record.traceback:
        lines.append(f"Traceback of {name}:\n{record.traceback.rstrip()}")
    return "\n".join(lines) + "\n"


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
