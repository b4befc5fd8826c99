"""`bench launch`: several numbers of devices in one table, and what the import adds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_ddp.cli import main
from lightning_ddp.tools import ToolError
from lightning_ddp.tools.bench import launch
from lightning_ddp.tools.bench.launch import ALONE, WITH_OURS, added_ms, time_imports
from lightning_ddp.tools.scripts import PACKAGE_ROOT, compiled_package

FIRST_BATCH = """
import json, sys, time
given = json.loads(sys.argv[1])
print(f"FIRST_BATCH {time.time() + 10 * given['devices'] * (1 + (given['strategy'] == 'ddp')):.6f}")
"""


def test_each_number_of_devices_is_compared_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, path = tmp_path / "first_batch.py", tmp_path / "a.json"
    script.write_text(FIRST_BATCH)
    monkeypatch.setattr(launch, "SCRIPT", script)
    monkeypatch.setattr(launch, "CONTENDERS", {"custom_ddp": (), "run": ("-B",), "ddp": ()})
    options = ["--world-size", "2", "4", "--parts", "first_batch", "--rounds", "1", "--json", str(path)]
    assert main(["bench", "launch", *options]) == 0
    document = json.loads(path.read_text())
    for devices in (2, 4):
        (ours,), (forked,), (theirs,) = document["samples"][f"first batch, {devices} devices"].values()
        # the script itself takes a fraction of a second
        assert 10 * devices < forked < 20 * devices
        assert 10 * devices < ours < 20 * devices < theirs < 30 * devices
    assert "first batch, 4 devices  ddp" in capsys.readouterr().out


def test_the_first_round_of_imports_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(9.0, 99.0), (1.0, 1.25), (2.0, 2.75)])
    monkeypatch.setattr(launch, "_NAMESPACES", ("json", "no_such_name"))
    monkeypatch.setattr(launch, "_time_import", lambda name, package_root, timeout_s: next(times))
    samples = time_imports(2, "", timeout_s=1)
    assert samples == {"import json": {ALONE: [1.0, 2.0], WITH_OURS: [1.25, 2.75]}}
    assert added_ms(samples["import json"]) == 500.0
    assert next(times, None) is None


@pytest.mark.slow
def test_the_import_is_that_of_lightning_and_this_package_after_it() -> None:
    alone, both = launch._time_import("pytorch_lightning", str(PACKAGE_ROOT), 600.0)
    assert 0 < alone < both
    with pytest.raises(ToolError, match=r"(?s)import no_such_name failed .*ModuleNotFoundError"):
        launch._time_import("no_such_name", str(PACKAGE_ROOT), 60.0)


def test_the_measured_package_has_its_bytecode_and_is_removed() -> None:
    with compiled_package() as name:
        folder = Path(name)
        sources = list(folder.rglob("*.py"))
        assert len(sources) == len(list((PACKAGE_ROOT / "lightning_ddp").rglob("*.py")))
        assert len(list(folder.rglob("*.pyc"))) == len(sources)
        assert (folder / "lightning_ddp" / "py.typed").exists()
    assert not folder.exists()
