"""Keys say who asks and what each may do; what one tenant has is, to others, not there."""

import io
import re
import threading
from pathlib import Path

import numpy as np
import openai
import pytest
from refusal import refused
from serving import key_file

from jaxrag.base.errors import ChunkMissing, ConfigError
from jaxrag.cli import main
from jaxrag.kv.store import ChunkStore
from jaxrag.library.documents import Document
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.server.tenants import Tenants, bearer, check_host, folder_name

KEYS = {
    "acme": 'tenant = "acme"\nread = ["village"]\nadmin = true',
    "blue": 'tenant = "blue"\nwrite = ["*"]',
    "slow": 'tenant = "slow"\nread = ["*"]',
    "nothing": 'tenant = "blue"\ndocuments = "none"',
}
LIMITS = "[tenants.acme]\nweight = 2.0\npriority = 1\n[tenants.slow]\nrequests_per_minute = 3"
STORY = b"File 23: Giso Berow lives in Tondorf.\n"


def key_of(name):
    return f"sk-{name}-0123456789"


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    keys = {key_of(name): more for name, more in KEYS.items()}
    return key_file(tmp_path_factory.mktemp("keys") / "keys.toml", keys, LIMITS)


@pytest.fixture(scope="module")
def tenants(keys, tmp_path_factory):
    return Tenants.open(keys, tmp_path_factory.mktemp("data"))


def test_a_key_says_whose_it_is_and_what_it_may(tenants):
    acme = tenants.access(key_of("acme"))
    assert (acme.tenant, acme.limits.weight, acme.limits.priority) == ("acme", 2.0, 1)
    assert (acme.admin, acme.documents) == (True, "write")
    assert acme.may_read("village") and not acme.may_read("other")
    assert not acme.may_write("village")
    blue = tenants.access(key_of("blue"))
    assert blue.may_read("village") and blue.may_write("any") and not blue.admin
    assert acme.salt != blue.salt == tenants.access(key_of("nothing")).salt
    assert key_of("acme") not in repr(acme) and acme.salt not in repr(acme)
    for unknown in (None, "", "sk", key_of("acme") + " ", "\ud800"):
        assert tenants.access(unknown) is None
    assert tenants.weights == {"acme": 2.0, "blue": 1.0, "slow": 1.0}


def test_a_salt_lasts_as_long_as_the_data_folder(keys, tmp_path):
    first = Tenants.open(keys, tmp_path / "a").salt("acme")
    assert Tenants.open(None, tmp_path / "a").salt("acme") == first
    assert Tenants.open(keys, tmp_path / "b").salt("acme") != first
    assert Tenants.open(keys, None).salt("acme") != Tenants.open(keys, None).salt("acme")
    for private in (tmp_path / "a", tmp_path / "a" / "secret"):
        assert private.stat().st_mode & 0o077 == 0
    (tmp_path / "b" / "secret").unlink()
    (tmp_path / "b" / "server.sqlite").touch()
    with refused(ConfigError):
        Tenants.open(keys, tmp_path / "b")
    (tmp_path / "a" / "secret").write_bytes(b"short")
    with refused(ConfigError, "5"):
        Tenants.open(keys, tmp_path / "a")


def test_the_secret_that_seals_is_a_tenants_own_and_no_salt(keys, tmp_path):
    tenants = Tenants.open(keys, tmp_path)
    acme, blue = (tenants.seal_secret(name) for name in ("acme", "blue"))
    assert len(acme) == 32 and acme != blue
    assert Tenants.open(keys, tmp_path).seal_secret("acme") == acme
    assert Tenants.open(keys, None).seal_secret("acme") != acme
    assert acme.hex() != tenants.salt("acme")
    assert Tenants.open(None, tmp_path).seal_secret("") is None


def test_the_example_of_the_page_is_a_file_of_keys(tmp_path):
    page = (Path(__file__).parents[2] / "docs/server-reference.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```text\n(\[tenants.*?)```", page, re.S)
    path = tmp_path / "keys.toml"
    path.write_text(example, encoding="utf-8")
    tenants = Tenants.open(path, None)
    assert tenants.weights == {"acme": 2.0, "operators": 1.0}


def test_without_keys_everybody_is_one_tenant():
    access = Tenants.open(None, None).access(None)
    assert (access.tenant, access.admin, access.documents) == ("", True, "write")
    assert access.may_write("village")
    assert folder_name("") == "_"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ""),
        ('[[keys]]\nsha256 = "abc"\ntenant = "a"', "64"),
        (f'[[keys]]\nsha256 = "{"a" * 64}"\ntenant = "../a"', ""),
        (f'[[keys]]\nsha256 = "{"a" * 64}"\ntenant = "_"', "tenant='_'"),
        (f'[[keys]]\nsha256 = "{"a" * 64}"\ntenant = "a"\n' * 2, ""),
        (f'[tenants.b]\n[[keys]]\nsha256 = "{"a" * 64}"\ntenant = "a"', "'b'"),
        (f'[tenants.a]\nweight = 0.0\n[[keys]]\nsha256 = "{"a" * 64}"\ntenant = "a"', "weight=0"),
        (f'[tenants.a]\npriority = 3\n[[keys]]\nsha256 = "{"a" * 64}"\ntenant = "a"', "priority=3"),
        (f'[[keys]]\nsha256 = "{"a" * 64}"\ntenant = "a"\nkey = "b"', "'key'"),
        (f'[[keys]]\nsha256 = "{"a" * 64}"\ntenant = "a"\ndocuments = "all"', ""),
    ],
)
def test_a_wrong_file_of_keys_is_refused(tmp_path, text, message):
    path = tmp_path / "keys.toml"
    path.write_text(text, encoding="utf-8")
    with refused(ConfigError, message):
        Tenants.open(path, None)


@pytest.mark.parametrize(
    ("header", "key"),
    [("Bearer abc", "abc"), ("bearer  abc ", "abc"), ("Basic abc", None), ("", None),
     (None, None), ("Bearer", None)],
)  # fmt: skip
def test_the_key_in_a_header(header, key):
    assert bearer(header) == key


def test_others_reach_a_server_only_with_keys_or_where_that_is_wanted():
    for host in ("127.0.0.1", "::1", "localhost", "127.8.8.8"):
        check_host(host, has_keys=False, open_to_all=False)
    for host in ("0.0.0.0", "192.0.2.1", "::", "example.org"):
        with refused(ConfigError, "--keys FILE"):
            check_host(host, has_keys=False, open_to_all=False)
        check_host(host, has_keys=True, open_to_all=False)
        check_host(host, has_keys=False, open_to_all=True)


@pytest.fixture(scope="module")
def keyed(running, served_model, village, keys, tmp_path_factory):
    """A server that asks for keys."""
    data = tmp_path_factory.mktemp("kept")
    settings = {"keys": keys, "data": str(data)}
    with running(served_model, {"village": village}, **settings) as started:
        yield started


@pytest.fixture(scope="module")
def clients(keyed):
    return {
        name: openai.OpenAI(base_url=f"{keyed.url}/v1", api_key=key_of(name), max_retries=0)
        for name in KEYS
    }


def test_what_another_tenant_has_is_not_there(clients):
    """It is neither seen nor listed, searched, changed nor removed; unknown is the same 404."""
    acme, blue = clients["acme"], clients["blue"]
    file = acme.files.create(file=("story.txt", io.BytesIO(STORY)), purpose="assistants")
    store = acme.vector_stores.create(name="secret plans")
    acme.vector_stores.files.create_and_poll(file.id, vector_store_id=store.id, poll_interval_ms=20)
    assert blue.files.list().data == []
    assert [it.id for it in blue.vector_stores.list()] == ["village"]
    assert [it.id for it in blue.models.list()] == ["synthetic", "synthetic@village"]
    own = blue.vector_stores.create(name="own")
    asked = {"model": "synthetic", "messages": [{"role": "user", "content": "Giso?"}]}

    def said(ask, name):
        with pytest.raises(openai.NotFoundError) as caught:
            ask(name)
        return str(caught.value.body).replace(name, "...")

    for there, missing, asks in (
        (file.id, "file-" + "0" * 24, (
            blue.files.retrieve, blue.files.content, blue.files.delete,
            lambda it: blue.vector_stores.files.create(own.id, file_id=it),
        )),
        (store.id, "vs_" + "0" * 24, (
            blue.vector_stores.retrieve, blue.vector_stores.delete,
            lambda it: blue.vector_stores.update(it, name="mine"),
            lambda it: blue.vector_stores.search(it, query="Giso"),
            lambda it: blue.vector_stores.files.list(it).data,
            lambda it: blue.vector_stores.files.retrieve(file.id, vector_store_id=it),
            lambda it: blue.vector_stores.files.delete(file.id, vector_store_id=it),
            lambda it: blue.chat.completions.create(**asked, extra_body={"knowledge_base": it}),
            lambda it: blue.chat.completions.create(**asked | {"model": f"synthetic@{it}"}),
        )),
    ):  # fmt: skip
        for ask in asks:
            assert said(ask, there) == said(ask, missing)
    with pytest.raises(openai.NotFoundError):
        blue.chat.completions.create(**asked, extra_body={"knowledge_base": "secret plans"})
    assert acme.vector_stores.search(store.id, query="Giso Berow").data[0].file_id == file.id
    assert acme.files.content(file.id).content == STORY


def test_kv_that_is_put_into_a_tenants_folder_changes_no_answer(keyed, clients):
    """By who can write the data folder and knows its secret not: no salt is needed for that."""
    acme = clients["acme"]
    file = acme.files.create(file=("story.txt", io.BytesIO(STORY)), purpose="assistants")
    store = acme.vector_stores.create(name="planted")
    acme.vector_stores.files.create_and_poll(file.id, vector_store_id=store.id, poll_interval_ms=20)

    def answer():
        keyed.state.engine.forget()
        said = acme.chat.completions.create(
            model=f"synthetic@{store.id}",
            messages=[{"role": "user", "content": "What is the home of Giso Berow?"}],
        )
        return said.choices[0].message.content, said.model_extra["jaxrag"]["notes"]

    assert answer() == ("Tondorf", [])
    (folder,) = Path(keyed.state.settings.data).glob(f"**/{store.id}")
    base = keyed.state.library.base(keyed.state.library.shelf(access_of(keyed, "acme"), store.id))
    (layout,) = (folder / "layouts").glob("*.json")
    attacker = ChunkStore.open(folder, layout.stem, base.store.layout, mode="rw")
    for record in list(attacker.records()):
        kv = np.ones_like(attacker.get(record.key))
        attacker.put(record.key, kv, record=record.provenance, replace=True)
    content, notes = answer()
    assert content == "Tondorf"
    assert any("not sealed) and stored" in note for note in notes)
    assert answer() == ("Tondorf", [])


def access_of(keyed, name):
    return keyed.state.tenants.access(key_of(name))


def test_documents_of_two_tenants_share_no_key(keyed, clients):
    """The same texts are encoded once for each; one's KV is not found under the other's name."""
    documents = [STORY.decode().strip(), "File 18: Mela Forow works as a judge."]

    def encoded(name):
        answer = clients[name].chat.completions.create(
            model="synthetic",
            messages=[{"role": "user", "content": "What is the home of Giso Berow?"}],
            extra_body={"documents": documents},
        )
        assert answer.choices[0].message.content == "Tondorf"
        return answer.usage.prompt_tokens_details.cached_tokens

    keyed.state.engine.forget()
    assert encoded("acme") == 0
    again = encoded("acme")
    assert again > 0
    assert encoded("blue") == 0
    assert encoded("blue") == again
    stores = [keyed.state.memory.store(name) for name in ("acme", "blue")]
    assert not set(stores[0].keys()) & set(stores[1].keys())
    key = next(stores[0].keys())
    with pytest.raises(ChunkMissing):
        stores[1].get(key)
    assert stores[0].max_bytes == keyed.state.settings.memory_bytes // 3


def test_only_admins_see_what_others_brought_near(clients):
    """Where KV of a shared knowledge base was found; a tenant sees that of what it brings."""

    def told(name, **body):
        answer = clients[name].chat.completions.create(
            model="synthetic", messages=[{"role": "user", "content": "Giso Berow"}], extra_body=body
        )
        rows = [row for row in answer.model_extra["jaxrag"]["reuse"] if row["how"] == "chunk hit"]
        assert rows
        return {row["where"] for row in rows}

    assert told("acme", knowledge_base="village") <= {"pool", "host", "store"}
    assert told("blue", knowledge_base="village") == {None}
    own = {"documents": ["File 18: Mela Forow works as a judge."]}
    clients["blue"].chat.completions.create(
        model="synthetic", messages=[{"role": "user", "content": "Giso"}], extra_body=own
    )
    assert told("blue", **own) == {"pool"}


def test_what_a_tenant_may_have_reaches_those_who_give_it(keyed, clients):
    assert keyed.state.engine.settings.scheduler.weights == {"acme": 2.0, "blue": 1.0, "slow": 1.0}
    for _ in range(3):
        clients["slow"].vector_stores.search("village", query="Giso")
    assert clients["slow"].vector_stores.retrieve("village").id == "village"
    with pytest.raises(openai.RateLimitError):
        clients["slow"].vector_stores.search("village", query="Giso")
    clients["acme"].vector_stores.search("village", query="Giso")


def test_one_store_a_tenant_though_many_ask_at_once(keyed):
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(keyed.state.memory.store("blue")))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1


def test_a_key_with_groups_only_reads(tmp_path):
    path = tmp_path / "keys.toml"
    grouped = 'read = ["village"]\ndocuments = "read"\ngroups = ["sales", "legal"]'
    key_file(path, {"acme": 'read = ["village"]\nwrite = ["own"]', "blue": grouped})
    tenants = Tenants.open(path, None)
    acme, blue = tenants.access("acme"), tenants.access("blue")
    assert (acme.groups, blue.groups) == (None, ("sales", "legal"))
    # Fewer groups than before, never more, and nothing to change.
    assert blue.limited(["legal", "board"]).groups == ("legal",)
    assert blue.limited([]).groups == ()
    narrow = acme.limited(["board"])
    assert narrow.groups == ("board",) and narrow.documents == "read"
    assert narrow.may_read("own") and narrow.may_read("village") and not narrow.may_write("own")
    for change, message in (('documents = "read"\n', ""), ('groups = ["sales", "legal"]', "0")):
        instead = "" if change.startswith("doc") else 'groups = ["a b"]'
        key_file(path, {"blue": grouped.replace(change, instead)})
        with refused(ConfigError, message):
            Tenants.open(path, None)


def test_a_header_of_a_trusted_proxy_takes_groups_away(running, served_model, tmp_path):
    with KnowledgeBase.open(tmp_path / "kb", model=served_model) as kb:
        kb.add(
            Document(name, f"Giso {name}", metadata={"groups": [name]}) for name in ("sales", "hr")
        )
        kb.add([Document("all", "Giso all")])
    bases, ask = {"kb": tmp_path / "kb"}, ("/v1/vector_stores/kb/search", {"query": "Giso"})
    given = {"groups_header": "X-Groups", "data": str(tmp_path / "data")}
    with running(served_model, bases, trusted_proxies=("127.0.0.0/8",), **given) as server:

        def found(*values):
            headers = [("x-groups", value) for value in values]
            answer = server.client.post(ask[0], json=ask[1], headers=headers)
            return {it["file_id"] for it in answer.json()["data"]}

        assert found() == {"all", "sales", "hr"}
        assert found("sales") == found("sales , board") == {"all", "sales"}
        assert found("sales", "hr") == {"all", "sales", "hr"}
        assert found("") == {"all"}
        refused = server.client.post(ask[0], json=ask[1], headers={"x-groups": "a b"})
        assert refused.status_code == 400 and "X-Groups=['a b']" in refused.text
        path = "/v1/vector_stores/kb/files/hr"
        there = server.client.delete(path, headers={"x-groups": "hr"})
        assert there.status_code == 403
        missing = server.client.get(path, headers={"x-groups": "sales"})
        never = server.client.get(path.replace("hr", "no"), headers={"x-groups": "sales"})
        assert missing.status_code == never.status_code == 404
        assert missing.text.replace("'hr'", "'no'") == never.text
    with running(served_model, bases, trusted_proxies=("192.0.2.1",), **given) as server:
        for forged in ({}, {"x-forwarded-for": "192.0.2.1"}):
            headers = {"x-groups": "sales", **forged}
            answer = server.client.post(ask[0], json=ask[1], headers=headers)
            assert answer.status_code == 403 and "X-Groups from 127.0.0.1" in answer.text


def test_a_store_of_uploads_is_verified(start, served_model, keys, tmp_path):
    """Its seal is derived from the secret of the data folder that it is in."""
    with start(served_model, {}, keys=keys, data=str(tmp_path)) as running:
        key = key_of("blue")
        url = f"{running.url}/v1"
        with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
            made = client.vector_stores.create(name="notes")
            done = client.vector_stores.files.upload_and_poll(
                vector_store_id=made.id, file=("a.txt", STORY)
            )
            assert done.status == "completed"
    [folder] = (tmp_path / "tenants/blue/stores").iterdir()
    assert main(["kb", "verify", str(folder)]) == 0
    (tmp_path / "secret").rename(tmp_path / "elsewhere")
    assert main(["kb", "verify", str(folder)]) != 0
