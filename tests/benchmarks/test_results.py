"""The results of the repository: each is of a commit, but for those from before that was asked."""

import json
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
# Measured before `--out` refused a tree with changes. Measure one again, and take it out of here.
OF_CHANGED_TREES = {
    "continuous", "digests", "index-answer", "index-distance", "index-long", "index-model",
    "long-documents-20", "long-documents-50", "long-documents-6", "long-infinitebench",
    "long-needle", "long-tasks", "methods-full", "seal", "serve", "serve-long",
    "ttft-cpu-bfloat16",
}  # fmt: skip


def test_results_are_of_commits():
    changed = set()
    for path in RESULTS.glob("*.json"):
        found = json.loads(path.read_text(encoding="utf-8"))
        machine = found.get("machine", {}) if isinstance(found, dict) else {}
        if "+changes" in str(machine.get("commit")):
            changed.add(path.stem)
    assert changed == OF_CHANGED_TREES, "of a tree with changes, or measured again: see above"
