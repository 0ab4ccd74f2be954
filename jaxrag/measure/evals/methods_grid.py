"""What `jaxrag eval methods` measures: methods of reuse x encoders x recompute ratios."""

import dataclasses
from collections.abc import Iterator, Sequence

from jaxrag.base.errors import RequestError
from jaxrag.measure.evals.options import MethodsOptions
from jaxrag.reuse.encode import encoder_named
from jaxrag.reuse.methods import METHODS, Method, method_named
from jaxrag.reuse.select import AllTokens, NoTokens, RandomTokens, Selector

FULL, REUSE = METHODS["full_attention"], METHODS["full_reuse"]
RANDOM = Method(
    "random", encoder="after_prefix", selector=RandomTokens(), recompute_ratio=0.15
)  # what choosing has to beat; no preset, as it is not for serving


@dataclasses.dataclass(frozen=True)
class MethodCell:
    """A method as it is measured, and under which name and ratio; None: as it is by itself."""

    name: str
    method: Method
    ratio: float | None

    @property
    def served(self) -> Method:
        """Equal for cells that give the same answers: no selector runs at ratio 0 or 1."""
        selector: Selector = self.method.selector
        ratio = self.method.recompute_ratio
        if not self.method.recomputes:
            selector, ratio = NoTokens(), None
        elif ratio == 1:
            selector = AllTokens()
        return dataclasses.replace(
            self.method, name="", template="", selector=selector, recompute_ratio=ratio
        )


REFERENCES = (  # measured always
    MethodCell(FULL.name, FULL, None),
    MethodCell(REUSE.name, REUSE, None),
)


def cells_of(options: MethodsOptions) -> list[MethodCell]:
    """Every method with every encoder at every ratio it has; the two references first.

    Raises RequestError for a ratio that a method has no use for, and for ratios that nothing
    is measured at.
    """
    cells = [*REFERENCES, *_cells(REUSE, options)]
    for named in options.methods:
        method = RANDOM if named == RANDOM.name else method_named(named)
        cells += _cells(method, options)
    if (
        not any(cell.ratio is not None for cell in cells)
        and options.ratios != MethodsOptions.ratios
    ):
        tried = ",".join(map(str, options.ratios))
        raise RequestError(
            f"--recompute-ratios {tried}: none of the methods recomputes anything; name "
            "fusionrag, cacheblend, cache_craft, epic or random as well"
        )
    distinct = list(dict.fromkeys(cells))
    shown = [(cell.name, cell.method.encoder, cell.ratio) for cell in distinct]
    twice = next((name for name in shown if shown.count(name) > 1), None)
    if twice is not None:
        raise RequestError(f"two methods are called {twice[0]!r}; rename one of the .toml files")
    return distinct


def _cells(method: Method, options: MethodsOptions) -> Iterator[MethodCell]:
    if method.encoder is None:
        yield MethodCell(method.name, method, None)
        return
    for variant in _variants(method, options.encoders):
        if isinstance(variant.selector, NoTokens):
            yield MethodCell(method.name, variant, None)
            continue
        if variant.recompute_ratio is None:  # its own budget
            yield MethodCell(method.name, variant, None)
        for ratio in options.ratios:
            yield MethodCell(method.name, variant.with_ratio(ratio), ratio)


def _variants(method: Method, encoders: Sequence[str]) -> Iterator[Method]:
    """The method under each encoder; as it is where it encodes chunks alone, or none is named.

    Behind neighbours, the prompt's first chunk is taken as encoded behind the prefix alone, which
    is exact (FusionRAG section 3.1).
    """
    if not encoders or method.encoder is None or not encoder_named(method.encoder).sees_prefix:
        yield method
        return
    for encoder in encoders:
        first = "after_prefix" if encoder_named(encoder).sees_neighbours else None
        yield dataclasses.replace(method, encoder=encoder, first_encoder=first)
