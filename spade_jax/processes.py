"""Several processes as one run: how they find one another, share work and results, stop and
end together.

Every process runs the same program on the same values, so all of them hold the same state; only
work is divided (`dealt`, `collected`), by its place in a list and never by a name, so that the
number of processes changes no result. Whole values travel from device to device, in pieces; who is
there, and short notes, through the key-value service of `jax.distributed`, which process 0 keeps.
What is exchanged is pickled: processes of one run trust one another, and generated programs travel
as text.

Who the processes are is found in the environment, the first of these that is there:

    JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES, JAX_PROCESS_ID
    a Slurm step of more than one task, each a process with the devices that Slurm lets it see
    JAX_PLATFORMS=tpu: the workers of the TPU slice, as jax finds them; JAX_NUM_PROCESSES=1 for none

An error in one process, or its loss, ends all of them with the reason (`heartbeat`). Processes that
are held up by one another are not handled here.
"""

import contextlib
import logging
import os
import pickle
import re
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from models.errors import ModelError
from spade_jax import heartbeat
from spade_jax.errors import ConfigError, LostProcess, SpadeError, TransientError
from spade_jax.heartbeat import ROOM, Heartbeat, client, first_line

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")

JOIN_S = 300  # for all processes to come
POLL_S = 1  # between two chances to be interrupted while others are waited for
PIECE_BYTES = 2**22  # of one process, in one exchange between devices


class Place(NamedTuple):
    """Where a process stands; without an address, jax finds it out."""

    address: str = ""
    count: int = 0
    index: int = 0


def find_place(environment: Mapping[str, str]) -> Place | None:
    """Look where this process stands; None: it is alone.

    Raises:
        ConfigError: what the environment says is not whole.
    """
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    told = {name: environment[name] for name in names if environment.get(name)}
    if told.get("JAX_NUM_PROCESSES") == "1":
        return None
    if told:
        if missing := [name for name in names if name not in told]:
            raise ConfigError(
                f"{' and '.join(told)} {'is' if len(told) == 1 else 'are'} set, but not "
                f"{' and '.join(missing)}: a run of several processes needs all three in each "
                "process; set them, or unset all"
            )
        return _checked(told[names[0]], told[names[1]], told[names[2]])
    if environment.get("SLURM_NTASKS", "1") != "1" and "SLURM_PROCID" in environment:
        address = _slurm_address(
            environment.get("SLURM_STEP_NODELIST", ""), environment.get("SLURM_JOB_ID", "")
        )
        return _checked(address, environment["SLURM_NTASKS"], environment["SLURM_PROCID"])
    if "tpu" in environment.get("JAX_PLATFORMS", "").split(","):
        return Place()
    return None


def _checked(address: str, count: str, index: str) -> Place:
    found = re.fullmatch(r"[^/\s]+:(\d{1,5})", address)
    if not (found and 0 < int(found[1]) < 2**16):
        raise ConfigError(f"JAX_COORDINATOR_ADDRESS={address!r}; expected HOST:PORT of process 0")
    if not (count.isdecimal() and index.isdecimal() and int(index) < int(count)):
        raise ConfigError(
            f"JAX_NUM_PROCESSES={count!r} and JAX_PROCESS_ID={index!r}; expected whole numbers, "
            "the index from 0 and less than the number of processes"
        )
    return Place(address, int(count), int(index))


def _slurm_address(nodes: str, job: str) -> str:
    """The first node of a list such as `gpu[003-007,9],login1`, and a port of the job's own."""
    found = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", nodes)
    if found is None or not job.isdecimal():
        raise ConfigError(
            f"SLURM_NTASKS is more than 1, with SLURM_STEP_NODELIST={nodes!r} and SLURM_JOB_ID="
            f"{job!r}: this is no task of a Slurm step; start it with srun, or set "
            "JAX_NUM_PROCESSES=1 to run as one"
        )
    return f"{found[1]}{found[2] or ''}:{12000 + int(job) % 16000}"


def index() -> int:
    """Which process this is, from 0; process 0 writes the run folder."""
    return jax.process_index()


def count() -> int:
    """How many processes the run has."""
    return jax.process_count()


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Be one of the processes that the environment tells of while in the block; alone without any.

    Raises:
        LostProcess: another process has failed or disappeared; it says why, if it could.
    """
    place = None if jax.distributed.is_initialized() else find_place(os.environ)
    if place is None:
        yield
        return
    _join(place)
    global _watch
    watch = Heartbeat(index(), count())
    if watch.count == 1:
        yield
        return
    _watch = watch
    watch.start()
    if watch.index:  # process 0 speaks for all
        for name in ("spade_jax", "models"):
            logging.getLogger(name).setLevel(logging.WARNING)
    logger.info("%d processes, %d devices", watch.count, jax.device_count())
    try:
        yield
        _meet("the end")
    except BaseException as error:
        _end(watch, error)
        raise
    finally:
        _watch = None
    watch.end()
    jax.distributed.shutdown()


def _join(place: Place) -> None:
    """Meet the other processes."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # A signal that asks one process to stop is the run's to handle.
    jax.config.update("jax_enable_preemption_service", False)
    told: dict[str, Any] = {}
    if place.address:
        told = {
            "coordinator_address": place.address,
            "num_processes": place.count,
            "process_id": place.index,
            "cluster_detection_method": "deactivate",  # all devices that this process can see
        }
        if place.index == 0:
            _require_port(place.address)
    try:
        jax.distributed.initialize(**told, initialization_timeout=JOIN_S)
    except (ValueError, RuntimeError, OSError) as error:
        where = f"the processes of {place.address}" if place.address else "the workers of this TPU"
        raise TransientError(
            f"{where} did not come together: {first_line(error)}; start all of them within "
            f"{JOIN_S} s, let them reach process 0, or set JAX_NUM_PROCESSES=1 to run as one"
        ) from error


def _require_port(address: str) -> None:
    """Refuse a port that process 0 cannot have: jax does not say so, and may crash.

    Raises:
        ConfigError: says why.
    """
    port = int(address.rpartition(":")[2])
    try:
        with socket.socket(socket.AF_INET) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(("", port))
    except OSError as error:
        raise ConfigError(
            f"port {port} of {address} cannot be had by process 0: {error.strerror}; take another"
        ) from error


def _end(watch: Heartbeat, error: BaseException) -> None:
    """Leave a run that has failed, here or elsewhere: say why, and let the others go first."""
    watch.leaving = True
    if isinstance(error, jax.errors.JaxRuntimeError):  # perhaps of a peer that is no more
        watch.wait_for_reason()
    watch.leave(None if watch.reason else _told(error))
    heartbeat.forget_service()
    if watch.reason:
        raise LostProcess(watch.reason) from None


def _told(error: BaseException) -> str:
    """An error in the line that the other processes say."""
    if isinstance(error, SpadeError | ModelError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted"
    return f"{first_line(error)} (its log has the whole of it)"


_watch: Heartbeat | None = None  # of the run that this process has joined
_meetings = 0  # how often this process has met the others, as each of them has


def _meet(note: str) -> list[str]:
    """Tell all processes something short and hear what they say, in their order."""
    global _meetings
    if count() == 1:
        return [note]
    service, mine = client(), index()
    service.key_value_set(f"{ROOM}/note/{_meetings}/{mine}", note)
    notes = [
        note if process == mine else _wait_for(service, f"{ROOM}/note/{_meetings}/{process}")
        for process in range(count())
    ]
    if _meetings:  # whoever is here has read the notes of the time before
        service.key_value_delete(f"{ROOM}/note/{_meetings - 1}/{mine}")
    _meetings += 1
    return notes


def _wait_for(service: Any, key: str) -> str:
    """What another process says, however long it takes: whether it still lives is `Heartbeat`'s."""
    while True:
        try:
            return service.blocking_key_value_get(key, POLL_S * 1000)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def agree(flag: bool) -> bool:
    """Whether any process says so: the same answer in all of them, which must ask together."""
    return "yes" in _meet("yes" if flag else "no")


def ask_to_stop() -> None:
    """Let the other processes know that this one was asked to stop; may be called by a signal."""
    if _watch is not None:
        _watch.stop = True


def is_asked_to_stop() -> bool:
    """Whether one of the others, or this one, was asked: some hear of it later than others."""
    return _watch is not None and _watch.stop


def exchange(value: Item) -> list[Item]:
    """The values of all processes, in their order; all must call it together."""
    if count() == 1:
        return [value]
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = [int(size) for size in _meet(str(len(data)))]
    parts: list[list[np.ndarray]] = [[] for _ in sizes]
    for start in range(0, max(sizes), PIECE_BYTES):
        left = min(PIECE_BYTES, max(sizes) - start)
        piece = np.zeros(1 << (left - 1).bit_length(), np.uint8)  # few shapes: each is compiled
        mine = data[start : start + left]
        piece[: len(mine)] = mine
        for part, found in zip(parts, multihost_utils.process_allgather(piece), strict=True):
            part.append(found[:left])
    whole = [np.concatenate(part)[:size] for part, size in zip(parts, sizes, strict=True)]
    return [pickle.loads(each.tobytes()) for each in whole]


def first(value: Item) -> Item:
    """What process 0 holds."""
    return exchange(value if index() == 0 else None)[0]  # type: ignore[return-value]


def dealt(items: Sequence[Item]) -> Sequence[Item]:
    """Those of a list that this process works on."""
    return items[index() :: count()]


def collected(parts: Sequence[Sequence[Result]]) -> list[Result]:
    """One result for each item of a list of which every process has done what was dealt to it."""
    whole = range(sum(map(len, parts)))
    return [parts[place % len(parts)][place // len(parts)] for place in whole]


def check_same(what: str, values: Mapping[str, Any]) -> None:
    """Refuse a run whose processes were started with different values.

    Raises:
        ConfigError: in every process, with the first that differs.
    """
    for process, found in enumerate(all_values := exchange(dict(values))):
        for name in sorted(found.keys() | all_values[0].keys()):
            theirs, ours = found.get(name), all_values[0].get(name)
            if theirs != ours:
                raise ConfigError(
                    f"process {process} was started with another {what}: {name} is {theirs!r} "
                    f"there and {ours!r} in process 0; start all processes with the same"
                )


def check_shared(folder: Path, name: str) -> None:
    """Refuse a folder that is not the same one for all processes.

    Raises:
        ConfigError: in every process.
    """
    mark = folder / f".process_0_{first(secrets.token_hex(4))}"
    if index() == 0:
        mark.touch()
    _meet("marked")
    blind = [place for place, sees in enumerate(exchange(mark.exists())) if not sees]
    if index() == 0:
        mark.unlink()
    if blind:
        raise ConfigError(
            f"{name} is another folder for process {blind[0]} than for process 0, and all of them "
            "write to it; put it on a disk that they share, or in a bucket"
        )
