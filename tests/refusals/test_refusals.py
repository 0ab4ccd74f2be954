"""Values that are refused, by the class of the error: in one line that names the value."""

import dataclasses
import functools

import numpy as np
import pytest
from refusal import refused

from jaxrag.base.errors import (
    ConfigError,
    DocumentError,
    EmbedderError,
    RequestError,
    StoreError,
)
from jaxrag.base.guide import MOST_GUIDE, Guide
from jaxrag.kv.cache import PageAllocator
from jaxrag.kv.int4 import pack
from jaxrag.kv.store.address import kvstore_spec
from jaxrag.kv.store.keys import chunk_key, content_id, context_id, derive, fingerprint
from jaxrag.kv.store.layout import HeadShare, KVLayout
from jaxrag.kv.store.quantise import quantise
from jaxrag.kv.store.record import MAX_AUX_BYTES, Provenance, describe_aux
from jaxrag.library.documents import Document, Intake, Shard, read_paths
from jaxrag.library.documents.chunking import Chunking
from jaxrag.library.documents.left_out import LeftOut
from jaxrag.library.documents.metadata import front_matter
from jaxrag.library.documents.stacks import stack_named
from jaxrag.library.embed import as_embedder
from jaxrag.library.retrieve.filters import MAX_VALUES, Filter
from jaxrag.measure.bench.options import ServeOptions, Traffic, TtftOptions
from jaxrag.measure.bench.serve_arms import arms_of
from jaxrag.measure.evals.datasets.options import DatasetOptions
from jaxrag.measure.evals.options import (
    LongOptions,
    ModelRead,
    RowsOptions,
    SyntheticOptions,
    Target,
)
from jaxrag.measure.plan.settings import load_plan
from jaxrag.models.text.passage_rules import PassageRules, passage_rules
from jaxrag.models.text.prompts import PromptTemplate, template_named
from jaxrag.server.settings import ServerSettings
from jaxrag.server.tenants import check_host
from jaxrag.tasks.synthetic import SyntheticTask

NAN, INF = float("nan"), float("inf")
LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=5, dtype="bfloat16")
HASH = "0" * 40
TEMPLATE = functools.partial(PromptTemplate, "t", prefix="", chunk="{text}", final="{question}")
RULES = functools.partial(
    PassageRules, certain={}, walls={}, least=64, whole=4800, reach=512, apart=200, worth=1024
)
NEEDLE = functools.partial(
    LongOptions, suite="needle", flavour="village", model="m", lengths=(200,), depths=(0, 1),
    methods=("full_attention", "turborag"), questions=4, chunk_tokens=40,
)  # fmt: skip
SYNTHETIC = functools.partial(SyntheticOptions, models={"raw": "raw", "tuned": "tuned"})
DATASET = functools.partial(DatasetOptions, name="rgb_en", data=("x",), model="m")
RAW = ModelRead("raw", "full")


def plan(change):
    return load_plan("qwen2.5-0.5b-on-two-cores", [change])


def embedded(function):
    return as_embedder(function, name="bad")


def stored(form, element):
    kv = np.ones((1, 2, 3, 1, 4), np.float32)
    kv[0, 1, 2, 0, 3] = element
    return form(kv)


# Of each class, calls and what they refuse: values of a field, or of their one argument.
FIELDS = {
    ConfigError: [
        (functools.partial(PageAllocator, 4), {"half_life": [0, -1.0, NAN, INF]}),
        (functools.partial(Chunking, 8), {"overlap": [8, 9, -1]}),
        (functools.partial(Chunking, 8, 0), ["page"]),
        (Shard.parse, ["", "1", "2/2", "-1/2", "0/0", "a/b", "1/2/3", "²/3"]),
        (RULES, {"walls": [{"a": "("}], "least": [0], "reach": [5000], "worth": [0]}),
        (passage_rules, ["none"]),
        (TEMPLATE, {
            "chunk": ["no text", "{text}{text}", "{text}{question}"],
            "final": ["no question", "{question} {title}", "{history}\n{question}"],
            "prefix": ["{question}", "{date}"],
            "chunk_order": ["random"],
        }),
        (template_named, ["turborga", "missing.toml", ""]),
        (stack_named, ["dify", "langchain:a", "langchain:1:2:3", "langchain:0:0"]),
        (as_embedder, [7]),
        (arms_of, ["statical", "static;static", "", "static:engine.threads=3", "static:link=-1"]),
        (plan, [
            "corpus.chunks=0", "corpus.chunk=3", "queries.k=99999999999", "queries.rate=-1",
            "engine.utilisation=1.5", "engine.flops=inf", "stored='int3'", "methods=['turbo']",
            "methods=[]", "tiers=[{name='disk', bandwidth=1e9, bytes=1e9}]",
            "model='configs/models/none.toml'",
        ]),
        (load_plan, ["nowhere"]),
        (SyntheticTask, {
            "chunks": [(3, 2), (0, 2), (4, 99)], "relations": [1, 9], "pairs": [-0.1],
            "plain": [2.0], "values": [1], "headers": [1.5], "questions": [0], "split": ["dev"],
            "mix": [{"hop3": 1.0}, {"hop1": 0.0}, {"hop1": -1.0}],
        }),
        (functools.partial(SyntheticTask, chunks=(2, 4)), {"places": [2]}),
        (functools.partial(SyntheticTask, bridge=False), {"relations": [7]}),
        (ServerSettings, {"groups_header": ["X-Groups"], "trusted_proxies": [("10.0.0.1",)],
                          "max_bodies_bytes": [10], "head_seconds": [0]}),
        (functools.partial(ServerSettings, groups_header="X"), {"trusted_proxies": [("proxy",)]}),
        (functools.partial(ServerSettings, trusted_proxies=("10.0.0.1",)),
         {"groups_header": ["a b"]}),
        (functools.partial(check_host, has_keys=False, open_to_all=False),
         ["0.0.0.0", "192.0.2.1", "::", "example.org"]),
    ],
    DocumentError: [
        (functools.partial(Intake, shard=Shard()),
         ["text", b"text", {"text": "x"}, Document("a", "x"), None, 3, ""]),
        (functools.partial(Document, "a", "amber"), {"metadata": [
            {"groups": groups} for groups in
            (None, "sales", [], ["a b"], [""], ["é"], [1], ["x" * 65], ["a"] * 33, {"a": 1})
        ]}),
        (functools.partial(front_matter, left_out=LeftOut()), ["+++\ngroups = \n+++\ntext"]),
        (functools.partial(read_paths, ["."]), {
            "parse_seconds": [0, NAN, INF, "9"], "parse_bytes": [1, None],
            "encoding": ["klingon", "base64", "rot13", "undefined", "", "a\0b"],
        }),
        (read_paths, [3, [3], [b"a"], "/"]),
    ],
    EmbedderError: [
        (embedded, [
            lambda texts: [1.0, 2.0], lambda texts: [[1.0]] * (len(texts) + 1),
            lambda texts: [[] for _ in texts], lambda texts: [["one"] for _ in texts],
            lambda texts: None, lambda texts: [[NAN] for _ in texts],
            lambda texts: [[1.0], [1.0, 2.0]],
        ]),
    ],
    RequestError: [
        (Filter.parse, [
            {"a": list(range(MAX_VALUES + 1))}, {f"f{n}": n for n in range(MAX_VALUES + 1)},
            {"$or": [{"a": n} for n in range(MAX_VALUES)], "b": 1},
        ]),
        (arms_of, ["full:recompute_ratio=0.3", "inline:method=turbo"]),
        (ServeOptions, {"rates": [(0.0,), (1.0, 1.0)], "rows": [0], "folder": ["nowhere"]}),
        (functools.partial(ServeOptions, peer="http://x"), {"peer_python": ["y"]}),
        (Traffic, {"requests": [0], "documents": [3], "neighbours": [160], "answers": [(4, 0)],
                   "focus": [1.5]}),
        (TtftOptions, {
            "method": ["full_attention"], "contexts": [(500,)], "repeats": [(0,), (3, 1)],
        }),
        (NEEDLE, {
            "flavour": ["city"], "answers": [0, 17], "tasks": [("niah",)],
            "lengths": [(), (5, 5), (0,)], "depths": [(0.5, 1.01), (NAN,), ()], "questions": [0],
            "batch_size": [0], "chunk_tokens": [0], "max_new_tokens": [0], "split": ["dev"],
            "filler": [("x.txt",)], "methods": [(), ("turborag", "turborag"), ("turbo",)],
            "host_values": [True],
            "decode": [("topn:n=0",), ("a=dense", "a=topn"), ("dense", "dense")],
        }),
        (RowsOptions, {"held_out_share": [1.0], "passages": [0], "batch_size": [0]}),
        (SYNTHETIC, {
            "models": [{}, {"a b": "x"}, {"a:b": "x"}], "questions": [0],
            "reads": [("full", "sideways"), (), ("full", "full")],
            "compare": [((RAW, ModelRead("other", "full")),)],
        }),
        (functools.partial(SYNTHETIC, reads=("full",)),
         {"compare": [((RAW, ModelRead("raw", "block")),)]}),
        (DATASET, {"data": [()], "methods": [("a", "a")], "number": [0], "model": [None]}),
        (Target, {"agreement": [1.5], "max_kl": [NAN]}),
        (functools.partial(Guide, text="start: a"), {"kind": ["lark"]}),
        (functools.partial(Guide, "regex"), ["a" * (MOST_GUIDE + 1)]),
    ],
    StoreError: [
        (fingerprint,
         [{"a": [it]} for it in (NAN, INF, np.float32(0.1), np.int32(1), b"x", {1: 2}, {"x"})]),
        (functools.partial(content_id, "t"), [
            [1, 2], np.array([1, 2]), np.ones((1, 2), np.int32), np.array([1.0, 2.0]),
            np.zeros(0, np.int32),
        ]),
        (functools.partial(chunk_key, content_id=HASH, context_id=HASH), {"fingerprint": [
            "", "0" * 39, "0" * 41, "G" * 40, "A" * 40, HASH + "\n", None]}),
        (functools.partial(context_id, "neighbours", np.zeros(0, np.int32)),
         {"neighbours": [["doc-1"]]}),
        (derive, {"fingerprint": ["ab"]}),
        (functools.partial(derive, "0" * 64), {"stored": [None]}),
        (functools.partial(derive, "0" * 64, "native"), {"salt": [3]}),
        (functools.partial(dataclasses.replace, LAYOUT), {
            "num_layers": [0], "num_kv_heads": [-1], "head_dim": [2.0, True], "dtype": ["int8"],
            "stored": ["int3"],
        }),
        (functools.partial(Provenance, content_id=HASH, context_id=HASH),
         {"encoder": ["", "x" * 65, "a\nb"]}),
        (functools.partial(describe_aux, array=np.zeros(1)),
         {"name": ["", "a/b", "Abc", "a" * 33, "scale", 3]}),
        (functools.partial(describe_aux, "x"), {"array": [
            [1, 2], np.array(["text"]), np.zeros(2, bool), np.float32(1), np.array(1.0),
            np.zeros((1,) * 9), np.zeros((3, 0)), np.zeros((4, 4))[:, ::2],
            np.broadcast_to(np.uint8(0), MAX_AUX_BYTES + 1),
        ]}),
        (functools.partial(stored, pack), [NAN, INF, -INF]),
        (functools.partial(stored, quantise), [NAN, INF, -INF]),
        (kvstore_spec, [
            "s3://bucket/path?region=x", "s3:///path?endpoint=http://127.0.0.1:1", "s3://bucket/x?"
        ]),
        (LAYOUT.of_share, [HeadShare(2, 2)]),
    ],
}  # fmt: skip


def cases():
    for error, calls in FIELDS.items():
        for call, fields in calls:
            name = getattr(call, "func", call).__name__
            for field, values in (fields if isinstance(fields, dict) else {"": fields}).items():
                for number, value in enumerate(values):
                    yield pytest.param(error, call, field, value, id=f"{name}-{field}-{number}")


def leaves(value):
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if not isinstance(value, list | tuple):
        return [str(value)]
    return [leaf for it in value for leaf in leaves(it)]


@pytest.mark.parametrize(("error", "call", "field", "value"), list(cases()))
def test_a_value_is_refused(error, call, field, value):
    with refused(error) as told:
        call(**{field: value}) if field else call(value)
    assert type(told.value) is error
    if field:  # the message names it, the option that sets it, or the value
        named = ["--", *(word.rstrip("s") for word in field.split("_")), *leaves(value)]
        assert any(it in str(told.value) for it in named if it), (str(told.value), named)
