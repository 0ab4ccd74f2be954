"""One of several processes that hold one model, led by the first; its clients answer in JSON.

python ranks_program.py RANK COORDINATOR WORK.json
"""

import dataclasses
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path

import jax

rank, coordinator, path = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
work = json.loads(path.read_text())
jax.distributed.initialize(coordinator, work["processes"], rank)

from jaxrag.base.errors import JaxragError  # noqa: E402
from jaxrag.base.sharding import make_mesh  # noqa: E402
from jaxrag.engine import transfers  # noqa: E402
from jaxrag.engine.admission import SchedulerSettings  # noqa: E402
from jaxrag.engine.engine import Engine  # noqa: E402
from jaxrag.engine.ranks import Leader, meet  # noqa: E402
from jaxrag.engine.state import EngineSettings  # noqa: E402
from jaxrag.library.knowledge_base import KnowledgeBase  # noqa: E402
from jaxrag.models.model import load_model  # noqa: E402
from jaxrag.serve.ask import Ask  # noqa: E402
from jaxrag.serve.questions import prepare, resolve  # noqa: E402

closed, waits = path.with_name("closed"), path.with_name("waits")


def read_when_open(*group, read=transfers.read_own):
    """A store that does not answer while there is a file ``closed``."""
    while closed.exists():
        waits.touch()
        time.sleep(0.01)
    return read(*group)


if rank == work.get("slow"):
    transfers.read_own = read_when_open


def lost(why):
    print(why, file=sys.stderr, flush=True)
    os._exit(9)


mesh = make_mesh(*work["mesh"])
model = load_model(work["model"], mesh=mesh, cache_tokens=work["pool"])
settings = EngineSettings(scheduler=SchedulerSettings(classes=3))
model.engine = engine = Engine(model, settings)
stores, kb = {"memory": engine.memory}, None
if "kb" in work:
    kb = KnowledgeBase.open(work["kb"], model=model)
    stores["kb"] = kb.store
about = {"weights": model.fingerprint}
try:
    met = meet(model, ("127.0.0.1", 0), about, stores, lost)
except JaxragError as error:
    print(error, file=sys.stderr, flush=True)
    os._exit(3)
if not isinstance(met, Leader):
    engine.follow(met)
    jax.distributed.shutdown()
    os._exit(0)

engine.lead(met)
given = {"method": work["method"], "max_new_tokens": work["tokens"]}
served = resolve(Ask(**given), model=None if kb else model, kb=kb, neighbours="prompt")
documents = None if kb else work["documents"]


def request_of(question, documents):
    return dataclasses.replace(prepare(served, question, documents), rows=4)


class Clients:
    """Take what comes; each ends as it was told to.

    ``ends`` holds for a request's place "stop" or "abort" after two tokens.
    """

    def __init__(self, count, ends):
        self.tokens = [[] for _ in range(count)]
        self.how = [None] * count
        self.left = threading.Semaphore(0)
        self.ends = ends
        self.numbers = []

    def sink(self, place):
        def take(news):
            self.tokens[place] += news.new
            if news.last:
                error = news.error
                self.how[place] = news.finish_reason if error is None else type(error).__name__
                self.left.release()
                return False
            end = self.ends.get(place) if len(self.tokens[place]) >= 2 else None
            if end == "abort":
                engine.abort(self.numbers[place])
            return end == "stop"

        return take

    def run(self, *groups):
        """Submit groups of requests, each when the one before has shown its first token."""
        place = 0
        for group in groups:
            sinks = [self.sink(place + at) for at in range(len(group))]
            self.numbers += engine.add_all(list(zip(group, sinks, strict=True)))
            place += len(group)
            while not any(self.tokens) and len(groups) > 1:
                time.sleep(0.001)
        for _ in range(place):
            assert self.left.acquire(timeout=120)


def at_once():
    """All together; then with others that leave, are stopped, come too late and go before."""
    asked = [request_of(question, documents) for question in work["questions"]]
    plain = Clients(len(asked), {})
    plain.run(asked)
    watched = [dataclasses.replace(it, watched=True, priority=2) for it in asked]
    better = [dataclasses.replace(it, priority=at % 2) for at, it in enumerate(asked)]
    mixed = Clients(2 * len(asked) + 1, {1: "stop", 3: "abort"})
    late = dataclasses.replace(asked[0], timeout=0.0)
    mixed.run(watched, [*better, late])
    return {
        "plain": [plain.tokens, plain.how],
        "mixed": [mixed.tokens, mixed.how],
        "preempted": engine.status().preempted,
    }


def beside_a_slow_store():
    """Who needs no chunk is served while others wait for theirs; they may leave, or be late."""
    asked = [request_of(question, [document]) for question, document in work["pairs"]]
    first = Clients(len(asked), {})
    first.run(asked)
    engine.forget()
    Clients(1, {}).run(asked[:1])
    closed.touch()
    clients = Clients(len(asked), {})
    late = dataclasses.replace(asked[2], timeout=1.0)
    waiting = [asked[1], late, asked[3]]
    for place, request in enumerate(waiting, 1):
        clients.numbers.append(engine.add(request, clients.sink(place)))
    while not waits.exists():
        time.sleep(0.01)
    engine.add(asked[0], clients.sink(0))
    engine.abort(clients.numbers[2])
    for _ in range(3):  # all but the one that still waits
        assert clients.left.acquire(timeout=120)
    meanwhile = [list(it) for it in clients.tokens]
    closed.unlink()
    assert clients.left.acquire(timeout=120)
    return {
        "first": first.tokens,
        "meanwhile": meanwhile,
        "tokens": clients.tokens,
        "how": clients.how,
    }


try:
    found = at_once() if "questions" in work else {}
    if "pairs" in work:
        engine.forget()
        found |= beside_a_slow_store()
    path.with_suffix(".out").write_text(json.dumps(found))
except BaseException:
    traceback.print_exc()
    os._exit(1)
met.close()
jax.distributed.shutdown()
os._exit(0)
