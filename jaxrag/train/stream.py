"""The mixture as an endless sequence of steps' batches, which can be taken up again anywhere.

Samples are drawn from the sources in proportion to their weights, without chance: each draw takes
the source that is furthest behind. Pieces that found no room wait for the next step and go first.
"""

import dataclasses
import math
import queue
import threading
from collections.abc import Iterator
from typing import Any, Self

from jaxrag.base.errors import TrainError
from jaxrag.models.text.prompts import template_named
from jaxrag.models.text.tokenizer import Tokenizer
from jaxrag.train.config import DataPart, SampleMode, SourcePart
from jaxrag.train.packing import Packer, SamplePiece, TrainBatch, lay_piece
from jaxrag.train.samples import SampleWriter
from jaxrag.train.sources import SampleLimits, SampleSource, block_mode, open_source

_SPARE = 0.25  # of a step's tokens that is drawn beyond it, so that small pieces fill the gaps
_MAX_SKIPPED = 10_000  # samples skipped in a row before a source is taken for useless


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a run stands in its data; a handful of numbers.

    Attributes:
      step: steps done.
      drawn: samples drawn from each source.
      credit: how far each source is behind its weight, in samples.
      waiting: (source, sample) of drawn samples that had no room yet, oldest first.
    """

    step: int
    drawn: tuple[int, ...]
    credit: tuple[float, ...]
    waiting: tuple[tuple[int, int], ...] = ()

    @classmethod
    def start(cls, num_sources: int) -> Self:
        """Before the first step."""
        return cls(0, (0,) * num_sources, (0.0,) * num_sources)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able form; ``from_dict`` is its inverse, exactly."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Inverse of ``to_dict`` after a trip through JSON."""
        waiting = tuple((int(source), int(k)) for source, k in values["waiting"])
        return cls(values["step"], tuple(values["drawn"]), tuple(values["credit"]), waiting)


@dataclasses.dataclass(frozen=True, eq=False)
class _Drawn:
    """Sample k of a source, laid out in each of its modes; no pieces where it is skipped."""

    source: int
    k: int
    pieces: tuple[SamplePiece, ...]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.pieces))


@dataclasses.dataclass(frozen=True)
class StepData:
    """The data of one step, and the position behind it."""

    batch: TrainBatch  # host arrays [B, T]
    pieces: tuple[SamplePiece, ...]
    efficiency: float
    position: Position


class SampleStream:
    """Packs steps from a mixture."""

    def __init__(
        self, data: DataPart, tokenizer: Tokenizer, end_id: int, max_positions: int
    ) -> None:
        """Open the sources. Raises TrainError or ConfigError."""
        writer = SampleWriter(
            tokenizer, template_named(data.template), end_id, data.response_start, data.refusal
        )
        limits = SampleLimits(data.row_tokens, max_positions, data.bad_rows, data.too_long)
        self.data = data
        self.sources: tuple[SampleSource, ...] = tuple(
            open_source(
                part.name,
                part.paths,
                part.synthetic,
                writer,
                limits,
                data.seed + number,
                part.made_by,
            )
            for number, part in enumerate(data.sources)
        )

    def start(self) -> Position:
        """Before the first step."""
        return Position.start(len(self.sources))

    def steps(self, position: Position) -> Iterator[StepData]:
        """Steps from a position on, without end. Raises TrainError for an unusable sample."""
        held = [self.lay(source, k) for source, k in position.waiting]
        while True:
            step, held = self._step(position, held)
            yield step
            position = step.position

    def lay(self, source: int, k: int) -> _Drawn:
        """Sample k of a source in its modes."""
        part, data = self.data.sources[source], self.data
        sample = self.sources[source].sample(k)
        if sample is None:
            return _Drawn(source, k, ())
        wanted: SampleMode = part.mode or data.mode
        mode = block_mode(self.sources[source], k, wanted, part.block_share, part.full_only)
        modes = {"full": (True,), "block": (False,), "both": (True, False)}[mode]
        pieces = tuple(lay_piece(sample, full, data.positions) for full in modes)
        return _Drawn(source, k, pieces)

    def _step(self, position: Position, held: list[_Drawn]) -> tuple[StepData, list[_Drawn]]:
        data, drawing, new = self.data, _Drawing(self, position), list[_Drawn]()
        most = math.inf if data.samples is None else data.samples
        wanted = data.rows * data.row_tokens * (1 + _SPARE)
        tokens = sum(item.num_tokens for item in held)
        count = sum(len(item.pieces) for item in held)
        while tokens < wanted and count < most:
            new.append(drawing.next())
            tokens += new[-1].num_tokens
            count += len(new[-1].pieces)
        packer, placed, left = (
            Packer(data.rows, data.row_tokens),
            list[SamplePiece](),
            list[_Drawn](),
        )
        # Those that waited find empty rows; the new ones fill the gaps, largest first.
        for item in [*held, *sorted(new, key=lambda item: -item.num_tokens)]:
            if len(placed) + len(item.pieces) <= most and packer.add(item.pieces):
                placed += item.pieces
            else:
                left.append(item)
        left.sort(key=[*held, *new].index)
        waiting = tuple((item.source, item.k) for item in left)
        after = Position(position.step + 1, tuple(drawing.drawn), tuple(drawing.credit), waiting)
        return StepData(packer.batch(), tuple(placed), packer.efficiency, after), left


class _Drawing:
    """Draws of one step."""

    def __init__(self, stream: SampleStream, position: Position) -> None:
        self._stream = stream
        self.drawn, self.credit = list(position.drawn), list(position.credit)
        self._active = [
            number
            for number, part in enumerate(stream.data.sources)
            if _takes_part(part, position.step)
        ]
        if not self._active:
            raise TrainError(f"no source takes part in step {position.step}; see first_step")

    def next(self) -> _Drawn:
        """The next usable sample."""
        sources = self._stream.data.sources
        total = sum(sources[s].weight for s in self._active)
        for s in self._active:
            self.credit[s] += sources[s].weight / total
        source = max(self._active, key=lambda s: (self.credit[s], -s))
        self.credit[source] -= 1
        for _ in range(_MAX_SKIPPED):
            k = self.drawn[source]
            self.drawn[source] += 1
            item = self._stream.lay(source, k)
            if item.pieces:
                return item
        name = sources[source].name
        raise TrainError(f"source {name!r}: {_MAX_SKIPPED} samples in a row cannot be used")


def _takes_part(part: SourcePart, step: int) -> bool:
    return part.first_step <= step and (part.last_step is None or step < part.last_step)


class Ahead:
    """Makes the items of an iterator in a thread of its own, a few ahead of their use."""

    def __init__(self, items: Iterator[Any], depth: int = 2) -> None:
        """Start."""
        self._ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(items,), daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Any]:
        while True:
            item, error = self._ready.get()
            if error is not None:
                raise error
            yield item

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        while self._thread.is_alive():
            try:
                self._ready.get(timeout=0.05)
            except queue.Empty:
                continue

    def _fill(self, items: Iterator[Any]) -> None:
        try:
            for item in items:
                self._ready.put((item, None))
                if self._stop.is_set():
                    return
        except BaseException as error:
            self._ready.put((None, error))
