"""What is installed: the version, configurations, the example documents and their model.

The files lie in ``jaxrag/data`` as in a checkout, where that folder holds links to the top level; a
wheel holds copies. What a user has in the working folder is always meant first.
"""

import importlib.metadata
import re
import shutil
import subprocess
from pathlib import Path

from jaxrag.base.errors import ConfigError

__version__ = "0.2.0"
DATA = Path(__file__).parents[1] / "data"
TREE = Path(__file__).parents[2]  # of a checkout
RESULTS = "benchmarks/results"  # in it
CHANGED = "+changes"  # behind a commit


def located(name: str | Path) -> Path:
    """A file or folder by its path, or by its path in the package where nothing is at that.

    ``configs/models/qwen2-7b.toml`` is that of the working folder, else the one that was installed.
    A path that is nowhere is returned as it is.
    """
    path = Path(name)
    if path.exists() or path.is_absolute() or ".." in path.parts or not path.parts:
        return path
    ours = DATA / path
    return ours if ours.exists() else path


def config_path(name: str, kind: str) -> Path | None:
    """The TOML file that a name stands for; None where it is none.

    Args:
      name: a path, as ``located`` takes it where it ends in .toml, or the name of an installed file
        of that kind without its ending, such as "valley".
      kind: a folder of configs/: "methods", "primers", "serve", "templates", "train", "models".
    """
    if name.endswith(".toml") or Path(name).is_file():
        return located(name)
    path = DATA / "configs" / kind / f"{name}.toml"
    return path if name in config_names(kind) else None


def config_names(kind: str) -> list[str]:
    """The names of the installed files of a folder of configs/, sorted."""
    return sorted(path.stem for path in (DATA / "configs" / kind).glob("*.toml"))


def installs(extra: str) -> str:
    """A command that installs the packages of an extra, wherever jaxrag itself came from."""
    requirements = importlib.metadata.requires("jaxrag") or ()
    of = re.compile(rf";.*extra == ['\"]{extra}['\"]")
    names = (re.split(r"[\s;<>=!~\[]", line)[0] for line in requirements if of.search(line))
    return f"`pip install {' '.join(sorted(set(names)))}`"


def commit(tree: Path = TREE) -> str:
    """The commit of a source tree, with CHANGED where it differs; "unknown" outside git.

    Results of benchmarks are no difference: a second one may be measured before the first is
    committed.
    """
    git = ["git", "-C", str(tree)]
    status = ["status", "--porcelain", "--untracked-files=no", "--", ".", f":(exclude){RESULTS}"]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        changes = subprocess.run([*git, *status], capture_output=True, text=True)
    except OSError:
        return "unknown"
    if head.returncode:
        return "unknown"
    return head.stdout.strip() + (CHANGED if changes.stdout.strip() else "")


def unpack(folder: Path) -> list[Path]:
    """Copy everything into a folder, laid out as in a checkout; returns what is now at its top.

    Raises ConfigError, before anything is written, where one of these is there already, and where
    the folder cannot be written to.
    """
    parts = sorted(DATA.iterdir())
    for part in parts:
        if (folder / part.name).exists():
            raise ConfigError(
                f"{folder / part.name} is there already; name another folder, or remove it first"
            )
    try:
        for part in parts:
            shutil.copytree(part, folder / part.name)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written to ({error.strerror or error})") from None
    return [folder / part.name for part in parts]
