"""`jaxrag kb connector`: let vLLM read the chunks of a knowledge base."""

import argparse
import dataclasses

from jaxrag.cli.opening import open_kb
from jaxrag.cli.options import add_command, add_json, add_model, add_secret
from jaxrag.cli.output import counted, note, print_json


def add_parser(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the action."""
    parser = add_command(
        actions,
        "connector",
        "write the folder by which vLLM reads the chunks, or refresh it, and print the line that "
        "starts vLLM",
        "jaxrag kb connector kb kb-vllm",
    )
    parser.add_argument("kb", metavar="DIR", help="folder of the knowledge base")
    parser.add_argument("out", metavar="OUT", help="folder to write")
    parser.add_argument(
        "--encoder", metavar="NAME", help="KV variant (the first kept of isolated, after_prefix)"
    )
    parser.add_argument(
        "--serve",
        metavar="DIR",
        help="Hugging Face directory that vLLM loads (the model's own)",
    )
    parser.add_argument(
        "--group",
        action="append",
        default=[],
        metavar="NAME",
        help="also documents of this group; repeatable (those without groups only)",
    )
    parser.add_argument(
        "--passage-rules",
        default="common",
        metavar="NAME",
        help="how passages are found in prompts that vLLM noted: a name, or a .toml file (common)",
    )
    add_secret(parser)
    add_model(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Write the folder once."""
    from jaxrag.serve.connector import write_connector

    with open_kb(args) as kb:
        report = write_connector(
            kb,
            args.out,
            encoder=args.encoder,
            serve=args.serve,
            groups=args.group,
            passage_rules=args.passage_rules,
        )
    if args.json:
        print_json(dataclasses.asdict(report))
        return
    print(f"{report.path}: {counted(report.parts, 'part')} of encoder {report.encoder}")
    if report.noted:
        noted = counted(report.noted, "part")
        print(f"of these {noted} that prompts wanted, {report.encoded} encoded now")
    if report.missing:
        note(f"{report.missing} have no KV in the store; `jaxrag kb verify --repair` encodes them")
    if not report.gates:
        note(
            "nothing says yet that answers from stored chunks alone are good, and vLLM will not "
            "start: run `jaxrag kb gate`, then this again"
        )
    print(report.command)
