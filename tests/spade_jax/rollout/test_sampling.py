import jax
import jax.numpy as jnp
import numpy as np

from spade_jax.rollout.sampling import sample

VOCAB = 5


def draw(logits: np.ndarray, keys: jax.Array, positions: list[int], temperature: list[float]):
    tokens, logprobs = jax.jit(sample)(
        jnp.asarray(logits, jnp.float32),
        jax.random.key_data(keys),
        jnp.asarray(positions, jnp.int32),
        jnp.asarray(temperature, jnp.float32),
    )
    return np.asarray(tokens), np.asarray(logprobs)


def test_equals_categorical_under_the_folded_key_and_its_log_softmax():
    logits = np.random.default_rng(0).normal(size=(3, VOCAB)).astype(np.float32)
    keys = jax.random.split(jax.random.key(1), 3)
    positions, temperature = [4, 4, 900], [1.0, 0.5, 2.0]
    tokens, logprobs = draw(logits, keys, positions, temperature)
    for row in range(3):
        scaled = logits[row].astype(np.float64) / temperature[row]
        key = jax.random.fold_in(keys[row], positions[row])
        assert tokens[row] == jax.random.categorical(key, jnp.asarray(scaled, jnp.float32))
        expected = scaled[tokens[row]] - np.log(np.exp(scaled).sum())
        np.testing.assert_allclose(logprobs[row], expected, atol=1e-6)


def test_temperature_zero_is_greedy_with_log_probabilities_of_temperature_one():
    logits = np.array([[0.0, 1.0, 3.0, -2.0, 2.9]], np.float32)
    tokens, logprobs = draw(logits, jax.random.split(jax.random.key(0), 1), [7], [0.0])
    assert tokens.tolist() == [2]
    np.testing.assert_allclose(
        logprobs[0], 3.0 - np.log(np.exp(logits[0].astype(np.float64)).sum()), atol=1e-6
    )


def test_frequencies_follow_the_tempered_distribution():
    rows, logits = 4000, np.log(np.array([0.1, 0.2, 0.3, 0.15, 0.25], np.float32))
    keys = jnp.broadcast_to(jax.random.key(3), (rows,))
    tokens, _ = draw(np.tile(logits, (rows, 1)), keys, list(range(rows)), [0.5] * rows)
    expected = np.exp(logits * 2) / np.exp(logits * 2).sum()
    observed = np.bincount(tokens, minlength=VOCAB) / rows
    assert np.abs(observed - expected).max() < 4 * np.sqrt(0.25 / rows)


def test_other_positions_and_keys_draw_independently():
    logits = np.zeros((64, VOCAB), np.float32)
    keys = jnp.broadcast_to(jax.random.key(3), (64,))
    first, _ = draw(logits, keys, list(range(64)), [1.0] * 64)
    again, _ = draw(logits, keys, list(range(64)), [1.0] * 64)
    other, _ = draw(logits, jnp.broadcast_to(jax.random.key(4), (64,)), list(range(64)), [1.0] * 64)
    assert (first == again).all()
    assert len(set(first.tolist())) == VOCAB
    assert 0 < (first == other).sum() < 40
