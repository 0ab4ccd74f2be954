"""What the text of an answer has to be, as a request says it."""

import dataclasses
from typing import Literal, get_args

from jaxrag.base.errors import RequestError

GuideKind = Literal["json_schema", "regex", "choice"]

MOST_GUIDE = 1 << 16  # characters


@dataclasses.dataclass(frozen=True)
class Guide:
    """What the text of an answer has to be. Raises RequestError for what is none.

    Attributes:
      kind: of ``text``: a JSON schema; a regular expression without look-around and back
        references, for the whole answer; or a JSON list of texts, of which the answer is one.
      text: at most MOST_GUIDE characters.
    """

    kind: GuideKind
    text: str

    def __post_init__(self) -> None:
        if self.kind not in get_args(GuideKind):
            kinds = ", ".join(get_args(GuideKind))
            raise RequestError(f"guide: kind {self.kind!r}: expected one of {kinds}")
        if len(self.text) > MOST_GUIDE:
            raise RequestError(
                f"guide: {len(self.text)} characters: expected at most {MOST_GUIDE}; make "
                f"the {self.kind} smaller"
            )
