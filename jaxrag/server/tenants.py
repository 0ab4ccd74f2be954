"""Who asks: the tenant behind a key, and what it may do."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Tenant:
    """What all keys of a tenant have in common.

    Attributes:
      priority: the best class that it may ask for, 0 before 1 before 2.
      requests_per_minute: that are taken; None: any number.
      tokens_per_minute: of prompts and answers, that are taken; None: any number.
    """

    priority: int = 0
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None


@dataclasses.dataclass(frozen=True)
class Access:
    """What the sender of a request may do.

    Attributes:
      tenant: its name, "" where there are no keys.
      limits: of the tenant.
      admin: whether it may look into the engine and prefetch.
    """

    tenant: str = ""
    limits: Tenant = dataclasses.field(default_factory=Tenant)
    admin: bool = True

    def may_read(self, knowledge_base: str) -> bool:
        """Whether it may ask this served knowledge base."""
        return True


class Tenants:
    """The keys of a server. Without any every sender is one tenant, which may do everything."""

    def access(self, key: str | None) -> Access | None:
        """What a key allows; None for one that is unknown, or missing where one is needed."""
        return Access()


def bearer(header: str | None) -> str | None:
    """The key in an Authorization header, "Bearer KEY"; None where there is none."""
    scheme, _, key = (header or "").strip().partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None
