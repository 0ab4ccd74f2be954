"""POST /v1/completions: prompts to go on from, with chunks before them or without any."""

import asyncio
import functools
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from jaxrag.base.types import HostArray
from jaxrag.models.model import Model, as_token_ids
from jaxrag.serve.answers import Result
from jaxrag.serve.ask import is_ids
from jaxrag.serve.conversation import Conversation, Text
from jaxrag.server.answers.answering import base_of, respond, visited
from jaxrag.server.answers.asking import Piece, make_ready
from jaxrag.server.answers.logprobs import CompletionLogprobs
from jaxrag.server.answers.scoring import scored, scoring_of
from jaxrag.server.answers.visit import Visit
from jaxrag.server.errors import invalid
from jaxrag.server.fields import Body, generation_of

_MOST_PROMPTS = 64


async def completions(request: Request) -> Response:
    """Go on from every prompt."""
    return await visited(request, _complete, "prompt")


async def _complete(visit: Visit, body: Body) -> Response:
    assert visit.access is not None
    state = visit.state
    prompts = prompts_of(body)
    if body.flag("echo"):
        scoring_of(body)
        told = [functools.partial(_ids, state.model, it) for it in prompts]
        return await scored(visit, body, await _together(visit, told))
    fields = generation_of(Body({**body.values, "earlier_turns": None}))
    base = base_of(visit, fields, default=False)
    alone = base is None and not fields.documents and not fields.said.get("blocks")
    makes = []
    for prompt in prompts:
        asked: Text | Conversation = prompt
        if alone:
            asked = Conversation((_ids(state.model, prompt),))
        makes.append(functools.partial(make_ready, state, visit.access, fields, asked, base))
    form = CompletionForm(visit, len(prompts), fields.logprobs)
    return await respond(visit, fields, makes, form)


def prompts_of(body: Body) -> list[Text]:
    """A text, token ids, or a list of either. Raises Problem 400."""
    given: Any = body.values.get("prompt")
    if isinstance(given, str) or is_ids(given):
        return [given]
    if not isinstance(given, list) or not given:
        raise body.wrong("prompt", "a text, token ids, or a list of either")
    if not (all(isinstance(it, str) for it in given) or all(is_ids(it) for it in given)):
        raise body.wrong("prompt", "a list of texts alone, or of lists of token ids alone")
    if len(given) > _MOST_PROMPTS:
        raise invalid(
            f"prompt has {len(given)} entries: expected at most {_MOST_PROMPTS}", "prompt"
        )
    return given


async def _together(visit: Visit, jobs: Sequence[Callable[[], HostArray]]) -> list[HostArray]:
    """What some jobs give, done on a thread."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(visit.state.prepare, lambda: [job() for job in jobs])


def _ids(model: Model, prompt: Text) -> HostArray:
    """A prompt that stands alone as token ids; a text is led by what the model expects first."""
    if not isinstance(prompt, str):
        return as_token_ids(prompt, model.config, "question")
    tokenizer = model.text_tokenizer()
    ids = tokenizer.encode(prompt, special=True)
    leading = tokenizer.leading_ids
    led = np.array_equal(ids[: len(leading)], leading)
    found = ids if led else np.concatenate((leading, ids))
    if not len(found):
        raise invalid("prompt is empty: expected a text, or token ids", "prompt")
    return found.astype(np.int32)


class CompletionForm:
    """A completion's form."""

    def __init__(self, visit: Visit, prompts: int, logprobs: bool) -> None:
        model = visit.state.model
        self._logprobs = [CompletionLogprobs(model) for _ in range(prompts)] if logprobs else None
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": visit.named,
        }

    def opening(self) -> Iterator[dict[str, Any]]:
        """Nothing is said before the text."""
        return iter(())

    def piece(self, place: int, piece: Piece) -> dict[str, Any] | None:
        """New text."""
        logprobs = self._told(place, piece)
        if not piece.text and logprobs is None:
            return None
        return self._head | {"choices": [_choice(place, piece.text, logprobs)]}

    def finish(self, place: int, result: Result) -> dict[str, Any]:
        """Why it ended."""
        return self._head | {"choices": [_choice(place, "", None, result.finish_reason)]}

    def closing(self) -> dict[str, Any]:
        """No choice."""
        return self._head | {"choices": []}

    def whole(self, results: Sequence[Result], logprobs: Sequence[list[float]]) -> dict[str, Any]:
        """All texts."""
        choices = []
        for place, (result, told) in enumerate(zip(results, logprobs, strict=True)):
            of_tokens = self._told(place, Piece(result.text, result.token_ids, told))
            choices.append(_choice(place, result.text, of_tokens, result.finish_reason))
        return self._head | {"choices": choices}

    def _told(self, place: int, piece: Piece) -> dict[str, Any] | None:
        return None if self._logprobs is None else self._logprobs[place].tell(piece)


def _choice(
    place: int, text: str, logprobs: dict[str, Any] | None, finish: str | None = None
) -> dict[str, Any]:
    return {"index": place, "text": text, "logprobs": logprobs, "finish_reason": finish}
