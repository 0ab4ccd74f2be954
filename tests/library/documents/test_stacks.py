"""Documents cut as other stacks cut them, and the blocks that their prompts have."""

import json
from pathlib import Path

import pytest
from refusal import refused

from jaxrag.base.errors import DocumentError
from jaxrag.library.documents.chunking import Chunking, split
from jaxrag.library.documents.stacks import STACKS, stack_blocks, stack_named
from jaxrag.models.text.passage_rules import passage_rules
from jaxrag.models.text.passages import cut

GOLDENS = json.loads(
    (Path(__file__).parents[2] / "goldens" / "splitters.json").read_text(encoding="utf-8")
)
RULES = passage_rules("common")
TEXT = "\n\n".join(
    f"## Part {i}\n\n"
    + " ".join(f"Otter {i} of {j} eats fish and sleeps at day." for j in range(9))
    for i in range(12)
)


def passages(name, text):
    stack = stack_named(name)
    return [text[a:b] for a, b in stack.split(text, stack.size, stack.overlap)]


@pytest.mark.parametrize(
    "case", GOLDENS["cases"], ids=[f"{it[0]} {len(it[1])}" for it in GOLDENS["cases"]]
)
def test_passages_are_those_of_the_stack_itself(case):
    name, text, wanted = case
    assert passages(name, text) == wanted


@pytest.mark.parametrize(("size", "overlap"), [(1000, 200), (90, 30)])
def test_langchain_as_it_is_installed(size, overlap):
    stock = pytest.importorskip("langchain_text_splitters")
    made = stock.RecursiveCharacterTextSplitter(chunk_size=size, chunk_overlap=overlap)
    assert passages(f"langchain:{size}:{overlap}", TEXT) == made.split_text(TEXT)


def test_llamaindex_as_it_is_installed():
    stock = pytest.importorskip("llama_index.core.node_parser")
    made = stock.SentenceSplitter(chunk_size=128, chunk_overlap=20)
    assert passages("llamaindex:128:20", TEXT) == made.split_text(TEXT)


PROMPTS = {  # what a stack writes around its passages
    "langchain": "\n\n".join,
    "haystack": lambda found: "".join(f"\n    {it}\n" for it in found),
    "open-webui": lambda found: "\n".join(
        f'<source id="{i}">{it}</source>' for i, it in enumerate(found)
    ),
    "anythingllm": lambda found: "".join(
        f"[CONTEXT {i}]:\n{it}\n[END CONTEXT {i}]\n\n" for i, it in enumerate(found)
    ),
    "llamaindex": lambda found: "\n\n".join(f"file_path: a.md\n\n{it}" for it in found),
}


@pytest.mark.parametrize("name", STACKS)
def test_the_blocks_of_its_prompts_are_known_before_the_first(name):
    if name == "llamaindex":
        pytest.importorskip("llama_index.core")
    stack = stack_named(f"{name}:60:5" if name == "haystack" else f"{name}:500:50")
    known = {TEXT[a:b] for a, b in stack_blocks(TEXT, stack, RULES)}
    found = [TEXT[a:b] for a, b in stack.split(TEXT, stack.size, stack.overlap)]
    prompt = "Use these.\n\nContext:\n" + PROMPTS[name](found[1:6]) + "\n\nWho sleeps?"
    blocks = [prompt[it.start : it.end] for it in cut(prompt, RULES) if it.block]
    share = sum(len(it) for it in blocks if it in known) / sum(map(len, blocks))
    assert share > 0.95
    assert sum(map(len, blocks)) > 0.95 * sum(map(len, found[1:6]))


def test_chunks_are_tokenised_alone(word_tokenizer):
    chunks = split(TEXT, word_tokenizer, Chunking(512, 10, "langchain:500:50"))
    assert [it.index for it in chunks] == list(range(len(chunks)))
    for chunk in chunks:
        assert chunk.text == TEXT[chunk.start : chunk.end] == chunk.text.strip()
        assert chunk.ids.tolist() == word_tokenizer.encode(chunk.text).tolist()


def test_a_file_is_pasted_whole(word_tokenizer):
    text = TEXT[:3000]
    [chunk] = split(text, word_tokenizer, Chunking(512, 10, "passages"))
    assert chunk.text == text.strip()


def test_what_is_too_short_to_be_read_from_kv_is_left_out(word_tokenizer):
    with refused(DocumentError):
        split("Otters eat fish.", word_tokenizer, Chunking(512, 10, "langchain"))
