"""The processes that hold one model: the leader sends each iteration of its engine to the others.

Every process makes the same iterations, so all of them run the same programs in the same order, and
nothing but the leader looks at a clock or at a client.

    leader  --- hello, nonce ------------>  follower      both prove that they know the secret
            <-- proof, who it is ---------
            --- proof ------------------->
            --- iteration 7: now, commands ->             then each makes the iteration
            <-- iteration 7 done, digest --               the digests must be equal
            <-- batch 3 loaded -----------                a part of chunks was read beside these
            --- beat --------- and back --                every second, so that silence means death
"""

import contextlib
import hashlib
import hmac
import json
import queue
import re
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Literal

import jax

from jaxrag.base.errors import ConfigError, EngineError, RequestError
from jaxrag.base.sharding import processes_of
from jaxrag.engine.wire import MAX_BYTES, Command, EngineIteration, iteration_bytes, iteration_of
from jaxrag.kv.store import KVStore
from jaxrag.models.model import Model

JOIN_SECONDS = 60.0  # in which all processes come to the leader, once all have their models
STALL_SECONDS = 15.0  # of silence after which a process counts as dead
BEAT_SECONDS = 1.0
_END_SECONDS = 10.0
_MEET_SECONDS = 5.0  # for who comes to prove what it knows
_LOOK_SECONDS = 0.05  # between two looks at who has
_MOST_MEETING = 64  # at once
_MOST_OPEN = 4096  # iterations and batches that not all have spoken of

_SECRET = 32  # bytes
_RANK = re.compile("[0-9]{1,6}")
_SAID = 1 << 16  # bytes that a follower says at once, at most
_HEAD = struct.Struct(">cQ")
_DONE = struct.Struct(">QI")

_LOADED = struct.Struct(">Q")

# hello, iteration, done, loaded, beat, error, end
Letter = Literal[b"h", b"t", b"d", b"l", b"b", b"e", b"x"]


class RankLost(EngineError):
    """A process of the model died, fell silent or made another iteration than the leader."""


class _Link:
    """Frames over a socket: a letter, a length, bytes. ``send`` is for any thread."""

    def __init__(self, sock: socket.socket, seconds: float, most: int) -> None:
        """``seconds`` of silence raise TimeoutError; frames above ``most`` bytes, EngineError."""
        sock.settimeout(seconds)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock, self._most, self._lock = sock, most, threading.Lock()

    def send(self, kind: Letter, data: bytes = b"") -> None:
        with self._lock:
            self._sock.sendall(_HEAD.pack(kind, len(data)) + data)

    def receive(self) -> tuple[bytes, bytes]:
        """The next frame but beats. Raises EOFError where the other end is gone."""
        while True:
            kind, size = _HEAD.unpack(self.exactly(_HEAD.size))
            if size > self._most:
                raise EngineError(f"a frame of {size} bytes: at most {self._most} are taken")
            data = self.exactly(size)
            if kind != b"b":
                return kind, data

    def exactly(self, size: int) -> bytes:
        """So many bytes, without a head."""
        data = bytearray()
        while len(data) < size:
            part = self._sock.recv(min(size - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def say(self, data: bytes) -> None:
        """Bytes without a head."""
        self._sock.sendall(data)

    def seconds(self, seconds: float) -> None:
        """From now on this much silence is too long."""
        self._sock.settimeout(seconds)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def _proof(secret: bytes, who: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(secret, b"".join((who, *nonces)), hashlib.sha256)


class Leader:
    """Process 0: sends iterations, and knows whether all others make them.

    Attributes:
      stores: that requests may name, by name; the same on every process.
      lost: why the engine cannot go on; None while it can.
    """

    def __init__(self, stores: Mapping[str, KVStore], links: Mapping[int, _Link]) -> None:
        self.stores, self._links = dict(stores), dict(links)
        self.lost: RankLost | None = None
        self._on_lost: list[Callable[[RankLost], None]] = []
        self._digests: dict[int, dict[int, int]] = {}  # digests, by iteration and rank
        self._loaded: dict[int, set[int]] = {}  # who has read its part, by batch
        self._on_loaded: Callable[[int], None] | None = None
        self._lock = threading.Lock()
        self._number = 0
        self._over = threading.Event()
        self._listeners = [
            threading.Thread(
                target=self._listen, args=(rank, link), name=f"jaxrag-rank-{rank}", daemon=True
            )
            for rank, link in self._links.items()
        ]
        for thread in self._listeners:
            thread.start()
        threading.Thread(target=self._beat, name="jaxrag-beat", daemon=True).start()

    def on_lost(self, call: Callable[[RankLost], None]) -> None:
        """Have it called, on any thread, once a process is lost; at once where one is."""
        with self._lock:
            self._on_lost.append(call)
            lost = self.lost
        if lost is not None:
            call(lost)

    def on_loaded(self, call: Callable[[int], None]) -> None:
        """Have it called, on any thread, once every process has read its part of a batch."""
        self._on_loaded = call

    def loaded(self, number: int, rank: int = 0) -> None:
        """A process has read its part of a batch."""
        with self._lock:
            ranks = self._loaded.setdefault(number, set())
            ranks.add(rank)
            all_there = len(ranks) > len(self._links)
            if all_there:
                del self._loaded[number]
            many = len(self._loaded) > _MOST_OPEN
        if many:
            self.lose(f"rank {rank} speaks of batches that there are not")
        if all_there and self._on_loaded is not None:
            self._on_loaded(number)

    def name_of(self, store: KVStore) -> str:
        """The name of a store. Raises RequestError for one that other processes do not have."""
        for name, known in self.stores.items():
            if known is store:
                return name
        raise RequestError(
            "this request reads a store that only one process has; ask a knowledge base that the "
            "server was started with"
        )

    def send(self, now: float, commands: Sequence[Command] = (), *, rests: bool = False) -> int:
        """Have all others make an iteration, or rest; its number. Raises RankLost."""
        if self.lost is not None:
            raise self.lost
        self._number += 1
        data = iteration_bytes(EngineIteration(self._number, now, tuple(commands), rests))
        for rank, link in self._links.items():
            try:
                link.send(b"t", data)
            except OSError as error:
                raise self.lose(f"rank {rank} is gone ({error})") from None
        return self._number

    def done(self, iteration: int, digest: int, rank: int = 0) -> None:
        """A process made an iteration."""
        with self._lock:
            digests = self._digests.setdefault(iteration, {})
            digests[rank] = digest
            same = len(set(digests.values())) == 1
            if len(digests) > len(self._links):
                del self._digests[iteration]
            many = len(self._digests) > _MOST_OPEN
        if many:
            self.lose(f"rank {rank} speaks of iterations that there are not")
        if not same:
            self.lose(f"rank {rank} made another iteration {iteration} than the others")

    def lose(self, why: str) -> RankLost:
        """The engine cannot go on."""
        if self._over.is_set() and self.lost is None:  # all end
            return RankLost(why)
        with self._lock:
            first = self.lost is None
            if self.lost is None:
                self.lost = RankLost(f"{why}; the engine of all processes ends: start them again")
            lost, calls = self.lost, list(self._on_lost)
        if first:
            self._over.set()
            for link in self._links.values():
                with contextlib.suppress(OSError):
                    link.send(b"e", str(lost).encode()[:_SAID])
            for call in calls:
                call(lost)
        return lost

    def close(self) -> None:
        """Let all others end, and wait a while until they have heard it."""
        self._over.set()
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.send(b"x")
        for thread in self._listeners:
            thread.join(_END_SECONDS)
        for link in self._links.values():
            link.close()

    def _listen(self, rank: int, link: _Link) -> None:
        why = ""
        while not why:
            try:
                kind, data = link.receive()
            except TimeoutError:
                why = f"rank {rank} has been silent for {STALL_SECONDS:g} s"
            except (OSError, EOFError, EngineError):
                why = f"rank {rank} ended"
            else:
                if kind == b"e":
                    why = f"rank {rank}: {data.decode('utf-8', 'replace')}"
                elif kind == b"d" and len(data) == _DONE.size:
                    iteration, digest = _DONE.unpack(data)
                    self.done(iteration, digest, rank)
                elif kind == b"l" and len(data) == _LOADED.size:
                    self.loaded(_LOADED.unpack(data)[0], rank)
        self.lose(why)
        link.close()

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            for link in self._links.values():
                with contextlib.suppress(OSError):  # who listens to it finds it gone
                    link.send(b"b")


class Follower:
    """Any other process: takes iterations, and says what it made of them."""

    def __init__(
        self, stores: Mapping[str, KVStore], link: _Link, lost: Callable[[str], None]
    ) -> None:
        """``lost`` is called on another thread, where the leader is gone or says why all ends."""
        self._stores, self._link, self._lost = dict(stores), link, lost
        self._iterations: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._over = threading.Event()
        for work in (self._listen, self._beat):
            threading.Thread(target=work, name="jaxrag-leader", daemon=True).start()

    def iterations(self) -> Iterator[EngineIteration]:
        """The leader's iterations, until it ends. Raises EngineError for what is none."""
        while (data := self._iterations.get()) is not None:
            yield iteration_of(data, self._stores)

    def done(self, iteration: int, digest: int) -> None:
        """This process made an iteration."""
        with contextlib.suppress(OSError):  # who listens finds it gone
            self._link.send(b"d", _DONE.pack(iteration, digest))

    def loaded(self, number: int) -> None:
        """This process has read its part of a batch of chunks; on any thread."""
        with contextlib.suppress(OSError):
            self._link.send(b"l", _LOADED.pack(number))

    def fail(self, why: str) -> None:
        """Tell the leader why this process ends."""
        with contextlib.suppress(OSError):
            self._link.send(b"e", why.encode()[:_SAID])

    def _listen(self) -> None:
        why = ""
        while not why:
            try:
                kind, data = self._link.receive()
            except TimeoutError:
                why = f"the leader has been silent for {STALL_SECONDS:g} s"
            except (OSError, EOFError, EngineError):
                why = "the leader ended"
            else:
                if kind == b"x":
                    break
                if kind == b"e":
                    why = data.decode("utf-8", "replace")
                else:
                    self._iterations.put(data)
        self._over.set()
        self._link.close()
        if why:
            self._lost(why)
        self._iterations.put(None)

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):
                self._link.send(b"b")


def meet(
    model: Model,
    address: tuple[str, int],
    about: Mapping[str, str],
    stores: Mapping[str, KVStore],
    lost: Callable[[str], None],
) -> Leader | Follower:
    """Join the processes that hold a model; all of them call it.

    The leader listens, and the others learn where, and the secret of this start, by a collective.

    Args:
      address: host and port where process 0 listens; port 0: any.
      about: what must be the same on every process, by name.
      stores: that requests may name; those of the same name must be the same.
      lost: as ``Follower`` takes it.

    Raises:
      ConfigError: on all processes, where they are not alike or cannot meet.
    """
    rank = processes_of(model.mesh).index(jax.process_index())
    server: socket.socket | None = None
    mine: tuple[str, int, bytes] | str = ""
    if rank == 0:
        try:
            server, secret = _listen(*address)
            mine = (address[0], server.getsockname()[1], secret)
        except ConfigError as error:
            mine = str(error)
    answer = model.exchange(mine)[0]
    if isinstance(answer, str):
        raise ConfigError(answer)
    host, port, secret = answer
    if server is None:
        return follow((host, port), secret, rank, about, stores, lost)
    return lead(server, secret, len(processes_of(model.mesh)), about, stores)


def _listen(host: str, port: int = 0) -> tuple[socket.socket, bytes]:
    """A socket for the others, and the secret that they must know. Raises ConfigError."""
    try:
        return socket.create_server((host, port)), secrets.token_bytes(_SECRET)
    except OSError as error:
        raise ConfigError(
            f"plan address {host}:{port} cannot be had ({error.strerror}); name another of this "
            "machine with --plan HOST:PORT"
        ) from None


def lead(
    server: socket.socket,
    secret: bytes,
    processes: int,
    about: Mapping[str, str],
    stores: Mapping[str, KVStore],
) -> Leader:
    """Wait for all other processes, and lead them.

    Args:
      about: what must be the same on every process, by name.

    Raises:
      ConfigError: one of them differs, comes twice or does not come.
    """
    links: dict[int, _Link] = {}
    end = time.monotonic() + JOIN_SECONDS
    with server, contextlib.closing(_comers(server, secret, end)) as comers:
        for link, stated in comers:
            wrong = _unlike(stated, about, links, processes)
            if wrong:
                for other in (link, *links.values()):
                    with contextlib.suppress(OSError):
                        other.send(b"e", wrong.encode())
                    other.close()
                raise ConfigError(wrong)
            links[int(stated["rank"])] = link
            if len(links) == processes - 1:
                break
        else:
            for link in links.values():
                link.close()
            raise ConfigError(
                f"{processes - 1 - len(links)} of {processes} processes did not come within "
                f"{JOIN_SECONDS:g} s; start all of them"
            )
    for link in links.values():
        link.seconds(STALL_SECONDS)
        link.send(b"h")
    return Leader(stores, links)


def _comers(
    server: socket.socket, secret: bytes, end: float
) -> Generator[tuple[_Link, dict[str, str]]]:
    """Who comes and knows the secret, until a moment; several are met at once, each for a while."""
    met: queue.SimpleQueue[tuple[_Link, dict[str, str] | None]] = queue.SimpleQueue()
    meeting, over = 0, threading.Event()

    def meet_one(link: _Link) -> None:
        timer = threading.Timer(_MEET_SECONDS, link.close)
        timer.start()
        stated = _met(link, secret)
        timer.cancel()
        met.put((link, stated))
        if over.is_set():
            link.close()

    server.settimeout(_LOOK_SECONDS)
    try:
        while time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                link = _Link(server.accept()[0], _MEET_SECONDS, _SAID)
                if meeting < _MOST_MEETING:
                    meeting += 1
                    threading.Thread(target=meet_one, args=(link,), daemon=True).start()
                else:
                    link.close()
            while not met.empty():
                link, stated = met.get()
                meeting -= 1
                if stated is None:  # a stranger
                    link.close()
                else:
                    yield link, stated
    finally:
        over.set()
        while not met.empty():
            met.get()[0].close()


def follow(
    address: tuple[str, int],
    secret: bytes,
    rank: int,
    about: Mapping[str, str],
    stores: Mapping[str, KVStore],
    lost: Callable[[str], None],
) -> Follower:
    """Join the leader at an address. Raises ConfigError where it refuses, or is not there."""
    link: _Link | None = None
    try:
        link = _Link(socket.create_connection(address, JOIN_SECONDS), JOIN_SECONDS, MAX_BYTES)
        theirs, mine = link.exactly(_SECRET), secrets.token_bytes(_SECRET)
        link.say(mine + _proof(secret, b"rank", theirs, mine))
        if not hmac.compare_digest(link.exactly(32), _proof(secret, b"leader", mine, theirs)):
            raise EOFError("who listens there does not know the secret")
        link.send(b"h", json.dumps({**about, "rank": str(rank)}).encode())
        kind, data = link.receive()
    except (OSError, EOFError) as error:
        if link is not None:
            link.close()
        raise ConfigError(
            f"rank {rank} cannot join the leader at {address[0]}:{address[1]} "
            f"({' '.join(str(error).split()) or 'it is gone'}); name an address that all machines "
            "reach with --plan HOST:PORT"
        ) from None
    if kind == b"e":
        link.close()
        raise ConfigError(data.decode("utf-8", "replace"))
    link.seconds(STALL_SECONDS)
    return Follower(stores, link, lost)


def _met(link: _Link, secret: bytes) -> dict[str, str] | None:
    """What a process says of itself that proves that it knows the secret; None: it does not."""
    mine = secrets.token_bytes(_SECRET)
    try:
        link.say(mine)
        theirs, proof = link.exactly(_SECRET), link.exactly(32)
        if not hmac.compare_digest(proof, _proof(secret, b"rank", mine, theirs)):
            return None
        link.say(_proof(secret, b"leader", theirs, mine))
        kind, data = link.receive()
        stated = json.loads(data)
    except (OSError, EOFError, EngineError, ValueError, RecursionError):
        return None
    if kind != b"h" or not isinstance(stated, dict):
        return None
    texts = all(isinstance(text, str) for text in stated.values())
    return stated if texts and _RANK.fullmatch(stated.get("rank", "")) else None


def _unlike(
    stated: Mapping[str, str], about: Mapping[str, str], links: Mapping[int, _Link], processes: int
) -> str:
    """Why a process cannot take part; "" where it can."""
    rank = int(stated["rank"])
    if rank in links or not 0 < rank < processes:
        return f"two processes are rank {rank}, or it is none of 1 to {processes - 1}"
    for name, mine in about.items():
        if stated.get(name) != mine:
            return f"rank {rank} has {name} {stated.get(name)}, the leader {mine}; start all alike"
    return ""
