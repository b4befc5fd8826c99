"""Load PyTorch's test class for DDP, with forked ranks and with tests that torch ships but does not run."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import unittest
from typing import Any

import torch
import torch.multiprocessing

from conformance import cpu_for_cuda as shim

MODULE = "torch.testing._internal.distributed.distributed_test"


def load(*, cpu_for_cuda: bool) -> type[unittest.TestCase]:
    """The class with torch's tests as methods; with `cpu_for_cuda` none of them asks for a GPU."""
    with shim.importing() if cpu_for_cuda else contextlib.nullcontext():
        module = importlib.import_module(MODULE)
    if cpu_for_cuda:
        shim.adapt(module)

    class TorchDDPTests(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._spawn_processes()

        def _spawn_processes(self) -> None:
            # a spawned rank would read it anew, as setUp left it
            module.INIT_METHOD = os.environ["INIT_METHOD"]
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    if cpu_for_cuda:
        for name, test in _shipped_but_not_run().items():
            setattr(TorchDDPTests, name, test)
    return TorchDDPTests


def _shipped_but_not_run() -> dict[str, Any]:
    """Tests whose helper method torch ships, with torch's own parameters.

    Fused optimizers: their tests are commented out there. Parity on several ranks: the test there also saves
    and loads a static graph between two backward passes, which breaks torch's own class; here without that.
    """
    sgd = (torch.optim.SGD, (1e-2,), {"momentum": 0.9, "weight_decay": 0.01})
    adam = (torch.optim.Adam, (1e-2,), {"betas": (0.9, 0.99), "eps": 1e-6})
    adamw = (torch.optim.AdamW, *adam[1:])
    either = (True, False)
    cases = [(optimizer, True, False, subset) for optimizer in (sgd, adam) for subset in either]
    cases += [(adamw, *flags) for flags in itertools.product(either, repeat=3)]
    tests = dict(_fused_optimizer(*case) for case in cases)
    return tests | dict(_parity(view) for view in either)


def _fused_optimizer(optimizer: Any, view: bool, static: bool, subset: bool) -> tuple[str, Any]:
    kind, args, kwargs = optimizer

    def test(self: Any) -> None:
        self._test_ddp_hook_with_optimizer_parity(view, static, kind, subset, *args, **kwargs)

    flags = "".join(f"_{flag}" for flag, on in (("view", view), ("static", static), ("subset", subset)) if on)
    test.__name__ = f"test_extra_fused_optim_parity_{kind.__name__.lower()}{flags}"
    return test.__name__, test


def _parity(view: bool) -> tuple[str, Any]:
    def test(self: Any) -> None:
        self._test_DistributedDataParallel([self.rank], self.rank, gradient_as_bucket_view=view)

    test.__name__ = "test_extra_DistributedDataParallel" + ("_view" if view else "")
    return test.__name__, test
