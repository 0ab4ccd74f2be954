"""The page on security and reliability names tests that there are."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "security.md"
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE.read_text(encoding="utf-8"))


def test_every_guarantee_names_a_test():
    rows = re.findall(r"^\| (\d+) \|(.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 16))
    assert all("::test_" in row for _, row in rows)


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_the_named_test_is_there(path, name):
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
