"""POST /v1/chat/completions: a conversation over retrieved or given chunks."""

import functools
from collections.abc import Iterator
from typing import Any

from starlette.responses import Response

from jaxrag.serve.answers import Piece
from jaxrag.server.answers.answering import respond, visited
from jaxrag.server.answers.asking import make_ready
from jaxrag.server.answers.forms import Form, logprobs_of
from jaxrag.server.answers.visit import Visit
from jaxrag.server.fields import Generation, conversation, generation_of


@visited("messages")
async def chat_completions(visit: Visit) -> Response:
    """Answer the last message."""
    fields, talk = await visit.read(lambda body: (generation_of(body), conversation(body)))
    fields = visit.with_header(fields)
    plain = visit.state.settings.plain == "passages"
    base = visit.choose_base(fields, default=not plain)
    make = functools.partial(make_ready, visit.state, visit.call.access, fields, talk, base)
    return await respond(visit, fields, [make], ChatForm(visit, fields))


class ChatForm(Form):
    """A chat's form."""

    def __init__(self, visit: Visit, fields: Generation) -> None:
        kind = "chat.completion.chunk" if fields.stream else "chat.completion"
        super().__init__(visit, kind, "chatcmpl", fields)

    def opening(self) -> Iterator[dict[str, Any]]:
        """Who speaks."""
        delta = {"role": "assistant", "content": ""}
        for place in range(self.fields.choices):
            one = {"index": place, "delta": delta, "logprobs": None, "finish_reason": None}
            yield self.event(one)

    def part(self, text: str | None) -> dict[str, Any]:
        """What the message grows by."""
        return {"delta": {} if text is None else {"content": text}}

    def message(self, text: str) -> dict[str, Any]:
        """The message."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, place: int, piece: Piece) -> dict[str, Any]:
        """Token by token, with its bytes where they are known."""
        return {"content": logprobs_of(self.model, piece), "refusal": None}
