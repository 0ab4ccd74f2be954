"""The page for people, in a real browser: asked by keyboard, seen, and read by a script."""

import itertools
import re
import threading
import time
from importlib.resources import files

import httpx
import pytest
from serving import key_file

from jaxrag.library.documents import Document
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.reuse.names import METHOD_NAMES

SECONDS = 60  # after which something that is waited for did not happen

QUESTION = "Which animal does Kora Felell keep?"

# What a reader's eye and a screen reader need, as far as a script can tell.
UNNAMED = """
const named = (it) => it.labels?.length || it.getAttribute("aria-label") || it.textContent.trim();
return [...document.querySelectorAll("input, select, textarea, button")]
  .filter((it) => it.checkVisibility() && !named(it)).map((it) => it.outerHTML);
"""
SAME_IDS = """
const ids = [...document.querySelectorAll("[id]")].map((it) => it.id);
return ids.filter((id, i) => ids.indexOf(id) !== i);
"""
FAINT = """
const parsed = (text) => text.match(/[\\d.]+/g).map(Number);
const light = (rgb) => rgb.slice(0, 3).map((v) => v / 255)
  .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const behind = (it) => {
  for (; it; it = it.parentElement) {
    const rgb = parsed(getComputedStyle(it).backgroundColor);
    if (rgb.length < 4 || rgb[3] > 0) return rgb;
  }
  return parsed(getComputedStyle(document.body).backgroundColor);
};
const faint = [];
for (const it of document.querySelectorAll("body *")) {
  const words = [...it.childNodes].filter((n) => n.nodeType === 3).map((n) => n.data).join("");
  const text = it.matches("input, textarea, select") ? it.value || it.placeholder || "" : words;
  if (!text.trim() || !it.checkVisibility() || it.disabled) continue;
  if (["SCRIPT", "STYLE", "OPTION"].includes(it.tagName)) continue;
  const both = [light(parsed(getComputedStyle(it).color)), light(behind(it))].map((v) => v + 0.05);
  const contrast = Math.max(...both) / Math.min(...both);
  if (contrast < 4.5) faint.push([text.trim().slice(0, 40), contrast]);
}
return faint;
"""
WIDER = """
return [...document.querySelectorAll("body *")].filter((it) => it.checkVisibility()
  && !it.closest(".unseen, .skip") && it.getBoundingClientRect().right > innerWidth + 0.5)
  .map((it) => it.outerHTML.slice(0, 80));
"""


BELOW = "return innerHeight - document.querySelector('#ask').getBoundingClientRect().bottom"
IN_SIGHT = """
const box = arguments[0].getBoundingClientRect();
return box.top >= 0 && box.bottom <= document.querySelector("#ask").getBoundingClientRect().top;
"""


def test_the_page_is_one_file_that_asks_nobody_else(server):
    first, second = httpx.get(server.url), httpx.get(server.url)
    policy = first.headers["content-security-policy"]
    nonce = re.search(r"script-src 'nonce-([\w-]+)'", policy)[1]
    assert "default-src 'self'" in policy and "unsafe" not in policy
    assert first.text.count(f'nonce="{nonce}"') == 2
    assert nonce not in second.text
    assert not re.findall(r"""(?:src|href)=["'](?:https?:)?//|url\(|@import""", first.text)
    icon = httpx.get(f"{server.url}/favicon.svg")
    assert icon.status_code == 200 and icon.headers["content-type"] == "image/svg+xml"


def test_the_page_writes_no_markup():
    """What a server or a document says is text, whatever it looks like."""
    text = files("jaxrag.server.http").joinpath("page.html").read_text(encoding="utf-8")
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    assert not re.findall(r"\sstyle=|\son\w+=\"", text)  # neither is allowed by the policy
    assert "localStorage" not in text


def test_the_page_describes_every_method():
    text = files("jaxrag.server.http").joinpath("page.html").read_text(encoding="utf-8")
    table, groups = (
        text[text.index(f"const {name} = ") :].split(end)[0]
        for name, end in (("METHODS", "\n};"), ("GROUPS", "\n];"))
    )
    assert sorted(re.findall(r"^  (\w+): ", table, re.MULTILINE)) == sorted(METHOD_NAMES)
    grouped = re.findall(r'"(\w+)"', groups)
    assert sorted(grouped) == sorted(METHOD_NAMES)


@pytest.fixture(scope="module")
def chromium(chromium_driver):
    """The page in a browser of a width and a colour scheme that tests set."""
    return Page(chromium_driver)


class Page:
    """The page as somebody uses it."""

    def __init__(self, browser):
        self.browser = browser

    def open(self, url, width=1280, scheme="light"):
        self.run("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1,
                 mobile=width < 500)  # fmt: skip
        self.run("Emulation.setEmulatedMedia",
                 features=[{"name": "prefers-color-scheme", "value": scheme}])  # fmt: skip
        self.browser.get(url)
        self.until(lambda: self.all("#model option"))
        self.browser.get_log("browser")

    def run(self, command, **options):
        self.browser.execute_cdp_cmd(command, options)

    def script(self, text, *given):
        return self.browser.execute_script(text, *given)

    def all(self, selector):
        return self.browser.find_elements("css selector", selector)

    def one(self, selector):
        (found,) = self.all(selector)
        return found

    def texts(self, selector):
        """Of all that fit, in one look: they may be replaced meanwhile."""
        words = "return [...document.querySelectorAll(arguments[0])].map((it) => it.innerText)"
        return [it.strip() for it in self.script(words, selector)]

    def until(self, true):
        """Wait for something; returns it."""
        end = time.monotonic() + SECONDS
        while not (found := true()):
            assert time.monotonic() < end, self.one("body").text
            time.sleep(0.05)
        return found

    def typed(self, *keys):
        """Type where the focus is."""
        self.browser.switch_to.active_element.send_keys(*keys)

    def ask(self, question):
        """Ask by keyboard, and wait for the end; returns the turn."""
        from selenium.webdriver.common.keys import Keys

        before = len(self.all(".turn"))
        self.one("#question").send_keys(question, Keys.ENTER)
        self.until(lambda: len(self.all(".turn")) > before and self.one("#send").is_displayed())
        return self.all(".turn")[-1]

    def ask_soon(self, question):
        """Ask by keyboard, whether it can be answered or not."""
        from selenium.webdriver.common.keys import Keys

        self.one("#question").send_keys(question, Keys.ENTER)

    def unfold(self):
        """Open the sources and accounts of all answers."""
        self.script("for (const it of document.querySelectorAll('.card details')) it.open = true")

    def complaints(self):
        """What the console says since the page was opened, or since the last time."""
        return [it["message"] for it in self.browser.get_log("browser")]

    def parts(self, name, card=0):
        """Numbers of a bar's legend by part, and the shares of the bar."""
        box = self.all(f'[data-split="{name}"]')[card]
        numbers = {
            row.get_attribute("data-part"): row.find_element("tag name", "dd").text
            for row in box.find_elements("css selector", "[data-part]")
        }
        widths = [it.rect["width"] for it in box.find_elements("css selector", ".bar span")]
        return numbers, widths


def test_somebody_asks_by_keyboard_and_sees_where_the_answer_is_from(server, chromium):
    chromium.open(server.url)
    assert chromium.texts("#examples button")
    assert chromium.one("#served").text == server.state.name
    turn = chromium.ask(QUESTION)
    assert turn.find_element("css selector", ".answer").text == "falcon"
    assert chromium.browser.switch_to.active_element == chromium.one("#question")
    assert not chromium.one(".sources").is_displayed()  # folded
    saved = chromium.one(".saved").text
    compiling = r"( \([\d.]+ m?s of it compiling, once\))?"
    words = r"(\d+) of \1 passage tokens reused · first token [\d.]+ m?s"
    assert re.fullmatch(words + compiling, saved)
    given = {"timings": {"ttft": 3, "compile": 2.5}}
    told = chromium.script("return savedLine({}, arguments[0]).textContent", given)
    assert told == "first token 3.00 s (2.50 s of it compiling, once)"
    chromium.unfold()
    sources = chromium.texts(".sources li")
    assert any("kora-felell.md" in it and "score" in it and "falcon" in it for it in sources)
    numbers, widths = chromium.parts("tokens")
    counts = [int(numbers[part]) for part in ("reused", "recomputed", "encoded")]
    assert sum(counts) == int(numbers["sum"]) > 0
    assert counts[0] == int(numbers["sum"])  # the knowledge base was ingested
    assert len(widths) == sum(count > 0 for count in counts)
    numbers, _ = chromium.parts("times")
    shown = [name for name in numbers if name != "compile"]  # where something was compiled
    assert shown == ["retrieve", "wait", "load", "prefill", "sum"]
    assert "falcon" in chromium.one("#announce").get_attribute("textContent")
    assert chromium.script(UNNAMED) == chromium.script(SAME_IDS) == []
    assert chromium.complaints() == []


def test_passages_that_the_answer_used_are_marked(server, chromium):
    """By the server's measure, the same in the sources and above them."""
    chromium.open(server.url)
    turn = chromium.ask("Which animal does Radia Dalell keep?")
    assert turn.find_element("css selector", ".answer").text == "rabbit"
    chromium.unfold()
    sources = chromium.texts(".sources li")
    used = [number for number, it in enumerate(sources) if "used in the answer" in it]
    assert len(used) == 1 < len(sources) and "rabbit" in sources[used[0]]
    above = chromium.texts(".cites button")
    assert [number for number, it in enumerate(above) if it.endswith(", used")] == used


def test_it_says_that_a_question_waits_for_compiling(server, chromium, held, monkeypatch):
    state = server.state
    monkeypatch.setattr(state, "phase", "starting")
    monkeypatch.setattr(state, "compiling", (3, 11))
    chromium.browser.get(server.url)
    told = lambda text: chromium.until(lambda: chromium.one("#state").text == text)  # noqa: E731
    told("compiling, 3 of 11")
    assert chromium.one("#served").text == state.name
    chromium.ask_soon(QUESTION)
    told("compiling, 3 of 11; your question waits")
    assert not chromium.all(".turn")
    with held(state):
        state.phase = "ready"
        chromium.until(lambda: chromium.all(".turn"))
        state.compiling = (4, 11)
        told("compiling, 4 of 11; your question waits")
    chromium.until(lambda: chromium.texts(".answer") == ["falcon"])
    told("ready; compiling, 4 of 11")
    state.compiling = None
    told("ready")


def test_a_long_passage_is_cut_between_words(server, chromium):
    chromium.open(server.url)
    begun = lambda text: chromium.script("return beginningOf(arguments[0])", text)  # noqa: E731
    words = "Rindfleischetikettierungsueberwachungsaufgabe " * 10
    assert begun(words) == words[: len(begun(words))] and words[len(begun(words))] == " "
    assert len(begun(words)) <= 320
    address = "see https://example.org/" + "a/b-c." * 100
    assert begun(address) and begun("a" * 500) == "a" * 500
    assert begun("\u6f22\u5b57" * 300) == "\u6f22\u5b57" * 160


@pytest.mark.slow
def test_an_answer_grows_and_a_conversation_goes_on(server, chromium):
    chromium.open(server.url)
    chromium.script("""
        window.seen = [];
        new MutationObserver(() => {
          const text = [...document.querySelectorAll(".answer")].at(-1)?.textContent;
          if (text && text !== seen.at(-1)) seen.push(text);
        }).observe(document.body, {subtree: true, childList: true, characterData: true});
    """)
    chromium.ask("What is the job of Vula Kinow?")
    seen = chromium.script("return seen")
    assert seen[-1] == "The documents do not say." and len(seen) > 1
    assert all(after.startswith(before) for before, after in itertools.pairwise(seen))
    turn = chromium.ask(QUESTION)
    chromium.unfold()
    assert "turn" not in turn.text and "what was said before" in turn.text
    assert "reused in 2 answers" in chromium.one("#sum").text
    early = [it for it in chromium.texts(".turn:last-child .sources li") if "for an earlier" in it]
    assert early and chromium.texts(".turn:last-child .sources li")[-len(early) :] == early
    chromium.one("#anew").click()
    assert chromium.all(".turn") == [] and chromium.one("#welcome").is_displayed()
    assert not chromium.one("#sum").is_displayed()
    turn = chromium.ask(QUESTION)
    chromium.unfold()
    assert "what was said before" not in turn.text


@pytest.mark.slow
def test_an_error_is_told_as_the_server_says_it(server, chromium):
    chromium.open(server.url)
    turn = chromium.ask("Which gizmo?")
    (box,) = turn.find_elements("css selector", "[role=alert]")
    assert "'gizmo': not in this model's vocabulary" in box.text
    assert chromium.script(IN_SIGHT, box)
    box.find_element("css selector", "button").click()
    assert chromium.one("#question").get_attribute("value") == "Which gizmo?"
    assert chromium.all(".turn") == []
    assert len(chromium.complaints()) == 1  # the browser's own, of status 400


@pytest.mark.slow
def test_escape_stops_an_answer(server, chromium):
    from selenium.webdriver.common.keys import Keys

    chromium.open(server.url)
    let_go = threading.Event()
    holding = threading.Thread(
        target=server.state.engine.call, args=(lambda _: let_go.wait(SECONDS),)
    )
    holding.start()
    try:
        chromium.typed(QUESTION, Keys.ENTER)
        chromium.until(lambda: chromium.one("#stop").is_displayed())
        chromium.typed(Keys.ESCAPE)
        chromium.until(lambda: chromium.one("#send").is_displayed())
        assert "Stopped." in chromium.one(".turn").text
    finally:
        let_go.set()
        holding.join()
    turn = chromium.ask(QUESTION)
    chromium.unfold()
    assert "what was said before" not in turn.text


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_at_any_width_and_in_the_dark(server, chromium, scheme):
    for width in (320, 1280):
        chromium.open(server.url, width, scheme)
        assert chromium.script(BELOW) < 2
        chromium.script("for (const it of document.querySelectorAll('details')) it.open = true")
        chromium.ask("What is the job of Vula Kinow?")
        chromium.ask("Which gizmo?")
        chromium.unfold()
        wide = "return document.documentElement.scrollWidth"
        assert chromium.script(wide) <= width
        assert chromium.script(WIDER) == []
        assert chromium.script(BELOW) < 2
        assert chromium.script(FAINT) == []
        assert chromium.script(UNNAMED) == []
    ground = chromium.script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) < 3 * 128) == (scheme == "dark")


@pytest.fixture(scope="module")
def keeping(running, served_model, village, tmp_path_factory):
    """A server that takes uploads."""
    data = tmp_path_factory.mktemp("data")
    with running(served_model, {"village": village}, data=str(data)) as started:
        yield started


@pytest.mark.slow
def test_a_document_is_uploaded_asked_about_found_and_removed(keeping, chromium, tmp_path):
    good, bad = tmp_path / "tilo.txt", tmp_path / "broken.pdf"
    good.write_text("File 18: Giso Berow lives in Tondorf.", encoding="utf-8")
    bad.write_bytes(b"%PDF-1.7 and nothing else")
    chromium.open(keeping.url)
    chromium.one("#documents > summary").click()
    chromium.until(lambda: len(chromium.all("#list li")) == 13)
    assert "in village" in chromium.one("#documents > summary").text
    assert "an instruct model" in chromium.one("#may-add").text
    assert "open Documents" not in chromium.one("#how-to-add").text
    chromium.one("#name").send_keys("mine")
    chromium.one("#make button").click()
    chromium.until(lambda: "in mine" in chromium.one("#documents > summary").text)
    chromium.until(lambda: chromium.one("#none").is_displayed())
    chromium.one("#files").send_keys(f"{good}\n{bad}")
    statuses = "return [...document.querySelectorAll('#list li')].map((it) => it.dataset.status)"
    chromium.until(lambda: sorted(map(str, chromium.script(statuses))) == ["completed", "failed"])
    failed = chromium.one('[data-status="failed"]')
    assert "broken.pdf" in failed.text and failed.find_element("css selector", ".failed").text

    done = chromium.one('[data-status="completed"]')
    done.find_element("css selector", "summary").click()
    chromium.until(lambda: "Giso Berow lives in Tondorf." in done.text)

    assert chromium.script(FAINT) == chromium.script(UNNAMED) == chromium.script(SAME_IDS) == []
    chromium.script("""
        const given = new DataTransfer();
        given.items.add(new File(["File 23: <img src=x onerror='window.hurt=1'>"], "<i>mela.txt"));
        document.querySelector("#drop").dispatchEvent(new DragEvent("drop", {dataTransfer: given}));
    """)
    chromium.until(lambda: len(chromium.all('[data-status="completed"]')) == 2)

    turn = chromium.ask("What is the home of Giso Berow?")
    assert turn.find_element("css selector", ".answer").text == "Tondorf"
    chromium.unfold()
    assert turn.find_element("css selector", ".sources b").text == "tilo.txt"
    chromium.one("#query").send_keys("Giso Berow\n")
    found = chromium.until(lambda: chromium.texts("#found li"))[0]
    assert "tilo.txt" in found and "Tondorf" in found

    chromium.one("#query").clear()
    chromium.one("#query").send_keys("img\n")
    (found,) = chromium.until(lambda: [it for it in chromium.texts("#found li") if "img" in it])
    assert "<i>mela.txt" in found and "<img src=x onerror='window.hurt=1'>" in found
    assert chromium.script("return [window.hurt, document.images.length]") == [None, 0]

    for left in (2, 1, 0):
        chromium.all("#list li > button")[0].click()
        chromium.all("#list .sure button")[0].click()  # "Remove it", before "Keep it"
        chromium.until(lambda left=left: len(chromium.all("#list li")) == left)
    chromium.until(lambda: chromium.one("#none").is_displayed())
    chromium.one("#search button").click()
    chromium.until(lambda: chromium.texts("#found") == ["Nothing was found."])
    assert httpx.get(f"{keeping.url}/v1/files").json()["data"] == []
    assert chromium.complaints() == []


HOSTILE = """# Kora Felell

File 23: Kora Felell walks with a **falcon** every day.
<script>window.hurt = 1</script><img src="/favicon.svg?tag" onerror="window.hurt = 2">
![a](/favicon.svg?image) [b](javascript:window.hurt=3) [c](https://example.com/) <svg onload=x>
"""


@pytest.mark.slow
def test_markdown_of_a_document_is_shown_and_runs_and_loads_nothing(
    start, served_model, tmp_path, chromium
):
    with KnowledgeBase.open(tmp_path / "kb", model=served_model) as kb:
        kb.add([Document("hostile.md", HOSTILE)])
    with start(served_model, {"hostile": tmp_path / "kb"}) as running:
        chromium.open(running.url)
        assert "answers from 1 document in hostile" in chromium.one("#about").text
        assert "an instruct model" in chromium.one("#how-to-add").text  # it knows words only
        chromium.script("welcome({...chosen(), word_level: false})")
        assert "--data" in chromium.one("#how-to-add").text
        chromium.ask("Kora Felell")
        chromium.one(".cites button").click()
        chromium.until(lambda: chromium.texts(".passage.rendered strong"))
        assert chromium.texts(".passage strong") == ["falcon"]
        assert chromium.texts(".sources li.lit") == chromium.texts(".sources li")
        addresses = [it.get_attribute("href") for it in chromium.all(".passage a")]
        assert addresses == ["https://example.com/"]
        assert "<script>" in chromium.one(".passage").text
        made = "return document.querySelectorAll('.turn :is(script, img, svg, iframe)').length"
        assert chromium.script(made) == 0 and chromium.script("return window.hurt") is None
        asked = chromium.script(
            "return performance.getEntriesByType('resource').map((e) => e.name)"
        )
        assert not [it for it in asked if "?" in it.replace("?limit", "") or "example" in it]
        assert chromium.complaints() == []


@pytest.mark.slow
def test_a_key_is_asked_for_and_forgotten(running, served_model, village, chromium, tmp_path):
    keys = {"open sesame": 'tenant = "a"\nread = ["village"]'}
    keys = key_file(tmp_path / "keys.toml", keys)
    with running(served_model, {"village": village}, keys=keys) as keyed:
        chromium.browser.get(keyed.url)
        for key in ("wrong", "open sesame"):
            chromium.until(lambda: chromium.one("#key-form").is_displayed())
            assert chromium.all("#model option") == [] and not chromium.one("#ask").is_displayed()
            assert chromium.browser.switch_to.active_element == chromium.one("#key")
            chromium.one("#key").send_keys(key, "\n")
            if key == "wrong":
                chromium.until(lambda: chromium.one("#key-title").text == "This key is wrong.")
                assert chromium.one("#state").text == "wrong key"
        chromium.until(lambda: chromium.one("#ask").is_displayed())
        assert not chromium.one("#key-form").is_displayed()
        assert chromium.browser.switch_to.active_element == chromium.one("#question")
        assert "falcon" in chromium.ask(QUESTION).text
        chromium.one("#documents > summary").click()
        chromium.until(lambda: chromium.one("#read-only").is_displayed())
        assert not chromium.one("#drop").is_displayed()
        assert not chromium.one("#engine").is_displayed()  # it is no admin's key
        assert chromium.script("return localStorage.length") == 0
        chromium.one("#forget").click()
        chromium.until(lambda: chromium.one("#key-form").is_displayed())
        assert chromium.script("return sessionStorage.length") == 0
