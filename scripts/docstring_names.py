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
from collections.abc import Iterator, Mapping, Sequence

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
    held = {module: _held(tree.body) for module, tree in trees.items()}
    first = first_parts(trees, packages)
    found = set()
    for module, tree in trees.items():
        for name, own in names_in(tree):
            start = name.split(".")[0]
            if start in first and start not in own and not _leads(name, held, packages):
                found.add((module, name))
    texts = {module: _texts(trees[module]) for module, _ in found}
    return sorted(f"{module}: {name}" for module, name in found if name not in texts[module])


def _texts(tree: ast.Module) -> set[str]:
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str)}


def first_parts(trees: Trees, packages: Sequence[str]) -> set[str]:
    """What a name of something in the tree begins with."""
    parts = [module.split(".") for module in trees]
    folders = {name for one in parts if one[0] in packages for name in one[:-1]}
    loose = {one[1] for one in parts if len(one) == 2 and one[0] in packages}
    return folders | loose | {*packages}


def names_in(tree: ast.Module) -> Iterator[tuple[str, set[str]]]:
    """Dotted names in docstrings, each with the names that mean something of its own there."""
    yield from _names(tree, set())


def _names(node: ast.AST, own: set[str]) -> Iterator[tuple[str, set[str]]]:
    if isinstance(node, _FUNCTIONS):
        own = own | {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
    elif isinstance(node, ast.ClassDef):
        own = own | _held(node.body).keys()
    if isinstance(node, _DOCUMENTED):
        for name in _DOTTED.findall(ast.get_docstring(node) or ""):
            if not _FILES.intersection(name.split(".")):
                yield name, own
    for below in ast.iter_child_nodes(node):
        if isinstance(below, _WITH_STATEMENTS):
            yield from _names(below, own)


Held = dict[str, ast.ClassDef | None]  # names in a module or a class; what is no class is None


def _held(body: Sequence[ast.stmt]) -> Held:
    """What a module or a class defines or imports, in its branches too."""
    found: Held = {}
    for node in body:
        match node:
            case ast.ClassDef(name=name):
                found[name] = node
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found[name] = None
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {(one.asname or one.name).split(".")[0]: None for one in names}
            case ast.TypeAlias(name=ast.Name(id=name)):
                found[name] = None
            case ast.Assign(targets=targets):
                named = [one for target in targets for one in ast.walk(target)]
                found |= {one.id: None for one in named if isinstance(one, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                found[name] = None
            case ast.If() | ast.Try() | ast.With() | ast.For():
                parts = (getattr(node, field, []) for field in ("body", "orelse", "finalbody"))
                for part in parts:
                    found |= _held(part)
    return found


def _leads(name: str, held: Mapping[str, Held], packages: Sequence[str]) -> bool:
    """Whether a name is that of a package, of a module, or of something in a module."""
    parts = name.split(".")
    from_top = parts[0] in packages
    if any(
        f"{it}.".startswith(f"{name}.") if from_top else f".{name}." in f".{it}." for it in held
    ):
        return True
    for length in range(len(parts) - 1, 0, -1):  # the longest name of a module decides
        start, rest = ".".join(parts[:length]), parts[length:]
        modules = [it for it in held if it == start or (not from_top and it.endswith(f".{start}"))]
        if modules:
            return any(_holds(held[module], rest) for module in modules)
    return False


def _holds(held: Held, rest: Sequence[str]) -> bool:
    """Whether a module or a class holds what the rest of a name says."""
    if rest[0] not in held:
        return False
    cls = held[rest[0]]
    if cls is None or len(rest) == 1:
        return True
    own = _held(cls.body)
    for node in ast.walk(cls):  # what its methods set
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.setdefault(node.attr, None)
    return bool(cls.bases) or _holds(own, rest[1:])
