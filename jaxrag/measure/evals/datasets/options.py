"""What `jaxrag eval dataset` asks: its settings, which the command line fills, and their checks."""

import dataclasses
from typing import get_args

from jaxrag.base.errors import RequestError
from jaxrag.base.options import option, parse_count, parse_ratios
from jaxrag.library.options import NeighboursFrom
from jaxrag.measure.evals.options import check_positive, option_controls, option_ratios
from jaxrag.reuse.names import DEFAULT_PRIMER

DATASET_NAMES = (  # keys of datasets.table
    "rgb_en", "rgb_zh", "nq_open", "musique", "cacheblend_musique", "hotpotqa", "2wikimultihopqa",
    "longbench_narrativeqa", "longbench_qasper", "longbench_multifieldqa_en",
    "longbench_multifieldqa_zh", "longbench_hotpotqa", "longbench_2wikimqa", "longbench_musique",
    "longbench_passage_count", "longbench_passage_retrieval_en", "longbench_passage_retrieval_zh",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DatasetOptions:
    """Of `jaxrag eval dataset`.

    Attributes:
      name: of the data set.
      model: a directory, or a name of the hub; with ``kb`` what the knowledge base remembers.
      out: where the result is to go; finished items are kept beside it.
      template: of the prompt; None: the data set's own.
    """

    name: str
    data: tuple[str, ...] = option(
        (), "the data set's own file; repeatable", "FILE", repeatable=True
    )
    methods: tuple[str, ...] = option(
        ("full_attention", "turborag"),
        "a preset or .toml file; all answer the same prompts, and are compared with the first; "
        "repeatable",
        "NAME",
        flag="--method",
        repeatable=True,
    )
    ratios: tuple[float, ...] = option_ratios()
    controls: bool = option_controls()
    number: int | None = option(
        None, "first questions of the file", "N", flag="--num", unset="all of them"
    )
    shard: str = option("0/1", "part i of n of the questions, from 0", "I/N")
    finished: tuple[str, ...] = option(
        (), "questions that were finished elsewhere, such as a shard's; repeatable", "FILE",
        repeatable=True,
    )  # fmt: skip
    metrics: tuple[str, ...] = option(
        (), "score answers by this; repeatable", "NAME", unset="the data set's own",
        flag="--metric", repeatable=True,
    )  # fmt: skip
    noise: tuple[float, ...] = option(
        (), "of RGB: shares of documents without the answer", "R,...", parse=parse_ratios,
        unset="0,0.2,0.4,0.6,0.8,1",
    )  # fmt: skip
    documents: int | None = option(
        None, "of NQ-open's oracle file: so many to a question, others' gold passages", "N",
        unset="those of the file", flag="--passages",
    )  # fmt: skip
    earlier: int = option(0, "of such passages: so many are asked about, and answered, before", "N")
    seed: int = option(7, "of these", "N")
    neighbours: NeighboursFrom = option(
        "corpus",
        "of methods that encode passages behind their neighbours: the most similar passages of the "
        "whole file, or the prompt's own others, an oracle",
    )
    answer_tokens: int = option(16, "of full attention's answer that are compared", "N")
    max_new_tokens: int | None = option(
        None, "of an answer", "N", parse=parse_count, unset="the benchmark's"
    )
    chat: bool = option(False, "put the prompt into one user message of the model's chat template")
    scores: bool = option(True, "report time and reuse alone, as of random weights")
    model: str | None = None
    kb: str | None = None
    out: str | None = None
    template: str | None = None

    def __post_init__(self) -> None:
        if not self.data:
            raise RequestError(f"{self.name}: no file; name it with --data FILE")
        if not self.methods or len(set(self.methods)) < len(self.methods):
            raise RequestError(
                f"--method {', '.join(self.methods)}: name at least one, and each once"
            )
        check_positive(self, "number", "documents", "max_new_tokens", "answer_tokens")
        passages = (self.documents or 0) if self.name == "nq_open" else 0
        if self.earlier and not 0 < self.earlier < passages:
            raise RequestError(f"--earlier {self.earlier}: of nq_open, fewer than its --passages N")
        if self.neighbours not in get_args(NeighboursFrom):
            raise RequestError(
                f"--neighbours {self.neighbours}: expected one of "
                f"{', '.join(get_args(NeighboursFrom))}"
            )
        if self.model is None and self.kb is None:
            raise RequestError("nothing to ask: give --model DIR or --kb DIR")


@dataclasses.dataclass(frozen=True)
class NearOptions(DatasetOptions):
    """Of `jaxrag eval near`."""

    methods: tuple[str, ...] = option(
        ("full_reuse", "cacheblend", "primed", "primed_fusion"),
        "a preset or .toml file that reads stored KV; the others are compared with the first; "
        "repeatable",
        "NAME",
        flag="--method",
        repeatable=True,
    )
    encoders: tuple[str, ...] = option(
        (), "measure every method that encodes chunks behind the prefix with each of these; "
        "repeatable", "NAME", unset="the method's own", flag="--encoder", repeatable=True,
    )  # fmt: skip
    primers: tuple[str, ...] = option(
        (DEFAULT_PRIMER,),
        "measure every method that reads chunks behind a primer with each of these; repeatable",
        "NAME",
        flag="--primer",
        repeatable=True,
    )
    template: str | None = option(
        None, "of the prompt, as a knowledge base has it; or a .toml file", "NAME",
        unset="the data set's own",
    )  # fmt: skip
    reference: str | None = option(
        None, "weights whose full attention all is compared with, as those that adapters were "
        "trained for", "MODEL", unset="the model's own",
    )  # fmt: skip
    chunk_tokens: int = option(256, "of a passage, the first of it", "N", parse=parse_count)
    metric: str = option("subspan", "whether an answer of as many tokens is right", "NAME")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "chunk_tokens")
