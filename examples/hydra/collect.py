"""Collect the results of a sweep into a table and a picture.

$ python examples/hydra/collect.py multirun/2025-01-31/12-00-00
"""

import argparse
import json
import statistics
import sys
import textwrap
from collections import defaultdict
from pathlib import Path

from lightning_ddp.tools.command_line import format_table


def read_results(folders: list[Path]) -> list[dict]:
    """Read the results of `train.py` from anywhere below the folders, in the order of the paths."""
    paths = sorted({path for folder in folders for path in folder.rglob("result.json")})
    return [json.loads(path.read_text()) for path in paths]


def group_seeds(results: list[dict]) -> dict[tuple[str, str], list[dict]]:
    """Group runs that differ in their seeds only, by data set and distinguishing settings."""
    described = [[*r["name"].split(","), f"ranks={r['world_size']}", f"steps={r['steps']}"] for r in results]
    shared = set.intersection(*map(set, described))
    groups = defaultdict(list)
    for result, words in zip(results, described, strict=True):
        name = ",".join(word for word in words if word not in shared) or result["name"]
        groups[result["data"], name].append(result)
    return dict(groups)


def tabulate(groups: dict[tuple[str, str], list[dict]]) -> str:
    """Format one row per configuration, with means over the seeds."""
    rows = []
    for (data, name), runs in groups.items():
        last = [run["curve"][-1] for run in runs]
        rows.append(
            (
                data,
                name,
                len(runs),
                runs[0]["world_size"],
                runs[0]["steps"],
                100 * statistics.mean(point["val_accuracy"] for point in last),
                statistics.mean(point["val_loss"] for point in last),
                statistics.mean(run["seconds"] for run in runs),
            )
        )
    return format_table(("data", "run", "seeds", "ranks", "steps", "accuracy %", "loss", "seconds"), rows)


def draw(groups: dict[tuple[str, str], list[dict]], path: Path) -> None:
    """Draw the loss over the steps on the left, the last accuracy per configuration on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    labels, scores = [], []
    for (data, name), runs in groups.items():
        label = textwrap.fill(name if len({key[0] for key in groups}) == 1 else f"{data}: {name}", 36)
        steps = [point["step"] for point in runs[0]["curve"]]
        losses = [
            statistics.mean(run["curve"][i]["val_loss"] for run in runs if i < len(run["curve"]))
            for i in range(len(steps))
        ]
        left.plot(steps, losses, marker=".", label=label)
        labels.append(label)
        scores.append(100 * statistics.mean(run["curve"][-1]["val_accuracy"] for run in runs))
    left.set(xlabel="step", ylabel="validation loss", yscale="log", title="Learning curves")
    left.legend(frameon=False, fontsize=8)
    bars = right.barh(labels, scores, color=[f"C{i % 10}" for i in range(len(labels))])
    right.bar_label(bars, fmt="%.1f", padding=3)
    right.invert_yaxis()
    right.set(xlabel="accuracy (%)", title="After the last step", xlim=(0, max(scores) * 1.12))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    left.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "folders", type=Path, nargs="+", help="output folders of Hydra, of one run or of many"
    )
    parser.add_argument("--picture", type=Path, default=None, help="default: results.png in the first folder")
    args = parser.parse_args()
    results = read_results(args.folders)
    if not results:
        sys.exit(
            f"no result.json below {', '.join(map(str, args.folders))}: has a run of train.py ended there?"
        )
    groups = group_seeds(results)
    picture = args.picture or args.folders[0] / "results.png"
    print(tabulate(groups))
    draw(groups, picture)
    print(f"picture: {picture}")


if __name__ == "__main__":
    main()
