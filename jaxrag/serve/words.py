"""Texts and words that a question cannot be made of."""

from collections.abc import Sequence

from jaxrag.base.errors import RequestError
from jaxrag.models.text.tokenizer import Tokenizer

_SHOWN_WORDS = 5  # of those that a tokenizer lacks
_SHOWN_CHARACTERS = 40  # of each


def check_text(what: str, text: str) -> None:
    """Refuse a text without words, or that is no Unicode: RequestError that names ``what``."""
    if not text.strip():
        raise RequestError(f"{what} is empty; expected a text with words in it")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{what} holds half of a surrogate pair at character {error.start}; repair the text"
        ) from None


def check_words(tokenizer: Tokenizer, question: str) -> None:
    """Refuse a question whose sense the tokenizer would lose: RequestError."""
    unknown = tokenizer.unknown_words(question)
    if unknown and (tokenizer.is_word_level or not tokenizer.knows_a_word(question)):
        raise RequestError(
            f"the question holds {some_of(unknown)}: not in this model's vocabulary of "
            f"{tokenizer.vocab_size} entries; ask in words that it knows, or use another model"
        )


def some_of(words: Sequence[str]) -> str:
    """Up to five of them, quoted, and how many more there are."""
    shown = ", ".join(repr(word[:_SHOWN_CHARACTERS]) for word in words[:_SHOWN_WORDS])
    more = len(words) - _SHOWN_WORDS
    return shown + (f" and {more} more" if more > 0 else "")
