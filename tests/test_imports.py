"""Imports point one way, kernels know nothing of the project, and importing does nothing."""

import ast
import graphlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A module imports from its own row and the rows above it. ``jaxrag`` is the public __init__.
LAYERS = (
    ("errors", "config", "types"),
    ("rope", "segments", "attention", "cache", "sharding", "sampling", "chat", "tokenizer",
     "prompts", "flops", "offload", "store"),
    ("models",),
    ("index", "embed", "documents", "sentences", "chunking", "attention_index"),
    ("encode", "catalog", "cutting", "ingest", "load", "export", "knowledge_base"),
    ("select", "decode"),
    ("mapping", "prefill", "methods", "reuse"),
    ("gated", "answer", "request", "generation", "batch_files", "batch"),
    ("jaxrag",),
    ("evals", "train"),
    ("bench",),
    ("cli", "__main__"),
)  # fmt: skip
RANK = {name: rank for rank, row in enumerate(LAYERS) for name in row}
STORE_MAY_IMPORT = {"store", "errors", "config", "types"}  # the store knows bytes, not models
KERNEL_RULES = {"pallas_kernels.visibility", "pallas_kernels.rotation"}  # data and pure rules
BANNED = {"torch", "transformers"}
# Imported when its body is chosen: JAX's Mosaic tells its compiler in the environment where its
# runtime lies; Triton is in no test's environment.
CHOSEN = {"pallas_kernels.mosaic.paged", "pallas_kernels.jax_triton.topn"}
MAY_IMPORT = {  # beside jax
    "pallas_kernels.jax_triton.topn": {"triton", "jax_triton"},
    "pallas_kernels.described": {"jaxlib"},
}
# Run by the peer's interpreter, never imported.
PEER_SCRIPTS = {"jaxrag.bench.peer_train", "jaxrag.bench.peer_transformers"}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {
    module_name(path): path
    for package in ("jaxrag", "pallas_kernels")
    for path in sorted((ROOT / package).rglob("*.py"))
}


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


def part(module):
    """The name that has a rank: the first below ``jaxrag``, or ``jaxrag`` itself."""
    return module.split(".")[1] if "." in module else module


def ours(module):
    return module.split(".")[0] == "jaxrag"


JAXRAG = sorted(filter(ours, FILES))


@pytest.mark.parametrize("module", JAXRAG)
def test_imports_point_to_the_same_layer_or_below(module):
    assert part(module) in RANK, f"{module} has no layer: name {part(module)!r} in LAYERS"
    upward = [
        name
        for name in sorted(imported(FILES[module]))
        if ours(name) and RANK.get(part(name), len(LAYERS)) > RANK[part(module)]
    ]
    assert not upward, f"{module} imports {upward}, which stand above it in LAYERS"


@pytest.mark.parametrize("module", JAXRAG)
def test_only_attention_chooses_a_kernel(module):
    kernels = {name for name in imported(FILES[module]) if name.startswith("pallas_kernels")}
    assert module == "jaxrag.attention" or part(module) == "bench" or kernels <= KERNEL_RULES


@pytest.mark.parametrize("module", [name for name in JAXRAG if part(name) == "store"])
def test_the_store_knows_no_models(module):
    foreign = {name for name in imported(FILES[module]) if ours(name)}
    assert {part(name) for name in foreign} <= STORE_MAY_IMPORT


@pytest.mark.parametrize("module", [name for name in FILES if not ours(name)])
def test_kernels_import_jax_only(module):
    roots = {name.split(".")[0] for name in imported(FILES[module])}
    allowed = {"jax", "pallas_kernels"} | MAY_IMPORT.get(module, set())
    assert roots <= allowed | sys.stdlib_module_names


def test_no_module_imports_torch_or_transformers():
    for module in FILES.keys() - PEER_SCRIPTS:
        path = FILES[module]
        assert not BANNED & {name.split(".")[0] for name in imported(path)}, module


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
    left_out = PEER_SCRIPTS | CHOSEN
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
