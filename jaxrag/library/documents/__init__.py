"""Documents: what a knowledge base is made of, and the readers of files.

A ``Document`` that exists is good: its constructor refuses text that could not be chunked, stored
or found again. The readers turn a refusal into a ``BadDocument``, so that one bad file, line or row
never costs the others.
"""

from jaxrag.library.documents.document import BadDocument, Document, document_from_mapping, text_id
from jaxrag.library.documents.intake import DocumentSource, Intake, Shard
from jaxrag.library.documents.paths import DocumentFiles, read_paths

__all__ = [
    "BadDocument",
    "Document",
    "DocumentFiles",
    "DocumentSource",
    "Intake",
    "Shard",
    "document_from_mapping",
    "read_paths",
    "text_id",
]
