"""What tests of servers share: waiting for what happens beside them, and files of keys."""

import hashlib
import time


def until(true, seconds=60):
    """Wait for it, as long as a busy machine may take."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def key_file(path, keys, head=""):
    """A file of keys: each, and what it says beside its tenant, which has the key's own name."""
    for key, more in keys.items():
        digest = hashlib.sha256(key.encode()).hexdigest()
        tenant = "" if "tenant =" in more else f'tenant = "{key}"'
        head += f'\n[[keys]]\nsha256 = "{digest}"\n{tenant}\n{more}\n'
    path.write_text(head, encoding="utf-8")
    return str(path)
