"""The routes of files, vector stores, embeddings and prefetch."""

from starlette.routing import Route

from jaxrag.server.documents import files, vector_stores
from jaxrag.server.documents.embeddings import create_embeddings
from jaxrag.server.documents.prefetch import prefetch

_STORE = "/v1/vector_stores/{store}"
_BATCH = f"{_STORE}/file_batches/{{batch}}"

ROUTES = [
    Route("/v1/files", files.list_files),
    Route("/v1/files", files.create_file, methods=["POST"]),
    Route("/v1/files/{file}", files.get_file),
    Route("/v1/files/{file}", files.delete_file, methods=["DELETE"]),
    Route("/v1/files/{file}/content", files.file_content),
    Route("/v1/vector_stores", vector_stores.list_stores),
    Route("/v1/vector_stores", vector_stores.create_store, methods=["POST"]),
    Route(_STORE, vector_stores.get_store),
    Route(_STORE, vector_stores.change_store, methods=["POST"]),
    Route(_STORE, vector_stores.delete_store, methods=["DELETE"]),
    Route(f"{_STORE}/search", vector_stores.search_store, methods=["POST"]),
    Route(f"{_STORE}/files", vector_stores.list_members),
    Route(f"{_STORE}/files", vector_stores.add_member, methods=["POST"]),
    Route(f"{_STORE}/files/{{file:path}}/content", vector_stores.member_content),
    Route(f"{_STORE}/files/{{file:path}}", vector_stores.get_member),
    Route(f"{_STORE}/files/{{file:path}}", vector_stores.change_member, methods=["POST"]),
    Route(f"{_STORE}/files/{{file:path}}", vector_stores.delete_member, methods=["DELETE"]),
    Route(f"{_STORE}/file_batches", vector_stores.create_batch, methods=["POST"]),
    Route(_BATCH, vector_stores.get_batch),
    Route(f"{_BATCH}/cancel", vector_stores.cancel_batch, methods=["POST"]),
    Route(f"{_BATCH}/files", vector_stores.list_batch),
    Route("/v1/embeddings", create_embeddings, methods=["POST"]),
    Route("/v1/prefetch", prefetch, methods=["POST"]),
]
