"""Programs that name a package, where they may run, and what is left when that goes wrong."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from spade_jax.envs import adapters
from spade_jax.envs.adapters import Listed
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool
from spade_jax.errors import SandboxError
from spade_jax.types import Fault, Outcome, Reply

PLAIN = """
class PlainEnv:
    def reset(self, seed):
        import sys
        found = [name for name in ("reasoning_gym", "textarena", "gem") if name in sys.modules]
        return f"seed {seed} {found}"

    def step(self, action):
        return action, 1.0, True, False, {}
"""


def test_program_names_its_package_first():
    text = adapters.program("gem", 'game:"odd"', turns=3, words=["a"], flag=True)
    assert adapters.package_of(text) == "gem"
    assert adapters.package_of(f"\n{text}") == ""
    assert adapters.package_of(PLAIN) == ""
    namespace: dict = {}
    body = text.replace("from spade_jax.envs.adapters.gem import Adapter", "Adapter = object")
    exec(body, namespace)
    assert namespace["PublicEnv"].identifier == 'game:"odd"'
    assert namespace["PublicEnv"].options == {"turns": 3, "words": ["a"], "flag": True}


def test_unknown_package_and_unplain_options_are_refused():
    with pytest.raises(ValueError, match="'numpy' is not one of reasoning_gym, rlve"):
        adapters.program("numpy", "x")
    for value in ({1, 2}, float("nan"), float("inf"), object(), (1, 2), {1: 2}):
        with pytest.raises(ValueError, match="not plain data"):
            adapters.program("gem", "x", option=value)


def test_parse():
    assert adapters.parse("gem:game:Sokoban-v0-easy") == ("gem", "game:Sokoban-v0-easy")
    with pytest.raises(ValueError, match="games/file"):
        adapters.parse("games/file.py")


def test_catalogue_is_listed_elsewhere(fakes: str):
    assert adapters.catalogue("reasoning_gym", [fakes]) == [
        Listed("pairs", "reasoning_gym/pairs", ""),
        Listed("sums", "reasoning_gym/sums", ""),
    ]
    assert "Gym" not in sys.modules
    assert [listed.id for listed in adapters.catalogue("rlve", [fakes])] == ["Doubling", "Unsolved"]
    assert "Gym" not in sys.modules


def test_missing_and_broken_packages_are_named(tmp_path: Path):
    (tmp_path / "Gym").mkdir()
    (tmp_path / "Gym" / "__init__.py").write_text("raise RuntimeError('half installed')")
    with pytest.raises(SandboxError, match="rlve cannot be imported: RuntimeError: half"):
        adapters.catalogue("rlve", [str(tmp_path)])
    missing = [name for name in adapters.PACKAGES if not _installed(name)]
    for name in missing:
        with pytest.raises(SandboxError, match=f"{name} need the module .* is not installed"):
            adapters.catalogue(name)
        with pytest.raises(SandboxError, match=f"{name} need the module .* is not installed"):
            asyncio.run(Pool(Limits(), packages=[name]).start())


def _installed(package: str) -> bool:
    try:
        adapters.require([package])
    except SandboxError:
        return False
    return True


def test_package_stays_in_its_own_workers(player):
    async def play() -> None:
        public = await player.opened("reasoning_gym", "sums")
        plain = await player.pool.open(PLAIN, 7)
        assert not isinstance(plain, Fault)
        assert plain.observation == "seed 7 []"
        assert public.observation.endswith("= ?")

    player.run(play())
    assert "Gym" not in sys.modules


def test_pool_without_the_package_refuses(fakes: str):
    async def play() -> None:
        async with Pool(Limits(), packages=["gem"], package_path=[fakes]) as pool:
            fault = await pool.open(adapters.program("reasoning_gym", "sums"), 1)
            assert isinstance(fault, Fault)
            assert fault.outcome is Outcome.SCHEMA
            assert "needs the package reasoning_gym" in fault.detail
            other = PLAIN.lstrip()
            fault = await pool.open(f"# package: os\n{other}", 1)
            assert isinstance(fault, Fault)
            assert fault.outcome is Outcome.SCHEMA

    asyncio.run(play())


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ("raise RuntimeError('half installed')", "gem cannot be imported: RuntimeError"),
        ("import sys; sys.exit(3)", "gem cannot be imported: SystemExit"),
        ("import os; os._exit(3)", "the zygote died"),
    ],
)
def test_broken_package_is_our_fault_and_hurts_nobody(tmp_path: Path, body: str, detail: str):
    (tmp_path / "gem").mkdir()
    (tmp_path / "gem" / "__init__.py").write_text(body)

    async def play() -> None:
        async with Pool(Limits(), packages=["gem"], package_path=[str(tmp_path)]) as pool:
            plain = await pool.open(PLAIN, 1)
            assert not isinstance(plain, Fault)
            for _ in range(2):
                fault = await pool.open(adapters.program("gem", "game:Flip-v0-easy"), 1)
                assert isinstance(fault, Fault)
                assert fault.outcome is Outcome.INFRASTRUCTURE
                assert detail in fault.detail
            assert await plain.step("still here") == Reply("still here", 1.0, True, False)

    asyncio.run(play())


def test_a_package_that_wants_a_place_to_write_is_imported(tmp_path: Path, fakes: str):
    """As one does that draws: its import fails where no folder can be made."""
    (tmp_path / "reasoning_gym").mkdir()
    body = (Path(fakes) / "reasoning_gym" / "__init__.py").read_text()
    body += "\nimport os, tempfile\nplaces = [tempfile.mkdtemp()]\n"
    body += "names = ('XDG_CACHE_HOME', 'XDG_CONFIG_HOME')\n"
    body += "places += [os.environ[name] for name in names if name in os.environ]\n"
    body += "for place in places:\n    open(place + '/cache', 'w').close()\n"
    (tmp_path / "reasoning_gym" / "__init__.py").write_text(body)

    async def play() -> None:
        path = [str(tmp_path)]
        async with Pool(Limits(), packages=["reasoning_gym"], package_path=path) as pool:
            opened = await pool.open(adapters.program("reasoning_gym", "sums"), 1)
            assert not isinstance(opened, Fault), opened

    asyncio.run(play())


def _zygote_of(package: str) -> int:
    """Process number of the zygote that was told to import a package."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
            parents = (path.parent / "stat").read_text()
        except OSError:
            continue
        if any(b"spade_jax.envs.zygote" in word for word in words) and package.encode() in words:
            parent = int(parents.rpartition(")")[2].split()[1])
            if parent in _below(os.getpid()):
                return int(path.parent.name)
    raise AssertionError(f"no zygote of {package}")


def _below(pid: int) -> set[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {int(child) for child in children}


def test_killed_package_zygote_is_replaced_and_its_instance_rebuilt(player):
    async def play() -> None:
        alone = await player.opened("textarena", "Dice-v0", 3)
        expected = [await alone.step(action) for action in ("one", "two", "three")]
        instance = await player.opened("textarena", "Dice-v0", 3)
        seen = [await instance.step("one")]
        os.kill(_zygote_of("textarena"), signal.SIGKILL)
        give_up = time.monotonic() + 30
        while not instance._worker.dead and time.monotonic() < give_up:
            await asyncio.sleep(0.01)
        seen += [await instance.step("two"), await instance.step("three")]
        assert seen == expected
        assert seen[-1].terminated

    player.run(play())


def test_instances_of_one_worker_do_not_share_randomness(player):
    async def play() -> None:
        alone = []
        for seed in (3, 4):
            instance = await player.opened("textarena", "Dice-v0", seed)
            alone.append([await instance.step("x") for _ in range(3)])
            await instance.close()
        both = [await player.opened("textarena", "Dice-v0", seed) for seed in (3, 4)]
        mixed: list[list] = [[], []]
        for _ in range(3):
            for replies, instance in zip(mixed, both, strict=True):
                replies.append(await instance.step("x"))
        assert mixed == alone
        assert alone[0] != alone[1]

    player.run(play())


@pytest.mark.parametrize(
    ("package", "name"),
    [("reasoning_gym", "sums"), ("rlve", "Doubling"), ("textarena", "Dice-v0"), ("bfcl", "Lamp")],
)
def test_two_zygotes_play_the_same(player, package: str, name: str):
    async def play(replica: int) -> object:
        instance = await player.pool.open(adapters.program(package, name), 5, replica)
        assert not isinstance(instance, Fault), instance
        replies = [await instance.step("1"), await instance.step("2")]
        await instance.close()
        return instance.observation, replies

    assert player.run(play(0)) == player.run(play(1))
