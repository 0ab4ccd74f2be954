"""Bodies of the ops: what each is called, where it runs, and the refusal where it cannot.

Every op is one contract with several bodies, chosen by its argument ``impl`` and by nothing else:

    xla                jnp, any backend; the reference that the others are tested against
    pallas_triton      Pallas kernels for NVIDIA GPUs, compiled by XLA's Triton (Ampere and later)
    pallas_mosaic      Pallas kernels for Hopper, wgmma and TMA written out
    jax_triton         as pallas_triton, but what it reads from host memory is read by a kernel in
                       Triton's own language; needs the package jax-triton
    pallas_interpret   the kernels of pallas_triton run by Pallas' interpreter, any backend: slow,
                       for tests of their numbers; says nothing about whether a GPU takes them
"""

import functools
import importlib.resources
import importlib.util
import json
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax

Impl = Literal["xla", "pallas_triton", "pallas_mosaic", "jax_triton", "pallas_interpret"]
IMPLS: tuple[str, ...] = get_args(Impl)

# Which bodies an op has. An op that is not listed has the `xla` body alone and takes no ``impl``.
BODIES: dict[str, tuple[Impl, ...]] = {
    "sparse_attention": ("xla", "pallas_triton", "pallas_mosaic", "pallas_interpret"),
    "paged_decode_attention": ("xla", "pallas_triton", "pallas_interpret"),
    "segment_attention": ("xla", "pallas_triton", "pallas_interpret"),
    "topn_attention": ("xla", "pallas_triton", "jax_triton", "pallas_interpret"),
}

# Bodies that take what `xla` takes, and so may stand in for it. The others are asked for by name.
_DEFAULTS: tuple[Impl, ...] = ("xla", "pallas_triton")


class KernelError(ValueError):
    """A body that an op does not have or that cannot run on this backend; one line."""


def check_impl(op: str, impl: str) -> None:
    """KernelError unless ``op`` has a body ``impl`` that runs on the backend of this trace."""
    if impl not in BODIES[op]:
        raise KernelError(f"{op} has no body {impl!r}: choose one of {', '.join(BODIES[op])}")
    found = platform()
    if impl not in ("xla", "pallas_interpret") and found not in ("cuda", "gpu"):
        raise KernelError(
            f"{op}: the body {impl!r} needs an NVIDIA GPU and the backend is {found!r}; "
            "choose 'xla'"
        )
    if impl == "jax_triton":
        missing = [name for name in ("triton", "jax_triton") if not importlib.util.find_spec(name)]
        if missing:
            raise KernelError(
                f"{op}: the body 'jax_triton' needs the module {missing[0]!r}, which is not "
                "installed; install jaxrag[cuda], or choose 'pallas_triton'"
            )


def default_impl(op: str, device_kind: str | None = None) -> Impl:
    """The body that was measured to be right and fastest on a device; "xla" where none was.

    Args:
      op: a key of BODIES.
      device_kind: as JAX calls it, such as "NVIDIA H200"; None: that of this trace.
    """
    kind = device_kind or described_device() or jax.devices()[0].device_kind
    return fastest(_measured().get(kind, {}).get(op, {}))


def fastest(bodies: Mapping[str, Mapping[str, Any]]) -> Impl:
    """The best of the bodies of one op, by the geometric mean over what all were timed on.

    Args:
      bodies: by name ``ok``, whether all its numbers were those of "xla", and ``seconds`` by
        scene, as ``benchmarks/gpu.py`` writes them.

    Returns "xla" unless another is right, was timed on every scene of "xla", and is faster.
    """
    reference = bodies.get("xla", {}).get("seconds", {})
    best: Impl = "xla"
    least = _mean(reference, reference)
    for name in _DEFAULTS:
        body = bodies.get(name, {})
        if name != "xla" and body.get("ok") and reference:
            mean = _mean(body["seconds"], reference)
            if mean < least:
                best, least = name, mean
    return best


def _mean(seconds: Mapping[str, float], scenes: Mapping[str, float]) -> float:
    """Geometric mean over these scenes; infinite where one is missing or there are none."""
    if not scenes or not set(scenes) <= set(seconds):
        return math.inf
    return math.exp(sum(math.log(seconds[scene]) for scene in scenes) / len(scenes))


@functools.cache
def _measured() -> dict[str, Any]:
    """What ``benchmarks/gpu.py --keep`` wrote: by device, op and body."""
    text = importlib.resources.files(__package__).joinpath("measured.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def platform() -> str:
    """What is compiled for: the abstract device of the mesh in use, else the default backend."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else str(device.platform)


def described_device() -> str | None:
    """The kind of the abstract device of the mesh in use; None where there is none."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return None if device is None else str(device.device_kind)
