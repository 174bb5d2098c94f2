"""The policy reads a program and says whether its goals can be reached. An option: the tests of
admission have already replayed the program's own solution.

It reads neither comments nor docstrings, in which a designer could speak to it. It fails closed: no
verdict, an unclear one, or no room to give one refuses the program, where the reference accepts on
any error. Its completions are measured, not trained.
"""

import jax

from spade_jax.config import DesignerConfig
from spade_jax.errors import SamplerError
from spade_jax.roles import digests, parsing, prompts
from spade_jax.roles.designer import Sampler, opening
from spade_jax.rollout.chat import Chat
from spade_jax.types import Gate, GateResult, SamplingParams, Stop, Verdict

_MAX_REASON_CHARS = 300


async def judge(
    engine: Sampler, chat: Chat, config: DesignerConfig, program: str, key: jax.Array
) -> tuple[Verdict, int]:
    """The verdict of the gate `judge`, and how many tokens were sampled for it."""
    chat = chat.with_thinking(config.thinking)
    params = SamplingParams(config.judge_temperature, config.judge_max_tokens, chat.stop_ids)
    prompt = opening(chat, prompts.judge(config.prompt, digests.code(program)))
    try:
        completion = await engine.generate(prompt, params, key)
    except SamplerError as error:
        return _refused(f"the judge was not asked: {error}"), 0
    text = chat.decode(completion.tokens)
    count = len(completion.tokens)
    if completion.stop is not Stop.STOP_ID:  # what would have followed may take a verdict back
        return _refused(f"the judge's verdict was cut off ({completion.stop})"), count
    match parsing.verdict(text):
        case True:
            return Verdict(True, gates={Gate.JUDGE: GateResult.PASSED}), count
        case False:
            return _refused(f"the judge found: {text.strip()[-_MAX_REASON_CHARS:]}"), count
        case None:
            return _refused("the judge gave no verdict, neither yes nor no in a box"), count


def _refused(reason: str) -> Verdict:
    shown = "".join(c if c.isprintable() else " " for c in reason)
    return Verdict(False, Gate.JUDGE, shown, gates={Gate.JUDGE: GateResult.REFUSED})
