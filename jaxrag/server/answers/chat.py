"""POST /v1/chat/completions: a conversation over retrieved or given chunks."""

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from jaxrag.serve.conversation import Conversation
from jaxrag.server.answers.answering import model_endpoint, respond
from jaxrag.server.answers.calling import (
    Calling,
    Tools,
    refuse_knowledge,
    with_tools,
)
from jaxrag.server.answers.visit import Visit
from jaxrag.server.answers.writers import ChatWriter
from jaxrag.server.fields import Generation, Talk


@model_endpoint("messages")
async def chat_completions(visit: Visit) -> Response:
    """Answer the last message."""
    fields, talk, calling = await visit.read(_parse)
    fields = visit.with_header(fields)
    plain = visit.state.settings.plain == "passages"
    base = visit.choose_base(fields, default=not plain and calling is None)
    if calling is not None:
        refuse_knowledge(fields, base)
    writer = ChatWriter(visit, fields, calling)
    return await respond(visit, fields, [talk], writer)


class _ChatFields(Talk, Tools, Generation):
    """All of them."""


def _parse(body: Mapping[str, Any]) -> tuple[Generation, Conversation, Calling | None]:
    """What a body asks for, and the tools that may be called."""
    fields = _ChatFields.read(body)
    calling, talk = fields.calling(), fields.conversation()
    if calling is None:
        return fields, talk, None
    return with_tools(fields, calling), talk.with_tools(calling.tools), calling
