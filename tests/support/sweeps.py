"""Which cases of the longest tests are left to sweeps, so that the others end in time.

A case that differs from its neighbours only in its rule, model or form rarely fails alone. A fault
found in a sweep alone is a reason for a smaller number here. Where it matters which cases run, the
test marks the others itself.
"""

from __future__ import annotations

import pytest

# Of these tests' cases every n-th runs, from the first on.
STRIDES = {
    "decoding/test_beam_laws.py::test_mtjd_is_exact_where_the_joint_can_be_drawn": 3,
    "decoding/test_beam_laws.py::test_sampled_beams_have_their_law_hot_and_endless": 3,
    "decoding/test_decode.py::test_cache_equals_fresh_prefill_after_every_round": 4,
    "decoding/test_decode.py::test_compiled_loop_holds_no_copy_of_the_cache": 2,
    "decoding/test_decode.py::test_growing_buckets_and_chunks_change_nothing": 4,
    "decoding/test_decode.py::test_one_trace_per_bucket_over_settings_keys_and_lengths": 4,
    "decoding/test_decode.py::test_row_of_a_batch_is_the_prompt_alone": 4,
    "decoding/test_gated.py::test_sampled_output_has_the_bases_law": 3,
    "decoding/test_golden.py::test_tokens_and_counters": 3,
    "decoding/test_grammar.py::test_the_law_is_the_masked_target": 2,
    "decoding/test_head.py::test_a_row_that_takes_a_batch_slot_is_the_row_alone": 2,
    "decoding/test_head.py::test_every_family_is_a_target": 3,
    "decoding/test_head.py::test_greedy_output_is_plain_decoding_s": 2,
    "decoding/test_head.py::test_law": 3,
    "decoding/test_laws.py::test_end_to_end_law_of_every_drafter_in_bfloat16": 5,
    "decoding/test_laws.py::test_lossless_rule_emits_the_law_of_p": 2,
    "decoding/test_lookahead.py::test_a_row_of_a_batch_is_the_prompt_alone": 2,
    "decoding/test_lookahead.py::test_cdsl_is_the_reference": 2,
    "decoding/test_lookahead.py::test_cdsl_on_the_demo_pair_is_the_reference": 6,
    "decoding/test_pairs.py::test_pair_decodes": 6,
    "decoding/test_pass_width.py::"
    "test_bfloat16_logits_are_the_same_bits_however_many_tokens_a_pass_has": 2,
    "decoding/test_rules.py::test_a_lossless_tree_rule_emits_p": 4,
    "decoding/test_rules.py::test_mutant_is_caught": 3,
    "decoding/test_rules.py::test_patched_rule_is_caught": 3,
    "decoding/test_sampling.py::test_greedy_tokens_are_those_of_transformers": 2,
    "decoding/test_sampling_laws.py::test_every_rule_has_the_law": 2,
    "decoding/test_sampling_laws.py::test_mutant_is_caught": 2,
    "decoding/test_sdsat.py::test_sampled_output_has_the_targets_law": 4,
    "infer/test_run.py::test_sigterm_to_one_process_of_a_model_ends_both": 2,
    "models/test_adapters.py::test_clean_tokens_equal_the_bases_bit_for_bit": 3,
    "models/test_families.py::test_drafting_changes_nothing": 5,
    "models/test_families.py::test_greedy_decoding": 4,
    "models/test_families.py::test_one_beam_is_greedy_decoding": 3,
    "models/test_long_attention.py::test_every_backend_runs_isolated_windows": 3,
    "models/test_mixtures.py::test_every_way_computes_every_token": 2,
    "models/test_models.py::test_ragged_prefill_then_one_token_steps": 5,
    "models/test_models.py::test_tree_nodes_equal_their_paths_alone": 4,
    "models/test_models.py::test_whole_sequences": 4,
    "models/test_quantized.py::test_every_family_computes_with_the_dequantized_weights": 3,
    "models/test_quantizers.py::test_a_directory_decodes_as_the_weights_that_it_means": 5,
    "models/test_quantizers.py::test_a_weight_is_what_its_format_says": 2,
    "models/test_rings.py::test_a_broken_ring_is_noticed": 2,
    "models/test_rings.py::test_a_ring_gives_what_a_full_cache_gives": 2,
    "models/test_rings.py::test_every_method_decodes_in_rings": 6,
    "models/test_stacks.py::test_greedy_tokens": 3,
    "models/test_stacks.py::test_logits": 4,
    "project/test_command_lines.py::test_any_model_argument_of_lm_eval_is_used_or_refused": 3,
    "project/test_command_lines.py::test_any_value_of_an_option_is_used_or_refused_in_one_line": 4,
    "project/test_command_lines.py::test_the_arguments_of_the_table_are_accepted": 3,
    "project/test_examples.py::test_notebook_runs": 2,
    "project/test_gpu_programs.py::test_a_layer_takes_as_many_kernels_for_any_number_of_rows": 3,
    "project/test_gpu_programs.py::"
    "test_a_round_of_every_method_is_one_graph_and_waits_for_nothing": 4,
    "project/test_papers.py::test_a_command_of_the_page_makes_its_table": 20,
    "project/test_papers.py::test_a_recipe_of_the_page_exports_a_model_that_drafts": 2,
    "project/test_tpu.py::test_one_row_streams_the_weights": 2,
    "real/test_real_texts.py::test_tokens_and_streamed_texts_are_transformers": 2,
    "real/test_smollm2.py::test_lossless_methods_give_plain_decodings_tokens": 8,
    "train/test_processes.py::test_a_signal_to_one_process_stops_both_at_one_checkpoint": 2,
    "train/test_processes.py::test_the_other_programs_run_in_two_processes_too": 3,
    "train/test_replaced_bases.py::test_a_replaced_model_is_refused_on_resume": 3,
    "train/test_sdsat_losses.py::test_every_family_is_grown_trained_and_read_back": 4,
    "train/test_sdsat_losses.py::test_losses_and_gradients_equal_the_dense_reference": 2,
    "train/test_sdsat_memory.py::test_estimates_are_within_a_fifth_of_the_measured_step": 2,
    "train/test_sdsat_program.py::test_eight_devices_give_the_losses_of_one": 2,
    "train/test_sdsat_program.py::test_killed_and_resumed_gives_the_same_numbers": 3,
    "train/test_shard_sources.py::test_changed_sources_are_refused_by_name": 2,
    "train/test_train.py::test_chunked_cross_entropy_equals_plain": 2,
    "train/test_train_head.py::test_two_devices_give_the_losses_of_one": 2,
}


def leave_to_sweeps(items: list[pytest.Item]) -> None:
    """Marks the cases of ``STRIDES`` that do not run, as slow and as sweep.

    Cases that are marked so already do not count. If the default suite ran some cases, the default
    suite and the slow one are counted apart.
    """
    counts: dict[tuple[str, bool], int] = {}
    for item in items:
        name = item.nodeid.partition("[")[0].removeprefix("tests/")
        if name not in STRIDES or item.get_closest_marker("sweep"):
            continue
        suite = name, item.get_closest_marker("slow") is not None
        at = counts[suite] = counts.get(suite, -1) + 1
        if at % STRIDES[name]:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.sweep)
