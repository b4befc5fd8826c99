"""What each spawned rank does for ``bench channel``: a wrapped model with and without a control channel."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_ddp import BucketedDDP
from lightning_ddp.comm.interrupt import Interrupt
from lightning_ddp.launch.inspection import Inspector
from lightning_ddp.reconcile.agreement import StepBoundary
from lightning_ddp.reconcile.record import FailureRecord, Identity, Where
from lightning_ddp.reconcile.server import ControlServer
from lightning_ddp.reconcile.settings import ReconcileSettings
from lightning_ddp.reconcile.watch import ServerAddress, Watch
from lightning_ddp.tools.bench.models import Workload, build_workload, compute_loss
from lightning_ddp.tools.bench.processes import RankContext
from lightning_ddp.tools.bench.workers import shuffled

_NUM_WARMUP_STEPS = 5
_HOST = "127.0.0.1"
_CONNECT_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Switches:
    """A contender: what is on beside the wrapper."""

    name: str
    """In the report."""

    channel: bool = True
    """The control channel, with the notes of every collective."""

    recorder: bool = False
    """A recorder of steps."""

    comparison: bool = False
    """debug="detail"; needs the channel."""


@dataclass(frozen=True, kw_only=True)
class SwitchSettings:
    """What ``time_switched`` measures."""

    models: tuple[str, ...]
    """Models, measured one after the other."""

    contenders: tuple[Switches, ...]
    """Ways to run, which take turns within each round."""

    num_rounds: int
    """Rounds per model."""

    num_steps: int
    """Timed steps of each contender in a round."""


class _Run:
    """One contender's copy of the model, and what its way to run needs."""

    def __init__(self, switches: Switches, workload: Workload, context: RankContext) -> None:
        self._switches = switches
        self._context = context
        self._batch = workload.batch.to(context.device)
        self._interrupt = Interrupt() if switches.channel else None
        device_ids = [context.device.index] if context.device.type == "cuda" else None
        self._wrapped = BucketedDDP(
            workload.module.to(context.device), device_ids=device_ids, interrupt=self._interrupt
        )
        self._recorder = self._wrapped.record_steps() if switches.recorder else None
        self._optimizer = torch.optim.SGD(self._wrapped.parameters(), lr=1e-6)
        self._boundary = StepBoundary()

    def step(self) -> None:
        """One training step with the boundary after it, as Lightning's loop has it."""
        self._optimizer.zero_grad(set_to_none=True)
        compute_loss(self._wrapped(self._batch)).backward()
        self._optimizer.step()
        if self._interrupt is not None:
            self._interrupt.check()
            self._interrupt.activity.advance()
            self._boundary.reached(self._interrupt.check)

    def _fail(self, record: FailureRecord) -> None:
        if self._interrupt is not None:
            self._interrupt.set(record.to_error())

    @contextmanager
    def connected(self) -> Generator[None, None, None]:
        """With the control channel, where this way to run has one."""
        if self._interrupt is None:
            yield
            return
        context, settings = self._context, ReconcileSettings()
        server = None
        where = [""]
        if context.rank == 0:
            server = ControlServer(
                _HOST, token=secrets.token_hex(16), world_size=dist.get_world_size(), settings=settings
            )
            where = [json.dumps([server.port, server.token])]
        dist.broadcast_object_list(where, device=context.device)
        port, token = json.loads(where[0])
        inspector = Inspector(self._interrupt, Where)
        watch = Watch(
            ServerAddress(host=_HOST, port=port, token=token, identity=Identity(rank=0, node_rank=0)),
            Identity(rank=context.rank, node_rank=0),
            settings,
            boundary=self._boundary,
            on_failure=self._fail,
            on_message=inspector.on_message,
        )
        inspector.attach(watch)
        inspector.compare_before_each(self._switches.comparison)
        watch.wait_for_all(_CONNECT_TIMEOUT_S, self._interrupt.check)
        inspector.enter("fit")
        try:
            yield
        finally:
            inspector.leave()
            watch.close()
            dist.barrier()  # nobody needs the server any more
            if server is not None:
                server.close()


def time_switched(context: RankContext, settings: SwitchSettings) -> dict[str, dict[str, list[list[float]]]]:
    """Time the training steps of all contenders on each model, interleaved; all ranks, communicates.

    Returns:
        Model, and "<model>, CPU" -> contender -> round -> seconds of each timed step on this rank.
    """
    seconds: dict[str, dict[str, list[list[float]]]] = {}
    for model in settings.models:
        runs = {
            switches.name: _Run(switches, build_workload(model, rank=context.rank), context)
            for switches in settings.contenders
        }
        clock, cpu = (seconds.setdefault(name, {n: [] for n in runs}) for name in (model, f"{model}, CPU"))
        for run in runs.values():
            with run.connected():
                for _ in range(_NUM_WARMUP_STEPS):
                    run.step()
        for round_index in range(settings.num_rounds):
            for name in shuffled(tuple(runs), seed=round_index):
                with runs[name].connected():
                    times = _timed_block(context, runs[name], settings.num_steps)
                clock[name].append([on_clock for on_clock, _ in times])
                cpu[name].append([on_cpu for _, on_cpu in times])
            context.advance()
    return seconds


def _timed_block(context: RankContext, run: _Run, num_steps: int) -> list[tuple[float, float]]:
    run.step()  # brings this contender's weights back into the caches
    seconds = []
    for _ in range(num_steps):
        dist.barrier()
        context.synchronize()
        start, cpu_start = time.perf_counter(), time.process_time()
        run.step()
        context.synchronize()
        seconds.append((time.perf_counter() - start, time.process_time() - cpu_start))
    return seconds
