"""Every program of the corpora gives eager's value, and is fused where it should be."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from corpus import (
    assigned,
    by_hand,
    calls,
    dense,
    dynamic,
    extended,
    families,
    families_more,
    functions,
    idioms,
    logsums,
    looped,
    masked,
    masks_made,
    normalised,
    online,
    packed,
    paged,
    paged_fetched,
    paged_found,
    paged_kept,
    paged_latent,
    paged_masked,
    paged_more,
    paged_near,
    paged_near_served,
    paged_near_writes,
    paged_parts,
    paged_pools,
    paged_requests,
    paged_served,
    paged_shared,
    paged_written,
    papers,
    papers_more,
    pieces,
    rarely_said,
    score,
    similar,
    spelled,
    spoken,
    totals,
    twins,
    variants_more,
    written,
    written_since,
)

from fusecomp import backend
from fusecomp.pipeline import Compilation
from fusecomp.report import Entry

ROOT = Path(__file__).parent
LONG = (
    dense, paged, paged_fetched, paged_masked, paged_more, paged_written, paged_served, paged_latent, paged_near,
    paged_near_writes, paged_near_served, paged_shared, families, families_more, by_hand, looped, masks_made, papers,
    papers_more, paged_pools, paged_requests, paged_parts, paged_kept, paged_found, spoken, variants_more,
    rarely_said, dynamic,
)  # fmt: skip
TABLES = (*LONG, spelled, masked, packed, written, written_since, twins, idioms, logsums, extended, functions,
          normalised, calls, pieces, online, assigned, totals, similar)  # fmt: skip

QUICK = {
    "mul_scale", "exp_over_sum", "einsum_bqhd", "k_permuted_straight_equal_axes", "bmm_scaled", "diffusers_baddbmm",
    "two_layers", "checkpointed", "gqa_repeat_kv", "additive_causal_after_mul", "triu_of_minus_inf",
    "gpt2_where_finfo_min", "causal_bottom_right", "window_on_both_sides", "key_lengths", "padding_times_minus_1e4",
    "dead_row_nan_to_num", "dead_row_finfo_min", "nan_in_one_key_under_causal", "alibi_from_arange", "sink_logit",
    "relative_bias_table", "hf_gpt_oss_eager", "hf_opt_eager", "mla_latent", "multi_head_attention_forward",
    "autocast_bfloat16", "weights_escape", "softmax_over_queries", "cumsum_over_keys", "table_index", "slot_index",
    "head_major_pages", "ragged_queries", "float8_pages", "latent_pages", "write_slots_then_read",
    "empty_sequence_guarded", "bits_joined_by_or", "one_block_at_a_time", "split_head_size", "head_in_the_index",
    "tree_of_drafts", "int8_scale_of_each_token", "owners_by_search", "latent_in_two_pools", "index_copied",
    "slots_of_padding", "pages_kept_apart", "exponentials_of_pages", "elements_taken", "pools_returned",
    "bits_that_collide", "truncated_below_zero", "blocks_out_of_order", "later_of_two_lengths",
    "past_the_length_or_even", "doubled_in_eight_bits", "rounded_on_the_way", "values_written_under_the_scores",
    "written_between_fetch_and_use", "distances_filled_twice", "ring_by_age", "beams_gathered", "pages_chosen_by_head",
    "tokens_chosen_by_head", "scale_and_zero_of_each_token", "halves_of_the_table", "soft_cap_after_the_mask",
    "transformer_xl", "looks_one_window_back", "no_key_for_the_first_query", "tree_of_parents", "four_index_arrays",
    "ones_column", "ones_column_near", "keys_assigned_for_each_request", "sigmoid_normalised",
    "ones_column_of_wider_numbers",
    "sigmoid_normalised_near", "softplus_masked_by_choice", "relu_over_its_sum", "sigmoid_masked_and_deferred",
    "safe_softmax_by_where", "rows_without_keys_filled", "rows_without_keys_filled_near", "rows_without_keys_counted",
    "one_number_as_a_value", "one_number_as_a_value_near", "chunks_look_back", "documents_by_search",
    "one_more_than_the_square_near",
    "gathered_by_einsum_of_three", "mapped_over_queries", "blocks_by_kron", "longformer", "triangle_attention",
    "rotary_by_complex_numbers", "multi_head_latent", "heads_mixed_behind_near", "music_transformer_skew",
    "half_of_a_mask_filled_again", "zero_in_the_bytes", "merged_in_base_two", "empty_part_under_a_finite_fill",
    "vllm_v0", "vllm_v1_keys_twice", "flashinfer_indptr", "sglang_window", "vmap_requests", "loop_masks_of_next",
    "mixed_by_compare", "empty_nan", "loop_online", "cascade_global_max", "cascade_merge_swapped", "spec_tree",
    "write_index_put", "write_keys_after", "quant_e4m3_token_head", "quant_int8_page", "mla_two_pools", "returns_lse",
    "old_keys_in_few_bits", "levels_in_base_two", "levels_in_base_two_near", "powers_of_two", "powers_of_two_near",
    "masked_after_the_exponential", "page_by_page_near", "elements_summed", "shards_of_one_head",
    "one_query_of_one_request", "layer_in_a_tensor", "sink_in_base_two", "divided_by_an_exponential",
}  # fmt: skip
"""Of the long tables, what every run takes; the rest is slow."""
INTERPRETED = "mul_scale,gqa_repeat_kv,causal_bottom_right,dead_row_finfo_min,sink_logit,two_index,slot_index"


def options(*arguments: str) -> Any:
    return score.parse(["--option", "inner=eager", *arguments])


def cases(*tables: Any) -> Iterator[Any]:
    for table in tables:
        for case in table.CASES:
            quick = table not in LONG or case.name in QUICK
            name = f"{table.__name__.rpartition('.')[2]}-{case.name}"
            yield pytest.param(case, id=name, marks=() if quick else pytest.mark.slow)


def check(case: Any, result: Any, heard: list[Entry]) -> None:
    """Right, fused as often as expected, or declined with the reason expected and a line of the program."""
    assert result.verdict == "right", f"{result.detail}: error {result.error:.1e} of {result.budget:.1e}"
    if case.expect == "fuse":
        assert result.fused >= case.count
    if case.expect == "decline":
        assert result.fused == 0
    if case.reason:
        assert any(case.reason in e.reason for e in heard), [e.reason for e in heard]
        assert all(e.where and e.source for e in heard)


@pytest.mark.parametrize("case", cases(*TABLES))
def test_case_is_right(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Compilation] = []
    monkeypatch.setattr(backend, "_listeners", [heard])
    check(case, score.score(case, score_name(case), options()), [e for c in heard for e in c.entries])


def score_name(case: Any, which: int = 0) -> str:
    return str(case.dtypes[which]).removeprefix("torch.")


REARRANGED = ("shift_by_two_paddings", "shift_by_a_column_of_zeros", "windows_in_the_batch")


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in dynamic.CASES if c.name in REARRANGED])
def test_rearranged_by_lengths_that_are_symbols(case: Any) -> None:
    check(case, score.score(case, "float32", options("--dynamic", "true")), [])


STOPPED = ("queries_detached", "values_as_data", "keys_transposed_without_gradient", "bias_detached",
           "shift_without_gradient", "scores_detached", "weights_without_gradient", "denominator_detached",
           "output_scaled_in_place")  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in idioms.CASES if c.name in STOPPED])
def test_gradients_stop_where_the_program_stops_them(case: Any) -> None:
    result = score.score(case, "float32", options("--train"))
    assert result.verdict == "right", result.detail
    assert bool(result.fused) != ("left to eager" in case.note)


PAGES_KNOWN = ("pages_kept_apart", "pages_kept_apart_in_the_scores", "exponentials_of_pages", "rows_of_group_and_query",
               "halves_of_the_table", "chunk_by_chunk", "chunk_by_chunk_masked", "chunks_interleaved",
               "pieces_of_two_scales", "v2_partitions_normalised", "v2_partitions_lse_shift",
               "loop_online", "v2_loop_stacked",
               "minus_one_embedding", "masked_after_the_exponential", "page_by_page")  # fmt: skip
"""Fused where the length of a page, or of another axis, is a number: the place in it is a remainder by it."""


@pytest.mark.slow
@pytest.mark.parametrize("setting", [("--train",), ("--dynamic", "true", "--sizes", "1,2"), ()], ids=" ".join)
@pytest.mark.parametrize("case", [p for t in TABLES for p in cases(t)])
def test_case_is_right_in_every_setting(case: Any, setting: tuple[str, ...]) -> None:
    for which in range(len(case.dtypes)):
        result = score.score(case, score_name(case, which), options(*setting))
        if result.detail.startswith("eager:"):  # the program is written for one size
            result = score.score(case, score_name(case, which), options(*setting, "--sizes", "1"))
        assert result.verdict == "right", result.detail
        if case.expect == "fuse":
            left = "left to eager" in case.note
            unknown = case.name in PAGES_KNOWN and "--dynamic" in setting
            assert result.fused or unknown or (left and "--train" in setting and result.declined)


def interpret(*arguments: str) -> str:
    """The generated kernels themselves, in Triton's interpreter, which a process takes up when it starts."""
    command = [sys.executable, str(ROOT / "corpus" / "score.py"), "--option", "inner=eager", "--strict", *arguments]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_kernels_in_the_interpreter() -> None:
    out = interpret("--only", INTERPRETED)
    assert "wrong 0, errors 0" in out


@pytest.mark.slow
def test_every_kernel_in_the_interpreter() -> None:
    assert "wrong 0, errors 0" in interpret()
