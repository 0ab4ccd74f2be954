"""Characters of fonts that draw signs in the places of letters, as Unicode."""

# Of each place from 0x20 on, but for 0x7f to 0xa0: as Adobe's Symbol has them.
_SYMBOL = (
    " !∀#∃%&∋()∗+,−./0123456789:;<=>?≅ΑΒΧΔΕΦΓΗΙϑΚΛΜΝΟΠΘΡΣΤΥςΩΞΨΖ[∴]⊥_‾αβχδεφγηιϕκλμνο"
    "πθρστυϖωξψζ{|}∼€ϒ′≤⁄∞ƒ♣♦♥♠↔←↑→↓°±″≥×∝∂•÷≠≡≈…⏐⎯↵ℵℑℜ℘⊗⊕∅∩∪⊃⊇⊄⊂⊆∈∉∠∇®©™∏√⋅¬∧∨⇔⇐⇑⇒⇓◊"
    "⟨®©™∑⎛⎜⎝⎡⎢⎣⎧⎨⎩⎪\0⟩∫⌠⎮⌡⎞⎟⎠⎤⎥⎦⎫⎬⎭"
)
# Places of signs, each followed by what it shows.
_WINGDINGS = {
    "wingdings": "28☎2a✉36⌛3a🖥3e✇3f✍41✌43👍44👎45☜46☞47☝48☟4a☺4b😐4c☹4e☠51✈54❄58✠59✡5b☯6c●6d❍6e■"
    "6f☐70☐71❑72❒73⬧74⧫75◆76❖77⬥78⌧7b❀80⓪81①82②83③84④85⑤86⑥87⑦88⑧89⑨8a⑩9e·9f•a1○"
    "a4◉a7▪a8☐ab★b0⌖d5⌫d8➢dc➲df←e0→e1↑e2↓e8➔ef⇦f0⇨f1⇧f2⇩f3⬄f4⇳fb✗fc✓fd☒fe☑",
    "wingdings 2": "4f✗50✓51☒52☑53☒54☒97●98●a2■a3☐a6▪ae◆",
    "wingdings 3": "21→22↑23↓66←67→68↑69↓7d▶84◀70▲71▼",
    "webdings": "61✓63☐67■72✗6e●",
}
_KNOWN = {
    font: {int(text[at : at + 2], 16): text[at + 2] for at in range(0, len(text), 3)}
    for font, text in _WINGDINGS.items()
}
_KNOWN["symbol"] = {0x20 + at if at < 95 else 0x41 + at: sign for at, sign in enumerate(_SYMBOL)}
_PRIVATE = 0xF000  # where files put the places of such fonts


def symbol(font: str, code: int) -> str:
    """What a place of a font shows; '' where that is not known. Other fonts have Unicode's."""
    places = _KNOWN.get(font.lower())
    if places is None:
        return "" if 0xE000 <= code < 0xF900 or not 0x20 <= code < 0xD800 else chr(code)
    return places.get(code - _PRIVATE if code >= _PRIVATE else code, "").strip("\0")
