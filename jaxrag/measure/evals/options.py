"""What each evaluation asks: its settings, which the command line fills, and their checks."""

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from jaxrag.base.config import DTYPES
from jaxrag.base.errors import RequestError
from jaxrag.base.options import (
    flags_of,
    option,
    parse_count,
    parse_counts,
    parse_names,
    parse_ratios,
)

if TYPE_CHECKING:
    from jaxrag.models.text.prompts import PromptTemplate
    from jaxrag.reuse.methods import Method
    from jaxrag.tasks.long.tasks import Task
    from jaxrag.tasks.synthetic import SyntheticTask

_NUMBER = "--num-questions"


def _template() -> Any:
    return option(None, "a template's name or .toml file", "NAME", unset="the model's own")


def _dtype() -> Any:
    return option(
        None, "of weights, activations and KV", choices=DTYPES, unset="as the model is stored"
    )


def option_ratios() -> Any:
    """--recompute-ratios."""
    return option(
        (), "measure every method that recomputes a part at each of these", "R,...",
        parse=parse_ratios, unset="the method's own", flag="--recompute-ratios",
    )  # fmt: skip


def option_controls() -> Any:
    """--controls."""
    return option(
        False,
        "beside every method that chooses what it recomputes, the same with as many tokens drawn "
        "at random",
    )


def _test_task() -> "SyntheticTask":
    from jaxrag.tasks.synthetic import SyntheticTask

    return SyntheticTask(split="test")


def _each_once(options: Any, *names: str) -> None:
    for name in names:
        values = getattr(options, name)
        if len(set(values)) < len(values):
            flag = flags_of(type(options))[name]
            raise RequestError(f"{flag} {','.join(map(str, values))}: name each once")


def check_positive(options: Any, *names: str) -> None:
    """Refuse numbers below 1, also among several; None is a default."""
    for name in names:
        value = getattr(options, name)
        for number in value if isinstance(value, Collection) else (value,):
            if number is not None and number < 1:
                flag = flags_of(type(options))[name]
                raise RequestError(f"{flag} {number}: expected a positive integer")


class ModelRead(NamedTuple):
    """One model, read in one way."""

    model: str
    read: str

    def __str__(self) -> str:
        return f"{self.model}:{self.read}"


@dataclasses.dataclass(frozen=True)
class SyntheticOptions:
    """Of `jaxrag eval synthetic`.

    Attributes:
      compare: further pairs whose difference is wanted.
    """

    models: Mapping[str, str]
    questions: int = option(4000, "of every model", "N", flag=_NUMBER)
    seed: int = option(7, "of the questions", "N")
    reads: tuple[str, ...] = option(
        ("full", "block", "composite"), "how prompts are read", "NAME,...", flag="--read"
    )
    template: str | None = _template()
    dtype: str | None = _dtype()
    task: "SyntheticTask" = dataclasses.field(default_factory=_test_task)
    compare: tuple[tuple[ModelRead, ModelRead], ...] = ()

    def __post_init__(self) -> None:
        from jaxrag.measure.evals.scoring import READS

        if not self.models:
            raise RequestError("no model to evaluate; name one with --model NAME=DIR")
        for name in self.models:
            if not re.fullmatch(r"[^\s:,=|]+", name):
                raise RequestError(f"model name {name!r}: expected a word without : , = or |")
        unknown = [read for read in self.reads if read not in READS]
        if unknown or not self.reads or len(set(self.reads)) < len(self.reads):
            raise RequestError(
                f"--read {','.join(self.reads)}: expected some of {', '.join(READS)}, each once"
            )
        check_positive(self, "questions")
        for cell in (cell for pair in self.compare for cell in pair):
            if cell.model not in self.models or cell.read not in self.reads:
                raise RequestError(
                    f"--compare {cell}: expected MODEL:READ with a model of "
                    f"{', '.join(self.models)} and a read of {', '.join(self.reads)}"
                )


@dataclasses.dataclass(frozen=True)
class LongOptions:
    """Of `jaxrag eval needle`, `ruler` and `infinitebench`.

    Attributes:
      suite: "needle", "ruler" or "infinitebench".
      lead: end prompts with the first words of the answer, where the task has some.
      depths: of the needle suite; the others spread theirs evenly.
    """

    suite: str
    model: str = option(dataclasses.MISSING, "a directory, or ORG/NAME of the hub", "MODEL")
    lengths: tuple[int, ...] = option(
        dataclasses.MISSING,
        "tokens of the whole prompt without the answer; 4k is 4096",
        "N,...",
        parse=parse_counts,
        flag="--contexts",
    )
    methods: "tuple[str | Method, ...]" = option(
        ("full_attention",),
        "presets or .toml files; all answer the same prompts and are compared with the first",
        "NAME,...",
        parse=parse_names,
    )
    decode: tuple[str, ...] = option(
        (),
        "how generated tokens attend, such as dense, static_window:sink=4,recent=64 or topn:n=64, "
        "NAME=RULE to call it so; repeatable, every method answers under each",
        "RULE",
        unset="the method's own",
        repeatable=True,
    )
    flavour: str = option(
        "plain",
        "village: in the words of the synthetic task, for models that know no others",
        choices=("plain", "village"),
    )
    split: Literal["train", "test"] = option(
        "test", "of the people whom the village flavour asks about", choices=("test", "train")
    )
    answers: int = option(
        16, "names that an answer of the village flavour has; fewer are for training", "N"
    )
    filler: tuple[str, ...] = option(
        (),
        "text whose sentences are the prose of haystacks; repeatable",
        "FILE",
        unset="generated ones",
        repeatable=True,
    )
    questions: int = option(10, "of every task, length and depth", "N", flag=_NUMBER)
    seed: int = option(7, "of the prompts", "N")
    chunk_tokens: int | None = option(
        None,
        "cut the haystack between sentences into chunks of up to N tokens",
        "N",
        parse=parse_count,
        unset="one chunk",
    )
    lead: bool = option(True, "do not end prompts with the first words of the answer")
    max_new_tokens: int | None = option(
        None, "of an answer", "N", parse=parse_count, unset="the benchmark's"
    )
    batch_size: int = option(1, "questions that run together", "N")
    host_values: bool = option(
        False, "keep K and V, or V, in host memory under rules that are meant to have them there"
    )
    template: str | None = _template()
    dtype: str | None = _dtype()
    tasks: tuple[str, ...] = option((), "of the suite", "NAME,...", unset="all of them")
    depths: tuple[float, ...] = option(
        tuple(n / 10 for n in range(11)), "shares of the filler that stand before the needle",
        "D,...", unset="0,0.1,...,1",
    )  # fmt: skip

    def __post_init__(self) -> None:
        from jaxrag.tasks.long.tasks import ANSWERS, SUITES
        from jaxrag.tasks.world import Split

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
        _each_once(self, "lengths", "depths", "tasks")
        for name in ("lengths", "depths"):
            if not getattr(self, name):
                raise RequestError(f"{flags_of(LongOptions)[name]}: name at least one")
        check_positive(
            self, "lengths", "questions", "batch_size", "answers", "chunk_tokens", "max_new_tokens"
        )
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
        if self.host_values and all(it.decode.placement.on_device for it in self.resolved):
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
    def resolved(self) -> "tuple[Method, ...]":
        """The methods, with a decode rule each, in whose name it is then."""
        from jaxrag.reuse.decode import rule_from
        from jaxrag.reuse.methods import method_named

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
        """The decode rules, each with what it is called: its own text where it has no name."""
        named = [re.fullmatch(r"(?:(\w+)=)?(.*)", rule, re.DOTALL) for rule in self.decode]
        return tuple((match[1] or match[2], match[2]) for match in named if match)

    @property
    def chosen(self) -> "Mapping[str, Task]":
        """The tasks by name, in the order of the suite."""
        from jaxrag.tasks.long.tasks import SUITES

        tasks = SUITES[self.suite, self.flavour]
        return {name: task for name, task in tasks.items() if name in (self.tasks or tasks)}

    def answer_tokens(self, task: str) -> int:
        """Most tokens of an answer."""
        return self.max_new_tokens or self.chosen[task].max_new_tokens


@dataclasses.dataclass(frozen=True)
class OwnOptions:
    """Of `jaxrag eval own`; ``template``, ``k`` and ``where`` are as for ``generate``."""

    methods: tuple[str, ...] = option(
        (),
        "presets or .toml files; full attention is measured always",
        "NAME,...",
        unset="all that suit what the knowledge base keeps",
    )
    ratios: tuple[float, ...] = option_ratios()
    controls: bool = option_controls()
    template: "str | PromptTemplate | None" = option(
        None, "a template's name or .toml file", "NAME", parse=str, unset="that of --kb"
    )
    k: int = 5
    where: Mapping[str, Any] | None = None
    max_new_tokens: int = option(32, "", "N", parse=parse_count)


@dataclasses.dataclass(frozen=True)
class Target:
    """What a ratio has to reach, on average over the probes."""

    agreement: float = option(0.9, "of answer tokens, at least", "SHARE", flag="--target-agreement")
    max_kl: float = option(0.1, "mean KL divergence from full attention a token, at most", "NATS")
    answers: float = option(
        0.0,
        "of whole answers that are full attention's, at least",
        "SHARE",
        flag="--target-answers",
    )

    def __post_init__(self) -> None:
        for name in ("agreement", "answers"):
            if not 0 <= getattr(self, name) <= 1:
                raise RequestError(
                    f"--target-{name} {getattr(self, name)}: expected a share from 0 to 1"
                )
        if not self.max_kl >= 0:
            raise RequestError(f"--max-kl {self.max_kl}: expected nats a token, 0 or more")


@dataclasses.dataclass(frozen=True)
class GateOptions:
    """Of `jaxrag kb gate`; ``template``, ``k`` and ``where`` are as for ``generate``."""

    method: "str | Method" = option(
        "turborag", "one that reuses chunks: a preset or a .toml file", "NAME", parse=str
    )
    ratios: tuple[float, ...] | None = option(
        None,
        "to try",
        "R,...",
        parse=parse_ratios,
        flag="--recompute-ratios",
        unset="0,0.05,0.1,0.15,0.2,0.3,0.5; 0 for a method that recomputes nothing",
    )
    target: Target = dataclasses.field(default_factory=Target)
    answer_tokens: int = option(8, "first tokens of an answer to compare", "N", parse=parse_count)
    compute_last: int = option(
        0, "the last N chunks of each prompt are computed, as `jaxrag kb connector` allows", "N"
    )
    template: "str | PromptTemplate | None" = option(
        None, "a template's name or .toml file", "NAME", parse=str, unset="that of DIR"
    )
    k: int = 5
    where: Mapping[str, Any] | None = None
    batch_size: int = option(8, "questions that run together", "N")

    def __post_init__(self) -> None:
        if self.compute_last < 0:
            raise RequestError(f"compute_last={self.compute_last}: expected at least 0 chunks")
        if self.ratios is not None and not self.ratios:
            raise RequestError("no ratio to try; name some, such as --recompute-ratios 0,0.15,0.3")
        check_positive(self, "batch_size")


@dataclasses.dataclass(frozen=True)
class PrimeOptions:
    """Of `jaxrag kb prime`; ``k`` and ``where`` are as for ``generate``."""

    primers: tuple[str, ...] = option(
        (), "measure this one too, a .toml file or .safetensors vectors; repeatable",
        "NAME", flag="--primer", repeatable=True,
    )  # fmt: skip
    answer_tokens: int = option(16, "of full attention's answer that are compared", "N")
    k: int = 5
    where: Mapping[str, Any] | None = None
    replace: bool = option(False, "take it where chunks are stored behind another primer, too")

    def __post_init__(self) -> None:
        check_positive(self, "answer_tokens")


@dataclasses.dataclass(frozen=True)
class RowsOptions:
    """Of `jaxrag kb questions`."""

    held_out_share: float = option(
        0.1, "of the documents, whose questions are kept from the rows", "SHARE"
    )
    passages: int | None = option(
        None, "passages to ask about", "N", flag=_NUMBER, unset="every one, or every line of FILE"
    )
    own_answers: bool = option(
        False, "train on what the model itself answers to a row with full attention"
    )
    k: int = 5
    temperature: float = option(0.7, "of the questions that the model writes; 0 is greedy", "T")
    max_new_tokens: int = option(
        96, "of a question with its answer, and of an answer", "N", parse=parse_count
    )
    batch_size: int = option(8, "passages that are read together", "N")
    seed: int = option(0, "of passages, questions, distractors and the share", "N")

    def __post_init__(self) -> None:
        check_positive(self, "passages", "k", "max_new_tokens", "batch_size")
        if not 0 <= self.held_out_share < 1:
            raise RequestError(
                f"--held-out-share {self.held_out_share}: expected a share from 0 to below 1"
            )
