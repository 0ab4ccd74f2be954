"""Imports point one way, kernels know nothing of the project, and importing does nothing."""

import ast
import functools
import graphlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# The storeys, from the roof down: a wing imports from lower storeys only, never a neighbour.
# A wing is a package below ``jaxrag``. Doors (``jaxrag`` itself, ``__main__``) stand on top.
FLOORS = (
    ("cli",),
    ("server", "measure"),
    ("serve",),
    ("engine", "library", "train"),
    ("reuse", "tasks"),
    ("models", "connectors"),
    ("kv",),
    ("base",),
)
# The rooms of a wing, from its roof down; "" is the wing's own files. The ground's may stand on
# one another.
ROOMS = {
    "server": (("http",), ("answers", "documents"), ("state",), ("",)),
    "measure": (("bench", "plan"), ("evals",), ("",)),
    "library": (
        ("knowledge_base",),
        ("export",),
        ("embed", "catalog"),
        ("documents",),
        ("retrieve",),
        ("",),
    ),
    "reuse": (("methods",), ("encode", "decode"), ("attention_index", "select", "names")),
    "models": (("",), ("text",)),
    "kv": (("cache", "store"), ("int4", "placement")),
}
DOORS = {"jaxrag", "__main__"}
FLOOR = {name: number for number, row in enumerate(reversed(FLOORS), 1) for name in row}
STORE_MAY_IMPORT = {  # bytes, not models
    "kv.store", "kv.int4", "base.errors", "base.config", "base.types",
}  # fmt: skip
KERNEL_RULES = {f"pallas_kernels.{it}" for it in ("forms", "rotation", "visibility")}  # no kernels
BANNED = {"torch", "transformers"}
IN_VLLM = {"jaxrag.connectors.counts", "jaxrag.connectors.vllm"}  # by its process alone
# Imported when its body is chosen: JAX's Mosaic tells its compiler in the environment where its
# runtime lies; Triton is in no test's environment.
CHOSEN = {"pallas_kernels.mosaic.paged", "pallas_kernels.jax_triton.topn"}
MAY_IMPORT = {"pallas_kernels.jax_triton.topn": {"triton", "jax_triton"}}  # beside jax
IN_LLAMA_CPP = {"jaxrag.base.llama_cpp.worker"}  # by its process alone
# Run by the peer's interpreter, never imported.
PEER_SCRIPTS = {f"jaxrag.measure.bench.peer_{name}" for name in ("logits", "transformers")}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {
    module_name(path): path
    for package in ("jaxrag", "pallas_kernels")
    for path in sorted((ROOT / package).rglob("*.py"))
}


@functools.cache
def imported(path):
    """Every module that ``path`` imports anywhere in it, submodules resolved."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"{path}:{node.lineno}: relative import; name the module in full"
            )
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in FILES else node.module)
    return found


def wing(module):
    """The name that has a storey: the first below ``jaxrag``, or ``jaxrag`` itself."""
    return module.split(".")[1] if "." in module else module


def room(module):
    """The room within the wing, "" for the wing's own files."""
    below = ".".join(module.split(".")[2:3])
    return below if any(below in row for row in ROOMS.get(wing(module), ())) else ""


def ours(module):
    return module.split(".")[0] == "jaxrag"


JAXRAG = sorted(filter(ours, FILES))


def test_every_wing_has_a_floor():
    """A new wing, or a new room of a wing that has some, is named in the tables first."""
    wings = {path.stem if path.is_file() else path.name for path in sources(ROOT / "jaxrag")}
    assert wings - {"__init__"} - DOORS == FLOOR.keys()
    assert {path.stem for path in sources(ROOT / "jaxrag") if path.is_file()} == {
        "__init__", "__main__"
    }  # fmt: skip
    for name, rows in ROOMS.items():
        named = {room for row in rows for room in row}
        found = {path.stem for path in sources(ROOT / "jaxrag" / name)} - {"__init__"}
        assert named <= found if "" not in named else named - {""} <= found
        assert "" in named or found == named


def sources(folder):
    """Files and folders of Python code in a folder."""
    return [
        path
        for path in folder.iterdir()
        if path.suffix == ".py" or (path.is_dir() and any(path.rglob("*.py")))
    ]


def climbs(module, names):
    """Those of the names that are not on a floor below the module's own."""
    return [name for name in names if not _below(name, module)]


def _below(name, module):
    if wing(name) != wing(module):
        return wing(name) not in DOORS and FLOOR[wing(name)] < FLOOR[wing(module)]
    rows = ROOMS.get(wing(name), ())
    rank = {one: number for number, row in enumerate(reversed(rows)) for one in row}
    return room(name) == room(module) or rank[room(name)] < rank[room(module)]


def test_imports_point_to_lower_floors():
    for module in (name for name in JAXRAG if wing(name) not in DOORS):
        upward = climbs(module, sorted(filter(ours, imported(FILES[module]))))
        assert not upward, f"{module} imports {upward}, not on a lower floor (FLOORS, ROOMS)"


@pytest.mark.parametrize(
    ("module", "name", "refused"),
    [
        ("jaxrag.engine.staging", "jaxrag.kv.store.keys", False),
        ("jaxrag.engine.staging", "jaxrag.engine.mapping", False),
        ("jaxrag.base.config", "jaxrag.base.errors", False),
        ("jaxrag.library.knowledge_base.search", "jaxrag.library.catalog", False),
        ("jaxrag.library.catalog", "jaxrag.library.knowledge_base.search", True),  # up, in a wing
        ("jaxrag.kv.store.keys", "jaxrag.kv.cache", True),  # sideways, in a wing
        ("jaxrag.engine.engine", "jaxrag.library.knowledge_base", True),  # sideways
        ("jaxrag.models.model", "jaxrag.engine.engine", True),  # up
        ("jaxrag.base.errors", "jaxrag.kv.store.keys", True),  # up
        ("jaxrag.engine.staging", "jaxrag", True),  # the door
    ],
)
def test_what_counts_as_a_climb(module, name, refused):
    assert bool(climbs(module, [name])) == refused


def test_only_attention_chooses_a_kernel():
    for module in JAXRAG:
        kernels = {name for name in imported(FILES[module]) if name.startswith("pallas_kernels")}
        may = module == "jaxrag.models.attention" or module.startswith("jaxrag.measure.bench")
        assert may or kernels <= KERNEL_RULES, module


def test_the_store_knows_no_models():
    for module in (name for name in JAXRAG if name.startswith("jaxrag.kv.store")):
        foreign = {name for name in imported(FILES[module]) if ours(name)}
        assert {".".join(name.split(".")[1:3]) for name in foreign} <= STORE_MAY_IMPORT, module


def test_kernels_import_jax_only():
    for module in (name for name in FILES if not ours(name)):
        roots = {name.split(".")[0] for name in imported(FILES[module])}
        allowed = {"jax", "pallas_kernels"} | MAY_IMPORT.get(module, set())
        assert roots <= allowed | sys.stdlib_module_names, module


def test_no_module_imports_torch_or_transformers():
    for module in FILES.keys() - PEER_SCRIPTS - IN_VLLM:
        path = FILES[module]
        assert not BANNED & {name.split(".")[0] for name in imported(path)}, module


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("peer_*.py")))
def test_peers_of_scripts_import_nothing_of_ours(path):
    assert not {name.split(".")[0] for name in imported(path)} & {"jaxrag", "pallas_kernels"}


def test_only_training_imports_flax():
    """It takes a tenth of what a question in a new process takes (``jaxrag.base.struct``)."""
    for module in FILES:
        roots = {name.split(".")[0] for name in imported(FILES[module])}
        assert "flax" not in roots or wing(module) == "train", module


def test_modules_form_no_cycle():
    # The public __init__ re-exports what lies below it and is imported by none of that.
    graph = {module: imported(path) & set(FILES) - {module} for module, path in FILES.items()}
    tuple(graphlib.TopologicalSorter(graph).static_order())


def test_importing_every_module_does_nothing():
    """No backend starts, no environment variable changes, no peer library is loaded."""
    program = """
import importlib, json, os, sys
before = dict(os.environ)
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
import jax
from jax._src import xla_bridge
print(json.dumps({
    "backends": xla_bridge.backends_are_initialized(),
    "environment": dict(os.environ) == before,
    "peers": sorted({"torch", "transformers"} & set(sys.modules)),
    "x64": jax.config.jax_enable_x64,
    "precision": jax.config.jax_default_matmul_precision,
}))
"""
    left_out = PEER_SCRIPTS | CHOSEN | IN_VLLM | IN_LLAMA_CPP
    modules = [name for name in FILES if name not in left_out and not name.endswith("__main__")]
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(modules)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "backends": False,
        "environment": True,
        "peers": [],
        "x64": False,
        "precision": None,
    }
