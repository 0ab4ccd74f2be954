"""The whole idea of jaxrag in one file, to be read from top to bottom.

A RAG prompt is a prefix (the instructions), some retrieved chunks, and a question. Usually the
model reads all of it again for every question. Here it reads every chunk once, ahead of time, and
its keys and values (KV: what `past_key_values` holds in transformers) are kept on disk. A prompt is
put together from stored KV, and only the question still runs through the model. Three ideas:

1. A chunk is read alone: its tokens see each other, but no other chunk (section 3).
2. A stored chunk fits at any position, because its keys are stored before RoPE. No key is rotated
   to its position in a prompt: attention rotates the query back instead (section 7).
3. A chunk that was read alone knows nothing of the others. If that costs accuracy, a few tokens
   are computed again: the 15 % that the other chunks change most (section 8).

Run it, with or without a question: python examples/nano.py "What is the job of Bada Fivin?"

Letters of shapes: T tokens of this call, L layers, D model width, N query heads, K key and value
heads, H head dimension, M pages of a prompt, S slots of a page.

JAX for readers of numpy: `jax.numpy` is numpy on the accelerator. Arrays never change:
`x.at[i].set(y)` is a new array with y at i. `jax.jit` compiles a function once for each combination
of shapes, so rows of tokens are padded to few lengths. Its arguments may be tuples and dicts of
arrays; a "static" argument is a constant, and the memory of a "donated" one is reused.
"""

import dataclasses
import hashlib
import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from jax import Array
from safetensors.numpy import load_file
from tokenizers import Tokenizer

Ids = list[int]  # token ids


# 1. The model: the files of a Hugging Face directory.
@jax.tree_util.register_static
class Config(NamedTuple):
    """The sizes of a Llama; static: constants of compiled functions."""

    layers: int  # L
    kv_heads: int  # K
    head_dim: int  # H
    norm_eps: float
    theta: float  # of RoPE
    end: int  # the token that ends an answer


class Llama(NamedTuple):
    """What compiled functions take."""

    config: Config
    weights: dict[str, Array]  # by their names in model.safetensors


class Model(NamedTuple):
    """A Llama with its tokenizer and its prompt format."""

    llama: Llama
    marks: Tokenizer  # for the text of the prompt format, which may hold <|special tokens|>
    plain: Tokenizer  # for documents and questions, where such a token is ordinary text
    prompt: dict[str, str]  # the texts of prefix, chunk and final block
    digest: str  # of the weights


def load_model(directory: Path) -> Model:
    """Read config.json, model.safetensors, tokenizer.json and prompt.toml."""
    raw = json.loads((directory / "config.json").read_text())
    config = Config(
        layers=raw["num_hidden_layers"],
        kv_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        norm_eps=raw["rms_norm_eps"],
        theta=raw["rope_parameters"]["rope_theta"],
        end=raw["eos_token_id"],
    )
    file = directory / "model.safetensors"
    weights = {name: jnp.asarray(array) for name, array in load_file(file).items()}
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])  # if tied
    marks, plain = (Tokenizer.from_file(str(directory / "tokenizer.json")) for _ in range(2))
    plain.encode_special_tokens = True
    prompt = tomllib.loads((directory / "prompt.toml").read_text())
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return Model(Llama(config, weights), marks, plain, prompt, digest)


# 2. The prompt. Prefix, chunks and question are tokenised separately and their ids are joined. If
#    the joined text were tokenised, a chunk could have other ids in every prompt.
def tokenise(model: Model, part: str, text: str = "") -> Ids:
    """Ids of the "prefix", of a "chunk" with this text, or of the "final" block with a question."""
    before, _, after = re.sub(r"\{\w+\}", "\0", model.prompt[part]).partition("\0")
    start = model.marks.encode(before, add_special_tokens=part == "prefix").ids
    inside = model.plain.encode(text, add_special_tokens=False).ids
    return start + inside + model.marks.encode(after, add_special_tokens=False).ids


# 3. Who sees whom. Every token has an id, a position (which RoPE sees) and a segment (the block it
#    belongs to). A prompt with two chunks; a row is a token that looks, x is a token that it sees:
#
#                    prefix   chunk 1   chunk 2   final block
#         segment     1  1     3  3      4  4      2  2
#
#         prefix      x
#                     x  x
#         chunk 1     p  p     x                             p: visible if the chunk is read
#                     p  p     x  x                          behind the prefix (CacheBlend), and
#         chunk 2     p  p               x                   not if it is read on its own
#                     p  p               x  x                (TurboRAG)
#         final       x  x     x  x      x  x      x
#                     x  x     x  x      x  x      x  x
#
#    Chunk 2 does not see chunk 1, so each can be read without the other, and stored. An ordinary
#    causal prompt is the same picture with every token in the final block.

EMPTY, PREFIX, FINAL, CHUNK = 0, 1, 2, 3  # segments; EMPTY is padding


def who_sees_whom(segments: Array) -> Array:
    """The picture for a row of tokens with segments [T]: bool [T, T]."""
    looks, seen = segments[:, None], segments[None, :]
    not_later = jnp.tri(len(segments), dtype=bool)
    return not_later & (seen != EMPTY) & ((looks == seen) | (looks == FINAL) | (seen == PREFIX))


# 4. The Llama. It is used in two ways that differ only in attention: over a row of tokens, and over
#    cached tokens. So `forward` takes attention as a function, which may keep KV in a cache.
def forward(llama: Llama, ids: Array, attend: Callable[..., Any], cache: Any) -> tuple[Array, Any]:
    """Run tokens [T] through all layers: logits [T, vocabulary], and the cache."""
    config, weights = llama

    def linear(x: Array, name: str) -> Array:
        return x @ weights[f"model.{name}.weight"].T

    def norm(x: Array, name: str) -> Array:
        variance = jnp.mean(x * x, axis=-1, keepdims=True)
        return x / jnp.sqrt(variance + config.norm_eps) * weights[f"model.{name}.weight"]

    x = weights["model.embed_tokens.weight"][ids]  # [T, D]
    for layer in range(config.layers):
        name = f"layers.{layer}"
        h = norm(x, f"{name}.input_layernorm")
        q, k, v = (linear(h, f"{name}.self_attn.{which}_proj") for which in "qkv")
        q, k, v = (a.reshape(len(ids), -1, config.head_dim) for a in (q, k, v))  # no RoPE yet
        out, cache = attend(layer, q, k, v, cache)
        x = x + linear(out, f"{name}.self_attn.o_proj")
        h = norm(x, f"{name}.post_attention_layernorm")
        h = jax.nn.silu(linear(h, f"{name}.mlp.gate_proj")) * linear(h, f"{name}.mlp.up_proj")
        x = x + linear(h, f"{name}.mlp.down_proj")
    return norm(x, "norm") @ weights["lm_head.weight"].T, cache


def rotate(x: Array, by: Array, theta: float) -> Array:
    """RoPE: rotate heads x [..., heads, H] by so many positions [...]."""
    half = x.shape[-1] // 2
    angles = by[..., None, None] * theta ** -(np.arange(half) / half)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention(q: Array, k: Array, v: Array, visible: Array) -> Array:
    """One softmax over the slots of all pages: [T, N * H].

    q [M, T, N, H]: a query for each page; k, v: [M, S, K, H]; visible [T, M, S]: slots it sees.
    """
    pages, tokens, heads, head_dim = q.shape
    q = q.reshape(pages, tokens, k.shape[2], -1, head_dim)  # N / K queries share a key
    scores = jnp.einsum("mtkgh,mskh->tkgms", q, k) / head_dim**0.5
    scores = jnp.where(visible[:, None, None], scores, -1e30)
    shares = jax.nn.softmax(scores, axis=(-2, -1))
    return jnp.einsum("tkgms,mskh->tkgh", shares, v).reshape(tokens, heads * head_dim)


# 5. Reading a row of tokens without a cache. This is how chunks are encoded.

PAGE = 64  # S: slots of a page


@jax.jit
def read_row(llama: Llama, ids: Array, positions: Array, segments: Array) -> tuple[Array, Array]:
    """Logits [T, vocabulary] of a row of tokens [T], and its KV [L, 2, T, K, H], K before RoPE."""
    visible = who_sees_whom(segments)[:, None]

    def attend(layer: int, q: Array, k: Array, v: Array, cache: Any) -> tuple[Array, Any]:
        turned_q, turned_k = (rotate(x, positions, llama.config.theta)[None] for x in (q, k))
        out = attention(turned_q, turned_k, v[None], visible)  # the row is one long page
        return out, [*cache, jnp.stack([k, v])]

    logits, kv = forward(llama, ids, attend, [])
    return logits, jnp.stack(kv)


def pad(numbers: Ids, filler: int = 0) -> np.ndarray:
    """Numbers [T] and fillers, up to a multiple of PAGE."""
    return np.pad(numbers, (0, -len(numbers) % PAGE), constant_values=filler).astype(np.int32)


# 6. The store: for every chunk one TensorStore array, in the format zarr3.
def stored(model: Model, path: Path, before: Ids, ids: Ids) -> np.ndarray:
    """KV [L, 2, T, K, H] of a chunk that sees itself and `before`; computed if not stored."""
    if not path.exists():
        row, segments = pad(before + ids), pad([PREFIX] * len(before) + [CHUNK] * len(ids))
        _, kv = read_row(model.llama, row, np.arange(len(row)), segments)
        kv = np.asarray(kv)[:, :, len(before) : len(before) + len(ids)]
        uri = f"{path.as_uri()}.new/|zarr3:"
        array = ts.open(uri, create=True, delete_existing=True, dtype="float32", shape=kv.shape)
        array.result().write(kv).result()
        # It gets its name after the last byte is written: a crash never leaves half a chunk.
        path.with_suffix(".new").rename(path)
    return ts.open(f"{path.as_uri()}/|zarr3:").result().read().result()


# 7. The pool: memory of the accelerator, in pages that all prompts share. A page holds a chunk.
#
#    On its way into the pool a key is rotated to its place inside its chunk: 0, 1, 2, ... A prompt
#    is a table of pages. Each has an offset: the position at which its chunk begins in this prompt.
#    RoPE scores depend only on the distance between query and key, which is
#
#        query position - (offset + place) = (query position - offset) - place.
#
#    So for each page the query is rotated by (query position - offset), and the keys do not change.
#    One copy of a chunk serves any number of prompts, at any positions.
#
#    With a cache, the picture of section 3 becomes one comparison. All tokens computed now count as
#    final block, so they see every slot whose position is not later than their own.

PAGES = 128  # of the pool
STORED = 16  # most stored pages of one prompt
COPIES = np.arange(108, 124)  # pages for copies of the STORED ones (section 8)
OWN = np.arange(124, 128)  # pages for tokens computed for the current prompt
HIDDEN = 2**31 - 1  # the position of empty slots: later than all


@dataclasses.dataclass
class Pool:
    """KV on the accelerator, and the folder of the store from which it comes."""

    store: Path
    kv: Array  # [L, 2, PAGES, S, K, H]
    pages: dict[str, int]  # the pages of chunks, by their names in the store


class Table(NamedTuple):
    """Where the KV of a prompt is."""

    pages: np.ndarray  # [M] page of the pool
    offsets: np.ndarray  # [M] where its chunk begins in this prompt
    slot_position: np.ndarray  # [M, S] position of the token in each slot
    slots: np.ndarray  # [M * S] the inverse: the slot of each position


def new_pool(config: Config, store: Path) -> Pool:
    """An empty pool."""
    pages = (config.layers, 2, PAGES, PAGE, config.kv_heads, config.head_dim)
    return Pool(store, jnp.zeros(pages), {})


def load(model: Model, pool: Pool, before: Ids, ids: Ids) -> int:
    """Bring a chunk into the pool if it is not there yet; returns its page."""
    key = hashlib.sha256(json.dumps([model.digest, before, ids]).encode()).hexdigest()
    if key not in pool.pages:
        page = len(pool.pages)
        assert len(ids) <= PAGE and page < COPIES[0], "jaxrag has longer chunks and drops old ones"
        kv = stored(model, pool.store / key, before, ids)
        kv = np.pad(kv, ((0, 0), (0, 0), (0, PAGE - len(ids)), (0, 0), (0, 0)))
        keys = rotate(kv[:, 0], np.arange(PAGE), model.llama.config.theta)
        pool.kv = pool.kv.at[:, :, page].set(jnp.stack([keys, kv[:, 1]], axis=1))
        pool.pages[key] = page
    return pool.pages[key]


def lay_out(pages: list[int], lengths: list[int]) -> Table:
    """The table of a prompt: its stored pages with so many tokens each, then OWN for the rest."""
    unused = [0] * (STORED - len(pages))  # their slots stay HIDDEN
    offsets = np.array([*np.cumsum([0, *lengths])[:-1], *unused, *[0] * len(OWN)])
    slot_position = np.full((STORED + len(OWN), PAGE), HIDDEN)
    for row, length in enumerate(lengths):
        slot_position[row, :length] = offsets[row] + np.arange(length)
    slot_position[STORED:] = sum(lengths) + np.arange(len(OWN) * PAGE).reshape(-1, PAGE)
    slots = np.argsort(slot_position, axis=None, stable=True)
    return Table(np.array([*pages, *unused, *OWN]), offsets, slot_position, slots)


@jax.jit(donate_argnames="kv")
def step(llama: Llama, kv: Array, table: Table, ids: Array, positions: Array) -> tuple[Array, ...]:
    """Compute tokens [T] of a prompt: logits [T, vocabulary], and the KV with theirs in it."""
    slots = table.slots[positions]
    pages = jnp.where(positions < 0, PAGES, table.pages[slots // PAGE])  # -1 is padding: dropped
    places = positions - table.offsets[slots // PAGE]  # inside their chunks
    turns = positions[None] - table.offsets[:, None]  # [M, T]: rotation of the query, by page
    visible = table.slot_position <= positions[:, None, None]  # [T, M, S]: the one comparison

    def attend(layer: int, q: Array, k: Array, v: Array, kv: Array) -> tuple[Array, Array]:
        new = jnp.stack([rotate(k, places, llama.config.theta), v], axis=1)  # [T, 2, K, H]
        kv = kv.at[layer, :, pages, slots % PAGE].set(new, mode="drop")
        keys, values = kv[layer, 0, table.pages], kv[layer, 1, table.pages]  # [M, S, K, H]
        q = rotate(jnp.broadcast_to(q, (len(turns), *q.shape)), turns, llama.config.theta)
        return attention(q, keys, values, visible), kv

    return forward(llama, ids, attend, kv)


# 8. Repair, as in CacheBlend. Stored chunks have not seen the chunks before them in the
#    prompt. The first two layers are computed again for prefix and chunks, which costs little. The
#    tokens whose values then differ most from the stored ones depend most on the other chunks:
#    `step` computes these again in all layers.
def repair(
    model: Model, pool: Pool, table: Table, prefix: Ids, chunks: list[Ids], percent: int = 15
) -> tuple[Table, np.ndarray]:
    """A table with its own copies of the pages, and the positions of tokens to compute again."""
    pool.kv = pool.kv.at[:, :, COPIES].set(pool.kv[:, :, table.pages[:STORED]])
    table = table._replace(pages=np.concatenate([COPIES, OWN]))  # shared pages never change

    tokens = sum(chunks, prefix)
    row, segments = pad(tokens), pad([FINAL] * len(tokens))
    positions = np.arange(len(row))
    two_layers = Llama(model.llama.config._replace(layers=2), model.llama.weights)
    _, fresh = read_row(two_layers, row, positions, segments)
    keys, values = fresh[:, 0], fresh[:, 1]  # [2, T, K, H]
    rows, slots = table.slots[positions] // PAGE, table.slots[positions] % PAGE
    pages, places = table.pages[rows], positions - table.offsets[rows]
    change = np.asarray(jnp.square(values[1] - pool.kv[1, 1, pages, slots]).sum((1, 2)))  # [T]
    fresh = jnp.stack([rotate(keys, places, model.llama.config.theta), values], axis=1)
    pool.kv = pool.kv.at[:2, :, pages, slots].set(fresh)  # fresh KV is better: keep it

    first = len(prefix + chunks[0])  # the first chunk had its true context
    budget = -(-percent * sum(map(len, chunks)) // 100)  # rounded up
    most = np.argsort(-change[first : len(tokens)], stable=True)[:budget]
    return table, first + np.sort(most)


# 9. The answer to a question.
def answer(
    model: Model, pool: Pool, texts: list[str], question: str, method: str, longest: int = 32
) -> tuple[Ids, dict[str, int]]:
    """Answer by "full_attention" (without reuse), "turborag" or "cacheblend", greedily.

    Returns the ids of the answer, and how many tokens of chunks were reused and computed again.
    """
    prefix, final = tokenise(model, "prefix"), tokenise(model, "final", question)
    chunks = [tokenise(model, "chunk", text) for text in texts]
    if method == "full_attention":
        table, again = lay_out([], []), range(len(sum(chunks, prefix)))
    else:
        behind = prefix if method == "cacheblend" else []
        pages = [load(model, pool, [], prefix), *(load(model, pool, behind, ids) for ids in chunks)]
        table, again = lay_out(pages, [len(ids) for ids in (prefix, *chunks)]), []
    if method == "cacheblend":
        table, again = repair(model, pool, table, prefix, chunks)

    tokens = np.array(sum(chunks, prefix) + final)
    positions = np.array([*again, *range(len(tokens) - len(final), len(tokens))])
    row = pad(tokens[positions])
    logits, pool.kv = step(model.llama, pool.kv, table, row, pad(positions, -1))
    said, token = [], int(logits[len(positions) - 1].argmax())
    while token != model.llama.config.end and len(said) < longest:
        here, said = np.array([len(tokens) + len(said)]), [*said, token]
        logits, pool.kv = step(model.llama, pool.kv, table, np.array([token]), here)
        token = int(logits[0].argmax())
    recomputed = len([position for position in again if position >= len(prefix)])
    return said, {"reused": sum(map(len, chunks)) - recomputed, "recomputed": recomputed}


# 10. A question about a folder.
def search(folder: Path, question: str, k: int) -> list[str]:
    """The k paragraphs that share most words with a question (rare ones count more), best first."""
    texts = []
    for file in sorted(folder.iterdir()):
        text = file.read_text().strip()
        if file.suffix == ".jsonl":
            texts += [(row["id"], row["text"]) for row in map(json.loads, text.splitlines())]
        else:
            texts += [(file.stem, paragraph) for paragraph in text.split("\n\n")]
    words = [set(re.findall(r"[a-z]+", f"{name} {text}".lower())) for name, text in texts]
    common = Counter(word for each in words for word in each)
    asked = re.findall(r"[a-z]+", question.lower())
    scores = [-sum(1 / common[word] for word in each.intersection(asked)) for each in words]
    return [texts[i][1] for i in np.argsort(scores, stable=True)[:k]]


if __name__ == "__main__":
    root = Path(__file__).parents[1]
    question = " ".join(sys.argv[1:]) or "Which animal does Kora Felell keep?"
    texts = search(root / "examples/village", question, k=6)
    model = load_model(root / "checkpoints/synthetic-0.8m/dual")
    pool = new_pool(model.llama.config, root / ".cache/nano")
    for method in ("full_attention", "turborag", "cacheblend"):
        said, counts = answer(model, pool, texts, question, method)
        print(f"{method:15} {model.plain.decode(said):26} {counts}")
