"""Dotted names in docstrings that lead nowhere, from the syntax of a tree alone.

A name is looked at where it begins with a package of the tree, at any depth, or with a loose file
below the top. One that begins with the top package is meant from there; any other is whatever ends
so: a module, or what a module or a class holds. What becomes of an object behind that is not
followed, nor what a class has from another. Left out are names of files, those that a module has as
a text of its code, and those that begin like an argument of their function or a name of their
class.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

# Not within a path or a longer name, nor a name of a file.
_DOTTED = re.compile(r"(?<![\w./\-{<:@\"'])([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?![\w/\-*])")
_FILES = {
    "csv", "docx", "eml", "epub", "html", "ipynb", "json", "jsonl", "lock", "md", "npz", "org",
    "pdf", "pptx", "py", "rst", "safetensors", "sqlite", "svg", "toml", "tsv", "txt", "xlsx",
    "xml", "yaml", "zip",
}  # fmt: skip
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED = (ast.Module, ast.ClassDef, *_FUNCTIONS)
_WITH_STATEMENTS = (ast.stmt, ast.ExceptHandler, ast.match_case)
Trees = Mapping[str, ast.Module]


def unresolved(trees: Trees, packages: Sequence[str] = ("jaxrag",)) -> list[str]:
    """The names that do not resolve, as "module: name", each once a module.

    Args:
      trees: every module of the tree by its dotted name.
      packages: those that a name may begin with.
    """
    there, opened = set[str](), set[str]()
    for module, tree in trees.items():
        there |= set(_beginnings(module))
        for name, node in _bound(tree):
            full = f"{module}.{name}"
            there.add(full)
            if isinstance(node, ast.ClassDef):
                members = {f"{full}.{name}" for name in _members(node)}
                there |= members
                opened |= members | ({full} if node.bases else set())
            else:
                opened.add(full)
    there, opened = _endings(there), _endings(opened - {*trees})
    first = first_parts(trees, packages)
    return sorted({
        f"{module}: {name}"
        for module, tree in trees.items()
        for name, own in _names(tree, set())
        if name.split(".")[0] in first - own and name not in there
        if opened.isdisjoint(_beginnings(name)) and name not in _texts(tree)
    })  # fmt: skip


def _beginnings(name: str) -> Iterator[str]:
    """store, store.keys of store.keys."""
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _endings(names: Iterable[str]) -> set[str]:
    """Names of something, from any of their parts on; one part says nothing."""
    parts = [name.split(".") for name in names]
    return {".".join(one[at:]) for one in parts for at in range(max(len(one) - 1, 1))}


def _texts(tree: ast.Module) -> set[str]:
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str)}


def first_parts(trees: Trees, packages: Sequence[str]) -> set[str]:
    """What a name of something in the tree begins with."""
    parts = [module.split(".") for module in trees]
    folders = {name for path in parts if path[0] in packages for name in path[:-1]}
    loose = {path[1] for path in parts if len(path) == 2 and path[0] in packages}
    return folders | loose | {*packages}


def _names(node: ast.AST, own: set[str]) -> Iterator[tuple[str, set[str]]]:
    """Dotted names in docstrings, each with the names that mean something of its own there."""
    if isinstance(node, _FUNCTIONS):
        own = own | {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
    elif isinstance(node, ast.ClassDef):
        own = own | {name for name, _ in _bound(node)}
    if isinstance(node, _DOCUMENTED):
        for name in _DOTTED.findall(ast.get_docstring(node) or ""):
            if not _FILES.intersection(name.split(".")):
                yield name, own
    for below in ast.iter_child_nodes(node):
        if isinstance(below, _WITH_STATEMENTS):
            yield from _names(below, own)


def _bound(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What a module or a class defines or imports, in its branches too."""
    for below in ast.iter_child_nodes(node):
        match below:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                yield name, below
            case ast.AsyncFunctionDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name, below
            case ast.alias(name=name, asname=called):
                yield (called or name).split(".")[0], below
            case _:
                yield from _bound(below)


def _members(cls: ast.ClassDef) -> set[str]:
    """What a class defines, and what its methods set."""
    stored = (node for node in ast.walk(cls) if isinstance(node, ast.Attribute))
    set_there = {node.attr for node in stored if isinstance(node.ctx, ast.Store)}
    return set_there | {name for name, _ in _bound(cls)}
