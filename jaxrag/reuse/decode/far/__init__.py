"""The host's half of attention: what is outside the static pattern, over K and V in host memory."""

from jaxrag.reuse.decode.far.blocks import Blocks
from jaxrag.reuse.decode.far.kept import Chosen
from jaxrag.reuse.decode.far.layer import Answer, FarLayer, HostLayer, HostPrompt, Task
from jaxrag.reuse.decode.far.pages import Pages
from jaxrag.reuse.decode.far.scan import Best, Everything

__all__ = [
    "Answer",
    "Best",
    "Blocks",
    "Chosen",
    "Everything",
    "FarLayer",
    "HostLayer",
    "HostPrompt",
    "Pages",
    "Task",
]
