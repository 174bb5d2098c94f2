"""Whole learners of every loss: eight devices in one process learn what one does."""

import dataclasses

import jax
import numpy as np
import pytest
from learning import CONFIG, MODELS, TOLD, draw_params, three_updates

from models.sharding import build_mesh, param_shardings
from spade_jax.learner.step import Learner


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "loss"),
    [("dense", "grpo"), ("moe", "grpo"), ("moe", "gspo"), ("moe", "cispo"), ("moe", "rloo")],
)
def test_three_updates_over_eight_devices_equal_those_of_one(name, loss):
    """GSPO's ratios are means over sequences, near to 1: its clips are narrower."""
    model, bound = MODELS[name], 0.05 if loss == "gspo" else 0.2
    config = dataclasses.replace(CONFIG, loss=loss, clip_low=bound, clip_high=bound)
    one, eight = build_mesh(1, 1, 1, 1, devices=jax.devices()[:1]), build_mesh(2, 2, 1, 2)
    expected, told = three_updates(Learner(model, config, one), draw_params(model))
    params = draw_params(model, param_shardings(model, eight))
    found, said = three_updates(Learner(model, config, eight), params)
    np.testing.assert_allclose(said, told, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    for before, after in zip(
        jax.tree.leaves(draw_params(model)), jax.tree.leaves(found), strict=True
    ):
        assert np.abs(np.asarray(before) - after).max() > 1e-4  # ten times what is borne
    # what tells the losses apart was at work in every update, and not everywhere
    for update in told:
        reported = dict(zip(TOLD, update, strict=True))
        assert 0.05 < reported["loss/tis_clip_frac"] < 0.95
        clipped = reported["loss/clip_frac"]
        assert clipped == 0.0 if loss == "rloo" else 0.05 < clipped < 0.95
