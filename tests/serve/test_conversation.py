"""Conversations and blocks through ``generate``: what is reused, equal, and refused."""

import asyncio
import dataclasses

import numpy as np
import pytest
from refusal import refused

from jaxrag import KnowledgeBase, Sampling, agenerate, generate, load_model
from jaxrag.base.errors import RequestError, TokenizerError
from jaxrag.base.types import FINAL, FIRST_CHUNK
from jaxrag.engine.engine import engine_of
from jaxrag.engine.prompt_inspection import inspect_prompts
from jaxrag.library.documents import Document
from jaxrag.models.segments import lay_out
from jaxrag.models.text.prompts import QuestionIds
from jaxrag.serve.answers import serve
from jaxrag.serve.ask import Ask
from jaxrag.serve.conversation import (
    Conversation,
    FoundChunk,
    Source,
    conversation_of,
    laid_out,
    shown_prompt,
)
from jaxrag.serve.questions import prepare, resolve

DOCUMENTS = ["The salt wells of Yanjing are worked by hand.", "A bamboo bridge crosses the river."]
QUESTIONS = ["Who works the salt wells?", "What crosses the river?", "Which river is it?"]
EXAMPLES = [
    "Question: Who sells tea?\nAnswer: A merchant.\n\n",
    "Question: What is a brick?\nAnswer: Clay.\n\n",
]
BRIEF = {"max_new_tokens": 6}


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


class Once(str):
    """A text that is not written into another one by and by."""

    def __format__(self, spec):
        raise AssertionError(self)


def test_messages_of_one_role_are_joined_at_once():
    said = [user(Once(name)) for name in "abc"]
    found = conversation_of([*said, assistant("d"), *said], wire=True)
    assert (found.questions, found.answers) == (("a\n\nb\n\nc", "a\n\nb\n\nc"), ("d",))
    with refused(RequestError, "1"):
        conversation_of([user("a"), user([5])], wire=True)
    assert conversation_of([user([5, 6])], wire=True).questions == ([5, 6],)


def reused(result, kind):
    return [(row.part, row.how) for row in result.reuse if row.part.startswith(kind)]


@pytest.fixture(scope="module")
def chat_model(chat_model_dir):
    return load_model(chat_model_dir, cache_tokens=8192, dtype="float32")


@pytest.fixture(scope="module")
def model_of(text_model, chat_model):
    return {"plain": text_model, "chat": chat_model}


@pytest.fixture
def alone():
    """``alone(model, ...)``: the answer where nothing is in the pool and nothing is kept."""

    def ask(model, **asked):
        fresh = dataclasses.replace(model)
        assert engine_of(fresh) is not engine_of(model)
        return generate(model=fresh, prefix_cache=False, **asked)

    return ask


@pytest.fixture(scope="module")
def kb(tmp_path_factory, text_model):
    path = tmp_path_factory.mktemp("kb")
    how = {"template": "plain", "chunk_tokens": 64, "stored": "native"}  # law 2, to 1e-4
    with KnowledgeBase.open(path, text_model, **how) as opened:
        opened.add(
            [
                Document("salt", "The salt wells of Yanjing are worked by hand."),
                Document("bridge", "A bamboo bridge crosses the river at the wells."),
                Document("tea", "Tea bricks were traded for wool."),
            ]
        )
        yield opened


@pytest.mark.parametrize("method", ["turborag", "full_attention"])
@pytest.mark.parametrize("template", ["plain", "chat"])
def test_three_turns_equal_recomputation(model_of, alone, template, method):
    model, messages = model_of[template], []
    options = {"documents": DOCUMENTS, "template": template, "method": method, **BRIEF}
    for turn, question in enumerate(QUESTIONS):
        messages.append(user(f"{question} {method}"))
        result = generate(messages=messages, model=model, **options)
        assert reused(result, "turn") == [(f"turn {i}", "prefix hit") for i in range(turn)]
        assert not turn or result.counts["recomputed"] == result.counts["encoded"] == 0
        assert result.token_ids == alone(model, messages=messages, **options).token_ids
        messages.append(assistant(result.token_ids))


def test_text_that_was_said_is_found_again(text_model):
    """Answers as clients send them; here none that was generated."""
    messages = [user("Who?"), assistant("A brick of clay."), user("Why?")]
    options = {"documents": DOCUMENTS, "model": text_model, "template": "plain", **BRIEF}
    assert reused(generate(messages=messages, **options), "turn") == [("turn 0", "computed")]
    messages[-1] = user("What crosses it?")
    assert reused(generate(messages=messages, **options), "turn") == [("turn 0", "prefix hit")]


def test_one_message_is_a_question(text_model):
    options = {"documents": DOCUMENTS, "neighbours": "prompt", "model": text_model, **BRIEF}
    for method in ("turborag", "full_attention", "fusionrag"):
        said = generate(messages=[user(QUESTIONS[0])], method=method, **options)
        assert said.token_ids == generate(QUESTIONS[0], method=method, **options).token_ids


def test_nothing_to_read_is_a_conversation_as_well(chat_model, alone):
    messages = [user("Who?"), assistant("Clay."), user("Why?")]
    result = generate(messages=messages, model=chat_model, **BRIEF)
    assert result.sources == [] and [row.part for row in result.reuse] == ["turn 0"]
    assert not any("no chunk was found" in note for note in result.notes)
    assert result.token_ids == alone(chat_model, messages=messages, **BRIEF).token_ids


def test_every_question_is_retrieved_for_and_no_chunk_stands_twice(kb, alone):
    messages = [user("salt wells")]
    first = generate(messages=messages, kb=kb, k=1, **BRIEF)
    messages += [assistant(first.token_ids), user("tea bricks")]
    second = generate(messages=messages, kb=kb, k=1, **BRIEF)
    assert [it.document_id for it in second.sources] == ["salt", "tea"]
    assert reused(second, "turn") == [("turn 0", "prefix hit"), ("turn 1", "computed")]
    messages += [assistant(second.token_ids), user("salt wells")]
    third = generate(messages=messages, kb=kb, k=1, **BRIEF)
    assert [it.document_id for it in third.sources] == ["salt", "tea"]
    assert {how for _, how in reused(third, "turn")} == {"prefix hit"}
    again = generate(messages=messages, kb=kb, k=1, prefix_cache=False, **BRIEF)
    assert {how for _, how in reused(again, "turn")} == {"computed"}
    assert again.token_ids == third.token_ids


def test_a_method_that_chooses_by_the_question_computes_turns_again_and_says_so(text_model):
    messages = [user("Who?"), assistant("Clay."), user(QUESTIONS[1])]
    options = {"documents": DOCUMENTS, "neighbours": "prompt", "model": text_model, **BRIEF}
    options["method"] = "fusionrag"
    for _ in range(2):
        result = generate(messages=messages, **options)
        assert reused(result, "turn") == [("turn 0", "computed")]
        assert "turns were computed again with this question: fusionrag" in " ".join(result.notes)


def test_streams_and_tasks(text_model):
    messages = [user("Who?"), assistant("A brick."), user("Why?")]
    options = {"documents": DOCUMENTS, "model": text_model, "batch_size": 1, **BRIEF}
    expected = generate(messages=messages, **options)
    stream = generate(messages=messages, stream=True, **options)
    assert "".join(stream) == expected.text
    assert [part["part"] for part in stream.prompt][-2:] == ["turn 0", "final block"]

    async def ask():
        other = agenerate(messages=messages, stream=True, **options)
        return await agenerate(messages=messages, **options), [piece async for piece in other]

    result, pieces = asyncio.run(ask())
    assert result.token_ids == expected.token_ids and "".join(pieces) == expected.text


def test_an_answer_that_was_left_is_a_turn_as_far_as_it_went(text_model):
    """A reader who stops it half-way, and asks on."""
    asked = user("Who works the salt wells, and since when, and for whom? " * 2)
    options = {"documents": DOCUMENTS, "model": text_model, "template": "plain"}
    stream = generate(messages=[asked], stream=True, max_new_tokens=40, **options)
    seen = next(stream)
    del stream
    messages = [asked, assistant(seen if seen.strip() else "none"), user("Why?")]
    result = generate(messages=messages, **options, **BRIEF)
    [found, *rest] = [row for row in result.reuse if row.part == "turn 0"]
    assert found.how == "prefix hit" and found.tokens > 0
    assert sum(row.tokens for row in rest) < 16


def test_a_system_message_changes_no_chunk(text_model):
    options = {"documents": DOCUMENTS, "model": text_model, "method": "full_reuse", **BRIEF}
    generate(messages=[user("Who?")], **options)
    said = [{"role": "system", "content": "Be brief."}, user("Who?")]
    result = generate(messages=said, **options)
    assert {how for _, how in reused(result, "chunk")} <= {"chunk hit", "prefix hit"}
    assert "the system message stands behind the chunks" in result.notes[-1]
    settings = resolve(
        Ask(method="full_reuse", template="plain", k=5, max_new_tokens=2), model=text_model
    )
    talk = Conversation(("Who?",), system="Be brief.")
    shown = shown_prompt(text_model, prepare(settings, talk, DOCUMENTS, Sampling()).prompt)
    assert shown[-1]["text"] == "Be brief.\n\nQuestion: Who?\nAnswer:"


def test_token_ids_need_no_tokenizer(text_model, alone):
    bare = dataclasses.replace(text_model, tokenizer=None)
    messages = [user([5, 6, 7]), assistant([8, 9]), user([10, 11])]
    options = {"documents": [[20, 21, 22]], **BRIEF}
    result = generate(messages=messages, model=bare, **options)
    assert [row.tokens for row in result.reuse if row.part == "turn 0"] == [4]
    assert result.token_ids == alone(bare, messages=messages, **options).token_ids
    with pytest.raises(TokenizerError):
        generate(messages=[user("Who?")], model=bare, **options)


def a_chunk(*ids):
    return FoundChunk(Source("a", 0, None, None, ""), "", np.array(ids, np.int32))


@pytest.mark.parametrize(
    ("before", "earlier", "chunks", "turns"),
    [
        ([1], "exact", [[50], [10, 11, 20], [21, 1], [51], [12, 22], [23, 1, 13]], (1, 2, 4)),
        ([], "exact", [[50], [10, 11, 20], [21], [51], [12, 22], [23, 13]], (1, 2, 4)),
        ([1], "blocks", [[50], [10, 11, 20, 21, 1], [51], [12, 22, 23], [1, 13]], ()),
        ([], "blocks", [[50], [10, 11, 20, 21], [51], [12, 22, 23], [13]], ()),
    ],
)
def test_every_token_stands_in_its_place(before, earlier, chunks, turns):
    """Whatever a tokenizer makes of what stands between two turns, and be it nothing."""

    def asked(*ids):
        array = np.array(ids, np.int32)
        return QuestionIds(np.array(before, np.int32), array, (0, len(array)))

    prompt, members = laid_out(
        [asked(10, 11), asked(12), asked(13)],
        [np.array(ids, np.int32) for ids in ([20, 21], [22, 23])],
        [[a_chunk(50)], [a_chunk(51)], []],
        lambda chunk: chunk.ids,
        earlier,
        str,
    )
    *parts, final = chunks
    assert [ids.tolist() for ids in prompt.chunks] == parts
    assert prompt.final.tolist() == final and prompt.turns == turns
    assert prompt.question == (len(final) - 1, len(final))
    assert len(members) == len(parts) - len(turns)
    assert {ids.dtype.name for ids in (*prompt.chunks, prompt.final)} == {"int32"}


def logits_of(model, request):
    """Logits of the last token of a prompt through the pool, which turns were kept, whence."""

    def seen(runner, state, there):
        turns = [part.kept for part in state.parts if part.turn]
        return np.asarray(there.logits)[0], turns, {it.origin.how for it in state.parts if it.load}

    [found] = inspect_prompts(engine_of(model), [request], seen)
    return found


def packed(model, prompt):
    """The same by one packed forward without a cache, prefix and chunks each for themselves.

    Turns see all that precedes them, as the final block does.
    """
    lengths = [len(chunk) for chunk in prompt.chunks]
    layout = lay_out(len(prompt.prefix), lengths, len(prompt.final))
    segments = layout.segments.copy()
    for turn in prompt.turns:
        segments[segments == FIRST_CHUNK + turn] = FINAL
    whole = np.concatenate((prompt.prefix, *prompt.chunks, prompt.final))[None]
    return np.asarray(model.logits(whole, layout.positions[None], segments[None])[0, -1])


def test_law_2_turns_in_the_pool_among_chunks_of_several_questions(kb):
    """Kept piece by piece, and read over stored chunks: one packed forward gives the same."""
    settings = resolve(Ask(method="turborag", k=1, max_new_tokens=20), kb=kb)
    questions, answers = ("salt wells", "tea bricks", "a bridge"), []
    for turn in range(3):
        talk = Conversation(questions[: turn + 1], tuple(answers), keeps=True)
        request = prepare(settings, talk, None, Sampling())
        found, kept, _ = logits_of(kb.model, request)
        assert sum(kept) > sum(len(it) // 16 for it in answers) or not turn
        expected = packed(kb.model, request.prompt)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)
        [answer] = serve([prepare(settings, talk, None, Sampling())], 1)
        answers.append(answer[0].token_ids)
    assert request.prompt.turns == (1, 2, 4, 5) and len(request.prompt.chunks) == 7


def ready(model, asked, blocks=(), template="plain", earlier="exact"):
    settings = resolve(
        Ask(
            blocks=blocks,
            earlier_turns=earlier,
            method="turborag",
            template=template,
            k=5,
            max_new_tokens=1,
        ),
        model=model,
    )
    return prepare(settings, asked, DOCUMENTS)


def test_law_2_blocks_are_chunks_of_their_own_whatever_the_question(text_model):
    for question in QUESTIONS:
        one = ready(text_model, question, EXAMPLES)
        prompt = one.prompt
        decode = text_model.tokenizer.decode
        assert [decode(ids) for ids in prompt.chunks[:2]] == EXAMPLES
        assert [it.document_id for it in one.sources] == [
            *("blocks[0]", "blocks[1]"),
            *("documents[0]", "documents[1]"),
        ]
        found, _, came = logits_of(text_model, one)
        np.testing.assert_allclose(found, packed(text_model, prompt), rtol=1e-4, atol=2e-5)
        if question is not QUESTIONS[0]:
            assert came == {"pool"}


def test_blocks_are_kept_in_the_repository(kb):
    functions = ["def add(a, b):\n    return a + b\n", "def one():\n    return 1\n"]
    first = generate("salt wells", kb=kb, k=1, blocks=functions, **BRIEF)
    assert reused(first, "chunk")[:2] == [("chunk 0", "encoded"), ("chunk 1", "encoded")]
    engine_of(kb.model).forget()
    second = generate("tea bricks", kb=kb, k=1, blocks=functions, **BRIEF)
    assert [(row.how, row.where) for row in second.reuse if row.part[0] == "c"] == [
        ("chunk hit", "store")
    ] * 3
    assert [it.document_id for it in second.sources] == ["blocks[0]", "blocks[1]", "tea"]
    alone = generate("Who?", model=kb.model, blocks=functions, **BRIEF)  # with nothing else
    assert len(alone.sources) == 2


def test_law_2_earlier_turns_as_blocks(text_model):
    talk = Conversation(("Who?", QUESTIONS[1]), ("A brick.",), keeps=True)
    one = ready(text_model, talk, earlier="blocks")
    prompt = one.prompt
    decode = text_model.tokenizer.decode
    assert not prompt.turns
    assert decode(prompt.chunks[-1]) == "Question: Who?\nAnswer:A brick."
    found, _, _ = logits_of(text_model, one)
    np.testing.assert_allclose(found, packed(text_model, prompt), rtol=1e-4, atol=2e-5)
    messages = [user("Who?"), assistant("A brick."), user(QUESTIONS[1])]
    options = {"documents": DOCUMENTS, "model": text_model, "template": "plain", **BRIEF}
    result = generate(messages=messages, earlier_turns="blocks", **options)
    assert result.sources[-1].document_id == "turn 0"
    assert result.sources[-1].text == "Question: Who?\nAnswer:A brick."
    assert "an approximation" in " ".join(result.notes)
    with refused(RequestError, "earlier_turns='blocks'"):
        generate(messages=messages, earlier_turns="blocks", method="full_attention", **options)


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([], "messages=[]"),
        ("Who?", "messages='Who?'"),
        (["Who?"], "messages[0]='Who?'"),
        ([{"role": "user"}], "0"),
        ([{**user("Who?"), "name": "x"}], "0"),
        ([{"role": "tool", "content": "x"}], "role='tool'"),
        ([user(" ")], "content=' '"),
        ([user(None)], "content=None"),
        ([user("Who?"), assistant("")], "content=''"),
        ([assistant("Clay.")], "0"),
        ([user("Who?"), user("Why?")], "1"),
        ([user("Who?"), assistant("Clay.")], ""),
        ([{"role": "system", "content": "x"}], ""),
        ([{"role": "system", "content": "x"}, assistant("y")], "1"),
        ([user("Who?"), {"role": "system", "content": "x"}], "1"),
        ([{"role": "system", "content": [5]}, user("Who?")], "0"),
        ([user([5]), assistant([6]), user("Who?")], ""),
    ],
)
def test_bad_messages_are_refused(text_model, messages, why):
    with refused(RequestError, why):
        generate(messages=messages, documents=DOCUMENTS, model=text_model)


def test_a_conversation_beyond_the_context_is_refused(text_model):
    messages = [user("Who?"), assistant("Clay. " * 600), user("Why?")]
    with refused(RequestError):
        generate(messages=messages, documents=DOCUMENTS, model=text_model)


def test_a_stop_string_ends_the_answer_and_not_the_turn(text_model):
    """What followed the cut is another text; what stands before it is found by pages."""
    question = "Who works the salt wells, and who else, and since when? " * 2
    options = {"documents": DOCUMENTS, "model": text_model, "template": "plain"}
    whole = generate(messages=[user(question)], max_new_tokens=12, **options)
    stop = next(piece for piece in whole.text[3:] if piece.strip())
    engine_of(text_model).forget()
    cut = generate(messages=[user(question)], max_new_tokens=12, stop=[stop], **options)
    assert cut.finish_reason == "stop" and cut.text == whole.text[: whole.text.index(stop)]
    messages = [user(question), assistant(cut.text or "none"), user("Why?")]
    result = generate(messages=messages, max_new_tokens=3, **options)
    assert reused(result, "turn")[0] == ("turn 0", "prefix hit")


def test_what_does_not_go_together_is_refused(text_model):
    messages, options = [user("Who?")], {"documents": DOCUMENTS, "model": text_model}
    with refused(RequestError):
        generate("Who?", messages=messages, **options)
    with refused(RequestError, "earlier_turns='near'"):
        generate(messages=messages, earlier_turns="near", **options)
    with refused(RequestError, "earlier_turns='blocks'"):
        generate("Who?", earlier_turns="blocks", **options)
    with refused(RequestError, "blocks='x'"):
        generate("Who?", blocks="x", **options)
    with refused(RequestError, "0"):
        generate("Who?", blocks=[" "], **options)
    with refused(RequestError):
        generate(
            messages=[user("Who?"), assistant("Clay."), user("Why?")],
            method="turborag_composite",
            **options,
        )
    with refused(RequestError):
        asyncio.run(agenerate("Who?", model=text_model))
