"""Under torchrun: no signal is sent, each rank raises, and the agent reports the rank that failed first."""

from __future__ import annotations

import re

import pytest
from harness import run_script

TRAIN = """
import os, signal, sys
import pytorch_lightning as pl
from pytorch_lightning.demos.boring_classes import BoringModel
import lightning_ddp

class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and self.global_rank == 1:
            os.write(1, b"FAULT FIRED" + os.linesep.encode())
            if sys.argv[1] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("expected 3 channels, got 1")
        return super().training_step(batch, batch_idx)

class Witness(pl.Callback):
    def on_exception(self, trainer, module, exception):
        name = type(exception).__name__
        os.write(1, f"WITNESS rank {trainer.global_rank} {name}".encode() + os.linesep.encode())

pl.Trainer(
    strategy="custom_ddp", accelerator="cpu", devices=2, max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[Witness()],
).fit(Model())
"""


@pytest.mark.parametrize("kind", ["raise", "kill"])
def test_torchrun_reports_the_rank_that_failed_first(kind) -> None:
    result = run_script(
        TRAIN,
        [kind],
        launcher=["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
        timeout_s=150.0,
    )
    assert result.returncode == 1
    assert result.stdout.count("FAULT FIRED") == 1
    assert "WITNESS rank 0 PeerFailure" in result.stdout
    root = result.stderr[result.stderr.index("Root Cause (first observed failure)") :]
    assert re.search(r"rank +: 1 \(local_rank: 1\)", root), root
    assert ("ValueError: expected 3 channels, got 1" if kind == "raise" else "SIGKILL") in root
