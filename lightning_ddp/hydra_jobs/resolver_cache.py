"""Cache of OmegaConf resolvers: their answers in a job's configuration, so that all ranks read the same.

OmegaConf asks a resolver (`${oc.env:USER}`, `${now:%H-%M}`, `${draw:}`) whenever a value is read, and keeps
the answers of some of them in a cache that belongs to the configuration. Here all copies of a job's
configuration share one cache, which also keeps the answers of the others. The rank that composed the
configuration hands the cache to the others together with it. Nothing else changes: interpolations stay
interpolations, and one that nobody could resolve fails where it is read.
"""

from __future__ import annotations

import contextlib
import pickle
import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from lightning_ddp.hydra_jobs.nodes import nodes_of

__all__ = ["JobCache", "answer_all", "attach", "detach", "install"]

_OF_THE_CONFIGURATION = {  # resolvers that only look at the configuration, which all ranks share
    "hydra",
    "oc.create",
    "oc.decode",
    "oc.deprecated",
    "oc.dict.keys",
    "oc.dict.values",
    "oc.select",
    "python_version",
}
_PASSED = {"pass_parent", "pass_node", "pass_root"}

Place = tuple[str, str, tuple[Any, ...]]


class JobCache(defaultdict[str, Any]):
    """In the place of OmegaConf's resolver cache: name of a resolver -> arguments -> answer.

    Args:
        cache: answers in OmegaConf's form.
        answers: answers of resolvers that OmegaConf does not cache: place in the configuration -> answer.
    """

    def __init__(self, cache: dict[str, dict[Any, Any]], answers: dict[Place, Any] | None = None) -> None:
        super().__init__(dict, {name: dict(values) for name, values in cache.items()})
        self.answers: dict[Place, Any] = dict(answers or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> JobCache:
        return self

    def __copy__(self) -> JobCache:
        return self

    def __reduce__(self) -> tuple[Any, ...]:  # a launcher may send the job's result to another process
        return type(self), self.to_portable()

    def ask(self, place: Place, resolver: Callable[[], Any]) -> Any:
        """The answer that is known for `place`; else asks `resolver` and remembers what it says."""
        if place not in self.answers:
            self.answers[place] = resolver()
        return self.answers[place]

    def to_portable(self) -> tuple[dict[str, dict[Any, Any]], dict[Place, Any]]:
        """The contents, less what cannot be pickled: of such an object each rank makes its own."""
        cache = {
            name: {key: value for key, value in values.items() if _pickles((key, value))}
            for name, values in self.items()
        }
        return cache, {key: value for key, value in self.answers.items() if _pickles((key, value))}


def _pickles(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # noqa: BLE001 (classes raise what they like)
        return False
    return True


def attach(config: Any, cache: JobCache | None = None) -> JobCache:
    """Gives a configuration a `JobCache`, unless it has one already; returns it.

    Args:
        config: a DictConfig without parent.
        cache: the one to use; None for one that begins with what OmegaConf has cached.
    """
    present = config._metadata.resolver_cache
    if cache is None:
        cache = present if isinstance(present, JobCache) else JobCache(present)
    config._metadata.resolver_cache = cache
    return cache


def detach(config: Any) -> None:
    """Gives a configuration OmegaConf's own kind of cache back, with what that would hold."""
    cache = defaultdict(dict, {name: dict(values) for name, values in attach(config).items()})
    config._metadata.resolver_cache = cache


def answer_all(config: Any) -> None:
    """Reads every interpolation in `config`, so that its cache holds all answers that can be had."""
    for _, node in nodes_of(config):
        if node._is_interpolation():
            # it fails again, for the user, where it is read; classes raise what they like
            with contextlib.suppress(Exception):
                node._dereference_node()


def install(base: types.ModuleType) -> None:
    """Has OmegaConf look into `JobCache`s. Args: base: the module `omegaconf.base`. Idempotent."""
    original = base.Container._evaluate_custom_resolver
    if hasattr(original, "original"):
        return

    def evaluate(
        self: Any,
        key: Any,
        node: Any,
        inter_type: str,
        inter_args: tuple[Any, ...],
        inter_args_str: tuple[str, ...],
    ) -> Any:
        def resolver() -> Any:
            return original(self, key, node, inter_type, inter_args, inter_args_str)

        cache = self._get_root()._metadata.resolver_cache
        if not isinstance(cache, JobCache) or _looks_at_the_configuration(self, inter_type):
            return resolver()
        is_plain = all(isinstance(value, str | int | float | bool | None) for value in inter_args)
        return cache.ask(
            (self._get_full_key(key), inter_type, inter_args if is_plain else inter_args_str), resolver
        )

    evaluate.original = original  # type: ignore[attr-defined]
    base.Container._evaluate_custom_resolver = evaluate


def _looks_at_the_configuration(container: Any, name: str) -> bool:
    """Whether a resolver is a function of the configuration: it is given nodes, and may follow changes."""
    if name in _OF_THE_CONFIGURATION:
        return True
    wrapper = container._resolvers.get(name)
    names = getattr(getattr(wrapper, "__code__", None), "co_freevars", ())
    cells = getattr(wrapper, "__closure__", None) or ()
    return any(cell.cell_contents for free, cell in zip(names, cells, strict=True) if free in _PASSED)
