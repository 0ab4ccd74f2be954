"""Searches that are checked while an answer grows."""

import numpy as np
import pytest

from jaxrag.reuse.attention_index import Exact, QueryLists
from jaxrag.reuse.decode.checks import RecallChecks
from jaxrag.reuse.decode.rule import Observe


def test_the_first_tokens_are_checked_and_then_one_in_32():
    checks = RecallChecks.of(QueryLists(), 100, (1, 1))
    assert [at - 100 for at in range(100, 200) if checks.due(at)] == [0, 1, 2, 3, 32, 64, 96]


def test_a_head_is_scanned_from_the_check_on_by_which_it_found_too_little():
    checks = RecallChecks.of(QueryLists(target_recall=0.95), 0, (2, 2))
    wanted = np.arange(10)
    assert checks.judge(1, 0, wanted, wanted) == "" and not checks.failed(1, 0)
    assert checks.judge(1, 0, wanted[:8], wanted) == ""  # 18 of 20 are 0.9
    note = checks.judge(1, 0, wanted[:9], np.append(wanted, -1)[:10] + 1)
    assert note.startswith("exact: some query heads") and "0.90 of the best 10 keys" in note
    assert checks.failed(1, 0) and not any(checks.failed(*at) for at in ((0, 0), (0, 1), (1, 1)))


def test_nothing_is_wanted_where_there_are_no_keys():
    checks = RecallChecks.of(QueryLists(), 0, (1, 1))
    assert checks.judge(0, 0, np.array([-1]), np.array([-1])) == "" and not checks.failed(0, 0)


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
