"""How near methods come to full attention on a data set's prompts, token by token.

So few prompts tell methods apart that would need thousands of right and wrong answers. Methods may
be measured behind several encoders and primers, and beside the full attention of other weights.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrag.base.errors import RequestError
from jaxrag.base.types import HostArray
from jaxrag.kv.store import MemoryStore
from jaxrag.measure.evals.asked import ask_all, kept
from jaxrag.measure.evals.datasets.asking import is_own
from jaxrag.measure.evals.datasets.corpus import account_of, note_in, with_neighbours
from jaxrag.measure.evals.datasets.nearness import (
    FULL,
    ShownAnswer,
    at_ratios,
    control_of,
    control_table,
    near_cells,
    nearness_of,
    needs,
    shown,
    times_over,
    with_controls,
)
from jaxrag.measure.evals.datasets.options import NearOptions
from jaxrag.measure.evals.datasets.run import items_of, template_of
from jaxrag.measure.evals.datasets.spec import DatasetItem
from jaxrag.measure.evals.datasets.table import dataset_named
from jaxrag.measure.evals.gate import answered
from jaxrag.measure.evals.statistics import (
    LEVEL,
    bootstrapped,
    bootstrapped_difference,
    median,
    plain,
    share,
)
from jaxrag.measure.subject import described
from jaxrag.measure.table import Table, percent
from jaxrag.models.model import Model, load_model
from jaxrag.reuse.encode import encoder_named, primer_named
from jaxrag.reuse.methods import METHODS, Method, method_named
from jaxrag.serve.answer_files import AnswerFile
from jaxrag.serve.ask import Ask
from jaxrag.serve.conversation import Passage
from jaxrag.serve.questions import Settings, prepare, resolve


@dataclasses.dataclass(frozen=True)
class NearStudy:
    """One model, and how its prompts are asked: by full attention, and by each method.

    Full attention is the reference's, where ``options`` name one.
    """

    options: NearOptions
    model: Model
    store: MemoryStore
    full: Settings
    arms: Mapping[str, Settings]

    @classmethod
    def open(
        cls, options: NearOptions, model: Model, reference: Model | None = None
    ) -> "NearStudy":
        """Resolve methods and primers. RequestError or ConfigError for one that there is not.

        RequestError for a reference of another tokenizer too.
        """
        reference = reference or model
        if reference.text_tokenizer().digest != model.text_tokenizer().digest:
            raise RequestError(
                f"--reference {options.reference}: its tokenizer is not that of {options.model}; "
                "tokens cannot be compared"
            )
        longest = model.config.max_positions
        store = MemoryStore(model.fingerprint, model.kv_layout, max_tokens=longest)
        template = template_of(options)
        ask = Ask(template=template, max_new_tokens=options.answer_tokens)

        def settings(method: Method) -> Settings:
            return resolve(dataclasses.replace(ask, method=method), model=model, store=store)

        arms = {name: settings(method) for name, method in arms_of(options).items()}
        arms = with_controls(arms) if options.controls else arms
        numbering = dataset_named(options.name).numbering
        arms = with_neighbours(options, arms, items_of, numbering, options.chunk_tokens)
        full = resolve(dataclasses.replace(ask, method=METHODS[FULL]), model=reference)
        return cls(options, model, store, full, arms)

    def measure(self, item: DatasetItem) -> dict[str, Any]:
        """One prompt by every method; JSON-able."""
        documents = passages_of(item, self.model, self.options.chunk_tokens)
        ready = prepare(self.full, item.talk, documents)
        [answer] = answered([ready], 1)
        most = self.options.answer_tokens - 1
        whole = ShownAnswer.by(self.full, ready, answer.token_ids, item, most)
        found: dict[str, Any] = {
            "id": item.id,
            "tokens": ready.prompt.num_tokens,
            "full": {"text": answer.text, "gold": whole.log_probability, "ttft": _ttft(answer)},
            "methods": {},
        }
        for name, settings in self.arms.items():
            ready = prepare(settings, item.talk, documents)
            line = whole.to(settings, ready)
            [answer] = answered([ready], 1)  # its chunks are in the pool now
            again = line["recomputed"] / sum(ready.prompt.lengths)
            line |= {"recomputed": again if settings.method.encoder else 1.0}
            found["methods"][name] = line | {"text": answer.text, "ttft": _ttft(answer)}
        self.store.delete(list(self.store.keys()))
        return found


def passages_of(item: DatasetItem, model: Model, most: int) -> list[Passage]:
    """The documents of a question, each of at most so many tokens."""
    encode = model.text_tokenizer().encode
    return [Passage(encode(text)[:most], title) for title, text in item.documents]


def arms_of(options: NearOptions) -> dict[str, Method]:
    """Methods by the names of their rows: by encoder and primer, where they read any, and ratio.

    Raises RequestError for a method twice, and for one that is full attention.
    """
    found: dict[str, Method] = {}
    for named in options.methods:
        method = method_named(named)
        if method.encoder is None and options.reference is None:
            raise RequestError(f"--method {named}: every method is compared with full attention")
        variants = {method.name: method}
        if options.encoders and method.encoder and encoder_named(method.encoder).sees_prefix:
            variants = {
                f"{method.name} {encoder}": dataclasses.replace(method, encoder=encoder)
                for encoder in options.encoders
            }
        for name, variant in variants.items():
            arms = [(name, variant)]
            if variant.sees_primer and variant.primer is None:
                arms = [
                    (f"{name} {primer.name}", dataclasses.replace(variant, primer=it))
                    for it in options.primers
                    if (primer := primer_named(it)).wraps == variant.wraps
                ]
            if not arms:
                raise RequestError(
                    f"--method {named}: no --primer for it; name a file of `jaxrag train primer "
                    f"--form {'packets' if variant.wraps else 'primer'}`"
                )
            for name, arm in arms:
                if name in found:
                    raise RequestError(f"--method {named}: there are two of {name!r}; rename one")
                found[name] = arm
    return at_ratios(found, options.ratios)


def run(
    options: NearOptions, progress: bool = True, load: Callable[[str], Model] = load_model
) -> dict[str, Any]:
    """Measure every prompt that is not kept yet; JSON-able.

    Finished prompts are kept as lines beside ``options.out``, and not measured again.

    Args:
      load: of the model's directory.

    Raises RequestError or ConfigError for what cannot be asked, before anything is.
    """
    arms_of(options)  # refused before the model is loaded
    items = items_of(dataclasses.replace(options, number=None))[: options.number]
    of = options.reference
    study = NearStudy.open(options, load(str(options.model)), None if of is None else load(of))
    setting: dict[str, Any] = {
        "dataset": options.name,
        "passages": options.documents,
        "earlier": options.earlier,
        "noise": list(options.noise),
        "chunk_tokens": options.chunk_tokens,
        "answer_tokens": options.answer_tokens,
        "methods": list(study.arms),
        "seed": options.seed,
        "chat": options.chat,
        "template": study.full.template.to_dict(),
    }
    if (neighbours := account_of(study.arms)) is not None:
        setting["neighbours"] = neighbours
    if of is not None:
        setting["reference"] = study.full.model.digest
    with kept(options.out, study.model.exchange, first=True) as path:
        primers = {name: _primer(settings) for name, settings in study.arms.items()}
        file = AnswerFile(path, setting | {"model": study.model.digest, "primers": primers})
        lines = ask_all(study.measure, items, file, progress=progress)
    return setting | result_of(study, lines)


def _primer(settings: Settings) -> Any:
    return None if settings.primer is None else settings.primer.to_dict()


def _ttft(answer: Any) -> float | None:
    """Seconds; None where something was compiled or encoded for it."""
    return answer.timings["ttft"] if is_own(answer.timings, answer.counts) else None


def result_of(
    study: NearStudy, lines: Sequence[tuple[DatasetItem, Mapping[str, Any]]]
) -> dict[str, Any]:
    """What finished prompts say together; the first method is what the others are compared with."""
    seed, layout = study.options.seed, study.model.whole_kv_layout
    size = study.options.chunk_tokens
    spec = dataset_named(study.options.name)
    each = np.arange(len(lines))

    def right(texts: Sequence[str]) -> HostArray:
        scored = zip(texts, lines, strict=True)
        return np.array([spec.score(study.options.metric, text, it) for text, (it, _) in scored])

    full = [line["full"] for _, line in lines]
    rows, first = [], np.zeros(0)
    for name, settings in study.arms.items():
        own = [line["methods"][name] for _, line in lines]
        kl = np.array([np.mean(it["kl"]) for it in own])
        control = control_of(name, list(study.arms))
        random = None if control is None else [line["methods"][control] for _, line in lines]
        method = settings.method
        first = first if len(first) else kl
        around = settings.primer.around if settings.primer else None
        more = around[1] if around else 0  # of every chunk
        rows.append({
            "method": name,
            **nearness_of(own, full, each, random, seed),
            "kl_minus_first": bootstrapped_difference(kl, first, seed),
            "kl_over_first": bootstrapped(kl, seed, over=first) if first.all() else None,
            "right": plain(share(right([it["text"] for it in own]), each)),
            "recomputed": float(np.mean([it["recomputed"] for it in own])),
            "bytes_per_token": len({method.encoder, method.first_encoder} - {None})
            * layout.stored_nbytes(size + more) / size,
            "ttft_over_full": times_over(own, full),
        })  # fmt: skip
    name = Path(str(study.options.model)).name
    return {
        "prompts": len(lines),
        "prompt_tokens": float(np.mean([line["tokens"] for _, line in lines])),
        "metric": study.options.metric,
        "full": {
            "right": plain(share(right([it["text"] for it in full]), each)),
            "ttft": plain(median(np.array([it["ttft"] for it in full if it["ttft"] is not None]))),
        },
        "interval": f"{LEVEL:.0%}, of resampled prompts",
        "rows": rows,
        "model": described(name, study.model, study.full.template),
    }


def tables(result: Mapping[str, Any]) -> Iterator[Table]:
    """A row for each method; and beside their controls, where there are some."""
    first = result["rows"][0]["method"]
    yield Table(
        f"{result['dataset']}, {result['prompts']} prompts of {result['prompt_tokens']:.0f} "
        "tokens; KL to full attention and the same next token over "
        f"{result['answer_tokens']} tokens of its answer, log-probability of the gold minus full "
        f"attention's, KL over that of {first} and prompts that their difference takes to show, "
        f"{result['metric']} (full attention {percent(result['full']['right'])}), chunk tokens "
        "computed again, stored KiB a token, time to first token from the pool over full"
        f"{note_in(result)}",
        [
            [
                "method", "KL", "same token, %", "gold", f"KL / {first}", "takes", "right, %",
                "again, %", "KiB", "ttft / full",
            ],
            *(
                [
                    row["method"],
                    *near_cells(row),
                    shown(row["kl_over_first"], ".3f"),
                    needs(row["kl_minus_first"]),
                    percent(row["right"]),
                    f"{100 * row['recomputed']:.1f}",
                    f"{row['bytes_per_token'] / 1024:.1f}",
                    shown(row["ttft_over_full"], ".3f"),
                ]
                for row in result["rows"]
            ),
        ],
    )  # fmt: skip
    yield from control_table([(row["method"], row) for row in result["rows"]])
