"""POST /v1/prefetch: bring KV closer before it is asked for."""

import asyncio
from typing import get_args

from starlette.requests import Request
from starlette.responses import JSONResponse

from jaxrag.kv.store.keys import ID_DIGITS, is_hex
from jaxrag.kv.store.prefetch import Tier
from jaxrag.server.errors import forbidden, invalid
from jaxrag.server.fields import read_body
from jaxrag.server.state.entry import chosen, entered

_MOST_KEYS = 10_000
_MOST_CHUNKS = 1000


async def prefetch(request: Request) -> JSONResponse:
    """For admins: the chunks of a question, or of store keys; answers when they are there."""
    state, access = entered(request)
    if not access.admin:
        raise forbidden("prefetch is for admins; ask for a key that is one")
    body = await read_body(request)
    question, keys = body.text("question"), body.texts("keys", most=_MOST_KEYS)
    if (question is None) == (not keys):
        raise invalid("expected a question or keys, one of them", "question")
    bad = next((key for key in keys if not is_hex(key, ID_DIGITS)), None)
    if bad is not None:
        raise invalid(f"keys: {bad[:80]!r}: expected {ID_DIGITS} lower-case hex digits", "keys")
    tier = body.choice("tier", get_args(Tier)) or "page"
    k = body.integer("k", 1, _MOST_CHUNKS) or state.settings.k
    header = request.headers.get("x-knowledge-base")
    named = chosen(state, body.text("model"), body.text("knowledge_base"), header)

    def bring() -> tuple[str, int]:
        name = named or state.default_base(access)
        if name is None:
            raise invalid("there is no knowledge base; name one", "knowledge_base")
        base = state.knowledge_base(access, name)
        what = list(keys) if question is None else question
        return name, base.prefetch(what, k=k, tier=tier).result()  # type: ignore[arg-type]

    name, nbytes = await asyncio.get_running_loop().run_in_executor(state.prepare, bring)
    return JSONResponse(
        {"object": "prefetch", "knowledge_base": name, "tier": tier, "bytes": nbytes}
    )
