"""`jaxrag plain`: how a request's messages are read, and what of them as blocks."""

import json
import sys
from pathlib import Path
from typing import Any

from jaxrag.cli.command import SUMMARIES, Args, argument, command, fields, value
from jaxrag.cli.options import JSON
from jaxrag.cli.output import human_count, print_json
from jaxrag.models.text.printable import printable
from jaxrag.server.options import ServerOptions

_BLOCK, _END = "\033[30;46m", "\033[0m"
_SHOWN = 60  # characters of each end of a part


def run(args: Args) -> int:
    """Exit code 0; 1 for a file that holds no messages, and for what the template refuses."""
    from jaxrag.models.text.passage_rules import passage_rules
    from jaxrag.models.text.tokenizer import Tokenizer
    from jaxrag.serve.conversation import conversation_of
    from jaxrag.serve.plain import plain_prompt

    talk = conversation_of(_messages(Path(args.request)), wire=True)
    tokenizer = Tokenizer.load(args.model)
    rules = passage_rules(args.passage_rules)
    prompt, members = plain_prompt(tokenizer, talk.messages, rules)
    blocks = iter(members)
    parts: list[dict[str, Any]] = []
    for place, ids in enumerate((*prompt.chunks, prompt.final)):
        block = place < len(prompt.chunks) and place not in prompt.turns
        row: dict[str, Any] = {"kind": "block" if block else "computed", "tokens": len(ids)}
        if block:
            source = next(blocks).source
            row |= {"message": source.document_id, "start": source.start, "end": source.end}
        parts.append(row | {"text": tokenizer.decode(ids, skip_special=False)})
    if args.json:
        print_json({"parts": parts})
        return 0
    coloured = sys.stdout.isatty()
    for part in parts:
        block = part["kind"] == "block"
        text = _short(part["text"])
        shown = f"{_BLOCK}{text}{_END}" if block and coloured else text
        print(f"{part['kind']:8} {human_count(part['tokens']):>6} tokens  {shown}")
    reused = sum(part["tokens"] for part in parts if part["kind"] == "block")
    total = prompt.num_tokens
    why = ""
    if not reused:
        why = f"; passages of less than {rules.worth} tokens together are not read as blocks"
    print(f"{reused:,} of {total:,} tokens are read from KV at second sight{why}")
    return 0


def _short(text: str) -> str:
    shown = printable(text.replace("\n", " "))
    if len(shown) <= 2 * _SHOWN:
        return shown
    return f"{shown[:_SHOWN]} ... {shown[-_SHOWN:]}"


def _messages(path: Path) -> Any:
    """The messages of a request. Raises RequestError."""
    from jaxrag.base.errors import RequestError

    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"{path}: expected JSON with messages ({error})") from None
    return body.get("messages") if isinstance(body, dict) else body


COMMAND = command(
    "plain",
    run,
    SUMMARIES["plain"],
    "jaxrag plain request.json --model models/qwen2.5-7b-instruct",
    argument("request", "FILE", "JSON: a list of messages, or an object with messages"),
    value("--model", "DIR", "whose chat template and tokenizer", required=True),
    fields(ServerOptions, only=("passage_rules",)),
    JSON,
)
