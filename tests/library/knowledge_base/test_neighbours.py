"""KV behind neighbours: who they are, what a change of the documents re-encodes, what is kept."""

import dataclasses
import hashlib

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import KnowledgeBaseError, RequestError
from jaxrag.engine.engine import engine_of
from jaxrag.library.documents import Document
from jaxrag.library.embed import as_embedder
from jaxrag.library.knowledge_base import KnowledgeBase, neighbours
from jaxrag.library.retrieve import lance
from jaxrag.library.retrieve.base import searched_text
from jaxrag.reuse.encode import chunk_encoding, chunk_key, encode_chunks, encode_for_store
from jaxrag.reuse.methods import Method
from jaxrag.serve.ask import Ask
from jaxrag.serve.generate import generate
from jaxrag.serve.questions import prepare, resolve

WORDS = ["amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath", "larch"]
TOP_N = 3
METHOD = Method("neighbours", encoder="neighbours")


def document(seed, name=None, words=8):
    text = " ".join(np.random.default_rng(seed).choice(WORDS, words))
    return Document(name or f"d{seed}", text)


@pytest.fixture(scope="session")
def embedder(embedder):
    """Bag of words with a little of its own for every text, so that no two are equally similar."""

    def function(texts):
        vectors = np.asarray(embedder(texts, "passage"))
        for row, text in zip(vectors, texts, strict=True):
            seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest())
            row += np.random.default_rng(seed).normal(0, 0.03, len(row))
        return vectors

    return as_embedder(function, name="bag of words and noise")


def options(embedder=None, **changes):
    by = {} if embedder is None else {"embedder": embedder, "index": "exact"}
    return {"encoders": ["neighbours"], "neighbours": TOP_N, **by, **changes}


@pytest.fixture
def encoded(monkeypatch):
    """The numbers of chunks that were to be encoded behind neighbours, call by call."""
    calls = []

    def counting(model, encoder, *rest):
        chunks = rest[1]
        if encoder == "neighbours" and chunks:
            calls.append(len(chunks))
        return encode_for_store(model, encoder, *rest)

    monkeypatch.setattr(chunk_encoding, "encode_for_store", counting)
    return calls


def prompt_ids(kb, text):
    """The tokens of a chunk of this text as they stand in a prompt."""
    tokenizer = kb.model.tokenizer
    return kb.template.chunk_ids(tokenizer, tokenizer.encode(text))


def brute_force(kb, embedder):
    """Chunk text -> its neighbours' texts by the definition, from the documents alone."""
    rows = [(d.title, chunk.text) for d in kb.documents() for chunk in kb._catalog.chunks(d.id)]
    ids = [i for d in kb.documents() for i in kb._catalog.ids_of_document(d.id)]
    vectors = np.asarray(embedder([searched_text(*row) for row in rows], "passage"))
    lists = {}
    for own, (_, text) in enumerate(rows):
        scores = vectors @ vectors[own]
        order = sorted(range(len(rows)), key=lambda i: (-scores[i], ids[i]))
        others = dict.fromkeys(rows[i][1] for i in order if rows[i][1] != text)
        lists[text] = tuple(others)[:TOP_N]
    return lists


def stands(kb):
    """The same from the catalog: what the KV of every chunk was encoded behind."""
    found = {}
    for entry in kb.documents():
        chunk_ids = kb._catalog.ids_of_document(entry.id)
        contexts = kb._catalog.contexts(chunk_ids, "neighbours")
        for chunk_id, chunk in zip(chunk_ids, kb._catalog.chunks(entry.id), strict=True):
            rows = kb._catalog.with_content(contexts[chunk_id])
            names = [kb.model.tokenizer.decode(rows[name].ids) for name in contexts[chunk_id]]
            found[chunk.text] = tuple(names)
    return found


def test_neighbours_are_the_most_similar_others_and_kv_is_behind_them(make_kb, embedder):
    kb = make_kb(stored="native", **options(embedder))
    same = [Document("again", document(0).text), Document("once more", document(0).text)]
    report = kb.add([*(document(n) for n in range(7)), *same])
    assert report.encoded == report.reused == 0
    found = report.neighbours
    # Three documents have one text: their KV is the same and encoded once.
    assert (found.chunks, found.encoded, found.reused, found.unchanged) == (9, 7, 2, 0)
    assert found.encoded_tokens == sum(len(prompt_ids(kb, document(n).text)) for n in range(7))
    expected = brute_force(kb, embedder)
    assert stands(kb) == expected
    prefix = kb.template.prefix_ids(kb.model.tokenizer)
    for hit in kb.search(" ".join(WORDS), k=20):
        ids, others = prompt_ids(kb, hit.text), [prompt_ids(kb, t) for t in expected[hit.text]]
        key = chunk_key(kb.store.fingerprint, kb.model, "neighbours", prefix, ids, others)
        ((_, kv),) = encode_chunks(kb.model, "neighbours", prefix, [ids], [others])
        np.testing.assert_allclose(kb.store.get(key), kv, rtol=1e-4, atol=1e-5)
        (asked,) = kb.neighbours_of([hit.chunk_id], "neighbours")
        assert [ids.tolist() for ids in asked] == [ids.tolist() for ids in others]


def test_a_change_encodes_exactly_the_chunks_whose_neighbours_changed(make_kb, embedder, encoded):
    kb = make_kb(**options(embedder))
    kb.add([document(n) for n in range(30)])
    steps = [
        lambda: kb.add([document(n) for n in range(30, 33)]).neighbours,
        lambda: kb.add([document(n) for n in range(33)]).neighbours,
        lambda: kb.remove(["d3", "d31"]).neighbours,
        lambda: kb.update([document(99, "d5"), document(6)]).neighbours,
        lambda: kb.refresh(),
    ]
    counts, searched = [], []
    for step in steps:
        kb.gc(grace_seconds=0)  # or KV of earlier neighbours might be found again
        before = brute_force(kb, embedder)
        encoded.clear()
        report = step()
        after = brute_force(kb, embedder)
        changed = [text for text, others in after.items() if before.get(text) != others]
        assert report.encoded == sum(encoded) == len(changed)
        assert report.unchanged == len(after) - len(changed)
        assert stands(kb) == after
        counts.append(len(changed))
        searched.append(report.searched)
    # Some did not change, and those that left were somebody's neighbours.
    assert 3 < counts[0] < 30
    assert 0 < counts[2] < 25
    assert 1 < counts[3] < 25
    assert counts[1] == counts[4] == 0
    # Nobody is searched in vain where documents left, and few where some came.
    assert [searched[at] for at in (1, 2, 4)] == [0, counts[2], 0]
    assert counts[0] <= searched[0] < 33
    assert counts[3] <= searched[3] < 31


def test_a_plan_tells_how_many_are_encoded_and_changes_nothing(make_kb, embedder):
    kb = make_kb(**options(embedder, encoders=["after_prefix", "neighbours"]))
    assert kb.plan([document(n) for n in range(4)]).behind == 4  # of nothing yet
    kb.add([document(n) for n in range(30)])
    steps = [
        [document(n) for n in range(30, 33)],
        [document(n) for n in range(33)],
        [document(99, "d5"), document(6), Document("d7", document(8).text)],
        [Document("copy", document(8).text)],
    ]
    planned, encoded = [], []
    for documents in steps:
        kb.gc(grace_seconds=0)  # or KV of earlier neighbours might be found again
        version, lists = kb._catalog.version(), stands(kb)
        plan = kb.plan(documents)
        assert (kb._catalog.version(), stands(kb)) == (version, lists)
        report = kb.add(documents)
        for name in ("documents", "replaced", "unchanged", "chunks", "encoded"):
            assert getattr(plan, name) == getattr(report, name), name
        planned.append(plan.behind)
        encoded.append(report.neighbours.encoded)
    assert encoded == planned
    assert encoded[0] > 3 and encoded[2] > 1 and encoded[1] == encoded[3] == 0
    plan = kb.plan([], removed=["d3", "nobody"])
    assert plan.behind == kb.remove(["d3"]).neighbours.encoded > 0


def test_a_plan_by_words_counts_all(make_kb):
    kb = make_kb(**options())
    kb.add([document(n) for n in range(6)])
    assert kb.plan([document(n) for n in range(6)]).behind == 0
    assert kb.plan([document(7)]).behind == 7
    assert make_kb("other", encoders=["isolated"]).plan([document(7)]).behind is None


def test_chunks_of_which_few_neighbours_are_others_stay_as_they_are(make_kb, embedder, encoded):
    kb = make_kb(**options(embedder, neighbour_changes=1))
    kb.add([document(n) for n in range(30)])
    before = stands(kb)
    encoded.clear()
    report = kb.add([document(n) for n in range(30, 34)]).neighbours
    wanted, after = brute_force(kb, embedder), stands(kb)
    others = {text: len(set(wanted[text]) - set(before[text])) for text in before}
    assert {text for text in before if after[text] != before[text]} == {
        text for text, count in others.items() if count > 1
    }
    assert report.encoded == sum(encoded) == 4 + sum(count > 1 for count in others.values())
    assert 1 in others.values() and report.unchanged > 20
    assert kb.refresh().searched == 0
    # What was left as it was is encoded again once any change is enough.
    again = make_kb(**options(embedder, neighbour_changes=0))
    assert again.refresh().encoded == sum(before[t] != wanted[t] for t in before) - sum(
        count > 1 for count in others.values()
    )
    assert stands(again) == wanted
    with refused(KnowledgeBaseError, "neighbour_changes=-1"):
        make_kb(**options(embedder, neighbour_changes=-1))


def test_an_approximate_index_searches_only_what_a_change_reaches(
    make_kb, embedder, tmp_path, monkeypatch
):
    monkeypatch.setattr(lance, "_INDEX_FROM", 20)
    monkeypatch.setattr(lance, "_ROWS_OF_PARTITION", 4)
    kb = make_kb(**{**options(embedder), "index": "lance"})
    kb.add([document(n) for n in range(30)])
    report = kb.add([document(40)]).neighbours
    assert len(kb._vectors.index._table.list_indices()) == 2
    assert 1 <= report.searched < 20
    assert stands(kb) == brute_force(kb, embedder)
    report = kb.refresh(every=True)
    assert (report.searched, report.encoded) == (31, 0)


def test_by_words_any_change_searches_all_and_none_nothing(make_kb, encoded, monkeypatch):
    kb = make_kb(**options())
    first = kb.add([document(n) for n in range(9)]).neighbours
    assert (first.searched, first.encoded) == (9, 9)
    assert kb.stats()["neighbours"] == {"top_n": TOP_N, "by": "bm25"}
    assert kb.add([document(n) for n in range(9)]).neighbours.searched == 0
    encoded.clear()
    report = kb.refresh()
    assert (report.searched, report.chunks, report.unchanged, encoded) == (0, 9, 9, [])
    assert kb.remove(["d3"]).neighbours.searched == 8
    monkeypatch.setattr(neighbours, "_BATCH", 4)  # more than that are searched in memory
    assert kb.add([document(10)]).neighbours.searched == 9
    for entry in kb.documents():
        (text,) = (chunk.text for chunk in kb._catalog.chunks(entry.id))
        ranking = [hit.text for hit in kb.search(text, k=20, mode="bm25")]
        assert stands(kb)[text] == tuple(other for other in ranking if other != text)[:TOP_N]


def test_an_interrupted_run_is_continued(make_kb, embedder, monkeypatch):
    kb = make_kb(**options(embedder))
    yielded = 0

    def dying(model, encoder, *rest):
        nonlocal yielded
        for item in encode_for_store(model, encoder, *rest):
            if encoder == "neighbours":
                if yielded == 5:
                    raise KeyboardInterrupt
                yielded += 1
            yield item

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(chunk_encoding, "encode_for_store", dying)
        kb.add([document(n) for n in range(12)])
    assert len(kb.documents()) == 12
    report = kb.refresh()
    assert (report.encoded, report.reused, report.unchanged) == (7, 5, 0)
    assert report.searched == 12
    assert stands(kb) == brute_force(kb, embedder)


@pytest.mark.parametrize("moment", ["get", "getter"])
def test_a_chunk_that_another_writer_removes_meanwhile_is_left_out(
    make_kb, embedder, monkeypatch, moment
):
    kb = make_kb(**options(embedder))
    kb.add([document(seed) for seed in range(9)])
    with KnowledgeBase.open(kb.path, mode="rw", embedder=embedder) as other:
        index, calls = kb._vectors.index, []
        slowed = getattr(index, moment)

        def slow(asked):
            calls.append(asked)
            if len(calls) == 1:
                other.remove(["d3"])
            return slowed(asked)

        monkeypatch.setattr(index, moment, slow)
        if moment == "get":  # what is searched is found out already
            monkeypatch.setattr(neighbours.NeighbourSearch, "outdated", lambda it, *_: it.chunk_ids)
        kb.add([document(9)])
    monkeypatch.undo()
    assert calls
    kb.refresh()
    assert {entry.id for entry in kb.documents()} == {f"d{i}" for i in range(10) if i != 3}
    assert kb.verify().damaged == ()
    assert kb.refresh().encoded == 0


def test_removed_text_is_out_of_every_context_at_once(make_kb, tmp_path, embedder):
    kb = make_kb(**options(embedder))
    kb.add([document(n) for n in range(10)])
    text = document(4).text
    touched = {own for own, others in stands(kb).items() if text in others}
    kb.close()
    with KnowledgeBase.open(kb.path, mode="rw", embedder=embedder) as writer:  # without a model
        assert writer.remove(["d4"]).neighbours is None
        held = writer.stats()["encoders"]["neighbours"]
        assert held == 9 - len(touched) < 9
    kb = make_kb(embedder=embedder)
    question = sorted(touched)[0]
    answer = generate(question, kb=kb, method=METHOD, k=1, max_new_tokens=3)
    assert answer.sources[0].text == question
    assert answer.counts["encoded"] > 0
    again = generate(question, kb=kb, method=METHOD, k=1, max_new_tokens=3)
    assert again.counts["encoded"] == 0
    assert again.token_ids == answer.token_ids
    report = kb.refresh()
    assert (report.encoded, report.reused) == (len(touched) - 1, 1)
    assert stands(kb) == brute_force(kb, embedder)


def test_answers_are_those_of_kv_encoded_on_the_fly(make_kb, embedder):
    ready, bare = make_kb(**options(embedder)), make_kb("bare", embedder=embedder)
    documents = [document(n) for n in range(8)]
    ready.add(documents)
    bare.add(documents)
    results = []
    for kb in (ready, bare):
        engine_of(kb.model).forget()
        results.append(generate("amber fjord", kb=kb, method=METHOD, k=3, max_new_tokens=4))
    stored, fresh = results
    assert stored.counts["encoded"] == 0 < stored.counts["reused"] == fresh.counts["encoded"]
    # Ten neighbours are the default where no variant was asked for.
    assert [source.text for source in stored.sources] == [source.text for source in fresh.sources]
    assert bare.stats()["stored"]["variants"]["neighbours"] == 3
    again = generate("amber fjord", kb=bare, method=METHOD, k=3, max_new_tokens=4)
    assert again.counts["encoded"] == 0
    assert again.token_ids == fresh.token_ids


def asked(base, texts, **more):
    """What ``generate`` says to given documents, and what each was encoded behind."""
    given = {"documents": texts, "method": METHOD, "template": base.template, "max_new_tokens": 2}
    given |= {"kb": base} | more
    settings = resolve(
        Ask(method=METHOD, template=base.template, groups=given.get("groups")),
        kb=given["kb"], model=given.get("model"), neighbours=given.get("neighbours", "corpus"),
    )  # fmt: skip
    prompt = prepare(settings, "amber?", texts).prompt
    decode = base.model.tokenizer.decode
    behind = [tuple(decode(ids).strip() for ids in others) for others in prompt.neighbours]
    return generate("amber?", **given), behind


def test_given_documents_are_each_others_neighbours_when_asked(make_kb):
    kb = make_kb()
    texts = [document(n).text for n in (1, 2, 1, 3)]
    alone = {"kb": None, "model": kb.model, "neighbours": "prompt"}
    result, behind = asked(kb, texts, **alone)
    tokens = sum(len(prompt_ids(kb, text)) for text in texts)
    assert result.counts == {"reused": 0, "recomputed": 0, "encoded": tokens}
    assert [len(others) for others in behind] == [2, 2, 2, 2]
    assert any("an oracle" in note for note in result.notes)
    other, _ = asked(kb, texts[:2], **alone)
    assert other.counts["encoded"] == sum(len(prompt_ids(kb, text)) for text in texts[:2])


def test_neighbours_of_given_documents_that_nobody_knows_are_refused(make_kb):
    kb = make_kb()
    given = {"documents": ["Salt wells."], "model": kb.model, "template": "plain"}
    with refused(RequestError, "documents=") as no:
        generate("amber?", method=METHOD, **given)
    for fix in ("kb=", "neighbours='prompt'"):
        assert fix in str(no.value)
    with refused(RequestError, "'others'"):
        generate("amber?", method=METHOD, neighbours="others", **given)
    assert generate("amber?", method="full_reuse", max_new_tokens=1, **given).text is not None


@pytest.mark.parametrize("by", ["bm25", "vectors"])
def test_given_documents_stand_behind_those_that_the_knowledge_base_finds(make_kb, embedder, by):
    """As a chunk of the same text does there; its own text is none of them."""
    kb = make_kb(**options(embedder, similar_by=by, neighbours=3))
    kb.add([document(n) for n in range(8)])
    there = stands(kb)
    texts = [document(2).text, document(5).text]
    result, behind = asked(kb, texts)
    assert behind == [there[text] for text in texts]
    assert f"in knowledge base {kb.path.name}" in " ".join(result.notes)
    assert result.counts["encoded"] == 0 < result.counts["reused"]  # they are kept there
    _, other = asked(kb, ["amber fjord salt"])
    assert len(other[0]) == 3 and set(other[0]) <= there.keys()


def test_neighbours_of_given_documents_are_what_the_reader_may_read(make_kb):
    kb = make_kb(**options(neighbours=2))
    words = "salt wells of the valley"
    kb.add([
        Document("open", f"{words} north"),
        Document("law", f"{words} south", metadata={"groups": ["law"]}),
    ])  # fmt: skip
    texts = [f"{words} east"]
    for groups, seen in ((None, 2), (["law"], 2), (["sales"], 1)):
        _, [behind] = asked(kb, texts, groups=groups)
        assert len(behind) == seen


def test_a_document_behind_which_a_given_one_stands_is_asked_for_anew_once_it_left(make_kb):
    kb = make_kb(**options(neighbours=1))
    kb.add([Document("a", "salt wells north"), Document("b", "tea bricks south")])
    settings = resolve(Ask(method=METHOD), kb=kb)
    ready = prepare(settings, "amber?", ["salt wells east"])
    assert ready.is_current and ready.content_ids
    kb.remove(["a"])
    assert not ready.is_current
    assert ready.prepare_again().is_current


def test_both_kinds_and_plain_variants_live_side_by_side(make_kb, embedder):
    kb = make_kb(**options(embedder, encoders=["isolated", "neighbours", "neighbours_joint"]))
    report = kb.add([document(n) for n in range(5)])
    assert (report.encoded, report.neighbours.encoded) == (5, 10)
    assert kb.stats()["encoders"] == {"isolated": 5, "neighbours": 5, "neighbours_joint": 5}
    assert kb.gc(grace_seconds=0).chunks == 0
    kb.add([document(7)])
    stale = kb.gc(grace_seconds=0)
    assert stale.chunks > 0
    assert kb.verify().damaged == ()


def test_damaged_kv_is_encoded_again_behind_the_same_neighbours(make_kb, embedder):
    kb = make_kb(**options(embedder))
    kb.add([document(n) for n in range(6)])
    key = next(iter(kb._catalog.all_keys()))
    before = kb.store.get(key)
    kb.store.delete([key])
    assert kb.verify().damaged == (key,)
    assert kb.verify(repair=True).repaired == 1
    np.testing.assert_allclose(kb.store.get(key), before, rtol=1e-4, atol=1e-5)
    assert kb.prefetch([key], tier="host").result() == before.nbytes


def test_the_list_ends_where_the_context_does(make_kb):
    kb = make_kb(chunk_tokens=200, **options())
    kb.add([document(n, words=25) for n in range(5)])
    for text, others in stands(kb).items():
        ranking = [hit.text for hit in kb.search(text, k=9, mode="bm25") if hit.text != text]
        assert tuple(ranking[: len(others)]) == others
        lengths = [len(prompt_ids(kb, t)) for t in (text, *ranking)]
        assert sum(lengths[: 1 + len(others)]) <= kb.config.max_positions
        assert sum(lengths[: 2 + len(others)]) > kb.config.max_positions


def test_a_variant_is_added_later(make_kb, embedder):
    kb = make_kb(embedder=embedder, index="exact")
    kb.add([document(n) for n in range(5)])
    kb.close()
    kb = make_kb(encoders=["neighbours"], embedder=embedder)
    assert kb.stats()["neighbours"] == {"top_n": 10, "by": "vectors"}
    report = kb.add([])
    assert (report.documents, report.neighbours.encoded) == (0, 5)
    assert kb.stats()["encoders"] == {"isolated": 5, "neighbours": 5}
    kb.close()
    with refused(KnowledgeBaseError, "neighbours=10"):
        make_kb(neighbours=4, encoders=["neighbours"])
    with refused(KnowledgeBaseError, "similar_by=vectors"):
        make_kb(similar_by="bm25")


def test_shards_leave_the_neighbours_to_the_last(make_kb, embedder):
    kb = make_kb(**options(embedder))
    documents = [document(n) for n in range(6)]
    assert [kb.add(documents, shard=(i, 2)).neighbours for i in range(2)] == [None, None]
    assert kb.add(documents).neighbours.encoded == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"neighbours": 0}, "neighbours=0"),
        ({"neighbours": True}, "neighbours=True"),
        ({"similar_by": "luck"}, "similar_by='luck'"),
        ({"similar_by": "vectors"}, "similar_by='vectors'"),
        ({"encoders": ["isolated"]}, "neighbours=3"),
    ],
)
def test_settings_that_cannot_be_are_refused(make_kb, changes, message):
    with refused(KnowledgeBaseError, message):
        make_kb(**options(**changes))


def test_refresh_needs_model_and_vectors(make_kb, embedder):
    kb = make_kb(**options(embedder))
    kb.add([document(n) for n in range(4)])
    with KnowledgeBase.open(kb.path) as reader, refused(KnowledgeBaseError):
        reader.refresh()
    kb._vectors.index.remove(kb._catalog.chunk_ids()[:1])
    with refused(KnowledgeBaseError):
        kb.refresh()
    assert dataclasses.asdict(kb.add([document(9)]).neighbours)["chunks"] == 5  # embeds first
