"""Methods of reuse in numpy, from the equations of their papers and from no code of this package.

One operation is all they are made of, the papers' LLM(tokens, positions, cached): some rows of a
prompt run through the layers over cached K and V of the others, each row seeing what stands at its
position or before. What a method caches, and which rows it runs, is below.
"""

import dataclasses
import math

import numpy as np
from numpy_llama import Llama


@dataclasses.dataclass
class Kv:
    """K before rotation and V, [L, T, K, H] each; tokens follow one another."""

    k: np.ndarray
    v: np.ndarray

    def __getitem__(self, tokens):
        return Kv(self.k[:, tokens], self.v[:, tokens])

    @staticmethod
    def joined(parts):
        return Kv(*(np.concatenate([getattr(it, x) for it in parts], 1) for x in "kv"))


@dataclasses.dataclass
class Ran:
    """Logits [V] of the last row; KV of the whole; queries [T, N, H] of the last layer."""

    logits: np.ndarray
    kv: Kv
    queries: np.ndarray


class Methods(Llama):
    """A llama, and how its prompts are answered by each method."""

    def llm(self, ids, rows, cached=None):
        """Run the rows [R] of ids [T], rising, over the cached KV of T tokens or its first ones.

        What is cached of the rows themselves is replaced by what they give, layer by layer.
        """
        config, total = self.config, len(ids)
        group, shape = config.num_heads // config.num_kv_heads, (total, config.num_kv_heads, -1)
        x, kept, places = self.params["embed"][ids[rows]], [], np.arange(total)
        for at, p in enumerate(self.layers):
            h = self.norm(x, p["attn_norm"])
            q = (h @ p["q"].reshape(len(h.T), -1)).reshape(len(rows), config.num_heads, -1)
            k, v = (np.zeros((*shape[:2], config.head_dim), x.dtype) for _ in range(2))
            if cached is not None:
                k[: cached.k.shape[1]], v[: cached.v.shape[1]] = cached.k[at], cached.v[at]
            for whole, name in ((k, "k"), (v, "v")):
                whole[rows] = (h @ p[name].reshape(len(h.T), -1)).reshape(len(rows), *k.shape[1:])
            kept.append((k, v))
            keys, values = (it.repeat(group, 1) for it in (self.turn(k, places), v))
            scores = np.einsum("rnh,snh->nrs", self.turn(q, rows), keys) / math.sqrt(k.shape[-1])
            weights = softmax(np.where(places <= rows[:, None], scores, -np.inf))
            mixed = np.einsum("nrs,snh->rnh", weights, values)
            x = x + np.einsum("rnh,nhd->rd", mixed, p["o"])
            h = self.norm(x, p["mlp_norm"])
            gate = h @ p["gate"]
            x = x + (gate / (1 + np.exp(-gate)) * (h @ p["up"])) @ p["down"]
        head = self.params.get("lm_head", self.params["embed"].T)
        logits = self.norm(x[-1:], self.params["final_norm"])[0] @ head
        return Ran(logits, Kv(*(np.stack(it) for it in zip(*kept, strict=True))), q)

    def whole(self, *parts):
        """Full attention over parts in a row."""
        ids = np.concatenate(parts)
        return self.llm(ids, np.arange(len(ids)))

    def behind(self, chunk, *before):
        """KV of a chunk over what stands before it: FusionRAG eq. 5, TurboRAG with nothing."""
        return self.whole(*before, chunk).kv[-len(chunk) :]

    def behind_neighbours(self, chunk, prefix, neighbours):
        """FusionRAG eq. 10: over its neighbours' own KV, each behind the prefix alone, turned."""
        own = [self.whole(prefix).kv, *(self.behind(it, prefix) for it in neighbours)]
        before = Kv.joined(own)
        ids = np.concatenate((prefix, *neighbours, chunk))
        ran = self.llm(ids, np.arange(before.k.shape[1], len(ids)), before)
        return ran.kv[-len(chunk) :]

    def answer(self, prompt, stored, critical=()):
        """FusionRAG eq. 6 and 9: critical tokens, counted over the chunks, and the final block."""
        prefix, chunks, final = prompt
        cached = Kv.joined([self.whole(prefix).kv, *stored])
        ids = np.concatenate((prefix, *chunks, final))
        start = len(prefix)
        rows = [
            *(start + np.sort(np.asarray(critical, int))),
            *range(len(ids) - len(final), len(ids)),
        ]
        return self.llm(ids, np.array(rows), cached)

    def isolated(self, prompt):
        """TurboRAG 3.2: chunks that saw nothing else, at reordered positions."""
        return self.answer(prompt, [self.behind(it) for it in prompt[1]])

    def after_prefix(self, prompt):
        """FusionRAG's Full Reuse."""
        return self.answer(prompt, [self.behind(it, prompt[0]) for it in prompt[1]])

    def primed(self, prompt, primer):
        """Chunks behind prefix and primer, of which no prompt has the primer."""
        return self.answer(prompt, [self.behind(it, prompt[0], primer) for it in prompt[1]])

    def neighbours(self, prompt, near):
        """FusionRAG's preprocessing alone, the first chunk behind the prefix, where it is exact."""
        return self.answer(prompt, self._preprocessed(prompt, near))

    def cacheblend(self, prompt, ratio, check=1):
        """FusionRAG eq. 7 to 9; K and V up to the layer that is compared stay as computed for it.

        V of the second layer is compared. A token of the first chunk deviates nowhere.
        """
        prefix, chunks, _ = prompt
        stored = Kv.joined([self.behind(it, prefix) for it in chunks])
        fresh = self.whole(prefix, *chunks).kv[len(prefix) :]
        deviation = ((fresh.v[check] - stored.v[check]) ** 2).sum((1, 2))
        critical = top(deviation, ratio, len(chunks[0]))
        for of, new in ((stored.k, fresh.k), (stored.v, fresh.v)):
            of[: check + 1] = new[: check + 1]
        return self.answer(prompt, [stored], critical)

    def fusionrag(self, prompt, near, ratio):
        """FusionRAG 3.1 and 3.2: keys stay where they were cached, a softmax for each chunk."""
        prefix, chunks, final = prompt
        stored = self._preprocessed(prompt, near)
        question = np.arange(len(final))
        queries = self.turn(self.whole(final).queries, question)
        group, scores = self.config.num_heads // self.config.num_kv_heads, []
        for one, chunk in zip(stored, chunks, strict=True):
            keys = self.turn(one.k[-1], len(prefix) + np.arange(len(chunk))).repeat(group, 1)
            met = np.einsum("rnh,snh->nrs", queries, keys) / math.sqrt(keys.shape[-1])
            scores.append(softmax(met).sum((0, 1)))
        return self.answer(prompt, stored, top(np.concatenate(scores), ratio, len(chunks[0])))

    def _preprocessed(self, prompt, near):
        prefix, chunks, _ = prompt
        behind = [self.behind_neighbours(*it) for it in
                  zip(chunks[1:], [prefix] * len(chunks), near[1:], strict=False)]  # fmt: skip
        return [self.behind(chunks[0], prefix), *behind]


def softmax(scores):
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def top(scores, ratio, exact):
    """The highest of a share of all chunk tokens, but for the first ones, whose KV is exact."""
    order = exact + np.argsort(-scores[exact:], kind="stable")
    return order[: math.ceil(ratio * len(scores))]


def kl(wanted, found):
    """KL divergence of two next-token distributions, from logits [V], in float64."""
    p, q = (np.asarray(it, np.float64) for it in (wanted, found))
    p, q = (it - it.max() - np.log(np.exp(it - it.max()).sum()) for it in (p, q))
    return float((np.exp(p) * (p - q)).sum())
