"""The layout of the package: imports only go down; named rooms touch Lightning and the environment."""

from __future__ import annotations

import re
import sys
import types
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch
from harness.processes import run_ranks

import lightning_ddp

PACKAGE = Path(lightning_ddp.__file__).parent
HOUSE = (
    ("_torch", "errors", "import_hook"),
    ("_lightning", "catalogue", "comm"),
    ("replicas", "shm", "supervise", "telemetry"),
    ("encoding", "hydra_jobs"),
    ("averaging", "hooks", "launch"),
    ("communication", "ddp"),
    ("replica_check",),
    ("elastic", "strategy_core"),
    ("fabric",),
    ("strategy",),
    ("callbacks", "trainer", "variants"),
    ("conf", "tools"),
    ("__init__", "__main__"),
)
"""The rooms, floor by floor, from the ground up."""
FLOORS = {room: floor for floor, rooms in enumerate(HOUSE) for room in rooms}
KNOWS_LIGHTNING = {
    "_lightning",
    "callbacks",
    "elastic",
    "fabric",
    "strategy",
    "strategy_core",
    "trainer",
    "variants",
    "launch",
    "tools",
}
READS_ENVIRONMENT = {"hydra_jobs", "launch", "tools"}
READS_VARIABLES_OF_TORCH = PACKAGE / "comm" / "nccl.py"
"""What the C++ of torch reads when it makes a group or a bucket has to be known there."""


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def imported_modules(path: Path) -> list[str]:
    assert not re.search(r"^ *from \.", FILES[path], re.MULTILINE), f"{path}: imports are absolute"
    return re.findall(r"^ *(?:from|import) ([\w.]+)", FILES[path], re.MULTILINE)


def import_edges() -> Iterator[tuple[Path, str]]:
    """Each import of the package by a file of it: the file, and the room that it imports."""
    for path in FILES:
        for module in imported_modules(path):
            if module == "lightning_ddp" or module.startswith("lightning_ddp."):
                parts = module.split(".")
                yield path, parts[1] if len(parts) > 1 else "__init__"


def test_every_file_has_a_floor() -> None:
    assert {room_of(path) for path in FILES} == set(FLOORS)


def test_imports_go_down() -> None:
    def is_up(path: Path, target: str) -> bool:
        here = room_of(path)
        if target == "__init__":  # the package itself
            return FLOORS[here] < FLOORS["tools"]
        return target != here and FLOORS[target] >= FLOORS[here]

    edges = [edge for edge in import_edges() if is_up(*edge)]
    assert [f"{path.relative_to(PACKAGE)} -> {target}" for path, target in edges] == []
    assert {room_of(path) for path, target in import_edges() if target == "tools"} == {"__main__", "tools"}


def test_the_tools_do_not_import_each_other() -> None:
    """What is shared lies beside `bench` and `doctor`."""
    tools = PACKAGE / "tools"
    for path in sorted(tools.rglob("*.py")):
        parts = path.relative_to(tools).parts
        here = parts[0] if len(parts) > 1 else ""
        for module in imported_modules(path):
            if module.startswith("lightning_ddp.tools."):
                target = module.split(".")[2]
                assert target == here or target not in ("bench", "doctor"), f"{path} imports {module}"


def test_the_engine_does_not_know_lightning() -> None:
    for path, target in import_edges():
        if target == "_lightning":
            assert room_of(path) in KNOWS_LIGHTNING, path
    for path in FILES:
        for module in imported_modules(path):
            if module.split(".")[0] in ("pytorch_lightning", "lightning", "lightning_fabric"):
                assert room_of(path) in ("_lightning", "tools"), path


def test_only_the_launcher_reads_the_environment() -> None:
    readers = {path for path, text in FILES.items() if re.search(r"\bos\.(?:environ|getenv)\b", text)}
    assert {room_of(path) for path in readers - {READS_VARIABLES_OF_TORCH}} <= READS_ENVIRONMENT


def test_modules_within_a_room_do_not_import_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for path in FILES:
        name = ".".join(("lightning_ddp", *path.relative_to(PACKAGE).with_suffix("").parts))
        graph[name.removesuffix(".__init__")] = {
            module for module in imported_modules(path) if module.startswith("lightning_ddp.")
        }
    assert graph.keys() <= {*TopologicalSorter(graph).static_order()}  # CycleError names the circle


ARCHITECTURE = (PACKAGE.parent / ".github" / "ARCHITECTURE.md").read_text()
ROOMS = sorted(folder for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists())
TRIPS = {  # how many files somebody has to open who follows one
    "How a gradient is reduced": 7,
    "The same on CUDA": 7,
    "How a child is started": 8,
    "What happens when a rank raises": 8,
    "How training continues without a lost rank": 8,
    "How a process joins": 8,
}


def named_files(page: str) -> set[str]:
    """Files of Python that a page names, `{a,b}` written out."""
    found = set()
    for text in re.findall(r"`([\w./{},]+)`", page):
        names = re.fullmatch(r"(.*)\{(.*)\}(.*)", text)
        parts = [f"{names[1]}{name}{names[3]}" for name in names[2].split(",")] if names else [text]
        found.update(part for part in parts if part.endswith(".py"))
    return found


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_the_page_of_a_room_names_its_files_and_no_others(room) -> None:
    page = (room / "README.md").read_text()
    assert len(page.splitlines()) <= 40  # notes for maintainers; what users read is in docs/
    table = page.partition("## Files in reading order")[2].partition("##")[0]
    assert [name for name in named_files(table) if not (list(room.rglob(name)))] == []
    files = {path.name for path in room.glob("*.py")} - {"__init__.py"}
    assert files - {Path(name).name for name in named_files(table)} == set()
    allowed = page.partition("\n## What it may import\n")[2].partition("\n## ")[0]
    used = {target for path, target in import_edges() if room in path.parents} - {room.name, "__init__"}
    unnamed = [name for name in used if f"`{name}`" not in allowed]
    assert unnamed == [] or allowed.startswith("Everything below")
    assert "\n## Promises\n" in page


@pytest.mark.parametrize(("trip", "most"), TRIPS.items(), ids=list(TRIPS))
def test_the_trips_of_the_architecture_page_are_short_and_lead_through_files_that_exist(trip, most) -> None:
    part = ARCHITECTURE.partition(f"## {trip}")[2].partition("## ")[0]
    named = named_files(part.partition("\n\nOn the way")[0])
    assert 5 < len(named) <= most
    folders = ("", "ddp")  # a file named alone lies beside the one before it
    assert [name for name in named if not any((PACKAGE / folder / name).exists() for folder in folders)] == []


def test_the_architecture_page_names_the_files_in_which_something_is_added() -> None:
    part = ARCHITECTURE.partition("## Where to add what")[2]
    answers = dict(re.findall(r"^- \*\*(.*?)\*\*(.*(?:\n  .*)*)", part, re.MULTILINE))
    for what in ("communication hook", "collective", "kind of failure", "way of starting processes"):
        named = re.findall(r"`([\w/]+(?:\.py|\.md|/))`", answers[f"A {what}"])
        assert named, what
        assert [name for name in named if not (PACKAGE / name).exists()] == []


def files_of_a_step(rank: int, world_size: int) -> list[str]:
    """Which files a synchronised step runs through, once the first steps are over."""
    model = lightning_ddp.BucketedDDP(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)))
    entered = set()

    def note(frame: types.FrameType, event: str, _: object) -> None:
        if Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            entered.add(str(Path(frame.f_code.co_filename).relative_to(PACKAGE)))

    for number in range(4):
        sys.setprofile(note if number == 3 else None)
        try:
            model(torch.ones(4, 8)).sum().backward()
        finally:
            sys.setprofile(None)
    return sorted(entered)


def test_the_gradients_trip_names_each_file_that_a_step_runs_through() -> None:
    page = ARCHITECTURE.partition("## How a gradient is reduced")[2]
    named = named_files(page.partition("\n## ")[0])
    for entered in run_ranks(files_of_a_step, 2):
        assert "ddp/reducer.py" in entered
        assert set(entered) - named == set()


def test_a_file_stem_is_in_one_room() -> None:
    stems = Counter(path.stem for path in FILES)
    assert {stem for stem, number in stems.items() if number > 1} == {"__init__", "base"}
