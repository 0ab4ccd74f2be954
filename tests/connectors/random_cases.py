"""A random model, stored chunks, prompts over them and our greedy answers, in a folder."""

import dataclasses
import json
from pathlib import Path

import numpy as np

from jaxrag.connectors import manifest
from jaxrag.engine.engine import engine_of
from jaxrag.engine.request import Prompt, Request
from jaxrag.kv.store import ChunkStore, content_id, derive
from jaxrag.models.export import export_hf
from jaxrag.models.model import load_model, random_model
from jaxrag.reuse.methods import METHODS
from jaxrag.serve.connector_files import parts_table, write_manifest

COUNT = 16  # tokens of an answer
PREFIX = 37
METHOD = {"isolated": "turborag", "after_prefix": "full_reuse"}


def make(folder, config, *, encoder="isolated", stored="native", questions=25, lengths=(20, 300),
         library=32, each=(2, 7), seed=0):  # fmt: skip
    """Write FOLDER/model, store, manifest and cases.json; returns what the last holds."""
    folder = Path(folder)
    source = random_model(config, seed)
    export_hf(folder / "model", source.params, config)
    model = load_model(folder / "model", dtype=config.dtype)
    draw = np.random.default_rng(seed)

    def ids(count):
        return draw.integers(3, config.vocab_size, count).astype(np.int32)

    prefix = ids(PREFIX)
    chunks = [ids(int(draw.integers(*lengths))) for _ in range(library)]
    cases = []
    for _ in range(questions):
        chosen = draw.permutation(library)[: int(draw.integers(*each))]
        cases.append({"chunks": chosen.tolist(), "final": ids(int(draw.integers(8, 50))).tolist()})
    fingerprint = derive(model.fingerprint, stored=stored)
    layout = dataclasses.replace(model.whole_kv_layout, stored=stored)
    store = ChunkStore.open(folder / "store", fingerprint, layout, mode="rw")
    answers, firsts = {}, {}
    for name in (METHOD[encoder], "full_attention"):
        firsts[name] = []
        answers[name] = answered(model, store, name, prefix, chunks, cases, firsts[name])
    store.close()
    digest = "" if model.tokenizer is None else model.tokenizer.digest
    engine = manifest.ServedModel(
        store=str(folder / "store"),
        fingerprint=fingerprint,
        layout=layout,
        rope=config.rope,
        tokenizer=digest,
        weights=manifest.weights_of(folder / "model", folder / "memo.json"),
        encoder=encoder,
    )
    parts = parts_table((content_id(digest, it), it) for it in chunks)
    gate = manifest.Gate(METHOD[encoder], 0, 0)
    write_manifest(folder / "manifest", manifest.Manifest(engine, prefix, (gate,), parts))
    data = {
        "prefix": prefix.tolist(),
        "chunks": [it.tolist() for it in chunks],
        "cases": cases,
        "stored": answers[METHOD[encoder]],
        "full": answers["full_attention"],
        "stored_firsts": firsts[METHOD[encoder]],
        "full_firsts": firsts["full_attention"],
    }
    (folder / "cases.json").write_text(json.dumps(data))
    return data


def answered(model, store, method, prefix, chunks, cases, firsts=None):
    """Our answers, one request at a time; what the method reuses is stored on the way.

    The logarithm of each first token's probability is added to ``firsts``.
    """
    engine, answers = engine_of(model), []
    for case in cases:
        parts = tuple(chunks[at] for at in case["chunks"])
        prompt = Prompt(prefix, parts, np.array(case["final"], np.int32))
        tokens, logprobs = [], []
        for progress in engine.iterate([Request(prompt, store, METHODS[method], COUNT)]):
            if progress.error is not None:
                raise progress.error
            tokens += list(progress.new)
            logprobs += progress.logprobs
        if firsts is not None:
            firsts.append(float(logprobs[0]))
        answers.append([int(token) for token in tokens])
    return answers
