"""Launchers: of scripts, which run again for each other rank; and of functions, in new processes.

If one rank fails, all end. torch starts the processes of a function. They are waited for here, as the job may
continue without some of them; then torch says how one has failed.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing import reduction
from multiprocessing.connection import wait
from multiprocessing.context import get_spawning_popen
from multiprocessing.synchronize import Barrier
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch.multiprocessing as mp

from lightning_ddp._lightning import (
    ClusterEnvironment,
    LightningEnvironment,
    MultiProcessingLauncher,
    SLURMEnvironment,
    SubprocessScriptLauncher,
    capture_globals,
    check_bad_cuda_fork,
    check_can_start_children,
    check_missing_main_guard,
    end_silently,
    interrupt_trainer,
    note_sigterm,
    set_num_threads_if_needed,
    sigterm_exception,
    teardown_trainer,
    unshare,
)
from lightning_ddp._torch import keep_sockets_in
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.hydra_jobs.jobs import jobs, restore, share_job
from lightning_ddp.launch.child_process import after_imports, begin_run, end_with, note_launcher
from lightning_ddp.launch.children import exit_message, exit_record
from lightning_ddp.launch.failure_handler import is_enabled
from lightning_ddp.launch.job_context import FIRST_JOB, JobContext, end_job, job_context
from lightning_ddp.launch.process_end import waiting
from lightning_ddp.launch.rendezvous import open_store
from lightning_ddp.launch.step_stop import PREEMPTED
from lightning_ddp.launch.zygote import Launch, Program, supervisor_link
from lightning_ddp.supervise.failure_detection import ECHO_WAIT_S, EXIT_WAIT_S
from lightning_ddp.supervise.failure_record import FailureRecord, Identity, Where
from lightning_ddp.supervise.guard import Guard
from lightning_ddp.supervise.job_control import LocalProcesses
from lightning_ddp.supervise.protocol import Exited, Failed
from lightning_ddp.supervise.server import ControlServer
from lightning_ddp.supervise.settings import ReplaceSettings, SupervisionSettings

if TYPE_CHECKING:
    from lightning_ddp._lightning import Trainer


_INTERRUPTED_S = 1.5
_LOOK_AGAIN_S = 0.1


class ScriptLauncher(SubprocessScriptLauncher):
    """Launcher that runs this program again in N-1 child processes; this process is local rank 0."""

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        settings: SupervisionSettings,
        init_method: str | None,
        timeout: timedelta | None,
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._init_method = init_method
        self._settings = settings
        self._timeout = timeout

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any
    ) -> Any:
        """Start the children unless they run already, then call `function` here and return its result."""
        begin_run()
        context, environment = job_context(), self.cluster_environment
        _check_tasks(environment, num_devices=self.num_processes, num_nodes=self.num_nodes)
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            self._start_children(context)
        context.begin_anew()
        set_num_threads_if_needed(num_processes=self.num_processes)
        try:
            return context.control.run(trainer, function, *args, **kwargs)
        except SystemExit as error:
            is_lone = context.control.watch is None and context.children.are_of_this_process and is_enabled()
            was_stopped = trainer is not None and isinstance(error, sigterm_exception(trainer))
            if is_lone and was_stopped and error.code is None:  # by Lightning
                error.code = PREEMPTED
            raise

    def kill(self, signum: int) -> None:
        """Wait up to 1.5 s for the children to end after Ctrl-C; send a signal to those that still run."""
        children = job_context().children
        children.join(_INTERRUPTED_S)
        children.send_signal(signum)

    def _start_children(self, context: JobContext) -> None:
        check_can_start_children(self)
        environment = self.cluster_environment
        node_rank = node_rank_of(environment, self.num_nodes)
        address, first_rank = environment.main_address, node_rank * self.num_processes
        world_size = self.num_processes * self.num_nodes
        rendezvous = context.rendezvous
        link = supervisor_link()
        if world_size == 1 or (link is not None and not link.can_start(os.environ)):
            link = None
        variables = {
            **rendezvous.host(
                environment,
                self._init_method,
                num_nodes=self.num_nodes,
                node_rank=node_rank,
                open_store=open_store if link is None else link.open_store,
            ),
            "NODE_RANK": str(node_rank),
            "LOCAL_RANK": str(environment.local_rank()),
            "WORLD_SIZE": str(world_size),
        }
        try:
            if self.num_nodes > 1 and jobs().config() is not None:  # the nodes agree on the job
                with waiting(environment, lambda: FIRST_JOB, first_rank):
                    share_job(rendezvous.find(environment, self._timeout), rank=first_rank)
            program, logs, job = _program(), _folder_for_logs(), jobs().handover(end_job)
            cwd, handed = jobs().runtime("cwd") or os.getcwd(), None if job is None else job.to_file()
        except BaseException:
            rendezvous.close()
            raise
        replaces = isinstance(self._settings.recovery, ReplaceSettings)
        if replaces and node_rank != 0 and not context.is_joining:
            context.is_joining = rendezvous.comes_back()
        launch = Launch(
            program=program,
            cwd=cwd,
            handed=handed,
            logs=logs,
            environment={**os.environ, **variables, **rendezvous.handed},
            first_rank=first_rank,
            node_rank=node_rank,
            num_ranks=self.num_processes,
            world_size=world_size,
            is_later=context.is_joining,
            goes_on=self._settings.recovery is not None,
            grace_s=self._settings.failure_grace_s,
        )
        context.begin_launch(launch, variables, link)
        if node_rank == 0 and world_size > 1 and is_enabled():  # a lone rank has nobody to hear of
            context.open_server(
                address,
                rendezvous.hosted,
                world_size=world_size,
                num_nodes=self.num_nodes,
                settings=self._settings,
            )
        if link is not None:
            note_launcher(link.supervisor)
            link.launch(launch)
        else:
            context.children.start_all()
        if handed is not None:
            if not replaces:  # others may be started later
                handed.close()
            if first_rank == 0:
                jobs().publish_to(context.rendezvous.hosted.set)


def node_rank_of(environment: ClusterEnvironment, num_nodes: int) -> int:
    """Return the rank of this node; raise `ConfigurationError` if none, or no valid one, is given."""
    if isinstance(environment, LightningEnvironment):
        name = "NODE_RANK" if "NODE_RANK" in os.environ else "GROUP_RANK"
        told = os.environ.get(name)
        if num_nodes > 1 and told is None:
            raise ConfigurationError(
                f"num_nodes={num_nodes}, but NODE_RANK is not set. Start the program on every node, with"
                f" NODE_RANK=0 on the node that has the address MASTER_ADDR, and 1 to {num_nodes - 1} on"
                " the others."
            )
        if told is not None and not (told.isdecimal() and int(told) < num_nodes):
            raise ConfigurationError(
                f"{name}={told}, but the nodes of Trainer(num_nodes={num_nodes}) are counted from 0 to"
                f" {num_nodes - 1}. Unset {name} if it is left over, or set num_nodes."
            )
    return int(environment.node_rank())


# ---------------------------------------------------------------------- the program of a child


def _program() -> Program:
    """Return the script or module that this process runs, with its arguments."""
    import __main__  # at this moment: it is another module while a program is run by runpy

    elsewhere = jobs().program()
    if elsewhere is not None:
        return Program(*elsewhere, [])
    spec, called = getattr(__main__, "__spec__", None), os.path.realpath(sys.argv[0])
    if spec is not None and spec.name != "__main__":
        if os.path.isfile(called) and called != os.path.realpath(spec.origin):
            return Program("script", os.path.abspath(sys.argv[0]), sys.argv[1:])  # run by cProfile, say
        return Program("module", spec.name, sys.argv[1:])
    # Python has made the path absolute when it started, while the working directory may have changed since
    path = getattr(__main__, "__file__", None) or sys.argv[0]
    if spec is not None:  # a folder with a __main__.py, which was run by its path
        path = os.path.dirname(path)
    if not os.path.exists(path):
        raise ConfigurationError(
            f"this program is neither a file nor a module (sys.argv[0] is {sys.argv[0]!r}), so the child"
            " processes cannot run it again. Use strategy='custom_ddp_spawn', 'custom_ddp_fork' or"
            " 'custom_ddp_notebook', or put the program into a file."
        )
    return Program("script", os.path.abspath(path), sys.argv[1:])


def _folder_for_logs() -> Path | None:
    folder = jobs().runtime("output_dir")
    if folder is None:
        return None
    logs = Path(folder, "ranks")
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"the output of the ranks cannot be written to {logs}: {error}. Check that hydra.run.dir (or"
            " hydra.sweep.dir) is writable."
        ) from error
    return logs


# ---------------------------------------------------------------------- SLURM


def _check_tasks(environment: ClusterEnvironment, *, num_devices: int, num_nodes: int) -> None:
    """Raise `ConfigurationError` if SLURM's number of tasks is not that of ranks; warn if srun is missing."""
    if not isinstance(environment, SLURMEnvironment):
        return
    num_tasks, nodes = int(os.environ["SLURM_NTASKS"]), os.environ.get("SLURM_NNODES")
    if num_tasks != num_devices * num_nodes:
        per_node, rest = divmod(num_tasks, int(nodes or num_nodes))
        fitting = f"devices={per_node}, num_nodes={int(nodes or num_nodes)}."
        if rest:
            fitting = f"devices and num_nodes whose product is {num_tasks}."
        where = "" if nodes is None else f" on {nodes} node{'s' if nodes != '1' else ''} (SLURM_NNODES)"
        raise ConfigurationError(
            f"SLURM has started {num_tasks} task{'s' if num_tasks != 1 else ''} (SLURM_NTASKS){where}, and"
            f" Trainer(devices={num_devices}, num_nodes={num_nodes}) needs {num_devices * num_nodes}. Either"
            " change the lines of the batch script to\n"
            f"  #SBATCH --nodes={num_nodes}\n"
            f"  #SBATCH --ntasks-per-node={num_devices}\n"
            "and start the program with srun; or change the Trainer to"
            f" {fitting}"
        )
    if num_tasks > 1 and "SLURM_STEP_ID" not in os.environ:
        warnings.warn(
            f"SLURM has allocated {num_tasks} tasks, but SLURM_STEP_ID is not set. If this program was not"
            " started with srun, it is the only process, and waits for the others until it times out. In"
            " the batch script use `srun python ...` instead of `python ...`.",
            stacklevel=2,
        )


# ---------------------------------------------------------------------- functions


class _Result:
    """Result of the processes, in a file, into which Lightning puts it as into a queue.

    A pipe blocks the process that fills it, while the launching one reads only after all have exited. What is
    in a file is whole, and needs no living process: a tensor is pickled by value.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def put(self, result: Any) -> None:
        part = self.path.with_suffix(f".{os.getpid()}")
        with part.open("wb") as file:
            pickle.dump(result, file)
        part.replace(self.path)


class MultiprocessLauncher(MultiProcessingLauncher, LocalProcesses):
    """Launcher that runs a function in N processes by spawn, fork or forkserver, and only waits itself."""

    def __init__(
        self,
        strategy: Any,
        start_method: Literal["spawn", "fork", "forkserver"],
        settings: SupervisionSettings,
        init_method: str | None,
    ) -> None:
        super().__init__(strategy, start_method=start_method)
        self._made_by = start_method
        self._owner = strategy
        self._init_method = init_method
        self._settings = settings
        self._has_fitted = False
        self._all_forked: Barrier | None = None
        self._output: Any = None
        self._scratch = ""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        # a new process makes the launcher first of all that it is sent, so before the Trainer
        return reduced if get_spawning_popen() is None else (after_imports, reduced[:2], *reduced[2:])

    @property
    def _first_rank(self) -> int:
        node_rank = node_rank_of(self._owner.cluster_environment, self._owner.num_nodes)
        return node_rank * int(self._owner.num_processes)

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any
    ) -> Any:
        """Run `function` in a new process for each rank; return the result of the lowest rank left."""
        if self._made_by != "fork":
            check_missing_main_guard()
        if self._made_by != "spawn":
            check_bad_cuda_fork()
        is_fit = trainer is not None and trainer.state.fn == "fit"
        if is_fit and self._has_fitted:
            raise NotImplementedError(
                f"trainer.fit() twice with start_method={self._made_by!r} is not supported. Make another"
                " Trainer, and pass ckpt_path to its fit()."
            )
        strategy = self._owner
        environment = strategy.cluster_environment
        self.procs = []
        if self._made_by == "fork":
            # The store looks up the address of each rank that connects, and holds a lock of the C library
            # while it does: a process forked then could never take that lock.
            self._all_forked = mp.get_context("fork").Barrier(strategy.num_processes)
        node_rank, context = node_rank_of(environment, strategy.num_nodes), job_context()
        rendezvous = context.rendezvous
        variables = rendezvous.host(
            environment, self._init_method, num_nodes=strategy.num_nodes, node_rank=node_rank
        )
        variables |= rendezvous.handed
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        server = None
        if is_enabled() and node_rank == 0:
            server = context.open_server(
                environment.main_address,
                rendezvous.hosted,
                world_size=strategy.num_processes * strategy.num_nodes,
                num_nodes=strategy.num_nodes,
                settings=self._settings,
                processes=self,
            )
        guard = Guard(ends_launcher=False)
        self._scratch = tempfile.mkdtemp(prefix="ddp-")
        remove_scratch = Finalize(None, shutil.rmtree, (self._scratch, True), exitpriority=-100)
        try:
            output = self._run_processes(server, trainer, function, args, kwargs)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            failure = _failure_of(error, self._first_rank, node_rank)
            known = server.wait_for_verdict(ECHO_WAIT_S + EXIT_WAIT_S) if server is not None else None
            # of one that had not joined yet only torch knows what it has raised
            if known is not None and (
                known.exception_type or failure.exception_type is None or known.rank != failure.rank
            ):
                failure = self._with_exit(known)
            raise failure.to_error(is_rank=False).like() from error
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
        else:
            if trainer is None:
                return output
            self._has_fitted |= is_fit
            self._recover_results_in_main_process(output, trainer)
            return output.trainer_results
        finally:
            if server is not None:
                server.close()
            guard.end()
            rendezvous.close()
            restore(before)
            if not any(map(_runs, self.procs)):  # else it is removed once they have been waited for at exit
                remove_scratch()

    def _run_processes(self, server: ControlServer | None, *arguments: Any) -> Any:
        """Start the processes and wait for them; return the result that one of them has sent."""
        results = _Result(Path(self._scratch, "result"))
        globals_of_torch = [capture_globals()] if self._made_by == "spawn" else []
        started = mp.start_processes(
            self._wrapping_function,
            args=(*arguments, results, *globals_of_torch),
            nprocs=self._owner.num_processes,
            join=False,
            start_method=self._made_by,
        )
        self.procs = started.processes
        try:
            has_ended = server is not None and self._wait(server, results)
            while not has_ended and not started.join():
                pass
        finally:
            for path in started.error_files:
                Path(path).unlink(missing_ok=True)
        with results.path.open("rb") as file:
            return pickle.load(file)

    def _wait(self, server: ControlServer, results: _Result) -> bool:
        """Wait until all processes have exited with 0 (then True), or one has failed and it is known why.

        One that ends well before all ranks have connected has failed, as the others wait for it. The server
        is told of each that fails, and where the job continues without lost ranks of each end. Returns False
        if torch is to end the others, and to say how one has failed.
        """
        goes_on = self._settings.recovery is not None
        told: set[int] = set()
        while True:
            codes = dict(enumerate(process.exitcode for process in self.procs))
            for local_rank, code in codes.items():
                if local_rank not in told and (code or (code == 0 and (goes_on or not server.has_met))):
                    told.add(local_rank)
                    pid, rank = self.procs[local_rank].pid or 0, self._first_rank + local_rank
                    server.tell(Exited(exit_record(Identity(rank=rank, node_rank=0, pid=pid), code)))
            failure = server.wait_for_verdict(0.0)
            counting = [n for n in codes if not codes[n] or not server.goes_on_without(self._first_rank + n)]
            if any(codes[n] for n in counting) and (failure is not None or not goes_on):
                return False
            if all(codes[n] == 0 for n in counting):
                if failure is not None:  # and nobody else is left to be told of it
                    raise failure.to_error(is_rank=False)
                if results.path.exists():
                    return True
            wait([process.sentinel for process in self.procs if process.exitcode is None], _LOOK_AGAIN_S)

    def _with_exit(self, record: FailureRecord) -> FailureRecord:
        """Return a failure record, with the exit code of its process if this launcher started that."""
        local_rank = record.rank - self._first_rank
        code = self.procs[local_rank].exitcode if 0 <= local_rank < len(self.procs) else None
        return record.with_exit(code, exit_message(code)) if code else record

    def failed(self, record: FailureRecord) -> None:
        """Send SIGCONT to all processes, so that stopped ones hear of the job's failure."""
        for process in filter(_runs, self.procs):
            with suppress(ProcessLookupError):  # the main thread has just waited for it
                os.kill(process.pid or 0, signal.SIGCONT)

    def kill_one(self, pid: int) -> None:
        for process in filter(_runs, self.procs):
            if process.pid == pid:
                process.kill()

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
        launcher = mp.parent_process()
        assert launcher is not None
        note_launcher(launcher.pid)
        end_with(os.getppid())
        if not launcher.is_alive():  # gone while this process was starting
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
            raise sigterm_exception(trainer)(PREEMPTED)
        super()._recover_results_in_main_process(worker_output, trainer)

    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        before = tempfile.tempdir
        tempfile.tempdir = self._scratch or before  # Lightning leaves a folder there
        try:
            self._output = super()._collect_rank_zero_results(trainer, results)
        finally:
            tempfile.tempdir = before
        return self._output


def _runs(process: Any) -> bool:
    """Return True if a process has not ended, without reaping it, as others wait for it. Thread-safe."""
    return not wait([process.sentinel], 0.0)


def _run(function: Callable[..., Any], trainer: Trainer | None, *args: Any, **kwargs: Any) -> Any:
    """Run a Trainer's function in a child; tear the Trainer down on errors, as Lightning's parent does."""
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
    """Return True if the exception tells that SIGTERM has stopped all ranks at one step."""
    return trainer is not None and is_enabled() and isinstance(error, sigterm_exception(trainer))


def _is_of_pickle(error: BaseException) -> bool:
    """Return True if an exception was raised while something was pickled for a new process."""
    frames = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    return isinstance(error, Exception) and any(code is reduction.dump.__code__ for code in frames)


def _failure_of(
    error: mp.ProcessRaisedException | mp.ProcessExitedException, first_rank: int, node_rank: int
) -> FailureRecord:
    who = Identity(rank=first_rank + int(error.error_index), node_rank=node_rank, pid=error.error_pid)
    if isinstance(error, mp.ProcessExitedException):
        return exit_record(who, int(error.exit_code))
    trace = str(error).strip()
    last_frame = trace.rpartition('\n  File "')[2]
    kind, _, message = re.split(r"\n(?=\S)", last_frame, maxsplit=1)[-1].partition(": ")
    return FailureRecord.of_identity(who, message, exit_code=1, exception_type=kind, traceback=trace)
