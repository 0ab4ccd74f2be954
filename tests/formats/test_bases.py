"""Knowledge bases that were made before: they open, answer, are checked, and change.

Every archive of KINDS beside this file is the folder of one knowledge base of commit 47e959d6, made
by ``make_bases.py``, which wrote ``answers.json`` as well: all that was seen of each of them then.
They are made anew only where the format becomes another. ``version-0.1.tar.gz`` is a base of
version 0.1.0, commit e23284c, which is refused.
"""

import contextlib
import dataclasses
import io
import json
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrag import Document, KnowledgeBase, generate, load_model
from jaxrag.base.errors import KnowledgeBaseError
from jaxrag.cli import main
from jaxrag.kv.store.sqlite import connect_checked
from jaxrag.library.knowledge_base.location import CATALOG
from jaxrag.library.knowledge_base.search import OTHER_TERMS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODEL = ROOT / "checkpoints" / "synthetic-0.8m" / "dual"
ANSWERS = HERE / "answers.json"
MOST_BYTES = 2 << 20  # of all archives together
OLD = "version-0.1"

SECRET = bytes(range(32))
FIRST = ("kora-felell.md", "mela-forow.md", "hinus-kolell.txt")
LATER = "liva-bimer.txt"
REMOVED = "mela-forow.md"
QUESTIONS = (
    "Which animal does Kora Felell keep?",
    "What is the job of Hinus Kolell?",
    "Where does Liva Bimer live?",
)


def hash_embed(texts: Sequence[str]) -> np.ndarray:
    """A cheap embedding: counts of hashed words, float32 [N, 32]."""
    vectors = np.zeros((len(texts), 32), np.float32)
    for row, text in zip(vectors, texts, strict=True):
        for word in text.lower().split():
            row[zlib.crc32(word.encode()) % 32] += 1
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.maximum(norms, 1e-6)).astype(np.float32)


# A knowledge base remembers an embedder by these.
hash_embed.__module__, hash_embed.__qualname__ = "formats", "hash_embed"


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of knowledge base.

    Attributes:
      options: of ``KnowledgeBase.open``, when it was made, beside those that all kinds have.
      needed: those of them that every opening has to name.
      asked: methods, each with a decode rule or None.
    """

    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    needed: tuple[str, ...] = ()
    asked: tuple[tuple[str, str | None], ...] = (("turborag", None), ("epic", None))

    @property
    def made(self) -> dict[str, Any]:
        """All options that it was made with."""
        return {"chunk_by": "sentence", "chunk_tokens": 20, "overlap": 0, **self.options}

    @property
    def opened(self) -> dict[str, Any]:
        """Those that an opening has to name."""
        return {name: self.options[name] for name in self.needed}


KINDS = {
    "lance": Kind({"embedder": hash_embed, "index": "lance", "stored": "int8"}, ("embedder",)),
    "int8": Kind({"stored": "int8"}),
    "packed": Kind({"stored": "int8"}),  # its words are packed, as those of many chunks
    "sealed": Kind({"secret": SECRET, "stored": "int8"}, ("secret",)),
    "salted": Kind({"salt": "tenant", "stored": "int8"}),
    "limited": Kind({"max_bytes": 1 << 24, "stored": "int8"}),
    "neighbours": Kind(
        {
            "encoders": ["after_prefix", "neighbours"],
            "neighbours": 2,
            "stored": "int8",
            "embedder": hash_embed,
            "index": "exact",
        },
        ("embedder",),
        (("full_reuse", None), ("fusionrag", None), ("cacheblend", None)),
    ),
    "attention-index": Kind(
        {
            "chunk_by": "tokens",
            "chunk_tokens": 48,
            "attention_index": "lists:exact_below=16,min_queries=16,reach=256,clusters=4,knn=8,"
            "k=4,most_scanned=1,target_recall=0.3",
        },
        asked=(("turborag", "retrieval:k=4,sink=2,recent=4"), ("turborag", None)),
    ),
    "log": Kind({"stored": "int8"}),  # its last change is in the write-ahead log alone
}


def document(name: str) -> Document:
    """One of the village, with metadata."""
    text = (ROOT / "examples" / "village" / name).read_text(encoding="utf-8")
    return Document(name, text, title=f"Of {name}", metadata={"letters": len(name)})


def archive(name: str) -> Path:
    return HERE / f"{name}.tar.gz"


def unpack(name: str, folder: Path) -> Path:
    """The folder of a knowledge base, unpacked in another."""
    with tarfile.open(archive(name)) as packed:
        packed.extractall(folder, filter="data")
    return folder / name


def told(answer: Any) -> dict[str, Any]:
    """What an answer says, without what depends on the machine."""
    return {
        "text": answer.text,
        "token_ids": [int(token) for token in answer.token_ids],
        "finish_reason": answer.finish_reason,
        "method": answer.method,
        "counts": answer.counts,
        "flops": answer.flops,
        "indexes": answer.indexes,
        "notes": answer.notes,
        "sources": [
            [s.document_id, s.chunk_index, s.start, s.end, rounded(s.score), s.text]
            for s in answer.sources
        ],
    }


def rounded(score: float | None) -> float | None:
    return None if score is None else round(score, 4)


def told_of_hits(hits: Any) -> list[list[Any]]:
    return [
        [hit.document_id, hit.chunk_index, hit.title, hit.start, hit.end, hit.section,
         dict(hit.metadata), rounded(hit.score), hit.text, hit.ids.tolist()]
        for hit in hits
    ]  # fmt: skip


GIVEN: dict[str, Any] = {"k": 2, "max_new_tokens": 6, "unanswerable": "ask"}


def asked(kb: KnowledgeBase, kind: Kind) -> dict[str, Any]:
    """All that is seen of a knowledge base from its documents to its answers."""
    modes = ("bm25", "vector", "hybrid") if "embedder" in kind.options else ("bm25",)
    return {
        "documents": [[entry.id, entry.title, entry.num_chunks] for entry in kb.documents()],
        "counts": kb.counts(),
        "settings": [list(kb.encoders), kb.template.name, kb.index],
        "hits": {
            mode: told_of_hits(kb.search(QUESTIONS[0], 3, mode=mode, where={"letters": {"$gt": 1}}))
            for mode in modes
        },
        "answers": [
            told(generate(question, kb=kb, method=method, decode=decode, **GIVEN))
            for question in QUESTIONS
            for method, decode in kind.asked
        ],
    }


def command(*arguments: Any) -> tuple[int, Any]:
    """The exit code of the program and the JSON that it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main([*map(str, arguments), "--json"])
    return code, json.loads(out.getvalue())


def checked(folder: Path, secret: Path | None) -> dict[str, Any]:
    """What ``jaxrag kb`` says of it."""
    given = [] if secret is None else ["--secret-file", secret]
    code, report = command("kb", "verify", folder, *given)
    rows = report["rows"]
    _, listed = command("kb", "list", folder, *given)
    return {
        "code": code,
        "ok": report["ok"],
        "damaged": report["damaged"],
        "unindexed": report["unindexed"],
        "unsealed": report["unsealed"],
        "vectors_lost": report["vectors_lost"],
        "rows": [rows["documents"], rows["faults"], rows["lost"]],
        "listed": [[entry["id"], entry["num_chunks"]] for entry in listed["documents"]],
    }


def counted(report: Any) -> dict[str, Any]:
    """What became of documents, without the time that it took."""
    names = ("documents", "replaced", "unchanged", "chunks", "tokens", "encoded", "reused")
    counts = {name: getattr(report, name) for name in names}
    behind = report.neighbours
    if behind is not None:
        names = ("chunks", "searched", "encoded", "reused", "unchanged")
        counts["neighbours"] = {name: getattr(behind, name) for name in names}
    return counts


def seen(name: str, folder: Path, model: Any) -> dict[str, Any]:
    """All that is seen of a kind in a folder, while it is opened, changed and opened again."""
    kind, found = KINDS[name], {}
    secret = None
    if "secret" in kind.options:
        secret = folder.with_name("secret")
        secret.write_bytes(SECRET)
    with KnowledgeBase.open(folder, model, **kind.opened, mode="r") as kb:
        found["as it was"] = asked(kb, kind)
    found["checked"] = checked(folder, secret)
    with KnowledgeBase.open(folder, model, **kind.opened) as kb:
        report = kb.verify()
        found["verified"] = [report.whole, report.ok, report.rows.unchecked]
        found["added"] = counted(kb.add([document(it) for it in (*FIRST, LATER)]))
        removed = kb.remove([REMOVED])
        found["removed"] = [removed.documents, removed.chunks, list(removed.unknown)]
        found["changed"] = asked(kb, kind)
    with KnowledgeBase.open(folder, model, **kind.made) as kb:
        found["opened again"] = asked(kb, kind)
        kb.gc(grace_seconds=0)
    found["checked again"] = checked(folder, secret)
    return json.loads(json.dumps(found))


@pytest.fixture(scope="module")
def model():
    return load_model(MODEL)


@pytest.mark.parametrize("name", KINDS)
def test_a_knowledge_base_is_as_it_was(name, model, tmp_path):
    wanted = json.loads(ANSWERS.read_text(encoding="utf-8"))[name]
    found = seen(name, unpack(name, tmp_path), model)
    for answer in found["as it was"]["answers"]:  # the terms of that time are another version
        answer["notes"].remove(OTHER_TERMS)
    if "neighbours" in wanted["added"]:  # over an index that was made anew all are looked for again
        behind = found["added"]["neighbours"]
        wanted["added"]["neighbours"]["searched"] = behind["chunks"]
    for step in wanted:
        assert found[step] == wanted[step], step


@pytest.mark.parametrize("form", [None, 3, 5])
def test_a_base_of_another_version_is_refused_in_one_line_and_left_as_it_is(
    form, model, tmp_path, capsys
):
    """By whatever opens it; ``form`` is written over its format."""
    folder = unpack(OLD, tmp_path).with_name("int8")  # as it was called
    catalog = folder / CATALOG
    if form is not None:
        with contextlib.closing(connect_checked(catalog, True, 1.0)) as connection:
            connection.execute(f"PRAGMA user_version = {form}")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    before = files_of(folder)
    has = "4 of version 0.1" if form is None else form
    said = (
        f"{catalog} has format {has}, this version reads formats 4 and 6 of version 0.2; ingest "
        "the documents again into a new folder"
    )
    for options in ({"mode": "r"}, {}, {"embedder": hash_embed}, {"accept_older": True}):
        with pytest.raises(KnowledgeBaseError) as refused:
            KnowledgeBase.open(folder, model, **options)
        assert str(refused.value) == said
    document = ROOT / "examples" / "village" / LATER
    for words in (
        ["kb", "list", folder],
        ["kb", "verify", folder, "--repair"],
        ["ingest", document, "--kb", folder, "--model", MODEL],
        ["ask", QUESTIONS[0], "--kb", folder, "--model", MODEL],
    ):
        assert main([*map(str, words)]) == 1
        assert capsys.readouterr().err.splitlines()[-1] == f"jaxrag: error: {said}"
    assert files_of(folder) == before


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(it.relative_to(folder)): it.read_bytes() for it in folder.rglob("*") if it.is_file()
    }


def test_every_archive_is_asked_and_all_are_small():
    packed = {path.name.removesuffix(".tar.gz") for path in HERE.glob("*.tar.gz")} - {OLD}
    assert packed == KINDS.keys() == json.loads(ANSWERS.read_text(encoding="utf-8")).keys()
    assert sum(archive(name).stat().st_size for name in KINDS) < MOST_BYTES


def test_what_answers_say_is_what_documents_say():
    """The answers that were kept make sense, and nothing was encoded for them."""
    wanted = json.loads(ANSWERS.read_text(encoding="utf-8"))
    for name, kind in KINDS.items():
        before = wanted[name]["as it was"]["answers"]
        assert before[0]["text"] == "falcon", name
        after = wanted[name]["opened again"]["answers"]
        assert after[2 * len(kind.asked)]["text"] == "Germouth", name
        assert not any(answer["counts"]["encoded"] for answer in before + after)
        assert wanted[name]["checked"]["code"] == wanted[name]["checked again"]["code"] == 0
        assert wanted[name]["added"]["unchanged"] == len(FIRST)
