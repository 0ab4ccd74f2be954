"""Files stay readable, names say something, and nothing points at one person's machine."""

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from structure import code_lines, modules_of

ROOT = Path(__file__).parents[1]
MAX_LINES = 380  # of code: imports, docstrings, comments and blank lines are not counted
EMPTY_NAMES = {"util", "utils", "common", "helper", "helpers", "manager", "managers", "misc"}
# A class of one letter keeps a pattern from matching its own line.
MACHINE = re.compile(
    r"(?<![\w.}~-])/(?:root|home|Users|work|opt|mnt)/\w"  # absolute paths of one machine
    r"|--(?:extra-)?index-[u]rl|--find-[l]inks"  # package indexes are the user's own business
    r"|https?://[^\s)'\"]+/simple\b"
    r"|@ [f]ile:"
)
CODE = sorted(modules_of(ROOT).values())


def tracked_files():
    """What git tracks or would track; a tree without git has nothing to check."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    return [ROOT / name for name in listing.split("\0") if name and (ROOT / name).is_file()]


def test_files_are_read_in_one_sitting():
    lines = {str(path.relative_to(ROOT)): code_lines(path.read_text("utf-8")) for path in CODE}
    long = {path: count for path, count in lines.items() if count > MAX_LINES}
    assert not long, f"lines of code of {long}: split them by what their parts are about"


def test_module_names_say_what_is_inside():
    named = {path.stem for path in CODE} | {path.parent.name for path in CODE}
    assert not named & EMPTY_NAMES
    assert not [name for name in named if re.search(r"_?v\d+$", name)]


SECTION = re.compile(r"^\s*(?:Args|Attributes):\s*$")
SEVERAL = re.compile(r"^\s+`*\w+`*(?:, `*\w+`*)+: |[.;)] `*[a-z_]\w*`*(?:, `*\w+`*)*: ")


def packed_entries(docstring):
    """Lines of its Args and Attributes that describe more than one name."""
    found, margin = [], None
    for line in docstring.splitlines():
        indent = len(line) - len(line.lstrip())
        if SECTION.match(line):
            margin = indent
        elif line.strip() and margin is not None and indent <= margin:
            margin = None
        elif margin is not None and SEVERAL.search(line):
            found.append(line.strip())
    return found


def test_docstrings_describe_one_name_a_line():
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, documented):
                assert not packed_entries(ast.get_docstring(node) or ""), path


@pytest.mark.parametrize(
    ("lines", "count"),
    [
        ("Args:\n  path: where.\n  mesh: on what; None: one device.\n", 0),
        ("Args:\n  path: where. mesh: on what.\n", 1),
        ("Attributes:\n  q, k: queries and keys.\n", 1),
        ("Returns:\n  q, k: as they were given.\n", 0),
    ],
)
def test_what_counts_as_several(lines, count):
    assert len(packed_entries(f"Text.\n\n{lines}")) == count


def test_no_machine_path_and_no_package_index():
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # goldens and weights
        found += [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
            for number, line in enumerate(text.splitlines(), 1)
            if MACHINE.search(line)
        ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("line", "caught"),
    [
        ("cache = '/" + "root/x'", True),
        ("see /" + "home/someone/y", True),
        ("pip install --" + "index-url u", True),
        ("pkg @ " + "file:///wheels/pkg.whl", True),
        ("src/" + "home/page", False),
        ("$HOME/" + "work/x", False),
        ("file:///tmp/kb", False),
    ],
)
def test_what_counts_as_a_machine_path(line, caught):
    assert bool(MACHINE.search(line)) == caught


def test_constraints_are_versions_only():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert "jax==0.11.2" in pins
    for line in pins:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line), line


def test_hashes_are_of_the_versions_of_the_constraints():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.lower() for line in lines if line and not line.startswith("#")]
    hashed = (ROOT / "hashes.txt").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    found = {line.split()[0]: line.split()[1:] for line in hashed}
    assert len(found) == len(hashed)
    assert {name.replace("_", "-") for name in found} == {name.replace("_", "-") for name in pins}
    for name, hashes in found.items():
        assert hashes, name
        for one in hashes:
            assert re.fullmatch("--hash=sha256:[0-9a-f]{64}", one), (name, one)


def test_every_slow_case_is_of_a_test_that_there_is(request):
    """tests/slow.txt: sorted, of files that there are, and of a test where one was collected."""
    listed = (ROOT / "tests" / "slow.txt").read_text(encoding="utf-8").splitlines()
    cases = [line for line in listed if not line.startswith("#")]
    assert cases == sorted(set(cases))
    assert all((ROOT / case.split("::")[0]).is_file() for case in cases)
    assert not request.config.slow_without_test
