"""Checks of gathered facts: pure functions that return findings (PASS, WARN or FAIL) with remedies."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from lightning_ddp.tools.doctor.machine import Finding, Level
from lightning_ddp.tools.doctor.measure import Line

Answer = Mapping[str, Any]
"""Facts of a rank from `measure.examine`, or from `gather_facts` of a single process."""

_LEAST_SHARED_MEMORY = 1 << 30
_LEAST_OPEN_FILES = 4096
_LARGEST_CLOCK_SKEW_S = 1.0
_LARGEST_RELATIVE_ERROR = 0.5
_SLOW_BYTES_PER_S = 125e6
_MUST_AGREE = ("torch", "pytorch-lightning", "lightning", "lightning_ddp")


def check_answers(answers: Sequence[Answer]) -> list[Finding]:
    """Run all checks of each rank and between ranks."""
    return [
        *_check_versions(answers),
        *_check_devices(answers),
        *_on_each_host(answers, "shared memory", check_shared_memory),
        *_on_each_host(answers, "limits", check_limits),
        *_check_cpus(answers),
        *_check_clocks(answers),
        *_on_each_host(answers, "variables", check_variables),
        *_findings_of_others(answers),
    ]


def name_ranks(ranks: Sequence[int]) -> str:
    """Format ranks for a message.

    >>> name_ranks([0]), name_ranks([3, 0, 1, 2, 7])
    ('rank 0', 'ranks 0-3, 7')
    """
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    text = ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def _differing(answers: Sequence[Answer], key: Callable[[Answer], Hashable]) -> str | None:
    """Describe the values of all ranks for a message; return None if they are equal."""
    found: dict[Any, list[int]] = defaultdict(list)
    for answer in answers:
        found[key(answer)].append(answer["rank"])
    if len(found) == 1:
        return None
    return "; ".join(f"{name_ranks(ranks)}: {value}" for value, ranks in found.items())


# ---------------------------------------------------------------------- between the ranks


def _check_versions(answers: Sequence[Answer]) -> list[Finding]:
    findings = []
    for name in _MUST_AGREE:
        differing = _differing(answers, lambda answer, name=name: answer["packages"].get(name))  # type: ignore[misc]
        if differing:
            message = f"{name} differs ({differing}). Install one version everywhere"
            findings.append(Finding("FAIL", "versions", message))
    differing = _differing(answers, lambda answer: answer["python"])
    if differing:
        findings.append(Finding("WARN", "versions", f"Python differs ({differing}). Use one environment"))
    packages = answers[0]["packages"]
    listed = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    return findings or [Finding("PASS", "versions", f"Python {answers[0]['python']}, {listed}")]


def _check_devices(answers: Sequence[Answer]) -> list[Finding]:
    findings = []
    differing = _differing(answers, lambda answer: answer["backend"])
    if differing:
        message = (
            f"backends differ ({differing}), because some nodes see no GPU. Check drivers and"
            " CUDA_VISIBLE_DEVICES"
        )
        findings.append(Finding("FAIL", "devices", message))
    for answer in answers:
        if answer["devices"] and answer["local_rank"] >= len(answer["devices"]):
            message = (
                f"rank {answer['rank']} on {answer['host']} has local rank {answer['local_rank']}, but"
                f" there are {len(answer['devices'])} GPUs. Start at most that many processes on a node"
            )
            findings.append(Finding("FAIL", "devices", message))
    if findings:
        return findings

    def kind(answer: Answer) -> str:
        devices = answer["devices"]
        return f"{len(devices)} x {devices[0]}" if devices else "CPU"

    differing = _differing(answers, kind)
    backend = f"backend {answers[0]['backend']}"
    if differing:
        return [Finding("WARN", "devices", f"{differing}; {backend}; the slowest kind sets the pace")]
    ranks = name_ranks([answer["rank"] for answer in answers])
    return [Finding("PASS", "devices", f"{ranks}: {kind(answers[0])}; {backend}")]


def _check_cpus(answers: Sequence[Answer]) -> list[Finding]:
    findings = []
    for host, num_ranks in Counter(answer["host"] for answer in answers).items():
        num_cpus = next(answer["num_cpus"] for answer in answers if answer["host"] == host)
        if num_cpus < num_ranks:
            message = f"{host}: {num_ranks} ranks share {num_cpus} CPU cores. Give the job one core per rank"
            findings.append(Finding("WARN", "CPU cores", message))
        else:
            findings.append(Finding("PASS", "CPU cores", f"{host}: {num_cpus} cores for {num_ranks} rank(s)"))
    return findings


def _check_clocks(answers: Sequence[Answer]) -> list[Finding]:
    if "clock" not in answers[0]:
        return []
    answer = max(answers, key=lambda answer: abs(answer["clock"]["offset_s"]))
    offset, error = answer["clock"]["offset_s"], answer["clock"]["error_s"]
    found = (
        f"at most {abs(offset) * 1e3:.1f} ms from rank 0's (rank {answer['rank']}, +/- {error * 1e3:.1f} ms)"
    )
    if abs(offset) - error > _LARGEST_CLOCK_SKEW_S:
        message = (
            f"{found}: logs and time stamps of files are not comparable. Start chrony or ntpd on all nodes"
        )
        return [Finding("WARN", "clocks", message)]
    return [Finding("PASS", "clocks", found)]


def _findings_of_others(answers: Sequence[Answer]) -> list[Finding]:
    """Return findings of the other ranks on their way to rank 0 that rank 0 does not have."""
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


# ---------------------------------------------------------------------- on each host


def _on_each_host(
    answers: Sequence[Answer], check: str, look: Callable[[Answer], tuple[Level, str]]
) -> list[Finding]:
    """Check each host; return one finding for all hosts with the same result."""
    seen: dict[tuple[Level, str], list[str]] = defaultdict(list)
    for answer in answers:
        hosts = seen[look(answer)]
        if answer["host"] not in hosts:
            hosts.append(answer["host"])
    is_same = len(seen) == 1
    return [
        Finding(level, check, message if is_same else f"{', '.join(hosts)}: {message}")
        for (level, message), hosts in seen.items()
        if message
    ]


def check_shared_memory(answer: Answer) -> tuple[Level, str]:
    """Check the size of /dev/shm, through which workers of data loaders pass batches."""
    memory = answer["shared_memory"]
    if memory is None:
        return "PASS", "no /dev/shm on this system"
    found = f"/dev/shm has {_mib(memory['total'])}, {_mib(memory['free'])} free"
    if memory["free"] < _LEAST_SHARED_MEMORY:
        return "WARN", (
            f"{found}: workers of data loaders die of a bus error when it is full. In a container use"
            " `docker run --shm-size=8g` (Kubernetes: an emptyDir of medium Memory), else delete its files"
        )
    return "PASS", found


def check_limits(answer: Answer) -> tuple[Level, str]:
    """Check the soft limits of the process."""
    limits = answer["limits"]
    found = ", ".join(f"{name} {'unlimited' if value is None else value}" for name, value in limits.items())
    files, locked = limits["open files"], limits["locked memory"]
    if files is not None and files < _LEAST_OPEN_FILES:
        return "WARN", (
            f"{found}: data loaders and sockets may run out of open files. Run `ulimit -n 65536` before the"
            " start"
        )
    if answer["devices"] and locked is not None:
        return "WARN", f"{found}: InfiniBand needs `ulimit -l unlimited` (in SLURM: of slurmd)"
    return "PASS", found


def check_variables(answer: Answer) -> tuple[Level, str]:
    """Check for environment variables that disable something useful."""
    variables = answer["variables"]
    if variables.get("LIGHTNING_DDP_SUPERVISION") == "0":
        return "WARN", "LIGHTNING_DDP_SUPERVISION=0: when a rank fails, the others will wait for it. Unset it"
    if variables.get("NCCL_P2P_DISABLE") == "1" or variables.get("NCCL_IB_DISABLE") == "1":
        return "WARN", "NCCL_P2P_DISABLE or NCCL_IB_DISABLE is set, so NCCL uses slower transports. Unset it"
    return "PASS", ""


# ---------------------------------------------------------------------- the network


def check_interface(
    named: str | None, route: str | None, found: Mapping[str, str], *, num_nodes: int, variable: str
) -> Finding:
    """Check the interface of the ranks: `named` by the user's variable, or the route to the master.

    `found` has the interfaces of this host with their addresses.
    """
    listed = ", ".join(f"{name} ({address})" for name, address in found.items())
    chosen = named or route
    level: Level = "FAIL"
    if named is not None and found and named not in found:
        message = f"{variable}={named}, but this host has {listed}. Name one of them or unset the variable"
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
        message = f"{variable}={named}, but the master is reached by {route}. Unset it unless both lead there"
    else:
        level, message = "PASS", f"{chosen} ({found.get(chosen, 'no IPv4 address')})"
    return Finding(level, "interface", message)


def check_line(line: Line | None, *, world_size: int, num_hosts: int) -> Finding:
    """Check that the times of the all-reduces are plausible."""
    if line is None:
        message = (
            "the times do not increase with the size, so no line fits. Measure again when the machine is idle"
        )
    elif line.relative_error > _LARGEST_RELATIVE_ERROR:
        message = (
            f"{line}, but half of the times are more than {line.relative_error:.0%} away from that line."
            " Something else uses the link or the cores"
        )
    elif num_hosts > 1 and line.link_bytes_per_s(world_size) < _SLOW_BYTES_PER_S:
        message = f"{line}: less than 1 Gbit/s between nodes. Check that this is the intended interface"
    else:
        return Finding("PASS", "all-reduce", str(line))
    return Finding("WARN", "all-reduce", message)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.0f} MiB"
