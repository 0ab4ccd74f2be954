"""The lower bounds of dependencies: each has one, and the versions of the tests are within them."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
GROUPS = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
REQUIREMENTS = [it for group in GROUPS for it in map(Requirement, group) if it.name != "jaxrag"]


def test_every_dependency_has_a_bound():
    assert len(REQUIREMENTS) > len(PROJECT["dependencies"])
    unbound = [
        str(it)
        for it in REQUIREMENTS
        if not any(clause.operator == ">=" for clause in it.specifier)
    ]
    assert not unbound


def test_the_versions_of_the_tests_are_within_the_bounds():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    versions = {canonicalize_name(name): Version(version) for name, version in pinned.items()}
    outside = [
        str(it)
        for it in REQUIREMENTS
        if (version := versions.get(canonicalize_name(it.name))) is not None
        and not it.specifier.contains(version)
    ]
    assert not outside
    assert "jax" in versions
