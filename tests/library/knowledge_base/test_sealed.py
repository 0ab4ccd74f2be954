"""A knowledge base with a secret: what others put into its store changes no answer."""

import shutil

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import ChunkNotSealed, KnowledgeBaseError, StoreError
from jaxrag.engine.engine import engine_of
from jaxrag.kv.store import ChunkStore, Record
from jaxrag.kv.store.seal import Sealer
from jaxrag.library.documents import Document
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.reuse.encode import chunk_encoding
from jaxrag.serve.generate import generate

OURS, THEIRS = b"the secret of this tenant", b"the secret of another one"
EXHAUSTIVE = (
    "lists:clusters=3,cap=200,knn=200,probes=3,exact_below=64,min_queries=1,queries=40,reach=200"
)
QUESTION = "amber birch?"
DOCUMENTS = [Document(f"d{n}", f"amber birch {n:02} " * 6) for n in range(4)]


@pytest.fixture
def ask(model):
    """``ask(kb)``: the answer to the question, nothing in the pool before."""

    def ask(kb, **options):
        engine_of(model).forget()
        return generate(QUESTION, kb=kb, k=3, max_new_tokens=6, **options)

    return ask


@pytest.fixture
def right(make_kb, ask):
    """The answer where nobody attacks."""
    kb = make_kb("undisturbed")
    kb.add(DOCUMENTS)
    return ask(kb).token_ids


def attacker(kb, secret=None):
    """The store of a knowledge base as somebody opens it who may write there."""
    location = kb.stats()["stored"]["location"]
    layout, fingerprint = kb.store.layout, kb.store.fingerprint
    return ChunkStore.open(location, fingerprint, layout, mode="rw", secret=secret)


def plant(kb, secret=None):
    """Other KV under every key of a knowledge base, by who knows its fingerprint alone."""
    store, seen = attacker(kb, secret), attacker(kb)
    rng = np.random.default_rng(5)
    for record in list(seen.records()):
        kv = seen.get(record.key)
        noise = rng.normal(size=kv.shape).astype(kv.dtype)
        aux = {name: seen.aux(record.key, name) for name in record.aux if name != "scale"}
        store.put(record.key, noise, record=record.provenance, aux=aux, replace=True)


def plant_before(kb, victim):
    """Other KV under the keys that ``victim`` is going to ask for, which ``kb`` has already."""
    store = attacker(victim)
    for record in list(kb.store.records()):
        store.put(record.key, np.ones_like(kb.store.get(record.key)), record=record.provenance)


@pytest.mark.parametrize("stored", ["native", "int8"])
def test_kv_that_was_planted_before_the_first_ingest_is_not_taken(make_kb, ask, stored):
    reference = make_kb("undisturbed", stored=stored)
    reference.add(DOCUMENTS)
    kb = make_kb(stored=stored, secret=OURS)
    plant_before(reference, kb)
    report = kb.add(DOCUMENTS)
    assert (report.encoded, report.reused, report.unsealed) == (4, 0, 4)
    assert kb.verify().ok == 4
    answer = ask(kb)
    assert answer.token_ids == ask(reference).token_ids
    assert (answer.counts["encoded"], answer.notes) == (0, [])


def test_without_a_secret_it_is_taken(make_kb, ask, right):
    """What docs/security.md says is not defended; the reason for all this."""
    kb = make_kb()
    plant_before(make_kb("undisturbed"), kb)
    assert kb.add(DOCUMENTS).encoded == 0
    assert kb.verify().ok == 4
    assert ask(kb).token_ids != right


@pytest.mark.parametrize("secret", [None, THEIRS])
def test_kv_that_was_planted_later_is_a_miss_is_told_and_replaced(make_kb, ask, right, secret):
    kb = make_kb(secret=OURS)
    kb.add(DOCUMENTS)
    plant(kb, secret)
    answer = ask(kb)
    assert answer.token_ids == right
    [note] = answer.notes
    assert "encoded (0 not in the store, 0 corrupt there, 3 not sealed) and stored" in note
    assert ask(kb).notes == [] and ask(kb).token_ids == right
    report = kb.verify()
    assert (report.ok, len(report.damaged), len(report.unsealed)) == (3, 1, 1)
    assert kb.stats(walk=True)["stored"]["unsealed"] == 1
    repaired = kb.verify(repair=True)
    assert (repaired.repaired, repaired.damaged, repaired.unsealed) == (1, (), ())
    assert kb.verify().ok == 4


def test_a_reader_uses_nothing_that_is_not_sealed_and_keeps_nothing(make_kb, ask, right):
    kb = make_kb(secret=OURS)
    kb.add(DOCUMENTS)
    plant(kb)
    reader = make_kb(secret=OURS, mode="r")
    for _ in range(2):
        answer = ask(reader)
        assert answer.token_ids == right
        assert "3 not sealed) and not stored" in answer.notes[0]


def test_variants_behind_neighbours_and_indexes_believe_only_what_is_sealed(make_kb, ask):
    options = {"encoders": ["after_prefix", "neighbours"], "neighbours": 2}
    options["attention_index"] = EXHAUSTIVE
    made = [make_kb(name, secret=secret, **options) for name, secret in
            (("undisturbed", None), ("kb", OURS))]  # fmt: skip
    for kb in made:
        kb.add(DOCUMENTS)
    reference, kb = made
    methods = ("fusionrag", "block_attention")
    right = [ask(reference, method=method).token_ids for method in methods]
    plant(kb)
    indexed = [record for record in attacker(kb).records() if record.aux]
    assert indexed
    with pytest.raises(ChunkNotSealed):
        kb.store.aux(indexed[0].key, next(iter(indexed[0].aux)))
    report = kb.verify(repair=True)
    assert report.damaged == () and report.repaired == 8
    assert [
        ask(kb, method=method).token_ids for method in ("fusionrag", "block_attention")
    ] == right


def test_tenants_of_one_fingerprint_cannot_put_anything_into_each_others_answers(
    make_kb, ask, right, tmp_path
):
    """Another tenant's chunks are a miss, though fingerprint and keys are the same."""
    store = tmp_path / "repository"
    ours, theirs = (make_kb(name, store=store, secret=secret)
                    for name, secret in (("ours", OURS), ("theirs", THEIRS)))  # fmt: skip
    theirs.add(DOCUMENTS)
    report = ours.add(DOCUMENTS)
    assert (report.encoded, report.unsealed) == (4, 4)
    assert ask(ours).token_ids == right
    assert theirs.verify().unsealed
    assert ours.gc(grace_seconds=0).chunks == 0 and ours.verify().ok == 4


def test_with_salts_beside_secrets_neither_touches_the_others_chunks(make_kb, tmp_path):
    store = tmp_path / "repository"
    for name, secret in (("ours", OURS), ("theirs", THEIRS)):
        kb = make_kb(name, store=store, secret=secret, salt=name)
        assert kb.add(DOCUMENTS).unsealed == 0
    for name, secret in (("ours", OURS), ("theirs", THEIRS)):
        assert make_kb(name, secret=secret).verify().ok == 4


def test_an_existing_knowledge_base_gets_a_secret_and_asks_for_it_from_then_on(
    make_kb, ask, right, tmp_path
):
    kb = make_kb()
    kb.add(DOCUMENTS)
    kb.close()
    # A reader with the secret believes nothing yet, and changes nothing.
    assert len(make_kb(secret=OURS, mode="r").verify().unsealed) == 4
    make_kb().close()
    kb = make_kb(secret=OURS)
    answer = ask(kb)
    assert answer.token_ids == right and "3 not sealed" in answer.notes[0]
    assert kb.add(DOCUMENTS).unsealed == 1  # unchanged documents, and what no question needed
    assert kb.verify().ok == 4 and kb.stats()["stored"]["sealed"]
    names = [Sealer(secret).name for secret in (OURS, THEIRS)]
    with refused(KnowledgeBaseError, names[0]):
        KnowledgeBase.open(kb.path)
    with refused(KnowledgeBaseError, names[0]):
        make_kb(secret=THEIRS)
    with refused(StoreError, "4"):
        make_kb(secret=b"four")
    assert OURS.decode() not in str(kb.stats()) + repr(kb)


def test_a_secret_is_changed_by_saying_so(make_kb, ask, right):
    make_kb(secret=OURS).add(DOCUMENTS)
    with refused(KnowledgeBaseError):
        make_kb(secret=THEIRS, reseal=True, mode="r")
    kb = make_kb(secret=THEIRS, reseal=True)
    assert len(kb.verify().unsealed) == 4
    assert kb.verify(repair=True).repaired == 4
    assert ask(kb).token_ids == right
    with refused(KnowledgeBaseError):
        make_kb(secret=OURS)
    assert make_kb(reseal=True).verify().ok == 4  # none from now on; the digests hold
    make_kb().close()


def test_an_export_holds_nothing_that_is_not_sealed(make_kb, tmp_path, model):
    kb = make_kb(secret=OURS)
    kb.add(DOCUMENTS)
    plant(kb)
    report = kb.export(tmp_path / "out", tokenizer=model.tokenizer)
    assert len(report.refused) == 4
    assert all("not sealed" in reason for _, reason in report.refused)


def test_a_store_elsewhere_and_its_copies_here_are_both_checked(make_kb, ask, right, s3_location):
    kb = make_kb(store=s3_location, secret=OURS)
    kb.add(DOCUMENTS)
    assert ask(kb).token_ids == right  # copies them
    plant(kb)
    assert ask(kb).token_ids == right  # from the copies
    shutil.rmtree(kb.path / "tier" / "kv")
    answer = ask(kb)
    assert answer.token_ids == right and "3 not sealed" in answer.notes[0]


def test_neighbours_do_not_see_planted_kv(make_kb, monkeypatch):
    """A chunk that is encoded behind others reads theirs from the store: sealed, or not at all."""
    kb = make_kb(secret=OURS, encoders=["neighbours"], neighbours=2)
    kb.add(DOCUMENTS)
    plant(kb)
    seen = []
    offer = chunk_encoding.ChunkEncoding.offer

    def counting(self, made):
        seen.append(made.key)
        return offer(self, made)

    monkeypatch.setattr(chunk_encoding.ChunkEncoding, "offer", counting)
    kb.add([Document("new", "amber birch 77 " * 6)])
    assert seen  # its neighbours' own KV was computed again, not read
    assert all(isinstance(kb.store.find([key])[key], Record) for key in seen)
