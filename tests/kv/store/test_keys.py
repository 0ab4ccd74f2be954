import json
import os
import subprocess
import sys

import numpy as np
import pytest

from jaxrag.kv.store.keys import chunk_key, content_id, context_id, derive, fingerprint

FIELDS = {
    "weights": "00ff",
    "config": {"layers": 3, "rope": {"theta": 1e6, "scaling": None}, "eos_ids": (1, 2)},
    "eps": 1e-5,
    "tie": False,
}
# These are on disk in every repository: a change here orphans all of them.
FINGERPRINT = "67b39fbc30a6fff4ca3f560dcffdf9d62fa43a3ac3658479787c67182345b07a"
KEY = "26b45eae0d60f293e1abe72eae5b793c28f42f25"


def ids(*values):
    return np.array(values, np.int32)


def example_key():
    content = content_id("aa55", ids(5, 7, 100_000, -1))
    context = context_id("neighbours", ids(1, 2), [content_id("aa55", ids(9))])
    return chunk_key(fingerprint(FIELDS), content, context)


def test_the_key_scheme_has_not_changed():
    assert fingerprint(FIELDS) == FINGERPRINT
    assert example_key() == KEY


@pytest.mark.parametrize("seed", ["1", "2"])
def test_keys_are_equal_in_every_process(seed):
    script = """
import json, sys, numpy as np
from jaxrag.kv.store.keys import *
fields = json.loads(sys.argv[1])
c = content_id("aa55", np.array([5, 7, 100_000, -1], np.int32))
n = content_id("aa55", np.array([9], np.int32))
x = context_id("neighbours", np.array([1, 2], np.int32), [n])
print(chunk_key(fingerprint(fields), c, x))
"""
    shuffled = json.dumps(dict(reversed(FIELDS.items())))
    out = subprocess.run(
        [sys.executable, "-c", script, shuffled],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.strip() == KEY


@pytest.mark.parametrize(
    "same",
    [
        {**FIELDS, "config": {"eos_ids": [1, 2], "rope": {"scaling": None, "theta": 1_000_000},
                              "layers": 3.0}},
        dict(reversed(FIELDS.items())),
    ],
)  # fmt: skip
def test_fingerprint_depends_on_values_only(same):
    assert fingerprint(same) == FINGERPRINT


def test_fingerprint_changes_with_every_field():
    changed = [
        {**FIELDS, "weights": "00fe"},
        {**FIELDS, "eps": 1.0000000000000002e-5},
        {**FIELDS, "tie": 0},
        {**FIELDS, "tie": None},
        {**FIELDS, "tie": "false"},
        {**FIELDS, "new": None},
        {**FIELDS, "config": {**FIELDS["config"], "eos_ids": (2, 1)}},
        {key: value for key, value in FIELDS.items() if key != "tie"},
    ]
    assert len({FINGERPRINT, *map(fingerprint, changed)}) == len(changed) + 1


def test_every_part_of_a_key_counts():
    base = ("tok", ids(1, 2, 3))
    contents = [
        content_id(*base),
        content_id("tok2", base[1]),
        content_id("tok", ids(1, 2)),
        content_id("tok", ids(3, 2, 1)),
        content_id("", ids(1, 2, 3)),
    ]
    a, b = contents[:2]
    contexts = [
        context_id("isolated", ids()),
        context_id("isolated", ids(1)),
        context_id("after_prefix", ids(1)),
        context_id("isolated", ids(), [a]),
        context_id("isolated", ids(), [a, b]),
        context_id("isolated", ids(), [b, a]),
    ]
    keys = {chunk_key(FINGERPRINT, c, x) for c in contents for x in contexts}
    keys |= {chunk_key(fingerprint({}), c, x) for c in contents for x in contexts}
    assert len(keys) == 2 * len(contents) * len(contexts)


def test_parts_cannot_flow_into_each_other():
    """Moving bytes over the border of two parts must change the id."""
    word = ids(int.from_bytes(b"abcd", "little"))
    assert content_id("tok", np.concatenate([word, word])) != content_id("tokabcd", word)
    assert context_id("e", word) != context_id("eabcd", ids())


def test_a_strided_view_has_the_id_of_its_values():
    assert content_id("t", ids(1, 0, 2, 0)[::2]) == content_id("t", ids(1, 2))


def test_derive_changes_nothing_without_a_difference():
    assert derive(FINGERPRINT) == FINGERPRINT
    assert derive(FINGERPRINT, stored="native", salt="") == FINGERPRINT


def test_every_variant_has_a_fingerprint_of_its_own():
    other = fingerprint({})
    variants = [
        derive(base, stored, salt)
        for base in (FINGERPRINT, other)
        for stored in ("native", "int8")
        for salt in ("", "a", "int8", "a company")
    ]
    assert len(set(variants)) == len(variants)
    assert derive(derive(FINGERPRINT, "int8"), salt="a") != derive(FINGERPRINT, "int8", "a")
    # On disk in every repository, as above.
    expected = "a92c68fda1a2b54ad1a1d25c202d7b4acaca5fa83e642132b3caa9f9fc6c9d48"
    assert derive(FINGERPRINT, "int8", "a company") == expected
