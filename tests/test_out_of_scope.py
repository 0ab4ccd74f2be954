"""What docs/troubleshooting.md says that the program says of what it does not support."""

import json
import re
import shutil
from pathlib import Path

import pytest

from jaxrag import cli
from jaxrag.base.errors import JaxragError
from jaxrag.base.guide import Guide
from jaxrag.models.model import load_model
from jaxrag.server.errors import Problem
from jaxrag.server.fields import Generation

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "checkpoints/synthetic-0.8m/dual"
PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE[PAGE.index("\n## Not supported") : PAGE.index("\n## Upgrading")].splitlines()
    if line.startswith("| ")
][1:]


def quoted(what):
    """The words of the program that the page quotes in the row of ``what``."""
    (row,) = [row for row in ROWS if row[0].startswith(what)]
    return re.findall(r"`([^`]+)`", row[2])


def test_quantised_weights(tmp_path):
    shutil.copytree(MODEL, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["quantization_config"] = {"bits": 4, "quant_method": "gptq"}
    path.write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(JaxragError) as refused:
        load_model(tmp_path / "model")
    (words,) = quoted("quantised weights")
    assert words in str(refused.value)


def test_an_adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"r": 8}', encoding="utf-8")
    with pytest.raises(JaxragError) as refused:
        load_model(tmp_path)
    (words,) = quoted("LoRA adapters")
    assert words in str(refused.value)


def test_speculative_decoding(capsys):
    with pytest.raises(SystemExit):
        cli.main(["ask", "q", "--kb", "kb", "--draft-model", "m"])
    (words,) = quoted("speculative decoding")
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("what", "fields"),
    [
        ("answers of a", {"guided_grammar": "start: a"}),
        ("tools", {"functions": [{"name": "f"}]}),
        ("predicted output", {"prediction": {"type": "content", "content": "x"}}),
    ],
)
def test_fields_of_requests(what, fields):
    with pytest.raises(Problem) as refused:
        Generation.read(fields)
    assert any(words in refused.value.message for words in quoted(what))


def test_answers_of_a_form():
    model = load_model(MODEL)
    with pytest.raises(JaxragError) as refused:
        model.grammar(Guide("regex", "a"))
    assert any(words in str(refused.value) for words in quoted("answers of a"))


def test_every_row_but_one_quotes_the_program():
    assert [row[0] for row in ROWS if "`" not in row[2]] == ["query rewriting"]
