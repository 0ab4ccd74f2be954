"""The shape of the source tree in numbers, from its syntax alone: nothing is imported or run.

    python scripts/structure.py [TREE ...] [--options] [--json]

One column a tree; the tree of this script where none is named. How each row is counted:

- rooms: packages and loose files below ``jaxrag``, its ``__init__`` (as ``jaxrag``) and
  ``__main__`` among them; ``pallas_kernels``, ``scripts`` and ``benchmarks`` are one room each.
- arrows between rooms: pairs of rooms of which a file of the first imports something of the second,
  at the top, within a function or for a type checker only.
- floors of rooms: the longest chain of rooms of which each imports the next. Floors of files: the
  same of the files below ``jaxrag``. Neither has a circle, which ``tests/test_imports.py`` sees to.
- floors within a room: the longest chain of the files of a folder below a wing (those of its own
  folders among them), or of a wing's own files; shown is the largest.
- long signatures: functions and methods, those within functions too, of more than 8 parameters;
  ``self`` and ``cls`` do not count, ``*args`` and ``**kwargs`` count as one each.
- type names with two homes: public names that more than one file below ``jaxrag`` defines, at the
  top, as a class or as another name of a type (``Mode = Literal["r", "rw"]``).
- names in docstrings that do not resolve: as ``scripts/docstring_names.py`` finds them.
- code lines: lines without blank ones, comments, docstrings and imports; of ``jaxrag``,
  ``pallas_kernels`` and ``scripts`` together, of ``tests``, and of ``benchmarks``.
- benchmark scripts beside the GPU's: ``benchmarks/*.py`` but for ``gpu*.py``.
- options, with --options alone, as each command's --help is run for it: those of all commands, of
  the command that has most, and the most that one --help shows.
- fields of one request: those of the classes that a request is from `generate` to its token, where
  a tree has them (``OF_A_REQUEST``).
- objects of one request: how many such classes there are.
"""

import argparse
import ast
import graphlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import docstring_names

PACKAGES = ("jaxrag", "pallas_kernels")
PLACES = (*PACKAGES, "scripts", "benchmarks")
MAX_PARAMETERS = 8
COUNTED = {
    "code lines": ("jaxrag", "pallas_kernels", "scripts"),
    "code lines, tests": ("tests",),
    "code lines, benchmarks": ("benchmarks",),
}
OF_A_REQUEST = (  # the second line: of trees before there was a Sequence
    "Ask", "ReadyQuestion", "Prompt", "Request", "Sequence",
    "RequestPlan", "RequestState", "RunningRequest", "Entry",
)  # fmt: skip
OF_REQUESTS = ("jaxrag/serve", "jaxrag/engine")  # where these classes are

Graph = dict[str, set[str]]
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_OF_TYPES = (ast.Subscript, ast.BinOp, ast.Name, ast.Attribute)  # what names a type anew


def code_lines(text: str) -> int:
    """Lines of a Python file that are not blank, comments, docstrings or imports."""
    left_out: set[int] = set()
    for node in _statements(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            left_out |= _span(node)
        elif (
            isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS))
            and ast.get_docstring(node, clean=False) is not None
        ):
            left_out |= _span(node.body[0])
    numbered = enumerate(text.splitlines(), 1)
    return sum(n not in left_out and line.strip()[:1] not in ("", "#") for n, line in numbered)


def fields_of(tree: Path) -> dict[str, int]:
    """Fields of the classes that a request is: annotated ones, else those that it is made with."""
    counts: dict[str, int] = {}
    for folder in OF_REQUESTS:
        for path in sorted((tree / folder).glob("*.py")):
            for node in _parsed(path).body:
                if isinstance(node, ast.ClassDef) and node.name in OF_A_REQUEST:
                    counts[node.name] = counts.get(node.name, 0) + _num_fields(node)
    return counts


def _num_fields(node: ast.ClassDef) -> int:
    annotated = sum(isinstance(it, ast.AnnAssign) for it in node.body)
    made = [it for it in node.body if isinstance(it, _FUNCTIONS) and it.name == "__init__"]
    stored = {
        it.attr
        for function in made
        for it in ast.walk(function)
        if isinstance(it, ast.Attribute) and isinstance(it.ctx, ast.Store)
        if isinstance(it.value, ast.Name) and it.value.id == "self"
    }
    return annotated + len(stored)


def options_of(tree: Path) -> dict[str, dict[str, int]]:
    """How many options each command has, in "all" and as "shown" by its --help; these are run.

    The commands are those that ``tests/goldens/public_names.json`` has, here or in the tree.
    """
    commands: dict[str, None] = {}
    for root in (Path(__file__).parents[1], tree):
        golden = root / "tests" / "goldens" / "public_names.json"
        commands |= dict.fromkeys(json.loads(golden.read_text(encoding="utf-8"))["commands"])

    def printed(command: str, option: str) -> str:
        words = [sys.executable, "-m", *command.split(), option]
        environment = os.environ | {"PYTHONPATH": str(tree.resolve()), "COLUMNS": "200"}
        ran = subprocess.run(  # 0.1 has commands that only refuse
            words, capture_output=True, text=True, env=environment
        )
        return ran.stdout

    found = {}
    for command in commands:
        shown = every = options_in(text := printed(command, "--help"))
        if "--help-all" in text:
            every = options_in(printed(command, "--help-all"))
        found[command] = {"all": len(every), "shown": len(shown)}
    return found


def options_in(text: str) -> set[str]:
    """The options that a help describes, but for those that print help; --no-x is that of --x."""
    named = re.findall(r"(?m)^[\s│*]*(?:-\w\b[ ,/|]*\w*[ ,/|]*)?--([a-z][\w-]*)", text)
    return {name for name in named if not name.startswith("help") and name[3:] not in named}


def _span(node: Any) -> set[int]:
    return set(range(node.lineno, node.end_lineno + 1))


def modules_of(tree: Path) -> dict[str, Path]:
    """Every Python file of the four places by its dotted name."""
    found = {}
    for place in PLACES:
        for path in sorted((tree / place).rglob("*.py")):
            parts = path.relative_to(tree).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(module: str, path: Path, modules: Mapping[str, Path]) -> set[str]:
    """The modules of the tree that a file imports; scripts name those of their folder bare."""
    named: set[str] = set()
    for node in _statements(_parsed(path)):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                named.add(below if below in modules else node.module)
    folder = module.rpartition(".")[0]
    if folder.split(".")[0] not in PACKAGES:
        named |= {f"{folder}.{name}" for name in named}
    return {name for name in named if name in modules} - {module}


def room_of(module: str) -> str:
    """The room of a module."""
    place, *below = module.split(".")
    return below[0] if place == "jaxrag" and below else place


def inner_room_of(path: Path) -> str:
    """The folder below a wing, such as kv/store, or the wing for its own files."""
    place, *below = path.with_suffix("").parts
    if place != "jaxrag" or len(below) < 2:
        return below[0] if place == "jaxrag" else place
    return "/".join(below[:2]) if len(below) > 2 else below[0]


def rooms_of(files: Graph) -> Graph:
    """Which rooms each room imports."""
    rooms: Graph = {}
    for module, imported in files.items():
        room = room_of(module)
        rooms.setdefault(room, set()).update({room_of(name) for name in imported} - {room})
    return rooms


def floors_of(graph: Graph) -> int:
    """The longest chain. Raises graphlib.CycleError, which names the nodes of a circle."""
    heights: dict[str, int] = {}
    for node in graphlib.TopologicalSorter(graph).static_order():
        heights[node] = 1 + max((heights[other] for other in graph[node]), default=0)
    return max(heights.values(), default=0)


def signatures(tree: ast.Module) -> Iterator[int]:
    """The number of parameters of every function."""
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS):
            given = [*node.args.posonlyargs, *node.args.args]
            if given and given[0].arg in ("self", "cls"):
                del given[0]
            rest = (node.args.vararg, node.args.kwarg)
            yield len(given) + len(node.args.kwonlyargs) + sum(one is not None for one in rest)


def types_of(tree: ast.Module) -> Iterator[str]:
    """The public names of types that a file defines at its top."""
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name):
                yield from [name] if name[0] != "_" else []
            case ast.TypeAlias(name=ast.Name(id=name)):
                yield from [name] if name[0] != "_" else []
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                constant = len(name) > 1 and name.isupper()
                if isinstance(value, _OF_TYPES) and name[0].isupper() and not constant:
                    yield name


def two_homes(trees: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """The public names of types that several files define, each with these files."""
    homes: dict[str, list[str]] = {}
    for module, tree in trees.items():
        for name in sorted(set(types_of(tree))):
            homes.setdefault(name, []).append(module)
    return {name: found for name, found in sorted(homes.items()) if len(found) > 1}


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """A module and its statements at any depth: a tenth of all nodes."""
    ahead: list[ast.AST] = [tree]
    while ahead:
        yield (node := ahead.pop())
        below = (ast.stmt, ast.ExceptHandler, ast.match_case)
        ahead += [it for it in ast.iter_child_nodes(node) if isinstance(it, below)]


def measure(tree: Path) -> dict[str, Any]:
    """The numbers of a tree by the names of the rows, JSON-able."""
    modules = modules_of(tree)
    files = {name: imports_of(name, path, modules) for name, path in modules.items()}
    rooms = rooms_of(files)
    parsed = {name: _parsed(path) for name, path in modules.items()}
    own = {name for name in files if name.split(".")[0] == "jaxrag"}
    inner: dict[str, set[str]] = {}
    for name, path in modules.items():
        inner.setdefault(inner_room_of(path.relative_to(tree)), set()).add(name)
    rows: dict[str, Any] = {
        "rooms": len(rooms),
        "arrows between rooms": sum(map(len, rooms.values())),
        "floors of rooms": floors_of(rooms),
        "floors of files, jaxrag": floors_of(_part(files, own)),
        "floors within a room": {
            room: floors_of(_part(files, names)) for room, names in sorted(inner.items())
        },
        "files, jaxrag": len(own),
    }
    counts = [count for name in own for count in signatures(parsed[name])]
    rows["functions, jaxrag"] = len(counts)
    rows["long signatures, jaxrag"] = sum(count > MAX_PARAMETERS for count in counts)
    rows["type names with two homes"] = two_homes({name: parsed[name] for name in sorted(own)})
    rows["names in docstrings that do not resolve"] = docstring_names.unresolved(parsed, PACKAGES)
    for row, places in COUNTED.items():
        paths = [path for place in places for path in (tree / place).rglob("*.py")]
        rows[row] = sum(code_lines(path.read_text(encoding="utf-8")) for path in paths)
    scripts = [path.stem for path in (tree / "benchmarks").glob("*.py")]
    rows["benchmark scripts beside the GPU's"] = sum(not it.startswith("gpu") for it in scripts)
    fields = fields_of(tree)
    rows["fields of one request"] = sum(fields.values())
    rows["objects of one request"] = fields
    return rows


def _part(files: Graph, names: set[str]) -> Graph:
    return {name: files[name] & names for name in names}


def report(trees: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The table in Markdown, one column a tree."""
    yield f"| | {' | '.join(trees)} |"
    yield f"|---|{'---:|' * len(trees)}"
    for row in next(iter(trees.values())):
        numbers = (number_of(row, of_tree[row]) for of_tree in trees.values())
        yield f"| {row} | {' | '.join(f'{number:,}' for number in numbers)} |"


def number_of(row: str, value: Any) -> int:
    """What stands in the table for the value of a row."""
    if row == "floors within a room":
        return max(value.values())
    return value if isinstance(value, int) else len(value)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, or one JSON object; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trees", nargs="*", metavar="TREE", help="checkouts (that of this script)")
    parser.add_argument("--options", action="store_true", help="also count options, by --help")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    trees = args.trees or [os.path.relpath(Path(__file__).parents[1])]
    for tree in trees:
        if not (Path(tree) / "jaxrag").is_dir():
            parser.error(f"{tree}: there is no jaxrag in it; name a checkout of this repository")
    found = {tree: measure(Path(tree)) for tree in trees}
    for tree in trees if args.options else ():
        options = options_of(Path(tree)).values()
        found[tree]["options"] = sum(option["all"] for option in options)
        found[tree]["options, most of a command"] = max(option["all"] for option in options)
        found[tree]["options, most that one --help shows"] = max(it["shown"] for it in options)
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print("\n".join(report(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
