"""Process groups of ranks of which some are lost: who still uses one is told which, and what to do.

Code of the user's may keep a group, which torch forgets and does not forbid: its collectives would wait for
the lost ranks.
"""

from __future__ import annotations

import os
import traceback
import weakref
from typing import Any

import torch.distributed as dist

from lightning_ddp._torch import known_groups, name_of_group, refuse_collectives
from lightning_ddp.comm.group import Group
from lightning_ddp.errors import ProcessGroupError

__all__ = ["explain_retired", "retire_groups"]

_retired: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Group -> its description."""
_COMMUNICATE = tuple(os.path.dirname(path) + os.sep for path in (str(dist.__file__), __file__))


def retire_groups() -> None:
    """Has the collectives of all groups that torch knows fail at once. Called before they are destroyed."""
    for group in list(known_groups()):
        ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
        what = "the default one" if group is dist.group.WORLD else f"{group.group_desc!r}"
        _retired[group] = f"process group {name_of_group(group)} ({what}, of ranks {ranks})"
        refuse_collectives(group)


def explain_retired(error: BaseException) -> ProcessGroupError | None:
    """What to raise in the place of an error that comes of the use of such a group; None for another one."""
    for frame, _ in traceback.walk_tb(error.__traceback__) if _retired else ():
        if not frame.f_code.co_filename.startswith(_COMMUNICATE):
            continue
        for value in frame.f_locals.values():
            group = value.process_group if isinstance(value, Group) else value
            if isinstance(group, dist.ProcessGroup) and group in _retired:
                return ProcessGroupError(
                    f"{_retired[group]} was made before ranks were lost, and cannot be used any more. Do not"
                    " keep torch.distributed.group.WORLD, but ask for it where you use it; and make groups of"
                    " torch.distributed.new_group anew in on_world_changed(), where all ranks that are left"
                    " do so."
                )
    return None
