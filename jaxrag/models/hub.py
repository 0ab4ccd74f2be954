"""Models by name from the Hugging Face hub, through its own client and into its own cache."""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

from jaxrag.base.errors import ModelError
from jaxrag.base.installed import installs
from jaxrag.models.tensor_files import INDEX_FILE
from jaxrag.models.text.tokenizer import TEMPLATE_DIRECTORY, TOKENIZER_FILES

_NAME = re.compile(r"([\w.-]+/[\w.-]+?)(?:@([\w./-]+))?")
_CONFIG = ("config.json", "generation_config.json")
_WEIGHTS = ("model*.safetensors", INDEX_FILE, *TOKENIZER_FILES, f"{TEMPLATE_DIRECTORY}/*.jinja")
_LONGEST = 200  # characters of another library's message


def is_hub_name(path: str | Path) -> bool:
    """Is it ORG/NAME or ORG/NAME@REVISION, and no path of a folder that is here?"""
    name = str(path)
    return (
        _NAME.fullmatch(name) is not None
        and not name.startswith(".")
        and not name.endswith(".gguf")
        and not Path(name).exists()
        and not Path(name).parent.exists()
    )


def fetched(name: str, look: Callable[[Path], None] | None = None) -> Path:
    """The folder of a model of the hub: fetched, or as it was fetched before.

    Of its files those that are read here: config, weights as safetensors, tokenizer. The endpoint,
    the token and the folder are those of huggingface_hub's own environment (HF_ENDPOINT, HF_TOKEN,
    HF_HOME).

    Args:
      name: ORG/NAME, or ORG/NAME@REVISION, a branch, a tag or a commit.
      look: is shown the folder with the config alone, before the weights are fetched; what it
        raises is raised.

    Raises:
      ModelError: without huggingface_hub or a network, and for a model or revision that the hub
        has not, or does not give to this user; it names the command that fetches it.
    """
    match = _NAME.fullmatch(name)
    assert match is not None
    repo, revision = match[1], match[2]
    command = f"hf download {repo} --local-dir {repo.partition('/')[2]}"
    command += "" if revision is None else f" --revision {revision}"
    then = f"`{command}` and name {repo.partition('/')[2]}"
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ModelError(
            f"{name}: no such model directory, and huggingface_hub, which fetches models by name, "
            f"is not installed; {installs('hub')}, or {then}"
        )
    import huggingface_hub
    from huggingface_hub import errors

    def folder(patterns: tuple[str, ...]) -> Path:
        return Path(
            huggingface_hub.snapshot_download(
                repo, revision=revision, allow_patterns=list(patterns)
            )
        )

    try:
        first = folder(_CONFIG)
    except errors.RevisionNotFoundError:
        raise ModelError(
            f"{name}: {repo} has no revision {revision!r}; name a branch, a tag or a commit of it"
        ) from None
    except (errors.RepositoryNotFoundError, errors.GatedRepoError):
        raise ModelError(
            f"{name}: no such model directory, and the hub has no such model or does not give it "
            "to this user; check the name, accept the model's terms, and log in by `hf auth login`"
        ) from None
    except Exception as error:  # the network's, the hub's and the disk's have no common base
        raise ModelError(f"{_unreached(name, error)}; {then} where there is a network") from None
    if look is not None:
        look(first)
    try:
        return folder((*_CONFIG, *_WEIGHTS))
    except Exception as error:
        raise ModelError(f"{_unreached(name, error)}; try again, or {then}") from None


def _unreached(name: str, error: Exception) -> str:
    why = " ".join(str(error).split())
    why = f"{type(error).__name__}: {why if len(why) <= _LONGEST else why[:_LONGEST] + '…'}"
    if type(error).__name__ == "LocalEntryNotFoundError":  # its text is three sentences
        cause = type(error.__cause__ or error).__name__
        why = f"the hub was not reached, {cause}, and it was not fetched before"
    return f"{name}: no such model directory, and it cannot be fetched ({why})"
