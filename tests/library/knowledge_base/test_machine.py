"""Any sequence of changes: a knowledge base and its index tell what a dict of documents tells."""

import tempfile

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from jaxrag.library.catalog.digests import Totals
from jaxrag.library.documents import Document
from jaxrag.library.knowledge_base import KnowledgeBase

WORDS = ["amber", "birch", "cedar", "delta", "ember", "fjord"]
TEXTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=30).map(" ".join)
NAMES = st.sampled_from("abcd")
YEARS = st.integers(2020, 2022)


class Documents(RuleBasedStateMachine):
    """Each document may have several chunks, and the same chunks as another."""

    index = "exact"

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.held = {}  # id -> Document
        self.used = set()  # chunk ids of whatever there was
        self.kb = None
        self.reopen()

    def teardown(self):
        self.kb.close()
        self.folder.cleanup()

    @rule()
    def reopen(self):
        if self.kb is not None:
            self.kb.close()
        self.kb = KnowledgeBase.open(
            self.folder.name, self.model, template="plain", chunk_tokens=60,
            embedder=self.embedder, index=self.index,
        )  # fmt: skip

    @rule(given=st.dictionaries(NAMES, st.tuples(TEXTS, YEARS), min_size=1))
    def add(self, given):
        documents = [
            Document(name, text, title=f"about {text[:5]}", metadata={"year": year})
            for name, (text, year) in given.items()
        ]
        same = [it for it in documents if self.held.get(it.id) == it]
        report = self.kb.add(documents, progress=False)
        assert (report.documents, report.unchanged) == (len(documents), len(same))
        assert report.replaced == len(given.keys() & self.held.keys()) - len(same)
        assert report.encoded + report.reused == report.chunks
        assert report.encoded == 0 or len(same) < len(documents)
        before = self.used
        self.used = before | set(self.ids())
        changed = given.keys() - {it.id for it in same}
        assert not before & {i for name in changed for i in self.ids(name)}, "an id came back"
        self.held |= {it.id: it for it in documents}

    @rule(names=st.sets(NAMES | st.just("nobody")))
    def remove(self, names):
        report = self.kb.remove(sorted(names))
        assert report.documents == len(names & self.held.keys())
        assert set(report.unknown) == names - self.held.keys()
        self.held = {name: it for name, it in self.held.items() if name not in names}

    @rule(text=TEXTS)
    def fail(self, text):
        """A change that ends amid its transaction is none."""
        catalog = self.kb._catalog
        with pytest.raises(ZeroDivisionError):
            catalog.swap("gate:x", lambda value: 1 // 0)
        with pytest.raises(ZeroDivisionError), catalog._database.transaction() as connection:
            connection.execute("DELETE FROM documents")
            connection.execute("DELETE FROM postings")
            raise ZeroDivisionError

    @rule(grace=st.sampled_from([0, 3600]))
    def collect(self, grace):
        self.kb.gc(grace_seconds=grace)
        if not grace:
            assert self.kb.stats(walk=True)["stored"]["orphans"] == 0

    @rule(word=st.sampled_from(WORDS), year=st.none() | YEARS)
    def search_by_words(self, word, year):
        where = None if year is None else {"year": year}
        hits = self.kb.search(f"Where is {word}?", k=100, where=where, mode="bm25")
        found = {hit.chunk_id for hit in hits}
        chosen = [it for it in self.held.values() if year in (None, it.metadata["year"])]
        assert found == {
            chunk_id
            for it in chosen
            for chunk_id, chunk in zip(self.ids(it.id), self.chunks(it.id), strict=True)
            if word in f"{it.title} {chunk.text}".split()
        }
        assert [(-h.score, h.chunk_id) for h in hits] == sorted(
            (-h.score, h.chunk_id) for h in hits
        )
        for hit in hits:
            kept = self.held[hit.document_id]
            assert (hit.title, hit.metadata) == (kept.title, kept.metadata)
            assert hit.text in kept.text

    @rule(text=TEXTS, year=st.none() | YEARS, mode=st.sampled_from(["vector", "hybrid"]))
    def search_by_vectors(self, text, year, mode):
        where = None if year is None else {"year": year}
        hits = self.kb.search(text, k=100, where=where, mode=mode)
        chosen = {n for n, it in self.held.items() if year in (None, it.metadata["year"])}
        assert {hit.document_id for hit in hits} == chosen
        assert len(hits) == sum(len(self.chunks(name)) for name in chosen)
        together = self.kb.search([text, WORDS[0]], k=3, where=where, mode=mode)
        assert [h.chunk_id for h in together[0]] == [h.chunk_id for h in hits[:3]]

    @invariant()
    def it_holds_what_the_dict_holds(self):
        kb = self.kb
        assert [row.id for row in kb.documents()] == sorted(self.held)
        for row in kb.documents():
            kept = self.held[row.id]
            assert (row.title, row.metadata) == (kept.title, kept.metadata)
            chunks = self.chunks(row.id)
            assert len(chunks) == row.num_chunks
            assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
            assert self.model.tokenizer.decode(chunks[0].ids) == chunks[0].text
            assert all(chunk.text in kept.text for chunk in chunks)
        stats = kb.stats()
        assert stats["chunks"] == stats["vectors"]["vectors"] == len(self.ids())
        with kb._catalog._database.snapshot() as connection:
            path = kb._catalog.path
            assert Totals.read(connection, path) == Totals.counted(connection)
        keys = set(kb._catalog.all_keys())
        assert keys <= set(kb.store.keys())

    def chunks(self, name):
        return self.kb._catalog.chunks(name)

    def ids(self, name=None):
        catalog = self.kb._catalog
        found = catalog.chunk_ids() if name is None else catalog.ids_of_document(name)
        return [int(it) for it in found]


@pytest.mark.parametrize("index", ["exact", "lance"])
def test_a_dict_of_documents(index, model, embedder):
    given = {"index": index, "model": model, "embedder": embedder}
    run_state_machine_as_test(
        type("Machine", (Documents,), given),
        settings=settings(
            max_examples=4,
            stateful_step_count=20,
            phases=[Phase.generate],  # a failure's steps are printed, not shortened for minutes
            suppress_health_check=list(HealthCheck),
        ),
    )
