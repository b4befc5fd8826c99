"""Simulates CUDA devices on the CPU; reports races, early frees and waits of the host, with the Python line.

Importing this package changes nothing. `start(build)`, called before torch is imported, makes torch (CPU
build) believe in two CUDA devices; `simcuda.ranks` runs functions of a test on such ranks.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import ctypes
import functools
import importlib
import importlib.util
import os
import sys
import sysconfig
import threading
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

KINDS = ("race", "free", "sync", "nccl")


class Report(NamedTuple):
    """One thing that the checker found."""

    kind: str
    """`race`, `free` (freed while another stream may use it), `sync` (the host waited for the device), or
    `nccl` (a use after an abort)."""
    text: str
    stack: traceback.StackSummary
    """Of Python, the innermost frame last; that of the main thread where a thread of C++ did it."""

    @property
    def place(self) -> str:
        """The line that did it: the innermost one of the package, otherwise of the test, otherwise of all."""
        package = _package()
        ours = [frame for frame in self.stack if frame.filename.startswith(package)]
        of_test = [frame for frame in self.stack if not frame.filename.startswith(_NOT_OF_TESTS)]
        frame = (ours or of_test or self.stack)[-1]
        file = frame.filename.removeprefix(package) if ours else os.path.basename(frame.filename)
        return f"{file}:{frame.lineno} {frame.name}"

    @property
    def file(self) -> str:
        """The innermost file, whoever has written it, besides those of the simulation."""
        return [frame.filename for frame in self.stack if not frame.filename.startswith(_HERE)][-1]


_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PATHS = sysconfig.get_paths()
_NOT_OF_TESTS = (_PATHS["purelib"] + os.sep, _PATHS["stdlib"] + os.sep, _HERE)


@functools.cache
def _package() -> str:
    found = importlib.util.find_spec("lightning_ddp")
    assert found is not None
    assert found.origin is not None
    return os.path.dirname(found.origin) + os.sep


report: list[Report] = []
"""What the checker found in this process."""

_library: Any = None
_nccl: Any = None
_kept: list[Any] = []


def start(build: Path) -> None:
    """Registers the simulated devices with torch, which must not have been imported.

    Args:
        build: the folder that `simcuda.build.build` returned.
    """
    global _library, _nccl
    if "torch" in sys.modules:
        raise RuntimeError("torch was imported before the simulated devices were registered")
    for name in ("libc10.so", "libtorch_cpu.so"):  # what the device's library is linked with
        folder = os.path.join(sysconfig.get_paths()["purelib"], "torch", "lib")
        ctypes.CDLL(os.path.join(folder, name), mode=ctypes.RTLD_GLOBAL)
    _library = ctypes.CDLL(str(build / "libsimcuda.so"), mode=ctypes.RTLD_GLOBAL)
    callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)(_append)
    _library.simcuda_set_callback(callback)
    runtime = importlib.import_module("simcuda.runtime")
    sys.meta_path.insert(0, runtime.Installer(_library))
    importlib.import_module("torch.distributed")
    spec = importlib.util.spec_from_file_location("simnccl", build / "simnccl.so")
    assert spec is not None
    assert spec.loader is not None
    _nccl = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(_nccl)
    runtime.install_nccl(_nccl)
    runtime.install_storages()
    atexit.register(_library.simcuda_set_callback, None)  # what is freed later has nobody to tell
    _kept.extend([callback, runtime.install_operators()])


# ---- reports


def _append(kind: bytes, text: bytes) -> None:
    frame = sys._getframe().f_back
    if frame is None:  # a thread of C++, such as that of a backward pass: what the program does meanwhile
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
    stack.reverse()
    report.append(Report(kind.decode(), text.decode(), stack))
    if kind == b"sync" and sys.modules["torch"].cuda.get_sync_debug_mode():
        warnings.warn("called a synchronizing CUDA operation", stacklevel=2)  # the words of CUDA's


def summary(kinds: Sequence[str] = KINDS, reports: Iterable[Report] | None = None) -> list[str]:
    """One line for each place and text of what `reports` (`report`) holds."""
    found = [r for r in (report if reports is None else reports) if r.kind in kinds]
    seen = collections.Counter((r.kind, r.text.split(" (")[0], r.place) for r in found)
    return [f"{n:4d} x {kind}: {text}  at {place}" for (kind, text, place), n in seen.items()]


def counted(whole: Sequence[Report], steady: Sequence[Report]) -> dict[str, collections.Counter[str]]:
    """Kind -> text and place -> how often: `sync` in the steady steps alone, the others in the whole run."""
    return {
        kind: collections.Counter(
            f"{found.text} at {found.place}, in {found.file}"
            for found in (steady if kind == "sync" else whole)
            if found.kind == kind
        )
        for kind in KINDS
    }


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """For a test that looks at the devices itself: nothing is reported, and nothing counts as a wait."""
    _library.simcuda_set_enabled(0)
    try:
        yield
    finally:
        _library.simcuda_set_enabled(1)


# ---- networks that break


def break_groups(message: str) -> None:
    """Ends all collectives of this process that have not ended, and later ones, with an error of NCCL's kind.

    NCCL's watchdog finds such an error and by default ends the process; here the works raise it, no more.
    """
    _nccl.break_groups(message)
