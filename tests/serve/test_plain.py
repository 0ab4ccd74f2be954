"""Plain prompts: what is read as a block depends on the text and the rules alone (law 16)."""

import dataclasses
import functools
import json
import random

import numpy as np
import pytest
from refusal import refused

import jaxrag
import jaxrag.serve.plain
from jaxrag.base.errors import RequestError, TokenizerError
from jaxrag.engine.engine import engine_of
from jaxrag.models.model import load_model
from jaxrag.models.text.passage_rules import passage_rules
from jaxrag.reuse.methods import METHODS
from jaxrag.serve.ask import Ask
from jaxrag.serve.conversation import conversation_of
from jaxrag.serve.history import FOLDED
from jaxrag.serve.plain import continued_prompt, plain_prompt, rules_for
from jaxrag.serve.questions import prepare, resolve
from jaxrag.serve.token_cache import TokenCache

WORDS = ["salt", "wells", "bamboo", "bridge", "river", "hands", "worked", "crosses", "brick", "tea"]
BRIEF = {"max_new_tokens": 5, "method": "turborag"}


@pytest.fixture(scope="module")
def model(chat_model_dir):
    return load_model(chat_model_dir, cache_tokens=8192)


def passage(seed):
    draw = random.Random(seed)
    return " ".join(draw.choices(WORDS, k=24)).capitalize() + "."


def pasted(seeds, asked="Who works the wells?"):
    sources = "\n".join(f'<source id="{i}">{passage(i)}</source>' for i in seeds)
    return [
        {"role": "system", "content": "Answer briefly <|im_end|>."},
        {"role": "user", "content": f"{sources}\n\n{asked}"},
    ]


def test_the_prompt_is_the_messages_as_the_template_writes_them(model, rules_file):
    messages = pasted([1, 2, 3])
    messages += [{"role": "assistant", "content": "Hands."}, {"role": "user", "content": "Sure?"}]
    tokenizer = model.text_tokenizer()
    prompt, members = plain_prompt(tokenizer, messages, passage_rules(rules_file))
    ids = np.concatenate((prompt.prefix, *prompt.chunks, prompt.final))
    assert tokenizer.decode(ids, skip_special=False) == tokenizer.render_chat(messages)
    ends = [i for i, it in enumerate(ids) if it == tokenizer.encode("<|im_end|>", special=True)[0]]
    assert len(ends) == len(messages)  # that of the system's text is text
    assert [it.source.text for it in members] == [passage(i) for i in (1, 2, 3)]
    for it in members:
        content = messages[1]["content"]
        assert content[it.source.start : it.source.end] == it.source.text
        assert it.source.document_id == "messages[1]"
    first, last = prompt.question
    assert tokenizer.decode(prompt.final[first:last]) == "Sure?"
    kinds = ["turn" if i in prompt.turns else "block" for i in range(len(prompt.chunks))]
    assert kinds == ["turn", "block"] * 3 + ["turn"]


def test_a_few_tokens_are_not_worth_it(model, rules_file):
    tokenizer, rules = model.text_tokenizer(), passage_rules(rules_file)
    rich = dataclasses.replace(rules, worth=10_000)
    prompt, members = plain_prompt(tokenizer, pasted([1, 2]), rich)
    assert not members and not prompt.chunks
    whole, _ = plain_prompt(tokenizer, pasted([1, 2]), None)
    assert np.array_equal(prompt.final[-40:], whole.final[-40:])


def answered(model, rules_file, messages):
    """Ids and log-probabilities of an answer, and how many chunks were found."""
    ask = Ask(plain="passages", passage_rules=rules_file, **BRIEF)
    asked = prepare(resolve(ask, model=model), conversation_of(messages))
    *_, last = progress = list(engine_of(model).iterate([asked]))
    ids = [it for one in progress for it in one.new]
    hits = sum(row.how == "chunk hit" for row in last.outcome.reuse)
    return ids, [it for one in progress for it in one.logprobs], hits


def test_a_prompt_beyond_the_bound_is_not_cut(model, rules_file, monkeypatch):
    """All messages count together, so that many long ones cost no more than one."""
    monkeypatch.setattr(jaxrag.serve.plain, "MOST_CHARACTERS", 600)
    tokenizer, rules = model.text_tokenizer(), passage_rules(rules_file)
    [one] = [it for it in pasted([1, 2, 3]) if it["role"] == "user"]
    assert 300 < len(one["content"]) < 600
    assert len(plain_prompt(tokenizer, [one], rules)[1]) == 3
    assert plain_prompt(tokenizer, [one, one], rules)[1] == []


def test_law_16_what_is_stored_decides_the_time_alone(model, rules_file):
    """Cold, warm, after other orders and after what it needs was pushed out: bit for bit."""
    draw = random.Random(16)
    for _ in range(4):
        seeds = draw.sample(range(100), 4)
        asked = pasted(seeds, draw.choice(["Who?", "What crosses it?"]))
        histories = ([], [asked], [pasted(seeds[::-1])], [pasted(seeds[:2]), pasted(seeds[2:])])
        answers = []
        for history in histories:
            engine_of(model).forget()
            for earlier in history:
                answered(model, rules_file, earlier)
            answers.append(answered(model, rules_file, asked))
        assert all(it[:2] == answers[0][:2] for it in answers)
        assert [it[2] for it in answers] == [0, 4, 4, 4]


def test_the_answer_is_that_of_full_attention_over_the_same_tokens(model, rules_file):
    """With all tokens computed again."""
    method = METHODS["cacheblend"].with_ratio(1.0)
    plain = {"plain": "passages", "passage_rules": rules_file, "model": model, "max_new_tokens": 5}
    found = jaxrag.generate(messages=pasted([5, 6, 7]), **plain | {"method": method})
    assert sum(row.part.startswith("chunk") for row in found.reuse) == 3
    tokenizer = model.text_tokenizer()
    prompt, _ = plain_prompt(tokenizer, pasted([5, 6, 7]), passage_rules(rules_file))
    ids = np.concatenate((prompt.prefix, *prompt.chunks, prompt.final))
    full = jaxrag.generate(
        [ids], model=model, documents=[], method="full_attention", max_new_tokens=5
    )
    assert found.token_ids == full[0].token_ids


@pytest.mark.slow
def test_control_tokens_in_1000_passages_are_text(model, rules_file):
    draw, tokenizer = random.Random(5), model.text_tokenizer()
    rules, special = passage_rules(rules_file), ["<|im_end|>", "<|im_start|>", "<|endoftext|>"]
    control = {int(it) for name in special for it in tokenizer.encode(name, special=True)}
    frame = [it for it in _all_ids(plain_prompt(tokenizer, pasted([1, 2]), None)) if it in control]
    for _ in range(1000):
        messages = pasted(draw.sample(range(1000), 2))
        content = messages[1]["content"]
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(content))
            content = content[:at] + draw.choice(special) + content[at:]
        messages[1]["content"] = content
        found = _all_ids(plain_prompt(tokenizer, messages, rules))
        assert [it for it in found if it in control] == frame


def _all_ids(made):
    prompt, _ = made
    return np.concatenate((prompt.prefix, *prompt.chunks, prompt.final)).tolist()


def test_a_chat_without_documents_is_the_templates_own(model):
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    stream = jaxrag.generate(messages=said, model=model, stream=True, **BRIEF)
    text = "".join(part["text"] for part in stream.prompt)
    assert text == model.text_tokenizer().render_chat(said)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"template": "plain"}, "plain='passages'"),
        ({"method": "fusionrag"}, ""),
        ({"misses": "in_place"}, "misses='in_place'"),
        ({"plain": "all"}, "plain='all'"),
    ],
)
def test_what_cannot_be_meant_is_one_line(model, options, why):
    with refused(RequestError, why):
        jaxrag.generate(messages=pasted([1]), model=model, **{"plain": "passages"} | options)


def test_a_method_without_blocks_computes_all():
    assert rules_for(Ask(plain="passages"), METHODS["full_attention"]) is None


def test_a_model_without_a_chat_template_is_refused(text_model, word_model_dir):
    model = load_model(word_model_dir)
    with refused(RequestError):
        jaxrag.generate(
            messages=[{"role": "user", "content": "Who?"}], model=model, plain="passages"
        )


def test_a_place_counts_what_the_template_strips(model, rules_file):
    """Llama 3 strips contents."""
    tokenizer = model.text_tokenizer()
    messages = pasted([1, 2, 3])
    messages[1]["content"] = "\n  " + messages[1]["content"] + "\n"
    stripping = Stripping(tokenizer)
    _, members = plain_prompt(stripping, messages, passage_rules(rules_file))
    content = messages[1]["content"]
    found = [content[it.source.start : it.source.end] for it in members]
    assert found == [passage(i) for i in (1, 2, 3)]


class Stripping:
    """A tokenizer whose chat template strips contents."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def render_chat(self, messages, **how):
        stripped = [it | {"content": it["content"].strip()} for it in messages]
        return self._tokenizer.render_chat(stripped, **how)


def test_a_question_before_its_passages_leaves_the_last_one_a_block(model, rules_file):
    """Where a label says so; what asks at the end is computed, whatever stands before."""
    tokenizer, rules = model.text_tokenizer(), passage_rules(rules_file)
    found = "\n\n".join(passage(it) for it in (1, 2, 3))

    def blocks(text):
        made = plain_prompt(tokenizer, [{"role": "user", "content": text}], rules)
        return [it.source.text for it in made[1]]

    assert blocks(f"Use these.\n\nQuestion: Who?\nContext: {found}")[-1] == passage(3)
    assert passage(3) not in blocks(f"Use these.\n\nContext: {found}")
    asks = passage(3)[:-1] + "?"
    assert asks not in blocks(f"Question: Who?\nContext: {found}\n\n{asks}")


def test_ids_come_from_where_they_are_said_to(model, rules_file):
    tokenizer, rules = model.text_tokenizer(), passage_rules(rules_file)
    seen = TokenCache()
    encode = functools.partial(seen.ids, "", encode=tokenizer.encode)
    messages = pasted([1, 2, 3])
    first, _ = plain_prompt(tokenizer, messages, rules, encode)
    hits = seen.hits
    again, _ = plain_prompt(tokenizer, messages, rules, encode)
    assert seen.hits - hits == seen.misses + hits > 3
    plain, _ = plain_prompt(tokenizer, messages, rules)
    for prompt in (first, again):
        parts = zip((*prompt.chunks, prompt.final), (*plain.chunks, plain.final), strict=True)
        assert all(np.array_equal(one, other) for one, other in parts)


def test_a_method_by_default_is_that_of_chunks(model, rules_file):
    """Weights that nothing says were trained for blocks get a part of them computed again."""
    ask = Ask(plain="passages", passage_rules=rules_file)
    settings = resolve(ask, model=model)
    assert settings.method.recomputes
    asked = prepare(settings, conversation_of(pasted([1, 2, 3])))
    assert asked.settings.method == settings.method
    assert not prepare(settings, conversation_of(pasted([]))).settings.method.recomputes


class Calling(Stripping):
    """A tokenizer whose chat template prints tool calls, and a content only where there is one."""

    def render_chat(self, messages, **how):
        text = "".join(
            f"<|im_start|>{it['role']}\n{it['content']}"
            + "".join(
                json.dumps(call["function"], ensure_ascii=False)
                for call in it.get("tool_calls", [])
            )
            + "<|im_end|>\n"
            for it in messages
        )
        return text + "<|im_start|>assistant\n"


def agent_talk(arguments='{"path": "wells.md"}'):
    call = {"id": "1", "function": {"name": "read", "arguments": arguments}}
    return [
        {"role": "user", "content": "Who works the wells?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": passage(1) + " " + passage(2)},
        {"role": "tool", "tool_call_id": "2", "content": passage(3) + " " + passage(4)},
    ]


def test_what_tools_say_is_passages(model, rules_file):
    talk = conversation_of(agent_talk(), wire=True)
    assert talk.has_tools
    tokenizer = Calling(model.text_tokenizer())
    prompt, members = plain_prompt(tokenizer, talk.messages, passage_rules(rules_file))
    assert [it.source.text for it in members] == [it["content"] for it in talk.messages[2:]]
    assert [it.source.document_id for it in members] == ["messages[2]", "messages[3]"]
    ids = np.concatenate((prompt.prefix, *prompt.chunks, prompt.final))
    assert tokenizer.decode(ids, skip_special=False) == tokenizer.render_chat(talk.messages)
    assert prompt.question is None  # the user's words are in a turn


def test_calls_of_tools_hold_no_control_tokens(model):
    talk = conversation_of(agent_talk('{"path": "<|im_end|>"}'), wire=True)
    tokenizer = Calling(model.text_tokenizer())
    found = _all_ids(plain_prompt(tokenizer, talk.messages, None))
    assert tokenizer.decode(found, skip_special=False) == tokenizer.render_chat(talk.messages)
    assert list(found).count(tokenizer.encode("<|im_end|>", special=True)[0]) == len(talk.messages)


def test_passages_of_folded_messages_are_named_as_they_were_sent(model, rules_file):
    """By a template that takes one message of the system, first."""

    class Strict(Stripping):
        def render_chat(self, messages, **how):
            if any(it["role"] == "system" for it in messages[1:]):
                raise TokenizerError("system first")
            return self._tokenizer.render_chat(messages, **how)

    strict = dataclasses.replace(model, tokenizer=Strict(model.text_tokenizer()))
    sources = pasted([1, 2, 3])[1]
    said = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Hands."}]
    messages = [*said, {"role": "system", "content": "Be brief."}, sources]
    ask = Ask(plain="passages", passage_rules=rules_file, **BRIEF)
    asked = prepare(resolve(ask, model=strict), conversation_of(messages, wire=True))
    assert FOLDED in asked.settings.notes and len(asked.sources) == 3
    for it in asked.sources:
        assert it.document_id == "messages[3]"
        assert sources["content"][it.start : it.end] == it.text


def test_tools_are_for_chats_alone(model):
    settings = resolve(Ask(method="turborag"), model=model)
    talk = conversation_of(agent_talk(), wire=True)
    with refused(RequestError):
        prepare(settings, talk, ["Salt wells."])


def test_a_prompt_of_its_own_is_cut_as_messages_are(model, rules_file):
    tokenizer, rules = model.text_tokenizer(), passage_rules(rules_file)
    text = f"Use these.\n{pasted([1, 2, 3])[1]['content']} Hands <|im_end|>"
    prompt, members = continued_prompt(tokenizer, text, rules)
    assert [it.source.text for it in members] == [passage(i) for i in (1, 2, 3)]
    assert all(text[it.source.start : it.source.end] == it.source.text for it in members)
    ids = np.concatenate((prompt.prefix, *prompt.chunks, prompt.final))
    assert tokenizer.decode(ids, skip_special=False) == text
    assert ids[-1] == tokenizer.encode("<|im_end|>", special=True)[0]
    chunks = plain_prompt(tokenizer, pasted([3, 1, 2]), rules)[1]
    assert {bytes(it.ids) for it in members} == {bytes(it.ids) for it in chunks}


def test_citations_are_of_passages(model, rules_file, monkeypatch):
    """What stands between them is in the prompt, too, and is no passage."""
    given = []

    def cited(tokenizer, ids, text, attribution, numbers):
        given.append((attribution, list(numbers)))
        return []

    monkeypatch.setattr("jaxrag.serve.answers.citations_of", cited)
    messages = pasted([1, 2, 3])
    messages += [{"role": "assistant", "content": "Hands."}, {"role": "user", "content": "Sure?"}]
    result = jaxrag.generate(
        messages=messages, model=model, plain="passages", passage_rules=rules_file, cite="spans",
        **BRIEF,
    )  # fmt: skip
    [(attribution, numbers)] = given
    assert numbers == [it.number for it in result.sources] and len(numbers) == 3
    assert attribution.votes.shape == (len(result.token_ids), 3) and (attribution.most > 0).all()
