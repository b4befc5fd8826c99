"""The simulated CUDA device reports what is planted, with its line, and nothing where the order is right."""

from __future__ import annotations

import inspect
import os
import re
import signal
import threading
import traceback
from datetime import timedelta

import pytest
import simcuda
import torch
import torch.distributed as dist
from torch import nn

from lightning_ddp.comm import Group, part_group, sub_group
from lightning_ddp.comm.nccl import allocate
from lightning_ddp.comm.teardown import abort_groups, destroy_groups, wait_for_aborts
from lightning_ddp.launch.rendezvous import join_default_group

pytestmark = pytest.mark.xdist_group("simulated ranks")

_CASES = {}


def _case(kind=None, text=""):
    """Registers a function that plants what is reported as `kind` at its line `# here`; None: nothing.

    `text` is a regular expression, in which `sN` stands for any stream but the default one.
    """

    def register(function):
        _CASES[function.__name__] = (function, kind, text)
        return function

    return register


def _ones():
    return torch.ones(64, device="cuda")


def _side():
    """A stream that is ordered after all that has been queued."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return stream


def _all_reduce(tensor):
    return dist.all_reduce(tensor, async_op=True)


# ---- races; `x` was written on the default stream


@_case("race", "read by aten::sum on sN is not ordered after write by aten::fill_ on cuda:0/s0")
def read_what_another_stream_writes(x):
    with torch.cuda.stream(torch.cuda.Stream()):
        x.sum()  # here


@_case("race", "write by aten::fill_ on cuda:0/s0 is not ordered after read by aten::sum on sN")
def write_what_another_stream_reads(x):
    with torch.cuda.stream(_side()):
        x.sum()
    x.fill_(2)  # here


@_case("race", "write by aten::fill_ on sN is not ordered after write by aten::fill_ on cuda:0/s0")
def write_what_another_stream_writes(x):
    with torch.cuda.stream(torch.cuda.Stream()):
        x.fill_(2)  # here


@_case("race", "write by aten::fill_ on cuda:0/s0 is not ordered after read by nccl:all_reduce on sN")
def write_what_is_being_reduced(x):
    work = _all_reduce(x)
    x.fill_(2)  # here
    work.wait()


@_case("race", "read by aten::sum on cuda:0/s0 is not ordered after write by nccl:all_reduce on sN")
def read_a_result_without_wait(x):
    work = _all_reduce(x)
    x.sum()  # here
    work.wait()


@_case("race", "read by nccl:all_reduce on sN is not ordered after write by aten::fill_ on sN")
def reduce_what_another_stream_writes(x):
    with torch.cuda.stream(_side()):
        x.fill_(2)
    dist.all_reduce(x, async_op=True).wait()  # here


@_case("race", "read by aten::sum on cuda:0/s0 is not ordered after write by nccl:all_reduce on sN")
def wait_on_the_wrong_stream(x):
    work = _all_reduce(x)
    with torch.cuda.stream(torch.cuda.Stream()):
        work.wait()
    x.sum()  # here
    work.wait()


@_case("race", "read by aten::sum on sN is not ordered after write by aten::native_batch_norm on cuda:0/s0")
def read_statistics_that_another_stream_moves(x):
    variance, side = _ones(), _side()
    nn.functional.batch_norm(_ones().expand(2, 64), x, variance, training=True)
    with torch.cuda.stream(side):
        x.sum()  # here


@_case()
def read_statistics_that_another_stream_uses(x):
    variance, rows = _ones(), _ones().expand(2, 64)
    side = _side()
    nn.functional.batch_norm(rows, x, variance)
    with torch.cuda.stream(side):
        x.sum()


@_case()
def parts_of_one_tensor_on_two_streams(x):
    with torch.cuda.stream(_side()):
        x[:32].fill_(2)
    x[32:].fill_(3)


@_case()
def read_on_two_streams(x):
    with torch.cuda.stream(_side()):
        x.sum()
    x.sum()


@_case()
def order_by_event(x):
    side = torch.cuda.Stream()
    event = torch.cuda.Event()
    event.record()
    side.wait_event(event)
    with torch.cuda.stream(side):
        x.fill_(2)
        done = side.record_event()
    done.wait()
    x.fill_(3)


@_case()
def order_by_copy_to_another_device(x):
    there = x.to("cuda:1")
    x.fill_(2)
    with torch.cuda.device(1):
        there.fill_(2)


# ---- frees


@_case("free", r"512 bytes of cuda:0/s0 are freed while sN may still read them \(aten::sum")
def free_under_another_stream():
    x = _ones()
    side = _side()
    with torch.cuda.stream(side):
        total = x.sum()
    del x  # here
    torch.cuda.current_stream().wait_stream(side)
    total.record_stream(torch.cuda.current_stream())


@_case("free", r"512 bytes of cuda:0/s0 are freed while sN may still (read|write) them \(nccl:all_reduce")
def free_after_waiting_on_the_wrong_stream():
    x = _ones()
    work = _all_reduce(x)
    with torch.cuda.stream(torch.cuda.Stream()):
        work.wait()
    del work
    del x  # here


@_case()
def drop_a_work_that_nobody_waited_for():
    _all_reduce(_ones())
    _all_reduce(_ones())


# ---- NCCL: what is wrong after an abort, and memory that it has registered


def _registered(group):
    device = torch.device("cuda", 0)
    return group._get_backend(device).allocate_tensor(64, dtype=torch.float32, device=device).fill_(1.0)


@_case("nccl", "nccl2?: a communicator is destroyed after its abort")
def destroy_after_an_abort():
    group = dist.new_group([0])
    group.abort()
    dist.destroy_process_group(group)  # here


@_case()
def drop_after_an_abort():
    dist.new_group([0]).abort()


@_case("nccl", r"memory that NCCL has registered is written by aten::fill_\S* after the abort")
def use_registered_memory_after_an_abort():
    group = dist.new_group([0])
    x = _registered(group)
    group.abort()
    x.fill_(2.0)  # here


@_case("free", r"512 bytes of cuda:0/s0 are freed while sN may still (read|write) them \(nccl:all_reduce")
def free_registered_memory_while_it_is_reduced():
    x = _registered(dist.group.WORLD)
    work = _all_reduce(x)
    with torch.cuda.stream(torch.cuda.Stream()):
        work.wait()
    del work
    del x  # here


@_case()
def free_registered_memory_after_the_wait():
    x = _registered(dist.group.WORLD)
    _all_reduce(x).wait()
    del x


# ---- waits of the host

_SYNCS = {
    "aten::_local_scalar_dense": [
        lambda x: x[0].item(),
        lambda x: float(x[0]),
        lambda x: bool(x[0] == 1),
        lambda x: x[0].is_nonzero(),
        lambda x: x.isfinite().all().item(),
        lambda x: [0] * int(x[0]),
    ],
    "aten::equal": [lambda x: torch.equal(x, x + 1)],
    "aten::nonzero": [lambda x: x.nonzero(), lambda x: torch.where(x > 0), lambda x: x[x > 0]],
    "aten::masked_select": [lambda x: x.masked_select(x > 0)],
    "aten::_index_put_impl_ with a mask": [lambda x: x.index_put_((x > 0,), x.clone())],
    "aten::_index_put_impl_ with indices on the CPU": [
        lambda x: x.index_put_((torch.tensor([1]),), x[:1].clone())
    ],
    "aten::_unique2": [lambda x: x.unique()],
    "aten::unique_consecutive": [lambda x: x.unique_consecutive()],
    "aten::repeat_interleave.Tensor": [lambda x: x.long().repeat_interleave(x.long())],
    "aten::bincount": [lambda x: x.long().bincount()],
    "copy to the CPU": [
        lambda x: x.cpu(),
        lambda x: x.tolist(),
        lambda x: torch.zeros(64).copy_(x),
        lambda x: torch.zeros(64).pin_memory().copy_(x),
    ],
    "copy from the CPU": [
        lambda x: torch.tensor(1.0, device="cuda"),
        lambda x: x.copy_(torch.zeros(64)),
        lambda x: torch.zeros(64).pin_memory().to("cuda"),
        lambda x: x[[1, 2]],
        lambda x: x[torch.tensor([1, 2])],
    ],
    "non_blocking copy to memory of the CPU that is not pinned": [
        lambda x: torch.zeros(64).copy_(x, non_blocking=True)
    ],
    "synchronize on": [lambda x: torch.cuda.current_stream().synchronize()],
    "synchronize an event": [lambda x: torch.cuda.current_stream().record_event().synchronize()],
    "synchronize cuda:0": [lambda x: torch.cuda.synchronize()],
    "barrier": [lambda x: dist.barrier(), lambda x: dist.barrier(async_op=True).wait()],
    "wait for a collective with a timeout": [lambda x: _all_reduce(x).wait(timedelta(seconds=9))],
}
_NO_SYNCS = [
    lambda x: x.sum() + 1,
    lambda x: x.masked_fill_(x > 0, 2.0),
    lambda x: x.__setitem__(x > 0, 2.0),
    lambda x: torch.where(x > 0, x, 0.0),
    lambda x: x[torch.zeros(2, dtype=torch.long, device="cuda")],
    lambda x: x.index_add_(0, torch.zeros(64, dtype=torch.long, device="cuda"), x.clone()),
    lambda x: torch.empty(64, pin_memory=True).copy_(x, non_blocking=True),
    lambda x: torch.empty(64, pin_memory=True).to("cuda", non_blocking=True),
    lambda x: torch.empty(64).to("cuda", non_blocking=True),
    lambda x: x.to("cuda:1"),
    lambda x: x.repeat_interleave(2),
    lambda x: x.repeat_interleave(x.long(), output_size=64),
    lambda x: x.split([32, 32]),
    lambda x: _all_reduce(x).wait(),
    lambda x: dist.all_reduce(x),
    lambda x: _all_reduce(x).get_future().wait(),
    lambda x: torch.cuda.current_stream().query(),
    lambda x: torch.nn.functional.dropout(x),
    lambda x: torch._foreach_add_([x, x.clone()], 1.0),
]


_CASES |= {
    f"{text} {number}": (function, "sync", text)
    for text, functions in _SYNCS.items()
    for number, function in enumerate(functions)
}
_CASES |= {f"none {number}": (function, None, "") for number, function in enumerate(_NO_SYNCS)}


def _line(function):
    """`file:line name` of what a case plants."""
    lines, first = inspect.getsourcelines(function)
    offset = next((i for i, line in enumerate(lines) if line.rstrip().endswith("# here")), 0)
    return f"test_simcuda_checker.py:{first + offset} {function.__name__}"


def _observe(rank, world_size):
    """What is reported in each case."""
    observed = {}
    for name, (function, _, _) in _CASES.items():
        torch.cuda.synchronize()
        x = _ones()  # outlives the case
        before = len(simcuda.report)
        try:
            function(*[x][: function.__code__.co_argcount])
            observed[name] = simcuda.report[before:]
        except Exception:  # noqa: BLE001 (told by the test of that case)
            observed[name] = traceback.format_exc()
    return observed


@pytest.fixture(scope="module")
def observed(simulated_ranks, nccl):
    (only,) = simulated_ranks.run(_observe, 1)
    return only


@pytest.mark.parametrize("name", _CASES)
def test_case(observed, name):
    function, kind, text = _CASES[name]
    found = observed[name]
    assert not isinstance(found, str), found
    if kind is None:
        assert found == [], simcuda.summary(reports=found)
    else:
        assert found, "nothing was reported"
        assert {report.kind for report in found} == {kind}
        expected = text.replace("sN", r"cuda:0/s[1-9]\d*").replace(" on cuda", r"\S* on cuda")
        assert any(re.search(expected, report.text) for report in found), simcuda.summary(reports=found)
        assert {report.place for report in found} == {_line(function)}


# ---- ranks that die, and groups


def _lose_a_rank(rank, world_size, how):
    if rank == 1:
        os._exit(3)
    x = _ones()
    if how == "timeout":
        _all_reduce(x).wait(timedelta(seconds=0.3))
    elif how == "error":
        work = _all_reduce(x)
        simcuda.break_groups("NCCL error: remote process exited or there was a network error")
        work.wait()
    elif how == "abort":
        work = _all_reduce(x)
        threading.Timer(0.3, dist.group.WORLD.abort).start()
        x.sum().item()  # blocks until then, and has no result
        assert work.is_completed()
        with pytest.raises(dist.DistBackendError, match=r"was aborted on rank 0|NCCL operation failed"):
            work.wait()
        dist.all_reduce(x)
    elif how == "watchdog":
        group = dist.new_group([0, 1], timeout=timedelta(seconds=0.3), use_local_synchronization=True)
        dist.all_reduce(x, group=group)
        torch.cuda.synchronize()
    return


@pytest.mark.parametrize(
    ("how", "first", "second"),
    [
        ("timeout", "OpType=ALLREDUCE.* timed out in blocking wait", "NCCL operation timed out"),
        ("error", "NCCL error: remote process exited", "NCCL error: remote process exited"),
        ("abort", "was aborted on rank 0", "was aborted after a previous error"),
    ],
)
def test_collective_that_cannot_end_raises(simulated_ranks, nccl, how, first, second):
    left, dead = simulated_ranks.run_outcomes(_lose_a_rank, 2, how)
    kind = "RuntimeError" if (nccl, how) == ("nccl2", "abort") else "DistBackendError"
    assert (left.status, left.exception_type) == ("raised", kind)
    assert re.search(second if nccl == "nccl2" else first, left.message)
    assert dead.exit_code == 3


def _error_after_abort(rank, world_size):
    backend = dist.group.WORLD._get_backend(torch.device("cuda", rank))
    before = backend.name(), backend.get_error().name
    dist.group.WORLD.abort()
    return *before, backend.get_error().name


def test_the_implementations_differ_in_name_and_in_the_error_after_an_abort(simulated_ranks, nccl):
    after = "COMM_ERROR" if nccl == "nccl2" else "SUCCESS"
    assert simulated_ranks.run(_error_after_abort, 2) == [(nccl, "SUCCESS", after)] * 2


def _use_device_of_another_rank(rank, world_size):
    if rank == 0:
        os.environ["LOCAL_RANK"] = "1"  # which nobody else has
    dist.all_reduce(torch.ones(3, device="cuda"))


def test_the_second_implementation_takes_the_device_of_local_rank(simulated_ranks, nccl):
    first, second = simulated_ranks.run_outcomes(
        _use_device_of_another_rank, 2, timeout_s=10.0, stop_on_failure=True
    )
    if nccl == "nccl":
        assert (first.status, second.status) == ("returned", "returned")
    else:
        assert "is bound to device cuda:1 but an operation was issued on cuda:0" in first.message


def _nest_groups(rank, world_size):
    device = torch.device("cuda", 1 - rank % 2)  # and not that of LOCAL_RANK
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    where = {"rank": rank, "world_size": world_size, "timeout": None, "device": device}
    pair = part_group(Group(join_default_group("nccl", store, **where)), 2, device)
    nested = sub_group(pair, [0, 1], device)
    total = torch.full((3,), float(rank), device=device)
    nested.wait(nested.all_reduce(total), device)
    return total


def test_groups_of_some_ranks_have_the_device_of_their_rank(simulated_ranks):
    totals = simulated_ranks.run(_nest_groups, 4, process_group=False)
    assert [total.tolist() for total in totals] == [[1.0] * 3] * 2 + [[5.0] * 3] * 2


def _leave_after_abort(rank, world_size):
    group = Group(dist.group.WORLD)
    part = sub_group(group, [0, 1], torch.device("cuda", rank))
    memory = allocate(part.process_group, 64, torch.float32, torch.device("cuda", rank))
    abort_groups()
    wait_for_aborts()
    destroy_groups()
    return dist.is_initialized(), float(memory.numel()), [str(report) for report in simcuda.report]


def test_groups_are_left_after_an_abort_without_being_destroyed(simulated_ranks):
    assert simulated_ranks.run(_leave_after_abort, 2) == [(False, 64.0, [])] * 2


@pytest.mark.parametrize(
    ("variables", "status", "exit_code"),
    [({}, "died", -signal.SIGABRT), ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}, "returned", None)],
)
def test_watchdog_ends_the_process_or_cleans_up_only(simulated_ranks, variables, status, exit_code):
    left, _ = simulated_ranks.run_outcomes(_lose_a_rank, 2, "watchdog", variables=variables)
    assert (left.status, left.exit_code) == (status, exit_code)


# ---- operators


def _mistake(rank, world_size):
    two = "Expected all tensors to be on the same device, but found at least two devices"
    for wrong, message in (
        (lambda: torch.ones(2, device="cuda") + torch.ones(2), f"{two}, cuda:0 and cpu"),
        (
            lambda: nn.functional.embedding(torch.tensor([1]), torch.ones(2, 2, device="cuda")),
            f"{two}, cuda:0 and cpu",
        ),
        (
            lambda: torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1"),
            f"{two}, cuda:0 and cuda:1",
        ),
        (lambda: torch.cuda.set_device(2), "CUDA error: invalid device ordinal"),
        (lambda: dist.all_reduce(torch.ones(2)), "No backend type associated with device type cpu"),
        (lambda: dist.all_reduce(torch.ones(2, 2, device="cuda").t()[:1].t()), "Tensors must be contiguous"),
    ):
        with pytest.raises(Exception, match=message):
            wrong()


def test_tensors_on_the_wrong_device_are_refused_as_by_cuda(simulated_ranks):
    simulated_ranks.run(_mistake, 1)
