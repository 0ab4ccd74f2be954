"""`jaxrag ask`: a question to a knowledge base, or to documents given on the spot."""

import contextlib
import dataclasses
import statistics
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxrag.base.config import ModelOptions
from jaxrag.base.errors import ConfigError, DocumentError, RequestError
from jaxrag.cli.account import explained, sources, summary, times_sooner
from jaxrag.cli.command import SUMMARIES, Args, argument, command, flag, from_fields, value, values
from jaxrag.cli.opening import asked_of, few_collections, load, method_of, open_kb
from jaxrag.cli.options import GENERATION, JSON, SECRET, model_options
from jaxrag.cli.output import note, print_json
from jaxrag.cli.waiting import untold
from jaxrag.models.text.printable import printable

if TYPE_CHECKING:
    from jaxrag.library.documents import Document
    from jaxrag.serve.answers import Result


_TIMED = 3  # rounds of the comparison, after one that compiles


def run(args: Args) -> int:
    """Print the answer as it grows; on stderr its sources and its account. Or one JSON object."""
    with few_collections():
        return _ask(args)


def _ask(args: Args) -> int:
    from jaxrag.serve.answers import Result
    from jaxrag.serve.generate import generate

    method = method_of(args)  # refused before a model is read
    documents = _read(args.documents) if args.documents else None
    options: dict[str, Any] = {
        **vars(asked_of(args)),
        "documents": None if documents is None else [document.text for document in documents],
    }
    if args.kb is None:
        if args.model is None or not args.documents:
            raise RequestError("pass --kb DIR, or --documents FILE... and --model DIR")
        options["model"] = load(args.model, from_fields(ModelOptions, args), method)
    else:
        options["kb"] = open_kb(args, method)
    try:
        if args.json and not args.show_prompt:
            print_json(_named(generate(args.question, **options), documents).to_dict())
            return 0
        answer = generate(args.question, stream=True, **options)
        if args.json:
            prompt = answer.prompt
            list(answer)  # to its end
            assert isinstance(answer.result, Result)
            print_json(_named(answer.result, documents).to_dict() | {"prompt": prompt})
            return 0
        if args.show_prompt:
            for part in answer.prompt:
                text = printable(part["text"], keep="\n\t")
                _tell(f"--- {printable(part['part'])}, {part['tokens']} tokens\n{text}")
            _tell("--- answer")
        _write(next(answer, ""))
        with untold():
            for piece in answer:
                _write(piece)
        print(flush=True)
        assert isinstance(answer.result, Result)
        _account(args, _named(answer.result, documents))
        if args.explain and answer.result.counts["reused"]:
            _compare(args.question, options)
    finally:
        if "kb" in options:
            options["kb"].close()
    return 0


def _read(paths: Sequence[str]) -> "list[Document]":
    """What is in files, as ``jaxrag ingest`` reads them; here a bad one ends the command."""
    from jaxrag.library.documents import BadDocument, read_paths

    documents = []
    for document in read_paths(paths):
        if isinstance(document, BadDocument):
            raise DocumentError(f"{document.source}: {document.reason}")
        documents.append(document)
    return documents


def _named(result: "Result", documents: "Sequence[Document] | None") -> "Result":
    """The result with the files that the documents came from, where they were given."""
    if documents is None:
        return result
    files = {f"documents[{i}]": document.file for i, document in enumerate(documents)}
    return dataclasses.replace(
        result,
        sources=[
            dataclasses.replace(source, file=files[source.document_id]) for source in result.sources
        ],
    )


def _account(args: Args, result: "Result") -> None:
    lines = list(sources(result, bool(args.documents)))
    _tell("".join(f"\n{line}" for line in lines) + "\n" * bool(lines))
    _tell(summary(result, args.max_new_tokens))
    for line in explained(result, sys.stderr.encoding) if args.explain else ():
        _tell(line)
    for remark in result.notes:
        note(remark)


def _compare(question: str, options: dict[str, Any]) -> None:
    """How much sooner the first token comes than with full attention, both asked before."""
    from jaxrag.serve.generate import generate

    reading = ("method", "recompute_ratio", "misses", "prefix_cache", "decode")
    plain = {name: value for name, value in options.items() if name not in reading}
    ways = (options, plain | {"method": "full_attention"})
    with contextlib.suppress(ConfigError, RequestError):  # full attention may be refused
        asked = [
            [generate(question, **way | {"max_new_tokens": 1}) for _ in range(1 + _TIMED)]
            for way in ways
        ]
        warm = [statistics.median(it.timings["ttft"] for it in rest) for _, *rest in asked]
        _tell(times_sooner(*warm))


def _write(piece: str) -> None:
    sys.stdout.write(printable(piece, keep="\n\t"))
    sys.stdout.flush()


def _tell(text: str) -> None:
    """Beside the answer, which a pipe gets alone."""
    print(text, file=sys.stderr, flush=True)


COMMAND = command(
    "ask",
    run,
    SUMMARIES["ask"],
    'jaxrag ask "Who built the bridge?" --kb kb --method cacheblend --recompute-ratio 0.15',
    argument("question", "QUESTION", "the question, as text"),
    value("--kb", "DIR", "knowledge base to retrieve from"),
    SECRET,
    values("--documents", "FILE", "use these texts as the chunks instead", greedy=True),
    model_options(kv=True),
    GENERATION,
    flag(
        "--explain",
        "what was reused, recomputed and encoded, and why, with the times of the phases",
    ),
    flag("--show-prompt", "the prompt too, part by part, as the model reads it"),
    JSON,
    basic="kb documents model method recompute-ratio decode k where max-new-tokens "
    "explain show-prompt json",
)
