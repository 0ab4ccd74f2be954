"""Laws 11 to 13 of decode rules that search and fetch on the host, over meshes."""

import dataclasses

import jax
import pytest
from refusal import refused

from jaxrag import generate
from jaxrag.base.errors import RequestError
from jaxrag.base.sharding import make_mesh
from jaxrag.engine.engine import engine_of
from jaxrag.models.export import export_hf
from jaxrag.models.model import load_model
from jaxrag.models.spec import init_params

DOCUMENTS = [
    "Salt is worked at the wells by hands that ask for wool.",
    "The river is crossed on a raft, and the raft is pulled by a rope.",
    "Tea comes over the pass on mules, two bags a mule.",
]
THINGS = ["salt", "wool", "tea", "river", "raft", "pass", "snow", "rope", "mule", "well"]
QUESTIONS = [f"{word} {thing}?" for word in ("Who has the", "What is") for thing in THINGS]
WINDOW = "sink=4,recent=8"
# By name: the rule, and how the model is loaded.
CASES = {
    "values": ("topn:n=8", {"value_layers": 1}),
    "retrieval": (f"retrieval:k=6,{WINDOW}", {}),
    "away": (f"retrieval:k=6,{WINDOW}", {"kv": "host"}),
    "topn": ("topn:n=8", {}),
    "ivf": (f"ivf:k=6,{WINDOW}", {}),
    "ivf away": (f"ivf:k=6,{WINDOW}", {"kv": "host"}),
    "dense away": ("dense", {"kv": "host"}),
    "static_window away": (f"static_window:{WINDOW}", {"kv": "host"}),
    "snapkv away": ("snapkv:capacity=12,window=4", {"kv": "host"}),
    "quest away": ("quest:budget=48,dense_layers=0", {"kv": "host"}),
    "flat away": (f"flat:k=6,{WINDOW}", {"kv": "host"}),
    "static_window": (f"static_window:{WINDOW}", {}),
    "snapkv": ("snapkv:capacity=12,window=4", {}),
    "infllm": ("infllm:block=4,blocks=2,sink=4,recent=8", {}),
    "quest": ("quest:budget=48,dense_layers=0", {}),
    "flat": (f"flat:k=6,{WINDOW}", {}),
}
FIRST = ("values", "retrieval", "away")  # of them in every run
HERE = tuple(case for case, (_, placed) in CASES.items() if placed.get("kv") != "host")
METHODS = pytest.mark.parametrize("method", ["turborag", "fusionrag"])


def cases_of(method):
    """Those that it works with: the selector of fusionrag reads KV on the device."""
    return HERE if method == "fusionrag" else tuple(CASES)


def answers(folder, case, questions, mesh=None, batch=1, method="turborag"):
    """Token ids of each, and the host memory of K and V."""
    rule, placed = CASES[case]
    model = load_model(folder, mesh=mesh, cache_tokens=1024, **placed)
    given = {"decode": rule, "method": method, "max_new_tokens": 4, "batch_size": batch}
    given |= {"documents": DOCUMENTS, "neighbours": "prompt"}
    results = generate(questions, model=model, **given)
    host = engine_of(model).runner.cache.host
    return [one.token_ids for one in results], host.nbytes if host else 0


@pytest.mark.parametrize("case", FIRST)
def test_rows_and_heads_on_four_devices(wide_model_dir, case):
    """A batch on tensor 2 x data 2 is answered as each question alone on one device."""
    mesh = make_mesh(2, 1, 2)
    found = answers(wide_model_dir, case, QUESTIONS[:3], mesh, batch=3)
    assert found == answers(wide_model_dir, case, QUESTIONS[:3])


@pytest.fixture(scope="module")
def experts_dir(tmp_path_factory, tiny_config, tokenizer_dir):
    """A model with experts and sink logits, of heads that two devices share."""
    config = tiny_config(
        "gpt_oss", vocab_size=600, num_layers=2, num_heads=8, num_kv_heads=4, max_positions=1024,
        sliding_window=None, window_layers=None,
    )  # fmt: skip
    config = dataclasses.replace(config, experts=dataclasses.replace(config.experts, count=4))
    directory = tmp_path_factory.mktemp("experts") / "gpt-oss"
    export_hf(directory, init_params(config, jax.random.key(3)), config, tokenizer_dir)
    return directory


@pytest.mark.parametrize("case", FIRST[1:])
def test_experts_and_sink_logits_on_four_devices(experts_dir, case):
    found = answers(experts_dir, case, QUESTIONS[:3], make_mesh(2, 1, 2), batch=3)
    assert found == answers(experts_dir, case, QUESTIONS[:3])


@pytest.mark.slow
@METHODS
@pytest.mark.parametrize("case", CASES)
def test_twenty_questions_on_meshes(wide_model_dir, case, method):
    if case not in cases_of(method):
        pytest.skip("its selector reads KV on the device")
    wanted = answers(wide_model_dir, case, QUESTIONS, method=method)
    for sizes in [(1, 1, 1), (1, 1, 2), (1, 1, 4), (2, 1, 2)]:
        found = answers(wide_model_dir, case, QUESTIONS, make_mesh(*sizes), 3, method)
        assert found == wanted, sizes


def test_heads_without_an_owner_are_refused(wide_model_dir):
    mesh = make_mesh(1, 1, 8)
    for placed in ({"value_layers": 1}, {"kv": "host"}):
        with refused(RequestError, "4") as no:
            load_model(wide_model_dir, mesh=mesh, cache_tokens=1024, **placed)
        assert "\n" not in str(no.value)
    with refused(RequestError, "'retrieval'"):
        answers(wide_model_dir, "retrieval", QUESTIONS[:1], mesh)


def test_blocks_of_all_heads_are_not_chosen_in_parts(wide_model_dir):
    model = load_model(wide_model_dir, mesh=make_mesh(1, 1, 2), cache_tokens=1024, kv="host")
    with refused(RequestError, "'infllm'") as no:
        generate(QUESTIONS[0], model=model, documents=DOCUMENTS, decode=CASES["infllm"][0])
    assert "\n" not in str(no.value)
