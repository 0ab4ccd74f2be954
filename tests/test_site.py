"""What the site says of the program, and that it works from a folder and asks nobody."""

import ast
import dataclasses
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from jaxrag.base.config import RopeConfig
from jaxrag.kv.cache.budget import pool_budget
from jaxrag.library.options import DEFAULT_FORM
from jaxrag.measure.plan.formulas import kv_token_bytes
from jaxrag.models.spec import num_params

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LOADS = {
    "audio": "src", "embed": "src", "iframe": "src", "img": "src", "link": "href",
    "object": "data", "script": "src", "source": "src", "video": "src",
}  # fmt: skip


def rows(page, width):
    """The cells of every table row of a page that has so many."""
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("|") and len(cells) == width and not set(line) <= set("|- "):
            yield cells


# Messages


def literals():
    """Every text of the code, with … where it has values."""
    for path in sorted((ROOT / "jaxrag").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(
                    it.value if isinstance(it, ast.Constant) else "…" for it in node.values
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def messages():
    return [cells[0].strip("`") for cells in rows("troubleshooting.md", 3) if cells[0][0] == "`"]


def is_said(message, texts):
    pieces = [re.escape(piece) for piece in message.split("…")]
    return any(re.search(".*".join(pieces), text, re.S) for text in texts)


def test_every_message_is_one_of_the_program():
    texts = [text.replace("'…'", "…") for text in literals()]
    quoted = messages()
    assert len(quoted) > 30
    assert not [message for message in quoted if not is_said(message, texts)]
    assert not is_said("nothing to serve: pass --kb FILE", texts)


# Numbers


def test_the_number_of_the_home_page_was_measured():
    page = (DOCS / "index.md").read_text(encoding="utf-8")
    (name,) = re.findall(r"\(\.\./(benchmarks/results/[\w.-]+)\)", page)
    measured = json.loads((ROOT / name).read_text(encoding="utf-8"))
    (row,) = [row for row in measured["rows"] if row["context"] == 4096]
    assert f"{row['full_over_pool']:.0f} times sooner" in page
    full, pool = (1000 * row["seconds"][name] for name in ("full", "pool"))
    assert f"after {pool:.0f} ms instead of {full:,.0f} ms" in page


SHAPES = {  # family, D, M, N, V, tied
    "Qwen2.5-0.5B": ("qwen2", 896, 4864, 14, 151936, True),
    "Llama-3.2-1B": ("llama", 2048, 8192, 32, 128256, True),
    "Qwen2.5-1.5B": ("qwen2", 1536, 8960, 12, 151936, True),
    "Qwen2.5-7B": ("qwen2", 3584, 18944, 28, 152064, False),
    "Mistral-7B v0.3": ("mistral", 4096, 14336, 32, 32768, False),
    "Llama-3.1-8B": ("llama", 4096, 14336, 32, 128256, False),
    "Qwen2.5-14B": ("qwen2", 5120, 13824, 40, 152064, False),
}


def test_the_table_of_sizes_is_computed(tiny_config):
    found = {cells[0]: cells[1:] for cells in rows("install.md", 7) if cells[0] in SHAPES}
    assert found.keys() == SHAPES.keys()
    for name, (family, width, mlp, heads, vocabulary, tied) in SHAPES.items():
        shape, *cells = found[name]
        layers, kv_heads, head = map(int, shape.split(" x "))
        config = dataclasses.replace(
            tiny_config(), family=family, num_layers=layers, model_dim=width, mlp_dim=mlp,
            num_heads=heads, num_kv_heads=kv_heads, head_dim=head, vocab_size=vocabulary,
            qkv_bias=family == "qwen2", tie_embeddings=tied, dtype="bfloat16",
            rope=RopeConfig(theta=1e4, rotary_dim=head, interleaved=False, scaling=None),
        )  # fmt: skip
        weights, kv = 2 * num_params(config), config.kv_bytes_per_token
        disk = 1e6 * kv_token_bytes(config, DEFAULT_FORM)

        def pool(gib, weights=weights, kv=kv):
            free = (gib << 30) - weights
            tokens = pool_budget(free, on_cpu=False) // kv
            return f"{tokens // 1000:,}k" if free > 0 else "does not fit"

        assert cells == [
            f"{weights / 2**30:.1f} GiB", f"{kv >> 10} KiB", f"{disk / 2**30:.1f} GiB",
            pool(24), pool(80),
        ]  # fmt: skip


# The built site


class Loaded(HTMLParser):
    """The addresses that a page loads by itself."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag == "link" and given.get("rel") in ("next", "prev", "canonical"):
            return
        self.found.append(given.get(LOADS.get(tag, ""), ""))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="the site is built with the extra docs")
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", folder]
    subprocess.run(build, cwd=ROOT, check=True, timeout=300)
    return folder


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        loaded = Loaded()
        loaded.feed(page.read_text(encoding="utf-8"))
        assert not [it for it in loaded.found if re.match(r"(?:\w+:)?//", it or "")], page
    for style in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", style.read_text()), style
    assert (site / "search" / "search_index.js").stat().st_size > 10_000
    assert "iframe-worker.js" in (site / "index.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_search_works_from_a_folder(site, chromium_driver):
    from selenium.webdriver.support.ui import WebDriverWait

    browser = chromium_driver
    browser.set_window_size(1400, 900)
    browser.get((site / "index.html").as_uri())
    browser.find_element("css selector", "input.md-search__input").send_keys("tenants")
    words = "return document.querySelector('.md-search-result__list')?.innerText ?? ''"
    WebDriverWait(browser, 60).until(lambda it: "tenants" in it.execute_script(words).lower())
    asked = browser.execute_script(
        "return performance.getEntriesByType('resource').map((it) => it.name)"
    )
    assert not [it for it in asked if not it.startswith(("file:", "data:"))]
