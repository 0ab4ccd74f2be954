"""Searches that are checked while an answer grows."""

import numpy as np
import pytest

from jaxrag.reuse.attention_index import Exact, QueryLists
from jaxrag.reuse.decode.checks import RecallChecks
from jaxrag.reuse.decode.rule import Observe


def due(checks, at, tokens):
    return [step for step in tokens if checks.due(at, checks.start + step)]


def test_the_first_tokens_are_checked_and_then_fewer():
    checks = RecallChecks.of(QueryLists(), 100, (1, 1))
    assert due(checks, (0, 0), range(200)) == [0, 1, 2, 3, 16, 32, 48, 64, 128, 192]


def test_a_head_that_finds_too_little_is_searched_with_more_effort_and_then_scanned():
    checks = RecallChecks.of(QueryLists(target_recall=0.95), 7, (2, 2))
    at, wanted, others = (1, 0), np.arange(20), ((0, 0), (0, 1), (1, 1))

    def judge(step, found):
        return checks.judge(at, 7 + step, wanted[:found], np.append(wanted, -1))

    assert judge(0, 18) == "" and checks.times[at] == 1  # .90 of one check is not below .85
    assert due(checks, at, range(1, 40)) == [1, 2, 3, 16, 32]
    assert judge(16, 18) == "" and checks.times[at] == 1  # nor below .90 of two
    assert judge(32, 18) == "" and checks.times[at] == 2  # but below .917 of three
    assert due(checks, at, range(33, 70)) == [33, 34, 35, 36, 48, 64]
    assert judge(33, 17) == "" and checks.times[at] == 2  # what was found before does not count
    assert judge(34, 18) == "" and checks.times[at] == 4
    assert all(judge(step, 17) == "" for step in (35, 36, 37))  # a scan is not for so few
    note = judge(38, 17)
    assert note.startswith("exact: some query heads") and "0.90 of the best 20 keys" in note
    assert checks.times[at] == 0 and all(checks.times[other] == 1 for other in others)
    assert due(checks, (1, 1), range(33, 150)) == [48, 64, 128]


def test_nothing_is_wanted_where_there_are_no_keys():
    checks = RecallChecks.of(QueryLists(), 0, (1, 1))
    assert checks.judge((0, 0), 0, np.array([-1]), np.array([-1])) == "" and checks.times[0, 0] == 1


def test_an_effort_that_was_given_is_not_checked():
    assert RecallChecks.of(QueryLists(probes=3), 0, (1, 1)) is None
    assert RecallChecks.of(Exact(), 0, (1, 1)) is not None  # stored indexes may be of any kind


@pytest.mark.parametrize("tokens", [0, 1, 5, 8, 9, 100])
@pytest.mark.parametrize("observe", [Observe("last", 8), Observe("strided", 8, 3)], ids=str)
def test_as_many_tokens_are_observed_as_asked_for_and_the_newest_without_a_gap(observe, tokens):
    chosen = observe.chosen(tokens)
    assert len(chosen) == min(8, tokens) and (np.diff(chosen) > 0).all()
    newest = 8 if observe.which == "last" else 3
    assert chosen[-newest:].tolist() == list(range(max(tokens - newest, 0), tokens))[-newest:]
    assert tokens < 9 or observe.which == "last" or chosen[0] == 0
