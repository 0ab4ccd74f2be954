"""The leaderboard says what the committed results say."""

import dataclasses
import json
import re
from pathlib import Path

import leaderboard
import pytest
from refusal import refused

from jaxrag.base.errors import ConfigError

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
CARD = (ROOT / "checkpoints" / "synthetic-0.8m" / "README.md").read_text(encoding="utf-8")
CARD = CARD[CARD.index("\n## Methods side by side") : CARD.index("\n## Longer prompts: `long`")]
# A method as its preset has it: the encoder of its chunks and its ratio.
PRESETS = {
    "full_attention": (None, None),
    "full_reuse": ("after_prefix", None),
    "turborag": ("isolated", None),
    "fusionrag": ("neighbours", 0.15),
    "cacheblend": ("after_prefix", 0.15),
    "cache_craft": ("after_prefix", None),
    "epic": ("isolated", None),
}
VERDICTS = {"held", "held in part", "held in kind", "not held", "inconclusive"}
CHECK = leaderboard.Check("SmolLM2", "near-nq", "cacheblend")  # .074 [.063, .088]


def result(name):
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def rows(page, heading):
    """The cells of the table below a heading line."""
    lines = page[page.index(heading) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.mark.parametrize(("column", "name"), [(1, "methods-full"), (2, "methods-dual")])
def test_right_answers(column, name):
    cells = {(it["method"], it["encoder"], it["ratio"]): it for it in result(name)["cells"]}
    shown = {row[0].strip("`"): row[column] for row in rows(CARD, "| method | `full` weights")}
    assert list(shown) == list(PRESETS)
    for method, text in shown.items():
        found = cells[method, *PRESETS[method]]["exact_match"]["all"]
        value, low, high = (f"{100 * found[part]:.1f}" for part in ("value", "low", "high"))
        assert text == f"{value} [{low}, {high}]", method


def test_times_on_prompts_of_data_sets():
    [text] = re.findall(r"Over HTTP, random weights.*?\n\n", PAGE, re.DOTALL)
    sets = result("dataset-times")["sets"]
    for name in ("turborag", "fusionrag"):
        for prompts in ("rgb_zh", "cacheblend_musique"):
            row = next(it for it in sets[prompts]["methods"] if it["method"] == name)
            assert f" {row['first_over_own']['value']:.1f}" in text


def test_a_claim_names_what_shows_it():
    claims = re.findall(r"^\| .* \| \*(.+?)\* \| .* \|(.*)\|$", PAGE + CARD, re.MULTILINE)
    assert len(claims) > 30
    for verdict, files in claims:
        assert verdict in VERDICTS and files.strip()


def test_the_page_is_as_its_script_writes_it(monkeypatch):
    monkeypatch.setattr("sys.argv", ["leaderboard", "--check"])
    assert leaderboard.main() == 0


@pytest.mark.parametrize(
    ("limits", "verdict"),
    [
        ({"below": 0.1}, leaderboard.HELD),
        ({"below": 0.05}, leaderboard.NOT_HELD),
        ({"below": 0.07}, leaderboard.INCONCLUSIVE),
        ({"above": 0.05}, leaderboard.HELD),
        ({"above": 0.1}, leaderboard.NOT_HELD),
        ({"than": "full_reuse"}, leaderboard.HELD),
        ({"than": "epic"}, leaderboard.INCONCLUSIVE),
        ({"than": "full_reuse", "below": -0.2}, leaderboard.NOT_HELD),
    ],
)
def test_a_verdict_is_of_the_whole_interval(limits, verdict):
    assert leaderboard.judged(dataclasses.replace(CHECK, **limits))[0] == verdict


def test_a_claim_is_held_where_all_its_checks_are():
    held, not_held, open_ = leaderboard.HELD, leaderboard.NOT_HELD, leaderboard.INCONCLUSIVE
    assert leaderboard.verdict([held, held]) == held
    assert leaderboard.verdict([held, not_held]) == leaderboard.IN_PART
    assert leaderboard.verdict([not_held, open_]) == not_held


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(KeyError, match="nothing"):
        leaderboard.judged(dataclasses.replace(CHECK, row="nothing"))
    path = tmp_path / "claims.toml"
    path.write_text('columns = []\nrows = {}\nclaim = []\nverdict = "held"\n')
    with refused(ConfigError, "verdict"):
        leaderboard.leaderboard(path)


def test_a_table_of_quality_shows_each_column_s_own_group():
    whole = leaderboard.DataSet("all", "quality-nq-5")
    first = dataclasses.replace(whole, group="gold at 1 of 5")
    row = next(it for it in result("quality-nq-5")["methods"] if it["method"] == "primed")
    table = leaderboard.quality_table("KL", [("all", whole, "kl"), ("first", first, "kl")])
    [shown] = rows(f"\n{table}", "\n")[3:4]
    part = row["by_group"]["gold at 1 of 5"]["kl"]
    assert shown[0] == "`primed`"
    assert shown[1].startswith(f"{row['kl']['value']:.3f} [")
    assert shown[2] == f"{part['value']:.3f} [{part['low']:.3f}, {part['high']:.3f}]"
    right = leaderboard.quality_table("right", [("all (60)", whole, "subspan")]).splitlines()
    assert right[0] == "| right | all (60) |"
    assert right[2].startswith("| `full_attention` | 26.7 [")


def test_right_answers_by_decode_rule():
    column = leaderboard.DataSet("160 tokens", "long-needle", of={"length": "160"})
    table = leaderboard.quality_table("right, %", [("160", column, "score")])
    assert rows(table, "| right")[0] == ["`dense`", "94.5 [88.6, 97.5]"]
    check = leaderboard.Check("", "long-needle", "full_attention, window", "difference", column.of)
    assert leaderboard.judged(check)[0] == leaderboard.HELD and leaderboard.asked(check) == 110
