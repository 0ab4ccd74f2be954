"""`jaxrag kb`: look into a knowledge base and keep it in order."""

import collections
import dataclasses
import operator
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxrag.base.errors import RequestError
from jaxrag.base.options import parse_bytes, parse_seconds
from jaxrag.cli import connector, export, gate, kb_backup, kb_prime, kb_questions
from jaxrag.cli.command import SUMMARIES, Args, argument, command, flag, group, value, values
from jaxrag.cli.opening import open_kb, secret_of, where_of
from jaxrag.cli.options import JSON, KB, SECRET, WHERE, model_options
from jaxrag.cli.output import counted, give, human_count, note, print_json, shorten, table
from jaxrag.models.text.printable import printable

if TYPE_CHECKING:
    from jaxrag.library.catalog import Hit
    from jaxrag.library.catalog.salvage import Salvage
    from jaxrag.library.knowledge_base import KnowledgeBase
    from jaxrag.library.knowledge_base.upkeep import VerifyReport


_TITLE = 30  # columns of it, so that an id of forty has place beside it in 80
_GROUPS = ("stored", "attention_index", "vectors", "last_gc", "gates")  # a line for each number
_SHOWN = {"tokens": "text tokens"}  # those stored count the template's, too


def run_stats(args: Args) -> None:
    """Print what the knowledge base holds and how it was made."""
    with _opened(args) as kb:
        stats = kb.stats(walk=args.walk)
    if args.json:
        print_json(stats)
        return
    rows = []
    for name, stat in stats.items():
        if name in _GROUPS and stat is not None:
            prefix = name.replace("_", " ")
            rows += [
                [f"{prefix} {part.replace('_', ' ')}", _plain(number)]
                for part, number in stat.items()
            ]
        else:
            rows.append([_SHOWN.get(name, name.replace("_", " ")), _plain(stat)])
    room = 80 - 2 - max(len(name) for name, _ in rows)
    wrapped = []
    for name, text in rows:
        lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
        wrapped += [[name if i == 0 else "", line] for i, line in enumerate(lines or [""])]
    print(table(wrapped))


def run_list(args: Args) -> None:
    """Print one line a document, or a JSON object with all that is known of them."""
    with _opened(args) as kb:
        where = where_of(args)
        documents = kb.documents(where)
        for why in [] if documents or where is None else kb.why_nothing(where):
            note(f"--where: {why}")
    if args.json:
        from jaxrag.library.catalog import DocumentEntry

        names = [field.name for field in dataclasses.fields(DocumentEntry)]
        values = operator.attrgetter(*names)
        print_json({"documents": [dict(zip(names, values(d), strict=True)) for d in documents]})
        return
    rows = [["document", "chunks", "title"]]
    rows += [[d.id, str(d.num_chunks), shorten(d.title, _TITLE)] for d in documents]
    print(table(rows, right=(1,)))


def run_show(args: Args) -> None:
    """Print a document as it is stored; RequestError where there is none of that id."""
    from jaxrag.cli.read import document_lines, text_lines

    with _opened(args) as kb:
        hits = kb.chunks_of(args.id)
    if not hits:
        raise RequestError(f"no document {args.id!r}; `jaxrag kb list {args.kb}` shows their ids")
    first, text = hits[0], _whole(hits)
    said = ("start", "end", "page", "section", "text")
    chunks = [{name: getattr(hit, name) for name in said} for hit in hits]
    value = {"id": args.id, "title": first.title, "file": first.file, "metadata": first.metadata,
             "text": text} | ({"chunks": chunks} if args.chunks else {})  # fmt: skip
    lines = list(document_lines(args.id, first.title, first.metadata))
    for hit in hits if args.chunks else ():
        page = "" if hit.page is None else f", page {hit.page}"
        section = f", {hit.section}" * bool(hit.section)
        place = f"-- chunk {hit.chunk_index}, characters {hit.start} to {hit.end}{page}{section}"
        lines += [printable(place), *text_lines(hit.text)]
    give(args, value, lines if args.chunks else [*lines, *text_lines(text)])


def _whole(hits: "Sequence[Hit]") -> str:
    """The text that was cut into these chunks; only white space stood between two."""
    text, end = "", 0
    for hit in hits:
        if text and hit.start > end:
            text += " " if hit.start == end + 1 else "\n\n"
        text += hit.text[max(0, end - hit.start) :]
        end = max(end, hit.end)
    return text


def run_remove(args: Args) -> int:
    """Exit code 0 when every document was there, 3 when some were not."""
    with _opened(args, mode="rw") as kb:
        report = kb.remove(args.ids)
    documents, chunks = counted(report.documents, "document"), counted(report.chunks, "chunk")
    unknown = (f"no document {name!r}" for name in report.unknown)
    give(args, report, [f"removed {documents}, {chunks}", *unknown])
    return 3 if report.unknown else 0


def run_gc(args: Args) -> None:
    """Print what was freed, or with --dry-run would be."""
    with _opened(args, mode="rw") as kb:
        report = kb.gc(
            grace_seconds=args.grace, dry_run=args.dry_run, others=args.others, gone=args.gone
        )
    summary = (
        f"{'would free' if report.dry_run else 'freed'} {counted(report.chunks, 'chunk')}, "
        f"{human_count(report.nbytes)}B, {counted(report.attempts, 'unfinished write')}, "
        f"{counted(report.vectors, 'vector')}"
    )
    give(args, report, [summary])


def run_verify(args: Args) -> int:
    """Exit code 0 when all rows and chunks are whole at the end and nothing is lost, 3 when not.

    With --forgotten 0 when nothing is left of the document, 3 when something is.
    """
    if args.forgotten is not None:
        return _run_forgotten(args)
    from jaxrag.library.knowledge_base.location import mend_catalog, mend_settings
    from jaxrag.library.knowledge_base.settings import find_folder

    if args.reseal and not args.repair:
        raise RequestError("--reseal without --repair: chunks are encoded again; pass both")
    mended = mend_catalog(find_folder(args.kb)) if args.repair else None
    if mended is not None and not args.json:
        for line in _of_salvage(mended):
            print(printable(line))
    settings = mend_settings(find_folder(args.kb)) if args.repair else ()
    if settings and not args.json:
        print(printable(f"settings repaired: {', '.join(name or 'totals' for name in settings)}"))
    if args.accept_older:
        _opened(args, mode="rw", accept_older=True).close()
    if args.reseal:
        _opened(args, mode="rw", reseal=True).close()
    kb = open_kb(args) if args.repair else _opened(args)
    with kb:
        report = kb.verify(
            repair=args.repair, max_bytes_per_second=args.rate, progress=not args.json
        )
        named = [
            f"{what}: {kb.chunk_of(key)} ({key})"
            for what, keys in (
                ("damaged", [it for it in report.damaged if it not in report.unsealed]),
                ("not sealed", report.unsealed),
                ("without its attention index", report.unindexed),
            )
            for key in keys
        ]
    salvaged = None if mended is None else dataclasses.asdict(mended)
    values = dataclasses.asdict(report) | {"catalog": salvaged, "settings": settings}
    lines = [
        f"chunks: {report.ok} whole, {report.repaired} repaired, {len(report.damaged)} damaged"
    ]
    if report.unsealed:
        lines.append(f"{len(report.unsealed)} of the damaged are sound, but not sealed")
    if report.dropped:
        lines.append(f"{report.dropped} not stored, under the size limit or until they are needed")
    give(args, values, map(printable, [*lines, *_about_rows(report), *named]))
    return 0 if report.whole and not (mended is not None and mended.is_loss) else 3


def _run_forgotten(args: Args) -> int:
    from jaxrag.library.knowledge_base.forgotten import look_in
    from jaxrag.library.knowledge_base.settings import find_folder
    from jaxrag.server.state.uploads import upload_of

    if args.repair or args.reseal or args.accept_older or args.rate is not None:
        raise RequestError("--forgotten only looks; leave all other options out")
    folder = find_folder(args.kb)
    report = look_in(folder, args.forgotten)
    upload = upload_of(folder, args.forgotten)
    if upload is not None:
        report = report.with_more(f"the uploaded file {upload}", used=False)
    remains = [
        printable(f"{it.count} {it.what}{'' if it.used else ' (in no answer)'}")
        for it in report.remains
    ]
    nothing = [f"nothing is left of it here; removed {report.removed}"] * report.nothing
    elsewhere = f"not looked at: {'; '.join(report.elsewhere)}"
    values = dataclasses.asdict(report) | {"nothing": report.nothing}
    give(args, values, [*remains, *nothing, elsewhere])
    return 0 if report.nothing else 3


def _of_salvage(salvage: "Salvage") -> list[str]:
    """A line for each thing that is to be said of a catalog that was made whole."""
    pages = f"{counted(salvage.mended, 'page')} mended, {salvage.unreadable} unreadable"
    lines = [f"catalog: {pages}; the damaged file is kept as {salvage.kept}"]
    if salvage.lost:
        lost = f"{counted(len(salvage.lost), 'document')} lost, add again"
        lines.append(f"{lost}: {', '.join(salvage.lost)}")
    if salvage.nameless or salvage.nameless is None:
        lost = "documents" if salvage.nameless is None else counted(salvage.nameless, "document")
        perhaps = "perhaps other " if salvage.nameless is None else ""
        lines.append(f"{perhaps}{lost} lost without a name; add again what `jaxrag kb list` lacks")
    if salvage.settings:
        lines.append(f"{counted(salvage.settings, 'setting')} lost, such as of `jaxrag kb gate`")
    return lines


def _about_rows(report: "VerifyReport") -> list[str]:
    """A line for each thing that is to be said of the catalog and the vectors."""
    rows, lines = report.rows, []
    if rows is not None:
        counts = collections.Counter[str]()
        for fault in rows.faults:
            counts[fault.kind] += fault.count
        shown = ", ".join(counted(count, kind) for kind, count in counts.items())
        what = "repaired" if rows.repaired else "not as written"
        lines.append(f"rows of {counted(rows.documents, 'document')}: {shown or 'all'} "
                     f"{what if shown else 'as written'}")  # fmt: skip
        lines += [
            f"{what}: {fault.kind} {fault.name}"
            for fault in rows.faults
            if fault.name and not rows.repaired
        ]
        if rows.lost:
            fate = "lost, add again" if rows.repaired else "that nothing proves"
            lines.append(f"{counted(len(rows.lost), 'document')} {fate}: {', '.join(rows.lost)}")
        if rows.unnamed:
            lines.append(
                f"{counted(rows.unnamed, 'document')} lost without a name; add again what "
                "`jaxrag kb list` lacks"
            )
        if rows.unchecked:
            lines.append(rows.unchecked)
    if report.vectors_lost:
        lines.append(f"{counted(report.vectors_lost, 'vector')} lost; --repair makes them again")
    return lines


def _opened(args: Args, **options: Any) -> "KnowledgeBase":
    from jaxrag.library.knowledge_base import KnowledgeBase
    from jaxrag.library.knowledge_base.settings import find_folder
    from jaxrag.server.tenants import upload_secret

    secret = secret_of(args.secret_file) or upload_secret(find_folder(args.kb))
    return KnowledgeBase.open(args.kb, secret=secret, **options)


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items())
    if value is None or isinstance(value, bool):
        return "yes" if value else "no" if value is False else "none"
    return human_count(value) if isinstance(value, int) and value >= 10_000 else str(value)


_HEAD = [KB, SECRET, JSON]
COMMAND = group(
    "kb",
    SUMMARIES["kb"],
    "jaxrag kb stats kb",
    command(
        "stats",
        run_stats,
        "counts, sizes and settings",
        "jaxrag kb stats kb --json",
        _HEAD,
        flag(
            "--walk",
            "look at every stored chunk: which have no KV, are damaged, not sealed or not needed",
        ),
    ),
    command("list", run_list, "every document", "jaxrag kb list kb", _HEAD, WHERE),
    command(
        "show",
        run_show,
        "a document's text as it is stored, its metadata, and what was left out of it",
        "jaxrag kb show kb notes.md --chunks",
        _HEAD,
        argument("id", "ID", "as `jaxrag kb list` shows it"),
        flag("--chunks", "chunk by chunk, with their places"),
    ),
    command(
        "remove",
        run_remove,
        "remove documents; they cannot be found any more when this ends",
        "jaxrag kb remove kb notes.md old/report.txt && jaxrag kb gc kb",
        _HEAD,
        argument("ids", "ID", "as `jaxrag kb list` shows them", several=True),
    ),
    command(
        "gc",
        run_gc,
        "free what removed and changed documents and killed runs have left behind",
        "jaxrag kb gc kb --grace 1h --dry-run",
        _HEAD,
        value(
            "--grace",
            "TIME",
            "touch nothing younger, such as 90s, 30m, 1h, 7d (1h)",
            3600.0,
            type=parse_seconds,
        ),
        flag("--dry-run", "only count"),
        values(
            "--others",
            "DIR",
            "folders of knowledge bases in the same repository that have moved",
            greedy=True,
        ),
        values("--gone", "ID", "ids of knowledge bases in it that exist no more", greedy=True),
    ),
    command(
        "verify",
        run_verify,
        "check every row of the catalog and the KV of every chunk, or that a document is forgotten",
        "jaxrag kb verify kb --repair --rate 200MB",
        _HEAD,
        flag(
            "--repair",
            "mend rows, drop what nothing proves, encode damaged and missing chunks again, "
            "and make vectors that are missing",
        ),
        value("--rate", "SIZE", "read at most so much a second", type=parse_bytes),
        flag(
            "--reseal",
            "with --repair: take this secret, or none, in place of the one that it was "
            "sealed with; what that sealed is encoded again",
        ),
        flag(
            "--accept-older",
            "take a catalog that its store knows for an older copy, as from a backup, as "
            "it is from now on",
        ),
        value(
            "--forgotten",
            "ID",
            "instead: list what is left of this document, which was removed or replaced",
        ),
        model_options(use="for --repair"),
        basic="repair rate reseal accept-older forgotten model secret-file json",
    ),
    kb_backup.BACKUP,
    kb_backup.RESTORE,
    gate.COMMAND,
    kb_prime.COMMAND,
    kb_questions.COMMAND,
    export.COMMAND,
    connector.COMMAND,
)
