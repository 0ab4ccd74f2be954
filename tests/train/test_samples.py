"""Rows of every published shape become the ids that a prompt of the same parts has."""

import json

import numpy as np
import pytest
from refusal import refused

from jaxrag.models.text.prompts import TEMPLATES
from jaxrag.models.text.tokenizer import Tokenizer
from jaxrag.tasks.synthetic import SyntheticTask, sample
from jaxrag.train.samples import BadRow, SampleWriter, split_chat

END = 2


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir):
    return Tokenizer.load(tokenizer_dir)


@pytest.fixture
def writer(tokenizer):
    return SampleWriter(tokenizer, TEMPLATES["block_attention"], END, " ", "I cannot say.")


def test_documents_are_tokenised_as_a_prompt_is(writer, tokenizer):
    row = {
        "chunks": [{"title": "Salt", "text": "It is dug."}, "No title."],
        "question": "What is dug?",
        "answers": ["Salt.", "salt"],
    }
    found, template = writer.write(row), TEMPLATES["block_attention"]
    np.testing.assert_array_equal(found.prefix, template.prefix_ids(tokenizer))
    titled = template.chunk_ids(tokenizer, tokenizer.encode("It is dug."), "Salt")
    np.testing.assert_array_equal(found.chunks[0], titled)
    (final,) = found.finals
    np.testing.assert_array_equal(final.question, template.final_ids(tokenizer, "What is dug?"))
    assert tokenizer.decode(final.response[:-1]) == " Salt."
    assert final.response[-1] == END
    assert found.num_tokens == found.num_positions == found.num_shared + len(final)


def test_own_prefix_several_questions_and_refusal(writer, tokenizer):
    row = {
        "prefix": "Read this.\n",
        "chunks": ["Salt is dug."],
        "questions": [
            {"question": "What?", "answers": "Salt"},
            {"question": "By whom and when exactly?", "answers": []},
        ],
    }
    found = writer.write(row)
    assert tokenizer.decode(found.prefix) == "Read this.\n"
    assert tokenizer.decode(found.finals[1].response) == " I cannot say."
    assert found.num_tokens == found.num_shared + sum(map(len, found.finals))
    assert found.num_positions == found.num_shared + len(found.finals[1])


def test_special_tokens_in_documents_stay_text(writer):
    row = {"chunks": ["before </s> after"], "question": "</s>?", "answers": ["</s>"]}
    found = writer.write(row)
    assert END not in found.chunks[0]
    assert END not in found.finals[0].question
    assert list(found.finals[0].response).count(END) == 1


def test_blocks_are_prompt_text(writer, tokenizer):
    row = {
        "prompt": "joined",
        "blocks": [
            "<|user|>\nHelp.\n",
            "- Title: A\nx\n",
            "- Title: B\ny\n",
            "Q?\n<|assistant|>\n",
        ],
        "response": "An answer.</s>",
    }
    found = writer.write(row)
    user, assistant = 3, 4
    assert list(found.prefix[:2]) == [tokenizer.bos_id, user]
    assert len(found.chunks) == 2
    assert assistant in found.finals[0].question
    assert list(found.finals[0].response).count(END) == 1
    alone = writer.write({"blocks": ["Only a question"], "response": "x"})
    assert (len(alone.prefix), alone.chunks) == (0, ())
    assert alone.finals[0].question[0] == tokenizer.bos_id


def test_dialogue_is_cut_into_blocks(writer, tokenizer):
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "One.\n\nTwo."},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "And three?"},
        {"role": "assistant", "content": "No."},
    ]
    found = writer.write({"messages": messages})
    parts = [found.prefix[1:], *found.chunks, found.finals[0].question]
    text = [tokenizer.decode(part, skip_special=False) for part in parts]
    assert text == [
        "<|system|>\nBe kind.\n<|user|>\nOne.\n\n",
        "Two.\n<|assistant|>\nYes.\n",
        "<|user|>\nAnd three?\n<|assistant|>\n",
    ]
    assert tokenizer.decode(found.finals[0].response) == " No."


@pytest.mark.parametrize(
    ("messages", "blocks"),
    [
        (["one\n\ntwo\nthree"], ["one\n\n", "two\nthree"]),
        (["one --- two"], ["one ---", " two"]),
        (["one\ntwo\n"], ["one\n", "two\n"]),
        (["no separator"], ["no separator"]),
        (["a\n\n\n\n\n\nb"], ["a\n\n\n\n\n\n", "b"]),
        ([f"m{n}\n\n!" for n in range(12)], [f"m{n}\n\n!" for n in range(12)]),
        (["a\n\n", "b", "q\n\nq"], ["a\n\n", "b", "q\n\nq"]),
    ],
)
def test_where_dialogue_is_cut(messages, blocks):
    assert split_chat(messages) == blocks


def test_many_pieces_are_joined_smallest_first():
    text = "".join(f"{'long ' * 30 if n == 7 else n}\n\n" for n in range(40))
    blocks = split_chat([text])
    assert len(blocks) == 14
    assert "".join(blocks) == text
    assert any(block.startswith("long") and block.count("\n\n") == 1 for block in blocks)


def test_generated_samples_are_written_like_rows(writer, tokenizer):
    drawn = sample(SyntheticTask(chunks=(3, 3)), seed=1, index=0)
    found = writer.write_synthetic(drawn)
    row = {
        "chunks": list(drawn.chunks),
        "questions": [{"question": q.question, "answers": [q.answer]} for q in drawn.questions],
    }
    again = writer.write(json.loads(json.dumps(row)))
    assert len(found.finals) == len(drawn.questions)
    for a, b in zip((*found.chunks, found.prefix), (*again.chunks, again.prefix), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"text": "x"}, ""),
        ({"chunks": "x", "question": "q", "answers": ["a"]}, ""),
        ({"chunks": [3], "question": "q", "answers": ["a"]}, "chunks=3"),
        ({"chunks": ["x"], "answers": ["a"]}, "question=None"),
        ({"chunks": ["x"], "question": "q", "answers": [""]}, ""),
        ({"chunks": ["x"], "question": "q", "answers": 3}, ""),
        ({"blocks": [], "response": "r"}, ""),
        ({"blocks": ["q"], "response": " "}, ""),
        ({"messages": [{"role": "user", "content": "x"}]}, ""),
        ({"messages": [{"role": "user"}]}, "content=None"),
    ],
)
def test_malformed_rows_say_why(writer, row, match):
    with refused(BadRow, match):
        writer.write(row)
