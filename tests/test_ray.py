"""Ray Train's workers train with this package: in an environment of its own, with a real local cluster."""

from __future__ import annotations

import json
import site
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lightning_ddp

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]
RAY = "ray[train]==2.60.0"
SCRIPT = Path(__file__).parent / "harness" / "ray_script.py"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has Ray beside the packages of this one."""
    folder = tmp_path_factory.mktemp("ray")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    (there,) = folder.glob("lib/python*/site-packages")
    paths = [*site.getsitepackages(), str(Path(lightning_ddp.__file__).parents[1])]
    (there / "beside.pth").write_text("\n".join(paths))
    subprocess.run([python, "-m", "pip", "install", "--quiet", RAY], check=True, timeout=170)
    return python


def train(python: Path, folder: Path, **order: Any) -> dict[str, Any]:
    order = {"folder": str(folder), "workers": 2, "strategy": "ours", **order}
    done = subprocess.run(
        [python, SCRIPT, json.dumps(order)], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize("workers", [2, 4])
def test_workers_train_to_the_weights_of_ray_s_own_strategy(python: Path, workers: int, tmp_path) -> None:
    ours, rays = (train(python, tmp_path, workers=workers, strategy=strategy) for strategy in ("ours", "ray"))
    assert ours["world_size"] == rays["world_size"] == workers
    assert ours["weights"] == pytest.approx(rays["weights"], rel=1e-6)
    assert ours["epochs"] == rays["epochs"] == 2  # that the callback reported, each with a checkpoint
    assert ours["checkpoint"]
    assert rays["checkpoint"]


@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_a_failed_worker_is_named_in_ray_s_error(python: Path, fault: str, tmp_path) -> None:
    result = train(python, tmp_path, fault=fault)
    assert "rank 1" in result["error"]
    assert ("a picture is broken" if fault == "raise" else "SIGKILL") in result["error"]
