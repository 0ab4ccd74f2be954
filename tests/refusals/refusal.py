"""What every refusal holds: its class, one line, and the value that is refused."""

import contextlib
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def refused(error: type[Exception], *named: object) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """The block raises ``error`` with one line that holds the text of each of ``named``."""
    with pytest.raises(error) as told:
        yield told
    text = str(told.value)
    assert text.isprintable() and 0 < len(text) < 1000, f"no message of one line: {text!r}"
    for value in map(str, named):
        assert value in text, f"{text!r} does not name {value!r}"
