"""The recompute ratio that a knowledge base was found to need (`jaxrag kb gate`), and its use."""

import dataclasses
import json
from typing import Any

from jaxrag.knowledge_base import KnowledgeBase
from jaxrag.methods import Method
from jaxrag.text.prompts import PromptTemplate


def gate_subject(method: Method, template: PromptTemplate) -> dict[str, Any]:
    """What a gate is about, JSON-able: how chunks are reused, at any ratio, and the prompt format.

    What becomes of misses and of leading parts is left out: there KV is exact, or behind more of
    what precedes it than a stored chunk's. So is the decode rule: the gate looks at prefill.
    """
    values = dataclasses.asdict(method)
    for other in ("recompute_ratio", "misses", "prefix_cache", "decode"):
        del values[other]
    subject = {"method": values, "template": template.to_dict()}
    return dict(json.loads(json.dumps(subject)))


def gated(
    kb: KnowledgeBase, method: Method, template: PromptTemplate
) -> tuple[Method, tuple[str, ...]]:
    """The method at the ratio that the knowledge base's gate found for it, and a note that says so.

    The method itself and no note where there was no gate; a note as well where there was one for
    other settings of the method or another prompt format, which says nothing about these.
    """
    gate = kb.gates.get(method.name)
    if gate is None:
        return method, ()
    if gate["subject"] != gate_subject(method, template):
        return method, (
            f"the gate of {method.name!r} in this knowledge base was for other settings of the "
            f"method or another template, and is not used; run `jaxrag kb gate` again",
        )
    ratio, probes = gate["ratio"], gate["questions"]
    return method.with_ratio(ratio), (
        f"recompute_ratio {ratio:g}, as the knowledge base's gate found for {method.name} on "
        f"{probes} questions",
    )
