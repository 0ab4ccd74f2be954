"""One server takes over the socket of another, so that clients always find one that answers.

The new process asks the old one over a local socket that only processes of the same user may use,
and has the listening socket itself: connections that nobody has accepted yet are lost to neither.

    new  --- (connects) ----->  old     its socket, and what else is said of it
         <-- socket, about ---
         --- room ----------->          it ends an engine, where there is no place for another
         <-- made, or none ---
         ... loads, and accepts connections of its own ...
         --- switch --------->          it accepts none any more, answers what it has, and ends
         <-- done ------------
         <-- (end) -----------          it has ended

A new process that dies before the switch changes nothing.
"""

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from typing import Any

from jaxrag.base.errors import ConfigError

_MOST = 1 << 16  # bytes that the old process says of itself
_SWITCH, _ROOM, _DONE, _NONE = b"s", b"r", b"d", b"n"
_SECONDS = 30.0  # for one answer of the other process
_CREDENTIALS = struct.Struct("3i")  # pid, uid and gid


class Successors:
    """Has another process take over the socket of this one, if it asks."""

    def __init__(
        self,
        bound: socket.socket,
        about: Mapping[str, Any],
        switch: Callable[[], None],
        room: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait for it on a thread, until ``close``. Raises OSError where its name is taken.

        Args:
          bound: the socket that clients connect to.
          about: what it is told of this process, JSON-able.
          switch: accepts no connection any more, answers what there is, and ends; on that thread.
          room: ends one of several engines; False where there is but one.
        """
        self._room = room
        self._bound, self._about, self._switch = bound, dict(about), switch
        self._asked = socket.socket(socket.AF_UNIX)
        try:
            self._asked.bind(_place(bound.getsockname()))
        except OSError:
            self._asked.close()
            raise
        self._asked.listen(1)
        self._kept: socket.socket | None = None  # to who took over
        threading.Thread(target=self._serve, name="jaxrag-handover", daemon=True).start()

    def close(self) -> None:
        """Nobody takes over any more; who did is told that this server has ended."""
        for one in (self._asked, self._kept):
            if one is not None:
                _end(one)

    def _serve(self) -> None:
        while self._kept is None:
            try:
                asking, _ = self._asked.accept()
            except OSError:  # closed
                return
            with contextlib.suppress(OSError):
                if _same_user(asking):
                    self._hand_over(asking)
            if asking is not self._kept:
                asking.close()

    def _hand_over(self, asking: socket.socket) -> None:
        about = json.dumps(self._about | {"pid": os.getpid()}).encode()
        socket.send_fds(asking, [about], [self._bound.fileno()])
        while (command := asking.recv(1)) == _ROOM:
            asking.sendall(_DONE if self._room() else _NONE)
        if command != _SWITCH:  # it has ended, or was not ready in time
            return
        self.close()
        self._kept = asking
        self._switch()
        asking.sendall(_DONE)


class Predecessor:
    """The server that this process takes over from.

    Attributes:
      bound: the socket that clients connect to.
      about: what it says of itself.
      ended: called on a thread once it has been switched and its process has ended.
    """

    def __init__(self, address: tuple[Any, ...]) -> None:
        """Ask the server on an address of this machine. Raises ConfigError where none answers."""
        self._asked = socket.socket(socket.AF_UNIX)
        self._asked.settimeout(_SECONDS)
        descriptors: list[int] = []
        about = b""
        with contextlib.suppress(OSError):
            self._asked.connect(_place(address))
            if _same_user(self._asked):
                about, descriptors, _, _ = socket.recv_fds(self._asked, _MOST, 1)
        if not descriptors:
            self._asked.close()
            raise ConfigError(
                f"--take-over: no server of this user listens on {address[0]}:{address[1]}, or it "
                "is being taken over; leave --take-over out to start the first"
            )
        self.bound = socket.socket(fileno=descriptors[0])
        self.about: dict[str, Any] = json.loads(about)
        self.ended: Callable[[], None] = lambda: None

    def make_room(self, seconds: float) -> None:
        """Have it end one of its engines, once that has answered what it has.

        Raises ConfigError where it has but one, or has not done so in time.
        """
        self._asked.settimeout(seconds)
        done = self._ask(_ROOM)
        self._asked.settimeout(_SECONDS)
        if done != _DONE:
            raise ConfigError(
                "--take-over: the cluster has no room for another engine, and the server that runs "
                "has but one; add a machine, or end that server first"
            )

    def _ask(self, what: bytes) -> bytes:
        try:
            self._asked.sendall(what)
            return self._asked.recv(1)
        except OSError:
            return b""

    def switch(self) -> None:
        """Have it accept no more connections, and end once it has answered what it has.

        To be called when this process accepts them. Raises ConfigError where it does not answer.
        """
        if self._ask(_SWITCH) != _DONE:
            raise ConfigError(
                f"--take-over: process {self.about['pid']} does not answer; end it with SIGTERM"
            )
        threading.Thread(target=self._wait, name="jaxrag-before", daemon=True).start()

    def _wait(self) -> None:
        self._asked.settimeout(None)
        with contextlib.suppress(OSError):
            self._asked.recv(1)
        self.ended()

    def close(self) -> None:
        """Let it go on, if it was not switched."""
        _end(self._asked)


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # whoever waits for it wakes
    connection.close()


def _place(address: tuple[Any, ...]) -> str:
    """Where a server waits for who takes over: a name that ends with its process."""
    return f"\0jaxrag-serve-{address[0]}-{address[1]}"


def _same_user(other: socket.socket) -> bool:
    found = other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(found)[1] == os.geteuid())
