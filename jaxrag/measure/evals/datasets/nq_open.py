"""NQ-open of Lost in the Middle (Liu et al., arXiv:2307.03172): one gold passage among others.

Files with several passages to a question are asked as they stand. The oracle file has the gold
passage alone; ``DatasetReading.documents`` adds gold passages of other questions, none of which
holds a right answer. Those were drawn at random and not retrieved, so such prompts are easier than
the paper's.
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
        if reading.documents is not None:
            own, gold = _among_others(record, passages, number, reading)
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
) -> tuple[list[Titled], int]:
    """The gold passage at a drawn place among those of other questions, and that place."""
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
    others: list[Titled] = []
    for place in drawn.sample(range(len(passages)), len(passages)):
        if len(others) == reading.documents - 1:
            break
        other = passages[place][0]
        if other != gold and other not in others and not subspan(other[1], long_answers):
            others.append(other)
    if len(others) < reading.documents - 1:
        raise RequestError(
            f"--passages {reading.documents}: the file has {len(others) + 1} passages that suit "
            f"{record.where}; name fewer"
        )
    at = drawn.randrange(reading.documents)
    return [*others[:at], gold, *others[at:]], at


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
