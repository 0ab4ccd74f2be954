"""What another engine needs to read a knowledge base's chunks: `jaxrag kb connector`."""

import dataclasses
import json
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxrag.base.errors import KnowledgeBaseError, RequestError
from jaxrag.base.gguf import is_gguf
from jaxrag.base.types import HostArray
from jaxrag.connectors.manifest import Gate, Manifest, ServedModel, weights_of
from jaxrag.kv.store import ChunkStore, ReadThrough
from jaxrag.kv.store.keys import content_id
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.models.digest import cache_directory, params_digest, weights_digest
from jaxrag.models.hf import is_hf_directory, load_config, load_params
from jaxrag.models.model import Model
from jaxrag.models.text.passage_rules import passage_rules as rules_of
from jaxrag.reuse.encode import (
    ChunkEncoding,
    ChunkInContext,
    encoder_named,
    prefix_key,
    primer_id,
)
from jaxrag.reuse.methods import METHODS
from jaxrag.serve import prompt_log
from jaxrag.serve.compatibility import gate_subject
from jaxrag.serve.connector_files import parts_table, write_manifest

# By the encoder of stored chunks: the method that reuses them as they are, and computes nothing.
METHOD_OF = {"isolated": "turborag", "after_prefix": "full_reuse", "primed": "primed"}


@dataclasses.dataclass(frozen=True)
class ConnectorReport:
    """What was written.

    Attributes:
      path: of the folder.
      encoder: of the chunks.
      parts: chunks that prompts may hold, each content once.
      noted: of these, those that are no document's but that prompts to the engine had.
      encoded: of those, now.
      missing: of these, without KV in the store: prompts that hold them are computed.
      gates: what speaks for answers from stored chunks alone.
      command: starts vLLM.
    """

    path: str
    encoder: str
    parts: int
    noted: int
    encoded: int
    missing: int
    gates: tuple[Gate, ...]
    command: str


def write_connector(
    kb: KnowledgeBase,
    out: str | os.PathLike[str],
    *,
    encoder: str | None = None,
    serve: str | os.PathLike[str] | None = None,
    groups: Sequence[str] = (),
    passage_rules: str = "common",
) -> ConnectorReport:
    """Write or refresh the folder by which another engine reads the chunks.

    The template's prefix is encoded where it is not stored, and so is what an engine noted in the
    folder as wanted. Documents that were removed are no part of it any more, and an engine that
    runs reads it again within seconds.

    Args:
      kb: opened with its model, for writing.
      out: the folder.
      encoder: of the chunks; None: the first that the knowledge base keeps of those that can be.
      serve: the Hugging Face directory that the engine loads; None: the model's own.
      groups: of documents that name groups in their metadata those with one of these.
      passage_rules: how passages are found that prompts pasted; of these none is stored where
        nothing but a gate of the template speaks for answers over stored chunks.

    Raises:
      KnowledgeBaseError: no model, or opened for reading.
      RequestError: an encoder whose chunks have seen each other or that is not kept; a directory
        that is none, or of other weights.
      ConfigError: passage rules that are none.
      StoreError: a folder that cannot be written, or a damaged file of what is wanted.
    """
    model = kb.model
    if model is None or kb.mode != "rw":
        raise KnowledgeBaseError(
            f"{kb.path} was opened for reading; open it with its model and mode 'rw'"
        )
    if model.config.own_kv_heads is not None:
        raise RequestError(
            f"{kb.path}: heads of a {model.config.family} model lie in one shape here, which no "
            "other engine reads; answer with `jaxrag serve`"
        )
    if model.config.rope_layers is not None:
        raise RequestError(
            f"{kb.path}: layers of this model rotate keys in {len(model.config.ropes)} ways, which "
            "the connector does not write; answer with `jaxrag serve`"
        )
    if kb.store.layout.rows:
        raise RequestError(
            f"{kb.path}: chunks of a {model.config.family} model hold maps of recurrent layers, "
            "which no other engine reads; answer with `jaxrag serve`"
        )
    if kb.store.layout.drops:
        raise RequestError(
            f"{kb.path} is stored as {kb.store.layout.stored}, which leaves tokens out: another "
            "engine would read zeros there; ingest with --stored int4, int8 or native"
        )
    rules = rules_of(passage_rules)
    chosen = _encoder(kb, encoder)
    folder = _served(model, serve)
    tokenizer = model.text_tokenizer()
    prefix = kb.template.prefix_ids(tokenizer)
    primer = None if kb.primer is None else kb.primer.tokens(kb.template, tokenizer)
    encoding = ChunkEncoding(model, kb.store, prefix, primer=primer)
    encoding.keep_prefix()
    parts = dict(_parts(kb, groups))
    path = Path(out).absolute()
    store = kb.store.inner if isinstance(kb.store, ReadThrough) else kb.store  # what lies elsewhere
    assert isinstance(store, ChunkStore)
    engine = ServedModel(
        store=store.location,
        fingerprint=kb.store.fingerprint,
        layout=kb.store.layout,
        rope=model.config.rope,
        tokenizer=tokenizer.digest,
        weights=weights_of(folder, cache_directory() / "engine-weights.json"),
        encoder=chosen,
        sealed=store.sealed_by,
        primer=primer_id(encoder_named(chosen), tokenizer.digest, primer),
    )
    gates = tuple(_gates(kb, model, METHOD_OF[chosen]))
    known = Manifest(engine, prefix, gates, parts_table(parts.items()))
    trained = any(gate.questions == 0 for gate in gates)
    prompts = prompt_log.read(path, tokenizer.digest)
    noted = {
        content: ids
        for content, ids in prompt_log.lacking(
            known, prompts, tokenizer, rules if trained else None
        ).items()
        if content not in parts
    }
    chunks = {encoding.key(chosen, ids): ChunkInContext(ids) for ids in noted.values()}
    encoded = encoding.encode_missing(chosen, chunks)
    parts |= noted
    table = parts_table(parts.items())
    write_manifest(path, dataclasses.replace(known, parts=table))
    keys = [encoding.key(chosen, ids) for ids in parts.values()]
    if len(prefix):
        keys.append(prefix_key(kb.store.fingerprint, tokenizer.digest, prefix))
    missing = sum(record is None for record in kb.store.head(keys, on_corrupt="skip"))
    return ConnectorReport(
        path=str(path),
        encoder=chosen,
        parts=len(parts),
        noted=len(noted),
        encoded=len(encoded),
        missing=missing,
        gates=gates,
        command=command_of(path, folder, model.config.dtype),
    )


def command_of(out: Path, folder: Path, dtype: str) -> str:
    """The line that starts vLLM with the connector."""
    config: dict[str, Any] = {
        "kv_connector": "JaxragConnector",
        "kv_connector_module_path": "jaxrag.connectors.vllm",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"manifest": str(out)},
    }
    words = ["vllm", "serve", str(folder), "--dtype", dtype, "--kv-transfer-config"]
    return shlex.join([*words, json.dumps(config)])


def _encoder(kb: KnowledgeBase, encoder: str | None) -> str:
    kept = [name for name in kb.encoders if name in METHOD_OF]
    if encoder is not None:
        encoder_named(encoder)
        if encoder not in METHOD_OF:
            raise RequestError(
                f"encoder {encoder!r}: its chunks have seen others, which a prompt's tokens do not "
                f"tell; expected one of {', '.join(METHOD_OF)}"
            )
        kept = [name for name in kept if name == encoder]
    if not kept:
        raise RequestError(
            f"{kb.path} keeps {', '.join(kb.encoders)}: ingest with --encoder "
            f"{encoder or 'isolated'} first"
        )
    return kept[0]


def _served(model: Model, serve: str | os.PathLike[str] | None) -> Path:
    """The directory that the engine loads, of the same weights."""
    given = serve or model.path
    if given is None or not is_hf_directory(Path(given)):
        raise RequestError(
            f"{given or 'the model'} is no Hugging Face directory, which the engine needs: make "
            "one with `jaxrag convert MODEL DIR --to huggingface`, and name it as --serve DIR"
        )
    folder = Path(given).resolve()
    if weights_digest(folder) == model.digest:
        return folder
    digest = model.digest
    if model.path is not None and is_gguf(model.path):  # its own is of quantised weights
        digest = params_digest(load_params(Path(model.path), model.config))
    if params_digest(load_params(folder, load_config(folder))) != digest:
        raise RequestError(f"--serve {given}: holds other weights than the model of the chunks")
    return folder


def _parts(kb: KnowledgeBase, groups: Sequence[str]) -> Iterator[tuple[str, HostArray]]:
    """Content id and token ids of every chunk as it stands in a prompt."""
    assert kb.model is not None
    tokenizer = kb.model.text_tokenizer()
    for document in kb.documents(groups=list(groups)):
        for chunk in kb.chunks_of(document.id):
            ids = kb.template.chunk_ids(tokenizer, chunk.ids, chunk.title)
            yield content_id(tokenizer.digest, ids), ids


def _gates(kb: KnowledgeBase, model: Model, name: str) -> Iterator[Gate]:
    """What speaks for answers from stored chunks, nothing recomputed."""
    method = METHODS[name]
    if method.positions in model.reading.block_positions and method.encoder == "isolated":
        yield Gate(name, 0, 0)
    for gate in kb.gates.values():
        if gate["subject"] == gate_subject(method, kb.template) and gate["ratio"] == 0:
            yield Gate(name, int(gate.get("compute_last", 0)), int(gate["questions"]))
