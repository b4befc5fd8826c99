"""Model of a step's time elsewhere: with more ranks, another link, hook, averager or bucket plan.

Nothing here communicates. `profile` is what the ranks compute, from recorded steps; `network` what a
collective costs; `program` what a hook does with a bucket; `simulation` plays one step; `prediction` says how
long it is; `planning` finds the buckets that end it soonest.
"""
