"""Options that the tools share, and how their values are checked; free of torch, so that `--help` is fast."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Final

MODEL_NAMES: Final = ("linear500", "linear16", "transformer6", "convbn40")
"""The models of `lightning_ddp.tools.models`, in the order in which they are measured."""

PICTURE_SUFFIXES: Final = (".png", ".svg", ".pdf")
"""Formats of pictures."""


def add_rounds_argument(parser: argparse.ArgumentParser, default: int) -> None:
    """Declare the number of rounds, in each of which every contender is measured once."""
    parser.add_argument(
        "--rounds", type=positive_int, default=default, metavar="N", help=f"measured rounds ({_DEFAULT})"
    )


def add_world_size_argument(parser: argparse.ArgumentParser, default: object = 2) -> None:
    """Declare the number of processes.

    Args:
        parser: of the command.
        default: a number; a list, if several can be given; None where ranks of torchrun are joined.
    """
    parser.add_argument(
        "--world-size",
        "--devices",
        type=positive_int,
        nargs="+" if isinstance(default, list) else None,
        default=default,
        metavar="N",
        help="number of processes (default: 2" + (")" if default else ", or those of torchrun)"),
    )


def add_timeout_argument(parser: argparse.ArgumentParser, default: float) -> None:
    """Declare the deadline."""
    parser.add_argument(
        "--timeout-s",
        type=positive_float,
        default=default,
        metavar="S",
        help=f"seconds after which spawned processes are ended and the run fails ({_DEFAULT})",
    )


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the kind of device."""
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help=f"cpu with gloo, or cuda with NCCL and one GPU per process ({_DEFAULT})",
    )


def add_models_argument(parser: argparse.ArgumentParser, default: tuple[str, ...] = MODEL_NAMES) -> None:
    """Declare the choice among `MODEL_NAMES`."""
    parser.add_argument(
        "--models",
        "--model",
        nargs="+",
        choices=MODEL_NAMES,
        default=list(default),
        metavar="MODEL",
        help=f"any of {', '.join(MODEL_NAMES)} (default: {' '.join(default)})",
    )


_DEFAULT = "default: %(default)s"


def positive_int(text: str) -> int:
    """Parse an integer of at least 1.

    >>> positive_int("3")
    3

    Raises:
        argparse.ArgumentTypeError: the text is no integer or is below 1.
    """
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return value


def positive_float(text: str) -> float:
    """Parse a finite number above 0.

    >>> positive_float("0.5")
    0.5

    Raises:
        argparse.ArgumentTypeError: the text is no number, or not above 0, or infinite.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


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
