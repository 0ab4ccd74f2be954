"""What `jaxrag eval methods` measures: methods of reuse x encoders x recompute ratios."""

import dataclasses
from collections.abc import Iterator, Sequence

from jaxrag.base.errors import RequestError
from jaxrag.base.options import flags_of
from jaxrag.measure.evals.options import MethodsOptions
from jaxrag.measure.evals.synthetic import TASK
from jaxrag.reuse.encode import encoder_named
from jaxrag.reuse.methods import METHODS, Method, method_named
from jaxrag.reuse.select import AllTokens, NoTokens, RandomTokens, Selector
from jaxrag.tasks.synthetic import SyntheticTask

FULL, REUSE = METHODS["full_attention"], METHODS["full_reuse"]
RANDOM = Method(
    "random", encoder="after_prefix", selector=RandomTokens(), recompute_ratio=0.15
)  # what choosing has to beat; no preset, as nobody would serve with it


@dataclasses.dataclass(frozen=True)
class Options(MethodsOptions):
    """What to measure.

    Attributes:
      task: what is asked about.
      deviation: samples whose first question's KV is compared with full attention's, 0 for none.
    """

    task: SyntheticTask = TASK
    deviation: int = 32

    def __post_init__(self) -> None:
        """Refuse what cannot be measured: RequestError, ConfigError for a bad .toml file."""
        flags = flags_of(MethodsOptions)
        for name in ("methods", "ratios", "encoders"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise RequestError(f"{flags[name]} {','.join(map(str, values))}: name each once")
        if not self.ratios:
            raise RequestError(
                "no recompute ratio; name some, such as --recompute-ratios 0,0.15,1.0"
            )
        for name in ("questions", "batch_size", "neighbours"):
            if getattr(self, name) < 1:
                value = getattr(self, name)
                raise RequestError(f"{flags[name]} {value}: expected a positive integer")
        if self.deviation < 0:
            raise RequestError(f"--deviation {self.deviation}: expected a number of samples, or 0")
        if self.retrieve is not None and not 1 <= self.retrieve <= self.task.chunks[0]:
            raise RequestError(
                f"--retrieve {self.retrieve}: expected 1 to {self.task.chunks[0]}, the chunks of a "
                f"question's knowledge base; name more of them with --chunks"
            )
        if self.retrieve is not None and self.deviation:
            raise RequestError(
                f"--retrieve {self.retrieve} --deviation {self.deviation}: KV is compared in one "
                f"knowledge base only; pass --deviation 0"
            )
        for encoder in self.encoders:
            if not encoder_named(encoder).sees_prefix:
                raise RequestError(
                    f"--encoder {encoder}: it takes the place of what is encoded behind the "
                    f"prefix; expected after_prefix, neighbours or neighbours_joint"
                )
        self.cells()

    def cells(self) -> "list[Cell]":
        """Every method with every encoder at every ratio it has; the two references first.

        Raises RequestError for a ratio that a method has no use for, and for ratios that nothing
        is measured at.
        """
        cells = [*REFERENCES, *_cells(REUSE, self)]
        for named in self.methods:
            method = RANDOM if named == RANDOM.name else method_named(named)
            cells += _cells(method, self)
        if (
            not any(cell.ratio is not None for cell in cells)
            and self.ratios != MethodsOptions.ratios
        ):
            tried = ",".join(map(str, self.ratios))
            raise RequestError(
                f"--recompute-ratios {tried}: none of the methods recomputes anything; name "
                "fusionrag, cacheblend, cache_craft, epic or random as well"
            )
        distinct = list(dict.fromkeys(cells))
        shown = [(cell.name, cell.method.encoder, cell.ratio) for cell in distinct]
        twice = next((name for name in shown if shown.count(name) > 1), None)
        if twice is not None:
            raise RequestError(
                f"two methods are called {twice[0]!r}; rename one of the .toml files"
            )
        return distinct


@dataclasses.dataclass(frozen=True)
class Cell:
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


REFERENCES = (Cell(FULL.name, FULL, None), Cell(REUSE.name, REUSE, None))  # measured always


def _cells(method: Method, options: Options) -> Iterator[Cell]:
    if method.encoder is None:
        yield Cell(method.name, method, None)
        return
    for variant in _variants(method, options.encoders):
        if isinstance(variant.selector, NoTokens):
            yield Cell(method.name, variant, None)
            continue
        if variant.recompute_ratio is None:  # its own budget
            yield Cell(method.name, variant, None)
        for ratio in options.ratios:
            yield Cell(method.name, variant.with_ratio(ratio), ratio)


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
