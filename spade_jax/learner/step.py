"""One optimiser step: gradients accumulated over microbatches, then one donated update.

The loss is the batch's weighted sum of token losses (`batch`, `loss`), so microbatches add exactly.
Scores of the whole vocabulary exist for one microbatch at a time; a chunked output head is not
here. Every jit states its shardings, one device included.
"""

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Num

from models import transformer
from models.config import TransformerConfig
from models.execution import PLAIN, Execution
from models.sharding import ROW_AXES, data_sharding, param_shardings, replicated
from models.transformer import Params
from spade_jax.config import LearnerConfig
from spade_jax.errors import SpadeError
from spade_jax.learner import loss as losses
from spade_jax.learner.batch import ROLES, Batch
from spade_jax.learner.optim import learning_rate, make_optimizer

Objective = Literal["grpo", "nll"]


class TrainState(NamedTuple):
    """Everything on the device that an update moves."""

    params: Params
    opt_state: optax.OptState
    step: Int[Array, ""]  # int32, updates done: the version of `params`


class Sums(NamedTuple):
    """What microbatches add up to (`gap_max`: the maximum of). Roles are in the order of ROLES."""

    total: Float[Array, ""]  # the loss that is differentiated
    loss: Float[Array, " roles"]  # unweighted token losses
    loss_tokens: Int[Array, " roles"]
    hidden_grad_square: Float[Array, " roles"]  # of the loss, at the final hidden states
    entropy: Float[Array, " roles"]
    clipped: Int[Array, ""]
    tis_capped: Int[Array, ""]
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


class Learner:
    """The compiled training functions of one model on one mesh; holds no parameters."""

    def __init__(
        self,
        model: TransformerConfig,
        config: LearnerConfig,
        mesh: Mesh,
        total_steps: int | None = None,
        execution: Execution = PLAIN,
    ) -> None:
        """Prepare the functions, compiled at first use; `total_steps` turns on cosine decay."""
        self._model, self._mesh, self._execution = model, mesh, execution
        self._learning_rate = learning_rate(config, total_steps)
        self._optimizer = make_optimizer(config, total_steps)
        self._shardings = self._state_shardings()
        params, everywhere = self._shardings.params, replicated(mesh)
        self._init_optimizer = jax.jit(
            self._optimizer.init, out_shardings=self._shardings.opt_state
        )
        self._zeros = jax.jit(self._make_zeros, out_shardings=(params, everywhere))
        self._accumulate = {
            objective: jax.jit(
                functools.partial(_accumulate, Setting(model, config, mesh, execution, objective)),
                in_shardings=(params, everywhere, params, data_sharding(mesh), everywhere),
                out_shardings=(params, everywhere),
                donate_argnums=(0, 1),
            )
            for objective in ("grpo", "nll")
        }
        self._norm = jax.jit(optax.tree.norm, in_shardings=(params,), out_shardings=everywhere)
        self._apply = jax.jit(
            self._update,
            in_shardings=(self._shardings, params),
            out_shardings=self._shardings,
            donate_argnums=(0,),  # the gradients are not: no output is left to take their memory
        )

    @property
    def execution(self) -> Execution:
        """How the model runs: the layout and dtype of its parameters among others."""
        return self._execution

    @property
    def row_multiple(self) -> int:
        """Data shards of the mesh, which the rows of a microbatch must divide by."""
        return math.prod(self._mesh.shape[axis] for axis in ROW_AXES)

    def init(self, params: Params) -> TrainState:
        """Start from `params`, which the first step consumes: keep no other use of these arrays."""
        params = jax.device_put(params, self._shardings.params)
        step = jax.device_put(jnp.zeros((), jnp.int32), self._shardings.step)
        return TrainState(params, self._init_optimizer(params), step)

    def abstract_state(self) -> TrainState:
        """The state as shapes with shardings: what a checkpoint is restored into."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            self._state_shapes(),
            self._shardings,
        )

    def gradients(
        self, params: Params, batch: Batch, objective: Objective = "grpo"
    ) -> tuple[Params, Sums]:
        """Gradient of the batch's loss, one microbatch at a time, and what is reported of it."""
        grads, sums = self._zeros()
        token_share = np.float32(1 / max(np.count_nonzero(batch.segment_ids), 1))
        for index in range(batch.num_microbatches):
            microbatch = batch.microbatch(index)
            grads, sums = self._accumulate[objective](grads, sums, params, microbatch, token_share)
        return grads, sums

    def step(
        self, state: TrainState, batch: Batch, objective: Objective = "grpo"
    ) -> tuple[TrainState, dict[str, float]]:
        """Update once on `batch`, consuming `state`.

        A gradient that is not finite raises and changes nothing.
        """
        grads, sums = self.gradients(state.params, batch, objective)
        host_sums, norm, step = jax.device_get((sums, self._norm(grads), state.step))
        if not math.isfinite(norm):
            raise SpadeError(
                f"step {int(step)}: the gradient norm is {norm} (loss {host_sums.total}), expected "
                "a finite number; the weights were left as they were. Start again with a lower "
                "learner.lr"
            )
        metrics = _metrics(host_sums, batch, objective) | {
            "optim/grad_norm": float(norm),
            "optim/lr": float(self._learning_rate(step)),
        }
        return self._apply(state, grads), metrics

    def _update(self, state: TrainState, grads: Params) -> TrainState:
        updates, opt_state = self._optimizer.update(grads, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state, state.step + 1)

    def _make_zeros(self) -> tuple[Params, Sums]:
        grads = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self._state_shapes().params
        )
        real, whole = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
        per_role = jnp.zeros((len(ROLES),), jnp.float32)
        load = jnp.zeros((self._model.num_layers, self._model.num_experts), jnp.float32)
        per_layer = load[:, 0]
        sums = Sums(
            total=real,
            loss=per_role,
            loss_tokens=jnp.zeros((len(ROLES),), jnp.int32),
            hidden_grad_square=per_role,
            entropy=per_role,
            clipped=whole,
            tis_capped=whole,
            gap_sum=real,
            gap_max=real,
            fresh_tokens=whole,
            expert_load=load,
            dropped=per_layer,
            balance=per_layer,
            router_z=per_layer,
        )
        return grads, sums

    def _state_shapes(self) -> TrainState:
        params = transformer.abstract_params(self._model, self._execution)
        opt_state = jax.eval_shape(self._optimizer.init, params)
        step: Any = jax.ShapeDtypeStruct((), jnp.int32)
        return TrainState(params, opt_state, step)

    def _state_shardings(self) -> TrainState:
        """Moments are sharded like the parameters they belong to; counters are everywhere."""
        shapes = self._state_shapes()
        params = param_shardings(self._model, self._mesh, self._execution)
        everywhere: Any = replicated(self._mesh)
        structure = jax.tree.structure(shapes.params)

        def like_params(node: object) -> bool:
            return jax.tree.structure(node) == structure

        opt_state = jax.tree.map(
            lambda node: params if like_params(node) else everywhere,
            shapes.opt_state,
            is_leaf=like_params,
        )
        return TrainState(params, opt_state, everywhere)


class Setting(NamedTuple):
    """What a loss is compiled for."""

    model: TransformerConfig
    config: LearnerConfig
    mesh: Mesh
    execution: Execution
    objective: Objective


def _accumulate(
    setting: Setting,
    grads: Params,
    sums: Sums,
    params: Params,
    batch: Batch,
    token_share: Float[Array, ""],
) -> tuple[Params, Sums]:
    """Add one microbatch's gradient and sums to what came before.

    `token_share` is one live token's share of the whole batch, for means over it.
    """
    # The gradient at a zero added to the final hidden states is each token's own share of the
    # backward pass: it tells the roles apart without a second one.
    shape = (*batch.tokens.shape, setting.model.embed)
    probe = jnp.zeros(shape, jnp.dtype(setting.execution.compute_dtype))
    differentiate = jax.value_and_grad(_loss, argnums=(1, 2), has_aux=True)
    (_, found), (new_grads, hidden_grads) = differentiate(
        setting, params, probe, batch, token_share
    )
    ahead = _ahead(batch)
    square = _per_role(jnp.square(hidden_grads.astype(jnp.float32)).sum(-1), ahead)
    sums = sums.add(found._replace(hidden_grad_square=square))
    return jax.tree.map(jnp.add, grads, new_grads), sums


def _ahead(batch: Batch) -> Batch:
    """Shift so that entry t speaks of token t + 1, the one that the hidden state at t predicts.

    What wraps around to a row's end is the entry of its first token, which never has a loss.
    """
    return Batch(*(jnp.roll(array, -1, axis=1) for array in batch))


def _per_role(values: Num[Array, "rows seq"], ahead: Batch) -> Num[Array, " roles"]:
    """Sum over the loss tokens of each role."""
    return jnp.stack(
        [
            jnp.where(
                ahead.loss_mask & (ahead.roles == index), values, jnp.zeros_like(values)
            ).sum()
            for index in range(len(ROLES))
        ]
    )


def _loss(
    setting: Setting,
    params: Params,
    probe: Float[Array, "rows seq embed"],
    batch: Batch,
    token_share: Float[Array, ""],
) -> tuple[Float[Array, ""], Sums]:
    """Weighted sum of token losses and of what routers add, and what is reported of it."""
    model, config, mesh, execution, objective = setting
    forward = transformer.forward(
        model,
        params,
        batch.tokens,
        batch.positions,
        segment_ids=batch.segment_ids,
        mesh=mesh,
        execution=execution,
    )
    scores = transformer.logits(model, params, forward.hidden + probe, mesh)
    ahead = _ahead(batch)
    current = losses.token_logprobs(scores, ahead.tokens, ahead.temperatures)
    nothing = jnp.zeros_like(ahead.loss_mask)
    if objective == "grpo":
        terms = losses.grpo(
            current,
            jax.lax.stop_gradient(
                current
            ),  # one update per batch: these weights are also the old ones
            ahead.sampler_logprobs,
            ahead.advantages,
            ahead.loss_mask,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            tis_cap=config.tis_cap,
        )
        entropy = _per_role(
            losses.entropy(jax.lax.stop_gradient(scores), ahead.temperatures), ahead
        )
        fresh = ahead.loss_mask & ahead.fresh
    else:
        terms = losses.GrpoTerms(losses.nll(current, ahead.loss_mask), nothing, nothing)
        entropy = jnp.zeros((len(ROLES),), jnp.float32)
        fresh = nothing
    total = (ahead.weights * terms.loss).sum()
    routing = forward.routing
    if config.balance_loss or config.router_z_loss:
        balance, router_z = routing.balance.mean(), routing.router_z.mean()
        total += token_share * (config.balance_loss * balance + config.router_z_loss * router_z)
    gap = jnp.where(fresh, jnp.abs(current - ahead.sampler_logprobs), 0.0)
    sums = Sums(
        total=total,
        loss=_per_role(terms.loss, ahead),
        loss_tokens=_per_role(ahead.loss_mask.astype(jnp.int32), ahead),
        hidden_grad_square=jnp.zeros(
            (len(ROLES),), jnp.float32
        ),  # known only after the backward pass
        entropy=entropy,
        clipped=terms.clipped.sum(),
        tis_capped=terms.tis_capped.sum(),
        gap_sum=gap.sum(),
        gap_max=gap.max(),
        fresh_tokens=fresh.sum(),
        expert_load=routing.load,
        dropped=routing.dropped,
        balance=routing.balance,
        router_z=routing.router_z,
    )
    return total, jax.lax.stop_gradient(sums)


def _metrics(sums: Sums, batch: Batch, objective: Objective) -> dict[str, float]:
    """Name what was measured; a role without tokens or a gap without fresh tokens has no entry."""
    live = batch.segment_ids > 0
    metrics = {
        "batch/rows_count": float(live.any(-1).sum()),
        "batch/tokens_count": float(live.sum()),
        **_routing_metrics(sums, int(live.sum())),
    }
    for index, role in enumerate(ROLES):
        if (count := int(sums.loss_tokens[index])) == 0:
            continue
        metrics[f"loss/{role}"] = float(sums.loss[index]) / count
        metrics[f"optim/{role}_grad_norm"] = math.sqrt(float(sums.hidden_grad_square[index]))
        if objective == "grpo":
            metrics[f"policy/entropy_{role}_mean"] = float(sums.entropy[index]) / count
    if objective == "grpo":
        loss_tokens = int(sums.loss_tokens.sum())
        metrics["loss/clip_frac"] = int(sums.clipped) / loss_tokens
        metrics["loss/tis_clip_frac"] = int(sums.tis_capped) / loss_tokens
    if fresh := int(sums.fresh_tokens):
        metrics["sampler/learner_logprob_gap_max"] = float(sums.gap_max)
        metrics["sampler/learner_logprob_gap_mean"] = float(sums.gap_sum) / fresh
    return metrics


def _routing_metrics(sums: Sums, tokens: int) -> dict[str, float]:
    """How routers spread the tokens over experts; `Sums.expert_load` has it expert by expert."""
    load = sums.expert_load / sums.expert_load.sum(-1, keepdims=True)
    metrics = {"moe/expert_load_max_frac": float(load.max())}
    if (experts := load.shape[-1]) == 1:
        return metrics
    imbalance = load.max(-1) * experts
    evenness = -(load * np.log(np.maximum(load, 1e-30))).sum(-1) / math.log(experts)
    return metrics | {
        "moe/load_imbalance_max": float(imbalance.max()),
        "moe/load_imbalance_mean": float(imbalance.mean()),
        "moe/load_evenness_min": float(evenness.min()),
        "moe/dropped_count": float(sums.dropped.sum()),
        "moe/balance_loss": float(sums.balance.mean()) / tokens,
        "moe/router_z_loss": float(sums.router_z.mean()) / tokens,
    }
