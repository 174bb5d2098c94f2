"""The programs that the long prompts show are admitted, and a copy of one is refused."""

import asyncio

import pytest

from spade_jax.envs.admit import admit
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool
from spade_jax.envs_config import EnvsConfig
from spade_jax.roles import prompts
from spade_jax.roles_config import TOOL_PROMPTS
from spade_jax.rollout.keys import named_seed


@pytest.fixture(scope="module")
def judged():
    """A function: the verdict on a program by the settings of a run."""
    with asyncio.Runner() as runner:
        pool = Pool(Limits())
        runner.run(pool.start())
        envs = EnvsConfig()

        def judge(program, max_turns, known):
            return runner.run(
                admit(
                    pool,
                    program,
                    solution_seeds=[named_seed(0, "solve", i) for i in range(envs.admit_seeds)],
                    probe_seeds=[named_seed(0, "probe", i) for i in range(envs.probe_seeds)],
                    max_probe_win_frac=envs.max_probe_win_frac,
                    max_turns=max_turns,
                    rng_seed=7,
                    known=known,
                    duplicate_similarity=envs.duplicate_similarity,
                )
            )

        yield judge
        runner.run(pool.close())


@pytest.mark.parametrize("kind", sorted(prompts.WORKED))
@pytest.mark.parametrize("max_turns", [12, 25])
def test_a_worked_example_is_admitted(judged, kind, max_turns):
    verdict = judged(prompts.WORKED[kind], max_turns, {})
    assert verdict.admitted, verdict
    assert verdict.measures["num_instances"] == 25
    assert (verdict.gates["criteria"] == "passed") == (kind in TOOL_PROMPTS)


def test_a_copy_of_the_worked_example_is_refused(judged):
    program = prompts.WORKED["corpus"]
    verdict = judged(program.replace("carve", "chop"), 25, {"of the prompt": program})
    assert (verdict.gate, "of the prompt" in verdict.reason) == ("duplicate", True)
