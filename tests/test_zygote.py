"""The zygote of `python -m lightning_ddp run`: forks on request, relays exit codes, ends last but one."""

from __future__ import annotations

import sys

import pytest
from harness import run_script

DEADLINE_S = 120.0
SUPERVISOR = """
import os, signal, socket, sys
from pathlib import Path
from lightning_ddp.launch.zygote import Program, Start, Zygote, fork, serve

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGIO})
ours, theirs = socket.socketpair()
supervisor = os.getpid()
zygote_pid = fork()
if zygote_pid == 0:
    ours.close()
    start, files = serve(theirs, supervisor)
    if start.program.name == "exit":
        os._exit(int(start.program.arguments[0]))
    if start.program.name == "write":
        os.write(files[7], start.environment["TEXT"].encode())
        os._exit(len(os.listdir("/proc/self/task")))
    signal.pause()
theirs.close()
zygote = Zygote(ours)

def start(name, *arguments, files={}, **environment):
    return zygote.start(Start(program=Program("script", name, arguments), environment=environment), files)

"""
CASES = {
    "exit codes": (
        "forks = [start('exit', str(number)) for number in (0, 3)] + [start('pause')]\n"
        "print(forks[2].returncode)\n"
        "forks[2].send_signal(signal.SIGTERM)\n"
        "print([fork.wait() for fork in reversed(forks)])\n"
        "forks[0].send_signal(signal.SIGKILL)",  # whose process id may be that of another process
        "None\n[-15, 3, 0]\n",
    ),
    "files": (
        "reading, writing = os.pipe()\n"
        "text = 'x' * 1_000_000\n"  # more than a packet of a socket holds
        "rank = start('write', files={7: writing}, TEXT='words', BIG=text)\n"
        "print(os.read(reading, 10), rank.wait())",
        "b'words' 1\n",
    ),
    "killed": (
        "rank = start('pause')\n"
        "os.kill(zygote_pid, signal.SIGKILL)\n"
        "os.waitpid(zygote_pid, 0)\n"
        "print(rank.wait())\n"  # the kernel has killed it
        "try:\n    start('pause')\nexcept OSError as error:\n    print(type(error).__name__)",
        "-9\nBrokenPipeError\n",
    ),
    "closed": ("zygote.close()\nprint(os.waitpid(zygote_pid, 0)[1])", "0\n"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_zygote(case) -> None:
    code, printed = CASES[case]
    assert run_script(SUPERVISOR + code, timeout_s=DEADLINE_S).check().stdout == printed


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are safe there alone")
