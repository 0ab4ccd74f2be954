"""Rows of a result, kept in a file one by one: a run that ends early loses none of them."""

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from script import PEER, More

from jaxrag.base.config import DTYPES, DType, ModelConfig
from jaxrag.base.errors import RequestError
from jaxrag.base.options import option, parse_counts, parse_names
from jaxrag.base.types import HostArray
from jaxrag.measure.machine import describe
from jaxrag.measure.zoo import llama, random_named, write_random

OURS = "jaxrag"

# 298M parameters.
LLAMA_300M: ModelConfig = llama(
    vocab_size=8192, num_layers=24, model_dim=1024, mlp_dim=3072, num_heads=16, num_kv_heads=4,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RowsOptions:
    """What is measured row by row, beside a peer.

    Attributes:
      model: a directory; None makes a random Llama of 300M parameters.
      dtypes: of weights, activations and KV, each measured.
      contexts: tokens of the prompt.
      repeats: timed rounds, after a warm-up.
      peer_python: interpreter with torch and transformers; None measures them not.
      seed: of what is drawn.
      resume: keep the rows of ``out``, and measure the others.
      out: the file of the rows.
    """

    model: str | None = option(None, metavar="MODEL", unset="a random Llama of 300M parameters")
    dtypes: tuple[DType, ...] = option(
        ("float32", "bfloat16"),
        "of weights, activations and KV",
        "DTYPE,...",
        parse=parse_names,
        flag="--dtype",
    )
    contexts: tuple[int, ...] = option(
        (512, 4096), "tokens of the prompt", "N,...", parse=parse_counts
    )
    repeats: int = option(5, "after a warm-up", "N")
    peer_python: str | None = None
    seed: int = option(0, "of what is drawn", "N")
    resume: bool = option(False, "measure only the rows that the file of --out does not hold yet")
    out: str | None = None

    def check_lists(self, *names: str) -> None:
        """RequestError for a list that is empty or says anything twice, or an unknown dtype."""
        for name in names:
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise RequestError(f"{name} {values}: expected one or more, each once")
        for dtype in self.dtypes:
            if dtype not in DTYPES:
                raise RequestError(f"dtype {dtype!r}: expected some of {', '.join(DTYPES)}")

    @contextlib.contextmanager
    def directory(self, dtype: DType) -> Iterator[tuple[str, Path]]:
        """The model's directory, and a folder for the time being."""
        with tempfile.TemporaryDirectory(prefix="jaxrag-bench-") as folder:
            path = self.model or write_random(Path(folder) / "model", LLAMA_300M, dtype, self.seed)
            yield str(path), Path(folder)


BESIDE_PEER = More(PEER.add, lambda args: {**PEER.fields(args), "out": args.out})


@dataclasses.dataclass
class Rows:
    """The rows of a result, in its file as soon as they are measured.

    Attributes:
      setting: what they share; a file with another setting is not gone on with.
      names: the fields that tell a row from others.
      rows: measured so far.
      out: the file; None: no file.
    """

    setting: dict[str, Any]
    names: tuple[str, ...]
    rows: list[dict[str, Any]]
    out: Path | None

    @classmethod
    def open(cls, benchmark: str, options: RowsOptions, names: tuple[str, ...]) -> "Rows":
        """No rows, or with ``resume`` those of the file, where there is one.

        Raises RequestError for a file that is no result of this setting.
        """
        setting = {
            "benchmark": benchmark,
            "model": options.model or random_named(LLAMA_300M),
            "seed": options.seed,
        }
        out, resume = options.out, options.resume
        if resume and out is None:
            raise RequestError("--resume without --out; name the file of the rows")
        path = None if out is None else Path(out)
        if path is None or not resume or not path.exists():
            return cls(setting, names, [], path)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            rows = [row for row in found["rows"] if all(name in row for name in names)]
        except (OSError, ValueError, LookupError, TypeError):
            raise RequestError(f"--out {out}: no result to go on with; remove it") from None
        for name, value in setting.items():
            if found.get(name) != value:
                raise RequestError(
                    f"--out {out}: {name} is {found.get(name)!r}, now {value!r}; write to another"
                )
        return cls(setting, names, rows, path)

    def has(self, **fields: Any) -> bool:
        """Is the row of these fields measured?"""
        return any(all(row[name] == fields[name] for name in self.names) for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row, with when and at which commit it was measured."""
        machine = describe()
        self.rows.append({**row, "time": machine["time"], "commit": machine["commit"]})
        if self.out is not None:
            text = json.dumps(self.result(), indent=1) + "\n"
            self.out.write_text(text, encoding="utf-8")

    def result(self) -> dict[str, Any]:
        """Setting, rows and machine, JSON-able."""
        return {**self.setting, "rows": self.rows, "machine": describe()}


def draw(config: ModelConfig, seed: int, count: int) -> HostArray:
    """[count] int32 random token ids, none of the first three."""
    rng = np.random.default_rng((seed, count))
    return rng.integers(3, config.vocab_size, count).astype(np.int32)
