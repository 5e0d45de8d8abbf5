"""The ledger: how GPU benchmarks lie, and what of it is shown to be caught here.

Two lists that others have drawn up: 40 lies seen in public benchmarks, and the 95 validity issues
that the harness of a public course names. An `Item` says which exploits and tests show that it is
caught, why there is nothing to catch, or what is open. Nothing is ticked by hand: its state follows
from what it points to, and `ledger_test.py` holds that to the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SECOND_LINES = {
    "fresh-memory": (
        "What `empty` hands out may be an earlier answer, but to other values: a side is shown its"
        " values in the same order as the side before it, so such an answer is refused by the bound"
        " as well. Whether a freed block comes back is the allocator's choice, and no lie here may"
        " depend on that. It is a second line for what reads memory that it never wrote;"
        " `inputs_test.py` shows that it is left full of NaN."
    )
}
"""Protections without a lie of their own, and why."""


@dataclass(frozen=True)
class Item:
    """One way to lie.

    Attributes:
        cheat: in a few words.
        exploits: files of `tests/exploits` that do it, and are caught, in words.
        tests: other tests that show it, ``file.py::test_name``, in words.
        why: why it cannot exist here, or what the design does about it.
        open: what is not shown, or not done.
    """

    cheat: str
    exploits: str = ""
    tests: str = ""
    why: str = ""
    open: str = ""

    @property
    def shown(self) -> bool:
        """Whether something in this repository shows that it is caught."""
        return bool(self.exploits or self.tests)

    @property
    def state(self) -> str:
        """``caught``, ``in part``, ``by design``, ``open``: it follows from what is pointed to."""
        if self.shown:
            return "in part" if self.open else "caught"
        return "open" if self.open else "by design"


_WHEN_TIMED = (
    "bf16_when_timed checked_sizes clock_when_timed every_second_call fewer_steps flags_when_timed"
    " half_a_step lazy_when_timed less_when_timed nan_when_timed prepared_when_timed"
    " skips_when_timed sorts_when_timed thread_when_timed view_when_timed zeros_when_timed"
)
_LEFTOVERS = "thread thread_when_timed pool child_process forked alarm"
_LAZY = "lazy_tensor lazy_when_timed lazy_sign sparse_output expanded meta_output"
_STALE = "once by_shape by_address stale_half prepared remembers_values knows_the_seed"
_LOWER = "bf16_inside bf16_inputs fp16_inside fp8_inside tf32_inside bf16_output bf16_when_timed"
_FLAGS = (
    "matmul_precision fp32_precision bf16_on_cpu cudnn_benchmark default_dtype flush_denormal"
    " flags_when_timed"
)
_BEHIND = "mode_left dispatch_mode_left module_hook anomaly grad_off default_device environment"
_PATCHES = (
    "slow_clock clock_when_timed no_wait own_event no_error no_nan always_equal own_max own_sample"
    " own_value own_window"
)
_FEWER = "fewer_rows dropped_row dropped_columns sampled less_when_timed"
_RATES = "decision_test.py::test_few_false_reds_and_few_misses"
_TRUE = "decision_test.py::test_the_measured_value_is_the_true_ratio"
_THROTTLED = (
    "decision_test.py::test_a_throttled_block_is_measured_again_and_counted"
    " decision_test.py::test_a_gpu_that_always_throttles_gives_no_measurement"
)
_SLOTS = (
    "inputs_test.py::test_slots_outgrow_the_cache_five_times_and_lie_apart"
    " inputs_test.py::test_what_cannot_be_cold_is_refused_unless_the_page_says_warm"
    " inputs_test.py::test_every_window_runs_through_all_slots"
)
_STALE_RECORD = "modes_test.py::test_a_loss_in_another_environment_is_stale_unless_strict"
_WARM = "inputs_test.py::test_warming_goes_on_while_memory_grows_or_times_fall"
_IMPORTS = (
    "interference_test.py::test_an_import_once_is_measured_again"
    " interference_test.py::test_an_import_at_every_call_fails_the_case"
)
_COMPILES = (
    "interference_test.py::test_what_dynamo_really_compiles_is_counted"
    " autotune_test.py::test_what_triton_compiles_is_counted_and_who_listened_before_is_told"
)
_FAULTS = "interference_test.py::test_pages_read_from_disk_disturb_unless_the_page_is_about_them"
_POWER = "modes_test.py::test_a_loss_under_another_power_limit_is_stale"
_FACTS = "store_test.py::test_facts_that_make_times_incomparable"
_FAKES = "shown on fakes, on no GPU"
_WRONG_SIDES = "check_test.py::test_a_wrong_side_is_named_with_its_size"
_ONE_GPU = "inputs_test.py::test_a_worker_process_sees_one_gpu"
_GPU = "no exploit on a GPU yet; "
_CLOCKS = (
    "cross_check_test.py::test_cross_check_detects_a_replaced_clock"
    " cross_check_test.py::test_one_reading_without_contradiction_is_enough"
)
_APART = "untrusted_test.py::test_sides_that_attack_their_judge_are_believed_there_and_wrong_apart"
_APART_CLOCK = (
    "untrusted_test.py::"
    "test_the_clock_that_is_read_can_be_replaced_from_inside_and_is_not_believed_apart"
)
_STRANGER = "device_test.py::test_another_process_that_computes_is_named"
_KERNELS = "cross_check_test.py::test_notes_list_kernels_and_say_if_both_sides_launch_the_same"
_CANARY = (
    "canary_test.py::test_a_side_that_differs_from_itself_makes_the_run_invalid"
    " canary_test.py::test_an_unseen_planted_slowdown_makes_the_run_invalid"
    " canary_test.py::test_chance_alone_does_not_make_a_run_invalid"
)
_NODES = (
    "cuda_graph_test.py::test_host_nodes_are_refused_in_child_graphs_too"
    " cuda_timer_test.py::test_a_graph_without_gpu_work_is_refused"
)
_ONE_RANK = "ranks_test.py::test_a_fault_is_red_and_names_the_rank"
_TWO_LAUNCHERS = "ranks_test.py::test_ranks_of_two_launchers_meet_at_an_endpoint"

BENCHMARK_CHEATS = (
    Item(
        "Work on a stream that nobody waits for",
        exploits="side_stream",
        tests=_CLOCKS,
        why="nothing may be under way on any stream when the last event is reached",
    ),
    Item(
        "Work that a thread, a process or a timer finishes later",
        exploits=_LEFTOVERS,
        open="threads that a C library starts",
    ),
    Item("An output that is computed when it is looked at", exploits=_LAZY),
    Item(
        "An answer found again by address, shape, or the call before",
        exploits=_STALE + " scans_inputs memo",
        tests="page_mutants_test.py::test_a_lie_is_caught",
    ),
    Item(
        "Several calls done as one, the others skipped",
        exploits="every_second_call every_second_round skips_when_timed fewer_steps"
        " uncaptured skips_captured",
    ),
    Item("Right while it is checked, fast while it is timed", exploits=_WHEN_TIMED),
    Item(
        "Inputs changed in place",
        exploits="sorted_inputs sorts_when_timed negative_zero sorted_list",
        tests="check_test.py::test_a_page_that_breaks_a_rule_is_refused",
    ),
    Item("An input handed back as the output", exploits="view view_when_timed"),
    Item(
        "The answer found in freed memory",
        tests=f"{_WRONG_SIDES} inputs_test.py::test_free_memory_is_left_full_of_nan",
        why="the memory that is handed out next holds NaN; outputs are poisoned between windows",
    ),
    Item(
        "Expected values found in the process",
        exploits="gc_scan scans_inputs",
        tests="inputs_test.py::test_the_unseen_values_do_not_exist_before_the_last_rewrite"
        f" {_APART}",
        why="under `--aisp-untrusted` they are in another process",
    ),
    Item(
        "Expected values overwritten, NaN as a joker",
        exploits="expected_overwritten expected_nan nan nan_when_timed",
        tests="numerics_test.py::test_nan_is_right_only_where_the_reference_has_it",
    ),
    Item(
        "A tolerance that zeros pass",
        exploits="loose_tolerance constant zeros",
        tests="numerics_test.py::test_a_tolerance_that_a_control_passes_is_condemned"
        " numerics_test.py::test_a_loose_output_cannot_hide_behind_a_strict_one"
        " page_mutants_test.py::test_a_lie_is_caught",
    ),
    Item(
        "Lower precision than declared",
        exploits=_LOWER + " terms",
        tests="numerics_test.py::test_tf32_inside_fp32_fails_unless_declared"
        " numerics_test.py::test_a_bf16_accumulator_fails",
        open="Work(roundings=) that is overstated widens the bound; nothing holds it to the code",
    ),
    Item(
        "Inputs of zeros or constants",
        exploits="zero_inputs constant_inputs",
        tests="numerics_test.py::test_inputs_that_cannot_tell_are_named",
        open="inputs that differ but draw less power: no second distribution is timed",
    ),
    Item(
        "Right at the listed sizes only", exploits="listed_size checked_sizes", tests=_WRONG_SIDES
    ),
    Item(
        "Work left out that no result shows",
        exploits="dropped_columns dropped_row one_element rounded_a_little reversed_rows",
        open="work whose result the page does not return: bytes and FLOPs are not counted (CUPTI)",
    ),
    Item(
        "A fallback to the baseline that nobody notices",
        tests=f"modes_test.py::test_a_missed_claim_is_red_and_names_value_and_limit {_KERNELS}",
        why="a variant that is its baseline has a speedup of 1, and misses any claim above it",
        open="under a claim of 1 or `neutral`: `--aisp-audit` says so, and refuses nothing",
    ),
    Item(
        "A warm L2 that is called cold",
        exploits="persisting_l2 ballast",
        tests=f"{_SLOTS} l2_test.py::test_slow_loads_after_a_round_show_a_cold_l2"
        " l2_test.py::test_a_warm_l2_is_measured_again_before_it_is_reported",
        why="slots of five L2 caches in rotation, proved cold by the latency of loads",
    ),
    Item(
        "A cache flush inside the timed window",
        why="between the two events of a window there is one replay; eviction is between blocks",
        tests=_CLOCKS,
    ),
    Item(
        "Clocks, waits or comparisons replaced",
        exploits=_PATCHES,
        tests="exploits_test.py::test_the_clock_that_is_read_is_not_the_one_that_a_page_can_replace"
        f" {_APART_CLOCK}",
        why="under `--aisp-untrusted` another process's clock must agree",
    ),
    Item(
        "Events that were swapped, or measure nothing",
        exploits="own_event no_wait short_events no_replay",
        tests=_CLOCKS,
        why="the plugin makes its events itself, and the GPU's own counter must agree with them",
    ),
    Item(
        "Results printed or edited instead of measured",
        tests=f"{_WRONG_SIDES} store_test.py::test_what_was_edited_by_hand_breaks_its_seal"
        " session_test.py::test_recording_is_refused_where_ci_is_set",
        why="prints go elsewhere; a stored line carries a seal; nothing is stored under CI",
        open="a side that writes to its process's answer pipe, without `--aisp-untrusted`;"
        " the seal keeps out no forger",
    ),
    Item(
        "A graph captured with the answer, or with the work already done",
        exploits="prepared prepared_when_timed captured_answer",
    ),
    Item(
        "Compiling, tuning or planning inside the window, or hidden outside of it",
        exploits="imports compiles",
        tests=f"{_WARM} {_IMPORTS} {_COMPILES}"
        " cuda_timer_test.py::test_device_allocations_in_a_window_are_counted",
        why="both sides are warmed until they are steady; the cost of preparing is its own line;"
        " allocations are counted, and refused nowhere",
        open=f"Triton's compilations and allocations: {_FAKES}",
    ),
    Item(
        "A launch-bound kernel: Python is timed, not the GPU",
        why="`bound` chooses the clock; the other clock's times are in the notes, and where a side"
        " takes 1.5 times as long without a graph the run says that it is launch-bound",
        tests="remarks_test.py::test_a_side_that_is_much_slower_without_a_graph_is_launch_bound"
        " remarks_test.py::test_remarks_are_shown_without_vv_and_stored",
        open="shown on no GPU by a test",
    ),
    Item(
        "Short samples on a coarse clock",
        why="a window lasts 1 ms and more, and the mean is taken inside it",
        tests="decision_test.py::test_a_coarse_clock_does_not_bias_the_value"
        " inputs_test.py::test_every_window_runs_through_all_slots",
    ),
    Item(
        "Clocks that differ between the sides",
        tests=f"{_TRUE} {_THROTTLED}",
        why="the sides alternate, window by window; a throttled block is measured again",
        open="simulated; no test throttles a GPU",
    ),
    Item(
        "Order and drift",
        why="ABBA or BAAB at random",
        tests="decision_test.py::test_windows_last_equally_long_and_orders_are_balanced"
        f" {_TRUE} {_RATES}",
    ),
    Item(
        "Iterations counted as independent",
        tests="decision_test.py::test_a_process_with_scattered_laps_is_judged_by_their_spread"
        f" {_RATES}",
        why="the replicate is the process and, in it, the capture",
    ),
    Item(
        "Measured until it is green, best of many",
        why="the blocks are counted before the first; every vote is in the row; no reruns",
        tests="session_test.py::test_a_red_case_is_not_rerun"
        " decision_test.py::test_voting_stops_when_it_is_decided"
        " decision_test.py::test_a_suspect_without_votes_is_inconclusive",
    ),
    Item(
        "Outliers removed, digits rounded away, failures left out of a mean",
        tests="modes_test.py::test_artifacts_hold_the_rows_of_finished_cases"
        " session_test.py::test_each_case_is_recorded_once_by_the_controller",
        why="a block goes only for a named cause and is counted; no mean over cases is formed",
    ),
    Item(
        "Garbage that happens to fit",
        exploits="nan_when_timed unwritten_rows",
        tests=_WRONG_SIDES,
        open=_GPU + "no guard bands; `--aisp-sanitize` looks only where it is asked to",
    ),
    Item(
        "A weak baseline",
        tests="peaks_test.py::test_share_and_plausibility",
        why="each row prints the optimized side's share of the machine's limit",
        open="that is for a reader to judge: there is no third, strong side",
    ),
    Item(
        "Another problem on each side",
        exploits=_FEWER + " ignores_mask bf16_output",
        why="one `inputs` and one `reference` for both sides; neither makes data of its own",
    ),
    Item(
        "Memory traded for speed in silence",
        why="the peak of a call of each side is in its row, and shown where the optimized side"
        " needs 1.5 times and 64 MiB more; it is said, not refused",
        tests="remarks_test.py::"
        "test_memory_is_traded_for_speed_if_the_optimized_side_needs_much_more"
        " remarks_test.py::test_remarks_are_shown_without_vv_and_stored"
        " cuda_timer_test.py::test_peak_memory_of_a_call_excludes_earlier_allocations"
        " cuda_timer_test.py::test_memory_held_by_preparation_is_counted_per_slot"
        " trial_test.py::test_memory_is_measured_once_and_after_the_windows",
        open="what a side keeps since an earlier call, what a graph of its own keeps for itself,"
        " and memory that is not torch's are not counted",
    ),
    Item(
        "A stored result of another machine",
        tests=f"{_STALE_RECORD}"
        " store_test.py::test_results_are_not_written_into_another_products_folder"
        " modes_test.py::test_too_many_suspects_in_one_direction_make_the_run_invalid"
        f" {_POWER} {_FACTS}",
        why="a result belongs to a product; a loss in another environment is `stale`: versions,"
        " power limit and MIG, on the host's clock CPU and governor, on several GPUs NCCL and"
        " their links",
    ),
    Item(
        "A neighbour on the GPU",
        tests="terminal_test.py::test_a_wait_for_a_lease_is_announced"
        f" inputs_test.py::test_a_block_that_waited_for_a_core_is_measured_again {_STRANGER}",
        why="our own sessions take turns by lease; NVML names others that compute",
        open="where a container hides process ids nobody can be named",
    ),
    Item(
        "A profiler that drops or slows what it sees",
        exploits="traced profiled torch_profiler",
        why="no profiler is a clock here, and none may run along",
    ),
    Item(
        "A core lost, garbage collected, a loop that logs",
        exploits="affinity priority collects_garbage switch_interval fewer_threads",
        tests="inputs_test.py::test_a_block_that_waited_for_a_core_is_measured_again",
    ),
    Item(
        "Noise that is called an improvement",
        tests=f"{_RATES} {_CANARY}",
        why="a margin from the recorded spread, then a vote of fresh processes; each run has a"
        " canary",
    ),
)
"""40 lies of public benchmarks, in the order in which they were gathered."""

VALIDITY_ISSUES: Mapping[str, tuple[Item, ...]] = {
    "Timing": (
        BENCHMARK_CHEATS[0],
        Item(
            "Asynchronous work not waited for",
            exploits="no_wait",
            why="the host clock waits for the device at both ends of a window",
            tests=_CLOCKS,
        ),
        Item(
            "Work between or beside the events",
            exploits="short_events side_stream",
            tests=_CLOCKS,
            why="events, the host between full waits and the GPU's own counter must agree",
        ),
        BENCHMARK_CHEATS[25],
        Item("Results carried over from warming up", exploits=_STALE + " unwritten_rows"),
        Item("A clock that drifts or jumps", exploits="slow_clock clock_when_timed", tests=_TRUE),
        BENCHMARK_CHEATS[37],
    ),
    "Output": (
        Item(
            "The same output whatever the input", exploits="nothing constant once constant_inputs"
        ),
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
            why="the baseline is held to the reference too: all three must agree",
            open="a reference and a baseline that are wrong alike",
        ),
        Item("Another shape", exploits="fewer_rows extra_dimension extra_output expanded"),
        Item("Another type", exploits="bf16_output fp64_output lazy_tensor sparse_output"),
        Item("Denormals flushed", exploits="flushed_denormals flush_denormal"),
        BENCHMARK_CHEATS[8],
    ),
    "Workload": (
        BENCHMARK_CHEATS[12],
        Item("Switches and modes changed for everybody", exploits=f"{_FLAGS} {_BEHIND}"),
        Item("Shortcuts that are not declared", exploits="constant " + _FEWER),
        Item(
            "Stops early",
            exploits="dropped_row dropped_columns first_step_only fewer_steps half_a_step",
        ),
        Item("A smaller batch", exploits="fewer_rows dropped_row"),
        Item("A shorter sequence", exploits="dropped_columns less_when_timed"),
        Item("Sampled down", exploits="sampled"),
        Item(
            "Another sparsity",
            exploits="sparse_output zero_inputs",
            why="both sides get the same bytes",
        ),
        Item("Another mask", exploits="ignores_mask"),
        Item(
            "A smaller cache of keys and values",
            exploits="dropped_columns half_a_step",
            why="a cache is an input or a state, the same for both; its tensors are compared",
        ),
        Item(
            "Test data seen in training", why="no model is scored: outputs are held to a reference"
        ),
    ),
    "Location": (
        Item(
            "Work done on the CPU",
            exploits="meta_output host_callback",
            tests=_NODES,
            why="its time is on the host clock; an output must be on the reference's device; a"
            " graph replays nothing of the host's but callbacks",
            open="the queue clock does not see what the host does meanwhile",
        ),
        Item(
            "Computed while it is prepared", exploits="prepared prepared_when_timed knows_the_seed"
        ),
        BENCHMARK_CHEATS[22],
        Item("Computed while it is warmed", exploits=_STALE + " skips_when_timed"),
        BENCHMARK_CHEATS[1],
        BENCHMARK_CHEATS[2],
        Item(
            "Compiled inside the window",
            exploits="imports compiles",
            tests=f"{_WARM} {_IMPORTS} {_COMPILES}",
            why="both sides are warmed until they are steady; such a block is measured again",
            open=f"compilations of Triton: {_FAKES}; of NVRTC: not counted",
        ),
    ),
    "Memory": (
        Item(
            "The output written before",
            exploits="unwritten_rows shared_output once",
        ),
        BENCHMARK_CHEATS[7],
        Item(
            "A copy to pinned memory that is not finished",
            exploits="late_copy",
            tests=f"{_CLOCKS} trial_test.py::test_no_output_is_read_before_the_device_is_idle",
            why="a graph ends when all of its copies have; behind a queue the device must be idle"
            " when the last call ends; outputs are read when it is",
        ),
        Item(
            "The allocator's pool gives back the answer",
            tests="inputs_test.py::test_free_memory_is_left_full_of_nan",
            why="the cache is released before each lap; both sides have slots of their own values",
        ),
        Item(
            "Memory in pieces",
            why="each lap lays its slots anew, and odd laps build the second side first",
            open="a side that fragments the allocator for the other one",
        ),
        Item(
            "Pages touched for the first time",
            tests=f"{_WARM} {_FAULTS}",
            why="the first block is thrown away; page faults are counted, and a block that read"
            " from disk is measured again",
        ),
        Item(
            "Swapping",
            tests="interference_test.py"
            f"::test_swapping_out_disturbs_and_swap_that_was_there_does_not {_FAULTS}",
            why="a block in which pages went to disk or came from it is measured again",
        ),
    ),
    "CUDA": (
        Item(
            "Work in a host callback",
            exploits="host_callback",
            tests=_NODES,
            why="a graph's nodes are counted by type, those of child graphs too",
            open="on the queue and host clocks a callback is not looked for, its time"
            " is in the window; the bodies of conditional nodes are not seen",
        ),
        Item(
            "A copy that is not finished",
            exploits="side_stream late_copy",
            tests=_CLOCKS,
            why="a copy is work like a kernel: nothing may be under way when the last call ends",
        ),
        Item(
            "Work done ahead in a workspace",
            exploits="prepared prepared_when_timed once",
            why="values change in place, so what was prepared from them is stale",
        ),
        Item(
            "A kernel that stays and works on",
            exploits="side_stream",
            tests=f"{_CLOCKS} cuda_faults_test.py::test_an_endless_kernel_fails_only_its_case",
            why="it is late, as a copy is, and each wait for the device waits for it; one that"
            " never ends meets the time limit",
        ),
        Item(
            "More GPUs than declared",
            tests=_ONE_GPU,
            why="a worker process sees one GPU",
        ),
        Item(
            "Contexts that change",
            tests=_STRANGER,
            why="a worker process has one GPU and one context, and is alone on it by lease",
        ),
        Item(
            "Driver calls in the window",
            why="the other clock's times are in the notes, and show what the host adds",
            open="they are not counted",
        ),
        Item(
            "A cooperative launch for the wrong reason",
            why="how a side launches is its own business: results and time are judged",
        ),
        Item(
            "Kernels started by kernels",
            why="by CUDA's rules a kernel ends when those that it has started have, and a window"
            " ends with its kernels",
            open=_GPU + "they are no nodes of a graph, so they are not counted; graphs that are"
            " launched on the device are not tried",
        ),
        Item(
            "Faults of unified memory",
            tests=_WARM,
            why="both sides are warmed until they are steady",
            open=_GPU + "the GPU's page faults are not counted",
        ),
    ),
    "Compile": (
        Item(
            "A warm compile cache on one side",
            tests="session_test.py::test_cold_start_gives_each_case_its_own_caches",
            why="the cost of preparing a side is a line of its own",
            open="without `--aisp-cold-start` that line may be of a warm cache",
        ),
        Item(
            "A trace that is used again",
            exploits="by_shape once",
            why="Dynamo's guards are the side's own business, its answers are not",
        ),
        Item(
            "Eager here, compiled there",
            why="that is a page's idea at times; the page says what each side is",
            open="that one thing changes between two sides is for a reader to judge",
        ),
        Item("Compiled for one side only", open="for a reader to judge, as above"),
        Item(
            "Guards that fail and compile again",
            exploits="compiles",
            tests=f"{_WARM} interference_test.py::test_what_dynamo_really_compiles_is_counted",
            why="a time that still moves is not timed yet; frames of Dynamo and graphs of Inductor"
            " are counted, and a block with one is measured again",
        ),
        Item(
            "Tuned by chance",
            exploits="cudnn_benchmark",
            tests=f"{_RATES} autotune_test.py"
            "::test_choices_are_shown_stored_and_named_when_a_loss_comes_with_another"
            " autotune_test.py::test_the_configuration_of_each_tuned_launch_is_noted",
            why="a vote is a fresh process, and so tunes again; what Triton's tuner chose is stored"
            " with the result",
            open=f"Triton's tuner: {_FAKES}; what Inductor's `max-autotune` chooses is not"
            " recorded",
        ),
        Item(
            "Right for one symbolic shape", exploits="listed_size checked_sizes", tests=_WRONG_SIDES
        ),
    ),
    "Distributed": (
        Item(
            "A rank that does nothing",
            tests=_ONE_RANK,
            why="each rank's outputs are compared with its own part of the reference",
        ),
        Item(
            "A collective that is skipped",
            tests=_ONE_RANK,
            why="every output depends on every rank's inputs, which no rank knows by itself",
        ),
        Item(
            "Another topology",
            tests="store_test.py::test_nccl_and_links_count_where_several_gpus_work_together",
            why="results belong to a product and a count of GPUs; how these are joined is recorded,"
            " and a loss where they are joined otherwise is `stale`",
        ),
        Item(
            "Ranks that start apart",
            tests=_TWO_LAUNCHERS,
            why="a window begins with a barrier on the stream, and the slowest rank counts",
        ),
        Item(
            "Other gradient buckets",
            why="that is a page's idea at times; the page says what each side is",
            open="for a reader to judge",
        ),
        Item(
            "Gradients not waited for",
            exploits="side_stream",
            why="what is under way when the last call ends is late, a collective as well",
            open="of a collective no exploit has run on GPUs",
        ),
        Item(
            "A pipeline's bubble left out",
            tests=_TWO_LAUNCHERS,
            why="a window is whole calls of every rank, and the slowest rank counts",
        ),
        Item(
            "Smaller shards",
            tests=_ONE_RANK,
            why="reference(ranks) says what every rank holds, in shape and value",
        ),
    ),
    "Environment": (
        Item(
            "Another device than was declared",
            why="a variant's needs are held against the GPU at hand; a result belongs to a product",
            tests="modes_test.py::test_the_unmet_need_names_the_gpu_of_the_machine"
            " store_test.py::test_results_are_not_written_into_another_products_folder",
        ),
        Item(
            "Clocks that boost",
            tests=f"{_TRUE} {_RATES}",
            why="clocks are not locked: the sides alternate, and each row records their range",
        ),
        Item("Priority raised", exploits="priority"),
        Item(
            "Memory overcommitted",
            tests="faults_test.py::test_out_of_memory_shows_the_line_that_asked_for_it",
            why="out of memory is red, never a skip",
            open="memory that is overcommitted and not exhausted shows as time alone",
        ),
        Item(
            "Another NUMA node",
            exploits="affinity",
            tests="device_test.py::test_the_numa_node_of_a_gpu_is_found_by_its_place_on_the_bus",
            why="both sides run in one process, so on the same node; the GPU's is recorded",
        ),
        Item(
            "Another CPU governor",
            tests=f"{_FACTS} device_test.py::test_the_governors_of_the_cores_in_use_are_recorded",
            why="both sides feel it alike, window by window; on the host's clocks a loss under"
            " another one is `stale`, and so is one on another CPU",
        ),
        Item(
            "Thermal throttling",
            tests=_THROTTLED,
            why="a block that NVML calls throttled is measured again; if all are, nothing is said",
            open="simulated; no test throttles a GPU",
        ),
        Item(
            "Another power limit",
            tests=f"{_POWER} {_FACTS}",
            why="a loss under another one is `stale`, and so is one with MIG switched",
        ),
        Item(
            "Another driver",
            tests=_STALE_RECORD,
            why="a loss in another environment is `stale`, or red with `-o aisp_strict_env=true`",
        ),
        Item(
            "Another library",
            tests=f"{_STALE_RECORD} {_FACTS}"
            " store_test.py::test_nccl_and_links_count_where_several_gpus_work_together"
            " versions_test.py::test_versions_are_those_that_the_libraries_say",
            why="a loss in another environment is `stale`",
            open=f"how cuDNN, cuBLAS and NCCL say their versions: {_FAKES}",
        ),
        Item(
            "A container's limits",
            tests="inputs_test.py::test_a_block_that_waited_for_a_core_is_measured_again",
            why="no cgroup limit is refused: ordinary pods have one, and both sides share it",
        ),
        Item(
            "A virtual machine",
            why="none is refused: both sides share it, and A/A trials say what a machine can tell",
        ),
    ),
    "Statistical": (
        Item(
            "Only the good runs are shown",
            why="every case is a row, every block and vote is in the artifacts",
            tests="session_test.py::test_each_case_is_recorded_once_by_the_controller"
            " modes_test.py::test_artifacts_hold_the_rows_of_finished_cases",
        ),
        Item(
            "Outliers put in",
            exploits="slow_clock own_window",
            tests=f"{_RATES} decision_test.py::test_one_rogue_process_cannot_inflate_the_spread",
        ),
        Item(
            "Spread that is chosen",
            why="it comes from recorded processes, shrunk towards the chapter's; no page sets it",
            tests="decision_test.py::test_a_small_spread_is_pulled_toward_the_products"
            " decision_test.py::test_spread_is_unbiased_in_its_square",
        ),
        Item(
            "A percentile that is chosen",
            why="one estimator for every page; none can choose another",
        ),
        Item(
            "Too few samples",
            why="the number of blocks is fixed before the first, six at the least",
            tests="decision_test.py::test_windows_last_equally_long_and_orders_are_balanced"
            " session_test.py::test_illegal_options_are_refused",
        ),
        Item(
            "A cold start that counts",
            tests=_WARM,
            why="both sides are warmed until they are steady, and the first block is thrown away",
        ),
        Item("Garbage collected inside the window", exploits="collects_garbage"),
        Item(
            "Noise of other processes",
            why="a block that waited for a core is measured again; sessions take turns by lease",
            tests="inputs_test.py::test_a_block_that_waited_for_a_core_is_measured_again"
            f" terminal_test.py::test_a_wait_for_a_lease_is_announced {_STRANGER}",
        ),
    ),
    "Evaluation": (
        Item(
            "The harness itself is attacked",
            exploits=_PATCHES + " gc_scan scans_inputs expected_overwritten",
            tests=f"{_APART} {_APART_CLOCK}",
            why="under `--aisp-untrusted` sides reach neither clock nor expected values",
            open="a page that attacks pytest when it is imported",
        ),
        Item(
            "Time limits of its own",
            tests="faults_test.py::test_the_marker_sets_the_limit_of_a_case",
            why="a limit only ends a case, red; no time comes from it",
        ),
        Item(
            "Metrics of its own",
            tests="peaks_test.py::test_share_and_plausibility"
            " declare_test.py::test_work_that_nobody_can_do_is_refused",
            why="the speedup is computed in one place from windows that the plugin timed",
        ),
        Item("Test data that leaked", exploits="knows_the_seed scans_inputs gc_scan"),
        Item("Fitted to the benchmark", exploits="checked_sizes listed_size remembers_values"),
        Item(
            "Tests that change themselves",
            exploits="own_value own_window own_sample own_max",
        ),
        BENCHMARK_CHEATS[3],
        Item(
            "Nothing held back",
            exploits="knows_the_seed remembers_values",
            tests="inputs_test.py::test_the_values_that_checks_draw_are_the_runs_secret"
            " inputs_test.py::test_the_unseen_values_do_not_exist_before_the_last_rewrite",
        ),
    ),
}
"""95 validity issues by category, in the order of the list that names them."""
