"""The router by hand: choice, weights, replay, padding, and the sums of the two losses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import routing

route = jax.jit(routing.route, static_argnums=3, static_argnames=("normalize",))
LIVE = jnp.ones((1, 1), bool)


def test_route_by_hand():
    # probabilities 1/8, 4/8, 3/8: the best two are experts 1 and 2, with 4/7 and 3/7
    x = jnp.log(jnp.array([[[1.0, 4.0, 3.0]]]))
    routes = route(x, LIVE, jnp.eye(3), 2, normalize=True)
    assert routes.chosen.tolist() == [[[1, 2]]]
    np.testing.assert_allclose(routes.weights, [[[4 / 7, 3 / 7]]], rtol=1e-6)
    assert routes.load.tolist() == [0, 1, 1]
    np.testing.assert_allclose(routes.router_z, np.log(8) ** 2, rtol=1e-6)
    # 3 experts x (1/2 x 4/8 + 1/2 x 3/8)
    np.testing.assert_allclose(routes.balance, 3 * 7 / 16, rtol=1e-6)
    plain = route(x, LIVE, jnp.eye(3), 2, normalize=False)
    np.testing.assert_allclose(plain.weights, [[[4 / 8, 3 / 8]]], rtol=1e-6)


def test_a_single_choice_keeps_its_probability_and_so_its_gradient():
    x = jnp.log(jnp.array([[[1.0, 4.0, 3.0]]]))

    def weight(router):
        return route(x, LIVE, router, 1, normalize=True).weights.sum()

    value, grad = jax.value_and_grad(weight)(jnp.eye(3))
    assert value == pytest.approx(0.5)
    assert float(jnp.abs(grad).max()) > 0.1


def test_replay_takes_the_experts_and_todays_weights():
    x = jnp.log(jnp.array([[[1.0, 4.0, 3.0]]]))
    replay = jnp.array([[[2, 0]]], jnp.uint8)
    routes = route(x, LIVE, jnp.eye(3), 2, normalize=True, replay=replay)
    assert routes.chosen.tolist() == [[[2, 0]]]
    np.testing.assert_allclose(routes.weights, [[[3 / 4, 1 / 4]]], rtol=1e-6)
    assert routes.load.tolist() == [1, 0, 1]


def test_padding_has_no_part_in_anything():
    rng = np.random.default_rng(0)
    x, router = rng.standard_normal((3, 5, 8)), rng.standard_normal((8, 6))
    live = rng.random((3, 5)) < 0.6
    live[2] = False
    x, router = jnp.asarray(x, jnp.float32), jnp.asarray(router, jnp.float32)
    first = route(x, jnp.asarray(live), router, 2, normalize=True)
    other = jnp.where(jnp.asarray(live)[:, :, None], x, 1e3)
    second = route(other, jnp.asarray(live), router, 2, normalize=True)
    for one, two in zip(first._replace(weights=0), second._replace(weights=0), strict=True):
        assert np.array_equal(one, two)
    assert float(first.load.sum()) == 2 * live.sum()
    assert not first.chosen[~live].any()


def test_balance_is_one_where_even_and_the_number_of_experts_where_all_go_to_one():
    live = jnp.ones((1, 4), bool)
    even = route(100 * jnp.eye(4)[None], live, jnp.eye(4), 1, normalize=True)
    assert float(even.balance) / 4 == pytest.approx(1.0)
    one = route(100 * jnp.eye(4)[None, :1].repeat(4, axis=1), live, jnp.eye(4), 1, normalize=True)
    assert float(one.balance) / 4 == pytest.approx(4.0)


def test_sums_add_over_rows():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((4, 5, 8)), jnp.float32)
    live = jnp.asarray(rng.random((4, 5)) < 0.7)
    router = jnp.asarray(rng.standard_normal((8, 6)), jnp.float32)
    whole = route(x, live, router, 2, normalize=True)
    parts = [route(x[i : i + 2], live[i : i + 2], router, 2, normalize=True) for i in (0, 2)]
    for name in ("load", "balance", "router_z"):
        total = sum(getattr(part, name) for part in parts)
        np.testing.assert_allclose(total, getattr(whole, name), rtol=1e-6)


def test_losses_pull_the_right_way():
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((2, 16, 8)) + 1.0, jnp.float32)
    router = jnp.asarray(rng.standard_normal((8, 4)), jnp.float32)
    live = jnp.ones((2, 16), bool)
    for name in ("balance", "router_z"):

        def value(router, name=name):
            return getattr(route(x, live, router, 1, normalize=True), name) / live.size

        step = jax.jit(jax.value_and_grad(value))
        now = router
        before, grad = step(now)
        for _ in range(20):
            now = now - 0.05 * grad
            _, grad = step(now)
        assert float(step(now)[0]) < 0.98 * float(before)


def test_bfloat16_inputs_are_routed_in_float32():
    """Two scores that bfloat16 cannot tell apart are told apart."""
    x = jnp.array([[[1.0, 2.0**-10]]], jnp.bfloat16)
    router = jnp.array([[1.0, 1.0], [0.0, 1.0]], jnp.float32)
    routes = route(x, LIVE, router, 1, normalize=True)
    assert routes.chosen.item() == 1
    assert routes.weights.dtype == jnp.float32
