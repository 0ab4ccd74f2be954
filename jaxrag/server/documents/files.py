"""/v1/files: uploads of a tenant."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse

from jaxrag.server.documents.lists import page
from jaxrag.server.documents.multipart import receive_file
from jaxrag.server.state.entry import entered
from jaxrag.server.state.registry import FileRow

_MOST_LISTED = 10_000


async def create_file(request: Request) -> JSONResponse:
    """Store a file; it is durable when this answers."""
    state, access = entered(request)
    made = await receive_file(request, lambda: state.library.begin(access))
    return JSONResponse(shown_file(made))


async def list_files(request: Request) -> JSONResponse:
    """The tenant's files, newest first."""
    state, access = entered(request)
    purpose = request.query_params.get("purpose")
    files = await asyncio.to_thread(state.library.files, access)
    chosen = [it for it in files if purpose in (None, it.purpose)]
    found = page(
        request, chosen, lambda it: it.id, shown_file, default=_MOST_LISTED, most=_MOST_LISTED
    )
    return JSONResponse(found)


async def get_file(request: Request) -> JSONResponse:
    """One of them."""
    state, access = entered(request)
    found = await asyncio.to_thread(state.library.file, access, request.path_params["file"])
    return JSONResponse(shown_file(found))


async def file_content(request: Request) -> FileResponse:
    """Its bytes, as they were uploaded."""
    state, access = entered(request)
    found = await asyncio.to_thread(state.library.file, access, request.path_params["file"])
    return FileResponse(
        state.library.uploads.path(found),
        media_type="application/octet-stream",
        filename=found.filename,
        headers={"x-content-type-options": "nosniff"},
    )


async def delete_file(request: Request) -> JSONResponse:
    """Remove a file, and its documents from every vector store."""
    state, access = entered(request)
    file_id = request.path_params["file"]
    await asyncio.to_thread(state.library.remove_file, access, file_id)
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})


def shown_file(file: FileRow) -> dict[str, Any]:
    """A file as clients know it."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }
