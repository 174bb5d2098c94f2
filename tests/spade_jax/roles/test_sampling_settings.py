"""What a config says of sampling reaches every request of its role."""

import asyncio
from typing import Any

import jax
import pytest

from helpers import ScriptedPolicy
from spade_jax.config import AgentConfig, DesignerConfig, HintConfig
from spade_jax.errors import ConfigError
from spade_jax.roles import agent, designer, hints, prompts
from spade_jax.types import (
    Arm,
    Environment,
    EnvironmentSource,
    Reply,
    SamplingParams,
    Verdict,
)

CHANGES: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "top_k": 30, "min_p": 0.05}
SECTIONS = {"designer": DesignerConfig, "hint": HintConfig, "agent": AgentConfig}


class KeepingPolicy(ScriptedPolicy):
    """Keeps how it was asked to sample."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.params: list[SamplingParams] = []

    async def generate(self, tokens: Any, params: SamplingParams, key: Any) -> Any:
        self.params.append(params)
        return await super().generate(tokens, params, key)


class Instance:
    observation = "Say go."

    async def step(self, action: str) -> Reply:
        return Reply("done", 1.0, True, False)

    async def close(self) -> None:
        pass


class Pool:
    async def open(self, program: str, seed: int) -> Instance:
        return Instance()


def ask(role: str, policy: ScriptedPolicy, chat: Any, changes: dict[str, Any]) -> None:
    """Let a role sample once."""
    key = jax.random.key(0)
    if role == "designer":
        config = DesignerConfig(**changes)
        talk = designer.Conversation(policy, chat, config, 2000, prompts.Prompt("design"), key)
        asyncio.run(talk.answer())
    elif role == "hint":

        async def judge(hint: str | None) -> Verdict:
            return Verdict(True)

        config = HintConfig(**changes)
        program = "class AEnv: pass"
        written = hints.write(
            policy, chat, config, "compact", program, None, lambda attempt: key, judge
        )
        asyncio.run(written)
    else:
        source = EnvironmentSource("class GoEnv: pass", "Optimization", "easy", "d")
        environment = Environment(source, "say go", 0, "design", Verdict(True))
        play = agent.Play("episode", environment, Arm.UNHINTED, 3, 0, 7)
        asyncio.run(agent.play(policy, chat, Pool(), AgentConfig(**changes), 200, play, key))


@pytest.mark.parametrize("role", SECTIONS)
def test_every_setting_reaches_the_request(chat, role: str):
    policy = KeepingPolicy(["\\boxed{go}<eos>"], chat.tokenizer)
    ask(role, policy, chat, CHANGES)
    (params,) = policy.params
    assert {name: getattr(params, name) for name in CHANGES} == CHANGES


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -0.1), ("top_p", 0.0), ("top_p", 1.5), ("top_k", -1), ("min_p", 1.5)],
)
def test_what_is_out_of_range_is_refused(section: str, name: str, value: float):
    with pytest.raises(ConfigError, match=rf"^{section}\.{name}={value}"):
        SECTIONS[section](**{name: value})
