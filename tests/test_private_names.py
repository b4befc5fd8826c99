"""Canaries for the private names of torch, Lightning, Hydra and OmegaConf that the package uses.

Each test says what some names do for the package, and fails, with the version and the places of use, where a
dependency drops or changes them. The last tests read the package and find the names that have no canary.
"""

from __future__ import annotations

import ast
import copy
import ctypes
import functools
import importlib
import inspect
import itertools
import multiprocessing
import operator
import pkgutil
import queue
import random
import re
import signal
import sys
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import numpy
import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from conformance.torch_names import OfReducer, OfWrapper
from harness import run_threads
from lightning_fabric.accelerators import CPUAccelerator
from lightning_fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning_fabric.strategies import DDPStrategy as FabricStrategy
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.demos.boring_classes import BoringModel
from pytorch_lightning.strategies import DDPStrategy
from torch.nn.parallel import distributed as torch_ddp
from torch.utils.data import DataLoader, DistributedSampler

import lightning_ddp
from lightning_ddp import _lightning
from lightning_ddp._torch import (
    forget_groups,
    has_communicator,
    refuse_collectives,
    run_eagerly,
    without_engine_context,
)
from lightning_ddp.ddp.buffers import unseen_by_autograd
from lightning_ddp.ddp.module import BucketedDDP
from lightning_ddp.errors import UnsupportedVersionError
from lightning_ddp.hydra_jobs.compositions import JobCallbacks, JobLoader

PACKAGE = Path(lightning_ddp.__file__).parent
DEPENDENCIES = ("torch", "pytorch_lightning", "lightning_fabric", "hydra", "omegaconf", "torchmetrics")
TORCH_SOURCE = Path(torch.__file__).parent
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
CPU = torch.device("cpu")

# dependencies warn of each other, in versions that are not the pinned ones
pytestmark = pytest.mark.filterwarnings("ignore")

CANARIES: dict[str, list[str]] = defaultdict(list)
"""Private name -> the paths by which canaries have it."""


def is_private(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"_(?!_)\w+(?<!__)", name) is not None


def canary(*paths: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Marks a test of what the package relies on.

    Args:
        *paths: what is used, by its full name. It is looked up before the test; what follows `()` belongs to
            an object, which the test makes. With a `?` in front a version may lack it.
    """
    for path in paths:
        for name in re.findall(r"\w+", path):
            if is_private(name):
                CANARIES[name].append(path)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def checked(*args: Any, **kwargs: Any) -> None:
            try:
                for path in paths:
                    if not path.startswith("?"):
                        pkgutil.resolve_name(path.partition("()")[0])
                test(*args, **kwargs)
            except Exception as error:
                package = paths[0].lstrip("?").partition(".")[0]
                version = importlib.import_module(package).__version__
                raise AssertionError(
                    f"{package} {version} is not as lightning_ddp needs it: {test.__doc__}\n{_places(paths)}"
                ) from error

        return checked

    return decorate


def takes(function: Any, *args: Any, **kwargs: Any) -> None:
    """Checks that a function can be called so."""
    inspect.signature(function).bind(*args, **kwargs)


def same_parameters(ours: Any, theirs: Any) -> bool:
    """Whether an override has the parameters of what it overrides."""
    return list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    """A default group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


# ---------------------------------------------------------------------- torch: tensors and autograd


@canary("torch.autograd.Variable._execution_engine")
def test_backward_calls_back_when_all_gradients_are_there() -> None:
    """The engine calls what a hook has queued once, at the end of this backward."""
    weight, seen = torch.ones(2, requires_grad=True), []
    loss = (2 * weight).sum()
    loss.register_hook(
        lambda _: torch.autograd.Variable._execution_engine.queue_callback(
            lambda: seen.append(weight.grad.tolist())
        )
    )
    loss.backward(retain_graph=True)
    assert seen == [[2.0, 2.0]]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="there is nothing to put away before torch 2.13")
@canary(
    "torch._C._is_key_in_tls",
    "torch._C._get_obj_in_tls",
    "torch._C._stash_obj_in_tls",
    "torch._C._remove_obj_from_tls",
)
def test_what_backward_keeps_in_its_thread_can_be_put_away_and_back() -> None:
    """In backward the thread's state has a "context", which can be removed and put back."""
    seen = []

    def look(_: torch.Tensor) -> None:
        seen.append(torch._C._get_obj_in_tls("context"))
        with without_engine_context():
            seen.append(torch._C._is_key_in_tls("context"))
        seen.append(torch._C._get_obj_in_tls("context"))

    loss = torch.ones(1, requires_grad=True).sum()
    loss.register_hook(look)
    loss.backward()
    before, is_kept, after = seen
    assert before is after is not None
    assert not is_kept


@canary("torch.Tensor._use_count")
def test_it_is_known_whether_c_plus_plus_holds_a_tensor(world) -> None:
    """A tensor's use count is 1 but while C++ holds it: as the base of a view, or in a collective."""
    tensor = torch.ones(1 << 20)
    assert tensor._use_count() == 1
    view = tensor.view(-1)
    assert tensor._use_count() == 2
    del view
    work = world.allreduce([tensor])
    assert tensor._use_count() > 1
    work.wait()
    del work
    deadline = time.monotonic() + 10
    while tensor._use_count() > 1:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@canary("torch.autograd._unsafe_preserve_version_counter")
def test_tensors_change_unseen_by_autograd() -> None:
    """What is written in this context does not count, of all of a tuple of tensors."""
    buffers = [torch.ones(2), torch.ones(1)]
    with unseen_by_autograd(buffers):
        for buffer in buffers:
            buffer.mul_(3)
    assert [(buffer._version, buffer[0].item()) for buffer in buffers] == [(0, 3.0), (0, 3.0)]


@canary("torch.Tensor._post_accumulate_grad_hooks")
def test_the_hooks_on_a_gradient_can_be_counted() -> None:
    """None, or a dict of the hooks that run once a parameter's gradient is accumulated."""
    parameter = torch.nn.Parameter(torch.ones(1))
    assert not parameter._post_accumulate_grad_hooks
    parameter.register_post_accumulate_grad_hook(lambda _: None)
    assert len(parameter._post_accumulate_grad_hooks) == 1


def test_the_memory_of_pythons_and_numpys_generator_is_what_they_tell_as_their_state() -> None:
    """Else the cheap comparison at each step boundary is not used, and the states are copied."""
    python: Any = random.getstate.__self__  # type: ignore[attr-defined]
    assert python.random == random.random
    _, (*key, position), _ = python.getstate()
    told = array("I", [position, *key]).tobytes()
    assert ctypes.string_at(id(python) + object.__basicsize__, len(told)) == told
    generator = numpy.random.get_bit_generator()
    _, numbers, place, *_ = numpy.random.get_state()
    told = numbers.tobytes() + place.to_bytes(4, sys.byteorder)
    assert ctypes.string_at(generator.ctypes.state_address, len(told)) == told


@canary("torch._foreach_copy_", "torch._foreach_mul_", "torch._foreach_add_")
def test_lists_of_tensors_are_changed_at_once() -> None:
    """Copies lists of any types, also of views, and multiplies and adds in place."""
    flat = torch.zeros(3)
    parts = [flat[:1], flat[1:]]
    torch._foreach_copy_(parts, [torch.ones(1, dtype=torch.bfloat16), torch.full((2,), 2.0)])
    torch._foreach_mul_(parts, 3.0)
    torch._foreach_add_(parts, [torch.ones(1), torch.ones(2)])
    assert flat.tolist() == [4.0, 7.0, 7.0]


@canary("torch.distributed.distributed_c10d._get_default_store")
def test_the_store_of_the_default_group_is_known() -> None:
    """That which its ranks met in, for other keys of theirs."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        dist.distributed_c10d._get_default_store().set("ours", "1")
        assert dist.distributed_c10d._get_default_store().get("ours") == b"1"
    finally:
        dist.destroy_process_group()


@canary("torch.autograd._profiler_enabled")
def test_it_is_known_whether_a_profiler_records() -> None:
    """True while a profiler records this thread."""
    assert torch.autograd._profiler_enabled() is False
    with torch.autograd.profiler.profile():
        assert torch.autograd._profiler_enabled() is True
    assert torch.autograd._profiler_enabled() is False


@canary(
    "torch.utils._pytree.keystr",
    "torch.utils._pytree.tree_flatten_with_path",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map",
    "torch.utils._pytree.tree_unflatten",
)
def test_nested_containers_are_walked() -> None:
    """Leaves of dicts, lists and tuples in order; containers of the same kinds with other leaves."""
    nested = {"a": [1, (2, 3)], "b": None}
    assert torch.utils._pytree.tree_leaves(nested)[:3] == [1, 2, 3]
    doubled = torch.utils._pytree.tree_map(lambda leaf: leaf and 2 * leaf, nested)
    assert doubled == {"a": [2, (4, 6)], "b": None}
    leaves, structure = torch.utils._pytree.tree_flatten_with_path(nested)
    assert torch.utils._pytree.keystr(leaves[1][0]) == "['a'][1][0]"
    assert torch.utils._pytree.tree_unflatten([2, 4, 6, None], structure) == doubled


# ---------------------------------------------------------------------- torch: modules


@canary(
    "torch.nn.Module()._parameters",
    "torch.nn.Module()._buffers",
    "torch.nn.Module()._modules",
    "torch.nn.Module._replicate_for_data_parallel",
    "torch.nn.Module._compiled_call_impl",
)
def test_a_module_keeps_what_it_owns_in_dicts_that_replicas_have_their_own_of() -> None:
    """Three dicts by name, of which a replica gets copies; a compiled call is None for none."""
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    layer = module[0]
    assert list(module._modules) == ["0"]
    assert list(layer._parameters) == ["weight", "bias"]
    assert list(layer._buffers) == ["running_mean", "running_var", "num_batches_tracked"]
    layer._buffers["running_mean"] = replaced = torch.ones(2)
    assert layer.running_mean is replaced
    replica = layer._replicate_for_data_parallel()
    assert type(replica) is torch.nn.BatchNorm1d
    replica._buffers["running_mean"] = None
    assert layer.running_mean is replaced
    assert replica._modules is not layer._modules
    assert layer._compiled_call_impl is None


@canary("torchmetrics.Metric()._update_count", "torchmetrics.Metric()._computed")
def test_a_metric_counts_its_updates_and_remembers_what_it_computed() -> None:
    """Both can be set: a metric without `_computed` computes anew."""
    import torchmetrics

    metric = torchmetrics.SumMetric()
    metric.update(2.0)
    assert metric._update_count == 1
    assert metric.compute() == metric._computed == 2
    metric.metric_state["sum_value"]
    metric.sum_value = torch.tensor(5.0)
    assert metric.compute() == 2
    metric._computed = None
    metric._update_count = 1
    assert metric.compute() == 5


# ---------------------------------------------------------------------- torch: process groups


@canary("torch.distributed.distributed_c10d._world")
def test_torch_tells_its_groups_with_their_stores_and_names(world) -> None:
    """`pg_map` has (backend, store) of each group, and `pg_names` its name, by their number."""
    backend, store = dist.distributed_c10d._world.pg_map[world]
    assert backend == "gloo"
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert str(dist.distributed_c10d._world.pg_names[world])
    assert dist.distributed_c10d._world.group_count > 0
    assert "other" not in dist.distributed_c10d._world.pg_map


@canary(
    "torch._C._distributed_c10d.FakeProcessGroup",
    "torch._C._distributed_c10d.FakeProcessGroup._create_internal",
    "torch.distributed.ProcessGroup._register_backend",
    "torch.distributed.ProcessGroup._device_types",
)
def test_a_group_can_be_made_to_refuse_its_collectives(world) -> None:
    """A backend that is registered later, of another type, is the one that is called."""
    group = dist.new_group([0])
    refuse_collectives(group)
    with pytest.raises(RuntimeError, match="collective operation error"):
        dist.all_reduce(torch.ones(1), group=group)


@canary(
    "torch.distributed.ProcessGroup._get_backend",
    "torch.distributed.ProcessGroupGloo._Options",
    "torch.distributed.ProcessGroupGloo._Options()._devices",
    "torch.distributed.ProcessGroupGloo._Options()._timeout",
)
def test_a_gloo_group_is_made_like_another_with_its_options() -> None:
    """The backend of a device has a name and options, of which another one is made."""

    shared = dist.HashStore()

    def rank_main(rank: int, world_size: int, group: dist.ProcessGroup) -> float:
        first = group._get_backend(CPU)
        assert first.name().lower() == "gloo"
        options = dist.ProcessGroupGloo._Options()
        options._devices = first.options._devices
        options._timeout = first.options._timeout
        assert first.options._timeout.total_seconds() == 10
        made = dist.ProcessGroupGloo(dist.PrefixStore("sibling", shared), rank, world_size, options)
        tensor = torch.tensor([rank + 1.0])
        made.allreduce([tensor]).wait()
        return tensor.item()

    assert run_threads(rank_main, 2) == [3.0, 3.0]


@canary("?torch.distributed.ProcessGroupGloo._set_default_timeout")
def test_the_time_limit_of_a_group_can_be_changed() -> None:
    """In a private way, needed where a backend lacks the public one of a newer torch."""

    def rank_main(rank: int, world_size: int, group: dist.ProcessGroup) -> list[float]:
        backend, seen = group._get_backend(CPU), []
        for name in {"set_timeout", "_set_default_timeout"} & set(dir(backend)):
            getattr(backend, name)(timedelta(seconds=7 + len(seen)))
            seen.append(backend.options._timeout.total_seconds())
        return seen

    for seen in run_threads(rank_main, 2):
        assert seen in ([7], [7, 8])


@pytest.mark.skipif(not hasattr(dist, "ProcessGroupNCCL"), reason="needs a build of torch with NCCL")
@canary("?torch.distributed.ProcessGroupNCCL.Options()._timeout")
def test_nccl_takes_its_time_limit_from_its_options() -> None:
    """The time limit of a communicator can be set, when it is made and afterwards."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=7)
    assert options._timeout == timedelta(seconds=7)


@canary("?torch.distributed.ProcessGroupNCCL._is_initialized")
def test_nccl_says_whether_it_has_a_communicator() -> None:
    """Without one it allocates no memory. `nccl2` always has one, and no such method."""
    assert has_communicator(object())


@canary("torch.distributed.distributed_c10d._world.pg_names")
def test_a_group_that_is_forgotten_is_not_shut_down() -> None:
    """`destroy_process_group` shuts down the groups that have a name."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    forget_groups()
    assert not dist.is_initialized()
    source = inspect.getsource(dist.destroy_process_group)
    assert re.search(
        r"in sorted\(\s*_world\.pg_names.*?\):\s+pg_to_shutdown\.shutdown\(\)", source, re.DOTALL
    )


@canary("torch.distributed.ProcessGroup._allgather_base")
def test_an_all_gather_may_fill_one_tensor() -> None:
    """One output in the place of a list."""

    def rank_main(rank: int, world_size: int, group: dist.ProcessGroup) -> list[float]:
        gathered = torch.zeros(2)
        group._allgather_base(gathered, torch.tensor([rank + 1.0])).wait()
        return gathered.tolist()

    assert run_threads(rank_main, 2) == [[1.0, 2.0]] * 2


@canary("?torch.distributed.device_mesh.DeviceMesh._get_root_mesh")
def test_a_part_of_a_mesh_knows_the_whole(world) -> None:
    """The whole mesh is its own root; a part of another is refused."""
    from torch.distributed.device_mesh import init_device_mesh

    whole = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    if hasattr(whole, "_get_root_mesh"):
        assert whole._get_root_mesh() == whole
        assert whole["dp"]._get_root_mesh() == whole != whole["dp"]


@canary("torch.distributed.algorithms.join.Joinable()._join_config")
def test_who_can_join_knows_whether_it_does() -> None:
    """`enable` is False until `Join` begins."""

    class Own(dist.algorithms.join.Joinable):
        join_hook = join_device = join_process_group = None

        def __init__(self) -> None:
            super().__init__()

    assert Own()._join_config.enable is False


# ---------------------------------------------------------------------- torch: DistributedDataParallel


@canary("torch.distributed.utils._to_kwargs")
def test_inputs_are_moved_together_with_keywords() -> None:
    """Returns one tuple of arguments and one dict of keywords for a device."""
    inputs = (torch.ones(1), "text")
    moved, keywords = torch.distributed.utils._to_kwargs(inputs, {"key": [torch.zeros(1)]}, CPU, False)
    assert len(moved) == len(keywords) == 1
    assert (moved[0][1], list(keywords[0])) == ("text", ["key"])


@canary(
    "torch.nn.parallel.DistributedDataParallel._active_ddp_module",
    "torch.distributed._DEFAULT_FIRST_BUCKET_BYTES",
    "torch._dynamo()",
)
def test_the_compiler_asks_torchs_class_for_the_wrapper_that_runs(monkeypatch) -> None:
    """It splits at `bucket_bytes_cap` of what `_active_ddp_module` is, from 1 MiB on."""
    kind = torch_ddp.DistributedDataParallel
    monkeypatch.setattr(kind, "_active_ddp_module", "a wrapper")
    assert kind._get_active_ddp_module() == "a wrapper"
    assert dist._DEFAULT_FIRST_BUCKET_BYTES == 1 << 20
    asked = (TORCH_SOURCE / "_dynamo" / "convert_frame.py").read_text(encoding="utf-8")
    assert "DistributedDataParallel._get_active_ddp_module()" in asked
    assert set(re.findall(r"\bddp_module\.(\w+)", asked)) == {"bucket_bytes_cap"}


@canary(
    "torch._C._dynamo.eval_frame",
    "?torch._C._dynamo.eval_frame._FrameExecStrategy",
    "?torch._C._dynamo.eval_frame._FrameAction",
    "torch._dynamo()._torchdynamo_disable",
    "torch._dynamo()._orig_mod",
)
def test_the_compiler_leaves_marked_functions_and_named_packages_alone() -> None:
    """A function by a mark and by its code, a package by its name; a compiled module wraps another."""

    def function() -> int:
        return 1

    assert run_eagerly(function)() == 1
    assert function._torchdynamo_disable is True
    folder = TORCH_SOURCE / "_dynamo"
    source = {name: (folder / f"{name}.py").read_text("utf-8") for name in ("eval_frame", "trace_rules")}
    assert "_torchdynamo_disable" in source["eval_frame"]
    assert "self._orig_mod = " in source["eval_frame"]
    assert re.search(r"^def add\(import_name: str", source["trace_rules"], re.MULTILINE)


def test_our_wrapper_has_no_private_name_that_torchs_has_not() -> None:
    """The names that other code of torch reaches for on a wrapper and its reducer, with their parameters."""
    kind = torch_ddp.DistributedDataParallel
    source = inspect.getsource(torch_ddp)
    for_the_library = ("_get_data_parallel_params", "_has_rebuilt_buckets", "_set_static_graph")
    for name, ours in {**{n: vars(BucketedDDP)[n] for n in for_the_library}, **vars(OfWrapper)}.items():
        if is_private(name):
            theirs = getattr(kind, name, None)
            assert theirs is not None or f"self.{name} = " in source or f"self.{name}:" in source, name
            if theirs is not None:
                ours = getattr(ours, "__func__", ours)
                assert same_parameters(ours, getattr(theirs, "__func__", theirs)), name
    names = ["_run_allreduce_hook", *(name for name in vars(OfReducer) if is_private(name))]
    assert [name for name in names if not hasattr(dist.Reducer, name)] == []


@canary(
    "torch.nn.Module()._ddp_params_and_buffers_to_ignore",
    "torch.nn.Parameter()._ddp_ignored",
)
def test_torch_marks_what_is_ignored() -> None:
    """A list of names on the module, a mark on each tensor."""
    module = torch.nn.Linear(1, 1)
    kind = torch_ddp.DistributedDataParallel
    kind._set_params_and_buffers_to_ignore_for_model(module, ["bias"])
    assert module._ddp_params_and_buffers_to_ignore == ["bias"]
    assert module.bias._ddp_ignored
    assert not hasattr(module.weight, "_ddp_ignored")


@canary(
    "torch.nn.Parameter()._in_backward_optimizers",
    "torch.distributed.optim.apply_optimizer_in_backward.param_to_optim_hook_handle_map",
)
def test_optimizers_that_step_in_backward_can_be_found_and_taken_over() -> None:
    """They hang on the parameter, beside hooks that can be removed."""
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    parameter = torch.nn.Parameter(torch.ones(1))
    _apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 0.5})
    (optimizer,) = parameter._in_backward_optimizers
    assert isinstance(optimizer, torch.optim.SGD)
    for handle in param_to_optim_hook_handle_map[parameter]:
        handle.remove()
    parameter.sum().backward()
    assert (parameter.item(), parameter.grad.item()) == (1.0, 1.0)


# ---------------------------------------------------------------------- Lightning: the Trainer and its loops


class Model(BoringModel):
    """Two batches of training; calls `look` in each."""

    def __init__(self, look: Callable[[Model], None]) -> None:
        super().__init__()
        self.look = look

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.look(self)
        self.log("step", float(batch_idx))
        return super().training_step(batch, batch_idx)


def new_trainer(**options: Any) -> pl.Trainer:
    return pl.Trainer(**{**QUIET, "devices": 1, "enable_model_summary": False, **options})


STEPS = ("end_advance", "start_epoch", "end_run", "check_sanity", "repeat")
"""The methods of `wrap_steps`, beside `advance`."""


@canary(
    "pytorch_lightning.loops.fit_loop._FitLoop()._combined_loader",
    "pytorch_lightning.loops.training_epoch_loop._TrainingEpochLoop._num_ready_batches_reached",
    "pytorch_lightning.trainer.Trainer()._logger_connector",
    "pytorch_lightning.trainer.call._call_callback_hooks",
    "pytorch_lightning.trainer.call._call_lightning_module_hook",
)
def test_a_batch_is_finished_by_hand_and_another_one_fetched_anew() -> None:
    """`training_step` of batch 1 raises: that batch is finished, and batch 2 comes from a new iterator."""
    seen: list[int] = []

    def advance(original: Any, fetcher: Any) -> None:
        try:
            original(fetcher)
        except ArithmeticError:
            _lightning.fetch_anew(trainer, 2)
            _lightning.finish_batch(trainer, torch.ones(1, 1), torch.ones(()))

    def step(original: Any, *arguments: Any) -> None:
        original(*arguments)

    class Ends(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            seen.append(index)
            assert "loss" in outputs

    def look(model: Model) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == 1:
            raise ArithmeticError

    trainer = new_trainer(max_epochs=1, limit_val_batches=0, callbacks=[Ends()])
    _lightning.wrap_steps(trainer, SimpleNamespace(**dict.fromkeys(STEPS, step), advance=advance))
    trainer.fit(Model(look))
    num_batches = trainer.num_training_batches
    assert seen == list(range(num_batches))
    counters = _lightning.loop_counters(trainer)
    assert [vars(counter)["completed"] for counter in counters[:2]] == [num_batches] * 2


@canary(
    "pytorch_lightning.Trainer._run_sanity_check",
    "pytorch_lightning.loops.evaluation_loop._EvaluationLoop()._max_batches",
    "pytorch_lightning.trainer.connectors.checkpoint_connector._CheckpointConnector.resume_end",
    "pytorch_lightning.callbacks.ModelCheckpoint()._last_global_step_saved",
)
def test_the_parts_of_a_fit_that_take_no_steps_are_called_by_us(tmp_path: Path) -> None:
    """The sanity check and the end of an epoch; a saved checkpoint is known, and batches are limited."""
    called: list[str] = []

    def note(original: Any, *arguments: Any) -> None:
        called.append(original.__name__)
        if original.__name__ == "_run_sanity_check":
            _lightning.limit_validation(trainer)
        original(*arguments)

    saving = pl.callbacks.ModelCheckpoint(tmp_path)
    options = {
        "max_epochs": 1,
        "num_sanity_val_steps": 1,
        "enable_checkpointing": True,
        "limit_val_batches": 2,
    }
    trainer = new_trainer(callbacks=[saving], **options)
    _lightning.wrap_steps(trainer, SimpleNamespace(**dict.fromkeys(STEPS, note), advance=note))
    data = DataLoader(torch.ones(8, 32), sampler=DistributedSampler(range(8), 2, 0))
    trainer.strategy.barrier = called.append
    trainer.fit(Model(lambda model: None), val_dataloaders=data)
    first = called.index(_lightning.FIRST_BARRIERS[0])
    assert called[first : first + 3] == [*_lightning.FIRST_BARRIERS, "_run_sanity_check"]
    called = [name for name in called[first + 2 :] if name and name.isidentifier()]
    assert called[:3] == ["_run_sanity_check", "setup_data", "on_advance_start"]
    assert called[-2:] == ["on_advance_end", "on_run_end"]
    assert _lightning.saved_last(saving) == trainer.global_step
    _lightning.limit_validation(trainer)
    assert trainer.num_val_batches == [2]
    data.sampler.num_samples = 1  # type: ignore[union-attr]
    _lightning.limit_validation(trainer)
    assert trainer.num_val_batches == [1]


@canary("pytorch_lightning.plugins.precision.Precision._after_closure")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_something_is_called_between_the_hooks_before_an_update_and_the_update(precision: str) -> None:
    """Once for each update: gradients are there, and parameters are as before."""
    called: list[str] = []

    class Steps(pl.Callback):
        def on_before_optimizer_step(self, *arguments: Any) -> None:
            called.append("hook")

        def on_before_zero_grad(self, *arguments: Any) -> None:
            called.append("begins")

    def look() -> None:
        weight = model.layer.weight
        assert weight.grad is not None
        called.append("before" if torch.equal(weight, before[-1]) else "after")

    before: list[torch.Tensor] = []
    model = Model(lambda model: before.append(model.layer.weight.detach().clone()))
    trainer = new_trainer(
        max_steps=2, limit_val_batches=0, callbacks=[Steps()], precision=precision, accumulate_grad_batches=2
    )
    _lightning.before_updates(trainer, look)
    trainer.fit(model)
    assert called == ["begins", "begins", "hook", "before"] * 2 or called == ["begins", "hook", "before"] * 2


@canary(
    "pytorch_lightning.trainer.connectors.checkpoint_connector._CheckpointConnector()._loaded_checkpoint",
    "pytorch_lightning.trainer.connectors.logger_connector._LoggerConnector()._callback_metrics",
    "pytorch_lightning.loops.fit_loop._FitLoop()._restarting",
    "pytorch_lightning.loops.fit_loop._FitLoop()._loaded_from_state_dict",
    "pytorch_lightning.loops.fit_loop._FitLoop()._resuming_from_checkpoint",
)
def test_a_fit_takes_over_the_state_of_another_inside_of_its_epoch() -> None:
    """After the first batch of one: the other begins with the second one, with weights, step and metrics."""
    taken: dict[str, Any] = {}
    begun: list[tuple[int, int, float, float]] = []

    def look(model: Model) -> None:
        metric = float(model.trainer.callback_metrics.get("step", -1))
        index = model.trainer.fit_loop.epoch_loop.batch_idx
        begun.append((index, model.trainer.global_step, float(model.layer.weight.sum()), metric))

    def call(original: Any, *arguments: Any) -> None:
        original(*arguments)

    def fit(**own: Any) -> None:
        trainer = new_trainer(max_epochs=1, limit_val_batches=0, limit_train_batches=3)
        parts = {name: functools.partial(function, trainer) for name, function in own.items()}
        _lightning.wrap_steps(trainer, SimpleNamespace(**dict.fromkeys((*STEPS, "advance"), call) | parts))
        trainer.fit(Model(look))
        assert [vars(counter)["completed"] for counter in _lightning.loop_counters(trainer)[:2]] == [3, 3]

    def give(trainer: Any, original: Any, fetcher: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.current.completed == 1:
            taken["state"] = copy.deepcopy(_lightning.dump_checkpoint(trainer))
            taken["metrics"] = dict(_lightning.callback_metrics(trainer))
        original(fetcher)

    def take(trainer: Any, original: Any) -> None:
        trainer.fit_loop.setup_data()
        _lightning.restore_checkpoint(trainer, dict(taken["state"]))
        _lightning.callback_metrics(trainer).update(taken["metrics"])

    def enter(trainer: Any, original: Any) -> None:
        original()
        _lightning.enter_epoch(trainer)

    def go_on(trainer: Any, original: Any, fetcher: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.current.completed == 0:
            _lightning.load_loops(trainer, taken["state"]["loops"]["fit_loop"])
            _lightning.fetch_anew(trainer, 1)
        original(fetcher)

    fit(advance=give)
    givers, begun = begun, []
    fit(advance=go_on, start_epoch=enter, check_sanity=take)
    assert [entry[0] for entry in givers] == [0, 1, 2]
    assert [entry[:2] for entry in begun] == [(1, 1), (2, 2)]
    assert begun[0] == givers[1]


@canary(
    "pytorch_lightning.loops.fit_loop._FitLoop()._data_fetcher",
    "pytorch_lightning.loops.training_epoch_loop._TrainingEpochLoop._should_check_val_fx",
    "pytorch_lightning.trainer.Trainer()._checkpoint_connector",
    "pytorch_lightning.utilities.combined_loader.CombinedLoader._state_dicts",
)
def test_an_interrupted_fit_is_saved_as_one_that_goes_on_with_the_next_batch(tmp_path: Path) -> None:
    """`training_step` of batch 1 raises; what `dump_checkpoint` returns is loaded by another Trainer."""
    seen: list[int] = []
    calls: list[int] = []

    def look(model: Model) -> None:
        index = trainer.fit_loop.epoch_loop.batch_idx
        seen.append(index)
        if len(seen) == 2:
            raise ArithmeticError

    trainer = new_trainer(max_epochs=1)
    _lightning.after_schedulers(trainer, lambda: calls.append(trainer.fit_loop.epoch_loop.batch_idx))
    with pytest.raises(ArithmeticError):
        trainer.fit(Model(look))
    assert calls == [0]
    states = _lightning.loader_states(trainer)
    _lightning.settle_counters(trainer, is_committed=False, num_stepped=0)
    torch.save(_lightning.dump_checkpoint(trainer, states), tmp_path / "saved.ckpt")
    trainer = new_trainer(max_epochs=1)
    trainer.fit(Model(look), ckpt_path=tmp_path / "saved.ckpt")
    assert seen == [0, 1, *range(1, trainer.num_training_batches)]
    assert _lightning.batches_that_stepped(trainer) == trainer.num_training_batches


@canary(
    "pytorch_lightning.LightningModule()._trainer",
    "pytorch_lightning.LightningModule()._current_fx_name",
    "pytorch_lightning.loops.training_epoch_loop._TrainingEpochLoop()._batches_that_stepped",
    "pytorch_lightning.loops.training_epoch_loop._TrainingEpochLoop()._results",
    "pytorch_lightning.loops.training_epoch_loop._TrainingEpochLoop()._should_check_val_fx",
    "pytorch_lightning.trainer.connectors.logger_connector.result._ResultCollection",
)
def test_a_fit_tells_where_it_is_and_logs_into_the_results_it_was_given() -> None:
    """The module knows its Trainer and the step that runs; the loop counts, and logs into `_results`."""
    seen, updates = [], []

    class Results(_lightning.ResultCollection):
        def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
            super().update_metrics(key, value, batch_size)
            metric = self[key]
            updates.append((key, float(value), metric.is_tensor, metric.meta.is_mean_reduction))
            assert metric.cumulated_batch_size.dtype == torch.int64

    trainer = new_trainer(max_steps=2, limit_val_batches=0)

    def look(model: Model) -> None:
        seen.append((_lightning.running_hook(model), _lightning.batches_that_stepped(trainer)))

    model = Model(look)
    assert _lightning.running_hook(model) is None
    _lightning.set_training_results(trainer, Results(training=True))
    trainer.fit(model)
    assert seen == [("training_step", 0), ("training_step", 1)]
    assert updates == [("training_step.step", 0.0, True, True), ("training_step.step", 1.0, True, True)]


@canary(
    "pytorch_lightning.loggers.csv_logs.ExperimentWriter._check_log_dir_exists",
    "pytorch_lightning.loggers.CSVLogger()._version",
    "pytorch_lightning.loggers.CSVLogger()._experiment",
    "pytorch_lightning.loggers.csv_logs.ExperimentWriter()._fs",
)
@pytest.mark.parametrize("root", _lightning.ROOTS)
def test_a_logger_goes_on_with_the_file_of_another_process(root, tmp_path: Path) -> None:
    """It has the other's version, and appends to its file, which a new writer would delete."""
    loggers = importlib.import_module(f"{root}.loggers")
    mine, other = (loggers.CSVLogger(tmp_path) for _ in range(2))
    mine.log_metrics({"b": 1.0}, 0)
    mine.save()
    assert other.version == 1
    _lightning.set_logger_version(other, _lightning.logger_version(mine))
    _lightning.append_to_csv(other)
    other.log_metrics({"a": 2.0}, 1)
    other.save()
    assert Path(mine.log_dir, "metrics.csv").read_text().split() == ["a,b,step", ",1.0,0", "2.0,,1"]
    _lightning.append_to_csv(loggers.CSVLogger(tmp_path))  # of a version that is new
    assert _lightning.logger_version(loggers.logger.DummyLogger()) is None


@canary(
    "pytorch_lightning.utilities.exceptions._TunerExitException",
    "pytorch_lightning.trainer.call._interrupt",
    "pytorch_lightning.trainer.call._call_teardown_hook",
    "pytorch_lightning.Trainer._teardown",
    "pytorch_lightning.Trainer._fit_impl",
)
def test_an_exception_is_seen_to_as_lightning_does(monkeypatch) -> None:
    """Callbacks hear of it, all is torn down; the tuner's exception ends a fit without an error."""
    heard = []

    class Hears(pl.Callback):
        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            heard.append(exception)

    trainer = new_trainer(callbacks=[Hears()])
    monkeypatch.setattr(trainer.strategy, "teardown", lambda: heard.append("torn down"))
    error = ValueError("of a test")
    _lightning.interrupt_trainer(trainer, error)
    _lightning.teardown_trainer(trainer)
    assert heard == [error, "torn down"]

    def leave(function: Any, *args: Any) -> None:
        assert function.__name__ == "_fit_impl", "what the phase of a run is called after"
        raise _lightning.lightnings("TunerExitException")

    monkeypatch.setattr(trainer, "_fit_impl", functools.partial(leave, pl.Trainer._fit_impl))
    trainer.fit(BoringModel())
    assert heard[2:] == ["torn down"]
    _lightning.end_after_teardown(trainer)
    with pytest.raises(SystemExit) as ended:
        trainer.fit(BoringModel())
    assert (ended.value.code, heard[3:]) == (0, ["torn down"])
    monkeypatch.setattr(Hears, "teardown", lambda *args, stage: heard.append(stage))
    with pytest.raises(SystemExit):
        _lightning.end_silently(trainer)
    assert heard[4:] == ["fit", "torn down"]
    assert isinstance(_lightning.silent_end(trainer), _lightning.stop_exceptions())


@canary(
    "?pytorch_lightning.loops.training_epoch_loop._TrainingEpochLoop._broadcast_sigterm_tensor",
)
def test_a_check_is_called_where_a_step_begins(world, monkeypatch) -> None:
    """Before a batch is fetched, where Lightning would ask all ranks whether one was told to stop."""

    class Stop(Exception):
        pass

    def check() -> None:
        raise Stop

    trainer = new_trainer()
    _lightning.at_step_boundaries(trainer, check)
    monkeypatch.setattr(pl.Trainer, "world_size", 2)
    with pytest.raises(Stop):
        trainer.fit_loop.epoch_loop.advance(iter(()))


@canary(
    "pytorch_lightning.Trainer()._signal_connector",
    "pytorch_lightning.trainer.connectors.signal_connector._SignalConnector._sigterm_notifier_fn",
    "pytorch_lightning.trainer.connectors.signal_connector._SignalConnector._slurm_sigusr_handler_fn",
)
def test_the_handlers_of_signals_are_the_ones_that_were_put_in(monkeypatch) -> None:
    """They are looked up when they are registered, and registered for SIGTERM and SLURM's signal."""
    monkeypatch.setenv("SLURM_NTASKS", "1")
    trainer = new_trainer(plugins=[SLURMEnvironment(requeue_signal=signal.SIGUSR1)])
    called = []
    requeue = _lightning.replace_signal_handlers(
        trainer,
        on_sigterm=lambda *arguments: called.append("SIGTERM"),
        on_requeue=lambda *arguments: called.append("requeue"),
    )
    takes(requeue, int(signal.SIGUSR1), None)
    before = signal.getsignal(signal.SIGTERM)
    trainer._signal_connector.register_signal_handlers()
    try:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.getsignal(number)(number, None)
    finally:
        trainer._signal_connector.teardown()
    assert called == ["SIGTERM", "requeue"]
    assert signal.getsignal(signal.SIGTERM) is before
    assert not trainer.received_sigterm
    _lightning.note_sigterm(trainer)
    assert trainer.received_sigterm


# ---------------------------------------------------------------------- Lightning: strategy and launchers


@canary(
    "pytorch_lightning.strategies.DDPStrategy._configure_launcher",
    "pytorch_lightning.strategies.DDPStrategy()._launcher",
    "pytorch_lightning.strategies.DDPStrategy()._layer_sync",
)
def test_a_trainer_has_the_strategy_make_a_launcher_and_gives_it_the_layer_sync() -> None:
    """`_configure_launcher` sets what `launcher` returns; `_layer_sync` replaces BatchNorm."""
    trainer = pl.Trainer(**QUIET, strategy="custom_ddp", devices=2, sync_batchnorm=True)
    assert type(trainer.strategy.launcher).__module__ == "lightning_ddp.launch.launcher"
    synced = _lightning.layer_sync(trainer.strategy).apply(torch.nn.Sequential(torch.nn.BatchNorm1d(2)))
    assert isinstance(synced[0], torch.nn.SyncBatchNorm)
    assert _lightning.layer_sync(DDPStrategy()) is None
    assert same_parameters(
        lightning_ddp.CustomDDPStrategy._configure_launcher, DDPStrategy._configure_launcher
    )


@canary(
    "pytorch_lightning.strategies.DDPStrategy._get_process_group_backend",
    "pytorch_lightning.strategies.DDPStrategy()._process_group_backend",
)
def test_the_backend_is_the_users_or_the_devices() -> None:
    """And the strategy tells it from then on."""
    strategy = DDPStrategy(parallel_devices=[CPU])
    assert _lightning.choose_backend(strategy) == strategy.process_group_backend == "gloo"
    assert _lightning.choose_backend(DDPStrategy(process_group_backend="mpi")) == "mpi"


@canary("lightning_fabric.strategies.launchers.multiprocessing._disable_module_memory_sharing")
def test_parameters_in_shared_memory_become_a_process_s_own() -> None:
    """In place, wherever the modules are in what a new process was sent."""
    layer = torch.nn.Linear(2, 2).share_memory()
    _lightning.unshare({"modules": [layer]})
    assert not layer.weight.is_shared()


@canary(
    "lightning_fabric.strategies.DDPStrategy._setup_distributed",
    "lightning_fabric.strategies.DDPStrategy._set_world_ranks",
    "lightning_fabric.strategies.DDPStrategy()._backward_sync_control",
)
def test_fabric_joins_the_group_by_a_method_and_skips_a_reduction_by_an_object(monkeypatch) -> None:
    """Fabric's `setup_environment` calls the method; what skips a reduction has one of its own."""
    called = []
    monkeypatch.setattr(FabricStrategy, "_setup_distributed", lambda strategy: called.append(strategy))
    strategy = FabricStrategy(accelerator=CPUAccelerator(), parallel_devices=[CPU])
    strategy.setup_environment()
    assert called == [strategy]
    takes(strategy._set_world_ranks)
    assert hasattr(strategy._backward_sync_control, "no_backward_sync")


@canary(
    "pytorch_lightning.strategies.DDPStrategy._setup_model",
    "pytorch_lightning.strategies.DDPStrategy._register_ddp_hooks",
    "pytorch_lightning.strategies.strategy._ForwardRedirection",
    "pytorch_lightning.strategies.DDPStrategy()._forward_redirection",
)
def test_a_strategy_wraps_the_model_and_its_steps_go_through_the_wrapper() -> None:
    """`configure_ddp` calls two overrides; a redirection tells when a step's forward is over, twice."""
    called = []

    class Wrapper(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            called.append("forward")
            return self.module(*args, **kwargs)

    class Own(DDPStrategy):
        def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
            return Wrapper(model)

        def _register_ddp_hooks(self) -> None:
            called.append("hooks")

    class Redirection(_lightning.ForwardRedirection):
        def on_after_inner_forward(self, wrapper_module: Any, original_module: Any) -> None:
            called.append(("inner", type(wrapper_module), type(original_module)))

        def on_after_outer_forward(self, wrapper_module: Any, original_module: Any) -> None:
            called.append(("outer", type(wrapper_module), type(original_module)))

    class Steps(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            called.append("step")

    strategy = Own(parallel_devices=[CPU])
    _lightning.set_redirection(strategy, Redirection())
    strategy.connect(Steps())
    strategy.configure_ddp()
    strategy.training_step(torch.ones(1, 32), 0)
    inner, outer = ((when, Wrapper, Steps) for when in ("inner", "outer"))
    assert called == ["hooks", "forward", "step", inner, outer]
    for name in ("_setup_model", "_register_ddp_hooks"):
        assert same_parameters(getattr(lightning_ddp.CustomDDPStrategy, name), getattr(DDPStrategy, name))


@canary("lightning_fabric.strategies.launchers.multiprocessing._check_missing_main_guard")
def test_a_script_without_a_main_guard_is_refused(monkeypatch) -> None:
    """In a new process that still imports the script of the one that has started it."""
    _lightning.check_missing_main_guard()
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(RuntimeError, match="guards the main"):
        _lightning.check_missing_main_guard()


@canary(
    "pytorch_lightning.trainer.connectors.accelerator_connector._AcceleratorConnector",
    "pytorch_lightning.trainer.connectors.accelerator_connector._AcceleratorConnector"
    "._check_config_and_set_final_flags",
    "pytorch_lightning.trainer.connectors.accelerator_connector._AcceleratorConnector._lazy_init_strategy",
)
def test_a_trainer_looks_at_its_arguments_in_two_methods(monkeypatch) -> None:
    """The first is given strategy and plugins by name, the second comes when the strategy has been set."""
    kind = sys.modules["pytorch_lightning.trainer.connectors.accelerator_connector"]._AcceleratorConnector
    called = []

    def note(name: str, look: Callable[..., Any]) -> None:
        original = getattr(kind, name)

        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            called.append((name, look(self, **kwargs)))
            return original(self, *args, **kwargs)

        monkeypatch.setattr(kind, name, noted)

    note("_check_config_and_set_final_flags", lambda self, **given: (given["strategy"], given["plugins"]))
    note("_lazy_init_strategy", lambda self: type(self.strategy).__name__)
    new_trainer(strategy="ddp", devices=2)
    assert called == [
        ("_check_config_and_set_final_flags", ("ddp", None)),
        ("_lazy_init_strategy", "DDPStrategy"),
    ]


@canary("pytorch_lightning.strategies.launchers._SubprocessScriptLauncher._check_can_spawn_children")
def test_a_process_that_was_started_starts_no_others() -> None:
    """Its local rank is not 0."""
    environment = LightningEnvironment()
    launcher = _lightning.SubprocessScriptLauncher(environment, 2, 1)
    _lightning.check_can_start_children(launcher)
    environment.local_rank = lambda: 1
    with pytest.raises(RuntimeError, match="local_rank > 0"):
        _lightning.check_can_start_children(launcher)
    assert launcher.procs == []


@canary("pytorch_lightning.strategies.launchers._MultiProcessingLauncher._wrapping_function")
def test_a_process_of_a_function_calls_it_and_sends_its_result(monkeypatch) -> None:
    """With the function as the third argument; rank 0 puts what it returned into the queue."""
    for name in ("LOCAL_RANK", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "0")  # which it sets itself
    strategy = DDPStrategy(parallel_devices=[CPU])
    strategy.cluster_environment = LightningEnvironment()
    launcher, results = (
        _lightning.MultiProcessingLauncher(strategy, start_method="spawn"),
        queue.SimpleQueue(),
    )
    launcher._wrapping_function(0, None, operator.add, (1, 2), {}, results)
    assert results.get() == 3
    assert launcher.procs == []


@canary("lightning_fabric.strategies.launchers.multiprocessing._check_bad_cuda_fork")
def test_a_process_that_was_forked_with_cuda_is_not_forked(monkeypatch) -> None:
    """Which torch knows."""
    _lightning.check_bad_cuda_fork()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="Cannot re-initialize CUDA in forked subprocess"):
        _lightning.check_bad_cuda_fork()


@canary(
    "pytorch_lightning.strategies.launchers.multiprocessing._GlobalStateSnapshot",
    "pytorch_lightning.strategies.launchers._MultiProcessingLauncher._wrapping_function",
)
def test_a_spawned_process_draws_as_the_launching_one(monkeypatch) -> None:
    """And has torch's flags: the last argument of the function that it runs."""
    for name in ("LOCAL_RANK", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "0")  # which it sets itself
    launcher = _lightning.MultiProcessingLauncher(DDPStrategy(parallel_devices=[CPU]), start_method="spawn")
    globals_of_torch, results = _lightning.capture_globals(), queue.SimpleQueue()
    for _ in range(2):
        launcher._wrapping_function(0, None, random.random, (), {}, results, globals_of_torch)
    assert results.get() == results.get()


@canary("pytorch_lightning.strategies.launchers._MultiProcessingLauncher._collect_rank_zero_results")
def test_a_process_of_a_function_collects_what_it_sends_if_it_is_the_first_of_its_node(monkeypatch) -> None:
    """Else None."""
    trainer = pl.Trainer(strategy="ddp_spawn", accelerator="cpu", devices=2, logger=False)
    trainer.strategy.connect(pl.LightningModule())
    collect = trainer.strategy.launcher._collect_rank_zero_results
    for local_rank, expected in (("0", 7), ("1", None)):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert getattr(collect(trainer, 7), "trainer_results", None) == expected


@canary("pytorch_lightning.strategies.launchers._MultiProcessingLauncher._recover_results_in_main_process")
def test_the_launching_process_takes_over_what_it_was_sent() -> None:
    kind = pl.strategies.launchers._MultiProcessingLauncher
    assert list(inspect.signature(kind._recover_results_in_main_process).parameters)[1:] == [
        "worker_output",
        "trainer",
    ]


@canary("torch.multiprocessing.Process()._config")
def test_a_process_makes_its_sockets_where_the_one_that_starts_it_does(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(vars(multiprocessing.current_process())["_config"], "tempdir", str(tmp_path))
    assert multiprocessing.util.get_temp_dir() == str(tmp_path)
    assert vars(multiprocessing.Process())["_config"]["tempdir"] == str(tmp_path)


@canary("lightning_fabric.utilities.distributed._set_num_threads_if_needed")
def test_processors_are_shared_among_processes(monkeypatch) -> None:
    """By a number of threads, unless the user has set one."""
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    _lightning.set_num_threads_if_needed(num_processes=100_000)
    assert torch.get_num_threads() == before
    monkeypatch.delenv("OMP_NUM_THREADS")
    try:
        _lightning.set_num_threads_if_needed(num_processes=100_000)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@canary("lightning_fabric.utilities.optimizer._optimizers_to_device")
def test_the_state_of_optimizers_moves() -> None:
    """All tensors of it, in place."""
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter])
    optimizer.state[parameter]["momentum_buffer"] = torch.ones(1)
    _lightning.optimizers_to_device([optimizer], torch.device("meta"))
    assert optimizer.state[parameter]["momentum_buffer"].device.type == "meta"


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (_lightning.teardown_trainer, "_teardown"),
        (_lightning.batches_that_stepped, "_batches_that_stepped"),
        (lambda o: _lightning.set_training_results(o, None), "_results"),
        (lambda o: _lightning.at_step_boundaries(o, print), "_broadcast_sigterm_tensor"),
        (
            lambda o: _lightning.replace_signal_handlers(o, on_sigterm=print, on_requeue=print),
            "_signal_connector",
        ),
        (_lightning.note_sigterm, "_signal_connector"),
        (_lightning.running_hook, "_current_fx_name"),
        (lambda o: _lightning.set_launcher(o, None), "_launcher"),
        (lambda o: _lightning.set_redirection(o, None), "_forward_redirection"),
        (_lightning.layer_sync, "_layer_sync"),
        (_lightning.choose_backend, "_get_process_group_backend"),
        (_lightning.check_can_start_children, "_check_can_spawn_children"),
        (lambda o: _lightning._import("pytorch_lightning.trainer.call", "_gone"), "_gone"),
        (lambda o: _lightning._import("pytorch_lightning.gone", "Trainer"), "Trainer"),
    ],
)
def test_a_name_that_is_gone_is_an_error_with_the_version(monkeypatch, call, name) -> None:
    monkeypatch.setattr(_lightning, "_version", lambda root: "2.7.0rc1")
    other = SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(advance=print)))
    with pytest.raises(
        UnsupportedVersionError, match=rf"^pytorch-lightning 2\.7\.0rc1 has no `{name}` in .* 2\.5 and 2\.6"
    ):
        call(other)
    assert set(vars(other)) == {"fit_loop"}


# ---------------------------------------------------------------------- Hydra


def note_calls(monkeypatch: pytest.MonkeyPatch, *names: tuple[Any, str]) -> list[tuple[str, Any, Any]]:
    """Notes the calls of some methods from now on: name, arguments, keywords."""
    called: list[tuple[str, Any, Any]] = []

    def note(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            called.append((name, args, kwargs))
            return original(*args, **kwargs)

        is_static = isinstance(vars(owner)[name], staticmethod)
        monkeypatch.setattr(owner, name, staticmethod(noted) if is_static else noted)

    for owner, name in names:
        note(owner, name)
    return called


@canary(
    "hydra._internal.hydra.ConfigLoaderImpl",
    "hydra._internal.callbacks.Callbacks",
    "hydra.core.utils.JobReturn()._return_value",
    "omegaconf.DictConfig._get_parent",
)
def test_a_sweep_calls_back_and_its_job_can_be_found_while_it_runs(tmp_path, monkeypatch) -> None:
    """Composed, begun; then for each job a configuration, a callback before its function and one after it."""
    from hydra._internal.callbacks import Callbacks
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.utils import JobReturn, JobStatus, run_job

    kind = hydra.core.hydra_config.HydraConfig
    called = note_calls(
        monkeypatch,
        (ConfigLoaderImpl, "load_configuration"),
        (ConfigLoaderImpl, "load_sweep_config"),
        (Callbacks, "__init__"),
        (Callbacks, "on_multirun_start"),
        (Callbacks, "on_job_start"),
        (Callbacks, "on_job_end"),
    )

    def task(config: DictConfig) -> None:
        called.append(("task", config.x, None))
        given = kind.get()._get_parent()
        assert (given.x, "hydra" in given, given._get_parent()) == (5, True, None)
        assert hydra.core.utils.JobRuntime.instance().get("name") != "UNKNOWN_NAME"
        (frame,) = (each.frame for each in inspect.stack() if each.frame.f_code is run_job.__code__)
        job = frame.f_locals
        assert job["task_function"] is task
        assert type(job["ret"]) is JobReturn
        assert (job["ret"].cfg is config, job["ret"].status) == (True, JobStatus.UNKNOWN)
        context = job["hydra_context"]
        assert (type(context.config_loader), type(context.callbacks)) == (JobLoader, JobCallbacks), "ours"
        raise ValueError("of a test")

    quiet = ["hydra/job_logging=none", "hydra/hydra_logging=none", "hydra.output_subdir=null"]
    monkeypatch.setattr(sys, "argv", ["app", "--multirun", "+x=5", f"hydra.sweep.dir={tmp_path}", *quiet])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ValueError, match="of a test"):
        hydra.main(version_base=None, config_path=str(tmp_path))(task)()
    names = [name for name, _, _ in called]
    assert names[:4] == ["load_configuration", "load_configuration", "__init__", "on_multirun_start"]
    assert set(names[4:-3]) == {"load_sweep_config", "load_configuration"}, "to be checked, and for the job"
    assert names[-3:] == ["on_job_start", "task", "on_job_end"]
    assert called[-3][2]["task_function"] is task
    _, arguments, keywords = called[-1]
    result = keywords.get("job_return") or arguments[-1]
    assert (result.status, str(result._return_value)) == (JobStatus.FAILED, "of a test")


@canary("hydra._internal.hydra.Hydra.create_main_hydra2")
def test_hydra_s_decorator_is_in_a_module_of_its_name_and_a_job_can_have_a_hydra_made() -> None:
    """`from hydra.main import main` as well as `hydra.main`; what is made for a search path is registered."""
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import create_config_search_path
    from hydra.core.global_hydra import GlobalHydra

    assert sys.modules["hydra.main"].main is hydra.main
    takes(hydra.core.utils.configure_log, None, False)
    made = Hydra.create_main_hydra2(task_name="app", config_search_path=create_config_search_path(None))
    try:
        assert GlobalHydra.instance().hydra is made
        assert made.config_loader.get_search_path() is not None
    finally:
        GlobalHydra.instance().clear()


@canary("hydra._internal.config_loader_impl.ConfigLoaderImpl._parse_overrides_and_create_caching_repo")
def test_a_composition_goes_through_what_is_extended(monkeypatch) -> None:
    """With the word whether the command line asks; sources are made before the list of defaults is."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource
    from hydra._internal.defaults_list import create_defaults_list

    parse, parsed = ConfigLoaderImpl._parse_overrides_and_create_caching_repo, []
    monkeypatch.setattr(
        ConfigLoaderImpl,
        "_parse_overrides_and_create_caching_repo",
        lambda *args: parsed.append(parse(*args)) or parsed[-1],
    )
    called = note_calls(monkeypatch, (ConfigLoaderImpl, "load_configuration"))
    hydra.core.config_store.ConfigStore.instance().store(name="of_a_test", node={"y": 1})
    with hydra.initialize(version_base=None, config_path=None):
        assert hydra.compose("of_a_test", ["+x=5"]) == {"x": 5, "y": 1}
    assert [keywords["from_shell"] for _, _, keywords in called] == [False]
    ((overrides, repository),) = parsed
    assert [override.key_or_group for override in overrides] == ["x"]
    assert repository.get_sources()[-1].store is not None
    assert isinstance(repository.cache, dict)
    found = create_defaults_list(repository, "of_a_test", overrides, prepend_hydra=True, skip_missing=True)
    assert "hydra/launcher" in found.overrides.known_choices
    assert ImportlibResourcesConfigSource("provider", "pkg://lightning_ddp.conf").is_group("strategy")


# ---------------------------------------------------------------------- OmegaConf


@canary(
    "omegaconf.DictConfig._get_parent",
    "omegaconf.DictConfig._get_full_key",
    "omegaconf.DictConfig._get_root",
    "omegaconf.DictConfig()._content",
    "omegaconf.Node._is_interpolation",
    "omegaconf.Node._value",
    "omegaconf.Node._dereference_node",
)
def test_nodes_are_walked_without_being_resolved() -> None:
    """A container has its nodes in a dict or a list, and a node knows its place and what it is."""
    config = OmegaConf.create({"a": {"b": 1, "c": "${a.b}"}, "l": [1, "???"], "n": None, "i": "${a}"})
    inner, items = config.a, config.l
    assert list(config._content) == ["a", "l", "n", "i"]
    assert isinstance(items._content, list)
    assert DictConfig("${a}")._content == "${a}"
    assert inner._get_parent() is inner._get_root() is config
    assert config._get_parent() is None
    assert inner._get_full_key("b") == "a.b"
    assert (inner._get_full_key(None), items._get_full_key(0)) == ("a", "l[0]")
    reference = inner._content["c"]
    assert reference._is_interpolation()
    assert not inner._content["b"]._is_interpolation()
    assert reference._value() == "${a.b}"
    assert reference._dereference_node()._value() == 1


@canary(
    "omegaconf.base.Container._evaluate_custom_resolver",
    "omegaconf.base.Container()._metadata",
    "omegaconf.basecontainer.BaseContainer._resolvers",
)
def test_resolvers_are_asked_in_one_place_and_their_answers_kept_in_the_root(monkeypatch) -> None:
    """By one method of containers; the cache can be replaced; a wrapper tells what a resolver is given."""
    from omegaconf.base import Container

    seen, original = [], Container._evaluate_custom_resolver

    def evaluate(self: Any, **call: Any) -> Any:
        key = self._get_full_key(call["key"])
        seen.append((key, call["inter_type"], call["inter_args"], call["inter_args_str"]))
        return original(self, **call)

    monkeypatch.setattr(Container, "_evaluate_custom_resolver", evaluate)
    name = "of_a_test"
    OmegaConf.register_new_resolver(name, lambda value, *, _parent_: value)
    try:
        config = OmegaConf.create({"a": {"b": f"${{{name}:5}}"}})
        wrapper = config._resolvers[name]
        cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__, strict=True))
        passed = {key: cells[key].cell_contents for key in ("pass_parent", "pass_node", "pass_root")}
        assert passed == {"pass_parent": True, "pass_node": False, "pass_root": False}
        assert config._metadata.object_type is dict
        OmegaConf.register_new_resolver(name, lambda value: value, use_cache=True, replace=True)
        config._metadata.resolver_cache = cache = defaultdict(dict)
        assert config.a.b == 5
    finally:
        OmegaConf.clear_resolver(name)
    assert seen == [("a.b", name, (5,), ("5",))]
    assert list(cache) == [name]


# ---------------------------------------------------------------------- the list is true

NOT_PRIVATE = {"_target_", "_convert_", "_partial_", "_recursive_"}
"""Keys that Hydra documents."""
OF_PYTHON = {"_fields", "_make", "_fields_", "_callback", "_initializing", "_ZSt13set_terminatePFvvE"}
"""Of namedtuples, ctypes structures, weakref and importlib; and `std::set_terminate`, as C++ spells it."""


def owner(node: ast.Attribute) -> str:
    """The name of what an attribute is of, such as `self`; of a call, what is called; else nothing."""
    value = node.value.func if isinstance(node.value, ast.Call) else node.value
    return value.id if isinstance(value, ast.Name) else ""


class File:
    """The private names in a file of the package: those that it defines, and others."""

    def __init__(self, path: Path) -> None:
        self.path = path.relative_to(PACKAGE)
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)
        self.module = ".".join(("lightning_ddp", *self.path.with_suffix("").parts)).removesuffix(".__init__")
        self.members: set[str] = set()
        """Methods and attributes of its classes."""
        self.imports: set[str] = set()
        """Modules of the package, also those that only type annotations need."""
        self.foreign: set[str] = set()
        """What it imports by name from dependencies, or through `_lightning`."""
        self.used: dict[str, list[int]] = defaultdict(list)
        """Private name -> lines in which it is read of something, imported, or a text by itself."""
        self._standard: set[str] = set()
        self._parts: set[ast.AST] = set()  # of texts
        for node in ast.walk(self.tree):
            self._note(node)
        for node in ast.walk(self.tree):
            if node not in self._parts:
                self._look(node)

    def _note(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            names = {alias.name: alias.asname or alias.name.partition(".")[0] for alias in node.names}
            self._standard |= {ours for name, ours in names.items() if name in sys.stdlib_module_names}
            self.foreign |= {ours for name, ours in names.items() if name.partition(".")[0] in DEPENDENCIES}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {alias.asname or alias.name for alias in node.names}
            if node.module.startswith("lightning_ddp"):
                self.imports |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            if node.module == "lightning_ddp._lightning" or node.module.partition(".")[0] in DEPENDENCIES:
                self.foreign |= names
        elif isinstance(node, ast.ClassDef):
            typed = [member.body for member in node.body if isinstance(member, ast.If)]  # TYPE_CHECKING
            for member in itertools.chain(node.body, *typed):
                targets = getattr(member, "targets", [getattr(member, "target", None)])
                self.members |= {target.id for target in targets if isinstance(target, ast.Name)}
                self.members |= {member.name} if isinstance(member, ast.FunctionDef) else set()
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            self.members |= {node.attr} if owner(node) in ("self", "cls") else set()
        elif isinstance(node, ast.JoinedStr):
            self._parts |= set(node.values)
        elif isinstance(node, ast.Call):
            if getattr(node.func, "attr", getattr(node.func, "id", "")) in (
                "removeprefix",
                "removesuffix",
                "endswith",
                "TypeVar",
            ):
                self._parts |= set(node.args)
            self.members |= {keyword.arg for keyword in node.keywords if is_private(keyword.arg)}

    def _look(self, node: ast.AST) -> None:
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("lightning_ddp"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Attribute) and owner(node) not in self._standard:
            names = [node.attr]
        elif isinstance(node, ast.Constant) and re.fullmatch(r"\w+(\.\w+)*", str(node.value)):
            names = str(node.value).split(".")
        for name in names:
            if is_private(name) and "lightning_ddp" not in name:
                self.used[name].append(node.lineno)


@functools.cache
def files() -> dict[str, File]:
    """Module -> its file."""
    return {file.module: file for file in map(File, sorted(PACKAGE.rglob("*.py")))}


def own_names(file: File) -> set[str]:
    """Members of classes that a file can reach: its own, and those of the files that it imports."""
    return file.members.union(*(files()[module].members for module in file.imports if module in files()))


def foreign_classes() -> list[tuple[File, ast.ClassDef]]:
    """The classes of the package that have a class of a dependency, or of Lightning, among their bases."""
    classes = [
        (file, node)
        for file in files().values()
        for node in ast.walk(file.tree)
        if isinstance(node, ast.ClassDef) and node.bases
    ]
    names: set[str] = set()
    while True:
        found = [
            (file, node)
            for file, node in classes
            if {ast.unparse(base).partition(".")[0] for base in node.bases} & (file.foreign | names)
        ]
        before, names = names, {node.name for _, node in found}
        if names == before:
            return found


def own_uses(node: ast.ClassDef) -> set[str]:
    """The private names of `self` in a class: attributes, and methods that it defines."""
    defined = {member.name for member in node.body if isinstance(member, ast.FunctionDef)}
    read = {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute) and owner(part) in ("self", "cls", "super")
    }
    return {name for name in defined | read if is_private(name)}


@functools.cache
def source_of(module: str) -> dict[str, str]:
    """Class -> its source, of a module of a dependency."""
    file = inspect.getsourcefile(sys.modules[module])
    text = "" if file is None else Path(file).read_text(encoding="utf-8")  # none for a module in C++
    nodes = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
    return {node.name: ast.get_source_segment(text, node) or "" for node in nodes}


@functools.cache
def inherited() -> set[tuple[str, str]]:
    """Private names that a class of the package shares with a base of a dependency, and the files."""
    found = set()
    for file, node in foreign_classes():
        kind = getattr(importlib.import_module(file.module), node.name, None)
        if kind is None:  # a function makes it, of public classes only
            continue
        if issubclass(kind, _lightning._Unbound):
            kind = _lightning.bind(kind, "pytorch_lightning")
        bases = [base for base in kind.__mro__ if base.__module__.partition(".")[0] in DEPENDENCIES]
        theirs = "\n".join(source_of(base.__module__).get(base.__name__, "") for base in bases)
        for base in kind.__mro__:
            ours = files().get(base.__module__)
            for part in ast.walk(ours.tree) if ours is not None else ():
                if isinstance(part, ast.ClassDef) and part.name == base.__name__:
                    names = "|".join(own_uses(part)) or "$^"
                    pattern = rf'(?:self\.|cls\.|def |"|^    )({names})\b'
                    found |= {(name, str(ours.path)) for name in re.findall(pattern, theirs, re.MULTILINE)}
    return found


@functools.cache
def uses() -> dict[str, list[str]]:
    """Private name of a dependency -> where the package uses it."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in files().values():
        skipped = own_names(file) | NOT_PRIVATE | OF_PYTHON
        for name, lines in file.used.items():
            if name not in skipped:
                found[name] += [f"{file.path}:{line}" for line in lines]
    for name, path in sorted(inherited()):
        found[name].append(f"{path} (inherited)")
    return found


def _places(paths: tuple[str, ...]) -> str:
    names = {name for path in paths for name in re.findall(r"\w+", path)} & uses().keys()
    return "\n".join(f"  {name}: {', '.join(uses()[name])}" for name in sorted(names))


def test_every_private_name_has_a_canary() -> None:
    assert {name: places for name, places in uses().items() if name not in CANARIES} == {}


def test_every_canary_is_of_a_name_that_is_used() -> None:
    paths = {path for paths in CANARIES.values() for path in paths}
    words = {word for file in files().values() for word in re.findall(r"\w+", file.text)}
    last = {path: [name for name in re.findall(r"\w+", path) if is_private(name)][-1:] for path in paths}
    assert [path for path, names in last.items() if not words.issuperset(names)] == []


def test_whoever_tests_a_private_name_is_its_canary() -> None:
    tests = [node for node in ast.parse(Path(__file__).read_text()).body if isinstance(node, ast.FunctionDef)]
    found = {
        f"{test.name}: {ast.unparse(part)}"
        for test in tests
        if not any(ast.unparse(mark).startswith("canary(") for mark in test.decorator_list)
        for part in ast.walk(test)
        if isinstance(part, ast.Attribute) and is_private(part.attr) and owner(part) in DEPENDENCIES
    }
    assert found == set()


PLACES = {
    "_lightning.py": ("pytorch_lightning", "lightning_fabric"),
    "_torch.py": ("torch", "torchmetrics"),
    "hydra_jobs/": ("hydra", "omegaconf"),
}
"""Where in the package -> the dependencies whose private names stand there."""


def test_private_names_of_a_dependency_are_in_one_place() -> None:
    places: dict[str, set[str]] = defaultdict(set)  # of a name that two dependencies have there are two
    for name, paths in CANARIES.items():
        packages = {path.lstrip("?").partition(".")[0] for path in paths}
        places[name] |= {place for place, theirs in PLACES.items() if packages.intersection(theirs)}
    outside = [
        f"{name}: {file.path}"
        for file in files().values()
        for name in {name for name in places if places[name]} & (file.used.keys() - file.members)
        if not str(file.path).startswith(tuple(places[name])) and (name, str(file.path)) not in inherited()
    ]
    assert outside == []


def test_names_are_found_however_they_are_used() -> None:
    found = {name: {place.partition(":")[0] for place in places} for name, places in uses().items()}
    assert found["_use_count"] == {"_torch.py"}, "called by a text"
    assert found["_evaluate_custom_resolver"] == {"hydra_jobs/handover.py"}, "patched"
    assert "hydra_jobs/compositions.py" in found["_internal"], "in the name of a module"
    assert found["_wrapping_function"] == {"launch/multiprocess_launcher.py (inherited)"}, "overridden"
    assert found["_interrupt"] == {"_lightning.py"}
    assert not {"_group", "_exit", "_target_"} & found.keys(), "ours, Python's, documented"
