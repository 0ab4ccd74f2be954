"""File batches: what is wrong with one file is said of that file, and the others are found."""

import contextlib
import itertools

import openai
import pytest
from serving import key_file

NUMBERS = itertools.count(23)  # of equal files one is found
BAD = {
    "torn.pdf": (b"%PDF-1.7\nnothing of it", "invalid_file", "cannot be parsed as PDF"),
    "photo.png": (b"\x89PNG", "unsupported_file", "file type '.png'"),
    "empty.txt": (b"", "invalid_file", "empty"),
}
HOME = "What is the home of Giso Berow?"


def upload(client, name="story.txt", data=None):
    if data is None:
        data = f"File {next(NUMBERS)}: Giso Berow lives in Tondorf.\n".encode()
    return client.files.create(file=(name, data), purpose="assistants").id


def counts(batch):
    told = batch.file_counts.to_dict()
    assert sum(told.values()) == 2 * told["total"]
    return {name: count for name, count in told.items() if count and name != "total"}


def listed(client, store, batch, **how):
    return {it.id: it for it in client.vector_stores.file_batches.list_files(
        batch, vector_store_id=store, **how
    )}  # fmt: skip


def test_files_that_are_wrong_fail_alone(client, kept):
    store = client.vector_stores.create().id
    files = {upload(client, name, data): name for name, (data, *_) in BAD.items()}
    lost = ["file-0123456789abcdef01234567", "file-", "no file at all"]
    good = [upload(client), upload(client)]
    batch = client.vector_stores.file_batches.create_and_poll(
        store, file_ids=[lost[0], good[0], *files, *lost[1:], good[1]], poll_interval_ms=20
    )
    assert batch.status == "completed" and counts(batch) == {"completed": 2, "failed": 6}
    there = listed(client, store, batch.id, limit=3)
    assert set(there) == {*lost, *files, *good}
    for file, name in files.items():
        error = there[file].last_error
        assert there[file].status == "failed" and error.code == BAD[name][1]
        assert BAD[name][2] in error.message
    for file in lost:
        error = there[file].last_error
        assert (there[file].status, there[file].usage_bytes) == ("failed", 0)
        assert error.code == "invalid_file" and f"there is no file {file!r}" in error.message
    assert set(listed(client, store, batch.id, filter="failed")) == {*lost, *files}
    assert set(listed(client, store, batch.id, filter="completed")) == set(good)
    wrong = f"/v1/vector_stores/{store}/file_batches/{batch.id}/files?filter=good"
    assert kept.client.get(wrong).json()["error"]["param"] == "filter"
    assert {it.file_id for it in client.vector_stores.search(store, query=HOME)} == set(good)
    assert client.vector_stores.retrieve(store).file_counts.failed == 6
    for file in lost:  # of which the second begins every upload's name
        path = f"/v1/vector_stores/{store}/files/{file}"
        assert kept.client.get(f"{path}/content").json()["data"] == []
        assert kept.client.delete(path).json()["deleted"]
    assert {it.file_id for it in client.vector_stores.search(store, query=HOME)} == set(good)


def test_a_batch_of_nothing_good_failed(client):
    store = client.vector_stores.create().id
    batch = client.vector_stores.file_batches.create_and_poll(store, file_ids=["file-0", "file-1"])
    assert batch.status == "failed" and counts(batch) == {"failed": 2}
    file = upload(client)
    batch = client.vector_stores.file_batches.create_and_poll(
        store, files=[{"file_id": file, "attributes": {"year": 1}}, {"file_id": "file-0"}]
    )
    assert batch.status == "completed" and counts(batch) == {"completed": 1, "failed": 1}
    assert listed(client, store, batch.id)[file].attributes == {"year": 1}


def test_a_file_by_itself_and_a_served_base_want_files_that_are_there(client):
    store = client.vector_stores.create().id
    with pytest.raises(openai.NotFoundError):
        client.vector_stores.files.create(store, file_id="file-0")
    with pytest.raises(openai.NotFoundError):
        client.vector_stores.file_batches.create("village", file_ids=[upload(client), "file-0"])
    assert client.vector_stores.retrieve("village").file_counts.failed == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"file_ids": []},
        {"file_ids": ["x" * 65]},
        {"file_ids": ["file-0", "file-0"]},
        {"file_ids": [f"file-{i}" for i in range(501)]},
        {"files": [{"file_id": ""}]},
        {"files": ["file-0"]},
        {"files": [{"file_id": "file-0", "chunking_strategy": {
            "type": "static", "static": {"max_chunk_size_tokens": 9}}}]},
    ],
    ids=range(7),
)  # fmt: skip
def test_what_is_no_batch_is_refused_as_a_whole(client, kept, fields):
    store = client.vector_stores.create().id
    answer = kept.post(f"/v1/vector_stores/{store}/file_batches", **fields)
    assert answer.status_code == 400, answer.text
    assert client.vector_stores.files.list(store).data == []


def test_a_batch_survives_the_server_and_can_be_cancelled(running, served_model, held, tmp_path):
    data = str(tmp_path / "data")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(running(served_model, {}, data=data))
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            store = client.vector_stores.create().id
            done, files = upload(client), [upload(client) for _ in range(3)]
            batches = client.vector_stores.file_batches
            first = batches.create_and_poll(store, file_ids=[done, "file-0"], poll_interval_ms=20)
            stack.enter_context(held(server.state))
            kept = batches.create(store, file_ids=[*files[:2], "file-1"])
            assert counts(kept) == {"in_progress": 2, "failed": 1} and kept.status == "in_progress"
            gone = batches.create(store, file_ids=[files[2], "file-2"])
            gone = batches.cancel(gone.id, vector_store_id=store)
            assert gone.status == "cancelled" and counts(gone) == {"cancelled": 1, "failed": 1}
            server.state.library.indexer._closed = True  # as it is killed amid the batch
    with (
        running(served_model, {}, data=data) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client,
    ):
        batches = client.vector_stores.file_batches
        assert batches.retrieve(first.id, vector_store_id=store) == first
        again = batches.poll(kept.id, vector_store_id=store, poll_interval_ms=20)
        assert again.status == "completed" and counts(again) == {"completed": 2, "failed": 1}
        assert batches.retrieve(gone.id, vector_store_id=store) == gone
        found = client.vector_stores.search(store, query=HOME, max_num_results=9)
        assert {it.file_id for it in found} == {done, *files[:2]}


def test_a_tenant_finds_no_file_of_another_and_what_failed_counts(running, served_model, tmp_path):
    most = "[tenants.blue]\nmax_bytes = 400000"
    keys = key_file(tmp_path / "keys.toml", {"acme": "", "blue": ""}, most)
    settings = {"keys": keys, "data": str(tmp_path / "data")}
    with running(served_model, {}, **settings) as server, contextlib.ExitStack() as stack:
        acme, blue = (
            stack.enter_context(openai.OpenAI(base_url=f"{server.url}/v1", api_key=it))
            for it in ("acme", "blue")
        )
        theirs, own = upload(acme), upload(blue)
        store = blue.vector_stores.create().id
        batch = blue.vector_stores.file_batches.create_and_poll(
            store, file_ids=[theirs, "file-0", own], poll_interval_ms=20
        )
        assert counts(batch) == {"completed": 1, "failed": 2}
        there = listed(blue, store, batch.id)
        words = [there[it].last_error.message.replace(it, "") for it in (theirs, "file-0")]
        assert words[0] == words[1], "one of another is as one that never was"
        assert acme.vector_stores.list().data == []
        registry = server.state.library.registry
        before = registry.bytes_of_tenant("blue")
        blue.vector_stores.file_batches.create(store, file_ids=["file-1"])
        assert registry.bytes_of_tenant("blue") > before
        with pytest.raises(openai.APIStatusError):
            for number in range(1000):
                names = [f"file-{number}-{i}" for i in range(500)]
                blue.vector_stores.file_batches.create(store, file_ids=names)
