"""`bench launch`: scripts that are started and timed, several numbers of devices, what the import adds."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

import psutil
import pytest

from lightning_ddp.__main__ import main
from lightning_ddp.tools import ToolError
from lightning_ddp.tools.bench import runs
from lightning_ddp.tools.bench.runs import ALONE, WITH_OURS, time_first_batch, time_import

DEATH_DEADLINE_S = 10
FIRST_BATCH = """
import json, sys, time
given = json.loads(sys.argv[1])
print("noise")
print(f"FIRST_BATCH {time.time() + 100 * given['devices'] * (1 + (given['strategy'] == 'ddp')):.6f}")
"""


def test_each_number_of_devices_is_compared_by_itself_after_an_uncounted_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, path = tmp_path / "first_batch.py", tmp_path / "a.json"
    script.write_text(FIRST_BATCH)
    monkeypatch.setattr(runs, "SCRIPT", script)
    monkeypatch.setattr(runs, "STARTS", {"custom_ddp": (), "run": ("-B",), "ddp": ()})
    imports = iter([(9.0, 99.0), (1.0, 1.25), (2.0, 2.75)])
    names = (ALONE, WITH_OURS)
    monkeypatch.setattr(runs, "time_import", lambda timeout_s: dict(zip(names, next(imports), strict=True)))
    options = ["--world-size", "2", "4", "--rounds", "2", "--json", str(path)]
    assert main(["bench", "launch", *options]) == 0
    document = json.loads(path.read_text())
    for devices in (2, 4):
        samples = document["samples"][f"first batch, {devices} devices"]
        for name, factor in (("custom_ddp", 100), ("run", 100), ("ddp", 200)):
            # counted from the start of the script, which itself takes a fraction of a second
            assert len(samples[name]) == 2
            assert all(factor * devices < value < factor * devices + 60 for value in samples[name])
    assert document["samples"]["import"] == {ALONE: [1.0, 2.0], WITH_OURS: [1.25, 2.75]}
    assert document["summary"]["import_adds_ms"] == 500.0
    assert "first batch, 4 devices  ddp" in capsys.readouterr().out


@pytest.mark.slow
def test_the_import_is_that_of_lightning_and_this_package_after_it() -> None:
    found = time_import(600.0)
    assert 0 < found[ALONE] < found[WITH_OURS]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import sys; print('the reason'); sys.exit(3)", "(?s)ended with status 3.*the reason"),
        ("print('the reason')", "(?s)did not reach FIRST_BATCH.*the reason"),
    ],
)
def test_script_without_a_first_batch_is_an_error_with_its_output(
    source: str, message: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(source)
    with pytest.raises(ToolError, match=message):
        time_first_batch(script, {}, timeout_s=60)


def test_hanging_script_is_killed_with_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "child.pid"
    script = tmp_path / "script.py"
    script.write_text(
        "import json, pathlib, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "pathlib.Path(json.loads(sys.argv[1])['path']).write_text(str(child.pid))\n"
        "child.wait()\n"
    )
    with pytest.raises(ToolError, match=r"still running after 2 s"):
        time_first_batch(script, {"path": str(pid_file)}, timeout_s=2)
    child = int(pid_file.read_text())
    deadline = time.monotonic() + DEATH_DEADLINE_S
    with contextlib.suppress(psutil.NoSuchProcess):  # gone, which is as good as a zombie
        while psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the script's child outlived it"
