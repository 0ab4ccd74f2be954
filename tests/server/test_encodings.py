"""Bodies as bytes: half surrogates in any encoding, and bodies that are packed."""

import gzip
import json
import sqlite3
import zlib

import pytest

HALF = b"a\xed\xa0\xbdb"  # of a pair, as bytes
CHAT = {"messages": [{"role": "user", "content": "Tondorf"}], "max_tokens": 1, "k": 1}


def send(server, path, content, **headers):
    return server.client.post(
        path, content=content, headers={"content-type": "application/json", **headers}
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "HALF"}]}),
        ("/v1/chat/completions", CHAT | {"documents": [{"text": "Tondorf", "title": "HALF"}]}),
        ("/v1/chat/completions", CHAT | {"guided_regex": "HALF"}),
        ("/v1/chat/completions", CHAT | {"stop": "HALF"}),
        ("/v1/completions", {"prompt": "HALF"}),
        ("/v1/completions", {"prompt": "HALF", "echo": True, "logprobs": 1, "max_tokens": 0}),
        ("/v1/responses", {"input": "Tondorf", "metadata": {"k": "HALF"}}),
        ("/tokenize", {"prompt": "HALF"}),
        ("/v1/vector_stores", {"name": "HALF"}),
        ("/v1/vector_stores", {"name": "n", "metadata": {"HALF": "a"}}),
    ],
)
def test_half_of_a_pair_is_refused_before_anything_is_written(kept, path, body):
    stores = kept.client.get("/v1/vector_stores").json()["data"]
    text = json.dumps(body)
    for content in (
        text.encode().replace(b"HALF", HALF),
        text.replace("HALF", "\\ud83d").encode(),
        text.replace("HALF", "\\ud83d").encode("utf-16"),
        text.replace("HALF", "a\ud83db").encode("utf-16-le", "surrogatepass"),
        text.replace("HALF", "a\ud83db").encode("utf-32", "surrogatepass"),
    ):
        answer = send(kept, path, content)
        assert answer.status_code == 400 and "\n" not in answer.json()["error"]["message"]
    assert kept.client.get("/v1/vector_stores").json()["data"] == stores


def test_what_an_older_version_wrote_is_listed(running, served_model, village, tmp_path):
    with running(served_model, {"village": village}, data=str(tmp_path)) as server:
        made = server.post("/v1/vector_stores", name="n", metadata={"k": "a"}).json()["id"]
    [path] = tmp_path.rglob("server.sqlite")
    with sqlite3.connect(path) as rows:
        changed = rows.execute("UPDATE stores SET metadata = ?", (json.dumps({"k": "a\ud83db"}),))
        assert changed.rowcount == 1
    rows.close()
    with running(served_model, {"village": village}, data=str(tmp_path)) as server:
        listed = server.client.get("/v1/vector_stores").raise_for_status().json()["data"]
        assert {it["id"]: it["metadata"] for it in listed}[made] == {"k": "a?b"}
        assert server.client.delete(f"/v1/vector_stores/{made}").status_code == 200


@pytest.mark.parametrize(("name", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_packed_bodies_are_read(server, name, pack):
    packed = pack(json.dumps(CHAT).encode())
    answer = send(server, "/v1/chat/completions", packed, **{"content-encoding": name})
    assert answer.status_code == 200, answer.text
    for wrong, status in (
        (packed[:-9], 400),
        (b"{}", 400),
        (pack(b" " * (server.state.settings.max_body_bytes + 1)), 413),
    ):
        answer = send(server, "/v1/chat/completions", wrong, **{"content-encoding": name})
        assert answer.status_code == status and "\n" not in answer.json()["error"]["message"]


def test_packed_otherwise_is_refused(server):
    answer = send(server, "/v1/chat/completions", b"a", **{"content-encoding": "br"})
    assert answer.status_code == 400 and "gzip, deflate" in answer.json()["error"]["message"]
