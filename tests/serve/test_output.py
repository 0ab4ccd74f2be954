"""An answer as it grows: stop strings, end of sequence, length, and what is shown when."""

import functools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxrag.models.text.tokenizer import Tokenizer
from jaxrag.serve.calls import sure_text
from jaxrag.serve.output import Answer, AnswerText


class Words:
    """A text stream whose token ids stand for given pieces; ``tail`` comes with the flush."""

    def __init__(self, pieces, tail=""):
        self.pieces = pieces
        self.tail = tail

    def push(self, token_id):
        return self.pieces[token_id]

    def flush(self):
        return self.tail


PIECES = st.lists(st.text("ab\n", max_size=3), min_size=1, max_size=8)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)


@settings(max_examples=400)
@given(pieces=PIECES, stop=STOPS, tail=st.text("ab", max_size=2), limit=st.integers(1, 9))
@example(["a", "b", "c", "x"], ["abcd", "bc"], "", 9)  # one inside another that may still come
@example(["a ", "St", "x"], ["Stop"], "", 2)
@example(["a", ""], ["\ufffd"], "\ufffdz", 2)
def test_what_is_shown_is_the_text_up_to_the_first_stop_string(pieces, stop, tail, limit):
    """AnswerText is never taken back; held is only what a stop string may begin with."""
    answer, shown = Answer(tuple(stop), Words(["", *pieces], tail)), ""
    for token_id in range(1, len(pieces) + 1):
        last = token_id == limit
        shown += answer.push([token_id], "length" if last else None)
        given = "".join(pieces[:token_id]) + (tail if last else "")
        cuts = [given.index(word) for word in stop if word in given]
        if answer.finish_reason:
            assert answer.text == shown == given[: min(cuts, default=None)]
            assert answer.finish_reason == ("stop" if cuts else "length")
            assert answer.token_ids == list(range(1, token_id + 1))
            assert answer.push([token_id]) == "", "nothing is added once it is over"
            return
        held = given[len(shown) :]
        assert given.startswith(shown)
        assert not held or any(word.startswith(held) for word in stop)
        assert answer.text.startswith(shown)


def test_end_of_sequence_releases_what_was_held_and_is_no_part_of_the_answer():
    answer = Answer(("Stop",), Words(["", "a ", "St"]))
    assert [answer.push([1]), answer.push([2])] == ["a ", ""]
    assert answer.push([], "stop") == "St"
    assert (answer.text, answer.finish_reason, answer.token_ids) == ("a St", "stop", [1, 2])


def test_without_a_tokenizer_only_ids_are_kept():
    answer = Answer((), None)
    assert [answer.push([5]), answer.push([6], "length")] == ["", ""]
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("", [5, 6], "length")


@pytest.mark.parametrize("stop", [(), ("ﬁ",), ("茶。", "naïve"), ("🍵",)])
def test_shown_pieces_are_the_text_whatever_the_bytes(tokenizer_dir, stop):
    """Characters of several tokens, held text and the cut at a stop string, all at once."""
    tokenizer = Tokenizer.load(tokenizer_dir)
    whole = "A naïve guest 🍵 drinks 盐井茶。 Then rests."
    ids = [int(i) for i in tokenizer.encode(whole)]
    answer = Answer(stop, tokenizer.stream())
    shown = [answer.push([i]) for i in ids[:-1]] + [answer.push(ids[-1:], "length")]
    cut = min((whole.index(word) for word in stop if word in whole), default=len(whole))
    assert "".join(shown) == answer.text == whole[:cut]
    assert answer.finish_reason == ("stop" if cut < len(whole) else "length")
    assert not any("\ufffd" in piece for piece in shown)


def test_tokens_of_one_step_behind_a_stop_string_are_left_out():
    answer = Answer(("\n",), Words(["", "a", "b\n", "c"]))
    assert answer.push([1, 2, 3], "length") == "ab"
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("ab", [1, 2], "stop")


def test_stop_ends_no_call_that_a_model_makes_of_itself():
    text = 'Hm city <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    for stop, said in (("city", "Hm "), ("name", text)):
        sure = functools.partial(sure_text, form="hermes", names={"weather"})
        answer = Answer((stop,), Words(list(text)), how=AnswerText(sure))
        shown = "".join(answer.push([place]) for place in range(len(text)))
        shown += answer.push([], "stop")
        assert shown == answer.text == said
