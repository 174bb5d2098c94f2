"""What a name of devices means; the compilers' own descriptions of them are stood in for."""

from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax.experimental import topologies

from spade_jax.errors import ConfigError
from spade_jax.plan import topology


@pytest.mark.parametrize(
    "name", ["v5p:4x4x4", "v6e:8x8", "v5e:4x8", "v4:2x2x4", "h200:8", "h100:16", "local"]
)
def test_a_name_is_known(name: str):
    topology.check_name(name)


@pytest.mark.parametrize(
    "name", ["", "v5p", "v5p:", "v5p:64", "v7x:4x4", "h200", "h200:1x8", "V6e:8x8", "local:8", "8"]
)
def test_another_name_is_refused_with_those_there_are(name: str):
    with pytest.raises(ConfigError, match=r"--topology .* is unknown; expected local, or chips"):
        topology.check_name(name)


def test_the_device_that_is_here_is_left_alone():
    assert topology.environment("v5p:4x4x4") == {"JAX_PLATFORMS": "cpu"}
    assert topology.environment("local") == {}
    told = topology.environment("h200:8")
    assert told["JAX_PLATFORMS"] == "cpu" and told["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] == "1"
    assert "--xla_gpu_autotune_level=0" in told["XLA_FLAGS"]


def described(monkeypatch: pytest.MonkeyPatch, count: int) -> list[dict[str, Any]]:
    """Stand in for the compilers: devices, four to a host; returns what they are asked for."""
    asked: list[dict[str, Any]] = []

    def describe(**wanted: Any) -> SimpleNamespace:
        asked.append(wanted)
        devices = [SimpleNamespace(process_index=index // 4) for index in range(count)]
        return SimpleNamespace(devices=devices)

    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    return asked


def test_chips_of_a_slice_lie_on_hosts(monkeypatch: pytest.MonkeyPatch):
    asked = described(monkeypatch, 64)
    site = topology.find_site("v5p:4x4x4")
    # One host for itself as well: the sampler is compiled for it.
    assert [each["topology_name"] for each in asked] == ["v5p:4x4x4", "v5p:2x2x1"]
    assert {each["platform"] for each in asked} == {"tpu"}
    assert (site.num_hosts, site.host_chips, len(site.devices)) == (16, 4, 64)
    assert site.hosts[1] == site.devices[4:8]
    assert site.chip == topology.CHIPS["v5p"] and site.apart


def test_a_slice_of_one_host_is_that_host(monkeypatch: pytest.MonkeyPatch):
    asked = described(monkeypatch, 4)
    assert not topology.find_site("v6e:2x2").apart
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("name", "shape"), [("h200:4", "1x1x4"), ("h200:8", "1x1x8"), ("h100:16", "1x2x8")]
)
def test_gpus_are_eight_to_a_host(monkeypatch: pytest.MonkeyPatch, name: str, shape: str):
    asked = described(monkeypatch, 4)
    site = topology.find_site(name)
    assert asked[0]["topology"] == shape
    assert "major: 9" in asked[0]["target_config"] and "NVIDIA H" in asked[0]["target_config"]
    whole = topology.CHIPS[name.partition(":")[0]]
    assert site.chip.memory == int(0.75 * whole.memory)  # what jax takes of it


def test_the_share_of_a_gpu_that_jax_takes_is_heeded(monkeypatch: pytest.MonkeyPatch):
    described(monkeypatch, 1)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    whole = topology.CHIPS["h200"].memory
    assert topology.find_site("h200:1").chip.memory == int(0.9 * whole)


@pytest.mark.parametrize("count", [0, 12, 20])
def test_a_number_of_gpus_that_fills_no_hosts_is_refused(count: int):
    with pytest.raises(ConfigError, match=f"is {count} GPUs; expected 1 to 8, or a multiple of 8"):
        topology.find_site(f"h200:{count}")


def test_a_compiler_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch):
    def fail(**wanted: Any) -> None:
        raise RuntimeError("no such platform\nand a page of more")

    monkeypatch.setattr(topologies, "get_topology_desc", fail)
    with pytest.raises(ConfigError, match=r"cannot be described: no such platform; .*extra tpu"):
        topology.find_site("v5e:4x4")
    with pytest.raises(ConfigError, match=r"extra cuda"):
        topology.find_site("h200:8")


def test_this_machine_is_measured():
    site = topology.find_site("local")
    assert site.devices == jax.devices() and site.num_hosts == 1
    assert site.chip.flops_per_s > 1e8 and site.chip.bytes_per_s > 1e7
    assert site.chip.link_bytes_per_s is None
    assert 2**25 < site.chip.memory < 2**45


def test_another_device_of_this_machine_is_told_by_its_kind(monkeypatch: pytest.MonkeyPatch):
    def found(kind: str, stats: dict[str, int] | None) -> topology.Chip:
        device = SimpleNamespace(
            platform="gpu", device_kind=kind, process_index=0, memory_stats=lambda: stats
        )
        monkeypatch.setattr(jax, "devices", lambda: [device])
        monkeypatch.setattr(jax, "local_devices", lambda: [device])
        return topology.find_site("local").chip

    assert found("NVIDIA H200", {"bytes_limit": 5}).memory == 5
    assert found("TPU v5 lite", None) == topology.CHIPS["v5e"]
    with pytest.raises(ConfigError, match="nothing is known of NVIDIA Voodoo"):
        found("NVIDIA Voodoo", None)


def test_what_stands_in_for_the_devices_leaves_again():
    own = jax.devices()
    with topology.standing_in(["one"]):
        assert jax.devices() == ["one"]
    assert jax.devices() == own
