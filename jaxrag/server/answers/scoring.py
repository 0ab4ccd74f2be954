"""Completions that tell how likely their own prompt is: ``echo`` with ``logprobs``.

Evaluation harnesses ask so. The prompt is read by a plain forward without chunks, one prompt at a
time between two steps of the engine, so that its log-probabilities depend on it alone.
"""

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from starlette.responses import JSONResponse

from jaxrag.base.errors import ContextExceeded, DeadlineExceeded
from jaxrag.base.types import HostArray
from jaxrag.engine.runner import ModelRunner
from jaxrag.models.likelihood import Likelihoods, likelihoods
from jaxrag.models.model import Model
from jaxrag.server.answers.asking import LATE
from jaxrag.server.answers.visit import Visit
from jaxrag.server.answers.writers import TokenTexts, head, token_text
from jaxrag.server.errors import invalid
from jaxrag.server.fields import Generation, Int, ignored, wrong
from jaxrag.server.state.entry import Call, with_notes

MOST = 5  # most likely tokens that are named


class ScoringFields(Generation):
    """What is told of prompts: of how many of the most likely tokens, and of a next one."""

    prompt: Any = None
    echo: bool = True
    max_tokens: Annotated[Int, Field(ge=0, le=1)] | None = None
    logprobs: Annotated[Int, Field(ge=0, le=MOST)] = -1

    def model_post_init(self, context: Any) -> None:
        """Problem 400 for what cannot be scored, too."""
        super().model_post_init(context)
        if self.logprobs < 0:
            raise invalid(
                "echo: a prompt is told with its log-probabilities; pass logprobs=1 and "
                "max_tokens=0, or leave echo out",
                "echo",
            )
        if self.max_tokens is None:
            raise invalid("max_tokens: echo with logprobs needs 0, or 1 for the next token",
                          "max_tokens")  # fmt: skip
        if self.stream:
            raise invalid("stream: a prompt is scored whole; leave stream out", "stream")
        if self.temperature:
            raise wrong("temperature", self.temperature, "0 with echo and logprobs")


async def scored(
    visit: Visit, jobs: Sequence[Callable[[], HostArray]], fields: ScoringFields
) -> JSONResponse:
    """Log-probabilities of prompts as a completion; ``jobs`` give their ids [T] each."""
    count, more = fields.logprobs, fields.max_tokens or 0
    _refuse_chunks(visit, fields)
    state, model = visit.state, visit.state.model
    visit.enter(len(jobs))
    loop = asyncio.get_running_loop()
    prompts = [await loop.run_in_executor(visit.threads, job) for job in jobs]
    length = sum(map(len, prompts))
    visit.known(length)
    for place, ids in enumerate(prompts):
        if len(ids) + more > model.config.max_positions:
            raise ContextExceeded(
                f"prompt {place} has {len(ids)} tokens and max_tokens is {more}: the model's "
                f"context is {model.config.max_positions}; score it in pieces"
            )
    left = visit.deadline(fields.timeout) - time.monotonic()
    choices: list[dict[str, Any]] = []
    try:
        async with asyncio.timeout(left), state.scoring:
            for place, ids in enumerate(prompts):
                job = functools.partial(_score, ids=ids, count=max(count, 1))
                scores = await loop.run_in_executor(visit.threads, state.engine.call, job)
                choices.append(_choice(model, place, ids, scores, count, more))
    except TimeoutError:
        raise DeadlineExceeded(LATE) from None
    visit.saw_tokens()
    generated = more * len(prompts)
    usage = {
        "prompt_tokens": length,
        "completion_tokens": generated,
        "total_tokens": length + generated,
        "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    }
    answer = head(visit, "text_completion", "cmpl") | {"choices": choices, "usage": usage}
    return JSONResponse(with_notes(answer, ignored(fields)))


def _refuse_chunks(visit: Visit, fields: Generation) -> None:
    """A prompt is scored as it is: with stored chunks it would be another text."""
    base = visit.choose_base(fields, default=False)
    given = {**fields.said, "knowledge_base": base, "documents": fields.documents}
    for name in ("knowledge_base", "documents", "blocks"):
        if given.get(name):
            raise invalid(
                f"{name}: echo with logprobs reads the prompt alone, by a forward that reuses no "
                "chunk; leave it out, or leave echo out",
                name,
            )


def _score(runner: ModelRunner, ids: HostArray, count: int) -> Likelihoods:
    """On the engine's thread."""
    return likelihoods(runner.model, ids, count)


def _choice(
    model: Model, place: int, ids: HostArray, found: Likelihoods, count: int, more: int
) -> dict[str, Any]:
    """Text and log-probabilities of a prompt, and of the most likely token behind it."""
    tokens = np.concatenate((ids, found.top_ids[-1, :more]))
    chosen = np.concatenate((found.chosen, found.top[-1, :more]))
    whole = TokenTexts(model)
    texts, offsets = whole.push(tokens.tolist())
    top: list[dict[str, float] | None] = [None]
    for at, probability in enumerate(chosen.tolist()):
        best = zip(found.top_ids[at, :count].tolist(), found.top[at, :count].tolist(), strict=True)
        pairs = [*best, (int(tokens[at + 1]), probability)]
        top.append({token_text(model, token_id): value for token_id, value in pairs})
    ended = more and int(tokens[-1]) in model.config.eos_ids
    return {
        "index": place,
        "text": whole.finish(),
        "logprobs": {
            "tokens": texts,
            "token_logprobs": [None, *chosen.tolist()],
            "top_logprobs": top,
            "text_offset": offsets,
        },
        "finish_reason": "stop" if ended else "length",
    }


def tokenizer_info(call: Call) -> dict[str, Any]:
    """GET /tokenizer_info, which harnesses ask: the texts that begin and end, if there are."""
    model = call.state.model
    tokenizer = model.text_tokenizer()

    def text(token_id: int | None) -> str | None:
        return None if token_id is None else tokenizer.decode([token_id], skip_special=False)

    ends = sorted(model.config.eos_ids)
    return {
        "bos_token": text(tokenizer.bos_id),
        "eos_token": text(ends[0] if ends else None),
        "pad_token": None,
        "unk_token": text(tokenizer.unk_id),
        "chat_template": None,
        "vocab_size": tokenizer.vocab_size,
    }
