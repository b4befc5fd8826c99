"""The wheel: what it holds, and that it runs from another folder than the clone's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import lightning_ddp
from lightning_ddp import _lightning

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 300


def call(*command: str, cwd: Path, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, **variables},
        text=True,
        capture_output=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_releases_of_lightning_that_were_malware_are_excluded() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    texts += re.findall(r"pip install '([^']+)'", str(_lightning._unsupported("a_module", "name")))
    bounds = [r.specifier for r in map(Requirement, texts) if r.name in ("lightning", "pytorch-lightning")]
    assert len(bounds) == 3
    assert [f"{v} in {bound}" for bound in bounds for v in ("2.6.2", "2.6.3") if v in bound] == []
    assert all(v in bound for bound in bounds for v in ("2.5.0", "2.6.1", "2.6.6"))


@pytest.mark.slow
def test_the_wheel_runs_an_example_and_has_the_groups_of_hydra(tmp_path) -> None:
    source = tmp_path / "source"  # a build leaves folders behind
    subprocess.run(["git", "clone", "-q", ROOT, source], check=True)
    call("-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(source), cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"lightning_ddp-{lightning_ddp.__version__}-")
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    assert list(installed.rglob("*.md")) == []
    assert not (installed / "lightning_ddp/docs").exists()
    assert (installed / "lightning_ddp/py.typed").exists()

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    place = {"PYTHONPATH": str(installed)}
    code = "import lightning_ddp; print(lightning_ddp.__file__)"
    assert call("-c", code, cwd=elsewhere, **place).strip().startswith(str(installed))
    example = str(ROOT / "examples/train_digits.py")
    assert "test accuracy" in call(example, "--epochs", "1", "--devices", "1", cwd=elsewhere, **place)
    app = elsewhere / "app.py"
    app.write_text(
        "import hydra\n\n\n"
        "@hydra.main(version_base=None, config_path=None)\n"
        "def main(cfg):\n    print(cfg.strategy._target_)\n\n\nmain()\n"
    )
    searched = "hydra.searchpath=[pkg://lightning_ddp.conf]"
    printed = call(str(app), searched, "+strategy=powersgd", cwd=elsewhere, **place)
    assert "CustomDDPStrategy" in printed
