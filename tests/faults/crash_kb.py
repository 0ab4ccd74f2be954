"""A knowledge base at work: small documents that are added, changed and removed."""

import dataclasses
import itertools
import random
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from crash_log import FRESH, Change, Log, require

from jaxrag.embed import as_embedder
from jaxrag.encode import chunk_key, encode_chunks
from jaxrag.knowledge_base import KnowledgeBase
from jaxrag.models.model import Model, load_model
from jaxrag.retrieve.base import VectorIndex
from jaxrag.types import HostArray

DOCUMENTS = 24  # ids that are added, changed and removed in turn
BATCH = 3  # documents of one change, at most
CHUNK_TOKENS = 48
WARM_COUNTS = (1, 3, 7)  # chunks that make rows of every width that a change can need
TOLERANCE = 1e-4  # of fp32 KV, between a packed and a single encoding
WORDS = (
    "river",
    "harbour",
    "lantern",
    "quarry",
    "meadow",
    "copper",
    "violin",
    "glacier",
    "orchard",
)


def document_text(number: int, version: int) -> str:
    """The text of one version of a document, one to a few chunks long, with a word of its own."""
    rng = random.Random(f"{number} {version}")
    sentences = []
    for _ in range(rng.randint(1, 8)):
        words = rng.choices(WORDS, k=rng.randint(4, 9))
        sentences.append(f"The {' '.join(words)} is {own_word(number, version)}.")
    return " ".join(sentences)


def own_word(number: int, version: int) -> str:
    """A word that only this version of this document holds."""
    return f"w{number}x{version}q"


def document_id(number: int) -> str:
    """The id of a document."""
    return f"doc-{number}"


def hash_embed(texts: Sequence[str]) -> HostArray:
    """A cheap embedding: counts of hashed words, float32 [N, 32]."""
    vectors = np.zeros((len(texts), 32), np.float32)
    for row, text in zip(vectors, texts, strict=True):
        for word in text.lower().split():
            row[zlib.crc32(word.encode()) % 32] += 1
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.maximum(norms, 1e-6)).astype(np.float32)


def open_kb(folder: Path, model: Model | None, mode: Literal["r", "rw"]) -> KnowledgeBase:
    """The knowledge base of the experiment."""
    return KnowledgeBase.open(
        folder,
        model=model,
        chunk_tokens=CHUNK_TOKENS,
        overlap=4,
        encoders=["isolated"],
        embedder=as_embedder(hash_embed, name="hashed words"),
        index="exact",
        mode=mode,
    )


def index_of(kb: KnowledgeBase) -> VectorIndex:
    """Its vectors."""
    assert kb._vectors is not None
    return kb._vectors.index


def load(work: Path) -> Model:
    """The model, with the programs that the documents need compiled or read from the cache."""
    model = load_model(work / "model", cache_tokens=2048)
    nothing = np.zeros(0, np.int32)
    for count in WARM_COUNTS:
        chunks = [np.full(CHUNK_TOKENS, 3, np.int32)] * count
        for _ in encode_chunks(model, "isolated", nothing, chunks):
            pass
    return model


def work_on_kb(work: Path, log_path: Path, number: int, state: dict[int, int]) -> None:
    """Change documents until killed. ``state``: the version of each document that stands."""
    rng = random.Random(number)
    log = Log(log_path)
    model = load(work)
    versions = dict(state)
    with open_kb(work / "kb", model, "rw") as kb:
        log.note("ready")
        for version in itertools.count(number * FRESH):
            chosen = rng.sample(range(DOCUMENTS), rng.randint(1, BATCH))
            kind = rng.choices(["write", "same", "remove", "gc"], [10, 1, 2, 1])[0]
            standing = [document for document in chosen if document in versions]
            if kind == "write":
                versions.update(dict.fromkeys(chosen, version))
                log.note("begin", change=[[document, version] for document in chosen])
                kb.add([as_document(document, version) for document in chosen])
            elif kind == "same":
                log.note("begin", change=[[document, versions[document]] for document in standing])
                kb.add([as_document(document, versions[document]) for document in standing])
            elif kind == "remove":
                log.note("begin", change=[[document, None] for document in standing])
                kb.remove([document_id(document) for document in standing])
                for document in standing:
                    del versions[document]
            else:
                log.note("begin", change=[])
                kb.gc(grace_seconds=0.0)
            log.note("done", what=kind)


def as_document(number: int, version: int) -> dict[str, str]:
    """A version of a document as ``KnowledgeBase.add`` takes it."""
    return {"id": document_id(number), "text": document_text(number, version)}


class KBExperiment:
    """A knowledge base, what must stand in it, and how that is checked."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.state: dict[int, int] = {}
        self._replaced: dict[int, int] = {}  # document -> a version that must not be found
        make_model(work / "model")
        self._model = load(work)
        self._fresh: dict[str, HostArray] = {}  # key -> KV encoded by itself
        with open_kb(work / "kb", self._model, "rw"):
            pass

    target = staticmethod(work_on_kb)

    def check(self, change: Change) -> Counter[str]:
        """Compare with the log; ``change`` was under way. Raises WrongError."""
        counts: Counter[str] = Counter()
        with open_kb(self.work / "kb", self._model, "r") as kb:
            prefix = kb.template.prefix_ids(self._model.text_tokenizer())
            found: dict[int, int] = {}
            chunk_ids = set()
            for entry in kb.documents():
                document = int(entry.id.removeprefix("doc-"))
                version, chunks = self._read(kb, document)
                found[document] = version
                counts["documents"] += 1
                ids = [
                    kb.template.chunk_ids(self._model.text_tokenizer(), chunk.ids, entry.title)
                    for chunk in chunks
                ]
                keys = kb._catalog.keys(entry.id)["isolated"]
                expected = [
                    chunk_key(kb.store.fingerprint, self._model, "isolated", prefix, tokens)
                    for tokens in ids
                ]
                require(list(keys) == expected, f"{entry.id}: keys are not those of its text")
                for key, tokens in zip(keys, ids, strict=True):
                    self._check_kv(kb.store.get(key), key, tokens)
                    counts["chunks"] += 1
            self._settle(found, change, counts)
            chunk_ids = set(kb._catalog.chunk_ids().tolist())
            vectors = set(index_of(kb).ids().tolist())
            require(chunk_ids <= vectors, f"{len(chunk_ids - vectors)} chunks have no vector")
            counts["stale vectors"] = len(vectors - chunk_ids)
            self._check_search(kb)
            swept = kb.store.verify()
            require(not swept.corrupt, f"corrupt: {swept.corrupt}")
            require(not swept.missing, f"committed without bytes: {swept.missing}")
        return counts

    def finish(self) -> dict[str, Any]:
        """Open for writing, collect, and count what is left beside what is needed."""
        with open_kb(self.work / "kb", self._model, "rw") as kb:
            kb.gc(grace_seconds=0.0)
            chunk_ids = set(kb._catalog.chunk_ids().tolist())
            vectors = set(index_of(kb).ids().tolist())
            require(chunk_ids == vectors, "vectors differ from the catalog after gc")
            stored = set(kb.store.keys())
            wanted = {
                key for entry in kb.documents() for key in kb._catalog.keys(entry.id)["isolated"]
            }
            require(wanted <= stored, "gc removed the KV of a document")
            files = [p for p in (self.work / "kb" / "kv").rglob("*") if p.is_file()]
            return {
                "documents": len(kb.documents()),
                "chunks": len(chunk_ids),
                "stored chunks": len(stored),
                "files after gc": len(files),
                "lock files after gc": sum(p.name.endswith(".__lock") for p in files),
            }

    def _read(self, kb: KnowledgeBase, document: int) -> tuple[int, Any]:
        """The version of a document that stands, and its chunks, which must be all of its text."""
        chunks = kb._catalog.chunks(document_id(document))
        words = re.findall(rf"w{document}x(\d+)q", chunks[0].text)
        require(bool(words), f"document {document} holds a text of another document")
        version = int(words[0])
        text = document_text(document, version)
        require(all(text[c.start : c.end] == c.text for c in chunks), f"{document}: text differs")
        covered = 0
        for chunk in chunks:
            require(not text[covered : chunk.start].strip(), f"{document}: text is missing")
            covered = chunk.end
        require(not text[covered:].strip(), f"document {document}: its end is missing")
        return version, chunks

    def _settle(self, found: dict[int, int], change: Change, counts: Counter[str]) -> None:
        """Hold what was found against what was acknowledged and what was under way."""
        before, after = dict(self.state), dict(self.state)
        for document, version in change:
            if version is None:
                after.pop(document, None)
            else:
                after[document] = version
        if found == after:
            counts["change stands"] += bool(change)
        else:
            require(found == before, f"stands {found}, expected {before} or {after}")
            counts["change does not stand"] += 1
        for document, version in change:
            other = before.get(document) if found == after else version
            if other is not None and other != found.get(document):
                self._replaced[document] = other
        self.state = found

    def _check_kv(self, kv: HostArray, key: str, ids: HostArray) -> None:
        if key not in self._fresh:
            nothing = ids[:0]
            for _, fresh in encode_chunks(self._model, "isolated", nothing, [ids]):
                self._fresh[key] = np.array(fresh)
        expected = self._fresh[key]
        require(kv.shape == expected.shape, f"chunk {key}: shape {kv.shape}")
        error = float(np.abs(kv - expected).max())
        require(error <= TOLERANCE, f"chunk {key}: differs from a fresh encoding by {error}")

    def _check_search(self, kb: KnowledgeBase) -> None:
        for document, version in self.state.items():
            word = own_word(document, version)
            hits = kb.search(word, 3, mode="bm25")
            require(bool(hits), f"{word} stands and is not found")
            require(all(word in hit.text for hit in hits), f"{word}: a text without it is found")
            hits = kb.search(word, 3, mode="vector")
            require(bool(hits), f"{word}: no vectors are found")
        for document, version in self._replaced.items():
            word = own_word(document, version)
            hits = kb.search(word, 3, mode="bm25")
            require(not hits, f"{word} was replaced and is still found")


def make_model(directory: Path) -> None:
    """Write a Hugging Face directory of a tiny random Llama and a tokenizer of the texts."""
    import jax

    from jaxrag.bench.ttft import LLAMA_100M
    from jaxrag.config import RopeConfig
    from jaxrag.models.export import export_hf
    from jaxrag.models.spec import init_params
    from jaxrag.text import byte_level

    texts = [document_text(n, 0) for n in range(DOCUMENTS)]
    tokenizer = byte_level.train(texts, 400, ["<|begin|>", "<|end|>"])
    config = dataclasses.replace(
        LLAMA_100M,
        vocab_size=tokenizer.get_vocab_size(),
        num_layers=2,
        model_dim=24,
        mlp_dim=40,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rope=RopeConfig(theta=10_000.0, rotary_dim=8, interleaved=False, scaling=None),
        max_positions=1024,
        bos_id=0,
        eos_ids=(1,),
    )
    export_hf(directory, init_params(config, jax.random.key(0)), config)
    settings = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    byte_level.save(tokenizer, directory, settings)
