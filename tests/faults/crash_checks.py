"""What must hold of a knowledge base whose writers were killed."""

import contextlib
import hashlib
import json
import logging
import random
import re
import shutil
import urllib.request
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bases import as_document, ask_once, document_id, document_text, few_are_many, own_word
from crash_log import Change, WrongError, replay, require
from crash_work import KINDS, Job, where

from jaxrag.base.errors import StoreError
from jaxrag.kv.store.dropping import dropped_tokens
from jaxrag.kv.store.ledger import StoredChunk, Sums
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.library.knowledge_base.neighbours import recorded_chunks
from jaxrag.models.model import Model

TOLERANCE = 1e-4  # of fp32 KV, between a packed and a single encoding
ROUNDED = {  # formats, and how far an element may be, as a share of the largest one
    "int8": 0.02,
    **dict.fromkeys(("int4", "int4-half"), 0.13),
}
FIRST = 8  # documents that stand before the first round
QUESTIONS = 2
NEWEST = "SELECT first, last FROM reservations ORDER BY first DESC LIMIT 1"
DEEP = 60  # chunks that are ranked where rankings are compared


class Experiment:
    """A knowledge base of one kind, what must stand in it, and how that is checked.

    Beside it lies a second one, to which the same changes are made and nothing happens.
    """

    def __init__(
        self, name: str, folder: Path, model: Model, path: Path, store: str | None
    ) -> None:
        """Make one in ``folder``, of a few documents; ``path`` is the model's directory."""
        self.name = name
        self.folder = folder
        self.kind = KINDS[name]
        self._model, self._path, self._store = model, path, store
        self.state: dict[int, int] = dict.fromkeys(range(FIRST), 0)
        self._replaced: dict[int, int] = {}  # document -> a version that must not be found
        self._fresh: dict[str, np.ndarray] = {}  # key -> KV encoded by itself
        self._ratio: float | None = None
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        large = few_are_many() if self.kind.base.large else contextlib.nullcontext()
        with large, self._open("rw") as kb:
            kb.add([as_document(*it) for it in self.state.items()])
        self._calm = self.kind.base.open(folder / "calm", model)

    def close(self) -> None:
        """Close the undisturbed one."""
        self._calm.close()

    def jobs(self, number: int, seed: int) -> list[Job]:
        """What the processes of a round are to do."""
        count = len(self.kind.steps)
        return [
            Job(
                kind=self.name,
                part=part,
                number=number,
                seed=f"{seed} {number} {part}",
                folder=self.folder,
                model=self._path,
                store=self._store,
                log=self.folder / f"log-{number}-{part}",
                state={d: v for d, v in self.state.items() if d % count == part},
            )
            for part in range(count)
        ]

    def check(self, told: Sequence[Sequence[Mapping[str, Any]]], seed: str) -> Counter[str]:
        """Compare with the logs of all processes. Raises WrongError."""
        counts: Counter[str] = Counter()
        changes = [change for events in told for change in replay(events, self.state)]
        with self._open("r") as kb:
            self._settle(self._standing(kb, counts), changes, counts)
            self._check_sums(kb)
        self._keep_calm()
        with self._open("rw") as kb:
            self._finish(kb, told, seed, counts)
            self._check_chunks(kb, counts)
            self._check_sums(kb)
            self._check_words(kb)
            self._check_answers(kb, seed, counts)
            kb.gc(grace_seconds=0.0)
            self._check_swept(kb, counts)
        return counts

    def _open(self, mode: Any) -> KnowledgeBase:
        return self.kind.base.open(self.folder / "kb", self._model, mode, **where(self._store))

    def _standing(self, kb: KnowledgeBase, counts: Counter[str]) -> dict[int, int]:
        """The version of each document that stands, whose chunks must be all of its text."""
        found: dict[int, int] = {}
        for entry in kb.documents():
            document = int(entry.id.removeprefix("doc-"))
            chunks = kb._catalog.chunks(entry.id)
            words = re.findall(rf"w{document}x(\d+)q", chunks[0].text)
            require(bool(words), f"{entry.id} holds a text of another document")
            found[document] = version = int(words[0])
            text, covered = document_text(document, version), 0
            tokenizer = self._model.text_tokenizer()
            for chunk in chunks:
                whole = text[chunk.start : chunk.end] == chunk.text
                require(whole, f"{entry.id}: the text of a chunk differs")
                require(not text[covered : chunk.start].strip(), f"{entry.id}: text is missing")
                same = tokenizer.decode(chunk.ids).strip() == chunk.text.strip()
                require(same, f"{entry.id}: token ids are not those of the text")
                covered = chunk.end
            require(not text[covered:].strip(), f"{entry.id}: its end is missing")
            counts["documents"] += 1
        return found

    def _settle(self, found: dict[int, int], changes: Change, counts: Counter[str]) -> None:
        """Hold what was found against what was acknowledged and what was under way."""
        under_way = dict(changes)
        for document in {*found, *self.state, *under_way}:
            before = self.state.get(document)
            after = under_way.get(document, before)
            stands = found.get(document)
            require(
                stands in (before, after),
                f"{document_id(document)} stands as {stands}, expected {before} or {after}",
            )
            if before != after:
                counts["changes that stand" if stands == after else "changes undone"] += 1
                gone = before if stands == after else after
                if gone is not None:
                    self._replaced[document] = gone
        self.state = found

    def _keep_calm(self) -> None:
        """Make the changes to the undisturbed one."""
        there = {}
        for entry in self._calm.documents():
            document = int(entry.id.removeprefix("doc-"))
            text = self._calm._catalog.chunks(entry.id)[0].text
            there[document] = int(re.findall(rf"w{document}x(\d+)q", text)[0])
        self._calm.remove([document_id(it) for it in there if it not in self.state])
        changed = {it: v for it, v in self.state.items() if there.get(it) != v}
        if changed:
            self._calm.add([as_document(*it) for it in changed.items()])

    def _finish(
        self,
        kb: KnowledgeBase,
        told: Sequence[Sequence[Mapping[str, Any]]],
        seed: str,
        counts: Counter[str],
    ) -> None:
        """What whoever is called after a crash has to do, and what must hold before."""
        if self.name == "neighbours":
            kb.refresh()
        elif self.name == "embed":
            lost = kb._catalog.chunk_ids().size - kb._vectors.compared(kb._catalog).lost.size
            if self.state and lost != kb._catalog.chunk_ids().size:
                note = kb.search(document_text(0, 0), 1).notes
                require(bool(note), "vectors are lost and no search says so")
            counts["vectors made again"] += kb.embed()
        elif self.name == "repair":
            self._check_answers(kb, seed, counts)  # from what is damaged
            report = kb.verify(repair=True)
            require(not report.damaged, f"damaged after a repair: {report.damaged}")
            counts["repaired"] += report.repaired
        elif self.name == "export":
            for event in (event for events in told for event in events if "out" in event):
                self._check_export(kb, event, counts)
        elif self.name == "gate":
            self._check_gate(kb, told, counts)

    def _check_export(
        self, kb: KnowledgeBase, event: Mapping[str, Any], counts: Counter[str]
    ) -> None:
        """An export that was cut short goes on; then all is there and as its manifest says."""
        out = Path(event["out"])
        manifest = out / "manifest.json"
        complete = manifest.is_file() and json.loads(manifest.read_text())["complete"]
        counts["exports complete" if complete else "exports cut short"] += 1
        if not complete:
            report = kb.export(out, format=event["format"])
            require(not report.refused, f"{out}: {report.refused}")
        for file in json.loads(manifest.read_text())["files"]:
            path = out / file["path"]
            require(path.exists(), f"{path}: named in the manifest and not there")
            if file["sha256"] is not None:
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                require(digest == file["sha256"], f"{path}: not what the manifest says")
            counts["exported files"] += 1
        shutil.rmtree(out)

    def _check_gate(
        self, kb: KnowledgeBase, told: Sequence[Sequence[Mapping[str, Any]]], counts: Counter[str]
    ) -> None:
        """The ratio is the acknowledged one, or that which was under way."""
        [events] = told
        allowed, tried = {self._ratio}, None
        for event in events:
            if event.get("what") == "gate":
                tried = event.get("ratio", tried)
                done = event["kind"] == "done"
                allowed = {tried} if done else allowed | {tried}
                counts["gates passed"] += done
        gate = kb.gates.get("epic")
        found = None if gate is None else gate["ratio"]
        require(found in allowed, f"the gate says {found}, expected one of {allowed}")
        self._ratio = found

    def _check_chunks(self, kb: KnowledgeBase, counts: Counter[str]) -> None:
        """Every chunk has its keys, their KV as a fresh encoding makes it, and its vector."""
        keys: list[str] = []
        for entry in kb.documents():
            by_encoder = kb._catalog.keys(entry.id)
            for encoder in kb.encoders:
                have = len(by_encoder.get(encoder, ()))
                wanted = entry.num_chunks
                require(have == wanted, f"{entry.id}: {have} of {wanted} keys of {encoder}")
                keys += by_encoder[encoder]
        keys = list(dict.fromkeys(keys))
        encoding = kb._encoding(self._model)
        recorded = recorded_chunks(kb._catalog, self._model, kb.template, keys)
        for encoder, placed in recorded.items():
            for key, chunk in placed.items():
                expected = encoding.key(encoder, chunk.ids, chunk.neighbours or None)
                require(key == expected, f"{key} is not the key of its ids")
            new = {key: chunk for key, chunk in placed.items() if key not in self._fresh}
            if new:
                self._fresh |= {
                    made.key: np.array(made.kv) for made in encoding.encode(encoder, new)
                }
        require({k for it in recorded.values() for k in it} == set(keys), "keys of no chunk")
        for key in keys:
            try:
                kv, fresh = kb.store.get(key), self._fresh[key]
            except StoreError as error:
                raise WrongError(f"{type(error).__name__}: {error}") from error
            require(kv.shape == fresh.shape, f"chunk {key}: shape {kv.shape}, not {fresh.shape}")
            limit = TOLERANCE
            if self.name in ROUNDED:
                limit = ROUNDED[self.name] * float(np.abs(fresh).max())
            kept = np.ones(kv.shape[2], bool)
            if kb.store.layout.drops:
                kept[dropped_tokens(kv)] = False
                expected_tokens = kb.store.layout.kept_tokens(len(kept))
                require(
                    int(kept.sum()) == expected_tokens,
                    f"chunk {key}: {int(kept.sum())} tokens, not {expected_tokens}",
                )
            error = float(np.abs(kv - fresh)[:, :, kept].max())
            require(error <= limit, f"chunk {key}: differs from a fresh encoding by {error}")
            counts["chunks"] += 1
        self._fresh = {key: self._fresh[key] for key in keys}
        if kb._vectors is not None:
            lost = kb._vectors.compared(kb._catalog).lost
            require(not len(lost), f"{len(lost)} chunks have no vector")

    def _check_sums(self, kb: KnowledgeBase) -> None:
        """What writers noted of the stored chunks is what is there."""
        walked = Sums()
        for _, seen in kb.store.committed():
            if isinstance(seen, StoredChunk):
                walked.add(seen)
        noted = kb.store.counted()
        for found, known in ((noted.encoders, walked.encoders), (noted.aux, walked.aux)):
            there = {name: one for name, one in found.items() if one.chunks}
            require(there == known, f"noted are {there} of stored chunks, there are {known}")

    def _check_words(self, kb: KnowledgeBase) -> None:
        """What stands is found, what was replaced is not."""
        for document, version in self.state.items():
            word = own_word(document, version)
            hits = kb.search(word, 3, mode="bm25")
            require(bool(hits), f"{word} stands and is not found")
            require(all(word in hit.text for hit in hits), f"{word}: a text without it is found")
        for document, version in self._replaced.items():
            if self.state.get(document) != version:
                hits = kb.search(own_word(document, version), 3, mode="bm25")
                require(not hits, f"{own_word(document, version)} was replaced and is still found")

    def _check_answers(self, kb: KnowledgeBase, seed: str, counts: Counter[str]) -> None:
        """Questions get the answers that the undisturbed one gives."""
        rng = random.Random(seed)
        chosen = rng.sample(sorted(self.state), min(QUESTIONS, len(self.state)))
        for document, method in zip(
            chosen, (self.kind.base.methods[-1], "full_attention"), strict=False
        ):
            question = document_text(document, self.state[document])[:70]
            distinct = self._same_rankings(kb, question, lost=self.name == "embed")
            one, other = ask_once(kb, question, method), ask_once(self._calm, question, method)
            sources = [[(s.document_id, s.text) for s in it.sources] for it in (one, other)]
            if sources[0] != sources[1]:
                require(not distinct, f"{question!r}: found {sources[0]}, not {sources[1]}")
                counts["answers over equal scores"] += 1
            elif one.token_ids != other.token_ids and self.name in ROUNDED:
                counts["answers of another rounding"] += 1
            else:
                same = one.token_ids == other.token_ids
                require(same, f"{question!r}: {one.token_ids}, not {other.token_ids}")
                counts["equal answers"] += 1

    def _same_rankings(self, kb: KnowledgeBase, question: str, lost: bool) -> bool:
        """Require equal scores; whether no two of them are equal, so that their order is fixed."""
        modes = ["bm25", "vector"] if self.kind.base.vectors else ["bm25"]
        distinct = True
        for mode in modes:
            one, other = (it.search(question, DEEP, mode=mode) for it in (kb, self._calm))
            scores, expected = (np.array([hit.score for hit in it]) for it in (one, other))
            same = scores.shape == expected.shape and np.allclose(scores, expected, atol=1e-5)
            require(bool(same), f"{question!r}: scores by {mode} are {scores}, not {expected}")
            distinct &= len(scores) < 2 or float(np.abs(np.diff(expected)).min()) > 1e-5
        return distinct

    def _check_swept(self, kb: KnowledgeBase, counts: Counter[str]) -> None:
        """After a collection nothing is left that nobody needs, and all that is needed."""
        report = kb.verify()
        require(not report.damaged, f"damaged or gone after gc: {report.damaged}")
        faults = report.rows.faults if report.rows is not None else ()
        require(not faults, f"rows, words and totals do not agree: {faults}")
        require(not report.vectors_lost, f"{report.vectors_lost} chunks have no vector after gc")
        counts["blocks of packed words"] += len(kb._catalog._index.packed.blocks())
        if kb._vectors is not None:
            # Those of the newest reservation go with the next one: its row says which ids are used.
            with kb._catalog._database.use() as connection:
                newest = connection.execute(NEWEST).fetchone() or (0, 0)
            strays = kb._vectors.compared(kb._catalog).strays
            old = [it for it in strays.tolist() if not newest[0] <= it <= newest[1]]
            require(not old, f"{len(old)} vectors of no chunk after gc")
            counts["vectors of the newest reservation"] += len(strays)
        if self.kind.remote:
            return
        for chunk in (kb.path / "kv").glob("*/*/*"):
            names = {path.name for path in chunk.iterdir()}
            attempt = json.loads((chunk / "commit.json").read_text())["attempt"]
            extra = names - {"commit.json", attempt}
            require(not extra, f"{chunk}: {extra} left after gc")
            counts["chunk folders"] += 1
        locks = [path for path in (kb.path / "kv").rglob("*.__lock")]
        require(not locks, f"{len(locks)} locks left after gc")


@contextlib.contextmanager
def object_store() -> Iterator[str]:
    """An S3 server in this process with an empty bucket; a location in it."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        endpoint = "http://{}:{}".format(*server.get_host_and_port())
        bucket = urllib.request.Request(f"{endpoint}/chunks", method="PUT")
        urllib.request.urlopen(bucket).close()
        yield f"s3://chunks/{uuid.uuid4().hex}/?endpoint={endpoint}&aws_region=us-east-1"
    finally:
        server.stop()
