"""`Fabric(strategy="custom_ddp")`: weights of `ddp`, launchers, hooks, averagers, checkpoints, failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ScriptResult, run_script

from lightning_ddp import CustomFabricStrategy, available_variants
from lightning_ddp.errors import ConfigurationError

SCRIPT = Path(__file__).with_name("harness") / "fabric_script.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
REPORT = "failed first, and all ranks were stopped because of it."


def run(namespace: str, folder: Path, *cases: str, **options: Any) -> ScriptResult:
    return run_script(SCRIPT, [namespace, str(folder), *cases], **options)


def results_of(folder: Path, case: str) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{case}.{rank}.pt", weights_only=True) for rank in range(2)]


def differing(one: dict[str, Any], other: dict[str, Any], *, but: str = "-") -> list[str]:
    assert list(one) == list(other)
    return [name for name in one if but not in name and not torch.equal(one[name], other[name])]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the results of Fabric's own strategy, of ours, of ours with a hook, with an averager."""
    folder = tmp_path_factory.mktemp("fabric")
    run("lightning_fabric", folder, "ddp").check()
    result = run("lightning_fabric", folder, "custom_ddp", "hook", "averager").check()
    assert "Warning" not in result.stderr
    return folder


@pytest.mark.xdist_group("fabric")
class TestTrained:
    def test_weights_equal_those_of_ddp_bit_for_bit(self, trained):
        ours, theirs = results_of(trained, "custom_ddp"), results_of(trained, "ddp")
        assert [result["wrapper"] for result in (ours[0], theirs[0])] == [
            "BucketedDDP",
            "DistributedDataParallel",
        ]
        assert differing(ours[0]["saved"], theirs[0]["saved"]) == []
        assert differing(ours[1]["saved"], theirs[1]["saved"], but="running") == []
        assert not torch.equal(ours[0]["saved"]["0.weight"], torch.zeros(16, 8))

    @pytest.mark.parametrize("case", ["custom_ddp", "hook", "averager"])
    def test_a_checkpoint_is_saved_and_loaded(self, trained, case):
        for result in results_of(trained, case):
            assert differing(result["saved"], result["loaded"], but="running") == []
            assert (result["step"], result["remainder"]) == (16, {})
            assert (float(result["sum"]), result["told"]) == (3.0, "by 1")

    def test_what_a_hook_remembers_is_in_a_file_of_each_rank_beside_the_checkpoint(self, trained):
        files = [name for name in results_of(trained, "hook")[0]["files"] if name.startswith("hook.")]
        assert [name.rsplit(".", 2)[0] for name in files[1:]] == ["hook.ckpt.rank0", "hook.ckpt.rank1"]
        assert torch.load(trained / "hook.ckpt")["lightning_ddp"]["hook"]["name"] == "powersgd"
        sent = results_of(trained, "hook")[0]["saved"]
        assert differing(sent, results_of(trained, "custom_ddp")[0]["saved"]) != []

    def test_models_of_local_training_drift_apart_meet_and_agree_in_the_checkpoint(self, trained):
        first, second = results_of(trained, "averager")
        together = [apart == 0 for apart in first["apart"]]
        assert together == [True, True, False, False, False, True, False, False]
        assert differing(first["saved"], second["saved"]) == []


@pytest.mark.parametrize(
    ("namespace", "strategy", "launcher"),
    [
        ("lightning.fabric", "custom_ddp_fork", ()),
        pytest.param("lightning.fabric", "custom_ddp_spawn", (), marks=pytest.mark.slow),
        pytest.param("lightning_fabric", "custom_ddp", TORCHRUN, marks=pytest.mark.slow),
    ],
)
@pytest.mark.xdist_group("fabric")
def test_every_launcher_and_namespace_gives_these_weights(trained, tmp_path, namespace, strategy, launcher):
    run(namespace, tmp_path, strategy, launcher=launcher).check()
    ours = results_of(tmp_path, strategy)[0]
    assert (ours["wrapper"], ours["is_shared"]) == ("BucketedDDP", False)
    assert differing(ours["saved"], results_of(trained, "ddp")[0]["saved"]) == []


RETURNS = """
import sys
import torch
import lightning_ddp
from lightning_fabric import Fabric

def work(fabric):
    return bytes(300_000), torch.full((2,), fabric.world_size)

if __name__ == "__main__":
    data, sizes = Fabric(accelerator="cpu", devices=2, strategy=sys.argv[1]).launch(work)
    print(len(data), sizes.tolist())
"""


@pytest.mark.parametrize(
    "strategy", ["custom_ddp_fork", pytest.param("custom_ddp_spawn", marks=pytest.mark.slow)]
)
def test_a_function_returns_more_than_a_pipe_holds_and_tensors(strategy):
    result = run_script(RETURNS, [strategy], timeout_s=60.0).check()
    assert result.stdout.splitlines()[-1] == "300000 [2, 2]"


LOADS = """
import sys, torch
from lightning_fabric import Fabric
from lightning_ddp import CustomFabricStrategy

def work(fabric, folder):
    net = torch.nn.Linear(2, 1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.0))
    weights = {"weight": torch.full((1, 2), 5.0), "bias": torch.ones(1)}
    fabric.save(folder + "/full.ckpt", {"model": weights})
    fabric.save(folder + "/raw.pt", weights)
    fabric.load_raw(folder + "/raw.pt", model)
    for part in range(2):
        for _ in range(4):
            fabric.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
        if fabric.global_rank == 0:
            print(net.weight.tolist(), net.bias.tolist())
        weights["bias"] += 1
        fabric.save(folder + "/full.ckpt", {"model": weights})
        fabric.load(folder + "/full.ckpt", {"model": model})

if __name__ == "__main__":
    averaging = {"name": "diloco", "period": 2}
    strategy = CustomFabricStrategy(start_method="fork", model_averaging=averaging)
    Fabric(accelerator="cpu", devices=2, strategy=strategy).launch(work, sys.argv[1])
"""


def test_an_averager_keeps_weights_that_are_loaded_after_setup(tmp_path):
    result = run_script(LOADS, [str(tmp_path)], timeout_s=60.0).check()
    assert result.stdout.splitlines()[-2:] == ["[[5.0, 5.0]] [1.0]", "[[5.0, 5.0]] [2.0]"]
    assert "they start from scratch" in result.stderr


@pytest.mark.parametrize("name", ["custom_ddp", pytest.param("custom_ddp_spawn", marks=pytest.mark.slow)])
def test_a_rank_that_fails_anywhere_in_the_script_ends_all_with_its_report(tmp_path, name):
    result = run("lightning_fabric", tmp_path, f"{name}:raise")
    assert result.returncode == 1
    is_script = name == "custom_ddp"
    report = result.stderr.rpartition("lightning_ddp: ")[2] if is_script else result.stderr
    assert ("rank 1 (" in report and REPORT in report) or not is_script
    assert "ValueError: the picture 4711.png is broken" in report
    assert "PeerFailure: rank 1 (" in result.stderr


def test_replicas_that_part_end_the_run(tmp_path):
    result = run("lightning_fabric", tmp_path, "check:part")
    assert result.returncode == 1
    assert "the replicas differ: ranks 0-1 have different 0.weight" in result.stderr
    assert "nobody knows which is right" in result.stderr


def test_fabric_knows_the_names_but_those_for_loops_and_says_what_is_wrong():
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import STRATEGY_REGISTRY

    ours = {name for name, entry in STRATEGY_REGISTRY.items() if entry["strategy"] is CustomFabricStrategy}
    assert ours == set(available_variants()) - {"custom_ddp_shrink", "custom_ddp_replace"}
    for name, words in {
        "custom_ddp_shrink": "as Fabric has no on_failure",
        "custom_ddpp": "did you mean",
    }.items():
        with pytest.raises(ValueError, match=words):
            Fabric(accelerator="cpu", devices=2, strategy=name)
    with pytest.raises(TypeError, match=r"'on_failure'"):
        CustomFabricStrategy(on_failure="shrink")
    with pytest.raises(ConfigurationError, match="no option 'rnak'"):
        CustomFabricStrategy(ddp_comm_hook={"name": "powersgd", "rnak": 1})
    with pytest.raises(TypeError, match="needs to be called with a function"):
        Fabric(accelerator="cpu", devices=2, strategy="custom_ddp_spawn").launch()
    averaging = CustomFabricStrategy(model_averaging="diloco")
    with pytest.raises(ConfigurationError, match=r"fabric\.setup\(model, optimizer\)"):
        averaging.setup_optimizer(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    with pytest.raises(TypeError, match=r"model that fabric\.setup has returned"):
        averaging._backward_sync_control.no_backward_sync(torch.nn.Linear(1, 1), True).__enter__()
