"""Who may ask from a browser: hosts by which the server may be called, and pages of other sites.

A name that an attacker owns can be made to lead to this machine (DNS rebinding), and then his page
is of the same origin as the server. A name that is an address, or has no dot, cannot be his.
"""

import ipaddress
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.types import Scope

from jaxrag.server.errors import forbidden
from jaxrag.server.settings import ServerSettings
from jaxrag.server.tenants import EVERY, is_loopback

_PAGE = "/"
_FOREIGN = ("cross-site", "same-site")  # values of Sec-Fetch-Site; another port is the same site
_HOST = re.compile(r"(?:\[([^\]]*)\]|([^:\[\]]*))(?::\d*)?")
_SHOWN = 100  # characters of what a client sent


def check_name(hosts: Sequence[str], settings: ServerSettings) -> None:
    """Problem 403 for a request under a Host by which nobody may call the server."""
    if settings.keys is not None and not settings.allowed_hosts:
        return  # a page under whatever name has no key
    for host in hosts:
        if not _is_allowed(_name(host), settings):
            raise forbidden(
                f"host {host[:_SHOWN]!r}: not a name of this server; its `allowed_hosts` adds it"
            )


def _is_allowed(name: str, settings: ServerSettings) -> bool:
    if name in settings.allowed_hosts or EVERY in settings.allowed_hosts:
        return True
    if any(name == urlsplit(origin).hostname for origin in settings.origins):
        return True
    if is_loopback(settings.host):
        return is_loopback(name)
    return bool(name) and ("." not in name or _is_address(name))


def _name(host: str) -> str:
    """Of a Host, without its port, and an address without brackets; "" for what is no Host."""
    match = _HOST.fullmatch(host.strip().lower())
    return "" if match is None else (match[1] or match[2]).removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def check_site(scope: Scope, settings: ServerSettings) -> None:
    """Problem 403 for what a page of another origin sends: its user did not ask for it.

    A browser sends a plain request to any server, this machine's own included, and says whence. The
    page itself may be opened from anywhere.
    """
    headers = dict(scope["headers"])
    origin = headers.get(b"origin", b"").decode("latin-1")
    site = headers.get(b"sec-fetch-site", b"").decode("latin-1").lower()
    if scope["method"] == "OPTIONS" or origin in settings.origins:
        return
    opens = headers.get(b"sec-fetch-mode") == b"navigate" and scope["path"] == _PAGE
    if site in _FOREIGN and not (opens and scope["method"] == "GET"):
        raise _foreign(origin or f"another origin ({site})")
    host = headers.get(b"host", b"").decode("latin-1")
    if origin and origin.partition("://")[2] != host:
        raise _foreign(origin)


def _foreign(origin: str) -> Exception:
    return forbidden(
        f"pages of {origin[:_SHOWN]} may not ask here; the server's `origins` lets them"
    )
