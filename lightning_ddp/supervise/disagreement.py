"""Disagreement of ranks in words, found by comparing their statuses (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lightning_ddp.supervise.failure_record import Where
from lightning_ddp.supervise.protocol import Findings, RankStatus

_CERTAIN_AFTER_S = 1.0
_MOST_MISSING, _MOST_ROWS = 1000, 16
_SENTENCE_CHARACTERS, _TABLE_CHARACTERS, _RANKS_CHARACTERS = 1_500, 2_000, 200
_PLURAL = {"waits": "wait", "is": "are", "has": "have", "does": "do", "ends": "end"}

Statuses = Mapping[int, RankStatus]  # status of each rank


def explain(statuses: Statuses, asker: int, group: str | None = None, number: int = 0) -> Findings:
    """Describe where the ranks disagree about a collective, and which have not called it, for rank `asker`.

    Args:
        statuses: of all ranks of the run.
        group: process group of the collective; None for that in which most ranks wait.
        number: of the collective in its group.
    """
    if all(status.on(group).number < 0 for status in statuses.values()):
        waits = [(a.group, a.number) for a in statuses.values() if a.group is not None and a.number]
        group, number = max(waits, key=waits.count, default=(None, 0))
    missing = _missing(statuses, asker, group, number)
    sentence = _first_difference(statuses, group)
    if sentence is None:
        concerned = members_of(statuses, group) if group is not None else set(statuses)
        present = [rank for rank in sorted(concerned) if rank not in missing]
        sentence = "; ".join(filter(None, (_sum_up(statuses, present), _sum_up(statuses, missing))))
        if not missing:
            sentence += (
                ". All ranks have called the same collective. The link is slow or broken, or a collective"
                " from outside this package is in between"
            )
    return Findings(
        sentence=sentence[:_SENTENCE_CHARACTERS],
        table=_table(statuses),
        missing=tuple(missing[:_MOST_MISSING]),
        is_contradiction=_contradicts(statuses, group, number),
    )


def members_of(statuses: Statuses, group: str | None) -> set[int]:
    """Return the global ranks of a process group, as far as the ranks' statuses tell them."""
    for status in statuses.values():
        ranks = split_ranks(status.on(group).ranks)
        if ranks is not None:
            return ranks & statuses.keys()
    return {rank for rank, status in statuses.items() if status.on(group).number >= 0}


def _contradicts(statuses: Statuses, group: str | None, number: int) -> bool:
    """Return True if ranks have waited for 1 s in different collectives with one sequence number."""
    called = set()
    for status in statuses.values():
        calls = status.on(group).calls
        is_there = status.state == "waits" and (status.group, status.number) == (group, number)
        if is_there and status.for_s >= _CERTAIN_AFTER_S and number in calls:
            called.add(calls[number].rpartition(": ")[2])  # a label alone makes no difference
    return len(called) > 1


def _missing(statuses: Statuses, asker: int, group: str | None, number: int) -> list[int]:
    """Return the ranks that have not called a collective yet, or have called another one in its place."""
    expected = statuses[asker].on(group).calls.get(number) if asker in statuses else None
    missing = []
    for rank in sorted(members_of(statuses, group)):
        known = statuses[rank].on(group)
        is_other = expected is not None and known.calls.get(number, expected) != expected
        if known.number < number or is_other:
            missing.append(rank)
    return missing


def _first_difference(statuses: Statuses, group: str | None) -> str | None:
    """Return a sentence on the first collective of a group that ranks called differently, or None."""
    calls = {rank: status.on(group).calls for rank, status in sorted(statuses.items())}
    for number in sorted({n for known in calls.values() for n in known}):
        callers = _by_value({rank: known[number] for rank, known in calls.items() if number in known})
        if len(callers) > 1:
            called = [
                f"{name_ranks(rs)} called {what}{_position(statuses, rs)}" for what, rs in callers.items()
            ]
            return f"as collective {number} of {group} " + "; ".join(called)
    return None


def _position(statuses: Statuses, ranks: Sequence[int]) -> str:
    positions = {Where(step=statuses[r].step, phase=statuses[r].phase) for r in ranks}
    return positions.pop().in_words() if len(positions) == 1 else ""


def _sum_up(statuses: Statuses, ranks: Sequence[int]) -> str:
    parts = []
    for text, same in list(_by_value({r: statuses[r].describe() for r in ranks}).items())[:_MOST_ROWS]:
        verb, _, rest = text.partition(" ")
        parts.append(f"{name_ranks(same)} {_PLURAL.get(verb, verb) if len(same) > 1 else verb} {rest}")
    return "; ".join(parts)


def _table(statuses: Statuses) -> str:
    rows = ["rank  state  for"]
    for rank, status in sorted(statuses.items())[:_MOST_ROWS]:
        of_group = (
            f" (collective {status.number} of {status.group})" if status.number and status.group else ""
        )
        rows.append(f"{rank}  {status.describe()}{of_group}  {status.for_s:.1f} s")
    if len(statuses) > _MOST_ROWS:
        rows.append(f"and {len(statuses) - _MOST_ROWS} more ranks")
    return "\n".join(f"  {row}" for row in rows)[:_TABLE_CHARACTERS]


# ---------------------------------------------------------------------- ranks in words


def _by_value(values: Mapping[int, str]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ranks


def name_ranks(ranks: Sequence[int]) -> str:
    """Return a phrase that names ranks, such as `rank 3` or `ranks 0-2, 5`."""
    return f"rank{'s' * (len(ranks) > 1)} {join_ranks(ranks)}"


def join_ranks(ranks: Iterable[int]) -> str:
    """Return a text that lists ranks, with consecutive ones as ranges.

    >>> join_ranks([0, 1, 2, 5])
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in runs)


def split_ranks(text: str) -> set[int] | None:
    """Return the ranks in a text such as "0-2, 5"; None if it was cut off, or is something else.

    >>> sorted(split_ranks("0-2, 5"))
    [0, 1, 2, 5]
    """
    ranks: set[int] = set()
    if len(text) >= _RANKS_CHARACTERS:
        return None
    for part in text.split(", "):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not first.isdecimal() or not last.isdecimal() or len(first + last) > 12:
            return None
        if int(last) - int(first) > 100_000:
            return None
        ranks.update(range(int(first), int(last) + 1))
    return ranks
