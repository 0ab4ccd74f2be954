"""The host's half of attention: what is outside the static pattern, over K and V in host memory."""

from jaxrag.reuse.decode.far.layer import FarAnswer, FarLayer, HostLayer, HostPrompt, HostTask

__all__ = ["FarAnswer", "FarLayer", "HostLayer", "HostPrompt", "HostTask"]
