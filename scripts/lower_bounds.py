"""Print the lowest versions that pyproject.toml allows, as constraints for pip.

An environment with these shows that the bounds are true:

    python scripts/lower_bounds.py serve documents > lower.txt
    python3.12 -m venv lower && lower/bin/pip install -c lower.txt '.[serve,documents]'
"""

import argparse
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def requirements(project: dict[str, Any], extras: Sequence[str]) -> Iterator[Requirement]:
    """The project's dependencies and those of its extras, which may name further extras."""
    groups, seen = [project["dependencies"]], set[str]()
    waiting = list(extras)
    while waiting:
        if (extra := waiting.pop()) not in seen:
            seen.add(extra)
            groups.append(project["optional-dependencies"][extra])
        for requirement in map(Requirement, groups[-1]):
            if requirement.name == project["name"]:
                waiting += requirement.extras - seen
    for requirement in (Requirement(line) for group in groups for line in group):
        if requirement.name != project["name"]:
            yield requirement


def lowest(requirement: Requirement) -> Version | None:
    """The version of its ``>=`` clause; None without one."""
    found = [Version(it.version) for it in requirement.specifier if it.operator == ">="]
    return max(found, default=None)


def constraints(project: dict[str, Any], extras: Sequence[str]) -> list[str]:
    """One line ``name==version`` for each dependency, by name.

    Raises:
        SystemExit: a dependency has no lower bound.
    """
    versions: dict[str, Version] = {}
    for requirement in requirements(project, extras):
        if (version := lowest(requirement)) is None:
            raise SystemExit(f"{requirement}: no lower bound; write {requirement}>=VERSION")
        versions[requirement.name] = max(version, versions.get(requirement.name, version))
    return [f"{name}=={versions[name]}" for name in sorted(versions)]


def main() -> None:
    """Print the lowest version of every dependency, for the core and for chosen extras."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    parser = argparse.ArgumentParser(description=main.__doc__)
    known = ", ".join(project["optional-dependencies"])
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help=known)
    extras = parser.parse_args().extras
    if unknown := [extra for extra in extras if extra not in project["optional-dependencies"]]:
        parser.error(f"no extra {unknown[0]!r}; choose from {known}")
    print("\n".join(constraints(project, extras)))


if __name__ == "__main__":
    main()
