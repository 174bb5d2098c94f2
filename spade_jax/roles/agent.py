"""The Reasoning Agent: plays one environment from reset to end and returns the episode with its
token record. How a game and a tool task are spoken with is `protocol`'s.

`episode_return` is the last reward, clipped to [-1, 1], if the environment terminated, else 0
(design decision 8). There is no discount and no credit for partial progress.
"""

from dataclasses import dataclass

import jax

from spade_jax.config import AgentConfig
from spade_jax.envs.pool import Instance, Pool
from spade_jax.errors import SamplerError
from spade_jax.roles import asking
from spade_jax.roles.designer import Sampler
from spade_jax.roles.protocol import speech
from spade_jax.rollout.chat import Chat
from spade_jax.rollout.record import Recorder
from spade_jax.types import Arm, Environment, Episode, Fault, Outcome, Stop, Turn

MIN_COMPLETION_TOKENS = 8  # with less room than this a turn is not started


@dataclass(frozen=True)
class Play:
    """Which episode to play. Both arms of a pair share environment, seed and play index."""

    episode_id: str
    environment: Environment
    arm: Arm
    seed: int
    play_index: int
    step: int


async def play(
    engine: Sampler,
    chat: Chat,
    pool: Pool,
    config: AgentConfig,
    context_tokens: int,
    plan: Play,
    key: jax.Array,
) -> Episode:
    """Play one episode; every way it can end is an `Outcome`, and no environment raises."""
    opened = await pool.open(plan.environment.source.program, plan.seed)
    if isinstance(opened, Fault):
        return _episode(plan, config, Recorder(), [], opened.outcome, None, opened.detail)
    record, turns = Recorder(), []
    chat = chat.with_thinking(config.thinking)
    try:
        outcome, last_reward, detail = await _turns(
            engine, chat, opened, config, context_tokens, plan, key, record, turns
        )
    finally:
        await opened.close()
    return _episode(plan, config, record, turns, outcome, last_reward, detail)


async def _turns(
    engine: Sampler,
    chat: Chat,
    instance: Instance,
    config: AgentConfig,
    context_tokens: int,
    plan: Play,
    key: jax.Array,
    record: Recorder,
    turns: list[Turn],
) -> tuple[Outcome, float | None, str]:
    """The turn loop: observation → completion → action → step. Appends to `record` and `turns`."""
    known = plan.environment.hint_for(plan.seed)
    hint = known if plan.arm is Arm.HINTED else None
    say = speech(plan.environment.source.program)
    observation = instance.observation
    piece = say.open(chat, observation, hint)
    hinted_piece = say.open(chat, observation, known)
    reserve = len(hinted_piece) - len(piece)  # the arms have the same room for the play itself
    for _ in range(config.max_turns):
        room = context_tokens - reserve - len(record) - len(piece) - 1
        # Measured without the hint, so that both arms end alike.
        size = len(chat.open(observation))
        if size > config.max_observation_tokens or room < MIN_COMPLETION_TOKENS:
            return Outcome.TOKEN_LIMIT, None, f"observation of {size} tokens, {room} left"
        record.add_prompt(piece)
        params = asking.sampling(config, chat, min(config.max_tokens, room))
        try:
            completion = await engine.generate(record.tokens, params, key)
        except SamplerError as error:
            return Outcome.SAMPLER_ERROR, None, str(error)
        text = chat.decode(completion.tokens)
        malformed = config.mask_malformed_calls and say.is_malformed(text)
        record.add_completion(completion, trained=not malformed)
        if completion.stop.cut:
            return Outcome.SAMPLER_ERROR, None, f"completion ended by {completion.stop}"
        if completion.stop is not Stop.STOP_ID:
            turns.append(Turn(observation, text, None, None))
            return Outcome.TOKEN_LIMIT, None, f"completion ended by {completion.stop}"
        action = say.action(text)
        if action is None:
            turns.append(Turn(observation, text, None, None))
            observation = say.no_action
        else:
            reply = await instance.step(action)
            if isinstance(reply, Fault):
                turns.append(Turn(observation, text, action, None))
                return reply.outcome, None, reply.detail
            turns.append(Turn(observation, text, action, reply.reward))
            if reply.terminated:
                return Outcome.FINISHED, reply.reward, ""
            if reply.truncated:
                return Outcome.ENV_TRUNCATED, None, ""
            observation = reply.observation
        piece = say.reply(chat, completion.tokens, observation)
    return Outcome.TURN_LIMIT, None, ""


def _episode(
    plan: Play,
    config: AgentConfig,
    record: Recorder,
    turns: list[Turn],
    outcome: Outcome,
    last_reward: float | None,
    detail: str,
) -> Episode:
    episode_return: float | None = 0.0
    if outcome.void:
        episode_return = None
    elif last_reward is not None:
        episode_return = max(-1.0, min(1.0, last_reward))
    return Episode(
        episode_id=plan.episode_id,
        environment_id=plan.environment.environment_id,
        arm=plan.arm,
        seed=plan.seed,
        play_index=plan.play_index,
        outcome=outcome,
        episode_return=episode_return,
        turns=tuple(turns),
        trajectory=record.build(config.temperature),
        step=plan.step,
        detail=detail,
    )
