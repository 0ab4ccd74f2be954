"""Who may ask from a browser: names of the server, and pages of other sites."""

import http.client

import pytest

from jaxrag.server.errors import Problem
from jaxrag.server.http.hosts import check_name
from jaxrag.server.settings import ServerSettings

LOOPBACK = ("127.0.0.1", "127.9.9.9:8000", "localhost", "LOCALHOST:80", "localhost.", "[::1]:8000")
NEAR = ("192.168.1.7:8000", "[fe80::1]", "jaxrag", "jaxrag:8000")
FAR = (
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "a.localhost.evil.example",
    "",
)
OPEN = {"host": "0.0.0.0", "open_to_all": True}
KEYS = {"host": "0.0.0.0", "keys": "keys.toml"}


@pytest.mark.parametrize(
    ("settings", "taken", "refused"),
    [
        ({}, LOOPBACK, (*NEAR, *FAR)),
        ({"host": "localhost"}, LOOPBACK, (*NEAR, *FAR)),
        ({"allowed_hosts": ("rag.example",)}, (*LOOPBACK, "rag.example:80", "RAG.example."), FAR),
        ({"allowed_hosts": ("*",)}, (*LOOPBACK, *NEAR, *FAR), ()),
        ({"origins": ("https://rag.example:1",)}, (*LOOPBACK, "rag.example"), (*NEAR, *FAR)),
        (OPEN, (*LOOPBACK, *NEAR), FAR),
        (OPEN | {"allowed_hosts": ("rag.example",)}, (*NEAR, "rag.example"), FAR),
        (KEYS, (*LOOPBACK, *NEAR, *FAR), ()),
        (KEYS | {"allowed_hosts": ("rag.example",)}, (*LOOPBACK, *NEAR, "rag.example"), FAR),
    ],
)
def test_names_of_the_server(settings, taken, refused):
    found = ServerSettings(**settings)
    for host in taken:
        check_name([host], found)
    check_name([], found)  # a client that is no browser need not say any
    for host in refused:
        with pytest.raises(Problem) as problem:
            check_name([host], found)
        assert problem.value.status == 403 and host[:20] in problem.value.message
        with pytest.raises(Problem):
            check_name(["127.0.0.1", host], found)


@pytest.fixture(scope="module")
def kept(start, served_model, village, tmp_path_factory):
    data = tmp_path_factory.mktemp("kept")
    with start(served_model, {"village": village}, data=str(data)) as server:
        yield server


ROUTES = [
    ("GET", "/"),
    ("GET", "/health"),
    ("GET", "/v1/files"),
    ("GET", "/v1/engine"),
    ("HEAD", "/"),
    ("OPTIONS", "/v1/files"),
    ("POST", "/tokenize"),
    ("POST", "/v1/chat/completions"),
    ("DELETE", "/v1/files/file-0"),
    ("PUT", "/nowhere"),
]


def status_of(server, method, path, **headers):
    """The status; ``headers`` with ``_`` for ``-``."""
    address = server.url.removeprefix("http://")
    with_host = {"host": address} | {name.replace("_", "-"): it for name, it in headers.items()}
    client = http.client.HTTPConnection(address, timeout=20)
    try:
        client.request(method, path, "{}", with_host)
        answer = client.getresponse()
        answer.read()
        return answer.status
    finally:
        client.close()


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_name_that_was_made_to_lead_here_reaches_nothing(kept, method, path):
    port = kept.url.rpartition(":")[2]
    evil = f"evil.example:{port}"
    assert status_of(kept, method, path, host=evil) == 403
    assert status_of(kept, method, path, host=evil, origin=f"http://{evil}") == 403
    same = {"origin": f"http://{evil}", "sec_fetch_site": "same-origin"}
    assert status_of(kept, method, path, host=evil, **same) == 403
    for host in (f"localhost:{port}", f"127.0.0.1:{port}"):
        assert status_of(kept, method, path, host=host) != 403


NAVIGATES = {"sec_fetch_mode": "navigate"}


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
@pytest.mark.parametrize(
    ("method", "path", "headers", "refused"),
    [
        ("POST", "/tokenize", {}, True),
        ("POST", "/", NAVIGATES, True),
        ("DELETE", "/v1/files/file-0", {}, True),
        ("GET", "/v1/files", {}, True),
        ("GET", "/v1/files", NAVIGATES, True),
        ("GET", "/", {"sec_fetch_mode": "no-cors"}, True),
        ("GET", "/", NAVIGATES, False),
        ("OPTIONS", "/tokenize", {}, False),
    ],
)
def test_what_other_pages_have_a_browser_send(kept, site, method, path, headers, refused):
    status = status_of(kept, method, path, sec_fetch_site=site, **headers)
    assert (status == 403) == refused


@pytest.mark.parametrize("site", ["same-origin", "none"])
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_what_the_page_and_its_user_send(kept, site, method, path):
    assert status_of(kept, method, path, sec_fetch_site=site) != 403


def test_pages_that_may_ask_from_elsewhere(start, served_model):
    page = {"origin": "https://chat.example", "sec_fetch_site": "cross-site"}
    with start(served_model, {}, origins=("https://chat.example",)) as server:
        for method, path in (("POST", "/tokenize"), ("GET", "/v1/models")):
            assert status_of(server, method, path, **page) != 403
            assert status_of(server, method, path, **page | {"origin": "https://b.example"}) == 403
