"""What a sampler is asked beside temperature and top-p, by OpenAI's own client."""

import json

import openai
import pytest

ASKED = [{"role": "user", "content": "Which animal does Kora Felell keep?"}]
KB = "synthetic@village"
LONG = {"ignore_eos": True}
PROMPT = "Question: What is the home of Giso Berow? Answer:"


@pytest.fixture(scope="module")
def ask(server):
    """``ask(**fields)``: a chat, by the stock client."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:

        def asked(**fields):
            return client.chat.completions.create(model=KB, messages=ASKED, **fields)

        asked.client = client
        yield asked


def texts(told):
    return [it.message.content for it in told.choices]


def test_n_choices_are_drawn_each_by_its_index(ask):
    drawn = {"temperature": 50.0, "seed": 5, "max_tokens": 6, "extra_body": LONG}
    three = ask(n=3, **drawn)
    assert [it.index for it in three.choices] == [0, 1, 2]
    assert len(set(texts(three))) == 3
    assert texts(three) == texts(ask(n=3, **drawn))
    assert texts(ask(n=2, **drawn)) == texts(three)[:2]
    assert texts(ask(**drawn)) == texts(three)[:1]
    usage, one = three.usage, ask(**drawn).usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (one.prompt_tokens, 18)
    assert usage.prompt_tokens_details == one.prompt_tokens_details
    assert len(three.model_extra["jaxrag"]) == 3
    streamed = ["", "", ""]
    for event in ask(n=3, stream=True, **drawn):
        for it in event.choices:
            streamed[it.index] += it.delta.content or ""
    assert streamed == texts(three)


def test_choices_share_the_pages_of_their_chunks(ask):
    ask()
    told = ask(n=4, max_tokens=2, extra_body=LONG)
    for account in told.model_extra["jaxrag"]:
        found = {row["how"] for row in account["reuse"]}
        assert found <= {"prefix hit", "chunk hit"}, "nothing is encoded for a choice"


def test_prompts_have_choices_each(ask):
    told = ask.client.completions.create(
        model="synthetic",
        prompt=[PROMPT, PROMPT + " the"],
        n=2,
        max_tokens=2,
        temperature=9,
        seed=1,
    )
    assert [it.index for it in told.choices] == [0, 1, 2, 3]
    with pytest.raises(openai.BadRequestError):
        ask.client.completions.create(model="synthetic", prompt=[PROMPT, PROMPT], n=40)


def test_likeliest_tokens_are_told(ask):
    told = ask(logprobs=True, top_logprobs=20, max_tokens=3, extra_body=LONG)
    content = told.choices[0].logprobs.content
    assert len(content) == 3
    for it in content:
        values = [top.logprob for top in it.top_logprobs]
        assert len(values) == 20 and values == sorted(values, reverse=True)
        assert (it.token, it.logprob) == (it.top_logprobs[0].token, values[0])
    stream = ask(logprobs=True, top_logprobs=20, max_tokens=3, extra_body=LONG, stream=True)
    pieces = [it.choices[0].logprobs for it in stream]
    assert [one for it in pieces if it is not None for one in it.content] == content
    drawn = ask(
        logprobs=True, top_logprobs=2, temperature=50, seed=1, max_tokens=3, extra_body=LONG
    )
    for one in drawn.choices[0].logprobs.content:
        assert len(one.top_logprobs) == 2 and one.logprob <= one.top_logprobs[0].logprob


def test_completions_tell_the_likeliest_and_the_chosen(ask):
    ask_for = {"model": "synthetic", "prompt": PROMPT, "max_tokens": 3, "seed": 4}
    told = ask.client.completions.create(**ask_for, logprobs=20, temperature=50)
    found = told.choices[0].logprobs
    for token, logprob, top in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, strict=True
    ):
        assert top[token] == logprob
        assert len(top) in (20, 21)
    plain = ask.client.completions.create(**ask_for, logprobs=0)
    assert [len(it) for it in plain.choices[0].logprobs.top_logprobs] == [1] * len(
        plain.choices[0].logprobs.tokens
    )


def test_a_bias_decides(ask, server):
    tokenizer = server.state.model.tokenizer
    [falcon], [judge] = (tokenizer.encode(it).tolist() for it in ("falcon", "judge"))
    assert texts(ask(max_tokens=1)) == ["falcon"]
    assert texts(ask(max_tokens=1, logit_bias={str(judge): 100})) == ["judge"]
    assert texts(ask(max_tokens=1, logit_bias={str(falcon): -100})) != ["falcon"]


@pytest.mark.parametrize(
    "penalty",
    [
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"extra_body": {"repetition_penalty": 50.0}},
    ],
    ids=lambda it: next(iter(it)),
)
def test_penalties_change_what_is_drawn(ask, server, penalty):
    """Of three words that come again and again."""
    words = server.state.model.tokenizer.encode("falcon judge Tondorf").tolist()
    drawn = {"temperature": 5.0, "seed": 3, "max_tokens": 24}
    drawn["logit_bias"] = {str(it): 100 for it in words}
    plain = texts(ask(**drawn, extra_body=LONG))
    assert set(plain[0].split()) == {"falcon", "judge", "Tondorf"}
    body = LONG | penalty.get("extra_body", {})
    assert texts(ask(**drawn, **penalty | {"extra_body": body})) != plain


def test_an_answer_has_its_least_length_and_stops_after_it(ask):
    assert ask(max_tokens=8).usage.completion_tokens == 1
    told = ask(max_tokens=8, extra_body={"min_tokens": 5})
    assert told.usage.completion_tokens >= 5
    words = texts(told)[0].split()
    stopped = ask(max_tokens=8, stop=[words[0]], extra_body={"min_tokens": 3})
    assert texts(stopped)[0].split()[:3] == words[:3], "no stop string is looked for before"
    assert texts(ask(max_tokens=8, stop=[words[0]])) == [""]


def test_tools_that_are_not_to_be_used_are_let_through(ask):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert texts(ask(tools=[tool], tool_choice="none")) == ["falcon"]
    with pytest.raises(openai.BadRequestError):
        ask(tools=[tool])


def test_vllms_ways_to_end_and_to_show(server, served_model):
    asked = {"ignore_eos": True, "max_tokens": 6, "temperature": 50.0, "seed": 5}
    whole = server.chat(logprobs=True, **asked).json()["choices"][0]
    words = [it["token"] for it in whole["logprobs"]["content"]]
    assert len(set(words)) == 6
    third = int(served_model.tokenizer.encode(words[2])[0])
    cut = server.chat(stop_token_ids=[third], **asked).json()
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["usage"]["completion_tokens"] == 2
    text = whole["message"]["content"]
    at = text.index(words[2])
    for too, said in ((False, text[:at]), (True, text[: at + len(words[2])])):
        told = server.chat(stop=words[2], include_stop_str_in_output=too, **asked).json()
        assert told["choices"][0]["message"]["content"] == said
    refused = server.chat(stop_token_ids=[10**6])
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "stop_token_ids"
    end = sorted(served_model.config.eos_ids)[0]
    forced = {"logit_bias": {str(end): 100}, "ignore_eos": True, "max_tokens": 2}
    assert server.chat(**forced).json()["choices"][0]["message"]["content"] == ""
    special = server.chat(**forced, skip_special_tokens=False).json()["choices"][0]
    mark = served_model.tokenizer.decode([end], skip_special=False)
    assert special["message"]["content"].count(mark) == 2


@pytest.fixture(params=["chat", "completion"])
def answers(request, server):
    """``answers(**fields)``: the texts of a request, and those of the same as a stream."""
    path, prompt = "/v1/completions", {"prompt": PROMPT}
    if request.param == "chat":
        path, prompt = "/v1/chat/completions", {"model": KB, "messages": ASKED}

    def said(choice):
        if "text" in choice:
            return choice["text"]
        return (choice.get("message") or choice["delta"]).get("content") or ""

    def ask(**fields):
        body = {"max_tokens": 6, "seed": 5, **LONG, **prompt, **fields}
        whole = server.post(path, **body).raise_for_status().json()["choices"]
        streamed = [""] * len(whole)
        for line in server.post(path, stream=True, **body).text.split("\n\n"):
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    streamed[choice["index"]] += said(choice)
        assert streamed == list(map(said, whole))
        return streamed

    return ask


@pytest.mark.parametrize("drawn", [{}, {"temperature": 50.0, "n": 2}])
def test_words_and_tokens_are_kept_out(answers, server, drawn):
    tokenizer = server.state.model.tokenizer
    plain = answers(**drawn)
    first = plain[0].split()[0]
    assert first not in " ".join(answers(bad_words=[first], **drawn)).split()
    kept = tokenizer.encode("falcon judge Tondorf").tolist()
    told = answers(allowed_token_ids=kept, **drawn)
    assert {it for text in told for it in text.split()} <= {"falcon", "judge", "Tondorf"}
    told = answers(allowed_token_ids=kept, bad_words=["judge", "falcon"], **drawn)
    assert told == [" ".join(["Tondorf"] * 6)] * len(told)
    likeliest = answers()
    assert answers(min_p=1.0, **drawn) == likeliest * len(plain)
    assert (answers(min_p=0.0, **drawn) == likeliest * len(plain)) == (not drawn)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_p", 1.5),
        ("bad_words", [""]),
        ("bad_words", ["a"] * 129),
        ("bad_words", [5]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [10**6]),
        ("allowed_token_ids", ["5"]),
    ],
)
def test_what_keeps_nothing_is_refused(server, field, value):
    told = server.chat(**{field: value})
    assert told.status_code == 400 and told.json()["error"]["param"] == field


def test_a_stream_with_usage_has_none_before_it(server):
    answer = server.chat(stream=True, stream_options={"include_usage": True})
    lines = [it[6:] for it in answer.text.split("\n\n") if it.startswith("data: {")]
    *others, last = map(json.loads, lines)
    assert last["usage"]["completion_tokens"] and all(it["usage"] is None for it in others)
