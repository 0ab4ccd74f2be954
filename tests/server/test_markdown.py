"""Markdown for the page: a tree of known elements, whatever a document or a model writes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrag.server.answers.markdown import MOST_TEXTS, SCHEMES, TAGS, nodes_of


def elements(nodes):
    for node in nodes:
        if not isinstance(node, str):
            yield node
            yield from elements(node[2])


def texts(nodes):
    return "".join(it if isinstance(it, str) else texts(it[2]) for it in nodes)


def test_marks_become_elements():
    assert nodes_of("# A *b*\n\n- c\n- `d`\n") == [
        ["h1", None, ["A ", ["em", None, ["b"]]]],
        ["ul", None, [["li", None, ["c"]], ["li", None, [["code", None, ["d"]]]]]],
    ]
    assert nodes_of("[a](https://b.c/d)") == [["p", None, [["a", "https://b.c/d", ["a"]]]]]
    (table,) = nodes_of("|a|\n|-|\n|b|")
    assert table[0] == "table" and texts([table]) == "ab"


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "a <b onclick=x>b</b>",
        "<!-- x --><iframe src=//x.y>",
    ],
)
def test_html_stays_text(text):
    nodes = nodes_of(text)
    assert texts(nodes).strip() == text
    assert [it[0] for it in elements(nodes)] == ["p"]


@pytest.mark.parametrize(
    "address",
    ["javascript:x", "JaVaScRiPt:x", "data:text/html,x", "vbscript:x", "file:///x", "//x.y", "/v1"],
)
def test_a_link_leads_to_the_web_or_nowhere(address):
    nodes = nodes_of(f"[word]({address})")
    assert "word" in texts(nodes)
    assert not [it for it in elements(nodes) if it[0] == "a"]


def test_an_image_is_its_description():
    assert nodes_of("![a bridge](https://x.y/z.png)") == [["p", None, ["[a bridge]"]]]


@given(st.text(alphabet="ab #*_`<>[]()!|-\n:/&;javscript", max_size=200))
def test_nothing_but_known_elements_is_made(text):
    for tag, address, _ in elements(nodes_of(text)):
        assert tag in TAGS
        assert (address is None) == (tag != "a")
        assert address is None or address.lower().startswith(tuple(f"{it}:" for it in SCHEMES))


def test_over_http(server):
    answer = server.post("/markdown", texts=["*a*", "b"])
    assert answer.json()["nodes"] == [[["p", None, [["em", None, ["a"]]]]], [["p", None, ["b"]]]]
    assert server.post("/markdown", texts=["a"] * (MOST_TEXTS + 1)).status_code == 400
    assert server.post("/markdown", texts=["a" * 70_000] * 2).status_code == 400
