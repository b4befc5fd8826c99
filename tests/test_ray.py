"""Ray Train's workers train with this package: in an environment of its own, with a real local cluster."""

from __future__ import annotations

import json
import site
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.scripts import ROOT, environment

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]
RAY = "ray[train]==2.60.0"
SCRIPT = Path(__file__).parent / "harness" / "ray_script.py"
ORDERS = {
    "ours": {},
    "ray": {"strategy": "ray"},
    "raise": {"fault": "raise"},
    "kill": {"fault": "kill"},
}


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """How each training ended, in an interpreter that has Ray beside the packages of this one."""
    folder = tmp_path_factory.mktemp("ray")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    (there,) = folder.glob("venv/lib/python*/site-packages")
    (there / "beside.pth").write_text("\n".join([*site.getsitepackages(), str(ROOT)]))
    # pip is one of the packages beside; of the files of Ray few are imported
    install = [python, "-m", "pip", "install", "--quiet", "--no-compile", RAY]
    subprocess.run(install, check=True, timeout=240)
    command = [python, SCRIPT, folder, json.dumps(ORDERS)]
    options: Any = {"env": environment({}), "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, check=False, **options)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return json.loads((folder / "notes.json").read_text())


def test_workers_train_to_the_weights_of_ray_s_own_strategy(notes: dict[str, Any]) -> None:
    ours, rays = notes["ours"], notes["ray"]
    assert ours["world_size"] == rays["world_size"] == 2
    assert ours["weights"] == pytest.approx(rays["weights"], rel=1e-6)
    for note in (ours, rays):
        assert note["epochs"] == 2  # that the callback has reported
        assert note["checkpoint"]


@pytest.mark.parametrize(("fault", "how"), [("raise", "a picture is broken"), ("kill", "killed by a signal")])
def test_a_failed_worker_is_named_in_ray_s_error(notes: dict[str, Any], fault: str, how: str) -> None:
    """By the other worker's `PeerFailure`, as Ray shows the end of each worker."""
    error = notes[fault]["error"].partition("[Rank 1 Error Snippet]")[0]
    assert "rank 1 " in error
    assert how in error
