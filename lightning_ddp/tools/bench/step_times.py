"""What each spawned rank does for ``bench step``."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp.tools.bench.arguments import TORCH_DEFAULT
from lightning_ddp.tools.bench.contenders import TrainingRun
from lightning_ddp.tools.bench.models import build_workload
from lightning_ddp.tools.bench.processes import RankContext
from lightning_ddp.tools.bench.turns import Turns
from lightning_ddp.tools.bench.workers import shuffled

__all__ = ["StepSettings", "check_agreement", "time_steps"]

_TOLERANCE = (
    1e-3  # relative; rounding stays far below, without communication every model is 5 to 1000 times above
)
_MOST_COMPARED = 8192


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What ``time_steps`` measures."""

    models: tuple[str, ...]
    """Models, measured one after the other."""

    contenders: tuple[str, ...]
    """Contenders, which take turns within each round."""

    num_rounds: int
    """Rounds per model."""

    num_steps: int
    """Timed steps of each contender in a round."""

    num_warmup_steps: int
    """Steps of each contender before the first round; torch rebuilds its buckets after the first of them."""


def time_steps(context: RankContext, settings: StepSettings) -> dict[str, dict[str, list[list[float]]]]:
    """Time the training steps of all contenders on each model, interleaved; all ranks, communicates.

    Where there are as many crews as contenders, each trains one of them; a single crew trains all.

    Returns:
        Model -> contender of this crew -> round -> seconds of each timed step on this rank.

    Raises:
        RuntimeError: If a contender's gradients or buffers differ from those of the others.
    """
    turns = Turns(context.store, context.world_size)
    mine = settings.contenders
    if context.num_crews > 1:
        mine = (settings.contenders[context.crew],)
    return {model: _time_model(context, settings, model, mine, turns) for model in settings.models}


def _time_model(
    context: RankContext, settings: StepSettings, model: str, mine: Sequence[str], turns: Turns
) -> dict[str, list[list[float]]]:
    runs: dict[str, TrainingRun] = {}
    for name in settings.contenders:
        with turns.take(is_mine=name in mine) as is_mine:
            if is_mine:
                runs[name] = TrainingRun(name, build_workload(model, rank=context.rank), context.device)
                for _ in range(settings.num_warmup_steps):
                    runs[name].step()
    seconds: dict[str, list[list[float]]] = {name: [] for name in mine}
    for round_index in range(settings.num_rounds):
        for name in shuffled(settings.contenders, seed=round_index):
            with turns.take(is_mine=name in mine) as is_mine:
                if is_mine:
                    seconds[name].append(_timed_block(context, runs[name], settings.num_steps))
        if context.crew == 0:
            context.advance()
    _compare(context, model, settings.contenders, runs, turns)
    return seconds


def _timed_block(context: RankContext, run: TrainingRun, num_steps: int) -> list[float]:
    run.step()  # brings this contender's weights back into the caches
    seconds = []
    for _ in range(num_steps):
        dist.barrier()
        context.synchronize()
        start = time.perf_counter()
        run.step()
        context.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


def _compare(
    context: RankContext,
    model: str,
    contenders: Sequence[str],
    runs: Mapping[str, TrainingRun],
    turns: Turns,
) -> None:
    """Check that all contenders compute the same; those of all crews, on each rank."""
    reference = TORCH_DEFAULT if TORCH_DEFAULT in contenders else contenders[0]
    key = f"state/{model}/{context.rank}"
    for name in sorted(contenders, key=lambda contender: contender != reference):
        with turns.take(is_mine=name in runs) as is_mine:
            if not is_mine:
                continue
            state = runs[name].state_after_one_step(build_workload(model, rank=context.rank))
            found = {kind: _sample(values) for kind, values in state.items()}
            if name == reference:
                context.store.set(key, json.dumps({kind: v.tolist() for kind, v in found.items()}))
                continue
            expected = json.loads(context.store.get(key))
            check_agreement(name, found, reference, {k: torch.tensor(v) for k, v in expected.items()})


def _sample(values: Tensor) -> Tensor:
    """Some of many elements, always the same ones."""
    if values.numel() <= _MOST_COMPARED:
        return values.cpu()
    generator = torch.Generator().manual_seed(values.numel())
    return values.cpu()[torch.randint(values.numel(), (_MOST_COMPARED,), generator=generator)]


def check_agreement(
    name: str, found: Mapping[str, Tensor], reference: str, expected: Mapping[str, Tensor]
) -> None:
    """Compare what a contender computed in one step with what another one did.

    A wrapper that communicated nothing would be the fastest; this keeps it off the table. The step starts
    from the same weights because from three ranks on sums are rounded in another order, and over many steps a
    deep network makes of that rounding weights that have nothing in common.

    Args:
        name: The contender.
        found: Its averaged gradients and buffers, or some elements of each.
        reference: The other contender.
        expected: The same of that one.

    Raises:
        RuntimeError: If values are not finite or differ by more than rounding.
    """
    for kind, values in found.items():
        error = ((values - expected[kind]).norm() / expected[kind].norm()).item()
        if not error <= _TOLERANCE:
            raise RuntimeError(
                f"the {kind} of {name} differ from those of {reference} by a relative {error:g} "
                f"(at most {_TOLERANCE:g} expected): its times mean nothing"
            )
