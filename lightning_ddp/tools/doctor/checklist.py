"""`doctor --verify --full`: the checklist of a first day on hardware, item by item, on each backend.

An item answers PASS, FAIL or NOT HERE, with a figure. Items share runs: a drill with process groups, and the
trials of `doctor --verify`. Others start a script in which a rank fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from lightning_ddp.comm import nccl
from lightning_ddp.comm.group import Group, sibling_group
from lightning_ddp.comm.teardown import abort_groups, destroy_groups, retire_groups, wait_for_aborts
from lightning_ddp.errors import LightningDDPError
from lightning_ddp.hydra_jobs.jobs import restore
from lightning_ddp.launch.rendezvous import join_default_group
from lightning_ddp.telemetry.timeline import load_folder
from lightning_ddp.tools import ToolError
from lightning_ddp.tools.command_line import draw_bars, progress_bar, save_panels
from lightning_ddp.tools.doctor.machine import Finding, Level, gather_facts, within
from lightning_ddp.tools.doctor.trials import HOST_WAITS, Verdict, beginning_with, store_verdict, trials_of
from lightning_ddp.tools.doctor.verify import Settings, fail_a_rank, shorten, stop_ranks, try_in_ranks
from lightning_ddp.tools.ranks import RankContext, run_ranks, synchronize
from lightning_ddp.tools.recorded_run import host_advice, record_steps
from lightning_ddp.tools.scripts import RUN

_STALL_S: Final = 4.0
_MOST_DRAWN: Final = 60
_MOMENTS: Final = ("idle", "all-reduce", "backward", "optimizer")
_REPLACED: Final = {"on_failure": "replace", "num_steps": 600, "step_s": 0.05, "launcher": RUN}
_FORENSICS: Final = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "NCCL_DEBUG": "WARN"}
_WRONG: Final = {
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "torch loses device_id with it"),
    "TORCH_INCLUDE_STACK_TRACE": ("TRUE", "stacks need the interpreter's lock, and may deadlock"),
}
"""Variables with values that break something, and what."""

_LIMIT_S: Final = 20.0
_NUM_KERNELS: Final = 200
_NUM_CYCLES, _CYCLES_WITHIN_S, _MOST_GROWTH_MIB = 50, 20.0, 64.0


# ---------------------------------------------------------------------- the drill, in the ranks


class Drill:
    """Test of aborts and new process groups. All ranks call its methods in the same order."""

    def __init__(self, context: RankContext) -> None:
        self._rank, self._size, self._device = context.rank, context.world_size, context.device
        self._store: Any = context.store
        self._backend = dist.get_backend()
        self._num_groups = 0
        self._groups: list[Group] = []

    def begin(self, verdict: Verdict) -> None:
        """Create the default process group and check an all-reduce; put the time of both into `verdict`."""
        start = time.monotonic()
        self._num_groups += 1
        group = join_default_group(
            self._backend,
            dist.PrefixStore(f"drill/{self._num_groups}", self._store),
            rank=self._rank,
            world_size=self._size,
            timeout=timedelta(seconds=_LIMIT_S),
            device=torch.device("cpu") if self._backend == "gloo" else self._device,
        )
        self._groups = [Group(group)]
        self._check_sums(verdict)
        verdict.figure = f"group and first all-reduce in {time.monotonic() - start:.2f} s"

    def communicate(self, verdict: Verdict) -> None:
        """Test all-reduces on two communicators in turns, and messages between neighbors in a ring."""
        rank, size = self._rank, self._size
        self._groups.append(sibling_group(self._groups[0], self._device))
        for _ in range(10):
            self._check_sums(verdict)
        own = torch.full((1000,), float(rank), device=self._device)
        found, source = torch.empty_like(own), (rank - 1) % size
        ring = [dist.P2POp(dist.isend, own, (rank + 1) % size), dist.P2POp(dist.irecv, found, source)]
        for work in dist.batch_isend_irecv(ring) if size > 1 else ():
            work.wait()
        if size > 1 and float(found[0]) != source:
            verdict.fail(f"received {float(found[0]):g} from rank {source}")
        verdict.figure = f"20 all-reduces on 2 communicators in turns, a ring of {size} ranks"

    def abort(self, verdict: Verdict) -> None:
        """Abort all groups while their collectives wait for rank 0; put the abort's time into `verdict`."""
        tensor = torch.ones(1000, device=self._device)
        for _ in range(_NUM_KERNELS if tensor.is_cuda else 0):
            tensor = tensor * 1.0
        works = [group.all_reduce(tensor.clone()) for group in self._groups if self._rank]
        self._meet("abort")
        start = time.monotonic()
        self._abort()
        verdict.figure = f"{len(self._groups)} groups in {time.monotonic() - start:.2f} s"
        for work in works if self._backend == "gloo" else ():
            try:
                within(_LIMIT_S, "a collective that was aborted", work.wait)
                verdict.fail("a collective that was aborted has ended without an error")
            except RuntimeError:  # as it should
                continue

    def rejoin(self, verdict: Verdict) -> None:
        """Destroy the aborted groups and create the default group again; put both times into `verdict`."""
        start = time.monotonic()
        retire_groups(group.process_group for group in self._groups)
        self._groups = []
        within(_LIMIT_S, "leaving the groups after their abort", destroy_groups)
        left_s = time.monotonic() - start
        self.begin(verdict)
        verdict.figure = f"left in {left_s:.2f} s, {verdict.figure}"

    def repeat(self, verdict: Verdict) -> None:
        """Abort all groups and create the default one again, many times; fail `verdict` if memory grows."""
        start, used = time.monotonic(), [self._used_mib()]
        while len(used) <= _NUM_CYCLES:
            key = f"again/{len(used)}"
            if self._rank == 0:  # one decides for all
                self._store.set(key, str(time.monotonic() - start < _CYCLES_WITHIN_S))
            if self._store.get(key) != b"True":
                break
            self._meet(f"cycle/{len(used)}")
            self._abort()
            self.rejoin(verdict)
            used.append(self._used_mib())
        growth, num_cycles = used[-1] - used[min(5, len(used) - 1)], len(used) - 1
        if growth > _MOST_GROWTH_MIB:
            verdict.fail(f"memory grew by {growth:.0f} MiB in {num_cycles} recoveries of groups")
        seconds = (time.monotonic() - start) / max(1, num_cycles)
        verdict.figure = f"{num_cycles} recoveries of groups, {seconds:.2f} s each, memory {growth:+.0f} MiB"

    def _abort(self) -> None:
        abort_groups()
        within(_LIMIT_S, "the abort", wait_for_aborts)
        within(_LIMIT_S, "work on the device", lambda: synchronize(self._device))

    def _meet(self, key: str) -> None:
        """Wait through the store, as groups may be aborted, until all ranks have called this with `key`."""
        self._store.set(f"{key}/{self._rank}", "")
        self._store.wait([f"{key}/{rank}" for rank in range(self._size)])

    def _check_sums(self, verdict: Verdict) -> None:
        expected = sum(range(self._size))
        for group in self._groups:
            total = torch.full((1000,), float(self._rank), device=self._device)
            group.wait(group.all_reduce(total), total.device)
            if float(total[0]) != expected:
                verdict.fail(f"the sum of the ranks is {float(total[0]):g}, expected {expected}")

    def _used_mib(self) -> float:
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            return (total - free) / 2**20
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


DRILLS: Final = ("begin", "communicate", "abort", "rejoin", "repeat")
"""Parts of the drill in running order: methods of `Drill`."""


def run_drill(context: RankContext, names: Sequence[str]) -> None:
    """Run the named methods of `Drill` on this rank; write each verdict to the store at once.

    Collective: all ranks must call it.
    """
    drill = Drill(context)
    destroy_groups()
    context.advance()
    for name in names:
        verdict = Verdict()
        getattr(drill, name)(verdict)
        store_verdict(context, name, verdict)


# ---------------------------------------------------------------------- a backend on this machine


class _NotHere(Exception):
    """Exception of a checklist item that cannot be checked on this machine; its result is NOT HERE."""


class _Site:
    """A backend to check on this machine, with the results of runs that several items share."""

    def __init__(self, backend: str, settings: Settings) -> None:
        self.backend = backend
        self.settings, self.size = settings, settings.world_size
        self.has_nccl = nccl.is_nccl(backend)
        self.facts = gather_facts(os.environ, rank=0, local_rank=0)

    @cached_property
    def drilled(self) -> dict[str, Finding]:
        return {found.check: found for found in try_in_ranks(self.settings, DRILLS, run_drill)}

    def tried(self, names: Sequence[str], variables: Mapping[str, str] = {}) -> str:
        """Run trials in new processes; return one's text, or the number of several; raise if one fails."""
        with _set(variables):
            found = list(try_in_ranks(self.settings, names))
        failed = [f"{finding.check}: {finding.message}" for finding in found if finding.level == "FAIL"]
        if failed or len(found) < len(names):
            raise ToolError("; ".join(failed))
        return found[0].message if len(found) == 1 else f"{len(found)} trials"


@contextmanager
def _set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes that start in this context; restore them at its end."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        restore(before)


# ---------------------------------------------------------------------- the items


def _versions(site: _Site) -> str:
    driver = "none"
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        driver = answer.partition("\n")[0].strip() or driver
    return f"torch {torch.__version__}, {site.backend}, NCCL {site.facts['nccl']}, driver {driver}"


def _nccl_version(site: _Site) -> str:
    if not site.has_nccl:
        raise _NotHere("no NCCL")
    found: str = site.facts["nccl"]
    problem = nccl.version_problem([int(part) for part in found.split(".")[:3]])
    if problem is not None:
        raise ToolError(f"NCCL {found}: {problem}")
    return found


def _variable(site: _Site, name: str) -> str:
    value, (wrong, why) = os.environ.get(name, "not set"), _WRONG[name]
    if value.upper() in (wrong, "1"):
        raise ToolError(f"{name}={value}: {why}. Unset it")
    missing = [f"{name}={value}" for name, value in _FORENSICS.items() if name not in os.environ]
    return f"{name} {value}; for a report of a hang also set {' '.join(missing) or 'nothing'}"


def _watchdog(site: _Site) -> str:
    right = nccl.WATCHDOG_VARIABLES
    changed = {name: os.environ[name] for name in right if os.environ.get(name, right[name]) != right[name]}
    if changed:
        raise ToolError(f"{changed}: NCCL's watchdog would end a process that loses a peer. Unset them")
    return f"set with on_failure: {nccl.WATCHDOG_VARIABLES}"


def _drilled(site: _Site, name: str) -> str:
    found = site.drilled.get(name)
    if found is None or found.level == "FAIL":
        raise ToolError("not run, as the drill had stopped before" if found is None else found.message)
    return found.message


def _hangs(site: _Site) -> str:
    raise _NotHere("an abort cannot be made to hang; a run ends 20 s after one that does, and says so")


def _trials(site: _Site, *, is_parity: bool) -> str:
    left_out = {"step time"} if site.has_nccl else {"step time", HOST_WAITS}
    names = [name for name in trials_of(site.settings.device.partition(":")[0]) if name not in left_out]
    return site.tried([name for name in names if name.startswith("gradients") == is_parity])


def _step_time(site: _Site) -> str:
    values = ("0", "1") if site.has_nccl else ("0",)
    figures = [site.tried(["step time"], {nccl.MEMORY_VARIABLE: value}) for value in values]
    return f"; with {nccl.MEMORY_VARIABLE}=1 ".join(figures)


def _host_time(site: _Site) -> str:
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"device": site.settings.device, "timeout_s": 4 * site.settings.timeout_s}
        run_ranks(record_steps, "convbn40", folder, 20, world_size=site.size, **options)
        advice = host_advice(load_folder(Path(folder))[0].steps)
    num_nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    return f"convbn40, {num_nodes} NUMA nodes: {advice or 'the GPU does not wait for the host'}"


def _slow_link(site: _Site) -> str:
    if not site.has_nccl or site.size < 2:
        raise _NotHere("needs NCCL and two GPUs")
    return site.tried(["hook fp16", "hook int8", "hook powersgd"], {"NCCL_P2P_DISABLE": "1"})


def _stops(site: _Site, fault: str = "kill", **more: Any) -> str:
    if site.size < 2:
        raise _NotHere("one rank has no peers")
    return stop_ranks(site.settings, fault, **more)


def _continues(site: _Site, *faults: Mapping[str, Any], least: int = 2, num_regroups: int = 1) -> str:
    """Run a training script with each fault; return times to the next step; raise unless others train on."""
    if site.size < least:
        raise _NotHere(f"needs {least} ranks")
    figures = []
    for given in faults:
        found = fail_a_rank(site.settings, **{"fault": "kill", "on_failure": "shrink", **given})
        if found.exit_code or found.num_left or not found.resumed_s or len(found.regroups_s) < num_regroups:
            raise ToolError(
                f"{given}: exit code {found.exit_code}, {len(found.regroups_s)} of {num_regroups} recoveries,"
                f" {found.num_left} processes left, raised {found.raised or 'nothing'}"
            )
        figures.append(f"{given.get('moment', 'forward')} {found.resumed_s:.2f} s")
    return f"next step after: {', '.join(figures)}"


def _replaces(site: _Site) -> str:
    if site.settings.device == "cuda:0":
        raise _NotHere("ranks that share a GPU are nodes, which are not replaced")
    return _continues(site, _REPLACED, num_regroups=2)


def _nodes(site: _Site) -> str:
    if site.settings.device != "cpu":
        raise _NotHere("start a script on two nodes, or in two containers, by hand")
    return _stops(site, function="train_on_nodes", num_nodes=site.size, devices=1)


ITEMS: Final[Mapping[str, Callable[[_Site], str]]] = {
    "1 versions": _versions,
    "2 NCCL version": _nccl_version,
    "3 debug level": partial(_variable, name="TORCH_DISTRIBUTED_DEBUG"),
    "4 watchdog": _watchdog,
    "5 forensics": partial(_variable, name="TORCH_INCLUDE_STACK_TRACE"),
    "6 abort of all groups": partial(_drilled, name="abort"),
    "7 nothing destroyed after it": partial(_drilled, name="rejoin"),
    "8 abort that hangs": _hangs,
    "9 death before the group": partial(_stops, moment="start"),
    "10 abort in backward": partial(_stops, moment="backward"),
    "11 messages of pairs": partial(_drilled, name="communicate"),
    "12 abort behind kernels": partial(_drilled, name="abort"),
    "13 device after an abort": partial(_drilled, name="rejoin"),
    "14 memory kept": partial(_drilled, name="repeat"),
    "15 first group": partial(_drilled, name="begin"),
    "16 two communicators": partial(_drilled, name="communicate"),
    "17 hooks and averagers": partial(_trials, is_parity=False),
    "18 parity with torch": partial(_trials, is_parity=True),
    "19 step time": _step_time,
    "20 host time": _host_time,
    "21 slow link": _slow_link,
    "22 exception": partial(_stops, fault="exception"),
    "23 SIGKILL": lambda site: _continues(site, *({"moment": moment} for moment in _MOMENTS)),
    "24 SIGSTOP": lambda site: _continues(site, {"fault": "stop", "stall_s": _STALL_S}),
    "25 out of memory": partial(_stops, fault="memory"),
    "26 illegal address": partial(_stops, fault="address"),
    "27 death of rank 0": partial(_stops, victim=0),
    "28 two at once": lambda site: _continues(site, {"num_victims": 2}, least=3),
    "29 replacement": _replaces,
    "30 many recoveries": partial(_drilled, name="repeat"),
    "31 two nodes": _nodes,
}
"""Items in the order of the day, by number and name: functions that return a figure, or raise."""

_NEED_A_GPU: Final = ("12", "13", "20", "25", "26")
"""Numbers of the items about the device."""


# ---------------------------------------------------------------------- the command


def run_checklist(settings: Settings, only: Sequence[str], path: Path) -> list[Finding]:
    """Run the items named by `only`, or all, on each backend; return findings, write JSON and a picture.

    Leaves no process. `path` gets the suffixes of a JSON file and of a picture, which needs matplotlib.
    """
    findings: list[Finding] = []
    seconds: dict[str, float] = {}
    numbers = {name.partition(" ")[2]: name for name in ITEMS}
    chosen = {numbers[name]: ITEMS[numbers[name]] for name in beginning_with(only, numbers, "item")}
    sites = list(_sites(settings))
    with progress_bar(len(sites) * len(chosen), "checklist") as bar:
        for site, variables in sites:
            for name, item in chosen.items():
                start = time.monotonic()
                with _set(variables):
                    level, message = _answer(site, name, item)
                findings.append(Finding(level, f"{name}, {site.backend}", message))
                seconds[findings[-1].check] = time.monotonic() - start
                bar.update()
    rows = [{**vars(finding), "seconds": seconds[finding.check]} for finding in findings]
    facts = gather_facts(os.environ, rank=0, local_rank=0)
    path.with_suffix(".json").write_text(json.dumps({"facts": facts, "items": rows}, indent=2))
    with suppress(ModuleNotFoundError):  # matplotlib is optional
        bars = {check: [value] for check, value in seconds.items()}
        texts = {finding.check: f"{finding.level}: {finding.message[:_MOST_DRAWN]}" for finding in findings}
        draw = partial(draw_bars, rows=bars, texts=texts, unit="seconds")
        size = {"height": 1 + 0.32 * len(findings), "width": 12.0}
        save_panels(path.with_suffix(".png"), {"": draw}, title="doctor --verify --full", **size)
    return findings


def _answer(site: _Site, name: str, item: Callable[[_Site], str]) -> tuple[Level, str]:
    try:
        if site.settings.device == "cpu" and name.startswith(_NEED_A_GPU):
            raise _NotHere("no GPU")
        return "PASS", item(site)
    except _NotHere as reason:
        return "NOT HERE", str(reason)
    except Exception as error:  # noqa: BLE001 (the other items are to be answered in any case)
        text = str(error) if isinstance(error, LightningDDPError) else f"{type(error).__name__}: {error}"
        return "FAIL", shorten(text)


def _sites(settings: Settings) -> Iterator[tuple[_Site, dict[str, str]]]:
    """Yield each backend to check on this machine, with the environment variables that choose it."""
    if settings.device == "cpu":
        yield _Site("gloo", settings), {}
        return
    for number, each in enumerate(nccl.IMPLEMENTATIONS):
        if hasattr(dist, each.class_name):
            yield _Site(each.name, settings), {nccl.CHOICE_VARIABLE: str(1 - number)}
    if settings.world_size == 1:
        yield _Site("gloo", replace(settings, device="cuda:0", world_size=2)), {}
