"""examples/nano.py: short, alone, and answering as jaxrag does."""

import ast
import importlib.util
import itertools
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import jaxrag
from jaxrag.tasks.synthetic import SyntheticTask, samples

ROOT = Path(__file__).parents[1]
FILE = ROOT / "examples" / "nano.py"
SHIPPED = ROOT / "checkpoints" / "synthetic-0.8m" / "dual"
ALLOWED = {"jax", "numpy", "tensorstore", "safetensors", "tokenizers"}
MOST_LINES = 400
QUESTIONS = {"turborag": 50, "cacheblend": 24, "full_attention": 8}


def test_it_is_short_and_stands_alone():
    text = FILE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module.partition(".")[0])
    assert imported - sys.stdlib_module_names == ALLOWED


@pytest.fixture(scope="module")
def nano():
    spec = importlib.util.spec_from_file_location("nano", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def shipped():
    return jaxrag.load_model(SHIPPED)


@pytest.fixture(scope="module")
def asked():
    """Chunks and a question on them."""
    drawn = samples(SyntheticTask(chunks=(4, 6), split="test"), seed=41)
    return [
        (list(sample.chunks), [asked.question for asked in sample.questions])
        for sample in itertools.islice(drawn, 12)
    ]


def test_the_picture_is_the_rule(nano):
    """The comment of section 3: p where the prefix is visible, and not where it is a block."""
    lines = iter(FILE.read_text(encoding="utf-8").splitlines())
    segments = next(line for line in lines if line.startswith("#         segment"))
    columns = [match.start() for match in re.finditer(r"\d", segments)]
    segments = np.array([int(segments[at]) for at in columns])
    next(lines)
    rows = [line.ljust(columns[-1] + 1) for line in itertools.takewhile(lambda s: s != "#", lines)]
    drawn = np.array([[row[at] for at in columns] for row in rows])
    np.testing.assert_array_equal(nano.who_sees_whom(segments), drawn != " ")
    apart = np.where(segments == nano.PREFIX, 9, segments)
    np.testing.assert_array_equal(nano.who_sees_whom(apart), drawn == "x")


def test_a_row_gives_what_pages_give(nano, tmp_path):
    """The question's logits over stored chunks are those of one row under the picture."""
    model = nano.load_model(SHIPPED)
    pool = nano.new_pool(model.llama.config, tmp_path)
    blocks = [nano.tokenise(model, "prefix")]
    blocks += [nano.tokenise(model, "chunk", f"File 1{n}: She keeps a {n} goat.") for n in range(3)]
    final = nano.tokenise(model, "final", "Which animal does Kora Felell keep?")
    table = nano.lay_out(
        [nano.load(model, pool, [], ids) for ids in blocks], [len(ids) for ids in blocks]
    )
    tokens = list(itertools.chain(*blocks))
    positions = len(tokens) + np.arange(len(final))
    paged, _ = nano.step(model.llama, pool.kv, table, nano.pad(final), nano.pad(positions, -1))
    segments = [nano.CHUNK + i for i, ids in enumerate(blocks) for _ in ids]
    row = nano.pad(tokens + final), nano.pad(segments + [nano.FINAL] * len(final))
    packed, _ = nano.read_row(model.llama, row[0], np.arange(len(row[0])), row[1])
    np.testing.assert_allclose(paged[: len(final)], packed[positions], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", QUESTIONS)
def test_it_answers_as_jaxrag_does(method, nano, shipped, asked, tmp_path):
    model = nano.load_model(SHIPPED)
    pool, compared = nano.new_pool(model.llama.config, tmp_path), 0
    for texts, questions in asked:
        jaxrag.generate(questions[0], documents=texts, model=shipped, method=method)  # encodes
        results = jaxrag.generate(questions, documents=texts, model=shipped, method=method)
        for question, result in zip(questions, results, strict=True):
            ids, counts = nano.answer(model, pool, texts, question, method)
            assert ids == list(result.token_ids), (texts, question)
            assert counts | {"encoded": 0} == result.counts
        compared += len(questions)
        if compared >= QUESTIONS[method]:
            return
    raise AssertionError(f"{compared} questions")
