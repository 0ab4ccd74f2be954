"""The data sets by name; files of LongBench-E are read as those of LongBench."""

from jaxrag.base.errors import RequestError
from jaxrag.measure.evals.datasets import longbench
from jaxrag.measure.evals.datasets.cacheblend_musique import CACHEBLEND_MUSIQUE
from jaxrag.measure.evals.datasets.multi_hop import HOTPOTQA, MUSIQUE, TWO_WIKI
from jaxrag.measure.evals.datasets.nq_open import NQ_OPEN
from jaxrag.measure.evals.datasets.rgb import RGB_EN, RGB_ZH
from jaxrag.measure.evals.datasets.spec import DatasetSpec

DATASETS: dict[str, DatasetSpec] = {
    "rgb_en": RGB_EN,
    "rgb_zh": RGB_ZH,
    "nq_open": NQ_OPEN,
    "musique": MUSIQUE,
    "cacheblend_musique": CACHEBLEND_MUSIQUE,
    "hotpotqa": HOTPOTQA,
    "2wikimultihopqa": TWO_WIKI,
    "longbench_narrativeqa": longbench.NARRATIVEQA,
    "longbench_qasper": longbench.QASPER,
    "longbench_multifieldqa_en": longbench.MULTIFIELDQA_EN,
    "longbench_multifieldqa_zh": longbench.MULTIFIELDQA_ZH,
    "longbench_hotpotqa": longbench.LONGBENCH_HOTPOTQA,
    "longbench_2wikimqa": longbench.LONGBENCH_2WIKIMQA,
    "longbench_musique": longbench.LONGBENCH_MUSIQUE,
    "longbench_passage_count": longbench.PASSAGE_COUNT,
    "longbench_passage_retrieval_en": longbench.PASSAGE_RETRIEVAL_EN,
    "longbench_passage_retrieval_zh": longbench.PASSAGE_RETRIEVAL_ZH,
}


def dataset_named(name: str) -> DatasetSpec:
    """The data set of that name. Raises RequestError, listing the names."""
    if name not in DATASETS:
        raise RequestError(f"data set {name!r}: expected one of {', '.join(DATASETS)}")
    return DATASETS[name]
