"""`jaxrag train primer`: vectors in front of chunks, by which stock weights read them."""

from pathlib import Path

from jaxrag.base.config import ModelOptions
from jaxrag.base.errors import RequestError
from jaxrag.cli.command import Args, command, fields, flag, from_fields, value
from jaxrag.cli.opening import load, open_kb
from jaxrag.cli.options import JSON, SECRET, model_options
from jaxrag.cli.output import give, require_folder
from jaxrag.measure.evals.datasets.options import DATASET_NAMES, NearOptions
from jaxrag.measure.evals.priming import PrimingOptions
from jaxrag.serve.ask import Ask


def run(args: Args) -> None:
    """Train and write the vectors, and print by how much the held-out KL fell."""
    from jaxrag.measure.evals import priming
    from jaxrag.models.compiled import keep_compiled
    from jaxrag.serve.question_files import QuestionFile

    options = from_fields(PrimingOptions, args, out=args.out)
    require_folder(args.out, "--out")
    if (args.kb is None) == (args.dataset is None):
        raise RequestError(
            "prompts come from --kb DIR with --questions FILE, or from --dataset NAME with --data "
            "FILE: pass one of the two"
        )
    how = {"resume": args.resume, "progress": not args.json}
    keep_compiled()
    if args.dataset is not None:
        named = {"name": args.dataset, "model": args.model, "seed": NearOptions.seed}
        dataset = from_fields(NearOptions, args, **named, out=None)
        model = load(args.model, from_fields(ModelOptions, args))
        result = priming.run(priming.of_dataset(dataset, model, options), options, **how)
    else:
        if args.questions is None:
            raise RequestError("--kb without questions: name them with --questions FILE")
        questions = QuestionFile.open(args.questions)
        with open_kb(args) as kb:
            asked = priming.of_knowledge_base(kb, questions, options, args.k)
            result = priming.run(asked, options, **how)
    looks = result["held_out_kl"]
    kind = "keys and values" if options.form == "layers" else "vectors"
    lines = [
        f"{args.out}: {options.vectors} {kind} of {result['width']}, "
        f"{Path(args.out).stat().st_size:,} bytes"
    ]
    if looks:
        lines.append(
            f"KL to full attention, {options.held_out} held-out prompts: {looks[0]['kl']:.4f} "
            f"before, {looks[-1]['kl']:.4f} after step {looks[-1]['step']}"
        )
    give(args, result, lines)


COMMAND = command(
    "primer",
    run,
    "train the vectors of a primer on prompts of your own: weights stay, no labels are needed",
    "jaxrag train primer --kb kb --questions questions.jsonl --out primer.safetensors",
    value("--kb", "DIR", "a knowledge base, whose chunks are retrieved for every question"),
    value("--questions", "FILE", "JSON lines or CSV with a question each, as of `jaxrag kb gate`"),
    value("--dataset", "NAME", "the prompts of a data set: " + ", ".join(DATASET_NAMES)),
    fields(NearOptions, only=("data", "documents", "noise", "chat", "template", "chunk_tokens")),
    fields(PrimingOptions),
    value("--out", "FILE", "the vectors, .safetensors", required=True),
    flag("--resume", "go on where a run for the same --out was ended"),
    fields(Ask, only=("k",)),
    SECRET,
    model_options(),
    JSON,
    basic="kb questions dataset data vectors num num-held-out steps out resume model json",
)
