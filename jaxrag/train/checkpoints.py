"""Checkpoints of a run: parameters, optimizer, position in the data; written by Orbax.

A save copies the state to the host and returns; writing goes on beside the next steps. A checkpoint
appears under its step number when it is complete, so a run that is killed while it writes goes on
from the one before.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_manager import METRIC_ITEM_NAME
from orbax.checkpoint.checkpoint_managers import (
    AnyPreservationPolicy,
    BestN,
    LatestN,
    PreservationPolicy,
)

from jaxrag.base.errors import TrainError
from jaxrag.train.step import TrainState
from jaxrag.train.stream import Position


class Restored(NamedTuple):
    """What a checkpoint holds."""

    state: TrainState
    position: Position


class Checkpoints:
    """The checkpoints of one run: the last few, and the best by one metric."""

    def __init__(self, folder: Path, keep: int, best: str | None) -> None:
        """Open or make the folder; ``best`` is a metric as in config.RunPart."""
        policies: list[PreservationPolicy] = [LatestN(max(keep, 1))]
        if best is not None:
            policies.append(
                BestN(get_metric_fn=self._score, n=1, keep_checkpoints_without_metrics=False)
            )
        logging.getLogger("absl").addFilter(_is_news)
        self._best = best
        self._folder = folder
        self._manager = ocp.CheckpointManager(
            folder.absolute(),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=AnyPreservationPolicy(policies),
                enable_async_checkpointing=True,
                cleanup_tmp_directories=True,
            ),
            item_names=("state", "position"),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    @property
    def latest(self) -> int | None:
        """The step of the newest complete checkpoint."""
        step: int | None = self._manager.latest_step()
        return step

    @property
    def best(self) -> int | None:
        """The step of the checkpoint with the best metric, of those that have it."""
        if self._best is None:
            return None
        measured = [(self._manager.metrics(step), step) for step in self._manager.all_steps()]
        scored = [(self._score(metrics), -step) for metrics, step in measured if metrics]
        return -max(scored)[1] if scored else None

    def _score(self, metrics: Any) -> float:
        """Higher is better."""
        assert self._best is not None
        value = float(metrics[self._best])
        return -value if self._best.endswith("loss") else value

    def save(
        self, state: TrainState, position: Position, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Start to save; ``metrics`` are those of the last evaluation, when it was of this step."""
        if position.step in self._manager.all_steps():
            return
        chosen = None
        if self._best is not None and metrics:
            if self._best not in metrics:
                raise TrainError(
                    f"run.best={self._best!r} is not measured; there are {', '.join(metrics)}"
                )
            chosen = {self._best: float(metrics[self._best])}
        items = {
            "state": ocp.args.StandardSave(state),
            "position": ocp.args.JsonSave(position.to_dict()),
        }
        if chosen is not None:
            # The manager would write them by itself for a ``best_fn``, but asks for them then at
            # every save. It reads them from here either way.
            items[METRIC_ITEM_NAME] = ocp.args.JsonSave(chosen)
        self._manager.save(position.step, args=ocp.args.Composite(**items), metrics=chosen)

    def restore(self, step: int, like: TrainState) -> Restored:
        """A checkpoint, onto the shapes, dtypes and shardings of ``like``.

        Raises TrainError when it cannot be read or is of another model.
        """
        try:
            found = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(like), position=ocp.args.JsonRestore()
                ),
            )
        except (ValueError, KeyError, OSError) as error:
            reason = str(error).splitlines()[0]
            raise TrainError(
                f"{self._folder / str(step)}: cannot be restored ({reason}); remove it to go on "
                "from the one before"
            ) from None
        return Restored(found["state"], Position.from_dict(found["position"]))

    def wait(self) -> None:
        """Until everything is on the disk."""
        self._manager.wait_until_finished()


def _is_news(record: logging.LogRecord) -> bool:
    """False of tracebacks: Orbax's threads log what the next call on the manager raises."""
    return not record.exc_info and "_SignalingThread" not in record.getMessage()


def abstract_state(make: Any, shardings: TrainState) -> TrainState:
    """Shapes, dtypes and shardings of what ``make()`` would return, without making it."""

    def of(shape: jax.ShapeDtypeStruct, place: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place)

    return jax.tree.map(of, jax.eval_shape(make), shardings)
