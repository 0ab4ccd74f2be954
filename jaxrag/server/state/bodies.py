"""Bodies in flight: so many bytes of all requests together, and a fair part for every tenant."""

from collections import Counter

from jaxrag.server.errors import busy

_AGAIN = 1.0  # seconds after which bodies of others have been read


class Bodies:
    """How many bytes of bodies are held. For the event loop's thread."""

    def __init__(self, most: int, tenants: int) -> None:
        """``most`` of all ``tenants`` together; a tenant's equal part is its own in any case."""
        self._most, self._part = most, most // tenants
        self._held = Counter[str]()

    @property
    def held(self) -> int:
        """Bytes now; below twice the limit."""
        return self._held.total()

    def hold(self, tenant: str, nbytes: int) -> None:
        """Count more bytes of a tenant. Raises Problem 429 where too many are held."""
        own, held = self._held[tenant] + nbytes, self.held + nbytes
        if held > self._most and own > self._part:
            raise busy(
                f"{held} bytes of bodies would be held and {self._most} may; send it again later",
                _AGAIN,
            )
        self._held[tenant] = own

    def release(self, tenant: str, nbytes: int) -> None:
        """They are held no more."""
        self._held[tenant] -= nbytes
