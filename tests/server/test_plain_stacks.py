"""Stacks as they come, over a real port: only `base_url` is theirs to change.

LangChain and LlamaIndex run from their packages. What Haystack sends was recorded from its package.
Requests of Open WebUI, RAGFlow and AnythingLLM, which are
servers, are written as their sources write them.
"""

import asyncio
import contextlib
import gc
import json
from pathlib import Path

import httpx
import pytest

from jaxrag.models.model import load_model

REQUESTS = Path(__file__).parent / "requests"
PASSAGES = json.loads((REQUESTS / "passages.json").read_text(encoding="utf-8"))["passages"]
QUESTIONS = ("Who sleeps?", "Who flies high?")


@pytest.fixture(scope="module")
def serving(start, trained_dir, rules_file, tmp_path_factory):
    model = load_model(trained_dir, cache_tokens=8192)
    data = str(tmp_path_factory.mktemp("stacks"))
    settings = {"plain": "passages", "passage_rules": rules_file, "data": data}
    with start(model, {}, warm_up=False, max_new_tokens=4, **settings) as running:
        yield running


@pytest.fixture
def told(serving):
    """``told``: a client that keeps (body, answer) of what is asked with it, as ``told.kept``."""
    assert serving.client.delete("/v1/plain").json()["deleted"]

    def keep(response):
        response.read()
        client.kept.append((json.loads(response.request.content), response.json()))

    with httpx.Client(event_hooks={"response": [keep]}, timeout=60) as client:
        client.kept = []
        yield client


def share(body, answer):
    """Of the passages' characters, how many lie in blocks whose KV was found."""
    known = [it for it in answer["jaxrag"]["plain"] if it["how"] != "first sight"]
    covered = 0
    for passage in PASSAGES:
        [(place, at)] = [
            (number, message["content"].find(passage))
            for number, message in enumerate(body["messages"])
            if passage in message["content"]
        ]
        covered += sum(
            max(0, min(it["end"], at + len(passage)) - max(it["start"], at))
            for it in known
            if it["message"] == place
        )
    return covered / sum(map(len, PASSAGES))


def check(told):
    """Nothing is known at first; then all, in another order and for another question."""
    (first, cold), (second, warm) = told.kept
    assert share(first, cold) == 0
    assert share(second, warm) >= 0.97
    cached = warm["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0.5 * warm["usage"]["prompt_tokens"]


def test_langchain(serving, told):
    documents = pytest.importorskip("langchain_core.documents")
    prompts = pytest.importorskip("langchain_core.prompts")
    chat = pytest.importorskip("langchain_openai").ChatOpenAI
    system = "Answer from these passages. Say so where they do not say it.\n\n{context}"
    prompt = prompts.ChatPromptTemplate.from_messages([("system", system), ("human", "{question}")])
    llm = chat(model=serving.state.name, base_url=f"{serving.url}/v1", api_key="any",
               http_client=told, max_retries=0)  # fmt: skip
    chain = (
        {
            "context": lambda it: "\n\n".join(one.page_content for one in it["documents"]),
            "question": lambda it: it["question"],
        }
        | prompt
        | llm
    )
    found = [documents.Document(page_content=it) for it in PASSAGES]
    for order, question in zip((found, found[::-1]), QUESTIONS, strict=True):
        chain.invoke({"documents": order, "question": question})
    check(told)


@pytest.fixture
def event_loop():
    """For a client that takes the thread's, and leaves open what it makes."""
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        asyncio.set_event_loop(loop)
        yield
        asyncio.set_event_loop(None)


@pytest.mark.filterwarnings("ignore")  # its own: coroutines of blocks that it awaits nowhere
@pytest.mark.usefixtures("event_loop")
def test_llamaindex(serving, told):
    synthesizers = pytest.importorskip("llama_index.core.response_synthesizers")
    schema = pytest.importorskip("llama_index.core.schema")
    like = pytest.importorskip("llama_index.llms.openai_like").OpenAILike
    llm = like(model=serving.state.name, api_base=f"{serving.url}/v1", api_key="any",
               is_chat_model=True, context_window=4096, max_tokens=4, max_retries=0,
               http_client=told)  # fmt: skip
    synthesizer = synthesizers.get_response_synthesizer(llm=llm, response_mode="compact")
    nodes = [
        schema.NodeWithScore(node=schema.TextNode(text=it, metadata={"file_path": f"docs/{i}.md"}))
        for i, it in enumerate(PASSAGES)
    ]
    for order, question in zip((nodes, nodes[::-1]), QUESTIONS, strict=True):
        synthesizer.synthesize(question, order)
    gc.collect()  # what it left is told here, and not in another test
    check(told)


@pytest.mark.parametrize("stack", ["haystack", "open-webui", "ragflow", "anythingllm"])
def test_recorded(stack, serving, told):
    for body in json.loads((REQUESTS / f"{stack}.json").read_text(encoding="utf-8")):
        sent = body | {"model": serving.state.name}
        told.post(f"{serving.url}/v1/chat/completions", json=sent).raise_for_status()
    check(told)
