"""DELETE /v1/plain: what is kept of a tenant's pasted passages and documents goes."""

from typing import Any

from jaxrag.server.errors import invalid
from jaxrag.server.state.entry import Call
from jaxrag.server.state.replicas import Replicas


def forget_passages(call: Call) -> dict[str, Any]:
    """Drop KV and token ids of the tenant, in memory and on disk."""
    state, tenant = call.state, call.access.tenant
    call.library.check_writes(call.access)
    if state.engine.leads:
        raise invalid("several processes hold the model: start the server again to forget")
    keys = state.memory.forget(tenant)
    state.token_cache.forget(tenant)
    state.engine.drop(keys)
    count = len(keys)
    if isinstance(state.engine, Replicas):
        count += state.engine.forget_tenant(tenant)
    return {"object": "plain", "deleted": True, "passages": count}
