"""What a role asks of the sampler, out of its section of the configuration. No wording."""

from spade_jax.roles_config import AgentConfig, DesignerConfig, HintConfig
from spade_jax.rollout.chat import Chat
from spade_jax.types import SamplingParams


def sampling(
    section: DesignerConfig | HintConfig | AgentConfig, chat: Chat, max_tokens: int
) -> SamplingParams:
    """How to sample one completion of at most `max_tokens` in `chat`."""
    return SamplingParams(
        section.temperature,
        max_tokens,
        chat.stop_ids,
        section.top_p,
        section.top_k,
        section.min_p,
        thinking_tokens=section.thinking_tokens,
        thinking=chat.thinking_block,
    )
