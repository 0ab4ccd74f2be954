"""Programs compiled ahead: requests of the shapes that will be asked for, served first."""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from jaxrag.base.shapes import QUESTION_WIDTHS, bucket
from jaxrag.base.types import HostArray
from jaxrag.engine.engine import engine_of
from jaxrag.engine.prefill import PREFILL_TOKENS
from jaxrag.engine.request import Prompt, Request
from jaxrag.kv.store import KVStore, MemoryStore
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.models.model import Model
from jaxrag.models.text.prompts import PromptTemplate
from jaxrag.reuse.decode import DecodeRule
from jaxrag.reuse.methods import Method
from jaxrag.serve.ask import Ask, check_count, check_flag, check_texts
from jaxrag.serve.conversation import Text
from jaxrag.serve.questions import prepare, resolve

SHORT_TOKENS = 128  # of the longest final block that is usual over chunks
_ASKED = "What?"
_CHUNK_TOKENS = 512  # where there is no knowledge base
_PRIMER_TOKENS = 300  # of a primer, about
_BYTES = 1 << 30  # of the chunks, which are not kept
_NOTHING = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True)
class Warmed:
    """What ``warm_up`` did.

    Attributes:
      programs: that were compiled, or read from the disk.
      prompts: that were served for it.
    """

    programs: int
    prompts: int
    seconds: float


def warm_up(
    questions: Sequence[Text] = (),
    *,
    kb: KnowledgeBase | None = None,
    model: Model | None = None,
    method: str | Method | None = None,
    recompute_ratio: float | None = None,
    decode: str | DecodeRule | None = None,
    template: str | PromptTemplate | None = None,
    k: int = 5,
    max_new_tokens: int = 64,
    stream: bool = False,
    batch_size: int = 1,
) -> Warmed:
    """Compile what ``generate`` with these arguments will need, so that no question waits for it.

    Programs have shapes: of the question and of the chunks, in steps of powers of two, of
    ``batch_size`` (8 for a list of questions), and of ``stream``. On disk they stay for the next
    process (``load_model``), where warming up takes a fraction of the time.

    Args:
      questions: like those that will come; their chunks are in the pool afterwards. None: questions
        of 16 to 128 tokens over ``k`` chunks of the largest size, and prompts of every length
        without any; the pool is empty afterwards.
      model: needed without ``kb``; without questions only.
      method: what its selector and its encoders need is compiled, too.
      stream: whether answers will be read as they grow.

    The other arguments are those of ``generate``.

    Raises RequestError as ``generate`` does.
    """
    start = time.perf_counter()
    check_flag("stream", stream)
    check_texts("questions", questions)
    check_count("batch_size", batch_size)
    ask = Ask(
        method=method,
        recompute_ratio=recompute_ratio,
        decode=decode,
        template=template,
        k=k,
        max_new_tokens=max_new_tokens,
    )
    settings = resolve(ask, kb=kb, model=model)
    engine = engine_of(settings.model)
    if len(questions):
        asked = (prepare(settings, text) for text in questions)
        requests: list[Request] = [
            dataclasses.replace(request, rows=batch_size, watched=stream) for request in asked
        ]
        programs = engine.warm_up(requests)
    else:
        if kb is not None:
            kb.search(_ASKED, 1)
        sizes = () if kb is None else (kb.chunking.chunk_tokens,)
        shapes = requests_like(
            settings.model, settings.method, sizes, k, max_new_tokens, batch_size, watched=stream
        )
        requests = list(shapes)
        programs = engine.warm_up(requests)
        engine.forget()
    return Warmed(programs, len(requests), time.perf_counter() - start)


def requests_like(
    model: Model,
    method: Method,
    chunk_tokens: Iterable[int],
    k: int,
    max_new_tokens: int,
    rows: int,
    *,
    watched: bool,
    store: KVStore | None = None,
) -> Iterator[Request]:
    """Requests of random ids in the shapes of questions that are to come.

    Final blocks of usual lengths over ``k`` chunks of each of these sizes (of 512 tokens where none
    is given), or as many as the context holds, and prompts without chunks in all widths. Their KV
    is kept in ``store``; None: in one that goes with them.
    """
    most = model.config.max_positions
    draw = np.random.default_rng(0)

    def ids(length: int) -> HostArray:
        return draw.integers(0, model.config.vocab_size, length, dtype=np.int32)

    if store is None:
        layout = model.kv_layout
        store = MemoryStore(model.fingerprint, layout, max_tokens=most, max_bytes=_BYTES)
    prompts = []
    for size in set(chunk_tokens) or {_CHUNK_TOKENS}:
        room = most - SHORT_TOKENS - max_new_tokens
        count = min(k, room // size)
        chunks = tuple(ids(size) for _ in range(count))
        finals = _widths(SHORT_TOKENS) if count > 0 else []
        prompts += [Prompt(_NOTHING, chunks, ids(length)) for length in finals]
    lengths = _widths(min(PREFILL_TOKENS, most - 1))
    prompts += [Prompt(_NOTHING, (), ids(length)) for length in lengths]
    for prompt in prompts:
        room = most - max(prompt.lengths, default=0)
        primer = ids(min(_PRIMER_TOKENS, room)) if method.sees_primer else None
        tokens = max(min(max_new_tokens, most - prompt.num_tokens), 1)
        yield Request(prompt, store, method, tokens, rows=rows, watched=watched, primer=primer)


def of_lengths(model: Model, request: Request) -> list[Request]:
    """A request with final blocks of usual lengths, of random ids, over its own chunks."""
    draw, size = np.random.default_rng(0), model.config.vocab_size
    finals = [draw.integers(0, size, width, dtype=np.int32) for width in _widths(SHORT_TOKENS)]
    prompt = dataclasses.replace(request.prompt, question=None)
    prompts = [dataclasses.replace(prompt, final=ids) for ids in finals]
    return [dataclasses.replace(request, prompt=prompt) for prompt in prompts]


def _widths(longest: int) -> list[int]:
    """Lengths up to ``longest`` of what is run in one piece each, one a width."""
    widths = [*QUESTION_WIDTHS, bucket(1)]
    while widths[-1] < longest:
        widths.append(2 * widths[-1])
    return sorted({min(width, longest) for width in widths})
