"""One optimiser step: gradients accumulated over microbatches, then one donated update.

The loss is the batch's weighted sum of token losses (`batch`, `objective`), so microbatches add
exactly. A gradient that is not finite skips the update. Every jit states its shardings, one device
included. Several steps on one rollout are in `update`.
"""

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int

from models import transformer
from models.backends import compiler_options
from models.config import TransformerConfig
from models.execution import PLAIN, Execution
from models.layers import Axes
from models.sharding import (
    ROW_AXES,
    axis_rules,
    data_sharding,
    param_shardings,
    partition,
    replicated,
)
from models.transformer import Params
from spade_jax.config import LearnerConfig
from spade_jax.errors import ConfigError, SpadeError
from spade_jax.learner import lora
from spade_jax.learner.batch import Batch, Rows
from spade_jax.learner.objective import Objective, Setting, Sums, accumulate, logprobs, no_sums
from spade_jax.learner.optim import learning_rate, make_optimizer
from spade_jax.learner.report import report
from spade_jax.learner_config import Memory, check_precision

logger = logging.getLogger(__name__)

ADAPTER_SEED = 0  # adapters start from B = 0: their draw decides nothing that a run should vary


class TrainState(NamedTuple):
    """Everything on the device that an update moves."""

    params: Params  # with adapters, the frozen weights that they are added to
    opt_state: optax.OptState
    step: Int[Array, ""]  # int32, updates done: the version of `params`
    skipped: Int[Array, ""]  # int32, updates skipped since the last one done
    adapters: Params | None = None


class Learner:
    """The compiled training functions of one model on one mesh; holds no parameters."""

    def __init__(
        self,
        model: TransformerConfig,
        config: LearnerConfig,
        mesh: Mesh,
        execution: Execution = PLAIN,
    ) -> None:
        """Prepare the functions, compiled at first use."""
        self._model, self._config, self._mesh = model, config, mesh
        self._execution = execution
        check_precision(config, execution.param_dtype)
        self._check_memory("optimizer_memory", config.optimizer_memory)
        self._check_memory("reference_memory", config.reference_memory)
        self._learning_rate = learning_rate(config)
        self._optimizer = make_optimizer(config)
        self._shardings = self._state_shardings()
        trained, everywhere = self._trained(self._shardings), replicated(mesh)
        rows = data_sharding(mesh)
        params, adapters = self._shardings.params, self._shardings.adapters
        self._moments = self._shardings.opt_state
        if config.optimizer_memory == "host":
            self._shardings = self._shardings._replace(opt_state=_on_host(self._moments))
        self._init_optimizer = jax.jit(self._optimizer.init, out_shardings=self._moments)
        self._zeros = jax.jit(self._make_zeros, out_shardings=(trained, everywhere))
        setting = Setting(model, config, mesh, execution)
        options = compiler_options(mesh)
        objectives: tuple[Objective, ...] = ("policy", "nll")
        self._accumulate = {
            objective: jax.jit(
                functools.partial(accumulate, setting._replace(objective=objective)),
                in_shardings=(trained, everywhere, params, adapters, rows, everywhere),
                out_shardings=(trained, everywhere),
                donate_argnums=(0, 1),
                compiler_options=options,
            )
            for objective in objectives
        }
        self._logprobs = jax.jit(
            functools.partial(logprobs, setting),
            in_shardings=(params, rows),
            out_shardings=everywhere,  # each process needs them all, for its batch
            compiler_options=options,
        )
        self._merge = jax.jit(
            functools.partial(lora.merge, config=config),
            in_shardings=(params, adapters),
            out_shardings=params,
        )
        self._distance: Any = jax.jit(
            _distance,
            in_shardings=(params, params),
            out_shardings=everywhere,
        )
        self._norm = jax.jit(optax.tree.norm, in_shardings=(trained,), out_shardings=everywhere)
        self._apply = jax.jit(
            self._update,
            in_shardings=(trained, self._moments, trained),
            out_shardings=(trained, self._moments),
            donate_argnums=(0, 1),  # the gradients are not: no output is left to take their memory
        )

    @property
    def config(self) -> LearnerConfig:
        return self._config

    @property
    def execution(self) -> Execution:
        """How the model runs: the layout and dtype of its parameters among others."""
        return self._execution

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def shards(self) -> int:
        """Devices that split the rows of a microbatch."""
        return math.prod(self._mesh.shape[axis] for axis in ROW_AXES)

    def init(self, params: Params) -> TrainState:
        """Start from `params`, which the first step consumes: keep no other use of these arrays."""
        params = jax.device_put(params, self._shardings.params)
        step, skipped = (
            jax.device_put(jnp.zeros((), jnp.int32), self._shardings.step) for _ in range(2)
        )
        adapters = None
        if (shapes := self._state_shapes().adapters) is not None:
            draw = functools.partial(lora.draw_adapters, shapes)
            adapters = jax.jit(draw, out_shardings=self._shardings.adapters)(
                jax.random.key(ADAPTER_SEED)
            )
        state = TrainState(params, (), step, skipped, adapters)
        moments = self._init_optimizer(self._trained(state))
        return state._replace(opt_state=jax.device_put(moments, self._shardings.opt_state))

    def abstract_state(self) -> TrainState:
        """The state as shapes with shardings: what a checkpoint is restored into."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            self._state_shapes(),
            self._shardings,
        )

    def policy(self, state: TrainState) -> Params:
        """The weights to sample with and to export: those of the state, adapters merged into a copy
        of them.
        """
        if state.adapters is None:
            return state.params
        return self._merge(state.params, state.adapters)

    def frozen(self, params: Params) -> Params:
        """Put reference weights where the settings want them to wait."""
        shardings = self._shardings.params
        if self._config.reference_memory == "host":
            shardings = _on_host(shardings)
        return jax.device_put(params, shardings)

    def compile(self) -> None:
        """Compile ahead what is first called when a run has ended, too late to fail."""
        params = self._state_shapes().params
        self._distance = self._distance.lower(params, params).compile()

    def distance(self, params: Params, start: Params) -> float:
        """How far apart two sets of weights are, relative to the norm of the second."""
        return float(self._distance(params, start))

    def on_device(self, params: Params) -> Params:
        """Fetch frozen weights from the host, if they wait there."""
        return jax.device_put(params, self._shardings.params)

    def logprobs(
        self, params: Params, batches: Sequence[Batch]
    ) -> list[Float[np.ndarray, "rows seq"]]:
        """Log-probabilities of each batch's loss tokens under some weights, 0 elsewhere."""
        params = self.on_device(params)
        found = []
        for batch in batches:
            parts = [self._logprobs(params, self._placed(rows)) for rows in batch.microbatches()]
            found.append(np.concatenate(jax.device_get(parts)))
        return found

    def gradients(
        self,
        params: Params,
        batch: Batch,
        objective: Objective = "policy",
        adapters: Params | None = None,
    ) -> tuple[Params, Sums]:
        """Gradient of the batch's loss, one microbatch at a time, and what is reported of it."""
        grads, sums = self._zeros()
        token_share = np.float32(1 / max(np.count_nonzero(batch.rows.segment_ids), 1))
        for rows in batch.microbatches():
            grads, sums = self._accumulate[objective](
                grads, sums, params, adapters, self._placed(rows), token_share
            )
        return grads, sums

    def _placed(self, rows: Rows) -> Rows:
        """Put each device's rows on it: every process has the whole batch, and puts its own."""
        place = data_sharding(self._mesh)
        return jax.tree.map(
            lambda array: jax.make_array_from_callback(array.shape, place, array.__getitem__), rows
        )

    def step(
        self, state: TrainState, batch: Batch, objective: Objective = "policy"
    ) -> tuple[TrainState, dict[str, float]]:
        """Update once on `batch`, consuming `state`.

        A gradient that is not finite changes nothing but the count of skipped updates.

        Raises:
            SpadeError: as many updates were skipped in a row as the settings bear.
        """
        grads, sums = self.gradients(state.params, batch, objective, state.adapters)
        host_sums, norm, step, skipped = jax.device_get(
            (sums, self._norm(grads), state.step, state.skipped)
        )
        metrics = report(host_sums, batch, objective) | {
            "optim/grad_norm": float(norm),
            "optim/lr": float(self._learning_rate(step)),
        }
        if not math.isfinite(norm):
            self._say_skipped(int(step), int(skipped) + 1, float(norm), host_sums)
            finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
            return state._replace(skipped=state.skipped + 1), finite | {"optim/skipped_count": 1.0}
        moments = jax.device_put(state.opt_state, self._moments)
        trained, moments = self._apply(self._trained(state), moments, grads)
        moved = {"params": trained} if state.adapters is None else {"adapters": trained}
        state = state._replace(
            opt_state=jax.device_put(moments, self._shardings.opt_state),
            step=state.step + 1,
            skipped=state.skipped * 0,  # placed as it was
            **moved,
        )
        return state, metrics

    def programs(self, rows: Rows) -> dict[str, Callable[[], jax.stages.Lowered]]:
        """Name every program of an update on microbatches like `rows`, of which shapes will do,
        with what traces it for the devices of the mesh, which need not be here.
        """
        state, share = self._state_shapes(), jax.ShapeDtypeStruct((), jnp.float32)
        trained, accumulate = self._trained(state), self._accumulate["policy"]
        grads, sums = jax.eval_shape(self._make_zeros)
        found = {
            "zeros": self._zeros.lower,
            "gradient": lambda: accumulate.lower(
                grads, sums, state.params, state.adapters, rows, share
            ),
            "norm": lambda: self._norm.lower(grads),
            "apply": lambda: self._apply.lower(trained, state.opt_state, grads),
        }
        if self._config.kl_coef or self._config.rollout_steps > 1:
            plain = rows._replace(old_logprobs=None, reference_logprobs=None)
            found["logprobs"] = lambda: self._logprobs.lower(state.params, plain)
        if state.adapters is not None:
            found["merge"] = lambda: self._merge.lower(state.params, state.adapters)
        return found

    def _say_skipped(self, step: int, in_a_row: int, norm: float, sums: Sums) -> None:
        most = self._config.max_skipped
        what = f"update {step}: the gradient norm is {norm} (loss {sums.total})"
        if in_a_row >= most:
            raise SpadeError(
                f"{what}, expected a finite number; {in_a_row} updates in a row were skipped, and "
                f"learner.max_skipped={most}. The weights were left as they were. Start again with "
                "a lower learner.lr"
            )
        logger.warning("%s: skipped, %d in a row of at most %d", what, in_a_row, most - 1)

    def _trained(self, state: TrainState) -> Any:
        """The part of a state, or of its shapes or shardings, that is trained."""
        return state.params if state.adapters is None else state.adapters

    def _update(self, trained: Params, moments: Any, grads: Params) -> tuple[Params, Any]:
        updates, moments = self._optimizer.update(grads, moments, trained)
        moved: Any = optax.apply_updates(trained, updates)
        return moved, moments

    def _make_zeros(self) -> tuple[Params, Sums]:
        trained = self._trained(self._state_shapes())
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), trained)
        return zeros, no_sums(self._model)

    def _state_shapes(self) -> TrainState:
        params = transformer.abstract_params(self._model, self._execution)
        adapters = None
        if self._config.lora_rank:
            adapters = lora.abstract_adapters(params, self._config)
        count: Any = jax.ShapeDtypeStruct((), jnp.int32)
        state = TrainState(params, (), count, count, adapters)
        return state._replace(opt_state=jax.eval_shape(self._optimizer.init, self._trained(state)))

    def _state_shardings(self) -> TrainState:
        """Moments are sharded like the parameters they belong to; counters are everywhere."""
        shapes = self._state_shapes()
        params = param_shardings(self._model, self._mesh, self._execution)
        everywhere: Any = replicated(self._mesh)
        adapters = None
        if shapes.adapters is not None:
            rules = axis_rules(self._model, self._mesh) | {lora.RANK: None}

            def place(leaf: nnx.Variable) -> nnx.Variable:
                axes: Axes = leaf.get_metadata("axes")
                return leaf.replace(NamedSharding(self._mesh, partition(axes, rules)))

            is_variable = lambda node: isinstance(node, nnx.Variable)  # noqa: E731
            adapters = jax.tree.map(place, shapes.adapters, is_leaf=is_variable)
        state = TrainState(params, (), everywhere, everywhere, adapters)
        trained = self._trained(state)
        structure = jax.tree.structure(self._trained(shapes))

        def like_trained(node: object) -> bool:
            return jax.tree.structure(node) == structure

        opt_state = jax.tree.map(
            lambda node: trained if like_trained(node) else everywhere,
            shapes.opt_state,
            is_leaf=like_trained,
        )
        return state._replace(opt_state=opt_state)

    def _check_memory(self, name: str, memory: Memory) -> None:
        kinds = device_memories(self._mesh)
        if memory == "host" and "pinned_host" not in kinds:
            raise ConfigError(
                f"learner.{name}='host' needs memory of the kind pinned_host, and this "
                f"{self._mesh.devices.flat[0].platform} has {', '.join(kinds)}; set "
                f"learner.{name} to 'device'"
            )


def _distance(found: Params, start: Params) -> Float[Array, ""]:
    """Norm of the difference over that of `start`, in float32 whatever the weights are."""
    moved = jax.tree.map(lambda a, b: jnp.float32(a) - jnp.float32(b), found, start)
    return optax.tree.norm(moved) / optax.tree.norm(jax.tree.map(jnp.float32, start))


def device_memories(mesh: Mesh) -> list[str]:
    """The kinds of memory that a device reaches."""
    return [memory.kind for memory in mesh.devices.flat[0].addressable_memories()]


def _on_host(shardings: Any) -> Any:
    """The same placement in the memory of the hosts."""
    return jax.tree.map(lambda sharding: sharding.with_memory_kind("pinned_host"), shardings)
