"""A replica of several processes: Ray actors in one placement group that hold one model.

The first is the engine that Ray Serve runs; it starts the others, and they end with it.
"""

import argparse
import dataclasses
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrag.cli.replicas import ReplicaOptions
    from jaxrag.server.settings import ServerSettings


class RayRank:
    """Any process of a replica but the first: makes the turns of its engine, until that ends."""

    def follow(self, settings: "ServerSettings", coordinator: str, count: int, rank: int) -> None:
        """Follow as process ``rank`` of ``count``.

        Raises what cannot be opened; a process whose leader is lost ends at once.
        """
        from jaxrag.cli.opening import model_of, open_bases
        from jaxrag.cli.processes import led
        from jaxrag.server.state.state import make_state

        settings = _joined(settings, coordinator, count, rank)
        model = model_of(settings)
        state = make_state(settings, model, open_bases(settings, model))
        with led(state, ("", 0)):
            pass


def lead_ranks(
    settings: "ServerSettings", options: "ReplicaOptions", ended: Callable[[str], None]
) -> tuple["ServerSettings", str, list[Any]]:
    """Start the other processes of a replica, and join them.

    ``ended`` is called on a thread with the reason, once one of them has ended.

    Returns the settings with the mesh of all, the host that they reach this one by, and the others,
    which end when nobody holds them any more. Raises RequestError where they do not come.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group, host = ray.util.get_current_placement_group(), ray.util.get_node_ip_address()
    count = options.replica_processes
    with socket.create_server((host, 0)) as free:
        coordinator = f"{host}:{free.getsockname()[1]}"
    followers = [
        ray.remote(RayRank)
        .options(
            num_cpus=options.replica_cpus,
            num_gpus=options.replica_gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=rank
            ),
        )
        .remote()
        for rank in range(1, count)
    ]
    runs = [
        follower.follow.remote(settings, coordinator, count, rank)
        for rank, follower in enumerate(followers, 1)
    ]

    def watch() -> None:
        [first], _ = ray.wait(runs, num_returns=1)
        try:
            ray.get(first)
            why = "it ended"
        except Exception as error:
            why = str(getattr(error, "cause", None) or type(error).__name__)
        ended(f"rank {1 + runs.index(first)}: {' '.join(why.split())}")

    threading.Thread(target=watch, name="jaxrag-ranks", daemon=True).start()
    return _joined(settings, coordinator, count, 0), host, followers


def _joined(
    settings: "ServerSettings", coordinator: str, count: int, rank: int
) -> "ServerSettings":
    from jaxrag.cli.options import join

    join(
        argparse.Namespace(
            distributed=True, coordinator=coordinator, processes=count, process_id=rank
        )
    )
    import jax

    mesh = settings.model.mesh or f"1,1,{jax.device_count()}"
    return dataclasses.replace(settings, model=dataclasses.replace(settings.model, mesh=mesh))
