"""POST /v1/chat/completions: a conversation over retrieved or given chunks."""

import dataclasses
import functools

from starlette.responses import Response

from jaxrag.serve.conversation import Conversation
from jaxrag.server.answers.answering import respond, visited
from jaxrag.server.answers.asking import make_ready
from jaxrag.server.answers.calling import (
    Calling,
    calling_of,
    refuse_knowledge,
    with_tools,
    without_tools,
)
from jaxrag.server.answers.forms import CallingForm, ChatForm
from jaxrag.server.answers.visit import Visit
from jaxrag.server.fields import Body, Generation, conversation, generation_of


@visited("messages")
async def chat_completions(visit: Visit) -> Response:
    """Answer the last message."""
    fields, talk, calling = await visit.read(_asked)
    fields = visit.with_header(fields)
    plain = visit.state.settings.plain == "passages"
    base = visit.choose_base(fields, default=not plain and calling is None)
    form = ChatForm(visit, fields)
    if calling is not None:
        refuse_knowledge(fields, base)
        form = CallingForm(visit, fields, calling)
    make = functools.partial(make_ready, visit.state, visit.call.access, fields, talk, base)
    return await respond(visit, fields, [make], form)


def _asked(body: Body) -> tuple[Generation, Conversation, Calling | None]:
    """What a body asks for, and the tools that may be called."""
    calling, others = calling_of(body), without_tools(body)
    fields, talk = generation_of(others), conversation(others)
    if calling is None:
        return fields, talk, None
    return with_tools(fields, calling), dataclasses.replace(talk, tools=calling.tools), calling
