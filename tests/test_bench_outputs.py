"""Pictures and reports of the benchmarks, from figures that are given."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

import pytest

from lightning_ddp.cli import build_parser, main
from lightning_ddp.tools.bench.arguments import picture_path
from lightning_ddp.tools.bench.outputs import write_outputs
from lightning_ddp.tools.bench.pictures import draw_bars, draw_lines
from lightning_ddp.tools.bench.report import compare

SAMPLES = {
    size: {"shared_memory": [1.0, 1.1, 1.3], "gloo": [float(size), 2.0, 2.2]} for size in ("4", "64", "256")
}
COMPARISONS = {size: compare(rounds, reference="shared_memory") for size, rounds in SAMPLES.items()}


@pytest.mark.parametrize("draw", [draw_bars, draw_lines])
def test_a_picture_shows_every_subject_contender_and_ratio(draw, tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    draw(SAMPLES, COMPARISONS, path, unit="ms", title="the title")
    picture = path.read_text()  # matplotlib writes each text into a comment beside its outlines
    ratio = f"{COMPARISONS['4']['gloo'].ratio:.2f}"
    for text in ("shared_memory", "gloo", "the title", "ms", ratio):
        assert f"{text} -->" in picture or f"{text}) -->" in picture, text
    if draw is draw_bars:
        assert all(f"<!-- {size} -->" in picture for size in SAMPLES)


def test_one_round_and_one_subject_can_be_drawn(tmp_path: Path) -> None:
    samples = {"64": {"shared_memory": [1.0], "gloo": [2.0]}}
    comparisons = {"64": compare(samples["64"], reference="shared_memory")}
    for draw in (draw_bars, draw_lines):
        draw(samples, comparisons, tmp_path / "a.png", unit="ms", title="")
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_files_that_were_asked_for_are_written_and_no_other(tmp_path: Path) -> None:
    for json_path, plot in ((tmp_path / "a.json", None), (None, tmp_path / "a.pdf")):
        write_outputs(
            argparse.Namespace(json=json_path, plot=plot),
            benchmark="allreduce",
            unit="ms",
            settings={"rounds": 3},
            samples=SAMPLES,
            comparisons=COMPARISONS,
            extra={"more": 1},
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.pdf"]
    document = json.loads((tmp_path / "a.json").read_text())
    assert set(document) == {"benchmark", "environment", "settings", "unit", "summary", "samples"}
    assert document["samples"] == SAMPLES
    assert document["summary"]["more"] == 1
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize("name", ["step", "memory", "allreduce", "launch", "failures", "hooks", "channel"])
def test_every_benchmark_writes_a_report_and_a_picture(name: str, tmp_path: Path) -> None:
    options = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.svg")]
    args = build_parser().parse_args(["bench", name, *options])
    assert args.json == tmp_path / "a.json"
    assert args.plot == tmp_path / "a.svg"


def test_a_picture_that_cannot_be_drawn_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert picture_path("a.SVG") == Path("a.SVG")
    with pytest.raises(argparse.ArgumentTypeError, match=r"expected one of .png, .svg, .pdf, got 'a.txt'"):
        picture_path("a.txt")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(argparse.ArgumentTypeError, match="needs matplotlib: pip install matplotlib"):
        picture_path("a.png")


def test_hooks_without_links_and_tasks_have_nothing_to_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "hooks", "--links", "--tasks"]) == 1
    assert "give --links or --tasks" in capsys.readouterr().err
