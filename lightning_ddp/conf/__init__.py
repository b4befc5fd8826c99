"""Hydra's configuration groups `strategy`, `trainer` and `launcher`, as YAML files.

`hydra.searchpath: [pkg://lightning_ddp.conf]` adds all of them to a program. In a program that imports
`lightning_ddp`, `hydra_jobs` adds those that its defaults name.
"""
