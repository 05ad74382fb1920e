"""Joining the ranks that were started together, by torchrun or by --nproc: who this process is among them, and how they talk."""

import ctypes
import hashlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

from eyeline.core.errors import EXPECTED, ElsewhereFailed, RankLost, Refused
from eyeline.core.world import ALONE, World
from eyeline.parallel.calls import record_calls

STORE = "EYELINE_STORE"  # the file by which the ranks that --nproc starts find one another: they need no port
LAUNCHER = "EYELINE_LAUNCHER"  # the process that started them: they end with it
LONG = timedelta(days=7)  # for a rank that indexes data, say, while others wait; that it has ended is seen at once


def started() -> World:
    """The place that the launcher gave this process, in torchrun's environment variables; it cannot talk to others yet. Raises
    Refused for half of one."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    given = {name: os.environ[name] for name in names if os.environ.get(name)}
    if given.get("WORLD_SIZE", "1") == "1" and given.get("RANK", "0") == "0":
        return ALONE
    how = f"Start the ranks with torchrun or --nproc N, or unset {', '.join(given)} for a single process"
    try:
        places = {name: int(text) for name, text in given.items()}
    except ValueError as error:
        raise Refused(f"{', '.join(f'{name}={text}' for name, text in given.items())}: wanted whole numbers ({error}). {how}") from error
    if missing := [name for name in names[:2] if name not in places]:
        raise Refused(f"{', '.join(given)} is set and {', '.join(missing)} is not. {how}")
    rank, size = places["RANK"], places["WORLD_SIZE"]
    if size < 1 or not 0 <= rank < size:
        raise Refused(f"RANK={rank} and WORLD_SIZE={size}: wanted a rank from 0 to WORLD_SIZE - 1. {how}")
    if STORE not in os.environ and (missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]):
        raise Refused(f"RANK and WORLD_SIZE are set and {', '.join(missing)} is not: the ranks cannot find one another. {how}")
    if not os.environ.get("MASTER_PORT", "0").isdigit():
        raise Refused(f"MASTER_PORT={os.environ['MASTER_PORT']}: wanted a number. {how}")
    return World(rank, size, places.get("LOCAL_RANK", rank), places.get("LOCAL_WORLD_SIZE", size))


def checked() -> bool:
    """Return whether whatever started this process has examined the recipe for all ranks."""
    return LAUNCHER in os.environ


@contextmanager
def joined(world: World, device: str, timeout_s: float) -> Iterator[World]:
    """The world once every rank has arrived, able to talk: over gloo, whatever the device computes with.

    An expected error inside is raised on the rank that has it, and as ElsewhereFailed on others that have the same: it is printed once.
    Raises RankLost where a rank has ended, or does not answer within `timeout_s`.
    """
    if world.size == 1:
        yield world
        return
    import torch.distributed as dist

    _end_with_launcher()
    record_calls()
    limit = timedelta(seconds=timeout_s)
    with lost_ranks(world):
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=limit, **_meeting(world, limit))
    try:
        with _said_once(), lost_ranks(world):
            soon, late = (dist.new_group(backend="gloo", timeout=wait) for wait in (limit, LONG))
            talking = _talking(world, soon, late)
            yield replace(talking, hosts=tuple(talking.gather_patiently(socket.gethostname())))
    finally:
        dist.destroy_process_group()


def _meeting(world: World, limit: timedelta) -> dict[str, Any]:
    """Where the ranks find one another. torchrun keeps one store however often it starts them again: each attempt has keys of its own, or
    its ranks would find the addresses of those that are gone."""
    import torch.distributed as dist

    place: dict[str, Any] = {"rank": world.rank, "world_size": world.size}
    if store := os.environ.get(STORE):
        return {"init_method": f"file://{store}", **place}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        tcp, prefixed = dist.TCPStore, dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage]
        kept = tcp(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world.size, False, limit)
        return {"store": prefixed(f"eyeline {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", kept), **place}
    return {}


def _end_with_launcher() -> None:
    """Ask the kernel to send SIGTERM when the process that started the ranks ends, however it ends."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != int(launcher):  # it ended before
        signal.raise_signal(signal.SIGTERM)


class Sharing(NamedTuple):
    """How ranks that share packs see the others."""

    group: World  # those with the same packs: the first of them fetches for all
    across: World  # those with other packs, one of each group


SHARES_NOTHING = Sharing(ALONE, ALONE)


def sharing(world: World, count: int, timeout_s: float, slices: int = 1) -> Sharing:
    """Groups of ranks that share packs, for kinds of parallelism that cut a pack or the model: `count` next to one another, and those at
    the same places in each of `slices` equal parts of the world. Every rank of the world calls this at once."""
    if count * slices == 1 or world.size == 1:
        return Sharing(ALONE, world)
    import torch.distributed as dist

    assert world.size % (count * slices) == 0, f"{world.size} ranks are not {slices} times groups of {count}"
    limit, part = timedelta(seconds=timeout_s), world.size // slices

    def among(all_members: Iterable[Sequence[int]]) -> World:
        own = ALONE
        for members in all_members:  # a rank takes part in making groups that it is not in, too
            soon, late = (dist.new_group(list(members), timeout=wait, backend="gloo") for wait in (limit, LONG))
            if world.rank in members and len(members) > 1:
                own = _talking(replace(world, rank=members.index(world.rank), size=len(members)), soon, late)
        return own

    return Sharing(
        among([s * part + start + n for s in range(slices) for n in range(count)] for start in range(0, part, count)),
        among(range(s * part + n, (s + 1) * part, count) for s in range(slices) for n in range(count)),
    )


def _talking(world: World, soon: Any, late: Any) -> World:
    """A world that can talk: over `soon`, which has a time limit, and over `late`."""
    import torch.distributed as dist

    def gather(value: Any, group: Any) -> list[Any]:
        begin, values = time.perf_counter(), [None] * world.size
        dist.all_gather_object(values, value, group=group)
        world.waits[0] += time.perf_counter() - begin
        return values

    def share(value: Any) -> Any:
        begin, values = time.perf_counter(), [value if world.first else None]
        dist.broadcast_object_list(values, group_src=0, group=late)
        world.waits[0] += time.perf_counter() - begin
        return values[0]

    return replace(world, gather=lambda value: gather(value, soon), gather_patiently=lambda value: gather(value, late), share=share)


LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "timed out", "timeout", "nccl")  # as torch says it


@contextmanager
def lost_ranks(world: World, explain: Callable[[], str] = lambda: "") -> Iterator[None]:
    """RankLost where a call failed because another rank did not answer it; `explain` says more, if it can."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).lower()
        how = next((words for words in LOST if words.lower() in text), None)
        if how is None:
            raise
        raise RankLost(
            f"rank {world.rank} lost another rank, which ended or did not answer in time ({how}). {explain() or 'Its output may say why'}. "
            "The same command resumes from the last checkpoint, if there is one"
        ) from error


@contextmanager
def _said_once() -> Iterator[None]:
    """ElsewhereFailed in place of an expected error that another rank has already raised. One loss is enough, too."""
    from torch.distributed import distributed_c10d

    try:
        yield
    except EXPECTED as error:
        text = "a rank is lost" if isinstance(error, RankLost) else str(error)
        name = f"said {hashlib.sha256(text.encode()).hexdigest()}"
        try:
            first = distributed_c10d._get_default_store().add(name, 1) == 1
        except RuntimeError:  # the process that kept the store has ended
            first = True
        if first:
            raise
        raise ElsewhereFailed(error.code) from error
