"""The lower bounds of dependencies: each has one, and the versions of the tests are within them."""

import tomllib
from pathlib import Path

import lower_bounds
import pytest
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SMALL = {
    "name": "small",
    "dependencies": ["zlib-ng>=0.4", "jax>=0.11.2,<0.13"],
    "optional-dependencies": {
        "web": ["httptools>=0.9", "zlib-ng>=0.10"],
        "test": ["small[web]", "pytest>=9"],
        "bare": ["ray[data]"],
    },
}


def test_the_highest_bound_of_each_dependency_by_name():
    core = ["jax==0.11.2", "zlib-ng==0.4"]
    assert lower_bounds.constraints(SMALL, []) == core
    with_extras = ["httptools==0.9", "jax==0.11.2", "pytest==9", "zlib-ng==0.10"]
    assert lower_bounds.constraints(SMALL, ["test"]) == with_extras


def test_a_dependency_without_a_bound_is_refused():
    with pytest.raises(SystemExit):
        lower_bounds.constraints(SMALL, ["bare"])


def test_every_dependency_has_a_bound():
    lines = lower_bounds.constraints(PROJECT, [*PROJECT["optional-dependencies"]])
    assert len(lines) > len(PROJECT["dependencies"])


def test_the_versions_of_the_tests_are_within_the_bounds():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    versions = {canonicalize_name(name): Version(version) for name, version in pinned.items()}
    outside = [
        str(requirement)
        for requirement in lower_bounds.requirements(PROJECT, [*PROJECT["optional-dependencies"]])
        if (version := versions.get(canonicalize_name(requirement.name))) is not None
        and not requirement.specifier.contains(version)
    ]
    assert not outside
    assert "jax" in versions


def test_it_prints_constraints(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["lower_bounds.py", "serve"])
    lower_bounds.main()
    printed = capsys.readouterr().out.splitlines()
    assert "starlette==1.10" in printed and printed == sorted(printed)
    monkeypatch.setattr("sys.argv", ["lower_bounds.py", "nothing"])
    with pytest.raises(SystemExit):
        lower_bounds.main()
    assert "no extra 'nothing'; choose from" in capsys.readouterr().err
