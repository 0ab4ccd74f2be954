"""Throughput of the chunk store: one request's chunks into one buffer, beside other ways to do it.

Every way fills the same buffer [L, 2, sum T, K, H] with the same chunks and is measured in turn, so
that a slow moment of the machine falls on all of them. Warm: the files are in the page cache. Cold:
they were dropped from it and seen to be gone.

example: python benchmarks/store_throughput.py --chunks 8 --layers 32 --chunk-tokens 512
"""

import ctypes
import dataclasses
import functools
import importlib.util
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from script import in_turn, run_script, seconds_of

from jaxrag.base.errors import RequestError
from jaxrag.base.options import option, parse_count
from jaxrag.base.types import HostArray
from jaxrag.kv.store import (
    ChunkStore,
    KVLayout,
    Provenance,
    chunk_key,
    content_id,
    context_id,
    fingerprint,
)
from jaxrag.measure.bench.options import DRAWN, TEMPORARY, WARM, check_folder, check_positive
from jaxrag.measure.machine import describe
from jaxrag.models.text.progress import followed

_BLOCK = 1 << 24  # bytes a plain read asks for
_COLD_SHARE = 0.01  # of a file's pages may be in the page cache

Way = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class StoreOptions:
    """Sizes of the chunks ([L, 2, T, K, H] bfloat16), how often, where."""

    chunks: int = option(8, "of one request", "N")
    layers: int = option(32, "of the model", "N")
    tokens: int = option(512, "of a chunk", "N", parse=parse_count, flag="--chunk-tokens")
    kv_heads: int = option(8, "of a layer", "N")
    head_dim: int = option(128, "of a head", "N")
    rounds: int = option(7, WARM, "N", flag="--repeats")
    cold: bool = option(True, "leave out reads from the disk")
    folder: str | None = option(None, "a disk to measure", "DIR", unset=TEMPORARY)
    seed: int = option(0, DRAWN, "N")

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be measured."""
        check_positive(self, "chunks", "layers", "tokens", "kv_heads", "head_dim", "rounds")
        check_folder(self.folder)


def run(options: StoreOptions) -> dict[str, Any]:
    """Write the chunks, measure every way to read them; returns a JSON-able result."""
    layout = KVLayout(options.layers, options.kv_heads, options.head_dim, "bfloat16")
    nbytes = options.chunks * layout.nbytes(options.tokens)
    with tempfile.TemporaryDirectory(prefix="jaxrag-bench-", dir=options.folder) as name:
        work = Path(name)
        if shutil.disk_usage(work).free < 3 * nbytes:
            raise RequestError(f"{work} has less than {3 * nbytes / 1e9:.1f} GB free")
        rng = np.random.default_rng(options.seed)
        bits = rng.integers(0, 1 << 16, (options.chunks, *layout.shape(options.tokens)), np.uint16)
        chunks: HostArray = bits.view(layout.numpy_dtype)
        model = fingerprint({"benchmark": "store"})
        store = ChunkStore.open(work / "store", model, layout, mode="rw", max_tokens=options.tokens)
        keys, put = _write(store, work, chunks)
        buffer = np.ones(layout.shape(options.chunks * options.tokens), layout.numpy_dtype)
        ways = _ways(store, work, keys, chunks, buffer)
        warm = _measure(ways, options.rounds, lambda: None, "warm")
        cold: dict[str, list[float]] = {}
        resident = None
        if options.cold:
            files = [path for path in work.rglob("*") if path.is_file() and path.stat().st_size]
            os.sync()
            _drop(files)
            resident = max(map(_resident_share, files))
            if resident <= _COLD_SHARE:
                on_disk = {way: fill for way, fill in ways.items() if way != "memcpy"}
                on_disk |= _dd(work)
                cold = _measure(on_disk, options.rounds, lambda: _drop(files), "cold")
        for start, expected in enumerate(chunks):
            found = buffer[:, :, start * options.tokens : (start + 1) * options.tokens]
            assert found.tobytes() == expected.tobytes()
    return {
        "benchmark": "store",
        "chunks": options.chunks,
        "chunk_shape": list(layout.shape(options.tokens)),
        "dtype": layout.dtype,
        "bytes": nbytes,
        "rounds": options.rounds,
        "warm": _rates(warm, nbytes),
        "cold": _rates(cold, nbytes),
        "resident_share_when_cold": resident,
        "put": _rates(put, nbytes // options.chunks),
        "machine": describe(),
    }


def _write(
    store: ChunkStore, work: Path, chunks: HostArray
) -> tuple[list[str], dict[str, list[float]]]:
    """Store the chunks, and the same bytes as plain and safetensors files; times per chunk."""
    from safetensors.numpy import save_file

    keys = []
    times: dict[str, list[float]] = {"put": [], "plain write": []}
    for number, kv in enumerate(chunks):
        ids = np.full(kv.shape[2], number, np.int32)
        record = Provenance("isolated", content_id("", ids), context_id("isolated", ids[:0]))
        key = chunk_key(store.fingerprint, record.content_id, record.context_id)
        start = time.perf_counter()
        store.put(key, kv, record=record)
        times["put"].append(time.perf_counter() - start)
        keys.append(key)
        start = time.perf_counter()
        with open(_plain_path(work, number), "wb") as file:
            file.write(memoryview(kv.view(np.uint8)).cast("B"))
            file.flush()
            os.fsync(file.fileno())
        times["plain write"].append(time.perf_counter() - start)
        save_file({"kv": kv}, _safetensors_path(work, number))
    return keys, times


def _ways(
    store: ChunkStore, work: Path, keys: Sequence[str], chunks: HostArray, buffer: HostArray
) -> dict[str, Way]:
    """What is measured, by name; each fills the whole buffer."""
    from safetensors import safe_open

    tokens = chunks.shape[3]
    views = [buffer[:, :, i * tokens : (i + 1) * tokens] for i in range(len(chunks))]

    def memcpy() -> None:
        for view, kv in zip(views, chunks, strict=True):
            np.copyto(view, kv)

    def verified() -> None:
        store.get_many(keys, out=buffer)

    def plain() -> None:
        flat = memoryview(buffer.view(np.uint8)).cast("B")
        size = len(flat) // len(chunks)
        for number in range(len(chunks)):
            with open(_plain_path(work, number), "rb", buffering=0) as file:
                for at in range(number * size, (number + 1) * size, _BLOCK):
                    file.readinto(flat[at : min(at + _BLOCK, (number + 1) * size)])

    def safetensors() -> None:
        for number, view in enumerate(views):
            with safe_open(_safetensors_path(work, number), framework="numpy") as file:
                np.copyto(view, file.get_tensor("kv"))

    ways: dict[str, Way] = {
        "memcpy": memcpy,
        "plain read": plain,
        "safetensors": safetensors,
    }
    if importlib.util.find_spec("zarr") is not None:
        import zarr

        trees = [next((work / "store").glob(f"kv/*/*/{key}/*/zarr.json")).parent for key in keys]

        def zarr_python() -> None:
            for tree, view in zip(trees, views, strict=True):
                array = zarr.open_array(tree, mode="r")
                np.copyto(view.view(np.uint16), np.asarray(array[...]))

        ways["zarr-python"] = zarr_python
    # Last, so that what stands in the buffer at the end came through the store.
    return ways | {"verified": verified}


def _plain_path(work: Path, number: int) -> Path:
    return work / f"{number}.bin"


def _safetensors_path(work: Path, number: int) -> Path:
    return work / f"{number}.safetensors"


def _dd(work: Path) -> dict[str, Way]:
    """The system's own sequential reader over the plain files, where it is installed."""
    program = shutil.which("dd")
    if program is None:
        return {}

    def read() -> None:
        for path in sorted(work.glob("*.bin")):
            command = [program, f"if={path}", "of=/dev/null", f"bs={_BLOCK}", "status=none"]
            subprocess.run(command, check=True)

    return {"dd": read}


def _measure(
    ways: dict[str, Way], rounds: int, prepare: Callable[[], None], name: str
) -> dict[str, list[float]]:
    """Seconds of every way in every round after one that is not counted."""
    timed = {way: functools.partial(seconds_of, fill) for way, fill in ways.items()}
    bar = functools.partial(followed, name=name, unit="round")
    return in_turn(timed, rounds, before=prepare, rounds=bar)


def _rates(times: dict[str, list[float]], nbytes: int) -> dict[str, dict[str, float]]:
    """GB/s (1e9 bytes a second) of the median and of the best time."""
    return {
        way: {
            "median": nbytes / statistics.median(seconds) / 1e9,
            "best": nbytes / min(seconds) / 1e9,
        }
        for way, seconds in times.items()
    }


def _drop(files: Sequence[Path]) -> None:
    """Ask the system to forget the files' pages; they must be on the disk already."""
    for path in files:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _resident_share(path: Path) -> float:
    """Share of a file's pages that are in the page cache, as mincore(2) tells it."""
    pages = np.memmap(path, mode="r")
    vector = np.zeros(-(-pages.size // mmap.PAGESIZE), np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    address, size = ctypes.c_void_p(pages.ctypes.data), ctypes.c_size_t(pages.size)
    if libc.mincore(address, size, ctypes.c_void_p(vector.ctypes.data)):
        raise RequestError(f"{path}: mincore: {os.strerror(ctypes.get_errno())}; use --no-cold")
    return float(np.mean(vector & 1))


def report(result: dict[str, Any]) -> Iterator[str]:
    """The result as lines of a table."""
    yield (
        f"{result['chunks']} chunks of {result['chunk_shape']} {result['dtype']} into one buffer, "
        f"{result['bytes'] / 1e6:.0f} MB; GB/s, median and best of {result['rounds']}"
    )
    warm, cold = result["warm"], result["cold"]
    yield f"{'':<12} {'warm':>7} {'best':>7} {'/memcpy':>8} {'cold':>8} {'best':>7} {'/dd':>6}"
    for way in dict.fromkeys([*warm, *cold]):
        line = f"{way:<12}"
        line += _cells(warm.get(way), warm["memcpy"])
        line += " " + _cells(cold.get(way), cold.get("dd"))
        yield line.rstrip()
    if not cold and result["resident_share_when_cold"] is not None:
        yield "cold: not measured, the file system keeps the files in memory"
    put = result["put"]
    yield (
        f"one durable put {put['put']['median']:.2f} GB/s (best {put['put']['best']:.2f}), a plain "
        f"write and fsync {put['plain write']['median']:.2f} ({put['plain write']['best']:.2f})"
    )


def _cells(rate: dict[str, float] | None, base: dict[str, float] | None) -> str:
    if rate is None:
        return " " * 24
    ratio = f"{rate['median'] / base['median']:8.2f}" if base else " " * 8
    return f" {rate['median']:7.2f} {rate['best']:7.2f}{ratio}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    return run_script(__doc__, StoreOptions, run, report, argv)


if __name__ == "__main__":
    sys.exit(main())
