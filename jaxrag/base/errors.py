"""The errors a user can meet. Every message is one line: the value, what was expected, the fix."""

import contextlib
import os
from collections.abc import Iterator


class JaxragError(Exception):
    """Base of everything raised on bad input, bad files or an impossible request."""


class ConfigError(JaxragError):
    """A configuration value or key that is unknown, contradictory or out of range."""


class ModelError(JaxragError):
    """A model directory that is missing, unsupported, truncated or inconsistent."""


class TokenizerError(JaxragError):
    """A tokenizer that is missing, unreadable or does not belong to the model."""


class EmbedderError(JaxragError):
    """An embedder whose vectors have the wrong shape or are not finite numbers."""


class DocumentError(JaxragError):
    """A document that cannot be read: empty, binary, wrong encoding, malformed."""


class StoreError(JaxragError):
    """A chunk repository that cannot be opened, read or written as asked."""


class DamagedCatalogError(StoreError):
    """A catalog that does not hold what was written to it; it is refused until it is repaired."""


class ChunkMissing(StoreError):
    """No committed chunk under this key (or its bytes are gone)."""


class ChunkAbsent(ChunkMissing):
    """Nothing was ever committed under this key, or it was removed."""


class ChunkCorrupt(StoreError):
    """A chunk whose record or bytes do not match their digests; it is never served."""


class ChunkNotSealed(ChunkCorrupt):
    """A chunk that was not written with the store's secret; it is never served."""


class KnowledgeBaseError(JaxragError):
    """A knowledge base that does not fit the model, the prompt template or the request."""


class RequestError(JaxragError):
    """A question, method or option that cannot be served: unknown, too long, incompatible."""


class ContextExceeded(RequestError):
    """A prompt that, with its answer, is longer than the model's context or the pool."""


class Overloaded(JaxragError):
    """A queue that is full; the same request may be sent again later."""


class RetrievalError(JaxragError):
    """A vector index, retriever or re-ranker that is unknown, not installed or answers nonsense."""


class TrainError(JaxragError):
    """Training data, a run or a checkpoint of it that cannot be used as asked."""


class EngineError(JaxragError):
    """A request that the engine could not finish through no fault of its own making."""


class EngineUnavailable(EngineError):
    """An engine that is gone or not there yet, where another may serve the same request."""


class DeadlineExceeded(JaxragError):
    """A request whose time was over before its answer was complete."""


class Cancelled(JaxragError):
    """A request that was aborted before its answer was complete."""


@contextlib.contextmanager
def disk_errors(path: os.PathLike[str]) -> Iterator[None]:
    """Errors of the operating system at a file or folder leave as StoreError."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{path}: {error.strerror or error}; check the disk, its free space and your "
            "permissions"
        ) from error
