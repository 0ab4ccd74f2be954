"""One program in several processes that hold one model: joining them, and ending all of them."""

import contextlib
import hashlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxrag.base.errors import ConfigError, JaxragError
from jaxrag.base.installed import __version__
from jaxrag.cli.command import Args
from jaxrag.cli.options import join
from jaxrag.models.text.printable import printable

if TYPE_CHECKING:
    from jaxrag.kv.store import KVStore
    from jaxrag.server.state.state import ServerState


@contextlib.contextmanager
def joined(args: Args) -> Iterator[bool]:
    """Join the other processes, if there are any; yields whether this is the first.

    Without --mesh the model lies over all devices, by heads.
    """
    if not join(args):
        yield True
        return
    import jax

    with _ending_all():
        if args.mesh is None:
            args.mesh = f"1,1,{jax.device_count()}"
        yield jax.process_index() == 0


@contextlib.contextmanager
def _ending_all() -> Iterator[None]:
    """Within, a process of several that run one program ends at once when it fails: exit code 1.

    It would wait at its end for the others, and they for its part of the next step. Without it
    jax.distributed ends them, within two minutes.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, JaxragError):
            print(f"jaxrag: error: {printable(str(error))}", file=sys.stderr)
        else:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


@contextlib.contextmanager
def led(state: "ServerState", address: tuple[str, int]) -> Iterator[None]:
    """Lead the other processes within; one that is led follows before, until the leader ends.

    Raises RankLost where another process died, and ConfigError where they are not alike.
    """
    import jax

    from jaxrag.engine.ranks import Leader, meet

    if state.settings.plain_store_bytes:
        raise ConfigError(
            f"--plain-store-bytes {state.settings.plain_store_bytes} with --distributed: what "
            "several processes keep of passages is in memory only; leave it out"
        )

    def lost(why: str) -> None:
        print(f"jaxrag: error: {printable(why)}", file=sys.stderr, flush=True)
        os._exit(1)

    state.tenants.share(state.model.exchange)
    stores: dict[str, KVStore] = {
        f"kb:{name}": base.store for name, base in state.knowledge_bases.items()
    }
    stores |= {f"tenant:{name}": state.memory.store(name) for name in state.tenants.names}
    about = {
        "version": f"{__version__} with jax {jax.__version__}",
        "weights": state.model.fingerprint,
        "engine": hashlib.sha256(repr(state.engine.settings).encode()).hexdigest()[:16],
        **{f"store {name}": store.fingerprint for name, store in stores.items()},
    }
    met = meet(state.model, address, about, stores, lost)
    if isinstance(met, Leader):
        state.engine.lead(met)
        yield
        if met.lost is not None:
            raise met.lost
        met.close()
        return
    for number in (signal.SIGTERM, signal.SIGINT):  # the leader drains, and says when it ends
        signal.signal(number, signal.SIG_IGN)
    try:
        state.engine.follow(met)
    except BaseException as error:
        met.fail(f"{type(error).__name__}: {error}")
        raise
    yield


def plan_address(plan: str | None, coordinator: str | None) -> tuple[str, int]:
    """Host and port of --plan; else the coordinator's host, or this machine's name, and port 0."""
    host, _, port = (plan or "").rpartition(":") if ":" in (plan or "") else (plan or "", "", "0")
    if not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--plan {plan}: expected HOST or HOST:PORT")
    host = host or (coordinator or "").rpartition(":")[0] or socket.gethostname()
    return host, int(port)
