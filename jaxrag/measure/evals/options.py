"""What each evaluation is told, as far as the command line says it; the evaluations check it."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from jaxrag.base.config import DTYPES
from jaxrag.base.options import option, parse_count, parse_counts, parse_names, parse_ratios

if TYPE_CHECKING:
    from jaxrag.reuse.methods import Method

_NUMBER = "--num-questions"
_OWN = "the model's own"


@dataclasses.dataclass(frozen=True)
class SyntheticOptions:
    """Of `jaxrag eval synthetic`.

    Attributes:
      models: name -> model directory.
      questions: how many.
      seed: of what is asked.
      reads: of ``scoring.READS``.
      baseline: the model that losses and recoveries refer to; the first one when None.
      answer: so many questions are also answered one at a time through cached KV.
      template: prompt format; None = what each model brings.
      response_start: text before answers.
      dtype: of weights and activations; None = the model's.
    """

    models: Mapping[str, str]
    questions: int = option(4000, "of every model", "N", flag=_NUMBER)
    seed: int = option(7, "of the questions", "N")
    reads: tuple[str, ...] = option(
        ("full", "block", "composite"), "how prompts are read", "NAME,...", flag="--read"
    )
    baseline: str | None = option(
        None, "the model that losses refer to", "NAME", unset="the first one"
    )
    answer: int = option(
        0,
        "also answer the first N questions one at a time from cached chunks",
        "N",
        flag="--generate",
    )
    template: str | None = option(None, "a template's name or .toml file", "NAME", unset=_OWN)
    response_start: str = option(
        "", "text before every answer, as data.response_start of the training", "TEXT", unset="''"
    )
    dtype: str | None = option(
        None, "of weights, activations and KV", choices=DTYPES, unset="as the model is stored"
    )


@dataclasses.dataclass(frozen=True)
class MethodsOptions:
    """Of `jaxrag eval methods`.

    Attributes:
      model: a model directory.
      methods: presets, .toml files or "random"; full attention and full reuse are measured whatever
        is named.
      ratios: of every method that recomputes.
      encoders: each method that encodes chunks behind the prefix is measured with each of these
        instead of its own; none = its own.
      neighbours: how many chunks a chunk is encoded behind, at most.
      questions: how many.
      retrieve: chunks that a question is asked over, found by a search in those of its sample,
        which are a knowledge base of their own; None asks it over all of them.
      seed: of what is asked.
      batch_size: questions that run together.
      template: as ``SyntheticOptions``.
      response_start: as ``SyntheticOptions``.
      dtype: as ``SyntheticOptions``.
    """

    model: str = option(dataclasses.MISSING, "a directory, or ORG/NAME of the hub", "MODEL")
    methods: tuple[str, ...] = option(
        (
            "full_attention", "full_reuse", "turborag", "fusionrag", "cacheblend", "cache_craft",
            "epic", "random",
        ),
        "presets, random or .toml files; full attention and full reuse are measured always",
        "NAME,...",
        unset="these two, turborag, fusionrag, cacheblend, cache_craft, epic, random",
    )  # fmt: skip
    ratios: tuple[float, ...] = option(
        (0.0, 0.05, 0.10, 0.15, 0.30, 1.0),
        "recompute ratios, of methods that recompute",
        "R,...",
        parse=parse_ratios,
        flag="--recompute-ratios",
    )
    encoders: tuple[str, ...] = option(
        ("after_prefix", "neighbours"),
        "measure every method that encodes chunks behind the prefix with each of these; own: as "
        "the method says; repeatable",
        "NAME",
        flag="--encoder",
        repeatable=True,
    )
    neighbours: int = option(10, "of a chunk, at most", "N")  # FusionRAG section 5.3.2
    questions: int = option(500, "of a cell", "N", flag=_NUMBER)
    retrieve: int | None = option(
        None,
        "ask a question over the N of its documents that a search finds; with many: --chunks 48 "
        "--set questions=50 --retrieve 6",
        "N",
        unset="all of them",
    )
    seed: int = option(7, "of the questions", "N")
    batch_size: int = option(32, "questions that run together", "N")
    template: str | None = option(None, "a template's name or .toml file", "NAME", unset=_OWN)
    response_start: str = option(
        "", "text before every answer, as data.response_start of the training", "TEXT", unset="''"
    )
    dtype: str | None = option(
        None, "of weights, activations and KV", choices=DTYPES, unset="as the model is stored"
    )


@dataclasses.dataclass(frozen=True)
class LongOptions:
    """Of `jaxrag eval needle`, `ruler` and `infinitebench`.

    Attributes:
      suite: "needle", "ruler" or "infinitebench".
      model: a model directory.
      lengths: tokens of a prompt, template and lead included, the answer not.
      methods: presets or .toml files; the others are compared with the first one.
      decode: rules of ``reuse.decode``, NAME=RULE to call one so; every method answers under each
        of them; none = as the method says.
      flavour: "plain", or "village" for models that know the words of the synthetic task only.
      split: "test" or "train", the people whom the village flavour asks about.
      answers: names that an answer of RULER's village flavour has.
      filler: text files whose sentences are the haystack of tasks that hide needles in prose.
      questions: of each task, length and depth.
      seed: of the prompts.
      chunk_tokens: the haystack is cut into chunks of at most so many tokens; None = it is one.
      lead: end prompts with the first words of the answer, where the task has some.
      max_new_tokens: of an answer; None = the task's.
      batch_size: questions that run together.
      host_values: K and V, or V alone, are in host memory where a rule is meant to have them so.
      template: None = the model's own.
      dtype: None = the model's own.
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
    template: str | None = option(None, "a template's name or .toml file", "NAME", unset=_OWN)
    dtype: str | None = option(
        None, "of weights, activations and KV", choices=DTYPES, unset="as the model is stored"
    )
