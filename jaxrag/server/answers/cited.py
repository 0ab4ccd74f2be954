"""Citations in the words of OpenAI's interfaces."""

from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

from jaxrag.serve.answers import Result
from jaxrag.serve.citing import Citation
from jaxrag.serve.conversation import Source
from jaxrag.server.attributes import file_id_of, is_upload


def filename(source: Source) -> str:
    """The name of the file that a passage is from; of none, what its document is called."""
    return PurePath(source.file).name if source.file else source.document_id


def of_chat(result: Result) -> list[dict[str, Any]]:
    """``annotations`` of a chat's message, the kind that its clients know.

    ``url`` is where the file is read, of an upload; else the number of the passage in ``sources``.
    """
    return [
        {
            "type": "url_citation",
            "url_citation": {
                "start_index": citation.start,
                "end_index": citation.end,
                "title": filename(source),
                "url": _url(source),
            },
        }
        for citation, source in _cited(result)
    ]


def of_response(result: Result, measured: bool) -> list[dict[str, Any]]:
    """``annotations`` of a response's text: what each part is from, if that was ``measured``.

    Else the files that the model was given passages of, the best first, each once. ``index`` is the
    place of the file among these.
    """
    best = sorted(result.sources, key=lambda hit: hit.number)
    files = list(dict.fromkeys(file_id_of(hit.document_id) for hit in best))
    if not measured:
        firsts = {file_id_of(hit.document_id): hit for hit in reversed(best)}
        return [_file_citation(firsts[file], files) for file in files]
    return [
        {**_file_citation(source, files), "start_index": citation.start, "end_index": citation.end}
        for citation, source in _cited(result)
    ]


def _cited(result: Result) -> Iterator[tuple[Citation, Source]]:
    sources = {source.number: source for source in result.sources}
    return ((citation, sources[citation.source]) for citation in result.citations)


def _file_citation(source: Source, files: Sequence[str]) -> dict[str, Any]:
    file_id = file_id_of(source.document_id)
    return {
        "type": "file_citation",
        "file_id": file_id,
        "filename": filename(source),
        "index": files.index(file_id),
    }


def _url(source: Source) -> str:
    if is_upload(source.document_id):
        return f"/v1/files/{file_id_of(source.document_id)}/content"
    return f"#source-{source.number}"
