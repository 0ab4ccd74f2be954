"""A server's programs, compiled before it is ready."""

from jaxrag.serve.warm import requests_like
from jaxrag.server.state.state import ServerState

_ASKED = "What?"


def warm_up(state: ServerState) -> int:
    """Search every knowledge base once, and compile what the default method needs; how many.

    Questions of usual lengths over as many chunks as are retrieved, and prompts without any, in
    all widths; where files are uploaded, their encoding. Other methods and rules are compiled when
    they are first asked for.
    """
    settings = state.settings
    for base in state.knowledge_bases.values():
        base.search(_ASKED, 1)
    requests = requests_like(
        state.model,
        next(iter(state.methods.values())),
        {base.chunking.chunk_tokens for base in state.knowledge_bases.values()},
        settings.k,
        settings.max_new_tokens,
        settings.rows,
        watched=True,
    )
    programs = state.engine.warm_up(list(requests))
    state.library.warm_up()
    state.engine.forget()
    return programs
