"""Compiles the simulated CUDA device, each source once for each version of it, of torch and of Python."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
REQUIREMENTS = HERE.parents[1] / "examples" / "requirements.txt"
_LIBRARIES = {"libsimcuda.so": ("operators", "device", "checker"), "simnccl.so": ("nccl",)}
# most of the time goes into reading torch's headers; what does not, -O0 halves
_COMPILE = ["g++", "-std=c++20", "-O0", "-fPIC", "-Wall", "-DUSE_DISTRIBUTED", "-DUSE_C10D"]


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
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two workers of pytest-xdist build once
        objects = {name: cache / f"{name}-{_digest(name)}.o" for name in _sources()}
        _run_all({path: _compile(name) for name, path in objects.items() if not path.exists()})
        folder = cache / hashlib.sha256(repr(sorted(objects.items())).encode()).hexdigest()[:16]
        if not folder.exists():
            _forget_others(cache, objects)
            _link(folder, objects)
    return folder


def _sources() -> list[str]:
    return [name for names in _LIBRARIES.values() for name in names]


def _obstacle() -> str | None:
    lines = REQUIREMENTS.read_text().split()
    wanted = next(line for line in lines if line.startswith("torch==")).partition("==")[2]
    found = metadata.version("torch")
    if found.partition("+")[0] != wanted:
        return f"is written for torch {wanted}, and this is {found}"
    if platform.system() != "Linux" or (_torch() / "lib/libtorch_cuda.so").exists():
        return "is for torch's build for the CPU on Linux"
    return None if shutil.which("g++") else "is compiled with g++, which is not there"


def _digest(name: str) -> str:
    key = hashlib.sha256(repr((metadata.version("torch"), platform.python_version(), _COMPILE)).encode())
    for source in [HERE / f"{name}.cpp", *sorted(HERE.glob("*.h"))]:
        key.update(source.read_bytes())
    return key.hexdigest()[:16]


def _torch() -> Path:
    return Path(sysconfig.get_paths()["purelib"], "torch")


def _compile(name: str) -> list[str]:
    include = _torch() / "include"
    folders = [include, include / "torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
    searched = [part for folder in folders for part in ("-isystem", str(folder))]  # no warnings of torch's
    return [*_COMPILE, *searched, "-c", str(HERE / f"{name}.cpp")]


def _link(folder: Path, objects: dict[str, Path]) -> None:
    scratch = folder.with_suffix(".part")
    scratch.mkdir(exist_ok=True)
    torch = [f"-L{_torch() / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{_torch() / 'lib'}"]
    for library, names in _LIBRARIES.items():
        own = [str(objects[name]) for name in names]
        if library == "simnccl.so":
            own += ["-ltorch_python", f"-L{scratch}", "-lsimcuda", "-Wl,-rpath,$ORIGIN"]
        _run_all({scratch / library: ["g++", "-shared", *own, *torch]})
    scratch.rename(folder)


def _run_all(commands: dict[Path, list[str]]) -> None:
    """At once. A file gets its name when it is whole: a build may be killed, and its compilers go on."""
    parts = {path: path.with_name(f"{path.name}-{os.getpid()}.part") for path in commands}
    processes = {
        path: subprocess.Popen([*command, "-o", str(parts[path])], stderr=subprocess.PIPE, text=True)
        for path, command in commands.items()
    }
    errors = {path: process.communicate()[1] for path, process in processes.items()}
    failed = [path for path, process in processes.items() if process.returncode]
    for path, part in parts.items():
        if path in failed:
            part.unlink(missing_ok=True)
        else:
            part.rename(path)
    if failed:
        raise RuntimeError("\n".join(errors[path][-8000:] for path in failed))


def _forget_others(cache: Path, objects: dict[str, Path]) -> None:
    for path in cache.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.suffix in (".o", ".part") and path not in objects.values():
            path.unlink()
