"""POST /v1/embeddings: vectors by the embedder of a knowledge base."""

import asyncio
import base64
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse

from jaxrag.base.types import HostArray
from jaxrag.library.embed import BertEmbedder, Embedder
from jaxrag.server.errors import invalid
from jaxrag.server.fields import Body, read_body
from jaxrag.server.state.entry import chosen, entered
from jaxrag.server.state.state import ServerState
from jaxrag.server.tenants import Access

_MOST_TEXTS = 2048
_KINDS = {"document": "passage", "passage": "passage", "query": "query"}


async def create_embeddings(request: Request) -> JSONResponse:
    """Vectors of texts, as base64 of little-endian float32 or as numbers."""
    state, access = entered(request)
    body = await read_body(request)
    texts = _texts(body)
    form = body.choice("encoding_format", ("float", "base64")) or "float"
    kind = _KINDS[body.choice("input_type", tuple(_KINDS)) or "passage"]
    dimensions = body.integer("dimensions", 1)
    header = request.headers.get("x-knowledge-base")
    name = chosen(state, body.text("model"), body.text("knowledge_base"), header)

    def make() -> tuple[str, HostArray, int]:
        embedder, of = _embedder(state, access, name)
        if dimensions not in (None, embedder.dim):
            raise invalid(
                f"dimensions={dimensions}: this embedder makes vectors of {embedder.dim}; leave it "
                "out",
                "dimensions",
            )
        return of, embedder(texts, kind), _tokens(state, embedder, texts)  # type: ignore[arg-type]

    loop = asyncio.get_running_loop()
    of, vectors, tokens = await loop.run_in_executor(state.prepare, make)
    answer = {
        "object": "list",
        "model": f"{state.name}@{of}",
        "data": [
            {"object": "embedding", "index": i, "embedding": _shown(vector, form)}
            for i, vector in enumerate(vectors)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return JSONResponse(answer)


def _texts(body: Body) -> list[str]:
    given = body.values.get("input")
    texts = [given] if isinstance(given, str) else given
    if isinstance(texts, list) and texts and not isinstance(texts[0], str):
        raise invalid(
            "input holds token ids; send texts (LangChain: check_embedding_ctx_length=False)",
            "input",
        )
    if not isinstance(texts, list) or not all(isinstance(it, str) and it for it in texts):
        raise body.wrong("input", "a text that is not empty, or a list of these")
    if not 0 < len(texts) <= _MOST_TEXTS:
        raise invalid(f"input has {len(texts)} texts: expected 1 to {_MOST_TEXTS}", "input")
    return texts


def _embedder(state: ServerState, access: Access, name: str | None) -> tuple[Embedder, str]:
    """That of the named knowledge base, or of the first that has one, and the base's name."""
    names = state.readable(access) if name is None else [name]
    for one in names:
        base = state.knowledge_base(access, one)
        if base.index is not None and (embedder := base.embedder) is not None:
            return embedder, one
    which = "no knowledge base here" if name is None else f"the knowledge base {name!r}"
    raise invalid(
        f"{which} has an embedder; make one with `jaxrag ingest ... --embedder DIR`"
        if name is None
        else f"{which} has no embedder; give it one with `jaxrag ingest ... --embedder DIR`",
        "model",
    )


def _tokens(state: ServerState, embedder: Embedder, texts: list[str]) -> int:
    """Tokens as the embedder counts them, or the model where the embedder is a function."""
    if isinstance(embedder, BertEmbedder):
        ids, _ = embedder.tokenizer.encode(texts)
        return sum(map(len, ids))
    tokenizer = state.model.tokenizer
    return 0 if tokenizer is None else sum(len(tokenizer.encode(text)) for text in texts)


def _shown(vector: HostArray, form: str) -> Any:
    if form == "base64":
        return base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode()
    return [float(value) for value in vector]
