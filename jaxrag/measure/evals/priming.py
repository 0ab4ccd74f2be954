"""Trains a primer for a model: prompts of a knowledge base or of a data set, and the run."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxrag.base.errors import RequestError
from jaxrag.base.options import option, parse_count
from jaxrag.base.types import HostArray
from jaxrag.kv.store import MemoryStore
from jaxrag.kv.store.keys import content_id
from jaxrag.library.documents import Shard
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.measure.evals.datasets.near import passages_of
from jaxrag.measure.evals.datasets.options import NearOptions
from jaxrag.measure.evals.datasets.run import items_of, template_of
from jaxrag.measure.evals.gate import answered
from jaxrag.measure.evals.options import check_positive
from jaxrag.models.model import Model
from jaxrag.models.text.progress import progress_bar
from jaxrag.models.text.prompts import PromptTemplate
from jaxrag.reuse.encode import encode_chunks, primer_named, wrapped
from jaxrag.reuse.encode.primer import Primer, PrimerVectors, write_vectors
from jaxrag.reuse.methods import METHODS
from jaxrag.reuse.names import DEFAULT_PRIMER
from jaxrag.serve.answer_files import AnswerFile
from jaxrag.serve.ask import Ask
from jaxrag.serve.conversation import Passage
from jaxrag.serve.question_files import BadQuestion, QuestionFile
from jaxrag.serve.questions import ReadyQuestion, Settings, prepare, resolve
from jaxrag.train.primer import PrimerProgress, PrimerPrompt, PrimerSettings, train_primer

FULL = METHODS["full_attention"]
ANSWERS = ".answers.jsonl"  # beside the vectors: how full attention answered each prompt


@dataclasses.dataclass(frozen=True)
class PrimingOptions:
    """Of `jaxrag train primer`.

    Attributes:
      out: the file of the vectors.
    """

    form: Literal["primer", "packets", "layers"] = option(
        "primer",
        "packets: half of them in front of a chunk, half behind it, and all in prompts; layers: "
        "keys and values of every layer in the place of vectors",
    )
    vectors: int = option(32, "how many stand in front of a chunk, 1 to 1,024", "N")
    start: str = option(
        DEFAULT_PRIMER, "the vectors begin as the last tokens of this text", "NAME|FILE"
    )
    number: int | None = option(
        None, "prompts to train with", "N", flag="--num", parse=parse_count, unset="all of them"
    )
    held_out: int = option(
        16, "the first prompts, which are measured and not trained with", "N", flag="--num-held-out"
    )
    skip: int = option(0, "prompts of the file before all of these", "N")
    answer_tokens: int = option(8, "of full attention's answer that are compared", "N")
    steps: int = option(180, "of Adam", "N")
    batch: int = option(1, "prompts of a step", "N")
    learning_rate: float = option(0.01, "of the first step; it falls to 0", "X")
    every: int = option(30, "steps between two looks at the held-out prompts", "N")
    seed: int = option(0, "of the order of the prompts", "N")
    out: str = ""

    def __post_init__(self) -> None:
        check_positive(self, "vectors", "number", "answer_tokens")
        for name in ("held_out", "skip"):
            if getattr(self, name) < 0:
                raise RequestError(f"{name}={getattr(self, name)}: expected 0 or more")
        if self.vectors > 1024:
            raise RequestError(f"vectors={self.vectors}: expected 1 to 1024")
        if not self.out.endswith(".safetensors"):
            raise RequestError(f"--out {self.out}: expected a name that ends in .safetensors")
        self.settings()

    def settings(self) -> PrimerSettings:
        """Those of the trainer. Raises TrainError for a value out of range."""
        return PrimerSettings(self.steps, self.learning_rate, self.batch, self.seed, self.every)

    @property
    def header(self) -> int | None:
        """How many vectors of packets are in front of a chunk; None: it is a primer."""
        return -(-self.vectors // 2) if self.form == "packets" else None


@dataclasses.dataclass(frozen=True)
class PromptSource:
    """Prompts that wait to be answered: who is asked, and every question with its documents."""

    settings: Settings
    questions: Sequence[tuple[str, tuple[Passage, ...] | None]]


def of_knowledge_base(
    kb: KnowledgeBase, questions: QuestionFile, options: PrimingOptions, k: int
) -> PromptSource:
    """Questions over the chunks that retrieval finds. RequestError for a line that is none."""
    found = []
    for entry in questions.entries(Shard.parse("0/1")):
        if isinstance(entry, BadQuestion):
            raise RequestError(f"{questions.path}: line {entry.line}: {entry.reason}")
        found.append((entry.text, None))
    ask = Ask(method=FULL, k=k, max_new_tokens=options.answer_tokens)
    return PromptSource(resolve(ask, kb=kb), found)


def of_dataset(dataset: NearOptions, model: Model, options: PrimingOptions) -> PromptSource:
    """Prompts of a data set's files, as `jaxrag eval near` has them."""
    items = items_of(dataclasses.replace(dataset, number=None))
    found = [(it.question, tuple(passages_of(it, model, dataset.chunk_tokens))) for it in items]
    store = MemoryStore(model.fingerprint, model.kv_layout, max_tokens=model.config.max_positions)
    ask = Ask(method=FULL, template=template_of(dataset), max_new_tokens=options.answer_tokens)
    return PromptSource(resolve(ask, model=model, store=store), found)


def run(
    asked: PromptSource, options: PrimingOptions, *, resume: bool = False, progress: bool = True
) -> dict[str, Any]:
    """Train the vectors and write them; JSON-able, with the KL of held-out prompts as it fell.

    Raises RequestError for fewer questions than are held out, and what training raises.
    """
    model = asked.settings.model
    total = options.held_out + (options.number or len(asked.questions))
    some = asked.questions[options.skip :][:total]
    if len(some) <= options.held_out:
        raise RequestError(
            f"{len(some)} questions, of which {options.held_out} are held out: give more, or a "
            "smaller --num-held-out"
        )
    start = start_vectors(model, asked.settings.template, options.start, options.vectors)
    if start.ndim > 2 and options.form != "layers":
        raise RequestError(f"--start {options.start}: keys and values; add --form layers")
    out = Path(options.out)
    file = AnswerFile(
        f"{out}{ANSWERS}",
        {"model": model.fingerprint, "answer_tokens": options.answer_tokens},
    )
    with file, progress_bar(len(some), "full attention", "prompt", shown=progress) as bar:
        prompts = []
        for prompt in _prompts(asked.settings, some, file):
            if options.header is not None:
                around = (model.config.vocab_size, options.header, options.vectors)
                packets = tuple(wrapped(chunk, *around) for chunk in prompt.chunks)
                prompt = dataclasses.replace(prompt, packets=packets)
            prompts.append(prompt)
            bar.update()
    if options.form == "layers":
        start = start_layers(model, prompts[0].prefix, start)
    held, used = prompts[: options.held_out], prompts[options.held_out :]
    looks: list[dict[str, Any]] = []
    with progress_bar(options.steps, "train primer", "step", shown=progress) as bar:

        def told(now: PrimerProgress) -> None:
            bar.update(now.step - bar.n)
            if now.held_out is not None:
                looks.append({"step": now.step, "kl": now.held_out})
                bar.set_postfix_str(f"held-out KL {now.held_out:.4f}")

        found = train_primer(
            model, start, used, held, options.settings(), out, resume=resume, told=told
        )
    vectors = PrimerVectors.of(model.digest, found, options.header)
    write_vectors(Primer(out.stem, vectors=vectors), out)
    settings = dataclasses.asdict(options)
    return settings | {
        "prompts": len(used),
        "prompt_tokens": float(np.mean([it.tokens for it in used])),
        "width": vectors.width,
        "held_out_kl": looks,
    }


def start_vectors(model: Model, template: PromptTemplate, text: str, count: int) -> HostArray:
    """The embeddings [count, D] float32 of the last tokens of a text, repeated where it is short.

    Of a primer that is no text its last vectors, or K and V [count, L, 2, K, H]. Raises ConfigError
    for a primer that there is not, and for K and V of another model.
    """
    primer = primer_named(text)
    ids = primer.tokens(template, model.text_tokenizer())
    if ids.ndim > 2:
        primer.check_model(model.digest, model.config)
    if ids.ndim != 1:
        return np.resize(ids[-count:], (count, *ids.shape[1:])).astype(np.float32)
    table = np.asarray(model.params.embed[np.resize(ids, max(count, len(ids)))[-count:]])
    return table.astype(np.float32)


def start_layers(model: Model, prefix: HostArray, start: HostArray) -> HostArray:
    """K before rotation and V of vectors [R, D] behind a prefix [P], float32 [R, L, 2, K, H].

    Where ``start`` is such already, that. Raises RequestError where the context is too short.
    """
    if start.ndim > 2:
        return start
    soft = model.with_soft(start)
    ids = np.arange(model.config.vocab_size, soft.num_ids, dtype=np.int32)
    [(_, kv)] = encode_chunks(soft, "after_prefix", prefix, [ids])
    return kv.transpose(2, 0, 1, 3, 4).astype(np.float32)


def _prompts(
    settings: Settings,
    questions: Sequence[tuple[str, tuple[Passage, ...] | None]],
    file: AnswerFile,
) -> Iterator[PrimerPrompt]:
    """Prompts with their answers, which are kept in the file, by what was asked."""
    lines = (json.loads(line) for line in file.path.read_text("utf-8").splitlines())
    known = {line["id"]: line["token_ids"] for line in lines}
    for question, documents in questions:
        ready = prepare(settings, question, documents)
        prompt = ready.prompt
        parts = (prompt.prefix, *prompt.chunks, prompt.final)
        name = content_id("", np.concatenate(parts).astype(np.int32))
        if name not in known:
            [answer] = answered([ready], 1)
            known[name] = [int(token_id) for token_id in answer.token_ids]
            file.write([{"id": name, "token_ids": known[name]}])
        yield _with_answer(ready, known[name], settings.model.config.eos_ids)


def _with_answer(
    ready: ReadyQuestion, answer: Sequence[int], eos_ids: Sequence[int]
) -> PrimerPrompt:
    """The prompt and the answer's tokens; where it has none, the one that ends it."""
    ids = np.array(list(answer) or list(eos_ids[:1]) or [0], np.int32)
    prompt = ready.prompt
    return PrimerPrompt(prompt.prefix, tuple(prompt.chunks), prompt.final, ids)
