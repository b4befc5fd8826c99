"""`python -m lightning_ddp run`: ranks are forks of a process that imports once, as new interpreters."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harness import RUN, run_script, slow, start_script
from harness.ledger import fault, logged_rows, train
from harness.scripts import ROOT, environment
from test_launch import require_trained
from user_script import SCRIPT, STEPS, order, read_notes, wait_for_notes

from lightning_ddp.__main__ import main
from lightning_ddp.launch.step_stop import PREEMPTED
from lightning_ddp.telemetry.timeline import load_folder

DEADLINE_S = 240.0


def test_all_ranks_are_forks_of_a_process_that_is_none_and_ends_last(tmp_path) -> None:
    arguments = [*order(tmp_path, trainer={"devices": 3}, pause="fit"), "--x", "a b"]
    with start_script(SCRIPT, arguments, launcher=RUN) as script:
        notes = wait_for_notes(script, tmp_path, ["ready-0", "ready-1", "ready-2"])
        ranks = [notes[f"ready-{rank}"]["pid"] for rank in range(3)]
        processes = {process.pid: process for process in script.processes()}
        (zygote,) = {processes[pid].ppid() for pid in ranks}
        assert processes[zygote].ppid() == script.pid
        assert (processes[zygote].num_threads(), processes[zygote].net_connections("tcp")) == (1, [])
        (tmp_path / "go").touch()
        script.wait(DEADLINE_S).check()
    ends = require_trained(tmp_path, 3)
    assert [end["arguments"] for end in ends] == [["--x", "a b"]] * 3


# ---------------------------------------------------------------------- as a new interpreter

FACTS = """
import gc, json, os, random, signal, sys, threading, warnings
from pathlib import Path

def names(values):
    return [f"{type(value).__module__}.{type(value).__qualname__}" for value in values]

def open_files():
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        try:
            found[path.name] = os.path.basename(os.readlink(path).partition(":[")[0])
        except OSError:
            pass  # the one that has listed them
    return found

def facts():
    frame, depth = sys._getframe(), 0
    while frame is not None:
        frame, depth = frame.f_back, depth + 1
    signals = [number for number in signal.valid_signals() if number not in (9, 19)]
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "meta_path": [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path],
        "flags": str(sys.flags),
        "main": sorted(vars(sys.modules["__main__"])),
        "name": __name__, "file": __file__, "package": __package__, "doc": __doc__,
        "spec": str(__spec__), "loader": type(__loader__).__name__, "builtins": str(__builtins__),
        "code": facts.__code__.co_filename,
        "cwd": os.getcwd(),
        "environment": {name: text for name, text in os.environ.items() if name not in OWN},
        "warnings": [str(entry) for entry in warnings.filters],
        "collector": [gc.isenabled(), *gc.get_threshold()],
        "handlers": {number: str(signal.getsignal(number)).split(" at ")[0] for number in signals},
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "files": open_files(),
        "group": os.getpgid(0) == os.getpgid(int(os.environ.get("FIRST", os.getpid()))),
        "session": os.getsid(0) == os.getsid(int(os.environ.get("FIRST", os.getpid()))),
        "streams": [
            [s.name, s.encoding, s.errors, s.line_buffering, s.write_through, s.isatty()]
            for s in (sys.stdin, sys.stdout, sys.stderr)
        ],
        "threads": [thread.name for thread in threading.enumerate()],
        "main_thread": threading.current_thread() is threading.main_thread(),
        "tracing": [sys.gettrace(), sys.getprofile()],
        "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__],
        "recursion": sys.getrecursionlimit(),
        "depth": depth,
        "parent": os.getppid() == int(os.environ.get("FIRST", os.getppid())),
        "imported": "torch" in sys.modules,
    }

OURS = {f"LIGHTNING_DDP_{name}" for name in ("STORE", "TOKEN", "PARENT_PID")}
OWN = {"FIRST", "NOTES", "MASTER_PORT", *OURS}
at_start = facts()
rank = int(os.environ.get("LOCAL_RANK", 0))
"""
AFTER = """
import multiprocessing, warnings
warnings.filterwarnings("ignore")
import numpy, torch, pytorch_lightning as pl
import lightning_ddp
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torchmetrics.utilities.prints import rank_zero_only as of_metrics

at_start |= {
    "ranks": [rank_zero_only.rank, of_metrics.rank],
    "torch_threads": torch.get_num_threads(),
    "process": multiprocessing.current_process().name,
    "environment_later": {name: text for name, text in os.environ.items() if name not in OWN},
    "cuda": torch.cuda.is_initialized(),
}
drawn = [random.random(), torch.rand(()).item(), numpy.random.random()]
drawn += [multiprocessing.current_process().authkey.hex(), hash("a")]
notes = Path(os.environ["NOTES"])
(notes / f"{rank}.json").write_text(json.dumps({"facts": at_start, "drawn": drawn}))
if rank == 0:
    os.environ["FIRST"] = str(os.getpid())
    os.environ.setdefault("KMP_INIT_AT_FORK", "FALSE")  # as scikit-learn does when it is imported
    os.environ["MINE"] = "a value \\udcff"
    random.seed(1)
    numpy.random.seed(1)
    open("/dev/null")
    kept = open(notes / "kept", "w")

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = pl.Trainer(
    strategy="custom_ddp", accelerator="cpu", devices=2, max_steps=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(4, 4)))
"""

DIFFERENCES = {
    "imported": "torch, Lightning and this package are there from the first line on: what it is for",
    "meta_path": "this package's finder is there with it",
    "warnings": "and the filters that torch and Lightning add at their import",
    "environment": "and the variables that they set",
    "collector": "a new child imports with a rare collector, until its run begins",
    "files": "rank 0 has the socket by which it asks for the others",
    "depth": "the supervisor's calls are below the program's; no traceback shows them",
    "parent": "all ranks are children of the supervisor, which outlives rank 0",
}
"""What is different from a new interpreter at the first line, and why."""


def facts_of(folder: Path, launcher: tuple[str, ...]) -> list[dict[str, Any]]:
    notes = folder / ("run" if launcher else "python")
    notes.mkdir()
    script = folder / "script.py"
    script.write_text(FACTS + AFTER)
    run_script(
        script, ["--x"], {"NOTES": str(notes)}, DEADLINE_S, fresh=True, launcher=launcher, cwd=folder
    ).check()
    return [json.loads((notes / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_a_rank_is_as_a_new_interpreter_but_for_a_list_of_differences(tmp_path) -> None:
    with ThreadPoolExecutor(2) as pool:
        new, forked = pool.map(lambda launcher: facts_of(tmp_path, launcher), [(), RUN])
    for rank, (one, other) in enumerate(zip(new, forked, strict=True)):
        ours, theirs = other["facts"], one["facts"]
        different = {name for name in theirs if theirs[name] != ours[name]}
        shown = {name: (theirs[name], ours[name]) for name in different - DIFFERENCES.keys()}
        assert shown == {}, f"rank {rank}: (new interpreter, fork)"
        added = set(ours["environment"]) - set(theirs["environment"])
        assert added <= {"PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR"}
        assert theirs["files"].items() <= ours["files"].items()
        more = [ours["files"][number] for number in ours["files"].keys() - theirs["files"].keys()]
        assert more == ["socket"] * (1 - rank)
        assert set(ours["meta_path"]) - set(theirs["meta_path"]) == {"_Finder"}
    mine, other = (rank["drawn"] for rank in forked)
    assert [a == b for a, b in zip(mine, other, strict=True)] == [False] * 4 + [True], (
        "but for the seed of hashes each rank draws its own numbers"
    )


ENDINGS = {
    "exit code": "import sys; sys.exit(3)",
    "exception": "def f():\n    raise ValueError('no such column')\nf()",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "interrupted": "import sys; out = open(sys.argv[1], 'w'); out.write('text'); raise KeyboardInterrupt",
    "handlers": "import atexit; atexit.register(print, 'the last'); print('the first')",
    "thread": "import threading, time\n"
    "threading.Thread(target=lambda: (time.sleep(0.2), print('of a thread'))).start()",
    "open file": "import sys; out = open(sys.argv[1], 'w'); out.write('not flushed')",
    "own hook": "import sys; sys.excepthook = lambda *error: print('seen', error[0]); 1 / 0",
    "pickles": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))).__module__)",
    "spawns": "import multiprocessing as mp\ndef f(): print('spawned', __name__, flush=True)\n"
    "if __name__ == '__main__':\n    p = mp.get_context('spawn').Process(target=f); p.start(); p.join()",
}


LATER_ENDINGS = {"terminated", "handlers", "thread", "own hook", "pickles"}


@pytest.mark.parametrize("ending", [slow(name) if name in LATER_ENDINGS else name for name in ENDINGS])
def test_a_program_that_starts_no_ranks_ends_as_under_python(tmp_path, ending) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDINGS[ending])
    seen = []
    for launcher in ((), RUN):
        out = tmp_path / "out"
        out.unlink(missing_ok=True)
        is_fresh = not launcher or ending == "open file"  # which the end of an interpreter closes
        result = run_script(script, [str(out)], launcher=launcher, timeout_s=DEADLINE_S, fresh=is_fresh)
        text = out.read_text() if out.exists() else None
        seen.append((result.returncode, result.stdout, result.stderr, text))
    assert seen[1] == seen[0]


def test_a_program_that_is_not_there_is_told_as_by_python(tmp_path) -> None:
    options: Any = {"capture_output": True, "text": True, "cwd": tmp_path, "env": environment({})}
    commands = [[sys.executable, *launcher, "nothing.py"] for launcher in ((), RUN)]
    seen = [subprocess.run(command, check=False, **options) for command in commands]
    assert [(one.returncode, one.stderr) for one in seen] == [(2, seen[0].stderr)] * 2


def test_output_may_be_closed_as_a_daemon_does(tmp_path) -> None:
    command = [sys.executable, *RUN, str(SCRIPT), *order(tmp_path)]
    closed = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command]
    subprocess.run(closed, env=environment({}), check=True, timeout=DEADLINE_S)
    require_trained(tmp_path)


def test_children_are_started_by_python_where_a_variable_was_read_already(tmp_path) -> None:
    script = tmp_path / "script.py"
    change = "os.environ['OMP_NUM_THREADS'] = '2'\n"
    script.write_text(
        SCRIPT.read_text().replace("import pytorch_lightning", change + "import pytorch_lightning", 1)
    )
    with start_script(script, order(tmp_path, pause="fit"), launcher=RUN) as running:
        notes = wait_for_notes(running, tmp_path, ["ready-0", "ready-1"])
        parents = {process.pid: process.ppid() for process in running.processes()}
        assert parents[notes["ready-1"]["pid"]] == notes["ready-0"]["pid"]
        (tmp_path / "go").touch()
        result = running.wait(DEADLINE_S).check()
    assert result.stderr.count("OMP_NUM_THREADS has changed since torch was imported") == 1
    require_trained(tmp_path)


# ---------------------------------------------------------------------- ends


def test_sigterm_to_the_supervisor_stops_all_ranks_at_one_step(tmp_path) -> None:
    with start_script(SCRIPT, order(tmp_path, pause="fit"), launcher=RUN) as script:
        wait_for_notes(script, tmp_path, ["ready-0", "ready-1"])
        os.kill(script.pid, signal.SIGTERM)
        (tmp_path / "go").touch()
        assert script.wait(DEADLINE_S).returncode == PREEMPTED
    notes = read_notes(tmp_path)
    assert [notes[f"on_exception-{rank}"]["kind"] for rank in range(2)] == ["SIGTERMException"] * 2
    assert notes["finally-0"]["step"] == notes["finally-1"]["step"] < STEPS
    assert "sigterm-1" not in notes, "rank 0 alone got it, and told the other one"


AT_TERMINAL = """
import os, signal, time
print("foreground", os.tcgetpgrp(0) == os.getpgid(0), flush=True)
print("read", input(), flush=True)
six = 6
import pdb; pdb.Pdb(nosigint=True).set_trace()
# not by print, which the signal may interrupt
signal.signal(signal.SIGCONT, lambda *_: os.write(1, b"continued %r" % (os.tcgetpgrp(0) == os.getpgid(0))))
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_the_terminal_is_the_programs(tmp_path) -> None:
    """It reads, and is debugged. Ctrl-Z stops it and the supervisor, as one job; Ctrl-C interrupts it."""
    script = tmp_path / "script.py"
    script.write_text(AT_TERMINAL)
    pid, terminal = pty.fork()
    if pid == 0:
        for number in (signal.SIGINT, signal.SIGQUIT):  # which background jobs ignore
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.chdir(ROOT)
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], environment({"PS1": ""}))
    text = b""

    def type_and_read(typed: str, wanted: str) -> None:
        nonlocal text
        os.write(terminal, typed.encode())
        deadline = time.monotonic() + DEADLINE_S
        while not re.search(wanted.encode(), text):
            assert time.monotonic() < deadline, text
            if select.select([terminal], [], [], 0.1)[0]:
                text += os.read(terminal, 4096)

    try:
        type_and_read(f"{sys.executable} {' '.join(RUN)} {script}\n", "foreground True")
        type_and_read("words\n", r"read words\r\n[^\0]*\(Pdb\) ")
        type_and_read("six * 7\n", "42\r\n")
        type_and_read("continue\n", "ready")
        type_and_read("\x1a", r"\[1\]\+ +Stopped")
        type_and_read("fg\n", "continued True")  # before that a Ctrl-C would be for bash
        type_and_read("\x03", "KeyboardInterrupt")
        type_and_read("echo code $?\n", "code 130")
        assert text.count(b"Traceback") == 1
    finally:
        os.close(terminal)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "lost",
    [
        {0: ("batch end", 3), 1: ("validation", 11)},
        {0: ("checkpoint", 2), 1: ("epoch end", 11)},
    ],
    ids=str,
)
def test_the_others_go_on_without_a_rank_that_is_lost(tmp_path, lost) -> None:
    """Of rank 0, which all of these are when they are lost, loggers and checkpoints too."""
    saving = {"dirpath": None, "monitor": "step", "mode": "max", "save_last": True, "every_n_train_steps": 2}
    faults = [fault(place, *when) for place, when in lost.items()]
    order = {"devices": 3, "logs": True, "records": True, "validates": True, "checkpoints": saving}
    ledger = train(tmp_path, launcher=RUN, faults=faults, trainer={"log_every_n_steps": 1}, **order)
    ledger.check([rank for rank in range(3) if rank not in lost])
    (folder,) = tmp_path.glob("logs/*/*")
    rows = logged_rows(tmp_path)
    steps = {key: [int(row["step"]) for row in rows if row[key]] for key in rows[0]}
    logged, taken = steps["loss_step"], range(len(ledger.by_step()))
    assert set(logged) <= set(taken)
    assert len(set(taken) - set(logged)) <= 2 * (0 in lost), "of the step in which rank 0 was lost"
    assert len(logged) - len(set(logged)) <= 2 * (0 in lost)
    ends = [max(e["step"] for e in ledger.commits if e["epoch"] == epoch) for epoch in range(2)]
    assert [steps[key] for key in ("loss_epoch", "val", "end of epoch")] == [ends] * 3
    assert len(steps["recovery/count"]) == len(lost)
    for entry in ledger.of("ends"):
        for path in (Path(entry["best"]), Path(entry["last"])):
            assert path.parent == folder / "checkpoints"
            assert path.exists()
    history = re.search(r"this run continued (\d) times? with other ranks.*:\n((?:  .*\n)+)", ledger.output)
    assert history is not None
    assert int(history[1]) == len(history[2].splitlines()) == len(lost)
    sizes = [(3 - number, 2 - number) for number in range(len(lost))]
    for line, (before, after) in zip(history[2].splitlines(), sizes, strict=True):
        assert re.search(rf"{before} -> {after} ranks after \S+ s; left: rank \d .*", line)
    recordings = load_folder(tmp_path / "timeline")
    assert [recording.rank for recording in recordings] == list(range(3 - len(lost)))
    for recording in recordings:
        recorded = [step.step for step in recording.steps]
        assert recorded == sorted(set(recorded))
        assert recorded[-1] == max(ledger.by_step())
        assert [(c.old_world_size, c.new_world_size) for c in recording.changes] == sizes
    assert main(["report", str(tmp_path / "timeline"), "--page", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text().count("stroke-dasharray") == 4 * len(lost)


def test_a_zygote_that_is_killed_ends_all_ranks(tmp_path) -> None:
    with start_script(SCRIPT, order(tmp_path, pause="fit"), launcher=RUN) as script:
        notes = wait_for_notes(script, tmp_path, ["ready-0", "ready-1"])
        processes = {process.pid: process for process in script.processes()}
        os.kill(processes[notes["ready-0"]["pid"]].ppid(), signal.SIGKILL)
        result = script.wait(DEADLINE_S)
    assert result.returncode == 1
    report = result.stderr.rpartition("lightning_ddp: ")[2]
    assert report.startswith("the launching process (node 0, host "), result.stderr
    assert "the process that forks the ranks was killed by SIGKILL" in report
    seen = read_notes(tmp_path)
    assert {seen[f"on_exception-{rank}"]["kind"] for rank in range(2)} == {"PeerFailure"}


def test_the_supervisor_never_touches_the_device(simulated_cuda, tmp_path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "told.py").write_text(
        "import os, atexit, torch\n"
        "os.register_at_fork(before=lambda: print(os.getpid(), torch.cuda.is_initialized(), flush=True))\n"
    )
    result = run_script(
        SCRIPT,
        order(tmp_path, trainer={"accelerator": "gpu"}),
        {"SIMULATED_CUDA": str(simulated_cuda), "PYTHONPATH": str(site)},
        DEADLINE_S,
        launcher=(*RUN, "--preload", "told"),
    ).check()
    notes = read_notes(tmp_path)
    ranks = [str(notes[f"trained-{rank}"]["pid"]) for rank in range(2)]
    forks = [line.split() for line in result.stdout.splitlines() if line.endswith(("True", "False"))]
    touched = [answer for pid, answer in forks if pid not in ranks]
    assert touched == ["False"] * 3, "before the fork of rank 0, of the zygote, and of rank 1"


OTHERS = """
import sys
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
import lightning_ddp

for strategy in sys.argv[1:]:
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_steps=2, logger=False,
        limit_val_batches=0, enable_checkpointing=False, enable_progress_bar=False,
    )
    trainer.fit(BoringModel())
    print("fitted", strategy, trainer.global_rank, flush=True)
"""


@pytest.mark.slow
def test_other_strategies_and_the_other_namespace_run_as_under_python() -> None:
    strategies = ["custom_ddp", "ddp"]
    # Lightning's rank 0 does not wait for the others
    result = run_script(OTHERS, strategies, launcher=RUN, timeout_s=DEADLINE_S, leftover_grace_s=60.0)
    fitted = sorted(line for line in result.check().stdout.splitlines() if line.startswith("fitted"))
    assert fitted == [f"fitted {name} {rank}" for name in strategies for rank in range(2)]
