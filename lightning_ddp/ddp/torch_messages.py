"""Phrases of torch's DDP by which its tests, and filters of people's logs, know an error or a warning.

Our messages say more; where torch has a message for the same thing, the phrase is part of it.
"""

from __future__ import annotations

ALREADY_REGISTERED = "register_comm_hook or register_builtin_comm_hook can only be called once."
BUCKET_ANNOTATION = "Communication hook: bucket annotation should be dist.GradBucket."
CHANGED_GRAPH = "Your training graph has changed in this iteration"
MUST_BE_CALLABLE = "Communication hook must be callable."
NO_FUTURE = "callback must return a torch.futures.Future object, but got"
ONE_DEVICE_ID = "device_ids can only be None or contain a single element."
ONE_DEVICE_TYPE = "input module must be on the same type of devices"
ONLY_SINGLE_DEVICE = (
    "DistributedDataParallel device_ids and output_device arguments only work with"
    " single-device/multiple-device GPU modules or CPU modules"
)
PARAMETER_AT = "Parameter at index"
READY_TWICE = "Expected to mark a variable ready only once."
RETURN_ANNOTATION = "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]."
STATIC_GRAPH_TOO_LATE = "should be called before training loop starts"
SYNC_BATCHNORM = "SyncBatchNorm layers only work with GPU modules"
UNFINISHED = "Expected to have finished reduction in the prior iteration before starting a new one."
UNFINISHED_STATIC = (
    UNFINISHED + " This error indicates that your training graph has changed in this iteration, e.g., one"
    " parameter is used in first iteration, but then got unused in the second iteration. this is not"
    " compatible with static_graph set to True.\nParameter indices which did not receive grad for"
)
UNINITIALIZED = "Modules with uninitialized parameters can't be used with `DistributedDataParallel`."

FIND_UNUSED = "passing the keyword argument `find_unused_parameters=True`"
OUTPUTS_IN_LOSS = "`forward` function outputs participate in calculating loss"
SET_DEBUG = "set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL"
