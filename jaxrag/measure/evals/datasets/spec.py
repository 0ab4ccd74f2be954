"""What a data set is: how its records become questions, its prompt, and how answers are scored."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

from jaxrag.measure.evals.datasets.records import DataRecord
from jaxrag.measure.evals.metrics import METRICS, AnswerParts
from jaxrag.models.text.prompts import PromptTemplate
from jaxrag.serve.conversation import Conversation

CheckedOn = Literal["real file", "fixture only"]


@dataclasses.dataclass(frozen=True)
class DatasetReading:
    """What a person chooses of how records become questions; a data set reads what it has.

    Attributes:
      noise: of RGB: shares of the documents that do not hold the answer.
      documents: of NQ-open's oracle file: so many to a question, the others the gold passages of
        other questions; None: those of the file.
      earlier: so many of those questions are asked and answered before.
      seed: of which others, and of the gold passage's place.
      titled: passages have their titles beside them, for a template that is not the data set's.
    """

    noise: tuple[float, ...] = ()
    documents: int | None = None
    earlier: int = 0
    seed: int = 7
    titled: bool = False


@dataclasses.dataclass(frozen=True)
class DatasetItem:
    """One question with its documents.

    Attributes:
      id: of the question as it is asked; every id once.
      sample: what this question has in common with others, such as the same documents.
      documents: title and text of each, in the order of the prompt, or none: it retrieves.
      answers: what an answer must hold all of, each with what it may be called.
      group: of questions whose scores are also given apart.
      earlier: questions of the conversation before this one, each with its answer.
    """

    id: str
    sample: str
    question: str
    documents: tuple[tuple[str, str], ...]
    answers: AnswerParts
    group: str = ""
    earlier: tuple[tuple[str, str], ...] = ()

    @property
    def talk(self) -> Conversation:
        """All that was asked; nothing of it is looked for in the pool."""
        questions = (*(question for question, _ in self.earlier), self.question)
        return Conversation(questions, tuple(answer for _, answer in self.earlier))


@dataclasses.dataclass(frozen=True)
class DatasetSpec:
    """A data set.

    Attributes:
      title: as its authors call it.
      source: where its file is from.
      checked: whether this reader was run on the authors' own file, or on made ones of its form.
      fields: what every record must have, with the types that each may be of.
      items: the questions of all records, in their order; those of one sample follow one another.
      template: its prompt.
      metrics: names of ``METRICS``, the one that it is ranked by first.
      max_new_tokens: of an answer.
      cleaned: the answer as it is scored.
      group_metrics: metrics of some groups in place of the first one.
      numbering: a regular expression of what tells a passage's place in its prompt, at its
        beginning; "" where nothing does.
      note: what makes its numbers differ from published ones; "" for nothing.
    """

    title: str
    source: str
    checked: CheckedOn
    fields: dict[str, tuple[type, ...]]
    items: Callable[[list[DataRecord], DatasetReading], Iterator[DatasetItem]]
    template: PromptTemplate
    metrics: tuple[str, ...]
    max_new_tokens: int
    cleaned: Callable[[str], str] = str
    group_metrics: dict[str, str] = dataclasses.field(default_factory=dict)
    numbering: str = ""
    note: str = ""

    def score(self, metric: str, answer: str, item: DatasetItem) -> float:
        """0..1, of an answer as it was generated."""
        if metric == self.metrics[0]:
            metric = self.group_metrics.get(item.group, metric)
        return METRICS[metric](self.cleaned(answer), item.answers)

    def described(self) -> dict[str, Any]:
        """What a result says of it, JSON-able."""
        return {
            "title": self.title,
            "source": self.source,
            "checked": self.checked,
            "note": self.note,
            "template": self.template.to_dict(),
        }
