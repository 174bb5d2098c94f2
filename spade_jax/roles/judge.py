"""The judge: the policy itself says whether a program can be won by a player who sees only what the
environment shows.

It comes after the mechanical gates, which have replayed the program's own solution; what is left
for it are messages that no reading of the observations leads to. It fails closed: no verdict, a
verdict that was cut off and a sampler that failed all refuse (the reference accepts then, weakness
14). Its completions are measured, not trained.
"""

import jax

from spade_jax.errors import SamplerError
from spade_jax.roles import parsing
from spade_jax.roles.designer import Sampler
from spade_jax.roles_config import JudgeConfig
from spade_jax.rollout.chat import Chat
from spade_jax.types import Completion, SamplingParams, Stop

PROMPT = """Below is a program that poses a task to a player. The player never sees the program, \
only what reset and step return and the tools if it has any.

```python
{program}
```

Go through what is asked for, one item at a time:
1. Which calls or actions bring it about, and does each of them succeed when it is tried?
2. Can the player find every value they need, in the text shown or by asking a tool?
3. Does the check compare values of one type, and does it check what the text asks for?
4. Is it open when the episode starts, rather than met before anything was done?

The task is unsound only if something asked for can never be met, contradicts another item, \
compares values that are never equal, needs what the player has no way of finding out, or is met \
from the start. That it is long or hard is no reason, nor that a value has to be discovered first.

End with \\boxed{{yes}} if the task can be solved, or \\boxed{{no}} if it is unsound."""

ACCEPTED = frozenset({"yes", "y", "true"})


async def judge(
    engine: Sampler, chat: Chat, config: JudgeConfig, program: str, key: jax.Array
) -> tuple[Completion | None, str]:
    """Ask for a verdict: the completion if there was one, and why the program is refused or ""."""
    chat = chat.with_thinking(config.thinking)
    params = SamplingParams(config.temperature, config.max_tokens, chat.stop_ids)
    try:
        prompt = chat.open(PROMPT.format(program=program.rstrip()))
        completion = await engine.generate(prompt, params, key)
    except SamplerError as error:
        return None, f"the judge could not be asked: {error}"
    if completion.stop is not Stop.STOP_ID:
        return completion, f"the judge's verdict was cut off ({completion.stop})"
    verdict = parsing.action(chat.decode(completion.tokens))
    if verdict is None:
        return completion, "the judge gave no verdict"
    if verdict.strip().lower() not in ACCEPTED:
        return completion, f"the judge finds that it cannot be solved: {verdict[:40]!r}"
    return completion, ""
