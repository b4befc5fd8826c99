"""README.md and the pages are true: code runs, commands and links lead somewhere, tables are complete."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from harness import run_script
from kubeflow_trainer_api import models as schemas

import lightning_ddp
from lightning_ddp.__main__ import build_parser
from lightning_ddp.averaging import available_averagers
from lightning_ddp.hooks import available_hooks
from lightning_ddp.launch.environment import nodes_of

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lightning_ddp"
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (
        *(ROOT / "README.md", ROOT / ".github" / "ARCHITECTURE.md", PACKAGE / "README.md"),
        *sorted(PACKAGE.glob("*/README.md")),
        ROOT / "examples" / "README.md",
        *sorted((PACKAGE / "docs").rglob("*.md")),
    )
}
FOR_USERS = sorted(page for page in PAGES if page.startswith("lightning_ddp/docs/"))
GUIDES = [page for page in FOR_USERS if "/guides/" in page]
README = PAGES["README.md"]
REFERENCE = "lightning_ddp/docs/reference/strategy.md"
TEST_COMMAND = "pip install -r tests/requirements.txt && pytest"
EXAMPLE_COMMAND = "pip install -r examples/requirements.txt && python examples/train_digits.py"


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block. `note` is the HTML comment before it: `needs: 8 GPUs`, `run with: torchrun ...`."""

    page: str
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
    Block(page=page, note=note, language=language, code=code)
    for page, text in PAGES.items()
    for note, language, code in re.findall(
        r"^(?:<!-- (.*?) -->\n)?```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL
    )
]
PYTHON_BLOCKS = [block for block in BLOCKS if block.language == "python"]
COMMANDS = [line for block in BLOCKS if block.language == "bash" for line in block.code.splitlines()]


def rows_of_table(page: str, heading: str) -> list[str]:
    """The names in the first column of the first table after a line that begins with `heading`."""
    after = re.split(rf"^{re.escape(heading)}", PAGES[page], maxsplit=1, flags=re.MULTILINE)[1]
    table = re.search(r"^\|.*\n\|[-|]+\n((?:\|.*\n)+)", after, re.MULTILINE)
    assert table, f"no table under {heading!r} in {page}"
    return [name for row in table[1].splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


def without_code(page: str) -> str:
    return re.sub(r"^```(?s:.*?)^```$", "", PAGES[page], flags=re.M)


@pytest.mark.parametrize("page", ["README.md", *FOR_USERS])
def test_a_page_is_neither_too_long_nor_too_wide_to_be_read(page):
    """Prose only: rows of tables and the targets of links are not what is read."""
    assert page != "README.md" or len(README.splitlines()) <= 170
    prose = re.sub(r"^\|.*$|\]\([^)\s]+\)", "", without_code(page), flags=re.M)
    assert [line for line in prose.splitlines() if len(line) > 100] == []


@pytest.mark.parametrize("page", FOR_USERS)
def test_a_page_for_users_has_one_title_no_skipped_level_and_tables_with_a_header_and_short_cells(page):
    text = without_code(page)
    levels = [len(marks) for marks in re.findall(r"^(#+) ", text, re.M)]
    assert (levels[0], levels.count(1)) == (1, 1)
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert re.findall(r"^[|\s]+\n\|[-|]+$", text, re.M) == []
    rows = re.sub(r"\]\([^)\s]+\)", "]", "\n".join(re.findall(r"^\|.*\|$", PAGES[page], re.M)))
    assert [cell for cell in rows.split("|") if len(cell.split()) > 25] == []


@pytest.mark.parametrize("page", GUIDES)
def test_a_guide_begins_with_a_block_that_runs_and_ends_with_where_to_read_on(page):
    first = next(block for block in BLOCKS if block.page == page)
    assert first in PYTHON_BLOCKS
    assert PAGES[page].index("```python") < PAGES[page].index("\n## ")
    assert re.findall(r"^## (.*)$", PAGES[page], re.M)[-1] == "See also"


def test_the_site_lists_every_page_and_there_is_nothing_else_beside_them():
    navigation = (ROOT / ".github" / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = sorted(f"lightning_ddp/docs/{page}" for page in re.findall(r": (\S+\.md)$", navigation, re.M))
    files = [path for path in (PACKAGE / "docs").rglob("*") if path.is_file()]
    assert listed == FOR_USERS == sorted(str(path.relative_to(ROOT)) for path in files)


def test_readme_says_for_how_many_ranks_results_have_the_same_bits():
    same_bits = re.findall(r"[^.|]*(?:bit\s+for\s+bit|[Bb]itwise)[^.|]*", README)
    assert same_bits
    assert [text for text in same_bits if "two ranks" not in text] == []


def test_every_block_is_found_and_its_note_understood():
    assert len(BLOCKS) == sum(text.count("```") for text in PAGES.values()) / 2
    assert PYTHON_BLOCKS
    assert [block.note for block in BLOCKS if block.note and not (block.num_gpus or block.launcher)] == []


@pytest.mark.parametrize("block", [b for b in PYTHON_BLOCKS if b.num_gpus <= torch.cuda.device_count()])
def test_a_python_block_runs(block):
    result = run_script(block.code, launcher=block.launcher).check()
    if block.launcher and "comm.run(" in block.code:
        # torchrun's workers do not buffer: the end of a line may come after the other rank's text
        printed = ("tensor([1., 1., 1.])", "tensor([0., 0.])", "tensor([1., 1.])")
        assert [result.stdout.count(text) for text in printed] == [2, 1, 1]
    elif block.launcher:
        weights = re.findall(r"rank (\d): first weight (-?\d+\.\d{6})", result.stdout)
        assert sorted(rank for rank, _ in weights) == ["0", "1"]
        assert weights[0][1] == weights[1][1]


@pytest.mark.parametrize("block", [b for b in PYTHON_BLOCKS if b.num_gpus > torch.cuda.device_count()])
def test_a_python_block_for_more_gpus_than_there_are_says_how_many_there_are(block):
    compile(block.code, block.page, "exec")
    result = run_script(block.code)
    assert result.returncode != 0
    last_line = result.stderr.strip().splitlines()[-1]
    assert re.search(rf"\b{block.num_gpus}\b.*\b{torch.cuda.device_count()}\b.*GPU", last_line), result.stderr


def test_the_two_commands_are_there_and_ci_runs_the_tests_by_that_command():
    assert COMMANDS[:2] == [EXAMPLE_COMMAND, TEST_COMMAND]
    assert TEST_COMMAND in (ROOT / ".ci" / "run").read_text()


def test_every_file_of_a_command_exists_and_the_package_has_every_command():
    words = [word for command in COMMANDS for word in shlex.split(command)]
    files = [word for word in words if re.search(r"/.+\.(py|txt)$", word)]
    ours = [command for command in COMMANDS if command.startswith("python -m lightning_ddp ")]
    assert files
    assert ours
    assert [name for name in files if not (ROOT / name).is_file()] == []
    for command in ours:
        build_parser().parse_args(shlex.split(command)[3:])


def test_the_tables_of_names_list_what_the_package_has():
    assert sorted(rows_of_table(REFERENCE, "## Public names")) == sorted(lightning_ddp.__all__)
    for guide, names, heading in (
        ("compression", available_hooks(), "A [communication hook]"),
        ("local-sgd", available_averagers(), "An [averager]"),
    ):
        assert sorted(rows_of_table(f"lightning_ddp/docs/guides/{guide}.md", "## Which one")) == sorted(names)
        chosen = rows_of_table("README.md", heading)  # the front page links to the guide, which has all
        assert len(chosen) > 4
        assert set(chosen) <= names.keys()


def test_batch_scripts_for_slurm_ask_for_the_tasks_that_their_trainer_needs():
    blocks = [block for block in BLOCKS if block.page.endswith("/slurm.md")]
    program = next(block for block in blocks if block in PYTHON_BLOCKS).code
    scripts = [block.code for block in blocks if block.code.startswith("#!/bin/bash")]
    assert len(scripts) == 2
    for script in scripts:
        asked = dict(re.findall(r"^#SBATCH --(\S+?)=(\S+)$", script, re.MULTILINE))
        command = re.findall(r"^srun (?:--\S+ )?(python .+)$", script, re.MULTILINE)[0]
        given = dict(re.findall(r"--(\S+) (\S+)", command))
        num_tasks = "1" if "lightning_ddp run" in command else given["devices"]
        assert (asked["nodes"], asked["ntasks-per-node"]) == (given["num-nodes"], num_tasks)
        assert asked["gpus-per-node"] == given["devices"]
        assert [name for name in given if f'"--{name}"' not in program] == []


def test_manifests_have_their_version_two_nodes_and_no_field_that_is_not_in_the_engine_s_schema():
    """The models are made of the schemas, and drop what these do not have."""
    loaded = [yaml.safe_load(block.code) for block in BLOCKS if "apiVersion:" in block.code]
    found = {manifest["kind"]: manifest for manifest in loaded}
    assert {kind: manifest["apiVersion"] for kind, manifest in found.items()} == {
        "TrainJob": "trainer.kubeflow.org/v1alpha1",
        "JobSet": "jobset.x-k8s.io/v1alpha2",
        "PyTorchJob": "kubeflow.org/v1",
    }
    train_job, job_set, pytorch_job = (found[kind]["spec"] for kind in ("TrainJob", "JobSet", "PyTorchJob"))
    for kind, model in (
        ("TrainJob", schemas.TrainerV1alpha1TrainJob),
        ("JobSet", schemas.JobsetV1alpha2JobSet),
    ):
        assert model.from_dict(found[kind]).to_dict() == found[kind]
    replicas = pytorch_job["pytorchReplicaSpecs"].values()
    for replica in replicas:
        pods = replica["template"]
        assert schemas.IoK8sApiCoreV1PodTemplateSpec.from_dict(pods).to_dict() == pods
    (job,) = job_set["replicatedJobs"]
    pod = job["template"]["spec"]
    num_nodes = (train_job["trainer"]["numNodes"], pod["completions"], sum(r["replicas"] for r in replicas))
    assert num_nodes == (2, 2, 2)
    (container,) = pod["template"]["spec"]["containers"]
    nodes, _ = nodes_of({variable["name"]: variable["value"] for variable in container["env"]})
    assert nodes.num_nodes.value == 2
    name = found["JobSet"]["metadata"]["name"]
    assert nodes.address == f"{name}-{job['name']}-0-0.{name}"  # a pod's host, of the headless service


def test_the_table_of_environment_variables_has_what_the_package_reads():
    page = "lightning_ddp/docs/reference/environment-variables.md"
    listed = {*rows_of_table(page, "## Set by you"), *rows_of_table(page, "## Set by launchers")}
    sources = [
        path.read_text() for path in PACKAGE.rglob("*.py") if "tools" not in path.relative_to(PACKAGE).parts
    ]
    found = {
        name
        for text in sources
        for pattern in (
            r'environ(?:\.get|\.pop)?[\[(]\s*"([A-Z_]+)"',
            r'"([A-Z_]+)" (?:not )?in os\.environ',
            r'_VARIABLE = "([A-Z_]+)"',
        )
        for name in re.findall(pattern, text)
    } - {"PYTHONPATH"}  # of the child's interpreter, which puts it back
    assert len(found) > 15
    assert found <= listed
    assert [name for name in listed if not any(re.search(rf"\b{name}\b", text) for text in sources)] == []


def headings(text: str) -> set[str]:
    """What GitHub makes of the headings of a page, as ends of links."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        path, _, heading = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        assert not heading or heading in headings(target.read_text()), link
