"""The recipe of CONTRIBUTING.md: a store says where bytes are; the base class checks them."""

import pickle

import numpy as np
import pytest

from jaxrag.base.errors import ChunkAbsent, ChunkCorrupt
from jaxrag.kv.store import KVStore, PutResult
from jaxrag.kv.store.reading import settle
from jaxrag.kv.store.record import layer_digests, new_attempt, new_record


class FolderStore(KVStore):
    """A toy: a .npy file and a record for every chunk, in one folder."""

    def __init__(self, folder, fingerprint, layout):
        super().__init__(fingerprint, layout, max_tokens=1000)
        self.folder = folder

    @property
    def private(self):
        return False

    def keys(self):
        return iter(sorted(path.stem for path in self.folder.glob("*.record")))

    def records(self):
        return iter(self._find(list(self.keys())).values())

    def _put(self, new):
        key, kv = new.key, new.kv
        if (self.folder / f"{key}.record").exists() and not new.replace:
            return PutResult(won=False, attempt=None)
        attempt = new_attempt()
        digests = layer_digests(kv)
        tokens, described = kv.shape[2], new.described
        made = new_record(key, attempt, tokens, self.layout, new.record, digests, described)
        np.save(self.folder / f"{key}.npy", kv.view(np.uint8))
        (self.folder / f"{key}.record").write_bytes(pickle.dumps(made))
        return PutResult(won=True, attempt=attempt)

    def _find(self, keys):
        paths = {key: self.folder / f"{key}.record" for key in keys}
        return {
            key: pickle.loads(path.read_bytes()) if path.exists() else ChunkAbsent(f"no {key}")
            for key, path in paths.items()
        }

    def _load(self, wanted):
        return [self._load_one(want) for want in wanted]

    def _load_one(self, want):
        kv = np.load(self.folder / f"{want.record.key}.npy").view(self.layout.numpy_dtype)
        for layer in want.layers:
            part = kv[layer]
            if want.direct:  # the bytes belong where they are asked for
                part = want.layer_out(layer)
                part[...] = kv[layer]
            refused = settle(want, layer, part[None], None)
            if refused is not None:
                return refused
        return None

    def _read_aux(self, record, name):
        raise NotImplementedError("a toy keeps no auxiliary arrays")

    def _delete(self, key):
        there = (self.folder / f"{key}.record").exists()
        for path in self.folder.glob(f"{key}.*"):
            path.unlink()
        return there


@pytest.fixture
def store(tmp_path, model, layout):
    return FolderStore(tmp_path, model, layout)


def test_a_new_store_gives_back_every_bit(store, chunk):
    a, b = chunk(1, 3), chunk(2, 8)
    for one in (a, b):
        assert store.put(one.key, one.kv, record=one.record).won
    assert not store.put(a.key, a.kv, record=a.record).won
    got = store.get_many([b.key, a.key])
    assert got.kv.tobytes() == np.concatenate([b.kv, a.kv], axis=2).tobytes()
    assert list(store.keys()) == sorted([a.key, b.key])
    assert sum(it.tokens for it in store.records()) == 11
    a.assert_equal(store.get(a.key))


def test_a_new_store_serves_nothing_that_is_damaged_or_gone(store, chunk):
    one = chunk(1)
    store.put(one.key, one.kv, record=one.record)
    path = store.folder / f"{one.key}.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ChunkCorrupt):
        store.get(one.key)
    assert store.verify().corrupt
    assert store.delete([one.key]) == 1
    with pytest.raises(ChunkAbsent):
        store.get(one.key)
