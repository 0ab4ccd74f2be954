"""POST /v1/completions: prompts to go on from, with chunks before them or without any."""

import functools
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from jaxrag.serve.answers import Piece, Result
from jaxrag.serve.ask import is_ids
from jaxrag.serve.conversation import Text
from jaxrag.server.answers.answering import model_endpoint, respond
from jaxrag.server.answers.asking import prompt_ids
from jaxrag.server.answers.scoring import ScoringFields, scored
from jaxrag.server.answers.visit import Visit
from jaxrag.server.answers.writers import AnswerWriter, TokenTexts, token_text
from jaxrag.server.errors import invalid
from jaxrag.server.fields import Generation, wrong

_MOST_PROMPTS = 64


@model_endpoint("prompt")
async def completions(visit: Visit) -> Response:
    """Go on from every prompt."""
    prompts, fields = await visit.read(_parse)
    if isinstance(fields, ScoringFields):
        jobs = [functools.partial(prompt_ids, visit.state.model, prompt) for prompt in prompts]
        return await scored(visit, jobs, fields)
    fields = visit.with_header(fields)
    visit.choose_base(fields, default=False)
    writer = CompletionWriter(visit, len(prompts) * fields.choices, fields)
    return await respond(visit, fields, prompts, writer)


class _CompletionFields(Generation):
    """What has no turns, and is not scored."""

    prompt: Any = None
    echo: bool = False


def _parse(body: Mapping[str, Any]) -> tuple[list[Text], Generation]:
    """The prompts of a body, and how they are gone on from or scored."""
    fields: Any = (ScoringFields if body.get("echo") is True else _CompletionFields).read(body)
    return prompts_of(fields.prompt), fields.model_copy(update={"earlier_turns": None})


def prompts_of(given: Any) -> list[Text]:
    """A text, token ids, or a list of either. Raises Problem 400."""
    if isinstance(given, str) or is_ids(given):
        return [given]
    if not isinstance(given, list) or not given:
        raise wrong("prompt", given, "a text, token ids, or a list of either")
    if not (all(isinstance(it, str) for it in given) or all(is_ids(it) for it in given)):
        raise wrong("prompt", given, "a list of texts alone, or of lists of token ids alone")
    if len(given) > _MOST_PROMPTS:
        raise invalid(
            f"prompt has {len(given)} entries: expected at most {_MOST_PROMPTS}", "prompt"
        )
    return given


class CompletionWriter(AnswerWriter):
    """Writes a completion; offsets of its tokens count characters of the whole answer."""

    def __init__(self, visit: Visit, choices: int, fields: Generation) -> None:
        super().__init__(visit, "text_completion", "cmpl", fields)
        self._texts = [TokenTexts(self.model) for _ in range(choices)]

    def part(self, text: str | None) -> dict[str, Any]:
        """New text."""
        return {"text": text or ""}

    def message(self, place: int, result: Result) -> dict[str, Any]:
        """All of it."""
        return {"text": result.text}

    def logprobs(self, place: int, piece: Piece) -> dict[str, Any]:
        """Lists of equal length."""
        tokens, offsets = self._texts[place].push(piece.ids)
        likeliest: list[dict[str, float]] = [{} for _ in tokens]
        for at, top in enumerate(piece.top):
            likeliest[at] = {token_text(self.model, token_id): value for token_id, value in top}
        for likely, token, logprob in zip(likeliest, tokens, piece.logprobs, strict=True):
            likely.setdefault(token, logprob)
        return {
            "tokens": tokens,
            "token_logprobs": piece.logprobs,
            "top_logprobs": likeliest,
            "text_offset": offsets,
        }
