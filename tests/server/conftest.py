"""A real server on a free port, in a thread, over the shipped model and the village."""

import asyncio
import contextlib
import dataclasses
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette

from jaxrag.library.documents import read_paths
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.models.model import Model, load_model
from jaxrag.models.reading import Reading, write_reading
from jaxrag.server.http.handover import Predecessor
from jaxrag.server.http.run import Server, bind, url_of
from jaxrag.server.options import ModelSettings
from jaxrag.server.settings import ServerSettings
from jaxrag.server.state.state import ServerState, make_state

ROOT = Path(__file__).parents[2]
NAME = "synthetic"
QUESTION = "Which animal does Kora Felell keep?"  # falcon, with k=3
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %}\n{{ t.function | tojson }}"
    "{% endfor %}\nCall one by <tool_call>{\"name\": ..., \"arguments\": ...}</tool_call>"
    "<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}"
    "{{ raise_exception('nine signs') }}{% endif %} {{ m.tool_call_id }}{% endif %}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Running:
    """A server that runs.

    Attributes:
      url: where.
      state: of it.
      app: with its routes.
      client: asks it, without retries.
      end: tells it to end.
    """

    url: str
    state: ServerState
    app: Starlette
    client: httpx.Client
    end: Callable[[], None]

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


@pytest.fixture(scope="session")
def start() -> Callable[..., contextlib.AbstractContextManager[Running]]:
    """``start(model, {"name": folder}, change, **settings)``; see ``running``."""
    return running


@pytest.fixture(scope="session")
def held() -> Callable[[ServerState], contextlib.AbstractContextManager[None]]:
    """``held(state)``: while the block runs the engine's thread does nothing."""
    return _held


@contextlib.contextmanager
def _held(state: ServerState) -> Iterator[None]:
    there, go = threading.Event(), threading.Event()

    def job(runner: object) -> None:
        there.set()
        assert go.wait(300)

    thread = threading.Thread(target=state.engine.call, args=(job,))
    thread.start()
    try:
        assert there.wait(300)
        yield
    finally:
        go.set()
        thread.join(300)


@pytest.fixture(scope="session")
def idle() -> Callable[[ServerState], None]:
    """``idle(state)``: waits until nobody is served; AssertionError where something is left."""
    return _idle


def _idle(state: ServerState) -> None:
    core, deadline = state.engine._core, time.monotonic() + 20
    assert core is not None
    while core.busy or state.limits.running or state.asking:
        assert time.monotonic() < deadline, (core.state.scheduler.live, state.asking)
        time.sleep(0.01)

    def look(runner: Any) -> None:
        scheduler, allocator = core.state.scheduler, runner.cache.allocator
        scheduler.check()
        assert not scheduler.live and not scheduler.occupancy
        assert allocator.num_free + allocator.num_unpinned == allocator.num_pages

    state.engine.call(look)
    assert (state.limits.waiting, state.limits.waiting_tokens) == (0, 0)


@pytest.fixture(scope="session")
def restarts() -> Callable[[Running], float]:
    """``restarts(server)``: how often its engine's pool was made anew; it serves on."""
    return _restarts


def _restarts(server: Running) -> float:
    assert server.chat(max_tokens=1).status_code == 200
    found = re.search(
        r"^jaxrag_engine_restarts_total (.+)$", server.client.get("/metrics").text, re.M
    )
    assert found is not None
    return float(found[1])


@contextlib.contextmanager
def running(
    model: Model,
    bases: dict[str, Path],
    change: Callable[[ServerState], None] = lambda state: None,
    before: Predecessor | None = None,
    name: str = NAME,
    **settings: Any,
) -> Iterator[Running]:
    """A server with these settings, until the block is left; ``change`` sees its state first.

    ``before``: of the server that it takes over from.
    """
    given = {"port": 0, "warm_up": False, "k": 3, "max_new_tokens": 8, "drain_seconds": 2.0}
    given |= {"model": ModelSettings(name=name), **settings}
    opened = {name: KnowledgeBase.open(path, model=model) for name, path in bases.items()}
    was = model.engine
    state = make_state(ServerSettings(**given), model, opened)
    change(state)
    ready = threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []
    with bind(state.settings) if before is None else before.bound as bound:
        server = Server(state, bound, before=before)
        url = url_of(bound)

        async def serve() -> None:
            loops.append(asyncio.get_running_loop())
            await server.serve(ready.set)

        def end() -> None:
            with contextlib.suppress(RuntimeError):  # it has ended
                loops[0].call_soon_threadsafe(server.end)

        thread = threading.Thread(target=asyncio.run, args=(serve(),), name="server")
        thread.start()
        try:
            assert ready.wait(300)
            with httpx.Client(base_url=url, timeout=300) as client:
                yield Running(url, state, server.app, client, end)
        finally:
            end()
            thread.join(300)
            model.engine = was
            for kb in opened.values():
                kb.close()
    assert not thread.is_alive()


@pytest.fixture(scope="session")
def server(served_model: Model, village: Path) -> Iterator[Running]:
    """One server for all tests that change nothing of it: the village is its knowledge base."""
    with running(served_model, {"village": village}, questions=(QUESTION,)) as started:
        yield started


@pytest.fixture(scope="session", name="running")
def running_fixture() -> Callable[..., contextlib.AbstractContextManager[Running]]:
    """``running(model, bases, change, **settings)``: a server of its own."""
    return running


@pytest.fixture(scope="module")
def kept(running, served_model, village, tmp_path_factory):
    """A server with a data folder."""
    data = tmp_path_factory.mktemp("data")
    with running(served_model, {"village": village}, data=str(data)) as started:
        yield started


@pytest.fixture(scope="module")
def client(kept):
    """OpenAI's client of that server."""
    with openai.OpenAI(base_url=f"{kept.url}/v1", api_key="any", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def tools_dir(chat_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chat model with a template that writes tools."""
    folder = tmp_path_factory.mktemp("tools") / "model"
    shutil.copytree(chat_model_dir, folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) | {"chat_template": TEMPLATE}
    path.write_text(json.dumps(settings), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def trained_dir(chat_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chat model, said to be trained for blocks."""
    folder = tmp_path_factory.mktemp("trained") / "qwen"
    shutil.copytree(chat_model_dir, folder)
    write_reading(folder, Reading(("reordered", "composite")))
    return folder
