"""POST /v1/completions: prompts to go on from, with chunks before them or without any."""

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from starlette.responses import Response

from jaxrag.base.types import HostArray
from jaxrag.models.model import Model, as_token_ids
from jaxrag.serve.answers import Piece
from jaxrag.serve.ask import is_ids
from jaxrag.serve.conversation import Conversation, Text
from jaxrag.server.answers.answering import respond, visited
from jaxrag.server.answers.asking import make_ready
from jaxrag.server.answers.forms import Form, TokenTexts
from jaxrag.server.answers.scoring import scored, scoring_of
from jaxrag.server.answers.tokenize import text_ids
from jaxrag.server.answers.visit import Visit
from jaxrag.server.errors import invalid
from jaxrag.server.fields import Body, generation_of

_MOST_PROMPTS = 64


@visited("prompt")
async def completions(visit: Visit) -> Response:
    """Go on from every prompt."""
    state, body, access = visit.state, visit.call.body, visit.call.access
    prompts = prompts_of(body)
    if body.flag("echo"):
        scoring_of(body)
        jobs = [functools.partial(_ids, state.model, it) for it in prompts]
        return await scored(visit, await _together(visit, jobs))
    fields = generation_of(Body({**body.values, "earlier_turns": None}))
    base = visit.choose_base(fields, default=False)
    alone = base is None and not fields.documents and not fields.said.get("blocks")
    makes = []
    for prompt in prompts:
        asked: Text | Conversation = prompt
        if alone:
            asked = Conversation((_ids(state.model, prompt),))
        makes.append(functools.partial(make_ready, state, access, fields, asked, base))
    return await respond(visit, fields, makes, CompletionForm(visit, len(prompts), fields.logprobs))


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
    found = text_ids(model, prompt)
    if not len(found):
        raise invalid("prompt is empty: expected a text, or token ids", "prompt")
    return found.astype(np.int32)


class CompletionForm(Form):
    """A completion's form; offsets of its tokens count characters of the whole answer."""

    def __init__(self, visit: Visit, prompts: int, logprobs: bool) -> None:
        super().__init__(visit, "text_completion", "cmpl", logprobs)
        self._texts = [TokenTexts(self.model) for _ in range(prompts)]

    def part(self, text: str | None) -> dict[str, Any]:
        """New text."""
        return {"text": text or ""}

    def message(self, text: str) -> dict[str, Any]:
        """All of it."""
        return {"text": text}

    def logprobs(self, place: int, piece: Piece) -> dict[str, Any]:
        """Lists of equal length."""
        tokens, offsets = self._texts[place].push(piece.ids)
        pairs = zip(tokens, piece.logprobs, strict=True)
        return {
            "tokens": tokens,
            "token_logprobs": piece.logprobs,
            "top_logprobs": [{token: logprob} for token, logprob in pairs],
            "text_offset": offsets,
        }
