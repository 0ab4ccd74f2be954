"""How to add a decode rule: one file with its two bodies, and one line. CONTRIBUTING.md links here.

``attend`` runs in the compiled step, over K and V on the device. ``far`` is for a model whose K and
V are in host memory: there the device attends to the static pattern, the host to the rest. A rule
without ``static_pattern`` and ``far`` is refused there.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrag.kv.placement import AWAY
from jaxrag.models.attention import merge
from jaxrag.reuse.decode import DECODE_RULES, DecodeRule
from jaxrag.reuse.decode.far.memory import HostMemory
from jaxrag.reuse.decode.far.scan import ByHead
from jaxrag.reuse.decode.footprint import Account
from jaxrag.reuse.decode.rule import require
from jaxrag.serve.generate import generate


# The file, such as jaxrag/reuse/decode/every_nth.py; its docstring names the paper.
@dataclasses.dataclass(frozen=True)
class EveryNth(DecodeRule):
    """The ``recent`` newest tokens, and of all before them every ``n``-th; of no paper."""

    n: int = 4
    recent: int = 8
    name: str = dataclasses.field(default="every_nth", init=False)

    def __post_init__(self):
        require(self.name, n=self.n, recent=self.recent)

    @property
    def static_pattern(self):
        return 0, self.recent

    def tokens(self):
        return {"recent": self.recent}

    def attend(self, view, layer, state):
        """On the device: positions 0, n, 2n ..., but for those of the window."""
        nth = jnp.arange(0, view.order.shape[1], self.n)[None, None, None]
        edge = view.position[:, None, None, None] - self.recent
        window = view.attend_at(*view.window(0, self.recent))
        return merge([window, view.attend_at(nth, nth <= edge)]), state

    def far(self, prompt):
        return EveryNthFar(prompt, self)


class EveryNthFar(ByHead):
    """On the host: the same of one layer of one request, a KV head at a time."""

    def __init__(self, prompt, rule):
        self.memory, self.rule = HostMemory(prompt.config, prompt.layer), rule
        self.account = Account(index_bytes=self.memory.nbytes)

    def work(self, position):
        return self.memory.kv_heads * position // self.rule.n

    def attend_head(self, head, asked, position, answer):
        edge = position - self.rule.recent
        nth = np.arange(0, max(edge + 1, 0), self.rule.n, dtype=np.int32)
        with answer.attending():
            stretches = self.memory.gathered(nth)
            answer.out[head], answer.lse[head] = self.memory.attend(head, asked, stretches)


@pytest.fixture(autouse=True)
def the_line(monkeypatch):
    """The line of the table in jaxrag/reuse/decode/__init__.py."""
    monkeypatch.setitem(DECODE_RULES, "every_nth", EveryNth)


@pytest.fixture
def options(model_of, ids):
    """A short prompt with two chunks for a model whose K and V are on the device."""
    model = model_of(max_positions=1024)
    return {"documents": list(ids(40, 30)), "model": model, "max_new_tokens": 12}


def test_answers_by_the_new_rule(options):
    """By name and settings, the same wherever K and V are; at n = 1 it is dense."""
    away = options | {"model": dataclasses.replace(options["model"], placement=AWAY)}
    ours, host, everything, dense = (
        generate([5, 6, 7], decode=decode, method="turborag", **where).token_ids
        for decode, where in (
            ("every_nth:n=3", options), ("every_nth:n=3", away),
            ("every_nth:n=1", options), ("dense", options),
        )
    )  # fmt: skip
    assert len(ours) == 12
    assert host == ours
    assert everything == dense
