"""Runs a test's function on ranks with simulated CUDA devices, forked from a process that imported all.

The devices have to be registered before torch is imported, so a rank cannot be forked from pytest. One
server process imports torch, Lightning and the package once; for each run it imports the test's module (once)
and forks the ranks. The fixture `simulated_ranks` is that server:

    def _train(rank, world_size, option):  # in a test module, as for `harness.run_ranks`
        net = Net().to("cuda")             # the current device is cuda:{rank}, the default group is NCCL's
        ...
        assert simcuda.report == []        # what the checker found in this rank
        return loss, net.state_dict()      # whatever can be pickled; tensors arrive on the CPU

    def test_it(simulated_ranks):
        (loss, state), second = simulated_ranks.run(_train, 2, "value of option")

A test's module is imported in pytest as well as in the server, so it must not touch a device when imported.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import simcuda

# torch, and what imports it, is imported in functions: in the server the devices have to be registered first.

_TESTS = Path(__file__).resolve().parents[1]
_START_TIMEOUT_S = 240.0
_ANSWER_GRACE_S = 60.0
"""How much later than the deadline of the ranks the server may answer: it collects stacks and kills."""


class SimulatedRanks:
    """The server, seen from pytest."""

    def __init__(self, build: Path, variables: Mapping[str, str]) -> None:
        """Args: build: the folder that `simcuda.build.build` returned; variables: of the ranks."""
        from harness.scripts import environment

        self._connection, theirs = Pipe()
        self._output = tempfile.NamedTemporaryFile(mode="a+", prefix="simcuda-", suffix=".log")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "simcuda.ranks", str(build), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            pass_fds=[theirs.fileno()],
            cwd=_TESTS,
            env=environment({"PYTHONPATH": str(_TESTS), **variables}),
        )
        theirs.close()
        try:
            self._receive(_START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def run(self, fn: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
        """Runs `fn(rank, world_size, *args)` on each rank; results in rank order.

        Args:
            fn: a function at the top of a module; it and `args` are pickled.
            world_size: how many; rank r has device `r % 2`, so that four ranks share two devices.
            **options: those of `run_outcomes`.

        Raises:
            RankFailed: a rank raised, died or hung; lists all of them. What they printed is in stderr.
        """
        from harness.outcomes import values_or_raise

        outcomes = self.run_outcomes(fn, world_size, *args, stop_on_failure=True, **options)
        if any(outcome.failed for outcome in outcomes):
            sys.stderr.write(self.output()[-8000:])
        return values_or_raise(outcomes)

    def run_outcomes(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout_s: float = 60.0,
        process_group: bool = True,
        variables: Mapping[str, str] | None = None,
        stop_on_failure: bool = False,
    ) -> list[Any]:
        """As `run`, for ranks that may fail: one `RankOutcome` each.

        Args:
            timeout_s: after that the ranks are made to show their stacks and are killed.
            process_group: whether the default group exists; otherwise the environment is that of torchrun,
                with the store in place, as `init_process_group()` and Lightning expect it.
            variables: environment variables of the ranks.
            stop_on_failure: whether a rank that raised ends at once, and the others soon.
        """
        import torch.distributed as dist

        # here, so that no rank that dies takes the store with it
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        where = (store.port, timeout_s, process_group, variables or {})
        self._output.truncate(0)
        try:
            # what belongs to the test's module may not be unpickled: the server tells why
            task = pickle.dumps((fn, args))
            self._connection.send_bytes(pickle.dumps((task, world_size, where, stop_on_failure)))
            answer = self._receive(timeout_s + _ANSWER_GRACE_S)
        except BaseException:
            self.close()  # its answer would be taken for that of the next run
            raise
        if isinstance(answer, str):
            raise RuntimeError(f"the server could not run {fn.__qualname__}:\n{answer}")
        return answer

    def _receive(self, timeout_s: float) -> Any:
        with contextlib.suppress(EOFError, OSError):
            if self._connection.poll(timeout_s):
                return pickle.loads(self._connection.recv_bytes())
        raise RuntimeError(f"the server of simulated ranks ended or hangs:\n{self.output()[-8000:]}")

    def output(self) -> str:
        """What the ranks of the last run printed."""
        return Path(self._output.name).read_text(errors="replace")

    def close(self) -> None:
        """Ends the server; its ranks end with it."""
        self._connection.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()


# ---- in the server and its ranks


def _serve(connection: Connection) -> None:
    import gc
    import traceback

    import pytorch_lightning  # noqa: F401 (once, for every rank)
    import torch
    from harness.processes import _Run, die_with_parent

    import lightning_ddp  # noqa: F401

    die_with_parent()
    torch.set_num_threads(1)
    gc.freeze()  # every run collects before it forks
    connection.send_bytes(pickle.dumps("ready"))
    while True:
        try:
            task, world_size, where, stop_on_failure = pickle.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)  # it has nothing to tidy up
        try:
            arguments = (*pickle.loads(task), *where)
            run = _Run(_run_rank, world_size, arguments, where[1], False, stop_on_failure=stop_on_failure)
            answer: Any = run.outcomes()
        except Exception:  # noqa: BLE001 (whatever unpickling runs may raise)
            answer = traceback.format_exc()
        connection.send_bytes(pickle.dumps(answer))


def _run_rank(
    rank: int,
    world_size: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    port: int,
    timeout_s: float,
    process_group: bool,
    variables: Mapping[str, str],
) -> Any:
    import torch
    import torch.distributed as dist
    from torch.utils._pytree import tree_map_only

    os.environ.update(variables)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    if process_group:
        store = dist.TCPStore("127.0.0.1", port, world_size, wait_for_workers=False)
        timeout = timedelta(seconds=2 * timeout_s)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size, timeout=timeout)
    else:
        os.environ.update(_torchrun_environment(rank, world_size, port))
    value = fn(rank, world_size, *args)
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), value)


def _torchrun_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "ROLE_RANK": rank, "WORLD_SIZE": world_size}
    numbers |= {"LOCAL_WORLD_SIZE": world_size, "ROLE_WORLD_SIZE": world_size, "MASTER_PORT": port}
    texts = {
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RUN_ID": "simulated",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return {name: str(number) for name, number in numbers.items()} | texts


if __name__ == "__main__":
    simcuda.start(Path(sys.argv[1]))
    import simcuda.ranks as myself  # what the ranks pickle belongs to this name, not to __main__

    myself._serve(Connection(int(sys.argv[2])))
