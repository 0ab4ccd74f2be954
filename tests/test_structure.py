"""The numbers of scripts/structure.py on small trees whose numbers are known."""

import json

import pytest
import structure

FILES = {
    "jaxrag/__init__.py": "",
    "jaxrag/errors.py": "class E(Exception):\n    pass\n",
    "jaxrag/types.py": "from jaxrag.errors import E\n",
    "jaxrag/store/__init__.py": "from jaxrag.store import keys\n",
    "jaxrag/store/keys.py": "import types\n\nfrom jaxrag.errors import E\n",
    "jaxrag/serve/batch.py": "def f():\n    from jaxrag.train.loop import g\n",
    "jaxrag/train/loop.py": "from jaxrag.serve.batch import f\nimport jaxrag.store.keys\n",
    "pallas_kernels/tiles.py": "import jax\n",
    "scripts/make.py": "from jaxrag import serve\n",
    "benchmarks/gpu.py": "import scenes\n",
    "benchmarks/scenes.py": "import gpu\nimport jaxrag.store\n",
}


@pytest.fixture
def tree(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_rooms_arrows_floors_and_circles(tree):
    found = structure.measure(tree)
    rooms = {"jaxrag", "errors", "types", "store", "serve", "train", "pallas_kernels", "scripts",
             "benchmarks"}  # fmt: skip
    assert found["rooms"] == len(rooms)
    # types and store -> errors, serve <-> train, train and benchmarks -> store, scripts -> jaxrag
    assert found["arrows between rooms"] == 7
    assert found["circles of rooms"] == [["serve", "train"]]
    assert found["arrows that close a circle"] == 1
    assert found["floors of rooms"] == 3  # errors, store, the circle
    assert found["circles of files"] == [
        ["benchmarks.gpu", "benchmarks.scenes"],
        ["jaxrag.serve.batch", "jaxrag.train.loop"],
    ]
    assert found["floors of files, jaxrag"] == 3
    assert found["loose files"] == 3
    assert found["arrows up"] is found["arrows sideways"] is None


@pytest.mark.parametrize(
    ("table", "up", "sideways"),
    [
        ('FLOORS = (("train",), ("serve", "store"), ("errors", "types"))', 1, 0),
        ('FLOORS = (("store", "serve", "train"), ("errors", "types"))', 0, 3),
        ('LAYERS = (("errors", "types"), ("store",), ("serve", "train"))', 0, 2),
        ('LAYERS = (("store",), ("errors", "types"))', 1, 1),
        ('OTHERS = (("errors",),)', None, None),
    ],
)
def test_a_trees_own_table_says_what_is_up_and_what_is_sideways(tree, table, up, sideways):
    (tree / "tests").mkdir()
    (tree / "tests" / "test_imports.py").write_text(table + "\n")
    found = structure.measure(tree)
    assert (found["arrows up"], found["arrows sideways"]) == (up, sideways)


@pytest.mark.parametrize(
    ("graph", "turned", "floors"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, 0, 3),
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}}, 1, 1),
        ({"a": {"b", "c"}, "b": {"a", "c"}, "c": {"a", "b"}, "d": {"a"}}, 3, 2),
        ({number: {(number + 1) % 9} for number in range(9)}, None, 1),
    ],
)
def test_circles(graph, turned, floors):
    named = {str(node): set(map(str, others)) for node, others in graph.items()}
    assert structure.turned(named) == turned
    assert structure.floors_of(named) == floors


def test_lines():
    text = '"""Doc.\n\nMore.\n"""\n\n# alone\nx = 1  # beside\ny = """\n# text\n\n"""\n'
    lines = structure.lines_of(text)
    assert lines == structure.Lines(code=5, docstrings=4, comments=1, blank=1)
    assert lines.total == text.count("\n")


def test_long_signatures_and_long_files(tree):
    eight = "a, b, /, c, *d, e, f, g=1, **h"
    code = f"class C:\n    def m(self, {eight}):\n        def n({eight}, i): ...\n"
    (tree / "jaxrag" / "types.py").write_text(code.replace("**h, i", "i, **h") + "x = 1\n" * 398)
    found = structure.measure(tree)
    assert found["functions, jaxrag"] == 3
    assert found["long signatures, jaxrag"] == 1
    assert found["long files"] == ["jaxrag.types"]


def test_the_command(tree, capsys):
    assert structure.main([str(tree), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out).values()
    assert found == structure.measure(tree)
    assert structure.main([str(tree)]) == 0
    shown = capsys.readouterr().out
    assert "| rooms | 9 |" in shown
    assert "| arrows up | - |" in shown
    assert "| circles of files | 2 |" in shown
    with pytest.raises(SystemExit):
        structure.main([str(tree / "scripts")])
    assert "there is no jaxrag in it" in capsys.readouterr().err
