"""How long a step would take elsewhere: with more ranks, another link, hook, averager or bucket plan.

Nothing here communicates. `profile` is what the ranks compute, from recorded steps; `network` what a
collective costs; `tracing` what a hook does with a bucket; `simulation` plays one step; `prediction` puts
them together.
"""

from lightning_ddp.scaling.network import Network, Transfer
from lightning_ddp.scaling.prediction import Prediction, predict_averager, predict_hook
from lightning_ddp.scaling.profile import StepProfile, cut_into_buckets, square_shapes
from lightning_ddp.scaling.program import HookModel, plain_model
from lightning_ddp.scaling.simulation import SimulatedBucket, SimulatedStep, simulate
from lightning_ddp.scaling.tracing import HookTracer, merge_traces, trace_hook

__all__ = [
    "HookModel",
    "HookTracer",
    "Network",
    "Prediction",
    "SimulatedBucket",
    "SimulatedStep",
    "StepProfile",
    "Transfer",
    "cut_into_buckets",
    "merge_traces",
    "plain_model",
    "predict_averager",
    "predict_hook",
    "simulate",
    "square_shapes",
    "trace_hook",
]
