"""Renders chat templates in a process of its own, as nothing bounds Jinja from the inside.

Run by ``text.chat``, never imported: it reads requests as lines of JSON from stdin and answers
each with one. It imports Jinja and the standard library only, so that it starts at once.
"""

import datetime
import functools
import json
import resource
import sys
import time
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


def main() -> None:
    """Answer until stdin ends. A render that takes too long ends the process by SIGXCPU."""
    for line in sys.stdin:
        request = json.loads(line)
        _limit(resource.RLIMIT_AS, request["bytes"])
        _limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + request["seconds"])
        try:
            answer = {"text": _render(request)}
        except jinja2.TemplateError as error:
            answer = {"error": str(error)}
        except Exception as error:  # whatever an expression may raise
            answer = {"error": f"{type(error).__name__}: {error}"}
        if len(answer.get("text", "")) > request["characters"]:
            answer = {"error": f"it makes more than {request['characters']} characters"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _limit(kind: int, soft: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (soft if hard < 0 else min(soft, hard), hard))


def _render(request: dict[str, Any]) -> str:
    stated = request["now"]

    def strftime_now(form: str) -> str:
        now = datetime.datetime.fromisoformat(stated) if stated else datetime.datetime.now()
        return now.strftime(form)

    return _compiled(request["source"]).render(
        strftime_now=strftime_now,
        messages=request["messages"],
        add_generation_prompt=request["add_generation_prompt"],
        tools=request["tools"],
        **({"documents": None} | request["special_tokens"] | request["values"]),
    )


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationBlock],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(source)


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks an answer for training and prints it."""

    tags = {"generation"}  # noqa: RUF012 (the attribute is declared by jinja2)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


if __name__ == "__main__":
    main()
