"""What a knowledge base takes in: every kind of item, each id once, dealt to shards."""

import pytest

from jaxrag.library.documents import BadDocument, Document, Intake, Shard, read_paths


def take(given, shard=None):
    return list(Intake(given, shard or Shard()))


@pytest.fixture
def folder(tmp_path, make_pdf):
    root = tmp_path / "in"
    (root / "sub").mkdir(parents=True)
    for number in range(8):
        (root / "sub" / f"{number}.txt").write_text(f"text {number}")
    lines = [f'{{"text": "line {n}", "id": "line {n}"}}' for n in range(8)] + ["{", "{"]
    (root / "lines.jsonl").write_text("\n".join(lines))
    (root / "bad.txt").write_bytes(b"\xff")
    (root / "page.odt").write_bytes(b"")
    (root / "page.pdf").write_bytes(make_pdf(["page"]))
    return root


def test_items_of_every_kind(folder):
    given = [Document("a", "x"), "text", {"text": "y", "id": "b"}, folder / "sub" / "0.txt"]
    found = take([*given, BadDocument("c", "why"), {"no": "text"}, folder / "gone"])
    assert [d.text for d in found if isinstance(d, Document)] == ["x", "text", "y", "text 0"]
    bad = [b.source for b in found if isinstance(b, BadDocument)]
    assert bad == ["c", "documents[5]", "documents[6]"]


def test_id_counts_the_first_time_only():
    found = take([Document("a", "one"), Document("a", "two", file="two.txt"), Document("b", "x")])
    assert [getattr(item, "text", None) for item in found] == ["one", None, "x"]
    assert found[1].source == "two.txt"
    assert "'a' was given before" in found[1].reason


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("wrap", [lambda path: read_paths([path]), lambda path: [path]])
def test_shards_take_everything_once(folder, count, wrap):
    whole = take(wrap(folder))
    parts = [take(wrap(folder), Shard(i, count)) for i in range(count)]
    assert sorted(map(repr, whole)) == sorted(repr(item) for part in parts for item in part)
    assert len(whole) == 8 + 8 + 2 + 2 + 1
    if count > 1:
        assert all(len(part) < len(whole) for part in parts)


def test_equal_ids_fall_to_one_shard():
    given = [Document(name, "text") for name in "abcdefgh"]
    for index in range(3):
        found = take([*given, *given], Shard(index, 3))
        good = [d.id for d in found if isinstance(d, Document)]
        assert len(found) == 2 * len(good)
        assert len(set(good)) == len(good)


def test_file_of_another_shard_is_not_opened(folder, monkeypatch):
    opened = []
    monkeypatch.setattr("builtins.open", lambda path, *a: opened.append(path) or path.open(*a))
    list(read_paths([folder / "sub"]).only(lambda name: name == "3.txt"))
    assert opened == [folder / "sub" / "3.txt"]


def test_fraction_grows_to_one(folder):
    for given in (read_paths([folder]), [folder], [Document(str(n), "x") for n in range(5)]):
        intake = Intake(given, Shard())
        fractions = []
        for _ in intake:
            fractions.append(intake.fraction())
        assert fractions == sorted(fractions)
        assert len(set(fractions)) > 3
        assert 0 <= fractions[0] < 0.5
        assert intake.fraction() == 1.0
    assert Intake(iter(["text"]), Shard()).fraction() is None
