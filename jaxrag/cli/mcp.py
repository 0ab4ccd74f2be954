"""`jaxrag mcp`: the knowledge bases of a running server as tools of agents."""

import os
from urllib.parse import urlsplit

from jaxrag.base.errors import ConfigError
from jaxrag.base.installed import installs
from jaxrag.cli.command import SUMMARIES, Args, command, flag, value, values
from jaxrag.cli.output import note

KEY_VARIABLE = "JAXRAG_API_KEY"  # in the environment: the key of every request
_URL = "http://127.0.0.1:8000"


def run(args: Args) -> None:
    """Serve until the client leaves or a signal comes."""
    if urlsplit(args.url).scheme not in ("http", "https") or not urlsplit(args.url).hostname:
        raise ConfigError(f"--url {args.url}: expected http://HOST:PORT")
    listen = None if args.listen is None else _address(args.listen)
    if args.allowed_host and listen is None:
        raise ConfigError("--allowed-host needs --listen HOST:PORT")
    try:
        from jaxrag.server.http.tools import run_http
        from jaxrag.server.mcp import make_server
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed; {installs('mcp')} does it") from None
    key = os.environ.get(KEY_VARIABLE)
    if listen is None:
        make_server(args.url, key=key, writes=args.write).run("stdio")
        return
    if key is not None:
        note(f"{KEY_VARIABLE} is not used with --listen: who calls brings a key of their own")
    server = make_server(args.url, writes=args.write, forwards=True)
    note(f"tools at http://{args.listen}/mcp")
    run_http(server, *listen, args.allowed_host)


def _address(text: str) -> tuple[str, int]:
    """Host and port. Raises ConfigError for what is none."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--listen {text}: expected HOST:PORT, as in 127.0.0.1:8001")
    return host, int(port)


COMMAND = command(
    "mcp",
    run,
    f"{SUMMARIES['mcp']} (Model Context Protocol, on standard input and output); a key is "
    f"taken from {KEY_VARIABLE}",
    "jaxrag mcp --url http://127.0.0.1:8000",
    value("--url", None, f"of the server ({_URL})", _URL),
    flag("--write", "also a tool that adds documents (search, ask, list)"),
    value(
        "--listen",
        "HOST:PORT",
        "serve streamable HTTP at /mcp instead; requests keep the Authorization of who calls",
    ),
    values(
        "--allowed-host",
        "NAME",
        "with --listen: a name by which it may be called; repeatable (that of --listen)",
    ),
)
