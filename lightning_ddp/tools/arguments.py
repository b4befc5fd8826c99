"""Options that the tools share, and how their values are checked."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any, Final

from lightning_ddp.tools.models import MODEL_NAMES

PICTURE_SUFFIXES: Final = (".png", ".svg", ".pdf")
"""Formats of pictures."""


def add_shared(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Declare some of the options that several tools have: name -> default."""
    for name, default in defaults.items():
        names, options = _SHARED[name]
        if isinstance(default, list):
            text = options["help"].replace("%(default)s", " ".join(map(str, default)))
            options = {**options, "nargs": "+", "help": text}
        parser.add_argument(*names, default=default, **options)


def _number_above(text: str, kind: type, least: float, expected: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if not least <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return value


def positive_int(text: str) -> int:
    """Parse an integer of at least 1.

    >>> positive_int("3")
    3

    Raises:
        argparse.ArgumentTypeError: the text is no integer or is below 1.
    """
    return int(_number_above(text, int, 1, "an integer of at least 1"))


def positive_float(text: str) -> float:
    """Parse a finite number above 0.

    >>> positive_float("0.5")
    0.5

    Raises:
        argparse.ArgumentTypeError: the text is no number, or not above 0, or infinite.
    """
    return float(_number_above(text, float, 5e-324, "a number above 0"))


def existing_file(text: str) -> str:
    """Parse a file to read.

    Raises:
        argparse.ArgumentTypeError: there is none.
    """
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"expected a file, got {text!r}")
    return str(Path(text).resolve())


def output_path(text: str) -> Path:
    """Parse a file to write, and refuse one whose folder is missing before anything long has run.

    Raises:
        argparse.ArgumentTypeError: the folder does not exist, or the path is itself a folder.
    """
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in an existing folder, got {text!r}")
    return path


def picture_path(text: str) -> Path:
    """Parse a picture to draw, and refuse one that could not be drawn before anything long has run.

    Raises:
        argparse.ArgumentTypeError: as `output_path`; the suffix is none of `PICTURE_SUFFIXES`; or matplotlib
            is not installed.
    """
    path = output_path(text)
    if path.suffix.lower() not in PICTURE_SUFFIXES:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(PICTURE_SUFFIXES)}, got {text!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("a picture needs matplotlib: pip install matplotlib")
    return path


_DEFAULT = "(default: %(default)s)"
_SHARED: Final[dict[str, tuple[tuple[str, ...], dict[str, Any]]]] = {
    "rounds": (("--rounds",), {"type": positive_int, "metavar": "N", "help": f"measured rounds {_DEFAULT}"}),
    "world_size": (
        ("--world-size", "--devices"),
        {"type": positive_int, "metavar": "N", "help": "number of processes (default: 2, or torchrun's)"},
    ),
    "timeout_s": (
        ("--timeout-s",),
        {
            "type": positive_float,
            "metavar": "S",
            "help": f"seconds after which spawned processes are ended and the run fails {_DEFAULT}",
        },
    ),
    "device": (
        ("--device",),
        {
            "choices": ("cpu", "cuda"),
            "help": f"cpu with gloo, or cuda with NCCL and one GPU per process {_DEFAULT}",
        },
    ),
    "models": (
        ("--models", "--model"),
        {
            "choices": MODEL_NAMES,
            "metavar": "MODEL",
            "help": f"any of {', '.join(MODEL_NAMES)} {_DEFAULT}",
        },
    ),
}
"""Option -> its names and what argparse is told. A list as the default lets several values be given."""
