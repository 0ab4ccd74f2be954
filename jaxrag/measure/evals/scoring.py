"""Questions of a task put to a model, scored packed: exact match of the greedy answer.

All questions on one set of documents run in one row with the right answers given
(``train.evaluation``), a thousand times cheaper than answering, with the same verdict.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import RequestError
from jaxrag.base.shapes import bucket
from jaxrag.base.sharding import make_mesh
from jaxrag.base.types import HostArray
from jaxrag.measure.subject import format_of
from jaxrag.models.model import Model
from jaxrag.models.rope import RopeTable
from jaxrag.models.segments import PositionScheme
from jaxrag.models.text.prompts import PromptTemplate
from jaxrag.reuse.methods import method_named
from jaxrag.tasks.synthetic import Sample, SyntheticTask
from jaxrag.tasks.synthetic import samples as endless
from jaxrag.train.evaluation import Losses, pack_pieces
from jaxrag.train.loss import TokenLoss
from jaxrag.train.packing import TrainBatch, lay_piece
from jaxrag.train.samples import SampleWriter, TrainSample, response_end
from jaxrag.train.step import Program, make_evaluation

ROWS = 8  # of a batch
ROW_TOKENS = 512  # at least
LOGITS_TOKENS = 4096  # tokens whose [V] logits exist at once

Heard = Callable[[int], None]  # called with how many samples or questions are done


def _silent(done: int) -> None:
    """Nobody watches."""


@dataclasses.dataclass(frozen=True)
class ReadMode:
    """One way to read a prompt: as a packed mask, and the preset that does it with cached KV."""

    full: bool
    positions: PositionScheme
    method: str


READS: dict[str, ReadMode] = {
    "full": ReadMode(full=True, positions="reordered", method="full_attention"),
    "block": ReadMode(full=False, positions="reordered", method="turborag"),
    "composite": ReadMode(full=False, positions="composite", method="turborag_composite"),
}


def draw(task: SyntheticTask, seed: int, questions: int) -> tuple[Sample, ...]:
    """The first samples of the sequence that hold so many questions; the last one may lose some."""
    drawn: list[Sample] = []
    left = questions
    for sample in endless(task, seed):
        drawn.append(dataclasses.replace(sample, questions=sample.questions[:left]))
        left -= len(drawn[-1].questions)
        if not left:
            return tuple(drawn)
    raise AssertionError("the sequence has no end")


@dataclasses.dataclass(frozen=True)
class Written:
    """Samples as the token ids of one model, ready to be scored. Make one with ``write``."""

    model: Model
    template: PromptTemplate
    samples: tuple[Sample, ...]
    ids: tuple[TrainSample, ...]


def write(
    model: Model, samples: Sequence[Sample], template: str | PromptTemplate | None = None
) -> Written:
    """Tokenise samples for a model.

    Args:
      template: prompt format, as of ``format_of``.

    Raises:
      TokenizerError: the model has no tokenizer, or one that cuts the template's markers.
      ConfigError: no token ends an answer.
      RequestError: a prompt is longer than the model's context, or has words that the model's
        vocabulary lacks.
    """
    tokenizer, where = model.text_tokenizer(), model.path or "the model"
    template = format_of(model, template)
    end_id = response_end(model.config, tokenizer, where)
    writer = SampleWriter(tokenizer, template, end_id, "", refusal="")
    ids = tuple(map(writer.write_synthetic, samples))
    longest = max(sample.num_positions for sample in ids)
    if longest > model.config.max_positions:
        raise RequestError(
            f"prompts of up to {longest} tokens do not fit into {where}, whose context has "
            f"{model.config.max_positions}; ask with fewer chunks"
        )
    _refuse_unknown_words(model, samples)
    return Written(model, template, tuple(samples), ids)


def scored(written: Written, read: ReadMode, heard: Heard = _silent) -> HostArray:
    """Exact match of every question, bool [Q], in order; ``heard`` counts samples.

    Raises RequestError for composite positions and a model with a sliding window.
    """
    model = written.model
    method_named(read.method).check(model.config)
    pieces = [lay_piece(sample, read.full, read.positions) for sample in written.ids]
    row_tokens = bucket(max(map(len, pieces)), ROW_TOKENS)
    packed = pack_pieces(pieces, ROWS, row_tokens)
    return packed.score(forward_losses(model, row_tokens), heard).right


def forward_losses(model: Model, row_tokens: int) -> Losses:
    """The forward pass of training, with the weights of a loaded model."""
    evaluate = _evaluation(model.config, model.mesh or make_mesh())
    rope = model.rope(row_tokens)

    def losses(batch: TrainBatch) -> TokenLoss:
        placed = jax.tree.map(lambda x: model.put_batch(x, len(x)), batch)
        return evaluate(model.params, None, rope, placed)

    return losses


@functools.lru_cache(maxsize=4)
def _evaluation(
    config: ModelConfig, mesh: Mesh
) -> Callable[[Any, None, RopeTable, TrainBatch], TokenLoss]:
    """Compiled once for all models of the same sizes."""
    return make_evaluation(
        Program(
            config=config,
            dtype=config.dtype,
            remat="none",
            logits_tokens=LOGITS_TOKENS,
            lora_scale=None,
            mesh=mesh,
        )
    )


def _refuse_unknown_words(model: Model, samples: Sequence[Sample]) -> None:
    """An answer of unknown tokens would count as right when unknown tokens are predicted."""
    tokenizer = model.text_tokenizer()
    if tokenizer.unk_id is None:
        return
    texts = [text for sample in samples for text in sample.chunks]
    texts += [f"{q.question} {q.answer}" for sample in samples for q in sample.questions]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        if (ids == tokenizer.unk_id).any():
            word = tokenizer.unknown_words(text)[0]
            raise RequestError(
                f"{model.path or 'the model'}: its vocabulary lacks {word!r}, a word of the task; "
                "evaluate a model whose tokenizer knows the task's words"
            )
