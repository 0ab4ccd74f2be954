"""Thoughts of a model that thinks before it speaks, apart from what it says."""

import dataclasses
import json
import shutil

import openai
import pytest

from jaxrag.models.model import load_model
from jaxrag.serve.thoughts import thinks, thought_of
from jaxrag.server.answers import asking

CHAT = "/v1/chat/completions"
ASKED = [{"role": "user", "content": "Is it warm?"}]
THOUGHT = "Hm[a-z]?\n</think>\n\nIt is\\."


@pytest.mark.parametrize(
    ("text", "begun", "thought", "said"),
    [
        ("<think>\nHm <b>\n</think>\n\n It is.", False, "Hm <b>", " It is."),
        ("\n<think>Hm</think>It is.", False, "Hm", "It is."),
        ("Hm\n</think>\nIt is.", True, "Hm", "It is."),
        ("Hm and so", True, "Hm and so", ""),
        ("<think>\n\n</think>\n\nIt is.", False, "", "It is."),
        (" It <think>is</think>.", False, "", " It <think>is</think>."),
        ("<thin", False, "", "<thin"),
        ("Hm</think>It is.", None, "", "Hm</think>It is."),
    ],
)
def test_a_thought_is_parted_and_never_taken_back(text, begun, thought, said):
    found, at = thought_of(text, begun)
    assert (found, text[at:]) == (thought, said)
    for end in range(len(text)):
        part, start = thought_of(text[:end], begun, ended=False)
        assert thought.startswith(part) and said.startswith(text[start:end])


@pytest.fixture(scope="module", params=["", "<think>\\n"], ids=["of itself", "as it is told"])
def serving(request, start, tools_dir, tmp_path_factory):
    """A server of a model that thinks; the prompt may begin the thought."""
    folder = tmp_path_factory.mktemp("thinks") / "model"
    shutil.copytree(tools_dir, folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    template = settings["chat_template"].replace(
        "assistant\n{% endif %}", f"assistant\n{{{{ '{request.param}' }}}}{{% endif %}}"
    )
    assert template != settings["chat_template"]
    settings["chat_template"] = "{# </think> #}" + template
    path.write_text(json.dumps(settings), encoding="utf-8")
    data = str(tmp_path_factory.mktemp("data"))
    with start(load_model(folder, cache_tokens=8192), {}, data=data) as running:
        yield running


@pytest.fixture
def form(serving, monkeypatch):
    """What an answer has to be that thinks; a form that is asked for allows no thoughts."""
    begun = []

    def unguided(question):
        begun[:] = [
            thinks(
                dataclasses.replace(
                    question, sampling=dataclasses.replace(question.sampling, guide=None)
                )
            )
        ]
        return begun[0]

    monkeypatch.setattr(asking, "thinks", unguided)
    serving.chat("Is it?", max_tokens=1)
    return THOUGHT if begun[0] else "<think>\n" + THOUGHT


@pytest.mark.parametrize("stream", [False, True])
def test_chats_tell_thoughts_apart(serving, form, stream):
    asked = {"guided_regex": form, "temperature": 1.0, "seed": 1, "max_tokens": 80}
    answer = serving.chat("Is it?", stream=stream, **asked)
    if stream:
        lines = [it[6:] for it in answer.text.split("\n\n") if it.startswith("data: {")]
        deltas = [it["choices"][0]["delta"] for it in map(json.loads, lines)]
        found = {
            name: "".join(it.get(name) or "" for it in deltas)
            for name in ("content", "reasoning_content")
        }
    else:
        found = answer.json()["choices"][0]["message"]
    assert found["content"] == "It is."
    assert found["reasoning_content"].startswith("Hm")
    again = [*ASKED, {"role": "assistant", **found}, *ASKED]
    assert serving.post(CHAT, messages=again, max_tokens=1).status_code == 200


def test_responses_have_an_item_of_thoughts(serving, form):
    asked = {"input": "Is it?", "temperature": 1.0, "max_output_tokens": 80}
    more = {"guided_regex": form, "seed": 1}
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="any", max_retries=0) as client:
        name = client.models.list().data[0].id
        told = client.responses.create(model=name, extra_body=more, **asked)
        assert [it.type for it in told.output] == ["reasoning", "message"]
        assert told.output_text == "It is." and told.output[0].content[0].text.startswith("Hm")
        with client.responses.stream(model=name, extra_body=more, **asked) as events:
            kinds = [it.type.removeprefix("response.") for it in events]
            final = events.get_final_response()
        assert [it.type for it in final.output] == ["reasoning", "message"]
        assert kinds.index("reasoning_text.done") < kinds.index("output_text.delta")
        assert kinds.count("output_item.added") == kinds.count("output_item.done") == 2
        items = [*ASKED, *(it.to_dict() for it in told.output), *ASKED]
        client.responses.create(model=name, input=items, max_output_tokens=1)
        client.responses.create(
            model=name, input="So?", previous_response_id=told.id, max_output_tokens=1
        )


def test_an_answer_of_a_form_has_no_thoughts(serving):
    told = serving.chat("Is it?", guided_regex="Hm[a-z]", temperature=1.0).json()
    message = told["choices"][0]["message"]
    assert message["content"].startswith("Hm") and "reasoning_content" not in message
