"""The reference has what the package has. `python tests/test_reference.py` writes its generated parts."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import lightning_ddp
from lightning_ddp import BucketedDDP, CustomDDPStrategy, averaging, callbacks, comm, errors, hooks
from lightning_ddp.__main__ import build_parser
from lightning_ddp.supervise.settings import RecoverySettings, ReplaceSettings, ReplicaCheckSettings
from lightning_ddp.telemetry.step_record import BucketRecord, StepRecord
from lightning_ddp.telemetry.timeline import lateness
from lightning_ddp.variants import BUILTIN

PACKAGE = Path(lightning_ddp.__file__).parent
REFERENCE = PACKAGE / "docs" / "reference"
PAGES = sorted(path.stem for path in REFERENCE.glob("*.md"))
PART = re.compile(r"(?<=<!-- generated: )([\w ]+)( -->\n\n)(.*?)(?=\n<!-- end -->)", re.DOTALL)
Lines = Iterator[str]
Option = tuple[str, object, str]
"""Name, default and description of an option."""

ON_FAILURE = {
    "stop": (None, "End the run on all ranks."),
    "shrink": (RecoverySettings, "Continue with the remaining ranks."),
    "replace": (
        ReplaceSettings,
        "Continue with the remaining ranks, and start a new process for each lost rank.",
    ),
}
REPLICA_CHECK = {
    "off": (None, "Compare nothing."),
    "warn": (ReplicaCheckSettings, "Print which rank, parameter and step."),
    "stop": (ReplicaCheckSettings, "End the run on all ranks."),
    "heal": (ReplicaCheckSettings, "Copy the state of the majority to the rank that has parted."),
}
SET_BY_THE_TRAINER = ("accelerator", "parallel_devices", "precision_plugin")


def described_arguments(owner: type) -> dict[str, str]:
    """What the section `Args:` of the docstring of a class says of each."""
    section = re.search(r"^Args:\n((?:[ ]{4}.*\n?|\n(?=[ ]{4}))+)", inspect.getdoc(owner), re.MULTILINE)
    entries = re.findall(r"^(\w+): (.*(?:\n[ ]+.*)*)", textwrap.dedent(section[1]), re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def arguments(owner: type, without: Iterable[str]) -> Iterator[Option]:
    """The arguments of a class; those of the wrapper are described by the wrapper alone."""
    texts = described_arguments(BucketedDDP) | described_arguments(owner)
    for name, parameter in inspect.signature(owner).parameters.items():
        if name not in without:
            yield name, parameter.default, texts[name]


def options(owner: type) -> Iterator[Option]:
    """The fields of a dataclass, as the strings below them describe them."""
    texts: dict[str, str] = {}
    for kind in filter(dataclasses.is_dataclass, reversed(owner.__mro__)):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        for statement, below in itertools.pairwise(definition.body):
            if isinstance(statement, ast.AnnAssign) and isinstance(below, ast.Expr):
                texts[statement.target.id] = " ".join(below.value.value.split())
    for field in dataclasses.fields(owner):
        if field.init:
            yield field.name, field.default, texts[field.name]


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Lines:
    for cells in (header, ("---",) * len(header), *rows):
        yield f"| {' | '.join(cells)} |".replace("| --- ", "|---").replace("--- |", "---|")


def described(header: tuple[str, ...], rows: Iterable[tuple[str, ...]], column: str, old: str) -> Lines:
    """A table with the first sentence of each text, and a list of the sentences after it.

    The texts are last in the rows. A `column` after them is written by hand: the `old` table has it.
    """
    by_hand = dict(re.findall(r"^\| ([^|]+) \|.*?([^|]*) \|$", old, re.MULTILINE)) if column else {}
    shown, further = [], []
    for *cells, text in rows:
        first, *more = re.split(r"(?<=\.) +(?=[A-Z`'\d])", text, maxsplit=1)
        shown.append((*cells, first.rstrip("."), *([by_hand.get(cells[0], "").strip()] if column else [])))
        further += [f"- {cells[0]}: {more[0]}"] if more else []
    yield from table((*header, "meaning", column) if column else (*header, "meaning"), shown)
    yield from ["", *further] if further else []


def written(value: object) -> str:
    """A value as it is written in Python, in a code span."""
    if isinstance(value, timedelta):
        return f"`timedelta(minutes={value.total_seconds() / 60:g})`"
    return "required" if value is dataclasses.MISSING else f"`{value!r}`".replace("'", '"')


def option_table(known: Iterable[Option], name: str = "option", column: str = "", old: str = "") -> Lines:
    rows = ((f"`{option}`", written(default), text) for option, default, text in known)
    return described((name, "default"), rows, column, old)


def groups(kinds: Mapping[str, tuple[type | None, str]], level: str = "##") -> Lines:
    """A section for each name of a group: what it is, and its options."""
    for name, (owner, description) in kinds.items():
        yield from [f"{level} {name}", "", description, ""]
        known = [] if owner is None else [*options(owner)]
        yield from [*option_table(known), ""] if known else []


def catalogue(owners: Mapping[str, type], descriptions: Mapping[str, str]) -> Lines:
    return groups({name: (owner, descriptions[name]) for name, owner in owners.items()})


def names(owner: Any, known: Iterable[str]) -> Lines:
    """Names with the first lines of their docstrings."""
    documented = {name: inspect.getdoc(getattr(owner, name)) or "" for name in known}
    return table(("name", "meaning"), ((f"`{n}`", text.partition("\n")[0]) for n, text in documented.items()))


def collectives() -> Lines:
    """Their names, and the directives that show the whole docstrings on the site."""
    yield from names(comm, comm.__all__)
    for name in comm.__all__:
        yield from ["", f"::: {getattr(comm, name).__module__}.{name}"]


def strategy_names() -> Lines:
    rows = []
    for name, (text, arguments) in sorted(BUILTIN.items()):
        given = ", ".join(f"{key}={written(value)[1:-1]}" for key, value in arguments.items())
        rows.append((f"`{name}`", f"`{given}`" if given else "none", text))
    return table(("name", "arguments", "meaning"), rows)


def error_classes() -> dict[str, type[BaseException]]:
    """The errors that a script can name in an `except` clause."""
    modules = (lightning_ddp, averaging, callbacks, comm, hooks)
    public = {name: getattr(module, name) for module in modules for name in module.__all__} | vars(errors)
    return {n: k for n, k in public.items() if isinstance(k, type) and issubclass(k, Exception)}


def builtin_bases(kind: type) -> str:
    bases = [base for base in kind.__mro__ if base.__module__ == "builtins"]
    nearest = [base for base in bases if not any(issubclass(b, base) for b in bases if b is not base)]
    return ", ".join(f"`{base.__name__}`" for base in nearest)


def error_table(old: str) -> Lines:
    rows = (
        (f"`{name}`", builtin_bases(kind), (inspect.getdoc(kind) or "").partition("\n")[0])
        for name, kind in error_classes().items()
    )
    return described(("class", "is also a"), rows, "what to do", old)


def commands(parser: argparse.ArgumentParser | None = None) -> Lines:
    """A section for each command: what it does, and its options."""
    parser = parser or build_parser()
    subcommands = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    own = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    if not subcommands:
        yield from [f"## {parser.prog.partition('lightning_ddp ')[2]}", "", parser.description or "", ""]
        yield from [*described(("option", "default"), map(command_option, own), "", ""), ""] if own else []
    for child in subcommands[0].choices.values() if subcommands else ():
        yield from commands(child)


def command_option(action: argparse.Action) -> tuple[str, str, str]:
    """Spelling, default and help text of an option or positional argument."""
    value = action.metavar or (f"{{{','.join(action.choices)}}}" if action.choices else "")
    spellings = [f"{name} {value}".strip() for name in action.option_strings or [""]]
    text = (action.help or "") % vars(action)
    stated = re.search(r" ?\(default: ([^()]*)\)", text)
    if stated:
        default, text = stated[1], text.replace(stated[0], "")
    elif action.nargs == 0:
        default = "off"
    else:
        is_required = not action.option_strings and action.nargs != "?"
        default = "required" if is_required else str(action.default or "none")
    return ", ".join(f"`{each or action.dest}`" for each in spellings), default, text


GENERATED: dict[str, Callable[[str], Lines]] = {
    "hooks": lambda old: catalogue(hooks.hook_options(), hooks.available_hooks()),
    "averagers": lambda old: catalogue(averaging.averager_options(), averaging.available_averagers()),
    "on_failure": lambda old: groups(ON_FAILURE, "###"),
    "replica_check": lambda old: groups(REPLICA_CHECK, "###"),
    "strategy names": lambda old: strategy_names(),
    "strategy arguments": lambda old: option_table(
        arguments(CustomDDPStrategy, SET_BY_THE_TRAINER), "argument", "page", old
    ),
    "errors": error_table,
    "commands": lambda old: commands(),
    "callbacks": lambda old: names(callbacks, callbacks.__all__),
    "collectives": lambda old: collectives(),
    "BucketedDDP": lambda old: names(BucketedDDP, own_names(BucketedDDP)),
}


def own_names(owner: type) -> list[str]:
    """Public methods and properties that the package itself defines; other tests may add some."""
    members = {name: getattr(member, "fget", member) for name, member in vars(owner).items()}
    ours = owner.__module__.partition(".")[0] + "."
    return [
        name
        for name, member in members.items()
        if not name.startswith("_") and getattr(member, "__module__", "").startswith(ours)
    ]


def wrapped(lines: Iterable[str]) -> str:
    """Lines as a page has them: prose and lists end at column 100."""
    indents = ((line, "  " if line.startswith("- ") else "") for line in lines)
    kept = (
        line
        if line.startswith("|")
        else textwrap.fill(line, 100, subsequent_indent=indent, break_on_hyphens=False)
        for line, indent in indents
    )
    return "\n".join(kept).strip() + "\n"


def generated(page: str) -> str:
    """A page with its generated parts as they have to be."""
    return PART.sub(lambda part: part[1] + part[2] + wrapped(GENERATED[part[1]](part[3])), page)


@pytest.mark.parametrize("page", PAGES)
def test_the_generated_parts_of_a_page_are_what_the_package_has(page):
    text = (REFERENCE / f"{page}.md").read_text()
    assert text == generated(text), "run `python tests/test_reference.py`"
    assert text.count("<!-- generated: ") == text.count("<!-- end -->") == len(PART.findall(text))
    assert [part for _, _, part in PART.findall(text) if re.search(r"\| *\|", part)] == []


def test_each_generated_part_is_on_one_page():
    parts = [name for page in PAGES for name, _, _ in PART.findall((REFERENCE / f"{page}.md").read_text())]
    assert sorted(parts) == sorted(GENERATED)


def logged_metrics() -> set[str]:
    """What the two places log that call `log_metrics`."""
    steps = [StepRecord(step=n, forward_start=100 * n, forward_end=1, backward_start=2) for n in range(2)]
    for record in steps:
        record.backward_end = record.comm_end = 30
        record.buckets = [BucketRecord(index=0, num_bytes=8, ready=3, launched=3, done=9)]
    found = set(callbacks.summarize(steps))
    for world_size in (1, 1000):
        late = callbacks._straggler_metrics(lateness({rank: [rank] for rank in range(world_size)}))
        found |= {name.replace("rank0", "rank<r>") for name in late}
    recoveries = (PACKAGE / "elastic" / "recovery.py").read_text()
    return {f"communication/{name}" for name in found} | set(re.findall(r'"(recovery/\w+)"', recoveries))


def test_the_table_of_metrics_lists_what_is_logged():
    logging = [path for path in PACKAGE.rglob("*.py") if "logger.log_metrics(" in path.read_text()]
    places = {str(path.relative_to(PACKAGE)) for path in logging}
    assert places == {"callbacks.py", "elastic/recovery.py"}
    listed = re.findall(r"^\| `([^`]+)` \|", (REFERENCE / "metrics.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(logged_metrics())


if __name__ == "__main__":
    for path in REFERENCE.glob("*.md"):
        path.write_text(generated(path.read_text()))
