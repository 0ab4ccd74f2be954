"""Accuracy over training steps as a picture: Block-Attention's Fig. 4 for any runs.

matplotlib is an extra (``jaxrag[plots]``) and is imported only when something is drawn.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrag.base.errors import ConfigError, RequestError, TrainError
from jaxrag.base.installed import installs
from jaxrag.train.log import METRICS_FILE, read_metrics

FORMATS = (".png", ".svg", ".pdf")
_METRIC = "/accuracy"
_STYLES = ("-", "--", ":", "-.")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito


class Curve(NamedTuple):
    """Accuracy of one ``[[eval]]`` over the steps of a run."""

    run: str
    name: str  # of the [[eval]]
    steps: list[int]
    accuracy: list[float]  # fractions of 1


def read_curves(runs: Sequence[tuple[str, Path]], names: Sequence[str] = ()) -> list[Curve]:
    """The curves of runs, given as (label, folder); of these ``[[eval]]`` names, or of all.

    Raises TrainError for a folder without metrics or without a curve of that name.
    """
    curves: list[Curve] = []
    for label, folder in runs:
        if not (folder / METRICS_FILE).is_file():
            raise TrainError(f"{folder}: no {METRICS_FILE}; name the folder of a training run")
        lines = read_metrics(folder / METRICS_FILE)
        there = list(dict.fromkeys(
            key.removesuffix(_METRIC) for line in lines for key in line if key.endswith(_METRIC)
        ))  # fmt: skip
        if not there:
            raise TrainError(
                f"{folder}: accuracy was not measured; train with an [[eval]] and run.eval_every"
            )
        for name in names or there:
            if name not in there:
                raise TrainError(f"{folder}: no [[eval]] {name!r}; it has {', '.join(there)}")
            points = [(line["step"], line[name + _METRIC]) for line in lines
                      if name + _METRIC in line]  # fmt: skip
            steps, accuracy = zip(*points, strict=True)
            curves.append(Curve(label, name, list(steps), list(accuracy)))
    return curves


def check_picture(path: Path) -> None:
    """Refuse a picture that cannot be written, before the work: RequestError, ConfigError."""
    if path.suffix not in FORMATS:
        raise RequestError(f"{path}: expected a name that ends in {', '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise RequestError(f"{path}: its folder does not exist; make it first")
    figure_class()


def draw_curves(curves: Sequence[Curve], path: Path) -> None:
    """Write the picture: one colour an ``[[eval]]``, one line style a run.

    Raises ConfigError when matplotlib is not installed, RequestError for a file it cannot write.
    """
    check_picture(path)
    figure = figure_class()(figsize=(6.4, 4.0), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    runs = list(dict.fromkeys(curve.run for curve in curves))
    names = list(dict.fromkeys(curve.name for curve in curves))
    for curve in curves:
        axes.plot(
            curve.steps,
            [100 * value for value in curve.accuracy],
            color=COLOURS[names.index(curve.name) % len(COLOURS)],
            linestyle=_STYLES[runs.index(curve.run) % len(_STYLES)],
            marker="o",
            markersize=3,
            label=curve.name if len(runs) == 1 else f"{curve.run}, {curve.name}",
        )
    axes.set_xlabel("training step")
    axes.set_ylabel("held-out questions answered exactly, %")
    axes.set_ylim(0, 100)
    axes.set_xlim(left=0)
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)


def figure_class() -> Any:
    """The Figure class, which draws without a display and without global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(f"matplotlib is not installed; {installs('plots')} does it") from None
    return Figure
