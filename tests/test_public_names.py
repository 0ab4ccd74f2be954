"""Names that others type: none of those in goldens/public_names.json is lost.

    python tests/test_public_names.py

writes that file. No test does: run it where names were added, or taken away on purpose. A name may
be added at any time, and so may a parameter that need not be given.
"""

import contextlib
import dataclasses
import importlib
import inspect
import io
import json
import re
import tarfile
import tempfile
import typing
from pathlib import Path

import click
import pytest

import jaxrag
from jaxrag.cli import PROGRAM, main
from jaxrag.cli.command import commands_of

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "goldens" / "public_names.json"
BASE = Path(__file__).parent / "formats" / "int8.tar.gz"
MODEL = ROOT / "checkpoints" / "synthetic-0.8m" / "dual"
VILLAGE = ROOT / "examples" / "village"
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py")]
MADE = ("Document", "Method", "PromptTemplate", "Sampling", "SamplingParams")  # by users
WHOLE = ("KnowledgeBase", "Result", "Stream", "AsyncStream")  # their methods are public, too
OF_MODEL = ("fingerprint", "logits", "prompt_format", "text_tokenizer")  # docs/reference.md
BY_ORDER = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


# What there is


def parameters(function):
    """Those that may be given by their place, by name only, and those that must be given."""
    found = [it for it in inspect.signature(function).parameters.values() if it.name != "self"]
    starred = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    needed = [it for it in found if it.kind not in starred and it.default is it.empty]
    return {
        "by place": [it.name for it in found if it.kind in BY_ORDER],
        "by name": [starred.get(it.kind, "") + it.name for it in found if it.kind not in BY_ORDER],
        "needed": [it.name for it in needed],
    }


def functions():
    """Public functions, what makes a class of MADE, and the public methods of classes."""
    found = {}
    for name in jaxrag.__all__:
        thing = getattr(jaxrag, name)
        if inspect.isfunction(thing) or name in MADE:
            found[name] = parameters(thing)
        for method in methods_of(thing) if inspect.isclass(thing) else ():
            found[f"{name}.{method}"] = parameters(getattr(thing, method))
    return found


def methods_of(cls):
    if cls is jaxrag.Model:
        return [name for name in OF_MODEL if inspect.isfunction(getattr(cls, name))]
    if cls.__name__ not in WHOLE:
        return []
    return [name for name in dir(cls) if inspect.isroutine(getattr(cls, name)) and name[0] != "_"]


def attributes():
    """Fields of public classes, and of what a knowledge base returns; what a base itself has."""
    classes = [getattr(jaxrag, name) for name in jaxrag.__all__]
    for name in methods_of(jaxrag.KnowledgeBase):
        told = getattr(jaxrag.KnowledgeBase, name).__annotations__.get("return")
        classes += [told, *typing.get_args(told)]
    found = {
        cls.__name__: [field.name for field in dataclasses.fields(cls) if field.name[0] != "_"]
        for cls in classes
        if inspect.isclass(cls) and dataclasses.is_dataclass(cls)
    }
    with unpacked() as folder, jaxrag.KnowledgeBase.open(folder) as kb:
        found["KnowledgeBase"] = [name for name in dir(kb) if name[0] != "_"]
    stream = jaxrag.generate([5], documents=[[6]], model=jaxrag.load_model(MODEL), stream=True)
    found["Stream"] = [name for name in dir(stream) if name[0] != "_"]
    found["Model"] = [name for name in dir(jaxrag.Model) if name in OF_MODEL]
    return found


@contextlib.contextmanager
def unpacked():
    """The folder of a small knowledge base."""
    with tempfile.TemporaryDirectory() as work, tarfile.open(BASE) as packed:
        packed.extractall(work, filter="data")
        yield Path(work, "int8")


def documented():
    """Of modules that the pages import from: what they import."""
    found = {}
    for path in PAGES:
        for module, names in IMPORTED.findall(path.read_text(encoding="utf-8")):
            found[module] = sorted({*found.get(module, []), *re.split(r",\s*", names)})
    return dict(sorted(found.items()))


IMPORTED = re.compile(r"^from (jaxrag[\w.]*) import ([\w, ]+)$", re.MULTILINE)


def commands():
    """Options of every command, each with its choices, and what stands without an option."""
    found = {}
    for path, command in commands_of(PROGRAM):
        options = found[path] = {}
        for it in command.get_params(click.Context(command, **command.context_settings)):
            choices = sorted(it.type.choices) if isinstance(it.type, click.Choice) else None
            named = it.opts if isinstance(it, click.Option) else [f"<{it.name}>"]
            options |= dict.fromkeys(named, choices)
    return found


def printed():
    """Keys of what commands print with --json."""
    of_kb = ["--model", MODEL]
    with unpacked() as kb:
        file = VILLAGE / "liva-bimer.txt"
        question = "Which animal does Kora Felell keep?"
        return {
            "ask": shape_of("ask", question, "--kb", kb, *of_kb, "--max-new-tokens", 2),
            "ingest": shape_of("ingest", file, "--kb", kb, *of_kb),
            "kb list": shape_of("kb", "list", kb),
            "kb stats": shape_of("kb", "stats", kb),
            "kb verify": shape_of("kb", "verify", kb),
            "kb remove": shape_of("kb", "remove", kb, "liva-bimer.txt"),
            "kb gc": shape_of("kb", "gc", kb),
        }


def shape_of(*command):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([*map(str, command), "--json"]) == 0
    return shape(json.loads(out.getvalue()))


def shape(value):
    """The keys of JSON; of a list those of its first item."""
    if isinstance(value, dict):
        return {key: shape(below) for key, below in value.items()}
    return [shape(value[0])] if isinstance(value, list) and value else None


def routes():
    """Methods and paths of HTTP."""
    from jaxrag.server.http.app import make_app
    from jaxrag.server.settings import ServerSettings
    from jaxrag.server.state.state import make_state

    app = make_app(make_state(ServerSettings(), jaxrag.load_model(MODEL)))
    return sorted(f"{method} {route.path}" for route in app.routes for method in route.methods)


def keys():
    """Of the TOML files of a server and of a training run, as they are nested."""
    from jaxrag.server.settings import ServerSettings
    from jaxrag.train.config import TrainConfig

    return {"serve": sorted(keys_of(ServerSettings)), "train": sorted(keys_of(TrainConfig))}


def keys_of(cls, before=""):
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        yield before + field.name
        for below in (hint, *typing.get_args(hint)):
            if inspect.isclass(below) and dataclasses.is_dataclass(below):
                yield from keys_of(below, f"{before}{field.name}.")


def tables():
    """Names of methods and templates."""
    return {"METHODS": list(jaxrag.METHODS), "TEMPLATES": list(jaxrag.TEMPLATES)}


PARTS = {
    "names": lambda: sorted([*jaxrag.__all__, "__version__"]),
    "functions": functions,
    "attributes": attributes,
    "tables": tables,
    "commands": commands,
    "printed": printed,
    "routes": routes,
    "keys": keys,
}


# What was there


@pytest.fixture(scope="module")
def golden():
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


def lost(before, now, where=""):
    """What of JSON is no more there: keys, items of lists, and values that are others."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            it
            for key, below in before.items()
            for it in (
                lost(below, now[key], f"{where}[{key}]") if key in now else [f"{where}[{key}]"]
            )
        ]
    if isinstance(before, list) and isinstance(now, list):
        if before and isinstance(before[0], dict | list):
            return lost(before[0], now[0], f"{where}[0]") if now else [f"{where}[0]"]
        return [f"{where}: {it}" for it in before if it not in now]
    return [] if before is None or before == now else [f"{where}: {before} is {now}"]


@pytest.mark.parametrize("part", [it for it in PARTS if it != "functions"])
def test_nothing_is_lost(golden, part):
    assert not lost(golden[part], PARTS[part]())


def test_calls_go_on_working(golden):
    now = functions()
    assert not golden["functions"].keys() - now.keys()
    for name, before in golden["functions"].items():
        assert now[name]["by place"][: len(before["by place"])] == before["by place"], name
        assert {*before["by name"]} <= {*now[name]["by name"], *now[name]["by place"]}, name
        assert {*now[name]["needed"]} <= {*before["needed"]}, name


def test_imports_of_the_pages_go_on_working(golden):
    assert golden["documented"]
    for module, names in golden["documented"].items():
        found = importlib.import_module(module)
        assert not [name for name in names if not hasattr(found, name)], module


@pytest.mark.parametrize(
    ("before", "now", "count"),
    [
        ({"a": None}, {"a": 1, "b": 2}, 0),
        ({"a": None, "b": None}, {"a": None}, 1),
        ({"a": {"b": ["c", "d"]}}, {"a": {"b": ["d", "e"]}}, 1),
        ([{"a": None}], [{"b": None}], 1),
        ([{"a": None}], [], 1),
        (["a"], None, 1),
    ],
)
def test_what_counts_as_lost(before, now, count):
    assert len(lost(before, now)) == count


def write():
    """Write the golden."""
    found = {name: look() for name, look in PARTS.items()} | {"documented": documented()}
    rows = (f"{json.dumps(name)}: {in_lines(part)}" for name, part in found.items())
    GOLDEN.write_text("{" + ",\n".join(rows) + "}\n", encoding="utf-8")


def in_lines(part):
    """A line for each key, where there are keys."""
    if not isinstance(part, dict):
        return json.dumps(part)
    rows = (f"  {json.dumps(key)}: {json.dumps(below)}" for key, below in part.items())
    return "{\n" + ",\n".join(rows) + "\n}"


if __name__ == "__main__":
    write()
