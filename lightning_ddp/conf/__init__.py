"""Hydra configuration groups: `strategy`, `trainer` and `launcher`.

They are found with `hydra.searchpath: [pkg://lightning_ddp.conf]`, and without it in a script that imports
`lightning_ddp` where its defaults name one of them that it has not itself. The ConfigStore then has their
schemas, and the groups as `lightning_ddp/strategy` and so on.
Nothing here imports Hydra before the user's script does.

* `options`: what there is to configure, read from the signatures and option dataclasses that own it;
* `schema`: typed classes made of that, for OmegaConf; `check`: what types cannot say, with closest names;
* `store`: schemas, groups and checks, for `hydra_jobs`, which gives them to Hydra;
* `pages`: the text of the YAML files; `python -m lightning_ddp.conf.pages` writes them, a test compares.
"""
