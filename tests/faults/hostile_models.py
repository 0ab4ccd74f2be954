"""Model directories that nobody should load: what is wrong with each, and what must be said."""

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from hostile_case import Case
from safetensors.numpy import load_file, save_file

DEEP = '{"a":' + "[" * 200_000
WEIGHTS = "model.safetensors"
FINAL_NORM = "model.norm.weight"
INPUT_NORM = "model.layers.0.input_layernorm.weight"
HEADS = {"num_attention_heads": 10**6, "num_key_value_heads": 10**6}
Edit = Callable[[Path], None]


def changed(name: str, **values: Any) -> Edit:
    """A JSON file with other values."""

    def edit(model: Path) -> None:
        path = model / name
        before = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps({**before, **values}))

    return edit


def config(**values: Any) -> Edit:
    return changed("config.json", **values)


def rope(**values: Any) -> Edit:
    def edit(model: Path) -> None:
        config(rope_parameters=values)(model)
        path = model / "config.json"
        kept = {k: v for k, v in json.loads(path.read_text()).items() if k != "rope_theta"}
        path.write_text(json.dumps({**kept, "rope_scaling": None, "rope_theta": 1e4}))

    return edit


def written(name: str, text: str | bytes) -> Edit:
    """A file with this in it."""

    def edit(model: Path) -> None:
        (model / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    return edit


def header(entry: Any = None, *, text: str = "", length: int | None = None) -> Edit:
    """Weights whose header holds ``entry`` under a name, or is this text."""
    data = (text or json.dumps({FINAL_NORM: entry})).encode()
    said = len(data) if length is None else length
    return written(WEIGHTS, struct.pack("<Q", said) + data + bytes(64))


def tensor(**values: Any) -> Edit:
    """Weights with one entry of their header changed."""

    def edit(model: Path) -> None:
        data = (model / WEIGHTS).read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        table = json.loads(data[8 : 8 + size])
        table[FINAL_NORM] |= values
        made = json.dumps(table).encode()
        (model / WEIGHTS).write_bytes(struct.pack("<Q", len(made)) + made + data[8 + size :])

    return edit


def weights(name: str, value: float) -> Edit:
    def edit(model: Path) -> None:
        tensors = load_file(model / WEIGHTS)
        tensors[name].reshape(-1)[-1] = value
        save_file(tensors, model / WEIGHTS)

    return edit


def shape(name: str, *size: int) -> Edit:
    def edit(model: Path) -> None:
        tensors = load_file(model / WEIGHTS)
        tensors[name] = np.ones(size, np.float32)
        save_file(tensors, model / WEIGHTS)

    return edit


def without(name: str) -> Edit:
    def edit(model: Path) -> None:
        tensors = load_file(model / WEIGHTS)
        del tensors[name]
        save_file(tensors, model / WEIGHTS)

    return edit


def cut(name: str, share: float) -> Edit:
    def edit(model: Path) -> None:
        data = (model / name).read_bytes()
        (model / name).write_bytes(data[: int(len(data) * share)])

    return edit


def template(source: Any) -> Edit:
    return changed("tokenizer_config.json", chat_template=source)


def tokenizer(change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Edit:
    """tokenizer.json with some of its parts changed."""

    def edit(model: Path) -> None:
        path = model / "tokenizer.json"
        values = json.loads(path.read_text())
        path.write_text(json.dumps({**values, **change(values)}))

    return edit


def replacements(times: int) -> dict[str, Any]:
    one = {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 50}
    return {"normalizer": {"type": "Sequence", "normalizers": [one] * times}}


def pattern(text: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": text}, "behavior": "Isolated", "invert": False}
    return {"pre_tokenizer": split}


def indexed(weight_map: Any) -> Edit:
    def edit(model: Path) -> None:
        (model / WEIGHTS).rename(model / "model-00001-of-00001.safetensors")
        text = weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map})
        (model / f"{WEIGHTS}.index.json").write_text(text)

    return edit


SIZE = "expected|malformed|not supported|do not fit|shape"
HEADER = "malformed safetensors header|safetensors"
CHAT = "chat template"
_EDITS: tuple[tuple[str, Edit, str], ...] = (
    ("layers 10^9", config(num_hidden_layers=10**9), "expected at most"),
    ("layers 10^400", config(num_hidden_layers=10**400), SIZE),
    ("layers -1", config(num_hidden_layers=-1), SIZE),
    ("layers a text", config(num_hidden_layers="1"), SIZE),
    ("vocabulary 10^12", config(vocab_size=10**12), SIZE),
    ("MLP 10^12", config(intermediate_size=10**12), SIZE),
    ("positions 10^15", config(max_position_embeddings=10**15), SIZE),
    ("hidden 10^9", config(hidden_size=10**9, head_dim=8), SIZE),
    ("head dim 10^6", config(head_dim=10**6), SIZE),
    ("heads 10^6", config(**HEADS), SIZE),
    ("heads 0", config(num_attention_heads=0), SIZE),
    ("heads -1", config(num_key_value_heads=-1), SIZE),
    ("epsilon -1", config(rms_norm_eps=-1), SIZE),
    ("epsilon NaN", config(rms_norm_eps=float("nan")), SIZE),
    ("epsilon 10^400", config(rms_norm_eps=10**400), SIZE),
    ("theta 0", rope(rope_type="default", rope_theta=0), SIZE),
    ("theta infinite", rope(rope_type="default", rope_theta=float("inf")), SIZE),
    ("rope factor 10^400", rope(rope_type="linear", factor=10**400, rope_theta=1e4), SIZE),
    ("rope type a list", rope(rope_type=["linear"], rope_theta=1e4), SIZE),
    ("dtype a list", config(dtype=["float32"], torch_dtype=["float32"]), SIZE),
    ("dtype unknown", config(dtype="float3", torch_dtype="float3"), "float3"),
    ("activation unknown", config(hidden_act="sinh"), "sinh"),
    ("architecture a number", config(architectures=[5]), "expected a"),
    ("model type a list", config(architectures=None, model_type=["llama"]), "expected a"),
    ("model type unknown", config(architectures=["Nobody"], model_type="nobody"), "nobody|Nobody"),
    ("end of sequence a mapping", config(eos_token_id={"a": 1}), SIZE),
    ("config of depth 200,000", written("config.json", DEEP), "cannot be read as JSON"),
    ("config a list", written("config.json", "[1]"), "config.json"),
    ("config is no JSON", written("config.json", b"\xff\xfe{"), "config.json"),
    ("header of depth 200,000", header(text=DEEP), HEADER),
    ("header of 1 GB in a short file", header({}, length=10**9), "header|file"),
    ("header of 2^64 - 1", header({}, length=2**64 - 1), "header|file"),
    ("header a list", header(text="[1]"), HEADER),
    ("header is no UTF-8", header(text="\udc80".encode("utf-8", "surrogatepass").hex()), HEADER),
    ("tensor a number", header(5), HEADER),
    ("dtype of a tensor a list", tensor(dtype=["F32"]), HEADER),
    ("dtype of a tensor unknown", tensor(dtype="F33"), "F33"),
    ("shape a text", tensor(shape="24"), HEADER),
    ("shape negative", tensor(shape=[-1, -24]), HEADER),
    ("shape fractional", tensor(shape=[24.0]), HEADER),
    ("offsets texts", tensor(data_offsets=["0", "96"]), HEADER),
    ("offsets negative", tensor(data_offsets=[-96, 0]), HEADER),
    ("offsets beyond the file", tensor(data_offsets=[0, 10**15]), HEADER),
    ("weights cut in half", cut(WEIGHTS, 0.5), WEIGHTS),
    ("weights empty", written(WEIGHTS, b""), WEIGHTS),
    ("weights NaN", weights(INPUT_NORM, np.nan), "NaN or infinity"),
    ("weights infinite", weights(FINAL_NORM, np.inf), "NaN or infinity"),
    ("weights of another shape", shape(FINAL_NORM, 25), "shape|expected"),
    ("weights that lack one", without(FINAL_NORM), FINAL_NORM),
    ("index that names /etc/passwd", indexed({"a": "../../etc/passwd"}), "passwd"),
    ("index of lists", indexed({"a": ["b"]}), "weight_map"),
    ("index of depth 200,000", indexed(DEEP), "JSON"),
    ("tokenizer empty", written("tokenizer.json", b""), "tokenizer"),
    ("tokenizer cut", cut("tokenizer.json", 0.7), "tokenizer"),
    ("tokenizer of depth 200,000", written("tokenizer.json", DEEP), "tokenizer"),
    ("tokenizer config of depth 200,000", written("tokenizer_config.json", DEEP), "JSON"),
    ("normalizer that multiplies by 50 six times", tokenizer(lambda _: replacements(6)), "times"),
    ("beginning of sequence unknown", changed("tokenizer_config.json", bos_token="<x>"), "<x>"),
    ("prompt.toml of depth 200,000", written("prompt.toml", "a = " + "[" * 200_000), "TOML"),
    ("prompt.toml of other types", written("prompt.toml", "prefix = 5\n"), "prompt.toml"),
)
_TEMPLATES: tuple[tuple[str, Any], ...] = (
    ("of nested loops", "{% for a in range(99999) %}" * 2 + "{% endfor %}" * 2),
    ("of lipsum", "{{ lipsum(n=3000000) }}"),
    ("of a range of 10^9", "{% for a in range(10**9) %}x{% endfor %}"),
    ("of 10^10 letters", "{{ 'a' * 10**10 }}"),
    ("of 10^10 spaces", "{{ '%10000000000d' % 1 }}"),
    ("that divides by 0", "{{ 1 / 0 }}"),
    ("that adds a number to a text", "{{ 'a' + 1 }}"),
    ("that includes a file", "{% include '/etc/passwd' %}"),
    ("that calls itself", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"),
    ("that is no Jinja", "{% for %}"),
    ("a number", 5),
    ("a list without templates", [{"name": "default"}]),
)  # fmt: skip


def _case(name: str, edit: Edit, says: str, *options: str) -> Case:
    def make(folder: Path) -> list[str]:
        edit(folder / "model")
        (folder / "good.txt").write_text("The river is copper.")
        return ["ingest", str(folder / "good.txt"), "--kb", str(folder / "kb"),
                "--model", str(folder / "model"), *options]  # fmt: skip

    return Case(f"model: {name}", make, "refused", says)


def _bombed(folder: Path) -> list[str]:
    tokenizer(lambda _: pattern("(x+x+)+y"))(folder / "model")
    (folder / "in").mkdir()
    (folder / "in" / "good.txt").write_text("The river is copper.")
    (folder / "in" / "bad.txt").write_text("x" * 60)
    return ["ingest", str(folder / "in"), "--kb", str(folder / "kb"),
            "--model", str(folder / "model")]  # fmt: skip


CASES = (
    *(_case(*edit) for edit in _EDITS),
    *(_case(f"template {name}", template(source), CHAT, "--template", "chat")
      for name, source in _TEMPLATES if isinstance(source, str)),
    *(_case(f"template {name}", template(source), "chat_template")
      for name, source in _TEMPLATES if not isinstance(source, str)),
    Case("model: a pattern that gives up on a document", _bombed, "left out",
         "the tokenizer fails on this text", panics=True),
)  # fmt: skip
