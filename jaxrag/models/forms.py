"""The forms of computations that were measured on this machine: kept, read, and taken into use."""

import dataclasses
import json
import os
from pathlib import Path

import jax

from jaxrag.base.errors import ConfigError
from jaxrag.models.digest import cache_directory
from pallas_kernels.forms import DECODE_TILES, KEY_TILES, Forms, forms, traced_with, use

__all__ = [
    "DECODE_TILES",
    "KEY_TILES",
    "Forms",
    "forms",
    "forms_file",
    "keep_forms",
    "kept_forms",
    "take_forms",
    "traced_with",
]

VARIABLE = "JAXRAG_FORMS"  # in the environment: "default", or a file that ``keep_forms`` wrote
_NAME = "forms.json"


def forms_file() -> Path:
    """Where those of this machine are kept, beside the compiled programs."""
    return cache_directory() / "xla" / _NAME


def kept_forms() -> tuple[Forms, str]:
    """Those that a new process takes, and where they are from.

    The environment's ``JAXRAG_FORMS`` goes first. A model that several processes hold has one
    program, so that they never take what one machine measured: there it is the variable or the
    defaults.

    Raises ConfigError for a file that holds none.
    """
    named = os.environ.get(VARIABLE, "")
    path = Path(named) if named else forms_file()
    alone = jax.process_count() == 1
    if named == "default" or not (named or (alone and path.exists())):
        return Forms(), "the defaults"
    try:
        values = json.loads(path.read_text("utf-8"))["forms"]
        values["heads_apart"] = tuple(values["heads_apart"])
        return Forms(**values), str(path)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{path} holds no forms ({error!r}): delete it, measure again with `jaxrag check "
            f"MODEL --measure`, or set {VARIABLE}=default"
        ) from None


def keep_forms(chosen: Forms, measured: dict[str, object]) -> Path:
    """Write them for the next process, with what they were measured by; returns the file."""
    path = forms_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(
        json.dumps({"forms": dataclasses.asdict(chosen), **measured}, indent=1) + "\n", "utf-8"
    )
    new.replace(path)
    return path


def take_forms() -> None:
    """Use those that are kept from the first program on; later it changes nothing."""
    use(kept_forms()[0])
