"""The gate of plain prompts: recorded requests with their passages as blocks, beside none as such.

Nothing is retrieved and no knowledge base is needed: a request is answered with full attention, as
its chat template writes it, and the method is shown the same answer over its passages as blocks.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrag.base.errors import RequestError
from jaxrag.measure.evals.gate import RATIOS, GateReport, compare
from jaxrag.measure.evals.options import GateOptions
from jaxrag.models.model import Model
from jaxrag.reuse.methods import METHODS, method_named
from jaxrag.reuse.select import NoTokens
from jaxrag.serve.ask import Ask
from jaxrag.serve.conversation import Conversation, conversation_of
from jaxrag.serve.plain import LEAST_REQUESTS, plain_subject
from jaxrag.serve.questions import prepare, resolve


def read_requests(path: str | Path) -> list[Conversation]:
    """The conversations of recorded requests: JSON lines, each with messages or a list of them.

    Raises RequestError, naming the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: cannot be read ({error})") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            one = json.loads(line)
            found.append(
                conversation_of(one["messages"] if isinstance(one, dict) else one, wire=True)
            )
        except (ValueError, KeyError, RequestError) as error:
            raise RequestError(
                f"{path}, line {number}: expected JSON with messages ({error})"
            ) from None
    return found


def gate_requests(
    model: Model,
    requests: Sequence[Conversation],
    options: GateOptions,
    passage_rules: str,
    *,
    least: int = LEAST_REQUESTS,
    progress: bool = False,
) -> tuple[GateReport, dict[str, Any]]:
    """Measure a method at every ratio on the requests in which passages are found.

    Args:
      model: with a chat template.
      requests: as they were recorded.
      options: the method, the ratios and the target; nothing of a knowledge base.
      passage_rules: how passages are found.
      least: requests with passages that say enough.
      progress: show how far it is, on stderr.

    Returns the report, and the gate as a server reads it; its ratio is None where none passed.
    Raises RequestError for too few requests with passages, and one that cannot be served.
    """
    method, ratios = method_named(options.method), options.ratios
    if ratios is None:
        ratios = (0.0,) if isinstance(method.selector, NoTokens) else RATIOS
    tried = [method.with_ratio(ratio) for ratio in sorted(set(ratios))]
    asks = [
        Ask(
            method=one,
            plain="passages",
            passage_rules=passage_rules,
            max_new_tokens=options.answer_tokens,
        )
        for one in (METHODS["full_attention"], *tried)
    ]
    full, *settings = [resolve(ask, model=model) for ask in asks]
    first = [(talk, prepare(settings[0], talk)) for talk in requests]
    talks = [talk for talk, ready in first if ready.sources]
    if len(talks) < least:
        raise RequestError(
            f"passages are found in {len(talks)} of {len(requests)} requests, which says too "
            f"little: record at least {least} that have some"
        )
    prepared = [[prepare(one, talk) for talk in talks] for one in (full, *settings)]
    measured, tokens = compare(
        [full, *settings], prepared, options.target, options.batch_size, progress=progress
    )
    ratio = next((one.ratio for one in measured if one.meets), None)
    report = GateReport(method.name, len(talks), tokens, options.target, measured, ratio)
    chosen = method.with_ratio(ratio or 0.0)
    return report, report.to_dict() | {"subject": plain_subject(model, asks[1], chosen)}
