"""Tools behind `python -m lightning_ddp`: the doctor, the benchmarks and the performance model.

Only the command line imports this room. Its page is README.md beside this file.
"""
