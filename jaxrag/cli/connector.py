"""`jaxrag kb connector`: let vLLM read the chunks of a knowledge base."""

import dataclasses

from jaxrag.cli.command import Args, argument, command, value, values
from jaxrag.cli.opening import open_kb
from jaxrag.cli.options import JSON, KB, SECRET, model_options
from jaxrag.cli.output import counted, note, print_json


def run(args: Args) -> None:
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


COMMAND = command(
    "connector",
    run,
    "write the folder by which vLLM reads the chunks, or refresh it, and print the "
    "line that starts vLLM",
    "jaxrag kb connector kb kb-vllm",
    KB,
    argument("out", "OUT", "folder to write"),
    value("--encoder", "NAME", "KV variant (the first kept of isolated, after_prefix, primed)"),
    value("--serve", "DIR", "Hugging Face directory that vLLM loads (the model's own)"),
    values(
        "--group", "NAME", "also documents of this group; repeatable (those without groups only)"
    ),
    value(
        "--passage-rules",
        "NAME",
        "how passages are found in prompts that vLLM noted: a name, or a .toml file (common)",
        "common",
    ),
    SECRET,
    model_options(),
    JSON,
    basic="encoder serve group passage-rules secret-file model dtype mesh json",
)
