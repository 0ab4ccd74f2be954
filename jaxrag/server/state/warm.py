"""What a server does before it is ready: search once, and compile what requests will need."""

from jaxrag.serve.warm import requests_like
from jaxrag.server.state.recipe import warm_up_passages
from jaxrag.server.state.replicas import Replicas
from jaxrag.server.state.state import ServerState


def warm_up(state: ServerState) -> int:
    """Search every knowledge base once, and compile what the default method needs; how many.

    Questions of usual lengths over as many chunks as are retrieved, and prompts without any, in
    all widths; where files are uploaded or passages are read, their encoding. Other methods and
    rules are compiled when they are first asked for.
    """
    settings = state.settings
    for base in state.knowledge_bases.values():
        base.search("What?", 1)
    if isinstance(state.engine, Replicas):  # each warms up by itself
        return state.library.warm_up()
    requests = requests_like(
        state.model,
        next(iter(state.methods.values())),
        {base.chunking.chunk_tokens for base in state.knowledge_bases.values()},
        settings.k,
        settings.max_new_tokens,
        settings.rows,
        watched=True,
        store=state.memory.store(state.tenants.names[0]) if state.engine.leads else None,
    )
    programs = state.engine.warm_up(list(requests))
    state.library.warm_up()
    if settings.plain == "passages":
        programs += warm_up_passages(state.model, state.default_method(None))
    state.engine.forget()
    return programs
