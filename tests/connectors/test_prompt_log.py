"""Prompts that an engine notes, and what is to be encoded for them."""

import dataclasses
import stat

import numpy as np
import pytest
from fake_vllm import Engine
from refusal import refused
from stored_chunks import drawn

from jaxrag.base.errors import ConfigError, StoreError
from jaxrag.connectors import manifest
from jaxrag.connectors.plan import Planner
from jaxrag.connectors.prompt_log import FILE, PromptLog
from jaxrag.models.text import byte_level
from jaxrag.models.text.passage_rules import passage_rules
from jaxrag.models.text.tokenizer import Tokenizer
from jaxrag.serve import prompt_log
from jaxrag.serve.plain import text_pieces
from jaxrag.serve.prompt_log import LoggedPrompt, read

HEADER = np.arange(600, 640, dtype=np.int32)
ON = {"wanted_bytes": 4000}
QUESTION = "What do the otters of the second river eat in winter?"
PASSAGES = [
    f"Passage about the {name}. " + " ".join(
        f"In year {1900 + 7 * at + year} the {name} of the {ordinal} river ate {year} fish."
        for year in range(9)
    )
    for at, (name, ordinal) in enumerate(zip(
        ("otters", "herons", "minks", "storks", "pikes"),
        ("first", "second", "third", "fourth", "fifth"), strict=True,
    ))
]  # fmt: skip
RULES = dataclasses.replace(passage_rules("common"), worth=300)


def pasted(order):
    sources = "\n".join(
        f'<source id="{number}">\n{PASSAGES[at]}\n</source>' for number, at in enumerate(order, 1)
    )
    return f"Use these.\n{sources}\n{QUESTION}"


def noted(stored):
    return [(it.spans and list(it.spans), len(it.ids)) for it in read(stored.out, "t")]


def lacking(stored, ids, spans=None, rules=None, tokenizer=None):
    prompt = LoggedPrompt(ids, None if spans is None else tuple(spans))
    known = manifest.read(stored.out)
    return [it.tolist() for it in prompt_log.lacking(known, [prompt], tokenizer, rules).values()]


@pytest.mark.parametrize("led", [True, False])
def test_what_stands_in_front_of_the_first_chunk(stored, led):
    front = [stored.prefix] if led else []
    ids = np.concatenate((*front, HEADER, stored.chunks[1], [7, 8])).astype(np.int32)
    assert lacking(stored, ids) == [HEADER.tolist()]
    assert lacking(stored, np.concatenate((*front, HEADER))) == []


def test_what_stands_between_chunks(stored):
    parts = (stored.prefix, stored.chunks[0], HEADER[:5], stored.chunks[2], [7, 8])
    assert lacking(stored, np.concatenate(parts).astype(np.int32)) == [HEADER[:5].tolist()]


@pytest.mark.parametrize("length", [1, 15, 16, 17])
def test_short_prompts_lack_nothing(stored, length):
    assert lacking(stored, HEADER[:length]) == []


def test_chunks_of_spans(stored):
    other = HEADER[:20]
    ids = np.concatenate((stored.prefix, HEADER, stored.chunks[0], other, [7])).astype(np.int32)
    spans = [len(stored.prefix), len(HEADER), len(stored.chunks[0]), len(other)]
    assert lacking(stored, ids, spans) == [HEADER.tolist(), other.tolist()]
    assert lacking(stored, ids, spans[:2]) == [HEADER.tolist()]
    assert lacking(stored, ids, [*spans, 1]) == [HEADER.tolist(), other.tolist()]


def test_chunks_that_saw_the_prefix_need_it(tmp_path):
    stored = drawn(tmp_path, "after_prefix")
    ids = np.concatenate((HEADER, stored.chunks[1], [7])).astype(np.int32)
    assert lacking(stored, ids) == []
    assert lacking(stored, ids, [len(HEADER), len(stored.chunks[1])]) == []


@pytest.fixture(scope="module")
def tokenizer():
    made = byte_level.train([pasted(range(5))], 600, [])
    return Tokenizer(made.to_str().encode(), {}, {})


@pytest.mark.parametrize("count", [3, 5])
def test_pasted_passages_and_what_stands_around_them(stored, tokenizer, count):
    """Cut as `jaxrag serve` cuts the text, but for tokens of both sides of an edge."""
    orders = (0, 1, 2, 3, 4)[:count], (4, 1, 0, 3, 2)[:count]
    prompts = {order: pasted(order) for order in orders}
    found = []
    for order, text in prompts.items():
        ids = tokenizer.encode(text)
        parts = lacking(stored, ids, None, RULES, tokenizer)
        joined = [token for part in parts for token in part]
        assert joined == ids[: len(joined)].tolist()
        assert tokenizer.decode(ids[len(joined) :]) == f"\n</source>\n{QUESTION}"
        blocks = [text[it.start : it.end] for it in text_pieces(text, RULES, True) if it.block]
        assert blocks == [PASSAGES[at] for at in order]
        assert set(blocks) <= {tokenizer.decode(part).strip() for part in parts}
        found.append({tuple(part) for part in parts})
    both = found[0] & found[1]
    shared = {PASSAGES[1], 'Use these.\n<source id="1">'}
    assert {tokenizer.decode(part).strip() for part in both} >= shared


def test_too_few_passages_are_left_alone(stored, tokenizer):
    ids = tokenizer.encode(pasted((0,)))
    assert lacking(stored, ids, None, RULES, tokenizer) == []


def test_pasted_passages_between_stored_chunks(stored, tokenizer):
    """A chunk of a document stands where it stands; what is between is cut."""
    stored.write([*stored.chunks, tokenizer.encode(PASSAGES[1])])
    ids = tokenizer.encode(pasted((0, 1, 2)))
    parts = lacking(stored, ids, None, RULES, tokenizer)
    texts = [tokenizer.decode(part).strip() for part in parts]
    assert PASSAGES[1] not in texts
    assert {PASSAGES[0], PASSAGES[2]} <= set(texts)
    stored.write([*stored.chunks, *(np.array(it, np.int32) for it in parts),
                  tokenizer.encode(PASSAGES[1])])  # fmt: skip
    plan, _ = Planner(manifest.read(stored.out)).plan(ids, None, 0)
    assert tokenizer.decode(ids[plan.end :]) == f"\n</source>\n{QUESTION}"


def test_an_engine_notes_it_once_and_only_if_told_to(connector, stored):
    ids = np.concatenate((stored.prefix, HEADER, stored.chunks[0], [7])).astype(np.int32)
    named = {"spans": [len(stored.prefix), len(HEADER)]}
    for extra, found in (({}, []), (ON, [(None, len(ids)), (named["spans"], len(ids))])):
        engine = Engine(connector, stored, extra=extra)
        for params in (None, named, {"off": True}, named, None):
            engine.run(engine.add(ids, params))
        engine.run(engine.add(stored.prompt(0, 1)))
        engine.close()
        assert noted(stored) == found
        assert (stored.out / FILE).exists() == bool(found)
    engine = Engine(connector, stored, extra=ON)  # started again
    engine.add(ids)
    engine.close()
    assert noted(stored) == found


def test_an_engine_notes_a_long_rest(connector, stored):
    engine = Engine(connector, stored, extra={"wanted_bytes": 9000})
    for final in (200, 300):
        engine.run(engine.add(stored.prompt(0, 1, final=final)))
    engine.close()
    assert noted(stored) == [(None, len(stored.prompt(0, 1, final=300)))]


def test_only_its_user_reads_the_file(tmp_path):
    (tmp_path / FILE).touch(0o644)
    PromptLog(tmp_path, "t", 100)
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    (tmp_path / FILE).unlink()
    PromptLog(tmp_path, "t", 100)
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600


def test_the_file_is_bounded(tmp_path, caplog):
    log = PromptLog(tmp_path, "t", 200)
    for first in range(100):
        log.note(np.arange(first, first + 10, dtype=np.int32), None)
    assert 100 < (tmp_path / FILE).stat().st_size <= 200
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / FILE}: cannot be written (it is full: wanted_bytes=200)"
    ]


def test_a_folder_that_cannot_be_written(tmp_path, caplog):
    (tmp_path / FILE).symlink_to(tmp_path / "elsewhere")
    with refused(ConfigError, "wanted_bytes=9"):
        PromptLog(tmp_path, "t", 9)
    assert not (tmp_path / "elsewhere").exists()
    (tmp_path / FILE).unlink()
    log = PromptLog(tmp_path, "t", 999)
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).mkdir()
    for first in (1, 2):
        log.note(np.array([first], np.int32), None)  # a request goes on
    [record] = caplog.records
    assert "cannot be written" in record.getMessage()


@pytest.mark.parametrize("line", ["{", "[]", '{"tokenizer": "t", "ids": []}',
    '{"tokenizer": "t", "ids": [-1], "spans": null}',
    '{"tokenizer": "t", "ids": [99999999999], "spans": null}',
    '{"tokenizer": "t", "ids": [1], "spans": [0]}', '{"tokenizer": "t", "ids": [1]}'])  # fmt: skip
def test_a_damaged_line_is_named(tmp_path, line):
    PromptLog(tmp_path, "t", 999).note(HEADER, [3])
    with (tmp_path / FILE).open("a") as file:
        file.write(line + "\n")
    with refused(StoreError, "2"):
        list(read(tmp_path, "t"))
