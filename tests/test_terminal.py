"""What a process says on the terminal: for whom it waits, and the report of a failure."""

from __future__ import annotations

import io
import re

from harness import TRAINS, free_port, start_script

from lightning_ddp.launch.process_end import show_report
from lightning_ddp.supervise.failure_record import FailureRecord, Identity

SCRIPT = f"""{TRAINS}
import lightning_ddp.launch.process_end as terminal

terminal.LONG_S = 1.0
trainer(devices=1, num_nodes=2, max_steps=1).fit(BoringModel())
"""
MESSAGE = "the picture 4711.png of a folder of very many is broken, as is the one before it, and the next one"
TRACE = 'Traceback (most recent call last):\n  File "train.py", line 8, in f\n    raise ValueError\n'


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_node_that_waits_for_the_other_one_says_so_in_a_line() -> None:
    """The other way round: `test_launch`, a signal to a rank that waits for another node."""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    told = r"the store of the run at 127\.0\.0\.1:\d+ \(rank 0 opens it\)"
    line = rf"^lightning_ddp: rank 1 \(host \S+, pid \d+\) has waited 1 s for {told}$"

    with start_script(SCRIPT, env={**env, "NODE_RANK": "1"}) as early:
        early.wait_until(lambda: re.search(line, early.output(), re.MULTILINE) is not None)
        with start_script(SCRIPT, env={**env, "NODE_RANK": "0"}) as late:
            late.wait().check()
        assert early.wait().check().stderr.count("has waited") == 1


def report(stream: io.StringIO, message: str = MESSAGE) -> str:
    record = FailureRecord.of_identity(
        Identity(rank=11, node_rank=2, host="a-host-with-a-long-name-07", pid=60_910),
        message,
        exception_type="ValueError",
        exit_code=1,
        traceback=TRACE,
    )
    show_report(record, stream)
    return stream.getvalue()


def test_the_report_of_a_failure_fits_100_columns_of_a_terminal_and_is_red_there_alone(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    plain, coloured = report(io.StringIO()), report(Terminal())
    assert "\033" not in plain
    assert max(map(len, plain.splitlines())) > 100
    assert coloured.startswith("\033[1;31mlightning_ddp: rank 11 (")
    without = re.sub("\033\\[[\\d;]*m", "", coloured)
    assert max(map(len, without.splitlines())) <= 100
    assert without.split() == plain.split()
    monkeypatch.setenv("NO_COLOR", "1")
    assert report(Terminal()) == without
    assert report(Terminal(), "") != ""
