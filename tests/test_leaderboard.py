"""The leaderboard says what the committed results say."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
PAGE = PAGE[PAGE.index("\n## Leaderboard") : PAGE.index("\n## Time to first token")]
# A method as its preset has it: the encoder of its chunks and its ratio, in `jaxrag eval methods`.
PRESETS = {
    "full_attention": (None, None),
    "full_reuse": ("after_prefix", None),
    "turborag": ("isolated", None),
    "fusionrag": ("neighbours", 0.15),
    "cacheblend": ("after_prefix", 0.15),
    "cache_craft": ("after_prefix", None),
    "epic": ("isolated", None),
}
VERDICTS = {"held", "held in part", "held in kind", "not held", "not testable here"}


def result(name):
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def rows(heading):
    """The cells of the table below a heading line."""
    lines = PAGE[PAGE.index(heading) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.mark.parametrize(("column", "name"), [(1, "methods-full"), (2, "methods-dual")])
def test_right_answers(column, name):
    cells = {(it["method"], it["encoder"], it["ratio"]): it for it in result(name)["cells"]}
    shown = {row[0].strip("`"): row[column] for row in rows("| method | `full` weights")}
    assert list(shown) == list(PRESETS)
    for method, text in shown.items():
        found = cells[method, *PRESETS[method]]["exact_match"]["all"]
        value, low, high = (f"{100 * found[part]:.1f}" for part in ("value", "low", "high"))
        assert text == f"{value} [{low}, {high}]", method


def test_times_on_prompts_of_data_sets():
    sets = result("dataset-times")["sets"]
    names = {"RGB, Chinese": "rgb_zh", "MuSiQue": "cacheblend_musique"}
    for prompts, method, questions, _, ms, *_ in rows("| prompts | method"):
        found = sets[names[prompts]]
        row = next(it for it in found["methods"] if it["method"] == method.strip("`"))
        assert questions == str(found["questions"])
        assert ms == f"{1000 * row['ttft']['value']:.0f}"


def test_a_claim_names_what_shows_it():
    claims = re.findall(r"^\| .* \| \*(.+)\* \| .* \|(.*)\|$", PAGE, re.MULTILINE)
    assert len(claims) > 25
    for verdict, files in claims:
        assert verdict in VERDICTS
        assert (not files.strip()) == (verdict == "not testable here")


def test_random_weights_have_no_scores():
    """Their result holds times alone."""
    for found in result("dataset-times")["sets"].values():
        assert found["metrics"] == []
        assert all(not row["scores"] for row in found["methods"])
