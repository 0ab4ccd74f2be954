"""The shape of the source tree in numbers, from its syntax alone: nothing is imported or run.

    python scripts/structure.py [TREE ...] [--options] [--json]

One column a tree; the tree of this script where none is named. How each row is counted:

- rooms: packages and loose files below ``jaxrag``, its ``__init__`` (as ``jaxrag``) and
  ``__main__`` among them; ``pallas_kernels``, ``scripts`` and ``benchmarks`` are one room each.
- arrows between rooms: pairs of rooms of which a file of the first imports something of the second,
  at the top, within a function or for a type checker only.
- arrows up, sideways: those that contradict the table of floors in the tree's own
  ``tests/test_imports.py`` (``FLOORS``, roof first, or ``LAYERS``, ground first): to a higher row,
  and within a row other than the ground's. Rooms that the table does not name are left out, and "-"
  stands where a tree has no table.
- arrows that close a circle: the fewest that must turn round until no circle of rooms is left.
- floors of rooms: the longest chain of rooms of which each imports the next, those of a circle
  counted as one. Floors of files: the same of the files below ``jaxrag``, and of
  ``pallas_kernels``.
- floors within a room: the longest chain of the files of a folder below a wing (those of its own
  folders among them), or of a wing's own files; shown is the largest.
- circles of files: sets of files that import one another, in all four places.
- loose files: ``jaxrag/*.py``.
- long signatures: functions and methods, those within functions too, of more than 8 parameters;
  ``self`` and ``cls`` do not count, ``*args`` and ``**kwargs`` count as one each.
- type names with two homes: public names that more than one file below ``jaxrag`` defines, at the
  top, as a class or as another name of a type (``Mode = Literal["r", "rw"]``).
- names in docstrings that do not resolve: as ``scripts/docstring_names.py`` finds them.
- long files: files of more than 400 lines of code, in all four places.
- lines: of code, of docstrings, of comments that have a line to themselves, and blank ones.
  A blank line of a docstring is one of the docstring.
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
import dataclasses
import itertools
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
MAX_LINES = 400  # of code
MOST_ORDERED = 8  # rooms of one circle whose orders are all tried
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


@dataclasses.dataclass(frozen=True)
class Lines:
    """Lines of a file, or of many.

    Attributes:
      code: all others.
      docstrings: of modules, classes and functions.
      comments: alone on their line.
      blank: outside of docstrings and of other strings.
    """

    code: int = 0
    docstrings: int = 0
    comments: int = 0
    blank: int = 0

    def __add__(self, other: "Lines") -> "Lines":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Lines(*(mine + its for mine, its in pairs))

    @property
    def total(self) -> int:
        """All of them."""
        return sum(dataclasses.astuple(self))


def lines_of(text: str) -> Lines:
    """Count the lines of a Python file."""
    documented: set[int] = set()
    quoted: set[int] = set()  # lines of other strings, which may be empty or begin with "#"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS)):
            if ast.get_docstring(node, clean=False) is not None:
                documented |= _span(node.body[0])
        elif isinstance(node, (ast.Constant, ast.JoinedStr)):
            quoted |= _span(node)
    counts = dict.fromkeys((field.name for field in dataclasses.fields(Lines)), 0)
    for number, line in enumerate(text.splitlines(), 1):
        if number in documented:
            kind = "docstrings"
        elif number in quoted or line.strip()[:1] not in ("", "#"):
            kind = "code"
        else:
            kind = "comments" if line.strip() else "blank"
        counts[kind] += 1
    return Lines(**counts)


def code_lines(text: str) -> int:
    """Lines of a Python file that are not blank, comments, docstrings or imports."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
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
    found: dict[str, int] = {}
    for folder in OF_REQUESTS:
        for path in sorted((tree / folder).glob("*.py")):
            for node in _parsed(path).body:
                if isinstance(node, ast.ClassDef) and node.name in OF_A_REQUEST:
                    found[node.name] = found.get(node.name, 0) + _num_fields(node)
    return found


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
    for node in ast.walk(_parsed(path)):
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


def circles_of(graph: Graph) -> list[frozenset[str]]:
    """The sets of two or more nodes of which each leads to every other."""
    reached = {node: _reached(graph, node) for node in graph}
    return sorted(
        {
            frozenset(other for other in nodes if node in reached[other])
            for node, nodes in reached.items()
            if node in nodes
        },
        key=sorted,
    )


def _reached(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        fresh = graph[waiting.pop()] - found
        found |= fresh
        waiting += fresh
    return found


def floors_of(graph: Graph) -> int:
    """The longest chain; the nodes of a circle count as one."""
    names = {node: node for node in graph}
    for circle in circles_of(graph):
        names |= dict.fromkeys(circle, min(circle))
    below: Graph = {name: set() for name in names.values()}
    for node, others in graph.items():
        below[names[node]] |= {names[other] for other in others} - {names[node]}
    heights: dict[str, int] = {}

    def height(node: str) -> int:
        if node not in heights:
            heights[node] = 1 + max(map(height, below[node]), default=0)
        return heights[node]

    return max(map(height, below), default=0)


def turned(graph: Graph) -> int | None:
    """The fewest arrows to turn until there is no circle; None where a circle is too large."""
    count = 0
    for circle in circles_of(graph):
        if len(circle) > MOST_ORDERED:
            return None
        count += min(
            sum(other in graph[node] for node, other in itertools.combinations(order, 2))
            for order in itertools.permutations(circle)
        )
    return count


def table_of(tree: Path) -> list[tuple[str, ...]] | None:
    """The rows of the tree's own table of floors, the ground first; None where there is none."""
    path = tree / "tests" / "test_imports.py"
    for node in _parsed(path).body if path.is_file() else ():
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            match node.targets[0].id:
                case "FLOORS":
                    return list(ast.literal_eval(node.value))[::-1]
                case "LAYERS":
                    return list(ast.literal_eval(node.value))
    return None


def against(rooms: Graph, table: Sequence[Sequence[str]]) -> tuple[int, int]:
    """Arrows up and arrows sideways, by a table with the ground first."""
    rank = {room: number for number, row in enumerate(table) for room in row}
    steps = [
        (rank[room], rank[other])
        for room, others in rooms.items()
        for other in others
        if room in rank and other in rank
    ]
    return sum(a < b for a, b in steps), sum(a == b > 0 for a, b in steps)


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


def measure(tree: Path) -> dict[str, Any]:
    """The numbers of a tree by the names of the rows, JSON-able."""
    modules = modules_of(tree)
    files = {name: imports_of(name, path, modules) for name, path in modules.items()}
    rooms = rooms_of(files)
    table = table_of(tree)
    up, sideways = (None, None) if table is None else against(rooms, table)
    lines = {name: lines_of(path.read_text(encoding="utf-8")) for name, path in modules.items()}
    parsed = {name: _parsed(path) for name, path in modules.items()}
    found: dict[str, Any] = {
        "rooms": len(rooms),
        "arrows between rooms": sum(map(len, rooms.values())),
        "arrows up": up,
        "arrows sideways": sideways,
        "arrows that close a circle": turned(rooms),
        "floors of rooms": floors_of(rooms),
    }
    for place in PACKAGES:
        found[f"floors of files, {place}"] = floors_of(_within(files, place))
    inner: dict[str, set[str]] = {}
    for name, path in modules.items():
        inner.setdefault(inner_room_of(path.relative_to(tree)), set()).add(name)
    found["floors within a room"] = {
        room: floors_of(_part(files, names)) for room, names in sorted(inner.items())
    }
    found["circles of rooms"] = [sorted(circle) for circle in circles_of(rooms)]
    found["circles of files"] = [sorted(circle) for circle in circles_of(files)]
    found["loose files"] = len(list((tree / "jaxrag").glob("*.py")))
    for place in PACKAGES:
        names = _within(files, place)
        counts = [count for name in names for count in signatures(parsed[name])]
        found[f"functions, {place}"] = len(counts)
        found[f"long signatures, {place}"] = sum(count > MAX_PARAMETERS for count in counts)
    homes = two_homes({name: tree for name, tree in parsed.items() if _place(name) == "jaxrag"})
    found["type names with two homes"] = homes
    found["names in docstrings that do not resolve"] = docstring_names.unresolved(parsed, PACKAGES)
    found["long files"] = [name for name in modules if lines[name].code > MAX_LINES]
    for place in PLACES:
        names = _within(files, place)
        total = sum((lines[name] for name in names), Lines())
        found[f"files, {place}"] = len(names)
        found[f"lines, {place}"] = {"all": total.total, **dataclasses.asdict(total)}
    for row, places in COUNTED.items():
        paths = [path for place in places for path in (tree / place).rglob("*.py")]
        found[row] = sum(code_lines(path.read_text(encoding="utf-8")) for path in paths)
    scripts = [path.stem for path in (tree / "benchmarks").glob("*.py")]
    found["benchmark scripts beside the GPU's"] = sum(not it.startswith("gpu") for it in scripts)
    fields = fields_of(tree)
    found["fields of one request"] = sum(fields.values())
    found["objects of one request"] = fields
    return found


def _within(files: Graph, place: str) -> Graph:
    """The part of a graph of files that lies in one place."""
    return _part(files, {name for name in files if _place(name) == place})


def _part(files: Graph, names: set[str]) -> Graph:
    return {name: files[name] & names for name in names}


def _place(module: str) -> str:
    return module.split(".")[0]


def report(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The table in Markdown, one column a tree."""
    yield f"| | {' | '.join(found)} |"
    yield f"|---|{'---:|' * len(found)}"
    for row in next(iter(found.values())):
        values = [numbers[row] for numbers in found.values()]
        if row.startswith("lines, "):
            for kind in values[0]:
                yield _row(row if kind == "all" else f"... {kind}", [v[kind] for v in values])
        else:
            yield _row(row, [number_of(row, value) for value in values])


def number_of(row: str, value: Any) -> int | None:
    """What stands in the table for the value of a row."""
    if row == "floors within a room":
        return max(value.values())
    return len(value) if isinstance(value, list | dict) else value


def _row(name: str, values: Sequence[int | None]) -> str:
    cells = ("-" if value is None else f"{value:,}" for value in values)
    return f"| {name} | {' | '.join(cells)} |"


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
        found[tree]["options"] = sum(it["all"] for it in options)
        found[tree]["options, most of a command"] = max(it["all"] for it in options)
        found[tree]["options, most that one --help shows"] = max(it["shown"] for it in options)
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print("\n".join(report(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
