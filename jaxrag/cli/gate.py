"""`jaxrag kb gate`: the recompute ratio that a method needs on a knowledge base."""

import sys
from typing import TYPE_CHECKING

from jaxrag.cli.command import Args, command, fields, from_fields, value
from jaxrag.cli.opening import open_kb, where_of
from jaxrag.cli.options import FOUND, JSON, KB, SECRET, model_options
from jaxrag.cli.output import give, table
from jaxrag.measure.evals.options import GateOptions, Target

if TYPE_CHECKING:
    from jaxrag.measure.evals.gate import GateReport


def run(args: Args) -> int:
    """Exit code 0 when a ratio was found and is remembered, 3 when none reaches the target."""
    from jaxrag.measure.evals.gate import gate
    from jaxrag.reuse.methods import method_named
    from jaxrag.serve.question_files import QuestionFile

    method_named(args.method)  # refused before a model is read
    questions, target = QuestionFile.open(args.questions), from_fields(Target, args)
    options = from_fields(GateOptions, args, target=target, k=args.k, where=where_of(args))
    with open_kb(args) as kb:
        report = gate(kb, questions, options, progress=not args.json)
    ratio = f"recomputes {report.ratio or 0:g} of the chunk tokens where no ratio is named"
    if report.ratio == 1:
        ratio = (
            "recomputes every chunk token where no ratio is named, which saves nothing: only "
            "--method full_attention meets the target"
        )
    return show(args, report, f"remembered: {report.method} {ratio}")


def show(args: Args, report: "GateReport", kept: str) -> int:
    """Print how the ratios agree with full attention, and what is kept; the exit code."""
    from jaxrag.measure.table import percent

    rows = [["ratio", "recomputed", "agreement", "KL", "answers", "meets"]]
    for measured in report.measured:
        shares = [percent(it._asdict()) for it in (measured.agreement, measured.answers)]
        meets = "no" if not measured.meets else "by computing all" if measured.ratio == 1 else "yes"
        first = [f"{measured.ratio:g}", f"{measured.recomputed:.1%}"]
        rows.append([*first, shares[0], f"{measured.kl:.4f}", shares[1], meets])
    head = (
        f"{report.method} against full attention: {report.questions} questions, "
        f"{report.answer_tokens} answer tokens; shares in % with 95 % intervals"
    )
    passed = report.ratio is not None
    lines = [head, table(rows, range(len(rows[0]) - 1)), *[kept] * passed]
    give(args, report.to_dict(), lines)
    if passed:
        return 0
    tried = ", ".join(f"{measured.ratio:g}" for measured in report.measured)
    target = report.target
    print(
        f"jaxrag: refused: {report.method} reaches agreement {target.agreement:g}, KL "
        f"{target.max_kl:g} and answers {target.answers:g} at none of the ratios {tried}; nothing "
        "was stored: try higher --recompute-ratios, another method or a lower target",
        file=sys.stderr,
    )
    return 3


COMMAND = command(
    "gate",
    run,
    "find the smallest recompute ratio at which a method answers as full attention "
    "does, and remember it",
    "jaxrag kb gate kb --questions probes.jsonl --method fusionrag "
    '--target-agreement 0.95 && jaxrag ask "Who built the bridge?" --kb kb '
    "--method fusionrag",
    KB,
    SECRET,
    value(
        "--questions",
        "FILE",
        "probes, as of `jaxrag eval own`: JSON lines or .csv; right answers are not looked at",
        required=True,
    ),
    fields(GateOptions),
    fields(Target),
    FOUND,
    model_options(),
    JSON,
    basic="questions method recompute-ratios answer-tokens target-agreement max-kl "
    "target-answers k where model secret-file json",
)
