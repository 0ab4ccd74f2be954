"""FAISS objects over arrays made here: key storages, and its graph walk over our links."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxrag.base.errors import RetrievalError
from jaxrag.base.types import HostArray
from jaxrag.reuse.attention_index.keys import Keys
from jaxrag.reuse.attention_index.spec import Hnsw, Ivf


def faiss_module() -> Any:
    """The package faiss. Raises RetrievalError when it is not installed."""
    try:
        import faiss
    except ImportError:
        raise RetrievalError(
            "attention indexes are searched with the package faiss-cpu; pip install faiss-cpu"
        ) from None
    return faiss


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """FAISS starts no threads of its own for calls of this thread; of others it may."""
    faiss = faiss_module()
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(threads)


def quantizer_type(storage: str) -> int:
    """FAISS's name for a storage of less than 32 bits."""
    kinds = faiss_module().ScalarQuantizer
    kind: int = {"float16": kinds.QT_fp16, "uint8": kinds.QT_8bit}[storage]
    return kind


def storage_of(keys: Keys, *, empty: bool = False) -> Any:
    """A FAISS storage that holds these very codes, searched exactly by inner product.

    ``empty`` leaves the codes out.
    """
    faiss = faiss_module()
    codes = keys.codes[:0] if empty else np.ascontiguousarray(keys.codes)
    if keys.storage == "float32":
        storage = faiss.IndexFlatIP(keys.dim)
    else:
        kind = quantizer_type(keys.storage)
        storage = faiss.IndexScalarQuantizer(keys.dim, kind, faiss.METRIC_INNER_PRODUCT)
    if keys.span is not None:
        faiss.copy_array_to_vector(np.ascontiguousarray(keys.span).ravel(), storage.sq.trained)
        storage.is_trained = True
    storage.add_sa_codes(codes.view(np.uint8))
    return storage


def keys_in(storage: Any, keys: Keys) -> Keys:
    """The keys as they lie in their storage, not copied; ``storage`` must outlive the result."""
    faiss = faiss_module()
    flat = faiss.rev_swig_ptr(storage.codes.data(), storage.codes.size())
    return Keys(flat.view(keys.codes.dtype).reshape(keys.codes.shape), keys.span)


def graph_over(storage: Any, links: HostArray, entry: int) -> Any:
    """FAISS's HNSW search, level 0 only, over given links [W, degree] int32 padded with -1.

    ``storage`` is used in place and may be shared; it must outlive the graph, and may hold more
    keys than the graph has.
    """
    faiss = faiss_module()
    count, degree = links.shape
    half = -(-degree // 2)
    graph = faiss.IndexHNSW(storage, half)
    hnsw = graph.hnsw
    if hnsw.nb_neighbors(0) != 2 * half:
        raise RetrievalError(
            f"faiss {faiss.__version__} keeps {hnsw.nb_neighbors(0)} links, expected {2 * half}; "
            "install the faiss-cpu that the constraints file names"
        )
    rows = np.full((count, 2 * half), -1, np.int32)
    rows[:, :degree] = links
    faiss.copy_array_to_vector(np.ones(count, np.int32), hnsw.levels)
    faiss.copy_array_to_vector((np.arange(count + 1) * 2 * half).astype(np.uint64), hnsw.offsets)
    faiss.copy_array_to_vector(rows.ravel(), hnsw.neighbors)
    hnsw.entry_point, hnsw.max_level = int(entry), 0
    graph.ntotal, graph.is_trained = count, True
    return graph


def build_ivf(keys: Keys, spec: Ivf) -> Any:
    """FAISS's inverted file over the keys; 4 sqrt(S) clusters unless the spec says how many."""
    faiss = faiss_module()
    vectors = keys.decode()
    clusters = min(spec.clusters or max(1, int(4 * len(keys) ** 0.5)), len(keys))
    quantizer = faiss.IndexFlatIP(keys.dim)
    if keys.storage == "float32":
        index = faiss.IndexIVFFlat(quantizer, keys.dim, clusters, faiss.METRIC_INNER_PRODUCT)
    else:
        index = faiss.IndexIVFScalarQuantizer(
            quantizer,
            keys.dim,
            clusters,
            quantizer_type(keys.storage),
            faiss.METRIC_INNER_PRODUCT,
            False,  # of residuals
        )
    index.cp.min_points_per_centroid = 1  # FAISS warns on stderr below 39
    index.train(vectors)
    index.add(vectors)
    return index


def build_hnsw(keys: Keys, spec: Hnsw) -> Any:
    """FAISS's own HNSW over the keys, by inner product."""
    faiss = faiss_module()
    vectors = keys.decode()
    if keys.storage == "float32":
        index = faiss.IndexHNSWFlat(keys.dim, spec.links, faiss.METRIC_INNER_PRODUCT)
    else:
        index = faiss.IndexHNSWSQ(
            keys.dim, quantizer_type(keys.storage), spec.links, faiss.METRIC_INNER_PRODUCT
        )
        index.train(vectors)
    index.hnsw.efConstruction = spec.ef_build
    index.add(vectors)
    return index


def vectors_of(index: Any) -> HostArray:
    """All keys that FAISS's inverted file or HNSW holds, [S, H] float32."""
    vectors: HostArray = index.reconstruct_n(0, index.ntotal)
    return vectors


def to_bytes(index: Any) -> HostArray:
    """A FAISS index as a uint8 array."""
    made: HostArray = faiss_module().serialize_index(index)
    return made


def from_bytes(data: HostArray) -> Any:
    """The index of ``to_bytes``. Raises RetrievalError when FAISS refuses the bytes."""
    try:
        return faiss_module().deserialize_index(data)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise RetrievalError(f"a saved FAISS index is damaged: {reason}; build it again") from error


def halves(rows: HostArray) -> HostArray:
    """float16 rows [..., H] as float32; several times as fast as numpy's conversion."""
    coder = faiss_module().ScalarQuantizer(rows.shape[-1], quantizer_type("float16"))
    flat = np.ascontiguousarray(rows).reshape(-1, rows.shape[-1])
    floats: HostArray = coder.decode(flat.view(np.uint8))
    return floats.reshape(rows.shape)
