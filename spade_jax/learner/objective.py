"""The loss of one microbatch, its gradient, and the sums that are reported of it.

Also the log-probabilities alone: those of the frozen reference, and the old ones of several updates
on one rollout.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from models import transformer
from models.config import TransformerConfig
from models.execution import Execution
from models.head import Predicted, predict
from models.transformer import Forward, Params
from spade_jax.config import LearnerConfig
from spade_jax.learner.batch import ROLES, Rows
from spade_jax.learner.lora import merge
from spade_jax.learner.losses import policy_loss
from spade_jax.learner.losses.entropy import bonus
from spade_jax.learner.losses.kl import kl
from spade_jax.learner.losses.nll import nll
from spade_jax.learner.losses.tis import tis
from spade_jax.learner.losses.tokens import Pair, Tokens, per_role

Objective = Literal["policy", "nll"]


class Sums(NamedTuple):
    """What microbatches add up to (`gap_max`: the maximum of). Roles are in the order of ROLES."""

    total: Float[Array, ""]  # the loss that is differentiated
    loss: Float[Array, " roles"]  # unweighted policy or NLL losses
    loss_tokens: Int[Array, " roles"]
    hidden_grad_square: Float[Array, " roles"]  # of the loss, at the final hidden states
    entropy: Float[Array, " roles"]
    kl: Float[Array, " roles"]  # to the reference
    clipped: Float[Array, ""]
    tis_capped: Float[Array, ""]
    gap_sum: Float[Array, ""]  # |learner - sampler| over fresh loss tokens
    gap_max: Float[Array, ""]
    fresh_tokens: Int[Array, ""]
    expert_load: Float[Array, "layers experts"]
    dropped: Float[Array, " layers"]  # choices of experts that were not computed
    balance: Float[Array, " layers"]  # over all tokens
    router_z: Float[Array, " layers"]

    def add(self, other: "Sums") -> "Sums":
        gap_max = jnp.maximum(self.gap_max, other.gap_max)
        return jax.tree.map(jnp.add, self, other)._replace(gap_max=gap_max)


def no_sums(model: TransformerConfig) -> Sums:
    """Sums over nothing."""
    real, per_layer = jnp.zeros((), jnp.float32), jnp.zeros((model.num_layers,), jnp.float32)
    roles, whole = jnp.zeros((len(ROLES),), jnp.float32), jnp.zeros((), jnp.int32)
    load = jnp.zeros((model.num_layers, model.num_experts), jnp.float32)
    return Sums(
        total=real,
        loss=roles,
        loss_tokens=jnp.zeros((len(ROLES),), jnp.int32),
        hidden_grad_square=roles,
        entropy=roles,
        kl=roles,
        clipped=real,
        tis_capped=real,
        gap_sum=real,
        gap_max=real,
        fresh_tokens=whole,
        expert_load=load,
        dropped=per_layer,
        balance=per_layer,
        router_z=per_layer,
    )


class Setting(NamedTuple):
    """What a loss is compiled for."""

    model: TransformerConfig
    config: LearnerConfig
    mesh: Mesh
    execution: Execution
    objective: Objective = "policy"


def accumulate(
    setting: Setting,
    grads: Params,
    sums: Sums,
    params: Params,
    adapters: Params | None,
    rows: Rows,
    token_share: Float[Array, ""],
) -> tuple[Params, Sums]:
    """Add one microbatch's gradient and sums to what came before; with adapters, the gradient is
    theirs.

    `token_share` is one live token's share of the whole batch, for means over it.
    """
    # The gradient at a zero added to the final hidden states is each token's own share of the
    # backward pass: it tells the roles apart without a second one.
    shape = (*rows.tokens.shape, setting.model.embed)
    probe = jnp.zeros(shape, jnp.dtype(setting.execution.compute_dtype))
    trained = params if adapters is None else adapters

    def loss(trained: Params, probe: Array) -> tuple[Float[Array, ""], Sums]:
        used = trained
        if adapters is not None:
            used = merge(params, trained, setting.config)
        return _loss(setting, used, probe, rows, token_share)

    (_, found), (new_grads, hidden_grads) = jax.value_and_grad(loss, (0, 1), has_aux=True)(
        trained, probe
    )
    square = per_role(
        jnp.square(hidden_grads.astype(jnp.float32)).sum(-1), _tokens(_ahead(rows), probe[..., 0])
    )
    sums = sums.add(found._replace(hidden_grad_square=square))
    return jax.tree.map(jnp.add, grads, new_grads), sums


def logprobs(setting: Setting, params: Params, rows: Rows) -> Float[Array, "rows seq"]:
    """Log-probability of each token that has a loss, indexed by that token; 0 for the others."""
    found = _predict(setting, params, _forward(setting, params, rows).hidden, _ahead(rows))
    return jnp.roll(found.logprobs, 1, axis=1)


def _ahead(rows: Rows) -> Rows:
    """Shift so that entry t speaks of token t + 1, the one that the hidden state at t predicts.

    What wraps around to a row's end is the entry of its first token, which never has a loss.
    """
    return Rows(*(None if array is None else jnp.roll(array, -1, axis=1) for array in rows))


def _tokens(ahead: Rows, current: Array, old: Array | None = None) -> Tokens:
    return Tokens(
        current=current,
        old=jax.lax.stop_gradient(current) if old is None else old,
        sampler=ahead.sampler_logprobs,
        advantages=ahead.advantages,
        mask=ahead.loss_mask,
        weights=ahead.weights,
        segment_ids=ahead.segment_ids,
        roles=ahead.roles,
    )


def _forward(setting: Setting, params: Params, rows: Rows) -> Forward:
    replay = None
    if rows.routing is not None:
        replay = rows.routing.transpose(2, 0, 1, 3)
    return transformer.forward(
        setting.model,
        params,
        rows.tokens,
        rows.positions,
        segment_ids=rows.segment_ids,
        mesh=setting.mesh,
        execution=setting.execution,
        replay=replay,
    )


def _predict(setting: Setting, params: Params, hidden: Array, ahead: Rows) -> Predicted:
    return predict(
        setting.model,
        params,
        hidden,
        ahead.tokens,
        ahead.temperatures,
        ahead.loss_mask,
        setting.mesh,
        chunk=setting.config.head_tokens,
    )


def _loss(
    setting: Setting,
    params: Params,
    probe: Float[Array, "rows seq embed"],
    rows: Rows,
    token_share: Float[Array, ""],
) -> tuple[Float[Array, ""], Sums]:
    """Weighted sum of token losses and of what routers add, and what is reported of it."""
    config = setting.config
    forward = _forward(setting, params, rows)
    ahead = _ahead(rows)
    predicted = _predict(setting, params, forward.hidden + probe, ahead)
    tokens = _tokens(ahead, predicted.logprobs, ahead.old_logprobs)
    sums = no_sums(setting.model)
    if setting.objective == "nll":
        loss = nll(tokens)
        total = loss.total
    else:
        total, loss, sums = _policy(config, tokens, ahead, predicted.entropy, sums)
    routing = forward.routing
    if config.balance_loss or config.router_z_loss:
        balance, router_z = routing.balance.mean(), routing.router_z.mean()
        total += token_share * (config.balance_loss * balance + config.router_z_loss * router_z)
    sums = sums._replace(
        total=total,
        loss=loss.sum,
        loss_tokens=loss.count,
        expert_load=routing.load,
        dropped=routing.dropped,
        balance=routing.balance,
        router_z=routing.router_z,
    )
    return total, jax.lax.stop_gradient(sums)


def _policy(
    config: LearnerConfig,
    tokens: Tokens,
    ahead: Rows,
    entropies: Float[Array, "rows seq"],
    sums: Sums,
) -> tuple[Float[Array, ""], Pair, Sums]:
    """The policy loss with its regularisers: what is differentiated, the policy loss alone, and
    what is reported.
    """
    importance = tis(config.tis, tokens, config.tis_cap)
    terms = policy_loss(config, tokens, importance.weight)
    total = terms.loss.total
    if config.entropy_coef:
        total += config.entropy_coef * bonus(tokens, entropies).total
    if ahead.reference_logprobs is not None:
        divergence = kl(config.kl_kind, tokens, ahead.reference_logprobs)
        total += config.kl_coef * divergence.total
        sums = sums._replace(kl=divergence.sum)
    fresh = ahead.loss_mask & ahead.fresh
    gap = jnp.where(fresh, jnp.abs(tokens.old - ahead.untruncated_logprobs), 0.0)
    sums = sums._replace(
        entropy=per_role(entropies, tokens),
        clipped=terms.clipped.sum.sum(),
        tis_capped=importance.capped.sum.sum(),
        gap_sum=gap.sum(),
        gap_max=gap.max(),
        fresh_tokens=fresh.sum(),
    )
    return total, terms.loss, sums
