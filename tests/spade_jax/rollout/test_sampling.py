"""The sampling rule against transformers' processors, a sort, and the exact distribution."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from scipy import stats

from models.sharding import build_mesh
from spade_jax.errors import SamplerError
from spade_jax.rollout.sampling import Drawn, Rule, check_params, draw
from spade_jax.types import SamplingParams

GOLDENS = np.load(Path(__file__).resolve().parents[2] / "golden" / "truncation" / "goldens.npz")
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
EVERY_WAY = [
    {},
    {"temperature": 0.6},
    {"temperature": 1e-6},
    {"temperature": 1e12},
    {"temperature": 0.0},
    {"top_k": 7},
    {"top_k": 150},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
]
drawing = jax.jit(draw)


def rule(rows: int, params: dict | list[dict], seed: int = 0, keys: object = None) -> Rule:
    """The same parameters for all rows, or those of each; row i has the key of number i."""
    each = [OFF | p for p in (params if isinstance(params, list) else [params] * rows)]
    if keys is None:
        keys = jax.random.split(jax.random.key(seed), rows)
    column = {name: np.array([p[name] for p in each]) for name in OFF}
    return Rule(
        jax.random.key_data(keys),
        jnp.asarray(column["temperature"], jnp.float32),
        jnp.asarray(column["top_p"], jnp.float32),
        jnp.asarray(column["min_p"], jnp.float32),
        jnp.asarray(column["top_k"], jnp.int32),
    )


def positions(rows: int) -> jax.Array:
    return jnp.arange(rows, dtype=jnp.int32)


def drawn(scores: np.ndarray, how: Rule, at: jax.Array | None = None) -> Drawn:
    at = positions(len(scores)) if at is None else at
    return Drawn(*map(np.asarray, drawing(jnp.asarray(scores, jnp.float32), how, at)))


def many(scores: np.ndarray, params: dict, count: int, seed: int = 0) -> Drawn:
    """Draws from one row of scores under as many keys."""
    return drawn(np.tile(scores, (count, 1)), rule(count, params, seed))


def exact(scores: np.ndarray, params: dict) -> np.ndarray:
    """The distribution in float64, by sorting: independent of how it is sampled."""
    p = OFF | params
    tempered = (scores - scores.max()).astype(np.float64) / p["temperature"]
    order = np.argsort(-tempered, kind="stable")
    weights = np.exp(tempered[order])
    if 0 < p["top_k"] < len(scores):
        weights[tempered[order] < tempered[order][p["top_k"] - 1]] = 0
    if p["top_p"] < 1:
        before = np.cumsum(weights) - weights
        least = tempered[order][before < p["top_p"] * weights.sum()].min()
        weights[tempered[order] < least] = 0
    weights[weights < p["min_p"]] = 0
    found = np.empty_like(weights)
    found[order] = weights / weights.sum()
    return found


@pytest.mark.parametrize("row", range(3))
def test_keeps_what_the_processors_of_transformers_keep(row: int):
    scores = GOLDENS["scores"]
    cases = [(p, q) for p, q in zip(GOLDENS["params"], GOLDENS["logprobs"], strict=True)]
    cases = [(p, q) for p, q in cases if p[0] == row]
    assert len(cases) == 39
    for (_, temperature, top_k, top_p, min_p), expected in cases:
        params = {"temperature": temperature, "top_k": int(top_k), "top_p": top_p, "min_p": min_p}
        result = many(scores[row], params, 256)
        # A token more or less would change the log-probability of all others.
        np.testing.assert_allclose(result.logprobs, expected[result.tokens], atol=1e-5)
        plain = exact(scores[row], {"temperature": temperature})
        np.testing.assert_allclose(result.untruncated, np.log(plain[result.tokens]), atol=1e-5)


@pytest.mark.parametrize("params", EVERY_WAY, ids=str)
@pytest.mark.parametrize("vocab", [5, 127, 129, 1000])
def test_log_probabilities_are_exact(vocab: int, params: dict):
    scores = np.random.default_rng(vocab).normal(size=vocab).astype(np.float32) * 3
    result = many(scores, params, 128)
    greedy = params.get("temperature") == 0
    expected = exact(scores, {} if greedy else params)
    assert (expected[result.tokens] > 0).all()
    np.testing.assert_allclose(result.logprobs, np.log(expected[result.tokens]), atol=1e-5)
    plain = exact(scores, {} if greedy else {"temperature": params.get("temperature", 1.0)})
    np.testing.assert_allclose(result.untruncated, np.log(plain[result.tokens]), atol=1e-5)
    if greedy:
        assert set(result.tokens) == {scores.argmax()}
    assert result.finite.all()


@pytest.mark.parametrize("params", [p for p in EVERY_WAY if p.get("temperature") != 0], ids=str)
def test_frequencies_are_those_of_the_distribution(params: dict):
    """Chi-square over 300 tokens in groups of three; the rare tokens are counted together."""
    count = 20_000
    scores = np.random.default_rng(3).normal(size=300).astype(np.float32) * 1.5
    expected = count * exact(scores, params)
    observed = np.bincount(many(scores, params, count, seed=11).tokens, minlength=300)
    assert observed[expected == 0].sum() == 0
    common = expected >= 5
    pooled = [np.append(each[common], each[~common].sum()) for each in (observed, expected)]
    pooled = [each[pooled[1] > 0] for each in pooled]
    if len(pooled[0]) > 1:
        assert stats.chisquare(*pooled).pvalue > 1e-3
    else:
        assert observed.max() == count


def test_unlikely_groups_come_as_often_as_they_should():
    """The best token has all but 0.001 of the mass, which 6,000 others share."""
    scores = np.zeros(6001, np.float32)
    scores[17] = np.log(6000 / 1e-3)
    batches = 6
    observed = sum(
        int((many(scores, {}, 4000, seed).tokens != 17).sum()) for seed in range(batches)
    )
    assert stats.binomtest(observed, batches * 4000, 1e-3 / (1 + 1e-3)).pvalue > 1e-3


def test_ties_are_kept_or_dropped_together():
    scores = np.array([1.0, 3.0, 2.0, 2.0, 0.0, 2.0], np.float32)
    twos = {1, 2, 3, 5}
    assert set(many(scores, {"top_k": 2}, 400).tokens) == twos
    assert set(many(scores, {"top_k": 4}, 400).tokens) == twos
    # The best token alone has 0.43 of the mass; a second one is needed, and has its equals.
    assert set(many(scores, {"top_p": 0.5}, 400).tokens) == twos
    assert set(many(scores, {"top_p": 0.4}, 400).tokens) == {1}
    assert set(many(np.zeros(6, np.float32), {"min_p": 1.0}, 400).tokens) == set(range(6))


def test_something_is_always_kept():
    scores = np.random.default_rng(0).normal(size=200).astype(np.float32)
    for params in ({"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 1, "top_p": 1e-9, "min_p": 1.0}):
        result = many(scores, params, 64)
        assert set(result.tokens) == {scores.argmax()}
        np.testing.assert_array_equal(result.logprobs, 0.0)


def test_hot_sampling_still_truncates_by_the_scores():
    scores = np.random.default_rng(1).permutation(1000).astype(np.float32)
    result = many(scores, {"temperature": 1e15, "top_k": 5}, 500)
    assert set(scores[result.tokens]) == {995, 996, 997, 998, 999}
    np.testing.assert_allclose(result.logprobs, np.log(1 / 5), atol=1e-5)


@pytest.mark.parametrize("temperature", [2e-38, 3e38])
def test_extreme_temperatures_give_numbers(temperature: float):
    scores = np.array([0.5, -np.inf, 1.0, -3.0], np.float32)
    result = many(scores, {"temperature": temperature, "top_p": 0.99, "min_p": 0.1}, 100)
    expected = {2} if temperature < 1 else {0, 2, 3}
    assert set(result.tokens) == expected
    np.testing.assert_allclose(result.logprobs, -np.log(len(expected)), atol=1e-5)


def test_tokens_at_minus_infinity_are_never_drawn():
    scores = np.full(300, -np.inf, np.float32)
    scores[[4, 290]] = -1e30, -1e30
    for params in EVERY_WAY:
        result = many(scores, params, 64)
        assert set(result.tokens) <= {4, 290}
        assert result.finite.all()


def test_unusable_rows_are_marked_and_leave_the_others_alone():
    rng = np.random.default_rng(2)
    scores = rng.normal(size=(8, 300)).astype(np.float32)
    params = [EVERY_WAY[i] for i in (0, 5, 7, 8, 9, 4, 1, 0)]
    before = drawn(scores, rule(8, params))
    bad = scores.copy()
    bad[1, 250], bad[2, 3], bad[4], bad[5, 9] = np.nan, np.inf, -np.inf, np.nan
    after = drawn(bad, rule(8, params))
    usable = np.array([True, False, False, True, False, False, True, True])
    np.testing.assert_array_equal(after.finite, usable)
    assert ((after.tokens >= 0) & (after.tokens < 300)).all()
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one[usable], other[usable])


def test_rows_are_the_same_bits_in_any_order_and_beside_any_neighbours():
    rng = np.random.default_rng(4)
    rows = 32
    scores = rng.normal(size=(rows, 1000)).astype(np.float32) * 2
    params = [EVERY_WAY[i % len(EVERY_WAY)] for i in range(rows)]
    how, at = rule(rows, params), positions(rows) * 7
    whole = drawn(scores, how, at)
    order = rng.permutation(rows)
    turned = drawn(scores[order], Rule(*(field[order] for field in how)), at[order])
    for one, other in zip(whole, turned, strict=True):
        np.testing.assert_array_equal(one[order], other)
    # Neighbours that truncate otherwise, or not at all: other branches run.
    for neighbour in ({}, {"top_p": 0.3}, {"top_k": 3}, {"min_p": 0.5}):
        for kept in (0, 5, 7, 8, 9):
            alone = [params[i] if i == kept else neighbour for i in range(rows)]
            mixed = scores * 1.5
            mixed[kept] = scores[kept]
            keys = (
                jax.random.split(jax.random.key(9), rows)
                .at[kept]
                .set(jax.random.split(jax.random.key(0), rows)[kept])
            )
            result = drawn(mixed, rule(rows, alone, keys=keys), at)
            for one, other in zip(whole, result, strict=True):
                assert one[kept] == other[kept]


def test_small_changes_of_the_scores_rarely_change_a_token():
    rng = np.random.default_rng(6)
    scores = rng.normal(size=(512, 2000)).astype(np.float32) * 2
    for params in ({}, {"top_p": 0.9}, {"top_k": 50, "min_p": 0.02}):
        how = rule(512, params)
        first = drawn(scores, how)
        moved = scores + rng.uniform(-1e-4, 1e-4, scores.shape).astype(np.float32)
        second = drawn(moved, how)
        # Near ties: of the two stages in a draw, and at the end of what is kept.
        assert (first.tokens != second.tokens).sum() <= 2
        assert (np.abs(first.logprobs - second.logprobs) > 3e-4).sum() <= 4


def test_other_positions_and_keys_draw_independently():
    scores = np.zeros((64, 5), np.float32)
    keys = jnp.broadcast_to(jax.random.key(3), (64,))
    first = drawn(scores, rule(64, {}, keys=keys)).tokens
    again = drawn(scores, rule(64, {}, keys=keys)).tokens
    other = drawn(scores, rule(64, {}, keys=jnp.broadcast_to(jax.random.key(4), (64,)))).tokens
    later = drawn(scores, rule(64, {}, keys=keys), positions(64) + 1).tokens
    assert (first == again).all()
    np.testing.assert_array_equal(first[1:], later[:-1])
    assert len(set(first.tolist())) == 5
    assert 0 < (first == other).sum() < 40


@pytest.mark.parametrize("tensor", [2, 8])
@pytest.mark.parametrize("vocab", [1024, 1216])
def test_a_split_vocabulary_draws_the_same_and_stays_split(vocab: int, tensor: int):
    rows = 16
    scores = np.random.default_rng(7).normal(size=(rows, vocab)).astype(np.float32) * 2
    how = rule(rows, [EVERY_WAY[i % len(EVERY_WAY)] for i in range(rows)])
    expected = drawn(scores, how)
    mesh = build_mesh(1, 8 // tensor, 1, tensor)
    split = NamedSharding(mesh, PartitionSpec(None, "tensor"))
    whole = NamedSharding(mesh, PartitionSpec())
    program = (
        jax.jit(draw, in_shardings=(split, whole, whole), out_shardings=whole)
        .lower(jnp.asarray(scores), how, positions(rows))
        .compile()
    )
    found = program(jax.device_put(scores, split), *jax.device_put((how, positions(rows)), whole))
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-6)
    np.testing.assert_allclose(found.untruncated, expected.untruncated, atol=1e-6)
    assert vocab % 128 or "collective-permute" not in program.as_text()
    # No device ever holds all scores of a row.
    assert f"f32[{rows},{vocab}]" not in program.as_text()
    assert f"f32[{rows},128,{-(-vocab // 128)}]" not in program.as_text()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("top_k", 2**31),
        ("top_k", 2.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", float("nan")),
    ],
)
def test_parameters_out_of_range_are_refused(name: str, value: float):
    params = SamplingParams(temperature=1.0, max_tokens=4, stop_ids=())
    check_params(params)
    object.__setattr__(params, name, value)  # past the type check of the tests
    with pytest.raises(SamplerError, match=f"^{name}={value}; expected "):
        check_params(params)


def test_parameters_at_the_ends_of_their_ranges_are_taken():
    params = SamplingParams(temperature=0.0, max_tokens=4, stop_ids=())
    for changes in ({"top_p": 1.0, "min_p": 1.0}, {"top_p": 1e-6, "top_k": 2**31 - 1}):
        check_params(dataclasses.replace(params, **changes))
