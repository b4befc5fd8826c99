"""README.md says what is true: its code runs, its commands exist, its tables list what the package has."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from harness import run_script

import lightning_ddp
from lightning_ddp.averaging import available_averagers
from lightning_ddp.cli import build_parser
from lightning_ddp.hooks import available_hooks

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
TEST_COMMAND = "pip install -r tests/requirements.txt && pytest"
EXAMPLE_COMMAND = "pip install -r examples/requirements.txt && python examples/train_digits.py"


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block. `note` is the HTML comment before it: `needs: 8 GPUs`, `run with: torchrun ...`."""

    language: str
    code: str
    note: str

    @property
    def num_gpus(self) -> int:
        needed = re.fullmatch(r"needs: (\d+) GPUs", self.note)
        return int(needed[1]) if needed else 0

    @property
    def launcher(self) -> list[str]:
        command = re.fullmatch(r"run with: torchrun (.+)", self.note)
        return ["-m", "torch.distributed.run", *shlex.split(command[1])] if command else []


BLOCKS = [
    Block(note=note, language=language, code=code)
    for note, language, code in re.findall(
        r"^(?:<!-- (.*?) -->\n)?```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL
    )
]
PYTHON_BLOCKS = [block for block in BLOCKS if block.language == "python"]
COMMANDS = [line for block in BLOCKS if block.language == "bash" for line in block.code.splitlines()]


def rows_of_table(heading: str) -> list[str]:
    """The first column of the table under a line that begins with `heading`."""
    table = re.search(rf"^{re.escape(heading)}.*?\n\n\|.*?\n\|[-|]+\n((?:\|.*\n)+)", README, re.MULTILINE)
    assert table, f"no table under {heading!r}"
    return [name for row in table[1].splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


def test_every_block_is_found_and_its_note_understood():
    assert len(BLOCKS) == README.count("```") / 2
    assert PYTHON_BLOCKS
    assert [block.note for block in BLOCKS if block.note and not (block.num_gpus or block.launcher)] == []


@pytest.mark.parametrize("block", [b for b in PYTHON_BLOCKS if b.num_gpus <= torch.cuda.device_count()])
def test_a_python_block_runs(block):
    result = run_script(block.code, launcher=block.launcher).check()
    if block.launcher and "all_gather_uneven" in block.code:
        # torchrun's workers do not buffer: the end of a line may come after the other rank's text
        assert [result.stdout.count(text) for text in ("tensor([1., 1., 1.])", "[(1,), (2,)]")] == [2, 2]
    elif block.launcher:
        weights = re.findall(r"rank (\d): first weight (-?\d+\.\d{6})", result.stdout)
        assert sorted(rank for rank, _ in weights) == ["0", "1"]
        assert weights[0][1] == weights[1][1]


@pytest.mark.parametrize("block", [b for b in PYTHON_BLOCKS if b.num_gpus > torch.cuda.device_count()])
def test_a_python_block_for_more_gpus_than_there_are_says_how_many_there_are(block):
    compile(block.code, "README.md", "exec")
    result = run_script(block.code)
    assert result.returncode != 0
    last_line = result.stderr.strip().splitlines()[-1]
    assert re.search(rf"\b{block.num_gpus}\b.*\b{torch.cuda.device_count()}\b.*GPU", last_line), result.stderr


def test_the_two_commands_are_there_and_ci_runs_the_tests_by_that_command():
    assert COMMANDS[:2] == [EXAMPLE_COMMAND, TEST_COMMAND]
    assert TEST_COMMAND in (ROOT / ".ci" / "run").read_text()


def test_every_file_of_a_command_exists():
    files = [
        word for command in COMMANDS for word in shlex.split(command) if re.search(r"/.+\.(py|txt)$", word)
    ]
    assert files
    assert [name for name in files if not (ROOT / name).is_file()] == []


def test_every_command_of_the_package_is_one_that_it_has():
    ours = [command for command in COMMANDS if command.startswith("python -m lightning_ddp ")]
    assert ours
    for command in ours:
        build_parser().parse_args(shlex.split(command)[3:])


def test_the_table_of_strategies_lists_the_registered_names():
    assert sorted(rows_of_table("Strategies (")) == sorted(lightning_ddp.available_variants())


def test_the_tables_of_hooks_and_averagers_list_the_catalogues():
    assert sorted(rows_of_table("Communication hooks")) == sorted(available_hooks())
    assert sorted(rows_of_table("Averagers")) == sorted(available_averagers())


def test_the_table_of_public_names_lists_what_the_package_exports():
    assert sorted(rows_of_table("Public names")) == sorted(lightning_ddp.__all__)
