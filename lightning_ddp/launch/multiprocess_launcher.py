"""Launcher of functions: it runs them in processes that are spawned or forked, and all end if one fails.

Lightning and torch start the processes. Where there is a control server they are waited for here, as the run
may go on without some of them; then torch says how one has failed.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import reduction
from multiprocessing.connection import wait
from multiprocessing.context import get_spawning_popen
from multiprocessing.synchronize import Barrier
from multiprocessing.util import Finalize
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch.multiprocessing as mp

from lightning_ddp._lightning import (
    MultiProcessingLauncher,
    check_missing_main_guard,
    end_silently,
    interrupt_trainer,
    note_sigterm,
    process_arguments,
    sigterm_exception,
    teardown_trainer,
    unshare,
)
from lightning_ddp._torch import keep_sockets_in
from lightning_ddp.errors import ConfigurationError, PeerFailure
from lightning_ddp.hydra_jobs.jobs import restore
from lightning_ddp.launch.child_process import after_imports, die_with_parent
from lightning_ddp.launch.failure_handler import is_enabled
from lightning_ddp.launch.job_context import JobContext, job_context
from lightning_ddp.launch.launcher import node_rank_of
from lightning_ddp.launch.processes import exit_message, exit_record
from lightning_ddp.supervise.failure_record import FailureRecord, Identity, Where
from lightning_ddp.supervise.guard import Guard
from lightning_ddp.supervise.job_control import LocalProcesses
from lightning_ddp.supervise.protocol import Exited, Failed
from lightning_ddp.supervise.root_cause import ECHO_WAIT_S, EXIT_WAIT_S
from lightning_ddp.supervise.server import ControlServer
from lightning_ddp.supervise.settings import SupervisionSettings

if TYPE_CHECKING:
    from lightning_ddp._lightning import Trainer

__all__ = ["MultiprocessLauncher"]

_LOOK_AGAIN_S = 0.1


class MultiprocessLauncher(MultiProcessingLauncher, LocalProcesses):
    """Runs a function in N processes made by spawn, fork or forkserver; this process only waits for them.

    Args:
        strategy: the strategy whose processes they are.
        start_method: how they are made.
        settings: times of reconciliation.
        init_method: as for `ScriptLauncher`.
    """

    def __init__(
        self,
        strategy: Any,
        start_method: Literal["spawn", "fork", "forkserver"],
        settings: SupervisionSettings,
        init_method: str | None,
    ) -> None:
        self._server: ControlServer | None = None
        super().__init__(strategy, start_method=start_method)
        self._made_by = start_method
        self._owner = strategy
        self._init_method = init_method
        self._settings = settings
        self._all_forked: Barrier | None = None
        self._output: Any = None
        self._scratch = ""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        # a new process makes the launcher first of all that it is sent, so before the Trainer
        return reduced if get_spawning_popen() is None else (after_imports, reduced[:2], *reduced[2:])

    def __getstate__(self) -> dict[str, Any]:
        """What is sent to the processes."""
        state: dict[str, Any] = super().__getstate__()
        return {**state, "_processes": [], "_server": None}

    @property
    def procs(self) -> list[Any]:
        """The processes."""
        return self._processes

    @procs.setter
    def procs(self, processes: list[Any]) -> None:
        self._processes = list(processes)
        if processes and self._server is not None:
            self._wait(self._server, process_arguments(sys._getframe(1))[4])
            for local_rank, process in enumerate(self._processes):
                if process.exitcode is not None and self._is_out(local_rank, self._server):
                    processes[local_rank] = _ENDED_WELL

    @property
    def _first_rank(self) -> int:
        node_rank = node_rank_of(self._owner.cluster_environment, self._owner.num_nodes)
        return node_rank * int(self._owner.num_processes)

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any
    ) -> Any:
        """Runs `function` in all processes and returns what rank 0 returned, the lowest that is left.

        Raises:
            PeerFailure: a process raised or died; with its traceback where there is one.
            ConfigurationError: several nodes without a port that all know, or what is to be sent to the
                processes does not pickle.
            RendezvousError: the port that the user named is taken.
            RuntimeError: the script has no main guard, so that each new process would run it anew.
        """
        if self._made_by != "fork":
            check_missing_main_guard()
        strategy = self._owner
        environment = strategy.cluster_environment
        assert environment is not None  # the Trainer has set it before it launches
        self.procs = []
        if self._made_by == "fork":
            # The store looks up the address of each rank that connects, and holds a lock of the C library
            # while it does: a process forked then could never take that lock.
            self._all_forked = mp.get_context("fork").Barrier(strategy.num_processes)
        node_rank, first_rank = node_rank_of(environment, strategy.num_nodes), self._first_rank
        context = job_context()
        rendezvous = context.rendezvous
        variables = rendezvous.host(
            environment, self._init_method, num_nodes=strategy.num_nodes, node_rank=node_rank
        )
        variables |= rendezvous.handed
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        server = self._open_server(context, node_rank) if is_enabled() and node_rank == 0 else None
        self._server = server
        guard = Guard(ends_launcher=False)
        self._scratch = tempfile.mkdtemp(prefix="ddp-")
        remove_scratch = Finalize(None, shutil.rmtree, (self._scratch, True), exitpriority=-100)
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            _remove_error_files(error)
            failure = _process_failure(error, first_rank)
            known = server.wait_for_verdict(ECHO_WAIT_S + EXIT_WAIT_S) if server is not None else None
            # of one that had not joined yet only torch knows what it has raised
            if known is not None and (
                known.exception_type or failure.exception_type is None or known.rank != failure.rank
            ):
                failure = self._with_exit(known, first_rank)
            raise failure.like() from error
        except BaseException as error:
            if server is not None:
                launcher = Identity(rank=-1, node_rank=node_rank)
                server.tell(Failed(FailureRecord.of_exception(error, launcher, Where())))
                server.wait_for_verdict(EXIT_WAIT_S)
            if not self.procs and self._made_by != "fork" and _is_of_pickle(error):
                raise ConfigurationError(
                    f"start_method={self._made_by!r} sends the model, the Trainer and everything in them to"
                    f' new processes, but they do not pickle: {error}. strategy="custom_ddp" and'
                    ' "custom_ddp_fork" send nothing.'
                ) from error
            raise
        finally:
            if server is not None:
                server.close()
            guard.end()
            self._server = None
            rendezvous.close()
            restore(before)
            if not any(map(_runs, self.procs)):  # else it is removed once they have been waited for at exit
                remove_scratch()

    def _open_server(self, context: JobContext, node_rank: int) -> ControlServer:
        strategy = self._owner
        server = context.open_server(
            strategy.cluster_environment.main_address,
            context.rendezvous.hosted,
            identity=Identity(rank=-1, node_rank=node_rank),
            world_size=strategy.num_processes * strategy.num_nodes,
            num_nodes=strategy.num_nodes,
            settings=self._settings,
            processes=self,
        )
        assert server is not None  # only scripts have a supervisor
        return server

    def _with_exit(self, record: FailureRecord, first_rank: int) -> PeerFailure:
        """The failure with the exit code of its process, which all have by now."""
        local_rank = record.rank - first_rank
        code = self.procs[local_rank].exitcode if 0 <= local_rank < len(self.procs) else None
        if code:
            record = record.with_exit(code, exit_message(code))
        return record.to_error(is_rank=False)

    def failed(self, record: FailureRecord) -> None:
        """Continues processes that are stopped, so that they hear of the failure."""
        for process in filter(_runs, self._processes):
            with suppress(ProcessLookupError):  # the main thread has just waited for it
                os.kill(process.pid, signal.SIGCONT)

    def kill_one(self, pid: int) -> None:
        """Ends a process that the others go on without."""
        for process in filter(_runs, self._processes):
            if process.pid == pid:
                process.kill()

    def _wait(self, server: ControlServer, results: Any) -> None:
        """Waits until all have ended well, or one has not and it is known why.

        One that ends well before all ranks have found each other has failed, as the others wait for it. The
        server is told of each that fails, before torch ends the others; where the run goes on without lost
        ranks of each end.

        Raises:
            PeerFailure: all have ended well, so that nobody else is left to be told of a failure.
        """
        tells_all = self._settings.recovery is not None
        told: set[int] = set()
        failure: FailureRecord | None = None
        while True:
            codes = [process.exitcode for process in self._processes]
            for local_rank, code in enumerate(codes):
                pid = self._processes[local_rank].pid
                if pid not in told and (code or (code == 0 and tells_all and server.has_met)):
                    told.add(pid)
                    self._tell_exit(server, local_rank, code)
                if code and self._is_out(local_rank, server):
                    codes[local_rank] = 0
            failure = failure or server.wait_for_verdict(0.0)
            if any(codes) and (failure is not None or not tells_all):
                return
            if 0 in codes and failure is None and not server.has_met:
                failure = self._tell_exit(server, codes.index(0), 0)
            awaited = [rank for rank, code in enumerate(codes) if code != 0]
            if not awaited and failure is not None:
                raise failure.to_error()
            if not awaited and not results.empty():
                return
            running = (process for process in self._processes if process.exitcode is None)
            wait([process.sentinel for process in running], _LOOK_AGAIN_S)

    def _tell_exit(self, server: ControlServer, local_rank: int, code: int) -> FailureRecord:
        pid = self._processes[local_rank].pid
        identity = Identity(rank=self._first_rank + local_rank, node_rank=0, pid=pid)
        record = exit_record(identity, code)
        server.tell(Exited(record))
        return record

    def _is_out(self, local_rank: int, server: ControlServer) -> bool:
        """Whether it is nothing to the run how a process ends, as the others go on."""
        return server.goes_on_without(self._first_rank + local_rank)

    def _wrapping_function(
        self,
        process_idx: int,
        trainer: Trainer | None,
        function: Any,
        args: Any,
        kwargs: Any,
        results: Any,
        *rest: Any,
    ) -> None:
        die_with_parent(os.getppid())
        launcher = mp.parent_process()
        if launcher is not None and not launcher.is_alive():  # gone while this process was starting
            os._exit(1)
        if self._all_forked is not None:
            self._all_forked.wait()
        keep_sockets_in(self._scratch)
        wrapped = partial(_run, function, trainer)
        if self._made_by != "fork":  # Lightning does not for all of them
            args, kwargs = unshare((args, kwargs))
        try:
            super()._wrapping_function(process_idx, trainer, wrapped, args, kwargs, results, *rest)
        except SystemExit as error:
            if not _is_stop(error, trainer):
                raise
            results.put(None)  # of each, as rank 0 may be lost; all end well, so that none is ended meanwhile
        if process_idx != 0 and self._output is not None:
            results.put(self._output)  # in the place of a process that is lost
        job_context().control.close()

    def _recover_results_in_main_process(self, worker_output: Any, trainer: Trainer) -> None:
        if worker_output is None:  # SIGTERM has stopped all ranks, and ends the script as it does elsewhere
            note_sigterm(trainer)
            raise sigterm_exception(trainer)
        super()._recover_results_in_main_process(worker_output, trainer)

    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        before, tempfile.tempdir = tempfile.tempdir, self._scratch  # Lightning leaves a folder there
        try:
            self._output = super()._collect_rank_zero_results(trainer, results)
        finally:
            tempfile.tempdir = before
        return self._output


_ENDED_WELL: Any = SimpleNamespace(exitcode=0, is_alive=lambda: False, join=lambda timeout=None: None)
"""What torch has in the place of a process whose end is none of the run."""


def _runs(process: Any) -> bool:
    """Whether a process has not ended. Any thread: it takes no exit code from the one that waits for it."""
    return not wait([process.sentinel], 0.0)


def _run(function: Callable[..., Any], trainer: Trainer | None, *args: Any, **kwargs: Any) -> Any:
    """Runs the function of a process; unwinds as Lightning does from exceptions in the main process only."""
    try:
        return job_context().control.run(trainer, function, *args, **kwargs)
    except BaseException as error:
        if trainer is not None:
            if job_context().control.has_left:
                end_silently(trainer)
            interrupt_trainer(trainer, error)
            teardown_trainer(trainer)
        if isinstance(error, SystemExit) and not error.code and not _is_stop(error, trainer):
            raise SystemExit(1) from error  # with 0 the launching process would wait for the result
        raise


def _is_stop(error: BaseException, trainer: Trainer | None) -> bool:
    """Whether SIGTERM has stopped this rank and all others at one step."""
    return trainer is not None and is_enabled() and isinstance(error, sigterm_exception(trainer))


def _remove_error_files(error: mp.ProcessRaisedException | mp.ProcessExitedException) -> None:
    """Removes the files in which torch has the exceptions of processes, all of which have ended by now."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        joined = frame.f_locals.get("self")
        if isinstance(joined, mp.ProcessContext):
            for path in joined.error_files:
                Path(path).unlink(missing_ok=True)


def _is_of_pickle(error: BaseException) -> bool:
    """Whether it was raised while something was pickled for a new process."""
    frames = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    return isinstance(error, Exception) and any(code is reduction.dump.__code__ for code in frames)


def _process_failure(
    error: mp.ProcessRaisedException | mp.ProcessExitedException, first_rank: int
) -> PeerFailure:
    code, kind, trace = 1, None, None
    if isinstance(error, mp.ProcessExitedException):
        code = int(error.exit_code)
        message = exit_message(code)
    else:
        trace = str(error).strip()
        kind, _, message = trace.splitlines()[-1].partition(": ")
    return PeerFailure(
        rank=first_rank + int(error.error_index),
        host=socket.gethostname(),
        pid=error.error_pid,
        exit_code=code,
        exception_type=kind,
        message=message,
        traceback=trace,
        is_own=None,
    )
