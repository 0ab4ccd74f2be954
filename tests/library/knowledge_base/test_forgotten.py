"""Forgotten is forgotten: what questions use after a removal, and what is left of the document."""

import asyncio
import json
import subprocess
import sys
import threading

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import DamagedCatalogError, KnowledgeBaseError, RequestError
from jaxrag.engine.engine import Engine, engine_of
from jaxrag.kv.store import ChunkStore, ReadThrough
from jaxrag.library.documents import Document
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.library.knowledge_base.location import mend_catalog
from jaxrag.reuse.encode import ChunkEncoding
from jaxrag.reuse.methods import METHODS, Method
from jaxrag.serve import answers
from jaxrag.serve.ask import Ask
from jaxrag.serve.generate import generate
from jaxrag.serve.questions import prepare, resolve

WORDS = ["amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath", "larch"]
BEHIND = Method("neighbours", encoder="neighbours")
CACHED = Method("cached", encoder="after_prefix", prefix_cache=True)
SECRET = "quartz"  # the word that is to be forgotten
KEEPS = {"encoders": ["after_prefix", "neighbours"], "neighbours": 3}


def document(seed, name=None, more=""):
    text = " ".join(np.random.default_rng(seed).choice(WORDS, 8))
    return Document(name or f"d{seed}", f"{more}{text}")


def documents(count=6):
    """Some documents, one of which holds the word and is like all others."""
    return [*(document(n) for n in range(count)), document(0, "secret", f"{SECRET} ")]


class Asked:
    """What questions named: the text of every chunk and neighbour, and their keys in the store."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.texts = []
        self.saw = {}  # store key -> text

    def request(self, request):
        prompt = request.prompt
        parts = [*prompt.chunks, prompt.final]
        for others in prompt.neighbours or ():
            parts += others or ()
        self.texts += map(self.tokenizer.decode, parts)

    def key(self, key, ids, neighbours):
        parts = [*(neighbours or ()), ids]
        self.saw[key] = " | ".join(map(self.tokenizer.decode, parts))

    def forget(self):
        self.texts.clear()
        self.saw.clear()

    @property
    def secret(self):
        """What of it held the word."""
        return [text for text in (*self.texts, *self.saw.values()) if SECRET in text]


@pytest.fixture
def asked(monkeypatch, model):
    """All that is asked of the engine, and every name of KV that is made of tokens."""
    found = Asked(model.tokenizer)
    entered, key = Engine._new_sequence, ChunkEncoding.key

    def entering(self, request, sink):
        found.request(request)
        return entered(self, request, sink)

    def naming(self, encoder, ids, neighbours=None):
        name = key(self, encoder, ids, neighbours)
        found.key(name, ids, neighbours)
        return name

    monkeypatch.setattr(Engine, "_new_sequence", entering)
    monkeypatch.setattr(ChunkEncoding, "key", naming)
    return found


def ask(kb, method, k=7):
    return generate("amber fjord cedar", kb=kb, method=method, k=k, max_new_tokens=2)


def by_remove(kb):
    kb.remove(["secret"])


def without_a_model(kb):
    with KnowledgeBase.open(kb.path, mode="rw") as other:
        assert other.remove(["secret"]).neighbours is None


def in_another_process(kb):
    code = (
        "import sys; from jaxrag import KnowledgeBase\n"
        "with KnowledgeBase.open(sys.argv[1], mode='rw') as kb: kb.remove(['secret'])"
    )
    subprocess.run([sys.executable, "-c", code, str(kb.path)], check=True)


def by_replacing(kb):
    kb.add([document(0, "secret", "basalt ")])


def without_the_refresh(kb):
    kb.add([document(0, "secret", "basalt ")], shard=(0, 2))
    kb.add([document(0, "secret", "basalt ")], shard=(1, 2))


LEAVES = [by_remove, without_a_model, in_another_process, by_replacing, without_the_refresh]
METHODS_ASKED = [BEHIND, CACHED, METHODS["fusionrag"], METHODS["full_attention"]]


@pytest.mark.parametrize("leaves", LEAVES, ids=lambda leaves: leaves.__name__)
def test_no_question_names_text_or_kv_of_a_document_that_left(make_kb, asked, leaves):
    kb = make_kb(**KEEPS)
    kb.add(documents())
    for method in METHODS_ASKED:
        ask(kb, method)
    assert asked.secret, "it was found, and seen by others"
    leaves(kb)
    asked.forget()
    for method in METHODS_ASKED:
        ask(kb, method)
        ask(kb, method)
    assert asked.texts
    assert not asked.secret


def test_no_kept_turn_is_found_behind_a_chunk_that_left(make_kb, asked):
    kb = make_kb(**KEEPS)
    kb.add(documents())
    first = f"{SECRET} amber fjord"
    options = {"kb": kb, "k": 3, "max_new_tokens": 4, "method": "turborag"}
    said = generate(messages=[{"role": "user", "content": first}], **options)
    talk = [
        {"role": "user", "content": first},
        {"role": "assistant", "content": said.token_ids},
        {"role": "user", "content": "birch cedar"},
    ]
    kept = generate(messages=talk, **options)
    assert next(row.how for row in kept.reuse if row.part == "turn 0") == "prefix hit"
    kb.remove(["secret"])
    asked.forget()
    after = generate(messages=talk, **options)
    assert [row.how for row in after.reuse if row.part == "turn 0"] == ["computed"]
    found = [text for text in asked.secret if first not in text]
    assert found == [], "what the user said himself stays said"
    engine_of(kb.model).forget()
    assert generate(messages=talk, **options).token_ids == after.token_ids


def remains(kb, name="secret"):
    """What is left of a document: what, and whether it is used."""
    return {it.what: it.used for it in kb.verify_forgotten(name).remains}


def test_what_is_left_is_listed_and_leaves_with_a_collection(make_kb, embedder):
    kb = make_kb(**KEEPS, embedder=embedder, index="exact")
    kb.add(documents())
    before = remains(kb)
    assert {what for what in before if not what.startswith("KV that saw it")} == {
        "row of the document",
        "rows of its chunks, with their texts",
        "rows of its words",
        "KV of its chunks, in the store",
        "vectors of its chunks",
    }
    assert any(what.startswith("KV that saw it: d") for what in before)
    assert all(before.values())
    kb.remove(["secret"])
    after = remains(kb)
    assert after.keys() == {
        "KV of its chunks, in the store",
        "KV that may have seen it, in the store",
        "files of vectors/ that may hold rows which left",
    }
    assert not any(after.values()), "no answer uses them"
    kb.gc(grace_seconds=0)
    report = kb.verify_forgotten("secret")
    assert report.nothing and report.removed and report.elsewhere
    kb.add([document(9, "secret")])
    assert remains(kb)["row of the document"]
    kb.remove(["secret"])
    kb.gc(grace_seconds=0)
    assert kb.verify_forgotten("secret").nothing


def test_text_that_another_document_has_is_not_listed_until_that_leaves_too(make_kb):
    kb = make_kb(**KEEPS)
    kb.add([*documents(3), Document("copy", document(0, "secret", f"{SECRET} ").text)])
    kb.remove(["secret"])
    kb.gc(grace_seconds=0)
    assert kb.verify_forgotten("secret").nothing
    kb.remove(["copy"])
    for name in ("secret", "copy"):
        assert not any(remains(kb, name).values())
        assert remains(kb, name)["KV of its chunks, in the store"] is False
    kb.gc(grace_seconds=0)
    assert kb.verify_forgotten("secret").nothing and kb.verify_forgotten("copy").nothing


def test_an_id_that_nobody_removed_is_no_proof(make_kb):
    kb = make_kb()
    kb.add([document(1)])
    with refused(KnowledgeBaseError, "'d2'"):
        kb.verify_forgotten("d2")
    kb.remove(["d2"])
    with refused(KnowledgeBaseError, "'d2'"):
        kb.verify_forgotten("d2")
    with refused(RequestError, "document=2"):
        kb.verify_forgotten(2)


def test_kv_that_a_question_made_behind_neighbours_leaves_with_a_collection(make_kb, asked):
    kb = make_kb()  # keeps no variant that sees neighbours
    kb.add(documents())
    ask(kb, BEHIND)
    assert asked.secret
    made = kb.stats()["stored"]["variants"]["neighbours"]
    kb.remove(["secret"])
    assert remains(kb)["KV that may have seen it, in the store"] is False
    assert kb.gc(grace_seconds=0).chunks >= made
    assert kb.verify_forgotten("secret").nothing


def test_neither_id_nor_text_nor_vector_is_left_in_any_file(make_kb, embedder):
    kb = make_kb(embedder=embedder, index="exact")
    kb.add([document(n) for n in range(30)])
    kb.add([document(0, "secret", f"{SECRET} ")])
    ids = kb._catalog.ids_of_document("secret")
    vector = kb._vectors.index.get(np.asarray(ids)).tobytes()

    def held(data):
        return [path.name for path in kb.path.rglob("*") if path.is_file()
                and data in path.read_bytes()]  # fmt: skip

    assert held(b"secret") and held(SECRET.encode()) and held(vector)
    kb.remove(["secret"])
    assert not held(b"secret") and not held(SECRET.encode())
    kb.gc(grace_seconds=0)
    assert not held(vector)
    assert kb.verify_forgotten("secret").nothing
    assert kb.verify().whole


def test_a_tier_is_looked_at_and_collected_too(make_kb, tmp_path, asked):
    kb = make_kb(**KEEPS)
    kb.add(documents())
    local = ChunkStore.open(tmp_path / "tier", kb.store.fingerprint, kb.store.layout, mode="rw")
    kb.store = ReadThrough(kb.store, local)
    engine_of(kb.model).forget()
    ask(kb, BEHIND)
    kb.remove(["secret"])
    asked.forget()
    ask(kb, BEHIND)
    assert asked.texts and not asked.secret
    assert "KV of its chunks, in tier/" in remains(kb) or (
        "KV that may have seen it, in tier/" in remains(kb)
    )
    kb.gc(grace_seconds=0)
    assert kb.verify_forgotten("secret").nothing


def test_a_log_that_a_reader_holds_is_listed(make_kb):
    kb = make_kb()
    kb.add(documents())
    reader = KnowledgeBase.open(kb.path, mode="r")
    with reader, reader._catalog._database.use() as connection:
        connection.execute("BEGIN")
        connection.execute("SELECT COUNT(*) FROM documents").fetchone()
        kb.remove(["secret"])
        assert "catalog.sqlite-wal, which others read still" in remains(kb)
        connection.execute("ROLLBACK")
    kb.gc(grace_seconds=0)
    assert kb.verify_forgotten("secret").nothing


def test_what_is_remembered_is_checked_as_all_rows_are(make_kb):
    kb = make_kb()
    kb.add(documents())
    kb.remove(["secret", "d1"])
    assert kb.verify().whole
    with kb._catalog._database.transaction() as connection:
        connection.execute("UPDATE forgotten SET removed = '2020-01-01T00:00:00+00:00'")
    with refused(DamagedCatalogError):
        kb.verify_forgotten("secret")
    report = kb.verify()
    assert not report.whole
    assert [(it.kind, it.count) for it in report.rows.faults] == [("removal", 2)]
    assert kb.verify(repair=True).whole
    with refused(KnowledgeBaseError):
        kb.verify_forgotten("secret")


def test_a_repair_does_not_forget_what_was_removed(make_kb):
    kb = make_kb()
    kb.add([*documents(30), *(Document(f"long{n}", f"{n} " * 4000) for n in range(3))])
    kb.remove(["secret"])
    kb.close()
    path = kb.path / "catalog.sqlite"
    data = bytearray(path.read_bytes())
    with KnowledgeBase.open(kb.path) as before:
        assert before.verify_forgotten("secret").removed
    data[-4096:] = bytes(4096)  # a page is lost
    path.write_bytes(data)
    assert mend_catalog(kb.path).unreadable == 1
    with KnowledgeBase.open(kb.path) as mended:
        assert mended.verify_forgotten("secret").removed


def test_the_command_lists_and_then_proves(make_kb, jaxrag, tmp_path):
    kb = make_kb(**KEEPS, secret=bytes(16))
    kb.add(documents())
    kb.close()
    look = ("kb", "verify", kb.path, "--forgotten", "secret")
    code, out, _ = jaxrag(*look)
    assert code == 3 and "1 row of the document\n" in out and "KV that saw it: d" in out
    with make_kb(secret=bytes(16)) as kb:
        kb.remove(["secret"])
        code, out, _ = jaxrag(*look)
        assert code == 3 and "1 KV of its chunks, in the store (in no answer)\n" not in out
        assert "2 KV of its chunks, in the store (in no answer)\n" in out
        kb.gc(grace_seconds=0)
    code, out, _ = jaxrag(*look)
    assert code == 0 and out.startswith("nothing is left of it here; removed 2")
    assert "not looked at: exports" in out
    code, out, _ = jaxrag(*look, "--json")
    found = json.loads(out)
    assert code == 0 and found["nothing"] and found["remains"] == [] and found["elsewhere"]
    code, out, err = jaxrag("kb", "verify", kb.path, "--forgotten", "secrets")
    assert (code, out, err.count("\n")) == (1, "", 1) and "'secrets'" in err
    code, _, err = jaxrag(*look, "--repair")
    assert code == 1 and "leave all other options out" in err


def test_the_upload_of_a_vector_store_is_listed(make_kb, jaxrag, tmp_path):
    tenant = tmp_path / "tenants" / "acme"
    (tenant / "files").mkdir(parents=True)
    (tenant / "files" / "file-1").write_text("text")
    kb = make_kb(tenant / "stores" / "vs_1")
    kb.add([document(0, "file-1#2"), document(0, "file-10"), document(1)])
    kb.remove(["file-1#2", "file-10", "d1"])
    kb.gc(grace_seconds=0)
    kb.close()
    code, out, _ = jaxrag("kb", "verify", kb.path, "--forgotten", "file-1#2")
    assert code == 3 and "the uploaded file" in out and out.count("\n") == 2
    (tenant / "files" / "file-1").unlink()
    for name in ("file-1#2", "file-10", "d1"):
        assert jaxrag("kb", "verify", kb.path, "--forgotten", name)[0] == 0


def test_a_stream_that_began_ends_with_an_error_and_a_task_asks_anew(make_kb):
    kb = make_kb(**KEEPS)
    kb.add(documents())
    options = {"kb": kb, "method": BEHIND, "k": 7, "max_new_tokens": 12}
    stream = generate("amber fjord", stream=True, **options)
    next(stream)
    without_a_model(kb)
    with refused(KnowledgeBaseError):
        list(stream)
    assert stream.result is None
    kb.add(documents())
    late = generate("amber fjord", stream=True, **options)
    kb.remove(["secret"])
    assert list(late)
    assert SECRET not in str(late.result.sources)

    kb.add(documents())
    settings = resolve(Ask(method=BEHIND, k=7, max_new_tokens=2), kb=kb)
    ready = prepare(settings, "amber fjord")
    assert SECRET in str(ready.sources)
    engine = engine_of(kb.model)
    there, go = threading.Event(), threading.Event()
    holding = threading.Thread(target=engine.call, args=(lambda _: there.set() or go.wait(300),))
    holding.start()
    assert there.wait(300)

    async def held():
        task = asyncio.create_task(answers.answer(ready))
        await asyncio.to_thread(without_a_model, kb)
        go.set()
        return await task

    found = asyncio.run(held())
    holding.join(60)
    assert found.sources
    assert SECRET not in str(found.sources)


# Many random changes under questions


def changed(kb, rng, texts, number):
    """Add, replace or remove some documents at random; returns the ids that left, and old texts."""
    kind = rng.choice(["add", "replace", "remove"], p=[0.3, 0.35, 0.35])
    some = [str(it) for it in rng.choice(list(texts), min(2, len(texts)), replace=False)]
    if kind == "add" or len(texts) < 4:
        name = f"n{number}"
        texts[name] = f"w{number}x {document(int(rng.integers(12))).text}"
        kb.add([Document(name, texts[name])])
        return {}
    left = {name: texts.pop(name) for name in some}
    if kind == "remove":
        kb.remove(list(left))
    else:
        for place, name in enumerate(left):
            texts[name] = f"w{number}x{place} {document(int(rng.integers(12))).text}"
        kb.add([Document(name, texts[name]) for name in left])
    return left


def check_forgotten(kb, asked, gone, rng):
    """No question names what left, and no answer may use what is left of it.

    ``gone`` are the first words of texts that left, by the ids of their documents.
    """
    asked.forget()
    method = (BEHIND, CACHED)[int(rng.integers(2))]
    generate(
        " ".join(rng.choice(WORDS, 3)), kb=kb, method=method, k=5, max_new_tokens=1,
        unanswerable="ask",
    )  # fmt: skip
    words = {word for words in gone.values() for word in words}
    named = {word for text in (*asked.texts, *asked.saw.values()) for word in text.split()}
    assert named
    assert not words & named
    present = {entry.id for entry in kb.documents()}
    for name in gone.keys() - present:
        assert not any(remains(kb, name).values())


def test_many_removals_and_replacements_under_questions(make_kb, asked):
    kb, rng = make_kb(**KEEPS), np.random.default_rng(5)
    texts = {f"n{-n}": f"w{-n}x {document(n).text}" for n in range(1, 7)}
    kb.add([Document(name, text) for name, text in texts.items()])
    gone = {}
    for number in range(8):
        for name, text in changed(kb, rng, texts, number).items():
            gone.setdefault(name, set()).add(text.split()[0])
        recent = dict(list(gone.items())[-3:])
        check_forgotten(kb, asked, recent, rng)
    kb.gc(grace_seconds=0)
    for name in gone.keys() - texts.keys():
        assert kb.verify_forgotten(name).nothing
    assert {entry.id for entry in kb.documents()} == texts.keys()
    assert gone.keys() - texts.keys()


@pytest.mark.parametrize("when", ["waits", "is answered"])
def test_a_question_that_waits_or_is_answered_is_asked_anew(make_kb, asked, monkeypatch, when):
    kb = make_kb(**KEEPS)
    kb.add(documents())
    left = []

    class Leaving(answers.Growing):
        """Lets the document leave as the first question is answered."""

        def on_progress(self, progress):
            if progress.outcome is not None and when == "is answered" and not left:
                left.append(self._question)
                without_a_model(kb)
            return super().on_progress(progress)

    monkeypatch.setattr(answers, "Growing", Leaving)
    questions = ["amber fjord", "cedar birch", "ember grove"]
    if when == "waits":
        settings = resolve(Ask(method=BEHIND, k=7, max_new_tokens=2), kb=kb)
        ready = [prepare(settings, text) for text in questions]
        assert all(SECRET in str(one.sources) for one in ready)
        without_a_model(kb)
        asked.forget()
        found = [result for done in answers.serve(ready, 2) for result in done.values()]
        assert not asked.secret
    else:
        found = generate(questions, kb=kb, method=BEHIND, k=7, max_new_tokens=2, batch_size=1)
        assert left and SECRET in str(left[0].sources)
    assert len(found) == 3
    for result in found:
        assert result.sources
        assert SECRET not in str(result.sources)
