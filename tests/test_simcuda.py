"""BucketedDDP on simulated CUDA devices: no race, no early free, no wait of the host.

Each scenario trains one network on two ranks for eight steps, with torch's class and with ours, in the same
harness. What the device's checker reports, and what was trained, is compared.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
import simcuda
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp import BucketedDDP
from lightning_ddp.averaging import Averager, available_averagers, build_averager
from lightning_ddp.comm.call import run
from lightning_ddp.comm.group import Group
from lightning_ddp.hooks import available_hooks, build_hook

# one worker, as each scenario is trained once and looked at by several tests
pytestmark = pytest.mark.xdist_group("simulated ranks")

NUM_STEPS = 8
NUM_STEADY = 4
"""The last steps: buckets are settled, hooks and averagers beyond their first steps."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """How a network is trained on the device."""

    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the wrapper, which both classes take."""
    network: Literal["plain", "unused", "two_streams", "sync_batch_norm"] = "plain"
    hook: Any = None
    """One of our hooks, as a name or with options."""
    torch_hook: str | None = None
    """One of torch's hooks, for both classes."""
    averager: dict[str, Any] | None = None
    autocast: torch.dtype | None = None
    """With float16 also a GradScaler; the gradients of rank 1 overflow in the fourth step."""
    num_micro_batches: int = 1
    num_unsynchronised: int = 0
    """How many of the micro-batches run inside `no_sync`."""
    num_batches: tuple[int, int] = (NUM_STEPS, NUM_STEPS)
    """Of each rank; where they differ, training is inside `join`."""
    is_wrapped_on_side_stream: bool = False
    evaluates: bool = False
    """Whether the model is evaluated and saved between steps."""
    group: Literal["default", "own", "pair"] = "default"
    """The ranks: all, a group of all beside that one, or two of four."""
    world_size: int = 2
    reference: Literal["torch", "cpu"] = "torch"
    """What the values have to equal: those of torch's class on the device, or of ours on the CPU."""

    @property
    def is_uneven(self) -> bool:
        """Whether ranks run out of batches at different steps."""
        return len(set(self.num_batches)) > 1


OPTIONS = {
    "defaults": Scenario(),
    "no_views": Scenario(options={"gradient_as_bucket_view": False}),
    "find_unused_parameters": Scenario(network="unused", options={"find_unused_parameters": True}),
    "static_graph": Scenario(network="unused", options={"static_graph": True}),
    "no_sync": Scenario(num_micro_batches=2, num_unsynchronised=1),
    "accumulation": Scenario(num_micro_batches=2),
    "two_streams": Scenario(network="two_streams"),
    "wrapped_on_a_side_stream": Scenario(is_wrapped_on_side_stream=True),
    "bf16": Scenario(autocast=torch.bfloat16),
    "fp16_overflow": Scenario(autocast=torch.float16),
    "sync_batch_norm": Scenario(network="sync_batch_norm"),
    "uneven_inputs": Scenario(num_batches=(NUM_STEPS, 6)),
    "evaluation": Scenario(evaluates=True),
    "own_group": Scenario(group="own"),
    "pairs_of_four_ranks": Scenario(world_size=4, group="pair"),
}


def _reference_of(name: str) -> Literal["torch", "cpu"]:
    """Of some hooks and averagers torch has one that computes the same."""
    return "torch" if name in ("allreduce", "post_local_sgd", "hierarchical_sgd") else "cpu"


TORCH_HOOKS = {
    "allreduce_hook": default_hooks.allreduce_hook,
    "fp16_compress_hook": default_hooks.fp16_compress_hook,
    "quantization_pertensor_hook": quantization_hooks.quantization_pertensor_hook,
    "powerSGD_hook": powerSGD_hook.powerSGD_hook,
}
HOOK_OPTIONS: dict[str, dict[str, Any]] = {"powersgd": {"start_step": 2}, "topk": {"ratio": 0.1}}
AVERAGER_OPTIONS: dict[str, dict[str, Any]] = {
    "hierarchical_sgd": {"periods": {2: 2}},
    "streaming_diloco": {"num_fragments": 1, "delay": 1, "period": 2},
}
SCENARIOS = {
    **OPTIONS,
    # one bucket, as the compression depends on what is in a bucket, and torch's plan is not ours
    **{f"torch's {name}": Scenario(torch_hook=name, options={"bucket_cap_mb": 25}) for name in TORCH_HOOKS},
    **{
        f"hook {name}": Scenario(
            hook={"name": name, **HOOK_OPTIONS.get(name, {})}, reference=_reference_of(name)
        )
        for name in available_hooks()
    },
    "hook bf16 around powersgd": Scenario(
        hook=["bf16", {"name": "powersgd", "start_step": 2}], reference="cpu"
    ),
    **{
        f"averager {name}": Scenario(
            averager={"name": name, "start_step": 0, **AVERAGER_OPTIONS.get(name, {"period": 2})},
            reference=_reference_of(name),
        )
        for name in available_averagers()
    },
    "averager hierarchical_sgd of four ranks": Scenario(
        averager={"name": "hierarchical_sgd", "start_step": 0, "periods": {2: 2, 4: 4}}, world_size=4
    ),
}

COMBINABLE = {
    name: scenario
    for name, scenario in SCENARIOS.items()
    # averagers train inside `no_sync`, without buckets; a hook of torch's is handled as one of ours
    if scenario.averager is None and scenario.torch_hook is None
}
COMBINED = {
    **{
        f"{name}, no_views": replace(scenario, options={**scenario.options, "gradient_as_bucket_view": False})
        for name, scenario in COMBINABLE.items()
        if name != "no_views"
    },
    **{
        f"{name}, no_sync": replace(scenario, num_micro_batches=2, num_unsynchronised=1)
        for name, scenario in COMBINABLE.items()
        # torch's class does not get over a static graph that begins in `no_sync`
        if scenario.num_micro_batches == 1 and not scenario.is_uneven and name != "static_graph"
    },
}
SCENARIOS |= COMBINED


def _base(name: str) -> str:
    """The scenario that one of `COMBINED` was made from; itself otherwise."""
    return name.partition(", ")[0]


# ---------------------------------------------------------------- training, on a rank


class Network(nn.Module):
    """Three linear layers and BatchNorm; the second layer may run on a stream of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(32, 300), nn.Linear(300, 300), nn.Linear(300, 10)
        self.unused = nn.Linear(3, 3) if kind == "unused" else None
        self.norm = nn.BatchNorm1d(300) if kind != "sync_batch_norm" else nn.SyncBatchNorm(300)
        self.side = torch.cuda.Stream() if kind == "two_streams" else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(torch.relu(self.first(x)))
        if self.side is None:
            return self.third(torch.relu(self.second(y)))
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        y.record_stream(self.side)
        with torch.cuda.stream(self.side):
            z = torch.relu(self.second(y))
        main.wait_stream(self.side)
        z.record_stream(main)
        return self.third(z)


@dataclass(kw_only=True)
class Run:
    """What one rank saw of a training."""

    reports: list[simcuda.Report]
    """Of the whole run."""
    steady: list[simcuda.Report]
    """Of the steady steps."""
    values: dict[str, Tensor]
    """Gradients by step and name, parameters at the end; on the CPU."""


class Training:
    """One rank trains with `subject`: our class, torch's, or ours on the CPU."""

    def __init__(self, rank: int, scenario: Scenario, subject: str) -> None:
        self.rank, self.scenario, self.subject = rank, scenario, subject
        self.device = torch.device("cpu" if subject == "cpu" else torch.cuda.current_device())
        self.values: dict[str, Tensor] = {}

    def run(self) -> Run:
        """Trains, and compares nothing yet."""
        scenario, num_reports = self.scenario, len(simcuda.report)
        torch.manual_seed(self.rank)
        self.network = Network(scenario.network).to(self.device)
        self.model = self._wrap()
        self._register_hook()
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.01, momentum=0.9)
        self.averager: Averager | None = None
        self.average = self._averaging()
        self.scaler = torch.amp.GradScaler(
            "cuda", init_scale=2.0**10, enabled=scenario.autocast == torch.float16
        )
        generator = torch.Generator().manual_seed(100 + self.rank)
        shape = (NUM_STEPS, scenario.num_micro_batches, 8, 32)
        batches = torch.randn(shape, generator=generator).to(self.device)
        steps = []
        with self.model.join() if scenario.is_uneven else contextlib.nullcontext():
            for step in range(scenario.num_batches[self.rank % 2]):
                start = len(simcuda.report)
                self._step(step, batches[step])
                steps.append(simcuda.report[start:])
                if scenario.evaluates:
                    self._evaluate(batches[step, 0])
        if self.averager is not None:
            self.averager.run(lambda: None)  # an exchange may be under way, which needs its group
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        reports = simcuda.report[num_reports:]
        self.values |= {f"final {name}": p.detach() for name, p in self.network.named_parameters()}
        values = {name: value.cpu() for name, value in self.values.items()}
        return Run(reports=reports, steady=[r for step in steps[-NUM_STEADY:] for r in step], values=values)

    def _wrap(self) -> Any:
        scenario, is_on_device = self.scenario, self.device.type == "cuda"
        group = dist.group.WORLD if is_on_device else dist.new_group(backend="gloo")
        if scenario.group == "own":
            group = dist.new_group()
        elif scenario.group == "pair":
            group, _ = dist.new_subgroups(2)
        wrapper = DistributedDataParallel if self.subject == "torch" else BucketedDDP
        arguments = {"process_group": group, "bucket_cap_mb": 0.2, **scenario.options}
        if is_on_device:
            arguments["device_ids"] = [self.device]
        if not scenario.is_wrapped_on_side_stream:
            return wrapper(self.network, **arguments)
        with torch.no_grad():  # parameters made on the device, as in Lightning's `init_module`
            for parameter in self.network.parameters():
                parameter.normal_(std=0.05)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model = wrapper(self.network, **arguments)
        torch.cuda.current_stream().wait_stream(stream)
        return model

    def _register_hook(self) -> None:
        scenario = self.scenario
        if scenario.hook is not None and self.subject != "torch":
            hook = build_hook(scenario.hook, self.model.process_group, self.device)
            self.model.register_comm_hook(None, hook)
        elif scenario.torch_hook is not None:
            is_power = scenario.torch_hook == "powerSGD_hook"
            state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2) if is_power else None
            self.model.register_comm_hook(state, TORCH_HOOKS[scenario.torch_hook])

    def _averaging(self) -> Callable[[], None] | None:
        """What averages parameters after each step."""
        spec = self.scenario.averager
        if spec is None:
            return None
        if self.subject != "torch":
            self.averager = ours = build_averager(
                spec, self.network, [self.optimizer], self.model.process_group
            )
            assert not ours.averages_gradients
            return lambda: ours.step(self.optimizer)
        theirs: Any
        if "periods" in spec:
            theirs = HierarchicalModelAverager(OrderedDict(spec["periods"]))
            theirs.step = 1  # it counts from 0, and averages in the steps that a period divides
        else:
            theirs = PeriodicModelAverager(spec["period"], warmup_steps=1)
        return lambda: theirs.average_parameters(self.network.parameters())

    def _step(self, step: int, micro_batches: Tensor) -> None:
        autocast = self.scenario.autocast
        self.optimizer.zero_grad()
        for i, inputs in enumerate(micro_batches):
            is_local = i < self.scenario.num_unsynchronised or self.average is not None
            with self.model.no_sync() if is_local else contextlib.nullcontext():
                with torch.autocast(self.device.type, autocast, enabled=autocast is not None):
                    loss = self.model(inputs).square().mean()
                if autocast == torch.float16 and step == 3 and self.rank == 1:
                    loss = loss * float("inf")
                self.scaler.scale(loss).backward()
        if self.average is None:
            for name, parameter in self.network.named_parameters():
                if parameter.grad is not None:
                    self.values[f"gradient {step} {name}"] = parameter.grad.clone()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.average is not None:
            self.average()

    def _evaluate(self, inputs: Tensor) -> None:
        self.model.eval()
        with torch.no_grad():
            self.values["evaluated"] = self.model(inputs)
        torch.save(self.model.state_dict(), io.BytesIO())
        self.model.train()


@dataclass(kw_only=True)
class Comparison:
    """What one rank found in a scenario."""

    ours: dict[str, Counter[str]]
    """Of our class, as `simcuda.counted` has it."""
    torch: dict[str, Counter[str]]
    """Of torch's class, where that is the reference."""
    differing: list[str]
    """Names of values that differ."""


def compare(rank: int, world_size: int, name: str) -> Comparison:
    """Trains with the reference, then with our class."""
    scenario = SCENARIOS[name]
    reference = Training(rank, scenario, scenario.reference).run()
    ours = Training(rank, scenario, "ours").run()
    differing = sorted(reference.values.keys() ^ ours.values.keys())
    for name in reference.values.keys() & ours.values.keys():
        if not torch.allclose(reference.values[name], ours.values[name], rtol=0, atol=0, equal_nan=True):
            differing.append(name)
    found = [simcuda.counted(run.reports, run.steady) for run in (ours, reference)]
    return Comparison(ours=found[0], torch=found[1], differing=differing)


# ---------------------------------------------------------------- the promises

ALLOWED: dict[tuple[str, str], dict[str, int]] = {
    # its step asks whether the gradients are finite
    ("fp16_overflow", "sync"): {"torch/amp/grad_scaler.py": NUM_STEADY},
    # the layer looks for ranks without a batch, in each forward
    ("sync_batch_norm", "sync"): {"torch/nn/modules/_functions.py": 3 * NUM_STEADY},
    ("sync_batch_norm, no_sync", "sync"): {"torch/nn/modules/_functions.py": 2 * 3 * NUM_STEADY},
    # whether some rank has inputs left, and which, decides what the host does next
    ("uneven_inputs", "sync"): {
        "lightning_ddp/ddp/module.py": NUM_STEADY,
        "torch/nn/parallel/distributed.py": 3 * NUM_STEADY,
    },
    # a parameter that no rank has used keeps its `.grad`, as a rule None, which only the host can leave so:
    # both classes read back once which those are, if this rank has not used all
    ("find_unused_parameters", "sync"): {
        "lightning_ddp/ddp/gradients.py": NUM_STEADY,
        "torch/autograd/graph.py": NUM_STEADY,
    },
    # these hooks of torch wait for the device, and drop tensors that their callbacks read on other streams
    ("torch's powerSGD_hook", "sync"): {"": NUM_STEADY},
    ("torch's powerSGD_hook", "free"): {"": NUM_STEPS - 2},
    ("torch's quantization_pertensor_hook", "sync"): {"": 8 * NUM_STEADY},
    ("torch's quantization_pertensor_hook", "free"): {"": 2 * NUM_STEPS},
}
"""What cannot be avoided: scenario and kind -> file, of ours or of torch's class -> how often (waits: in all
steady steps). Of a combined scenario without an entry, what the base of it has."""


TURNS = {
    f"{name}, {('no_views', 'no_sync')[number % 2]}"
    for number, name in enumerate(name for name in COMBINABLE if name.startswith("hook "))
}
"""Each hook with one of the two, in turns: a hook has a bucket whatever is a view of it."""


def tier(name: str) -> list[Any]:
    if name not in COMBINED:
        return []
    is_of_hook = name.startswith("hook ")
    return [pytest.mark.exhaustive if is_of_hook and name not in TURNS else pytest.mark.slow]


def scenarios(*, of_torch: bool = False) -> list[Any]:
    """The scenarios as parameters; for torch's class as the subject, those in which it has what ours has."""
    return [
        pytest.param(name, marks=tier(name))
        for name, scenario in SCENARIOS.items()
        if not of_torch or (scenario.reference == "torch" and scenario.averager is None)
    ]


@pytest.fixture(scope="module")
def found(simulated_ranks, nccl):
    """What the ranks of a scenario found, in rank order; each scenario is trained once."""

    @functools.cache
    def trained(name: str) -> list[Comparison]:
        if nccl == "nccl2" and "quantization" in name:
            pytest.skip("its callback takes one tensor of all ranks, where nccl2 has one of each rank")
        return simulated_ranks.run(compare, SCENARIOS[name].world_size, name, timeout_s=120)

    return trained


def check_allowed(name: str, kind: str, found: dict[str, Counter[str]]) -> None:
    """Nothing was found but what `ALLOWED` has, not more often, and some of that was."""
    allowed = ALLOWED.get((name, kind)) or ALLOWED.get((_base(name), kind), {})
    left = Counter(found[kind])
    for file, number in allowed.items():
        there = Counter({line: count for line, count in left.items() if line.endswith(file)})
        assert there.total() <= number, there
        left -= there
    assert dict(left) == {}
    assert bool(found[kind]) == bool(allowed), "nobody needs this to be allowed"


@pytest.mark.parametrize("name", scenarios())
@pytest.mark.parametrize("kind", ["race", "free", "sync"])
def test_no_race_no_early_free_and_no_wait_of_the_host_in_a_steady_step(name, kind, found):
    for comparison in found(name):
        check_allowed(name, kind, comparison.ours)


@pytest.mark.parametrize("name", scenarios())
def test_gradients_and_parameters_equal_those_of_the_reference(name, found):
    for comparison in found(name):
        assert comparison.differing == []


@pytest.mark.parametrize("name", scenarios(of_torch=True))
def test_torchs_own_class_passes_the_same_checks(name, found):
    for comparison in found(name):
        for kind in simcuda.KINDS:
            check_allowed(name, kind, comparison.torch)


def sums_by_run(rank: int, world_size: int) -> list[list[float]]:
    group, sums = Group(dist.group.WORLD), []
    for timeout in (None, 60.0):
        total = torch.full((4,), float(rank), device="cuda")
        run(group, functools.partial(dist.all_reduce, total, async_op=True), label="sum", timeout=timeout)
        sums.append(total.tolist())
    return sums


def test_any_collective_of_nccl_may_have_a_deadline_or_none(simulated_ranks):
    assert simulated_ranks.run(sums_by_run, 2) == [[[1.0] * 4] * 2] * 2
