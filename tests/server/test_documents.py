"""Files and vector stores as OpenAI's client keeps them, and questions about what was uploaded."""

import base64
import functools
import io
import threading

import httpx
import numpy as np
import openai
import openpyxl
import pytest
from serving import until

from jaxrag.library.knowledge_base import KnowledgeBase

STORY = b"File 23: Giso Berow lives in Tondorf.\n\nFile 18: Mela Forow works as a judge.\n"
HOME = "What is the home of Giso Berow?"


def upload(client, name="story.txt", data=STORY):
    return client.files.create(file=(name, io.BytesIO(data)), purpose="assistants")


def test_a_file_is_kept_as_it_was_sent(client):
    made = upload(client, "../a/st\u00f6ry.txt")
    assert (made.filename, made.bytes, made.purpose) == ("st\u00f6ry.txt", len(STORY), "assistants")
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).content == STORY
    assert made.id in [file.id for file in client.files.list()]
    assert client.files.delete(made.id).deleted
    for gone in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            gone(made.id)


@pytest.mark.parametrize(
    "name",
    [
        'q"uote;x=.md',
        'a"; filename="b.md',
        "two words; a=b.txt",
        "100%.md",
        "na\u00efve.md",
        "\U0001f469\u200d\U0001f680.txt",
        "\u0645\u06cc\u200c\u062e.txt",
    ],
)
def test_a_name_is_kept_whole(client, kept, name):
    made = upload(client, name)
    assert made.filename == name
    head = kept.client.get(f"/v1/files/{made.id}/content").headers
    assert set(head) <= {
        "date", "server", "accept-ranges", "content-type", "content-length", "content-disposition",
        "last-modified", "etag", "x-content-type-options", "x-request-id",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ('filename="q"uote;x=.md"', 'q"uote;x=.md'),
        ('filename="q\\"uote.md"', 'q"uote.md'),
        ('filename="q%22uote%0D%0Ax-evil: 1.md"', 'q"uotex-evil: 1.md'),
        ('filename="TCP/IP.md"', "TCP_IP.md"),
        ("filename=plain.md", "plain.md"),
        ("filename*=UTF-8''na%C3%AFve%20%E2%82%AC.md", "na\u00efve \u20ac.md"),
        ("filename*=UTF-8''other.md; filename=\"a.md\"", "a.md"),
        ('filename="\u202e\u200d.md\u0007"', ".md"),
    ],
)
def test_names_as_clients_write_them(kept, written, name):
    head = f'--b\r\ncontent-disposition: form-data; name="file"; {written}\r\n\r\n'
    form = {"content-type": "multipart/form-data; boundary=b"}
    body = f"{head}text\r\n--b--\r\n".encode()
    answer = kept.client.post("/v1/files", content=body, headers=form)
    assert answer.json().get("filename") == name, answer.text
    told = kept.client.get(f"/v1/files/{answer.json()['id']}/content")
    assert told.text == "text" and "x-evil" not in told.headers


@pytest.mark.parametrize("limit", ["0", "101", "1" + "0" * 5000, "+1", "\u0661"])
def test_a_limit_of_a_list_is_an_integer(kept, limit):
    answer = kept.client.get("/v1/vector_stores", params={"limit": limit})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")


def test_a_document_is_found_once_its_file_is_completed(client, kept):
    store = client.vector_stores.create(name="stories", metadata={"kind": "test"})
    assert (store.name, store.file_counts.total, store.metadata) == ("stories", 0, {"kind": "test"})
    file = upload(client)
    member = client.vector_stores.files.create_and_poll(
        file.id, vector_store_id=store.id, attributes={"year": 2020}, poll_interval_ms=20
    )
    assert (member.status, member.last_error, member.attributes) == (
        "completed", None, {"year": 2020},
    )  # fmt: skip
    found = client.vector_stores.search(store.id, query=HOME)
    assert found.data[0].file_id == file.id
    assert found.data[0].filename == "story.txt"
    assert "Tondorf" in found.data[0].content[0].text
    least = {"search_mode": "bm25", "min_score": 1000.0}
    assert client.vector_stores.search(store.id, query=HOME, extra_body=least).data == []
    asked = {"question": HOME, "method": "turborag"}
    texts = client.vector_stores.files.content(file.id, vector_store_id=store.id)
    assert next(it.text for it in texts) == found.data[0].content[0].text
    answer = kept.chat(**asked, knowledge_base=store.id, return_text=True).json()
    assert answer["choices"][0]["message"]["content"] == "Tondorf"
    assert answer["jaxrag"]["sources"][0]["file"] == "story.txt"
    assert kept.chat(**asked, knowledge_base="stories").json()["choices"] == answer["choices"]
    names = [model.id for model in client.models.list()]
    assert f"synthetic@{store.id}" in names
    assert client.vector_stores.files.delete(file.id, vector_store_id=store.id).deleted
    assert client.vector_stores.search(store.id, query="Giso Berow").data == []
    assert client.files.retrieve(file.id).id == file.id
    assert client.vector_stores.delete(store.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.vector_stores.search(store.id, query="Giso Berow")
    assert kept.chat(knowledge_base=store.id).status_code == 404


@pytest.mark.parametrize("stream", [False, True])
def test_no_answer_ends_with_a_document_that_was_removed_meanwhile(client, kept, held, stream):
    store = client.vector_stores.create(name="leaving")
    members = []
    for data in (STORY, b"File 7: Rino Dirow lives in Kerdorf."):
        file = upload(client, data=data)
        members.append(file.id)
        client.vector_stores.files.create_and_poll(
            file.id, vector_store_id=store.id, poll_interval_ms=20
        )
    body = {"messages": [{"role": "user", "content": HOME}], "knowledge_base": store.id}
    answers = []

    def ask():
        answer = kept.client.post("/v1/chat/completions", json=body | {"stream": stream})
        answers.append((answer.status_code, answer.text))

    asking = threading.Thread(target=ask)
    with held(kept.state):
        asking.start()
        until(lambda: any(it.prompt_tokens for it in list(kept.state.asking)))
        assert client.files.delete(members[0]).deleted
    asking.join(60)
    [(status, text)] = answers
    assert "document_removed" in text and "was removed meanwhile; ask again" in text
    assert status == (200 if stream else 503)
    assert "[DONE]" not in text
    again = kept.client.post("/v1/chat/completions", json=body)
    assert again.status_code == 200 and "Tondorf" not in again.text


def test_filters_choose_files_by_their_attributes(client):
    store = client.vector_stores.create(name="filtered")
    files = {
        year: upload(
            client, f"{year}.txt", b"File %d: Giso Berow lives in Tondorf.\n" % (year - 2000)
        )
        for year in (2019, 2020, 2021)
    }
    batch = client.vector_stores.file_batches.create_and_poll(
        store.id,
        files=[
            {"file_id": file.id, "attributes": {"year": year, "odd": bool(year % 2)}}
            for year, file in files.items()
        ],
        poll_interval_ms=20,
    )
    assert (batch.status, batch.file_counts.completed) == ("completed", 3)

    def years(filters):
        found = client.vector_stores.search(store.id, query="Giso Berow", filters=filters)
        return {int(hit.filename.removesuffix(".txt")) for hit in found}

    def compare(kind, value, key="year"):
        return {"type": kind, "key": key, "value": value}

    assert years(compare("gte", 2020)) == {2020, 2021}
    assert years(compare("nin", [2019, 2020])) == {2021}
    assert years(compare("eq", True, "odd")) == {2019, 2021}
    both = [compare("gt", 2019), {"type": "or", "filters": [compare("in", [2020]),
                                                            compare("eq", 1)]}]  # fmt: skip
    assert years({"type": "and", "filters": both}) == {2020}
    changed = client.vector_stores.files.update(
        files[2019].id, vector_store_id=store.id, attributes={"year": 2022}
    )
    assert changed.attributes == {"year": 2022}
    client.vector_stores.files.poll(files[2019].id, vector_store_id=store.id, poll_interval_ms=20)
    assert years(compare("gt", 2021)) == {2019}
    with pytest.raises(openai.BadRequestError):
        years(compare("like", 1))
    client.files.delete(files[2020].id)
    assert years(compare("gt", 0)) == {2019, 2021}
    assert client.vector_stores.retrieve(store.id).file_counts.total == 2


def test_attributes_of_the_client_go_before_what_a_file_says_of_itself(client):
    store = client.vector_stores.create(name="said twice")
    file = upload(client, "said.md", b"---\nyear: 1999\nby: Mela\n---\nGiso Berow lives.\n")
    client.vector_stores.files.create_and_poll(
        file.id, vector_store_id=store.id, attributes={"year": 2020}, poll_interval_ms=20
    )
    [hit] = client.vector_stores.search(store.id, query="Giso Berow").data
    assert hit.attributes == {"year": 2020, "by": "Mela"}


@pytest.mark.parametrize(
    ("name", "data", "code", "why"),
    [
        ("torn.pdf", b"%PDF-1.7\nnothing of it", "invalid_file", "cannot be parsed as PDF"),
        ("photo.png", b"\x89PNG", "unsupported_file", "file type '.png' is not one of .txt"),
        ("latin.txt", "caf\u00e9".encode("latin-1"), "invalid_file", "byte 3 is not UTF-8"),
        ("blank.txt", b" \n", "invalid_file", "white space only"),
    ],
)
def test_a_file_that_cannot_be_read_fails_alone(client, name, data, code, why):
    store = client.vector_stores.create(name=name)
    files = [upload(client, name, data), upload(client)]
    bad, good = (
        client.vector_stores.files.create_and_poll(
            file.id, vector_store_id=store.id, poll_interval_ms=20
        )
        for file in files
    )
    assert (bad.status, bad.last_error.code, good.status) == ("failed", code, "completed")
    assert why in bad.last_error.message
    assert {hit.file_id for hit in client.vector_stores.search(store.id, query="Giso")} == {
        files[1].id
    }


def test_what_a_reader_left_out_is_listed(client):
    book, data = openpyxl.Workbook(), io.BytesIO()
    book.active.append(["Giso Berow lives in Tondorf."])
    book.create_sheet("draft").sheet_state = "hidden"
    book.save(data)
    store = client.vector_stores.create(name="books")
    file = upload(client, "book.xlsx", data.getvalue())
    member = client.vector_stores.files.create_and_poll(file.id, vector_store_id=store.id)
    [line] = member.to_dict()["jaxrag"]["left_out"]
    assert line.startswith("1 hidden sheet")


def test_what_is_served_is_a_vector_store_by_its_name(client, kept):
    names = [store.id for store in client.vector_stores.list()]
    assert "village" in names
    served = client.vector_stores.retrieve("village")
    before = served.file_counts.completed
    assert before > 1
    found = client.vector_stores.search("village", query="Kora Felell", max_num_results=2)
    assert len(found.data) == 2
    file = upload(client, "new.md", b"# New\n\nSella Vorn keeps an owl.")
    client.vector_stores.files.create_and_poll(
        file.id, vector_store_id="village", poll_interval_ms=20
    )
    assert client.vector_stores.search("village", query="Sella Vorn").data[0].file_id == file.id
    listed = [member.id for member in client.vector_stores.files.list("village", limit=100)]
    assert file.id in listed and len(listed) == before + 1
    assert client.vector_stores.files.retrieve(listed[-1], vector_store_id="village").status
    assert len(client.vector_stores.files.content(listed[-1], vector_store_id="village").data) > 0
    with pytest.raises(openai.NotFoundError):
        client.vector_stores.files.content("no.txt", vector_store_id="village")
    client.vector_stores.files.delete(file.id, vector_store_id="village")
    assert all(
        hit.file_id != file.id for hit in client.vector_stores.search("village", query="Sella Vorn")
    )
    with pytest.raises(openai.PermissionDeniedError):
        client.vector_stores.delete("village")


def test_lists_come_in_pages(client):
    made = [client.vector_stores.create(name=f"page {i}").id for i in range(3)]
    assert [store.id for store in client.vector_stores.list(limit=2)][:3] == made[::-1]
    first = client.vector_stores.list(limit=2)
    assert first.has_more and len(first.data) == 2
    assert client.vector_stores.list(limit=2, before=made[0]).data[0].id == made[2]
    assert client.vector_stores.list(limit=1, order="asc").data[0].id == "village"
    changed = client.vector_stores.update(made[0], name="other", metadata={"a": "b"})
    assert (changed.name, changed.metadata) == ("other", {"a": "b"})
    with pytest.raises(openai.BadRequestError):
        client.vector_stores.list(limit=0)


def test_a_vector_store_cuts_in_its_own_way(client):
    static = {"max_chunk_size_tokens": 9, "chunk_overlap_tokens": 0}
    store = client.vector_stores.create(chunking_strategy={"type": "static", "static": static})
    file = upload(client)
    client.vector_stores.files.create_and_poll(
        file.id, vector_store_id=store.id, poll_interval_ms=20
    )
    member = client.vector_stores.files.retrieve(file.id, vector_store_id=store.id)
    assert member.model_extra["jaxrag"]["chunks"] >= 3
    with pytest.raises(openai.BadRequestError):
        client.vector_stores.files.create(
            store.id, file_id=file.id, chunking_strategy={"type": "static", "static": static}
        )


@pytest.mark.parametrize(
    ("send", "param"),
    [
        (lambda c: c.post("/v1/files", content=b"x"), None),
        (lambda c: c.post("/v1/files", files={"other": ("a.txt", b"x")}), "file"),
        (lambda c: c.post("/v1/files", files={"file": ("a/..", b"x")}), "file"),
        (lambda c: c.post("/v1/files", content=b"--b\r\nbroken", headers={
            "content-type": "multipart/form-data; boundary=b"}), "file"),
        (lambda c: c.post("/v1/vector_stores", json={"name": 3}), "name"),
        (lambda c: c.post("/v1/vector_stores", json={"metadata": {"a": []}}), "metadata"),
        (lambda c: c.post("/v1/vector_stores", json={"metadata": {"a": 10**400}}), "metadata"),
        (lambda c: c.post("/v1/vector_stores", json={"metadata": {"a": "x" * 513}}), "metadata"),
        (lambda c: c.post("/v1/vector_stores",
                          json={"metadata": {str(i): i for i in range(17)}}), "metadata"),
        (lambda c: c.post("/v1/vector_stores/village/search", json={}), "query"),
        (lambda c: c.post("/v1/vector_stores/village/search",
                          json={"query": "x" * 65537}), "query"),
        (lambda c: c.post("/v1/vector_stores/village/search",
                          json={"query": "a", "max_num_results": 51}), "max_num_results"),
        (lambda c: c.post("/v1/vector_stores/village/search",
                          json={"query": "a", "filters": {"type": "and"}}), "filters"),
        (lambda c: c.post("/v1/vector_stores/village/files", json={}), "file_id"),
        (lambda c: c.post("/v1/vector_stores/village/file_batches", json={}), "file_ids"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(kept, send, param):
    answer = send(kept.client)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_a_file_beyond_the_limit_leaves_nothing(running, served_model, tmp_path):
    with running(
        served_model, {}, data=str(tmp_path / "data"), max_upload_bytes=1 << 16
    ) as started:
        files = {"file": ("big.txt", b"x" * (1 << 17))}
        assert started.client.post("/v1/files", files=files).status_code == 413

        def pieces():
            yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.txt"\r\n\r\n'
            for _ in range(8):
                yield b"x" * (1 << 14)

        head = {"content-type": "multipart/form-data; boundary=b"}
        answer = started.client.post("/v1/files", content=pieces(), headers=head)
        assert answer.status_code == 413
        assert started.client.get("/v1/files").json()["data"] == []
        assert not list((tmp_path / "data").rglob("files/*"))


def test_without_a_data_folder_nothing_is_kept_and_what_is_served_is_searched(server):
    refused = server.client.post("/v1/files", files={"file": ("a.txt", b"x")})
    assert refused.status_code == 400 and "--data DIR" in refused.json()["error"]["message"]
    found = server.post("/v1/vector_stores/village/search", query="Kora Felell").json()
    assert found["data"]


def bag_of_letters(texts):
    """Counts of letters."""
    return np.array([[text.lower().count(it) for it in "abcdefghijklmnop"] for text in texts], "f4")


def stock(url, texts, http):
    """LangChain's and LlamaIndex's embeddings, as they are."""
    from langchain_openai import OpenAIEmbeddings
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    wanted = bag_of_letters(texts)
    given = {"model": "synthetic@letters", "api_key": "none", "http_client": http}
    langchain = OpenAIEmbeddings(base_url=url, check_embedding_ctx_length=False, **given)
    assert np.allclose(langchain.embed_documents(texts), wanted)
    assert np.allclose(langchain.embed_query(texts[0]), wanted[0])
    given["model_name"] = given.pop("model")
    llama = OpenAILikeEmbedding(api_base=url, **given)
    assert np.allclose(llama.get_text_embedding_batch(texts), wanted)
    assert np.allclose(llama.get_query_embedding(texts[0]), wanted[0])


def test_embeddings_are_those_of_the_knowledge_base(
    running, served_model, village, server, tmp_path
):
    with KnowledgeBase.open(
        tmp_path / "kb", served_model, embedder=bag_of_letters, index="exact", chunk_tokens=20
    ) as base:

        def change(state):
            state.knowledge_bases["letters"] = base

        with running(served_model, {"village": village}, change) as started:
            client = openai.OpenAI(base_url=f"{started.url}/v1", api_key="none", max_retries=0)
            base.add([{"id": "cab", "text": "File 18: Giso Berow lives in Tondorf."}])
            search = functools.partial(started.post, "/v1/vector_stores/letters/search")
            assert search(query="Giso").json()["jaxrag"] == {"notes": []}
            base._vectors.index.remove(base._catalog.ids_of_document("cab"))
            found = search(query="Giso").json()
            [note] = found["jaxrag"]["notes"]
            assert note.startswith("the vectors of 1 of 1 chunks") and len(found["data"]) == 1
            texts = ["a bad cab", "Hello"]
            made = client.embeddings.create(model="synthetic@letters", input=texts)
            assert np.allclose([row.embedding for row in made.data], bag_of_letters(texts))
            assert made.usage.total_tokens > 0
            asked = {"model": "synthetic@letters", "input": "abc"}
            form = {"encoding_format": "base64", "user": "me"}
            raw = started.post("/v1/embeddings", **asked, **form).json()
            assert "['user']" in raw["jaxrag"]["notes"][0]
            data = base64.b64decode(raw["data"][0]["embedding"])
            assert np.array_equal(np.frombuffer(data, "<f4"), bag_of_letters(["abc"])[0])
            numbers = started.post("/v1/embeddings", **asked, dimensions=16).json()
            assert numbers["data"][0]["embedding"][:3] == [1.0, 1.0, 1.0]
            with httpx.Client() as http:
                stock(f"{started.url}/v1", texts, http)
            for wrong, param in (
                ({"dimensions": 8}, "dimensions"),
                ({"input": [[1, 2]]}, "input"),
                ({"input": []}, "input"),
                ({"model": "synthetic@village"}, "model"),
            ):
                answer = started.post("/v1/embeddings", **{**asked, **wrong})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    none = server.post("/v1/embeddings", input="abc")
    assert none.status_code == 400 and "--embedder DIR" in none.json()["error"]["message"]
