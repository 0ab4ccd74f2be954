"""NQ-open of Lost in the Middle (Liu et al., arXiv:2307.03172): one gold passage among others.

Files with several passages to a question are asked as they stand. The oracle file has the gold
passage alone; ``DatasetReading.documents`` adds gold passages of other questions, none of which
holds a right answer, and ``earlier`` lets some of those be asked and answered before. They were
drawn at random and not retrieved, so such prompts are easier than the paper's.
"""

import random
from collections.abc import Iterator
from typing import Any

from jaxrag.base.errors import RequestError
from jaxrag.measure.evals.datasets.records import DataRecord
from jaxrag.measure.evals.datasets.spec import DatasetItem, DatasetReading, DatasetSpec
from jaxrag.measure.evals.metrics import first_line, squad_normalised, subspan
from jaxrag.models.text.prompts import PromptTemplate

Titled = tuple[str, str]

_TEMPLATE = PromptTemplate(
    name="nq_open",
    prefix=(
        "Write a high-quality answer for the given question using only the provided search results "
        "(some of which might be irrelevant).\n"
    ),
    chunk="\n{text}",
    final="\n\nQuestion: {question}\nAnswer:",
    chunk_order="document",
)


def _items(records: list[DataRecord], reading: DatasetReading) -> Iterator[DatasetItem]:
    passages = [_passages(record) for record in records]
    for number, (record, own) in enumerate(zip(records, passages, strict=True)):
        answers = record.values["answers"]
        gold = next((i for i, ctx in enumerate(record.values["ctxs"]) if ctx.get("isgold")), None)
        others: list[int] = []
        if reading.documents is not None:
            others, gold = _among_others(record, passages, number, reading)
            own = [passages[other][0] for other in (*others[:gold], number, *others[gold:])]
        before = [records[other].values for other in others[: reading.earlier]]
        yield DatasetItem(
            id=str(number),
            sample=str(number),
            question=record.values["question"],
            documents=tuple(
                (title, text)
                if reading.titled
                else ("", f"Document [{place}](Title: {title}) {text}")
                for place, (title, text) in enumerate(own, 1)
            ),
            answers=(tuple(answers),),
            group="" if gold is None else f"gold at {gold + 1} of {len(own)}",
            earlier=tuple((values["question"], values["answers"][0]) for values in before),
        )


def _passages(record: DataRecord) -> list[Titled]:
    for name in ("answers", "ctxs"):
        if not record.values[name]:
            raise record.wrong(name, "at least one")
    return [titled(record, one) for one in record.values["ctxs"]]


def titled(record: DataRecord, one: Any) -> Titled:
    """One of the record's "ctxs"; RequestError for what is none."""
    match one:
        case {"title": str(title), "text": str(text)}:
            return title, text
    raise record.wrong("ctxs", "a list of objects with a title and a text")


def _among_others(
    record: DataRecord, passages: list[list[Titled]], number: int, reading: DatasetReading
) -> tuple[list[int], int]:
    """Numbers of other records, and the drawn place of the gold passage among theirs."""
    assert reading.documents is not None
    drawn = random.Random(f"{reading.seed} {number}")
    answers, [gold, *more] = record.values["answers"], passages[number]
    if more:
        raise RequestError(
            f"{record.where}: {len(more) + 1} passages; --passages is for the oracle file, which "
            "has one: leave it out"
        )
    # Every text holds one that is a letter, or that normalises to nothing.
    long_answers = [answer for answer in answers if len(squad_normalised(answer)) > 1]
    others: list[int] = []
    seen = [gold]
    for place in drawn.sample(range(len(passages)), len(passages)):
        if len(others) == reading.documents - 1:
            break
        other = passages[place][0]
        if other not in seen and not subspan(other[1], long_answers):
            seen.append(other)
            others.append(place)
    if len(others) < reading.documents - 1:
        raise RequestError(
            f"--passages {reading.documents}: the file has {len(others) + 1} passages that suit "
            f"{record.where}; name fewer"
        )
    return others, drawn.randrange(reading.documents)


NQ_OPEN = DatasetSpec(
    title="NQ-open, Lost in the Middle",
    source="github.com/nelson-liu/lost-in-the-middle: qa_data/",
    checked="real file",
    fields={"question": (str,), "answers": (list,), "ctxs": (list,)},
    items=_items,
    template=_TEMPLATE,
    metrics=("subspan", "exact_match", "f1"),
    max_new_tokens=100,
    cleaned=first_line,
    numbering=r"Document \[\d+\]",
    note="checked on the oracle file; others of it are random gold passages, not retrieved ones",
)
