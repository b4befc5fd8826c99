"""`python -m simulation`: plays histories, prints one, and makes a failing one smaller."""

from __future__ import annotations

import argparse
import sys
import time

from simulation.kernel import Violation
from simulation.plan import Plan, plan_of
from simulation.world import World


def failure_of(plan: Plan) -> str | None:
    """What does not hold in a history; None if all does."""
    try:
        World(plan).play()
    except Violation as error:
        return str(error)
    return None


def shrink(plan: Plan) -> Plan:
    """The simplest plan that still fails, by leaving out one thing after the other."""
    while True:
        for smaller in plan.smaller():
            if failure_of(smaller) is not None:
                plan = smaller
                break
        else:
            return plan


def show(plan: Plan) -> str | None:
    """Prints a history message by message; returns what does not hold."""
    world = World(plan, traces=True)
    try:
        world.play()
        failure = None
    except Violation as error:
        failure = str(error)
    print(plan)
    print("\n".join(world.kernel.trace or ()))
    return failure


def main() -> int:
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="the history to print")
    parser.add_argument("--range", type=int, nargs=2, metavar=("FIRST", "LAST"), help="histories to play")
    parser.add_argument("--most", type=int, default=10, help="so many failures, then stop")
    parser.add_argument("--shrink", action="store_true", help="make a failing history smaller")
    options = parser.parse_args()
    if options.seed is not None:
        plan = plan_of(options.seed)
        if options.shrink and failure_of(plan) is not None:
            plan = shrink(plan)
        failure = show(plan)
        print(failure or "all holds")
        return failure is not None
    first, last = options.range or (0, 2000)
    start, num_failed, num_events = time.perf_counter(), 0, 0
    for seed in range(first, last):
        world = World(plan_of(seed))
        try:
            world.play()
        except Violation as error:
            print(f"{seed}: {error}")
            num_failed += 1
            if num_failed >= options.most:
                break
        num_events += world.kernel.num_events
    seconds = time.perf_counter() - start
    number = seed + 1 - first
    print(f"{number} histories, {num_events} events, {num_failed} failed, {number / seconds:.0f} a second")
    return num_failed > 0


if __name__ == "__main__":
    sys.exit(main())
