"""Dr.GRPO: the surrogate of GRPO without its two biases.

What differs lies outside the surrogate, where the settings hold it to the name: advantages are not
divided by the spread of their group (`reward.agent_norm="mean"`), so that easy and hard groups
weigh alike; and tokens are summed over a constant (`reduction="constant"`), so that a long wrong
answer is not punished less per token than a short one.
"""

from spade_jax.learner.losses.grpo import grpo

dr_grpo = grpo
