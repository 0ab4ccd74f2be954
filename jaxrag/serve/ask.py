"""What is said of how a question is answered: every field once, with its default, help and check.

``generate`` takes the fields as keywords, `jaxrag ask` as options, and the server as fields of a
request. Importing this imports nothing heavy, for `--help` reads it: types of objects, which a
field may be beside what people write, are in quotes.
"""

import dataclasses
import itertools
import reprlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from jaxrag.base.errors import RequestError
from jaxrag.base.groups import check_own
from jaxrag.base.options import check_fields, option, parse_count
from jaxrag.base.tables import require_kind
from jaxrag.engine.sampling_params import SamplingParams
from jaxrag.library.options import SearchMode
from jaxrag.reuse.names import DECODE_NAMES, METHOD_NAMES, Misses

if TYPE_CHECKING:
    from jaxrag.base.types import HostArray
    from jaxrag.models.text.prompts import PromptTemplate
    from jaxrag.reuse.decode import DecodeRule
    from jaxrag.reuse.methods import Method

EarlierTurns = Literal["exact", "blocks"]
Plain = Literal["off", "passages"]  # what is read as blocks in messages that bring no documents
Unanswerable = Literal["abstain", "ask"]  # what to do where nothing is found
Cite = Literal["no", "spans", "marks"]  # whether an answer says which passages it is from


def check_count(name: str, value: Any) -> None:
    """Refuse what is no positive integer: RequestError."""
    import numpy as np

    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < 1:
        raise RequestError(f"{name}={reprlib.repr(value)}: expected a positive integer")


def check_flag(name: str, value: Any) -> None:
    """Refuse what is not True, False or None: RequestError."""
    require_kind(name, value, (bool,), "True or False")


def check_texts(name: str, value: Any) -> None:
    """Refuse what is no list of texts or of token ids: RequestError. None passes."""
    if value is None:
        return
    shown = reprlib.repr(value)
    if isinstance(value, str):
        raise RequestError(
            f"{name}={shown} is one text: expected a list; write {name}=[...], each entry is one "
            "chunk"
        )
    if not is_list(value):
        raise RequestError(f"{name}={shown}: expected a list of texts")
    for i, text in enumerate(value):
        if not isinstance(text, str) and not is_list(text):
            raise RequestError(f"{name}[{i}]={reprlib.repr(text)}: expected a text or token ids")


def is_list(x: Any) -> bool:
    """Is it a sequence other than a text, or an array?"""
    import numpy as np

    array = isinstance(x, np.ndarray) and x.ndim > 0
    return array or (isinstance(x, Sequence) and not isinstance(x, str | bytes | Mapping))


def is_ids(x: Any) -> bool:
    """Is this one sequence of token ids, rather than several texts?"""
    import numpy as np

    if isinstance(x, np.ndarray):
        return x.ndim == 1
    if not is_list(x) or not len(x):
        return False
    return all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in x)


def _check_method(name: str, value: Any) -> None:
    from jaxrag.reuse.methods import Method

    require_kind(name, value, (str, Method), "a preset's name, a .toml file or a Method")


def _check_template(name: str, value: Any) -> None:
    from jaxrag.models.text.prompts import PromptTemplate

    expected = "a template's name, a .toml file or a PromptTemplate"
    require_kind(name, value, (str, PromptTemplate), expected)


def _check_ratio(name: str, value: Any) -> None:
    import numpy as np

    require_kind(name, value, (int, float, np.number), "a number from 0 to 1")


def _check_choice(name: str, value: Any) -> None:
    choices = get_args(
        {
            "earlier_turns": EarlierTurns, "unanswerable": Unanswerable, "plain": Plain,
            "cite": Cite,
        }[name]
    )  # fmt: skip
    if value not in choices:
        shown = reprlib.repr(value)
        raise RequestError(f"{name}={shown}: expected one of {', '.join(choices)}")


def _check_stop(name: str, value: Any) -> None:
    texts = isinstance(value, Sequence) and not isinstance(value, str)
    if not texts or not all(isinstance(text, str) and text for text in value):
        raise RequestError(f"{name}={value!r}: expected a list of non-empty strings")


def _check_sampling(name: str, value: Any) -> None:
    if value is None or isinstance(value, SamplingParams):
        return
    if not is_list(value) or not all(isinstance(params, SamplingParams) for params in value):
        raise RequestError(
            f"{name}={reprlib.repr(value)}: expected jaxrag.Sampling, such as "
            "jaxrag.Sampling(temperature=0.7), or a list with one for each question"
        )


@dataclasses.dataclass(frozen=True)
class Ask:
    """How a question is answered. ``jaxrag.generate`` says what every field means.

    Raises RequestError for a value of another kind.
    """

    blocks: "Sequence[str | Sequence[int] | HostArray]" = option((), check=check_texts, shown=False)
    earlier_turns: EarlierTurns = option("exact", check=_check_choice, shown=False)
    plain: Plain = option("off", check=_check_choice, shown=False)
    passage_rules: str = option("common", shown=False)
    method: "str | Method | None" = option(
        None,
        f"{', '.join(METHOD_NAMES)}, or a .toml file",
        "NAME",
        unset="turborag for a model that was trained to read chunks apart, else primed, "
        "fusionrag or cacheblend, the first that --kb has KV for",
        check=_check_method,
    )
    recompute_ratio: float | None = option(
        None,
        "share of the chunk tokens computed again, 0 to 1",
        "R",
        unset="what `jaxrag kb gate` found, else the method's own",
        check=_check_ratio,
    )
    misses: Misses | None = option(
        None,
        "chunks that the store does not hold: encode and keep them, or compute them where they "
        "stand, over all that precedes them, and keep nothing",
        unset="the method's own",
    )
    prefix_cache: bool | None = option(
        None,
        "keep leading parts as full attention computed them, for prompts that begin alike",
        check=check_flag,
    )
    decode: "str | DecodeRule | None" = option(
        None,
        f"how generated tokens attend: {', '.join(DECODE_NAMES)}"
        "; settings follow a colon, as in topn:n=64",
        "RULE",
        unset="the method's own",
    )
    template: "str | PromptTemplate | None" = option(
        None,
        "a template's name or .toml file",
        "NAME",
        unset="that of --kb or --model",
        check=_check_template,
    )
    k: int = option(5, "chunks to retrieve", "N", check=check_count)
    where: Mapping[str, Any] | None = option(
        None,
        'only documents with this metadata, such as \'{"year": {"$gte": 2020}}\'',
        "JSON",
        parse=str,
    )
    search_mode: SearchMode | None = option(
        None,
        "by words, by meaning, or by both",
        flag="--search",
        unset="hybrid where every chunk has a vector, else bm25",
    )
    min_score: float | None = option(
        None,
        "leave out chunks that score less, by words or by meaning",
        "X",
        unset="none",
    )
    groups: tuple[str, ...] | None = option(
        None,
        "what readers of these groups may read: of documents with groups, only theirs",
        "A,B",
        unset="everything",
        check=check_own,
    )
    unanswerable: Unanswerable = option(
        "abstain",
        "where no chunk is found: say so, or ask without any",
        check=_check_choice,
    )
    max_new_tokens: int = option(64, "of the answer", "N", parse=parse_count, check=check_count)
    sampling: SamplingParams | Sequence[SamplingParams] | None = option(
        None, check=_check_sampling, shown=False
    )
    stop: Sequence[str] = option(
        (), "ends the answer; repeatable", "TEXT", repeatable=True, check=_check_stop,
    )  # fmt: skip
    cite: Cite = option(
        "no",
        "say which passage a part of the answer is from, by where the model looked: beside it, or "
        "as [1] in its text",
        check=_check_choice,
    )

    def __post_init__(self) -> None:
        check_fields(self)

    def samplings(self, count: int) -> list[SamplingParams]:
        """One for each of so many questions, greedy for None.

        Raises RequestError for a list of another length.
        """
        given = self.sampling
        if given is None or isinstance(given, SamplingParams):
            return list(itertools.repeat(given or SamplingParams(), count))
        if len(given) != count:
            raise RequestError(
                f"sampling has {len(given)} entries for {count} question(s); give one for each, or "
                "a single SamplingParams for all"
            )
        return list(given)
