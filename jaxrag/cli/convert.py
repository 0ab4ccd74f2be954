"""`jaxrag convert`: Hugging Face directory to jaxrag checkpoint and back, and GGUF to either."""

from jaxrag.cli.command import SUMMARIES, Args, argument, command, value


def run(args: Args) -> None:
    """Convert; the target appears only when it is complete."""
    from jaxrag.models.export import convert

    form = convert(args.source, args.target, to=args.to)
    names = {"huggingface": "Hugging Face directory", "jaxrag": "jaxrag checkpoint"}
    print(f"{args.target}: {names[form]} written")


COMMAND = command(
    "convert",
    run,
    SUMMARIES["convert"],
    "jaxrag convert models/llama checkpoints/llama",
    argument("source", "SOURCE", "directory or GGUF file to read"),
    argument("target", "TARGET", "directory to make"),
    value("--to", None, "the other form; of GGUF huggingface", choices=("huggingface", "jaxrag")),
)
