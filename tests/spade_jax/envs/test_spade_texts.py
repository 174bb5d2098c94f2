"""Texts of the SPADE reference as programs of ours and back."""

import asyncio

import pytest

from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool
from spade_jax.envs.spade_texts import NotAdoptable, adopt, release
from spade_jax.types import Fault, Outcome, Reply

# As the reference's designer writes them: names of the loader, boxed actions, rewards up to 10.
GAME = '''"""A game about a number."""
class NumberGameEnv:
    def __init__(self, max_turns: Optional[int] = 12):
        self.max_turns = max_turns

    def reset(self, seed=None):
        self.number = random.Random(seed).randint(1, 9)
        return "Guess in \\\\boxed{}.", {"suffix": ""}

    def step(self, action):
        found = re.search(r"\\\\boxed\\{(.*?)\\}", action)
        if not found:
            return "Box your guess.", -3, False, False, {}
        if found.group(1) == "nan":
            return "nan", float("nan"), True, False, {}
        if found.group(1) == "flag":
            return "flag", True, True, False, {}
        won = found.group(1) == str(self.number)
        return f"It was {self.number}.", 10 if won else 0.5, True, False, {}


class HelperEnv(NumberGameEnv):
    pass
'''
OURS = """
class Base:
    def reset(self, seed):
        self.seed = seed
        return f"seed {seed}"


class OtherEnv:
    pass


class EchoEnv(Base):
    def step(self, action):
        return action, 0.25, False, True, {}

    def solution(self):
        return ["x"]
"""


def test_adopted_game_plays_in_the_pool(shared):
    async def play() -> None:
        program = adopt(GAME)
        first = await shared.pool.open(program, 3)
        assert not isinstance(first, Fault), first
        assert first.observation == "Guess in \\boxed{}."
        reply = await first.step("0")
        assert reply.reward == 0.5
        number = reply.observation.removeprefix("It was ").removesuffix(".")
        second = await shared.pool.open(program, 3)
        assert not isinstance(second, Fault)
        won = Reply(f"It was {number}.", 1.0, True, False)
        assert await second.step(f"so: \\boxed{{{number}}}") == won
        third = await shared.pool.open(program, 3)
        assert not isinstance(third, Fault)
        assert await third.step(number) == won

    shared.run(play())


@pytest.mark.parametrize("action", ["nan", "flag"])
def test_adopting_repairs_no_reward(shared, action: str):
    async def play() -> None:
        instance = await shared.pool.open(adopt(GAME), 3)
        assert not isinstance(instance, Fault)
        fault = await instance.step(action)
        assert isinstance(fault, Fault)
        assert fault.outcome is Outcome.SCHEMA

    shared.run(play())


def reference(code: str):
    """The class that the reference would load."""
    namespace: dict = {"__name__": "game"}
    exec(compile(code, "game", "exec"), namespace)
    return next(v for k, v in namespace.items() if isinstance(v, type) and k.endswith("Env"))


@pytest.mark.parametrize(
    ("action", "seen"),
    [
        ("I think \\boxed{up}", "up"),
        ("\\boxed{no} then \\boxed{f{x}{y}} ok", "f{x}{y}"),
        ("bare", "bare"),
        ("\\boxed{open", "open"),
        ("\\boxed{}", ""),
    ],
)
def test_released_program_unboxes_for_the_reference(action: str, seen: str):
    game = reference(release(OURS))(max_turns=9)
    assert game.max_turns == 9
    assert game.reset(seed=4) == ("seed 4", {})
    assert game.reset() == ("seed 0", {})
    assert game.step(action) == (seen, 0.25, False, True, {})


def test_released_program_is_still_ours():
    async def play() -> None:
        async with Pool(Limits()) as pool:
            instance = await pool.open(release(OURS), 2)
            assert not isinstance(instance, Fault), instance
            assert await instance.step("\\boxed{a}") == Reply("\\boxed{a}", 0.25, False, True)
            assert await instance.solution() == ["x"]

    asyncio.run(play())


FUTURE = '"""Doc."""\nfrom __future__ import annotations\n'


@pytest.mark.parametrize("head", ["", "# a comment\r\n", FUTURE, FUTURE.replace("\n", "\r\n")])
def test_there_and_back(head: str):
    for text in (GAME, GAME.rstrip("\n"), GAME.replace("\n", "\r\n"), GAME + "\n\n# é ☃ end"):
        adopted = adopt(head + text)
        compile(adopted, "adopted", "exec")
        assert release(adopted) == head + text
    released = release(head + OURS)
    compile(released, "released", "exec")
    assert adopt(released) == head + OURS


def test_text_that_only_looks_adopted_is_taken_as_it_is():
    program = adopt(GAME) + "\nclass MoreEnv(NumberGameEnv):\n    pass\n"
    assert adopt(release(program)) == program


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("class XEnv(TerminalBaseEnv): pass", "XEnv builds on TerminalBaseEnv"),
        ("class A(Terminal): pass\nclass XEnv(A): pass", "XEnv builds on Terminal,"),
        ("class XEnv(make()): pass", r"XEnv builds on make\(\)"),
        ("class XEnv(Env): pass", "XEnv builds on Env"),
        ("class Env: pass\nclass ToolUseBaseEnv: pass", "no class whose name ends in Env"),
        ("x = 1", "no class whose name ends in Env"),
        ("class XEnv(: pass", "SyntaxError"),
        ("class XEnv: pass\n\0", "SyntaxError|ValueError"),
        ("(" * 1000, "SyntaxError|MemoryError|RecursionError"),
    ],
)
def test_what_cannot_be_adopted_is_told(code: str, reason: str):
    with pytest.raises(NotAdoptable, match=reason):
        adopt(code)


@pytest.mark.parametrize(
    "code",
    [
        "class XEnv(ABC): pass",
        "class XEnv(object): pass",
        "import gym\nclass XEnv(gym.Env): pass",
        "from typing import Generic, TypeVar\nT = TypeVar('T')\nclass XEnv(Generic[T]): pass",
        "try:\n    from a import B\nexcept ImportError:\n    class B: pass\nclass XEnv(B): pass",
        "class A(B): pass\nclass B: pass\nclass XEnv(A): pass",
        "class XEnv(XEnv): pass",
    ],
)
def test_known_bases_are_adopted(code: str):
    assert release(adopt(code)) == code


def test_tool_programs_import_their_base_and_are_not_boxed():
    code = "class ShopEnv(ToolUseBaseEnv):\n    pass\n"
    adopted = adopt(code)
    assert "from tool_use_base_env import ToolUseBaseEnv\n" in adopted
    assert "if False and" in adopted
    assert release(adopted) == code
    imported = f"from tool_use_base_env import ToolUseBaseEnv\n{code}"
    assert release(adopt(imported)) == imported


def test_release_needs_an_environment():
    with pytest.raises(NotAdoptable, match="no class whose name ends in Env"):
        release("x = 1")
