"""The losses of the learner, each a file of pure functions that return sums with their counts."""

from jaxtyping import Array, Float

from spade_jax.learner.losses.cispo import cispo
from spade_jax.learner.losses.dr_grpo import dr_grpo
from spade_jax.learner.losses.grpo import grpo
from spade_jax.learner.losses.gspo import gspo
from spade_jax.learner.losses.rloo import rloo
from spade_jax.learner.losses.tokens import Terms, Tokens
from spade_jax.learner_config import LearnerConfig

__all__ = ["policy_loss"]


def policy_loss(
    config: LearnerConfig, tokens: Tokens, importance: Float[Array, "rows seq"]
) -> Terms:
    """Apply the loss that the settings name."""
    clips = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    match config.loss:
        case "grpo":
            return grpo(tokens, importance, **clips, dual_clip=config.dual_clip)
        case "dr_grpo":
            return dr_grpo(tokens, importance, **clips, dual_clip=config.dual_clip)
        case "gspo":
            return gspo(tokens, importance, **clips)
        case "cispo":
            return cispo(tokens, importance, **clips)
        case "rloo":
            return rloo(tokens, importance)
