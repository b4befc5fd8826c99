"""The interpreter does not end while a backend's thread holds tensors that have Python objects."""

from __future__ import annotations

import sys
import threading
import time

import pytest
import torch
from harness import run_script, run_threads

from lightning_ddp.comm import exit as parting
from lightning_ddp.comm.group import Group


def are_let_go_within(seconds):
    deadline = time.monotonic() + seconds
    while not parting.are_let_go() and time.monotonic() < deadline:
        time.sleep(0.001)
    return parting.are_let_go()


def hold_and_let_go(rank, world_size, process_group, entered):
    group = Group(process_group)
    tensor = torch.ones(4)
    if rank == 1:
        assert entered.wait(20)
    work = group.all_reduce(tensor)
    was_held = None
    if rank == 0:
        was_held = not are_let_go_within(0.05)
        entered.set()
    group.wait(work, tensor.device)
    del work
    return was_held, are_let_go_within(20), tensor.tolist()


def test_a_collective_holds_its_tensor_until_it_is_over():
    answers = run_threads(hold_and_let_go, 2, threading.Event(), timeout_s=60)
    assert answers[0] == (True, True, [2.0] * 4)
    assert answers[1] == (None, True, [2.0] * 4)


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
