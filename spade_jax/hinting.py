"""The hint of an admitted design: whose it is, what it is for, and what refuses it.

    hint.source   policy: a call of its own, from the program; designer: it stands in the design
    hint.scope    program: one for all instances; seed: one for each instance that is played with it

Where no reward looks at the regret there is no hint. Hints are measured, not trained.
"""

from dataclasses import replace
from typing import Any

from spade_jax.config import Config
from spade_jax.envs.hint_gates import admit_hint
from spade_jax.roles import hints
from spade_jax.rollout.keys import episode_key, named_seed
from spade_jax.stage import Stage, instance_seeds
from spade_jax.types import (
    Design,
    EnvironmentSource,
    Fault,
    Gate,
    GateResult,
    Measures,
    Outcome,
    Verdict,
)


async def hinted(
    stage: Stage, draft: Design, source: EnvironmentSource, written: str | None
) -> Design:
    """The admitted design with its hint, or refused by a gate of hints; `written` is the hint in
    the design's own completion, if any.
    """
    config = stage.config
    if not config.reward.needs_regret:
        return replace(draft, hint="")
    if config.hint.source == "designer":
        verdict = await _admitted(stage, draft, source, written, None)
        return replace(joined(draft, verdict), hint=written if verdict.admitted else None)
    if config.hint.scope == "program":
        draft, hint = await _write(stage, draft, source, None, None)
        return replace(draft, hint=hint)
    for seed in instance_seeds(config, source.environment_id, draft.cycle * config.run.cycle_steps):
        opened = await stage.pool.open(source.program, seed)
        if isinstance(opened, Fault):
            ours = opened.outcome is Outcome.INFRASTRUCTURE
            gate = Gate.INFRASTRUCTURE if ours else Gate.CONTRACT
            return joined(draft, at_gate(gate, f"seed {seed}: {opened.outcome}: {opened.detail}"))
        await opened.close()
        draft, hint = await _write(stage, draft, source, seed, opened.observation)
        if hint is None:
            return draft
        draft = replace(draft, seed_hints=draft.seed_hints | {str(seed): hint})
    return replace(draft, hint="")


async def _write(
    stage: Stage,
    draft: Design,
    source: EnvironmentSource,
    seed: int | None,
    observation: str | None,
) -> tuple[Design, str | None]:
    """Have the policy write a hint: the design with what it took, and the hint if it passed."""
    config = stage.config
    name = draft.design_id if seed is None else f"{draft.design_id}/{seed}"
    result = await hints.write(
        stage.engine,
        stage.chat,
        config.hint,
        config.designer.prompt,
        source.program,
        observation,
        lambda attempt: episode_key(config.run.seed, f"hint/{name}/{attempt}"),
        lambda hint: _admitted(stage, draft, source, hint, seed),
    )
    design = replace(
        joined(draft, result.verdict),
        hint_completion=result.completion,
        hint_tokens=draft.hint_tokens + result.tokens,
    )
    return design, result.hint


async def _admitted(
    stage: Stage, draft: Design, source: EnvironmentSource, hint: str | None, seed: int | None
) -> Verdict:
    """The verdict of the gates of hints; one that is for a single instance is tried on that."""
    how = tried(stage.config, draft.design_id)
    if seed is not None:
        how |= {"solution_seeds": [seed], "probe_seeds": [seed]}
    return await admit_hint(
        stage.pool, source.program, hint, **how, max_words=stage.config.hint.max_words
    )


def tried(config: Config, design_id: str) -> dict[str, Any]:
    """How a design and its hint are tried."""
    seed, envs = config.run.seed, config.envs
    return {
        "solution_seeds": [
            named_seed(seed, "solve", design_id, i) for i in range(envs.admit_seeds)
        ],
        "probe_seeds": [named_seed(seed, "probe", design_id, i) for i in range(envs.probe_seeds)],
        "max_probe_win_frac": envs.max_probe_win_frac,
        "max_turns": config.agent.max_turns,
        "rng_seed": named_seed(seed, "player", design_id),
    }


def at_gate(gate: Gate, reason: str) -> Verdict:
    """The verdict of a design that one gate refused."""
    return Verdict(False, gate, reason, gates={gate: GateResult.REFUSED})


def joined(draft: Design, later: Verdict) -> Design:
    """The design with the verdict of later gates; what the earlier ones found stays."""
    earlier = draft.verdict
    measures: Measures = {**earlier.measures, **later.measures}
    verdict = replace(later, measures=measures, gates=earlier.gates | later.gates)
    return replace(draft, verdict=verdict)
