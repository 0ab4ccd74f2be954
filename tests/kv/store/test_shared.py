"""One store as several processes see it, each with its share of the heads; threads play them."""

import concurrent.futures
import pickle
import threading
import time

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import ChunkCorrupt, ChunkMissing, StoreError
from jaxrag.kv.store import (
    ChunkStore,
    HeadShare,
    KVLayout,
    MemoryStore,
    PutResult,
    ReadThrough,
    SharedStore,
)

WIDE = KVLayout(num_layers=3, num_kv_heads=4, head_dim=5, dtype="float16")
WIDE8 = KVLayout(num_layers=3, num_kv_heads=4, head_dim=5, dtype="float16", stored="int8")
WIDE4 = KVLayout(num_layers=3, num_kv_heads=4, head_dim=5, dtype="float16", stored="int4")
REPLICATED = [HeadShare(), HeadShare(writes=False, leads=False)]
HALVES = [HeadShare(0, 2), HeadShare(1, 2, leads=False)]
TWICE = [
    HeadShare(0, 2),
    HeadShare(1, 2, leads=False),
    HeadShare(0, 2, writes=False, leads=False),
    HeadShare(1, 2, writes=False, leads=False),
]


class Processes:
    """Threads that run one function each and exchange as processes do."""

    def __init__(self, stores, shares):
        self.barrier = threading.Barrier(len(shares), timeout=30)
        self.said = [None] * len(shares)
        self.stores = [
            SharedStore(store, share, self.exchange_of(number))
            for number, (store, share) in enumerate(zip(stores, shares, strict=True))
        ]
        self.shares = shares

    def exchange_of(self, number):
        def exchange(value):
            self.said[number] = pickle.dumps(value)
            self.barrier.wait()
            heard = [pickle.loads(one) for one in self.said]
            self.barrier.wait()
            return heard

        return exchange

    def run(self, step):
        """``step(store, share)`` of all of them; results, or what they raised."""

        def one(store, share):
            try:
                return step(store, share)
            except StoreError as error:
                return error

        with concurrent.futures.ThreadPoolExecutor(len(self.shares)) as threads:
            return list(threads.map(one, self.stores, self.shares))


def own(kv, share):
    return np.ascontiguousarray(kv[:, :, :, slice(*share.heads(kv.shape[3]))])


def put(c, **options):
    return lambda store, share: store.put(c.key, own(c.kv, share), record=c.record, **options)


def get(*chunks, **options):
    return lambda store, share: store.get_many([c.key for c in chunks], **options)


@pytest.mark.parametrize("layout", [WIDE, WIDE8, WIDE4], ids=["native", "int8", "int4"])
@pytest.mark.parametrize("shares", [REPLICATED, HALVES, TWICE], ids=["whole", "halves", "twice"])
def test_every_process_writes_and_reads_its_heads(open_store, chunk, shares, layout):
    c, alone = chunk(1, 6, layout), chunk(2, 3, layout)
    for one in (c, alone):  # numbers, which int8 can hold
        one.kv[...] = np.random.default_rng(3).standard_normal(one.kv.shape)
    single = open_store(layout=layout)
    single.put(alone.key, alone.kv, record=alone.record)
    together = Processes([open_store(layout=layout) for _ in shares], shares)
    results = together.run(put(c, aux={"x": np.array([7])}))
    assert len(set(results)) == 1 and results[0].won
    assert single.head([c.key])[0].ways == shares[0].ways
    whole = single.get_many([alone.key, c.key])
    for share, read in zip(shares, together.run(get(alone, c)), strict=True):
        assert read.kv.tobytes() == own(whole.kv, share).tobytes()
        assert read.offsets == whole.offsets
    assert single.aux(c.key, "x").tolist() == [7]
    assert together.run(put(c)) == [PutResult(won=False, attempt=None)] * len(shares)


def test_what_one_is_refused_nobody_gets(open_store, chunk, tmp_path):
    """Heads of rank 1 are damaged: rank 0 could read its own, and does not."""
    first, damaged, last, missing = (chunk(n, 4 + n, WIDE) for n in range(1, 5))
    together = Processes([open_store(layout=WIDE) for _ in HALVES], HALVES)
    for c in (first, damaged, last):
        together.run(put(c))
    (path,) = (tmp_path / "kb").glob(f"kv/*/*/{damaged.key}/*/c/0/0/0/1/0")
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    reads = together.run(get(first, damaged, missing, last, on_missing="skip"))
    for share, read in zip(HALVES, reads, strict=True):
        assert list(read.offsets) == [first.key, last.key]
        assert (
            read.kv.tobytes() == own(np.concatenate((first.kv, last.kv), axis=2), share).tobytes()
        )
        assert isinstance(read.refused[damaged.key], ChunkCorrupt)
        assert isinstance(read.refused[missing.key], ChunkMissing)
    assert (
        open_store("r", layout=WIDE).get_many([damaged.key], share=HALVES[0]).kv.tobytes()
        == own(damaged.kv, HALVES[0]).tobytes()
    )  # of the file that it opened
    assert [type(error) for error in together.run(get(damaged))] == [ChunkCorrupt] * 2
    together.run(put(damaged, replace=True))
    assert all(not read.refused for read in together.run(get(damaged, on_missing="skip")))


def test_a_failure_of_one_fails_all_and_leaves_nothing(open_store, chunk, monkeypatch, tmp_path):
    c = chunk(1, 6, WIDE)
    stores = [open_store(layout=WIDE) for _ in HALVES]
    together = Processes(stores, HALVES)

    def fail(*args, **kwargs):
        raise StoreError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(stores[1], "put_shard", fail)
        assert [str(error) for error in together.run(put(c))] == ["the disk is full"] * 2
    assert not list((tmp_path / "kb").glob(f"kv/*/*/{c.key}/*/c"))
    with monkeypatch.context() as patch:
        patch.setattr(stores[0], "begin", fail)
        assert [str(error) for error in together.run(put(c))] == ["the disk is full"] * 2
    with monkeypatch.context() as patch:
        patch.setattr(stores[1], "get_many", fail)
        skip = get(c, on_missing="skip")
        assert [str(error) for error in together.run(skip)] == ["the disk is full"] * 2
    assert all(result.won for result in together.run(put(c)))


def test_processes_that_ask_for_different_chunks_are_told(open_store, chunk):
    together = Processes([open_store(layout=WIDE) for _ in HALVES], HALVES)
    answers = together.run(lambda store, share: store.head([chunk(share.rank, 3, WIDE).key]))
    assert ["different chunks" in str(answer) for answer in answers] == [True, True]


def test_a_store_in_memory_holds_the_share(chunk, model):
    c = chunk(1, 6, WIDE)
    stores = [MemoryStore(model, WIDE.of_share(share)) for share in HALVES]
    together = Processes(stores, HALVES)
    together.run(put(c))
    for share, read in zip(HALVES, together.run(get(c)), strict=True):
        assert read.kv.tobytes() == own(c.kv, share).tobytes()
    stores[1].delete([c.key])  # it left one of them to make room
    assert together.run(lambda store, share: store.head([c.key])) == [[None]] * 2


def test_a_share_is_one_of_the_heads_there_are(open_store):
    with refused(StoreError, "0"):
        SharedStore(open_store(layout=WIDE), HeadShare(0, 3), lambda value: [value])
    with refused(StoreError, "2"):
        WIDE.of_share(HeadShare(2, 2))


def test_shares_pass_through_a_local_tier(s3_location, open_store, chunk, model, tmp_path):
    from jaxrag.kv.store import ChunkStore

    c = chunk(1, 6, WIDE)
    stores = [
        ReadThrough(
            ChunkStore.open(s3_location, model, WIDE, mode="rw"),
            ChunkStore.open(tmp_path / f"tier-{share.rank}", model, WIDE, mode="rw"),
        )
        for share in HALVES
    ]
    together = Processes(stores, HALVES)
    together.run(put(c))
    for _ in range(2):  # from afar, then the copies
        for share, read in zip(HALVES, together.run(get(c)), strict=True):
            assert read.kv.tobytes() == own(c.kv, share).tobytes()
    remote = Processes([one.remote for one in stores], HALVES)
    for share, read in zip(HALVES, remote.run(get(c)), strict=True):
        assert read.kv.tobytes() == own(c.kv, share).tobytes()


def test_one_lease_is_that_of_all_processes(tmp_path, model, chunk):
    """Two models of two processes each want one chunk: one of them encodes it."""
    stores = [ChunkStore.open(tmp_path / "kb", model, WIDE, mode="rw") for _ in range(4)]
    one, other = (Processes(stores[at : at + 2], HALVES) for at in (0, 2))
    key = chunk(1, layout=WIDE).key

    def lease(store, share):
        return store.lease(key)

    assert one.run(lease) == [True, True] and other.run(lease) == [False, False]
    for store in one.stores:
        store.release(key)
    deadline = time.monotonic() + 30
    while other.run(lease) == [False, False]:
        assert time.monotonic() < deadline
    assert one.run(lease) == [False, False]
    for store in stores:
        store.close()
