"""Words, keys, values and filler sentences of haystacks; everything follows from the ``rng``."""

import heapq
import itertools
import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jaxrag.base.errors import DocumentError
from jaxrag.models.text.pieces import sentence_starts

Prose = Callable[[random.Random], Iterator[str]]  # endless sentences of a haystack

_LONGEST = 100  # words of a sentence of a text file


def _each(listed: str) -> tuple[str, ...]:
    return tuple(listed.split())


def _phrases(listed: str) -> tuple[str, ...]:
    return tuple(listed.split("|"))


SHADES = _each(
    "amber azure black blue bronze brown copper crimson golden green grey indigo ivory jade lilac "
    "maroon olive orange pink purple red rusty scarlet silver tawny teal violet white yellow"
)
MATERIALS = _each(
    "bamboo brass brick chalk clay cork cotton crystal felt flint glass granite iron leather linen "
    "marble oak paper pine plaster porcelain silk slate steel stone tin velvet walnut wax wicker"
)
THINGS = _each(
    "anchor anvil arrow barrel basket bell bench bowl bridge broom bucket button cabin candle cart "
    "chair chest clock cloak coin comb compass cradle crown cup curtain desk door drawer drum fan "
    "fence flag fountain gate globe hammer handle harp hat helmet hinge hook jar jug kettle key "
    "kite ladder lantern lever lock mask mirror needle oar oven paddle pan pillar pipe plate "
    "plough pulley ring rope saddle sail scale shield shovel sign spoon stool table tent tower "
    "tray trumpet vase wagon wheel whistle window"
)
NOISE = (
    "The river is wide.",
    "The hill is steep.",
    "The road is long.",
    "One man walks up.",
    "Another walks down.",
    "Both will rest at noon.",
)

_WHO = _each(
    "baker carpenter clerk cook doctor farmer ferryman fisher gardener guard innkeeper judge "
    "librarian mayor merchant miller musician painter pilot poet postman sailor shepherd smith "
    "student tailor teacher traveller watchmaker weaver widow"
)
_MANNER = _each(
    "ancient anxious busy careful cheerful clever curious elderly famous gentle honest lonely "
    "modest nervous patient polite quiet restless serious shy silent sleepy stubborn talkative "
    "thoughtful tired wealthy young"
)
_DID = _phrases(
    "asked about|avoided|carried|cleaned|described|drew|forgot|found|hid|inherited|kept|lent|"
    "looked after|lost|measured|mended|moved|noticed|ordered|painted|pointed at|polished|praised|"
    "remembered|searched for|sold|spoke of|studied|touched|wanted|watched|wrote about"
)
_WHERE = _phrases(
    "at the harbour|at the market|behind the church|behind the mill|beside the canal|by the fire|"
    "by the lake|in a side street|in the attic|in the cellar|in the garden|in the kitchen|in the "
    "library|in the valley|in the village hall|near the border|near the station|on the bridge|on "
    "the hill|on the way home|outside the town|under the old trees"
)
_WHEN = _phrases(
    "after supper|all afternoon|all through the winter|before dawn|before the storm|during the "
    "harvest|every spring|for a whole week|in early summer|in late autumn|late at night|long ago|"
    "on a rainy morning|on market days|once more|one evening|that year|the day before|towards "
    "midnight|while the snow fell"
)
_SO = _phrases(
    "and nobody asked why|and said so to everybody|and that was the end of it|and the neighbours "
    "laughed|and the others agreed|as people do in those parts|but changed nothing|but did not say "
    "a word|but it made no difference|but soon thought of something else|which surprised no one|"
    "which took longer than planned|without any hurry|without knowing the reason|without much "
    "success"
)


def prose(rng: random.Random) -> Iterator[str]:
    """Sentences about nothing in particular, without digits; none says anything of use."""
    pick = rng.choice
    while True:
        who = f"the {pick(_MANNER)} {pick(_WHO)}"
        what = f"{pick(_DID)} the {pick(MATERIALS)} {pick(THINGS)}"
        form = rng.randrange(4)
        if form == 0:
            yield f"{who.capitalize()} {what} {pick(_WHERE)}."
        elif form == 1:
            yield f"{pick(_WHEN).capitalize()} {who} {what} {pick(_WHERE)}, {pick(_SO)}."
        elif form == 2:
            yield f"{pick(_WHERE).capitalize()}, {who} {what}, {pick(_SO)}."
        else:
            other = f"the {pick(_MANNER)} {pick(_WHO)}"
            yield f"{who.capitalize()} and {other} {what} {pick(_WHEN)}."


def noise(rng: random.Random) -> Iterator[str]:
    """The same few sentences again and again, from a random one on."""
    start = rng.randrange(len(NOISE))
    return itertools.cycle(NOISE[start:] + NOISE[:start])


def text_prose(paths: Sequence[str | Path]) -> Prose:
    """Sentences of text files, from a random one on and around; white space becomes one space.

    A sentence of more than a hundred words is cut, so that a needle finds its place in any text.
    Raises DocumentError for a file that cannot be read as UTF-8 or is empty.
    """
    sentences: list[str] = []
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise DocumentError(f"{path}: cannot be read ({error.strerror})") from None
        except UnicodeDecodeError as error:
            raise DocumentError(f"{path}: not UTF-8 at byte {error.start}; convert it") from None
        if not text.strip():
            raise DocumentError(f"{path}: holds no text; leave the file out")
        edges = [0, *sentence_starts(text), len(text)]
        for start, end in itertools.pairwise(edges):
            parts = text[start:end].split()
            sentences += (" ".join(part) for part in itertools.batched(parts, _LONGEST))

    def read(rng: random.Random) -> Iterator[str]:
        start = rng.randrange(len(sentences))
        return itertools.cycle(sentences[start:] + sentences[:start])

    return read


def names(rng: random.Random) -> Iterator[str]:
    """Different keys of three words each, such as "amber oak lantern"; ends when all are drawn."""
    every = len(SHADES) * len(MATERIALS) * len(THINGS)
    for n in shuffled(rng, every):
        n, shade = divmod(n, len(SHADES))
        thing, material = divmod(n, len(MATERIALS))
        yield f"{SHADES[shade]} {MATERIALS[material]} {THINGS[thing]}"


def numbers(rng: random.Random, digits: int = 7) -> Iterator[str]:
    """Different numbers of so many digits, the first of them not 0."""
    low = 10 ** (digits - 1)
    for n in shuffled(rng, 9 * low):
        yield str(low + n)


def codes(rng: random.Random) -> Iterator[str]:
    """Random UUIDs (version 4), in lower case."""
    while True:
        yield str(uuid.UUID(int=rng.getrandbits(128), version=4))


def coined(rng: random.Random) -> Iterator[str]:
    """Different words that no language has, of three syllables; ends when all are drawn."""
    onsets, vowels, ends = _each("b d f g k l m n p r s t v z"), "aeiou", _each("l m n r s t x k")
    parts = (onsets, vowels, onsets, vowels, onsets, vowels, ends)
    every = 1
    for part in parts:
        every *= len(part)
    for n in shuffled(rng, every):
        letters = []
        for part in parts:
            n, at = divmod(n, len(part))
            letters.append(part[at])
        yield "".join(letters)


def evenly(rng: random.Random, listed: Sequence[str], weights: Sequence[float]) -> Iterator[str]:
    """The words for ever, each at even distances and in proportion to its weight."""
    total = sum(weights)
    every = [total / weight for weight in weights]
    due = [(rng.random() * distance, n) for n, distance in enumerate(every)]
    heapq.heapify(due)
    while True:
        time, n = due[0]
        yield listed[n]
        heapq.heapreplace(due, (time + every[n], n))


def shuffled(rng: random.Random, count: int) -> Iterator[int]:
    """0 .. count-1 in random order, in memory of what is drawn only."""
    moved: dict[int, int] = {}  # Fisher and Yates on a list that is kept as its changes
    for left in range(count, 0, -1):
        at = rng.randrange(left)
        yield moved.get(at, at)
        moved[at] = moved.get(left - 1, left - 1)
