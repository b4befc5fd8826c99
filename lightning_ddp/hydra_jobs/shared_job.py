"""Sharing of a Hydra job that each process composes by itself (torchrun, srun): rank 0's values hold.

Under torchrun there is a store before the program begins, and the processes agree before Hydra makes a
directory: one output directory for all. Elsewhere they meet when the process group is made. From then on all
read rank 0's values; what a process has read before, and found different, is reported. Everywhere `.hydra`
and the job's log file are written by rank 0 alone.
"""

from __future__ import annotations

import os
import pickle
import warnings
from typing import Any

from lightning_ddp.errors import RankMismatchError
from lightning_ddp.hydra_jobs.handover import without_files
from lightning_ddp.hydra_jobs.jobs import jobs
from lightning_ddp.hydra_jobs.resolver_cache import answer_all, attach

__all__ = ["agree_before_job", "give_files_back", "share_job"]

_KEY = "lightning_ddp/hydra_job"
_SHOWN = 5
_ZERO_ON_RANK_0 = ("NODE_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")


def share_job(store: Any, *, rank: int) -> None:
    """Has this process's job read rank 0's values. All ranks call it that did not get their job handed over.

    Args:
        store: of the run.
        rank: of this process.

    Raises:
        RankMismatchError: this process composed another configuration than rank 0; names the lines.
    """
    given = jobs.config()
    if given is None or given is jobs.shared:
        return
    jobs.shared, jobs.num_shared = given, jobs.num_shared + 1
    key = f"{_KEY}/{jobs.num_shared}"
    if rank == 0:
        store.set(key, _pack(given))
    else:
        packed = store.get(key)
        differing = _adopt(given, packed, rank)
        if differing:
            warnings.warn(
                f"rank {rank}: these values of the configuration had been read before the ranks met, and"
                f" differ from rank 0's: {'; '.join(differing[:_SHOWN])}. From now on rank 0's are read. Let"
                " hydra.run.dir and what the ranks must share depend on something that they have in common,"
                " such as ${oc.env:SLURM_JOB_ID}, or start them with torchrun, under which they agree first.",
                stacklevel=2,
            )


def agree_before_job(config: Any, *, is_sweep: bool) -> None:
    """Before a job begins has rank 0 alone write its files, and under torchrun all read rank 0's values.

    All ranks call it; it communicates under torchrun only.

    Args:
        config: what this process has composed, with the node `hydra`; changed in place.
        is_sweep: whether it is of a sweep, whose jobs are composed from it.

    Raises:
        RankMismatchError: this process composed another configuration than rank 0.
    """
    attach(config)  # before the job copies it: the copies share the cache
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        rank = int(os.environ["RANK"])
        _agree(config, rank)
    else:
        rank = max(int(os.environ.get(name) or 0) for name in _ZERO_ON_RANK_0)
    if rank > 0 and not is_sweep:
        _leave_files_to_rank_0(config)


def _agree(config: Any, rank: int) -> None:
    import torch.distributed as dist  # a job that trains nothing may not need it

    from lightning_ddp.comm.elastic_restart import store_of_attempt

    jobs.shared, jobs.num_shared = config, jobs.num_shared + 1
    agents = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = store_of_attempt(agents, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    store = dist.PrefixStore(f"job/{jobs.num_shared}", store)
    if rank == 0:
        store.set(_KEY, _pack(config))  # type: ignore[arg-type]  # takes bytes as well
    else:
        _adopt(config, store.get(_KEY), rank)


def _pack(config: Any) -> bytes:
    cache = attach(config)
    answer_all(config)
    return pickle.dumps((_text_of(config), *cache.to_portable()))


def _adopt(config: Any, packed: bytes, rank: int) -> list[str]:
    """Takes rank 0's answers over; returns a description of each that this process has read differently."""
    text, cached, answers = pickle.loads(packed)
    _require_same(_text_of(config), text, rank)
    cache = attach(config)
    differing = [
        f"`{place[0]}` ({cache.answers[place]!r} here, {value!r} there)"
        for place, value in answers.items()
        if place in cache.answers and cache.answers[place] != value
    ]
    for name, values in cached.items():
        differing += [
            f"${{{name}:{','.join(key)}}} ({cache[name][key]!r} here, {value!r} there)"
            for key, value in values.items()
            if cache[name].get(key, value) != value
        ]
        cache[name].update(values)
    cache.answers.update(answers)
    return differing


def _text_of(config: Any) -> str:
    """The user's part of a configuration, with its interpolations as they are."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.masked_copy(config, [key for key in config if key != "hydra"]))


def _require_same(here: str, there: str, rank: int) -> None:
    if here == there:
        return
    mine, theirs = here.splitlines(), there.splitlines()
    only_here = [line.strip() for line in mine if line not in theirs][:_SHOWN]
    only_there = [line.strip() for line in theirs if line not in mine][:_SHOWN]
    raise RankMismatchError(
        f"rank {rank} composed another configuration than rank 0: here {only_here}, on rank 0 {only_there}."
        " Start the program with the same arguments and files on all nodes."
    )


def _leave_files_to_rank_0(config: Any) -> None:
    hydra = config.hydra
    jobs.withheld = (hydra.output_subdir, _plain(hydra.job_logging))
    logging = _plain(hydra.job_logging)
    _set_files(hydra, None, None if logging is None else without_files(logging))


def _plain(node: Any) -> Any:
    """A copy: what is set in a configuration is written into the node that is there."""
    from omegaconf import OmegaConf

    return None if node is None else OmegaConf.to_container(node)


def give_files_back() -> None:
    """Sets what `agree_before_job` has changed for the sake of Hydra back, for the job to read."""
    from hydra.core.hydra_config import HydraConfig

    withheld, jobs.withheld = jobs.withheld, None
    if withheld is not None:
        for hydra in (jobs.config().hydra, HydraConfig.get()):
            _set_files(hydra, *withheld)


def _set_files(hydra: Any, output_subdir: Any, job_logging: Any) -> None:
    from omegaconf import open_dict, read_write

    with read_write(hydra), open_dict(hydra):
        hydra.output_subdir, hydra.job_logging = output_subdir, job_logging
