"""Runs code on several ranks and answers for each of them: a result, or how it failed. Never silence.

`run_ranks` and `run_ranks_outcomes` start forked processes, `run_threads` and `run_threads_outcomes` start
threads with one gloo group each, of which `on_ranks` makes a test; `run_script` and `start_script` start a
Python script as a user would. None of them leaves a process behind, and each has a deadline.
"""

# ruff: noqa: F401 (what tests import from here)
from functools import partial

import pytest

from harness.leftovers import ProcessLeftBehind
from harness.machine import free_port, host_with, srun
from harness.outcomes import RankFailed, RankOutcome
from harness.processes import run_ranks, run_ranks_outcomes, store_elsewhere
from harness.scripts import (
    RUN,
    TORCHRUN,
    TRAINS,
    RunningScript,
    ScriptFailed,
    ScriptResult,
    last_screen,
    run_script,
    start_script,
)
from harness.threads import on_ranks, run_threads, run_threads_outcomes

slow = partial(pytest.param, marks=pytest.mark.slow)
exhaustive = partial(pytest.param, marks=pytest.mark.exhaustive)
