"""Which parts a prompt begins with."""

import numpy as np
import pytest
from stored_chunks import FINGERPRINT, drawn

from jaxrag.connectors import manifest
from jaxrag.connectors.plan import Planner, spans_of
from jaxrag.serve.connector_files import write_manifest


def planner(stored):
    return Planner(manifest.read(stored.out))


def keys(stored, *numbers):
    return (stored.prefix_key, *(stored.key(stored.chunks[at]) for at in numbers))


@pytest.mark.parametrize("numbers", [(0,), (1, 0, 2), (2, 2), (3, 0, 3), (4, 3, 2, 1, 0)])
@pytest.mark.parametrize("named", [False, True])
def test_parts_in_any_order(stored, numbers, named):
    spans = stored.spans(*numbers) if named else None
    plan, reason = planner(stored).plan(stored.prompt(*numbers), spans, 0)
    assert reason == ""
    assert tuple(key for key, _ in plan.parts) == keys(stored, *numbers)
    assert [tokens for _, tokens in plan.parts] == stored.spans(*numbers)


def test_a_gap_ends_them(stored):
    ids = stored.prompt(0, 1)
    cut = len(stored.prefix) + len(stored.chunks[0])
    ids = np.concatenate((ids[:cut], [7], ids[cut:])).astype(np.int32)
    plan, _ = planner(stored).plan(ids, None, 0)
    assert plan.end == cut


def test_one_token_is_left(stored):
    ids = stored.prompt(0, 1, final=0)
    plan, _ = planner(stored).plan(ids, None, 0)
    assert plan.end == len(ids) - len(stored.chunks[1])
    assert planner(stored).plan(ids, stored.spans(0, 1), 0) == (None, "spans")


def test_a_changed_token_is_another_part(stored):
    for at in (0, 20, 39):
        ids = stored.prompt(0, 1)
        ids[len(stored.prefix) + at] += 1
        assert planner(stored).plan(ids, None, 0) == (None, "unknown")
        assert planner(stored).plan(ids, stored.spans(0, 1), 0) == (None, "missing")


def test_without_the_prefix(stored, tmp_path):
    ids = stored.prompt(0, 1)[len(stored.prefix) :]
    plan, _ = planner(stored).plan(ids, None, 0)
    assert tuple(key for key, _ in plan.parts) == keys(stored, 0, 1)[1:]
    (tmp_path / "other").mkdir()
    seen = drawn(tmp_path / "other", encoder="after_prefix")
    assert planner(seen).plan(ids, None, 0) == (None, "unknown")  # its chunks have seen it
    plan, _ = planner(seen).plan(seen.prompt(0, 1), None, 0)
    assert tuple(key for key, _ in plan.parts) == keys(seen, 0, 1)


def test_spans_that_cut_the_prefix_otherwise(tmp_path):
    """A chunk that begins as the prompt does is no prefix, and what has seen one is not taken."""
    other = drawn(tmp_path, encoder="after_prefix")
    longer = np.concatenate((other.prefix, other.chunks[0]))
    other.write([*other.chunks, longer])
    assert planner(other).plan(other.prompt(0), [len(longer)], 0) == (None, "unknown")
    plan, _ = planner(other).plan(other.prompt(0), other.spans(0), 0)
    assert tuple(key for key, _ in plan.parts) == keys(other, 0)


def test_a_prefix_alone_is_the_engine_s_own(stored):
    assert planner(stored).plan(stored.prompt(), None, 0) == (None, "unknown")


@pytest.mark.parametrize(("last", "end"), [(1, 2), (2, 1), (3, 0), (9, 0)])
def test_the_last_parts_may_be_left_out(stored, last, end):
    plan, reason = planner(stored).plan(stored.prompt(0, 1, 2), None, last)
    if end:
        assert plan.end == sum(stored.spans(*range(end)))
    else:
        assert (plan, reason) == (None, "computed")


def test_the_longest_of_parts_that_begin_alike(stored):
    longer = np.concatenate((stored.chunks[0], stored.chunks[1][:10]))
    stored.write([*stored.chunks, longer])
    ids = np.concatenate((stored.prefix, longer, [1, 2, 3])).astype(np.int32)
    plan, _ = planner(stored).plan(ids, None, 0)
    assert plan.end == len(stored.prefix) + len(longer)


def test_equal_hashes_are_not_enough(stored, monkeypatch):
    """The hash of the first tokens finds; what counts is the content id."""
    known = manifest.read(stored.out)
    table = np.array(known.parts)
    for row in table:
        row["content"] = bytes(it ^ 1 for it in bytes(row["content"]).ljust(20, b"\0"))
    table.sort(order="content")
    write_manifest(stored.out, manifest.Manifest(known.engine, known.prefix, known.gates, table))
    assert planner(stored).plan(stored.prompt(0), None, 0) == (None, "unknown")


def test_salts_name_the_whole_plan(stored):
    plans = [planner(stored).plan(stored.prompt(*it), None, 0)[0] for it in ((0, 1), (1, 0), (0,))]
    assert len({plan.salt(FINGERPRINT) for plan in plans}) == 3
    assert plans[0].salt(FINGERPRINT) != plans[0].salt("cd" * 32)


def test_what_requests_may_say():
    assert spans_of(None) == (True, None)
    assert spans_of({"off": True}) == (False, None)
    assert spans_of({"spans": [3, 4]}) == (True, [3, 4])
    for wrong in ({"keys": []}, {"spans": [1.5]}, {"spans": [True]}, [3]):
        with pytest.raises(ValueError):
            spans_of(wrong)
