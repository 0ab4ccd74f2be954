"""What is believed with a secret: only what was put with it, as it was put, under its own key."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import xxhash
from blake3 import blake3
from refusal import refused

from jaxrag.base.errors import ChunkCorrupt, ChunkMissing, ChunkNotSealed, StoreError
from jaxrag.kv.store import ChunkStore, KVLayout, ReadThrough, SharedStore, as_stored
from jaxrag.kv.store.layout import HeadShare
from jaxrag.kv.store.record import Record
from jaxrag.kv.store.seal import Sealer, read_secret

OURS, THEIRS = b"the secret of this tenant", b"the secret of another one"
LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=5, dtype="bfloat16")
AUX = {"summary": np.arange(6, dtype=np.float32), "ids": np.arange(4)}


@pytest.fixture(params=["native", "int8"])
def layout(request):
    return dataclasses.replace(LAYOUT, stored=request.param)


@pytest.fixture
def opened(open_store, layout):
    """``opened(secret)``: the store of one directory."""

    def open_(secret=OURS, **options):
        return open_store(layout=layout, secret=secret, **options)

    return open_


@pytest.fixture
def numbers(chunk):
    """``numbers(number, seed=0)``: a Chunk of finite numbers, which int8 takes too."""

    def make(number, seed=0):
        c = chunk(number)
        rng = np.random.default_rng([seed, number])
        return dataclasses.replace(c, kv=rng.normal(size=c.kv.shape).astype(c.kv.dtype))

    return make


def record_file(root, key):
    (path,) = root.glob(f"kv/*/*/{key}/commit.json")
    return path


def rewritten(path, **change):
    """Change fields of a record and make its checksum right, as anybody can."""
    values = {**json.loads(path.read_text()), **change}
    body = {name: value for name, value in values.items() if name != "check"}
    text = json.dumps(body, sort_keys=True).encode()
    path.write_text(json.dumps({**body, "check": xxhash.xxh3_64_hexdigest(text)}, sort_keys=True))


def test_what_was_put_with_the_secret_comes_back(opened, numbers, layout):
    c = numbers(1)
    opened().put(c.key, c.kv, record=c.record, aux=AUX)
    store = opened(mode="r")
    assert store.get(c.key).tobytes() == as_stored(c.kv, layout).tobytes()
    assert store.get(c.key, layers=(1, 2)).tobytes() == as_stored(c.kv, layout)[1:2].tobytes()
    for name, array in AUX.items():
        np.testing.assert_array_equal(store.aux(c.key, name), array)
    assert store.verify().ok == 1
    # Whoever has no secret reads it by its digests, as before.
    assert opened(None).get(c.key).tobytes() == as_stored(c.kv, layout).tobytes()


def test_seals_are_what_the_format_says(opened, numbers, layout, tmp_path):
    c, store = numbers(1), opened()
    store.put(c.key, c.kv, record=c.record, aux=AUX)
    path = record_file(tmp_path / "kb", c.key)
    values = json.loads(path.read_text())

    def seal(what, data):
        key = blake3(OURS, derive_key_context=f"jaxrag: seal of {what} in a chunk store").digest()
        return blake3(data, key=key).hexdigest()[:32]

    folder = path.parent / values["attempt"]
    size = c.kv.size // 3 * layout.stored_dtype.itemsize
    stored = (folder / "c/0/0/0/0/0").read_bytes()
    layers = [stored[size * layer :][:size] for layer in range(3)]
    assert values["seals"] == [seal("bytes", layer) for layer in layers]
    for name, entry in values["aux"].items():
        (file,) = (one for one in (folder / "aux" / name / "c").rglob("*") if one.is_file())
        assert entry["seals"] == [seal("bytes", file.read_bytes())]
    body = {name: value for name, value in values.items() if name not in ("seal", "check")}
    assert values["seal"] == seal("a record", json.dumps(body, sort_keys=True).encode())
    assert values["format"] == 3 and len(values["aux"]) == 2 + (layout.stored == "int8")


@pytest.mark.parametrize("secret", [None, THEIRS])
def test_forged_with_the_fingerprint_alone_is_a_miss_and_replaced(opened, numbers, layout, secret):
    c, planted = numbers(1), numbers(1, seed=9)
    opened(secret).put(c.key, planted.kv, record=c.record, aux=AUX)
    store = opened()
    for read in (store.get, lambda key: store.aux(key, "summary"), lambda key: store.head([key])):
        with refused(ChunkNotSealed, c.key):
            read(c.key)
    assert store.get_many([c.key], on_missing="skip").corrupt == (c.key,)
    assert store.verify().unsealed == (c.key,) and not store.verify().corrupt
    assert [type(it) for _, it in store.committed()] == [ChunkNotSealed]
    assert list(store.records()) == []
    assert store.put(c.key, c.kv, record=c.record).won
    assert store.get(c.key).tobytes() == as_stored(c.kv, layout).tobytes()
    assert store.verify().ok == 1


def test_a_record_stripped_of_its_seal_is_a_miss(opened, numbers, tmp_path):
    c = numbers(1)
    store = opened()
    store.put(c.key, c.kv, record=c.record, aux=AUX)
    path = record_file(tmp_path / "kb", c.key)
    record = Record.from_json(path.read_bytes())
    path.write_bytes(record.sealed(None).to_json())
    opened(None).get(c.key)  # it is sound
    with refused(ChunkNotSealed):
        store.get(c.key)


@pytest.mark.parametrize("part", ["c/0/0/0/0/0", "aux/summary/c/0", "aux/scale/c/0/0/0/0"])
def test_bytes_that_collide_under_xxh3_are_not_believed(
    opened, numbers, layout, monkeypatch, tmp_path, part
):
    """Planted bytes with the digest of the right ones: the seals alone tell them apart."""
    if "scale" in part and layout.stored == "native":
        pytest.skip("native KV has no scales")
    store, c = opened(), numbers(1)
    store.put(c.key, c.kv, record=c.record, aux=AUX)
    (path,) = (tmp_path / "kb").glob(f"kv/*/*/{c.key}/*/{part}")
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    with refused(ChunkCorrupt, "xxh3"):
        [store.get(c.key), store.aux(c.key, "summary")]
    record = store.head([c.key])[0]
    colliding = {record.xxh3[0], *(it.xxh3[0] for it in record.aux.values())}
    for name in ("reading.layer_digest", "loading.digest"):
        monkeypatch.setattr(f"jaxrag.kv.store.{name}", lambda array: _Any(colliding))
    with refused(ChunkNotSealed):
        [store.get(c.key), store.aux(c.key, "summary")]


class _Any:
    """Equal to any of some digests."""

    def __init__(self, digests):
        self.digests = digests

    def __eq__(self, other):
        return other in self.digests

    __hash__ = None


def test_records_swapped_between_two_chunks_of_one_tenant(opened, numbers, tmp_path, layout):
    store, root = opened(), tmp_path / "kb"
    pair = numbers(1), numbers(2)
    for c in pair:
        store.put(c.key, c.kv, record=c.record)
    one, other = (record_file(root, c.key).parent for c in pair)
    one.rename(root / "between")
    other.rename(one)
    (root / "between").rename(other)
    for c in pair:
        with refused(ChunkCorrupt):
            store.get(c.key)
    # And with the key put right, as far as that can be done without the secret.
    for c in pair:
        rewritten(record_file(root, c.key), key=c.key, content_id=c.record.content_id)
        with pytest.raises(ChunkNotSealed):
            store.get(c.key)


def test_an_old_record_of_the_same_key_gives_what_was_sealed_or_nothing(opened, numbers, tmp_path):
    store, c = opened(), numbers(1)
    store.put(c.key, c.kv, record=c.record)
    path = record_file(tmp_path / "kb", c.key)
    old, folder = path.read_bytes(), path.parent / json.loads(path.read_text())["attempt"]
    shutil.copytree(folder, tmp_path / "kept")
    kv = store.get(c.key).tobytes()
    store.put(c.key, c.kv, record=c.record, replace=True)
    path.write_bytes(old)
    shutil.rmtree(folder, ignore_errors=True)
    with pytest.raises(ChunkMissing):
        store.get(c.key)
    shutil.copytree(tmp_path / "kept", folder)
    assert store.get(c.key).tobytes() == kv  # its own, sealed before


def test_damage_is_told_from_what_others_put(opened, numbers, tmp_path):
    store, c = opened(), numbers(1)
    store.put(c.key, c.kv, record=c.record, aux=AUX)
    for path in (tmp_path / "kb").glob("kv/**/c/**/0"):
        if path.is_file():
            data = bytearray(path.read_bytes())
            data[0] ^= 1
            path.write_bytes(data)
    for read in (store.get, lambda key: store.aux(key, "summary")):
        with refused(ChunkCorrupt, "xxh3") as told:
            read(c.key)
        assert not isinstance(told.value, ChunkNotSealed)
    assert store.verify().corrupt == (c.key,)


def test_others_of_the_fingerprint_keep_their_chunks_at_a_collection(opened, numbers):
    ours, theirs = numbers(1), numbers(2)
    store, other = opened(), opened(THEIRS)
    store.put(ours.key, ours.kv, record=ours.record)
    other.put(theirs.key, theirs.kv, record=theirs.record)
    report = store.gc(lambda record: True, grace_seconds=0)
    assert (report.chunks, report.damaged) == (0, 0)
    assert other.verify().ok == 1
    assert store.gc(lambda record: record.key == ours.key, grace_seconds=0).chunks <= 1


def test_a_size_limit_counts_what_is_not_sealed_and_drops_it(opened, numbers):
    for number in range(4):
        c = numbers(number)
        opened(None).put(c.key, c.kv, record=c.record)
    limit = opened(None).head([c.key])[0].nbytes * 2
    store = opened(max_bytes=limit)
    assert len(list(store.keys())) <= 2
    store.close()


def test_two_ranks_seal_their_shares_of_one_chunk(opened, numbers, layout):
    c, store = numbers(1), opened()
    heads = np.split(c.kv, 2, axis=3)
    attempt = store.begin(c.key, c.kv.shape[2], c.record, ways=2)
    shards = [
        opened().put_shard(attempt, rank, np.ascontiguousarray(part))
        for rank, part in enumerate(heads)
    ]
    assert store.commit(attempt, shards, aux=AUX).won
    whole = as_stored(c.kv, layout)
    assert store.get(c.key).tobytes() == whole.tobytes()
    half = store.get_many([c.key], share=HeadShare(1, 2)).kv
    assert half.tobytes() == np.ascontiguousarray(whole[:, :, :, 1:]).tobytes()
    alone = SharedStore(store, HeadShare(), lambda value: [value])
    assert alone.get(c.key).tobytes() == whole.tobytes()
    assert opened(THEIRS).get_many([c.key], on_missing="skip").corrupt == (c.key,)


@pytest.mark.parametrize(("first", "second"), [(OURS, None), (None, OURS)])
def test_ranks_without_the_same_secret_commit_nothing(opened, numbers, first, second):
    c, store = numbers(1), opened(first)
    attempt = store.begin(c.key, c.kv.shape[2], c.record, ways=2)
    shards = [
        opened(secret).put_shard(attempt, rank, np.ascontiguousarray(part))
        for rank, (secret, part) in enumerate(
            zip((first, second), np.split(c.kv, 2, axis=3), strict=True)
        )
    ]
    with refused(StoreError, "1"):
        store.commit(attempt, shards)
    assert store.head([c.key]) == [None]


def test_a_tier_believes_neither_planted_copies_nor_a_planted_remote(
    opened, numbers, layout, tmp_path
):
    def near(secret):
        return ChunkStore.open(
            tmp_path / "near", remote.fingerprint, layout, mode="rw", durable=False, secret=secret
        )

    c, planted = numbers(1), numbers(1, seed=9)
    remote = opened()
    remote.put(c.key, c.kv, record=c.record, aux=AUX)
    near(None).put(c.key, planted.kv, record=c.record, aux=AUX)
    store = ReadThrough(remote, near(OURS))
    whole = as_stored(c.kv, layout).tobytes()
    assert store.get(c.key).tobytes() == whole
    assert near(OURS).get(c.key).tobytes() == whole  # the copy is sealed, under its own attempt
    np.testing.assert_array_equal(near(OURS).aux(c.key, "summary"), AUX["summary"])
    store.prefetch([c.key], "host").result()
    assert store.get(c.key).tobytes() == whole
    near(None).delete([c.key])
    opened(None).put(c.key, planted.kv, record=c.record, replace=True)
    fresh = ReadThrough(opened(), near(OURS))
    with pytest.raises(ChunkNotSealed):
        fresh.get(c.key)
    assert fresh.put(c.key, c.kv, record=c.record, replace=True).won
    assert fresh.get(c.key).tobytes() == whole


def test_a_tier_has_the_secret_of_its_store(opened, layout, tmp_path):
    near = ChunkStore.open(tmp_path / "near", opened().fingerprint, layout, mode="rw")
    with refused(StoreError):
        ReadThrough(opened(), near)


def test_host_memory_keeps_nothing_that_is_not_sealed(opened, numbers):
    c = numbers(1)
    opened(None).put(c.key, c.kv, record=c.record)
    store = opened()
    assert store.prefetch([c.key], "host").result() == 0
    assert store.prefetch([c.key], "page").result() == 0


@pytest.mark.parametrize("secret", [b"", b"fifteen bytes..", "a text of many characters", 7])
def test_a_secret_that_is_none(open_store, secret):
    with refused(StoreError):
        open_store(secret=secret)


def test_a_secret_is_read_from_a_file_and_never_shown(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(OURS)
    assert read_secret(path) == OURS
    assert OURS.decode() not in repr(Sealer(OURS)) and len(Sealer(OURS).name) == 16
    assert Sealer(OURS).name != Sealer(THEIRS).name
    path.write_bytes(b"short")
    with refused(StoreError, "5"):
        read_secret(path)
    path.write_bytes(bytes(70_000))
    with refused(StoreError, "65536"):
        read_secret(path)
    with refused(StoreError):
        read_secret(tmp_path / "nowhere")
