"""Text of documents as a terminal may be given it."""

import re

# C0 and C1 controls, which move the cursor, colour and rename; separators of lines; overrides of
# direction, which show one name as another.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def printable(text: str, keep: str = "") -> str:
    """The text with control characters spelled as Python escapes; ``keep`` stays."""
    return _UNSAFE.sub(lambda m: m[0] if m[0] in keep else ascii(m[0])[1:-1], text)
