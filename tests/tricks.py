"""The table at the top of docs/reference/validity.md: how each class of tricks is handled.

`checklists_test.py` checks that the exploits and tests exist, and that whatever is refused or
visible is proved by at least one of them.
"""

from __future__ import annotations

from dataclasses import dataclass

REFUSED, VISIBLE, BELIEVED = "refused", "visible", "believed"
STATES = {
    REFUSED: "the case fails, and the message names the side and the reason",
    VISIBLE: "the case may pass, but the run shows a remark about it",
    BELIEVED: "the case passes, and only a reader of the page can find the trick",
}


@dataclass(frozen=True)
class Trick:
    """One class of tricks.

    Attributes:
        name: what the page does.
        ordinary, untrusted: the state in the ordinary mode and under ``--aisp-untrusted``.
        proofs: names of exploits and tests that prove it, separated by spaces.
    """

    name: str
    ordinary: str
    untrusted: str
    proofs: str = ""


TRICKS = (
    Trick("Wrong values, another type or shape", REFUSED, REFUSED, "nearly one_element fewer_rows"),
    Trick("A lower precision that is not declared", REFUSED, REFUSED, "tf32_inside bf16_inputs"),
    Trick("An output that is computed when it is read", REFUSED, REFUSED, "lazy_tensor lazy_list"),
    Trick(
        "An answer kept by address, version, shape or value, or until the input changes",
        *(REFUSED, REFUSED, "by_address by_version remembers_values unchanged"),
    ),
    Trick(
        "An answer made with the inputs, drawn from the seed, or taken from the baseline",
        *(REFUSED, REFUSED, "computed_with_inputs knows_the_seed baselines_answer"),
    ),
    Trick(
        "An answer computed before the clock starts, from values found in the process",
        *(REFUSED, REFUSED, "scans_before_each_window scans_inputs"),
    ),
    Trick(
        "One timed call that answers for all later calls of its window in a single operation",
        *(BELIEVED, BELIEVED),
    ),
    Trick(
        "Such an answer where windows repeat their values: on the host's and the queue's clock, and"
        " with inputs above 4 MiB on the CPU's clock",
        *(BELIEVED, BELIEVED),
    ),
    Trick("A side that is right only while it is checked", REFUSED, REFUSED, "zeros_when_timed"),
    Trick(
        "Less work in every second call, or in most calls",
        *(REFUSED, REFUSED, "every_second_call one_call_of_64"),
    ),
    Trick(
        "On the CPU's clock, work in the last calls of a window only",
        *(REFUSED, REFUSED, "last_calls"),
    ),
    Trick(
        "Less work in fewer than half of the timed calls (on the CPU's clock, in under one of 20)",
        *(BELIEVED, BELIEVED),
    ),
    Trick("A setting of torch or the process left changed", REFUSED, REFUSED, "matmul_precision"),
    Trick(
        "Threads, oneDNN or cores changed inside the baseline and restored",
        *(REFUSED, REFUSED, "one_thread_restored onednn_off_restored"),
    ),
    Trick("Such a change in C code, restored inside the call", BELIEVED, BELIEVED),
    Trick(
        "Work or a lock held by a thread or process after the call",
        *(REFUSED, REFUSED, "thread_when_timed lock_held child_process"),
    ),
    Trick("A clock, a wait or a comparison replaced", REFUSED, REFUSED, "slow_clock always_equal"),
    Trick(
        "A function of torch replaced when the page is imported",
        *(REFUSED, REFUSED),
        "test_a_page_that_replaces_a_function_of_torch_at_its_import_fails_alone",
    ),
    Trick(
        "An attack on the checker inside its process",
        *(BELIEVED, REFUSED, "test_sides_that_attack_the_checks_fail_in_a_sandbox"),
    ),
    Trick(
        "A baseline that sleeps or waits while the other side computes",
        *(VISIBLE, VISIBLE),
        "test_the_shares_stand_in_the_row_and_a_waiting_baseline_is_shown",
    ),
    Trick(
        "A baseline below 1 % of a limit that the other side half reaches",
        *(VISIBLE, VISIBLE, "test_a_baseline_that_hardly_uses_the_limit_is_shown"),
    ),
    Trick(
        "Inputs that are constant, all equal or of low rank",
        *(VISIBLE, VISIBLE, "test_the_remark_is_shown_and_a_page_without_one_shows_none"),
    ),
    Trick("Another slow baseline, such as a poor algorithm", BELIEVED, BELIEVED),
    Trick("A mistake that the reference and both sides share", BELIEVED, BELIEVED),
)
