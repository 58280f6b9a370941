"""specjax.metrics: rates worked out by hand, and the cost model against a simulation."""

import json

import numpy as np
import pytest

from specjax import metrics

COUNTERS = {
    "target_calls": 4,
    "rounds": 4,
    "drafted": 12,
    "tested": 10,
    "accepted": 8,
    "emitted": 12,
}


def test_rates_by_hand():
    assert metrics.rates(COUNTERS) == {
        "acceptance_rate": 0.8,
        "accept_rate_per_draft": pytest.approx(2 / 3),
        "draft_length": 3.0,
        "block_efficiency": 3.0,
        "tokens_per_target_call": 3.0,
    }


def test_undefined_rates_are_null_in_json():
    nothing = dict.fromkeys(COUNTERS, 0)
    assert set(metrics.rates(nothing).values()) == {None}
    assert "null" in json.dumps(metrics.rates(nothing))


def test_numpy_counters_give_plain_floats():
    found = metrics.rates({name: np.int32(value) for name, value in COUNTERS.items()})
    assert {type(value) for value in found.values()} == {float}


def test_speeds_leave_prefill_out():
    found = metrics.speeds(COUNTERS, prefill_s=2.0, first_token_s=2.5, decode_s=6.0)
    assert found["tokens_per_second"] == 2.0
    assert found["time_to_first_token_s"] == 2.5
    assert found["time_per_output_token_s"] == 0.5  # the 5.5 s after the first, over 11 tokens


def test_one_token_has_no_gap_and_no_decode_time_no_speed():
    found = metrics.speeds(COUNTERS | {"emitted": 1}, 1.0, 1.0, 0.0)
    assert found["time_per_output_token_s"] is None
    assert found["tokens_per_second"] is None


@pytest.mark.parametrize("acceptance, gamma", [(0.0, 3), (0.5, 1), (0.8, 4), (0.99, 7), (1.0, 3)])
def test_expected_block_efficiency_is_the_mean_of_simulated_rounds(acceptance, gamma):
    draws = np.random.Generator(np.random.Philox(7)).random((200_000, gamma)) < acceptance
    tokens = np.cumprod(draws, axis=1).sum(axis=1) + 1
    # The deviation allowed is six standard errors: at most (γ + 1) / 2 / √200000 each.
    tolerance = 6 * (gamma + 1) / 2 / np.sqrt(len(tokens))
    expected = metrics.expected_block_efficiency(acceptance, gamma)
    assert expected == pytest.approx(tokens.mean(), abs=tolerance)


def test_expected_block_efficiency_is_continuous_at_one():
    assert metrics.expected_block_efficiency(1 - 1e-9, 5) == pytest.approx(6.0, rel=1e-6)


def test_expected_speedup_by_hand():
    # λ = 0.5, γ = 1: 1.5 tokens a round, at the cost of one draft step and one pass.
    assert metrics.expected_speedup(0.5, 1, c=0.25) == 1.5 / 1.25
    assert metrics.expected_speedup(0.5, 1, c=0.25, v=1.5) == 1.5 / 1.75
    # A draft that is never accepted costs its steps.
    assert metrics.expected_speedup(0.0, 4, c=0.1) == pytest.approx(1 / 1.4)


def test_perplexity():
    assert metrics.perplexity(np.log([0.5, 0.5, 0.5])) == pytest.approx(2.0)
    assert metrics.perplexity(np.log([0.25, 1.0])) == pytest.approx(2.0)
    assert metrics.perplexity([]) is None


def test_diversity_by_hand():
    assert metrics.diversity([[1, 2, 3, 4, 5]]) == 1
    # 1 2 1 2 1: 2 of 4 bigrams, 2 of 3 trigrams, 2 of 2 four-grams are different.
    assert metrics.diversity([[1, 2, 1, 2, 1]]) == pytest.approx(2 / 4 * 2 / 3)
    assert metrics.diversity([[1, 2, 3]]) is None
    assert metrics.diversity([[1, 2, 3], [1, 2, 3, 4]]) == 1


def test_contrastive_predictions():
    # λ = 1: γ + 1 tokens per round; a round takes γ + 1 amateur passes, one more than drafts.
    assert metrics.expected_scd_speedup(1.0, 3, 0.1) == pytest.approx(4 / 1.4)
    assert metrics.expected_scored_speedup(1.0, 3, 0.1) == pytest.approx(4 / 1.4)
    paper = metrics.expected_scd_speedup(0.5, 3, 0.1)
    ours = metrics.expected_scored_speedup(0.5, 3, 0.1)
    assert paper == pytest.approx(1.875 / 1.3125) and ours == pytest.approx(1.875 / 1.4)


def test_common_subsequence_by_hand():
    # "a c e" is in both. Nothing longer is, because b and d are swapped.
    assert metrics.common_subsequence("abcde", "adcbe") == 3
    assert metrics.common_subsequence("abc", "cab") == 2
    assert metrics.common_subsequence("abab", "ba") == 2  # order counts, neighbors do not
    assert metrics.common_subsequence("", "abc") == metrics.common_subsequence("abc", "xyz") == 0


def test_rouge_l_by_hand():
    # Lin 2004, §3: LCS("police kill the gunman", "police killed the gunman") = 3 of 4 and 4.
    assert metrics.rouge_l("police kill the gunman", ["Police killed the gunman."]) == 0.75
    # "the gunman police killed": of its 4 words only two stand in the reference's order.
    assert metrics.rouge_l("the gunman police killed", ["police killed the gunman"]) == 0.5
    # precision 2/2, recall 2/6: F1 = 2·2/(2 + 6); the better of two references counts.
    assert metrics.rouge_l("b d", ["a b c d e f"]) == 0.5
    assert metrics.rouge_l("b d", ["a b c d e f", "x b d"]) == pytest.approx(0.8)
    assert metrics.rouge_l("", ["a"]) == metrics.rouge_l("a", ["?"]) == 0.0
    assert metrics.rouge_l("a", []) is None
