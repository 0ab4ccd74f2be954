"""What ``generate`` takes beside the question, as the command line names it."""

import dataclasses

from jaxrag.base.options import option, parse_count


@dataclasses.dataclass(frozen=True)
class ReuseOptions:
    """How chunks are reused and read; see ``jaxrag.generate``."""

    method: str = option(
        "turborag",
        "full_attention, full_reuse, turborag, turborag_composite, block_attention, cacheblend, "
        "cache_craft, epic, fusionrag, retrieval_attention, kcache, or a .toml file",
        "NAME",
    )
    recompute_ratio: float | None = option(
        None,
        "share of the chunk tokens computed again, 0 to 1",
        "R",
        unset="what `jaxrag kb gate` found, else the method's own",
    )
    misses: str | None = option(
        None,
        "chunks that the store does not hold: encode and keep them, or compute them where they "
        "stand, over all that precedes them, and keep nothing",
        choices=("encode", "in_place"),
        unset="the method's own",
    )
    prefix_cache: bool = option(
        False,
        "keep leading parts as full attention computed them, for prompts that begin alike",
    )
    decode: str | None = option(
        None,
        "how generated tokens attend: dense, static_window, snapkv, infllm, quest, flat, ivf, "
        "retrieval, topn; settings follow a colon, as in topn:n=64",
        "RULE",
        unset="the method's own",
    )
    template: str | None = option(
        None, "a template's name or .toml file", "NAME", unset="that of --kb or --model"
    )


@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """What is retrieved; ``where`` as JSON."""

    k: int = option(5, "chunks to retrieve", "N")
    where: str | None = option(
        None, 'only documents with this metadata, such as \'{"year": {"$gte": 2020}}\'', "JSON"
    )
    search_mode: str | None = option(
        None,
        "by words, by meaning, or by both",
        choices=("bm25", "vector", "hybrid"),
        flag="--search",
        unset="hybrid where every chunk has a vector, else bm25",
    )
    min_score: float | None = option(
        None, "leave out chunks that score less, by words or by meaning", "X", unset="none"
    )
    unanswerable: str = option(
        "abstain",
        "where --where or --min-score leave no chunk: say so, or ask without any",
        choices=("abstain", "ask"),
    )


@dataclasses.dataclass(frozen=True)
class AnswerOptions:
    """Of the answer itself, beside how its tokens are chosen."""

    max_new_tokens: int = option(64, "of the answer", "N", parse=parse_count)
    stop: tuple[str, ...] = option((), "ends the answer; repeatable", "TEXT", repeatable=True)
