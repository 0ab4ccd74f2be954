"""What the scripts here do alike: options of a dataclass, a run, a result that is printed and kept.

They import this package and each other, are started from a checkout, and are in no wheel. Beside
that: what the machine itself can do, which results stand beside; arms that are measured in turn, so
that a slow moment of the machine falls on all of them; and rows of a result, kept in a file one by
one, so that a run that ends early loses none of them.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxrag.base.config import DTYPES, DType, ModelConfig
from jaxrag.base.errors import RequestError
from jaxrag.base.options import option, parse_counts, parse_names
from jaxrag.base.types import HostArray
from jaxrag.cli import run_command
from jaxrag.cli.command import Args, Parameter, command, fields, from_fields, parse
from jaxrag.cli.options import PEER as PEER_OPTIONS
from jaxrag.cli.options import peer_of, result_options
from jaxrag.cli.output import give_out, require_folder
from jaxrag.measure.machine import describe, settle
from jaxrag.measure.zoo import llama, random_named, write_random

Result = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class More:
    """Arguments beside those of the dataclass.

    Attributes:
      options: of the command.
      fields: the fields of the dataclass that they fill, by name.
    """

    options: Sequence[Parameter] = ()
    fields: Callable[[Args], dict[str, Any]] = lambda args: {}


PEER = More(PEER_OPTIONS, lambda args: {"peer_python": peer_of(args)})


def indented(result: Result) -> list[str]:
    """The result as JSON, for those without a table."""
    return [json.dumps(result, indent=1)]


def run_script(
    doc: str | None,
    options: type,
    run: Callable[[Any], Result],
    report: Callable[[Result], Iterable[str]] = indented,
    argv: Sequence[str] | None = None,
    *,
    more: More | None = None,
    markdown: Callable[[Result], str] | None = None,
    passed: Callable[[Result], bool] = lambda result: True,
) -> int:
    """Parse the arguments, run, print and write; returns the exit code.

    Args:
      doc: of the script, shown by --help.
      options: the dataclass whose fields are the arguments.
      run: measures; its result is JSON-able.
      report: the lines that are printed without --json.
      argv: the arguments; None: those of the process.
      more: further arguments.
      markdown: the page of --markdown; None: there is no such option.
      passed: exit code 1 where it says False of the result.
    """
    more = more or More()

    def measured(args: Args) -> int:
        require_folder(args.out)
        if markdown is not None:
            require_folder(args.markdown, "--markdown")
        result = run(from_fields(options, args, **more.fields(args)))
        give_out(args, result, report(result), markdown)
        return 0 if passed(result) else 1

    results = result_options(markdown=markdown is not None)
    name = Path(sys.argv[0]).name
    script = command(name, measured, doc or "", None, fields(options), more.options, results)
    return run_command(measured, parse(script, argv))


_MATMUL = {"cpu": 2048}  # side of the square matrices whose product is the peak; 8192 elsewhere


def matmul_side() -> int:
    """Of the square matrices whose product is the peak."""
    return _MATMUL.get(jax.default_backend(), 8192)


def matmul_peak(dtype: DType, repeats: int = 5) -> float:
    """FLOP/s of a large square matrix product on the default device, the best of some."""
    side = matmul_side()
    a = jnp.ones((side, side), dtype)
    product = jax.jit(jnp.matmul)
    return 2 * side**3 / best_seconds(lambda: product(a, a).block_until_ready(), repeats)


def best_seconds(job: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of some calls, after one that is not counted."""
    job()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        job()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


BYTES = 1 << 30  # of the array that is read and copied, far above any cache


def bandwidth(repeats: int = 5) -> dict[str, float]:
    """Bytes/s of the default device's memory, the best of some: ``read`` alone, and ``copy``.

    ``read`` is the better of a product with a vector and, on a CPU, all cores combining the words
    of a part each; ``copy`` counts what is read and what is written.
    """
    array = jnp.ones((BYTES >> 16, 1 << 14), jnp.float32)
    vector = jnp.ones(array.shape[1], jnp.float32)
    product = jax.jit(jnp.matmul)
    read = BYTES / best_seconds(lambda: product(array, vector).block_until_ready(), repeats)
    if jax.default_backend() != "cpu":
        negate = jax.jit(jnp.negative)
        copied = best_seconds(lambda: negate(array).block_until_ready(), repeats)
        return {"read": read, "copy": 2 * BYTES / copied}
    source = np.asarray(array).view(np.int64).ravel()
    by_words, copy = _on_all_cores(source, repeats)
    return {"read": max(read, by_words), "copy": copy}


def _on_all_cores(source: HostArray, repeats: int) -> tuple[float, float]:
    """Bytes/s of reading and of copying, a part of the array on each core."""
    cores, target = len(os.sched_getaffinity(0)), np.zeros_like(source)
    edges = np.linspace(0, len(source), cores + 1).astype(int)
    parts = [slice(*pair) for pair in itertools.pairwise(edges)]

    with ThreadPoolExecutor(cores) as threads:

        def each(job: Callable[[slice], object]) -> None:
            for _ in threads.map(job, parts):
                pass

        read = best_seconds(lambda: each(lambda part: np.bitwise_xor.reduce(source[part])), repeats)
        copied = best_seconds(
            lambda: each(lambda part: np.copyto(target[part], source[part])), repeats
        )
    return source.nbytes / read, 2 * source.nbytes / copied


def in_turn[Answer](
    arms: Mapping[str, Callable[[], Answer]],
    repeats: int,
    *,
    before: Callable[[], None] = settle,
    rounds: Callable[[range], Iterable[int]] = iter,
) -> dict[str, list[Answer]]:
    """What every arm answers in every round but the first, which compiles and warms up.

    Args:
      arms: by name.
      repeats: rounds that count.
      before: called before every measurement.
      rounds: goes through the rounds, with a bar.
    """
    answers: dict[str, list[Answer]] = {name: [] for name in arms}
    for number in rounds(range(repeats + 1)):
        for name, measure in arms.items():
            before()
            answer = measure()
            if number:
                answers[name].append(answer)
    return answers


def seconds_of(way: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """How long a call takes."""
    start = clock()
    way()
    return clock() - start


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def ratios(theirs: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    """Spread of theirs over ours, round by round."""
    return spread([one / other for one, other in zip(theirs, ours, strict=True)])


def between(it: Mapping[str, float], form: str) -> str:
    """A spread as text: median (low-high)."""
    return f"{it['median']:{form}} ({it['low']:{form}}-{it['high']:{form}})"


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

    kinds: ClassVar = DTYPES
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
        if odd := set(self.dtypes) - set(self.kinds):
            raise RequestError(f"dtype {odd.pop()!r}: expected some of {', '.join(self.kinds)}")

    @contextlib.contextmanager
    def directory(self, dtype: DType) -> Iterator[tuple[str, Path]]:
        """The model's directory, and a folder for the time being."""
        with tempfile.TemporaryDirectory(prefix="jaxrag-bench-") as folder:
            kind = dtype if dtype in DTYPES else "float32"
            path = self.model or write_random(Path(folder) / "model", LLAMA_300M, kind, self.seed)
            yield str(path), Path(folder)


BESIDE_PEER = More(PEER.options, lambda args: {**PEER.fields(args), "out": args.out})


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
