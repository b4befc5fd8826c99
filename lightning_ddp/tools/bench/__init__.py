"""Benchmarks behind ``python -m lightning_ddp bench``.

Every benchmark compares contenders that take turns within one run, so that a slow minute of the machine hits
all of them, and reports medians of ratios that were paired round by round.

* ``step``, ``memory``, ``allreduce``, ``launch``: the commands, without torch at import time;
* ``workers``: what each spawned rank does; ``processes``: how ranks are spawned, watched and ended;
* ``hooks``: the command for hooks and averagers; ``links``: ranks in two namespaces, with a shaped link
  between them; ``tasks``: what they are trained on; ``traffic``: what each rank does;
* ``channel``: the command for the control channel; ``switching``: what each rank does;
* ``scaling``: the command that predicts; ``predicting``: how; ``calibration``: what ranks measure for it;
  ``validation``: predictions beside measured steps;
* ``timeline``: the command that draws recorded steps; ``recorders``: what each rank does where it has none;
* ``imports``: the time of ``import lightning_ddp``; ``scripts``: scripts that are timed;
* ``trainer_steps``: steps inside a Trainer;
* ``models``, ``contenders``: what is trained, and what wraps it;
* ``session``: the ranks of a benchmark, its own processes or those of torchrun;
* ``linked_steps``: the work of ``step`` on two ranks that a shaped link joins;
* ``ending``: what SIGTERM does;
* ``arguments``, ``report``: shared options; statistics, tables and JSON; ``outputs``, ``pictures``: the files
  that were asked for.
"""

from lightning_ddp.errors import LightningDDPError


class BenchmarkError(LightningDDPError, RuntimeError):
    """A benchmark could not be completed; the message is meant to be printed without a traceback."""


__all__ = ["BenchmarkError"]
