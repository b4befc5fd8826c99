"""Hydra support of `import lightning_ddp`: schemas, groups and checks for a script that uses Hydra.

`install` imports nothing of Hydra; the rest happens when the user's script has imported it. (A plugin in
Hydra's own sense would be found without `import lightning_ddp`, but would have every Hydra program of the
environment import torch.) A program whose defaults and search path do not ask for a group composes as without
the import: `strategy`, `trainer` and `launcher` may be keys or groups of its own.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Set
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_ddp.launch.import_hook import after_import

__all__ = ["install"]

_FOLDER = Path(__file__).parent
_PROVIDER = "lightning_ddp"
_PACKAGE = "lightning_ddp.conf"
_GROUPS = ("strategy", "trainer", "launcher")
_MARK = "_knows_lightning_ddp"

_taking_part: frozenset[str] = frozenset()
"""The groups that the latest composition has asked for; `_PROVIDER` for those below that name."""


def install() -> None:
    """Does all this when Hydra is imported, or at once if it is. Does not communicate."""
    after_import("hydra._internal.config_loader_impl", _extend_loader)
    after_import("hydra.core.config_store", _follow)


def _follow(module: ModuleType) -> None:
    """Has the package imported where a launcher (joblib, submitit) unpickles Hydra's state for a job.

    It takes there of the script's module what the job's function mentions, which the package is often not.
    """
    setattr(module.ConfigStore.instance(), _MARK, install)


@functools.cache
def _register() -> None:
    """Stores the schemas, and the groups under the name of this package.

    Not as `strategy`, `trainer` and `launcher`: Hydra 1 takes an entry of its store for the schema of a file
    of the same name, so that a `trainer/gpu.yaml` of the user's could not be composed any more.
    """
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    from lightning_ddp.conf.schema import all_schemas

    store = ConfigStore.instance()
    for schema in all_schemas().values():
        group, _, name = f"lightning_ddp/schema/{schema.name}".rpartition("/")
        store.store(group=group, name=name, node=schema.cls, provider=_PROVIDER)
    for path in sorted(path for group in _GROUPS for path in _FOLDER.glob(f"{group}/**/*.yaml")):
        text = path.read_text(encoding="utf-8")
        package = re.match(r"# @package (\S+)", text)
        store.store(
            group=f"lightning_ddp/{path.parent.relative_to(_FOLDER).as_posix()}",
            name=path.stem,
            node=OmegaConf.create(text),
            package=package[1] if package else None,
            provider=_PROVIDER,
        )


def _extend_loader(module: ModuleType) -> None:
    """Adds our groups to compositions that ask for them, and to these our checks.

    For every `@hydra.main`, sweep and `compose` of this process, which all end in this module. Hydra (1.3)
    runs no call-back when a composition fails, and so none that could name the option that was meant.
    """
    loader: Any = module.ConfigLoaderImpl
    if getattr(loader, _MARK, False):
        return
    override, open_repository = (
        loader._apply_overrides_to_config,
        loader._parse_overrides_and_create_caching_repo,
    )

    @functools.wraps(override)
    def _apply_overrides_to_config(overrides: Any, cfg: Any) -> None:
        override(overrides, cfg)
        if "lightning_ddp.conf.schema" in sys.modules:
            from lightning_ddp.conf.check import check_composed

            check_composed(cfg)

    @functools.wraps(open_repository)
    def _parse_overrides_and_create_caching_repo(self: Any, *args: Any, **kwargs: Any) -> Any:
        overrides, repository = open_repository(self, *args, **kwargs)
        _add_groups(repository, _taking_part)  # for lists of the options of a group: help, completion, glob
        return overrides, repository

    loader.load_configuration = _explained(loader.load_configuration)
    loader._parse_overrides_and_create_caching_repo = _parse_overrides_and_create_caching_repo
    # What follows matters where a search path is all that names the package: Hydra imports it in the middle
    # of its first composition, whose load_configuration is running by then, and which then looks these up.
    module.create_defaults_list = _with_our_groups(module.create_defaults_list)  # type: ignore[attr-defined]
    loader._compose_config_from_defaults_list = _explained(loader._compose_config_from_defaults_list)
    loader._apply_overrides_to_config = staticmethod(_explained(_apply_overrides_to_config))
    setattr(loader, _MARK, True)


# ---------------------------------------------------------------------- who asks


def _with_our_groups(create: Callable[..., Any]) -> Callable[..., Any]:
    """Hydra's function that makes the list of defaults, with the groups of ours that it needs for that."""

    @functools.wraps(create)
    def create_defaults_list(repo: Any, config_name: Any, overrides_list: Any, **kwargs: Any) -> Any:
        from hydra.errors import HydraException

        global _taking_part
        _taking_part = _named(repo, overrides_list)
        while True:
            _add_groups(repo, _taking_part)
            try:
                found = create(repo, config_name, overrides_list, **kwargs)
                lacking = _asked_by_nothing(found, repo) - _taking_part
                if not lacking:
                    return found
            except HydraException as error:
                lacking = _asked_by_error(error, repo, overrides_list) - _taking_part
                if not lacking:
                    raise
            _taking_part |= lacking

    return create_defaults_list


def _named(repository: Any, overrides: Any) -> frozenset[str]:
    """The groups that the search path names, and whether an override names one by its long name."""
    has_path = any(_is_ours(source) for source in repository.get_sources())
    has_long_name = any(override.key_or_group.startswith(f"{_PROVIDER}/") for override in overrides)
    return frozenset((_GROUPS if has_path else ()) + ((_PROVIDER,) if has_long_name or has_path else ()))


def _asked_by_error(error: BaseException, repository: Any, overrides: Any) -> Set[str]:
    """The group of ours without which there is no list of defaults.

    None for a choice on the command line in a group that the program has itself: that asks the program.
    """
    unspecified = re.match(r"You must specify '([\w/]+)", str(error).lstrip())
    if unspecified:
        return set() if repository.group_exists(unspecified[1]) else _top_of_ours(unspecified[1])
    group, _, choice = (getattr(error, "missing_cfg_file", None) or "").rpartition("/")
    is_chosen = any((each.key_or_group, each.value()) == (group, choice) for each in overrides)
    return set() if is_chosen and repository.group_exists(group) else _top_of_ours(group)


def _asked_by_nothing(found: Any, repository: Any) -> Set[str]:
    """The groups of ours that the defaults name without a choice, as in `strategy: null`."""
    choices = found.overrides.known_choices.items()
    groups = [key.partition("@")[0] for key, choice in choices if choice in (None, "???")]
    return {top for group in groups if not repository.group_exists(group) for top in _top_of_ours(group)}


def _top_of_ours(group: str) -> Set[str]:
    top = group.partition("/")[0]
    return {top} if top == _PROVIDER or (top in _GROUPS and (_FOLDER / group).is_dir()) else set()


# ---------------------------------------------------------------------- taking part


def _add_groups(repository: Any, groups: Set[str]) -> None:
    """Has a repository find our groups after the user's files; before the store, which Hydra wants last."""
    sources = repository.get_sources()
    has_path = any(_is_ours(source) for source in sources)
    sources[:] = [source for source in sources if not hasattr(source, _MARK)]
    if groups:
        from hydra.core.config_store import ConfigStore

        _register()
        sources[-1].store = ConfigStore.instance()  # Hydra composes with a copy from before
    if groups and not has_path:
        source = _kind_of_source()(_PROVIDER, f"pkg://{_PACKAGE}")
        setattr(source, _MARK, groups)
        sources.insert(-1, source)
    for place in [place for place, config in repository.cache.items() if config is None]:
        del repository.cache[place]


def _is_ours(source: Any) -> bool:
    """Whether the user's search path has led to it."""
    return source.scheme() == "pkg" and source.path == _PACKAGE and not hasattr(source, _MARK)


@functools.cache
def _kind_of_source() -> Any:
    from hydra._internal.sources_registry import SourcesRegistry

    kind: Any = SourcesRegistry.instance().resolve("pkg")

    class Groups(kind):  # type: ignore[misc]  # a class that is found at run time
        """The folder of this package, less the groups that nobody has asked for."""

        def is_group(self, config_path: str) -> bool:
            return self._takes_part(config_path) and super().is_group(config_path)

        def is_config(self, config_path: str) -> bool:
            return self._takes_part(config_path) and super().is_config(config_path)

        def list(self, config_path: str, results_filter: Any) -> Any:
            found = super().list(config_path, results_filter)
            return found if config_path else [name for name in found if self._takes_part(name)]

        def _takes_part(self, config_path: str) -> bool:
            return not config_path or config_path.partition("/")[0] in getattr(self, _MARK)

    return Groups


# ---------------------------------------------------------------------- messages


def _explained(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose errors about our options say what was meant; each is explained once."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        from hydra.errors import HydraException

        try:
            return function(*args, **kwargs)
        except HydraException as error:
            if not _taking_part or hasattr(error, _MARK):
                raise
            from lightning_ddp.conf.check import explain

            explanation = explain(error, _taking_part)
            if explanation is None:
                raise
            error.args = (explanation,)
            setattr(error, _MARK, True)
            raise

    return wrapper
