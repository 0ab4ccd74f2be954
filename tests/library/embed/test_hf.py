"""An encoder's directory is read strictly: every tensor, every shape, every key."""

import json
import shutil

import numpy as np
import pytest
from refusal import refused
from safetensors.numpy import load_file, save_file

from jaxrag.base.errors import ConfigError, ModelError
from jaxrag.library.embed import load_embedder

WEIGHT = "encoder.layer.1.output.dense.weight"


def change_tensors(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_a_missing_tensor(embedder_dir):
    directory = embedder_dir("minilm")
    change_tensors(directory, lambda tensors: tensors.pop(WEIGHT))
    with refused(ModelError, WEIGHT):
        load_embedder(directory)


def test_a_tensor_without_a_place(embedder_dir):
    directory = embedder_dir("minilm")
    change_tensors(directory, lambda tensors: tensors.update(extra=np.zeros(2, np.float32)))
    with refused(ModelError, "'extra'"):
        load_embedder(directory)


def test_a_tensor_of_another_shape(embedder_dir):
    directory = embedder_dir("minilm")
    change_tensors(directory, lambda t: t.update({WEIGHT: np.ascontiguousarray(t[WEIGHT].T)}))
    with refused(ModelError, "37"):
        load_embedder(directory)


def test_a_weight_of_integers(embedder_dir):
    directory = embedder_dir("minilm")
    change_tensors(directory, lambda t: t.update({WEIGHT: t[WEIGHT].astype(np.int64)}))
    with refused(ModelError, WEIGHT):
        load_embedder(directory)


def test_buffers_of_old_checkpoints_are_known(embedder_dir):
    directory = embedder_dir("minilm")
    before = load_embedder(directory)(["heron"], "passage")
    buffers = {"embeddings.position_ids": np.arange(40)[None]}
    change_tensors(directory, lambda tensors: tensors.update(buffers))
    np.testing.assert_array_equal(load_embedder(directory)(["heron"], "passage"), before)


def test_a_checkpoint_with_its_head_and_one_without(embedder_dir):
    directory = embedder_dir("bert_last")
    before = load_embedder(directory)(["heron"], "passage")

    def strip(tensors):
        for name in list(tensors):
            values = tensors.pop(name)
            if name.startswith("bert."):
                tensors[name.removeprefix("bert.")] = values

    change_tensors(directory, strip)
    np.testing.assert_array_equal(load_embedder(directory)(["heron"], "passage"), before)


@pytest.mark.parametrize("architecture", ["NewModel", "MPNetModel", "LlamaForCausalLM"])
def test_another_architecture(embedder_dir, edit_json, architecture):
    directory = embedder_dir("minilm")
    edit_json(directory / "config.json", architectures=[architecture])
    with refused(ModelError, architecture):
        load_embedder(directory)


def test_the_model_type_stands_in_for_a_missing_architecture(embedder_dir, edit_json):
    directory = embedder_dir("multilingual_e5")
    before = load_embedder(directory)(["heron"], "passage")
    edit_json(directory / "config.json", architectures=None)
    np.testing.assert_array_equal(load_embedder(directory)(["heron"], "passage"), before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
        ({"is_decoder": True}, "is_decoder=True"),
        ({"hidden_act": "mish"}, "hidden_act='mish'"),
        ({"num_attention_heads": 5}, "hidden_size=24"),
        ({"hidden_size": "24"}, "hidden_size='24'"),
    ],
)
def test_a_key_that_is_not_supported(embedder_dir, edit_json, changes, message):
    directory = embedder_dir("minilm")
    edit_json(directory / "config.json", **changes)
    with refused(ConfigError, message):
        load_embedder(directory)


def test_a_directory_that_is_none(tmp_path):
    with refused(ModelError):
        load_embedder(tmp_path / "nowhere")
    with refused(ModelError):
        load_embedder(tmp_path)


def test_weights_in_another_format(embedder_dir):
    directory = embedder_dir("minilm")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with refused(ModelError):
        load_embedder(directory)


def test_weights_in_several_files(embedder_dir):
    directory = embedder_dir("minilm")
    before = load_embedder(directory)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in files.items():
        save_file({name: tensors[name] for name in members}, directory / file)
    weight_map = {name: file for file, members in files.items() for name in members}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    after = load_embedder(directory)
    assert after.digest == before.digest
    np.testing.assert_array_equal(after(["heron"], "query"), before(["heron"], "query"))


def test_the_encoder_in_a_folder_of_its_own(embedder_dir, edit_json):
    directory = embedder_dir("minilm")
    before = load_embedder(directory)
    folder = directory / "0_Transformer"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "sentence_bert_config.json"):
        shutil.move(directory / name, folder / name)
    modules = json.loads((directory / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (directory / "modules.json").write_text(json.dumps(modules))
    assert load_embedder(directory).digest == before.digest
