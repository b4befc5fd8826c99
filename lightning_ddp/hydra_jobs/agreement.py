"""Ranks that each compose their job (torchrun, srun): all use rank 0's values, and only it writes files.

Under torchrun they agree before Hydra makes a directory. Elsewhere they do when the process group is made;
values that a rank has read before, and that differ, are reported.
"""

from __future__ import annotations

import copy
import os
import pickle
import warnings
from typing import Any

from lightning_ddp.errors import RankMismatchError
from lightning_ddp.hydra_jobs.handover import BY_PLACE, answer_all, attach, without_files
from lightning_ddp.hydra_jobs.jobs import jobs

_KEY = "lightning_ddp/hydra_job"
_SHOWN = 5
_ZERO_ON_RANK_0 = ("NODE_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")


def share_job(store: Any, *, rank: int) -> None:
    """Make this process's Hydra job use rank 0's resolver values, if it composed its own configuration.

    Collective: all ranks must call it.

    Raises:
        RankMismatchError: this rank composed another configuration than rank 0; the message has the lines.
    """
    config = jobs().config()
    if config is None or config is jobs().shared:
        return
    differing = _read_rank_0(store, config, rank)
    if differing:
        warnings.warn(
            f"rank {rank}: these values of the configuration were read before the ranks were connected, and"
            f" differ from rank 0's: {'; '.join(differing[:_SHOWN])}. Rank 0's values are used from now on."
            " Let hydra.run.dir and other shared values depend on something that all ranks have in common,"
            " such as ${oc.env:SLURM_JOB_ID}, or start the ranks with torchrun, under which they agree"
            " first.",
            stacklevel=2,
        )


def agree(config: Any) -> None:
    """Replace resolver values in a Hydra configuration that each torchrun rank has composed by rank 0's.

    Changes nothing but the cache elsewhere. Raises as `share_job` does.

    Collective: all ranks must call it.
    """
    attach(config)  # before the job copies it: the copies share the cache
    if _is_of_torchrun():
        import torch.distributed as dist  # late, because a job without training may not need it

        from lightning_ddp.comm.barrier import store_of_attempt

        agents = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        store = store_of_attempt(agents, rank=_rank(), world_size=int(os.environ["WORLD_SIZE"]))
        _read_rank_0(store, config, _rank())


def _is_of_torchrun() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _rank() -> int:
    """Return this process's rank under torchrun; elsewhere 0 on rank 0 (or its node), else more than 0."""
    names = ("RANK",) if _is_of_torchrun() else _ZERO_ON_RANK_0
    return max(int(os.environ.get(name) or 0) for name in names)


def _read_rank_0(store: Any, config: Any, rank: int) -> list[str]:
    """Publish rank 0's resolver values in the store, or adopt them; return descriptions of differences."""
    jobs().shared, jobs().num_shared = config, jobs().num_shared + 1
    key, cache = f"{_KEY}/{jobs().num_shared}", attach(config)
    if rank == 0:
        answer_all(config)
        store.set(key, pickle.dumps((_text_of(config), cache.to_portable())))
        return []
    text, known = pickle.loads(store.get(key))
    mine, theirs = _text_of(config).splitlines(), text.splitlines()
    if mine != theirs:
        only_here = [line.strip() for line in mine if line not in theirs][:_SHOWN]
        only_there = [line.strip() for line in theirs if line not in mine][:_SHOWN]
        raise RankMismatchError(
            f"rank {rank} composed another configuration than rank 0: here {only_here}, on rank 0"
            f" {only_there}. Start the program with the same arguments and files on all nodes."
        )
    differing = []
    for name, values in known.items():
        for place, value in values.items():
            here = cache[name].get(place, value)
            if here != value:
                what = f"`{place[0]}`" if name == BY_PLACE else f"${{{name}:{','.join(place)}}}"
                differing.append(f"{what} ({here!r} here, {value!r} there)")
        cache[name].update(values)
    return differing


def _text_of(config: Any) -> str:
    """Return the user's part of a configuration as YAML, with unresolved interpolations."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.masked_copy(config, [key for key in config if key != "hydra"]))


def withhold_files(config: Any) -> None:
    """Disable `.hydra` and log files of a Hydra job on ranks above 0, until `give_files_back`."""
    from omegaconf import OmegaConf

    if _rank() > 0:
        node = config.hydra.job_logging  # copied, as setting a value changes the existing node
        job_logging = None if node is None else OmegaConf.to_container(node)
        jobs().withheld = config.hydra.output_subdir, job_logging
        _set_files(config.hydra, None, without_files(copy.deepcopy(job_logging)))


def give_files_back() -> None:
    """Restore the settings of Hydra's output files that `withhold_files` removed, for the job to read."""
    from hydra.core.hydra_config import HydraConfig

    withheld, jobs().withheld = jobs().withheld, None
    if withheld is not None:
        for hydra in (jobs().config().hydra, HydraConfig.get()):
            _set_files(hydra, *withheld)


def _set_files(hydra: Any, output_subdir: Any, job_logging: Any) -> None:
    from omegaconf import open_dict, read_write

    with read_write(hydra), open_dict(hydra):
        hydra.output_subdir, hydra.job_logging = output_subdir, job_logging
