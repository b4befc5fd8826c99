"""Options and names that the benchmarks share; free of torch, so that ``--help`` is fast."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

MODEL_NAMES: Final = ("linear500", "linear16", "transformer6", "convbn40")
"""The models of `lightning_ddp.tools.bench.models`, in the order in which they are measured."""

OURS: Final = "ours"
"""`lightning_ddp.BucketedDDP` with its default arguments."""

OURS_AUTO: Final = "ours_auto"
"""`lightning_ddp.BucketedDDP` with ``bucket_cap_mb="auto"``: it has its plan after 31 steps of `--warmup`."""

TORCH_DEFAULT: Final = "torch_ddp"
"""torch's DistributedDataParallel with its default arguments."""

TORCH_VIEW: Final = "torch_ddp_view"
"""torch's DistributedDataParallel with ``gradient_as_bucket_view=True``."""

TORCH_FLAGS: Final = "torch_ddp_flags"
"""torch's DistributedDataParallel with every flag on that makes a static model's step faster."""

BARE: Final = "bare"
"""The module itself, on one rank."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A way to wrap a module."""

    is_ours: bool = False
    """Whether `lightning_ddp.BucketedDDP` wraps it; otherwise torch's DistributedDataParallel."""
    is_bare: bool = False
    """Whether nothing wraps it, for the overhead of a wrapper on one rank."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the wrapper besides the module and its device."""

    @property
    def is_torch(self) -> bool:
        """Whether torch's DistributedDataParallel wraps it."""
        return not (self.is_ours or self.is_bare)


CONTENDERS: Final[Mapping[str, Contender]] = {
    OURS: Contender(is_ours=True),
    OURS_AUTO: Contender(is_ours=True, flags={"bucket_cap_mb": "auto"}),
    TORCH_DEFAULT: Contender(),
    TORCH_VIEW: Contender(flags={"gradient_as_bucket_view": True}),
    TORCH_FLAGS: Contender(
        flags={"gradient_as_bucket_view": True, "static_graph": True, "batched_grad_copy": True}
    ),
    BARE: Contender(is_bare=True),
}
"""Name -> how it wraps; a new contender is one line here."""

PICTURE_SUFFIXES: Final = (".png", ".svg", ".pdf")
"""Formats of pictures."""

SHARED: Final = "shared_memory"
"""An all-reduce in memory that the ranks share."""

GLOO: Final = "gloo"
"""An all-reduce by gloo."""


def add_common_arguments(
    parser: argparse.ArgumentParser, *, rounds: int, timeout_s: float, world_size: object = 2
) -> None:
    """Declare the options that every benchmark has.

    Args:
        parser: The benchmark's own parser.
        rounds: Default number of rounds; in a round every contender is measured once.
        timeout_s: Default deadline in seconds.
        world_size: Default number of processes: a list, if several numbers can be given, to be measured in
            turns; None where ranks that torchrun has started are joined.
    """
    parser.add_argument(
        "--rounds",
        type=positive_int,
        default=rounds,
        metavar="N",
        help="measured rounds (default: %(default)s)",
    )
    parser.add_argument(
        "--world-size",
        "--devices",
        type=positive_int,
        nargs="+" if isinstance(world_size, list) else None,
        default=world_size,
        metavar="N",
        help="number of processes (default: 2" + (")" if world_size else ", or those of torchrun)"),
    )
    parser.add_argument(
        "--timeout-s",
        type=positive_float,
        default=timeout_s,
        metavar="S",
        help="seconds after which spawned processes are ended and the run fails (default: %(default)s)",
    )
    parser.add_argument(
        "--json", type=output_path, metavar="PATH", help="write all samples and the summary to this file"
    )
    add_plot_argument(parser)


def add_plot_argument(parser: argparse.ArgumentParser, *names: str) -> None:
    """Declare the option for a picture, also under further names."""
    parser.add_argument(
        "--plot",
        *names,
        type=picture_path,
        metavar="PATH",
        help="draw the figures (PNG, SVG or PDF; needs matplotlib)",
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of benchmarks that train the models of `lightning_ddp.tools.bench.models`."""
    parser.add_argument(
        "--models",
        nargs="+",
        choices=MODEL_NAMES,
        default=list(MODEL_NAMES),
        metavar="MODEL",
        help=f"models to measure, any of {', '.join(MODEL_NAMES)} (default: all)",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cpu with gloo, or cuda with NCCL and one GPU per process (default: %(default)s)",
    )


def add_contender_argument(parser: argparse.ArgumentParser, default: Sequence[str]) -> None:
    """Declare the option that chooses among `CONTENDERS`."""
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=tuple(CONTENDERS),
        default=list(default),
        metavar="NAME",
        help=f"what takes turns, any of {', '.join(CONTENDERS)} (default: {' '.join(default)})",
    )


def positive_int(text: str) -> int:
    """Parse an integer of at least 1.

    >>> positive_int("3")
    3

    Raises:
        argparse.ArgumentTypeError: If the text is no integer or is below 1.
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
        argparse.ArgumentTypeError: If the text is no number, or not above 0, or infinite.
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
        argparse.ArgumentTypeError: If there is none.
    """
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"expected a file, got {text!r}")
    return str(Path(text).resolve())


def output_path(text: str) -> Path:
    """Parse a file to write, and refuse one whose folder is missing before anything long has run.

    Raises:
        argparse.ArgumentTypeError: If the folder does not exist, or the path is itself a folder.
    """
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in an existing folder, got {text!r}")
    return path


def picture_path(text: str) -> Path:
    """Parse a picture to draw, and refuse one that could not be drawn before anything long has run.

    Raises:
        argparse.ArgumentTypeError: As `output_path`; if the suffix is none of `PICTURE_SUFFIXES`; or if
            matplotlib is not installed.
    """
    path = output_path(text)
    if path.suffix.lower() not in PICTURE_SUFFIXES:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(PICTURE_SUFFIXES)}, got {text!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("a picture needs matplotlib: pip install matplotlib")
    return path
