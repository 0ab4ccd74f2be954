"""Training on a GPU: `jaxrag train` of configs/train/synthetic-6m.toml in calls of minutes.

A run is a folder under ``work``, one for each seed. It stops by SIGTERM before the stage is killed,
with a checkpoint, exports the weights it has, and the next call goes on there. When the last step
is done, `jaxrag eval synthetic` measures the weights, as it did checkpoints/synthetic-0.8m; a call
after that only evaluates.
"""

import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CONFIG = "synthetic-6m"  # of configs/train
QUESTIONS = 4_000  # as checkpoints/synthetic-0.8m is evaluated
LEAVE = 60.0  # seconds of a stage for the last checkpoint and the export
EVALUATION = 90.0  # seconds that must be left to begin it
# A toy: the same lessons and data, few steps.
TOY = (
    'model.config="configs/models/synthetic-0.8m.toml"', "data.rows=2", "optimizer.warmup_steps=1",
    "optimizer.steps=3", "run.log_every=1", "run.eval_every=2", "run.save_every=2",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Training:
    """How much of the run a call does.

    Attributes:
      work: folder of the runs.
      seed: of weights and samples; 0 is the config's own.
      steps: stop after this step; None: after the last one.
      seconds: until the stage is killed.
      settings: KEY=VALUE in place of the config's.
    """

    work: Path
    seed: int = 0
    steps: int | None = None
    seconds: float = 540.0
    settings: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Of the run of this seed."""
        return self.work / f"train-{self.seed}"

    @property
    def assignments(self) -> list[str]:
        """All settings that differ from the file's; those given come last."""
        seeds = (f"model.seed={self.seed}", f"data.seed={1 + 1_000 * self.seed}")
        return [*(seeds if self.seed else ()), *self.settings]


@contextmanager
def terminated_after(seconds: float) -> Iterator[None]:
    """SIGTERM for this process when that time is over, as a scheduler would send it."""
    timer = threading.Timer(max(seconds, 0.0), os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def stage_train(training: Training, tiny: bool, found: MutableMapping[str, Any]) -> None:
    """Train one seed until the last step or the time is over; then measure what is exported."""
    from jaxrag.train.config import load_config
    from jaxrag.train.loop import train

    start = time.perf_counter()
    training = dataclasses.replace(training, settings=(*(TOY if tiny else ()), *training.settings))
    config = load_config(CONFIG, training.assignments)
    with terminated_after(training.seconds - LEAVE):
        report = train(
            config, training.folder, resume=True, stop_after=training.steps, progress=False
        )
    rate = report.tokens / report.seconds
    found["run"] = {
        "seconds": report.seconds, "tokens_per_second": rate, "stopped": report.stopped,
        "step": report.step, "of_steps": config.optimizer.steps, "loss": report.loss,
        "tokens": report.tokens,
    }  # fmt: skip
    for name, value in held_out(training.folder).items():
        found[name] = value
    if report.model is None:  # terminated: the checkpoint is there, its weights are not
        train(config, training.folder, resume=True, stop_after=report.step, progress=False)
        return
    left = training.seconds - (time.perf_counter() - start)
    if report.stopped == "finished" and (tiny or left > EVALUATION):
        evaluate(report.model, 8 if tiny else QUESTIONS, found)


def held_out(folder: Path) -> Mapping[str, dict[str, float]]:
    """What the run last measured on its held-out samples, by name."""
    from jaxrag.train.log import METRICS_FILE, read_metrics

    found: dict[str, dict[str, float]] = {}
    for row in read_metrics(folder / METRICS_FILE):
        for name, value in row.items():
            if name.endswith("/accuracy"):
                found[f"held out, {name}"] = {"share": value, "step": row["step"]}
    return found


def evaluate(model: str, questions: int, found: MutableMapping[str, Any]) -> None:
    """Exact match of the exported weights, in three ways of reading, and where it was written."""
    from jaxrag.measure.evals.options import SyntheticOptions
    from jaxrag.measure.evals.synthetic import run

    options = SyntheticOptions(models={"6m": model}, questions=questions)
    start = time.perf_counter()
    result = run(options, progress=False)
    seconds = time.perf_counter() - start
    path = Path(model).parent / "results.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for cell in result["cells"]:
        share = cell["accuracy"]["all"]
        found[f"exact match, {cell['read']}"] = {
            "share": share["value"], "interval": [share["low"], share["high"]],
            "questions": questions,
        }  # fmt: skip
    found["evaluation"] = {"seconds": seconds}
