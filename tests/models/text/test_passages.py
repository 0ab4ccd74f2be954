"""Where passages lie in pasted text: it is found again in any order."""

import random
import textwrap

import pytest

from jaxrag.models.text.passage_rules import passage_rules
from jaxrag.models.text.passages import MOST_CHARACTERS, MOST_LINES, cut, passage_blocks

RULES = passage_rules("common")
WORDS = ["otters", "bees", "rivers", "stones", "bread", "lamps", "salt", "clay", "winter", "songs"]
ASKED = "What do the papers say about it?"


def passages(count, seed=0, sentences=8, join=" "):
    """Texts of a few hundred characters, no two alike."""
    draw = random.Random(seed)

    def sentence():
        words = draw.choices(WORDS, k=draw.randrange(6, 12))
        return " ".join(words).capitalize() + "."

    return [join.join(sentence() for _ in range(sentences)) for _ in range(count)]


# As stacks write them: function of the passages -> the whole message.
FORMS = {
    "empty lines": lambda ps: "Read these.\n\n" + "\n\n".join(ps) + f"\n\n{ASKED}",
    "question first": lambda ps: f"Question: {ASKED} \nContext: " + "\n\n".join(ps) + " \nAnswer:",
    "metadata": lambda ps: (
        "Context information is below.\n---------------------\n"
        + "\n\n".join(f"file_path: docs/{i}.md\n\n{p}" for i, p in enumerate(ps))
        + f"\n---------------------\nQuery: {ASKED}\nAnswer: "
    ),
    "indented loop": lambda ps: (
        "\nContext:\n" + "".join(f"\n    {p}\n" for p in ps) + f"\n\nQuestion: {ASKED}\nAnswer:"
    ),
    "tags": lambda ps: (
        "<context>\n"
        + "\n".join(f'<source id="{i}">{p}</source>' for i, p in enumerate(ps, 1))
        + f"\n</context>\n\n{ASKED}"
    ),
    "tree": lambda ps: (
        "Here is what we know:\n\n------\n"
        + "\n\n------\n\n".join(
            f"\nID: {i}\n├── Title: t{i}\n└── Content:\n{p}" for i, p in enumerate(ps)
        )
        + "\n      The above is what we know."
    ),
    "brackets": lambda ps: (
        "Context:\n"
        + "".join(f"[CONTEXT {i}]:\n{p}\n[END CONTEXT {i}]\n\n" for i, p in enumerate(ps))
        + ASKED
    ),
    "json": lambda ps: (
        "Answer from these:\n["
        + ", ".join(f'{{"title": "t{i}", "text": "{p}"}}' for i, p in enumerate(ps))
        + f"]\n\nQuestion: {ASKED}"
    ),
    "counted": lambda ps: "\n".join(f"[{i}] {p}" for i, p in enumerate(ps)) + f"\n\nQ: {ASKED}",
    "letters": lambda ps: (
        "Use these.\n\n"
        + "\n".join(f"Passage {chr(65 + i)}: {p}" for i, p in enumerate(ps))
        + f"\n\n{ASKED}"
    ),
    "unknown tags": lambda ps: (
        "\n".join(f"<d{i}>{p}</d{i}>" for i, p in enumerate(ps)) + f"\n{ASKED}"
    ),
    "labels no rule knows": lambda ps: (
        "Answer from these.\n\n"
        + "".join(f"Collection: c\nPath: p{i}.md\nExcerpt: {p}\n\n" for i, p in enumerate(ps))
        + ASKED
    ),
    "lines above": lambda ps: (
        "### Query:\nWhat?\n\n### Context:\n"
        + "\n".join(f"Source ID [{i:07x}]:\nText: {p}\n" for i, p in enumerate(ps, 0xB0))
        + f"\n\n{ASKED}"
    ),
    "brackets behind": lambda ps: (
        "Use these.\n\n## Context of documents: \n"
        + "".join(f"{p} (extracted from p{i}.md)\n" for i, p in enumerate(ps))
        + f"\n{ASKED}"
    ),
    "lines of brackets": lambda ps: (
        "".join(f"[[ p{i}.md | part {i} ]]\n{p}\n\n" for i, p in enumerate(ps)) + ASKED
    ),
    "a rule of quotes": lambda ps: (
        'Use these.\n"""\n' + "\n\n".join(ps) + f'\n"""\nBy what is above,\n{ASKED}'
    ),
    "one group, counted": lambda ps: (
        "Use these.\n\n<context>\n"
        + "\n".join(f"{i}. name{i} {p}" for i, p in enumerate(ps, 1))
        + f"\n</context>\n\n{ASKED}"
    ),
    "signs with words": lambda ps: (
        "Facts:\n"
        + "".join(f"==== [File:p{i}.md;Relevance:{90 - i}.{i}%]:\n{p}\n" for i, p in enumerate(ps))
        + f"======\nQuestion: {ASKED}"
    ),
    "names of files": lambda ps: (
        "Sources:\n"
        + "\n".join(f"p{i}.md#page={i}: {p}" for i, p in enumerate(ps))
        + f"\n\n{ASKED}"
    ),
    "bars": lambda ps: f"Use these.\n------\n{' | '.join(ps)}\n------\nQuery: {ASKED}",
    "counted, in brackets that close": lambda ps: (
        "[[ ## context ## ]]\n"
        + "\n".join(f"[{i}] {p}" for i, p in enumerate(ps, 1))
        + f"\n\n[[ ## question ## ]]\n{ASKED}\n\nRespond with the field `answer`, and be brief."
    ),
    "ruled": lambda ps: "Use these.\n\n" + "\n=====\n".join(ps) + f"\n\nQuestion: {ASKED}",
}


def blocks(text):
    return [text[p.start : p.end] for p in cut(text, RULES) if p.block]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_passages_are_found_whole_in_any_order(form):
    found = passages(5)
    text = form(found)
    pieces = cut(text, RULES)
    assert "".join(text[p.start : p.end] for p in pieces) == text
    assert all(any(it.endswith(passage) for it in blocks(text)) for passage in found)
    if "name1" not in text:  # there a name stands in the line of its passage
        assert set(found) <= set(blocks(text))
        assert set(found) <= set(blocks(form(found[::-1])))
    assert not any(ASKED in block for block in blocks(text))


@pytest.mark.parametrize("form", [FORMS["tags"], FORMS["metadata"]], ids=["tags", "metadata"])
def test_a_passage_of_several_paragraphs_is_one_block(form):
    found = passages(3, join="\n\n")
    assert set(found) <= set(blocks(form(found)))


def test_what_passages_count_does_not_end_the_count_of_their_labels():
    found = passages(5)
    found[2] += " And so on:\n[9] a note\n[1] another"
    text = FORMS["counted"](found)
    assert found[4] in blocks(text) and found[1] in blocks(text)


@pytest.mark.parametrize(
    ("numbers", "inside"),
    [((1, 2, 3, 4), False), ((3, 1, 0, 2), False), ((1, 1, 2, 2), False), ((12, 3, 12, 40), True)],
)
def test_a_label_whose_number_names_its_passage_is_part_of_it(numbers, inside):
    found = passages(4)
    named = [f"File {n}: {it}" for n, it in zip(numbers, found, strict=True)]
    for order in (1, -1):
        text = "\n\n".join(named[::order]) + f"\n\nQuestion: {ASKED}"
        assert blocks(text) == (named if inside else found)[::order]
    alone = "\n\n".join(f"File {n}\n{it}" for n, it in zip(numbers, found, strict=True))
    assert blocks(f"{alone}\n\nQuestion: {ASKED}") == found  # a line of its own


def test_a_named_passage_is_the_same_block_alone():
    [passage] = passages(1)
    text = f"File 12: {passage}"
    assert [text[a:b] for a, b in passage_blocks(text, RULES, parted=True)] == [text]


def test_passages_may_begin_a_text():
    found = passages(6)
    text = "\n".join(found) + f"\n\n---\n\nUse these.\n\nQuestion: {ASKED}\n\nAnswer: "
    assert sum(map(len, blocks(text))) >= 0.9 * sum(map(len, found))


FOUND_AGAIN = {  # forms that part passages by nothing but breaks: share of their characters
    "paragraphs": (lambda ps: "Use these.\n\n" + "\n\n".join(ps) + f"\n\n{ASKED}", 0.97),
    "lines": (lambda ps: "Use these.\n\n" + "\n".join(ps) + f"\n\n{ASKED}", 0.9),
    "ruled off": (lambda ps: "Use these.\n\n---\n" + "\n\n".join(ps) + f"\n---\n{ASKED}", 0.97),
    "in one tag": (lambda ps: f"<context>\n{chr(10).join(ps)}\n</context>\n\n{ASKED}", 0.9),
}


@pytest.mark.parametrize(("form", "share"), FOUND_AGAIN.values(), ids=FOUND_AGAIN)
def test_paragraphs_are_found_again_beside_other_passages(form, share):
    """Passages of headings, paragraphs, a list and a note too short to be a block, among others."""

    def of(seed):
        one, two, three = passages(3, seed)
        return f"## On {one[:12]}\n\n{one}\n\n- {two}\n- {three}\n\n[1] A note on it, at length."

    asked = [of(100 + i) for i in range(5)]
    seen = set(blocks(form([*asked[:2], *(of(i) for i in range(3))])))
    seen |= set(blocks(form([*(of(10 + i) for i in range(2)), *asked[2:]])))
    found = [it for it in blocks(form(asked[::-1])) if it in seen]
    assert sum(map(len, found)) >= share * sum(map(len, asked))


def test_a_last_line_that_goes_on_with_its_sentence_stays_with_the_passage():
    found = [f"{it[:-1]}, and\nwhat is next." for it in passages(4)]
    text = "Notes.\n\n" + "\n\n".join(f"File: {i}.md\n{it}" for i, it in enumerate(found))
    assert set(found) <= set(blocks(text))


def test_wrapped_text_is_parted_where_a_line_is_torn():
    """A passage that begins or ends within a line, joined to others by one line break."""
    wrapped = [textwrap.fill(it.replace(".", " and"), 70) for it in passages(6, sentences=12)]
    torn = [it[30 : it.rfind(" ") - 25].strip() for it in wrapped]
    first, second = ("Notes.\n\n" + "\n".join(it) + f"\n\n{ASKED}" for it in (torn, torn[::-1]))
    seen = set(blocks(first))
    again = sum(len(it) for it in blocks(second) if it in seen)
    assert again >= 0.5 * sum(map(len, torn))


def test_a_wall_inside_one_passage_leaves_the_others_apart():
    """What code in one passage spells as a template does is no template."""
    inner = 'Say "content": "yes" to it. ' + passages(1, 7)[0]
    pasted = [*passages(7), inner]
    found = blocks("Use these.\n\n" + "\n\n".join(pasted) + f"\n\n{ASKED}")
    assert set(pasted[:7]) <= set(found)


def test_what_is_short_is_computed():
    assert blocks("A question of one line?") == []
    assert blocks("<source>too short</source>") == []


def test_blocks_are_without_white_space_at_their_edges():
    [found] = passages(1)
    assert blocks(f"<source>\n\n  {found}\n \n</source>") == [found]


def test_long_texts_that_overlap_are_cut_alike_where_they_do():
    [text] = passages(1, sentences=600)
    whole, part = set(blocks(f"<doc>{text}</doc>")), blocks(f"<doc>{text[9_000:]}</doc>")
    assert len(whole) > 10
    assert len(whole & set(part)) >= len(part) - 1
    assert max(len(block.encode()) for block in whole) <= RULES.whole
    chinese = "盐井由人手经营而竹桥横跨河流" * 40 + "".join(chr(0x4E00 + i) for i in range(3000))
    pieces = blocks(f"<doc>{chinese}</doc>")
    assert len(pieces) > 5
    assert "".join(pieces) == chinese


@pytest.mark.parametrize(
    "text",
    [
        "<source>" * 100_000,
        "\n" * 500_000,
        '"text": "\\' * 50_000,
        "[1] " * 200_000,
        ("\n" + " " * 500) * 2_000,
        "---\n" * 200_000,
        "title:" * 100_000,
        "\ue000\u2028<" * 100_000,
        "Label: x\n" * 100_000,
        "(taken from" * 50_000,
        "|\n" * 200_000,
        ("a." * 200 + "\n") * 2_000,
        "=== x\n" * 100_000,
        "x | " * 200_000,
        "[[ x ]]\n" * 100_000,
        "",
    ],
    ids=range(16),
)
def test_hostile_texts_are_cut_into_themselves(text):
    pieces = cut(text, RULES)
    assert "".join(text[p.start : p.end] for p in pieces) == text
    assert all(p.start < p.end for p in pieces)


@pytest.mark.parametrize(
    "body", ["word " * (MOST_CHARACTERS // 5 + 1), "word\n" * (MOST_LINES + 1)]
)
def test_a_text_beyond_the_bounds_is_no_block(body):
    text = f"<source>{body}</source>"
    [piece] = cut(text, RULES)
    assert (piece.start, piece.end, piece.block) == (0, len(text), False)
