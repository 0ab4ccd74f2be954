"""`jaxrag check`: what a model directory is, whether it runs here, and what to type next."""

import dataclasses
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from jaxrag.base.config import ModelOptions
from jaxrag.cli.command import SUMMARIES, Args, argument, command, fields, flag, value
from jaxrag.cli.opening import mesh_of
from jaxrag.cli.options import JSON
from jaxrag.cli.output import human_count, print_json, shorten
from jaxrag.cli.waiting import loading, tell_programs
from jaxrag.models.text.printable import printable

if TYPE_CHECKING:
    from jaxrag.measure.bench.model_check import Checked, Parity
    from jaxrag.models.forms import Forms
    from jaxrag.models.memory import Memory
    from jaxrag.models.overview import Overview
    from jaxrag.reuse.methods import Choice

_WIDTH = 80
_LABEL = 14
_DIFFERS = 3  # exit code where transformers gives other logits


def run(args: Args) -> int:
    """Exit code 0; 1 for what cannot be served; 3 where transformers gives other logits."""
    import jax

    from jaxrag.measure.bench.model_check import Parity, check_model
    from jaxrag.models.forms import kept_forms
    from jaxrag.models.overview import overview
    from jaxrag.reuse.methods import choices

    mesh = mesh_of(args.mesh)
    model = overview(args.model, dtype=args.dtype, cache_tokens=args.cache_tokens, mesh=mesh)
    suited = choices(model.config, model.reading)
    if not args.json:
        _show(_understood(model))
    if args.measure:
        _measure_forms(model)
    forms, source = kept_forms()
    if not args.json and jax.default_backend() == "cpu":
        _show([("forms", f"{_written(forms)}; {source}")])
    checked = None
    if not args.quick:
        tell_programs()
        with loading(model.path):
            checked = check_model(
                model,
                dtype=args.dtype,
                cache_tokens=args.cache_tokens,
                mesh=mesh,
                peer_python=args.peer_python,
            )
    if args.json:
        values = model.to_dict() | {"forms": dataclasses.asdict(forms), "forms_from": source}
        values |= {"methods": [_choice_values(one) for one in suited]}
        print_json(values | {"checked": None if checked is None else checked.to_dict()})
    else:
        if checked is not None:
            _show(_measured(checked))
        _show(_next(model, suited))
    if checked is None or not isinstance(checked.parity, Parity) or checked.parity.same:
        return 0
    print(
        f"jaxrag: refused: {args.model} gives other logits than transformers "
        f"{checked.parity.peer['transformers']}; is config.json that of these weights?",
        file=sys.stderr,
    )
    return _DIFFERS


def _written(forms: "Forms") -> str:
    """As text: "key_tile 256, heads_apart bfloat16, ..."."""
    values = dataclasses.asdict(forms)
    values["heads_apart"] = "+".join(forms.heads_apart) or "never"
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _measure_forms(model: "Overview") -> None:
    """Measure, keep, and say what was faster; says so where there is nothing to choose."""
    import jax

    from jaxrag.measure.bench.forms import measure_forms
    from jaxrag.models.forms import keep_forms

    if jax.default_backend() != "cpu":
        print("forms: they are chosen on processors only", file=sys.stderr)
        return
    chosen, measured = measure_forms(model.config)
    path = keep_forms(chosen, {"measured": [dataclasses.asdict(one) for one in measured]})
    for one in measured:
        times = ", ".join(f"{name} {1e3 * it:.2f} ms" for name, it in one.seconds.items())
        print(f"{one.choice}: {times}; {one.taken} is kept", file=sys.stderr)
    print(f"forms: kept in {path}", file=sys.stderr)


def _show(rows: Iterable[tuple[str, str]]) -> None:
    """Rows of a name and a text, broken at words to the width of a terminal; unnamed as it is."""
    for name, text in rows:
        if not name:
            print(printable(text, keep="\n"), flush=True)
            continue
        lines = textwrap.wrap(printable(text), _WIDTH - _LABEL, break_on_hyphens=False)
        for number, line in enumerate(lines):
            print(f"{'' if number else name:<{_LABEL}}{line}", flush=True)


def _understood(model: "Overview") -> list[tuple[str, str]]:
    from jaxrag.models.memory import gib
    from jaxrag.models.overview import rope_words, scale_words
    from jaxrag.models.spec import num_active_params

    c, files = model.config, model.files
    stored = f"{gib(files.nbytes)} of weights in {' and '.join(files.dtypes)}"
    head = "tied to the embedding" if c.tie_embeddings else "of its own"
    window = "" if c.sliding_window is None else f"; sliding window of {c.sliding_window} tokens"
    window += f" in {sum(c.window_layers)} layers" if c.window_layers else ""
    norms = "" if c.pre_norms else "; norms after attention and MLP alone"
    mlp, count = f"MLP {c.mlp_dim}", f"{human_count(files.parameters)} parameters"
    if c.experts is not None:
        width = c.experts.beside or c.mlp_dim
        beside = f"{mlp} beside " if c.experts.beside else ""
        mlp = f"{beside}{c.experts.count} experts of {width}, {c.experts.active} for a token"
        mlp += f" and one of {c.experts.shared}" if c.experts.shared else ""
        count += f", a token meets {human_count(num_active_params(c))}"
    window += "; a sink logit of each head" if c.sink_logits else ""
    if (r := c.recurrent) is not None:
        states = f"{r.value_heads} heads of {r.key_dim} x {r.value_dim}"
        window += f"; {sum(r.layers)} layers keep a state of {states} in place of KV"
    if c.own_kv_heads is not None:
        kinds = sorted(
            {(n, c.head_dim // p) for n, p in zip(c.own_kv_heads, c.head_parts, strict=True)}
        )
        own = " or ".join(f"{count} of {size}" for count, size in kinds)
        window += (
            f"; arranged from KV heads that are {own}, whose share of KV is {c.own_kv_share:.0%}"
        )
    if c.shared_layers:
        wide = f", with an MLP of {c.shared_mlp_dim}" if c.shared_mlp_dim else ""
        window += f"; the last {c.shared_layers} layers take K and V of others{wide}"
    norms += f"; {c.input_dim} inputs of each layer's own" if c.input_dim else ""
    positions = ", ".join(model.reading.block_positions)
    trained = "with full attention, as far as is known (no reading.toml)"
    if positions:
        trained = f"to read chunks block-wise ({positions} positions)"
    rows = [
        ("model", model.path),
        ("files", f"{files.kind}, {files.count} with {stored}"),
        ("architecture", f"{model.architecture}, {count}"),
        ("layers", f"{c.num_layers} of width {c.model_dim}, {mlp}{norms}; head {head}"),
        (
            "attention",
            f"{c.num_heads} query and {c.num_kv_heads} KV heads of {c.head_dim}{window}",
        ),
        ("positions", f"RoPE {rope_words(c)}; context {c.max_positions} tokens"),
        *([("constants", scales)] if (scales := scale_words(c)) else []),
        ("runs in", c.dtype),
        ("trained", trained),
    ]
    if files.left_out:
        parts = (f"{part} ({human_count(many)})" for part, many in files.left_out.items())
        rows.append(("left out", f"{' and '.join(parts)}: the text part alone is read"))
    if model.ignored:
        rows.append(("ignored", f"of config.json: {', '.join(model.ignored)}"))
    return [*rows, *_text(model), *_memory(model)]


def _text(model: "Overview") -> list[tuple[str, str]]:
    """Of tokenizer and template."""
    words, prompt = model.vocabulary, model.prompt
    if words is None or prompt is None:
        return [("tokenizer", "none: it takes token ids, no text; add its tokenizer.json")]
    special, chat = sum(words.added.values()), "a" if words.chat else "no"
    of = f"{words.size} ids of {model.config.vocab_size} in the embedding"
    ends = ", ".join(f"{text} ({end})" for text, end in words.ends.items())
    most = 3 * (_WIDTH - _LABEL)
    rows = [
        ("tokenizer", f"{of}; {len(words.added)} added, {special} special; {chat} chat template"),
        ("answers end", f"at {ends or 'no token, only at --max-new-tokens or --stop'}"),
        ("template", f"{prompt.template}: {prompt.source}"),
        *((f"  {part}", shorten(repr(text), most) if text else "-") for part, text in prompt.parts),
    ]
    return rows if prompt.note is None else [*rows, ("  note", prompt.note)]


def _memory(model: "Overview") -> list[tuple[str, str]]:
    from jaxrag.models.memory import gib
    from jaxrag.models.overview import eight_billion

    memory, other = model.memory, eight_billion()
    lies = f"{memory.pool_tokens} tokens in {gib(memory.pool + memory.host_pool)}"
    rows = [("memory", _need(memory, model.config.dtype)), ("  pool", lies)]
    if memory.free is not None:
        rows.append(("  free", f"{gib(memory.free)} on {memory.device}"))
    if memory.missing:
        rows.append(("  verdict", f"the weights do not fit: {gib(memory.missing)} are missing"))
    elif memory.most_tokens is not None:
        most = f"KV of {human_count(memory.most_tokens)} tokens beside the weights"
        whole = " (its context)" if model.longest_context == model.config.max_positions else ""
        longest = f"prompt and answer of {model.longest_context}{whole}"
        rows.append(("  verdict", f"fits; at most {most}, {longest}"))
    fits = f"{gib(other.missing)} missing" if other.missing else "it fits"
    return [*rows, ("  an 8B", f"as Llama-3-8B: {_need(other, 'bfloat16')}; {fits}")]


def _need(memory: "Memory", dtype: str) -> str:
    from jaxrag.models.memory import gib

    return f"weights {gib(memory.weights)} in {dtype}, KV {gib(memory.kv_per_token)} a token"


def _measured(checked: "Checked") -> list[tuple[str, str]]:
    speed, prefill, decode = checked.speed, checked.speed.prefill, checked.speed.decode
    return [
        ("loaded", f"in {checked.load_seconds:.1f} s; logits are finite"),
        ("transformers", _beside(checked.parity)),
        (
            "speed",
            f"prefill {human_count(prefill)} tokens/s ({speed.prompt_tokens} tokens), generation "
            f"{human_count(decode)} tokens/s",
        ),
    ]


def _beside(parity: "Parity | str") -> str:
    if isinstance(parity, str):
        return f"not compared: {parity}"
    same, version = "the same" if parity.same else "OTHER", parity.peer["transformers"]
    largest = f"largest difference {parity.difference:.2g} of {parity.largest:.3g}"
    first = f"first choices {parity.first_choice:.0%} the same, {parity.tokens} tokens"
    return f"{version}: {same} logits in float32 ({largest}, {first})"


def _choice_values(choice: "Choice") -> dict[str, object]:
    return {
        "method": choice.method.name,
        "encoders": list(choice.encoders),
        "refused": choice.refused,
    }


def _next(model: "Overview", suited: "tuple[Choice, ...]") -> list[tuple[str, str]]:
    """Which methods suit, and what to type."""
    from jaxrag.models import FAMILIES
    from jaxrag.reuse.methods import refused_methods

    rows = [("refused", choice.refused) for choice in suited if choice.refused is not None]
    if FAMILIES[model.config.family].needs_bos and not model.reading.block_positions:
        text = "are read behind a BOS token, which this family needs: not isolated ones (epic)"
        rows.append(("chunks", text))
    if refusing := refused_methods(model.config):
        rows.append(("not here", f"{', '.join(refusing)}; each says why if it is asked for"))
    served = [choice for choice in suited if choice.refused is None]
    if not served or model.memory.missing:
        return rows
    first = served[0]
    method = (f"--method {first.method.name}",)
    asked = () if first.default else method
    ingest = ("jaxrag ingest DOCUMENTS --kb kb", f"--model {model.path}", *first.flags)
    return [
        *rows,
        ("methods", f"{', '.join(map(_kept, served))}; full_attention always"),
        ("", "next"),
        ("", _command(ingest)),
        ("", _command(('jaxrag ask "QUESTION" --kb kb', *asked))),
        ("", _command(("jaxrag kb gate kb --questions PROBES.jsonl", *method))),
    ]


def _kept(choice: "Choice") -> str:
    return f"{choice.method.name} ({' and '.join(choice.encoders)} KV)"


def _command(words: Sequence[str]) -> str:
    """A command as a shell reads it, continued where it is longer than a line."""
    lines = [f"  {words[0]}"]
    for word in words[1:]:
        if len(lines[-1]) + len(word) + 3 > _WIDTH:
            lines[-1] += " \\"
            lines.append(f"      {word}")
        else:
            lines[-1] += f" {word}"
    return "\n".join(lines)


COMMAND = command(
    "check",
    run,
    SUMMARIES["check"],
    "jaxrag check models/llama-3-8b-instruct --quick",
    argument("model", "MODEL", "a directory, a GGUF file, or ORG/NAME of the hub"),
    flag("--quick", "read no weights: files, headers and memory only"),
    fields(ModelOptions, only=("dtype", "mesh", "cache_tokens")),
    flag(
        "--measure",
        "measure which forms of attention and of products run fastest on this "
        "processor with this model's shapes, and keep them for new processes "
        "(JAXRAG_FORMS=default: use none)",
    ),
    value(
        "--peer-python",
        "FILE",
        "interpreter with torch and transformers, to compare logits (this one)",
    ),
    JSON,
)
