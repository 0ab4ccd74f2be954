"""The results of the repository: each is of a commit, and a page says what it shows."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [
    *(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("checkpoints/*/README.md"),
    ROOT / "pallas_kernels" / "README.md",
]  # fmt: skip
# Measured before `--out` refused a tree with changes. Measure one again, and take it out of here.
OF_CHANGED_TREES = {
    "long-infinitebench", "long-needle", "long-tasks", "methods-full", "serve",
    "ttft-cpu-bfloat16",
}  # fmt: skip


def cited():
    """Names of results with the pages that name them; a log of changes is no page."""
    found = {}
    for page in PAGES:
        if page.name != "CHANGELOG.md":
            for name in re.findall(r"\bresults/([\w.-]+\w)", page.read_text(encoding="utf-8")):
                found.setdefault(name, set()).add(str(page.relative_to(ROOT)))
    return found


def test_every_result_is_cited_by_a_page_and_every_citation_is_a_result():
    there = {path.name for path in RESULTS.iterdir()}
    found = cited()
    assert len(found) > 50
    assert not there - set(found), "no page says what they show: cite or delete them"
    assert not {name: found[name] for name in set(found) - there}, "pages cite what is not there"


def commit_of(path):
    """The commit that a result is of; None where it says none."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return found.get("machine", {}).get("commit") if isinstance(found, dict) else None


def test_results_are_of_commits():
    changed = {path.stem for path in RESULTS.glob("*.json") if "+changes" in str(commit_of(path))}
    assert changed == OF_CHANGED_TREES, "of a tree with changes, or measured again: see above"


def test_the_commits_of_results_are_of_this_history():
    """A commit that was rewritten away cannot be looked at; merge a branch with results."""
    git = ["git", "-C", str(RESULTS)]
    if shutil.which("git") is None or subprocess.run([*git, "rev-parse", "-q"]).returncode:
        pytest.skip("not a git checkout")
    shallow = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True)
    if shallow.stdout.strip() == b"true":
        pytest.skip("a shallow clone has no history")
    log = subprocess.run([*git, "rev-list", "HEAD"], capture_output=True, text=True, check=True)
    history, lost = set(log.stdout.split()), []
    for path in RESULTS.glob("*.json"):
        commit = commit_of(path)
        if commit is not None and commit.removesuffix("+changes") not in history:
            lost.append(path.stem)
    assert not lost, "of commits that are not in the history"
