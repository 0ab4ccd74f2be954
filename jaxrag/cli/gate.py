"""`jaxrag kb gate`: the recompute ratio that a method needs on a knowledge base."""

import argparse
import sys
from typing import TYPE_CHECKING

from jaxrag.base.options import parse_count, parse_ratios
from jaxrag.cli.opening import open_kb, where_of
from jaxrag.cli.options import (
    add_command,
    add_earlier_name,
    add_found,
    add_json,
    add_model,
    add_secret,
)
from jaxrag.cli.output import print_json, table

if TYPE_CHECKING:
    from jaxrag.measure.evals.gate import GateReport
    from jaxrag.measure.evals.statistics import Estimate


def add_parser(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the action."""
    parser = add_command(
        actions,
        "gate",
        "find the smallest recompute ratio at which a method answers as full attention does, and "
        "remember it",
        "jaxrag kb gate kb --questions probes.jsonl --method fusionrag --target-agreement 0.95 && "
        'jaxrag ask "Who built the bridge?" --kb kb --method fusionrag',
    )
    parser.add_argument("kb", metavar="DIR", help="folder of the knowledge base")
    add_secret(parser)
    parser.add_argument(
        "--questions",
        required=True,
        metavar="FILE",
        help="probes, as of `jaxrag eval own`: JSON lines or .csv; right answers are not looked at",
    )
    parser.add_argument(
        "--method",
        default="turborag",
        metavar="NAME",
        help="one that reuses chunks: a preset or a .toml file (turborag)",
    )
    parser.add_argument(
        "--recompute-ratios",
        type=parse_ratios,
        metavar="R,...",
        help="to try (0,0.05,0.1,0.15,0.2,0.3,0.5; 0 for a method that recomputes nothing)",
    )
    add_earlier_name(parser, "--ratios", "recompute_ratios")
    parser.add_argument(
        "--target-agreement",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="of answer tokens, at least (0.9)",
    )
    parser.add_argument(
        "--max-kl",
        type=float,
        default=0.1,
        metavar="NATS",
        help="mean KL divergence from full attention a token, at most (0.1)",
    )
    parser.add_argument(
        "--target-answers",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of whole answers that are full attention's, at least (0)",
    )
    parser.add_argument(
        "--answer-tokens",
        type=parse_count,
        default=8,
        metavar="N",
        help="first tokens of an answer to compare (8)",
    )
    parser.add_argument(
        "--template", metavar="NAME", help="a template's name or .toml file (that of DIR)"
    )
    add_found(parser)
    parser.add_argument(
        "--batch-size", type=int, default=8, metavar="N", help="questions that run together (8)"
    )
    add_model(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when a ratio was found and is remembered, 3 when none reaches the target."""
    from jaxrag.measure.evals.gate import Target, gate
    from jaxrag.reuse.methods import method_named
    from jaxrag.serve.question_files import QuestionFile

    method, questions = method_named(args.method), QuestionFile.open(args.questions)
    target = Target(args.target_agreement, args.max_kl, args.target_answers)
    with open_kb(args) as kb:
        report = gate(
            kb,
            method,
            questions,
            ratios=args.recompute_ratios,
            target=target,
            template=args.template,
            k=args.k,
            where=where_of(args),
            answer_tokens=args.answer_tokens,
            batch_size=args.batch_size,
            progress=not args.json,
        )
    if args.json:
        print_json(report.to_dict())
    else:
        _print_report(report)
    if report.ratio is not None:
        return 0
    tried = ", ".join(f"{one.ratio:g}" for one in report.measured)
    print(
        f"jaxrag: refused: {args.method} reaches agreement {target.agreement:g}, KL "
        f"{target.max_kl:g} and answers {target.answers:g} at none of the ratios {tried}; nothing "
        "was stored: try higher --recompute-ratios, another method or a lower target",
        file=sys.stderr,
    )
    return 3


def _print_report(report: "GateReport") -> None:
    rows = [["ratio", "recomputed", "agreement", "KL", "answers", "meets"]]
    for one in report.measured:
        rows.append(
            [
                f"{one.ratio:g}",
                f"{one.recomputed:.1%}",
                _share(one.agreement),
                f"{one.kl:.4f}",
                _share(one.answers),
                "no" if not one.meets else "by computing all" if one.ratio == 1 else "yes",
            ]
        )
    print(
        f"{report.method} against full attention: {report.questions} questions, "
        f"{report.answer_tokens} answer tokens; shares in % with 95 % intervals"
    )
    print(table(rows, range(len(rows[0]) - 1)))
    if report.ratio == 1:
        print(
            f"remembered: {report.method} recomputes every chunk token where no ratio is named, "
            "which saves nothing: only --method full_attention meets the target"
        )
    elif report.ratio is not None:
        print(
            f"remembered: {report.method} recomputes {report.ratio:g} of the chunk tokens where no "
            "ratio is named"
        )


def _share(estimate: "Estimate") -> str:
    return f"{100 * estimate.value:.1f} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"
