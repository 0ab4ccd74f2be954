"""The Model Context Protocol over HTTP, with the bounds of the server itself."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import httpx2
import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.server.transport_security import TransportSecuritySettings

from jaxrag.server.http.checks import Checks
from jaxrag.server.http.connections import Connections
from jaxrag.server.settings import ServerSettings
from jaxrag.server.state.bodies import Bodies


def run_http(
    server: MCPServer[httpx2.AsyncClient], host: str, port: int, hosts: Sequence[str]
) -> None:
    """Serve streamable HTTP at /mcp until a signal ends it.

    Args:
      hosts: names by which it may be called beside ``host``; a browser's pages may be of the same.
    """
    settings = ServerSettings(host=host, port=port, allowed_hosts=tuple(hosts))
    asyncio.run(_served(server, settings))


async def _served(server: MCPServer[httpx2.AsyncClient], settings: ServerSettings) -> None:
    """With the bounds of `jaxrag serve` on connections, heads, bodies, hosts and origins."""
    connections = Connections(settings)
    bodies = Bodies(settings.max_bodies_bytes, 1)
    state: Any = SimpleNamespace(settings=settings, bodies=bodies, max_requests=None)
    security = TransportSecuritySettings(enable_dns_rebinding_protection=False)  # Checks do that
    app = server.streamable_http_app(stateless_http=True, transport_security=security)
    config = uvicorn.Config(
        Checks(app, state),
        host=settings.host,
        port=settings.port,
        log_level="warning",
        http=connections.protocol,  # type: ignore[arg-type]
        ws="none",
        server_header=False,
        proxy_headers=False,
    )
    asyncio.get_running_loop().set_exception_handler(connections.on_error)
    watching = asyncio.ensure_future(connections.watch())
    try:
        await uvicorn.Server(config).serve()
    finally:
        watching.cancel()
