"""Update, remove, gc, verify and prefetch: what is re-encoded, freed, found damaged and healed."""

import dataclasses
import shutil
import uuid

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import KnowledgeBaseError, RequestError, StoreError
from jaxrag.kv.store.owners import Owner
from jaxrag.library.documents import Document
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.serve.generate import generate


def disk_bytes(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_an_update_encodes_exactly_the_chunks_whose_text_changed(kb, encoded):
    first, last = "A" * 100, "C" * 60
    kb.add([Document(f"d{n}", f"{n:03}" * 50) for n in range(20)])
    kb.add([Document("a", first + "B" * 100 + last)], progress=False)
    encoded.clear()
    documents = [Document(f"d{n}", f"{n:03}" * 50) for n in range(20)]
    report = kb.add([*documents, Document("a", first + "D" * 100 + last)])
    assert (report.documents, report.unchanged, report.replaced) == (21, 20, 1)
    # With an overlap of 2 the chunks are [0, 100), [98, 198), [196, 260): the first stays.
    assert report.encoded == sum(encoded) == 2


def test_changed_text_is_unreachable_at_once_and_gc_frees_its_bytes(kb, model):
    kb.add([Document(f"d{n}", f"document {n} " * 10) for n in range(10)])
    kb.add([Document("a", "basalt columns of the coast")])
    assert kb.search("basalt")
    before = generate("basalt?", kb=kb, k=1, max_new_tokens=4)
    assert before.sources[0].document_id == "a"
    kb.update([Document("a", "gneiss domes of the valley floor")])
    assert kb.search("basalt") == []
    after = generate("gneiss?", kb=kb, k=1, max_new_tokens=4)
    assert after.sources[0].text == "gneiss domes of the valley floor"
    assert after.counts["encoded"] == 0
    size = disk_bytes(kb.path / "kv")
    dry = kb.gc(grace_seconds=0, dry_run=True)
    assert (dry.chunks, dry.dry_run) == (1, True)
    assert disk_bytes(kb.path / "kv") == size
    report = kb.gc(grace_seconds=0)
    assert report.chunks == 1
    assert size - disk_bytes(kb.path / "kv") >= report.nbytes > 0
    assert report.nbytes >= kb.store.layout.stored_nbytes(len("basalt columns of the coast"))
    assert kb.gc(grace_seconds=0).chunks == 0
    again = generate("gneiss?", kb=kb, k=1, max_new_tokens=4)
    assert again.counts["encoded"] == 0
    assert again.token_ids == after.token_ids


def test_gc_respects_the_grace(kb):
    kb.add([Document("a", "basalt")])
    kb.remove(["a"])
    assert kb.gc().chunks == 0
    assert kb.gc(grace_seconds=0).chunks == 1
    assert kb.stats()["last_gc"]["chunks"] == 1
    with refused(RequestError, "grace_seconds=-1"):
        kb.gc(grace_seconds=-1)


def test_variants_of_a_live_chunk_and_the_prefix_stay(make_kb):
    kb = make_kb(template="block_attention", chunk_tokens=60)
    kb.add([Document("a", "basalt"), Document("b", "gneiss")])
    answer = generate("basalt?", kb=kb, method="full_reuse", k=1, max_new_tokens=2)
    assert answer.counts["encoded"] > 0
    stats = kb.stats(walk=True)["stored"]
    assert stats["variants"] == {"after_prefix": 1, "isolated": 3}
    assert stats["orphans"] == 0
    assert kb.gc(grace_seconds=0).chunks == 0
    kb.remove(["a"])
    assert kb.stats(walk=True)["stored"]["orphans"] == 2
    assert kb.gc(grace_seconds=0).chunks == 2
    assert kb.stats()["stored"]["variants"] == {"isolated": 2}


def test_upkeep_needs_no_model_but_a_writable_knowledge_base(tmp_path, kb):
    kb.add([Document("a", "basalt"), Document("b", "gneiss")])
    with KnowledgeBase.open(kb.path) as reader:
        for work in (lambda: reader.remove(["a"]), reader.gc, reader.embed):
            with refused(KnowledgeBaseError):
                work()
        assert reader.verify().ok == 2
        with refused(KnowledgeBaseError):
            reader.verify(repair=True)
    with KnowledgeBase.open(kb.path, mode="rw") as writer:
        assert writer.remove(["a"]).documents == 1
        assert writer.gc(grace_seconds=0).chunks == 1
        with refused(KnowledgeBaseError):
            writer.add(["more"])


def damage(folder, name):
    """Flip a bit in the middle of one chunk's bytes."""
    path = next(
        path for path in sorted(folder.rglob(name)) if path.is_file() and path.stat().st_size > 1000
    )
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("stored", ["native", "int4"])
def test_what_was_stored_otherwise_is_read_and_added_to_as_it_is(make_kb, stored):
    assert make_kb("new").store.layout.stored == "int8"
    make_kb(stored=stored).add([Document("a", "basalt columns of the coast")])
    kb = make_kb()
    kb.add([Document("b", "basalt domes of the valley floor")])
    answer = generate("basalt?", kb=kb, k=2, max_new_tokens=2)
    assert (kb.stats()["stored"]["kv"], answer.counts["encoded"]) == (stored, 0)
    assert {record.stored for record in kb.store.records()} == {stored}


def test_kv_that_is_no_numbers_is_encoded_again(make_kb, text_of):
    """As a model stored it that was broken: every digest says that it is what was written."""
    kb = make_kb(stored="native")  # int8 has no such numbers
    kb.add([Document("a", text_of(1)), Document("b", text_of(2))])
    key, *others = kb._catalog.all_keys()
    before = kb.store.get(key)
    [record] = kb.store.head([key])
    broken = before.copy()
    broken[-1, ..., 3] = np.nan
    kb.store.put(key, broken, record=record.provenance, replace=True)
    assert np.isnan(kb.store.get(key)).any()
    assert dataclasses.astuple(kb.verify())[:5] == (len(others), 0, (key,), 0, ())
    assert kb.verify(repair=True).repaired == 1
    np.testing.assert_allclose(kb.store.get(key), before, rtol=1e-4, atol=1e-5)
    assert kb.verify().ok == len(others) + 1


def test_verify_finds_damage_and_repairs_it(kb, text_of):
    kb.add([Document("a", text_of(1)), Document("b", text_of(2))])
    chunks = kb.stats()["chunks"]
    keys = list(kb._catalog.all_keys())
    before = {key: kb.store.get(key) for key in keys}
    assert dataclasses.astuple(kb.verify())[:5] == (chunks, 0, (), 0, ())
    damage(kb.path / "kv", "0")
    shutil.rmtree(next((kb.path / "kv").rglob(keys[0])))
    found = kb.verify()
    assert found.ok + len(found.damaged) == chunks
    assert keys[0] in found.damaged
    repaired = kb.verify(repair=True)
    assert (repaired.repaired, repaired.damaged) == (len(found.damaged), ())
    assert dataclasses.astuple(kb.verify())[:5] == (chunks, 0, (), 0, ())
    for key in keys:
        np.testing.assert_allclose(kb.store.get(key), before[key], rtol=1e-4, atol=1e-5)


@pytest.fixture
def shared(make_kb, tmp_path):
    """Two knowledge bases over one repository, with a chunk of each and one in common."""
    store = tmp_path / "repository"
    one, two = make_kb("one", store=store), make_kb("two", store=store)
    one.add([Document("own", "basalt"), Document("both", "slate")])
    two.add([Document("own", "gneiss"), Document("both", "slate")])
    return one, two


def test_gc_asks_every_knowledge_base_of_a_shared_repository(shared):
    one, two = shared
    one.remove(["own", "both"])
    assert one.gc(grace_seconds=0).chunks == 1
    assert generate("slate?", kb=two, k=1, max_new_tokens=2).counts["encoded"] == 0
    two.remove(["both"])
    assert one.gc(grace_seconds=0).chunks == 1


def test_a_moved_owner_must_be_named_or_declared_gone(shared, tmp_path):
    one, two = shared
    one.remove(["own", "both"])
    two.close()
    two.path.rename(tmp_path / "moved")
    with refused(KnowledgeBaseError, two.id):
        one.gc(grace_seconds=0)
    assert one.gc(grace_seconds=0, others=[tmp_path / "moved"]).chunks == 1
    assert one.gc(grace_seconds=0, gone=[two.id]).chunks == 2
    assert one.gc(grace_seconds=0).chunks == 0, "it was struck out"


def test_an_owner_on_another_machine_is_not_looked_for_here(shared):
    one, two = shared
    one._owners().register(Owner(uuid.uuid4().hex, "elsewhere", str(two.path)))
    with refused(KnowledgeBaseError):
        one.gc(grace_seconds=0)


def test_tenants_of_different_salts_share_nothing(make_kb, tmp_path):
    store = tmp_path / "repository"
    reports = []
    for name, salt in (("one", "s1x"), ("two", "s2x"), ("three", None), ("four", "s1x")):
        kb = make_kb(name, store=store, salt=salt)
        reports.append(kb.add([Document("a", "basalt")]).encoded)
        assert "s1x" not in str(kb.stats())
    assert reports == [1, 1, 1, 0]
    with refused(KnowledgeBaseError):
        make_kb("one", salt="s2x")


def test_packed_formats_keep_less_and_answer(make_kb, tmp_path):
    sizes, layout = {}, None
    for stored in ("native", "int8", "int4", "int4-half"):
        kb = make_kb(stored, stored=stored, chunk_tokens=150)
        kb.add([Document("a", "basalt columns of the coast and gneiss " * 20)])
        layout = kb.store.layout
        sizes[stored] = [
            kb.stats()["stored"]["bytes"],
            layout.nbytes(kb.stats()["stored"]["tokens"]),
        ]
        for _ in range(2):
            result = generate("basalt?", kb=kb, k=1, max_new_tokens=2)
            assert result.counts["encoded"] == 0
        assert kb.verify().whole
        name = next(kb._catalog.all_keys())
        assert kb.store.get(name).dtype == np.float32
        if stored == "int4-half":
            with refused(StoreError, stored):
                kb.export(tmp_path / "out")
    assert sizes["int8"][0] < sizes["native"][0] / 2
    assert sizes["int4"][0] < 0.2 * sizes["native"][0]  # of float32
    assert sizes["int4-half"][0] < 0.6 * sizes["int4"][0]
    with refused(KnowledgeBaseError, "stored=int4"):
        make_kb("int4", stored="int4-half", chunk_tokens=150)


def test_formats_that_cannot_be_are_refused(make_kb):
    with refused(KnowledgeBaseError, "stored='int4-half'"):
        make_kb("odd", stored="int4-half", attention_index="lists")
    with refused(KnowledgeBaseError, "stored='int3'"):
        make_kb("odd", stored="int3")


def test_prefetch(kb, model):
    kb.add([Document("a", "basalt"), Document("b", "gneiss")])
    for tier in ("page", "host"):
        assert kb.prefetch("basalt?", k=1, tier=tier).result(timeout=300) > 0
    everything = list(kb._catalog.all_keys())
    assert kb.prefetch(everything, tier="host").result(timeout=300) > 0
    with refused(RequestError, "tier='disk'"):
        kb.prefetch("basalt?", tier="disk")


def test_a_size_limit_is_remembered_and_may_change(tmp_path, make_kb, model):
    make_kb(max_bytes=10_000_000).close()
    kb = make_kb()
    assert kb.stats()["stored"]["max_bytes"] == 10_000_000
    make_kb(max_bytes=0).close()
    assert make_kb().stats()["stored"]["max_bytes"] is None
    with refused(KnowledgeBaseError, "max_bytes=-1"):
        make_kb(max_bytes=-1)
    with refused(KnowledgeBaseError):
        KnowledgeBase.open(tmp_path / "kb", max_bytes=5)


def test_chunks_in_an_object_store_are_read_through_the_folder(make_kb, s3_location):
    kb = make_kb(store=s3_location)
    kb.add([Document("a", "basalt"), Document("b", "gneiss")])
    kb.close()
    assert not (kb.path / "kv").exists()
    kb = make_kb(store=s3_location)
    keys = list(kb._catalog.all_keys())
    read = kb.store.get_many(keys).kv
    copies = list((kb.path / "tier" / "kv").rglob("commit.json"))
    assert len(copies) == 2
    np.testing.assert_array_equal(kb.store.get_many(keys).kv, read)
    assert generate("basalt?", kb=kb, k=1, max_new_tokens=2).notes == []
    assert kb.verify().ok == 2
    kb.remove(["a"])
    assert kb.gc(grace_seconds=0).chunks == 1
    stored = kb.stats(walk=True)["stored"]
    assert (stored["chunks"], stored["orphans"]) == (1, 0)
    assert kb.stats()["stored"]["location"] == s3_location


def test_chunks_that_a_size_limit_dropped_are_no_damage(make_kb, text_of):
    kb = make_kb(max_bytes=60_000)
    kb.add([Document(str(n), text_of(n)) for n in range(4)])
    stored, chunks = kb.stats()["stored"], kb.stats()["chunks"]
    assert stored["bytes"] <= 60_000
    assert stored["chunks"] < chunks
    report = kb.verify(repair=True)
    assert (report.ok, report.repaired, report.damaged) == (stored["chunks"], 0, ())
    assert report.dropped == chunks - stored["chunks"]
    assert len(kb.search(text_of(0), k=100)) == chunks
