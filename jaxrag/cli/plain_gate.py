"""`jaxrag gate`: whether a method may read the passages of recorded requests as blocks."""

import json
from pathlib import Path

from jaxrag.base.config import ModelOptions
from jaxrag.cli.command import SUMMARIES, Args, command, fields, from_fields, value
from jaxrag.cli.gate import show
from jaxrag.cli.opening import load
from jaxrag.cli.options import JSON, model_options
from jaxrag.cli.output import require_folder
from jaxrag.measure.evals.options import GateOptions, Target
from jaxrag.server.options import ServerOptions


def run(args: Args) -> int:
    """Exit code 0 when a ratio was found and written, 3 when none reaches the target."""
    from jaxrag.measure.evals.plain_gate import gate_requests, read_requests
    from jaxrag.reuse.methods import method_named

    require_folder(args.out)
    method = method_named(args.method)  # refused before a model is read
    requests, target = read_requests(args.requests), from_fields(Target, args)
    options = from_fields(GateOptions, args, target=target, k=1, where=None, template=None)
    report, gate = gate_requests(
        load(args.model, from_fields(ModelOptions, args), method),
        requests,
        options,
        args.passage_rules,
        progress=not args.json,
    )
    if report.ratio is not None:
        Path(args.out).write_text(json.dumps(gate, indent=1) + "\n", encoding="utf-8")
    at = f"for {report.method} at recompute ratio {report.ratio or 0:g}"
    return show(args, report, f"written: {args.out}, {at}")


COMMAND = command(
    "gate",
    run,
    SUMMARIES["gate"],
    "jaxrag gate --requests requests.jsonl --model models/qwen --out gate.json && "
    "jaxrag serve --model models/qwen --plain passages --plain-gate gate.json",
    value(
        "--requests",
        "FILE",
        "JSON lines: a list of messages, or an object with messages",
        required=True,
    ),
    value("--out", "FILE", "for `jaxrag serve --plain-gate`", required=True),
    fields(GateOptions, only=("method", "ratios", "answer_tokens", "batch_size")),
    fields(Target),
    fields(ServerOptions, only=("passage_rules",)),
    model_options(required=True),
    JSON,
    basic="requests out method recompute-ratios answer-tokens target-agreement max-kl "
    "target-answers passage-rules model dtype json",
)
