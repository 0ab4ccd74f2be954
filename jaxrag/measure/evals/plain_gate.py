"""The gate of plain prompts: recorded requests with their passages as blocks, beside none as such.

Nothing is retrieved and no knowledge base is needed: a request is answered with full attention, as
its chat template writes it, and the method is shown the same answer over its passages as blocks.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrag.base.errors import RequestError
from jaxrag.measure.evals.gate import GateReport, measure, tried
from jaxrag.measure.evals.options import GateOptions
from jaxrag.models.model import Model
from jaxrag.serve.ask import Ask
from jaxrag.serve.conversation import Conversation, conversation_of
from jaxrag.serve.plain import LEAST_REQUESTS, plain_subject
from jaxrag.serve.questions import prepare


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
            body = json.loads(line)
            found.append(
                conversation_of(body["messages"] if isinstance(body, dict) else body, wire=True)
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
    ask = Ask(plain="passages", passage_rules=passage_rules, max_new_tokens=options.answer_tokens)
    settings = tried(options, ask, model=model)
    talks = [talk for talk in requests if prepare(settings[1], talk).sources]
    if len(talks) < least:
        raise RequestError(
            f"passages are found in {len(talks)} of {len(requests)} requests, which says too "
            f"little: record at least {least} that have some"
        )
    prepared = [[prepare(one, talk) for talk in talks] for one in settings]
    report = measure(settings, prepared, options, progress=progress)
    chosen = settings[1].method.with_ratio(report.ratio or 0.0)
    return report, report.to_dict() | {"subject": plain_subject(model, settings[1].ask, chosen)}
