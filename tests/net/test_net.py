"""What the system answers is what it answered when net.py recorded it.

The default run asks two questions of a shipped model under every method; test_answers.py asks
by every rule.
"""

import net
import numpy as np
import pytest

WHOLE = [pytest.param(part, net.QUESTIONS, "", marks=pytest.mark.slow) for part in net.PARTS]
GOLDEN = {
    "case/tokens": np.array([[5, 6, 7], [8, 9, 10]]),
    "case/safe": np.array([3, 1]),
    "case/ids": np.array([[[1, 2, 3, 4]] * 2, [[5, 6, 7, 8]] * 2]),
    "case/likely": np.array([[[-1.0, -2.0, -2.0001, -3.0]] * 2, [[-1.0, -2.0, -3.0, -4.0]] * 2]),
    "other/refused": np.array("RequestError"),
}


@pytest.mark.parametrize(("part", "few", "only"), [("village", 2, "method"), *WHOLE])
def test_nothing_is_answered_otherwise(part, few, only):
    golden = net.GOLDENS / f"{part}.json.gz"
    if part == "smollm2" and not (net.SMOLLM2.is_file() and golden.is_file()):
        pytest.skip(
            "weights that `make real` fetches, or what net.py recorded of them, are not there"
        )
    known = net.read(golden, only)
    verdict = net.compare(known, net.PARTS[part](few, only))
    assert verdict.compared > few and not verdict.differ
    assert verdict.cut < verdict.compared / 40


@pytest.mark.parametrize(
    ("name", "at", "value", "differs"),
    [
        ("case/tokens", (0, 2), 1, True),
        ("case/tokens", (1, 0), 1, True),
        ("case/tokens", (1, 1), 1, False),  # the step before it was open
        ("case/ids", (0, 1, 0), 9, True),
        ("case/ids", (1, 0, 0), 9, True),
        ("case/ids", (1, 1, 0), 9, False),
        ("case/ids", (0, 0, slice(1, 3)), (3, 2), False),  # as likely
        ("case/likely", (0, 0, 0), -1.0001, False),
        ("case/likely", (1, 0, 0), -1.0003, True),
        ("case/likely", (1, 1, 0), -2.0, False),
        ("other/refused", (), "ConfigError", True),
    ],
)
def test_what_differs(name, at, value, differs):
    now = {key: it.copy() for key, it in GOLDEN.items()}
    now[name][at] = value
    assert [it.split(":")[0] for it in net.compare(GOLDEN, now).differ] == [name] * differs


def test_what_is_missing_differs():
    (name, *_), verdict = GOLDEN, net.compare(GOLDEN, {"new/ids": GOLDEN["case/ids"]})
    assert f"{name}: not there" in verdict.differ and len(verdict.differ) == len(GOLDEN) + 1
