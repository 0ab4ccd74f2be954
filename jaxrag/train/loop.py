"""The training loop: steps, metrics, checkpoints, evaluation; stops cleanly, resumes exactly."""

import contextlib
import dataclasses
import errno
import json
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from jaxrag.base.errors import TrainError
from jaxrag.models.export import export_hf
from jaxrag.models.flops import forward_flops
from jaxrag.models.spec import Params
from jaxrag.models.text.prompts import template_named
from jaxrag.train.checkpoints import Checkpoints
from jaxrag.train.config import TrainConfig, changed_field, to_dict
from jaxrag.train.cost import passes
from jaxrag.train.evaluation import HeldOut, held_out
from jaxrag.train.log import Log, measured_peak
from jaxrag.train.packing import NOTHING
from jaxrag.train.start import Setup, set_up
from jaxrag.train.step import StepMetrics, TrainState, make_evaluation, make_step
from jaxrag.train.stream import Ahead, Position, SampleStream, StepData

RUN_FILE = "run.json"
MODEL_DIR = "model"  # the last weights, as a Hugging Face directory
BEST_DIR = "best"  # those of the best checkpoint

Evaluate = Callable[[int, Params], Mapping[str, float]]  # step, whole model -> metrics by name


@dataclasses.dataclass(frozen=True)
class Report:
    """What a call of ``train`` did.

    ``stopped``: "finished" (all steps are done), "paused" (at ``stop_after``) or "terminated" (by
    SIGTERM). ``loss`` is that of the last step, None when none was done.
    """

    stopped: str
    step: int
    loss: float | None
    tokens: int  # of this call, padding left out
    seconds: float
    packing_efficiency: float | None
    skipped: dict[str, int]  # samples left out, by source
    model: str | None  # directory of the exported weights
    best: str | None


def train(
    config: TrainConfig,
    out: str | Path,
    *,
    resume: bool = False,
    stop_after: int | None = None,
    evaluate: Evaluate | None = None,
    progress: bool = True,
) -> Report:
    """Train, and export the weights to OUT/model when the last step is done.

    Args:
      config: the run.
      out: its folder: run.json, metrics.jsonl, checkpoints/, model/, best/.
      resume: go on from the newest checkpoint in ``out``, or start where there is none. On the same
        devices the result is bit for bit that of a run that was never interrupted.
      stop_after: stop after this step, with a checkpoint and an export; the schedule is unchanged.
      evaluate: called every ``run.eval_every`` steps, beside the config's own ``[[eval]]``.

    Raises:
      TrainError: ``out`` holds a run and ``resume`` is off; the config differs from that of the
        run; a sample cannot be used; loss or gradient are not finite, or the disk is full (the last
        checkpoint stays).
      ConfigError, ModelError, TokenizerError: as ``set_up``.
    """
    setup = set_up(config)
    out = Path(out)
    stream = SampleStream(config.data, setup.tokenizer, setup.end_id, setup.model.max_positions)
    with _room_for(out):
        _claim(out, setup, stream, resume)
        with Checkpoints(out / "checkpoints", config.run.keep, config.run.best) as checkpoints:
            run = _Run(setup, stream, checkpoints, out, evaluate, progress)
            return run.go(min(stop_after or config.optimizer.steps, config.optimizer.steps))


@contextlib.contextmanager
def _room_for(out: Path) -> Iterator[None]:
    """A disk that is full leaves as TrainError; Orbax says it in errors of its own."""
    try:
        yield
    except (OSError, ValueError) as error:
        full = (os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT))
        why = next((it for it in full if it in str(error)), None)
        if why is None:
            raise
        raise TrainError(
            f"{out}: {why}; what was saved before is whole: make room, and --resume goes on from it"
        ) from None


def _claim(out: Path, setup: Setup, stream: SampleStream, resume: bool) -> None:
    """Write the record of a new run, or compare with that of the run that is there."""
    path = out / RUN_FILE
    record = {
        "config": to_dict(setup.config),
        "weights": setup.weights_digest,
        "tokenizer": setup.tokenizer.digest,
        "rows": {source.name: source.num_rows for source in stream.sources},
    }
    is_new = not path.is_file()
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("looked for a run")
    if is_new:
        if jax.process_index() == 0:
            out.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".tmp")
            temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            temporary.replace(path)
        return
    if not resume:
        raise TrainError(f"{out} holds a run already; pass --resume to go on, or name another one")
    before = json.loads(path.read_text(encoding="utf-8"))
    changed = changed_field(before["config"], setup.config)
    if changed:
        raise TrainError(f"{out} was made with another config, {changed}; undo that or start anew")
    for name, what in (
        ("weights", "the weights of model.path"),
        ("tokenizer", "the tokenizer"),
        ("rows", "the number of rows of the data files"),
    ):
        if before[name] != record[name]:
            raise TrainError(f"{out}: {what} changed since the run began; start anew")


@dataclasses.dataclass
class _Pending:
    """A step whose metrics were not fetched yet."""

    step: int
    metrics: StepMetrics
    tokens: int
    flops: int
    efficiency: float


class _Run:
    """One call of ``train``."""

    def __init__(
        self,
        setup: Setup,
        stream: SampleStream,
        checkpoints: Checkpoints,
        out: Path,
        evaluate: Evaluate | None,
        progress: bool,
    ) -> None:
        config = setup.config
        self.setup, self.stream, self.checkpoints, self.out = setup, stream, checkpoints, out
        self.evaluate = evaluate
        self.first = jax.process_index() == 0
        self.progress = progress and self.first
        self.template = template_named(config.data.template)  # of the export: as it is trained
        self.step = make_step(config, setup.program, setup.shardings)
        self.losses = make_evaluation(setup.program)
        self.peak = measured_peak(config.compute.dtype) * jax.process_count()
        self.eval_rows = config.data.rows // config.compute.accumulate
        self.held_out: list[HeldOut] = [
            held_out(part, config.data, self.eval_rows, setup.tokenizer, setup.end_id,
                     setup.model.max_positions)
            for part in config.eval
        ]  # fmt: skip
        self.pending: list[_Pending] = []
        self.fetched: list[_Pending] = []  # of the line that is being collected
        self.loss: float | None = None
        self.tokens = 0
        self.room = 0.0  # tokens that the rows could have held

    def go(self, last: int) -> Report:
        setup, config, start = self.setup, self.setup.config, time.perf_counter()
        frozen = setup.frozen()
        found = self.checkpoints.latest
        if found is None:
            state, position = setup.first_state(), self.stream.start()
        else:
            state, position = self.checkpoints.restore(found, setup.like_state())
        stopped = "finished" if last == config.optimizer.steps else "paused"
        ahead = Ahead(self._placed(self.stream.steps(position)))
        with (
            _Terminated() as terminated,
            contextlib.closing(ahead),
            self._log(position.step, last) as log,
        ):
            self.clock = time.perf_counter()
            steps = iter(ahead)
            metrics: dict[str, float] = {}
            if config.run.eval_every and found is None and position.step < last:
                metrics = self._evaluate(0, state, frozen, log)
            while position.step < last:
                step, batch = next(steps)
                state, measured = self._step(state, frozen, batch)
                position = step.position
                self._note(step, measured)
                if log is not None:
                    log.advance()
                done = position.step
                if self._due(config.run.log_every, done) or done == last:
                    self._write(log)
                metrics = {}
                if self._due(config.run.eval_every, done):
                    metrics = self._evaluate(done, state, frozen, log)
                if terminated(done):
                    stopped = "terminated"
                if self._due(config.run.save_every, done) or done == last or stopped[0] == "t":
                    self._save(state, position, metrics)
                if stopped == "terminated":
                    break
        self.checkpoints.wait()
        exported = stopped != "terminated"
        return Report(
            stopped=stopped,
            step=position.step,
            loss=self.loss,
            tokens=self.tokens,
            seconds=time.perf_counter() - start,
            packing_efficiency=self.tokens / self.room if self.room else None,
            skipped={source.name: source.skipped for source in self.stream.sources},
            model=self._export(state, frozen, MODEL_DIR) if exported else None,
            best=self._export_best(frozen) if exported else None,
        )

    def _step(self, state: TrainState, frozen: Params | None, batch: Any) -> Any:
        with jax.transfer_guard_device_to_host("disallow"):  # a step waits for nothing
            return self.step(state, frozen, self.setup.rope, batch)

    def _placed(self, steps: Iterator[StepData]) -> Iterator[tuple[StepData, Any]]:
        for step in steps:
            yield step, self.setup.place(step.batch, self.setup.config.compute.accumulate)

    def _log(self, done: int, last: int) -> Any:
        config = self.setup.config
        if not self.first:
            return contextlib.nullcontext()
        return Log(
            self.out,
            steps=last,
            done=done,
            tensorboard=config.run.tensorboard,
            progress=self.progress,
        )

    @staticmethod
    def _due(every: int, step: int) -> bool:
        return every > 0 and step % every == 0

    def _note(self, step: StepData, metrics: StepMetrics) -> None:
        spans = [span for piece in step.pieces for span in piece.spans]
        predicted = int((step.batch.kinds != NOTHING).sum())
        tokens = sum(map(len, step.pieces))
        self.tokens += tokens
        self.room += tokens / step.efficiency
        self.pending.append(
            _Pending(
                step=step.position.step,
                metrics=metrics,
                tokens=tokens,
                flops=passes(self.setup.config) * forward_flops(self.setup.model, spans, predicted),
                efficiency=step.efficiency,
            )
        )

    def _fetch(self) -> None:
        """Bring all metrics to the host, which waits for the newest step.

        Raises TrainError when one is not finite.
        """
        ready, self.pending = self.pending, []
        for item in ready:
            item.metrics = jax.device_get(item.metrics)
            for name in ("loss", "grad_norm"):
                value = float(getattr(item.metrics, name))
                if not math.isfinite(value):
                    self.checkpoints.wait()
                    good = self.checkpoints.latest
                    kept = "none was saved" if good is None else f"the last good one is step {good}"
                    raise TrainError(
                        f"{name}={value} in step {item.step}; stopped, checkpoints are kept "
                        f"({kept}); lower the learning rate or look at the data of that step"
                    )
            self.loss = float(item.metrics.loss)
        self.fetched += ready

    def _write(self, log: Log | None) -> None:
        """One line: means over the steps since the last one."""
        self._fetch()
        items, now = self.fetched, time.perf_counter()
        if not items:
            return
        seconds, self.clock, self.fetched = now - self.clock, now, []
        tokens, flops = sum(i.tokens for i in items), sum(i.flops for i in items)

        def mean(name: str) -> float:
            return float(sum(getattr(i.metrics, name) for i in items)) / len(items)

        names = ("loss", "response_loss", "context_loss", "accuracy", "grad_norm", "learning_rate")
        if log is not None:
            values: dict[str, Any] = {name: mean(name) for name in names}
            values |= {
                "steps": len(items),
                "tokens": tokens,
                "tokens_per_second": tokens / seconds,
                "mfu": flops / seconds / self.peak,
                "packing_efficiency": sum(i.efficiency for i in items) / len(items),
            }
            log.write(items[-1].step, values)

    def _evaluate(
        self, step: int, state: TrainState, frozen: Params | None, log: Log | None
    ) -> dict[str, float]:
        began = time.perf_counter()
        metrics: dict[str, float] = {}

        def losses(batch: Any) -> Any:
            placed = self.setup.place(batch, None)
            return self.losses(state.trained, frozen, self.setup.rope, placed)

        for part in self.held_out:
            metrics |= part.measure(losses)
        if self.evaluate is not None:
            metrics |= self.evaluate(step, self.setup.merged(state, frozen))
        if log is not None:
            log.write(step, metrics)
        self.clock += time.perf_counter() - began
        return metrics

    def _save(self, state: TrainState, position: Position, metrics: dict[str, float]) -> None:
        self._fetch()  # nothing that is not finite is ever saved
        began = time.perf_counter()
        self.checkpoints.save(state, position, metrics)
        self.clock += time.perf_counter() - began

    def _export(self, state: TrainState, frozen: Params | None, name: str) -> str:
        target = self.out / name
        params = self.setup.on_host(self.setup.merged(state, frozen))
        if self.first:
            shutil.rmtree(target, ignore_errors=True)  # of an earlier end of this run
            export_hf(
                target, params, self.setup.model, self.setup.tokenizer_dir,
                template=self.template, reading=self.setup.config.data.reading,
            )  # fmt: skip
        return str(target)

    def _export_best(self, frozen: Params | None) -> str | None:
        best = self.checkpoints.best
        if best is None:
            return None
        state, _ = self.checkpoints.restore(best, self.setup.like_state())
        return self._export(state, frozen, BEST_DIR)


class _Terminated:
    """Whether SIGTERM arrived; on several processes, whether it did at one of them.

    Used in the main thread it takes the signal over for the length of the block.
    """

    def __init__(self) -> None:
        self._here = threading.Event()

    def __enter__(self) -> Callable[[int], bool]:
        self._restore: Any = None
        if jax.process_count() > 1:
            # The distributed runtime has its own handler and agrees on a step to stop at.
            return multihost_utils.reached_preemption_sync_point
        if threading.current_thread() is threading.main_thread():
            self._restore = signal.signal(signal.SIGTERM, lambda *_: self._here.set())
        return lambda step: self._here.is_set()

    def __exit__(self, *_: object) -> None:
        if self._restore is not None:
            signal.signal(signal.SIGTERM, self._restore)
