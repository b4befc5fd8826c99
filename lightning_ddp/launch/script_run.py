"""A whole script as one run, for Fabric, which has no loop of its own."""

from __future__ import annotations

import atexit
import sys
import traceback
from typing import Any

from lightning_ddp.launch.failure_handler import FailureHandler
from lightning_ddp.launch.last_words import exit_now


class ScriptRun:
    """Supervision of a script as one run, from a call of `begin` to the script's end."""

    def __init__(self, control: FailureHandler) -> None:
        self._control = control
        self._hook_before = sys.excepthook

    def begin(self) -> None:
        """Start to supervise the script, by an exception hook and an exit handler, unless it has begun."""
        running = getattr(sys.excepthook, "__self__", None)
        if isinstance(running, ScriptRun) and running._control is self._control:
            return
        self._control.enter("the script")
        sys.excepthook = self._raised
        atexit.register(self._end)

    def _raised(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        self._control.alarm.silence()
        failure = None if self._control.is_over else self._control.end(error)
        if failure is not None:
            kind, error = type(failure), failure.with_traceback(trace)
        self._hook_before(kind, error, trace)

    def _end(self) -> None:
        """Wait until all ranks have come to the end of the script, unless this one has failed."""
        control = self._control
        if control.is_inherited:
            return
        try:
            if not control.is_ending:
                control.leave_together()
        except BaseException as error:  # noqa: BLE001 (nobody is left to catch it)
            control.alarm.silence()
            traceback.print_exception(control.end(error) or error)
            if not control.is_launcher:  # the launching process still ends the others
                exit_now(1)
        finally:
            control.leave()
