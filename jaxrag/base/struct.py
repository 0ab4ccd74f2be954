"""Frozen dataclasses of arrays, which JAX takes apart and puts together as pytrees.

They are written as those of ``flax.struct``, which serve as well where time does not count: to
import that is to import all of Flax, a tenth of what ``jaxrag ask`` takes.
"""

import dataclasses
from typing import Any, Self, dataclass_transform

import jax

_STATIC = "static"


def static(default: Any = dataclasses.MISSING) -> Any:
    """A field that compiled functions are compiled for: hashable, and no array."""
    return dataclasses.field(default=default, metadata={_STATIC: True})


@dataclass_transform(frozen_default=True, field_specifiers=(static,))
class PyTreeNode:
    """Its subclasses are frozen dataclasses and pytrees; a field is a subtree, or ``static``."""

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True)(cls)
        names: dict[bool, list[str]] = {False: [], True: []}
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]  # it is one now
            names[_STATIC in field.metadata].append(field.name)
        jax.tree_util.register_dataclass(cls, names[False], names[True])

    def replace(self, **updates: Any) -> Self:
        """The same with other values of some fields. Raises TypeError for a field it has not."""
        return dataclasses.replace(self, **updates)  # type: ignore[type-var]  # as above
