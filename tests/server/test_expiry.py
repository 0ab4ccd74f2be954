"""Vector stores that expire, as OpenAI's client says it; the clock is the test's."""

import dataclasses
import functools
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from serving import until

from jaxrag.server.state.registry import Registry

STORY = b"File 23: Giso Berow lives in Tondorf.\n"
HOME = "What is the home of Giso Berow?"
DAY = 86400
ONE_DAY = {"anchor": "last_active_at", "days": 1}


@dataclasses.dataclass
class Clock:
    """Says when it is."""

    now: float = dataclasses.field(default_factory=lambda: float(int(time.time())))

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def begin(running, served_model, tmp_path, clock, monkeypatch):
    """``begin()``: a server over one data folder, whose stores look at the clock."""
    timed = functools.partial(Registry, clock=clock)
    monkeypatch.setattr("jaxrag.server.state.library.Registry", timed)
    data = str(tmp_path / "data")
    return functools.partial(running, served_model, {}, data=data, grace_seconds=0.0)


@pytest.fixture
def server(begin):
    with begin() as started:
        yield started


def client_of(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


@pytest.fixture
def client(server):
    with client_of(server) as made:
        yield made


def filled(client, **fields):
    """The id of a store that holds the story, and that of its file."""
    made = client.vector_stores.create(**fields)
    file = client.vector_stores.files.upload_and_poll(
        vector_store_id=made.id, file=("story.txt", STORY), poll_interval_ms=20
    )
    assert file.status == "completed"
    return made.id, file.id


def test_a_time_is_said_changed_and_taken_back(client, clock):
    made = client.vector_stores.create(name="notes", expires_after=ONE_DAY)
    assert made.expires_after.to_dict() == ONE_DAY
    assert made.expires_at == made.last_active_at + DAY
    assert client.vector_stores.retrieve(made.id) == made
    assert client.vector_stores.list().data == [made]
    clock.now += 100
    renamed = client.vector_stores.update(made.id, name="other")
    assert (renamed.name, renamed.expires_after) == ("other", made.expires_after)
    assert renamed.expires_at == made.expires_at + 100, "a change is a use"
    later = client.vector_stores.update(made.id, expires_after=ONE_DAY | {"days": 365})
    assert later.expires_at == later.last_active_at + 365 * DAY
    never = client.vector_stores.update(made.id, expires_after=None)
    assert (never.name, never.expires_after, never.expires_at) == ("other", None, None)
    clock.now += 1000 * DAY
    assert client.vector_stores.retrieve(made.id).status == "completed"


@pytest.mark.parametrize(
    "wrong",
    [
        "tomorrow",
        {"days": 1},
        {"anchor": "created_at", "days": 1},
        {"anchor": "last_active_at"},
        *({"anchor": "last_active_at", "days": days} for days in (0, 366, 1.5, "1", True)),
    ],
)
def test_a_time_that_cannot_be_meant(server, wrong):
    answer = server.post("/v1/vector_stores", expires_after=wrong)
    assert answer.status_code == 400 and "\n" not in answer.json()["error"]["message"]
    assert server.client.get("/v1/vector_stores").json()["data"] == []


def test_searches_answers_and_files_keep_a_store(client, server, clock):
    store, file = filled(client, expires_after=ONE_DAY)
    uses = [
        lambda: client.vector_stores.search(store, query=HOME),
        lambda: server.chat(HOME, knowledge_base=store),
        lambda: client.responses.create(
            model="synthetic",
            input=HOME,
            tools=[{"type": "file_search", "vector_store_ids": [store]}],
        ),
        lambda: client.vector_stores.files.create_and_poll(file, vector_store_id=store),
        lambda: client.vector_stores.file_batches.create_and_poll(store, file_ids=[file]),
    ]
    for use in uses:
        clock.now += DAY - 1
        use()
        shown = client.vector_stores.retrieve(store)
        assert (shown.status, shown.last_active_at) == ("completed", clock.now)
    began = clock.now
    clock.now += DAY - 1
    client.vector_stores.list()
    client.vector_stores.files.list(store)
    server.state.library._keep_once(0.0)
    assert client.vector_stores.retrieve(store).last_active_at == began, "to look is no use"
    clock.now += 1
    assert client.vector_stores.retrieve(store).status == "expired"


def test_one_that_expired_is_refused_by_name_and_empty(client, server, clock):
    store, file = filled(client, name="notes", expires_after=ONE_DAY)
    tool = {"type": "file_search", "vector_store_ids": [store]}
    told = client.responses.create(model="synthetic", input=HOME, tools=[tool])
    folder = server.state.library._folder("", store)
    clock.now += DAY
    path = f"/v1/vector_stores/{store}"
    refused = [
        lambda: server.post(f"{path}/search", query=HOME),
        lambda: server.chat(HOME, knowledge_base=store),
        lambda: server.chat(HOME, knowledge_base="notes"),
        lambda: server.chat(HOME, knowledge_base="notes", stream=True),
        lambda: server.post("/v1/responses", input=HOME, tools=[tool]),
        lambda: server.post(f"{path}/files", file_id=file),
        lambda: server.post(f"{path}/file_batches", file_ids=[file]),
        lambda: server.post(path, name="other"),
        lambda: server.client.get(f"{path}/files"),
        lambda: server.client.get(f"{path}/files/{file}/content"),
    ]
    for gone in (False, True):  # before and after its bytes go
        if gone:
            server.state.library._keep_once(float("inf"))
            server.state.library._keep_once(float("inf"))
            assert not folder.exists()
        for ask in refused:
            answer = ask()
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "vector_store_expired")
            assert store in error["message"] and "\n" not in error["message"]
        shown = client.vector_stores.retrieve(store)
        assert (shown.status, shown.file_counts.total, shown.usage_bytes) == ("expired", 0, 0)
        assert [it.status for it in client.vector_stores.list()] == ["expired"]
        assert f"synthetic@{store}" not in [it.id for it in client.models.list()]
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(told.id)
    assert client.files.content(file).content == STORY, "the file itself stays"
    again, _ = filled(client, name="notes")
    assert "Tondorf" in server.chat(HOME, knowledge_base="notes").text
    assert client.vector_stores.delete(store).deleted
    assert [it.id for it in client.vector_stores.list()] == [again]


def test_what_is_being_indexed_goes_with_its_store(client, server, held, clock):
    store = client.vector_stores.create(expires_after=ONE_DAY).id
    file = client.files.create(file=("story.txt", STORY), purpose="assistants").id
    library = server.state.library
    with ThreadPoolExecutor() as threads, held(server.state):
        client.vector_stores.files.create(store, file_id=file)
        until(lambda: any(it.running() for it in list(library.indexer._jobs.values())))
        clock.now += DAY
        keeping = threads.submit(library._keep_once, 0.0)
    keeping.result()
    assert client.vector_stores.retrieve(store).status == "expired"
    assert library.registry.members(store) == [] and not library.indexer.works_on(store)
    assert client.vector_stores.delete(store).deleted


def test_a_time_goes_on_while_no_server_runs(begin, clock):
    with begin() as server, client_of(server) as client:
        kept, _ = filled(client, expires_after={"anchor": "last_active_at", "days": 3})
        lost, file = filled(client, expires_after=ONE_DAY)
        clock.now += DAY // 2
        client.vector_stores.search(lost, query=HOME)
    clock.now += DAY - 1
    with begin() as server, client_of(server) as client:
        assert client.vector_stores.search(lost, query=HOME).data, "the search was remembered"
    clock.now += DAY
    with begin() as server, client_of(server) as client:
        library = server.state.library

        def left():
            library._keep_once(float("inf"))
            return [it.name for it in library.data.glob("tenants/*/stores/*")]

        until(lambda: left() == [kept])
        assert client.vector_stores.search(kept, query=HOME).data
        clock.now -= DAY
        assert client.vector_stores.retrieve(lost).status == "expired"
        assert client.files.retrieve(file).id == file
