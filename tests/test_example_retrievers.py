"""The example retrievers, asked by the real LangChain and LlamaIndex, and adapted back."""

import importlib.util
import runpy
import types
from pathlib import Path

import pytest

from jaxrag.library.retrieve.adapters import from_langchain, from_llamaindex
from jaxrag.library.retrieve.base import Chunks

EXAMPLES = Path(__file__).parents[1] / "examples"
TEXTS = {4: "The lamp burns oil.", 9: "It was lit in 1871."}


class Searched:
    """Stands for a knowledge base: notes what it was asked and finds two chunks."""

    def __init__(self):
        self.asked = []

    def search(self, question, k, *, where=None):
        self.asked.append((question, k, where))
        return [
            types.SimpleNamespace(
                chunk_id=chunk_id, document_id="lighthouse", text=text, metadata={"year": 1871},
                file="a.md", page=2, score=score,
            )
            for (chunk_id, text), score in zip(TEXTS.items(), (2.5, 1.5), strict=True)
        ]  # fmt: skip


def example(name, package):
    pytest.importorskip(package)
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.KnowledgeBaseRetriever


@pytest.fixture
def chunks():
    return Chunks(
        lambda ids: {i: TEXTS[i] for i in ids if i in TEXTS}, lambda name: [], lambda text, k: []
    )


def test_langchain(chunks):
    kb = Searched()
    made = example("langchain_retriever", "langchain_core")(kb=kb, k=2, where={"year": 1871})
    first, second = made.invoke("When was it lit?")
    assert kb.asked == [("When was it lit?", 2, {"year": 1871})]
    assert (first.page_content, second.page_content) == tuple(TEXTS.values())
    assert second.metadata == {
        "year": 1871, "chunk_id": 9, "document_id": "lighthouse", "file": "a.md", "page": 2,
        "score": 1.5,
    }  # fmt: skip
    (found,) = from_langchain(made, chunks).search(["When?"], 5)
    assert [item.chunk_id for item in found] == [4, 9]


def test_llamaindex(chunks):
    kb = Searched()
    made = example("llamaindex_retriever", "llama_index.core")(kb, k=2)
    first, second = made.retrieve("When was it lit?")
    assert kb.asked == [("When was it lit?", 2, None)]
    assert (first.score, second.node.get_content()) == (2.5, "It was lit in 1871.")
    assert second.node.metadata["chunk_id"] == 9
    assert from_llamaindex(made, chunks).search(["When?"], 5) == [[(4, 2.5), (9, 1.5)]]


@pytest.mark.parametrize(
    ("name", "package"),
    [("langchain_retriever", "langchain_core"), ("llamaindex_retriever", "llama_index.core")],
)
def test_run_as_a_program_it_asks_the_village(name, package, tmp_path, monkeypatch, capsys):
    pytest.importorskip(package)
    monkeypatch.setattr("sys.argv", [name, "--kb", str(tmp_path / "kb")])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    *found, answer = capsys.readouterr().out.splitlines()
    assert found[0].startswith("kora-felell.md: File 23: Kora Felell works as a weaver. She")
    assert (len(found), answer) == (3, "falcon")
