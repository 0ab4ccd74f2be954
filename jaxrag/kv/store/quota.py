"""A store that stays below a number of bytes: counting, and removing what is coldest."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from jaxrag.base.errors import StoreError
from jaxrag.kv.store.eviction import FILE, Counted, Heat, Name
from jaxrag.kv.store.namespace import Namespace
from jaxrag.kv.store.record import Record


class SizeLimit:
    """The limit of one fingerprint in a local repository: on its own chunks; only they leave."""

    def __init__(self, heat: Heat, space: Namespace) -> None:
        """Use ``SizeLimit.open``."""
        self._heat = heat
        self._space = space

    @classmethod
    def open(cls, space: Namespace, max_bytes: int | None) -> "SizeLimit | None":
        """The limit of a fingerprint; None when none is given and the repository never had one.

        ``space`` has its chunks however long, sealed or not.

        Chunks that stand there uncounted are counted, which reads their records. What is beyond
        the limit leaves at once.

        Raises:
            StoreError: a limit on something other than a directory, or one that is no positive
                number; the count cannot be read or written.
        """
        backend, fingerprint = space.backend, space.fingerprint
        if backend.directory is None:
            if max_bytes is None:
                return None
            raise StoreError(
                f"{backend.location}: max_bytes={max_bytes} needs a local directory; put a local "
                "store with this limit in front of it (jaxrag.kv.store.ReadThrough)"
            )
        path = backend.directory / FILE
        if max_bytes is None and not path.exists():
            return None

        def standing() -> Iterator[Counted]:
            for found in space.find_all():
                if isinstance(found, Record):
                    yield Counted(Name(fingerprint, found.key), found.nbytes, found.age)

        heat = Heat(path, fingerprint, max_bytes, standing)
        limit = cls(heat, space)
        limit._heat.enforce(limit._drop)
        return limit

    @property
    def max_bytes(self) -> int | None:
        """The most that all chunks of the fingerprint together may take."""
        return self._heat.max_bytes

    def admit(self, key: str, nbytes: int) -> None:
        """Make room for a chunk; before a byte of it is written."""
        self._heat.admit(self._name(key), nbytes, self._drop)

    def settle(self, key: str, nbytes: int) -> None:
        """An admitted chunk is committed, or will never be."""
        self._heat.settle(self._name(key), nbytes, self._drop)

    def read(self, keys: Iterable[str]) -> None:
        """Chunks were read."""
        self._heat.read(map(self._name, keys))

    def strike(self, keys: Iterable[str]) -> None:
        """Chunks are gone."""
        self._heat.strike(map(self._name, keys))

    def recount(self, keys: Callable[[], Iterable[str]]) -> None:
        """Strike off what is counted under the fingerprint and is not among the ``keys``."""
        counted = self._heat.settled()
        standing = {self._name(key) for key in keys()}
        self._heat.strike_versions([pair for pair in counted if pair[0] not in standing])

    def close(self) -> None:
        """Write down what was counted."""
        self._heat.close()

    def _name(self, key: str) -> Name:
        return Name(self._heat.fingerprint, key)

    def _drop(self, names: Sequence[Name]) -> None:
        for name in names:
            self._space.delete(name.key)
