"""`jaxrag ask`: a question to a knowledge base, or to documents given on the spot."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrag.cli.options import (
    add_command,
    add_generation,
    add_json,
    add_model,
    add_secret,
    human_count,
    load,
    method_of,
    open_kb,
    print_json,
    sampling_of,
    shorten,
    table,
    where_of,
)
from jaxrag.errors import DocumentError, RequestError
from jaxrag.text.printable import printable

if TYPE_CHECKING:
    from jaxrag.documents import Document
    from jaxrag.serve.answers import Result


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = add_command(
        commands,
        "ask",
        "answer a question from cached chunks",
        'jaxrag ask "Who built the bridge?" --kb kb --method cacheblend --recompute-ratio 0.15',
    )
    parser.add_argument("question", help="the question, as text")
    parser.add_argument("--kb", metavar="DIR", help="knowledge base to retrieve from")
    add_secret(parser)
    parser.add_argument(
        "--documents", nargs="+", metavar="FILE", help="use these texts as the chunks instead"
    )
    add_model(parser, required=False, text="(the one that the knowledge base remembers)")
    add_generation(parser)
    parser.add_argument(
        "--show-prompt",
        action="store_true",
        help="print the prompt too, part by part, as the model reads it",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the answer as it grows, then its sources and its account; or one JSON object."""
    from jaxrag.serve.answers import Result
    from jaxrag.serve.generate import generate

    method = method_of(args)  # refused before a model is read
    documents = None if args.documents is None else _read(args.documents)
    options: dict[str, Any] = {
        "documents": None if documents is None else [document.text for document in documents],
        "method": args.method,
        "recompute_ratio": args.recompute_ratio,
        "misses": args.misses,
        "prefix_cache": args.prefix_cache or None,
        "decode": args.decode,
        "template": args.template,
        "k": args.k,
        "where": where_of(args),
        "max_new_tokens": args.max_new_tokens,
        "sampling": sampling_of(args),
        "stop": args.stop,
    }
    if args.kb is None:
        if args.model is None or args.documents is None:
            raise RequestError("pass --kb DIR, or --documents FILE... and --model DIR")
        options["model"] = load(args, args.model, args.dtype, method)
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
                print(f"--- {printable(part['part'])}, {part['tokens']} tokens\n{text}")
            print("--- answer")
        for piece in answer:
            sys.stdout.write(printable(piece, keep="\n\t"))
            sys.stdout.flush()
        print()
        assert isinstance(answer.result, Result)
        _print_account(_named(answer.result, documents), documents is not None)
    finally:
        if "kb" in options:
            options["kb"].close()
    return 0


def _read(paths: Sequence[str]) -> "list[Document]":
    """What is in files, as ``jaxrag ingest`` reads them; here a bad one ends the command."""
    from jaxrag.documents import BadDocument, read_paths

    documents = []
    for found in read_paths(paths):
        if isinstance(found, BadDocument):
            raise DocumentError(f"{found.source}: {found.reason}")
        documents.append(found)
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


def _print_account(result: "Result", given: bool) -> None:
    if result.sources:
        rows = [["source", "score", "text"]]
        for source in result.sources:
            score = "" if source.score is None else f"{source.score:.2f}"
            name = f"{source.document_id} #{source.chunk_index}"
            if given and source.file is not None:
                name = Path(source.file).name
            rows.append([shorten(name, 40), score, shorten(source.text, 60)])
        print("\n" + table(rows, right=(1,)))
    times = "  ".join(f"{name} {1000 * value:.1f} ms" for name, value in result.timings.items())
    counts = "  ".join(f"{name} {value}" for name, value in result.counts.items())
    print(f"\n{result.method}: {result.finish_reason}; {times}")
    print(f"chunk tokens: {counts}; {human_count(result.flops)}FLOP to the first token")
    if result.reuse:
        print(f"reuse: {printable(_reuse_line(result.reuse))}")
    if result.indexes:
        print("indexes: " + "  ".join(f"{name} {n}" for name, n in result.indexes.items()))
    for note in result.notes:
        print(f"note: {printable(note)}")


def _reuse_line(rows: Sequence[Any]) -> str:
    """Parts by how they came, such as "prefix hit: prefix; in place: chunk 0 (not in kb/kv)"."""
    groups: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        again = f" ({row.recomputed} recomputed)" if row.recomputed else ""
        groups.setdefault((row.how, row.why), []).append(row.part + again)
    return "; ".join(
        f"{how}: {', '.join(parts)}" + (f" ({why})" if why else "")
        for (how, why), parts in groups.items()
    )
