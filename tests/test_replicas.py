"""The single-process data-parallel family, compared with the plain module on the whole batch."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import traceback
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
from harness import on_ranks, run_threads
from models import batch, build
from torch import Tensor, nn

from lightning_ddp.ddp.module import BucketedDDP
from lightning_ddp.errors import ConfigurationError
from lightning_ddp.replicas import DataParallel, data_parallel, gather, parallel_apply, replicate, scatter

TWO = ["cpu", "cpu"]
THREE = ["cpu"] * 3
DEADLINE_S = 10.0


class Pair(NamedTuple):
    first: object
    second: object


class Scale(nn.Module):
    def __init__(self, weight: float = 3.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Choosy(nn.Module):
    """Uses one of two weights by the sign of the first input, and a third one never."""

    def __init__(self) -> None:
        super().__init__()
        self.positive, self.negative, self.unused = Scale(), Scale(), Scale()

    def forward(self, x: Tensor) -> Tensor:
        return self.positive(x) if x[0] > 0 else self.negative(x)


class Listed(nn.Module):
    """Parameters in a list, and one that is made of two others."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(4, 4), torch.randn(4, 4)])
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return self.normed(x)


class Nested(nn.Module):
    """Takes and returns containers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()

    def forward(self, sample: Pair, *, extra: dict[str, Tensor], times: int) -> dict[str, object]:
        y = self.scale(sample.first) + extra["add"]
        return {"again": [Pair(y * times, sample.second)], "none": None}


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], rtol: float = 1e-6) -> None:
    assert found.keys() == wanted.keys()
    assert wanted
    for name, grad in wanted.items():
        # atol for entries that are a rounding error beside the others of their tensor
        atol = rtol * float(grad.abs().max())
        torch.testing.assert_close(found[name], grad, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def train_step(run, inputs: Tensor, labels: Tensor) -> None:
    nn.functional.cross_entropy(run(inputs), labels).backward()


def assert_trains_as_plain(
    plain: nn.Module, use: Callable[[nn.Module], object], devices=TWO, rtol: float = 1e-6
) -> nn.Module:
    """Lets `use` run the plain module, then a copy of it over the devices. Returns the copy."""
    module = copy.deepcopy(plain)
    use(plain)
    use(DataParallel(module, devices))
    assert_same(gradients(module), gradients(plain), rtol)
    return module


# ------------------------------------------------------------------ gradients


@pytest.mark.parametrize("devices", [["cpu"], TWO, THREE, ["cpu"] * 4], ids=len)
@pytest.mark.parametrize("name", ["mlp", "transformer", "shared_and_frozen", "mixed_dtypes"])
def test_outputs_and_gradients_are_those_of_the_plain_module_on_the_whole_batch(name, devices) -> None:
    inputs, labels = batch(name, 0, 0)  # 6 samples: chunks of 2, 2, 2 on 4 devices
    rtol = 2e-2 if name == "mixed_dtypes" else 1e-6  # bfloat16
    assert_trains_as_plain(build(name, seed=1), lambda run: train_step(run, inputs, labels), devices, rtol)


SEQUENCES = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(0))
FIRST, SECOND = (batch("mlp", 0, step)[0] for step in range(2))


def gradient_penalty(run) -> None:
    inputs = FIRST.clone().requires_grad_()
    (grad,) = torch.autograd.grad(run(inputs).square().sum(), inputs, create_graph=True)
    grad.square().mean().backward()


def nested(run) -> None:
    output = run(Pair(torch.arange(5.0), "cat"), extra={"add": torch.arange(5.0) * 10}, times=2)
    assert (output["again"][0].second, output["none"]) == ("cat", None)
    output["again"][0].first.square().sum().backward()


@pytest.mark.parametrize(
    ("make", "use", "num_gradients"),
    [
        (
            lambda: nn.LSTM(4, 5, batch_first=True),
            lambda run: run(SEQUENCES)[0].square().mean().backward(),
            4,
        ),
        (Listed, lambda run: run(SEQUENCES[:, 0]).square().mean().backward(), 5),
        (lambda: build("mlp", seed=1), lambda run: (run(FIRST) * run(SECOND)).mean().backward(), 6),
        (lambda: build("mlp", seed=1), gradient_penalty, 6),
        (Nested, nested, 1),
    ],
    ids=[
        "LSTM",
        "parameter list and parametrization",
        "two uses of one wrapper",
        "gradient penalty",
        "nested",
    ],
)
def test_any_module_and_use_trains_as_the_plain_module(make, use, num_gradients) -> None:
    assert len(gradients(assert_trains_as_plain(make(), use))) == num_gradients


def test_batch_norm_normalises_each_chunk_and_the_running_statistics_are_those_of_replica_0() -> None:
    module = build("conv_batch_norm", seed=1)
    by_hand = copy.deepcopy(module)
    inputs, labels = batch("conv_batch_norm", 0, 0)
    running = {n: b.clone() for n, b in by_hand.named_buffers()}
    first = by_hand(inputs[:3])
    after_first = {n: b.clone() for n, b in by_hand.named_buffers()}
    nn.functional.cross_entropy(torch.cat([first, by_hand(inputs[3:])]), labels).backward()
    train_step(DataParallel(module, TWO), inputs, labels)
    assert_same(gradients(module), gradients(by_hand))
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, after_first[name]), name
        assert not torch.equal(buffer, running[name]), name


def test_the_weights_of_an_lstm_are_also_in_a_list() -> None:
    replica = replicate(nn.LSTM(4, 5), TWO)[1]
    weights = zip(replica._flat_weights_names, replica._flat_weights, strict=True)
    assert all(weight is getattr(replica, name) for name, weight in weights)


def test_second_derivatives_of_the_parameters_pass_through_the_sum_over_replicas() -> None:
    module = Scale(3.0)
    output = data_parallel(module, torch.tensor([1.0, 2.0]), TWO).pow(3).sum()
    (grad,) = torch.autograd.grad(output, module.weight, create_graph=True)
    grad.sum().backward()
    assert module.weight.grad.item() == 6 * 3.0 * (1 + 8)  # d2/dw2 of (x w)^3 is 6 w x^3


def test_a_parameter_that_no_replica_uses_keeps_no_gradient_and_one_used_by_some_gets_theirs() -> None:
    module = Choosy()
    data_parallel(module, torch.tensor([1.0, 2.0, -4.0, -8.0]), TWO).sum().backward()
    assert module.positive.weight.grad.tolist() == [3.0]
    assert module.negative.weight.grad.tolist() == [-12.0]
    assert module.unused.weight.grad is None


def test_sparse_gradients_stay_sparse_where_a_replica_has_none() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(3, 1, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x) if x[0] > 0 else torch.zeros(len(x), 1)

    module = Sometimes()
    data_parallel(module, torch.tensor([0, 0, 1, 2]), TWO).sum().backward()
    data_parallel(module, torch.tensor([1, 1, 1, 2]), TWO).sum().backward()
    assert module.table.weight.grad.is_sparse
    assert module.table.weight.grad.to_dense().flatten().tolist() == [0.0, 4.0, 2.0]


def test_an_inplace_change_of_the_inputs_by_one_replica_does_not_disturb_the_others() -> None:
    class Inplace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.relu_())

    inputs = torch.tensor([[1.0, -1.0], [2.0, -2.0]])
    module = Inplace()
    data_parallel(module, inputs, TWO).sum().backward()
    assert torch.equal(module.linear.weight.grad, torch.tensor([[3.0, 0.0], [3.0, 0.0]]))
    assert inputs.tolist() == [[1.0, -1.0], [2.0, -2.0]]


# ------------------------------------------------------------------ replicate


def test_replicas_are_distinct_tensors_with_an_edge_and_the_original_stays_as_it_was() -> None:
    module = build("shared_and_frozen", seed=1)
    before = dict(module.named_parameters())
    replicas = replicate(module, TWO)
    addresses = {r.trained.weight.data_ptr() for r in (module, *replicas)}
    assert len(addresses) == 3
    for replica in replicas:
        assert torch.equal(replica.trained.weight, module.trained.weight)
        assert replica.trained.weight.grad_fn is not None
        assert not replica.frozen.weight.requires_grad
        assert list(replica.parameters()) == []
        assert replica.embedding.weight is replica.output.weight
        assert replica.output.bias is None
    assert dict(module.named_parameters()).keys() == before.keys()
    assert all(p is before[n] and p.is_leaf for n, p in module.named_parameters())


def test_a_module_under_two_names_is_one_module_in_a_replica() -> None:
    shared = Scale()
    replica = replicate(nn.ModuleDict({"a": shared, "b": shared}), TWO)[1]
    assert replica["a"] is replica["b"]
    assert replica["a"] is not shared


def test_buffers_are_shared_with_the_first_replica_on_their_device_and_copied_for_the_others() -> None:
    module = nn.BatchNorm1d(2)
    replicas = replicate(module, ["meta", "cpu", "cpu"])
    assert replicas[1].running_mean is module.running_mean
    assert torch.equal(replicas[2].running_mean, module.running_mean)
    assert replicas[2].running_mean.data_ptr() != module.running_mean.data_ptr()
    assert {t.device.type for t in (replicas[0].running_mean, replicas[0].weight)} == {"meta"}
    assert replicate(module, ["cpu"])[0].running_mean is module.running_mean


def test_hooks_and_attributes_are_kept() -> None:
    module = Scale()
    module.note = "kept"
    seen = []
    module.register_forward_hook(lambda m, args, output: seen.append(m))
    replicas = replicate(module, TWO)
    parallel_apply(replicas, [torch.ones(1)] * 2)
    assert {id(m) for m in seen} == {id(r) for r in replicas}
    assert [r.note for r in replicas] == ["kept"] * 2


def test_replicas_are_detached_under_no_grad() -> None:
    with torch.no_grad():
        replicas = replicate(Scale(), TWO)
    assert [r.weight.requires_grad for r in replicas] == [False, False]
    assert [r.weight.item() for r in replicas] == [3.0, 3.0]


def test_a_module_compiled_in_place_runs_its_replicas_with_their_own_parameters() -> None:
    module = Scale()
    module._compiled_call_impl = module._call_impl  # what module.compile() binds, without the compiler
    data_parallel(module, torch.ones(2), TWO)
    assert all(r._compiled_call_impl is None for r in replicate(module, TWO))


class _Wrapper(nn.Module):
    """The shape of what torch.compile returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


# ------------------------------------------------------------------ scatter


@pytest.mark.parametrize(
    ("size", "num_devices", "expected"),
    [(4, 2, [2, 2]), (3, 2, [2, 1]), (1, 2, [1]), (5, 4, [2, 2, 1]), (0, 2, [0]), (3, 1, [3])],
)
def test_chunks_are_as_equal_as_they_can_be_and_fewer_than_devices_where_rows_lack(
    size, num_devices, expected
) -> None:
    pieces = scatter(torch.arange(size), ["cpu"] * num_devices)
    assert [len(piece) for piece in pieces] == expected
    assert torch.cat(pieces).tolist() == list(range(size))


def test_scatter_reaches_nested_containers_keeps_their_kinds_and_repeats_the_rest() -> None:
    marker = object()
    x = torch.arange(4)
    inputs = (
        [x],
        Pair(x, marker),
        OrderedDict(b=x, a="text"),
        defaultdict(int, k=x),
        torch.return_types.max((x, x)),
    )
    pieces = scatter(inputs, TWO)
    assert len(pieces) == 2
    for i, (listed, pair, ordered, default, maximum) in enumerate(pieces):
        tensors = (listed[0], pair.first, ordered["b"], default["k"], maximum.values)
        assert [tensor.tolist() for tensor in tensors] == [[2 * i, 2 * i + 1]] * 5
        assert [type(x) for x in (pair, ordered, maximum)] == [Pair, OrderedDict, torch.return_types.max]
        assert (pair.second, list(ordered), ordered["a"]) == (marker, ["b", "a"], "text")
        assert default["other"] == 0
    assert inputs[3].keys() == {"k"}


def test_scatter_splits_along_dim_and_places_the_chunks() -> None:
    pieces = scatter(torch.arange(6).view(2, 3), ["cpu", "meta"], dim=1)
    assert pieces[0].tolist() == [[0, 1], [3, 4]]
    assert (pieces[1].device.type, tuple(pieces[1].shape)) == ("meta", (2, 1))
    assert scatter(torch.arange(6).view(2, 3), TWO, dim=-1)[1].tolist() == [[2], [5]]
    assert scatter(torch.tensor(1.0), ["cpu"])[0].item() == 1.0  # nothing to split


def test_without_tensors_all_is_repeated_for_each_device() -> None:
    assert scatter(("text", [1]), THREE) == [("text", [1])] * 3


# ------------------------------------------------------------------ gather


def test_gather_joins_nested_containers_and_is_differentiable() -> None:
    a, b = torch.ones(2, 1, requires_grad=True), torch.ones(1, 1, requires_grad=True)
    joined = gather([{"y": Pair(a, "t"), "z": None}, {"y": Pair(b, "t"), "z": None}], "cpu")
    assert type(joined["y"]) is Pair
    assert (joined["y"].second, joined["z"]) == ("t", None)
    (joined["y"].first * torch.tensor([[1.0], [2.0], [3.0]])).sum().backward()
    assert a.grad.tolist() == [[1.0], [2.0]]
    assert b.grad.tolist() == [[3.0]]


def test_scalars_become_a_vector_with_a_warning() -> None:
    losses = [torch.tensor(1.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)]
    with pytest.warns(UserWarning, match=r"output\['loss'\] has no dimensions in any replica"):
        joined = gather([{"loss": loss} for loss in losses], "cpu")
    assert joined["loss"].tolist() == [1.0, 2.0]
    joined["loss"].sum().backward()
    assert [loss.grad.item() for loss in losses] == [1.0, 1.0]


# ------------------------------------------------------------------ parallel_apply


def test_each_replica_has_a_thread_of_its_own_and_they_run_at_once() -> None:
    barrier = threading.Barrier(3, timeout=DEADLINE_S)

    def replica(x: int, *, plus: int) -> tuple[int, int]:
        barrier.wait()  # breaks unless all three are here
        return x + plus, threading.get_ident()

    outputs = parallel_apply([replica] * 3, [1, (2,), [3]], [{"plus": 10 * i} for i in range(3)])
    assert [value for value, _ in outputs] == [1, 12, 23]
    assert len({ident for _, ident in outputs} | {threading.get_ident()}) == 4


def test_the_first_error_in_replica_order_is_raised_after_all_threads_have_ended() -> None:
    threads: dict[str, threading.Thread] = {}
    begun = threading.Barrier(3, timeout=DEADLINE_S)
    raised, ended = threading.Event(), threading.Event()

    def begin(name: str) -> None:
        threads[name] = threading.current_thread()
        begun.wait()

    def late() -> None:
        begin("late")
        raised.wait(DEADLINE_S)
        raise ValueError("late in time, first in order")

    def early() -> None:
        begin("early")
        raised.set()
        raise TypeError("early")

    def fine() -> None:
        begin("fine")
        raised.wait(DEADLINE_S)
        ended.set()

    with pytest.raises(ValueError, match=r"^late in time, first in order\n") as caught:
        parallel_apply([late, early, fine], [()] * 3, devices=THREE)
    assert ended.is_set()
    assert not any(thread.is_alive() for thread in threads.values())
    assert caught.value.__notes__ == ["raised by replica 0 on cpu"]
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "late"


def test_an_exit_passes_unchanged() -> None:
    with pytest.raises(SystemExit) as caught:
        parallel_apply([sys.exit] * 2, [(3,)] * 2)
    assert caught.value.code == 3


def test_all_replicas_run_although_the_first_has_raised_before_the_second_begins() -> None:
    begun = []

    def replica(index: int) -> None:
        begun.append(index)
        if index == 0:
            raise ValueError("now")

    for _ in range(200):
        begun.clear()
        with pytest.raises(ValueError, match="now"):
            parallel_apply([replica] * 8, list(range(8)))
        assert sorted(begun) == list(range(8))


def test_an_error_does_not_keep_the_replicas_tensors_alive() -> None:
    alive = []

    def replica() -> None:
        tensor = torch.ones(1)
        alive.append(weakref.ref(tensor))
        raise ValueError("now")

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(ValueError, match="now"):
            parallel_apply([replica] * 2, [()] * 2)
        assert len(alive) == 2
        assert [ref() for ref in alive] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_the_threads_take_on_the_callers_settings_and_the_caller_keeps_them(num_replicas) -> None:
    def state(*_: object) -> tuple[object, ...]:
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
            torch.is_autocast_cache_enabled(),
        )

    def seen() -> list[object]:
        return parallel_apply([state] * num_replicas, [()] * num_replicas, devices=["cpu"] * num_replicas)

    half = torch.autocast("cpu", dtype=torch.float16, cache_enabled=False)
    for context, expected in (
        (nullcontext(), (True, False, False, None, True)),
        (torch.no_grad(), (False, False, False, None, True)),
        (torch.inference_mode(), (False, True, False, None, True)),
        (half, (True, False, True, torch.float16, False)),
    ):
        with context:
            assert seen() == [expected] * num_replicas
            assert state() == expected
    assert state() == (True, False, False, None, True)


# ------------------------------------------------------------------ data_parallel and DataParallel


@pytest.mark.parametrize("devices", [["cpu"], TWO], ids=len)
def test_empty_batches_and_no_inputs_run_once(devices) -> None:
    module = Scale()
    empty = data_parallel(module, torch.empty(0, 2), devices)
    assert tuple(empty.shape) == (0, 2)
    empty.sum().backward()
    assert module.weight.grad.tolist() == [0.0]

    class Bare(Scale):
        def forward(self) -> Tensor:
            return self.weight

    assert data_parallel(Bare(), None, devices).tolist() == [3.0]
    assert DataParallel(Bare(), devices)().tolist() == [3.0]


def test_state_dict_has_torchs_keys() -> None:
    module = build("conv_batch_norm", seed=1)
    assert list(DataParallel(module, TWO).state_dict()) == [f"module.{name}" for name in module.state_dict()]


def test_one_device_runs_the_module_itself_and_passes_scalars_through() -> None:
    seen = []
    module = Scale()
    module.register_forward_hook(lambda m, args, output: seen.append((m, threading.get_ident())))
    output = DataParallel(module, ["cpu"])(torch.tensor(2.0))
    assert seen == [(module, threading.get_ident())]
    assert output.tolist() == [6.0]


@pytest.mark.parametrize("devices", [["cpu"], TWO], ids=len)
def test_outputs_are_gathered_on_the_output_device(devices) -> None:
    wrapped = DataParallel(Scale(), devices, output_device="meta")
    assert wrapped(torch.ones(2)).device.type == "meta"


def test_dim_is_that_of_inputs_and_outputs() -> None:
    inputs = torch.arange(6.0).view(2, 3)
    assert torch.equal(DataParallel(Scale(), TWO, dim=1)(inputs), 3 * inputs)


def gathered(*outputs: object) -> Callable[[], object]:
    return lambda: gather(outputs, "cpu")


REFUSED = [
    (
        lambda: replicate(nn.ModuleDict({"inner": _Wrapper(Scale())}), TWO),
        r"^inner is a _Wrapper, and scripted and compiled modules",
    ),
    (
        lambda: scatter({"x": torch.ones(4, 2), "mask": [torch.ones(1, 2)]}, TWO),
        r"inputs\['x'\] of shape \(4, 2\): 2; inputs\['mask'\]\[0\] of shape \(1, 2\): 1",
    ),
    (
        lambda: DataParallel(Scale(), TWO)(torch.ones(2), scale=torch.tensor(1.0)),
        r"kwargs\['scale'\] of shape \(\) has no dimension 0",
    ),
    (gathered(), "gather got no outputs"),
    (gathered({"n": 1}, {"n": 2}), r"output\['n'\] is not a tensor and differs between the replicas: 1, 2"),
    (
        gathered({"a": torch.ones(1)}, {"b": torch.ones(1)}),
        r"output holds different things .*\['a'\]; \['b'\]",
    ),
    (
        gathered([torch.ones(1)], [None]),
        r"output\[0\] is of different types in the replicas: Tensor, NoneType",
    ),
    (gathered([torch.ones(1)], []), r"output holds different things in the replicas: \[0\]; nothing"),
    (
        lambda: parallel_apply([int] * 2, [1], [{}, {}], THREE),
        r"2 replicas; got 1 inputs, 2 kwargs and 3 devices",
    ),
    (
        lambda: data_parallel(Scale(), torch.ones(2, 2), ["meta", "cpu"]),
        "parameter weight is on cpu; expected all parameters and buffers on meta",
    ),
    (
        lambda: data_parallel(nn.BatchNorm1d(2, affine=False), torch.ones(2, 2), ["meta", "cpu"]),
        "buffer running_mean is on cpu; expected .* on meta",
    ),
    (lambda: DataParallel(Scale(), []), "devices is empty"),
    (
        lambda: DataParallel(Scale(), [4096]),
        f"device 4096 does not exist: this machine has {torch.cuda.device_count()}",
    ),
    (lambda: DataParallel(Scale(), TWO, output_device=-1), "device -1 does not exist"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_done_is_refused_by_name(call, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the default is the CPU only where there is no CUDA")
def test_without_cuda_the_default_is_one_cpu() -> None:
    assert DataParallel(Scale()).devices == [torch.device("cpu")]
    assert data_parallel(Scale(), torch.ones(1)).tolist() == [3.0]


# ------------------------------------------------------------------ several processes


def gradients_of_steps(run, module: nn.Module, batches) -> list[dict[str, Tensor]]:
    optimizer, found = torch.optim.SGD(module.parameters(), lr=0.1), []
    for inputs, labels in batches:
        optimizer.zero_grad()
        train_step(run, inputs, labels)
        found.append(gradients(module))
        optimizer.step()
    return found


@pytest.mark.parametrize("name", ["mlp", "shared_and_frozen"])
def test_several_devices_in_several_processes_give_the_gradients_of_the_whole_batch(name) -> None:
    batches = [[batch(name, rank, step) for step in range(3)] for rank in range(2)]
    whole = [
        [torch.cat(parts) for parts in zip(*of_ranks, strict=True)] for of_ranks in zip(*batches, strict=True)
    ]
    plain = build(name, seed=1)
    expected = gradients_of_steps(plain, plain, whole)

    def rank_main(rank, world_size, process_group):
        module = build(name, seed=1 + rank)  # rank 0's weights are broadcast
        wrapped = BucketedDDP(DataParallel(module, TWO), process_group=process_group)
        return gradients_of_steps(
            wrapped, module, batches[rank]
        )  # buckets are planned anew before the second

    for found in run_threads(rank_main, 2):
        for grads, wanted in zip(found, expected, strict=True):
            assert_same(grads, wanted)


@on_ranks(2)
def test_the_hybrid_finds_parameters_that_no_replica_uses(rank, process_group) -> None:
    module = Choosy()
    wrapped = BucketedDDP(DataParallel(module, TWO), process_group=process_group, find_unused_parameters=True)
    wrapped(torch.full((2,), rank + 1.0)).sum().backward()
    assert (module.positive.weight.grad.item(), module.unused.weight.grad) == (3.0, None)


# ------------------------------------------------------------------ GPU

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # torch, in a thread that has no context yet
def test_on_cuda_gradients_are_those_of_the_plain_module_and_devices_and_streams_are_current() -> None:
    indices = [i % torch.cuda.device_count() for i in range(2)]
    plain = build("mlp", seed=1).to("cuda:0")
    module = copy.deepcopy(plain)
    seen = []

    def note(replica: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        seen.append((torch.cuda.current_device(), args[0].device.index, torch.cuda.current_stream()))

    module.register_forward_hook(note)
    inputs, labels = batch("mlp", 0, 0)
    inputs, labels = inputs.to("cuda:0"), labels.to("cuda:0")
    train_step(plain, inputs, labels)
    side = torch.cuda.Stream("cuda:0")
    side.wait_stream(torch.cuda.current_stream("cuda:0"))
    with torch.cuda.stream(side):
        expected = [(i, i, torch.cuda.current_stream(i)) for i in indices]
        train_step(DataParallel(module, indices), inputs, labels)
    torch.cuda.synchronize()
    assert sorted(seen, key=lambda entry: entry[0]) == sorted(expected, key=lambda entry: entry[0])
    assert_same(gradients(module), gradients(plain), rtol=1e-5)
    assert DataParallel(module).devices == [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
