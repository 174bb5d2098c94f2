"""What admission says to sound programs: draws of the environment library, on documents.

    python benchmarks/admission.py [--programs 60] [--seed 0]

Needs nothing beyond the package. Families and difficulties are drawn in equal shares, each on the
rare words of a document of its own; the programs before a program are its memory, and every hint is
tried. The last line is JSON.
"""

import argparse
import asyncio
import json
import random
import time
from collections import Counter

from spade_jax.config import Config
from spade_jax.envs.admit import admit
from spade_jax.envs.hint_gates import admit_hint
from spade_jax.envs.library import FAMILIES, Draw
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool
from spade_jax.roles.corpus import Corpus, excerpt
from spade_jax.roles.designer import MAX_TERMS
from spade_jax.roles.examples import DIFFICULTIES, MIN_TERMS
from spade_jax.types import Verdict

GOAL = 0.95


def draws(count: int, seed: int) -> list[Draw]:
    """Programs of all families and difficulties, in equal shares."""
    config, rng = Config(), random.Random(seed)
    corpus = Corpus.load(config.corpus, seed)
    found = []
    while len(found) < count:
        shown = excerpt(corpus[rng.randrange(len(corpus))], config.designer.document_words)
        terms = corpus.rare_terms(shown)[:MAX_TERMS]
        if len(terms) >= MIN_TERMS:
            family = FAMILIES[len(found) % len(FAMILIES)]
            difficulty = DIFFICULTIES[len(found) // len(FAMILIES) % len(DIFFICULTIES)][0]
            found.append(family.draw(rng, terms, difficulty))
    return found


async def judge(programs: list[Draw], seed: int) -> list[tuple[Draw, Verdict]]:
    """The verdict on each program, or on its hint when the program is admitted."""
    envs, rng = Config().envs, random.Random(seed)
    judged, known = [], {}
    async with Pool(Limits()) as pool:
        for index, draw in enumerate(programs):
            how = {
                "solution_seeds": [rng.randrange(2**31) for _ in range(envs.admit_seeds)],
                "probe_seeds": [rng.randrange(2**31) for _ in range(envs.probe_seeds)],
                "max_probe_win_frac": envs.max_probe_win_frac,
                "max_turns": Config().agent.max_turns,
                "rng_seed": rng.randrange(2**31),
            }
            verdict = await admit(
                pool,
                draw.program,
                **how,
                known=known,
                duplicate_similarity=envs.duplicate_similarity,
            )
            if verdict.admitted:
                known[f"program {index}"] = draw.program
                words = Config().hint.max_words
                verdict = await admit_hint(pool, draw.program, draw.hint, **how, max_words=words)
            judged.append((draw, verdict))
    return judged


def main() -> None:
    """Judge the programs and print what was refused."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--programs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    programs = draws(arguments.programs, arguments.seed)
    start = time.process_time()
    judged = asyncio.run(judge(programs, arguments.seed))
    cpu_s = (time.process_time() - start) / len(judged)
    for draw, verdict in judged:
        if not verdict.admitted:
            print(f"{draw.family}: {verdict.gate}: {verdict.reason}")
    gates = Counter(verdict.gate for _, verdict in judged if not verdict.admitted)
    frac = sum(verdict.admitted for _, verdict in judged) / len(judged)
    print(f"admitted {frac:.3f} of {len(judged)}, refused by {dict(gates)}")
    print(f"{cpu_s:.3f} s of the trainer's processor time each")
    goal = {"name": "library_admitted_frac", "value": frac, "goal": GOAL, "holds": frac >= GOAL}
    print(json.dumps({"goals": [goal]}))


if __name__ == "__main__":
    main()
