"""2WikiMultihopQA (Ho et al. 2020): the form and the scores of HotpotQA."""

from jaxrag.measure.evals.datasets.hotpotqa import FIELDS, paragraph_items
from jaxrag.measure.evals.datasets.spec import DatasetSpec
from jaxrag.models.text.prompts import TEMPLATES

TWO_WIKI = DatasetSpec(
    title="2WikiMultihopQA",
    source="github.com/Alab-NII/2wikimultihop: dev.json",
    checked="fixture only",
    fields=FIELDS,
    items=paragraph_items,
    template=TEMPLATES["block_attention"],
    metrics=("f1_hotpotqa", "exact_match", "subspan"),
    max_new_tokens=32,
    note="the prompt is Block-Attention's",
)
