"""What a run writes down: metrics as JSON lines, TensorBoard, and the progress bar."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp

from jaxrag.base.errors import ConfigError
from jaxrag.base.installed import installs
from jaxrag.models.text.progress import progress_bar

METRICS_FILE = "metrics.jsonl"
_PEAK_SIZES = {"cpu": 1024}  # rows and columns of the matrices that peak FLOP/s is measured with
_PEAK_SIZE = 8192  # on an accelerator


class Log:
    """Lines of metrics of one run; the values of a line are JSON numbers."""

    def __init__(
        self, folder: Path, *, steps: int, done: int, tensorboard: bool, progress: bool
    ) -> None:
        """Continue the folder's log after ``done`` steps; lines of later steps are dropped.

        Raises ConfigError when TensorBoard is asked for and tensorboardX is not installed.
        """
        path = folder / METRICS_FILE
        kept = [line for line in read_metrics(path) if line["step"] <= done]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
        self._file = path.open("a", encoding="utf-8")
        self._board = _board(folder / "tensorboard", done) if tensorboard else None
        self._bar = progress_bar(steps, "train", "step", shown=progress, done=done)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.close()
        self._file.close()
        if self._board is not None:
            self._board.close()

    def advance(self) -> None:
        """One step more on the bar."""
        self._bar.update()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """One line, and its numbers on the board."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
        shown = {
            name: f"{values[key]:{form}}"
            for name, key, form in (
                ("loss", "loss", ".4f"),
                ("tokens/s", "tokens_per_second", ",.0f"),
                ("mfu", "mfu", ".1%"),
            )
            if key in values
        }
        if shown:
            self._bar.set_postfix(shown, refresh=False)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a log, without one that was cut off; none when there is no file."""
    lines = []
    if path.is_file():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                break
    return lines


def measured_peak(dtype: str) -> float:
    """FLOP/s of this process's devices together at multiplying large matrices, just measured."""
    size = _PEAK_SIZES.get(jax.default_backend(), _PEAK_SIZE)
    x = jnp.ones((size, size), dtype)
    multiply = jax.jit(lambda x: x @ x)
    multiply(x).block_until_ready()
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        multiply(x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    # The devices of a CPU share its cores, those of an accelerator are counted each.
    devices = 1 if jax.default_backend() == "cpu" else jax.local_device_count()
    return 2 * size**3 / best * devices


def _board(folder: Path, done: int) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise ConfigError(
            "run.tensorboard = true: tensorboardX is not installed; "
            f"{installs('tensorboard')} does it"
        ) from None
    return SummaryWriter(str(folder), purge_step=done + 1)
