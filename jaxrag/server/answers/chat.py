"""POST /v1/chat/completions: a conversation over retrieved or given chunks."""

import functools
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxrag.models.model import Model
from jaxrag.serve.answers import Result
from jaxrag.serve.conversation import conversation_of
from jaxrag.server.answers.answering import base_of, respond, visited
from jaxrag.server.answers.asking import Piece, make_ready
from jaxrag.server.answers.logprobs import chat_logprobs
from jaxrag.server.answers.visit import Visit
from jaxrag.server.fields import Body, generation_of


async def chat_completions(request: Request) -> Response:
    """Answer the last message."""
    return await visited(request, _chat, "messages")


async def _chat(visit: Visit, body: Body) -> Response:
    assert visit.access is not None
    fields = generation_of(body)
    talk = conversation_of(body.values.get("messages"), body.text("query"), wire=True)
    base = base_of(visit, fields, default=True)
    make = functools.partial(make_ready, visit.state, visit.access, fields, talk, base)
    return await respond(visit, fields, [make], ChatForm(visit, fields.stream, fields.logprobs))


class ChatForm:
    """A chat's form."""

    def __init__(self, visit: Visit, stream: bool, logprobs: bool) -> None:
        self._model: Model = visit.state.model
        self._logprobs = logprobs
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if stream else "chat.completion",
            "created": int(time.time()),
            "model": visit.named,
        }

    def opening(self) -> Iterator[dict[str, Any]]:
        """Who speaks."""
        yield self._event({"role": "assistant", "content": ""})

    def piece(self, place: int, piece: Piece) -> dict[str, Any] | None:
        """New text."""
        logprobs = chat_logprobs(self._model, piece) if self._logprobs else None
        if not piece.text and logprobs is None:
            return None
        return self._event({"content": piece.text}, logprobs)

    def finish(self, place: int, result: Result) -> dict[str, Any]:
        """Why it ended."""
        return self._event({}, finish=result.finish_reason)

    def closing(self) -> dict[str, Any]:
        """No choice."""
        return self._head | {"choices": []}

    def whole(self, results: Sequence[Result], logprobs: Sequence[list[float]]) -> dict[str, Any]:
        """The message."""
        [result], [of_tokens] = results, logprobs
        piece = Piece(result.text, result.token_ids, of_tokens)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": result.text, "refusal": None},
            "logprobs": chat_logprobs(self._model, piece) if self._logprobs else None,
            "finish_reason": result.finish_reason,
        }
        return self._head | {"choices": [choice]}

    def _event(
        self, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self._head | {"choices": [choice]}
