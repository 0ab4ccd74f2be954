"""Which process encodes a chunk now, so that no other of its repository does so too.

``leases/<16 digits of fingerprint>/<key>`` names a holder, and until when its lease holds. A holder
renews it while it works. A lease that is not renewed is over, and whoever wants the chunk takes it:
by its time, and where the clocks of machines differ, by having watched it unchanged for as long. A
chunk that two encode all the same is put once: the first put of a key wins.
"""

import contextlib
import functools
import json
import os
import threading
import time

from jaxrag.base.errors import StoreError
from jaxrag.kv.store.backend import Backend
from jaxrag.kv.store.record import MAX_RECORD_BYTES, new_attempt, parse_object

LEASE_SECONDS = 10.0  # without a word of its holder, after which a lease is over
_RENEWALS = 3  # in the time of a lease
_TRIES = 3  # to write a lease that is not there
_REMEMBERED = 10  # times of a lease for which one of others is watched


class Leases:
    """The leases of one fingerprint's chunks. Safe to share between threads."""

    def __init__(
        self,
        location: str | os.PathLike[str],
        fingerprint: str,
        seconds: float = LEASE_SECONDS,
    ) -> None:
        """Of the repository at a path or URL; nothing is read yet."""
        self._location = location
        self._prefix = f"leases/{fingerprint[:16]}/"
        self._seconds = seconds
        self._holder = new_attempt()
        self._held: dict[str, bytes] = {}  # by key, the generation of a lease of ours
        self._ended: dict[str, bytes] = {}  # likewise, to be removed
        self._watched: dict[str, tuple[bytes, float]] = {}  # leases of others, and since when
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @functools.cached_property
    def _backend(self) -> Backend:
        return Backend(self._location, "default", durable=False)

    def take(self, key: str) -> bool:
        """Whether the lease of a key is this process's now; it is renewed until ``release``.

        Raises StoreError where the repository cannot be read or written.
        """
        with self._changed:
            if key in self._held:
                return True
        path = self._prefix + key
        for _ in range(_TRIES):
            generation = self._backend.generation(path)
            found = self._backend.read_many([path], MAX_RECORD_BYTES)[0]
            if found is not None and not self._is_over(key, generation, found):
                return False
            mine = self._backend.write_if(path, self._text(), generation)
            if mine is not None:  # else another was first, who is found there now
                break
        else:  # as where there is no bucket
            raise StoreError(f"{self._location}: {path} is not there, and cannot be written")
        with self._changed:
            self._watched.pop(key, None)
            self._held[key] = mine
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._keep, name="jaxrag-leases", daemon=True
                )
                self._thread.start()
        return True

    def release(self, key: str) -> None:
        """Others may take the lease of a key, if it was this process's; at once, on a thread."""
        with self._changed:
            if key in self._held:
                self._ended[key] = self._held.pop(key)
                self._changed.notify_all()

    def remove_stale(self, grace_seconds: float) -> None:
        """Remove leases that have been over for the grace, as of holders that died."""
        for key in self._backend.paths(self._prefix):
            path = self._prefix + key
            generation = self._backend.generation(path)
            found = self._backend.read_many([path], MAX_RECORD_BYTES)[0]
            if found is not None and _until(found) + grace_seconds < time.time():
                self._backend.delete_if(path, generation)
        self._backend.remove_stale(self._prefix, grace_seconds, False, lambda key: False)

    def close(self) -> None:
        """Release all leases, and wait until they are."""
        with self._changed:
            thread = self._thread
            self._ended |= self._held
            self._held.clear()
            self._changed.notify_all()
        if thread is not None:
            thread.join()

    def _is_over(self, key: str, generation: bytes, found: bytes) -> bool:
        now = time.monotonic()
        with self._changed:
            last, since = self._watched.get(key, (b"", now))
            if last != generation:
                old = now - _REMEMBERED * self._seconds
                self._watched = {k: it for k, it in self._watched.items() if it[1] > old}
                self._watched[key] = generation, now
                since = now
        return _until(found) < time.time() or now - since > self._seconds

    def _text(self) -> bytes:
        now = time.time()
        lease = {"holder": self._holder, "taken": now, "until": now + self._seconds}
        return json.dumps(lease).encode()

    def _keep(self) -> None:
        """Renew what is held and remove what has ended, until there is nothing of either."""
        renewed = time.monotonic()
        while True:
            with self._changed:
                left = renewed + self._seconds / _RENEWALS - time.monotonic()
                if not self._ended and self._held and left > 0:
                    self._changed.wait(left)
                ended, self._ended = self._ended, {}
                if not ended and not self._held:
                    self._thread = None
                    return
                held = dict(self._held)
            for key, generation in ended.items():
                with contextlib.suppress(StoreError):  # it will be over by itself
                    self._backend.delete_if(self._prefix + key, generation)
            if time.monotonic() - renewed >= self._seconds / _RENEWALS:
                renewed = time.monotonic()
                for key, generation in held.items():
                    self._renew(key, generation)

    def _renew(self, key: str, generation: bytes) -> None:
        try:
            mine = self._backend.write_if(self._prefix + key, self._text(), generation)
        except StoreError:  # the next time, if there is one
            return
        with self._changed:
            if self._ended.get(key) == generation and mine is not None:
                self._ended[key] = mine  # released meanwhile
            elif self._held.get(key) == generation:
                del self._held[key]
                if mine is not None:  # else another took it, as this process was silent too long
                    self._held[key] = mine


def _until(lease: bytes) -> float:
    """When a lease is over unless it is renewed, in seconds since 1970; 0 of a damaged one."""
    with contextlib.suppress(StoreError):
        until = parse_object(lease).get("until")
        if isinstance(until, float):
            return until
    return 0.0
