"""The chunk store at work: random bits that are put, replaced, deleted and collected."""

import dataclasses
import itertools
import random
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from crash_log import FRESH, Log, replay, require

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
from jaxrag.kv.store.namespace import SWEPT

KEYS = 40
LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=16, dtype="bfloat16")
MODEL = fingerprint({"weights": "random bits"})


def random_chunk(number: int, version: int) -> tuple[str, HostArray, Provenance]:
    """Key, KV and provenance of a chunk; the version decides its bits."""
    ids = np.full(11, number, np.int32)
    record = Provenance("isolated", content_id("", ids), context_id("isolated", ids[:0]))
    bits = np.random.default_rng([number, version]).integers(
        0, 1 << 16, LAYOUT.shape(11), np.uint16
    )
    key = chunk_key(MODEL, record.content_id, record.context_id)
    return key, bits.view(LAYOUT.numpy_dtype), record


def open_store(work: Path, mode: Any) -> ChunkStore:
    """The store of the experiment."""
    return ChunkStore.open(work / "store", MODEL, LAYOUT, mode=mode)


@dataclasses.dataclass(frozen=True)
class StoreJob:
    """What the process is to do."""

    number: int  # of the round
    folder: Path
    log: Path
    state: dict[int, int]  # the version of each chunk that stands


def work_on_store(job: StoreJob, go: Any) -> None:
    """Put, replace, delete and collect chunks until killed; opens it when ``go`` says so."""
    rng = random.Random(job.number)
    log = Log(job.log)
    versions = dict(job.state)
    log.note("loaded")
    go.recv()
    store = open_store(job.folder, "rw")
    log.note("ready")
    for version in itertools.count(job.number * FRESH):
        chosen = rng.sample(range(KEYS), rng.randint(1, 4))
        kind = rng.choices(["put", "replace", "delete", "gc"], [6, 3, 2, 1])[0]
        if kind == "put":
            chosen = [chunk for chunk in chosen if chunk not in versions]
        elif kind != "gc":
            chosen = [chunk for chunk in chosen if chunk in versions]
        if kind in ("put", "replace"):
            log.note("begin", change=[[chunk, version] for chunk in chosen])
            with store.writer() as writer:
                for chunk in chosen:
                    writer.submit(*random_chunk(chunk, version), replace=kind == "replace")
            versions.update(dict.fromkeys(chosen, version))
        elif kind == "delete":
            log.note("begin", change=[[chunk, None] for chunk in chosen])
            store.delete([random_chunk(chunk, 0)[0] for chunk in chosen])
            for chunk in chosen:
                del versions[chunk]
        else:
            log.note("begin", change=[])
            store.gc(lambda record: True, grace_seconds=0.0)
        log.note("done", what=kind)


class StoreExperiment:
    """A store, what must stand in it, and how that is checked."""

    target = staticmethod(work_on_store)

    def __init__(self, folder: Path) -> None:
        """Make an empty one in ``folder``."""
        self.folder = folder
        self.state: dict[int, int] = {}
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        open_store(folder, "rw")

    def close(self) -> None:
        """Nothing is held open."""

    def jobs(self, number: int, seed: int) -> list[StoreJob]:
        """What the process of a round is to do."""
        return [StoreJob(number, self.folder, self.folder / f"log-{number}", dict(self.state))]

    def check(self, told: Sequence[Sequence[Mapping[str, Any]]], seed: str) -> Counter[str]:
        """Compare with the log, collect, and count what is left. Raises WrongError."""
        under_way = dict(replay(told[0], self.state))
        store = open_store(self.folder, "rw")
        counts: Counter[str] = Counter()
        keys = {chunk: random_chunk(chunk, 0)[0] for chunk in range(KEYS)}
        got = store.get_many(list(keys.values()), on_missing="skip")
        require(not got.corrupt, f"corrupt: {got.corrupt}")
        for chunk, key in keys.items():
            before = self.state.get(chunk)
            allowed = [before, under_way.get(chunk, before)]
            if key not in got.offsets:
                require(None in allowed, f"chunk {chunk} of version {before} is lost")
                self.state.pop(chunk, None)
                continue
            first, tokens = got.offsets[key]
            found = got.kv[:, :, first : first + tokens].tobytes()
            fits = [v for v in allowed if v is not None]
            stands = [v for v in fits if random_chunk(chunk, v)[1].tobytes() == found]
            require(bool(stands), f"chunk {chunk}: its bytes are of none of the versions {fits}")
            self.state[chunk] = stands[0]
            counts["chunks"] += 1
            if chunk in under_way:
                now = stands[0] == under_way[chunk]
                counts["changes that stand" if now else "changes undone"] += 1
        store.gc(lambda record: True, grace_seconds=0.0)
        files = [p for p in (self.folder / "store" / "kv").rglob("*") if p.is_file()]
        # A gc that is killed leaves its mark, an empty file that other collections respect.
        whole = sum(not path.name.startswith(SWEPT) for path in files)
        wanted = 3 * len(self.state)
        require(whole == wanted, f"{whole} files after gc for {len(self.state)} chunks")
        return counts
