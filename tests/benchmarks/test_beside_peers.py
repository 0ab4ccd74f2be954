"""Decoding and prefill beside peers: what is asked, compared and kept; no time is judged."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import decode_throughput
import jax
import numpy as np
import prefill
import pytest
import script
from decode_throughput import ThroughputOptions, report, same, step_bytes
from refusal import refused
from script import LLAMA_300M, Rows, RowsOptions, draw, in_turn, ratios

from jaxrag.base.errors import RequestError
from jaxrag.engine.engine import engine_of
from jaxrag.engine.request import Prompt, Request
from jaxrag.models.export import export_hf
from jaxrag.models.flops import forward_flops
from jaxrag.models.model import load_model, random_model
from jaxrag.models.spec import init_params, num_params
from jaxrag.reuse.methods import METHODS

# Answers every question with what the file beside it says, and writes down what was asked.
FAKE = """#!{python}
import json, sys
from pathlib import Path
here = Path({folder!r})
print(json.dumps({{"version": "0", "arguments": sys.argv[1:]}}), flush=True)
answers = json.loads((here / "answers.json").read_text())
with open(here / "asked.txt", "a") as asked:
    for line in sys.stdin:
        question = json.loads(line)
        print(line, end="", file=asked, flush=True)
        name = "matmul" if "matmul" in question else question.get("cache", "top")
        print(json.dumps(answers[name]), flush=True)
"""


class FakePeer:
    """An interpreter that ignores the script it is given."""

    def __init__(self, folder, **answers):
        folder.mkdir()
        self.python = folder / "python"
        self.python.write_text(FAKE.format(python=sys.executable, folder=str(folder)))
        self.python.chmod(0o755)
        (folder / "answers.json").write_text(json.dumps(answers))
        self._asked = folder / "asked.txt"

    def asked(self):
        return [json.loads(line) for line in self._asked.read_text().splitlines()]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("jaxrag.measure.machine.SETTLE_SECONDS", 0)
    monkeypatch.setattr(script, "BYTES", 1 << 20)
    monkeypatch.setitem(script._MATMUL, "cpu", 16)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, tiny_config):
    config = tiny_config()
    path = tmp_path_factory.mktemp("bench") / "model"
    export_hf(path, init_params(config, jax.random.key(0)), config)
    return str(path)


@pytest.fixture(scope="module")
def answer(model_dir):
    """11 tokens that the engine generates behind 40 random ones, as it serves any request."""
    model = load_model(model_dir, dtype="float32", cache_tokens=512)
    engine = engine_of(model)
    prompt = Prompt(np.zeros(0, np.int32), (), draw(model.config, 0, 40))
    request = Request(prompt, engine.memory, METHODS["full_attention"], 11)
    return [token for news in engine.iterate([request]) for token in news.new]


def test_default_model_has_300m_parameters():
    assert 297e6 < num_params(LLAMA_300M) < 299e6


def test_every_arm_decodes_what_the_engine_generates(model_dir, answer, tmp_path, capsys):
    other = [*answer[:2], answer[2] ^ 1, *answer[3:]]
    hf = FakePeer(
        tmp_path / "hf",
        dynamic={"seconds": 2.0, "ids": answer},
        static={"seconds": 4.0, "ids": other},
    )
    llama = FakePeer(tmp_path / "llama", **{"": {"seconds": 8.0, "ids": answer}})
    out = tmp_path / "result.json"
    command = ["--model", model_dir, "--dtype", "float32"]
    command += ["--contexts", "40", "--tokens", "10", "--repeats", "2", "--out", str(out)]
    command += ["--peer", "transformers", "--peer-python", str(hf.python)]
    command += ["--llama-python", str(llama.python)]
    assert decode_throughput.main([*command, "--batch", "1,3"]) == 0
    table = capsys.readouterr().out
    result = json.loads(out.read_text(encoding="utf-8"))
    assert [(row["batch"], row["context"]) for row in result["rows"]] == [(1, 40), (3, 40)]
    for row in result["rows"]:
        arms = row["arms"]
        names = ["jaxrag", "transformers dynamic", "transformers static", "llama.cpp"]
        assert list(arms) == names
        assert [len(arm["seconds"]) for arm in arms.values()] == [2] * 4
        assert [arms[name]["same_tokens"] for name in names[1:]] == [11, 2, 11]
        assert arms["llama.cpp"]["tokens_per_second"]["median"] == row["batch"] * 10 / 8.0
        assert arms["transformers static"]["seconds_per_token"]["high"] == 0.4
        ours = arms["jaxrag"]["seconds"]
        assert arms["transformers dynamic"]["over_ours"]["high"] == 2.0 / min(ours)
        assert arms["transformers dynamic"]["over_ours"]["low"] == 2.0 / max(ours)
        bytes_ = sum(row["bytes_per_step"].values())
        assert arms["llama.cpp"]["bytes_per_second"] == pytest.approx(bytes_ / 0.8)
        limit = row["batch"] * row["limits"]["read"] / bytes_
        assert row["limit_tokens_per_second"] == pytest.approx(limit)
        for name in names:
            assert f"\n  {name} " in table
    asked = hf.asked()
    assert [(it["rows"], it["cache"]) for it in asked] == [
        (rows, cache) for rows in (1, 3) for _ in range(3) for cache in ("dynamic", "static")
    ]
    assert {it["tokens"] for it in asked} == {10} and len(asked[0]["ids"]) == 40
    # Its own file of weights comes after the directory and the dtype.
    arguments = result["rows"][0]["peers"]["llama.cpp"]["arguments"]
    assert arguments[1:3] == [model_dir, "float32"] and arguments[3].endswith(".gguf")

    # A row that is there is not measured again; a new one is.
    before = len(llama.asked())
    assert decode_throughput.main([*command, "--batch", "1,2,3", "--resume"]) == 0
    assert [it["rows"] for it in llama.asked()[before:]] == [2] * 3
    again = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert again[:2] == result["rows"] and [row["batch"] for row in again] == [1, 3, 2]
    capsys.readouterr()
    assert decode_throughput.main([*command, "--batch", "1", "--seed", "1", "--resume"]) == 1
    assert "seed is 0, now 1; write to another" in capsys.readouterr().err


def test_what_windows_imply_is_what_is_read(monkeypatch, tmp_path):
    """Chunks are as long as the window: six layers of the last one, the sixth of the others."""
    small = {"num_hidden_layers": 6, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8}
    monkeypatch.setattr(prefill, "_GEMMA", prefill._GEMMA | small | {"vocab_size": 128})
    command = ["--windows", "--contexts", "1024", "--repeats", "1", "--dtype", "float32"]
    out = tmp_path / "result.json"
    assert prefill.main([*command, "--out", str(out)]) == 0
    [row] = json.loads(out.read_text(encoding="utf-8"))["rows"]
    layer = 2 * 8 * 4 * 512  # bytes of a chunk
    for arm, layers, pages in (("windows", 7, 38), ("none", 12, 64)):
        found = row["arms"][arm]
        assert found["read_bytes"] == found["implied_bytes"] == layers * layer
        assert found["pool_bytes"] == pages * 6 * layer // 32
        assert len(found["seconds"]) == 1


def test_prefill_stands_beside_the_peer_and_the_matrix_product(model_dir, tmp_path, capsys):
    peer = FakePeer(
        tmp_path / "hf", matmul={"flops_per_second": 1e15}, top={"seconds": 2.0, "top": -5}
    )
    out = tmp_path / "result.json"
    command = ["--model", model_dir, "--dtype", "float32", "--repeats", "1"]
    command += ["--peer", "transformers", "--peer-python", str(peer.python), "--out", str(out)]
    assert prefill.main([*command, "--contexts", "40"]) == 0
    [row] = json.loads(out.read_text(encoding="utf-8"))["rows"]
    config = load_model(model_dir, dtype="float32", cache_tokens=64).config
    assert row["flops"] == forward_flops(config, [(40, 0)], num_logits=1)
    theirs, ours = row["arms"]["transformers"], row["arms"]["jaxrag"]
    assert theirs["flops_per_second"] == row["flops"] / 2
    assert theirs["of_matmul"] == pytest.approx(row["flops"] / 2 / 1e15)
    assert theirs["over_ours"]["median"] == 2.0 / ours["seconds"][0]
    assert row["same_first_token"] is False  # no token is -5
    assert [list(it) for it in peer.asked()] == [["matmul"]] * 3 + [["ids"]] * 2
    assert peer.asked()[0]["matmul"] == 16
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("float32, 40 tokens, 1 rounds; square matmul TFLOP/s: jaxrag ")
    assert lines[2].endswith(", transformers 1000.00")
    assert lines[4].split()[:3] == ["transformers", "2000", "(2000-2000)"]
    assert lines[4].endswith("another")


def test_arms_take_turns_and_the_first_round_is_left_out():
    calls = []

    def arm(name):
        return lambda: calls.append(name) or len(calls)

    assert in_turn({"a": arm("a"), "b": arm("b")}, 2) == {"a": [3, 5], "b": [4, 6]}
    assert calls == ["a", "b"] * 3
    assert ratios([2.0, 9.0, 8.0], [1.0, 3.0, 8.0]) == {"median": 2.0, "low": 1.0, "high": 3.0}


def test_tokens_alike_are_counted_from_the_first():
    assert [same([1, 2, 3], other) for other in ([1, 2, 3], [1, 4, 3], [0, 2, 3])] == [3, 1, 0]


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_reads_every_weight_but_a_table_of_inputs(tiny_config, tied):
    model = random_model(tiny_config(tie_embeddings=tied))
    c = model.config
    inputs = 0 if tied else c.vocab_size * c.model_dim
    found = step_bytes(model, 5, 100, 7)
    assert found["weights"] == 4 * (num_params(c) - inputs)
    assert found["kv"] == 5 * (100 + 4) * c.kv_bytes_per_token


def test_a_copy_counts_what_is_read_and_what_is_written(monkeypatch):
    def half_a_second(job, repeats):
        job()
        return 0.5

    monkeypatch.setattr(script, "best_seconds", half_a_second)
    assert script.bandwidth() == {"read": 2 << 20, "copy": 4 << 20}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batches": ()}, ""),
        ({"contexts": (512, 512)}, "512"),
        ({"dtypes": ("float32", "int7")}, "'int7'"),
        ({"tokens": 0}, ""),
        ({"repeats": 0}, ""),
        ({"dtypes": ("float16",), "llama_python": "python"}, "'float16'"),
    ],
)
def test_bad_options_are_refused(change, message):
    with refused(RequestError, message):
        dataclasses.replace(ThroughputOptions(), **change)
    rest = {name: value for name, value in change.items() if name in ("dtypes", "contexts")}
    if rest and "llama_python" not in change:
        with refused(RequestError, message):
            dataclasses.replace(prefill.PrefillOptions(), **rest)


def test_a_peer_without_its_name_and_one_that_cannot_run_are_refused(model_dir, capsys):
    command = ["--model", model_dir]
    assert decode_throughput.main([*command, "--peer-python", "python"]) == 1
    assert "--peer-python without --peer; add --peer transformers" in capsys.readouterr().err
    assert decode_throughput.main([*command, "--llama-python", "no-such-python"]) == 1
    assert "--llama-python no-such-python: cannot be run" in capsys.readouterr().err


def test_a_file_that_is_no_result_is_not_gone_on_with(tmp_path):
    with refused(RequestError, "--resume without"):
        Rows.open("a", RowsOptions(resume=True), ("dtype",))
    path = tmp_path / "result.json"
    again = RowsOptions(resume=True, out=str(path))
    for text in ("{", "[]", "{}", '{"rows": 1}'):
        path.write_text(text, encoding="utf-8")
        with refused(RequestError, "result.json"):
            Rows.open("a", again, ("dtype",))
    path.write_text('{"benchmark": "b", "rows": []}', encoding="utf-8")
    with refused(RequestError, "'b'"):
        Rows.open("a", again, ("dtype",))
    assert Rows.open("a", RowsOptions(out=str(path)), ("dtype",)).rows == []


def test_the_report_has_a_line_for_every_arm():
    spread = {"median": 20.0, "low": 10.0, "high": 30.0}
    arm = {
        "tokens_per_second": spread,
        "seconds_per_token": {"median": 0.05, "low": 0.04, "high": 0.1},
        "bytes_per_second": 12.3e9,
        "of_read": 0.41,
    }
    row = {
        "dtype": "bfloat16", "batch": 8, "context": 512, "tokens": 32, "repeats": 5,
        "limits": {"read": 30e9, "copy": 50e9}, "limit_tokens_per_second": 48.8,
        "arms": {"jaxrag": arm, "llama.cpp": {**arm, "over_ours": spread, "same_tokens": 33}},
        "peers": {"llama.cpp": {}},
    }  # fmt: skip
    _, head, title, ours, theirs = report({"model": "random", "rows": [row]})
    assert head.split() == ["tokens/s", "ms", "GB/s", "of", "read", "over", "ours", "same"]
    assert title == (
        "bfloat16, batch 8, context 512, 32 tokens, 5 rounds; at most 48.8 tokens/s: memory reads "
        "30.0 GB/s, copies 50.0"
    )
    assert ours.split() == ["jaxrag", "20.0", "(10.0-30.0)", "50.00", "12.3", "41%"]
    assert theirs.split()[-3:] == ["20.00", "(10.00-30.00)", "33"]


@pytest.fixture
def peer_llama(monkeypatch):
    """The script of llama.cpp's side, whose libraries no test has."""
    types = SimpleNamespace(F32=0, F16=1, BF16=30, Q8_0=8)
    monkeypatch.setitem(sys.modules, "gguf", SimpleNamespace(GGMLQuantizationType=types))
    llama = SimpleNamespace(llama_log_callback=lambda function: function)
    monkeypatch.setitem(sys.modules, "llama_cpp", llama)
    path = Path(decode_throughput.__file__).with_name("peer_llama.py")
    spec = importlib.util.spec_from_file_location("peer_llama", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_a_llama_keeps_its_meaning_where_pairs_are_neighbours(peer_llama):
    rng = np.random.default_rng(0)
    heads, half, width = 3, 4, 5
    weight, x = rng.normal(size=(heads * 2 * half, width)), rng.normal(size=width)
    turn = np.exp(1j * rng.normal(size=half))
    halves = (weight @ x).reshape(heads, 2, half)
    expected = (halves[:, 0] + 1j * halves[:, 1]) * turn
    pairs = (peer_llama.interleave(weight, 2 * half) @ x).reshape(heads, half, 2)
    np.testing.assert_allclose((pairs[..., 0] + 1j * pairs[..., 1]) * turn, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_exported_is_read_for_llama(peer_llama, tiny_config, tmp_path, dtype):
    config = tiny_config(dtype=dtype)
    params = init_params(config, jax.random.key(1))
    export_hf(tmp_path / "model", params, config)
    found = dict(peer_llama.tensors(tmp_path / "model"))
    assert len({peer_llama.gguf_name(name) for name in found}) == 3 + 9 * config.num_layers
    assert peer_llama.gguf_name("model.layers.2.mlp.up_proj.weight") == "blk.2.ffn_up.weight"
    assert peer_llama.gguf_name("lm_head.weight") == "output.weight"
    values = peer_llama.as_float32(found["model.embed_tokens.weight"])
    np.testing.assert_array_equal(values, np.asarray(params.embed, np.float32))
