"""Chat templates: Jinja programs that ship with a tokenizer, rendered in a sandbox.

A template comes from a downloaded directory, so it runs in Jinja's immutable sandbox. The
environment offers what templates are written against: ``raise_exception``, ``strftime_now``, the
loop controls, ``{% generation %}`` blocks and a ``tojson`` that does not escape HTML.
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from jaxrag.errors import TokenizerError


def render_template(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    *,
    add_generation_prompt: bool,
    now: datetime.datetime | None = None,
) -> str:
    """Render a chat template.

    ``messages`` are mappings with "role" and "content". ``special_tokens`` are the names templates
    use, such as ``bos_token``. ``now`` is what ``strftime_now`` prints, by default the present.
    Raises TokenizerError when the template is malformed or refuses the messages.
    """
    try:
        return _compiled(source).render(
            strftime_now=lambda form: (now or datetime.datetime.now()).strftime(form),
            messages=[dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            tools=None,
            documents=None,
            **special_tokens,
        )
    except jinja2.TemplateError as error:
        raise TokenizerError(f"the chat template cannot render these messages: {error}") from None


@functools.lru_cache(maxsize=8)  # compiling takes milliseconds, and every question renders some
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
