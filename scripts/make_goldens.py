"""Make the golden models and outputs in tests/goldens with torch and transformers.

Every model is tiny and random, with sizes that are all unequal, unusual constants and random norms
and biases, so that a swapped axis or an ignored key changes the result. Beside each model lie

* ``config_v4.json``, but of Gemma 4: the configuration with ``rope_theta`` and ``rope_scaling``;
* ``expected.npz``: ``ids``, causal ``logits`` and ``greedy`` continuations, and for every block
  layout ``<layout>/ids|positions|segments|logits``, logits of non-empty tokens only.

Nothing of jaxrag is imported here. Run it where torch and transformers are installed:

    python scripts/make_goldens.py [--out tests/goldens] [--only NAME ...]
"""

import argparse
import copy
import importlib.metadata
import inspect
import json
import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from golden_models import COMMON, GOLDENS, Golden
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

EMPTY, PREFIX, FINAL, FIRST_CHUNK = 0, 1, 2, 3
GREEDY_STEPS = 12
LEAST_MARGIN = 1e-3  # between the best and second logit of a greedy step


def make_model(golden: Golden, seed: int) -> torch.nn.Module:
    """A random model in float32, its weights already rounded to the dtype they are saved in."""
    keys = {key: value for key, value in COMMON.items() if key not in golden.omit}
    config = transformers.AutoConfig.for_model(golden.model_type, **{**keys, **golden.changes})
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    return randomised(model, golden.dtype, seed)


def randomised(model: torch.nn.Module, dtype: torch.dtype, seed: int) -> torch.nn.Module:
    """The model with random weights in float32, rounded to the dtype that they are saved in."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        scales = [buffer for buffer in model.named_buffers() if buffer[0].endswith("layer_scalar")]
        for name, weight in [*model.named_parameters(), *scales]:
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("bias"):
                values = 0.5 * noise
            elif name.endswith("sinks"):
                values = 2 * noise
            elif name.endswith("A_log"):  # of decays near 0 and near 1
                values = 2 * noise - 1
            elif name.endswith(("norm.weight", "layernorm.weight")) and zero_centred(model):
                values = 0.3 * noise + ("linear_attn" in name)
            elif weight.ndim == 1:  # a norm
                values = 1 + 0.3 * noise
            elif "embed" in name:
                values = noise
            else:  # of experts all are one tensor, [E, out, in]
                values = 1.5 * noise / weight.shape[-1] ** 0.5
            weight.copy_(values.to(dtype))
    return model.eval()


def zero_centred(model: torch.nn.Module) -> bool:
    """Do its norms multiply by 1 + weight? All but those of what linear attention gives."""
    return "linear_attention" in (getattr(model.config, "layer_types", None) or ())


def config_v4(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration as transformers 4 wrote it."""
    old = dict(config)
    rope, given = dict(old.pop("rope_parameters")), config["rope_parameters"]
    if "sliding_attention" in rope:
        if "sliding_window_pattern" in old:
            del old["layer_types"], old["_sliding_window_pattern"]
        if old["model_type"] != "olmo3":
            old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope, given = dict(rope["full_attention"]), given["full_attention"]
    old["torch_dtype"] = old.pop("dtype")
    old["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    newer = (
        "sliding_attention" in config["rope_parameters"] or kind == "llama3"
    )  # than the word "type"
    name = "rope_type" if newer else "type"
    old["rope_scaling"] = None if kind == "default" else {name: kind, **rope}
    again = transformers.CONFIG_MAPPING[old["model_type"]].from_dict(copy.deepcopy(old))
    read = again.rope_parameters.get("full_attention", again.rope_parameters)
    if {**read, "type": kind} != {**given, "type": kind}:
        raise SystemExit(f"{kind}: the old form reads as {again.rope_parameters}")
    return old


def block_layout(golden: Golden, composite: bool) -> tuple[np.ndarray, np.ndarray]:
    """Positions and segments [B, T] of its rows; composite positions restart at every chunk."""
    length = max(prefix + sum(chunks) + final for prefix, chunks, final in golden.rows)
    positions = np.zeros((len(golden.rows), length), np.int32)
    segments = np.full((len(golden.rows), length), EMPTY, np.int32)
    for row, (prefix, chunks, final) in enumerate(golden.rows):
        blocks = [(PREFIX, prefix)]
        blocks += [(FIRST_CHUNK + i, size) for i, size in enumerate(chunks)]
        blocks += [(FINAL, final)]
        start = 0
        for segment, size in blocks:
            first = 0 if composite and segment >= FIRST_CHUNK else start
            positions[row, start : start + size] = np.arange(first, first + size)
            segments[row, start : start + size] = segment
            start += size
    return positions, segments


def visible(segments: np.ndarray, prefix_visible: bool, window: int | None) -> np.ndarray:
    """Who sees whom, [B, T, T]: query i, key j, both in order; an empty token sees itself."""
    num_rows, length = segments.shape
    mask = np.zeros((num_rows, length, length), bool)
    for row in range(num_rows):
        for i in range(length):
            for j in range(i + 1):
                query, key = segments[row, i], segments[row, j]
                allowed = query in (key, FINAL) or (key == PREFIX and prefix_visible)
                near = window is None or i - j < window
                mask[row, i, j] = i == j or (key != EMPTY and allowed and near)
    return mask


def block_logits(
    model: torch.nn.Module,
    ids: np.ndarray,
    positions: np.ndarray,
    segments: np.ndarray,
    prefix_visible: bool,
) -> np.ndarray:
    """Logits of non-empty tokens, [tokens, V], under explicit masks.

    A model given a 4-D mask does not add its sliding window to it, so the window is put in here.
    """

    def mask(window: int | None) -> torch.Tensor:
        allowed = torch.from_numpy(visible(segments, prefix_visible, window))[:, None]
        return torch.where(allowed, 0.0, torch.finfo(torch.float32).min)

    window = getattr(model.config, "sliding_window", None)
    masks: Any = mask(window)
    if model.config.model_type in (
        "qwen2", "qwen3", "gemma2", "gemma3_text", "gemma4_text", "olmo3", "smollm3", "gpt_oss",
    ):  # fmt: skip
        masks = {"full_attention": mask(None), "sliding_attention": mask(window)}
    with torch.no_grad():
        logits = model(
            input_ids=torch.from_numpy(ids).long(),
            position_ids=torch.from_numpy(positions).long(),
            attention_mask=masks,
            use_cache=False,
        ).logits
    return logits.numpy()[segments != EMPTY]


def hybrid_logits(
    model: torch.nn.Module,
    ids: np.ndarray,
    positions: np.ndarray,
    segments: np.ndarray,
    prefix_visible: bool,
) -> np.ndarray:
    """The same of a model with recurrent layers, part by part with transformers' own caches.

    A chunk runs behind a copy of the prefix's cache, or an empty one. The final block runs behind
    the keys and values of all parts, the convolution's inputs of the last chunk, and the state that
    the rule leaves which runs over what the parts' tokens write, one behind the other.
    """
    module = inspect.getmodule(type(model))
    assert module is not None
    rules = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
    first = {name: getattr(module, name) for name in rules}  # the other is for a single token
    rule, written = first[rules[0]], []

    def noting(rule: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **named: Any) -> Any:
            written.append((args, named))
            return rule(*args, **named)

        return noted

    for name in rules:
        setattr(module, name, noting(first[name]))
    found: list[torch.Tensor] = []
    for row, used in enumerate(segments != EMPTY):
        part_ids = [int(it) for it in dict.fromkeys(segments[row][used].tolist())]
        empty = transformers.DynamicCache(config=model.config)
        prefix, last = empty, empty
        keys: list[list[Any]] = []
        states: dict[int, torch.Tensor] = {}
        for part in part_ids:
            in_part = segments[row] == part
            cache = copy.deepcopy(empty if part == PREFIX or not prefix_visible else prefix)
            if part == FINAL:
                cache = copy.deepcopy(last)
                for layer, state in states.items():
                    cache.layers[layer].recurrent_states = {0: state}
                for layer, values in enumerate(zip(*keys, strict=True)):
                    if values[0] is not None:
                        its = cache.layers[layer]
                        its.keys, its.values = (
                            torch.cat(it, 2) for it in zip(*values, strict=True)
                        )
            written.clear()
            before = cache.get_seq_length()
            with torch.no_grad():
                found.append(
                    model(
                        input_ids=torch.from_numpy(ids[row : row + 1, in_part]).long(),
                        position_ids=torch.from_numpy(positions[row : row + 1, in_part]).long(),
                        cache=cache,
                        use_cache=True,
                    ).logits[0]
                )
            recurrent = [i for i, it in enumerate(model.config.layer_types) if "linear" in it]
            for layer, (args, named) in zip(recurrent, written, strict=True):
                named = {**named, "initial_state": states.get(layer), "output_final_state": True}
                states[layer] = rule(*args, **named)[1]
            keys.append(
                [
                    None if i in recurrent else (it.keys[:, :, before:], it.values[:, :, before:])
                    for i, it in enumerate(cache.layers)
                ]
            )
            last, prefix = cache, cache if part == PREFIX else prefix
    for name in rules:
        setattr(module, name, first[name])
    return torch.cat(found).numpy()


def greedy(model: torch.nn.Module, ids: np.ndarray) -> np.ndarray | None:
    """The most likely continuation of each row, [B, GREEDY_STEPS], every prefix computed anew.

    None when a step is so close that rounding could decide it.
    """
    tokens = torch.from_numpy(ids).long()
    for _ in range(GREEDY_STEPS):
        with torch.no_grad():
            last = model(input_ids=tokens, use_cache=False).logits[:, -1]
        best = last.topk(2).values
        if (best[:, 0] - best[:, 1]).min() < LEAST_MARGIN:
            return None
        tokens = torch.cat([tokens, last.argmax(-1, keepdim=True)], dim=1)
    return tokens[:, ids.shape[1] :].numpy().astype(np.int32)


def write_golden(golden: Golden, out: Path) -> None:
    """Write one model directory with its expected outputs."""
    directory = out / golden.name
    shutil.rmtree(directory, ignore_errors=True)
    positions, segments = block_layout(golden, composite=False)
    continuation = None
    seed = zlib.crc32(golden.name.encode())
    while continuation is None:
        model = make_model(golden, seed)
        rng = np.random.default_rng(seed)
        ids = rng.integers(3, COMMON["vocab_size"], segments.shape, dtype=np.int32)
        continuation = greedy(model, ids)
        seed += 1
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(ids).long(), use_cache=False).logits.numpy()
    expected = {"ids": ids, "logits": logits, "greedy": continuation}

    kinds = getattr(model.config, "layer_types", None)
    logits_of = hybrid_logits if kinds and "linear_attention" in kinds else block_logits
    layouts = {"prefix_hidden": (False, False), "prefix_visible": (False, True)}
    windowed = getattr(model.config, "sliding_window", None) is not None
    if not windowed or (kinds and "sliding_attention" not in kinds):
        layouts["composite"] = (True, False)
    for name, (composite, prefix_visible) in layouts.items():
        positions, segments = block_layout(golden, composite)
        expected |= {
            f"{name}/ids": np.where(segments == EMPTY, 0, ids),
            f"{name}/positions": positions,
            f"{name}/segments": segments,
            f"{name}/logits": logits_of(model, ids, positions, segments, prefix_visible),
        }

    model.to(golden.dtype).save_pretrained(directory, max_shard_size=golden.max_shard_size)
    config = json.loads((directory / "config.json").read_text())
    if golden.model_type != "gemma4_text":  # which transformers 4 does not have
        old = json.dumps(config_v4(config), indent=2) + "\n"
        (directory / "config_v4.json").write_text(old)
    np.savez_compressed(directory / "expected.npz", **expected)


def write_mxfp4(path: Path) -> None:
    """Random blocks of MXFP4, and what transformers makes of them."""
    rng = np.random.default_rng(11)
    blocks = rng.integers(0, 256, (3, 5, 2, 16), dtype=np.uint8)
    scales = rng.integers(115, 135, (3, 5, 2), dtype=np.uint8)
    made = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
    np.savez_compressed(path, blocks=blocks, scales=scales, values=made.float().numpy())


def write_all(
    goldens: Sequence[Any], write: Callable[[Any, Path], None], folder: str, *packages: str
) -> None:
    """Make every golden, or some, and note the versions of torch, transformers and others."""
    parser = argparse.ArgumentParser(description="make goldens of the tests")
    parser.add_argument("--out", type=Path, default=Path(folder), help=f"({folder})")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="leave the others as they are")
    args = parser.parse_args()
    out: Path = args.out
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    made = [golden for golden in goldens if not args.only or golden.name in args.only]
    for golden in made:
        write(golden, out)
    if goldens is GOLDENS and not args.only:
        write_mxfp4(out / "mxfp4.npz")
    versions: dict[str, Any] = {
        name: importlib.metadata.version(name) for name in ("torch", "transformers", *packages)
    }
    noted = out / "versions.json"
    if args.only:  # those of the others stay, and what differs is said
        whole = json.loads(noted.read_text())
        later = {**whole.get("later", {}), **{golden.name: versions for golden in made}}
        versions = {**whole, "later": dict(sorted(later.items()))}
    noted.write_text(json.dumps(versions, indent=2) + "\n")
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{len(made)} goldens, {size / 1e6:.2f} MB in {out}")


if __name__ == "__main__":
    write_all(GOLDENS, write_golden, "tests/goldens")
