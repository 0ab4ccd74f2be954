"""Which primer the chunks of a knowledge base are best encoded behind, measured on questions.

Full attention answers. Then every candidate, shown that answer over the same chunks, is asked for
each next token, as in the gate: chunks behind the prefix alone, behind their neighbours, and behind
each primer. Their KV is made in memory and dropped at once; the knowledge base's store gets none.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrag.base.errors import KnowledgeBaseError
from jaxrag.base.installed import config_names
from jaxrag.kv.store import MemoryStore
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.library.knowledge_base.settings import check_primer
from jaxrag.measure.evals.gate import prepared_questions, tallied
from jaxrag.measure.evals.options import PrimeOptions
from jaxrag.measure.evals.statistics import bootstrapped
from jaxrag.reuse.encode import Primer, primer_named
from jaxrag.reuse.methods import METHODS, Method
from jaxrag.serve.ask import Ask
from jaxrag.serve.question_files import QuestionFile
from jaxrag.serve.questions import ReadyQuestion, resolve

FULL = METHODS["full_attention"]
# Candidates without a primer, and the methods that read them with nothing recomputed.
UNPRIMED: Mapping[str, Method] = {
    "after_prefix": METHODS["full_reuse"],
    "neighbours": METHODS["fusionrag"].with_ratio(0),
}
_SEED = 0  # of the resampled questions


@dataclasses.dataclass(frozen=True)
class PrimeRow:
    """One candidate: what chunks were encoded behind, and how near that is to full attention.

    Attributes:
      primer_tokens: of the primer, or how many vectors; 0 without one.
      variants: that are stored of every chunk.
      bytes_per_token: of all of them.
      kl: of a token, with its interval, of resampled questions; as ``statistics.bootstrapped``.
      kl_minus_least: the same of the difference from the candidate with the least, paired.
      same_tokens: share of next tokens that are full attention's.
    """

    name: str
    encoder: str
    primer_tokens: int
    variants: int
    bytes_per_token: float
    kl: Mapping[str, float]
    kl_minus_least: Mapping[str, float]
    same_tokens: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class PrimeReport:
    """What was measured, and what became of it.

    Attributes:
      answer_tokens: that were compared, of all questions.
      left_out: candidates that were not measured, and why.
      least: the candidate with the least KL.
      chosen: the one to take, by ``choice``.
      before: the primer that the knowledge base had; None: none was chosen.
      stored: how many chunks had KV behind that.
      taken: whether chunks are encoded behind the chosen primer from now on.
    """

    questions: int
    answer_tokens: int
    candidates: tuple[PrimeRow, ...]
    left_out: Mapping[str, str]
    least: str
    chosen: str
    before: str | None
    stored: int
    taken: bool


def prime(
    kb: KnowledgeBase, questions: QuestionFile, options: PrimeOptions, *, progress: bool = False
) -> PrimeReport:
    """Measure candidates, and have the knowledge base encode behind the chosen primer from now on.

    Nothing is remembered where that is no primer; nor, without ``options.replace``, where chunks
    are stored behind another.

    Args:
      kb: opened with its model, for writing.
      questions: as of ``gate``.
      progress: show how far it is, on stderr.

    Raises:
      RequestError: a bad line, a question that finds no chunk or cannot be served.
      ConfigError: a primer that there is not, or vectors of another model.
      KnowledgeBaseError: opened without a model or for reading; a primer of ``options`` that is too
        long. All of these before anything is computed.
    """
    if kb.mode != "rw" or kb.model is None:
        raise KnowledgeBaseError(
            f"{kb.path} was opened for reading; open it with its model and mode 'rw' to prime it"
        )
    primers = primers_of(kb, options.primers)
    store, size = kb.store, kb.chunking.chunk_tokens
    memory = MemoryStore(store.fingerprint, store.layout, max_tokens=kb.model.config.max_positions)
    prepared, left_out = _prepared(kb, questions, options, primers, memory)
    settings = [ready[0].settings for ready in prepared.values()]
    tallies = tallied(
        settings, list(prepared.values()), 1, name="prime", progress=progress,
        heard=lambda: memory.delete(list(memory.keys())),
    )  # fmt: skip
    tokens = np.array([len(one) for one in tallies[0].agree])
    kl = {name: np.array(tally.kl) for name, tally in zip(list(prepared)[1:], tallies, strict=True)}
    least = min(kl, key=lambda name: float(kl[name].sum()))
    candidates = []
    for name, one in zip(kl, tallies, strict=True):
        first, same = prepared[name][0], np.array([it.sum() for it in one.agree])
        encoders = first.method.encoders
        candidates.append(PrimeRow(
            name=name,
            encoder=encoders[0],
            primer_tokens=0 if first.primer is None else len(first.primer),
            variants=len(encoders),
            bytes_per_token=len(encoders) * store.layout.stored_nbytes(size) / size,
            kl=bootstrapped(kl[name], _SEED, over=tokens),
            kl_minus_least=bootstrapped(kl[name] - kl[least], _SEED, over=tokens),
            same_tokens=bootstrapped(same, _SEED, over=tokens),
        ))  # fmt: skip
    chosen, own = choice(candidates).name, kb.primer
    before = next((name for name, it in primers.items() if own is not None and it.same(own)), None)
    stored = kb.counts()["encoded"].get("primed", 0)
    taken = chosen in primers and (options.replace or not stored or chosen == before)
    if taken:
        kb.set_primer(primers[chosen])
    return PrimeReport(
        questions=len(tokens), answer_tokens=int(tokens.sum()), candidates=tuple(candidates),
        left_out=left_out, least=least, chosen=chosen, before=before, stored=stored, taken=taken,
    )  # fmt: skip


def choice(candidates: Sequence[PrimeRow]) -> PrimeRow:
    """The one of least KL; or the cheapest, if it cannot be told from that one.

    That is where the interval of the paired difference reaches 0. Fewer variants are cheaper, then
    fewer tokens of a primer.
    """
    near = [one for one in candidates if one.kl_minus_least["low"] <= 0]
    return min(near, key=lambda one: (one.variants, one.primer_tokens, one.kl["value"]))


def primers_of(kb: KnowledgeBase, named: Sequence[str]) -> dict[str, Primer]:
    """The shipped primers, those that are named, and the knowledge base's own, each once, by name.

    Raises ConfigError for one that there is not, and for vectors of another model.
    """
    measured = {text: primer_named(text) for text in (*config_names("primers"), *named)}
    if kb.primer is not None:
        measured[f"{kb.primer.name}, as kept"] = kb.primer
    distinct: dict[str, Primer] = {}
    others = {FULL.name, *UNPRIMED}  # that rows are called by
    for text, primer in measured.items():
        primer.check_model(kb.model_digest, kb.config)
        if not any(primer.same(other) for other in distinct.values()):
            distinct[text if primer.name in distinct.keys() | others else primer.name] = primer
    return distinct


def _prepared(
    kb: KnowledgeBase,
    questions: QuestionFile,
    options: PrimeOptions,
    primers: Mapping[str, Primer],
    memory: MemoryStore,
) -> tuple[dict[str, list[ReadyQuestion]], dict[str, str]]:
    """The questions for full attention and for each candidate, and why some are left out.

    Those may be whose text is too long, and neighbours that are found by vectors which chunks lack.
    """
    assert kb.model is not None
    ask = Ask(k=options.k, where=options.where, max_new_tokens=options.answer_tokens)
    may_lack = {"neighbours", *config_names("primers")} - set(options.primers)
    arms: dict[str, tuple[Method, Primer | None]] = {
        name: (method, None) for name, method in ((FULL.name, FULL), *UNPRIMED.items())
    }
    arms |= {name: (METHODS["primed"], primer) for name, primer in primers.items()}
    prepared, left_out = dict[str, list[ReadyQuestion]](), dict[str, str]()
    for name, (method, primer) in arms.items():
        settings = resolve(dataclasses.replace(ask, method=method), kb=kb)
        settings = dataclasses.replace(settings, store=memory, primer=primer)
        try:
            check_primer(primer, kb.template, kb.model, kb.chunking.chunk_tokens)
            prepared[name] = prepared_questions(settings, questions)
        except KnowledgeBaseError as error:
            if name not in may_lack:
                raise
            left_out[name] = str(error)
    return prepared, left_out
