"""The leaderboard is what its command writes from the committed results."""

import typing

import claims
import leaderboard
import pytest

RESULTS = claims.Results()


def test_the_page_is_what_the_command_writes():
    written = leaderboard.PAGE.read_text(encoding="utf-8")
    assert written == leaderboard.page(RESULTS), "run `python scripts/leaderboard.py`"


@pytest.mark.parametrize(
    ("paper", "claim"), [(paper, it) for paper, all_ in claims.CLAIMS.items() for it in all_]
)
def test_a_claim_names_what_shows_it(paper, claim):
    assert claim.verdict in typing.get_args(claims.Verdict)
    assert bool(claim.files) == (claim.verdict != "not testable here"), paper
    for name in claim.files:
        assert (claims.RESULTS / f"{name}.json").is_file()
    assert claim.shown(RESULTS)


def test_the_verdicts_that_a_number_decides():
    """A verdict that a new result turns round is written anew."""
    full = {
        name: RESULTS.right(claims.FULL, *name)
        for name in (
            ("full_attention", None, None),
            ("turborag", "isolated", None),
            ("cacheblend", "after_prefix", 0.15),
            ("cacheblend", "neighbours", 0.15),
            ("fusionrag", "neighbours", 0.15),
        )
    }
    whole, turbo, blend, blend_near, fusion = full.values()
    assert whole - turbo > 10 and blend_near < blend < fusion
    assert claims._back(RESULTS, "after_prefix") > 80 > claims._back(RESULTS, "neighbours")
    assert claims._most(RESULTS, 4096, "topn") < 1.4 * claims._most(RESULTS, 4096, "dense")
    for name in (
        claims.NEAR,
        "deep-neighbours",
        "deep-full-neighbours",
    ):  # two neighbours help, ten do not
        two, ten = (claims._gain(RESULTS, name, it) for it in ("2", "10"))
        assert two["low"] > 0 > ten["value"]
    assert claims._ruler(RESULTS, "retrieval_default") < claims._ruler(RESULTS, "dense") - 5


def test_random_weights_have_no_scores():
    """Their result holds times alone."""
    for found in RESULTS.of("dataset-times")["sets"].values():
        assert found["metrics"] == []
        assert all(not row["scores"] for row in found["methods"])
