"""How near a method comes to full attention, token by token, and to choosing tokens at random.

Full attention answers greedily. Every method is then shown that answer, and a right one, and gives
its distribution of each next token: its KL divergence from full attention's, whether both take the
same token, and the log-probability of the right answer. A selector is worth what it is nearer than
its control, which computes as many tokens again that are drawn at random.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrag.base.types import HostArray
from jaxrag.measure.evals.asked import Line
from jaxrag.measure.evals.datasets.spec import DatasetItem
from jaxrag.measure.evals.gate import forced_along, kl_divergence
from jaxrag.measure.evals.statistics import (
    bootstrapped,
    bootstrapped_difference,
    median,
    plain,
    share,
)
from jaxrag.measure.table import Table, percent
from jaxrag.reuse.methods import Method
from jaxrag.reuse.select import RandomTokens
from jaxrag.serve.questions import ReadyQuestion, Settings

FULL = "full_attention"
_CONTROL = "{} (random)"  # the name of a method's
_SEED = 7  # of resampled questions


def at_ratios(methods: Mapping[str, Method], ratios: Sequence[float]) -> dict[str, Method]:
    """Those that recompute a part at each of these ratios, which their names end with then."""
    found: dict[str, Method] = {}
    for name, method in methods.items():
        own = ratios if method.recomputes else ()
        each = {f"{name} {it:g}": method.with_ratio(it) for it in own}
        found |= each or {name: method}
    return found


def with_controls(settings: Mapping[str, Settings]) -> dict[str, Settings]:
    """Behind every method that computes a chosen part again the same with tokens at random.

    None where nothing is chosen: all tokens, those of a selector's own number, or random ones.
    """
    both: dict[str, Settings] = {}
    for name, own in settings.items():
        both[name] = own
        method = own.method
        chooses = method.recomputes and not isinstance(method.selector, RandomTokens)
        if chooses and method.recompute_ratio not in (None, 1):
            random = dataclasses.replace(
                method, name=_CONTROL.format(method.name), selector=RandomTokens()
            )
            both[_CONTROL.format(name)] = dataclasses.replace(own, method=random)
    return both


@dataclasses.dataclass(frozen=True)
class ShownAnswer:
    """What every method is shown, and what full attention makes of it.

    Attributes:
      answer: the first tokens of its own.
      gold: token ids of the first right answer, as it would begin the model's.
      logits: float32 [len(answer) + 1, V], of each token of the answer and of the one behind it.
      log_probability: of ``gold``, in nats.
    """

    answer: Sequence[int]
    gold: HostArray
    logits: HostArray
    log_probability: float

    @classmethod
    def by(
        cls,
        full: Settings,
        ready: ReadyQuestion,
        answer: Sequence[int],
        item: DatasetItem,
        most: int,
    ) -> "ShownAnswer":
        """Full attention's, up to ``most`` tokens of both answers."""
        text = next(iter(item.answers[0]), "") if item.answers else ""
        space = "" if full.template.chat else " "
        gold = full.model.text_tokenizer().encode(f"{space}{text}")[:most]
        logits, own, _ = _along(full, ready, answer[:most], gold)
        return cls(answer[:most], gold, logits, own)

    def to(self, settings: Settings, ready: ReadyQuestion) -> Line:
        """What a method makes of it; ``recomputed`` counts chunk tokens."""
        logits, gold, recomputed = _along(settings, ready, self.answer, self.gold)
        return {
            "kl": kl_divergence(self.logits, logits).tolist(),
            "same": (self.logits.argmax(1) == logits.argmax(1)).tolist(),
            "gold": gold,
            "recomputed": recomputed,
        }


def _along(
    settings: Settings, ready: ReadyQuestion, answer: Sequence[int], gold: HostArray
) -> tuple[HostArray, float, int]:
    """Logits [T, V] along an answer, the log-probability of the gold, tokens computed again."""
    [logits, along], recomputed = forced_along(settings.model, ready, [answer, gold.tolist()])
    chances = along[: len(gold)].astype(np.float64)
    chances -= chances.max(1, keepdims=True)
    each = chances[np.arange(len(gold)), gold] - np.log(np.exp(chances).sum(1))
    return logits, float(each.sum()), recomputed


def nearness_of(
    own: Sequence[Line],
    full: Sequence[Line],
    samples: HostArray,
    control: Sequence[Line] | None = None,
    seed: int = _SEED,
) -> dict[str, Any]:
    """What a method's lines say, and full attention's and its control's of the same questions.

    Args:
      samples: numbers the sample of each question, [Q].
    """
    if not own:
        return {}
    kl, same = _means(own, "kl"), np.concatenate([np.array(line["same"], np.bool_) for line in own])
    gold = np.array([line["gold"] for line in own])
    wanted = np.array([line["gold"] for line in full])
    found: dict[str, Any] = {
        "kl": bootstrapped(kl, seed, samples=samples),
        "same_tokens": plain(share(same, np.repeat(samples, [len(line["same"]) for line in own]))),
        "gold_minus_full": bootstrapped_difference(gold, wanted, seed, samples),
    }
    if control is not None:
        random = np.array([line["gold"] for line in control])
        found["minus_control"] = {
            "kl": bootstrapped_difference(kl, _means(control, "kl"), seed, samples),
            "gold": bootstrapped_difference(gold, random, seed, samples),
        }
    return found


def times_over(lines: Sequence[Line], others: Sequence[Line]) -> dict[str, Any] | None:
    """The median of the first's times to first token over the others'; of those that have both."""
    pairs = [(one["ttft"], other["ttft"]) for one, other in zip(lines, others, strict=True)]
    return plain(median(np.array([a / b for a, b in pairs if None not in (a, b)])))


def control_of(name: str, names: Sequence[str]) -> str | None:
    """The name of a method's control, where it is among these."""
    control = _CONTROL.format(name)
    return control if control in names else None


def _means(lines: Sequence[Line], part: str) -> HostArray:
    return np.array([np.mean(it[part]) for it in lines])


def control_table(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[Table]:
    """Named rows that have a control beside it; no table where none has."""
    cells = [
        [name, *(text for part, form in (("kl", "+.4f"), ("gold", "+.2f"))
                 for text in (shown(row["minus_control"][part], form),
                              needs(row["minus_control"][part])))]
        for name, row in rows if "minus_control" in row
    ]  # fmt: skip
    if cells:
        yield Table(
            "minus that of as many tokens drawn at random, on the same questions: KL to full "
            "attention, and log-probability of the right answer; questions that a difference of "
            "this size takes",
            [["method", "KL", "takes", "gold", "takes"], *cells],
        )


def shown(found: Mapping[str, Any] | None, form: str, factor: float = 1) -> str:
    """A number, so many times, with its interval; "" for none."""
    if found is None:
        return ""
    ends = [found[name] for name in ("value", "low", "high")]
    value, low, high = (end if end is None else factor * end for end in ends)
    return f"{value:{form}}" + ("" if low is None else f" [{low:{form}}, {high:{form}}]")


def needs(comparison: Mapping[str, Any] | None) -> str:
    """How many questions would show a difference of the size seen; "" for none."""
    return "" if comparison is None or comparison["needed"] is None else f"{comparison['needed']:,}"


def near_cells(row: Mapping[str, Any]) -> list[str]:
    """KL, same next tokens and the right answer's log-probability, of ``nearness_of``."""
    return [
        shown(row["kl"], ".4f"),
        percent(row["same_tokens"]),
        shown(row["gold_minus_full"], "+.2f"),
    ]
