"""What every kind of key is answered on every route: a table that no route may be missing in.

Its columns are KEYS; of what is named in a request, "own" is what tenant acme made, "served" a
knowledge base of the server's. The documents that are named are for the group "legal".
"""

import shutil
import time

import pytest
from serving import key_file

from jaxrag.library.documents import Document
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.server.http.app import ROUTES

KEYS = ("none", "unknown", "bare", "other", "chats", "reader", "grouped", "writer", "admin")
FILE = {
    "bare": 'tenant = "blue"\ndocuments = "none"',  # of another tenant, for chats about nothing
    "other": 'tenant = "blue"\nwrite = ["*"]',  # which may write to what is served
    "chats": 'tenant = "acme"\nread = ["village"]\ndocuments = "none"',
    "reader": 'tenant = "acme"\ndocuments = "read"',  # of its tenant's own documents only
    # Of its tenant's and of what is served what it may read, none of which has its groups.
    "grouped": 'tenant = "acme"\nread = ["village"]\ndocuments = "read"\ngroups = ["sales"]',
    "writer": 'tenant = "acme"\nread = ["village"]',
    "admin": 'tenant = "acme"\nread = ["village"]\nadmin = true',
}
OPEN = {"": "200 200 200 200 200 200 200 200 200"}
KNOWN = {"": "401 401 200 200 200 200 200 200 200"}
ADMINS = {"": "401 401 403 403 403 403 403 403 200"}
READ = {
    "own": "401 401 404 404 404 200 200 200 200",
    "served": "401 401 404 200 200 404 200 200 200",
}
DOCUMENT = {
    "own": "401 401 404 404 404 200 404 200 200",
    "served": "401 401 404 200 200 404 404 200 200",
}
CHANGE = {
    "own": "401 401 404 404 404 403 403 200 200",
    "served": "401 401 404 200 403 404 403 403 403",
}
OWN_ONLY = {**CHANGE, "served": "401 401 404 403 403 404 403 403 403"}
STORE = "/v1/vector_stores/{store}"


def past(rows):
    """Rows of what is refused behind the question of rights, so that no model runs.

    More tokens are asked for than the server gives; it has no embedder.
    """
    return {about: row.replace("200", "400") for about, row in rows.items()}


RIGHTS = {
    "GET /": OPEN,
    "GET /favicon.svg": OPEN,
    "GET /favicon.ico": OPEN,
    "GET /health": OPEN,
    "GET /ready": OPEN,
    "GET /metrics": OPEN,
    "GET /v1/engine": ADMINS,
    "GET /tokenizer_info": KNOWN,
    "GET /v1/models": KNOWN,
    "GET /v1/models/{name:path}": READ,
    "POST /v1/chat/completions": past(KNOWN | READ),
    "POST /v1/completions": past(KNOWN | READ),
    "POST /v1/responses": past(KNOWN | READ),
    "GET /v1/responses/{response}": {"own": "401 401 404 404 404 404 404 200 200"},
    "GET /v1/responses/{response}/input_items": {"own": "401 401 404 404 404 404 404 200 200"},
    "DELETE /v1/responses/{response}": {"own": "401 401 404 404 404 404 404 200 200"},
    "POST /markdown": KNOWN,
    "POST /tokenize": KNOWN,
    "POST /detokenize": KNOWN,
    "DELETE /v1/plain": {"": "401 401 403 200 403 403 403 200 200"},
    "GET /v1/files": {"": "401 401 403 200 403 200 403 200 200"},
    "POST /v1/files": {"": "401 401 403 200 403 403 403 200 200"},
    "GET /v1/files/{file}": {"own": "401 401 403 404 403 200 403 200 200"},
    "GET /v1/files/{file}/content": {"own": "401 401 403 404 403 200 403 200 200"},
    "DELETE /v1/files/{file}": {"own": "401 401 403 404 403 403 403 200 200"},
    "GET /v1/vector_stores": KNOWN,
    "POST /v1/vector_stores": {"": "401 401 403 200 403 403 403 200 200"},
    f"GET {STORE}": READ,
    f"POST {STORE}": OWN_ONLY,
    f"DELETE {STORE}": OWN_ONLY,
    f"POST {STORE}/search": READ,
    f"GET {STORE}/files": READ,
    # What is put in is acme's file, which others do not find.
    f"POST {STORE}/files": {**CHANGE, "served": "401 401 404 404 403 404 403 403 403"},
    f"GET {STORE}/files/{{file:path}}": DOCUMENT,
    f"GET {STORE}/files/{{file:path}}/content": DOCUMENT,
    f"POST {STORE}/files/{{file:path}}": {
        "own": "401 401 404 404 404 403 404 200 200",
        "served": "401 401 404 404 403 404 404 403 403",
    },
    f"DELETE {STORE}/files/{{file:path}}": CHANGE,
    f"POST {STORE}/file_batches": {
        **CHANGE, "served": "401 401 404 404 403 404 403 403 403"
    },
    f"GET {STORE}/file_batches/{{batch}}": {"own": DOCUMENT["own"]},
    f"GET {STORE}/file_batches/{{batch}}/files": {"own": DOCUMENT["own"]},
    f"POST {STORE}/file_batches/{{batch}}/cancel": {"own": "401 401 404 404 404 403 404 200 200"},
    "POST /v1/embeddings": past(READ),
}  # fmt: skip
SECRET = Document("secret.md", "Giso Berow owns a falcon.", metadata={"groups": ["legal"]})
BODIES = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Giso?"}],
        "max_tokens": 10**6,
    },
    "/v1/responses": {"input": "Giso?", "max_output_tokens": 10**6},
    "/v1/completions": {"prompt": "Giso?", "max_tokens": 10**6},
    "/markdown": {"texts": ["Giso"]},
    "/tokenize": {"prompt": "Giso"},
    "/detokenize": {"tokens": [5]},
    "/v1/vector_stores": {"name": "another"},
    STORE: {"name": "renamed"},
    f"{STORE}/search": {"query": "Giso"},
    f"{STORE}/files": {"file_id": "{file}", "attributes": {"groups": ["legal"]}},
    f"{STORE}/files/{{file:path}}": {"attributes": {"groups": ["legal"], "year": 1}},
    f"{STORE}/file_batches": {"file_ids": ["{file}"], "attributes": {"groups": ["legal"]}},
    "/v1/embeddings": {"input": "Giso"},
}
ASKED = [
    (method, route.path)
    for route in ROUTES
    for method in sorted(set(route.methods or ()) - {"HEAD"})
]


class Asking:
    """Requests with every key, about what acme has."""

    def __init__(self, client):
        self.client = client
        self.own = self.made()
        self.served = {"store": "village", "file": SECRET.id}

    def send(self, key, method, path, **more):
        headers = {} if key == "none" else {"authorization": f"Bearer sk-{key}"}
        return self.client.request(method, path, headers=headers, **more)

    def made(self):
        """Ids of a store of acme, of a file in it, and of a batch of another."""

        def answer(path, **more):
            found = self.send("writer", "POST", path, **more)
            assert found.status_code == 200, found.text
            return found.json()["id"]

        ids = {"store": answer("/v1/vector_stores", json={"name": "plans"})}
        members = f"/v1/vector_stores/{ids['store']}"
        for name in ("file", "batched"):
            text = f"{name}: Giso Berow lives in Tondorf.\n".encode()
            ids[name] = answer("/v1/files", files={"file": ("story.txt", text)})
        groups = {"attributes": {"groups": ["legal"]}}
        answer(f"{members}/files", json={"file_id": ids["file"], **groups})
        batch = {"file_ids": [ids["batched"]], **groups}
        ids["batch"] = answer(f"{members}/file_batches", json=batch)
        deadline = time.monotonic() + 60
        while self.send("writer", "GET", members).json()["status"] != "completed":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        asked = {"input": "Giso Berow", "knowledge_base": ids["store"], "max_output_tokens": 1}
        ids["response"] = answer("/v1/responses", json=asked)
        return ids

    def __call__(self, key, method, path, about):
        """The answer to a request about nothing, what is acme's own, or what is served."""
        named = {"own": self.own, "served": self.served}.get(about, {})
        if (method, path) == ("POST", "/v1/files"):
            return self.send(key, method, path, files={"file": ("a.txt", b"amber")})
        body = dict(BODIES.get(path, {})) if method == "POST" else None
        if body is not None and "{" not in path and named:
            body["knowledge_base"] = named["store"]
        if body is not None and "{store}" in path:
            texts = {"file_id": self.own["file"], "file_ids": [self.own["file"]]}
            body = {name: texts.get(name, value) for name, value in body.items()}
        filled = path.replace(":path", "")
        if named:
            filled = filled.format(name=f"synthetic@{named['store']}", **named)
        return self.send(key, method, filled, json=body)


@pytest.fixture(scope="module")
def asking(running, served_model, village, tmp_path_factory):
    """Requests to a server with all these keys, over a village of its own."""
    folder = tmp_path_factory.mktemp("rights")
    keys = key_file(folder / "keys.toml", {f"sk-{name}": more for name, more in FILE.items()})
    copied = shutil.copytree(village, folder / "village")
    with KnowledgeBase.open(copied, model=served_model) as kb:
        kb.add([SECRET])
    settings = {"keys": keys, "data": str(folder / "data")}
    with running(served_model, {"village": copied}, **settings) as started:
        yield Asking(started.client)


@pytest.mark.parametrize(("method", "path"), ASKED)
def test_every_route_answers_every_key_as_the_table_says(asking, method, path):
    for about, row in RIGHTS[f"{method} {path}"].items():
        for key, status in zip(KEYS, row.split(), strict=True):
            found = asking(key, method, path, about)
            assert found.status_code == int(status), (about, key, found.text)
            if method == "DELETE" and status == "200" and about == "own":
                asking.own = asking.made()


def test_the_table_has_no_route_that_is_gone():
    assert set(RIGHTS) == {f"{method} {path}" for method, path in ASKED}


def test_lists_hold_what_a_key_may_read(asking):
    def listed(key, path):
        return {it["id"] for it in asking.send(key, "GET", path).json()["data"]}

    own, village = asking.own["store"], "village"
    for key, stores in {
        "bare": set(), "chats": {village}, "reader": {own}, "admin": {own, village},
    }.items():  # fmt: skip
        found = listed(key, "/v1/vector_stores")
        assert found & {own, village} == stores
        models = {"synthetic", *(f"synthetic@{it}" for it in found)}
        assert listed(key, "/v1/models") == models
    shown = asking.send("reader", "GET", f"/v1/vector_stores/{own}").json()
    assert shown["jaxrag"]["writable"] is False
    assert not {own, asking.own["file"]} & (
        listed("other", "/v1/vector_stores") | listed("other", "/v1/files")
    )


def test_no_list_and_no_answer_has_what_groups_may_not_read(asking):
    def found(key, place):
        store = place["store"]
        search = {"query": "Giso Berow falcon", "max_num_results": 50}
        hits = asking.send(key, "POST", f"/v1/vector_stores/{store}/search", json=search)
        listed = asking.send(key, "GET", f"/v1/vector_stores/{store}/files?limit=100")
        ask = {"prompt": "Giso Berow falcon", "max_tokens": 1, "knowledge_base": store, "k": 50}
        answer = asking.send(key, "POST", "/v1/completions", json=ask)
        sources = answer.json()["jaxrag"]["sources"]
        return (
            place["file"] in {it["file_id"] for it in hits.json()["data"]},
            place["file"] in {it["id"] for it in listed.json()["data"]},
            any(it["document_id"].startswith(place["file"]) for it in sources),
        )

    asking.own = asking.made()  # nothing of it is indexed anew just now
    for place in (asking.own, asking.served):
        assert found("grouped", place) == (False, False, False)
    assert found("writer", asking.own) == (True, True, True)
    said = {"prompt": "Giso", "knowledge_base": "village", "groups": ["legal"]}
    refused = asking.send("grouped", "POST", "/v1/completions", json=said)
    assert refused.status_code == 400 and "groups" in refused.json()["error"]["message"]
