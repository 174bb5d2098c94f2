"""A file of prompts, completed."""

import asyncio
import logging
import math
import signal
import time
from typing import Any

import numpy as np
from jaxtyping import Int

from models.tokenizer import Tokenizer
from spade_jax.errors import SamplerError
from spade_jax.generate.files import Completions
from spade_jax.generate.options import Options
from spade_jax.generate.policy import Policy
from spade_jax.rollout.engine import Engine
from spade_jax.rollout.keys import episode_key
from spade_jax.types import Completion, Stop

logger = logging.getLogger(__name__)

SLOTS = 32
PROGRESS_S = 10.0


def complete(
    policy: Policy, options: Options, prompts: list[Int[np.ndarray, "_"]], out: Completions
) -> int:
    """Complete all prompts, and write each completion in its place."""
    longest = max(map(len, prompts)) + options.max_tokens
    context = options.context or min(64 * math.ceil(longest / 64), policy.config.max_positions)
    slots = min(options.slots or SLOTS, len(prompts))
    engine = policy.engine(slots=slots, context=context, queue=slots, decode_steps=32)
    batch = _Batch(engine, policy, options, out)
    started = time.perf_counter()
    asyncio.run(batch.run(prompts))
    seconds = time.perf_counter() - started
    logger.info(
        "%s: %d completions, %d tokens in %.1f s (%.0f a second)",
        options.out,
        out.num_written,
        batch.num_tokens,
        seconds,
        batch.num_tokens / max(seconds, 1e-9),
    )
    if batch.stopped:
        logger.info("interrupted: what was not finished is marked %s", Stop.CANCELLED)
        return 130
    if batch.num_failed:
        logger.info("%d prompts failed: see their error", batch.num_failed)
    return 1 if batch.num_failed else 0


class _Batch:
    """All prompts of a file on their way through the engine."""

    def __init__(self, engine: Engine, policy: Policy, options: Options, out: Completions) -> None:
        self._engine = engine
        self._tokenizer: Tokenizer = policy.tokenizer
        self._params = policy.sampling(options.stop)
        self._seed = options.seed
        self._out = out
        self._told = time.monotonic()
        self.stopped = False
        self.num_tokens = 0
        self.num_failed = 0

    async def run(self, prompts: list[Int[np.ndarray, "_"]]) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._stop)
        try:
            await self._engine.gather(
                [self._one(index, len(prompts), tokens) for index, tokens in enumerate(prompts)]
            )
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    def _stop(self) -> None:
        """At the first interrupt keep what there is; a second one ends the process as usual."""
        self.stopped = True
        self._engine.stop()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    async def _one(self, index: int, total: int, tokens: Int[np.ndarray, " seq"]) -> None:
        key = episode_key(self._seed, f"prompt/{index}")
        try:
            completion = await self._engine.generate(tokens, self._params, key)
        except SamplerError as error:
            failure: dict[str, Any] = {"stop": Stop.CANCELLED}
            if not self.stopped:
                self.num_failed += 1
                failure = {"stop": "error", "error": str(error)}
            self._out.put(index, {"text": "", "tokens": [], "logprobs": []} | failure)
            return
        self.num_tokens += len(completion.tokens)
        self._out.put(index, _record(self._tokenizer, completion))
        if time.monotonic() - self._told > PROGRESS_S:
            self._told = time.monotonic()
            logger.info("%d of %d written", self._out.num_written, total)


def _record(tokenizer: Tokenizer, completion: Completion) -> dict[str, Any]:
    tokens = completion.tokens.tolist()
    return {
        "text": tokenizer.decode(tokens),
        "tokens": tokens,
        "logprobs": completion.logprobs.tolist(),
        "stop": completion.stop,
    }
