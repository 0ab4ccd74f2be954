"""From token ids to text: detokenised as it grows, with stop strings and the reason it ended."""

import dataclasses
from collections.abc import Callable, Sequence

from jaxrag.engine.sampling_params import FinishReason
from jaxrag.models.text.tokenizer import TextStream


@dataclasses.dataclass(frozen=True)
class AnswerText:
    """How the text of an answer is shown.

    Attributes:
      sure: in how many characters of its beginning stop strings are looked for, as none is in a
        call of a tool; None: in all.
      stop_too: with the stop string at which it ends.
      special: with special tokens.
    """

    sure: Callable[[str], int] | None = None
    stop_too: bool = False
    special: bool = False


PLAINLY = AnswerText()


@dataclasses.dataclass
class Answer:
    """One answer as it grows: ids, text, and why it ended."""

    stop: tuple[str, ...]
    stream: TextStream | None  # None without a tokenizer: text stays empty
    min_tokens: int = 0  # that stop strings are not looked for in
    how: AnswerText = PLAINLY
    token_ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    _held: str = ""  # may be the beginning of a stop string, not shown yet

    def push(self, token_ids: Sequence[int], ended: FinishReason | None = None) -> str:
        """Add tokens, and say whether they were the last; returns text that is certain now.

        Tokens after the one that completes a stop string are left out.
        """
        shown = ""
        for token_id in token_ids:
            if self.finish_reason is not None:
                return shown
            self.token_ids.append(token_id)
            shown += "" if self.stream is None else self._show(self.stream.push(token_id))
        if ended is not None and self.finish_reason is None:
            shown += self._finish(ended)
        return shown

    def _finish(self, reason: FinishReason) -> str:
        shown = "" if self.stream is None else self._show(self.stream.flush())
        if self.finish_reason is None:
            shown += self._held
            self.text += self._held
            self._held, self.finish_reason = "", reason
        return shown

    def _show(self, piece: str) -> str:
        """Move text from held to shown; a stop string ends the answer just before it."""
        self._held += piece
        stop = self.stop if len(self.token_ids) > self.min_tokens else ()
        free = len(self._held)
        if stop and self.how.sure is not None:
            free = max(0, self.how.sure(self.text + self._held) - len(self.text))
        places = [(self._held.find(word), len(word)) for word in stop]
        stops = [(at, size) for at, size in places if 0 <= at < free]
        if stops:
            at, size = min(stops)
            shown, self._held = self._held[: at + size * self.how.stop_too], ""
            self.finish_reason = "stop"
        else:
            keep = max((overlap(self._held, word) for word in stop), default=0)
            cut = min(free, len(self._held) - keep)
            shown, self._held = self._held[:cut], self._held[cut:]
        self.text += shown
        return shown


def overlap(text: str, word: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``word``."""
    return next(
        (n for n in range(min(len(text), len(word) - 1), 0, -1) if text.endswith(word[:n])), 0
    )
