"""The examples, run as a user runs them."""

from __future__ import annotations

import re
from pathlib import Path

from harness import ScriptResult, run_script
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "train_digits.py"
ROWS = ("test accuracy", "training", "images/s", "processes", "strategy", "picture")


def run_example(*args: str, cwd: Path, fresh: bool = False) -> ScriptResult:
    return run_script(EXAMPLE, args, cwd=cwd, timeout_s=300, hidden_packages=(), fresh=fresh)


def table_of(result: ScriptResult) -> dict[str, str]:
    """The closing table, which has to be there once: a second rank that printed would repeat rows."""
    pattern = rf"^({'|'.join(map(re.escape, ROWS))}) {{2,}}(\S.*?)\s*$"
    found = re.findall(pattern, result.stdout, re.MULTILINE)
    assert [name for name, _ in found] == list(ROWS), result.stdout[-4000:]
    return dict(found)


def test_two_of_four_processes_are_killed_and_the_others_go_on(tmp_path):
    script = ROOT / "examples" / "kill_a_rank.py"
    result = run_script(script, cwd=tmp_path, timeout_s=300, hidden_packages=()).check()
    assert "rank 3 lost at step 60; 3 ranks go on" in result.stderr
    assert "rank 1 lost at step 120; 2 ranks go on" in result.stderr
    assert "240 steps, picture: kill_a_rank.png" in result.stdout
    require_picture(tmp_path / "kill_a_rank.png")
    assert len(script.read_text().splitlines()) < 80


def require_picture(path: Path) -> None:
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        assert picture.width >= 1000
        assert picture.height >= 500
        assert len(set(picture.convert("L").resize((200, 100)).tobytes())) > 20, "the picture is blank"


def test_two_processes_reach_97_percent_and_save_a_picture(tmp_path):
    result = run_example(cwd=tmp_path, fresh=True).check()
    table = table_of(result)
    assert float(table["test accuracy"].removesuffix(" %")) >= 97.0
    assert 0 < float(table["training"].removesuffix(" s")) < 60
    assert int(table["images/s"].replace(",", "")) > 0
    assert table["processes"] == "2"
    assert table["strategy"] == "custom_ddp"
    assert table["picture"] == "outputs/digits/digits.png"
    require_picture(tmp_path / table["picture"])
    assert "Warning" not in result.stderr
    assert "Warning" not in result.stdout


def test_spawned_processes_give_one_table_and_the_picture(tmp_path):
    args = ("--strategy", "custom_ddp_spawn", "--epochs", "1", "--output-dir", "elsewhere")
    table = table_of(run_example(*args, cwd=tmp_path).check())
    assert (table["processes"], table["strategy"]) == ("2", "custom_ddp_spawn")
    assert table["picture"] == "elsewhere/digits.png"
    require_picture(tmp_path / table["picture"])


def test_no_devices_is_an_error_that_says_so(tmp_path):
    result = run_example("--devices", "0", cwd=tmp_path)
    assert result.returncode != 0
    assert re.search(r"devices=0", result.stderr)
    assert "test accuracy" not in result.stdout
