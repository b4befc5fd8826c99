"""Runs of `shrink_script.py`: ranks are lost, replaced or leave; what has to hold of what all have noted."""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.namespaces import INTERFACES, NAMESPACES, by_hand
from harness.scripts import RunningScript, start_script

SCRIPT = Path(__file__).with_name("shrink_script.py")
SAMPLES, EPOCHS = 96, 2
DEADLINE_S = 480.0
Entry = dict[str, Any]
_ALIKE = ("parameters", "optimizer", "average", "lr", "generation", "epoch", "world_size")
"""What all members have alike after each batch."""


def fault(place: int, moment: str, step: int | None, **more: Any) -> Entry:
    """What happens to the process in a place, at a moment of a step or of any."""
    return {"place": place, "moment": moment, "step": step, **more}


def require_same(entries: Iterable[Entry], keys: Iterable[str] = _ALIKE) -> None:
    """All entries have the same value of each key."""
    entries = list(entries)
    for key in keys:
        assert len({entry[key] for entry in entries}) == 1, (key, entries)


def hash_of(tensors: Iterable[torch.Tensor]) -> str:
    """As the script's."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def logged_rows(folder: Path) -> list[dict[str, str]]:
    """Of the one file that a `CSVLogger` has written."""
    (metrics,) = folder.glob("logs/*/version_*/metrics.csv")
    return list(csv.DictReader(metrics.read_text().splitlines()))


def train(
    folder: Path,
    refusal: str | None = None,
    env: dict[str, str] | None = None,
    code: int = 0,
    *,
    launcher: Sequence[str] = (),
    timeout_s: float = DEADLINE_S,
    **order: Any,
) -> Ledger:
    """Run the script to its end, which is `code`, or 1 with `refusal` in what it has printed."""
    arguments = [json.dumps({"folder": str(folder), **order})]
    with start_script(SCRIPT, arguments, env, launcher=launcher) as script:
        result = script.wait(timeout_s)
        assert result.returncode == (code if refusal is None else 1), script.output()
        assert refusal is None or refusal in script.output()
    return Ledger(folder, result.stderr)


def start_node(
    node: int,
    folder: Path,
    launcher: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    **order: Any,
) -> AbstractContextManager[RunningScript]:
    """Start the script on one of two nodes, by hand if no variables of an engine are given."""
    num_nodes = {"num_nodes": 2} if variables is None else {}
    order = {"folder": str(folder), "devices": 2, **order, "trainer": {**num_nodes, **order["trainer"]}}
    env = {**(variables or by_hand(node)), "GLOO_SOCKET_IFNAME": INTERFACES[node]}
    return start_script(SCRIPT, [json.dumps(order)], env, namespace=NAMESPACES[node], launcher=launcher)


def replacing(num_generations: int, **order: Any) -> dict[str, Any]:
    """The order to train to the end of an epoch in which all places are taken, after so many generations."""
    return {
        "step_s": 0.05,
        "until_generation": num_generations,
        **order,
        "strategy": {"on_failure": "replace", **order.get("strategy", {})},
        "trainer": {"max_epochs": 10_000, **order.get("trainer", {})},
    }


def replace(folder: Path, *kills: Entry, **order: Any) -> Ledger:
    """Train on three ranks until all places are taken again after some kills."""
    return train(folder, **replacing(2 * len(kills), **{"devices": 3, "faults": kills, **order}))


class Ledger:
    """What all processes of a run have noted, and what has to hold of it."""

    def __init__(self, folder: Path, output: str = "") -> None:
        self.folder, self.output = folder, output
        texts = [path.read_text() for path in sorted(folder.glob("ledger-*"))]
        lines = [line for text in texts for line in text.splitlines(keepends=True)]
        whole = [line for line in lines if line.endswith("\n")]  # a process may be writing the last one
        self.entries: list[Entry] = list(map(json.loads, whole))
        latest: dict[int, int] = defaultdict(int)
        for entry in self.of("commits"):
            latest[entry["step"]] = max(latest[entry["step"]], entry["generation"])
        last = {entry["place"]: entry["generation"] for entry in self.of("tries")}
        self.num_void = 0
        self.commits = []
        for entry in self.of("commits"):  # of a window that is done again its batches have ended before
            is_void = entry["generation"] < latest[entry["step"]]
            # who alone had finished a step took that with it when it was lost
            self.num_void += is_void and entry["generation"] < last[entry["place"]]
            self.commits += [] if is_void else [entry]
        self.changes = self.of("changes")
        self.ended = [entry["place"] for entry in self.of("ends")]

    def of(self, event: str, place: int | None = None) -> list[Entry]:
        """What was noted of an event, by all or in one place."""
        return [e for e in self.entries if e["event"] == event and place in (None, e["place"])]

    def by_step(self) -> dict[int, list[Entry]]:
        found = defaultdict(list)
        for entry in self.commits:
            found[entry["step"]].append(entry)
        return dict(sorted(found.items()))

    def by_batch(self) -> list[list[Entry]]:
        found = defaultdict(list)
        for entry in self.commits:
            found[entry["step"], entry["batch"]].append(entry)
        return list(found.values())

    def sizes_of(self, place: int) -> list[list[int]]:
        """Sizes of the world before and after each change that a place was told of."""
        return [entry["sizes"] for entry in self.of("changes", place)]

    # ------------------------------------------------------------------ what has to hold

    def check(
        self, survivors: list[int], window: int = 1, rates: Any = None, *, is_whole: bool = True
    ) -> None:
        """The invariants: one state, no step or sample twice or lost, counters without a gap."""
        assert self.ended in (survivors, [-1])
        # all refuse another fit, and one may hear of another's refusal first; who was lost may have raised
        excepts = [entry for entry in self.of("excepts") if entry["place"] in survivors]
        assert [entry for entry in excepts if "has lost ranks in a fit" not in entry["text"]] == []
        assert len(self.of("starts")) == len({entry["place"] for entry in self.of("starts")})
        steps = self.check_steps(rates)
        for same in self.by_batch():
            require_same(same)
            assert {entry["place"] for entry in same} >= set(survivors)
        self._check_undo(survivors, window)
        for place in survivors:
            self.check_place(place, list(steps))
        assert self.num_void == 0 or window > 1
        self.check_samples(steps, is_whole=is_whole)

    def check_steps(self, rates: Any = None) -> dict[int, list[Entry]]:
        """No step is left out, and the learning rate follows them: as `rates` say, if not "any"."""
        steps = self.by_step()
        assert list(steps) == list(range(len(steps)))
        found = [entries[-1]["lr"] for entries in steps.values()]
        expected = [0.01 * 0.9 ** (step + 1) for step in steps] if rates is None else rates
        assert rates == "any" or found == pytest.approx(expected)
        return steps

    def check_place(self, place: int, steps: list[int]) -> None:
        """One place has taken all steps, each batch once."""
        mine = [entry for entry in self.commits if entry["place"] == place]
        assert [step for step, _ in itertools.groupby(entry["step"] for entry in mine)] == steps
        batches = [(entry["epoch"], entry["batch"]) for entry in mine]
        assert len(batches) == len(set(batches))

    def _check_undo(self, survivors: list[int], window: int) -> None:
        """A step that is done again begins where it began, and what hooks share is the same on all."""
        first: dict[tuple[int, ...], Any] = {}
        for entry in self.of("tries"):
            place, batch = entry["place"], (entry["epoch"], entry["batch"], entry["step"])
            if entry["batch"] % window:  # of a window that is done again the samples are others
                continue
            assert first.setdefault((place, *batch), entry["before"]) == entry["before"]
            if place in survivors:
                assert first.setdefault(batch, entry["hook"]) == entry["hook"]

    def check_samples(
        self,
        steps: dict[int, list[Entry]],
        *,
        is_whole: bool = True,
        num_epochs: int = EPOCHS,
        num_samples: int = SAMPLES,
        most_repeated: int = 3,
    ) -> None:
        """Each sample is used once an epoch, but for those that fill up the last batches."""
        generations = {step: entries[0]["generation"] for step, entries in steps.items()}
        used: dict[int, Counter[int]] = defaultdict(Counter)
        for entry in self.of("tries"):  # that of a rank which was killed after it was committed counts
            if generations.get(entry["step"]) == entry["generation"] and not entry["repeats"]:
                used[entry["epoch"]].update(entry["ids"])
        for epoch in range(num_epochs):
            assert not is_whole or set(used[epoch]) == set(range(num_samples)), epoch
            assert used[epoch].total() - len(used[epoch]) <= most_repeated, epoch

    def check_members(
        self,
        num_places: int,
        *,
        rates: Any = None,
        is_whole: bool = True,
        num_samples: int = SAMPLES,
        most_repeated: int | None = None,
    ) -> None:
        """The invariants of a run in which each process that is lost is replaced.

        All places take part in the last step, and are told of the same changes. After one step or five by
        three of four ranks the last batch of each would be one sample, and BatchNorm needs another one.
        """
        self.check_all_ended(num_places)
        steps = self.check_steps(rates)
        for entries in steps.values():
            require_same(entries, (*_ALIKE, "batch"))
            places = [entry["place"] for entry in entries]
            assert len(places) == len(set(places))
            assert {entry["rank"] for entry in entries} <= set(range(entries[0]["world_size"]))
        last = sorted((entry["place"], entry["rank"]) for entry in steps[max(steps)])
        assert last == [(place, place) for place in range(num_places)]
        self.check_samples(
            steps,
            is_whole=is_whole,
            num_epochs=1 + max(entry["epoch"] for entry in self.commits),
            num_samples=num_samples,
            most_repeated=max(3, num_places) if most_repeated is None else most_repeated,
        )

    def check_all_ended(self, num_places: int) -> None:
        """A process has ended well in each place, and nobody has raised but to be lost by that."""
        assert sorted(set(self.ended)) == list(range(num_places))
        assert {entry["text"] for entry in self.of("excepts")} <= {"a picture is broken"}

    def check_leaving(self, leavers: list[int], survivors: list[int]) -> None:
        """Some end in order on request, and no step is done again for it."""
        self.check(survivors)
        assert sorted(entry["place"] for entry in self.of("is torn down")) == sorted(leavers)
        assert all(entry["value"] == entry["place"] for entry in self.of("is torn down")), "it is alone"
        tried = [(e["place"], e["step"], e["batch"], e["epoch"]) for e in self.of("tries")]
        assert len(tried) == len(set(tried))
        assert {(entry["cause"], entry["retried"]) for entry in self.changes} == {("None", False)}
        assert not list(self.folder.glob("**/emergency*"))

    def check_rounds(
        self,
        lost: int,
        is_common: Callable[[int], bool],
        rate: Callable[[int], float] | None = None,
        num_samples: int = SAMPLES,
    ) -> None:
        """Each step and each sample once, whatever was undone, and one state after each round."""
        assert self.ended == list(range(lost))
        assert self.of("excepts") == []
        steps = self.check_steps(None if rate is None else list(map(rate, self.by_step())))
        for place in range(lost):
            self.check_place(place, list(steps))
            rates = [entry["lr"] for entry in self.commits if entry["place"] == place]
            assert rates == pytest.approx([entries[-1]["lr"] for entries in steps.values()])
        for number, entries in steps.items():
            left = [entry for entry in entries if entry["place"] != lost]
            require_same(left, ["outer", *["parameters"] * is_common(number)])
        self.check_samples(steps, num_samples=num_samples)

    def check_behind(self) -> None:
        """Who slept has step 3 from the others."""
        (slept,) = self.of("sleeps")
        mine = [entry for entry in self.entries if entry["place"] == slept["place"]]
        changed = next(n for n, entry in enumerate(mine) if entry["event"] == "changes")
        following = [(entry["event"], entry["step"]) for entry in mine[changed : changed + 3]]
        assert following == [("changes", 4), ("commits", 3), ("tries", 4)]
