"""Pooling, normalisation, prefixes and lengths as a directory's files say, or its name."""

import json
import logging

import pytest
from refusal import refused

from jaxrag.base.errors import ConfigError, ModelError
from jaxrag.library.embed import Prefixes, load_embedder
from jaxrag.library.embed.hf import known_prefixes, read_settings


def test_what_the_files_say(embedder_dir):
    settings = read_settings(embedder_dir("bge"))
    assert (settings.pooling, settings.normalize) == ("cls", True)
    assert settings.prefixes == Prefixes(query="where: ")
    assert settings.max_tokens is None
    assert read_settings(embedder_dir("minilm")).max_tokens == 20
    assert read_settings(embedder_dir("roberta")).pooling == "max"
    assert not read_settings(embedder_dir("bert_last")).normalize


def test_a_plain_encoder_says_what_is_assumed(embedder_dir, caplog):
    with caplog.at_level(logging.INFO, "jaxrag"):
        settings = read_settings(embedder_dir("contriever"))
    assert (settings.pooling, settings.normalize) == ("mean", False)
    assert "no modules.json; mean pooling, vectors not normalised" in caplog.text


def test_the_newer_spelling_of_the_pooling(embedder_dir):
    directory = embedder_dir("minilm")
    for spelled, meant in (("cls", "cls"), ("mean", "mean"), ("lasttoken", "last")):
        (directory / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": spelled}))
        assert read_settings(directory).pooling == meant


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"pooling_mode_weightedmean_tokens": True}, "weightedmean_tokens"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "mean_tokens"),
        ({}, ""),
        ({"pooling_mode_cls_token": True, "include_prompt": False}, "include_prompt=false"),
    ],
)
def test_a_pooling_that_is_not_supported(embedder_dir, config, message):
    directory = embedder_dir("minilm")
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(config))
    with refused(ModelError, message):
        read_settings(directory)


def test_a_step_that_is_not_supported(embedder_dir):
    directory = embedder_dir("minilm")
    modules = json.loads((directory / "modules.json").read_text())
    modules.insert(2, {"path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    (directory / "modules.json").write_text(json.dumps(modules))
    with refused(ModelError):
        read_settings(directory)
    (directory / "modules.json").write_text("{}]")
    with refused(ModelError):
        read_settings(directory)


def test_prompts_by_their_other_names(embedder_dir, edit_json):
    directory = embedder_dir("minilm")
    path = directory / "config_sentence_transformers.json"
    edit_json(path, prompts={"query": "q: ", "document": "d: ", "passage": "p: "})
    assert read_settings(directory).prefixes == Prefixes("q: ", "d: ")
    edit_json(path, prompts={"any": "a: "}, default_prompt_name="any")
    assert read_settings(directory).prefixes == Prefixes("a: ", "a: ")
    edit_json(path, prompts={"query": 3})
    with refused(ModelError):
        read_settings(directory)


@pytest.mark.parametrize(
    ("name", "query"),
    [
        ("e5-base-v2", "query: "),
        ("multilingual-e5-large", "query: "),
        ("bge-small-en-v1.5", "Represent this sentence for searching relevant passages: "),
        ("BGE-large-zh", "为这个句子生成表示以用于检索相关文章："),
        ("multilingual-e5-large-instruct", None),
        ("bge-m3", None),
        ("our-e5-base", None),
        ("all-MiniLM-L6-v2", None),
    ],
)
def test_prefixes_known_by_name(name, query):
    found = known_prefixes(name)
    assert (found and found.query) == query


def test_where_the_name_is_looked_for(embedder_dir, edit_json, caplog):
    known = Prefixes("query: ", "passage: ")
    with caplog.at_level(logging.INFO, "jaxrag"):
        assert read_settings(embedder_dir("minilm", "e5-small-v2")).prefixes == known
    assert "known from the model's name" in caplog.text
    cached = embedder_dir("minilm", "models--someone--e5-large/snapshots/0123")
    assert read_settings(cached).prefixes == known
    directory = embedder_dir("minilm")
    assert read_settings(directory).prefixes == Prefixes()
    edit_json(directory / "config.json", _name_or_path="/cache/someone_e5-base/")
    assert read_settings(directory).prefixes == known


def test_what_the_files_say_wins_over_the_name(embedder_dir):
    assert read_settings(embedder_dir("bge", "e5-base")).prefixes == Prefixes("where: ")


def test_the_longest_text(embedder_dir, edit_json):
    directory = embedder_dir("contriever")
    tokens = directory / "tokenizer_config.json"
    assert load_embedder(directory).tokenizer.max_tokens == 40
    edit_json(tokens, model_max_length=10**30)
    assert load_embedder(directory).tokenizer.max_tokens == 40
    edit_json(tokens, model_max_length=31)
    assert load_embedder(directory).tokenizer.max_tokens == 31
    edit_json(directory / "sentence_bert_config.json", max_seq_length=512)
    assert load_embedder(directory).tokenizer.max_tokens == 40
    edit_json(directory / "sentence_bert_config.json", max_seq_length="long")
    with refused(ModelError, "'long'"):
        load_embedder(directory)


def test_positions_of_roberta_start_behind_the_padding_id(embedder_dir):
    directory = embedder_dir("roberta")
    assert load_embedder(directory).tokenizer.max_tokens == 40 - 5


def test_no_room_for_a_text_is_refused(embedder_dir, edit_json):
    directory = embedder_dir("minilm")
    edit_json(directory / "sentence_bert_config.json", max_seq_length=2)
    with refused(ConfigError, "max_tokens=2"):
        load_embedder(directory)
