"""Compiles the simulated CUDA device, once for each version of its sources, of torch and of Python."""

from __future__ import annotations

import fcntl
import hashlib
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
REQUIREMENTS = HERE.parents[1] / "examples" / "requirements.txt"
_LIBRARIES = {"libsimcuda.so": ("operators", "device", "checker"), "simnccl.so": ("nccl",)}
"""Name -> the sources, which are compiled as one: most of the time goes into reading torch's headers."""
_LINKED_WITH = {"libsimcuda.so": [], "simnccl.so": ["-ltorch_python"]}
# -O0 halves the rest of the time
_COMPILE = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", "-Wall", "-DUSE_DISTRIBUTED", "-DUSE_C10D"]


class CannotBuild(Exception):
    """This machine cannot build the simulated device; the text says why."""


def build(cache: Path) -> Path:
    """The folder with the two libraries, compiled if no earlier call did.

    Args:
        cache: where to keep them.

    Raises:
        CannotBuild: no compiler, or a torch that the sources were not written for.
    """
    obstacle = _obstacle()
    if obstacle is not None:
        raise CannotBuild(f"the simulated CUDA device {obstacle}")
    folder = cache / _digest()
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two workers of pytest-xdist build once
        if not folder.exists():
            for other in filter(Path.is_dir, cache.iterdir()):
                shutil.rmtree(other)
            # it gets its name when it is whole: a build may be killed, and its compilers go on
            scratch = Path(tempfile.mkdtemp(dir=cache))
            _compile_all(scratch)
            scratch.rename(folder)
    return folder


def _obstacle() -> str | None:
    lines = REQUIREMENTS.read_text().split()
    wanted = next(line for line in lines if line.startswith("torch==")).partition("==")[2]
    found = metadata.version("torch")
    if found.partition("+")[0] != wanted:
        return f"is written for torch {wanted}, and this is {found}"
    if platform.system() != "Linux" or (_torch() / "lib/libtorch_cuda.so").exists():
        return "is for torch's build for the CPU on Linux"
    return None if shutil.which("g++") else "is compiled with g++, which is not there"


def _digest() -> str:
    key = hashlib.sha256(repr((metadata.version("torch"), platform.python_version(), _COMPILE)).encode())
    for source in sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h")]):
        key.update(source.read_bytes())
    return key.hexdigest()[:16]


def _torch() -> Path:
    return Path(sysconfig.get_paths()["purelib"], "torch")


def _compile_all(folder: Path) -> None:
    """All libraries at once."""
    include, libraries = _torch() / "include", _torch() / "lib"
    searched = [include, include / "torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
    options = [part for path in searched for part in ("-isystem", str(path))]  # no warnings of torch's
    linked = [f"-L{libraries}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{libraries}"]
    processes = []
    for library, (first, *more) in _LIBRARIES.items():
        options_of = [part for name in more for part in ("-include", str(HERE / f"{name}.cpp"))]
        command = [*_COMPILE, *options, *options_of, str(HERE / f"{first}.cpp"), "-o", str(folder / library)]
        command += [*_LINKED_WITH[library], *linked]
        processes.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    errors = [process.communicate()[1] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError("\n".join(error[-8000:] for error in errors))
