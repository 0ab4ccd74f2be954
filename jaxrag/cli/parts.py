"""`--ray N`: one command over a Ray cluster, its work dealt into parts by Ray Data."""

import dataclasses
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxrag.base.errors import JaxragError, RequestError
from jaxrag.base.installed import installs
from jaxrag.base.options import option
from jaxrag.cli.command import Args, from_fields

if TYPE_CHECKING:
    from jaxrag.library.documents import Shard

_PARTS_PER_WORKER = 4  # so that a worker with long work does not keep the others waiting

Work = Callable[["Shard"], Any]  # what is done with a part; its report


@dataclasses.dataclass(frozen=True)
class RayOptions:
    """Of a run over a Ray cluster.

    Attributes:
      ray: workers; 0: this process does all.
      ray_parts: of the work; None: four a worker.
      ray_cpus: that Ray counts for each worker.
      ray_gpus: likewise.
      ray_address: of the cluster; None: one of this machine's, which ends with the run.
    """

    ray: int = option(0, "workers on a Ray cluster; 0: this process does all", "N")
    ray_parts: int | None = option(None, "of the work", "N", unset="4 a worker")
    ray_cpus: float = option(1.0, "CPUs of a worker", "N")
    ray_gpus: float = option(0.0, "GPUs of a worker", "N")
    ray_address: str | None = option(None, "of the cluster", "ADDRESS", unset="a local one")

    @property
    def parts(self) -> int:
        """Of the work. Raises RequestError where a worker would have none."""
        parts = self.ray_parts or _PARTS_PER_WORKER * self.ray
        if self.ray < 1 or parts < self.ray:
            raise RequestError(
                f"--ray {self.ray} --ray-parts {parts}: expected at least one worker, and a part "
                "for each"
            )
        return parts


class RayWorker:
    """Does one part after another, with what it loaded once."""

    def __init__(self, args: Args, make: Callable[..., Work], count: int) -> None:
        self._work, self._count = make(args), count

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """{"part": i} -> {"part": i, "report": ...} or, where it failed, {..., "error": why}."""
        from jaxrag.library.documents import Shard

        shard = Shard(int(row["part"]), self._count)
        try:
            return {"part": shard.index, "report": self._work(shard), "error": ""}
        except JaxragError as error:  # the same every time: not for Ray to try again
            return {"part": shard.index, "report": None, "error": str(error)}


def in_parts(args: Args, make: Callable[[Args], Work], name: str) -> list[Any]:
    """The reports of all parts, in their order, from the workers of a cluster.

    A part whose worker dies is begun again by another. On stderr stands how many are done.

    Args:
      args: the command's, with those of ``RayOptions``.
      make: loads what a worker needs; called in each. A function of a module.
      name: of the work.

    Raises:
      RequestError: Ray is not there, or a part failed: its own reason.
    """
    options = from_fields(RayOptions, args)
    parts = options.parts
    try:
        import ray
        import ray.data
    except ImportError:
        raise RequestError(f"ray is not installed; {installs('ray')} does it") from None
    from jaxrag.models.text.progress import progress_bar

    cpus = max(os.cpu_count() or 1, round(options.ray * options.ray_cpus))
    cluster: dict[str, Any] = {"address": options.ray_address}
    if options.ray_address is None:
        cluster = {"address": "local", "num_cpus": cpus, "include_dashboard": False}
    ray.init(log_to_driver=False, logging_level="ERROR", **cluster)
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False
        rows = [{"part": part} for part in range(parts)]
        # As blocks of the driver's: to repartition takes tasks, for which workers leave no CPU.
        done = ray.data.from_items(rows, override_num_blocks=parts).map(
            RayWorker,
            fn_constructor_args=(args, make, parts),
            compute=ray.data.ActorPoolStrategy(size=options.ray),
            num_cpus=options.ray_cpus,
            num_gpus=options.ray_gpus,
        )
        found: dict[int, Any] = {}
        with progress_bar(parts, name, "part", shown=not args.json) as bar:
            for row in done.iter_rows():
                if row["report"] is None:
                    raise RequestError(f"part {row['part']} of {parts}: {row['error']}")
                found[int(row["part"])] = row["report"]
                bar.update()
    finally:
        ray.shutdown()
    return [found[part] for part in range(parts)]
