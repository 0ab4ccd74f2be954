"""The usual figure of a needle in a haystack: score by length of the prompt and depth.

matplotlib is an extra (``jaxrag[plots]``) and is imported only when something is drawn.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrag.base.errors import ConfigError, RequestError
from jaxrag.base.installed import installs

FORMATS = (".png", ".svg", ".pdf")


def check_picture(path: Path) -> None:
    """Refuse a picture that cannot be written, before the work: RequestError, ConfigError."""
    if path.suffix not in FORMATS:
        raise RequestError(f"{path}: expected a name that ends in {', '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise RequestError(f"{path}: its folder does not exist; make it first")
    _figure_class()


def draw_heatmap(result: Mapping[str, Any], path: Path) -> None:
    """Write the picture of a needle result, a panel a method, in the order of the methods.

    Raises ConfigError when matplotlib is not installed, RequestError for a file it cannot write.
    """
    check_picture(path)
    lengths, depths = result["lengths"], result["depths"]
    names = list(result["methods"])
    found = {(c["method"], c["length"], c["depth"]): c["score"]["value"] for c in result["grid"]}
    width = max(2.6, 0.55 * len(lengths) + 1.2)
    height = max(2.4, 0.28 * len(depths) + 1.2)
    figure = _figure_class()(
        figsize=(width * len(names) + 1.2, height), dpi=150, layout="constrained"
    )
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for name, axes in zip(names, panels, strict=True):
        scores = np.array([[100 * found[name, n, depth] for n in lengths] for depth in depths])
        image = axes.imshow(scores, cmap="RdYlGn", vmin=0, vmax=100, aspect="auto")
        for (row, column), score in np.ndenumerate(scores):
            pale = 20 < score < 80  # the colours of the middle
            axes.text(column, row, f"{score:.0f}", ha="center", va="center", fontsize=6,
                      color="black" if pale else "white")  # fmt: skip
        axes.set_title(name.replace(", ", "\n").replace(":", ":\n"), fontsize=8)
        axes.set_xlabel("tokens of the prompt", fontsize=8)
        axes.set_xticks(range(len(lengths)), [_tokens(n) for n in lengths], rotation=45)
        axes.set_yticks(range(len(depths)), [f"{100 * depth:g} %" for depth in depths])
        axes.tick_params(labelsize=7)
        # Thin lines between cells, where they touch.
        axes.set_xticks([n - 0.5 for n in range(1, len(lengths))], minor=True)
        axes.set_yticks([n - 0.5 for n in range(1, len(depths))], minor=True)
        axes.grid(which="minor", color="white", linewidth=0.8)
        axes.tick_params(which="minor", length=0)
    panels[0].set_ylabel("depth of the needle", fontsize=8)
    bar = figure.colorbar(image, ax=list(panels))
    bar.set_label("score, %", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    figure.savefig(path)


def _figure_class() -> Any:
    """The Figure class, which draws without a display and without global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(f"matplotlib is not installed; {installs('plots')} does it") from None
    return Figure


def _tokens(count: int) -> str:
    """1024 -> 1k, 1000 -> 1000."""
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)
