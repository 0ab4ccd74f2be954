"""What an evaluation of long contexts asks: the options, and the cases they stand for."""

import dataclasses
import hashlib
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

from jaxrag.base.errors import RequestError
from jaxrag.measure.evals.options import LongOptions
from jaxrag.models.text.progress import followed
from jaxrag.reuse.decode import rule_from
from jaxrag.reuse.methods import Method, method_named, placement_of
from jaxrag.tasks.long.case import Fitted, Frame
from jaxrag.tasks.long.tasks import ANSWERS, SUITES, Draw, Task
from jaxrag.tasks.long.words import Prose, prose, text_prose
from jaxrag.tasks.world import Split

GRID_DEPTHS = tuple(n / 10 for n in range(11))


@dataclasses.dataclass(frozen=True)
class Options(LongOptions):
    """What to measure.

    Attributes:
      tasks: of the suite; empty = all of them.
      depths: of the needle suite; the others spread theirs evenly.
    """

    tasks: tuple[str, ...] = ()
    depths: tuple[float, ...] = GRID_DEPTHS

    def __post_init__(self) -> None:
        """Refuse what cannot be measured: RequestError, ConfigError for a bad .toml file."""
        if (self.suite, self.flavour) not in SUITES:
            flavours = [flavour for suite, flavour in SUITES if suite == self.suite]
            raise RequestError(
                f"--flavour {self.flavour}: {self.suite} has {', '.join(flavours) or 'none'}"
            )
        unknown = [name for name in self.tasks if name not in SUITES[self.suite, self.flavour]]
        if unknown:
            raise RequestError(
                f"--tasks {unknown[0]}: the {self.flavour} tasks of {self.suite} are "
                f"{', '.join(SUITES[self.suite, self.flavour])}"
            )
        for option, values in (
            ("contexts", self.lengths),
            ("depths", self.depths),
            ("tasks", self.tasks),
        ):
            if len(set(values)) < len(values):
                raise RequestError(f"--{option} {','.join(map(str, values))}: name each once")
        for option, values in (("contexts", self.lengths), ("depths", self.depths)):
            if not values:
                raise RequestError(f"--{option}: name at least one")
        for option, value in (
            *(("contexts", length) for length in self.lengths),
            ("num-questions", self.questions),
            ("batch-size", self.batch_size),
            ("answers", self.answers),
            ("chunk-tokens", 1 if self.chunk_tokens is None else self.chunk_tokens),
            ("max-new-tokens", 1 if self.max_new_tokens is None else self.max_new_tokens),
        ):
            if value < 1:
                raise RequestError(f"--{option} {value}: expected a positive integer")
        if self.answers > ANSWERS:
            raise RequestError(
                f"--answers {self.answers}: expected at most {ANSWERS}, as there are places for"
            )
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise RequestError(
                    f"--depths {depth:g}: expected 0 to 1, the share of filler before the needle"
                )
        if self.filler and (self.suite == "infinitebench" or self.flavour == "village"):
            raise RequestError(
                f"--filler {self.filler[0]}: no {self.flavour} task of {self.suite} hides its "
                "needle in prose; leave it out"
            )
        if self.split not in get_args(Split):
            raise RequestError(f"--split {self.split}: expected {' or '.join(get_args(Split))}")
        if self.host_values and not any(map(placement_of, self.resolved)):
            raise RequestError(
                "--host-values: no method's decode rule is meant to have any in host memory; add "
                "--decode topn or retrieval, or leave it out"
            )
        named = [method.name for method in self.resolved]
        if not named or len(set(named)) < len(named):
            raise RequestError(
                f"--methods {'; '.join(named)}: name at least one method, and each once"
            )

    @property
    def resolved(self) -> tuple[Method, ...]:
        """The methods, with a decode rule each, in whose name it is then."""
        methods = tuple(method_named(method) for method in self.methods)
        if not self.decode:
            return methods
        return tuple(
            dataclasses.replace(method, name=f"{method.name}, {name}", decode=rule_from(rule))
            for method in methods
            for name, rule in self.rules
        )

    @property
    def rules(self) -> tuple[tuple[str, str], ...]:
        """The decode rules, each with what it is called: its own text where nobody named it."""
        named = [re.fullmatch(r"(?:(\w+)=)?(.*)", rule, re.DOTALL) for rule in self.decode]
        return tuple((found[1] or found[2], found[2]) for found in named if found)

    @property
    def chosen(self) -> Mapping[str, Task]:
        """The tasks by name, in the order of the suite."""
        tasks = SUITES[self.suite, self.flavour]
        return {name: task for name, task in tasks.items() if name in (self.tasks or tasks)}

    def answer_tokens(self, task: str) -> int:
        """Most tokens of an answer."""
        return self.max_new_tokens or self.chosen[task].max_new_tokens


@dataclasses.dataclass(frozen=True, eq=False)
class Item:
    """One prompt of a plan; ``depth`` is None for tasks that hide several needles."""

    task: str
    length: int
    depth: float | None
    fitted: Fitted


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where an item stands in the plan."""

    task: str
    length: int
    depth: float
    question: int  # its number among those of this task and length


def plan(options: Options, frame: Frame, max_positions: int, progress: bool) -> list[Item]:
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


def _places(options: Options) -> Iterator[_Place]:
    """Needles of the grid at its depths; those of the others in the middle of equal shares."""
    even = [(n + 0.5) / options.questions for n in range(options.questions)]
    depths: Sequence[float] = even
    if options.suite == "needle":
        depths = [depth for depth in options.depths for _ in range(options.questions)]
    for length in options.lengths:
        for task in options.chosen:
            for question, depth in enumerate(depths):
                yield _Place(task, length, depth, question)


def _item(options: Options, frame: Frame, filler: Prose, place: _Place) -> Item:
    name = f"{options.seed} {place.task} {place.length} {place.question}"
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())
    task = options.chosen[place.task]
    case = task.make(Draw(random.Random(seed), place.depth, filler, options.split, options.answers))
    depth = place.depth if task.one_needle else None
    return Item(place.task, place.length, depth, frame.fit(case, place.length))
