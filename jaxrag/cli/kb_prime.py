"""`jaxrag kb prime`: which primer the chunks of a knowledge base are best encoded behind."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxrag.cli.command import Args, command, fields, from_fields, value
from jaxrag.cli.opening import open_kb, secret_of, where_of
from jaxrag.cli.options import FOUND, JSON, KB, SECRET, model_options
from jaxrag.cli.output import counted, give, human_count, table
from jaxrag.measure.evals.options import PrimeOptions

if TYPE_CHECKING:
    from jaxrag.measure.evals.primers import PrimeReport


# How chunks that won without a primer are asked as they were measured.
_ASKED = {"after_prefix": "full_reuse", "neighbours": "fusionrag --recompute-ratio 0"}


def run(args: Args) -> int:
    """Exit code 0 when chunks are encoded behind the chosen primer from now on, 3 when not."""
    from jaxrag.library.knowledge_base import KnowledgeBase
    from jaxrag.measure.evals.primers import prime, primers_of
    from jaxrag.serve.question_files import QuestionFile

    questions = QuestionFile.open(args.questions)
    options = from_fields(PrimeOptions, args, k=args.k, where=where_of(args))
    # Refused before a model is read.
    with KnowledgeBase.open(args.kb, mode="rw", secret=secret_of(args.secret_file)) as kb:
        primers_of(kb, options.primers)
    with open_kb(args) as kb:
        report = prime(kb, questions, options, progress=not args.json)
    give(args, report, _lines(report, args.kb))
    return 0 if report.taken else 3


def _lines(report: "PrimeReport", folder: str) -> Iterator[str]:
    from jaxrag.measure.table import percent

    yield (
        f"chunks against full attention: {report.questions} questions, {report.answer_tokens} "
        "answer tokens; 95 % intervals, primers in tokens"
    )
    rows = [["behind", "KL", "same token, %", "primer", "variants", "B/token"]]
    for one in report.candidates:
        kl = "{value:.4f} [{low:.4f}, {high:.4f}]".format_map(one.kl)
        costs = (str(one.primer_tokens), str(one.variants), human_count(one.bytes_per_token))
        rows.append([one.name, kl, percent(one.same_tokens), *costs])
    yield table(rows, range(1, len(rows[0])))
    yield from (f"left out: {name}: {why}" for name, why in report.left_out.items())
    if report.chosen != report.least:
        yield f"{report.chosen} costs less than {report.least}, and is as near as can be told"
    yield _outcome(report, folder)


def _outcome(report: "PrimeReport", folder: str) -> str:
    """What was chosen, and what is left to do."""
    chosen, before = report.chosen, report.before
    again = f"`jaxrag ingest PATH... --kb {folder} --encoder"
    if chosen in _ASKED:
        how = f"{again} {chosen}`, then ask with --method {_ASKED[chosen]}"
        return f"chosen: {chosen}, no primer; nothing was remembered: {how}"
    if chosen == before:
        return f"chosen: {chosen}, as before"
    behind = f"{counted(report.stored, 'chunk')} stored behind {before}"
    if not report.taken:
        return (
            f"chosen: {chosen}; nothing was remembered, as there are {behind}: --replace takes it, "
            "and the same documents are to be ingested again then"
        )
    old = f" in place of {before}; {behind} are read no more, `jaxrag kb gc {folder}` frees them"
    return f"remembered: {chosen}{old * bool(report.stored)}: {again} primed` encodes behind it"


COMMAND = command(
    "prime",
    run,
    "measure which primer chunks are best encoded behind, and remember it. That is the one of "
    "least KL divergence from full attention; or a cheaper one (fewer variants, then a shorter "
    "primer), if the 95 % interval of their difference on the same questions reaches 0",
    "jaxrag kb prime kb --questions questions.jsonl && jaxrag ingest docs/ --kb kb "
    "--encoder primed",
    KB,
    SECRET,
    value(
        "--questions",
        "FILE",
        "as of `jaxrag eval own`, asked over the chunks that are found: JSON lines or .csv",
        required=True,
    ),
    fields(PrimeOptions),
    FOUND,
    model_options(),
    JSON,
    basic="questions primer answer-tokens k where replace model secret-file json",
)
