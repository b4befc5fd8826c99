"""The interpreter does not end while a backend's thread holds tensors that have Python objects."""

from __future__ import annotations

import sys
import time

import pytest
import torch
from harness import on_ranks, run_script

from lightning_ddp.comm import teardown as parting
from lightning_ddp.comm.group import Group


def are_let_go_within(seconds):
    deadline = time.monotonic() + seconds
    while not parting.are_let_go() and time.monotonic() < deadline:
        time.sleep(0.001)
    return parting.are_let_go()


@on_ranks(2)
def test_a_collective_holds_its_tensor_until_it_is_over(rank, process_group, event):
    group = Group(process_group)
    tensor = torch.ones(4)
    if rank == 1:
        assert event.wait(20)
    work = group.all_reduce(tensor)
    if rank == 0:
        assert not are_let_go_within(0.05)
        event.set()
    group.wait(work, tensor.device)
    del work
    assert are_let_go_within(20)
    assert tensor.tolist() == [2.0] * 4


def test_a_tensor_with_a_view_is_not_waited_for():
    tensor = torch.zeros(4)
    view = tensor.view(2, 2)
    parting.note_sent((tensor,))
    assert parting.are_let_go()
    assert view._base is tensor


SCRIPT = """
import os, sys, torch, torch.distributed as dist
from lightning_ddp.comm.group import Group
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
if os.fork() == 0:  # keeps the processor busy until the script has ended
    parent = os.getppid()
    while os.getppid() == parent:
        pass
    os._exit(0)
before = set(os.listdir("/proc/self/task"))
group = Group(dist.ProcessGroupGloo(dist.FileStore(sys.argv[1], 1), 0, 1))
for thread in set(os.listdir("/proc/self/task")) - before:
    os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
tensor = torch.zeros(4)
group.wait(group.all_reduce(tensor), tensor.device)
del tensor
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's scheduling of threads")
def test_a_backend_that_is_late_does_not_abort_the_exit(tmp_path):
    run_script(SCRIPT, [str(tmp_path / "store")], timeout_s=120, fresh=True).check()


INTERRUPTED = """
import io, os, signal, sys
from lightning_ddp.comm.teardown import flush_output

class Raw(io.RawIOBase):
    def writable(self):
        return True
    def write(self, data):
        signal.raise_signal(signal.SIGUSR1)
        return len(data)

signal.signal(signal.SIGUSR1, lambda *_: (flush_output(), os._exit(7)))
sys.stdout = None
sys.stderr = io.TextIOWrapper(io.BufferedWriter(Raw()))
sys.stderr.write("x")
sys.stderr.flush()
"""


def test_a_signal_that_interrupts_a_write_ends_the_process_all_the_same():
    assert run_script(INTERRUPTED).returncode == 7
