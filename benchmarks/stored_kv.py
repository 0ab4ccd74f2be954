"""What storing KV in fewer bytes does to answers: KL to the same method over KV as computed.

The prompts are a data set's, a few passages of at most ``chunk_tokens`` tokens each. Every chunk is
encoded once and put into one store a form; ``bfloat16`` is no form that a knowledge base has, and
is rounded by this script. A method answers greedily over KV in the model's dtype; then, shown that
answer token by token, it is asked for each next token over KV of every form, that of the model's
dtype again among them, which says how much differs by itself. Finished prompts are kept as lines
beside the result's file, and not measured again.

example: python benchmarks/stored_kv.py --model DIR --data nq-open-oracle.jsonl --out FILE
"""

import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from script import Result, run_script

from jaxrag.base.errors import RequestError
from jaxrag.base.options import option, parse_names
from jaxrag.kv.store import MemoryStore, derive
from jaxrag.kv.store.base import NewChunk
from jaxrag.kv.store.writer import PutResult
from jaxrag.measure.evals.asked import ITEMS, ask_all
from jaxrag.measure.evals.datasets.options import DATASET_NAMES, DatasetOptions
from jaxrag.measure.evals.datasets.run import items_of, template_of
from jaxrag.measure.evals.datasets.spec import DatasetItem
from jaxrag.measure.evals.gate import answered, forced_logits, kl_divergence
from jaxrag.measure.evals.statistics import bootstrapped, plain, share
from jaxrag.measure.machine import describe
from jaxrag.measure.subject import described
from jaxrag.models.model import Model, load_model
from jaxrag.reuse.encode import ChunkEncoding, ChunkInContext
from jaxrag.reuse.methods import default_choice, method_named
from jaxrag.serve.answer_files import AnswerFile
from jaxrag.serve.ask import Ask
from jaxrag.serve.conversation import Passage
from jaxrag.serve.questions import ReadyQuestion, Settings, prepare, resolve

NATIVE, BFLOAT16 = "native", "bfloat16"


@dataclasses.dataclass(frozen=True)
class StoredOptions:
    """What is measured."""

    model: str = option(dataclasses.MISSING, "a directory", "DIR")
    data: str = option(dataclasses.MISSING, "the data set's own file", "FILE")
    dataset: str = option("nq_open", "whose file it is", "NAME", choices=DATASET_NAMES)
    number: int = option(200, "first questions of the file", "N", flag="--num")
    passages: int = option(3, "to a question", "N")
    chunk_tokens: int = option(256, "of a passage, the first of it", "N")
    answer_tokens: int = option(8, "of an answer that are compared", "N")
    methods: tuple[str, ...] = option(
        (), "that read stored KV", "NAME,...", parse=parse_names,
        unset="the model's default and full_reuse",
    )  # fmt: skip
    forms: tuple[str, ...] = option(
        (NATIVE, BFLOAT16, "int8", "int4"), "of stored KV", "NAME,...", parse=parse_names
    )
    seed: int = option(7, "of passages that are added, and of resampling", "N")
    chat: bool = option(True, "put the prompt into one user message of the model's chat template")
    finished: bool = option(False, "measure no more, and report the prompts that are kept")
    keep: Path | None = option(
        None, "where finished prompts are kept, to go on from", "FILE", unset="they are not"
    )


class RoundedStore(MemoryStore):
    """Keeps KV rounded to bfloat16, in the model's dtype."""

    def _put(self, new: NewChunk) -> PutResult:
        rounded = new.kv.astype(ml_dtypes.bfloat16).astype(new.kv.dtype)
        return super()._put(new._replace(kv=rounded))


@dataclasses.dataclass(frozen=True)
class Study:
    """One model and the stores of its KV, by form; that in its dtype comes first."""

    options: StoredOptions
    model: Model
    stores: Mapping[str, MemoryStore]
    settings: Mapping[str, Mapping[str, Settings]]  # by method, then by form

    @classmethod
    def open(cls, options: StoredOptions) -> "Study":
        """Load the model. RequestError for a form or method that there is not."""
        model = load_model(options.model)
        stores = {form: _store(model, form) for form in dict.fromkeys((NATIVE, *options.forms))}
        default = default_choice(model.config, model.reading).method.name
        names = options.methods or tuple(dict.fromkeys((default, "full_reuse")))
        ask = Ask(template=template_of(_dataset(options)), max_new_tokens=options.answer_tokens)
        asks = {name: dataclasses.replace(ask, method=method_named(name)) for name in names}
        settings = {
            name: {  # forms of the same KV are compared: any neighbours do
                form: resolve(one, model=model, store=store, neighbours="prompt")
                for form, store in stores.items()
            }
            for name, one in asks.items()
        }
        return cls(options, model, stores, settings)

    def measure(self, item: DatasetItem) -> dict[str, Any]:
        """A prompt by every method and form: KL of each next token, and the first token."""
        tokenizer = self.model.text_tokenizer()
        documents = [
            Passage(tokenizer.encode(text)[: self.options.chunk_tokens], title)
            for title, text in item.documents
        ]
        methods = {}
        for name, by_form in self.settings.items():
            ready = {form: prepare(it, item.question, documents) for form, it in by_form.items()}
            native = ready[NATIVE]
            self._keep(native)
            [answer] = answered([native], 1)
            forced = [answer.token_ids[: self.options.answer_tokens - 1]]
            [[wanted], _] = forced_logits(by_form[NATIVE], [native], forced)
            forms = {}
            for form, question in ready.items():
                [[found], _] = forced_logits(by_form[form], [question], forced)
                forms[form] = {
                    "kl": kl_divergence(wanted, found).tolist(),
                    "first": bool(wanted[0].argmax() == found[0].argmax()),
                }
            methods[name] = forms
        for store in self.stores.values():
            store.delete(list(store.keys()))
        return {"id": item.id, "tokens": native.prompt.num_tokens, "methods": methods}

    def _keep(self, asked: ReadyQuestion) -> None:
        """Encode its chunks, and the prefix, and put them into every store."""
        prefix, encoder = asked.prompt.prefix, str(asked.method.encoder)
        encodings = {
            form: ChunkEncoding(self.model, store, prefix, primer=asked.primer)
            for form, store in self.stores.items()
        }
        native = encodings[NATIVE]
        wanted = {native.key(encoder, ids): ChunkInContext(ids) for ids in asked.prompt.chunks}
        for made in native.encode(encoder, native.missing(encoder, wanted)):
            for encoding in encodings.values():
                key = encoding.key(encoder, made.chunk.ids)
                encoding.held.put(**dataclasses.replace(made, key=key).for_store())
        for encoding in encodings.values():
            encoding.keep_prefix()


def _store(model: Model, form: str) -> MemoryStore:
    fingerprint = derive(model.fingerprint, stored=form)
    if form == BFLOAT16:
        return RoundedStore(fingerprint, model.whole_kv_layout)
    return MemoryStore(fingerprint, dataclasses.replace(model.whole_kv_layout, stored=form))  # type: ignore[arg-type]


def _dataset(options: StoredOptions) -> DatasetOptions:
    return DatasetOptions(
        options.dataset,
        (options.data,),
        model=options.model,
        number=options.number,
        documents=options.passages if options.dataset == "nq_open" else None,
        seed=options.seed,
        chat=options.chat,
    )


def run(options: StoredOptions) -> Result:
    """Measure every prompt that is not kept yet; a mean for each method and form."""
    if min(options.number, options.passages, options.chunk_tokens, options.answer_tokens) < 1:
        raise RequestError("number, passages, chunk_tokens and answer_tokens must be positive")
    items = items_of(_dataset(options))[: options.number]
    study = Study.open(options)
    setting = {
        "dataset": options.dataset,
        "passages": options.passages,
        "chunk_tokens": options.chunk_tokens,
        "answer_tokens": options.answer_tokens,
        "methods": list(study.settings),
        "forms": list(study.stores),
        "seed": options.seed,
        "chat": options.chat,
    }
    with tempfile.TemporaryDirectory(prefix="jaxrag-") as folder:
        kept = Path(f"{options.keep or Path(folder) / 'prompts'}{ITEMS}")
        file = AnswerFile(kept, setting | {"model": study.model.digest})
        if options.finished:
            items = [item for item in items if item.id in file.done]
        lines = [line for _, line in ask_all(study.measure, items, file, progress=True)]
    return result_of(study, setting, lines)


def result_of(
    study: Study, setting: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]
) -> Result:
    """What finished prompts say together, JSON-able."""
    native = study.model.whole_kv_layout
    rows = []
    for method in study.settings:
        for form, store in study.stores.items():
            cells = [line["methods"][method][form] for line in lines]
            kl, first = (np.array([np.mean(cell[it]) for cell in cells]) for it in ("kl", "first"))
            rounded = dataclasses.replace(native, dtype="bfloat16")
            layout = rounded if form == BFLOAT16 else store.layout
            nbytes = layout.stored_nbytes(study.options.chunk_tokens) / study.options.chunk_tokens
            rows.append({
                "method": method,
                "form": form,
                "bytes_per_token": nbytes,
                "kl": bootstrapped(kl, study.options.seed),
                "same_first_token": plain(share(first, np.arange(len(lines)))),
            })  # fmt: skip
    template = next(iter(study.settings.values()))[NATIVE].template
    name = Path(study.options.model).name
    return {
        "benchmark": "stored_kv",
        **setting,
        "prompts": len(lines),
        "prompt_tokens": float(np.mean([line["tokens"] for line in lines])),
        "rows": rows,
        "model": described(name, study.model, template),
        "machine": describe(),
    }


def report(result: Result) -> Iterator[str]:
    """The result as lines of a table."""
    yield (
        f"{result['dataset']}, {result['prompts']} prompts of {result['passages']} passages, "
        f"{result['prompt_tokens']:.0f} tokens; KL over {result['answer_tokens']} answer tokens"
    )
    yield f"{'method':<14} {'form':<9} {'KiB/token':>9} {'KL':>30} {'first token':>12}"
    for row in result["rows"]:
        kl, same = row["kl"], row["same_first_token"]
        yield (
            f"{row['method']:<14} {row['form']:<9} {row['bytes_per_token'] / 1024:>9.1f} "
            f"{kl['value']:>10.5f} [{kl['low']:.5f}, {kl['high']:.5f}] {same['value']:>12.1%}"
        )


if __name__ == "__main__":
    sys.exit(run_script(__doc__, StoredOptions, run, report))
