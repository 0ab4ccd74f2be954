"""Flipped bits and cuts of a catalog: the answer of before or one error, never another answer."""

import contextlib
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from refusal import refused

from jaxrag.base.errors import DamagedCatalogError, JaxragError, StoreError
from jaxrag.library.catalog import Catalog, NewDocument
from jaxrag.library.catalog import salvage as salvaging
from jaxrag.library.catalog.pages import PAGE_BYTES, flips, mend, wrong_pages
from jaxrag.library.catalog.salvage import salvage
from jaxrag.library.documents import Document
from jaxrag.library.documents.chunking import Chunk

LOCKS = (0x40000000, 512)  # where SQLite locks a file
GOLDEN = Path(__file__).parents[2] / "goldens" / "catalog" / "whole.sqlite"
QUESTIONS = ("fjord", "amber birch", "Title 1")
IDS = range(1, 13)
WORDS = ("amber", "birch", "cedar", "delta")
NAMES = st.sampled_from("abcd")


@pytest.fixture(scope="module")
def whole():
    """The bytes of a catalog.

    Of the knowledge base of knowledge_base/conftest.py with ``chunk_tokens=60`` and the encoders
    isolated and neighbours, to which four documents d0 to d3 of 30 random words were added and d3
    removed again.
    """
    return GOLDEN.read_bytes()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "catalog.sqlite"


@pytest.fixture
def place(path):
    """``place(data)``: the catalog is these bytes, and nothing else is beside it."""

    def put(data):
        for other in path.parent.iterdir():
            other.unlink()
        path.write_bytes(data)

    return put


def told(path):
    """What three questions find, with all that an answer is made of, and the lists of keys."""
    with contextlib.closing(Catalog.open(path)) as catalog:
        hits = [catalog.search(question, 5) for question in QUESTIONS]
        tokens = catalog.tokens(IDS)
        return (
            catalog.settings(),
            [
                [(hit.chunk_id, hit.score, hit.text, hit.ids.tolist()) for hit in own]
                for own in hits
            ],
            {i: (own.content_id, own.title, own.ids.tolist()) for i, own in tokens.items()},
            [catalog.keys(document.id) for document in catalog.documents()],
            catalog.contexts(IDS, "neighbours"),
        )


def verdict(path, want):
    try:
        found = told(path)
    except JaxragError as error:
        assert "\n" not in str(error)
        assert path.name in str(error)
        return "refused"
    return "same" if found == want else "WRONG"


def flipped(data, generator):
    changed = bytearray(data)
    changed[generator.integers(len(data))] ^= 1 << int(generator.integers(8))
    return bytes(changed)


def test_flips_and_cuts_are_never_believed(place, path, whole):
    generator = np.random.default_rng(7)
    place(whole)
    want = told(path)
    cuts = [whole[: generator.integers(len(whole))] for _ in range(20)]
    verdicts = []
    for data in [*cuts, *(flipped(whole, generator) for _ in range(60))]:
        place(data)
        verdicts.append(verdict(path, want))
    assert "WRONG" not in verdicts
    assert verdicts[:20] == ["refused"] * 20
    assert verdicts.count("refused") > 40, "the others lie in pages that no question reads"


def test_every_byte_of_the_header_counts(place, path, whole):
    place(whole)
    want = told(path)
    for byte in range(100):
        changed = bytearray(whole)
        changed[byte] ^= 4
        place(changed)
        assert verdict(path, want) == "refused", byte


def test_damage_is_an_error_of_its_own_that_names_file_and_fix(place, path, whole):
    changed = bytearray(whole)
    changed[200] ^= 1
    for data in (bytes(changed), whole[: 7 * PAGE_BYTES], whole[: 7 * PAGE_BYTES + 9]):
        place(data)
        with refused(DamagedCatalogError, "--repair") as error:
            Catalog.open(path)
        assert str(path) in str(error.value)
    place(whole[:1000])
    with refused(DamagedCatalogError, "--repair"):
        Catalog.is_empty(path)


def pages_of(data):
    return np.frombuffer(bytearray(data), np.uint8).reshape(-1, PAGE_BYTES)


def test_a_page_tells_which_bit_was_flipped(whole):
    pages = pages_of(whole)
    assert wrong_pages(pages) == []
    before = pages[3].copy()
    for byte, bit in ((0, 0), (801, 5), (3001, 1), (PAGE_BYTES - 7, 6)):
        pages[3, byte] ^= 1 << bit
        assert wrong_pages(pages) == [3]
        assert mend(pages[3])
        assert (pages[3] == before).all()
    pages[3, [100, 200, 300]] ^= 1
    assert not mend(pages[3])


def test_of_several_bits_that_explain_a_checksum_none_is_turned_back(whole):
    """A word is added up: its highest bit may have been any word's on the same side."""
    pages = pages_of(whole)
    pages[3, 803] ^= 0x80
    damaged = pages[3].copy()
    assert not mend(pages[3])
    assert (pages[3] == damaged).all()


def kept(path):
    """What no other file tells: settings, documents, their texts and the names of their KV."""
    with contextlib.closing(Catalog.open(path)) as catalog:
        rows = catalog.documents()
        return (
            catalog.settings(),
            rows,
            [[(it.text, it.ids.tolist()) for it in catalog.chunks(row.id)] for row in rows],
            [catalog.keys(row.id)["isolated"] for row in rows],
        )


def test_no_flipped_bit_loses_a_document(place, path, whole):
    """Not one of those that the checksum cannot tell, in a row or in the pages that it reaches."""
    place(whole)
    with contextlib.closing(Catalog.open(path)) as catalog:
        for number in range(6):
            put(catalog, f"n{number}", [f"unique{number} " + "harbour lamp " * 60] * 3)
        put(catalog, "long", ["gneiss and larch", "harbour lamp " * 1000])
    want, data = kept(path), path.read_bytes()
    pages = pages_of(data)
    texts = (b"best_first", b"unique2 ", b"gneiss", b"n5", b"harbour lamp " * 200)
    hit = [next(n for n in range(len(pages)) if text in page(data, n)) for text in texts]
    generator = np.random.default_rng(11)
    numbers = [*hit, *hit, *generator.integers(len(pages), size=20)]
    reached = 0
    for number in numbers:
        changed = pages.copy()
        byte = 4 * generator.integers(PAGE_BYTES // 4 - 2) + 3
        changed[number, byte] ^= 1 << int(generator.integers(2, 8))
        reached += len(flips(changed[number])) > 1
        place(changed.tobytes())
        found = salvage(path, want[0])
        assert not found.is_loss, (number, byte)
        assert kept(path) == want, (number, byte)
    assert reached > len(numbers) // 2


def test_a_flipped_bit_is_turned_back(place, path, whole):
    place(whole)
    want = told(path)
    assert salvage(path, want[0]) is None
    changed = bytearray(whole)
    changed[20] ^= 8  # without it no page would be checked
    changed[5 * PAGE_BYTES + 4000] ^= 2
    place(changed)
    found = salvage(path, want[0])
    assert (found.mended, found.unreadable, found.documents, found.is_loss) == (2, 0, 3, False)
    assert told(path) == want
    assert Path(found.kept).read_bytes() == changed
    assert sorted(other.name for other in path.parent.iterdir()) == [
        "catalog.sqlite",
        "catalog.sqlite.damaged",
    ]


def page_with(whole, text):
    """The number of the only page that holds a text."""
    (found,) = [
        number
        for number in range(len(whole) // PAGE_BYTES)
        if text in whole[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]
    ]
    return found


def without(whole, *numbers):
    """The file with other bytes in some pages."""
    pages = pages_of(whole)
    for number in numbers:
        pages[number, 64:1024] ^= 0x55
    return pages.tobytes()


def test_what_a_page_took_along_is_named_and_the_rest_stays(place, path, whole):
    place(whole)
    with contextlib.closing(Catalog.open(path)) as catalog:
        for number in range(10):
            put(catalog, f"n{number}", [f"unique{number} " + "harbour lamp " * 60] * 3)
        lost = catalog.chunks("n4")[0].text.encode()[:60]
        before = {row.id: row for row in catalog.documents()}
        texts = {name: [chunk.text for chunk in catalog.chunks(name)] for name in before}
        known, next_id = catalog.settings(), catalog.reserve(1)[0]
    data = path.read_bytes()
    hit = {0, *(n for n in range(len(data) // PAGE_BYTES) if lost in page(data, n))}
    place(without(data, *hit))
    found = salvage(path, known)
    assert (found.mended, found.unreadable, found.nameless) == (0, len(hit), 0)
    assert "n4" in found.lost
    assert 0 < len(found.lost) < len(before)
    with contextlib.closing(Catalog.open(path)) as catalog:
        kept = {row.id: row for row in catalog.documents()}
        assert kept == {name: row for name, row in before.items() if name not in found.lost}
        for name in kept:
            assert [chunk.text for chunk in catalog.chunks(name)] == texts[name]
        assert catalog.settings() == known
        assert catalog.reserve(1)[0] > next_id
        hits = catalog.search("unique7 harbour", 3)
        assert [hit.document_id for hit in hits] == ["n7"] * 3
        # Postings are those of the texts: removing takes every one of them.
        catalog.remove(kept)
        with catalog._database.use() as connection:
            assert connection.execute("SELECT COUNT(*) FROM postings").fetchone() == (0,)


def test_what_is_left_of_a_lost_document_leaves_the_vector_index(place, path, whole):
    place(whole)
    with contextlib.closing(Catalog.open(path)) as catalog:
        catalog.set("vectors", {"index": "exact"})
        put(catalog, "long", ["harbour lamp " * 1000, "gneiss and larch"])
        _, second = catalog.ids_of_document("long")
        known = catalog.settings()
    data = path.read_bytes()
    full = [n for n in range(len(data) // PAGE_BYTES) if page(data, n).count(b" lamp ") > 200]
    place(without(data, full[0]))
    assert salvage(path, known).lost == ("long",)
    with contextlib.closing(Catalog.open(path)) as catalog:
        assert catalog.leaving() == [second]


def put(catalog, name, texts):
    """A document of these chunks, whose token ids are its bytes."""
    chunks = [
        Chunk(index, 0, len(text), np.frombuffer(text.encode(), np.uint8).astype(np.int32), text)
        for index, text in enumerate(texts)
    ]
    keys = {"isolated": [f"{name}-{chunk.index}" for chunk in chunks]}
    contents = [f"content of {name} {chunk.index}" for chunk in chunks]
    document = Document(name, " ".join(texts), title="", metadata={})
    ids = catalog.reserve(len(chunks))
    catalog.put([NewDocument(document, "digest", chunks, keys, contents, ids)])


def roots(path):
    """The first page of every table and index, from 0, by name."""
    with contextlib.closing(Catalog.open(path)) as catalog:
        connection = catalog._database.connection
        rows = connection.execute("SELECT name, rootpage FROM sqlite_master").fetchall()
    return {name: root - 1 for name, root in rows}


def page(whole, number):
    return whole[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]


def test_postings_are_made_anew(place, path, whole):
    place(whole)
    want, first = told(path), roots(path)
    names = ("postings", "lengths", "terms", "reservations")
    place(without(whole, 0, *(first[name] for name in names)))
    found = salvage(path, want[0])
    assert (found.documents, found.is_loss) == (3, False)
    assert told(path) == want


def test_a_zeroed_page_is_not_taken_for_whole(place, path, whole):
    place(whole)
    want = told(path)
    pages = pages_of(whole)
    pages[roots(path)["postings"]] = 0
    place(pages.tobytes())
    assert wrong_pages(pages) == [], "zeros have the checksum zero"
    assert verdict(path, want) == "refused"
    assert salvage(path, want[0]).documents == 3
    assert told(path) == want


def test_without_its_settings_nothing_is_told(place, path, whole):
    place(whole)
    needed = told(path)[0]
    number = page_with(whole, b"best_first")
    damaged = without(whole, number, 0)
    place(damaged)
    with refused(StoreError):
        salvage(path, needed)
    assert path.read_bytes() == damaged
    assert [other.name for other in path.parent.iterdir()] == ["catalog.sqlite"]
    place(b"")
    with refused(DamagedCatalogError, "0"):
        salvage(path, needed)


def test_nobody_opens_what_is_salvaged(place, path, whole, monkeypatch):
    """Not even to read, for which SQLite takes a lock that others may share."""
    place(bytes([*whole[:20], whole[20] ^ 8, *whole[21:]]))
    look = (
        "import fcntl, sys; file = open(sys.argv[1], 'rb'); "
        f"fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB, {LOCKS[1]}, {LOCKS[0]})"
    )
    saved, seen = salvaging._saved, []

    def watched(*args):
        command = [sys.executable, "-I", "-S", "-c", look, str(path)]
        seen.append(subprocess.run(command, capture_output=True, text=True).stderr)
        return saved(*args)

    monkeypatch.setattr(salvaging, "_saved", watched)
    assert salvage(path, ()).mended == 1
    [error] = seen
    assert "BlockingIOError" in error


def test_nobody_is_salvaged_under(place, path, whole):
    changed = flipped(whole, np.random.default_rng(3))
    place(changed)
    with contextlib.closing(Catalog.open(path)):
        assert salvage(path, []) is None
    assert path.read_bytes() == changed


class Catalogs(RuleBasedStateMachine):
    """A catalog is a dict of documents, whatever bit is flipped while nobody has it open."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "catalog.sqlite"
        self.held, self.given = {}, 0
        self.known = {"id": "a", "vectors": None, "gate:x": ["a setting"] * 50}
        Catalog.create(self.path, self.known).close()

    def teardown(self):
        self.folder.cleanup()

    @rule(names=st.sets(NAMES, min_size=1), words=st.lists(st.sampled_from(WORDS), min_size=1),
          times=st.sampled_from([1, 40, 400]))  # fmt: skip
    def put(self, names, words, times):
        texts = [" ".join(words * times), "amber birch"]
        with contextlib.closing(Catalog.open(self.path)) as catalog:
            for name in sorted(names):
                put(catalog, name, texts)
                self.held[name] = texts
                ids = catalog.ids_of_document(name)
                assert ids[0] > self.given, "an id came back"
                self.given = ids[-1]
            catalog.checkpoint()

    @rule(names=st.sets(NAMES))
    def remove(self, names):
        with contextlib.closing(Catalog.open(self.path)) as catalog:
            catalog.remove(sorted(names))
            catalog.checkpoint()
        self.held = {name: it for name, it in self.held.items() if name not in names}

    @rule(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
    def flip(self, place, bit):
        data = bytearray(self.path.read_bytes())
        data[int(place * len(data))] ^= 1 << bit
        self.path.write_bytes(data)
        found = salvage(self.path, self.known)
        assert found is not None
        assert not found.is_loss

    @rule()
    def go_back_and_on(self):
        """A copy of a moment is the catalog of that moment."""
        copy = self.path.with_name("copy")
        with contextlib.closing(Catalog.open(self.path)) as catalog:
            catalog.copy_to(copy, lambda count: None)
        self.path.unlink()
        copy.rename(self.path)

    @invariant()
    def is_the_dict(self):
        with contextlib.closing(Catalog.open(self.path)) as catalog:
            rows = catalog.documents()
            assert {row.id: [it.text for it in catalog.chunks(row.id)] for row in rows} == self.held
            catalog.check_whole()
            assert self.known.items() <= catalog.settings().items()
            for word in WORDS[:2]:
                hits = catalog.search(word, 20)
                having = {n for n, it in self.held.items() if any(word in text for text in it)}
                assert {hit.document_id for hit in hits} == having


def test_a_catalog_is_a_dict_under_flips():
    run_state_machine_as_test(
        Catalogs,
        settings=settings(
            max_examples=8, stateful_step_count=12, deadline=None, derandomize=True,
            phases=[Phase.generate], suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
