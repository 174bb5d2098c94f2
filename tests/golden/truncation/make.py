"""Makes goldens.npz: what transformers' own logits processors leave of random scores.

Run by hand, with torch and transformers, which the project does not depend on (made with torch
2.13.0 and transformers 5.24.0, on CPU):

    python tests/golden/truncation/make.py

`scores` are three rows: peaked, flat, and falling like word frequencies with a few at -inf.
`params` are (row, temperature, top_k, top_p, min_p); `logprobs` are those of each, -inf where a
token is removed. The processors run in the order of `GenerationMixin._get_logits_processor`.
"""

import itertools
from pathlib import Path

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

VOCAB = 700  # not a multiple of the groups that the sampler draws in
TRUNCATIONS = [
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (40, 1.0, 0.0),
    (300, 1.0, 0.0),
    (0, 0.9, 0.0),
    (0, 0.05, 0.0),
    (0, 0.999, 0.0),
    (0, 1.0, 0.1),
    (0, 1.0, 1.0),
    (40, 0.7, 0.0),
    (20, 1.0, 0.3),
    (0, 0.95, 0.02),
    (200, 0.9, 0.05),
]


def make_scores() -> np.ndarray:
    """Return the three rows."""
    rng = np.random.default_rng(5)
    peaked, flat = rng.normal(size=(2, VOCAB)) * [[5.0], [0.3]]
    falling = -1.2 * np.log1p(rng.permutation(VOCAB)) + rng.normal(size=VOCAB)
    falling[rng.permutation(VOCAB)[:60]] = -np.inf
    return np.stack([peaked, flat, falling]).astype(np.float32)


def left(scores: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float):
    """Return the log-probabilities after all processors."""
    chain = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        chain.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        chain.append(TopPLogitsWarper(top_p))
    if min_p:
        chain.append(MinPLogitsWarper(min_p))
    processed = chain(torch.zeros((1, 1), dtype=torch.long), torch.tensor(scores)[None])
    return torch.log_softmax(processed.double(), dim=-1)[0].float().numpy()


def main() -> None:
    """Write every row with every temperature and truncation."""
    scores = make_scores()
    params = [
        (row, temperature, *truncation)
        for row, temperature, truncation in itertools.product(
            range(len(scores)), (0.5, 1.0, 3.0), TRUNCATIONS
        )
    ]
    logprobs = np.stack([left(scores[row], *rest) for row, *rest in params])
    path = Path(__file__).with_name("goldens.npz")
    np.savez_compressed(path, scores=scores, params=np.array(params), logprobs=logprobs)
    kept = np.isfinite(logprobs).sum(axis=1)
    print(f"{len(params)} cases, {kept.min()} to {kept.max()} tokens kept, {path.stat().st_size} B")


if __name__ == "__main__":
    main()
