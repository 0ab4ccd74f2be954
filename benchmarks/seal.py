"""What seals cost: the digests themselves, puts and reads of chunks, and a whole ingest.

Everything is measured in turn, so that a slow moment of the machine falls on all of it, and in
processor time of this process. Digests: of the bytes of one layer, by
candidates for a keyed digest beside xxh3 and memcpy; GMAC where ``cryptography`` is installed.
Chunks: put and read warm, sealed and not, native and int8. Ingest: chunks of 48 tokens under a
model of one layer, the smallest chunks for the most records.

example: python benchmarks/seal.py --out benchmarks/results/seal.json
"""

import argparse
import dataclasses
import hashlib
import hmac
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from blake3 import blake3
from update import WORDS, small_model

from jaxrag.base.types import HostArray
from jaxrag.cli import run_command
from jaxrag.cli.options import add_json
from jaxrag.cli.output import give_out, require_folder
from jaxrag.kv.store import ChunkStore, KVLayout, Provenance, chunk_key, content_id, context_id
from jaxrag.kv.store.layout import Stored
from jaxrag.library.documents import Document
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.measure.machine import describe
from jaxrag.models.model import Model, random_model

SECRET = bytes(range(32))
LAYER_BYTES = (24 << 10, 2 << 20)  # 48 tokens of a small model; 512 of 8 heads of 128 in bfloat16
CHUNK_TOKENS = 48
DIGEST_BYTES = 1 << 25  # that a round takes through a digest

KINDS: tuple[Stored, ...] = ("native", "int8")

Way = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Options:
    """How much to measure."""

    rounds: int = 7
    chunks: int = 2  # of 512 tokens, put and read in a round
    layers: int = 8
    documents: int = 60  # of an ingest, two chunks each


def main() -> int:
    """Run and print; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for field in dataclasses.fields(Options):
        parser.add_argument(f"--{field.name}", type=int, default=field.default, metavar="N")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON result there")
    add_json(parser)
    return run_command(run, parser.parse_args())


def run(args: argparse.Namespace) -> int:
    """Print the result, indented or on one line."""
    require_folder(args.out)
    names = [field.name for field in dataclasses.fields(Options)]
    options = Options(**{name: getattr(args, name) for name in names})
    result = {"sizes": dataclasses.asdict(options), **measure(options), "machine": describe()}
    give_out(args, result, [json.dumps(result, indent=1)])
    return 0


def measure(options: Options) -> dict[str, Any]:
    """Digests, chunks and ingest, JSON-able."""
    return {
        "digests": {str(size): digests(size, options.rounds) for size in LAYER_BYTES},
        "chunks": {stored: chunks(stored, options) for stored in KINDS},
        "ingest": {stored: ingest(stored, options) for stored in KINDS},
    }


def in_turn(ways: Mapping[str, Way], rounds: int) -> dict[str, list[float]]:
    """Processor seconds of every way in every round, forwards and backwards by turns.

    One round more, before, does not count.
    """
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            start = time.process_time()
            ways[name]()
            if number:
                taken[name].append(time.process_time() - start)
    return taken


def digests(size: int, rounds: int) -> dict[str, float]:
    """GB/s of processor time over arrays of so many bytes, by name."""
    data = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    room = np.empty_like(data)
    candidates: dict[str, Callable[[HostArray], object]] = {
        "memcpy": lambda array: np.copyto(room, array),
        "xxh3": xxhash.xxh3_64_hexdigest,
        "blake3": lambda array: blake3(array, key=SECRET).hexdigest(),
        "blake2b": lambda array: hashlib.blake2b(array, key=SECRET).hexdigest(),
        "hmac-sha256": lambda array: hmac.digest(SECRET, array, "sha256"),
    }
    if importlib.util.find_spec("cryptography"):
        candidates["gmac"] = _gmac
    times = DIGEST_BYTES // size
    ways = {
        name: lambda digest=digest: [digest(data) for _ in range(times)]
        for name, digest in candidates.items()
    }
    taken = in_turn(ways, rounds)
    return {
        name: round(size * times / statistics.median(one) / 1e9, 2) for name, one in taken.items()
    }


def _gmac(array: HostArray) -> bytes:
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    state = Cipher(algorithms.AES(SECRET), modes.GCM(bytes(12))).encryptor()
    state.authenticate_additional_data(array.data)
    state.finalize()
    return state.tag


def chunks(stored: Stored, options: Options) -> dict[str, Any]:
    """Puts and reads of chunks of 512 tokens: GB/s of KV in memory, and what seals take of it."""
    layout = KVLayout(options.layers, 8, 128, "bfloat16", stored)
    kv = np.random.default_rng(1).normal(size=layout.shape(512)).astype(layout.numpy_dtype)
    model = "5" * 64
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        stores = {
            name: ChunkStore.open(
                Path(folder, name), model, layout, mode="rw", durable=False, secret=secret
            )
            for name, secret in (("plain", None), ("sealed", SECRET))
        }
        ids = [np.full(8, number, np.int32) for number in range(options.chunks)]
        records = [
            Provenance("isolated", content_id("t", one), context_id("isolated", one[:0]))
            for one in ids
        ]
        keys = [chunk_key(model, one.content_id, one.context_id) for one in records]
        out = np.empty(layout.shape(512 * len(keys)), layout.numpy_dtype)

        def put(store: ChunkStore) -> None:
            store.delete(keys)
            for key, record in zip(keys, records, strict=True):
                store.put(key, kv, record=record)

        for what, way in (("put", put), ("read", lambda store: store.get_many(keys, out))):
            ways = {name: lambda store=store, way=way: way(store) for name, store in stores.items()}
            found[what] = _compared(in_turn(ways, options.rounds), kv.nbytes * len(keys))
        for store in stores.values():
            store.close()
    return found


def ingest(stored: Stored, options: Options) -> dict[str, Any]:
    """Processor seconds of adding documents of two chunks each, a new folder every round."""
    config = dataclasses.replace(small_model().config, num_layers=1)
    model = random_model(config, tokenizer=small_model().tokenizer)
    documents = [
        Document(f"{number:05}", f"{number:05} {' '.join(_words(number))}"[: 2 * CHUNK_TOKENS])
        for number in range(options.documents)
    ]

    def add(secret: bytes | None) -> None:
        with tempfile.TemporaryDirectory() as folder, _open(folder, model, stored, secret) as kb:
            assert kb.add(documents).encoded == 2 * len(documents)

    ways = {
        "plain": lambda: add(None),
        "sealed": lambda: add(SECRET),
        "plain again": lambda: add(None),  # how far apart equals are
    }
    return _compared(in_turn(ways, options.rounds))


def _words(seed: int) -> list[str]:
    return [str(word) for word in np.random.default_rng(seed).choice(WORDS, 30)]


def _open(folder: str, model: Model, stored: Stored, secret: bytes | None) -> KnowledgeBase:
    return KnowledgeBase.open(
        folder,
        model,
        template="plain",
        chunk_tokens=CHUNK_TOKENS,
        overlap=0,
        chunk_by="tokens",
        encoders=["isolated"],
        stored=stored,
        secret=secret,
    )


def _compared(taken: Mapping[str, list[float]], nbytes: int | None = None) -> dict[str, Any]:
    """Of every way median and least seconds, and both as shares of what "plain" takes.

    The median is of ratios round by round. Other work of the machine only adds, so the least
    seconds are nearest to what the way takes by itself.
    """
    plain = taken["plain"]
    result: dict[str, Any] = {}
    for name, seconds in taken.items():
        median = statistics.median(seconds)
        ratio = statistics.median(a / b for a, b in zip(seconds, plain, strict=True))
        result[name] = {
            "seconds": round(median, 4),
            "least_seconds": round(min(seconds), 4),
            "ratio": round(ratio, 3),
            "least_ratio": round(min(seconds) / min(plain), 3),
        }
        if nbytes is not None:
            result[name]["gb_per_second"] = round(nbytes / min(seconds) / 1e9, 2)
    return result


if __name__ == "__main__":
    sys.exit(main())
