"""What stands around passages in the prompts of RAG stacks, as data: configs/passages."""

import dataclasses
import re
from collections.abc import Mapping

from jaxrag.base.errors import ConfigError
from jaxrag.base.installed import config_names, config_path
from jaxrag.base.tables import build, read_toml

FLAGS = re.MULTILINE | re.IGNORECASE  # of the patterns of rules


@dataclasses.dataclass(frozen=True)
class PassageRules:
    """How passages are found; read from a TOML file as configs/passages/common.toml.

    Attributes:
      certain: regular expressions by name of what stands around passages; one is enough.
      walls: delimiters, of which one kind has to open two passages.
      least: bytes of the smallest block.
      whole: bytes of the largest that is not cut by its own text.
      reach: bytes to each side in which such a cut is the best place.
      apart: characters between two delimiters that the text repeats.
      worth: tokens of all blocks of a prompt together, below which none is read as one.
    """

    certain: Mapping[str, str]
    walls: Mapping[str, str]
    least: int
    whole: int
    reach: int
    apart: int
    worth: int

    def __post_init__(self) -> None:
        """Refuse patterns that are none, and sizes that cut nothing: ConfigError."""
        for name, pattern in (*self.certain.items(), *self.walls.items()):
            try:
                re.compile(pattern, FLAGS)
            except re.error as error:
                raise ConfigError(f"rule {name!r}: {pattern!r} is no pattern: {error}") from None
        if not (0 < self.least <= self.reach <= self.whole and min(self.apart, self.worth) > 0):
            raise ConfigError(
                f"least={self.least}, reach={self.reach}, whole={self.whole}, apart={self.apart}, "
                f"worth={self.worth}: expected positive numbers, the first three in rising order"
            )


def passage_rules(name: str) -> PassageRules:
    """Rules of configs/passages by name, or of a TOML file by path. Raises ConfigError."""
    path = config_path(name, "passages")
    if path is None:
        names = ", ".join(config_names("passages"))
        raise ConfigError(f"passage rules {name!r}: expected one of {names} or a .toml file")
    return build(PassageRules, read_toml(path), name)


def closer(rules: PassageRules) -> PassageRules:
    """Rules for what may hold the end of one passage and the beginning of the next."""
    reach = max(rules.reach // 4, rules.least)
    return dataclasses.replace(rules, whole=max(rules.whole // 4, reach), reach=reach)
