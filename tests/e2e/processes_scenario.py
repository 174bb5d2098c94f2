"""What one process of several does; started by test_processes.py, which names the scenario and
gives it a scratch folder. No pytest here: a failure is this process's exit status and last line.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from learning import CONFIG, MODELS, draw_params, three_updates

from models.execution import PLAIN
from models.sharding import build_mesh, host_meshes, param_shardings
from spade_jax import cli, heartbeat, processes
from spade_jax.errors import SpadeError
from spade_jax.learner.step import Learner
from spade_jax.rollout import weights


def exchanges(scratch: Path) -> None:
    """Values of every size come whole to all, and work is shared by its place."""
    mine, several = processes.index(), processes.count()
    assert several == 2 and jax.device_count() == 8 and jax.local_device_count() == 4
    for size in (0, 1, processes.PIECE_BYTES - 200, 2 * processes.PIECE_BYTES + 12345):
        data = np.random.default_rng(mine).bytes(size * (mine + 1))
        found = processes.exchange((mine, data))
        assert [place for place, _ in found] == [0, 1]
        assert found[mine][1] == data and len(found[1][1]) == 2 * len(found[0][1])
    for items in ([], [5], list(range(7))):
        parts = processes.exchange([-item for item in processes.dealt(items)])
        assert processes.collected(parts) == [-item for item in items]
    assert processes.dealt(range(5)) == (range(0, 5, 2) if mine == 0 else range(1, 5, 2))
    assert processes.agree(mine == 1) and not processes.agree(False)
    assert processes.first(mine + 7) == 7
    processes.check_same("config", {"a": 1})
    processes.check_shared(scratch, "run.dir")
    assert mine == 1 or not list(scratch.iterdir())
    if mine == 1:
        time.sleep(3)  # the other waits, which is no failure
    assert processes.agree(True)


def another_config(scratch: Path) -> None:
    processes.check_same("config", {"run.steps": 3, "run.seed": processes.index()})


def another_folder(scratch: Path) -> None:
    own = scratch / str(processes.index())
    own.mkdir()
    processes.check_shared(own, "run.dir='x'")


def fails(scratch: Path) -> None:
    """One process has an error while the other waits for it, or works."""
    if processes.index() == 1:
        raise SpadeError("the disk is full: 0 bytes left, expected some; free some space")
    processes.exchange("never answered")


def fails_first(scratch: Path) -> None:
    """Process 0, which keeps the service, has a bug, and the other is in no hurry to listen."""
    if processes.index() == 0:
        raise ValueError("a bug")
    while True:
        time.sleep(0.1)


def waits(scratch: Path) -> None:
    """To be killed while it waits for a program of all devices that never starts here."""
    (scratch / f"ready{processes.index()}").touch()
    if processes.index() == int(os.environ["WAITS_ASIDE"]):
        time.sleep(600)
    multihost_utils.process_allgather(np.arange(3))


def learns(scratch: Path) -> None:
    """Three updates over all devices; what each process would sample with goes to a file."""
    for name, model in MODELS.items():
        mesh = build_mesh(2, 2, 1, 2)
        learner = Learner(model, CONFIG, mesh)
        params = draw_params(model, param_shardings(model, mesh))
        policy, told = three_updates(learner, params)
        own = host_meshes(model, mesh)[processes.index()]
        found = jax.tree.leaves(weights.to_sampler(model, own, PLAIN, policy))
        assert all(leaf.is_fully_addressable for leaf in found)
        assert len(found[0].devices()) == 4
        np.savez(scratch / f"{name}{processes.index()}.npz", *found, told=np.array(told))


def main() -> int:
    scenario: Callable[[Path], None] = globals()[sys.argv[1]]
    heartbeat.LOST_S = heartbeat.GRACE_S = 4.0  # for tests that wait for it

    def run(arguments: list[str]) -> int:
        with processes.joined():
            scenario(Path(sys.argv[2]))
        return 0

    cli._run = run  # as a command: errors end in one line, bugs keep their traceback
    return cli.main([])


if __name__ == "__main__":
    sys.exit(main())
