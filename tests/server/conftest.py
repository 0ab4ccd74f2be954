"""A real server on a free port, in a thread, over the shipped model and the village."""

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxrag.documents import read_paths
from jaxrag.knowledge_base import KnowledgeBase
from jaxrag.models.model import Model, load_model
from jaxrag.server.run import Server, bind, url_of
from jaxrag.server.settings import ModelSettings, ServerSettings
from jaxrag.server.state import ServerState, make_state

ROOT = Path(__file__).parents[2]
NAME = "synthetic"
QUESTION = "Which animal does Kora Felell keep?"  # falcon, with k=3
FILES = ["File 18: Giso Berow lives in Tondorf.", "File 23: Mela Forow works as a judge."]
HOME = "What is the home of Giso Berow?"  # Tondorf, by FILES


@dataclasses.dataclass(frozen=True)
class Running:
    """A server that runs.

    Attributes:
      url: where.
      state: of it.
      client: asks it, without retries.
    """

    url: str
    state: ServerState
    client: httpx.Client

    def post(self, path: str, **body: Any) -> httpx.Response:
        """Send a JSON body."""
        return self.client.post(path, json=body)

    def chat(self, question: str = QUESTION, **body: Any) -> httpx.Response:
        """Ask a question."""
        messages = [{"role": "user", "content": question}]
        return self.post("/v1/chat/completions", messages=messages, **body)


@pytest.fixture(scope="session")
def served_model() -> Model:
    """The shipped model, which reads chunks block-wise."""
    return load_model(ROOT / "checkpoints/synthetic-0.8m/dual")


@pytest.fixture(scope="session")
def village(served_model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a knowledge base of the example village."""
    folder = tmp_path_factory.mktemp("served") / "village"
    settings = {"chunk_by": "sentence", "chunk_tokens": 20, "overlap": 0}
    with KnowledgeBase.open(folder, model=served_model, **settings) as kb:
        kb.add(read_paths([str(ROOT / "examples/village")]))
    yield folder


@contextlib.contextmanager
def running(
    model: Model,
    bases: dict[str, Path],
    change: Callable[[ServerState], None] = lambda state: None,
    **settings: Any,
) -> Iterator[Running]:
    """A server with these settings, until the block is left; ``change`` sees its state first."""
    given = {"port": 0, "warm_up": False, "k": 3, "max_new_tokens": 8, "drain_seconds": 2.0}
    given |= {"model": ModelSettings(name=NAME), **settings}
    opened = {name: KnowledgeBase.open(path, model=model) for name, path in bases.items()}
    was = model.engine
    state = make_state(ServerSettings(**given), model, opened)
    change(state)
    ready = threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []
    with bind(state.settings) as bound:
        server = Server(state, bound)
        url = url_of(bound)

        async def serve() -> None:
            loops.append(asyncio.get_running_loop())
            await server.serve(ready.set)

        thread = threading.Thread(target=asyncio.run, args=(serve(),), name="server")
        thread.start()
        try:
            assert ready.wait(30)
            with httpx.Client(base_url=url, timeout=60) as client:
                yield Running(url, state, client)
        finally:
            loops[0].call_soon_threadsafe(server.end)
            thread.join(30)
            model.engine = was
            for kb in opened.values():
                kb.close()
    assert not thread.is_alive()


@pytest.fixture(scope="session")
def server(served_model: Model, village: Path) -> Iterator[Running]:
    """One server for all tests that change nothing of it: the village is its knowledge base."""
    with running(served_model, {"village": village}) as started:
        yield started


@pytest.fixture(scope="session")
def running_server() -> Callable[..., contextlib.AbstractContextManager[Running]]:
    """``running_server(model, bases, **settings)``: ``running``, for a server of one's own."""
    return running
