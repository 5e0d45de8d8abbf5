"""A mistake in a declaration is an error at collection, shown at the page's own line."""

from __future__ import annotations

import re

import pytest

from pytest_aisp import Conditions, Sweep, Variant, Work, compare, fresh_process
from pytest_aisp.page.pair import PairError


def inputs(device, n):
    return (n,)


def reference(x):
    return x


def slow(x):
    return x


def fast(x):
    return x


def declared(**changes):
    """Declare a valid pair with `changes`. None removes a keyword."""
    valid = {
        "baseline": slow,
        "optimized": [fast],
        "inputs": inputs,
        "reference": reference,
        "sizes": [{"n": 4096}],
        "check_sizes": [{"n": 33}],
        "work": lambda n: Work(read=4 * n),
        "bound": "dram",
    }
    names = ("needs", "gpus", "l2", "owns", "environment")
    conditions = {name: changes.pop(name) for name in names if name in changes}
    wanted = {**valid, **changes, "conditions": Conditions(**conditions)}
    return compare(**{k: v for k, v in wanted.items() if v is not None})


def message(**changes):
    with pytest.raises(PairError) as refused:
        declared(**changes)
    return str(refused.value)


def test_valid_declaration_is_a_mark_with_its_cases():
    pair = declared().kwargs["pair"]
    assert [case.id for case in pair.cases()] == ["fast-n4096"]


def test_work_may_depend_on_the_number_of_ranks():
    given = declared(work=lambda n, world: Work(wire=n * (world - 1))).kwargs["pair"]
    assert [given.work_at({"n": 7}, world).wire for world in (1, 4)] == [0, 21]
    assert declared().kwargs["pair"].work_at({"n": 7}, 4).read == 28


UNKNOWN_WORDS = {
    "bound": ({"bound": "disk"}, "unknown bound 'disk'; legal: dram, l2, tensor, issue, "),
    "l2": ({"l2": "tepid"}, "unknown l2 'tepid'; legal: cold, warm"),
    "owns": ({"owns": ["clock"]}, "unknown owns 'clock'; legal: gc, affinity, "),
    "feature": ({"needs": "tensors"}, "unknown feature in needs 'tensors'; legal: cp_async, "),
    "feature of a variant": (
        {"optimized": [Variant(fast, needs="tensors")]},
        "unknown feature in needs 'tensors'; legal: cp_async, ",
    ),
    "precision": (
        {"optimized": [Variant(fast, precision="fp12")]},
        "unknown precision 'fp12'; legal: tf32, bf16, ",
    ),
    "precision of a baseline": (
        {"baseline": Variant(slow, precision="fp12")},
        "unknown precision 'fp12'; legal: tf32, bf16, ",
    ),
    "versus": ({"versus": "cublas"}, "unknown versus 'cublas'; legal: library"),
    "arch": ({"at_least": {"sm91": 2.0}}, "unknown arch in at_least 'sm91'; legal: cpu, sm90, "),
}
SLOWDOWN = (
    "claims a slowdown; write at_least='neutral' if nothing is gained, or at_least='yardstick'"
)
CLAIMS = {
    "below one": ({"at_least": 0.9}, f"at_least=0.9 {SLOWDOWN}"),
    "zero on a CPU": ({"at_least": {"cpu": 0}}, f"at_least=0 {SLOWDOWN}"),
    "not a number": ({"at_least": float("nan")}, f"at_least=nan {SLOWDOWN}"),
    "variant below one": ({"optimized": [Variant(fast, at_least=0.5)]}, f"at_least=0.5 {SLOWDOWN}"),
    "below one, with the way out": (
        {"at_least": 0.8},
        f"at_least=0.8 {SLOWDOWN} for a library that is there to compare with; if the baseline"
        " is the library, and the claim is a share of its speed, add versus='library'",
    ),
    "zero of a library": (
        {"at_least": 0, "versus": "library"},
        "at_least=0 must be above 0, as in at_least=0.8",
    ),
    "a word": (
        {"at_least": "fast"},
        "at_least='fast' is neither a number nor 'neutral' or 'yardstick'",
    ),
    "a boolean": (
        {"at_least": True},
        "at_least=True is neither a number nor 'neutral' or 'yardstick'",
    ),
}
SIDES = {
    "empty": ({"optimized": []}, "optimized=[] is empty: a pair needs at least one variant"),
    "not a list": ({"optimized": fast}, "optimized= is a list of sides, as in optimized=[tiled]"),
    "a bare variant": (
        {"optimized": Variant(fast)},
        "optimized= is a list of sides, as in optimized=[tiled]",
    ),
    "the baseline again": (
        {"optimized": [slow]},
        "two sides are called 'slow'; name each by its idea",
    ),
    "not a function": ({"optimized": [3]}, "a side is a function; 3 is not"),
    "a variant of a variant": (
        {"baseline": Variant(Variant(slow))},
        "a side is a function; Variant(side=<function slow ",
    ),
    "a claim of the baseline": (
        {"baseline": Variant(slow, at_least=1.5)},
        "baseline=Variant(at_least=...): a baseline declares only its precision; write at_least="
        " on compare() or on a variant, because a claim is about an optimized side",
    ),
    "needs of the baseline": (
        {"baseline": Variant(slow, precision="tf32", needs="tma")},
        "baseline=Variant(needs=...): a baseline declares only its precision; write needs= in"
        " conditions=Conditions(needs=...), because every case runs the baseline",
    ),
    "when of the baseline": (
        {"baseline": Variant(slow, when=lambda n: True)},
        "baseline=Variant(when=...): a baseline declares only its precision; write when= on each",
    ),
    "instructions of the baseline": (
        {"baseline": Variant(slow, sass="LDG.128")},
        "baseline=Variant(sass=...): a baseline declares only its precision; write sass= on a",
    ),
    "baseline only on a GPU": (
        {"baseline": Variant(slow, gpu_only="NCCL")},
        "baseline=Variant(gpu_only=...): a baseline declares only its precision; write gpu_only=",
    ),
    "marks of the baseline": (
        {"baseline": Variant(slow, marks=[pytest.mark.skip])},
        "baseline=Variant(marks=...): a baseline declares only its precision; write marks= on the"
        " test function, as in @pytest.mark.skipif(...)",
    ),
    "twice": (
        {"optimized": [fast, Variant(fast)]},
        "two sides are called 'fast'; name each by its idea",
    ),
    "no GPU": (
        {"needs": "wgmma", "optimized": [Variant(fast, needs="tcgen05")]},
        "'fast': no known GPU has all of wgmma, tcgen05",
    ),
    "environment": (
        {"environment": {"A": "1"}},
        "environment= is for the ranks of a page on several GPUs; a page on one GPU has"
        " fresh_process(environment=...)",
    ),
    "an owner's variable": (
        {"gpus": 2, "environment": {"NVSHMEM_DISABLE_NVLS": "0"}},
        "environment= sets NVSHMEM_DISABLE_NVLS, which only the machine's owner may set",
    ),
    "no ranks": ({"gpus": 0}, "gpus=(0,) must be a count of GPUs or several counts"),
    "ranks a sample": (
        {"gpus": 2, "baseline": fresh_process(slow), "optimized": [fresh_process(fast)]},
        "fresh_process with gpus= above 1: ranks start once, not for every sample",
    ),
}
NO_CHECK_SIZES = (
    "check_sizes= is missing: give a small odd size that a laptop can check, as in"
    ' check_sizes=[{"n": 33}]'
)
SIZES = {
    "nothing": (
        {"sizes": [], "check_sizes": []},
        "sizes=[] and cpu_sizes=[] are both empty: no case would run",
    ),
    "nothing small": ({"check_sizes": []}, NO_CHECK_SIZES),
    "only strategies": ({"check_sizes": [{"n": object()}]}, NO_CHECK_SIZES),
    "no mapping": ({"sizes": [4096]}, "sizes: 4096 is not a mapping such as {'n': 4096}"),
    "no value": (
        {"sizes": [{"n": (1, 2)}]},
        "sizes: the values of {'n': (1, 2)} must be numbers or text",
    ),
    "unknown key": (
        {"sizes": [{"n": 4096, "m": 1}]},
        "sizes has the key 'm', which inputs does not take (n)",
    ),
    "missing key": (
        {"check_sizes": [{}]},
        "check_sizes lacks the key 'n', which inputs needs; keys: none",
    ),
    "unlike work": (
        {"work": lambda m: Work()},
        "sizes has the key 'n', which work does not take (m)",
    ),
    "unlike state": (
        {"state": lambda device: None},
        "sizes has the key 'n', which state does not take ()",
    ),
    "no device": (
        {"inputs": lambda n: (n,)},
        "inputs takes the device first, as in def inputs(device, n)",
    ),
    "unlike when": (
        {"optimized": [Variant(fast, when=lambda m: True)]},
        "sizes has the key 'n', which when of 'fast' does not take (m)",
    ),
    "two kinds of keys": (
        {
            "inputs": lambda device, **size: (1,),
            "work": lambda **size: Work(),
            "cpu_sizes": [{"m": 1}],
        },
        "sizes and cpu_sizes must all have the same keys, in the same order",
    ),
    "the same twice": (
        {"sizes": [{"n": 4096}, {"n": 4096}]},
        "two cases have the id 'fast-n4096'",
    ),
    "the same to read": (
        {"cpu_sizes": [{"n": 1}, {"n": "1"}]},
        "two cases have the id 'fast-cpu-n1'",
    ),
}
THREE = {"sizes": [{"n": n} for n in (1, 2, 4)]}
SWEEPS = {
    "a word": ({"sweep": "n"}, "sweep='n' is not a Sweep, such as sweep=Sweep('block')"),
    "an unknown key": ({"sweep": Sweep("m")}, "unknown key in sweep 'm'; legal: n"),
    "two points": (
        {"sizes": [{"n": 1}, {"n": 2}], "sweep": Sweep("n")},
        "Sweep(key='n', judged=None): a curve needs at least three values of n in sizes",
    ),
    "no judged point": (
        {**THREE, "sweep": Sweep("n", judged=[])},
        "Sweep(key='n', judged=[]): judged= names no point, so the page could not fail",
    ),
    "an unknown point": (
        {**THREE, "sweep": Sweep("n", judged=[1, 8])},
        "unknown n in judged '8'; legal: 1, 2, 4",
    ),
}
REFUSED = UNKNOWN_WORDS | CLAIMS | SIDES | SIZES | SWEEPS


@pytest.mark.parametrize("name", REFUSED)
def test_declaration_that_makes_no_sense_is_refused(name):
    changes, expected = REFUSED[name]
    assert message(**changes).startswith(f"@compare: {expected}")


def test_keyword_of_conditions_is_refused_with_its_new_form():
    valid = declared().kwargs["pair"]
    with pytest.raises(PairError) as refused:
        compare(
            baseline=slow,
            optimized=[fast],
            inputs=inputs,
            reference=reference,
            sizes=valid.sizes,
            work=valid.work,
            bound="dram",
            gpus=(2, 4),
            l2="warm",
        )
    assert str(refused.value) == (
        "@compare: gpus= is one of the conditions of a page: needs, gpus, l2, owns, environment\n"
        "    conditions=Conditions(gpus=(2, 4), l2='warm')"
    )


@pytest.mark.parametrize(
    ("state", "form"),
    [(None, "reference(ranks)"), (lambda device, n: None, "reference(states, ranks)")],
)
def test_reference_of_a_multi_rank_page_takes_all_ranks(state, form):
    error = message(reference=lambda a, b, c: a, gpus=2, state=state)
    assert error.startswith("@compare: with gpus= above 1 the reference takes ")
    assert error.endswith(form)


PROMISES = {"sm90": 1.5, "sm100": 1.8, "sm90-x4": 1.2}


@pytest.mark.parametrize(
    ("claims", "arch", "gpus", "claim", "origin"),
    [
        (1.5, "sm90", 2, 1.5, "at_least on the page"),
        (
            1.5,
            "sm90",
            4,
            "yardstick",
            "yardstick, because there is no at_least['sm90-x4'] on the page",
        ),
        (PROMISES, "sm90", 2, 1.5, "at_least['sm90'] on the page"),
        (PROMISES, "sm90", 4, 1.2, "at_least['sm90-x4'] on the page"),
        (
            PROMISES,
            "sm100",
            4,
            "yardstick",
            "yardstick, because there is no at_least['sm100-x4'] *",
        ),
        (PROMISES, "sm103", 2, 1.0, "1.0, because there is no at_least['sm103'] on the page"),
        (PROMISES, "sm90", None, 1.5, "at_least['sm90'] on the page"),
    ],
)
def test_claim_for_two_gpus_promises_nothing_for_four(claims, arch, gpus, claim, origin):
    pair = declared(at_least=claims, gpus=(2, 4)).kwargs["pair"]
    assert pair.claim(pair.variants[0], arch, gpus) == claim
    assert pair.origin(pair.variants[0], arch, gpus).startswith(origin.rstrip("*"))


def test_claim_for_a_gpu_count_that_the_page_lacks_is_refused():
    error = message(at_least={"sm90-x8": 1.5}, gpus=(2, 4))
    assert error.startswith("@compare: unknown arch in at_least 'sm90-x8'; legal: ")
    assert "sm90-x4" in error


@pytest.mark.parametrize(
    "claim", [1, 1.0, 2.5, "neutral", "yardstick", {"sm90": 2.0, "cpu": "neutral"}]
)
def test_claims_of_one_and_more_are_legal(claim):
    assert declared(at_least=claim)


@pytest.mark.parametrize("baseline", [slow, Variant(slow), Variant(slow, precision="tf32")])
def test_a_baseline_may_declare_its_precision(baseline):
    pair = declared(baseline=baseline).kwargs["pair"]
    assert pair.baseline is slow
    assert pair.baseline_precision == getattr(baseline, "precision", None)


def test_a_claim_against_a_library_may_be_below_one():
    pair = declared(versus="library", at_least={"sm90": 0.8}).kwargs["pair"]
    assert pair.claim(pair.variants[0], "sm90") == 0.8
    assert pair.claim(pair.variants[0], "sm100") == "yardstick"
    assert pair.origin(pair.variants[0], "sm100").startswith("yardstick, because there is no ")


def test_page_and_variant_features_that_one_gpu_has_are_legal():
    pair = declared(needs="tma", optimized=[Variant(fast, needs="wgmma")]).kwargs["pair"]
    assert pair.archs(pair.variants[0]) == ("sm90",)


def test_inputs_may_also_take_rank_and_world():
    def spread(device, n, rank, world):
        return (n,)

    assert declared(inputs=spread, gpus=2)


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({"read": -1}, "Work(read=-1) must be a number >= 0"),
        ({"write": float("nan")}, "Work(write=nan) must be a number >= 0"),
        ({"flops": {"bf16": -2}}, "Work(bf16=-2) must be a number >= 0"),
        (
            {"flops": {"bfloat16": 1}},
            "unknown type in Work(flops=) 'bfloat16'; legal: fp64, fp32, tf32, bf16, fp16, fp8,"
            " mxfp8, nvfp4, int8, int4, w4a16",
        ),
        ({"terms": 0}, "Work(terms=, roundings=) must be at least 1"),
        ({"roundings": 0}, "Work(terms=, roundings=) must be at least 1"),
    ],
)
def test_impossible_work_is_refused(keywords, expected):
    with pytest.raises(PairError) as refused:
        Work(**keywords)
    assert str(refused.value) == expected


COLLECTING = "_* ERROR collecting ch99/NAME_test.py _*"
COMPARE_LINE = "ch99/NAME_test.py:{@compare(}: "
AT_COMPARE = [COLLECTING, COMPARE_LINE + "in <module>", "    @compare("]
"""Output lines. NAME is the page, and {text} the number of its line that starts with the text."""
ERROR = "E   pytest_aisp.page.pair.PairError: @compare:"
BROKEN = {
    "word": (
        [('bound="dram"', 'bound="disk"')],
        [*AT_COMPARE, f"{ERROR} unknown bound 'disk'; legal: dram, *"],
    ),
    "claiming": (
        [("baseline=added", "baseline=Variant(added, at_least=2)")],
        [*AT_COMPARE, f"{ERROR} baseline=Variant(at_least=...): a baseline declares only *"],
    ),
    "gpus": (
        [('bound="dram"', 'bound="dram", conditions=Conditions(gpus=lambda: 2)')],
        [*AT_COMPARE, f"{ERROR} gpus=(<function *,) must be a count of *"],
    ),
    "unknown": (
        [('bound="dram"', 'bound="dram", color="red"')],
        [*AT_COMPARE, "E   TypeError: compare() got an unexpected keyword argument 'color'"],
    ),
    "missing": (
        [("reference=reference,", "")],
        [
            *AT_COMPARE,
            "E   TypeError: compare() missing 1 required keyword-only argument: 'reference'",
        ],
    ),
    "when": (
        [("optimized=[doubled]", "optimized=[Variant(doubled, when=lambda n: {}[n])]")],
        [*AT_COMPARE, "ch99/NAME_test.py:{optimized=}: in <lambda>", "    optimized=*"],
    ),
    "method": (
        [
            ("@compare(", "class TestDoubling:\n  @compare("),
            ("def test_doubling(pair)", "  def test_doubling(self, pair)"),
        ],
        [COLLECTING, COMPARE_LINE + "@compare goes on a function of the page, not on a method"],
    ),
    "parameters": (
        [
            ("@compare(", "@pytest.mark.parametrize('k', [1])\n@compare("),
            ("import torch", "import pytest, torch"),
        ],
        [
            COLLECTING,
            "ch99/NAME_test.py:{@pytest}: @compare with @pytest.mark.parametrize has no stored key",
        ],
    ),
    "bare": (
        [("@compare(", "dict("), ("def test_", "\n\n\ndef test_")],
        [
            "_* ERROR at setup of test_doubling _*",
            "ch99/NAME_test.py:{def test_}: the fixture `pair` needs @compare on the test",
        ],
    ),
}
"""By page: the changes to a valid page, and the lines that pytest prints."""


@pytest.fixture
def broken(page, pytester, module_cache):
    """Run all broken pages once. Return the output and the lines of each page."""
    if not module_cache:
        for name, (changes, _) in BROKEN.items():
            path = page(name=f"{name}_test.py")
            for old, new in changes:
                path.write_text(path.read_text().replace(old, new))
            module_cache[name] = path.read_text().splitlines()
        module_cache["run"] = pytester.runpytest_subprocess("--continue-on-collection-errors")
    return module_cache


@pytest.mark.parametrize("name", BROKEN)
def test_error_shows_only_lines_of_the_page(broken, name):
    def line_number(match):
        starts = (line.strip().startswith(match[1]) for line in broken[name])
        return str(1 + list(starts).index(True))

    lines = [line.replace("NAME", name) for line in BROKEN[name][1]]
    lines = [re.sub(r"\{(.+?)\}", line_number, line) for line in lines]
    broken["run"].stdout.fnmatch_lines(lines, consecutive=True)


def test_broken_pages_fail_the_run_without_plugin_lines(broken):
    broken["run"].stdout.fnmatch_lines(["E   KeyError: 1001"])  # of the page called "when"
    assert "pytest_aisp/" not in broken["run"].stdout.str()
    assert broken["run"].ret == pytest.ExitCode.TESTS_FAILED
