"""Small knowledge bases of every kind over a model of one layer, and what is asked of them."""

import contextlib
import dataclasses
import random
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from jaxrag.kv.store.record import new_attempt
from jaxrag.library.embed import as_embedder
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.library.knowledge_base.writers import FOLDER as WRITERS
from jaxrag.library.retrieve import bm25, joining, lance, packing
from jaxrag.measure.zoo import llama
from jaxrag.models.export import export_hf
from jaxrag.models.model import Model, load_model
from jaxrag.models.spec import init_params
from jaxrag.models.text import byte_level
from jaxrag.reuse.methods import method_named
from jaxrag.serve.compatibility import gate_subject
from jaxrag.serve.generate import generate

CHUNK_TOKENS = 48
CACHE_TOKENS = 1024
WORDS = ("river", "harbour", "lantern", "quarry", "meadow", "copper", "violin", "glacier",
         "orchard", "canvas", "thistle", "marble", "pepper", "saddle", "anchor")  # fmt: skip
CONFIG = llama(
    vocab_size=400, num_layers=1, model_dim=24, mlp_dim=40, num_heads=4, num_kv_heads=2, head_dim=8,
    max_positions=1024, tie_embeddings=False, bos_id=0, eos_ids=(1,),
)  # fmt: skip


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


def as_document(number: int, version: int) -> dict[str, Any]:
    """A version of a document as ``KnowledgeBase.add`` takes it."""
    return {
        "id": document_id(number),
        "text": document_text(number, version),
        "title": f"Of {WORDS[number % len(WORDS)]}",
        "year": 2000 + number,
    }


def hash_embed(texts: Sequence[str]) -> np.ndarray:
    """A cheap embedding: counts of hashed words, float32 [N, 32]."""
    vectors = np.zeros((len(texts), 32), np.float32)
    for row, text in zip(vectors, texts, strict=True):
        for word in text.lower().split():
            row[zlib.crc32(word.encode()) % 32] += 1
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.maximum(norms, 1e-6)).astype(np.float32)


def make_model(directory: Path) -> None:
    """Write a Hugging Face directory of a random Llama and a tokenizer of the texts."""
    import jax

    texts = [document_text(n, 0) for n in range(24)]
    tokenizer = byte_level.train(texts, CONFIG.vocab_size, ["<|begin|>", "<|end|>"])
    config = dataclasses.replace(CONFIG, vocab_size=tokenizer.get_vocab_size())
    export_hf(directory, init_params(config, jax.random.key(0)), config)
    byte_level.save(tokenizer, directory, {"bos_token": "<|begin|>", "eos_token": "<|end|>"})


def load(directory: Path) -> Model:
    """The model of ``make_model``."""
    return load_model(directory, cache_tokens=CACHE_TOKENS)


RECOMPUTING = ("epic", "fusionrag")  # methods that a gate chooses a ratio for


@dataclasses.dataclass(frozen=True)
class Base:
    """One kind of knowledge base.

    Attributes:
      options: of ``KnowledgeBase.open``, beside those that all kinds have.
      vectors: whether its chunks have vectors.
      methods: that answer from it; the last one is asked with reuse.
      decode: the decode rule of its last question; None: the method's own.
      unfinished: whether its last changes are in the write-ahead log alone, as a kill leaves it.
      large: whether it is made as one of very many chunks is: words are packed, blocks of them
        joined, and vectors indexed.
    """

    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    vectors: bool = True
    methods: tuple[str, ...] = ("turborag", "epic")
    decode: str | None = None
    unfinished: bool = False
    large: bool = False

    def open(
        self, folder: Path, model: Model | None, mode: Any = None, **changes: Any
    ) -> KnowledgeBase:
        """Open it, or make it."""
        options = {"chunk_tokens": CHUNK_TOKENS, "overlap": 4, "encoders": ["isolated"]}
        options["stored"] = "native"  # for the comparison with a fresh encoding
        if self.vectors:
            embedder = as_embedder(hash_embed, name="hashed words")
            options |= {"embedder": embedder, "index": "exact"}
        options |= {**self.options, **changes}
        return KnowledgeBase.open(folder, model, mode=mode, **options)


BASES: dict[str, Base] = {
    "native": Base(),
    "int8": Base({"stored": "int8"}),
    "int4": Base({"stored": "int4"}),
    "int4-half": Base({"stored": "int4-half"}),
    "neighbours": Base(
        {"encoders": ["after_prefix", "neighbours"], "neighbours": 2},
        methods=("full_reuse", "fusionrag"),
    ),
    "attention index": Base(
        {"attention_index": "lists:exact_below=24,min_queries=24,reach=256,clusters=4"},
        vectors=False,
        methods=("turborag", "turborag"),
        decode="retrieval:k=4,sink=2,recent=4",
    ),
    "lance": Base({"index": "lance"}),
    "large": Base({"index": "lance"}, large=True),
    "limited": Base({"max_bytes": 1 << 24}, vectors=False),
    "sealed": Base({"secret": bytes(range(32))}),
    "log": Base(unfinished=True),
}


@contextlib.contextmanager
def few_are_many() -> Iterator[None]:
    """Here, this process keeps a few chunks as it keeps very many."""
    changed = {
        bm25: {"_MANY_CHUNKS": 10, "_AT_ONCE": 3},
        packing: {"_LOOSE": 3, "_PACKED_AT_ONCE": 4, "_CLEARED_AT_ONCE": 40},
        joining: {"_TIERS": (8, 32), "_TERMS": 9, "_DROPPED": 11},
        lance: {"_INDEX_FROM": 20, "_OPTIMIZE_EVERY": 3},
    }
    with contextlib.ExitStack() as stack:
        for module, names in changed.items():
            stack.enter_context(mock.patch.multiple(module, **names))
        yield


def fill(base: Base, folder: Path, model: Model, documents: int = 8) -> None:
    """Make a knowledge base of a kind, with documents that came, changed and left."""
    if base.large:
        with few_are_many():
            fill(dataclasses.replace(base, large=False), folder, model, documents)
        return
    kb = base.open(folder, model)
    kb.add([as_document(number, 0) for number in range(documents)])
    for method in base.methods:
        ask_once(kb, document_text(0, 0)[:30], method)
    if base.methods[-1] in RECOMPUTING:
        kb.set_gate(base.methods[-1], gate_of(kb, base.methods[-1], 0.25))
    if base.unfinished:
        kb._acknowledged = contextlib.nullcontext  # killed before that
    kb.add([as_document(1, 1), as_document(documents, 0)])
    kb.remove([document_id(2)])
    (folder / WRITERS).mkdir(exist_ok=True)
    (folder / WRITERS / new_attempt()).write_bytes(bytes(40))  # of a writer that died
    if base.unfinished:  # what a kill leaves: the files as they are, before anybody closes them
        copy = folder.with_name(f"{folder.name}-copy")
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*-shm"))
        kb.close()
        shutil.rmtree(folder)
        copy.rename(folder)
    else:
        kb.close()


def gate_of(kb: KnowledgeBase, method: str, ratio: float) -> dict[str, Any]:
    """What a gate remembers, as far as a question reads it."""
    subject = gate_subject(method_named(method), kb.template)
    return {"ratio": ratio, "questions": 7, "subject": subject}


def ask_once(kb: KnowledgeBase, question: str, method: str, decode: str | None = None) -> Any:
    """An answer of a few tokens."""
    return generate(question, kb=kb, k=3, method=method, decode=decode, max_new_tokens=4)


Told = tuple[str, ...]
Answers = tuple[list[Any], Told]


def ask(kb: KnowledgeBase, base: Base, questions: Sequence[str]) -> Answers:
    """Three questions, by words, by all that there is, and with reuse; what was answered, and told.

    The answers are all that can be seen: the documents, the hits with their texts and ids, the
    tokens and the sources.
    """
    words, every, reuse = questions
    seen: list[Any] = [[dataclasses.astuple(entry) for entry in kb.documents()]]
    told: list[str] = []
    hits = kb.search(words, 3, mode="bm25", where={"year": {"$gte": 2000}})
    told += hits.notes
    seen.append([(*plain(hit), hit.ids.tolist()) for hit in hits])
    asked = ((every, base.methods[0], None), (reuse, base.methods[1], base.decode))
    for question, method, decode in asked:
        answer = ask_once(kb, question, method, decode)
        told += answer.notes
        seen.append((answer.token_ids, answer.text, answer.method))
        seen.append([dataclasses.astuple(source) for source in answer.sources])
    return seen, tuple(told)


def plain(hit: Any) -> tuple[Any, ...]:
    """A hit without its ids, as a tuple."""
    fields = [f.name for f in dataclasses.fields(hit) if f.name != "ids"]
    return tuple(getattr(hit, name) for name in fields)


def forget(model: Model) -> None:
    """Let the model forget what it holds of any knowledge base; its programs stay."""
    model.engine = None
