"""What a data set's passages are encoded behind, by methods whose chunks see their neighbours."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrag.library.knowledge_base.passages import PassageCorpus
from jaxrag.measure.evals.datasets.options import DatasetOptions
from jaxrag.measure.evals.datasets.records import HUB
from jaxrag.measure.evals.datasets.spec import DatasetItem
from jaxrag.serve.given import neighbours_account
from jaxrag.serve.questions import Settings

NeighboursAccount = Mapping[str, Any]  # of ``neighbours_account``


def with_neighbours[Name](
    options: DatasetOptions,
    settings: Mapping[Name, Settings],
    items_of: Callable[[DatasetOptions], Sequence[DatasetItem]],
    numbering: str,
    chunk_tokens: int | None = None,
) -> dict[Name, Settings]:
    """Settings of one model and template, with where their passages' neighbours come from.

    From all passages of the data set's files, however many questions are asked; or, as
    ``options.neighbours`` says, from the prompt. As they are where no method sees any.

    Args:
      settings: of methods by name.
      items_of: reads the files.
      numbering: of the data set.
      chunk_tokens: of a passage the first so many are a chunk; None: all.
    """
    if account_of(settings) is None:
        return dict(settings)
    if options.neighbours == "prompt":
        return {
            name: dataclasses.replace(own, neighbours="prompt") for name, own in settings.items()
        }
    items = items_of(dataclasses.replace(options, number=None))
    first = next(iter(settings.values()))
    files = ", ".join(it if it.startswith(HUB) else Path(it).name for it in options.data)
    corpus = PassageCorpus(
        f"{options.name} ({files})", (), first.model, first.template, chunk_tokens, numbering
    )
    distinct: dict[tuple[str, str], tuple[str, str]] = {}
    for title, text in (passage for item in items for passage in item.documents):
        distinct.setdefault((title, corpus.without_number(text).strip()), (title, text))
    corpus = dataclasses.replace(corpus, passages=tuple(distinct.values()))
    return {name: dataclasses.replace(own, neighbours=corpus) for name, own in settings.items()}


def account_of(settings: Mapping[Any, Settings]) -> NeighboursAccount | None:
    """What a result says of the neighbours of its passages; None where no method sees any."""
    sources = (neighbours_account(one.method, one.neighbours) for one in settings.values())
    return next((it for it in sources if it is not None), None)


def note_in(result: Mapping[str, Any]) -> str:
    """The same for the title of a table, behind what else it says; "" for nothing."""
    source = result.get("neighbours")
    if source is None:
        return ""
    if source["from"] == "prompt":
        return "; neighbours: the prompt's own other passages, an oracle"
    return f"; neighbours: the most similar of {source['passages']} passages of {source['name']}"
