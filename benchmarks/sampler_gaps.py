"""Log-probabilities of the sampler against those of the learner's forward on the same tokens.

In float32, in bfloat16 over many turns, with int8 weights in the sampler, and in float32 on the
embedded policy. Of int8 there is no goal: what it costs is printed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sampler_ours import ROOT, Model, goal, load_model, make_engine, play, say
from sampler_workload import Scripted

from models.backends import compiler_options
from models.sharding import build_mesh
from models.tokenizer import load_tokenizer
from models.transformer import forward, logits
from spade_jax.types import Trajectory

WIDTH = 256  # rows are padded to a multiple of this
CHUNK = 128  # sampled tokens whose scores of the whole vocabulary exist at one time
LONG_TURNS, TURN_TOKENS, LONG_EPISODES = 25, 16, 8
MARGIN = 1.25
"""What the last five turns may have more than the first five before it is called drift."""
INT8_EPISODES, INT8_PROMPT, INT8_LENGTHS = 16, 200, [128]
TINY_EPISODES, TINY_PROMPT, TINY_LENGTHS, TINY_REPLY = 16, 300, [200, 150], 40
EXACT_SLOTS = 64  # of configs/tiny.py: with fewer rows a CPU sums products in another order


def gaps(model: Model, trajectories: list[Trajectory]) -> list[np.ndarray]:
    """Absolute difference at each sampled token of each trajectory."""
    config, execution = model.config, model.execution
    options = compiler_options(build_mesh(1, 1, 1, 1, jax.devices()[:1]))  # as the learner has them

    @functools.partial(jax.jit, compiler_options=options)
    def hidden(params: Any, tokens: Any, segments: Any) -> Any:
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        out = forward(config, params, tokens, positions, segment_ids=segments, execution=execution)
        return out.hidden[0]

    @functools.partial(jax.jit, compiler_options=options)
    def chosen(params: Any, rows: Any, targets: Any) -> Any:
        scores = jax.nn.log_softmax(logits(config, params, rows).astype(jnp.float32), axis=-1)
        return jnp.take_along_axis(scores, targets[:, None], axis=-1)[:, 0]

    found = []
    for trajectory in trajectories:
        size = len(trajectory.tokens)
        tokens = np.zeros((1, -(-size // WIDTH) * WIDTH), np.int32)
        tokens[0, :size] = trajectory.tokens
        segments = (np.arange(tokens.shape[1]) < size).astype(np.int32)[None]
        states = np.asarray(hidden(model.params, tokens, segments))
        places = np.flatnonzero(trajectory.loss_mask)
        learner = []
        for start in range(0, len(places), CHUNK):
            part = np.resize(places[start : start + CHUNK], CHUNK)  # the last chunk repeats itself
            learner.append(chosen(model.params, states[part - 1], tokens[0, part]))
        logprobs = np.concatenate([np.asarray(part) for part in learner])[: len(places)]
        found.append(np.abs(logprobs - trajectory.sampler_logprobs[places]))
    return found


def float32(model: Model, trajectories: list[Trajectory]) -> list[dict[str, Any]]:
    """Mean and largest gap."""
    found = np.concatenate(gaps(model, trajectories))
    say(f"float32 gap over {len(found)} tokens: mean {found.mean():.2e}, max {found.max():.2e}")
    return [
        goal("logprob_gap_float32_mean", float(found.mean()), 1e-5, least=False),
        goal("logprob_gap_float32_max", float(found.max()), 2e-4, least=False),
    ]


def bfloat16(model: Model, text: list[int]) -> list[dict[str, Any]]:
    """Mean gap over 25 turns, and whether it grows with them."""
    episodes = []
    for index in range(LONG_EPISODES):
        pieces = [
            text[(index * LONG_TURNS + turn) * TURN_TOKENS :][:TURN_TOKENS]
            for turn in range(LONG_TURNS)
        ]
        episodes.append(Scripted(index, pieces[0], [TURN_TOKENS] * LONG_TURNS, pieces[1:]))
    engine = make_engine(model, EXACT_SLOTS, episodes[0].context_tokens)
    played = play(engine, model, episodes)
    by_turn: list[list[np.ndarray]] = [[] for _ in range(LONG_TURNS)]
    for trajectory, found in zip(
        played.trajectories, gaps(model, played.trajectories), strict=True
    ):
        turns = trajectory.turn_index[trajectory.loss_mask]
        for turn in range(LONG_TURNS):
            by_turn[turn].append(found[turns == turn])
    means = [float(np.concatenate(parts).mean()) for parts in by_turn]
    first, last = float(np.mean(means[:5])), float(np.mean(means[-5:]))
    say(
        f"bfloat16 gap of {LONG_TURNS} turns: mean {np.mean(means):.2e}, first five {first:.2e}, "
        f"last five {last:.2e}; by turn {[f'{mean:.1e}' for mean in means]}"
    )
    return [
        goal("logprob_gap_bfloat16_mean", float(np.mean(means)), 5e-3, least=False),
        goal("logprob_gap_bfloat16_last_over_first_turns", last / first, MARGIN, least=False),
    ]


def int8(model: Model, text: list[int]) -> None:
    """Print how far a sampler with int8 weights is from the learner, which keeps its own."""
    episodes = [
        Scripted(index, text[index * INT8_PROMPT :][:INT8_PROMPT], INT8_LENGTHS, [])
        for index in range(INT8_EPISODES)
    ]
    context = episodes[0].context_tokens
    engine = make_engine(model, INT8_EPISODES, context, weights="int8")
    found = np.concatenate(gaps(model, play(engine, model, episodes).trajectories))
    say(
        f"int8 weights in the sampler, gap over {len(found)} tokens: mean {found.mean():.2e}, "
        f"median {np.median(found):.2e}, max {found.max():.2e}"
    )


def embedded() -> list[dict[str, Any]]:
    """The largest gap of the policy that `configs/tiny.py` starts from, among programs, of which it
    writes.
    """
    folder = ROOT / "assets" / "tiny"
    model = load_model(folder, "float32")
    families = sorted((ROOT / "spade_jax" / "envs" / "library").glob("*families.py"))
    source = "\n".join(file.read_text(encoding="utf-8") for file in families)
    text = np.asarray(load_tokenizer(folder).encode(source)).tolist()
    apart = TINY_PROMPT + TINY_REPLY
    pieces = [text[index * apart :][:apart] for index in range(TINY_EPISODES)]
    episodes = [
        Scripted(index, piece[:TINY_PROMPT], TINY_LENGTHS, [piece[TINY_PROMPT:]])
        for index, piece in enumerate(pieces)
    ]
    engine = make_engine(model, EXACT_SLOTS, episodes[0].context_tokens)
    found = np.concatenate(gaps(model, play(engine, model, episodes).trajectories))
    say(f"tiny, gap over {len(found)} tokens: mean {found.mean():.2e}, max {found.max():.2e}")
    return [goal("logprob_gap_tiny_float32_max", float(found.max()), 1e-5, least=False)]
