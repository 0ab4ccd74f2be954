"""Objects that commands work with, from their arguments: secret, filter, method, model, base."""

import atexit
import contextlib
import dataclasses
import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrag.base.config import ModelOptions
from jaxrag.base.errors import ConfigError, KnowledgeBaseError, RequestError
from jaxrag.cli.command import Args, from_fields
from jaxrag.cli.options import SECRET_VARIABLE
from jaxrag.cli.output import note
from jaxrag.cli.waiting import loading, tell_programs
from jaxrag.engine.sampling_params import SamplingParams
from jaxrag.serve.ask import Ask

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxrag.library.knowledge_base import KnowledgeBase
    from jaxrag.models.model import Model
    from jaxrag.reuse.methods import Method
    from jaxrag.server.settings import ServerSettings


@contextlib.contextmanager
def few_collections() -> Iterator[None]:
    """Look for garbage seldom, in a process that ends soon, and not once more at its end.

    Importing and tracing make a million objects that live as long as the process: to go over them
    takes a tenth of a second.
    """
    usual = gc.get_threshold()
    gc.set_threshold(2_000_000, 50, 50)
    atexit.register(gc.freeze)
    try:
        yield
    finally:
        gc.freeze()  # what is young becomes old: restored, the threshold would go over all of it
        gc.unfreeze()
        gc.set_threshold(*usual)


def secret_of(given: str | None) -> bytes | None:
    """The secret of --secret-file, else of the file in the environment; None where none is named.

    Raises StoreError for a file that holds none.
    """
    from jaxrag.kv.store.seal import read_secret

    path = given or os.environ.get(SECRET_VARIABLE)
    return None if not path else read_secret(path)


def where_of(args: Args) -> dict[str, Any] | None:
    """The filter of --where; RequestError when it is not JSON of an object."""
    if args.where is None:
        return None
    try:
        where = json.loads(args.where)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"--where {args.where[:200]!r} is not JSON ({error}); write it as '{{\"year\": 2020}}'"
        ) from None
    if not isinstance(where, dict):
        raise RequestError(
            f'--where {args.where[:200]!r}: expected an object such as {{"year": 2020}}'
        )
    return where


def asked_of(args: Args) -> Ask:
    """What the arguments of ``add_generation`` say."""
    sampling = from_fields(SamplingParams, args)
    return from_fields(Ask, args, where=where_of(args), sampling=sampling)


def method_of(args: Args) -> "Method":
    """The method of --method, --recompute-ratio and --decode, as far as it is known unopened."""
    from jaxrag.reuse.decode import rule_from
    from jaxrag.reuse.methods import method_named

    method = method_named(args.method or "turborag")  # placed where any default is
    if args.method and args.recompute_ratio is not None:
        method = method.with_ratio(args.recompute_ratio)
    if args.decode is not None:
        method = dataclasses.replace(method, decode=rule_from(args.decode, "--decode"))
    return method


def load(path: str, options: ModelOptions, method: "Method | None" = None) -> "Model":
    """A model as the options beside --model say.

    Where these leave it open, K and V are where the method is meant to have them, if the model can
    have them there; ``serve.compatibility.unplaced`` says so in every answer if it cannot.
    """
    from jaxrag.models.model import load_model
    from jaxrag.serve.compatibility import placed

    tell_programs()
    with loading(path):
        model = load_model(
            path,
            mesh=mesh_of(options.mesh),
            dtype=options.dtype,
            cache_tokens=options.cache_tokens,
            value_layers=options.value_layers,
            max_host_bytes=options.max_host_bytes,
            kernels=options.kernels,
            kv=options.kv or "device",
            engine=options.engine or "jax",
        ).decoding_with(options.decode_weights)
    if options.dtype is None and model.config.dtype == "bfloat16":
        tell_slow_dtype()
    if method is None or options.kv is not None:
        return model
    with contextlib.suppress(ConfigError, RequestError):
        model = placed(model, method)
    return model


def tell_slow_dtype() -> None:
    """A note where products of bfloat16 are slower here than those of float32."""
    import jax

    from jaxrag.models.compiled import multiplies_bfloat16

    if jax.default_backend() == "cpu" and not multiplies_bfloat16():
        note(
            "this processor has no instructions for bfloat16: --dtype float32 is about twice as "
            "fast, and takes twice the memory"
        )


def mesh_of(text: str | None) -> "Mesh | None":
    """The mesh of --mesh; ConfigError for what is none, or needs more devices than there are."""
    if text is None:
        return None
    from jaxrag.base.sharding import make_mesh

    sizes = text.split(",")
    if len(sizes) != 3 or not all(size.isdigit() for size in sizes):
        raise ConfigError(f"--mesh {text!r}: expected three integers such as 1,1,8")
    data, fsdp, tensor = map(int, sizes)
    return make_mesh(data, fsdp, tensor)


def open_kb(args: Args, method: "Method | None" = None) -> "KnowledgeBase":
    """The knowledge base of --kb with the model it remembers, or that of --model, as ``load``."""
    from jaxrag.library.knowledge_base import KnowledgeBase

    model = model_of_kb(args, method)
    return KnowledgeBase.open(args.kb, model=model, secret=secret_of(args.secret_file))


def model_of_kb(args: Args, method: "Method | None" = None) -> "Model":
    """The model that the knowledge base of --kb remembers, or that of --model, as ``load``.

    The knowledge base is opened without a model first, so that what is wrong with it is said before
    weights are read.
    """
    from jaxrag.library.knowledge_base import KnowledgeBase

    with KnowledgeBase.open(args.kb, secret=secret_of(args.secret_file)) as remembered:
        path = args.model or remembered.model_path
        given = from_fields(ModelOptions, args)
        options = as_remembered(given, remembered)
    if path is None:
        raise KnowledgeBaseError(f"{args.kb} does not remember a model directory; pass --model DIR")
    if args.model is None and not Path(path).exists():
        raise KnowledgeBaseError(
            f"{args.kb} was made with the model in {path}, which is not there any more; pass "
            "--model DIR to say where it is now"
        )
    return load(path, options, method)


def as_remembered[Options: ModelOptions](given: Options, kb: "KnowledgeBase") -> Options:
    """With the engine and the dtype of a knowledge base, where none is named."""
    engine = given.engine or kb.engine
    dtype = given.dtype or (kb.store.layout.dtype if engine.startswith("jax") else None)
    return dataclasses.replace(given, dtype=dtype, engine=engine)


def model_of(settings: "ServerSettings") -> "Model":
    """The model of the settings, or that of the first knowledge base."""
    from jaxrag.library.knowledge_base import KnowledgeBase
    from jaxrag.reuse.methods import method_named

    method = method_named(settings.method or "turborag")  # placed where any default is
    given = settings.model
    path, options = given.path, given
    for folder in list(settings.knowledge_bases.values())[:1]:
        with KnowledgeBase.open(folder, secret=secret_of(settings.secret_file)) as remembered:
            path, options = path or remembered.model_path, as_remembered(given, remembered)
        if given.path is None and (path is None or not Path(path).exists()):
            raise KnowledgeBaseError(
                f"{folder} was made with the model in {path}, which is not there; pass --model DIR"
            )
    if path is None:
        raise ConfigError("nothing to serve: pass --kb DIR, or --model DIR")
    return load(path, options, method)


def open_bases(settings: "ServerSettings", model: "Model") -> "dict[str, KnowledgeBase]":
    """The knowledge bases of the settings, by name."""
    from jaxrag.library.knowledge_base import KnowledgeBase

    opened: dict[str, KnowledgeBase] = {}
    secret = secret_of(settings.secret_file)
    try:
        for name, folder in settings.knowledge_bases.items():
            if not Path(folder).is_dir():
                raise KnowledgeBaseError(
                    f"{folder} is no folder; make it with `jaxrag ingest PATH... --kb {folder}`"
                )
            opened[name] = KnowledgeBase.open(
                folder, model=model, secret=secret, tier=settings.tier
            )
    except BaseException:
        for base in opened.values():
            base.close()
        raise
    return opened
