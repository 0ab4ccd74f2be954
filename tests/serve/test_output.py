"""An answer as it grows: stop strings, end of sequence, length, and what is shown when."""

import itertools

import pytest

from jaxrag.models.text.tokenizer import Tokenizer
from jaxrag.serve.output import Answer


class Words:
    """A text stream whose token ids stand for given pieces; ``tail`` comes with the flush."""

    def __init__(self, pieces, tail=""):
        self.pieces = pieces
        self.tail = tail

    def push(self, token_id):
        return self.pieces[token_id]

    def flush(self):
        return self.tail


def play(pieces, stop=(), limit=100, tail=""):
    """Push every piece as one token: the answer, and what each push showed."""
    answer = Answer(tuple(stop), Words(["", *pieces], tail))
    shown = []
    for token_id in range(1, len(pieces) + 1):
        shown.append(answer.push([token_id], "length" if token_id == limit else None))
        if answer.finish_reason:
            break
    return answer, shown


def test_pieces_are_shown_as_they_come():
    answer, shown = play(["one ", "two ", "three"])
    assert shown == ["one ", "two ", "three"]
    assert answer.text == "one two three"
    assert answer.token_ids == [1, 2, 3]
    assert answer.finish_reason is None


def test_stop_string_over_several_tokens_never_shows():
    answer, shown = play(["yes", " a", "b", "c", " more"], stop=[" abc"])
    assert shown == ["yes", "", "", ""]
    assert answer.text == "yes"
    assert answer.finish_reason == "stop"
    assert answer.token_ids == [1, 2, 3, 4]


def test_text_held_back_comes_out_when_it_is_no_stop_string():
    answer, shown = play(["x", "##", "#", "# y"], stop=["###!"])
    assert shown == ["x", "", "", "#### y"]
    assert answer.text == "x#### y"


def test_the_longest_possible_beginning_is_held():
    answer, shown = play(["aab", "aab", "aac"], stop=["aabaac"])
    assert shown == ["", "aab", ""]
    assert answer.text == "aab"
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize("stop", [*itertools.permutations(["bcd", "cd", "de"])])
def test_the_stop_string_that_begins_first_wins(stop):
    answer, _ = play(["ab", "cde"], stop=stop)
    assert answer.text == "a"


def test_a_stop_string_inside_another_that_may_still_come():
    answer, shown = play(["a", "b", "c", "x"], stop=["abcd", "bc"])
    assert shown == ["", "", "a"]
    assert (answer.text, answer.finish_reason) == ("a", "stop")


def test_stop_string_at_the_start_leaves_nothing():
    answer, shown = play(["\n", "\nmore"], stop=["\n\n"])
    assert shown == ["", ""]
    assert (answer.text, answer.finish_reason) == ("", "stop")


def test_text_behind_a_stop_string_in_the_same_token_is_dropped():
    assert play(["a\n\nb"], stop=["\n"])[0].text == "a"


def test_nothing_is_added_once_it_is_over():
    answer, _ = play(["a\n", "b"], stop=["\n"])
    assert answer.push([2]) == ""
    assert (answer.text, answer.token_ids) == ("a", [1])


def test_end_of_sequence_releases_what_was_held_and_is_no_part_of_the_answer():
    answer, shown = play(["a ", "St"], stop=["Stop"])
    assert shown == ["a ", ""]
    assert answer.push([], "stop") == "St"
    assert (answer.text, answer.finish_reason, answer.token_ids) == ("a St", "stop", [1, 2])


def test_end_of_sequence_at_once():
    answer, _ = play([])
    assert answer.push([], "stop") == ""
    assert (answer.text, answer.finish_reason, answer.token_ids) == ("", "stop", [])


def test_length_releases_what_was_held():
    answer, shown = play(["a ", "St", "x"], stop=["Stop"], limit=2)
    assert shown == ["a ", "St"]
    assert (answer.text, answer.finish_reason, answer.token_ids) == ("a St", "length", [1, 2])


def test_stop_string_in_the_last_token_is_a_stop():
    assert play(["a", "b\n"], stop=["\n"], limit=2)[0].finish_reason == "stop"


def test_stop_string_completed_by_the_last_bytes_of_a_character():
    answer, shown = play(["a", ""], stop=["\ufffd"], limit=2, tail="\ufffdz")
    assert shown == ["a", ""]
    assert (answer.text, answer.finish_reason) == ("a", "stop")


def test_incomplete_character_comes_at_the_end():
    answer, shown = play(["a", ""], limit=2, tail="\ufffd")
    assert shown == ["a", "\ufffd"]
    assert answer.text == "a\ufffd"


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
