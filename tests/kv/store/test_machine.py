"""Any sequence of changes, damage and crashes: a chunk comes back to the bit, or not at all."""

import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxrag.base.errors import ChunkCorrupt, ChunkMissing
from jaxrag.kv.store import ChunkStore, MemoryStore, ReadThrough, as_stored
from jaxrag.kv.store.layout import STORED

NUMBERS = range(5)
SECRET = b"the secret of this tenant"
number = st.sampled_from(NUMBERS)


class Bytes(RuleBasedStateMachine):
    """A store beside a dict: what was put, and which of it was damaged since."""

    kind = "directory"

    def chunk_of(self, number, seed=0):
        c = self.chunk(number, tokens=3 + number, seed=seed)
        if self.layout.stored == "native":
            return c
        kv = np.random.default_rng([number, seed]).normal(size=c.kv.shape).astype(c.kv.dtype)
        return dataclasses.replace(c, kv=kv)

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.root = Path(self.folder.name)
        self.held = {}  # number -> (chunk, auxiliary array)
        self.damaged = set()
        self.memory = MemoryStore(self.model, self.layout) if self.kind == "memory" else None
        self.opened = []
        self.open()

    def teardown(self):
        for store in self.opened:
            store.close()
        self.folder.cleanup()

    def open_at(self, name, mode="rw", secret=None):
        secret = SECRET if self.kind == "sealed" else secret
        options = {"io_mode": "default"} if self.kind == "default io" else {}
        found = ChunkStore.open(
            self.root / name, self.model, self.layout, mode=mode, durable=False, secret=secret,
            **options,
        )  # fmt: skip
        self.opened.append(found)
        return found

    @rule()
    def open(self):
        """As a process that begins: nothing of it is kept but the files."""
        self.store = self.memory or self.open_at("store")
        if self.kind == "tier":
            self.store = ReadThrough(self.store, self.open_at("near"))

    @rule(number=number, seed=st.integers(0, 2), replace=st.booleans())
    def put(self, number, seed, replace):
        c, aux = self.chunk_of(number, seed), np.arange(seed, seed + 3)
        won = self.store.put(c.key, c.kv, record=c.record, aux={"x": aux}, replace=replace).won
        if number not in self.held or replace:
            assert won
        if won:
            self.held[number] = dataclasses.replace(c, kv=as_stored(c.kv, self.layout)), aux
            self.damaged.discard(number)

    @rule(number=number, seed=st.integers(0, 2))
    def crash(self, number, seed):
        """A writer ends before it commits."""
        if self.kind not in ("memory", "tier"):
            c = self.chunk_of(number, seed)
            attempt = self.store.begin(c.key, c.kv.shape[2], c.record, ways=1, replace=True)
            self.store.put_shard(attempt, 0, c.kv)

    @rule(chosen=st.sets(number))
    def delete(self, chosen):
        there = chosen & self.held.keys()
        gone = self.store.delete([self.chunk_of(it).key for it in chosen])
        assert gone == len(there) or there & self.damaged
        for it in there:
            del self.held[it]
        self.damaged -= there

    @precondition(lambda self: self.kind != "memory")
    @rule(chosen=st.sets(number), tier=st.sampled_from(["page", "host"]))
    def prefetch(self, chosen, tier):
        self.store.prefetch([self.chunk_of(it).key for it in chosen], tier).result()

    @precondition(lambda self: self.kind != "memory")
    @rule(chosen=st.sets(number))
    def collect(self, chosen):
        live = {self.chunk_of(it).key for it in chosen}
        self.store.gc(lambda record: record.key in live, grace_seconds=0)
        self.held = {it: kept for it, kept in self.held.items() if it in chosen | self.damaged}

    @precondition(lambda self: self.kind != "memory" and self.held)
    @rule(
        pick=st.integers(0, 2**16),
        how=st.sampled_from(["flip", "cut", "grow", "zero", "swap", "remove"]),
        place=st.integers(0, 2**16),
    )
    def damage(self, pick, how, place):
        """Any file of the chunks, at any byte."""
        files = sorted(path for path in self.root.glob("*/kv/**/*") if path.is_file())
        if not files:
            return
        path = files[pick % len(files)]
        data = bytearray(path.read_bytes())
        keys = {self.chunk_of(it).key: it for it in self.held}
        self.damaged |= {keys[part] for part in path.parts if part in keys}
        if how == "remove" or not data:
            path.unlink()
            return
        data[place % len(data)] ^= 1 << place % 8
        change = {"cut": data[: place % len(data)], "grow": data + b"\0", "zero": bytes(len(data))}
        change["swap"] = next(it for it in files if it.name == path.name).read_bytes()
        path.unlink()  # a hard link of the tier's would change with it
        path.write_bytes(change.get(how, data))

    @rule(number=number, layers=st.sampled_from([None, (0, 1), (1, 3)]))
    def get(self, number, layers):
        kept = self.held.get(number)
        try:
            kv = self.store.get(self.chunk_of(number).key, layers=layers)
            aux = self.store.aux(self.chunk_of(number).key, "x")
        except ChunkMissing:
            assert kept is None or number in self.damaged
        except ChunkCorrupt as error:
            assert number in self.damaged and "\n" not in str(error)
        else:
            assert kv.tobytes() == kept[0].kv[slice(*layers or (None,))].tobytes()
            assert aux.tolist() == kept[1].tolist()

    @rule(order=st.permutations(NUMBERS))
    def get_many(self, order):
        got = self.store.get_many([self.chunk_of(it).key for it in order], on_missing="skip")
        found = [it for it in order if self.chunk_of(it).key in got.offsets]
        lost = set(order) - set(found)
        assert set(found) <= self.held.keys() and lost & self.held.keys() <= self.damaged
        assert {*got.missing, *got.corrupt} == {self.chunk_of(it).key for it in lost}
        parts = [self.held[it][0].kv for it in found]
        if parts:
            assert got.kv.tobytes() == np.concatenate(parts, axis=2).tobytes()

    @rule()
    def verify(self):
        report = self.store.verify()
        damaged = {self.chunk_of(it).key for it in self.damaged}
        assert {*report.corrupt, *report.missing} <= damaged
        assert report.ok >= len(self.held.keys() - self.damaged)

    @precondition(lambda self: self.kind == "sealed")
    @rule(number=number, seed=st.integers(0, 2))
    def plant(self, number, seed):
        """Another writes under the key without the secret, which nobody with it believes."""
        c = self.chunk_of(number, seed)
        other = ChunkStore.open(
            self.root / "store", self.model, self.layout, mode="rw", durable=False
        )
        self.opened.append(other)
        if other.put(c.key, c.kv, record=c.record, replace=True).won:
            self.damaged.add(number)
            self.held.setdefault(number, (c, np.arange(0)))
            with pytest.raises(ChunkCorrupt):
                self.store.get(c.key)

    @invariant()
    def what_stands_is_listed(self):
        keys = set(self.store.keys())
        whole = {self.chunk_of(it).key for it in self.held.keys() - self.damaged}
        assert whole <= keys <= {self.chunk_of(it).key for it in self.held}
        if not self.damaged:
            kept = [kv for kv, _ in self.held.values()]
            records = list(self.store.records())
            assert sorted(it.key for it in records) == sorted(keys)
            assert sum(it.tokens for it in records) == sum(c.kv.shape[2] for c in kept)
            found = self.store.head([c.key for c in kept])
            assert [it.provenance for it in found] == [c.record for c in kept]


@pytest.mark.parametrize("kind", ["directory", "default io", "memory", "tier", "sealed", "int4"])
def test_bytes_or_nothing(kind, chunk, model, layout):
    layout = dataclasses.replace(layout, stored=kind if kind in STORED else "native")
    given = {"kind": kind, "chunk": staticmethod(chunk), "model": model, "layout": layout}
    machine = type(kind.title(), (Bytes,), given)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=5,
            stateful_step_count=25,
            phases=[Phase.generate],  # a failure's steps are printed, not shortened for minutes
            suppress_health_check=list(HealthCheck),
        ),
    )
