"""The settings of the rewards and of their normalisation (paper section 3). The formulas are in
`rewards`, each in the module of its name.
"""

from dataclasses import dataclass
from typing import Literal

from spade_jax.settings import Section, require

RewardKind = Literal[
    "blend",
    "regret",
    "learning_potential",
    "solve_rate",
    "micro_learning_potential",
    "frontier",
]


@dataclass(frozen=True)
class RewardConfig(Section):
    """What the designer earns and how both roles are normalised."""

    # what an admitted environment earns: the blend, max(0, regret), learning potential of its
    # skill, the anchor alone, max(0, micro learning potential), or the frontier term alone
    kind: RewardKind = "blend"
    anchor_weight: float = 0.6  # blend: weight of the win-rate anchor
    regret_weight: float = 0.4  # blend: weight of the clipped regret
    micro_weight: float = 0.0  # blend: weight of the micro learning potential
    frontier_weight: float = 0.0  # blend: weight of the frontier term
    # what anchor and frontier read: binary wins with the anchor times their share of variance
    # within instances, wins alone, or the mean return (the reference)
    anchor_on: Literal["wins_within_seeds", "wins", "mean_return"] = "wins_within_seeds"
    band_low: float = 0.4  # win rate at which the anchor reaches 1
    band_high: float = 0.6  # win rate up to which the anchor is 1
    band_ramp: float = 0.25  # distance from the band at which the anchor is 0
    # which plays the regret compares (`rewards.regret`): the arms' means, pairs on one instance, or
    # pairs and all later unhinted plays
    regret_estimator: Literal["reference", "paired", "accumulated"] = "paired"
    # what a noisy regret is worth (`rewards.caution`). Shrinking pays a useless hint at most 0.10
    # of the maximum, where the regret as measured pays 0.25 to 0.33, and ranks a true gap above it
    # at least as often; a lower bound pays still less, but half of its ranks are ties at 0
    regret_caution: Literal["none", "shrunk", "lower_bound"] = "shrunk"
    regret_prior: float = 0.08  # shrunk: spread of true regrets that is believed beforehand
    regret_errors: float = 1.0  # lower_bound: standard errors taken off
    regret_scale: float = 0.15  # blend: regret at which its term saturates
    regret_clip: bool = True  # blend: cut the regret's term to 0 to 1
    # gain over the steps of a cycle by a line through them, or later half minus earlier half
    micro_method: Literal["slope", "halves"] = "slope"
    micro_scale: float = 0.1  # blend: gain that counts as 1
    frontier_scale: float = 0.08  # squared distance from a win rate of 0.5 that counts as -1
    tracker_fast: float = 0.98  # weight of the new value in a skill's fast tracker
    tracker_slow: float = 0.85  # weight of the new value in the slow one, learning potential's base
    variance_bonus: bool = False  # learning_potential: add the bonus for returns that differ
    # who is punished: refused designs and programs that break in play; only hangs in play (the
    # reference's regret); or nobody (its blend). Refused designs are not trained on otherwise
    punish: Literal["all", "hangs", "none"] = "all"
    invalid_reward: float = -0.5  # no program, or none that runs as the contract says
    unsound_reward: float = -0.5  # a program that cannot be won, or is won without thought
    duplicate_reward: float = -0.5  # a near-duplicate
    hint_reward: float = -0.5  # a program whose hint was refused
    hang_reward: float = -0.5  # an admitted program that missed a deadline in play
    fault_reward: float = -0.5  # an admitted program that raised or broke its contract in play
    # the agent's groups: plays of one instance, or all plays of an environment (the reference)
    agent_group: Literal["environment_seed", "environment"] = "environment_seed"
    agent_norm: Literal["mean", "mean_std", "rloo"] = "mean_std"  # normalisation in such a group
    designer_norm: Literal["mean", "mean_std", "rloo"] = "mean_std"  # normalisation within a skill
    # episodes cut by a limit count in their group's mean, but are not trained on (the reference's
    # compact filter, in its tool recipes)
    compact_filter: bool = False
    # how the roles are balanced: by learner.designer_weight on the mean of each role's loss, or
    # as in the reference by the number of trajectories and a factor of up to 50 on the designer's
    designer_scale: Literal["role_weight", "reference"] = "role_weight"

    def __post_init__(self) -> None:
        require(
            0 <= self.band_low <= self.band_high <= 1,
            "reward.band_low, reward.band_high",
            (self.band_low, self.band_high),
            "0 <= band_low <= band_high <= 1",
        )
        for name in ("band_ramp", "regret_prior", "regret_scale", "micro_scale", "frontier_scale"):
            require(
                getattr(self, name) > 0, f"reward.{name}", getattr(self, name), "a positive number"
            )
        weights = ("anchor_weight", "regret_weight", "micro_weight", "frontier_weight")
        for name in (*weights, "regret_errors"):
            require(getattr(self, name) >= 0, f"reward.{name}", getattr(self, name), "0 or more")
        require(
            self.kind != "blend" or any(getattr(self, name) for name in weights),
            "reward." + ", reward.".join(weights),
            tuple(getattr(self, name) for name in weights),
            'a positive weight for reward.kind="blend"',
        )
        require(
            0 < self.tracker_slow < self.tracker_fast <= 1,
            "reward.tracker_slow, reward.tracker_fast",
            (self.tracker_slow, self.tracker_fast),
            "0 < tracker_slow < tracker_fast <= 1",
        )
        for name in ("invalid", "unsound", "duplicate", "hint", "hang", "fault"):
            value = getattr(self, f"{name}_reward")
            require(-1 <= value <= 0, f"reward.{name}_reward", value, "-1 to 0")

    @property
    def needs_regret(self) -> bool:
        """Whether plays with the hint are needed."""
        return self.kind == "regret" or (self.kind == "blend" and self.regret_weight > 0)

    @property
    def needs_steps(self) -> bool:
        """Whether an environment must be played in several steps before its design is scored."""
        blended = self.kind == "blend" and self.micro_weight > 0
        return blended or self.kind == "micro_learning_potential"
