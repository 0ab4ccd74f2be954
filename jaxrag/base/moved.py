"""Module paths of version 0.1, which go on working: each leads to the module of today.

``jaxrag`` adds the finder to ``sys.meta_path``, behind the ones that read files, so that only a
name without a file comes here. What comes back is the module itself, never a second copy of it.
"""

import importlib
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# The first part of an earlier path -> where it lies below ``jaxrag`` now.
_WINGS = {
    "base": ("config", "errors", "installed", "options", "sharding", "shapes", "struct", "tables",
             "types"),
    "kv": ("cache", "store"),
    "library": ("catalog", "documents", "embed", "export", "knowledge_base", "retrieve"),
    "measure": ("bench", "evals"),
    "models": ("text",),
    "reuse": ("attention_index", "decode", "encode", "methods", "select"),
}  # fmt: skip
MOVED = {room: f"{wing}.{room}" for wing, rooms in _WINGS.items() for room in rooms}


class MovedFinder(MetaPathFinder, Loader):
    """Finds a module by its earlier path."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module of today under its earlier name, with a DeprecationWarning that names it."""
        package, _, below = fullname.partition(".")
        room, dot, rest = below.partition(".")
        if package != "jaxrag" or room not in MOVED:
            return None
        name = f"jaxrag.{MOVED[room]}{dot}{rest}"
        warnings.warn(f"{fullname} is {name} now", DeprecationWarning, stacklevel=2)
        return ModuleSpec(fullname, self, origin=name, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module of today; the import system writes the earlier name's spec into it."""
        assert spec.origin is not None
        module = importlib.import_module(spec.origin)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back; it has run."""
        spec = module.__spec__
        if spec is not None and spec.loader is self:
            module.__spec__ = spec.loader_state
