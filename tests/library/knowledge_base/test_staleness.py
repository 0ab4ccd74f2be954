"""Which lists of neighbours are searched again, against all lists by brute force."""

import dataclasses
import itertools

import numpy as np
import pytest

from jaxrag.library.knowledge_base.neighbours import (
    NeighbourSearch,
    _from_ranges,
    _to_ranges,
    entered,
)
from jaxrag.library.retrieve.lance import VectorIndex

TOP_N = 3
HOW = {"by": "vectors", "top_n": TOP_N}
DIM = 6


@dataclasses.dataclass
class Chunks:
    """What a search reads of a catalog: chunks with contents, and the lists that were recorded."""

    contents: dict = dataclasses.field(default_factory=dict)  # id -> content
    lists: dict = dataclasses.field(default_factory=dict)  # id -> contents of its neighbours
    value: object = None

    def swap(self, name, change):
        before, self.value = self.value, change(self.value)
        return before

    def settings(self):
        return {"searched": self.value}

    def chunk_ids(self):
        return np.array(sorted(self.contents), np.int64)

    def encoded_ids(self, encoder):
        return np.array(sorted(self.lists), np.int64)

    def copies(self):
        held = list(self.contents.values())
        return np.array(sorted(i for i, c in self.contents.items() if held.count(c) > 1), np.int64)

    def last_neighbours(self, encoder, count):
        full = [i for i in sorted(self.lists) if len(self.lists[i]) >= count]
        last = [min(j for j, c in self.contents.items() if c == self.lists[i][count - 1])
                for i in full]  # fmt: skip
        return np.array(full, np.int64), np.array(last, np.int64)

    def remove(self, ids):
        """As the catalog does: lists with a content that nobody has any more are forgotten."""
        for i in ids:
            del self.contents[i]
            self.lists.pop(i, None)
        held = set(self.contents.values())
        self.lists = {i: others for i, others in self.lists.items() if held.issuperset(others)}


def brute_force(contents, vectors):
    """id -> the contents of its neighbours, by comparing every two chunks."""
    lists = {}
    for own, content in contents.items():
        order = sorted(contents, key=lambda i: (-(vectors[own] @ vectors[i]), i))
        others = dict.fromkeys(contents[i] for i in order if contents[i] != content)
        lists[own] = list(others)[:TOP_N]
    return lists


@pytest.fixture
def index(tmp_path):
    return VectorIndex.open(tmp_path / "vectors", DIM, "exact")


def test_every_list_that_changed_is_searched_and_few_others(rng, index):
    """Chunks come and go at random, some with the content of another and a vector of their own."""
    chunks, vectors, next_id = Chunks(), {}, 1
    searched = needed = total = 0
    for step in range(60):
        leave = rng.random() < 0.5 and len(chunks.contents) > 20
        if leave:
            chunks.remove(
                rng.choice(chunks.chunk_ids(), rng.integers(1, 4), replace=False).tolist()
            )
        for _ in range(40 if step == 0 else rng.integers(0, 4)):
            known = list(chunks.contents.values())
            copy = known and rng.random() < 0.1
            chunks.contents[next_id] = rng.choice(known) if copy else f"content {next_id}"
            vectors[next_id] = rng.normal(size=DIM).astype(np.float32)
            index.add(np.array([next_id]), vectors[next_id][None])
            next_id += int(rng.integers(1, 3))
        search = NeighbourSearch.begin(chunks, HOW)
        outdated = search.outdated(["neighbours"], TOP_N, index).tolist()
        expected = brute_force(chunks.contents, vectors)
        changed = {i for i, others in expected.items() if chunks.lists.get(i) != others}
        assert changed <= set(outdated)
        chunks.lists |= {i: expected[i] for i in outdated}
        assert chunks.lists == expected
        search.finish()
        if step:
            searched, needed = searched + len(outdated), needed + len(changed)
            total += len(chunks.contents)
    assert 0 < needed <= searched < total / 2


def remembered(chunks):
    return bool(chunks.value) and "chunks" in chunks.value


def test_a_search_that_was_interfered_with_is_not_remembered():
    chunks = Chunks({1: "a", 2: "b"}, {1: ["b"], 2: ["a"]})
    NeighbourSearch.begin(chunks, HOW).finish()
    assert remembered(chunks)

    killed = NeighbourSearch.begin(chunks, HOW)
    assert not remembered(chunks)
    NeighbourSearch.begin(chunks, HOW).finish()
    assert remembered(chunks)
    killed.check()  # it was not killed, and wrote lists after a newer search
    assert not remembered(chunks)

    older, newer = NeighbourSearch.begin(chunks, HOW), NeighbourSearch.begin(chunks, HOW)
    older.check()
    newer.finish()
    assert not remembered(chunks)

    search = NeighbourSearch.begin(chunks, HOW)
    chunks.contents[3] = "c"  # came while it ran
    search.finish()
    assert not remembered(chunks)
    search = NeighbourSearch.begin(chunks, HOW)
    assert search.outdated(["neighbours"], TOP_N, None).tolist() == [1, 2, 3]


@pytest.mark.parametrize("ids", [[], [4], [1, 2, 3, 7, 9, 10], [5, 7, 9], list(range(20))])
def test_ranges_give_the_ids_back(ids):
    ranges = _to_ranges(np.array(ids, np.int64))
    assert _from_ranges(ranges).tolist() == ids
    assert all(last < following for (_, last), (following, _) in itertools.pairwise(ranges))


def test_a_new_chunk_as_similar_as_the_last_neighbour_has_entered(rng, index):
    """A tie counts, and so does what rounding makes of one."""
    vectors = rng.normal(size=(32, DIM)).astype(np.float32)
    vectors[20:30] = vectors[10:20]  # the new chunks have the vectors of the last neighbours
    vectors[30:] = np.array([[-1], [1]]) * vectors[0]
    index.add(np.arange(32, dtype=np.int64), vectors)
    for own in range(10):
        new = [index.get(np.array([own + 20]))]
        assert entered(index, np.array([own]), np.array([own + 10]), new).all()
    assert not entered(index, np.array([0]), np.array([31]), [index.get(np.array([30]))]).any()
