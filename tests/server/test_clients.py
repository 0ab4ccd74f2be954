"""Stock clients, as they are: openai, LangChain and LlamaIndex."""

import threading

import httpx
import openai
import pytest
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

ANIMAL = "Which animal does Kora Felell keep?"
ASKED = [{"role": "user", "content": ANIMAL}]
FILES = ["File 18: Giso Berow lives in Tondorf.", "File 23: Mela Forow works as a judge."]
HOME = "What is the home of Giso Berow?"
KB = "synthetic@village"


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def test_openai_asks_and_reads_the_account(client):
    told = client.chat.completions.create(model=KB, messages=ASKED)
    assert told.choices[0].message.content == "falcon"
    assert told.usage.prompt_tokens_details.cached_tokens > 0
    assert told.model_extra["jaxrag"]["sources"][0]["document_id"] == "kora-felell.md"


def test_openai_passes_documents_and_fields_of_ours(client):
    told = client.chat.completions.create(
        model="synthetic",
        messages=[{"role": "user", "content": HOME}],
        logprobs=True,
        extra_body={"documents": FILES, "return_text": True},
    )
    assert told.choices[0].message.content == "Tondorf"
    assert told.choices[0].logprobs.content[0].token.strip() == "Tondorf"
    assert told.model_extra["jaxrag"]["sources"][0]["text"] == FILES[0]


def test_openai_streams(client):
    text, last = "", None
    with client.chat.completions.create(model=KB, messages=ASKED, stream=True) as stream:
        for last in stream:
            text += last.choices[0].delta.content or ""
    assert text == "falcon"
    assert last.model_extra["jaxrag"]["counts"]["reused"] > 0
    counted = client.chat.completions.create(
        model=KB, messages=ASKED, stream=True, stream_options={"include_usage": True}
    )
    assert list(counted)[-1].usage.completion_tokens == 1


def test_openai_completes(client):
    prompt = "Question: What is the home of Giso Berow? Answer:"
    told = client.completions.create(model="synthetic", prompt=prompt, max_tokens=2, logprobs=1)
    assert len(told.choices[0].logprobs.token_logprobs) == told.usage.completion_tokens
    pieces = client.completions.create(model="synthetic", prompt=prompt, max_tokens=2, stream=True)
    assert "".join(it.choices[0].text for it in pieces) == told.choices[0].text


def test_openai_lists_models(client):
    assert [it.id for it in client.models.list()] == ["synthetic", KB]
    assert client.models.retrieve(KB).owned_by == "jaxrag"


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (openai.BadRequestError, {"n": 65}),
        (openai.BadRequestError, {"max_tokens": 1020}),
        (openai.NotFoundError, {"model": "gpt-4"}),
    ],
)
def test_openai_raises_its_own_errors(client, kind, options):
    for stream in (False, True):
        with pytest.raises(kind) as found:
            client.chat.completions.create(
                **{"model": KB, "messages": ASKED, "stream": stream, **options}
            )
        assert found.value.type == "invalid_request_error"
        assert found.value.body["message"]


def test_openai_raises_its_own_errors_of_a_server_in_need(served_model, village, start, held):
    with start(served_model, {"village": village}, max_waiting=1, hold_seconds=0.0) as server:
        made = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
        with made as client:
            ask = {"model": KB, "messages": ASKED}
            client.chat.completions.create(**ask)
            late = []

            def wait():
                try:
                    stream = client.chat.completions.create(
                        **ask, stream=True, extra_body={"timeout": 0.5}
                    )
                    list(stream)
                except openai.OpenAIError as error:
                    late.append(error)

            with held(server.state):
                thread = threading.Thread(target=wait)
                thread.start()
                while not server.state.limits.waiting:
                    thread.join(0.01)
                with pytest.raises(openai.RateLimitError) as busy:
                    client.chat.completions.create(**ask)
                thread.join(0.6)
            thread.join(20)
            assert int(busy.value.response.headers["retry-after"]) >= 1
            assert type(late[0]) is openai.APIError, "an error event of a stream that had begun"
            assert late[0].code == "deadline_exceeded"
            server.state.phase = "draining"
            with pytest.raises(openai.InternalServerError) as ending:
                client.chat.completions.create(**ask)
            assert ending.value.status_code == 503


@pytest.fixture
def http():
    """What goes under clients that close nothing themselves."""
    with httpx.Client() as made:
        yield made


def test_langchain_invokes_and_streams(server, http):
    settings = {"base_url": f"{server.url}/v1", "api_key": "any", "max_retries": 0}
    made = ChatOpenAI(model=KB, http_client=http, **settings)
    told = made.invoke(ANIMAL)
    assert told.content == "falcon"
    assert told.usage_metadata["input_token_details"]["cache_read"] > 0
    pieces = list(made.stream([("system", "Answer the question."), ("user", ANIMAL)]))
    assert "".join(it.content for it in pieces) == "falcon"
    over = ChatOpenAI(
        model="synthetic", http_client=http, extra_body={"documents": FILES}, **settings
    )
    assert over.invoke(HOME, max_completion_tokens=4).content == "Tondorf"


def test_llama_index_chats_completes_and_streams(server, http):
    settings = {"api_base": f"{server.url}/v1", "api_key": "any", "max_retries": 0}
    settings["http_client"] = http
    made = OpenAILike(model=KB, is_chat_model=True, context_window=1024, **settings)
    asked = [ChatMessage(role="user", content=ANIMAL)]
    assert made.chat(asked).message.content == "falcon"
    assert "".join(it.delta for it in made.stream_chat(asked)) == "falcon"
    assert made.complete(ANIMAL).text == "falcon"
    plain = OpenAILike(model=KB, is_chat_model=False, max_tokens=4, **settings)
    assert plain.complete(ANIMAL).text == "falcon"
