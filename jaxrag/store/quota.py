"""A store that stays below a number of bytes: counting, and removing what is coldest."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from jaxrag.errors import StoreError
from jaxrag.store.eviction import FILE, Counted, Heat, Name
from jaxrag.store.record import Record
from jaxrag.store.repository import Repository


class SizeLimit:
    """The limit of one local repository, as its chunks of one fingerprint meet it.

    The limit is on the chunks of every fingerprint, and any of them may have to leave.
    """

    def __init__(self, heat: Heat, repository: Repository, fingerprint: str) -> None:
        """Use ``SizeLimit.open``."""
        self._heat = heat
        self._repository = repository
        self._fingerprint = fingerprint

    @classmethod
    def open(
        cls,
        repository: Repository,
        fingerprint: str,
        max_bytes: int | None,
    ) -> "SizeLimit | None":
        """The limit of a repository; None when it has none and never had one.

        Chunks that stand there uncounted are counted, which reads every record. What is beyond the
        limit leaves at once.

        Raises:
            StoreError: a limit on something other than a directory, or one that is no positive
                number; the count cannot be read or written.
        """
        backend = repository.backend
        if backend.directory is None:
            if max_bytes is None:
                return None
            raise StoreError(
                f"{backend.location}: max_bytes={max_bytes} needs a local directory; put a local "
                "store with this limit in front of it (jaxrag.store.ReadThrough)"
            )
        path = backend.directory / FILE
        if max_bytes is None and not path.exists():
            return None

        def standing() -> Iterator[Counted]:
            for space in repository.spaces():
                for found in space.find_all():
                    if isinstance(found, Record):
                        name = Name(space.fingerprint, found.key)
                        yield Counted(name, found.nbytes, found.age)

        limit = cls(Heat(path, max_bytes, standing), repository, fingerprint)
        limit._heat.enforce(limit._drop)
        return limit

    @property
    def max_bytes(self) -> int | None:
        """The most that all chunks together may take."""
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
        counted = self._heat.settled(self._fingerprint)
        standing = {self._name(key) for key in keys()}
        self._heat.strike_versions([pair for pair in counted if pair[0] not in standing])

    def close(self) -> None:
        """Write down what was counted."""
        self._heat.close()

    def _name(self, key: str) -> Name:
        return Name(self._fingerprint, key)

    def _drop(self, names: Sequence[Name]) -> None:
        keys = defaultdict(list)
        for name in names:
            keys[name.fingerprint].append(name.key)
        for fingerprint, chosen in keys.items():
            space = self._repository.space(fingerprint)
            if space is not None:
                for key in chosen:
                    space.delete(key)
