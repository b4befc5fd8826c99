"""Benchmarks behind `python -m lightning_ddp bench`: this package beside torch and Lightning.

Contenders take turns within one run, so that a slow minute of the machine hits all of them, and ratios are
medians of ratios that were paired round by round. `benchmark` is what every benchmark is made of; each other
file is one, with what its ranks do; `tasks` has what `hooks` trains, `calibration` what `scaling` measures.
"""
