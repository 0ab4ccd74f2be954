"""What a tenant stores is counted and bounded, and no other user of the machine reads it."""

import contextlib
import os

import openai
import pytest
from refusal import refused
from serving import key_file

from jaxrag.base.errors import ConfigError
from jaxrag.server.durable import make_private
from jaxrag.server.state import quota
from jaxrag.server.tenants import Tenants

STORY = b"File 23: Giso Berow lives in Tondorf.\n"


@pytest.fixture
def keyed(start, served_model, tmp_path, monkeypatch):
    """``keyed()``: a server over one data folder, and clients by name."""
    monkeypatch.setattr(quota, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(quota, "_LOOK_SHARE", 0)
    keys, most = {"small": "", "other": ""}, "[tenants.small]\nmax_bytes = 1000000"
    keys = key_file(tmp_path / "keys.toml", keys, most)
    settings = {"keys": keys, "data": str(tmp_path / "data")}

    def begin(**more):
        return start(served_model, {}, **settings | more)

    return begin


@pytest.fixture
def client_of():
    """``client_of(server, name)``: a client of a tenant."""
    with contextlib.ExitStack() as stack:

        def make(server, name):
            url = f"{server.url}/v1"
            return stack.enter_context(openai.OpenAI(base_url=url, api_key=name, max_retries=0))

        yield make


def upload(client, data, name="a.txt"):
    return client.files.create(file=(name, data), purpose="assistants")


def refusal(call):
    with pytest.raises(openai.APIStatusError) as found:
        call()
    assert found.value.body["code"] == "quota_exceeded"
    assert "\n" not in found.value.body["message"] and "max_bytes" in found.value.body["message"]
    return found.value.status_code


def test_files_are_counted_over_restarts_and_freed_when_they_are_removed(keyed, client_of):
    with keyed() as server:
        small = client_of(server, "small")
        first = upload(small, b"a" * 600_000)
        assert refusal(lambda: upload(small, b"b" * 400_001)) == 413
        assert upload(small, b"b" * 100_000).bytes == 100_000
        assert upload(client_of(server, "other"), b"a" * 1_100_000).bytes == 1_100_000
    with keyed() as server:
        small = client_of(server, "small")
        assert server.state.library.quota.used("small") == 700_000
        assert refusal(lambda: upload(small, b"c" * 300_001)) == 413
        full = upload(small, b"c" * 300_000)
        assert refusal(lambda: upload(small, b"c")) == 413
        assert refusal(lambda: small.vector_stores.create()) == 413
        small.files.delete(full.id)
        small.files.delete(first.id)
        assert server.state.library.quota.used("small") == 100_000
        assert upload(small, b"c" * 900_000).bytes == 900_000


def test_uploads_at_once_share_what_is_left(keyed):
    with keyed() as server:
        library = server.state.library
        access = server.state.tenants.access("small")
        first, second = library.begin(access), library.begin(access)
        first.write(b"a" * 600_000)
        with pytest.raises(Exception, match="600000 of the 1000000 bytes"):
            second.write(b"b" * 600_000)
        second.abort()
        first.abort()
        assert library.quota.used("small") == 0
        assert not list(library.data.glob("tenants/*/files/*"))


def test_vector_stores_count_and_free(keyed, client_of):
    with keyed(grace_seconds=0.0) as server:
        small = client_of(server, "small")
        store = small.vector_stores.create()
        file = upload(small, STORY, "story.txt")
        member = small.vector_stores.files.create_and_poll(file.id, vector_store_id=store.id)
        assert member.status == "completed"
        used = server.state.library.quota.used("small")
        assert used > len(STORY)
        upload(small, b"b" * (1_000_000 - used))
        again = small.vector_stores.files
        assert refusal(lambda: again.create(store.id, file_id=file.id)) == 413
        small.vector_stores.delete(store.id)
        server.state.library._keep_once(float("inf"))
        assert server.state.library.quota.used("small") == 1_000_000 - used + len(STORY)


def test_what_grows_beyond_the_limit_while_it_is_indexed_fails(keyed, client_of, monkeypatch):
    with keyed() as server:
        small = client_of(server, "small")
        store = small.vector_stores.create()
        file = upload(small, STORY, "story.txt")
        library = server.state.library
        check, calls = library.quota.check, []

        def later(tenant, more=0):
            calls.append(tenant)
            if len(calls) > 1:  # the first is of the request
                monkeypatch.setattr(library.quota, "_stores", lambda tenant: 1_000_000)
            check(tenant, more)

        monkeypatch.setattr(library.quota, "check", later)
        member = small.vector_stores.files.create_and_poll(file.id, vector_store_id=store.id)
        assert member.status == "failed" and "max_bytes" in member.last_error.message


@pytest.mark.parametrize("value", ["0", "-1", "1.5", '"1"'])
def test_a_limit_that_cannot_be_meant(tmp_path, value):
    keys = key_file(tmp_path / "keys.toml", {"a": ""}, f"[tenants.a]\nmax_bytes = {value}")
    with refused(ConfigError, "max_bytes"):
        Tenants.open(keys, None)


def test_no_other_user_reads_what_is_in_a_data_folder(keyed, client_of, tmp_path):
    """Also where the folder is there, and an earlier server made it so that others do."""
    data = tmp_path / "data"
    data.mkdir(mode=0o755)
    before = os.umask(0o022)
    try:
        for _ in range(2):
            with keyed() as server:
                other = client_of(server, "other")
                store = other.vector_stores.create()
                file = upload(other, STORY, "story.txt")
                other.vector_stores.files.create_and_poll(file.id, vector_store_id=store.id)
                for path in data.iterdir():
                    assert path.stat().st_mode & 0o077 == 0, path
                for folder in data.glob("tenants/*"):
                    assert folder.stat().st_mode & 0o077 == 0, folder
            (data / "tenants").chmod(0o755)
            (data / "server.sqlite").chmod(0o644)
        assert data.stat().st_mode & 0o777 == 0o755  # that is its owner's
    finally:
        os.umask(before)


def test_what_cannot_be_made_private_is_said(tmp_path, monkeypatch, caplog):
    def refuse(path, mode):
        raise PermissionError(1, "Operation not permitted")

    make_private(tmp_path / "nothing")
    (tmp_path / "a").touch(0o644)
    (tmp_path / "a").chmod(0o644)
    monkeypatch.setattr("pathlib.Path.chmod", refuse)
    make_private(tmp_path / "a")
    assert "can be read by other users" in caplog.text
