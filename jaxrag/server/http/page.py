"""The page for people: one file, with a nonce of its own every time it is served."""

import functools
import secrets
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

_MARK = "@NONCE@"  # stands in the file where its style and its script say the nonce
_POLICY = (
    "default-src 'self'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; object-src 'none'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect width="16" height="16" '
    'rx="3" fill="#0f685a"/><path d="M4 5h8M4 8h8M4 11h5" stroke="#fff" stroke-width="1.6" '
    'stroke-linecap="round"/></svg>'
)


@functools.cache
def _text() -> str:
    return files("jaxrag.server.http").joinpath("page.html").read_text(encoding="utf-8")


async def page(request: Request) -> Response:
    """GET /: the page. It runs no script and takes no style but its own, from nowhere else."""
    nonce = secrets.token_urlsafe(16)
    headers = {
        "content-security-policy": _POLICY.format(nonce=nonce),
        "cache-control": "no-store",
        "referrer-policy": "same-origin",
        "x-content-type-options": "nosniff",
    }
    return HTMLResponse(_text().replace(_MARK, nonce), headers=headers)


async def icon(request: Request) -> Response:
    """GET /favicon.svg and /favicon.ico: the same picture."""
    return Response(
        _ICON, media_type="image/svg+xml", headers={"cache-control": "public, max-age=86400"}
    )
