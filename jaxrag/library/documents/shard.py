"""The part of a run that falls to one of several processes."""

import dataclasses
import re

import xxhash

from jaxrag.base.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Shard:
    """Part ``index`` of ``count`` of documents or questions.

    Processes that each take another part of the same share the work without talking. Raises
    ConfigError unless 0 <= index < count.
    """

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        """Refuse a part that does not exist."""
        if not 0 <= self.index < self.count:
            raise ConfigError(f"shard {str(self)!r}: expected i/n with 0 <= i < n, such as 0/8")

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """From "i/n"."""
        found = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
        if found is None:
            raise ConfigError(f"shard {text!r}: expected i/n with 0 <= i < n, such as 0/8")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def holds(self, name: str) -> bool:
        """Whether the document of that id belongs to this part: by hash, equal ids to one part."""
        if self.count == 1:
            return True
        digest = xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogateescape"))
        return digest % self.count == self.index

    def holds_line(self, index: int) -> bool:
        """Whether the line of that index, from 0, belongs to this part: in turn."""
        return index % self.count == self.index
