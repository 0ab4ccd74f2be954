"""The part of MuSiQue that CacheBlend uses, in the form of its files and with its prompt."""

from collections.abc import Iterator

from jaxrag.measure.evals.datasets.nq_open import titled
from jaxrag.measure.evals.datasets.records import DataRecord
from jaxrag.measure.evals.datasets.spec import DatasetItem, DatasetReading, DatasetSpec
from jaxrag.models.text.prompts import PromptTemplate

_TEMPLATE = PromptTemplate(
    name="cacheblend_musique",
    prefix=(
        "You will be asked a question after reading several passages. Please directly answer the "
        "question based on the given passages. Do NOT repeat the question. The answer should be "
        "within 5 words..\nPassages:\n"
    ),
    chunk="{text}",
    final=(
        "\n\nAnswer the question directly based on the given passages. Do NOT repeat the question. "
        "The answer should be within 5 words. \nQuestion:{question}\nAnswer:"
    ),
    chunk_order="document",
)


def _items(records: list[DataRecord], reading: DatasetReading) -> Iterator[DatasetItem]:
    del reading
    for number, record in enumerate(records):
        values = record.values
        if not values["answers"]:
            raise record.wrong("answers", "at least one")
        yield DatasetItem(
            id=str(number),
            sample=str(number),
            question=_as_a_question(values["question"]),
            documents=tuple(
                ("", "{}\n\n{}\n\n".format(*titled(record, ctx))) for ctx in values["ctxs"]
            ),
            answers=(tuple(values["answers"]),),
        )


def _as_a_question(text: str) -> str:
    """As CacheBlend writes it: a mark at its end, and a small letter first."""
    text = text if text.endswith("?") else f"{text}?"
    return text[0].lower() + text[1:]


CACHEBLEND_MUSIQUE = DatasetSpec(
    title="MuSiQue as CacheBlend asks it",
    source="github.com/YaoJiayi/CacheBlend: inputs/musique_s.json",
    checked="real file",
    fields={"question": (str,), "answers": (list,), "ctxs": (list,)},
    items=_items,
    template=_TEMPLATE,
    metrics=("f1", "exact_match", "subspan"),
    max_new_tokens=32,
    note="F1 of words; CacheBlend counts the token ids of its model instead",
)
