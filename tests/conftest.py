"""Every test leaves the process as it found it: environment, process groups, threads, children."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import hypothesis
import psutil
import pytest
from simcuda.build import CannotBuild, build
from simcuda.ranks import SimulatedRanks

# a loaded machine is no fault of a test
hypothesis.settings.register_profile(
    "patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("patient")

# Set by the machinery, not by the test: pytest's own, and what torch, its OpenMP and Lightning set at import.
_NOT_OURS = {
    "PYTEST_CURRENT_TEST",
    "KMP_INIT_AT_FORK",
    "KMP_DUPLICATE_LIB_OK",
    "TORCHINDUCTOR_CACHE_DIR",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
}
_ENDING_GRACE_S = 2.0


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--slow`: the second tier as well; `-m slow` with it selects that tier alone."""
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")
    parser.addoption("--exhaustive", action="store_true", help="--slow and every cell of matrices")
    parser.addoption("--seeds", default="20000:60000", help="of the histories that --exhaustive simulates")


_FIRST_TIER_WITH_NCCL2 = (
    "host_in_a_steady_step[nccl2-race-defaults]",
    "host_in_a_steady_step[nccl2-free-defaults]",
    "host_in_a_steady_step[nccl2-sync-defaults]",
    "test_simcuda.py::test_gradients_and_parameters_equal_those_of_the_reference[nccl2-defaults]",
    "test_simcuda_checker.py::test_groups_are_left_after_an_abort_without_being_destroyed[nccl2]",
    "test_simcuda_shrink.py::test_an_update_waits_for_gradients_that_a_lost_rank_has_a_part_in[nccl2]",
    "test_simcuda_trainer.py::test_a_rank_that_dies_is_named_and_nothing_hangs[nccl2-kill-1]",
    "test_simcuda_trainer.py::test_a_rank_that_is_late_is_named_when_the_deadline_passes[nccl2-device]",
    "test_simcuda_trainer.py::test_groups_that_are_made_of_another_one_have_its_timeout[nccl2]",
    "test_simcuda_trainer.py::test_what_is_trained_and_validated_equals_lightnings_ddp[nccl2-16-mixed]",
)
"""Ends of the names of tests on simulated devices with the second implementation.

The second tier has all others but the longest matrix, of which it has what the first one has with the first
implementation.
"""


_LONG = ("examples", "launch", "scaling", "simulation", "stuck", "two_nodes", "verify")
"""Files, without `test_`, whose tests come first, as they are long: so the workers end at the same time."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what only `--slow` or `--exhaustive` run."""
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in _LONG)
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        names = [item.nodeid for item in items]
        gone = [end for end in _FIRST_TIER_WITH_NCCL2 if not any(name.endswith(end) for name in names)]
        assert not gone, f"no test is called {gone}"
    for item in items:
        if getattr(item, "callspec", None) is None or item.callspec.params.get("nccl") != "nccl2":
            continue
        item.add_marker(pytest.mark.xdist_group("simulated nccl2"), append=False)  # on the other worker
        if not item.nodeid.endswith(_FIRST_TIER_WITH_NCCL2):
            is_of_matrix = item.path.name == "test_simcuda.py" and item.get_closest_marker("slow")
            item.add_marker("exhaustive" if is_of_matrix else "slow")
    if config.getoption("--exhaustive"):
        return
    kinds = ("exhaustive",) if config.getoption("--slow") else ("exhaustive", "slow")
    left_out = {item for item in items if any(map(item.get_closest_marker, kinds))}
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Keeps what was imported from the garbage collector, which `harness` runs for each set of ranks."""
    gc.collect()
    gc.freeze()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs tests on simulated devices with both implementations of NCCL: in the first tier a few of them."""
    if "nccl" in metafunc.fixturenames:
        metafunc.parametrize("nccl", ["nccl", "nccl2"], indirect=True, scope="session")


@pytest.fixture(scope="session")
def nccl(request: pytest.FixtureRequest) -> str:
    """What the backend `nccl` means on simulated devices: `nccl`, the first implementation, or `nccl2`."""
    return request.param


@pytest.fixture(autouse=True)
def chosen_nccl(request: pytest.FixtureRequest) -> Iterator[None]:
    """Chooses the implementation in the processes that a test starts; around `no_leaked_environment`."""
    if "nccl" not in request.fixturenames:
        yield
        return
    os.environ["TORCH_DIST_USE_NCCL2"] = str(int(request.getfixturevalue("nccl") == "nccl2"))
    yield
    os.environ.pop("TORCH_DIST_USE_NCCL2", None)


@pytest.fixture(scope="session")
def compiled_cuda(pytestconfig: pytest.Config) -> Path:
    """The folder with the compiled simulated CUDA device; where it cannot be compiled tests are skipped."""
    try:
        return build(pytestconfig.cache.mkdir("simcuda"))
    except CannotBuild as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def simulated_cuda(compiled_cuda: Path, nccl: str) -> Path:
    """That folder, for tests that run with each implementation of NCCL."""
    return compiled_cuda


@pytest.fixture(scope="session")
def simulated_ranks(simulated_cuda: Path, nccl: str) -> Iterator[SimulatedRanks]:
    """Runs functions on ranks with simulated CUDA devices."""
    server = SimulatedRanks(simulated_cuda, {"TORCH_DIST_USE_NCCL2": str(int(nccl == "nccl2"))})
    yield server
    server.close()


@pytest.fixture(scope="module", autouse=True)
def light_processes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lets processes that are not started by `harness` do without SciPy and matplotlib, as its scripts do."""
    with pytest.MonkeyPatch.context() as patch:
        if request.module.__name__ in ("test_bench", "test_mission", "test_verify"):
            from harness.scripts import environment

            given = environment({})
            for name in ("PYTHONPATH", "HIDDEN_PACKAGES"):
                patch.setenv(name, given[name])
        yield


@pytest.fixture(autouse=True)
def no_leaked_environment() -> Iterator[None]:
    """Restores the environment, then fails the test that changed it."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = {
        name: (before.get(name), after.get(name))
        for name in before.keys() | after.keys()
        if name not in _NOT_OURS and before.get(name) != after.get(name)
    }
    for name, (old, _) in changed.items():
        if old is None:
            del os.environ[name]
        else:
            os.environ[name] = old
    assert not changed, f"the test changed environment variables (before, after): {changed}"


@pytest.fixture(autouse=True)
def no_leaked_process_group() -> Iterator[None]:
    """Destroys a default process group, then fails the test that left it."""
    import torch.distributed as dist  # not in the process that only hands out the tests

    assert not dist.is_initialized(), "a default process group exists before the test"
    yield
    leaked = dist.is_initialized()
    if leaked:
        dist.destroy_process_group()
    assert not leaked, "the test left a default process group; call destroy_process_group()"


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    """Fails the test that leaves a thread which would keep the interpreter from ending."""
    before = set(threading.enumerate())
    yield
    leaked = [t for t in threading.enumerate() if t not in before and not t.daemon]
    for thread in leaked:
        thread.join(timeout=_ENDING_GRACE_S)
    alive = [thread.name for thread in leaked if thread.is_alive()]
    assert not alive, f"the test left non-daemon threads: {alive}"


@pytest.fixture(scope="session", autouse=True)
def resource_tracker_of_all_tests() -> None:
    """Starts multiprocessing's tracker before the first test.

    It is not waited for: between its fork and its exec, which a loaded machine draws out, the test that first
    makes a semaphore would be left with a child that has no command line to know it by.
    """
    resource_tracker.ensure_running()


@pytest.fixture(autouse=True)
def no_leaked_children() -> Iterator[None]:
    """Kills child processes, then fails the test that left them."""
    me = psutil.Process()
    before = set(me.children(recursive=True))
    yield
    multiprocessing.active_children()  # reaps those that have ended
    left = [child for child in me.children(recursive=True) if child not in before]
    _, alive = psutil.wait_procs([child for child in left if not _is_shared_server(child)], _ENDING_GRACE_S)
    described = [f"pid {child.pid}: {_command(child)}" for child in alive]
    for child in alive:
        child.kill()
    psutil.wait_procs(alive, timeout=10)
    assert not alive, f"the test left child processes: {described}"


def _is_shared_server(process: psutil.Process) -> bool:
    # multiprocessing keeps one of each for the life of the interpreter, as does `harness/scripts.py`
    command = _command(process)
    if "harness/script_server.py" in command:
        return process.ppid() == os.getpid()  # and not what it has started
    return "multiprocessing.resource_tracker" in command or "multiprocessing.forkserver" in command


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return "(ended)"
