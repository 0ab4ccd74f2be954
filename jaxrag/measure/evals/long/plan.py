"""What an evaluation of long contexts asks: the cases that its options stand for."""

import dataclasses
import hashlib
import random
from collections.abc import Iterator, Sequence

from jaxrag.base.errors import RequestError
from jaxrag.measure.evals.options import LongOptions
from jaxrag.models.text.progress import followed
from jaxrag.tasks.long.case import Fitted, Frame
from jaxrag.tasks.long.tasks import Draw
from jaxrag.tasks.long.words import Prose, prose, text_prose


@dataclasses.dataclass(frozen=True, eq=False)
class Item:
    """One prompt of a plan; ``depth`` is None for tasks that hide several needles."""

    task: str
    length: int
    depth: float | None
    fitted: Fitted


@dataclasses.dataclass(frozen=True)
class _Place:
    """Place of an item in the plan."""

    task: str
    length: int
    depth: float
    question: int  # its number among those of this task and length


def plan(options: LongOptions, frame: Frame, max_positions: int, progress: bool) -> list[Item]:
    """Every prompt, by length and task; the same options give the same prompts.

    Raises RequestError for a length beyond the model's context, before any prompt is made, and as
    ``Frame.fit`` does; DocumentError for filler that cannot be read.
    """
    answer = max(map(options.answer_tokens, options.chosen))
    longest = max(options.lengths)
    if longest + answer > max_positions:
        raise RequestError(
            f"--contexts {longest}: with {answer} tokens for the answer the prompt does not fit "
            f"into the model's context of {max_positions}; ask for at most {max_positions - answer}"
        )
    filler = text_prose(options.filler) if options.filler else prose
    places = list(_places(options))
    shortest = [place for place in places if place.length == min(options.lengths)]
    for place in {place.task: place for place in shortest}.values():
        _item(options, frame, filler, place)  # what cannot be asked, before the long prompts
    return [
        _item(options, frame, filler, place)
        for place in followed(places, "prompts", "prompt", shown=progress)
    ]


def _places(options: LongOptions) -> Iterator[_Place]:
    """Needles of the grid at its depths; those of the others in the middle of equal shares."""
    even = [(n + 0.5) / options.questions for n in range(options.questions)]
    depths: Sequence[float] = even
    if options.suite == "needle":
        depths = [depth for depth in options.depths for _ in range(options.questions)]
    for length in options.lengths:
        for task in options.chosen:
            for question, depth in enumerate(depths):
                yield _Place(task, length, depth, question)


def _item(options: LongOptions, frame: Frame, filler: Prose, place: _Place) -> Item:
    name = f"{options.seed} {place.task} {place.length} {place.question}"
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())
    task = options.chosen[place.task]
    case = task.make(Draw(random.Random(seed), place.depth, filler, options.split, options.answers))
    depth = place.depth if task.one_needle else None
    return Item(place.task, place.length, depth, frame.fit(case, place.length))
