"""Token ids of texts that were asked before, so that a known passage is not tokenised again."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable

from jaxrag.base.types import HostArray

_ENTRY_BYTES = 256  # of an entry beside its ids: digest, array object and places in the table


class TokenCache:
    """The ids of texts seen last, in a bounded number of bytes. For any thread.

    What one owner's texts are kept under, no text of another has. Texts themselves are not kept.

    Attributes:
      hits: texts whose ids were there.
      misses: texts that were tokenised.
      nbytes: that are held.
    """

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        """``max_bytes``: beyond which the ids that were asked for longest ago are dropped."""
        self.hits = self.misses = self.nbytes = 0
        self._max_bytes = max_bytes
        self._ids: OrderedDict[tuple[str, bytes], HostArray] = OrderedDict()
        self._lock = threading.Lock()

    def ids(self, owner: str, text: str, encode: Callable[[str], HostArray]) -> HostArray:
        """What ``encode`` gives for the text, int32 [T], read-only.

        ``encode`` has to be the same at every call.
        """
        key = (owner, _digest(owner, text))
        with self._lock:
            ids = self._ids.get(key)
            if ids is not None:
                self._ids.move_to_end(key)
                self.hits += 1
                return ids
        made = encode(text).copy()  # others write into what they are given
        made.setflags(write=False)
        with self._lock:
            self.misses += 1
            if key not in self._ids:
                self._ids[key] = made
                self.nbytes += made.nbytes + _ENTRY_BYTES
                while self.nbytes > self._max_bytes:
                    _, left = self._ids.popitem(last=False)
                    self.nbytes -= left.nbytes + _ENTRY_BYTES
        return made

    def forget(self, owner: str) -> None:
        """Drop what is kept of the texts of one owner."""
        with self._lock:
            for key in [key for key in self._ids if key[0] == owner]:
                self.nbytes -= self._ids.pop(key).nbytes + _ENTRY_BYTES


def _digest(owner: str, text: str) -> bytes:
    name = owner.encode()
    hashed = hashlib.blake2b(len(name).to_bytes(8) + name, digest_size=32)
    hashed.update(text.encode())
    return hashed.digest()
