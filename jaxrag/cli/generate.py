"""`jaxrag generate`: a file of questions, one JSON line in, one JSON line out, for clusters."""

import dataclasses
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, get_args

from jaxrag.base.config import ModelOptions
from jaxrag.base.errors import RequestError
from jaxrag.cli.command import SUMMARIES, Args, command, fields, from_fields, value
from jaxrag.cli.opening import asked_of, load, method_of, open_kb
from jaxrag.cli.options import GENERATION, JSON, SECRET, distributed_options, model_options
from jaxrag.cli.output import give
from jaxrag.cli.parts import RayOptions, in_parts
from jaxrag.cli.processes import joined
from jaxrag.library.options import NeighboursFrom

if TYPE_CHECKING:
    from jaxrag.library.documents import Shard
    from jaxrag.serve.batch import BatchReport
    from jaxrag.serve.question_files import QuestionFile
    from jaxrag.serve.questions import Settings

_ABOUT = (
    'A question is {"question": "...", "id": ..., "documents": ["...", ...]}; the last two may be '
    "left out. A killed run goes on where it stopped when it is started again. Exit code 0: "
    "everything is answered; 3: some questions were refused, their lines say why; 1: nothing more "
    "could be done. On several machines or devices, start one process for each with its own "
    "--shard and --out. A model that is too large for one machine lies on the devices of all "
    "processes with --distributed: then all of them take the same arguments and files, and the "
    "first one writes --out and prints."
)


def run(args: Args) -> int:
    """Answer, and print the throughput."""
    if args.ray:
        return _answer_in_parts(args)
    with joined(args) as first:
        return _answer(args, first)


def _answer_in_parts(args: Args) -> int:
    """Answer on a Ray cluster: each part into a file of its own, then all of them into --out."""
    from jaxrag.serve.answer_files import joined_parts
    from jaxrag.serve.batch import all_parts

    if args.distributed or args.shard != "0/1":
        raise RequestError(
            f"--ray {args.ray} deals the questions itself; leave --distributed and --shard out"
        )
    _check(args)
    start = time.perf_counter()
    reports = in_parts(args, answer_part, "answer")
    joined_parts(args.out, [_part_file(args, at, len(reports)) for at in range(len(reports))])
    return _tell(args, all_parts(reports, time.perf_counter() - start))


def answer_part(args: Args) -> "Callable[[Shard], BatchReport]":
    """What a worker of --ray does with a part of the questions; it goes on where one stopped."""
    from jaxrag.serve.batch import answer_file

    questions, settings = _opened(args)

    def work(shard: "Shard") -> "BatchReport":
        out = _part_file(args, shard.index, shard.count)
        return answer_file(questions, out, settings, shard=shard, batch_size=args.batch_size)

    return work


def _part_file(args: Args, part: int, parts: int) -> str:
    return f"{args.out}.{part}-of-{parts}"


def _check(args: Args) -> None:
    """What can be refused before a model is read."""
    method_of(args)
    if args.kb is None and args.model is None:
        raise RequestError(
            "pass --kb DIR, or --model DIR where the questions bring their own documents"
        )


def _opened(args: Args) -> "tuple[QuestionFile, Settings]":
    """The questions, and what answers them; its knowledge base is the caller's to close."""
    from jaxrag.serve.question_files import QuestionFile
    from jaxrag.serve.questions import resolve

    _check(args)
    method = method_of(args)
    questions = QuestionFile.open(args.questions)
    kb = None if args.kb is None else open_kb(args, method)
    try:
        model = load(args.model, from_fields(ModelOptions, args), method) if kb is None else None
        ask = asked_of(args)
        return questions, resolve(ask, kb=kb, model=model, neighbours=args.neighbours)
    except BaseException:
        if kb is not None:
            kb.close()
        raise


def _answer(args: Args, first: bool) -> int:
    from jaxrag.library.documents import Shard
    from jaxrag.serve.answer_files import written_once
    from jaxrag.serve.batch import answer_file

    shard = Shard.parse(args.shard)
    questions, settings = _opened(args)
    try:
        with written_once(args.out, settings.model.exchange, first) as out:
            report = answer_file(
                questions,
                out,
                settings,
                shard=shard,
                batch_size=args.batch_size,
                progress=first and not args.json,
            )
    finally:
        if settings.kb is not None:
            settings.kb.close()
    if not first:
        return 0 if report.complete else 3
    return _tell(args, report)


def _tell(args: Args, report: "BatchReport") -> int:
    """Print what became of the questions; the exit code."""
    for bad in report.refused:
        print(f"refused {bad.id}: {bad.reason}", file=sys.stderr)
    rates = report.rates()
    summary = (
        f"{args.out}: {report.answered} answered, {len(report.refused)} refused, "
        f"{report.earlier} there before, of {report.questions}; {report.seconds:.1f} s\n"
        f"{rates['questions_per_second']:.3g} questions/s, "
        f"{rates['generated_tokens_per_second']:.3g} generated tokens/s, "
        f"{rates['reused_tokens_per_second']:.3g} reused chunk tokens/s"
    )
    give(args, dataclasses.asdict(report) | rates, [summary])
    return 0 if report.complete else 3


COMMAND = command(
    "generate",
    run,
    f"{SUMMARIES['generate']}. {_ABOUT}",
    "jaxrag generate --questions nq.jsonl --kb kb --out "
    "answers.$SLURM_PROCID.jsonl --shard $SLURM_PROCID/$SLURM_NTASKS",
    value("--questions", "FILE", "JSON lines", required=True),
    value("--out", "FILE", "made, or continued", required=True),
    value("--kb", "DIR", "knowledge base to retrieve from"),
    value(
        "--neighbours",
        None,
        "of documents in the questions, for methods that encode chunks behind neighbours: the most "
        "similar of --kb, or the prompt's own others, an oracle (corpus)",
        "corpus",
        choices=get_args(NeighboursFrom),
    ),
    SECRET,
    model_options(kv=True),
    GENERATION,
    value("--batch-size", "N", "questions run together (8)", 8, type=int),
    value("--shard", "I/N", "only lines I, I+N, ... from line 0 (0/1)", "0/1"),
    distributed_options(),
    fields(RayOptions),
    JSON,
    basic="questions out kb model method k where max-new-tokens batch-size shard distributed json",
)
