"""Errors travel between processes and say what happened."""

from __future__ import annotations

import pickle

import pytest

from lightning_ddp.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    MissingGradientError,
    PeerFailure,
)


def test_peer_failure_keeps_its_fields_over_pickling() -> None:
    failure = PeerFailure(
        rank=2,
        host="gpu-07",
        pid=4121,
        step=1840,
        phase="training_step",
        exception_type="ValueError",
        message="expected 3 channels, got 1",
        traceback="Traceback ...",
    )
    again = pickle.loads(pickle.dumps(failure))
    assert vars(again) == vars(failure)
    assert str(again) == str(failure)
    assert str(failure).startswith(
        "rank 2 (host gpu-07, pid 4121) failed at step 1840 in training_step:\n"
        "  ValueError: expected 3 channels, got 1\n"
    )
    assert str(failure).endswith("Traceback of rank 2 follows.\nTraceback ...")


def test_missing_gradients_say_who_misses_what_over_pickling() -> None:
    error = MissingGradientError({0: ["a.weight"], 2: []}, rank=0, world_size=3, step=7)
    again = pickle.loads(pickle.dumps(error))
    assert (again.missing, again.step, str(again)) == (error.missing, 7, str(error))
    lines = str(error).splitlines()
    assert lines[1:4] == ["  rank 0: a.weight", "  rank 1: no report", "  rank 2: none missing"]
    assert error.copy() is not error


@pytest.mark.parametrize("kind", [CollectiveTimeoutError, CollectiveMismatchError])
def test_errors_of_collectives_keep_their_fields_over_pickling(kind) -> None:
    error = kind("rank 0: barrier", label="barrier", rank=0, waited_s=3.5, missing=[2])
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (str(again), again.label, again.rank, again.waited_s, again.missing) == (
        "rank 0: barrier",
        "barrier",
        0,
        3.5,
        (2,),
    )


class WantsArguments(KeyError):
    def __init__(self, first, second) -> None:
        super().__init__(first, second)


class Outer:
    class Final(ValueError):
        def __init_subclass__(cls) -> None:
            raise TypeError("no more classes of this")


@pytest.mark.parametrize(
    ("kind", "is_one"),
    [
        (FileNotFoundError, True),
        (KeyError, True),
        (WantsArguments, True),
        (UnicodeDecodeError, True),
        (Outer.Final, False),  # Python cannot combine them
        (CollectiveTimeoutError, False),
        (KeyboardInterrupt, False),
    ],
)
def test_a_peer_failure_may_be_an_instance_of_what_was_raised(kind, is_one) -> None:
    path = f"{kind.__module__}:{kind.__qualname__}"
    failure = PeerFailure(rank=1, message="m", exception_class=path, exit_code=1)
    like = failure.like()
    assert isinstance(like, kind) == is_one
    assert isinstance(like, PeerFailure)
    assert (str(like), like.exit_code, type(like).__name__) == (str(failure), 1, "PeerFailure")
    again = pickle.loads(pickle.dumps(like))
    assert (type(again), vars(again)) == (PeerFailure, vars(failure))


@pytest.mark.parametrize(
    "path", [None, "", "builtins", "os:system", "no.such:Error", "os:path.x", ":", "os:<locals>"]
)
def test_a_peer_failure_of_an_unknown_class_stays_what_it_is(path) -> None:
    failure = PeerFailure(rank=1, message="m", exception_class=path)
    assert failure.like() is failure
