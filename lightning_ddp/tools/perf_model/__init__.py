"""Model of a step's time elsewhere: with more ranks, another link, hook, averager or bucket plan.

Nothing here communicates. `profile` is what the ranks compute, from recorded steps; `network` what a
collective costs; `program` and `tracing` what a hook does with a bucket; `simulation` plays one step;
`planning` finds the buckets that end a backward soonest; `prediction` puts them together.
"""

from lightning_ddp.tools.perf_model.network import Network, Transfer
from lightning_ddp.tools.perf_model.prediction import (
    BucketPlan,
    Prediction,
    predict_averager,
    predict_hook,
    recommend_buckets,
)
from lightning_ddp.tools.perf_model.profile import StepProfile, cut_into_buckets, square_shapes
from lightning_ddp.tools.perf_model.program import HookModel, plain_model
from lightning_ddp.tools.perf_model.simulation import SimulatedBucket, SimulatedStep, simulate
from lightning_ddp.tools.perf_model.tracing import trace_hook

__all__ = [
    "BucketPlan",
    "HookModel",
    "Network",
    "Prediction",
    "SimulatedBucket",
    "SimulatedStep",
    "StepProfile",
    "Transfer",
    "cut_into_buckets",
    "plain_model",
    "predict_averager",
    "predict_hook",
    "recommend_buckets",
    "simulate",
    "square_shapes",
    "trace_hook",
]
