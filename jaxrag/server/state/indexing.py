"""Files become documents of a knowledge base, beside the questions that are answered.

A file is parsed and cut by a process of its own (``documents.parser``), its chunks are encoded
piece by piece in turns that the engine gives (``Engine.spare``), and it is "completed" once its KV
is durable and its documents are found. Until then the registry says that it is in progress, and a
server that starts takes it up again.
"""

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, wait

from jaxrag.base.errors import DocumentError, EngineError, JaxragError
from jaxrag.engine.engine import engine_of
from jaxrag.library.documents import BadDocument, Document
from jaxrag.library.documents.chunking import Chunk
from jaxrag.library.documents.files import ReadOptions
from jaxrag.library.documents.parser import ParseLimits, Parser
from jaxrag.library.knowledge_base import KnowledgeBase
from jaxrag.library.knowledge_base.reports import AddReport
from jaxrag.models.model import Model
from jaxrag.server.errors import Problem
from jaxrag.server.settings import ServerSettings
from jaxrag.server.state.quota import Quota
from jaxrag.server.state.registry import Member, Registry
from jaxrag.server.state.threads import FairThreads
from jaxrag.server.state.uploads import Uploads

_LOG = logging.getLogger("jaxrag.server")

_TRIES = 3  # of a piece, where the engine fails under it
_PARSE_BYTES = 16 << 30  # of address space, most of it never touched: JAX is in the process too
_SHOWN = 20  # of what was left out of a file

Open = Callable[[str, str], KnowledgeBase]  # of (tenant, name of the store)


@dataclasses.dataclass(eq=False)
class _Job:
    """A member that waits or is worked on."""

    member: Member
    wanted: bool = True


class Indexer:
    """Threads that bring files into knowledge bases: in turn by tenant, each in its order."""

    def __init__(
        self,
        registry: Registry,
        uploads: Uploads,
        quota: Quota,
        model: Model,
        open_base: Open,
        settings: ServerSettings,
    ) -> None:
        """Starts nothing yet.

        Args:
          registry: where members are.
          uploads: where their bytes are.
          quota: what tenants may store.
          model: of the knowledge bases, which all have its tokenizer; its engine encodes, when
            those that it serves let it.
          open_base: gives the knowledge base of a tenant's store.
          settings: of the server.
        """
        self._registry, self._uploads, self._quota = registry, uploads, quota
        self._model, self._open = model, open_base
        self._limits = ParseLimits(settings.parse_seconds, _PARSE_BYTES)
        self._threads = FairThreads(settings.index_threads, "jaxrag-index")
        self._parsers: list[Parser] = []  # those that no thread works with
        self._jobs: dict[_Job, Future[None]] = {}  # that are not done
        self._closed = False
        self._lock = threading.Lock()  # of these

    def submit(self, members: Sequence[Member]) -> None:
        """Take members in progress up."""
        with self._lock:
            for job in () if self._closed else map(_Job, members):
                run = functools.partial(self._run, job)
                self._jobs[job] = self._threads.submit(job.member.tenant, run)

    def drop(self, store: str, files: Collection[str] | None = None) -> None:
        """Do no more for members of a store, or for all; returns when nothing is done any more.

        What was found of it by then is not found any more.
        """
        with self._lock:
            running = []
            for job, future in list(self._jobs.items()):
                if job.member.store == store and (files is None or job.member.file in files):
                    job.wanted = False
                    if future.cancel():
                        del self._jobs[job]
                    else:
                        running.append(future)
        wait(running)

    def works_on(self, store: str) -> bool:
        """Whether members of a store wait or are worked on."""
        with self._lock:
            return any(job.member.store == store for job in self._jobs)

    def close(self) -> None:
        """Stop; what is in progress is taken up by the next server."""
        with self._lock:
            self._closed = True
        self._threads.shutdown(wait=True)
        for parser in self._parsers:
            parser.close()

    def _run(self, job: _Job) -> None:
        with self._lock:
            idle = self._parsers.pop() if self._parsers else None
        parser = idle or Parser(self._limits, self._model.text_tokenizer())
        try:
            self._index(job, parser)
        except Exception:
            _LOG.exception("a file of %s could not be indexed", job.member.store)
        finally:
            with self._lock:
                self._parsers.append(parser)
                del self._jobs[job]

    def _index(self, job: _Job, parser: Parser) -> None:
        """Bring one file in, and say how it ended."""
        member = job.member
        try:
            base = self._open(member.tenant, member.store)
        except JaxragError as error:
            self._fail(member, "server_error", error)
            return
        try:
            report = self._add(job, parser, base)
            if not job.wanted:  # since its last piece was handed to the engine
                raise InterruptedError
            if not report.documents:
                bad = report.skipped
                raise _Refused(bad[0].reason if bad else "holds no documents; leave the file out")
        except InterruptedError:
            if job.wanted:
                return  # the server ends
            self._undo(member, base)
        except DocumentError as error:
            self._undo(member, base)
            unknown = "file type" in str(error)
            self._fail(member, "unsupported_file" if unknown else "invalid_file", error)
        except JaxragError as error:
            self._undo(member, base)
            self._fail(member, "server_error", error)
        except Exception:
            _LOG.exception("file %s could not be indexed", member.file)
            self._undo(member, base)
            why = JaxragError("the server failed on this file; its log says why")
            self._fail(member, "server_error", why)
        else:
            counts = {
                "documents": report.documents,
                "chunks": report.chunks,
                "tokens": report.tokens,
                "left_out": [
                    *(f"{skip.source}: {skip.reason}" for skip in report.skipped[:_SHOWN]),
                    *(line.removeprefix(f"{member.file}: ") for line in report.left_out[:_SHOWN]),
                ],
            }
            self._registry.settle_member(member.number, "completed", counts=counts)

    def _add(self, job: _Job, parser: Parser, base: KnowledgeBase) -> AddReport:
        member = job.member
        file = self._registry.file(member.tenant, member.file)
        if file is None:
            raise _Refused("the file is gone; upload it again")
        path, name = self._uploads.path(file), file.filename
        cut: dict[str, tuple[Chunk, ...]] = {}

        def wanted() -> bool:
            return job.wanted and not self._closed

        def turn[Result](piece: Callable[[], Result]) -> Result:
            for left in reversed(range(_TRIES)):
                if not wanted():
                    raise InterruptedError
                self._check_quota(member.tenant)
                try:
                    return engine_of(self._model).spare(piece)
                except EngineError:  # of others: a piece can be encoded again
                    if not left:
                        raise
            raise AssertionError

        def documents() -> Iterator[Document | BadDocument]:
            for parsed in parser.parse(
                path, name, file.id, ReadOptions(), name, chunking=base.chunking, wanted=wanted
            ):
                if isinstance(parsed, BadDocument):
                    yield parsed
                    continue
                own = parsed.document.id
                own = own if own.startswith(file.id) else f"{file.id}/{own}"
                metadata = {**parsed.document.metadata, **member.attributes}
                cut.setdefault(own, parsed.chunks)  # an id that comes twice is refused
                yield dataclasses.replace(parsed.document, id=own, metadata=metadata)

        return base.add(documents(), cut=lambda it: cut.pop(it.id), turn=turn)

    def _check_quota(self, tenant: str) -> None:
        """Raises DocumentError where the tenant stores as much as it may."""
        try:
            self._quota.check(tenant)
        except Problem as problem:
            raise _Refused(problem.message) from None

    def _undo(self, member: Member, base: KnowledgeBase) -> None:
        """Nothing of the file is found any more."""
        try:
            base.remove(base.ids_beginning(member.file))
        except JaxragError:
            _LOG.exception("what was indexed of file %s could not be removed", member.file)

    def _fail(self, member: Member, code: str, error: Exception) -> None:
        text = self._uploads.without_folder(" ".join(str(error).split()))
        self._registry.settle_member(member.number, "failed", code=code, message=text)


class _Refused(DocumentError):
    """A file that gives no document."""
