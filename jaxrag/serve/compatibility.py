"""Whether method, model, template and knowledge base suit each other, and what is said of it."""

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from jaxrag.base.errors import ConfigError, RequestError
from jaxrag.engine.request import Prompt
from jaxrag.engine.reuse import PartReuse
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.models.model import Model
from jaxrag.models.text.prompts import PromptTemplate, template_named
from jaxrag.reuse.encode import Primer, default_primer, encoder_named, primer_named
from jaxrag.reuse.methods import METHODS, Method, default_choice
from jaxrag.serve.ask import Ask

_FOR_STOCK = ("primed", "fusionrag", "cacheblend")  # of models that nobody trained, the best first


def chosen_template(
    given: str | PromptTemplate | None, kb: KnowledgeBase | None, model: Model, method: Method
) -> tuple[PromptTemplate, tuple[str, ...]]:
    """The caller's prompt format, else the knowledge base's, else the model's; and notes on it.

    Raises TokenizerError where the caller names one with markers that the model's tokenizer cuts
    into pieces. A recorded one is used all the same, as its chunks are stored in it.
    """
    if given is not None:
        chosen = template_named(given) if isinstance(given, str) else given
        if model.tokenizer is not None:
            chosen.check_markers(model.tokenizer)
        return chosen, ()
    chosen = kb.template if kb else model.prompt_format(method.template)
    wrong = None if model.tokenizer is None else chosen.split_marker(model.tokenizer)
    if wrong is None:
        return chosen, ()
    of = "knowledge base" if kb else "model"
    return chosen, (
        f"{wrong}; the {of} was made with it, so it is used all the same: a new knowledge base "
        "with another --template spares these tokens",
    )


def chosen_primer(kb: KnowledgeBase | None, method: Method) -> Primer | None:
    """What a method's chunks are encoded behind; None where they see no primer.

    Raises RequestError for another one than that of the knowledge base, or than the method reads,
    ConfigError for one that there is not.
    """
    if not method.sees_primer:
        return None
    if method.wraps and kb is not None:
        raise RequestError(
            f"method {method.name!r}: a knowledge base keeps no packets; ask over documents= alone"
        )
    known = None if kb is None else kb.primer
    named = None if method.primer is None else primer_named(method.primer)
    if known is not None and named is not None and not named.same(known):
        raise RequestError(
            f"method {method.name!r}: primer={method.primer!r}, and the knowledge base holds "
            f"chunks behind the primer {known.name!r}; leave it out"
        )
    primer = known or named or default_primer()
    if primer.wraps != method.wraps:
        raise RequestError(
            f"method {method.name!r}: {primer.name!r} is {'' if primer.wraps else 'not '}packets; "
            "name in primer= a file that `jaxrag train primer` wrote with --form "
            f"{'packets' if method.wraps else 'primer'}"
        )
    return primer


def gate_subject(method: Method, template: PromptTemplate) -> dict[str, Any]:
    """What a gate is about, JSON-able: how chunks are reused, at any ratio, and the prompt format.

    What becomes of misses and of leading parts is left out: there KV is exact, or behind more of
    what precedes it than a stored chunk's. So is the decode rule: the gate looks at prefill. And
    the primer, which is the knowledge base's.
    """
    values = method.settings
    for other in ("recompute_ratio", "misses", "prefix_cache", "decode", "primer"):
        del values[other]
    subject = {"method": values, "template": template.to_dict()}
    return dict(json.loads(json.dumps(subject)))


def gated(
    kb: KnowledgeBase, method: Method, template: PromptTemplate
) -> tuple[Method, tuple[str, ...]]:
    """The method at the ratio that the knowledge base's gate found for it, and a note that says so.

    The method itself and no note where there was no gate; a note as well where there was one for
    other settings of the method or another prompt format, which says nothing about these.
    """
    gate = kb.gates.get(method.name)
    if gate is None:
        return method, ()
    if gate["subject"] != gate_subject(method, template):
        return method, (
            f"the gate of {method.name!r} in this knowledge base was for other settings of the "
            f"method or another template, and is not used; run `jaxrag kb gate` again",
        )
    ratio, probes = gate["ratio"], gate["questions"]
    return method.with_ratio(ratio), (
        f"recompute_ratio {ratio:g}, as the knowledge base's gate found for {method.name} on "
        f"{probes} questions",
    )


def default_method(model: Model, kb: KnowledgeBase | None) -> Method:
    """The method of a question that names none.

    Of a model that nothing says was trained to read chunks apart, one for such models, by the KV
    that the knowledge base keeps, so that nothing is encoded anew unasked; plain reuse where that
    is only KV of chunks alone, and where it passed the gate of that.
    """
    plain = METHODS["turborag"]
    if kb is None:
        return default_choice(model.config, model.reading).method
    if plain.encoder in kb.encoders and not untuned(model, kb, plain, kb.template):
        return plain
    suited = suiting(kb, model)
    return next((METHODS[name] for name in _FOR_STOCK if name in suited), plain)


def check_backend(model: Model, method: Method) -> None:
    """RequestError for what the engine of a model does not do, where that is not ours."""
    if model.backend is None:
        return
    engine = model.backend.called
    if method.prefix_cache:
        raise RequestError(f"{engine} keeps no leading parts of prompts; leave prefix_cache out")
    preset = METHODS.get(method.name)
    if method.decode.sparse and (preset is None or preset.decode != method.decode):
        raise RequestError(
            f"decode rule {method.decode.name!r}: {engine} attends to all of a prompt; leave "
            "decode out"
        )
    if not method.as_stored:
        known = ", ".join(name for name, preset in METHODS.items() if preset.as_stored)
        raise RequestError(
            f"method {method.name!r}: {engine} computes nothing again and attends to all of a "
            f"prompt; choose one of {known}"
        )


def for_no_chunks(method: Method, ask: Ask) -> Method:
    """A default method where a prompt has no chunks: none is chosen by the question, turns stay."""
    if ask.method is not None or len(ask.blocks):
        return method
    changes = {name: getattr(method, name) for name in ("misses", "prefix_cache", "decode")}
    return dataclasses.replace(METHODS["turborag"], **changes)


def untuned(
    model: Model, kb: KnowledgeBase | None, method: Method, template: PromptTemplate
) -> tuple[str, ...]:
    """A note where nothing speaks for reading stored chunks as they are: no training, no gate.

    Also where parts are computed again, if the family needs a BOS token that chunks alone lack.
    """
    bare = method.lacks_bos(model.config)
    if method.encoder is None or (method.recomputes and not bare):
        return ()
    if method.positions in model.reading.block_positions:
        return ()
    gate = None if kb is None else kb.gates.get(method.name)
    if gate is not None and gate["subject"] == gate_subject(method, template) and not gate["ratio"]:
        return ()
    if method.sees_primer:
        return ()
    best = default_choice(model.config, model.reading)
    return (
        f"nothing says that this model was trained to read chunks apart, as {method.name} does"
        f"{', and without the BOS token that its family needs before them' if bare else ''}; "
        f"better: --encoder {' --encoder '.join(best.encoders)}, then --method {best.method.name}",
    )


def placed(model: Model, method: Method) -> Model:
    """The model with K and V where the method's decode rule is meant to have them.

    The model itself where they are there already, or where whoever loaded it put them elsewhere
    than on the device. Raises RequestError or ConfigError where its kernels, its mesh or the
    method's selector do not allow that.
    """
    placement = method.decode.placement
    if not model.placement.on_device or placement.on_device:
        return model
    method.check_placement(model.config, placement)
    return model.placed(placement)


def unplaced(model: Model, method: Method) -> tuple[str, ...]:
    """A note where a method that is there to free device memory frees none of it."""
    placement = method.decode.placement
    try:
        if placed(model, method) is model:
            return ()
    except (RequestError, ConfigError) as error:
        return (f"{method.name} frees no device memory, as {placement} is refused: {error}",)
    return (
        f"{method.name} frees no device memory, as the model was loaded with K and V on the "
        f"device: load_model(..., {placement}) frees it",
    )


def suiting(kb: KnowledgeBase, model: Model) -> tuple[str, ...]:
    """Presets that answer from what the knowledge base keeps, full attention first.

    Of presets that only their templates set apart, the one of the knowledge base's template. Those
    that are about how answers attend, and reuse nothing, are left out; so are composite positions
    for weights that were not trained to read them.
    """
    names: dict[Method, str] = {}
    for name, method in METHODS.items():
        needed = {method.encoder, method.first_encoder} - {None}
        composite = method.positions == "composite"
        if (method.encoder is None and name != "full_attention") or not needed <= set(kb.encoders):
            continue
        if composite and "composite" not in model.reading.block_positions:
            continue
        with contextlib.suppress(RequestError, ConfigError):
            check_backend(model, method)
            method.check(model.config)
            same = dataclasses.replace(method, name="", template="")
            if same not in names or method.template == kb.template.name:
                names[same] = name
    return tuple(names.values())


def suited(kb: KnowledgeBase) -> tuple[str, ...]:
    """Of these presets, those that recompute, were trained for, or passed a gate."""
    model = kb.model
    if model is None:
        return ()
    suited = suiting(kb, model)
    return tuple(name for name in suited if not untuned(model, kb, METHODS[name], kb.template))


def renamed(method: Method, template: PromptTemplate) -> tuple[str, ...]:
    """A note where the prompt format makes a preset the same as another one.

    ``turborag`` and ``block_attention`` differ in their templates only.
    """
    if method.template == template.name:
        return ()
    same = [
        other
        for other in METHODS.values()
        if dataclasses.replace(other, name=method.name, template=method.template) == method
    ]
    if method not in same:
        return ()
    named = [other for other in same if other.template == template.name]
    other = (named or same)[0]
    if other == method:
        return ()
    return (
        f"{method.name} with the template {template.name!r} is the same as {other.name}: only the "
        f"template sets them apart; pass --template {method.template} for its own",
    )


def explained(
    kb: KnowledgeBase,
    method: Method,
    template: PromptTemplate,
    prompt: Prompt,
    reuse: Sequence[PartReuse],
) -> tuple[list[PartReuse], list[str]]:
    """Why chunks of a knowledge base were not found that could have been: in ``reuse``, and notes.

    They lie there under another template, or not under the method's encoders, or no more.
    """
    missed = [row for row in reuse if row.part != "prefix" and row.how in ("encoded", "in place")]
    if not missed or method.encoder is None:
        return list(reuse), []
    encoders = dict.fromkeys(filter(None, (method.encoder, method.first_encoder)))
    otherwise = stored_otherwise(kb, method, template)
    places = iter(prompt.places)

    def with_reason(row: PartReuse) -> PartReuse:
        place = next(places) if row.part.startswith("chunk") else None
        if row not in missed or place is None:
            return row
        why = f"; stored under the template {kb.template.name!r}, asked under {template.name!r}"
        if not otherwise:
            why = _since_ingest(kb, method.encoder_of(place)) if row.why else ""
        return dataclasses.replace(row, why=row.why + why)

    rows = [with_reason(row) for row in reuse]
    lacking = [name for name in encoders if name not in kb.encoders]
    if otherwise or not lacking:
        return rows, []
    flags = " ".join(f"--encoder {name}" for name in lacking)
    return rows, [
        f"{method.name} reads chunks encoded as {' and '.join(encoders)}, the knowledge base keeps "
        f"{', '.join(kb.encoders)}: {len(missed)} chunks of {sum(row.tokens for row in missed)} "
        f"tokens were encoded for this answer; `jaxrag ingest PATH... --kb {kb.path} {flags}` does "
        "it once, before questions"
    ]


def _since_ingest(kb: KnowledgeBase, encoder: str) -> str:
    if encoder not in kb.encoders:
        return f"; the knowledge base keeps {', '.join(kb.encoders)}, not {encoder}"
    moved = ", or its neighbours are others now" if encoder.startswith("neighbours") else ""
    return f"; it was there once: evicted or removed{moved}"


def stored_otherwise(kb: KnowledgeBase, method: Method, template: PromptTemplate) -> bool:
    """Does the template make other chunks, or another prefix that they see, than what is stored?"""
    if template.chunk != kb.template.chunk:
        return True
    encoders = filter(None, (method.encoder, method.first_encoder))
    if not any(encoder_named(name).sees_prefix for name in encoders):
        return False
    return (template.prefix, template.chat) != (kb.template.prefix, kb.template.chat)
