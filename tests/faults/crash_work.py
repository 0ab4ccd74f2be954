"""What the processes do that are killed: each kind of work on a knowledge base, step by step."""

import contextlib
import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bases import BASES, Base, as_document, document_id, document_text, few_are_many, load
from crash_log import FRESH, Log

from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.measure.evals.gate import gate
from jaxrag.measure.evals.options import GateOptions, Target
from jaxrag.reuse.methods import METHODS
from jaxrag.serve.question_files import QuestionFile

DOCUMENTS = 24  # ids that are added, changed and removed in turn
BATCH = 3  # documents of one change, at most
RATIOS = (0.25, 0.5)  # that a gate tries
FORMATS = ("safetensors", "lmcache", "zarr")


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process is to do.

    Attributes:
      kind: a key of KINDS.
      part: which of the kind's processes it is.
      number: of the round.
      seed: of its choices.
      folder: of the kind: the knowledge base in it is "kb".
      model: the model's directory.
      store: the repository, where it is not the knowledge base's folder.
      log: where it tells what was acknowledged.
      state: the version of each of its documents that stands.
    """

    kind: str
    part: int
    number: int
    seed: str
    folder: Path
    model: Path
    store: str | None
    log: Path
    state: dict[int, int]


class Run:
    """One process at work."""

    def __init__(self, job: Job, log: Log) -> None:
        self.job = job
        self.log = log
        self.rng = random.Random(job.seed)
        self.versions = dict(job.state)
        self.documents = range(job.part, DOCUMENTS, len(KINDS[job.kind].steps))
        self.fresh = itertools.count(job.number * FRESH + job.part * FRESH // 2)

    def done(self, what: str, change: list[list[Any]], act: Callable[[], Any], **told: Any) -> None:
        """Do it between two notes."""
        self.log.note("begin", change=change, what=what, **told)
        act()
        self.log.note("done", what=what)


Step = Callable[[KnowledgeBase, Run], None]


def change(kb: KnowledgeBase, run: Run, weights: tuple[int, int, int, int] = (10, 1, 2, 1)) -> None:
    """Add, replace or remove some documents, add some again as they are, or collect garbage."""
    rng, versions = run.rng, run.versions
    chosen = rng.sample(run.documents, rng.randint(1, BATCH))
    standing = [document for document in chosen if document in versions]
    what = rng.choices(["write", "same", "remove", "gc"], weights)[0]
    if what == "write":
        version = next(run.fresh)
        versions.update(dict.fromkeys(chosen, version))
        documents = [as_document(document, version) for document in chosen]
        run.done(what, [[it, version] for it in chosen], functools.partial(kb.add, documents))
    elif what == "same":
        documents = [as_document(document, versions[document]) for document in standing]
        same = [[it, versions[it]] for it in standing]
        run.done(what, same, functools.partial(kb.add, documents))
    elif what == "remove":
        ids = [document_id(document) for document in standing]
        run.done(what, [[it, None] for it in standing], functools.partial(kb.remove, ids))
        for document in standing:
            del versions[document]
    else:
        run.done(what, [], kb.gc)


def remove(kb: KnowledgeBase, run: Run) -> None:
    """Remove documents, and put some back."""
    change(kb, run, (6, 0, 6, 1))


def collect(kb: KnowledgeBase, run: Run) -> None:
    """Collect garbage without grace; change a document now and then."""
    if run.rng.random() < 0.3:
        change(kb, run, (3, 0, 1, 0))
    run.done("gc", [], functools.partial(kb.gc, grace_seconds=0.0))


def repair(kb: KnowledgeBase, run: Run) -> None:
    """Damage stored chunks, and repair them; change a document now and then."""
    if run.rng.random() < 0.4:
        change(kb, run, (3, 0, 1, 0))
    files = sorted(path for path in (kb.path / "kv").rglob("*") if path.is_file())
    damaged = run.rng.sample(files, min(len(files), run.rng.randint(1, 4)))

    def act() -> None:
        for path in damaged:
            if run.rng.random() < 0.2:
                path.unlink()
            else:
                data = bytearray(path.read_bytes())
                data[run.rng.randrange(len(data))] ^= 1 << run.rng.randrange(8)
                path.write_bytes(data)
        report = kb.verify(repair=True)
        if report.damaged:
            raise AssertionError(f"{report.damaged} are damaged after a repair")

    run.done("repair", [], act)


def embed(kb: KnowledgeBase, run: Run) -> None:
    """Lose vectors, and make them again; change a document now and then."""
    if run.rng.random() < 0.4:
        change(kb, run, (3, 0, 1, 0))
    vectors = kb._vectors
    assert vectors is not None

    def act() -> None:
        ids = vectors.index.ids().tolist()
        vectors.index.remove(run.rng.sample(ids, run.rng.randint(0, len(ids))))
        kb.embed()

    run.done("embed", [], act)


def export(kb: KnowledgeBase, run: Run) -> None:
    """Write chunks for other programs, in one format after another."""
    if not run.versions or run.rng.random() < 0.2:
        change(kb, run, (1, 0, 0, 0))
    name = run.rng.choice(FORMATS)
    out = run.job.folder / f"out-{next(run.fresh)}"
    act = functools.partial(kb.export, out, format=name)
    run.done("export", [], act, out=str(out), format=name)


def pass_gate(kb: KnowledgeBase, run: Run) -> None:
    """Let the gate choose a ratio, which is the one that is tried."""
    if len(run.versions) < 4:
        change(kb, run, (1, 0, 0, 0))
        return
    probes = run.job.folder / "probes.jsonl"
    asked = [document_text(*it)[:40].replace('"', "") for it in list(run.versions.items())[:2]]
    probes.write_text("".join(f'{{"question": "{text}"}}\n' for text in asked))
    ratio = run.rng.choice(RATIOS)
    target = Target(agreement=0.0, max_kl=1e9)
    options = GateOptions(METHODS["epic"], (ratio,), target, answer_tokens=2, k=2)
    act = functools.partial(gate, kb, QuestionFile.open(probes), options)
    run.done("gate", [], act, ratio=ratio)


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of crash: a knowledge base, and what each of the processes does to it.

    Attributes:
      base: how it is made.
      steps: one for every process.
      remote: whether its chunks lie on an S3 server, and are read through a local tier.
    """

    base: Base
    steps: tuple[Step, ...]
    remote: bool = False


KINDS: Mapping[str, Kind] = {
    "two writers": Kind(BASES["native"], (change, change)),
    "large": Kind(BASES["large"], (change, change)),
    "neighbours": Kind(BASES["neighbours"], (change, change)),
    "int8": Kind(BASES["int8"], (change, change)),
    "int4": Kind(BASES["int4"], (change, change)),
    "int4-half": Kind(BASES["int4-half"], (change, change)),
    "attention index": Kind(BASES["attention index"], (change, change)),
    "gc without grace": Kind(BASES["native"], (collect, change)),
    "remove": Kind(BASES["native"], (remove,)),
    "repair": Kind(BASES["native"], (repair,)),
    "embed": Kind(BASES["native"], (embed,)),
    "export": Kind(BASES["native"], (export,)),
    "gate": Kind(BASES["native"], (pass_gate,)),
    "tier": Kind(BASES["native"], (change, change), remote=True),
}


def at_work(job: Job, go: Any) -> None:
    """Work on a knowledge base until killed; opens it when ``go`` has something to receive."""
    log = Log(job.log)
    run = Run(job, log)
    kind = KINDS[job.kind]
    large = few_are_many() if kind.base.large else contextlib.nullcontext()
    try:
        model = load(job.model)
        log.note("loaded")
        go.recv()
        with large, kind.base.open(job.folder / "kb", model, "rw", **where(job.store)) as kb:
            log.note("ready")
            while True:
                kind.steps[job.part](kb, run)
    except Exception as error:
        log.note("error", told=f"{type(error).__name__}: {error}")
        raise


def where(store: str | None) -> dict[str, Any]:
    """The option of ``KnowledgeBase.open`` that names the repository, where it lies elsewhere."""
    return {} if store is None else {"store": store}
