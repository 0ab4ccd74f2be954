"""What was ingested as a stack cuts it is read from KV when the stack pastes it the first time."""

import random

import pytest

from jaxrag.cli import main
from jaxrag.library.documents.stacks import stack_named
from jaxrag.models.model import load_model

WORDS = ["Otters", "bees", "fish", "fields", "sleep", "fly", "eat", "at", "day", "high", "over"]
STACKS = {  # what each writes around its passages
    "open-webui:300:30": lambda found: "\n".join(
        f'<source id="{i}">{it}</source>' for i, it in enumerate(found)
    ),
    "langchain:300:30": lambda found: "Use these.\n\n" + "\n\n".join(found),
    "haystack:40:0": lambda found: (
        "Use these.\n\nContext:\n" + "".join(f"\n    {it}\n" for it in found)
    ),
}


def text_of(seed):
    draw = random.Random(seed)

    def paragraph():
        return " ".join(draw.choices(WORDS, k=draw.randint(25, 35))) + "."

    return "\n\n".join(paragraph() for _ in range(12))


def ingested(folder, trained_dir, stack):
    """A knowledge base of two texts, made by the command; its folder."""
    docs, kb = folder / "docs", folder / "kb"
    docs.mkdir()
    for seed in (1, 2):
        (docs / f"{seed}.txt").write_text(text_of(seed), encoding="utf-8")
    given = [str(docs), "--kb", str(kb), "--model", str(trained_dir), "--like", stack, "--json"]
    assert main(["ingest", *given]) == 0
    return kb


def passages(stack, seed, count=4):
    text, stack = text_of(seed), stack_named(stack)
    spans = stack.split(text, stack.size, stack.overlap)
    return [text[start:end] for start, end in spans[1 : 1 + count]]


def ask(serving, stack, found, **body):
    pasted = STACKS[stack](found)
    body |= {"messages": [{"role": "user", "content": f"{pasted}\n\nWho sleeps?"}]}
    body |= {"max_tokens": 4, "logprobs": True, "model": serving.state.name}
    return serving.post("/v1/chat/completions", **body).raise_for_status().json()


def hows(answer):
    return [it["how"] for it in answer["jaxrag"]["plain"]]


@pytest.mark.parametrize("stack", STACKS)
def test_the_first_sight_is_warm_and_equal_to_a_cold_one(
    stack, start, trained_dir, rules_file, tmp_path
):
    kb = ingested(tmp_path, trained_dir, stack)
    plain = {"plain": "passages", "passage_rules": rules_file, "warm_up": False}
    found = passages(stack, 1)
    with start(load_model(trained_dir, cache_tokens=8192), {"kb": kb}, **plain) as serving:
        warm = ask(serving, stack, found)
        strange = ask(serving, stack, passages(stack, 3))
    with start(load_model(trained_dir, cache_tokens=8192), {}, **plain) as serving:
        cold = ask(serving, stack, found)
    assert set(hows(cold)) == set(hows(strange)) == {"first sight"}
    assert "first sight" not in hows(warm)
    assert len(hows(warm)) == len(hows(cold)) >= 4
    assert warm["choices"] == cold["choices"]  # tokens and log-probabilities, to the bit
