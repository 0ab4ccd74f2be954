"""Parts of an evaluation, each in a file once it is done, so that a killed run goes on."""

import contextlib
import dataclasses
import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrag.base.installed import __version__
from jaxrag.library.documents import Shard
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.measure.evals.options import OwnOptions
from jaxrag.measure.evals.own import Answered, AskedMethod, Evaluation, Probe, evaluate
from jaxrag.serve.question_files import FileQuestion, QuestionFile


def evaluate_once(
    kb: KnowledgeBase, questions: QuestionFile, options: OwnOptions, shard: Shard, file: Path
) -> Evaluation:
    """As ``evaluate``, of a part; what an earlier run wrote to the file is not asked again.

    That counts only of the same questions, options, weights and documents. Raises as ``evaluate``,
    and OSError where the file cannot be written.
    """
    assert kb.model is not None
    made_with = {
        "version": __version__,
        "questions": questions.digest,
        "options": repr(options),
        "weights": kb.model.fingerprint,
        "knowledge_base": kb.id,
        "changes": kb.changes,
        "part": str(shard),
    }
    found = _read(file, made_with)
    if found is None:
        found = evaluate(kb, questions, options, shard=shard)
        text = json.dumps({"made_with": made_with, "evaluation": dataclasses.asdict(found)})
        new = file.with_name(f".{file.name}.{uuid.uuid4().hex}.tmp")
        try:
            new.write_text(text, encoding="utf-8")
            new.replace(file)
        finally:
            new.unlink(missing_ok=True)
    return found


def _read(file: Path, made_with: Mapping[str, Any]) -> Evaluation | None:
    """What an earlier run found; None where there is nothing, or something else."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        table = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(table, dict) and table.get("made_with") == made_with:
            return _evaluation(table["evaluation"])
    return None


def _evaluation(table: Mapping[str, Any]) -> Evaluation:
    return Evaluation(
        probes=tuple(
            Probe(FileQuestion(**it["question"]), tuple(it["answers"]), tuple(it["sources"]))
            for it in table["probes"]
        ),
        methods=tuple(AskedMethod(**it) for it in table["methods"]),
        template=table["template"],
        k=table["k"],
        max_new_tokens=table["max_new_tokens"],
        answered=tuple(tuple(Answered(**it) for it in row) for row in table["answered"]),
        notes=tuple(table["notes"]),
    )
