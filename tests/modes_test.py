"""The modes of a run: verdicts, messages, exit codes."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree

import pytest

from pytest_aisp.results import run_reader
from pytest_aisp.results.row import Row
from pytest_aisp.results.verdict import environment_moved


def test_a_case_is_new_until_it_has_a_stored_result(timed_page, pytester):
    timed_page(at_least="1.5")
    result = pytester.runpytest_subprocess("-v")
    result.stdout.fnmatch_lines(["*test_doubling[[]doubled-n1001[]] NEW ?.???x [[]*"])
    result.stdout.fnmatch_lines(["*pytest --aisp-update-expectations*"])
    assert result.ret == 0
    assert pytester.runpytest_subprocess("--aisp-update-expectations").ret == 0
    again = pytester.runpytest_subprocess("-v")
    again.stdout.fnmatch_lines(["*test_doubling[[]doubled-n1001[]] PASSED ?.???x*"])


@pytest.mark.parametrize("workers", [[], ["-n2"]])
def test_a_missed_claim_is_red_and_names_value_and_limit(timed_page, pytester, workers):
    timed_page(at_least="{'sm90': 3.0}")
    result = pytester.runpytest_subprocess(*workers)
    result.stdout.fnmatch_lines(
        [
            "*pair.assert_speedup()",
            "*?.???x against 3.000x (at_least on the page)*votes of fresh processes*-> red",
            "*reproduce:",
            "*    pytest 'ch99/doubling_test.py::test_doubling[[]doubled-n1001[]]'",
        ]
    )
    assert result.ret == 1
    assert "FAILED" in result.stdout.str()


def test_a_loss_against_the_stored_result_is_regressed(page, gpu, recorded, pytester):
    page(variants="[doubled, shifted]", defs="def shifted(x):\n    return x * 2", at_least="1.5")
    gpu(added=2e-5, doubled=1e-5, shifted=1e-5)
    recorded()
    gpu(added=2e-5, doubled=1.2e-5, shifted=1e-5)
    result = pytester.runpytest_subprocess("--junitxml=junit.xml")
    result.stdout.fnmatch_lines(
        ["*stored in baselines/simulated-gpu/ch99.json*-> red", "*accept:", "*=all*doubled-n1001*"]
    )
    result.stdout.fnmatch_lines(["*REGRESSED*", "*1 failed, 1 passed*"])
    assert result.ret == 1
    said = properties(pytester.path / "junit.xml")
    assert [case["aisp_verdict"] for case in said] == ["regressed", "pass"]
    for case, speedup in zip(said, (5 / 3, 2.0), strict=True):
        numbers = {k: float(v) for k, v in case.items() if k not in WORDS}
        assert numbers["aisp_speedup_low"] < numbers["aisp_speedup"] < numbers["aisp_speedup_high"]
        assert numbers["aisp_speedup"] == pytest.approx(speedup, rel=0.02)
        assert numbers["aisp_stored"] == pytest.approx(2.0, rel=0.01)
        assert numbers["aisp_seconds_baseline"] == pytest.approx(2e-5, rel=0.02)
        assert numbers["aisp_claim"] == 1.5
        assert 0 < numbers["aisp_detectable_loss"] < 1
    last = pytester.runpytest_subprocess("--lf", "-v")
    last.stdout.fnmatch_lines(["*test_doubling[[]doubled-n1001[]] REGRESSED*", "*1 failed in*"])
    assert "shifted-n1001" not in last.stdout.str()


WORDS = {"aisp_verdict", "aisp_clock", "aisp_bound", "aisp_product", "aisp_limit", "aisp_timer"}
WORDS |= {"aisp_cause"}
"""Properties in JUnit that are no numbers; the claim may be one."""


def test_junit_properties_include_metrics_and_checked_cases():
    case = ("id", "ch99.json", "key", "doubling_test.py", "test_doubling", "doubled", {"n": 8})
    row = Row(*case, bound="dram", verdict="checked")
    assert row.properties() == [("aisp_verdict", "checked"), ("aisp_bound", "dram")]
    row.goals = {"memory": {"baseline": 2048, "optimized": 1024, "noise": 0.1}}
    row.claim = "neutral"
    assert row.properties()[2:] == [
        ("aisp_claim", "neutral"),
        ("aisp_memory_baseline", 2048),
        ("aisp_memory_optimized", 1024),
    ]


def properties(junit):
    """Return each case's properties in a JUnit file."""
    cases = ElementTree.parse(junit).iter("testcase")
    return [{p.attrib["name"]: p.attrib["value"] for p in c.iter("property")} for c in cases]


def test_the_printed_command_accepts_a_loss(timed_page, page, gpu, recorded, pytester):
    timed_page()
    recorded()
    gpu(added=2e-5, doubled=1.2e-5)
    accept = ["--aisp-update-expectations=all", "--aisp-processes=1"]
    result = pytester.runpytest_subprocess(*accept)
    result.stdout.fnmatch_lines(["stored: *doubled-n1001]: 2.0?0x -> 1.6??x"])
    assert result.ret == 0
    page(at_least="1.9")  # a claim is not accepted that way
    result = pytester.runpytest_subprocess(*accept)
    result.stdout.fnmatch_lines(["*against 1.900x (at_least on the page)*-> red"])
    assert "stored:" not in result.stdout.str()
    assert result.ret == 1


def test_a_gain_against_the_stored_result_is_improved_and_green(
    timed_page, gpu, recorded, pytester
):
    timed_page()
    recorded()
    gpu(added=2e-5, doubled=0.8e-5)
    result = pytester.runpytest_subprocess("-v")
    result.stdout.fnmatch_lines(["*IMPROVED 2.???x*"])
    assert result.ret == 0


def test_a_loss_in_another_environment_is_stale_unless_strict(timed_page, gpu, recorded, pytester):
    timed_page()
    recorded()
    file = pytester.path / "baselines" / "simulated-gpu" / "ch99.json"
    file.write_text(file.read_text().replace('"torch": "simulated"', '"torch": "other"'))
    gpu(added=2e-5, doubled=1.2e-5)
    result = pytester.runpytest_subprocess("-v")
    result.stdout.fnmatch_lines(["*STALE 1.???x*"])
    assert result.ret == 0
    assert pytester.runpytest_subprocess("-o", "aisp_strict_env=true").ret == 1


def test_a_result_below_its_claim_is_not_stored(timed_page, pytester, monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    timed_page(at_least="2.005")
    result = pytester.runpytest_subprocess("--aisp-update-expectations", "--aisp-processes=3")
    result.stdout.fnmatch_lines(
        ["*2.00?x in 6 processes is below 2.005 (at_least on the page): not stored"]
    )
    assert result.ret == 1
    assert not list(pytester.path.glob("baselines/*/ch99.json"))
    assert pytester.runpytest_subprocess().ret == 0, "inconclusive by itself is green"


SHAKEN = """
    from pytest_aisp.timing import fake_device


    def simulate(baseline, optimized, options, budget, seed):
        if seed.endswith("}0"):  # the first process of the case
            options = {**options, "seconds": {"added": 2e-5, "doubled": 1.4e-5}}
        return fake_device.simulate(baseline, optimized, options, budget, seed)
"""


def test_votes_count_as_recording_processes(timed_page, pytester, monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    timed_page(at_least="1.5")
    pytester.makepyfile(shaken=SHAKEN)
    other = pytester.path / "conftest.py"
    other.write_text(other.read_text().replace("pytest_aisp.timing.fake_device:", "shaken:"))
    result = pytester.runpytest_subprocess("--aisp-update-expectations", "--aisp-processes=1", "-v")
    result.stdout.fnmatch_lines(["*NEW 1.8??x*", "stored: * new -> 1.8??x"])
    (entry,) = stored_entries(pytester.path)
    assert entry["values"] == [[pytest.approx(v, abs=0.01) for v in (0.357, 0.693, 0.693, 0.693)]]


def stored_entries(root):
    """Return what is stored of each case."""
    (file,) = root.glob("baselines/*/ch99.json")
    return list(json.loads(file.read_text())["results"].values())


SYNCING = """
    import dataclasses

    from pytest_aisp.timing import fake_device


    def simulate(*args):
        found = fake_device.simulate(*args)
        found.details["no graph"] = "it waits for the GPU"
        return dataclasses.replace(found, clock="host")
"""


def test_a_result_of_another_clock_is_stale(timed_page, gpu, recorded, pytester):
    timed_page()
    recorded()
    gpu(added=2e-5, doubled=1.9e-5)
    pytester.makepyfile(syncing=SYNCING)
    other = pytester.path / "conftest.py"
    other.write_text(other.read_text().replace("pytest_aisp.timing.fake_device:", "syncing:"))
    result = pytester.runpytest_subprocess("-v")
    result.stdout.fnmatch_lines(
        [
            "*STALE 1.0??x*",
            "stale: *timed on the host clock: it waits for the GPU; the result stored in"
            " baselines/simulated-gpu/ch99.json is of the graph clock: not compared",
        ]
    )
    assert result.ret == 0
    assert pytester.runpytest_subprocess("-o", "aisp_strict_env=true").ret == 1
    accepted = pytester.runpytest_subprocess("--aisp-update-expectations=all", "-v")
    accepted.stdout.fnmatch_lines(["*PASSED*", "stored: *"])


def test_a_loss_under_another_power_limit_is_stale(page, gpu, recorded, pytester):
    page()
    gpu(added=2e-5, doubled=1e-5, environment={"power_limit_w": 700, "mig": None})
    recorded()
    slower = {"added": 2e-5, "doubled": 1.2e-5}
    gpu(**slower, environment={"power_limit_w": 350, "mig": False, "numa_node": 1})
    result = pytester.runpytest_subprocess("-v")
    result.stdout.fnmatch_lines(
        [
            "*STALE 1.???x*",
            "stale: *-> red",
            "stale: *doubled-n1001]: power_limit_w was 700 when stored, and is 350",
        ]
    )
    assert "mig" not in result.stdout.str()  # it was unknown then: no difference
    gpu(**slower, environment={"power_limit_w": 700, "mig": True})
    result = pytester.runpytest_subprocess()
    assert result.ret == 1
    assert "when stored" not in result.stdout.str()


def test_a_yardstick_is_judged_only_against_its_stored_result(page, gpu, recorded, pytester):
    page(at_least="'yardstick'")
    gpu(added=1e-5, doubled=2e-5)
    result = pytester.runpytest_subprocess("-v")
    result.stdout.fnmatch_lines(["*0.500x*yardstick  -       -        new*"])
    recorded()
    assert pytester.runpytest_subprocess().ret == 0
    gpu(added=1e-5, doubled=3e-5)
    result = pytester.runpytest_subprocess()
    result.stdout.fnmatch_lines(["*stored in *-> red"])
    assert result.ret == 1


def test_a_claim_against_a_library_may_be_a_share_of_its_speed(page, gpu, recorded, pytester):
    page(at_least="0.8", more="versus='library',")
    gpu(added=0.9e-5, doubled=1e-5)
    result = pytester.runpytest_subprocess("-v", "--aisp-artifacts=out")
    result.stdout.fnmatch_lines(["*0.90?x*0.8 of library  -       *  new*"])
    assert result.ret == 0
    assert "0.8 of library" in (pytester.path / "out" / "results.md").read_text()
    (case,) = json.loads((pytester.path / "out" / "results.json").read_text())["cases"]
    assert case["claim"] == {"at_least": 0.8, "from": "at_least on the page", "versus": "library"}
    recorded()
    gpu(added=0.9e-5, doubled=1.4e-5)
    result = pytester.runpytest_subprocess()
    result.stdout.fnmatch_lines(
        ["*against 0.800x (at_least of library on the page)*-> red", "*stored in *-> red"]
    )
    assert result.ret == 1


def test_a_neutral_claim_fails_only_on_a_loss(page, gpu, pytester):
    page(at_least="'neutral'")
    gpu(added=1e-5, doubled=1e-5)
    assert pytester.runpytest_subprocess().ret == 0
    gpu(added=1e-5, doubled=1.1e-5)
    result = pytester.runpytest_subprocess()
    result.stdout.fnmatch_lines(["*against 1.000x (at_least='neutral' on the page)*-> red"])
    assert result.ret == 1


def test_check_mode_times_nothing(page, gpu, pytester):
    page(at_least="1000")
    gpu(added=1e-5, doubled=1e-5)
    result = pytester.runpytest_subprocess("--aisp-check", "-v")
    result.stdout.fnmatch_lines(["*CHECKED*", "*1 checked*"])
    assert result.ret == 0


def test_check_mode_prints_one_reason_for_not_timing(page, pytester):
    page(more="cpu_sizes=[{'n': 99}],")
    result = pytester.runpytest_subprocess("--aisp-check")
    said = [line for line in result.outlines if line.startswith("not timed: ")]
    assert said == ["not timed: --aisp-check"]
    result.stdout.fnmatch_lines(["*2 checked in *"])


def test_without_a_gpu_a_case_is_checked_and_names_its_need(page, pytester):
    page(more="conditions=Conditions(needs='tcgen05'),")
    result = pytester.runpytest_subprocess("-v")
    result.stdout.fnmatch_lines(
        ["*CHECKED at n=33; not timed: needs tcgen05 (sm100, sm103); there is none here*"]
    )
    assert result.ret == 0


def test_the_unmet_need_names_the_gpu_of_the_machine(page, gpu, pytester):
    page(more="conditions=Conditions(needs='wgmma'),")
    gpu(added=1e-5, doubled=1e-5)
    text = pytester.path.joinpath("conftest.py").read_text().replace("sm90", "sm100")
    pytester.path.joinpath("conftest.py").write_text(text)
    result = pytester.runpytest_subprocess("-m", "sm90", "-v")
    need = "needs wgmma (sm90); this GPU is sm100 (simulated-gpu)"
    result.stdout.fnmatch_lines([f"*CHECKED at n=33; not timed: {need}*"])


def test_a_gpu_without_fp8_is_named_and_nothing_is_timed_there(page, gpu, pytester):
    page(more="conditions=Conditions(needs='fp8'),")
    gpu(added=1e-5, doubled=1e-5)
    conftest = pytester.path / "conftest.py"
    conftest.write_text(conftest.read_text().replace("sm90", "sm80"))
    result = pytester.runpytest_subprocess("-v")
    need = "needs fp8 (sm90, sm100, sm103, sm121); this GPU is sm80 (simulated-gpu)"
    result.stdout.fnmatch_lines([f"*CHECKED at n=33; not timed: {need}*"])


def test_aa_times_a_side_against_itself(timed_page, pytester):
    timed_page(at_least="2.0")
    result = pytester.runpytest_subprocess("--aisp-aa", "-v")
    result.stdout.fnmatch_lines(["*PASSED ?.???x*", "*doubled*"])
    assert result.ret == 0


def test_replay_judges_recorded_samples(timed_page, page, gpu, pytester):
    timed_page(at_least="1.5")
    first = pytester.runpytest_subprocess("--aisp-artifacts=kept", "-v")
    gpu(added=1e-5, doubled=1e-5)  # would miss the claim if it were measured
    again = pytester.runpytest_subprocess("--aisp-replay=kept", "-v")

    def row(result):
        return next(ln for ln in result.outlines if ln.startswith("doubling "))

    assert row(first) == row(again)
    assert again.ret == 0
    page(at_least="3.0")
    (pytester.path / "conftest.py").unlink()  # on a machine of another product
    elsewhere = pytester.runpytest_subprocess("--aisp-replay=kept/results.jsonl")
    elsewhere.stdout.fnmatch_lines(["aisp: replay on simulated-gpu (simulated-gpu, sm90)*"])
    elsewhere.stdout.fnmatch_lines(["doubling *2.0??x *inconclusive"])
    assert elsewhere.ret == 17


def test_replay_uses_the_votes_and_environment_of_the_recording(page, gpu, pytester):
    page(at_least="3.0")
    gpu(added=2e-5, doubled=1e-5, environment={"power_limit_w": 700})
    pytester.runpytest_subprocess("--aisp-artifacts=kept")
    [recorded] = map(json.loads, (pytester.path / "kept/results.jsonl").read_text().splitlines())
    timer = {"timer": "pytest_aisp.timing.fake_device:simulate"}
    assert recorded["environment"] == {"torch": "simulated", "power_limit_w": 700, **timer}
    gpu(added=1e-5, doubled=1e-5, environment={"power_limit_w": 350})
    pytester.runpytest_subprocess("--aisp-replay=kept", "--aisp-artifacts=again")
    [again] = map(json.loads, (pytester.path / "again/results.jsonl").read_text().splitlines())
    assert again["votes"] == recorded["votes"] != []
    assert again["environment"] == recorded["environment"]


def test_replay_refuses_a_file_that_is_no_run(page, pytester):
    page()
    (pytester.path / "notes.txt").write_text("hello")
    result = pytester.runpytest_subprocess("--aisp-replay=notes.txt")
    result.stderr.fnmatch_lines(
        ["*--aisp-replay=notes.txt: no run to judge again: notes.txt: was not written by *"]
    )
    assert result.ret == 4


def test_a_new_case_fails_if_the_ini_file_says_so(timed_page, pytester):
    timed_page()
    result = pytester.runpytest_subprocess("-o", "aisp_missing=fail")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*pytest --aisp-update-expectations 'ch99*"])


@pytest.mark.parametrize(
    ("cases", "suspects", "moved"),
    [(8, 5, False), (8, 6, True), (8, -6, True), (200, 10, False), (200, 11, True), (6, 0, False)],
)
def test_the_environment_moved_if_over_5_and_over_5_percent_are_suspect(cases, suspects, moved):
    case = ("id", "ch99.json", "key", "doubling_test.py", "test_doubling", "doubled", {"n": 8})
    off = Row(*case, bound="dram", value=0.0, suspect=int(math.copysign(1, suspects)))
    quiet = Row(*case, bound="dram", value=0.0)
    rows = [off] * abs(suspects) + [quiet] * (cases - abs(suspects))
    assert environment_moved(rows) is moved
    assert not environment_moved([Row(*case, bound="dram", suspect=1)] * cases)


@pytest.fixture
def moved(timed_page, gpu, recorded, pytester):
    """Three pages that are slower than recorded, in a session where two would be believed."""
    for name in "abc":
        timed_page(name=f"{name}_test.py")
    recorded()
    gpu(added=2e-5, doubled=1.2e-5)
    conftest = pytester.path / "conftest.py"
    least = "from pytest_aisp.results import verdict\n\nverdict.MOVED_LEAST = 2\n"
    conftest.write_text(least + conftest.read_text())
    return conftest


def test_too_many_suspects_in_one_direction_make_the_run_invalid(moved, pytester):
    result = pytester.runpytest_subprocess()
    result.stdout.fnmatch_lines(["RUN INVALID (environment moved)*"])
    assert result.ret == 17


LAST = """

def pytest_aisp_result(config, row):
    if "c_test" in row["nodeid"]:
        raise KeyboardInterrupt
"""


def test_an_interrupted_run_keeps_its_exit_code(moved, pytester):
    moved.write_text(moved.read_text() + LAST)
    assert pytester.runpytest_subprocess().ret == pytest.ExitCode.INTERRUPTED


def test_arch_markers_select_cases(page, pytester):
    page(more="cpu_sizes=[{'n': 99}], conditions=Conditions(needs='wgmma'),")
    ids = {
        "sm90": ["doubled-n1001"],
        "aisp_cpu": ["doubled-cpu-n99"],
        "sm100": [],
    }
    for marker, expected in ids.items():
        result = pytester.runpytest_subprocess("--collect-only", "-q", "-m", marker)
        lines = [ln for ln in result.outlines if "::" in ln]
        assert [ln.partition("[")[2].rstrip("]") for ln in lines] == expected


def test_artifacts_hold_the_rows_of_finished_cases(timed_page, pytester):
    timed_page()
    pytester.runpytest_subprocess("--aisp-artifacts=kept")
    rows = list(run_reader.load(pytester.path / "kept").rows())
    assert [row.verdict for row in rows] == ["new"]
    assert len(rows[0].timings[0]["blocks"]) == 20


def test_the_result_hook_runs_on_the_controller(timed_page, pytester):
    timed_page()
    conftest = pytester.path / "conftest.py"
    hook = "\n\ndef pytest_aisp_result(config, row):\n    print('seen', row['verdict'])\n"
    conftest.write_text(conftest.read_text() + hook)
    for workers in ("-n0", "-n2"):
        assert "seen new" in pytester.runpytest_subprocess(workers, "-s").stdout.str()
