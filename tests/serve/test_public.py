"""What a notebook and a type checker see of the public names."""

import inspect
import typing

import pytest

import jaxrag
from jaxrag.serve import generate as module

QUESTION = "Who carries the salt?"


@pytest.fixture(scope="module")
def kb(tmp_path_factory, text_model):
    with jaxrag.KnowledgeBase.open(tmp_path_factory.mktemp("public") / "kb", text_model) as kb:
        kb.add(["Salt is carried by mules. " * 20])
        yield kb


def test_results_hits_and_knowledge_bases_are_printed_on_one_line(kb):
    out = jaxrag.generate(QUESTION, kb=kb, max_new_tokens=3)
    assert repr(out).startswith("<Result ") and "turborag: 1 sources, reused " in repr(out)
    assert len(repr(out)) < 200 and "mules" not in repr(out)
    assert repr(kb) == (
        f"<KnowledgeBase {str(kb.path)!r}: template 'turborag', encoders isolated, mode 'rw'>"
    )
    assert repr(kb.model) == (
        f"<Model {kb.model.path!r}: llama, 42,360 parameters in float32, context 1024, default "
        "device, KV on the device>"
    )
    assert repr(jaxrag.generate(QUESTION, kb=kb, stream=True)) == (
        "<Stream turborag: not at its end>"
    )
    (hit,) = kb.search(QUESTION, k=1)
    assert isinstance(hit, jaxrag.Hit) and len(hit.ids) > 0
    page = "" if hit.page is None else f", page {hit.page}"
    assert repr(hit) == (
        f"<Hit {hit.document_id!r} #{hit.chunk_index}{page}, score {hit.score:.4g}: "
        f"{hit.text[:60] + '…'!r}>"
    )


def test_a_stream_is_an_iterator_that_shows_its_prompt(kb):
    stream = jaxrag.generate(QUESTION, kb=kb, max_new_tokens=4, stream=True)
    assert isinstance(stream, jaxrag.Stream) and iter(stream) is not stream.prompt
    prefix, chunk, final = stream.prompt
    assert [part["part"] for part in (prefix, chunk, final)] == ["prefix", "chunk 0", "final block"]
    assert chunk["text"].startswith("<|doc_start|>Salt is carried")
    assert QUESTION in final["text"]
    pieces = []
    while (piece := next(stream, None)) is not None:
        pieces.append(piece)
    assert "".join(pieces) == stream.result.text


@pytest.mark.parametrize(
    ("function", "returned"),
    [
        (module.generate, ["Result", "Stream", "list", "Result", "Stream"]),
        (module.agenerate, ["Result", "AsyncStream", "Result", "AsyncStream"]),
    ],
)
def test_every_form_of_a_call_has_its_type(function, returned):
    """Each overload takes what the function takes, a question or messages; says what comes back."""
    real = inspect.signature(function).parameters
    overloads = typing.get_overloads(function)
    found = []
    for one in overloads:
        parameters = inspect.signature(one).parameters
        (options,) = typing.get_args(parameters["options"].annotation)
        asked = {"question", "messages"} & set(parameters)
        assert asked == ({"messages"} if len(found) >= len(returned) - 2 else {"question"})
        shared = {"stream", *typing.get_type_hints(options)}
        assert {"question", "messages"} | shared == set(real)
        for name, kind in typing.get_type_hints(options).items():
            assert real[name].annotation == kind, name
        found.append(str(typing.get_type_hints(one)["return"]))
    assert len(found) == len(returned)
    assert all(name in text for name, text in zip(returned, found, strict=True))
