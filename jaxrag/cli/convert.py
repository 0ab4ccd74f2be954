"""`jaxrag convert`: Hugging Face directory to jaxrag checkpoint and back."""

import argparse

from jaxrag.cli.options import add_command


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = add_command(
        commands,
        "convert",
        "turn a Hugging Face model into a jaxrag (Orbax) checkpoint, or back",
        "jaxrag convert models/llama checkpoints/llama",
    )
    parser.add_argument("source", metavar="SOURCE", help="directory to read")
    parser.add_argument("target", metavar="TARGET", help="directory to make")
    parser.add_argument(
        "--to", choices=("huggingface", "jaxrag"), help="the other one of the source"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Convert; the target appears only when it is complete."""
    from jaxrag.models.export import convert

    form = convert(args.source, args.target, to=args.to)
    names = {"huggingface": "Hugging Face directory", "jaxrag": "jaxrag checkpoint"}
    print(f"{args.target}: {names[form]} written")
