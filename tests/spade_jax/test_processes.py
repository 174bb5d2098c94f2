"""Where a process stands by its environment, and a run of one process, which meets nobody. Several
are in tests/e2e/test_processes.py.
"""

import socket
from array import array

import jax
import pytest

from models.config import TransformerConfig
from models.errors import ModelError
from models.sharding import build_mesh, host_mesh, host_meshes
from spade_jax import processes
from spade_jax.envs import pool_stats, quarantine
from spade_jax.envs.pool_stats import PoolStats
from spade_jax.errors import ConfigError, TransientError
from spade_jax.processes import Place, find_place
from spade_jax.rollout import stats
from spade_jax.rollout.stats import EngineStats
from spade_jax.types import Fault, Outcome

PLAIN = {
    "JAX_COORDINATOR_ADDRESS": "host0:1234",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "3",
}
SLURM = {
    "SLURM_JOB_ID": "20005",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "7",
    "SLURM_STEP_NODELIST": "gpu[003-017]",
}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        ({"JAX_PLATFORMS": "cpu"}, None),
        (PLAIN, Place("host0:1234", 4, 3)),
        (PLAIN | SLURM | {"JAX_PLATFORMS": "tpu"}, Place("host0:1234", 4, 3)),
        (SLURM, Place("gpu003:16005", 16, 7)),
        (SLURM | {"SLURM_STEP_NODELIST": "n1,n2"}, Place("n1:16005", 16, 7)),
        (SLURM | {"SLURM_STEP_NODELIST": "a-b[09,12-14],x1"}, Place("a-b09:16005", 16, 7)),
        (SLURM | {"SLURM_NTASKS": "1"}, None),
        ({"SLURM_JOB_ID": "20005", "SLURM_NTASKS": "16"}, None),  # in the batch script, no step
        ({"JAX_PLATFORMS": "tpu,cpu"}, Place()),
        ({"JAX_PLATFORMS": "tpu", "JAX_NUM_PROCESSES": "1"}, None),
    ],
)
def test_where_a_process_stands(environment, place):
    assert find_place(environment) == place


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"JAX_PROCESS_ID": ""}, "are set, but not JAX_PROCESS_ID"),
        ({"JAX_PROCESS_ID": "4"}, "JAX_PROCESS_ID='4'; expected whole numbers"),
        ({"JAX_NUM_PROCESSES": "many"}, "JAX_NUM_PROCESSES='many'"),
        ({"JAX_COORDINATOR_ADDRESS": "host0"}, "'host0'; expected HOST:PORT"),
        ({"JAX_COORDINATOR_ADDRESS": "host0:0"}, "'host0:0'; expected HOST:PORT"),
        ({"JAX_COORDINATOR_ADDRESS": "host0:99999"}, "'host0:99999'; expected HOST:PORT"),
        ({"JAX_COORDINATOR_ADDRESS": "http://host0:1"}, "'http://host0:1'; expected HOST:PORT"),
    ],
)
def test_half_a_place_is_refused(changes, part):
    with pytest.raises(ConfigError, match=part):
        find_place(PLAIN | changes)


@pytest.mark.parametrize(
    "changes",
    [{"SLURM_STEP_NODELIST": ""}, {"SLURM_JOB_ID": "x"}],
)
def test_what_is_no_step_of_slurm_is_refused(changes):
    with pytest.raises(ConfigError, match="start it with srun"):
        find_place(SLURM | changes)
    with pytest.raises(ConfigError, match="SLURM_STEP_NODELIST=''"):
        find_place({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"})
    with pytest.raises(ConfigError, match="'abc'"):
        find_place(SLURM | {"SLURM_NTASKS": "abc"})


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of host0:{port} cannot be had"):
            processes._require_port(f"host0:{port}")
    processes._require_port(f"host0:{port}")


def test_processes_that_do_not_come_together_may_do_so_later(monkeypatch):
    def late(**_: object) -> None:
        raise RuntimeError("DEADLINE_EXCEEDED: Barrier timed out")

    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(jax.distributed, "initialize", late)
    with pytest.raises(TransientError, match=r"host0:1234 did not come together: .*DEADLINE"):
        processes._join(Place("host0:1234", 2, 1))


def test_one_process_does_all_the_work_itself(tmp_path):
    with processes.joined():
        assert (processes.index(), processes.count()) == (0, 1)
        assert processes.collected([processes.dealt([3, 4])]) == [3, 4]
        processes.ask_to_stop()
        assert not processes.is_asked_to_stop()  # there is nobody to tell
        assert processes.exchange("value") == ["value"]
        assert processes.first("value") == "value"
        assert processes.agree(True) and not processes.agree(False)
        processes.check_same("config", {"run.seed": 1})
        processes.check_shared(tmp_path, "run.dir")
        assert not list(tmp_path.iterdir())


def test_each_process_samples_on_its_own_devices():
    model = TransformerConfig(num_heads=4, num_kv_heads=2, num_experts=4)
    mesh = build_mesh(1, 8, 1, 1)
    assert host_meshes(model, mesh) == [mesh]  # all are of this process
    own = jax.devices()[::2]
    four = host_mesh(model, own)
    assert dict(four.shape) == {"data": 1, "fsdp": 1, "expert": 1, "tensor": 4}
    assert list(four.devices.flat) == own
    few_heads = TransformerConfig(num_heads=2, num_kv_heads=2, num_experts=4)
    assert (host_mesh(few_heads, own).shape["expert"], len(own)) == (2, 4)
    odd = TransformerConfig(num_heads=3, num_kv_heads=3, num_experts=3)
    with pytest.raises(ModelError, match="do not divide over the 4 devices of a process"):
        host_mesh(odd, own)


def offences(**faults):
    table = quarantine.Quarantine()
    for digest, texts in faults.items():
        for text in texts:
            table.offend(digest, Fault(Outcome.TIMEOUT, text))
    return table.state()


def test_a_program_is_in_quarantine_by_its_offences_in_all_processes():
    before = offences(old=["a"], worn=["a", "b"])
    states = [
        offences(old=["a", "b"], worn=["a", "b"], new=["same"]),
        offences(old=["a", "b"], worn=["a", "b"], new=["same"], other=["c"]),
    ]
    assert quarantine.joined(before, states) == offences(
        old=["a", "b"], worn=["a", "b"], new=["same", "same"], other=["c"]
    )
    assert quarantine.joined(before, [before, before]) == before


def test_what_several_did_at_the_same_time_adds_up():
    one = EngineStats(
        sampled_tokens=6, rounds=2, held_pages_max=5, device_s=3.0, decode_s=2.0, host_s=1.0
    )
    other = EngineStats(
        sampled_tokens=4, rounds=3, held_pages_max=9, device_s=1.0, decode_s=1.0, host_s=0.5
    )
    assert stats.joined([one, other]) == EngineStats(
        sampled_tokens=10, rounds=5, held_pages_max=9, device_s=2.0, decode_s=1.5, host_s=1.5
    )
    assert stats.joined([one]) == one

    def pool(**changes):
        fields = dict.fromkeys(PoolStats.__dataclass_fields__, 1)
        return PoolStats(
            **fields
            | {"faults": {Outcome.TIMEOUT: 1}, "programs": frozenset("a"), "busy_s": 2.0}
            | {"step_s": array("d", [0.5]), "spawn_s": array("d")}
            | changes
        )

    found = pool_stats.joined(
        [pool(peak_bytes=7), pool(programs=frozenset("ab"), faults={Outcome.SCHEMA: 2}, steps=3)]
    )
    assert (found.requests, found.steps, found.workers, found.quarantined) == (2, 4, 2, 1)
    assert found.faults == {Outcome.TIMEOUT: 1, Outcome.SCHEMA: 2}
    assert (found.programs, found.peak_bytes, found.busy_s) == (frozenset("ab"), 7, 2.0)
    assert list(found.step_s) == [0.5, 0.5] and not found.spawn_s
