"""`jaxrag kb`: look into a knowledge base."""

import argparse
import dataclasses

from jaxrag.cli.options import add_command, add_json, human_count, print_json, table


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command and its actions."""
    parser = add_command(commands, "kb", "look into a knowledge base", "jaxrag kb stats kb")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    stats = add_command(actions, "stats", "counts, sizes and settings", "jaxrag kb stats kb --json")
    listing = add_command(actions, "list", "every document", "jaxrag kb list kb")
    for action, run in ((stats, run_stats), (listing, run_list)):
        action.add_argument("kb", metavar="DIR")
        add_json(action)
        action.set_defaults(run=run)


def run_stats(args: argparse.Namespace) -> None:
    """Print what the knowledge base holds and how it was made."""
    from jaxrag.knowledge_base import KnowledgeBase

    with KnowledgeBase.open(args.kb) as kb:
        stats = kb.stats()
    if args.json:
        print_json(stats)
        return
    stored = stats.pop("stored")
    rows = [[name, _plain(value)] for name, value in stats.items()]
    rows += [[f"stored {name}", _plain(value)] for name, value in stored.items()]
    print(table(rows))


def run_list(args: argparse.Namespace) -> None:
    """Print one line a document, or a JSON object with all of them."""
    from jaxrag.knowledge_base import KnowledgeBase

    with KnowledgeBase.open(args.kb) as kb:
        documents = kb.documents()
    if args.json:
        print_json({"documents": [dataclasses.asdict(document) for document in documents]})
        return
    rows = [["document", "title", "chunks", "file"]]
    rows += [[d.id, d.title, str(d.num_chunks), d.file or ""] for d in documents]
    print(table(rows, right=(2,)))


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items())
    return human_count(value) if isinstance(value, int) and value >= 10_000 else str(value)
