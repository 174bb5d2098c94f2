"""The account of a run compares cycles by hand-computed means; what is missing shows as a dash."""

import json

import pytest

from spade_jax.telemetry.summary import average, changes, closing, read_metrics, summary

LINES = [
    {
        "progress/step": 0,
        "progress/cycle": 0,
        "agent/return_unhinted_mean": 0.5,
        "agent/return_unhinted_mean_count": 2,
        "designer/attempted_count": 4,
        "designer/admitted_count": 3,
        "agent/outcome_finished_count": 5,
        "sampler/learner_logprob_gap_max": 2e-6,
        "optim/grad_norm": 1.0,
        "time/step_s": 30.0,
    },
    {
        "progress/step": 1,
        "progress/cycle": 0,
        "agent/return_unhinted_mean": 0.0,
        "agent/return_unhinted_mean_count": 8,
        "time/step_s": 60.0,
    },
    {
        "progress/step": 2,
        "progress/cycle": 1,
        "agent/return_unhinted_mean": 0.75,
        "agent/return_unhinted_mean_count": 4,
        "time/step_s": 30.0,
    },
]


def test_means_are_weighted_by_their_counts():
    assert average(LINES[:2], "agent/return_unhinted_mean") == pytest.approx(0.1)
    assert average(LINES, "designer/regret_mean") is None
    compared = {label: (old, new) for label, old, new in changes(LINES)}
    assert compared["agent return without hint"] == (pytest.approx(0.1), 0.75)
    assert compared["regret"] == (None, None)


def test_summary_counts_and_dashes():
    text = summary(LINES, 0.001)
    for part in (
        "3 steps, 1 optimiser updates, 2 designer cycles, 2.0 minutes",
        "4 designs, 3 admitted",
    ):
        assert part in text
    assert "1.00e-03 of their norm" in text and "2.0e-06" in text
    assert "| agent return without hint | 0.100 | 0.750 |" in text
    assert "| regret | - | - |" in text
    assert "moved by - of" in summary(LINES, None)


def test_closing_names_the_folder_and_only_what_was_measured(tmp_path):
    text = closing(LINES, 0.001, str(tmp_path))
    assert str(tmp_path) in text and "0.100 -> 0.750" in text and "regret" not in text


def test_a_run_whose_programs_were_not_contained_says_so(tmp_path):
    marked = [LINES[0], *({**line, "sandbox/unsafe": 1} for line in LINES[1:])]
    for text in (summary(marked, 0.001), closing(marked, 0.001, str(tmp_path))):
        assert "sandbox=unsafe: programs of 2 steps were not contained" in text
    for text in (summary(LINES, 0.001), closing(LINES, 0.001, str(tmp_path))):
        assert "sandbox" not in text


def test_metrics_are_read_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    assert read_metrics(path) == LINES
