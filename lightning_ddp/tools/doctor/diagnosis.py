"""Checks of gathered facts: pure functions that return findings (PASS, WARN or FAIL) with remedies."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

from lightning_ddp.comm.nccl import CHOICE_VARIABLE, version_problem
from lightning_ddp.supervise.desync import join_ranks
from lightning_ddp.tools.doctor.machine import Finding, Level

T = TypeVar("T")
Answer = Mapping[str, Any]
"""Facts of a rank from `machine.examine`, or from `gather_facts` of a single process."""

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""Variable with which a user names the interface."""

_HARMFUL_VARIABLES = {
    ("LIGHTNING_DDP_SUPERVISION", "0"): "when a rank fails, the others wait for it",
    ("NCCL_P2P_DISABLE", "1"): "NCCL uses slower transports",
    ("NCCL_IB_DISABLE", "1"): "NCCL uses slower transports",
}
_MUST_AGREE = ("torch", "pytorch-lightning", "lightning", "lightning_ddp")


def check_answers(answers: Sequence[Answer]) -> list[Finding]:
    """Return findings on the ranks' facts, for each rank and between ranks, except on all-reduce times."""
    return [
        *_check_versions(answers),
        *_check_devices(answers),
        *_check_nccl(answers),
        *_check_cpus(answers),
        *_check_variables(answers),
        *_findings_of_others(answers),
    ]


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text for a message, such as 'ranks 0-3, 7'."""
    return f"rank{'s' * (len(ranks) > 1)} {join_ranks(ranks)}"


def by_value(values: Mapping[int, T]) -> dict[T, list[int]]:
    """Return a dict from each distinct value to the ranks that have it."""
    found: dict[T, list[int]] = defaultdict(list)
    for rank, value in values.items():
        found[value].append(rank)
    return found


def _differing(values: Mapping[int, Hashable]) -> str | None:
    """Return a text of which ranks have which value, for a message; None if all values are equal."""
    found = by_value(values)
    texts = (f"{name_ranks(ranks)}: {value}" for value, ranks in found.items())
    return "; ".join(texts) if len(found) > 1 else None


def _check_versions(answers: Sequence[Answer]) -> list[Finding]:
    findings = []
    for name in _MUST_AGREE:
        differing = _differing({a["rank"]: a["packages"].get(name) for a in answers})
        if differing:
            message = f"{name} differs ({differing}). Install one version everywhere"
            findings.append(Finding("FAIL", "versions", message))
    differing = _differing({a["rank"]: a["python"] for a in answers})
    if differing:
        findings.append(Finding("WARN", "versions", f"Python differs ({differing}). Use one environment"))
    packages = answers[0]["packages"]
    listed = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    return findings or [Finding("PASS", "versions", f"Python {answers[0]['python']}, {listed}")]


def _check_devices(answers: Sequence[Answer]) -> list[Finding]:
    messages = []
    differing = _differing({a["rank"]: a["backend"] for a in answers})
    if differing:
        messages.append(
            f"backends differ ({differing}), because some nodes see no GPU. Check drivers and"
            " CUDA_VISIBLE_DEVICES"
        )
    messages += [
        f"rank {a['rank']} on {a['host']} has local rank {a['local_rank']}, but there are"
        f" {len(a['devices'])} GPUs. Start at most that many processes on a node"
        for a in answers
        if a["devices"] and a["local_rank"] >= len(a["devices"])
    ]
    if messages:
        return [Finding("FAIL", "devices", message) for message in messages]
    lists = {a["rank"]: a["devices"] for a in answers}
    kinds = {rank: f"{len(found)} x {found[0]}" if found else "CPU" for rank, found in lists.items()}
    backend, differing = f"backend {answers[0]['backend']}", _differing(kinds)
    if differing:
        return [Finding("WARN", "devices", f"{differing}; {backend}; the slowest kind sets the pace")]
    return [Finding("PASS", "devices", f"{name_ranks(list(kinds))}: {kinds[answers[0]['rank']]}; {backend}")]


def _check_nccl(answers: Sequence[Answer]) -> list[Finding]:
    """Return findings on NCCL's version, on torch's backend for it, and if NCCL can register buckets."""
    kinds = {a["rank"]: a["nccl"] and f"NCCL {a['nccl']} by {a['implementation']}" for a in answers}
    if (differing := _differing(kinds)) is not None:
        message = f"{differing}. Install one version, and set the same {CHOICE_VARIABLE}"
        return [Finding("FAIL", "NCCL", message)]
    first = answers[0]
    if first["nccl"] is None:
        return []
    problem = version_problem([int(part) for part in first["nccl"].split(".")[:3]])
    text = kinds[first["rank"]] + ("" if problem is None else f": {problem}, which on_failure needs")
    findings = [Finding("PASS" if problem is None else "WARN", "NCCL", text)]
    if "bucket_memory" in first:
        why = first["bucket_memory"]
        place = "registered with NCCL; with on_failure plain" if why is None else f"plain: {why}"
        findings.append(Finding("PASS", "bucket memory", place))
    return findings


def _check_cpus(answers: Sequence[Answer]) -> list[Finding]:
    findings = []
    for host, num_ranks in Counter(answer["host"] for answer in answers).items():
        num_cpus = next(answer["num_cpus"] for answer in answers if answer["host"] == host)
        message, has_few = f"{host}: {num_cpus} cores for {num_ranks} rank(s)", num_cpus < num_ranks
        message += ". Give the job one core per rank" * has_few
        findings.append(Finding("WARN" if has_few else "PASS", "CPU cores", message))
    return findings


def _check_variables(answers: Sequence[Answer]) -> list[Finding]:
    """Return warnings about environment variables that disable something useful."""
    findings = []
    for (name, value), effect in _HARMFUL_VARIABLES.items():
        ranks = [answer["rank"] for answer in answers if answer["variables"].get(name) == value]
        if ranks:
            message = f"{name_ranks(ranks)}: {name}={value}, so {effect}. Unset it"
            findings.append(Finding("WARN", "variables", message))
    return findings


def _findings_of_others(answers: Sequence[Answer]) -> list[Finding]:
    """Return WARN and FAIL findings of other ranks that rank 0 lacks, and which ranks reached the master."""
    own = answers[0].get("findings", [])
    found: dict[tuple[Level, str, str], list[int]] = defaultdict(list)
    for answer in answers[1:]:
        for finding in answer.get("findings", []):
            if finding["level"] != "PASS" and finding not in own:
                found[finding["level"], finding["check"], finding["message"]].append(answer["rank"])
            elif (finding["level"], finding["check"]) == ("PASS", "master"):
                found["PASS", "master", "reached"].append(answer["rank"])
    return [
        Finding(level, check, f"{name_ranks(ranks)}: {message}")
        for (level, check, message), ranks in found.items()
    ]


def check_interface(
    named: str | None, route: str | None, found: Mapping[str, str], *, num_nodes: int
) -> Finding:
    """Return a finding on the network interface: the `named` one, or that of the route to the master.

    `found` has the interfaces of this host with their addresses.
    """
    listed = ", ".join(f"{name} ({address})" for name, address in found.items())
    chosen = named or route
    level: Level = "FAIL"
    if named is not None and found and named not in found:
        message = f"{INTERFACE_VARIABLE}={named}, but this host has {listed}. Name one of them or unset it"
    elif chosen is None:
        level = "FAIL" if num_nodes > 1 else "WARN"
        message = (
            f"no interface leads to the master; this host has {listed}. Check MASTER_ADDR and the routes"
        )
    elif num_nodes > 1 and found.get(chosen, "").startswith("127."):
        message = (
            f"{chosen} is the loopback, which no other node reaches. Set MASTER_ADDR to an address of the"
            f" first node on a network of all nodes; this host has {listed}"
        )
    elif named is not None and route is not None and named != route:
        level = "WARN"
        message = (
            f"{INTERFACE_VARIABLE}={named}, but the master is reached by {route}. Unset it unless both lead"
            " there"
        )
    else:
        level, message = "PASS", f"{chosen} ({found.get(chosen, 'no IPv4 address')})"
    return Finding(level, "interface", message)


def check_all_reduce(answers: Sequence[Answer]) -> Finding:
    """Return a finding with the time of the ranks' all-reduce, a warning if it is slow between nodes."""
    num_bytes, seconds = answers[0]["all_reduce"]["num_bytes"], answers[0]["all_reduce"]["seconds"]
    # In a ring each link carries this share of the bytes, each way.
    gbit_per_s = 8e-9 * num_bytes * 2 * (len(answers) - 1) / len(answers) / seconds
    message = (
        f"{num_bytes / (1 << 20):.3g} MiB of float32 over {answers[0]['measured_on']}, {len(answers)} ranks:"
        f" {seconds * 1e3:.2f} ms, as a ring {gbit_per_s:.3g} Gbit/s a link (median of the slowest rank)"
    )
    if gbit_per_s < 1 and len({answer["host"] for answer in answers}) > 1:
        message += ". This is slow between nodes. Check that it is the intended interface"
        return Finding("WARN", "all-reduce", message)
    return Finding("PASS", "all-reduce", message)
