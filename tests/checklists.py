"""Two public checklists of cheats in GPU benchmarks, and what catches each cheat here.

The first has 40 cheats seen in public benchmarks, and the second has the 95 validity issues that
the harness of a public course lists. The state of an `Item` is not set by hand. It follows from the
exploits and tests that the item names. `checklists_test.py` checks that these exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SECOND_LINES = {
    "fresh-memory": (
        "`empty` may return memory that holds an earlier answer. This answer belongs to other"
        " values, because each side gets its values in the same order, so the bound refuses it too."
        " Whether a freed block comes back is up to the allocator, and no exploit may depend on"
        " that. This is a second line against sides that read memory they never wrote."
        " `inputs_test.py` shows that free memory is filled with NaN."
    ),
    "malloc": (
        "No side is refused: changed parameters are reset before the next window. `malloc_test.py`"
        " shows that a side then takes no more page faults than before."
    ),
}
"""Protections without an exploit of their own, and why."""


@dataclass(frozen=True)
class Item:
    """One way to cheat.

    Attributes:
        cheat: in a few words.
        exploits: names of exploits that cheat in this way and are caught, separated by spaces.
        tests: names of other tests that prove that it is caught, separated by spaces. A name that
            is not unique has its file before it: ``file.py::test_name``.
        why: why the cheat cannot happen here, or how the design prevents it.
        open: what is not proved, or not done.
    """

    cheat: str
    exploits: str = ""
    tests: str = ""
    why: str = ""
    open: str = ""

    @property
    def state(self) -> str:
        """``caught``, ``in part``, ``by design`` or ``open``."""
        if self.exploits or self.tests:
            return "in part" if self.open else "caught"
        return "open" if self.open else "by design"


_WHEN_TIMED = (
    "bf16_when_timed checked_sizes clock_when_timed every_second_call fewer_steps"
    " flags_when_timed half_a_step last_calls lazy_when_timed less_when_timed nan_when_timed"
    " one_call_of_64 prepared_when_timed"
    " remembered_mean_when_timed"
    " skips_when_timed sorts_when_timed thread_when_timed view_when_timed zeros_when_timed"
)
_BACKGROUND = "thread thread_when_timed pool child_process forked alarm lock_held"
_LAZY = (
    "lazy_tensor lazy_when_timed lazy_sign sparse_output expanded meta_output"
    " lazy_list lazy_list_when_timed lazy_dict lazy_namespace lazy_record"
)
_STALE = (
    "by_version by_version_when_timed unchanged admitted_late by_sample baselines_answer"
    " computed_with_inputs"
    " once by_shape by_address stale_half prepared remembers_values knows_the_seed remembered_mean"
)
_LOWER = "bf16_inside bf16_inputs fp16_inside fp8_inside tf32_inside bf16_output bf16_when_timed"
_SETTINGS = (
    "matmul_precision fp32_precision bf16_on_cpu cudnn_benchmark default_dtype flush_denormal"
    " flags_when_timed mode_left dispatch_mode_left module_hook anomaly grad_off default_device"
    " environment onednn_off onednn_off_restored mkl_threads one_thread_restored"
)
_REPLACED = (
    "slow_clock clock_when_timed no_wait own_event no_error no_nan always_equal own_max own_sample"
    " own_value own_window own_code own_limit slow_baseline"
)
_FEWER = "fewer_rows dropped_row dropped_columns sampled less_when_timed"
_RATES = "decision_test.py::test_few_false_reds_and_few_misses"
_TRUE_RATIO = "test_the_measured_value_is_the_true_ratio"
_THROTTLED = (
    "test_a_throttled_block_is_measured_again_and_counted"
    " test_a_gpu_that_always_throttles_gives_no_measurement"
)
_OTHER_ENVIRONMENT = "test_a_loss_in_another_environment_is_stale_unless_strict"
_WARMUP = "test_the_warmup_lasts_while_memory_grows_or_times_fall"
_IMPORTS = (
    "test_a_block_with_an_import_is_measured_again test_an_import_at_every_call_fails_the_case"
)
_DYNAMO = "test_real_compilations_of_dynamo_are_counted"
_COMPILATIONS = f"{_DYNAMO} test_triton_compilations_are_counted_and_other_listeners_called"
_PAGE_FAULTS = "test_page_faults_disturb_unless_the_page_owns_them"
_POWER = "test_a_loss_under_another_power_limit_is_stale"
_COMPARED_FACTS = "test_facts_that_make_times_incomparable"
_WITH_FAKES = "tested with fakes, not on a GPU"
_WRONG_SIDES = "test_the_message_names_the_wrong_side_and_its_size"
_CLOCKS = (
    "test_cross_check_detects_a_replaced_clock test_one_reading_without_contradiction_is_enough"
)
_SANDBOX = "test_sides_that_attack_the_checks_fail_in_a_sandbox"
_SANDBOX_CLOCK = "test_a_replaced_clock_is_detected_from_outside"
_OTHER_PROCESS = (
    "test_another_process_on_the_gpu_is_reported test_a_simulated_neighbor_is_detected"
    " test_beside_a_neighbor_no_verdict_is_red_and_nothing_is_stored"
)
_WAITED = "test_a_block_that_waited_for_a_core_is_measured_again"
_FREE_MEMORY = "test_free_memory_is_filled_with_nan"
_UNSEEN = "test_the_unseen_values_do_not_exist_before_the_last_rewrite"
_WINDOWS = "test_every_window_runs_through_all_slots"
_ROWS = (
    "test_each_case_is_recorded_once_by_the_controller"
    " test_artifacts_hold_the_rows_of_finished_cases"
)
_NOTES = "test_remarks_are_shown_without_vv_and_stored"
_GRAPH_NODES = (
    "test_host_nodes_are_refused_in_child_graphs_too test_a_graph_without_gpu_work_is_refused"
)
_ONE_RANK = "test_a_fault_fails_and_names_the_rank"
_TWO_LAUNCHERS = "test_ranks_of_two_launchers_measure_together"
_NCCL = "test_nccl_and_links_count_where_several_gpus_work_together"
_PRODUCT = "test_results_are_not_written_into_another_products_folder"

SIDE_STREAM = Item(
    "Work on a stream that is never waited for",
    exploits="side_stream",
    tests=_CLOCKS,
    why="no work may be left on any stream when the last event is reached",
)
BACKGROUND_WORK = Item(
    "Work that a thread, a process or a timer finishes later",
    exploits=_BACKGROUND,
    open="threads that a C library starts",
)
LAZY_OUTPUT = Item("An output that is computed only when it is read", exploits=_LAZY)
CACHED_ANSWER = Item(
    "An answer found again by address, by shape, or from the last call",
    exploits=_STALE + " scans_inputs memo",
    tests="test_a_page_refuses_wrong_sides",
)
VIEW_OF_INPUT = Item("An input returned as the output", exploits="view view_when_timed")
FREED_MEMORY = Item(
    "The answer found in freed memory",
    tests=f"{_WRONG_SIDES} {_FREE_MEMORY}",
    why="the memory that is allocated next holds NaN; outputs are overwritten between windows",
)
LOWER_PRECISION = Item(
    "Lower precision than declared",
    exploits=_LOWER + " terms",
    tests="test_tf32_inside_fp32_fails_unless_declared test_a_bf16_accumulator_fails",
    open="an overstated Work(roundings=) widens the bound; a note names it, but no check does",
)
PREPARED_GRAPH = Item(
    "A graph captured with the answer, or with the work already done",
    exploits="prepared prepared_when_timed captured_answer",
)
SHORT_SAMPLES = Item(
    "Short samples on a coarse clock",
    tests=f"test_a_coarse_clock_does_not_bias_the_value {_WINDOWS}",
    why="a window lasts at least 1 ms, and the mean is taken inside it",
)
PROFILER = Item(
    "A profiler that drops events or slows kernels",
    exploits="traced profiled torch_profiler",
    why="no profiler is used as a clock, and none may run during timing",
)

BENCHMARK_CHEATS = (
    SIDE_STREAM,
    BACKGROUND_WORK,
    LAZY_OUTPUT,
    CACHED_ANSWER,
    Item(
        "Several calls merged into one, with the others skipped",
        exploits="every_second_call every_second_round skips_when_timed fewer_steps"
        " uncaptured skips_captured",
    ),
    Item("Right while it is checked, fast while it is timed", exploits=_WHEN_TIMED),
    Item(
        "Inputs changed in place",
        exploits="sorted_inputs sorts_when_timed negative_zero sorted_list",
        tests="test_a_page_that_breaks_a_rule_is_refused",
    ),
    VIEW_OF_INPUT,
    FREED_MEMORY,
    Item(
        "Expected values found in the process",
        exploits="gc_scan scans_inputs",
        tests=f"{_UNSEEN} {_SANDBOX}",
        why="with `--aisp-untrusted` they are in another process",
    ),
    Item(
        "Expected values overwritten, or NaN that equals everything",
        exploits="expected_overwritten expected_nan nan nan_when_timed",
        tests="test_nan_is_right_only_where_the_reference_has_it",
    ),
    Item(
        "A tolerance that accepts zeros",
        exploits="loose_tolerance constant zeros",
        tests="test_a_tolerance_that_accepts_a_control_is_refused"
        " test_a_loose_output_cannot_hide_behind_a_strict_one test_a_page_refuses_wrong_sides",
    ),
    LOWER_PRECISION,
    Item(
        "Inputs of zeros or constants",
        exploits="zero_inputs constant_inputs",
        tests="test_inputs_that_cannot_tell_are_named",
        open="inputs that differ but draw less power: no second distribution is timed",
    ),
    Item("Right only at the listed sizes", "listed_size checked_sizes", _WRONG_SIDES),
    Item(
        "Omitted work that does not change any result",
        exploits="dropped_columns dropped_row one_element rounded_a_little reversed_rows",
        open="work whose result the page does not return: bytes and FLOPs are not counted (CUPTI)",
    ),
    Item(
        "An unnoticed fallback to the baseline",
        tests="test_a_missed_claim_is_red_and_names_value_and_limit"
        " test_notes_list_kernels_and_say_if_both_sides_launch_the_same",
        why="a variant that is its baseline has a speedup of 1 and misses any claim above 1",
        open="with a claim of 1 or `neutral`, `--aisp-audit` reports it but refuses nothing",
    ),
    Item(
        "A warm L2 that is called cold",
        exploits="persisting_l2 ballast",
        tests="test_slots_cover_five_caches_and_share_no_memory"
        f" test_a_small_working_set_is_refused_unless_the_page_declares_a_warm_l2 {_WINDOWS}"
        " test_slow_loads_after_a_round_show_a_cold_l2"
        " test_a_warm_l2_is_measured_again_before_it_is_reported",
        why="slots of five L2 caches rotate, and the latency of loads proves that the L2 is cold",
    ),
    Item(
        "A cache flush inside the timed window",
        tests=_CLOCKS,
        why="only one replay is between the two events of a window; the L2 is flushed between"
        " blocks",
    ),
    Item(
        "Replaced clocks, waits or comparisons",
        exploits=_REPLACED,
        tests=f"test_a_page_cannot_replace_the_clock_that_is_read {_SANDBOX_CLOCK}",
        why="with `--aisp-untrusted` the clock of another process must agree",
        open="constants of the plugin that a page changes outside of its sides",
    ),
    Item(
        "CUDA events that were swapped or that measure nothing",
        exploits="own_event no_wait short_events no_replay",
        tests=_CLOCKS,
        why="the plugin makes its own events, and the GPU's own counter must agree with them",
    ),
    Item(
        "Results printed or edited instead of measured",
        tests=f"{_WRONG_SIDES} test_a_manual_edit_breaks_the_seal"
        " test_recording_is_refused_where_ci_is_set",
        why="printed text is not read as results; a stored line has a checksum; CI stores nothing",
        open="a side that writes to its process's reply pipe, without `--aisp-untrusted`; the"
        " checksum does not stop a forger",
    ),
    PREPARED_GRAPH,
    Item(
        "Compiling, tuning or planning inside the window, or hidden outside it",
        exploits="imports compiles",
        tests=f"{_WARMUP} {_IMPORTS} {_COMPILATIONS}"
        " test_device_allocations_in_a_window_are_counted",
        why="both sides are warmed up until their times are steady; the report has a separate "
        "line for the cost of preparing; allocations are counted, never refused",
        open=f"Triton's compilations and allocations: {_WITH_FAKES}",
    ),
    Item(
        "A launch-bound kernel: Python is timed, not the GPU",
        tests="test_a_side_that_is_much_slower_without_a_graph_is_launch_bound " + _NOTES,
        why="`bound` chooses the clock; the notes have the times of the other clock, and a side"
        " that takes 1.5 times as long without a graph is reported as launch-bound",
        open="no test shows it on a GPU",
    ),
    SHORT_SAMPLES,
    Item(
        "Clocks that differ between the sides",
        tests=f"{_TRUE_RATIO} {_THROTTLED}",
        why="the sides alternate in every window; a throttled block is measured again",
        open="simulated; no test throttles a GPU",
    ),
    Item(
        "Order and drift",
        tests=f"test_windows_last_equally_long_and_orders_are_balanced {_TRUE_RATIO} {_RATES}",
        why="each block is ABBA or BAAB at random",
    ),
    Item(
        "Iterations counted as independent",
        tests=f"test_a_process_with_scattered_laps_is_judged_by_their_spread {_RATES}",
        why="the replicate is the process and, in it, the capture",
    ),
    Item(
        "Measured until it is green, or the best of many",
        tests="test_a_red_case_is_not_rerun"
        " test_voting_stops_when_it_is_decided"
        " test_a_suspect_without_votes_is_inconclusive",
        why="the number of blocks is fixed before the first; the row has every vote; no reruns",
    ),
    Item(
        "Outliers removed, digits rounded away, failures left out of a mean",
        tests=_ROWS,
        why="a block is dropped only for a named cause and is counted; there are no means over"
        " cases",
    ),
    Item(
        "Garbage that happens to fit",
        exploits="nan_when_timed unwritten_rows",
        tests=_WRONG_SIDES,
        open="no exploit on a GPU yet; no guard bands; `--aisp-sanitize` runs only on request",
    ),
    Item(
        "A weak baseline",
        tests="test_share_and_plausibility",
        why="each row shows how close the optimized side is to the machine's limit",
        open="the reader must judge that: there is no third, strong side",
    ),
    Item(
        "Another problem on each side",
        exploits=_FEWER + " ignores_mask bf16_output",
        why="both sides share one `inputs` and one `reference`, and neither makes its own data",
    ),
    Item(
        "Memory silently traded for speed",
        tests="test_memory_is_traded_for_speed_if_the_optimized_side_needs_much_more"
        f" {_NOTES} test_peak_memory_of_a_call_excludes_earlier_allocations"
        " test_memory_held_by_preparation_is_counted_per_slot"
        " test_peak_memory_includes_the_memory_nodes_of_this_side_only"
        " test_memory_is_measured_once_and_after_the_windows",
        why="the row has the peak memory of a call of each side, and it is shown if the optimized"
        " side needs both 1.5 times as much and 64 MiB more. More memory is reported, not refused",
        open="memory that a side keeps from an earlier call, temporaries that torch allocates"
        " during a capture, and memory that neither torch nor a graph's memory nodes allocate are"
        " not counted",
    ),
    Item(
        "A stored result of another machine",
        tests=f"{_OTHER_ENVIRONMENT} {_PRODUCT}"
        f" test_too_many_suspects_in_one_direction_make_the_run_invalid {_POWER} {_COMPARED_FACTS}",
        why="a result belongs to a GPU product; a loss in another environment is `stale`: other"
        " versions, power limit or MIG; on the host's clock, another CPU or governor; on several"
        " GPUs, another NCCL or other links",
    ),
    Item(
        "A neighbor on the GPU",
        tests=f"test_a_wait_for_a_lease_is_announced {_WAITED} {_OTHER_PROCESS}",
        why="sessions lock the GPU in turn; time slices of other processes are measured, and NVML"
        " names them",
        open="clients of MPS take no time slices; without NVML nothing shows them",
    ),
    PROFILER,
    Item(
        "A lost core, garbage collection, a loop that logs",
        exploits="affinity priority collects_garbage switch_interval fewer_threads",
        tests=_WAITED,
    ),
    Item(
        "Noise that is called an improvement",
        tests=f"{_RATES} test_a_side_that_differs_from_itself_makes_the_run_invalid"
        " test_an_unseen_planted_slowdown_makes_the_run_invalid"
        " test_chance_alone_does_not_make_a_run_invalid",
        why="the recorded spread gives a margin, then fresh processes vote; each run has a canary",
    ),
)
"""40 cheats of public benchmarks, in the order in which they were collected."""

VALIDITY_ISSUES: Mapping[str, tuple[Item, ...]] = {
    "Timing": (
        SIDE_STREAM,
        Item(
            "Asynchronous work not waited for",
            exploits="no_wait",
            tests=_CLOCKS,
            why="the host clock waits for the device at both ends of a window",
        ),
        Item(
            "Work outside the events",
            exploits="short_events side_stream",
            tests=_CLOCKS,
            why="events, the host's clock and the GPU's own counter must agree",
        ),
        SHORT_SAMPLES,
        Item("Results carried over from the warmup", exploits=_STALE + " unwritten_rows"),
        Item("A clock that drifts or jumps", "slow_clock clock_when_timed", _TRUE_RATIO),
        PROFILER,
    ),
    "Output": (
        Item("The same output for every input", exploits="nothing constant once constant_inputs"),
        Item("A stale output", exploits=_STALE + " every_second_call shared_output"),
        Item(
            "Nearly right",
            exploits="nearly rounded_a_little one_element off_by_one wrong_sign transposed "
            + _LOWER,
        ),
        Item("NaN", exploits="nan nan_when_timed expected_nan"),
        Item("Infinity", exploits="infinite"),
        Item(
            "A wrong ground truth",
            exploits="expected_overwritten",
            why="the baseline is compared with the reference too: all three must agree",
            open="a reference and a baseline that are wrong in the same way",
        ),
        Item("Another shape", exploits="fewer_rows extra_dimension extra_output expanded"),
        Item("Another type", exploits="bf16_output fp64_output lazy_tensor sparse_output"),
        Item("Denormals flushed to zero", exploits="flushed_denormals flush_denormal"),
        FREED_MEMORY,
    ),
    "Workload": (
        LOWER_PRECISION,
        Item("Global settings and modes changed", exploits=_SETTINGS),
        Item("Undeclared shortcuts", exploits="constant " + _FEWER),
        Item(
            "Stopping early",
            exploits="dropped_row dropped_columns first_step_only fewer_steps half_a_step",
        ),
        Item("A smaller batch", exploits="fewer_rows dropped_row"),
        Item("A shorter sequence", exploits="dropped_columns less_when_timed"),
        Item("Sampled inputs", exploits="sampled"),
        Item(
            "Another sparsity",
            exploits="sparse_output zero_inputs",
            why="both sides get the same bytes",
        ),
        Item("Another mask", exploits="ignores_mask"),
        Item(
            "A smaller KV cache",
            exploits="dropped_columns half_a_step",
            why="a cache is an input or a state; both sides get the same one, and its tensors "
            "are compared",
        ),
        Item(
            "Test data seen in training",
            why="no model is scored: outputs are compared with a reference",
        ),
    ),
    "Location": (
        Item(
            "Work done on the CPU",
            exploits="meta_output host_callback",
            tests=_GRAPH_NODES,
            why="the host clock includes it; outputs must be on the reference's device; a graph"
            " replays nothing on the host except callbacks",
            open="the queue clock does not see what the host does meanwhile",
        ),
        Item("Computed during preparation", exploits="prepared prepared_when_timed knows_the_seed"),
        PREPARED_GRAPH,
        Item("Computed during the warmup", exploits=_STALE + " skips_when_timed"),
        BACKGROUND_WORK,
        LAZY_OUTPUT,
        Item(
            "Compiled inside the window",
            exploits="imports compiles",
            tests=f"{_WARMUP} {_IMPORTS} {_COMPILATIONS}",
            why="both sides are warmed up until their times are steady; a block in which something"
            " was compiled is measured again",
            open=f"Triton's compilations: {_WITH_FAKES}; NVRTC's are not counted",
        ),
    ),
    "Memory": (
        Item("An output written before", exploits="unwritten_rows shared_output once"),
        VIEW_OF_INPUT,
        Item(
            "An unfinished copy to pinned memory",
            exploits="late_copy",
            tests=f"{_CLOCKS} test_no_output_is_read_before_the_device_is_idle",
            why="a graph ends after all its copies; on the queue clock, the device must be idle "
            "when the last call ends; outputs are read after that",
        ),
        Item(
            "The allocator's pool returns the answer",
            tests=_FREE_MEMORY,
            why="the cache is released before each lap; both sides have their own slots",
        ),
        Item(
            "Fragmented memory",
            why="each lap allocates its slots again, and odd laps build the second side first",
            open="a side that fragments the allocator for the other one",
        ),
        Item(
            "Memory pages touched for the first time",
            tests=f"{_WARMUP} {_PAGE_FAULTS}",
            why="the first block is discarded; page faults are counted, and a block that read from"
            " disk is measured again",
        ),
        Item(
            "Swapping",
            tests=f"test_swapping_disturbs_but_earlier_swap_does_not {_PAGE_FAULTS}",
            why="a block in which memory was swapped in or out is measured again",
        ),
    ),
    "CUDA": (
        Item(
            "Work in a host callback",
            exploits="host_callback",
            tests=_GRAPH_NODES,
            why="the nodes of a graph and of its child graphs are counted by type",
            open="on the queue and host clocks, callbacks are not detected, but the window"
            " includes their time; nodes in the body of a conditional node are not counted",
        ),
        Item(
            "An unfinished copy",
            exploits="side_stream late_copy",
            tests=_CLOCKS,
            why="a copy is work like a kernel: none may be left when the last call ends",
        ),
        Item(
            "Work done in advance in a workspace",
            exploits="prepared prepared_when_timed once",
            why="values change in place, so anything prepared from them is stale",
        ),
        Item(
            "A kernel that keeps running after the call",
            exploits="side_stream",
            tests=f"{_CLOCKS} test_an_endless_kernel_fails_only_its_case",
            why="every wait for the device waits for the kernel, and the plugin reports late "
            "work as for an unfinished copy; a kernel that never ends reaches the time limit",
        ),
        Item(
            "More GPUs than declared",
            tests="test_a_worker_process_sees_one_gpu",
            why="a worker process sees one GPU",
        ),
        Item(
            "Contexts that change",
            tests=_OTHER_PROCESS,
            why="a worker process has one GPU and one context, and locks the GPU",
        ),
        Item(
            "Driver calls in the window",
            why="the notes have the times of the other clock, which show what the host adds",
            open="calls of the driver are not counted",
        ),
        Item(
            "A cooperative launch for the wrong reason",
            why="a side may launch as it likes: results and time are judged",
        ),
        Item(
            "Kernels started by kernels",
            why="by CUDA's rules a kernel ends after the kernels that it started, and a window "
            "ends after its kernels",
            open="no exploit on a GPU yet; such kernels are not nodes of a graph, so they are not"
            " counted; graphs launched on the device are not tested",
        ),
        Item(
            "Faults of unified memory",
            tests=_WARMUP,
            why="both sides are warmed up until their times are steady",
            open="no exploit on a GPU yet; the GPU's page faults are not counted",
        ),
    ),
    "Compile": (
        Item(
            "A warm compile cache on one side",
            tests="test_cold_start_gives_each_case_its_own_caches",
            why="the report has a separate line for the cost of preparing a side",
            open="without `--aisp-cold-start` that cost may be from a warm cache",
        ),
        Item(
            "A reused trace",
            exploits="by_shape once",
            why="a side may choose Dynamo's guards, but its answers are compared",
        ),
        Item(
            "Eager on one side, compiled on the other",
            why="some pages compare just that; the page says what each side is",
            open="the reader must judge whether only one thing differs between the sides",
        ),
        Item(
            "Compiled for one side only",
            open="the reader must judge whether both sides should be compiled",
        ),
        Item(
            "Guards that fail and cause another compilation",
            exploits="compiles",
            tests=f"{_WARMUP} {_DYNAMO}",
            why="timing starts when times are steady; Dynamo frames and Inductor graphs are"
            " counted, and a block with one is measured again",
        ),
        Item(
            "Tuned by chance",
            exploits="cudnn_benchmark",
            tests=f"{_RATES}"
            " test_choices_are_stored_and_explain_a_slowdown"
            " test_the_configuration_of_each_tuned_launch_is_recorded",
            why="each vote is a fresh process, which tunes again; the choices of Triton's tuner are"
            " stored with the result",
            open=f"Triton's tuner: {_WITH_FAKES}; Inductor's `max-autotune` choices are not"
            " recorded",
        ),
        Item("Right for one symbolic shape", "listed_size checked_sizes", _WRONG_SIDES),
    ),
    "Distributed": (
        Item(
            "A rank that does nothing",
            tests=_ONE_RANK,
            why="the outputs of each rank are compared with its own part of the reference",
        ),
        Item(
            "A skipped collective",
            tests=_ONE_RANK,
            why="every output depends on the inputs of every rank, and no rank knows the inputs "
            "of the others",
        ),
        Item(
            "Another topology",
            tests=_NCCL,
            why="results belong to a product and a number of GPUs; their links are recorded, and a"
            " loss with other links is `stale`",
        ),
        Item(
            "Ranks that start at different times",
            tests=_TWO_LAUNCHERS,
            why="a window begins with a barrier on the stream, and the slowest rank counts",
        ),
        Item(
            "Other gradient buckets",
            why="some pages compare just that; the page says what each side is",
            open="the reader must judge this",
        ),
        Item(
            "Gradients not waited for",
            exploits="side_stream",
            why="work that is left when the last call ends is late, collectives too",
            open="no exploit with a collective has run on GPUs",
        ),
        Item(
            "A pipeline bubble left out",
            tests=_TWO_LAUNCHERS,
            why="a window is whole calls of every rank, and the slowest rank counts",
        ),
        Item(
            "Smaller shards",
            tests=_ONE_RANK,
            why="reference(ranks) returns what every rank holds, in shape and value",
        ),
    ),
    "Environment": (
        Item(
            "Another device than declared",
            tests=f"test_the_unmet_need_names_the_gpu_of_the_machine {_PRODUCT}",
            why="a variant's needs are compared with the GPU; a result belongs to a product",
        ),
        Item(
            "Clocks that boost",
            tests=f"{_TRUE_RATIO} {_RATES}",
            why="clocks are not locked: the sides alternate, and each row records their range",
        ),
        Item("Raised priority", exploits="priority"),
        Item(
            "Overcommitted memory",
            tests="test_a_fault_fails_its_case_with_side_size_cause_and_line",
            why="out of memory is a failure, never a skip",
            open="memory that is overcommitted but not exhausted shows only in the times",
        ),
        Item(
            "Another NUMA node",
            exploits="affinity",
            tests="test_numa_node_is_looked_up_by_pci_bus_id",
            why="both sides run in one process, so on the same NUMA node; the GPU's node is "
            "recorded",
        ),
        Item(
            "Another CPU governor",
            tests=f"{_COMPARED_FACTS} test_governor_covers_the_usable_cores",
            why="it affects both sides equally in every window; on the host's clocks a loss "
            "under another governor or on another CPU is `stale`",
        ),
        Item(
            "Thermal throttling",
            tests=_THROTTLED,
            why="a block that NVML reports as throttled is measured again; if all are, there is no"
            " result",
            open="simulated; no test throttles a GPU",
        ),
        Item(
            "Another power limit",
            tests=f"{_POWER} {_COMPARED_FACTS}",
            why="a loss under another power limit or MIG setting is `stale`",
        ),
        Item(
            "Another driver",
            tests=_OTHER_ENVIRONMENT,
            why="a loss in another environment is `stale`, or red with `-o aisp_strict_env=true`",
        ),
        Item(
            "Another library",
            tests=f"{_OTHER_ENVIRONMENT} {_COMPARED_FACTS} {_NCCL}"
            " test_versions_come_from_the_libraries",
            why="a loss in another environment is `stale`",
            open=f"the versions of cuDNN, cuBLAS and NCCL: {_WITH_FAKES}",
        ),
        Item(
            "A container's limits",
            tests=_WAITED,
            why="a cgroup limit is not refused: ordinary pods have one, and both sides share it",
        ),
        Item(
            "A virtual machine",
            why="no such machine is refused: both sides share it, and A/A trials show its noise",
        ),
    ),
    "Statistical": (
        Item(
            "Only good runs are shown",
            tests=_ROWS,
            why="every case is a row, and every block and vote is in the artifacts",
        ),
        Item(
            "Injected outliers",
            exploits="slow_clock own_window",
            tests=f"{_RATES} test_one_rogue_process_cannot_inflate_the_spread",
        ),
        Item(
            "A chosen spread",
            tests="test_a_small_spread_is_pulled_toward_the_products"
            " test_spread_is_unbiased_in_its_square",
            why="it comes from recorded processes and is shrunk toward the chapter's spread; no "
            "page sets it",
        ),
        Item(
            "A chosen percentile", why="every page uses one estimator, and none can choose another"
        ),
        Item(
            "Too few samples",
            tests="test_windows_last_equally_long_and_orders_are_balanced"
            " test_illegal_options_are_refused",
            why="the number of blocks is fixed before the first, at least six",
        ),
        Item(
            "A cold start that counts",
            tests=_WARMUP,
            why="both sides are warmed up until their times are steady, and the first block is"
            " discarded",
        ),
        Item("Garbage collection inside the window", exploits="collects_garbage"),
        Item(
            "Noise of other processes",
            tests=f"{_WAITED} test_a_wait_for_a_lease_is_announced {_OTHER_PROCESS}",
            why="a block that waited for a core is measured again; sessions lock the GPU in turn",
        ),
    ),
    "Evaluation": (
        Item(
            "An attack on the harness itself",
            exploits=_REPLACED + " gc_scan scans_inputs expected_overwritten",
            tests=f"{_SANDBOX} {_SANDBOX_CLOCK}",
            why="with `--aisp-untrusted` sides reach neither the clock nor the expected values",
            open="a page that attacks pytest when it is imported",
        ),
        Item(
            "Its own time limits",
            tests="test_the_marker_sets_the_time_limit_of_a_case",
            why="a limit can only fail a case; no time is derived from a limit",
        ),
        Item(
            "Its own metrics",
            tests="test_share_and_plausibility test_impossible_work_is_refused",
            why="one function computes the speedup, from windows that the plugin timed",
        ),
        Item(
            "Leaked test data",
            exploits="knows_the_seed scans_inputs scans_before_each_window gc_scan",
        ),
        Item("Fitted to the benchmark", exploits="checked_sizes listed_size remembers_values"),
        Item("Tests that change themselves", exploits="own_value own_window own_sample own_max"),
        CACHED_ANSWER,
        Item(
            "Nothing held back",
            exploits="knows_the_seed remembers_values",
            tests=f"test_every_run_checks_other_values {_UNSEEN}",
        ),
    ),
}
"""95 validity issues by category, in the order of the list that names them."""
