"""Balance and z losses of the routers: off by default, exact over microbatches and devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import pack_groups, tree_allclose
from models import transformer
from models.sharding import build_mesh
from spade_jax.config import LearnerConfig
from spade_jax.errors import ConfigError
from spade_jax.learner.step import Learner
from spade_jax.telemetry.metrics import check
from spade_jax.types import Role

SEQ = 32
LOSSES = LearnerConfig(lr=1e-2, balance_loss=0.3, router_z_loss=0.02)


def pack(groups, rows: int, shards: int = 1):
    weights = {Role.AGENT: 1.0, Role.DESIGNER: 0.5}
    return pack_groups(groups, SEQ, rows, weights=weights, learner=LOSSES, shards=shards)


@pytest.fixture(scope="module")
def added(model):
    """Gradient of what the losses add, of a whole batch at once."""

    def loss(params, tokens, positions, segment_ids):
        out = transformer.forward(model, params, tokens, positions, segment_ids=segment_ids)
        routing = out.routing
        count = jnp.sum(segment_ids > 0).astype(jnp.float32)
        balance, router_z = routing.balance.mean() / count, routing.router_z.mean() / count
        return 0.3 * balance + 0.02 * router_z, (balance, router_z)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def whole(batch):
    """The tokens of all microbatches as the rows of one."""
    return batch.rows.tokens, batch.rows.positions, batch.rows.segment_ids


@pytest.mark.parametrize(("mesh", "rows"), [((1, 1, 1, 1), 2), ((1, 2, 2, 2), 4)])
def test_losses_are_exact_over_microbatches_and_devices(
    model, learner, groups, params, added, mesh, rows
):
    devices = jax.devices()[: int(np.prod(mesh))]
    own = Learner(model, LOSSES, build_mesh(*mesh, devices=devices))
    batch = pack(groups, rows // own.shards, own.shards)
    plain, plain_sums = learner.gradients(params, pack(groups, 2))
    (value, (balance, router_z)), more = added(params, *whole(batch))
    expected = jax.device_get(jax.tree.map(jnp.add, plain, more))
    state = own.init(jax.tree.map(np.asarray, params))
    grads, sums = own.gradients(state.params, batch)
    assert float(sums.total) == pytest.approx(float(plain_sums.total + value), abs=1e-5)
    assert tree_allclose(grads, expected, rtol=1e-3, atol=1e-6)
    biggest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(more))
    assert biggest > 1e-3  # or the comparison would say nothing

    if rows == 2:  # one more program is enough
        assert batch.num_microbatches == 2
        _, metrics = own.step(state, batch)
        assert check(metrics) == metrics
        assert metrics["moe/balance_loss"] == pytest.approx(float(balance), rel=1e-4)
        assert metrics["moe/router_z_loss"] == pytest.approx(float(router_z), rel=1e-4)
        assert metrics["moe/dropped_count"] == 0.0
        assert 1 <= metrics["moe/load_imbalance_mean"] <= metrics["moe/load_imbalance_max"] <= 2
        assert 0.5 < metrics["moe/load_evenness_min"] <= 1


def test_weights_below_zero_are_refused():
    with pytest.raises(ConfigError, match=r"learner.balance_loss=-0.1 .* 0 or more"):
        LearnerConfig(balance_loss=-0.1)
