"""Chunks that several ranks write, a share of the heads each."""

import concurrent.futures
import pickle

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import ChunkCorrupt, ChunkMissing, StoreError
from jaxrag.kv.store import HeadShare, KVLayout, PutResult, as_stored
from jaxrag.kv.store.quantise import quantise

WIDE = KVLayout(num_layers=3, num_kv_heads=4, head_dim=5, dtype="float16")
WIDE8 = KVLayout(num_layers=3, num_kv_heads=4, head_dim=5, dtype="float16", stored="int8")
WIDE4 = KVLayout(num_layers=3, num_kv_heads=4, head_dim=5, dtype="float16", stored="int4")


def normal(c):
    c.kv[...] = np.random.default_rng(3).standard_normal(c.kv.shape)
    return c


def shares(kv, ways):
    return [np.ascontiguousarray(share) for share in np.split(kv, ways, axis=3)]


def put_shards(store, c, ways, **options):
    attempt = store.begin(c.key, c.kv.shape[2], c.record, ways=ways, **options)
    parts = list(enumerate(shares(c.kv, ways)))
    shards = [store.put_shard(attempt, rank, share) for rank, share in reversed(parts)]
    return attempt, shards


@pytest.mark.parametrize("io_mode", ["memmap", "default"])
@pytest.mark.parametrize("layout", [WIDE, WIDE8, WIDE4], ids=["native", "int8", "int4"])
@pytest.mark.parametrize("ways", [1, 2, 4])
def test_any_reader_reads_the_whole(open_store, chunk, tmp_path, ways, layout, io_mode):
    store = open_store(layout=layout, io_mode=io_mode)
    c, other = normal(chunk(1, 6, layout)), normal(chunk(2, 3, layout))
    attempt, shards = put_shards(store, c, ways)
    assert store.head([c.key]) == [None]  # nothing is visible before the commit
    result = store.commit(attempt, shards, aux={"x": np.array([7])})
    assert result == PutResult(won=True, attempt=attempt.attempt)
    store.put(other.key, other.kv, record=other.record)

    reader = open_store("r", layout=layout, io_mode=io_mode)
    assert reader.head([c.key])[0].ways == ways
    wanted = c.kv
    if layout.stored == "int8":
        elements, scale = quantise(c.kv)
        assert reader.aux(c.key, "scale").tobytes() == scale.tobytes()
        wanted = (elements * scale[..., None]).astype(np.float16)
    elif layout.stored == "int4":
        wanted = as_stored(c.kv, layout)
    assert reader.get(c.key).tobytes() == wanted.tobytes()
    got = reader.get_many([other.key, c.key])
    assert got.kv[:, :, 3:].tobytes() == wanted.tobytes()
    assert reader.get(c.key, layers=(1, 3)).tobytes() == wanted[1:3].tobytes()
    assert reader.aux(c.key, "x").tolist() == [7]
    assert len(list((tmp_path / "kb").glob(f"kv/*/*/{c.key}/*/c/0/0/0/*/0"))) == ways


def test_attempts_and_shards_travel_between_processes(open_store, chunk):
    store, c = open_store(layout=WIDE), chunk(1, 6, WIDE)
    attempt = pickle.loads(pickle.dumps(store.begin(c.key, 6, c.record, ways=2)))

    def rank(number):
        own = open_store(layout=WIDE)  # as another process would
        return pickle.loads(pickle.dumps(own.put_shard(attempt, number, shares(c.kv, 2)[number])))

    with concurrent.futures.ThreadPoolExecutor(2) as ranks:
        shards = list(ranks.map(rank, range(2)))
    assert store.commit(attempt, shards).won
    c.assert_equal(store.get(c.key))


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damage_in_one_file(open_store, chunk, tmp_path, rank, damage):
    store, c = open_store(layout=WIDE), chunk(1, 6, WIDE)
    assert store.commit(*put_shards(store, c, 4)).won
    (path,) = (tmp_path / "kb").glob(f"kv/*/*/{c.key}/*/c/0/0/0/{rank}/0")
    data = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if damage == "truncate" else bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(ChunkMissing if damage == "remove" else ChunkCorrupt):
        store.get(c.key)


def test_begin_says_when_there_is_nothing_to_do(open_store, chunk):
    store, first, second = open_store(layout=WIDE), chunk(1, 6, WIDE, seed=1), chunk(1, 6, WIDE)
    store.put(first.key, first.kv, record=first.record)
    assert store.begin(first.key, 6, first.record, ways=2) is None
    assert store.commit(*put_shards(store, second, 2, replace=True)).won
    second.assert_equal(store.get(first.key))


def test_what_does_not_fit_is_refused(open_store, chunk):
    store, c = open_store(layout=WIDE), chunk(1, 6, WIDE)
    for ways in (0, 3, 8, 2.0, True + 2):
        with refused(StoreError, "4"):
            store.begin(c.key, 6, c.record, ways=ways)
    with refused(StoreError, "0"):
        store.begin(c.key, 0, c.record, ways=2)
    with refused(StoreError):
        store.begin("0" * 40, 6, c.record, ways=2)
    attempt = store.begin(c.key, 6, c.record, ways=2)
    share = shares(c.kv, 2)[0]
    for rank, kv, said in [
        (2, share, "rank=2"),
        (-1, share, "rank=-1"),
        (0, c.kv, "0"),
        (0, share[:, :, :5].copy(), "5"),
        (0, np.split(c.kv, 2, axis=3)[0], "0"),
    ]:
        with refused(StoreError, said):
            store.put_shard(attempt, rank, kv)
    with refused(StoreError):
        open_store("r", layout=WIDE).begin(c.key, 6, c.record, ways=2)


def test_a_commit_needs_every_rank_once(open_store, chunk):
    store, c = open_store(layout=WIDE), chunk(1, 6, WIDE)
    for pick, said in [
        (lambda shards, other: shards[:1], "1"),
        (lambda shards, other: [shards[0]] * 2, "1"),
        (lambda shards, other: [shards[0], other[1]], ""),
    ]:
        attempt, shards = put_shards(store, c, 2)
        _, other = put_shards(store, c, 2)
        with refused(StoreError, said):
            store.commit(attempt, pick(shards, other))
        assert store.head([c.key]) == [None]


@pytest.mark.parametrize("io_mode", ["memmap", "default"])
@pytest.mark.parametrize("layout", [WIDE, WIDE8, WIDE4], ids=["native", "int8", "int4"])
@pytest.mark.parametrize("written", [1, 2, 4])
@pytest.mark.parametrize("read", [1, 2, 4])
def test_a_share_is_read_of_any_chunk(open_store, chunk, written, read, layout, io_mode):
    store = open_store(layout=layout, io_mode=io_mode)
    c, other = normal(chunk(1, 6, layout)), normal(chunk(2, 3, layout))
    for one in (c, other):
        attempt, shards = put_shards(store, one, written)
        store.commit(attempt, shards)
    keys = [other.key, c.key]
    whole = store.get_many(keys).kv
    for rank, wanted in enumerate(shares(whole, read)):
        got = store.get_many(keys, share=HeadShare(rank, read))
        assert got.kv.tobytes() == wanted.tobytes()
        some = store.get_many(keys, layers=(1, 3), share=HeadShare(rank, read))
        assert some.kv.tobytes() == wanted[1:3].tobytes()
    store.prefetch(keys, "host").result()
    assert store.get_many(keys, share=HeadShare(read - 1, read)).kv.tobytes() == wanted.tobytes()


def test_a_share_is_verified_as_the_whole_is(open_store, chunk, tmp_path):
    """One file holds all heads: damage to a head that is not wanted refuses the others too."""
    store, c = open_store(layout=WIDE), chunk(1, 6, WIDE)
    store.put(c.key, c.kv, record=c.record)
    (path,) = (tmp_path / "kb").glob(f"kv/*/*/{c.key}/*/c/0/0/0/0/0")
    data = bytearray(path.read_bytes())
    data[-100] ^= 1  # in the last layer, of the last head
    path.write_bytes(data)
    with refused(ChunkCorrupt, "2"):
        store.get_many([c.key], share=HeadShare(0, 4))
    assert store.get_many([c.key], layers=(0, 2), share=HeadShare(0, 4)).offsets
