"""The examples, run as a user runs them; `test_hydra_example.py` has the one with Hydra."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import ScriptResult, run_script
from PIL import Image

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
EXAMPLE = EXAMPLES / "train_digits.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
AS_NOTEBOOK = """
import json, sys
names = {"__name__": "__main__"}
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        exec("".join(cell["source"]), names)
"""
ROWS = ("test accuracy", "training", "images/s", "processes", "strategy", "picture")


def run_example(*args: str, cwd: Path) -> ScriptResult:
    return run_script(EXAMPLE, args, cwd=cwd, timeout_s=300, hidden_packages=()).check()


def table_of(result: ScriptResult) -> dict[str, str]:
    """The closing table, which has to be there once: a second rank that printed would repeat rows."""
    pattern = rf"^({'|'.join(map(re.escape, ROWS))}) {{2,}}(\S.*?)\s*$"
    found = re.findall(pattern, result.stdout, re.MULTILINE)
    assert [name for name, _ in found] == list(ROWS), result.stdout[-4000:]
    return dict(found)


@pytest.mark.slow
def test_two_of_four_processes_are_killed_and_the_others_go_on(tmp_path):
    script = EXAMPLES / "kill_a_rank.py"
    result = run_script(script, cwd=tmp_path, timeout_s=300, hidden_packages=()).check()
    assert "rank 3 was lost at step 60; training continues on 3 ranks" in result.stderr
    assert "rank 1 was lost at step 120; training continues on 2 ranks" in result.stderr
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
    result = run_example(cwd=tmp_path)
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


@pytest.mark.slow
def test_spawned_processes_give_one_table_and_the_picture(tmp_path):
    args = ("--strategy", "custom_ddp_spawn", "--epochs", "1", "--output-dir", "elsewhere")
    table = table_of(run_example(*args, cwd=tmp_path))
    assert (table["processes"], table["strategy"]) == ("2", "custom_ddp_spawn")
    assert table["picture"] == "elsewhere/digits.png"
    require_picture(tmp_path / table["picture"])


SHORT = {
    "minimal_ddp.py": r"weights add up to (-?\d+\.\d{6})\n.* add up to \1\n",
    "notebook.ipynb": r"trained in 2 processes",
    "cli.py": r"with CustomDDPStrategy in 2 processes",
    "powersgd.py": r"mean +85,002 numbers a step .*powersgd +2,718 numbers a step ",
    "local_sgd.py": r"step 20:[a-z ]+0\.0000 .*step 27:[a-z ]+0\.0*[1-9]\d* .*step 28:[a-z ]+0\.0000 ",
    "gan.py": r"\d+ steps of two optimizers.*(\n[ .:\-=+*#%@]{16}){8}\n",
}
"""Name -> what it prints that makes it an example of its subject."""
FIRST_TIER = ("minimal_ddp.py", "notebook.ipynb")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FIRST_TIER else pytest.mark.slow) for name in SHORT]
)
def test_a_short_example_learns_and_shows_its_subject(name):
    printed = run_short(name).check().stdout
    assert re.search(SHORT[name], printed, re.DOTALL), printed
    accuracies = re.findall(r"(\d+\.\d)% of the test digits", printed)
    assert accuracies or name == "gan.py"
    assert all(float(accuracy) > 85 for accuracy in accuracies), printed


def run_short(name: str) -> ScriptResult:
    path = EXAMPLES / name
    if name == "notebook.ipynb":
        return run_script(AS_NOTEBOOK, [str(path)], hidden_packages=("matplotlib",))
    return run_script(
        path,
        ("fit", "--config", str(path.with_suffix(".yaml"))) if name == "cli.py" else (),
        launcher=TORCHRUN if name == "minimal_ddp.py" else (),
        hidden_packages=("matplotlib",),
    )


def test_the_short_examples_are_short_and_all_are_in_the_list():
    files = [path for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb", ".yaml")]
    listed = re.findall(r"\[\w+\.\w+\]\((\w+\.\w+)\)", (EXAMPLES / "README.md").read_text())
    assert sorted(listed) == sorted(path.name for path in files)
    scripts = [path for path in files if path.suffix == ".py" and path != EXAMPLE]
    assert [path.name for path in scripts if len(path.read_text().splitlines()) > 80] == []
