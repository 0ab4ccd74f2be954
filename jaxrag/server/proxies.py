"""Groups of readers that a proxy in front of the server names in a header."""

import ipaddress

from starlette.requests import Request

from jaxrag.base.groups import MAX_OWN, wrong_groups
from jaxrag.server.errors import forbidden, invalid
from jaxrag.server.settings import ServerSettings
from jaxrag.server.tenants import Access


def limited_by_proxy(access: Access, request: Request, settings: ServerSettings) -> Access:
    """What the key allows, less what the header of ``groups_header`` takes away.

    Raises Problem 403 for the header from an address that is not trusted, 400 for no names.
    """
    name = settings.groups_header
    values = [] if name is None else request.headers.getlist(name)
    if not values:
        return access
    peer = "" if request.client is None else request.client.host
    if not _is_trusted(peer, settings.trusted_proxies):
        raise forbidden(
            f"{name} from {peer or 'no address'}: only proxies of trusted_proxies may send it; "
            "leave it out"
        )
    groups = [it.strip() for value in values for it in value.split(",") if it.strip()]
    wrong = wrong_groups(groups, 0, MAX_OWN)
    if wrong is not None:
        raise invalid(f"{name}={wrong}, with commas between them")
    return access.limited(groups)


def _is_trusted(peer: str, networks: tuple[str, ...]) -> bool:
    try:
        address = ipaddress.ip_address(peer)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return any(address in ipaddress.ip_network(network) for network in networks)
