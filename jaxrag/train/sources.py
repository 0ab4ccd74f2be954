"""Where samples come from: local files through ``datasets``, or a generator; addressed by number.

Sample k of a source is a pure function of (k, seed): file rows are shuffled anew in every epoch, a
generator draws sample k. So the position of a run in its data is one integer a source.
"""

import dataclasses
import functools
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from jaxrag.base.errors import TrainError
from jaxrag.base.types import HostArray
from jaxrag.models.digest import cache_directory
from jaxrag.tasks.synthetic import SyntheticTask
from jaxrag.tasks.synthetic import sample as synthetic_sample
from jaxrag.train.config import OnBad, SampleMode
from jaxrag.train.samples import BadRow, SampleWriter, TrainSample

_LOG = logging.getLogger("jaxrag")
_REPORTED = 20  # skipped rows that are named one by one


@dataclasses.dataclass(frozen=True)
class SampleLimits:
    """What a sample may measure: tokens of a row, positions of the model; and what if not."""

    row_tokens: int
    max_positions: int
    bad_rows: OnBad
    too_long: OnBad


class SampleFiles:
    """Rows of .jsonl and .parquet files."""

    def __init__(self, paths: Sequence[str], seed: int, made_by: str | None = None) -> None:
        """Open the files. Raises TrainError when one is missing, empty or of another kind."""
        self._seed = seed
        self._files = [(path, _open(Path(path), made_by)) for path in paths]
        self._ends = np.cumsum([len(rows) for _, rows in self._files])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def row(self, k: int) -> tuple[str, Any]:
        """Where sample k stands ("file:line"), and the row, or the text of its line."""
        index = int(self._order(k // len(self))[k % len(self)])
        file = int(np.searchsorted(self._ends, index, side="right"))
        path, rows = self._files[file]
        at = index - (int(self._ends[file - 1]) if file else 0)
        row = rows[at]
        return f"{path}:{at + 1}", row["text"] if path.endswith(".jsonl") else row

    def _order(self, epoch: int) -> HostArray:
        return _permutation(len(self), self._seed, epoch)


@functools.lru_cache(maxsize=16)
def _permutation(count: int, seed: int, epoch: int) -> HostArray:
    return np.random.default_rng((seed, epoch)).permutation(count)


class SampleSource:
    """Samples by number, tokenised, with unusable ones reported.

    Attributes:
      name: for messages.
      skipped: how many samples were left out so far.
    """

    def __init__(
        self,
        name: str,
        origin: SampleFiles | SyntheticTask,
        writer: SampleWriter,
        limits: SampleLimits,
        seed: int,
    ) -> None:
        """Args: name; files or a task; how rows are tokenised; what fits; of the generator."""
        self.name, self.skipped = name, 0
        self._origin, self._writer, self._limits, self._seed = origin, writer, limits, seed

    @property
    def num_rows(self) -> int | None:
        """Rows of the files; None for a generator, which has no end."""
        return len(self._origin) if isinstance(self._origin, SampleFiles) else None

    def sample(self, k: int) -> TrainSample | None:
        """Sample k, or None where it is skipped.

        Raises TrainError naming file and line of a row that is malformed, has an empty response or
        is too long, where such rows are fatal.
        """
        if isinstance(self._origin, SyntheticTask):
            where = f"{self.name}: sample {k}"
            generated = synthetic_sample(self._origin, self._seed, k)
            sample = self._writer.write_synthetic(generated)
        else:
            where, row = self._origin.row(k)
            try:
                sample = self._writer.write(_parsed(row))
            except BadRow as error:
                self._refuse(where, str(error), "bad_rows", self._limits.bad_rows)
                return None
        limits = self._limits
        for count, limit, what in (
            (sample.num_tokens, limits.row_tokens, "a row (data.row_tokens)"),
            (sample.num_positions, limits.max_positions, "the model's context"),
        ):
            if count > limit:
                reason = f"{count} tokens, more than the {limit} of {what}"
                self._refuse(where, reason, "too_long", limits.too_long)
                return None
        return sample

    def holds(self, k: int, texts: Sequence[str]) -> bool:
        """Whether the row of sample k contains one of these texts; generated samples never do."""
        if isinstance(self._origin, SyntheticTask) or not texts:
            return False
        row = self._origin.row(k)[1]
        written = row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)
        return any(json.dumps(text, ensure_ascii=False)[1:-1] in written for text in texts)

    def single_turn(self, k: int) -> bool:
        """Whether sample k asks once: all but dialogues with two or more messages of the user."""
        if isinstance(self._origin, SyntheticTask):
            return True
        row = _parsed(self._origin.row(k)[1])
        messages = row.get("messages") or ()
        return sum(message["role"] == "user" for message in messages) < 2

    def draw(self, k: int) -> float:
        """A number from 0 to 1 that belongs to sample k."""
        return float(np.random.default_rng((self._seed, 1, k)).random())

    def _refuse(self, where: str, reason: str, setting: str, policy: OnBad) -> None:
        if policy == "fail":
            raise TrainError(f'{where}: {reason}; mend it, or set data.{setting} = "skip"')
        self.skipped += 1
        if self.skipped <= _REPORTED:
            _LOG.warning("skipped %s: %s", where, reason)


def open_source(
    name: str,
    paths: Sequence[str],
    synthetic: SyntheticTask | None,
    writer: SampleWriter,
    limits: SampleLimits,
    seed: int,
    made_by: str | None = None,
) -> SampleSource:
    """A source of files or of a task. Raises TrainError as ``SampleFiles`` does."""
    origin = SampleFiles(paths, seed, made_by) if synthetic is None else synthetic
    return SampleSource(name, origin, writer, limits, seed)


def block_mode(
    source: SampleSource, k: int, mode: SampleMode, share: float, full_only: Sequence[str]
) -> SampleMode:
    """The mode of sample k, which is usable: ``mode``, or full where its text or its draw says so.

    Shares are of single-turn samples; dialogues of several turns keep ``mode``.
    """
    if mode == "full" or source.holds(k, full_only):
        return "full"
    if share < 1 and source.draw(k) >= share and source.single_turn(k):
        return "full"
    return mode


def _open(path: Path, made_by: str | None) -> Any:
    kinds = {".jsonl": "text", ".parquet": "parquet"}
    if path.suffix not in kinds:
        raise TrainError(f"{path}: expected a .jsonl or .parquet file")
    if not path.is_file():
        fix = "put it there, or name another" if made_by is None else f"it is made by {made_by}"
        raise TrainError(f"{path}: no such file; {fix}")
    if not path.stat().st_size:
        raise TrainError(f"{path}: no rows")
    shown = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        rows = datasets.load_dataset(
            kinds[path.suffix],
            data_files=str(path),
            split="train",
            cache_dir=str(cache_directory() / "datasets"),
        )
    except Exception as error:  # the library raises many kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TrainError(f"{path}: cannot be read ({reason})") from None
    finally:
        if not shown:
            datasets.enable_progress_bars()
    if not len(rows):
        raise TrainError(f"{path}: no rows")
    return rows


def _parsed(row: Any) -> Mapping[str, Any]:
    if isinstance(row, str):
        try:
            row = json.loads(row)
        except ValueError as error:
            raise BadRow(f"not JSON ({error})") from None
        if not isinstance(row, dict):
            raise BadRow(f"expected a JSON object, got {type(row).__name__}")
        return row
    # A table has every column in every row; what a row does not have is None there.
    return {key: value for key, value in row.items() if value is not None}
