"""`jaxrag check`: what a directory is understood as, from its headers and at work."""

import functools
import json
import os
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrag.base.errors import ModelError
from jaxrag.cli.check import _understood
from jaxrag.cli.output import human_count
from jaxrag.kv.cache import budget
from jaxrag.kv.placement import AWAY, KVPlacement
from jaxrag.measure.bench import forms, model_check
from jaxrag.models import FAMILIES, model
from jaxrag.models import memory as memories
from jaxrag.models.export import export_hf
from jaxrag.models.memory import memory_of
from jaxrag.models.model import load_model
from jaxrag.models.overview import LLAMA_3_8B, overview
from jaxrag.models.spec import by_name, init_params, num_params, param_specs
from jaxrag.models.tensor_files import DTYPES, NewTensor, file_header

ROOT = Path(__file__).parents[1]
GOLDENS = ROOT / "tests" / "goldens"
SHIPPED = ROOT / "checkpoints" / "synthetic-0.8m"
MODELS = sorted(path.parent.name for path in GOLDENS.glob("*/model*.safetensors*"))
MODELS = [name for name in dict.fromkeys(MODELS) if name != "embed"]


@pytest.fixture
def check(jaxrag):
    return functools.partial(jaxrag, "check")


@pytest.fixture(scope="module")
def large(tmp_path_factory, tokenizer_dir):
    """A directory of Llama-3-8B's shapes whose weights are a hole in a file."""
    folder = tmp_path_factory.mktemp("large") / "llama-3-8b"
    shutil.copytree(tokenizer_dir, folder)
    family, specs = FAMILIES["llama"], by_name(param_specs(LLAMA_3_8B))
    (folder / "config.json").write_text(json.dumps(family.write_config(LLAMA_3_8B)))
    tensors = []
    for rule in family.tensors:
        if rule.paths[0] not in specs:
            continue
        shape = specs[rule.paths[0]].shape
        expected = rule.file_shape(shape[rule.repeats :])
        tensors += [
            NewTensor(rule.name(at), DTYPES["BF16"], expected, None)
            for at in np.ndindex(shape[: rule.repeats])
        ]
    with (folder / "model.safetensors").open("wb") as file:
        header = file_header(tensors, {})
        file.write(header)
        file.truncate(len(header) + sum(tensor.num_bytes for tensor in tensors))
    return folder


@pytest.fixture
def memory(monkeypatch):
    """``memory(gib)``: so much is free."""

    def free(gib):
        monkeypatch.setattr(budget, "_system_bytes", lambda: int(gib * 2**30))
        monkeypatch.setattr(budget, "_container_bytes", lambda: None)

    return free


@pytest.mark.parametrize("name", MODELS)
def test_every_golden_directory_is_understood(name):
    found = overview(GOLDENS / name)
    held = num_params(found.config)
    if found.config.own_kv_heads is None:
        assert found.files.parameters == held
    else:  # arranged as they are loaded
        assert found.files.parameters < held
    assert (
        found.architecture
        in json.loads((GOLDENS / name / "config.json").read_text())["architectures"]
    )
    width = 4 if found.config.dtype == "float32" else 2
    assert found.memory.weights == width * num_params(found.config)
    assert found.memory.kv_per_token == found.config.kv_bytes_per_token
    assert "rms_norm_eps" not in found.ignored and "hidden_size" not in found.ignored


def test_the_parts_of_a_family_are_said():
    rows = dict(_understood(overview(GOLDENS / "granite")))
    assert rows["constants"] == "embeddings x 1.7, scores x 0.21, residuals x 0.6, logits x 0.3333"
    assert "constants" not in dict(_understood(overview(GOLDENS / "llama")))
    rows = dict(_understood(overview(GOLDENS / "olmo3")))
    assert "norms after attention and MLP alone" in rows["layers"]
    assert "sliding window of 5 tokens in 2 layers" in rows["attention"]
    assert "1 layers theta 100, yarn x 4" in rows["positions"]
    rows = dict(_understood(overview(GOLDENS / "smollm3")))
    assert "1 layers without positions" in rows["positions"]


def test_keys_that_nothing_reads_are_named(tmp_path):
    shutil.copytree(GOLDENS / "llama", tmp_path / "llama")
    path = tmp_path / "llama" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pretraining_tp": 4}))
    before = overview(GOLDENS / "llama").ignored
    assert set(overview(tmp_path / "llama").ignored) == {*before, "pretraining_tp"}


def test_experts_are_counted(check):
    code, out, _ = check(GOLDENS / "gpt_oss", "--quick")
    one = 3 * (3 * 24 * 37 + 2 * 37 + 24)  # of an expert, in all layers
    whole = num_params(overview(GOLDENS / "gpt_oss").config)
    assert code == 0
    assert f"{human_count(whole)} parameters, a token meets {human_count(whole - 3 * one)}" in out
    assert "5 experts of 37, 2 for a token" in out
    assert "a sink logit of each head" in " ".join(out.split())


def test_the_shipped_model(check):
    code, out, err = check(SHIPPED / "dual", "--quick")
    assert (code, err) == (0, "")
    for words in (
        "LlamaForCausalLM, 820k parameters",
        "4 query and 4 KV heads of 32",
        "block-wise (reordered positions)",
        "the directory's prompt.toml",
        "'<|doc_start|>{text}<|doc_end|>'",
        "at <|end|> (1)",
        "turborag (isolated KV)",
    ):
        assert words in out
    assert max(map(len, out.replace(str(SHIPPED), "").splitlines())) <= 80
    found = json.loads(check(SHIPPED / "full", "--quick", "--json")[1])
    assert [one["method"] for one in found["methods"]] == ["cacheblend", "fusionrag", "epic"]
    assert found["methods"][0]["encoders"] == ["after_prefix"]
    assert found["checked"] is None


def test_measured_forms_are_kept_and_shown(check, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAXRAG_FORMS")
    monkeypatch.setattr(forms, "_KEYS", 256)
    monkeypatch.setattr(forms, "_WEIGHT_BYTES", 1 << 16)
    monkeypatch.setattr(forms, "chosen_of", lambda times, default: default)
    code, out, err = check(SHIPPED / "dual", "--quick", "--measure")
    assert code == 0 and "attention of a step: 1 tiles" in err and "4 tiles is kept" in err
    kept = tmp_path / "jaxrag" / "xla" / "forms.json"
    assert f"forms: kept in {kept}" in err
    assert "key_tile 256, heads_apart bfloat16" in out
    found = json.loads(check(SHIPPED / "dual", "--quick", "--json")[1])
    assert (found["forms"]["decode_tiles"], found["forms_from"]) == (4, str(kept))
    kept.write_text("{}")
    code, _, err = check(SHIPPED / "dual", "--quick")
    assert code == 1 and err.startswith("jaxrag: ") and err.count("\n") == 1


def test_a_family_that_needs_a_bos_is_told_which_chunks_it_reads(check):
    said = check(GOLDENS / "gemma3", "--quick")[1]
    assert "behind a BOS token" in said and "not isolated" in said
    assert "epic (isolated KV)" not in said and "cacheblend (after_prefix KV)" in said
    said = check(GOLDENS / "llama", "--quick")[1]
    assert "BOS" not in said and "epic (isolated KV)" in said


def test_a_chat_model_is_shown_with_its_own_template(check, chat_model_dir):
    found = json.loads(check(chat_model_dir, "--quick", "--json")[1])
    assert found["prompt"]["template"] == "chat"
    parts = dict(found["prompt"]["parts"])
    assert parts["prefix"].startswith("<|im_start|>system\nYou are helpful.<|im_end|>\n")
    assert parts["final block"].endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert found["vocabulary"]["ends"] == {"<|im_end|>": 2, "<|endoftext|>": 0}


def test_an_8b_model_that_does_not_fit_is_told_and_not_read(check, large, memory, monkeypatch):
    memory(4)
    code, out, err = check(large, "--quick")
    assert (code, err) == (0, "")
    assert "8.03G parameters" in out and "15.0 GiB in bfloat16, KV 128.0 KiB a token" in out
    assert "the weights do not fit: 1" in out  # 11 and what reads them
    assert "jaxrag ingest" not in out
    monkeypatch.setattr(model, "load_hf", lambda *_, **__: pytest.fail("weights are read"))
    code, out, err = check(large)
    assert code == 1 and "8.03G parameters" in out
    assert err.count("\n") == 1
    assert "15.0 GiB of bfloat16 weights and 3.5 GiB to read them, and 4.0 GiB of memory" in err


def test_an_8b_model_that_fits(large, memory):
    memory(24)
    found = overview(large)
    assert (found.memory.missing, found.longest_context) == (0, 8192)
    assert found.memory.pool_tokens == 8192  # 1 GiB
    memory(15.5)
    tight = overview(large).memory
    assert tight.missing > 0 and tight.most_tokens * 128 * 1024 < 0.6 * 2**30


def quantised(config):
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "modules": ["x"] * 99}


def other(config):
    config["architectures"] = ["PhiForCausalLM"]


def deeper(config):
    config["num_hidden_layers"] += 1


def test_a_mesh_is_taken_into_account(check):
    """What is not split, such as norms, lies on each device."""
    alone, parted = (
        json.loads(check(SHIPPED / "dual", "--quick", "--json", *mesh)[1])["memory"]
        for mesh in ((), ("--mesh", "1,1,2"))
    )
    assert alone["weights"] < parted["weights"] < 1.1 * alone["weights"]
    code, _, err = check(SHIPPED / "dual", "--quick", "--mesh", "2,2")
    assert code == 1 and "--mesh '2,2': expected three integers such as 1,1,8" in err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (quantised, "take the weights that were quantised, in bfloat16, float16 or float32"),
        (other, "PhiForCausalLM is not supported; supported are those of ForCausalLM: Llama, "),
        (deeper, "is missing; the llama config asks for it"),
    ],
)
def test_what_cannot_be_served_is_one_line(check, tmp_path, change, words):
    shutil.copytree(GOLDENS / "llama", tmp_path / "llama")
    path = tmp_path / "llama" / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    code, out, err = check(tmp_path / "llama", "--quick")
    assert (code, out) == (1, "")
    assert words in err and err.count("\n") == 1 and len(err) < 400 + len(str(path))


def test_what_is_truncated_is_one_line(check, tmp_path):
    shutil.copytree(GOLDENS / "llama", tmp_path / "llama")
    weights = tmp_path / "llama" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    code, out, err = check(tmp_path / "llama", "--quick")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "truncated" in err


def peer(tmp_path, logits):
    """An interpreter that answers as peer_logits.py does, with these logits."""
    np.save(tmp_path / "theirs.npy", logits)
    script = tmp_path / "peer"
    script.write_text(
        f"#!{sys.executable}\n"
        "import json, shutil, sys\n"
        'print(json.dumps({"torch": "2", "transformers": "5"}), flush=True)\n'
        "for line in sys.stdin:\n"
        f"    shutil.copy({str(tmp_path / 'theirs.npy')!r}, json.loads(line)['out'])\n"
        '    print(json.dumps({"tokens": 1}), flush=True)\n'
    )
    script.chmod(0o755)
    return script


def test_logits_are_held_against_a_peer(check, model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(model_check, "_speed", lambda model: model_check.Speed(64, 100.0, 10.0))
    loaded = load_model(model_dir)
    ids = model_check._random_ids(loaded, model_check.LOGIT_TOKENS)
    logits = np.asarray(loaded.logits(ids[None])[0])
    code, out, err = check(model_dir, "--peer-python", peer(tmp_path, logits))
    assert (code, err) == (0, "")
    out = " ".join(out.split())  # lines are broken anywhere
    assert "5: the same logits in float32" in out and "first choices 100% the same" in out
    assert "prefill 100 tokens/s" in out
    other = peer(tmp_path, logits + 0.1)
    code, out, err = check(model_dir, "--peer-python", other, "--json")
    assert code == 3 and "gives other logits than transformers 5" in err
    parity = json.loads(out)["checked"]["parity"]
    assert not parity["same"] and parity["difference"] == pytest.approx(0.1, abs=1e-4)
    code, out, err = check(model_dir, "--peer-python", tmp_path / "absent")
    assert code == 1 and "cannot be run" in err


def test_a_model_at_work(model_dir, monkeypatch):
    monkeypatch.setattr(model_check, "_LONGEST", 64)
    checked = model_check.check_model(overview(model_dir), peer_python=None)
    assert checked.speed.prompt_tokens == 64
    assert checked.speed.prefill > 0 < checked.speed.decode


def test_weights_that_give_no_numbers_are_refused(tmp_path, tiny_config):
    config = tiny_config(num_layers=1, dtype="float16")
    params = init_params(config, jax.random.key(0))
    huge = params.replace(embed=params.embed * 1e4, final_norm=params.final_norm * 6e4)
    export_hf(tmp_path / "huge", huge, config)
    with pytest.raises(ModelError, match="logits hold NaN or infinity in float16; load it in a"):
        model_check.check_model(overview(tmp_path / "huge"))


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["llama_llama3", "qwen2", "glm4", "llama_sharded_bf16"])
def test_the_goldens_are_as_transformers_has_them(name, monkeypatch):
    monkeypatch.setattr(model_check, "_speed", lambda model: model_check.Speed(64, 1.0, 1.0))
    python = os.environ.get("PEER_PYTHON", sys.executable)
    checked = model_check.check_model(overview(GOLDENS / name), peer_python=python)
    assert checked.parity.same and checked.parity.first_choice == 1.0


def test_the_memory_of_a_model_grows_with_what_is_asked(tiny_config):
    config = tiny_config(dtype="bfloat16")
    asked = memory_of(config, cache_tokens=1000)
    assert (asked.pool_tokens, asked.host_pool) == (1008, 0)  # whole pages
    assert asked.pool == 1008 * config.kv_bytes_per_token
    away = memory_of(config, cache_tokens=1000, placement=AWAY)
    assert (away.pool, away.host_pool) == (0, asked.pool)
    values = memory_of(config, cache_tokens=1000, placement=KVPlacement(value_layers=1))
    assert values.host_pool == asked.pool // 3  # V of two layers of three
    assert values.pool + values.host_pool == asked.pool


def test_a_container_is_no_larger_than_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(budget, "_CGROUP", tmp_path)
    assert budget._container_bytes() is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 50\n")
    assert budget._container_bytes() is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert budget._container_bytes() == budget.available_bytes() == 750


class Accelerator:
    """A device of another platform, with so much memory."""

    platform, device_kind, process_index = "gpu", "H200", 0

    def __init__(self, limit, used):
        self.stats = {"bytes_limit": limit, "bytes_in_use": used}

    def memory_stats(self):
        return self.stats


def test_an_accelerator_says_what_it_has(large, memory, monkeypatch):
    memory(64)
    two = [Accelerator(80 << 30, 60 << 30), Accelerator(80 << 30, 61 << 30)]
    monkeypatch.setattr(memories, "_devices", lambda mesh: two)
    found = memory_of(LLAMA_3_8B)
    assert (found.device, found.devices, found.free) == ("H200", 2, 19 << 30)
    assert found.missing == 0 and found.pool <= (19 << 30) // 2
    with pytest.raises(ModelError, match=r"a pool of 1000000 tokens .* on H200; lower cache_tok"):
        load_model(large, cache_tokens=1_000_000)
    two[1].stats["bytes_in_use"] = 70 << 30
    with pytest.raises(ModelError, match=r"15\.0 GiB of bfloat16 weights, and 10\.0 GiB on H200"):
        load_model(large)
    away = memory_of(LLAMA_3_8B, cache_tokens=100_000, placement=AWAY)
    assert (away.pool, away.missing > 0) == (0, True)
