"""`jaxrag ingest`: documents into a knowledge base."""

import contextlib
import dataclasses
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrag.base.config import ModelOptions
from jaxrag.base.errors import KnowledgeBaseError, RequestError, StoreError
from jaxrag.base.options import parse_bytes
from jaxrag.cli.command import (
    SUMMARIES,
    Args,
    argument,
    command,
    fields,
    flag,
    from_fields,
    given_fields,
    value,
)
from jaxrag.cli.opening import load, model_of_kb, secret_of
from jaxrag.cli.options import JSON, SECRET, model_options
from jaxrag.cli.output import counted, human_count, note, print_json
from jaxrag.cli.parts import RayOptions, in_parts
from jaxrag.library.options import FORMATS, KnowledgeBaseOptions
from jaxrag.models.text.printable import printable
from jaxrag.models.text.progress import announce

if TYPE_CHECKING:
    from jaxrag.library.documents import DocumentFiles, Shard
    from jaxrag.library.knowledge_base import KnowledgeBase
    from jaxrag.library.knowledge_base.ingest import EncodeWhen
    from jaxrag.library.knowledge_base.reports import AddPlan, AddReport
    from jaxrag.models.model import Model


_LEFT_OUT = 20  # lines that are shown


def run(args: Args) -> int:
    """Exit code 0 when everything was ingested, 3 when documents were left out."""
    from jaxrag.library.documents import Shard

    shard = Shard() if args.shard is None else Shard.parse(args.shard)
    if args.sync_empty and not args.sync:
        raise RequestError("--sync-empty is about --sync; pass --sync with it")
    files = files_of(args)
    if args.dry_run:
        return _dry_run(args, files)
    if args.ray:
        if args.sync or args.shard is not None:
            raise RequestError(
                f"--ray {args.ray} deals the documents itself, and only adds; leave --shard out, "
                "and run --sync without it"
            )
        start = time.perf_counter()
        reports = in_parts(args, ingest_part, "ingest")
        report = merged(reports, time.perf_counter() - start)
    else:
        report = ingest(args, model_for(args), files, shard, not args.json)
    print_report(report, args.json, args.sync)
    return 3 if report.skipped else 0


def ingest_part(args: Args) -> "Callable[[Shard], AddReport]":
    """What a worker of --ray does with a part of the documents."""
    model = model_for(args)
    return lambda shard: ingest(args, model, files_of(args), shard, progress=False)


def merged(reports: "Sequence[AddReport]", seconds: float) -> "AddReport":
    """One report of several parts: counts are added, ``seconds`` is the whole run's."""
    from jaxrag.library.knowledge_base.ingest import UNKNOWN_EXAMPLES

    own = ("skipped", "seconds", "unknown_words", "neighbours", "removed", "gone", "left_out")
    names = [f.name for f in dataclasses.fields(reports[0]) if f.name not in own]
    unknown = dict.fromkeys(word for report in reports for word in report.unknown_words)
    return dataclasses.replace(
        reports[0],
        **{name: sum(getattr(report, name) for report in reports) for name in names},
        skipped=tuple(itertools.chain.from_iterable(report.skipped for report in reports)),
        left_out=tuple(itertools.chain.from_iterable(report.left_out for report in reports)),
        seconds=seconds,
        unknown_words=tuple(unknown)[:UNKNOWN_EXAMPLES],
    )


def _dry_run(args: Args, files: "DocumentFiles") -> int:
    """Say what would be encoded, and what --sync would remove."""
    from jaxrag.library.knowledge_base.upkeep import Gone

    with _to_look_at(args, model_for(args)) as kb:
        gone = kb.gone(files, empty=args.sync_empty) if args.sync else Gone()
        plan = _as_placed(args, kb.plan(files_of(args), removed=gone.ids))
        size = _size_of(kb, plan)
    if args.json:
        left = {"removed": gone.ids, "gone": gone.doubtful, "kept": gone.kept}
        print_json({**dataclasses.asdict(plan), **left})
        return 0
    for name in gone.ids:
        print(f"would remove {printable(name)}")
    new = plan.documents - plan.replaced - plan.unchanged
    print(
        f"would add {counted(new, 'document')} and replace {plan.replaced} ({plan.unchanged} "
        f"unchanged), and encode {plan.encoded} of {counted(plan.chunks, 'chunk')}"
    )
    if plan.kv_bytes:
        print(f"would write {size}")
    if plan.behind is not None:
        print(f"would encode at most {counted(plan.behind, 'chunk')} behind other neighbours")
    if args.sync:
        print(f"would remove {counted(len(gone.ids), 'document')}")
    print("nothing was changed")
    for bad in plan.skipped:
        print(f"would skip {bad.source}: {bad.reason}", file=sys.stderr)
    _print_left(gone.doubtful, gone.kept, sync=True)
    return 0


@contextlib.contextmanager
def _to_look_at(args: Args, model: "Model") -> "Iterator[KnowledgeBase]":
    """The knowledge base, for reading; where there is none yet, one like it that does not stay."""
    from jaxrag.library.knowledge_base import KnowledgeBase
    from jaxrag.library.knowledge_base.settings import find_folder

    find_folder(args.kb)  # refused here, as a folder that is thrown away would not be
    options = _settings(args) | {"model": model, "secret": secret_of(args.secret_file)}
    if _is_kb(args.kb):
        with KnowledgeBase.open(args.kb, mode="r", **options) as kb:
            yield kb
        return
    with (
        tempfile.TemporaryDirectory(prefix="jaxrag-") as folder,
        KnowledgeBase.open(folder, **options | {"store": None}) as kb,
    ):
        yield kb


def _as_placed(args: Args, plan: "AddPlan") -> "AddPlan":
    """The plan with the room there is where a new knowledge base would be."""
    from jaxrag.library.knowledge_base.location import room_of

    return (
        plan if _is_kb(args.kb) else dataclasses.replace(plan, room=room_of(args.store or args.kb))
    )


def _size_of(kb: "KnowledgeBase", plan: "AddPlan") -> str:
    """What a plan would write, in words."""
    each = plan.kv_bytes / max(plan.kv_tokens, 1)
    return (
        f"about {human_count(plan.kv_bytes)}B of KV: {plan.kv_tokens:,} tokens of "
        f"{each / 1024:.1f} KiB as {kb.store.layout.stored}"
    )


def _smaller(kb: "KnowledgeBase", plan: "AddPlan") -> dict[str, float]:
    """About how many bytes the KV would take in each form that takes fewer."""
    layout, tokens = kb.store.layout, kb.chunking.chunk_tokens
    if kb.engine != "jax" or layout.rows:  # which has types of its own
        return {}
    own = layout.stored_nbytes(tokens)
    others = {form: dataclasses.replace(layout, stored=form) for form in FORMATS}  # type: ignore[arg-type]
    sizes = {form: other.stored_nbytes(tokens) for form, other in others.items()}
    return {form: plan.kv_bytes * size / own for form, size in sizes.items() if size < own}


def _announce(args: Args, kb: "KnowledgeBase", new: bool) -> None:
    """Say how much KV will be written, before any of it is; refuse what the disk does not hold.

    Raises StoreError where the disk has less room.
    """
    from jaxrag.kv.store import ChunkStore

    plan = kb.plan(files_of(args), search=False, progress=not args.json)
    plan = _as_placed(args, plan)
    limit = kb.store.max_bytes if isinstance(kb.store, ChunkStore) else None
    needed = min(plan.kv_bytes, limit) if limit else plan.kv_bytes
    smaller = _smaller(kb, plan) if new else {}
    if plan.room is not None and needed > plan.room:
        forms = [f"--stored {form} ({human_count(size)}B)" for form, size in smaller.items()]
        raise StoreError(
            f"{args.kb}: {_size_of(kb, plan)}, and the disk has {human_count(plan.room)}B free; "
            f"free some, or ingest with {', '.join([*forms, '--max-bytes'])} or --encode on-demand"
        )
    if not plan.kv_bytes or args.json:
        return
    hint = ""
    if "int8" in smaller:
        hint = f"; --stored int8 would take {human_count(smaller['int8'])}B"
    announce(_size_of(kb, plan) + hint)


def _settings(args: Args) -> dict[str, Any]:
    """What was given of the settings of a knowledge base; --like says how chunks are cut."""
    return given_fields(KnowledgeBaseOptions, args) | (
        {} if args.like is None else {"chunk_by": args.like}
    )


def model_for(args: Args) -> "Model":
    """The model of --model, else the one that an existing knowledge base remembers."""
    if args.model is not None:
        return load(args.model, from_fields(ModelOptions, args))
    if not _is_kb(args.kb):
        raise KnowledgeBaseError(f"{args.kb} is no knowledge base yet; pass --model DIR to make it")
    return model_of_kb(args)


def _is_kb(folder: str) -> bool:
    from jaxrag.library.knowledge_base.location import CATALOG

    return (Path(folder) / CATALOG).is_file()


def _tell_default(model: "Model") -> None:
    """Which KV a new knowledge base gets and what asks it, where that follows from the model."""
    from jaxrag.reuse.methods import default_choice

    chosen = default_choice(model.config, model.reading)
    if chosen.method.recomputes or chosen.method.sees_primer:
        note(
            "nothing says that this model was trained to read chunks apart, so they get "
            f"{' and '.join(chosen.encoders)} KV, and `jaxrag ask` takes {chosen.method.name}"
        )


def files_of(args: Args) -> "DocumentFiles":
    """The documents of the paths; DocumentError for one that does not exist."""
    from jaxrag.library.documents import read_paths

    return read_paths(
        args.paths,
        encoding=args.encoding,
        text_field=args.text_field,
        follow_links=args.follow_links,
        parse_seconds=args.parse_seconds,
        parse_bytes=args.parse_bytes,
        missing_ok=args.sync_empty,
    )


def ingest(
    args: Args,
    model: "Model",
    files: "DocumentFiles",
    shard: "Shard",
    progress: bool,
) -> "AddReport":
    """Ingest one part of the documents into the knowledge base that the arguments describe."""
    from jaxrag.library.knowledge_base import KnowledgeBase

    if args.sync and shard.count > 1:
        raise RequestError(
            f"--sync needs all documents, and part {shard} has some; run it once without parts"
        )
    options = _settings(args)
    new = not _is_kb(args.kb)
    default = progress and "encoders" not in options and new
    secret = secret_of(args.secret_file)
    # A part of several cannot know what the others write, and a run in workers has no one report.
    foreseen = args.encode == "now" and not args.ray and shard.count == 1
    if foreseen and new:  # refused before it is made
        with _to_look_at(args, model) as kb:
            _announce(args, kb, new)
    with KnowledgeBase.open(args.kb, model=model, secret=secret, **options) as kb:
        if default:
            _tell_default(model)
        if foreseen and not new:
            _announce(args, kb, new)
        encode: EncodeWhen = "on demand" if args.encode == "on-demand" else "now"
        if args.sync:
            report = kb.sync(files, empty=args.sync_empty, progress=progress, encode=encode)
        else:
            part = (shard.index, shard.count)
            report = kb.add(files, progress=progress, shard=part, encode=encode)
        return report


def print_report(report: "AddReport", as_json: bool, sync: bool = False) -> None:
    """What was left out on stderr, the rest on stdout."""
    for bad in report.skipped:
        print(f"skipped {bad.source}: {bad.reason}", file=sys.stderr)
    for line in report.left_out[:_LEFT_OUT]:
        print(printable(f"left out of {line}"), file=sys.stderr)
    if more := report.left_out[_LEFT_OUT:]:
        print(f"left out of documents: {len(more)} lines more, see --json", file=sys.stderr)
    if report.unknown_tokens:
        print(
            f"warning: the model's vocabulary lacks {human_count(report.unknown_tokens)} of "
            f"{human_count(report.tokens)} tokens, such as "
            f"{', '.join(map(repr, report.unknown_words))}; it reads them all as one unknown word",
            file=sys.stderr,
        )
    if as_json:
        rates = {
            "tokens_per_second": report.tokens_per_second,
            "chunks_per_second": report.chunks_per_second,
        }
        print_json({**dataclasses.asdict(report), **rates})
        return
    encoded = _with_bytes(counted(report.encoded, "chunk"), report.kv_bytes)
    rate, tokens_rate = map(human_count, (report.chunks_per_second, report.tokens_per_second))
    speed = f", {rate} chunks/s, {tokens_rate} tokens/s" if report.encoded else ""
    print(
        f"{counted(report.documents, 'document')} ({report.unchanged} unchanged, {report.replaced} "
        f"replaced), {counted(report.chunks, 'chunk')}, {human_count(report.tokens)} tokens\n"
        f"encoded {encoded}, reused {report.reused}; {report.seconds:.1f} s{speed}"
    )
    if report.on_demand:
        print(f"encoded when they are needed first: {counted(report.on_demand, 'chunk')}")
    if report.unsealed:
        chunks = counted(report.unsealed, "chunk")
        print(f"encoded again, as the store holds them not sealed: {chunks}")
    if report.neighbours is not None:
        near, rate = report.neighbours, human_count(report.neighbours.chunks_per_minute)
        print(
            f"behind their neighbours: searched those of {near.searched} chunks; encoded "
            f"{_with_bytes(str(near.encoded), near.kv_bytes)}, reused {near.reused}, "
            f"unchanged {near.unchanged}; {near.seconds:.1f} s, {rate} chunks/min"
        )
    if report.removed:
        print(f"removed {counted(len(report.removed), 'document')}: no longer in the files")
    _print_left(report.gone, report.kept, sync)
    if report.passed:
        print(f"passed over {counted(report.passed, 'file')} without text, such as pictures")
    if report.skipped:
        print(f"left out {len(report.skipped)}; see above")


def _with_bytes(encoded: str, kv_bytes: int) -> str:
    return f"{encoded} ({human_count(kv_bytes)}B)" if kv_bytes else encoded


def _print_left(gone: Sequence[str], kept: int, sync: bool) -> None:
    """What stays though it was not read."""
    if gone and sync:
        print(
            f"kept {counted(len(gone), 'document')} of missing paths and empty folders: "
            "--sync-empty removes what is no longer there"
        )
    elif gone:
        print(f"{counted(len(gone), 'document')} no longer in the files: --sync removes them")
    if kept:
        print(f"kept {counted(kept, 'document')} of files that were not read to their end")


READING = [
    value("--encoding", "NAME", "of text files without a byte order mark, such as gb18030 (utf-8)"),
    value(
        "--text-field",
        "NAME",
        "key or column that holds the text of a record (text; in tables also content or body)",
    ),
    flag(
        "--follow-links",
        "read what links in a folder name outside of it, and linked folders (reported only)",
    ),
    value(
        "--parse-seconds",
        "S",
        "that a file may take to parse, but for text, tables and JSON lines, else it "
        "is left out (60)",
        60.0,
        type=float,
    ),
    value("--parse-bytes", "SIZE", "of memory that it may take (4GiB)", 4 << 30, type=parse_bytes),
]
PARAMETERS = [
    argument(
        "paths",
        "PATH",
        "a folder, or a file: .txt .md .rst .org .html .pdf .epub .docx .pptx .xlsx "
        ".ipynb .eml (one document each), .jsonl .json .csv .tsv (one an object or "
        "row); pictures, sound, archives and programs in a folder are passed over, and "
        "any other file that cannot be read makes the exit code 3",
        several=True,
    ),
    value("--kb", "DIR", "made when missing", required=True),
    *model_options("the one that --kb remembers"),
    *fields(KnowledgeBaseOptions),
    value(
        "--like",
        "STACK",
        "cut as a stack does that pastes passages into chats, and keep KV as such "
        "chats have it, for a server with --plain: langchain:1000:200 (size and "
        "overlap), open-webui, anythingllm, haystack, llamaindex",
    ),
    SECRET,
    *READING,
    value(
        "--shard",
        "I/N",
        "only the documents that fall to part I of N by their id, so that N processes "
        "share the work; a last run without it encodes what sees neighbours (0/1)",
    ),
    value(
        "--encode",
        None,
        "on-demand: only make the documents findable; the KV of a chunk is encoded by "
        "the first question that needs it, once for all who share the repository (now)",
        "now",
        choices=("now", "on-demand"),
    ),
    flag("--sync", "then remove the documents whose files or rows below the paths are gone"),
    flag(
        "--sync-empty",
        "with --sync also those of paths that are missing and of folders that are "
        "empty, as a disk is that is not mounted",
    ),
    flag(
        "--dry-run",
        "say how much would be encoded, with --sync also what would be removed, and change nothing",
    ),
    *fields(RayOptions),
    JSON,
]
BASIC = "kb model encoder template chunk-tokens overlap chunk-by stored embedder sync dry-run json"
COMMAND = command(
    "ingest",
    run,
    SUMMARIES["ingest"],
    "jaxrag ingest docs/ notes.jsonl --kb kb --model models/llama",
    PARAMETERS,
    basic=BASIC,
)
