"""With pytest-benchmark: both sides in its results, our timer in its fixture, and `export`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import fake_results
import pytest

import pytest_aisp
from pytest_aisp.cli import app
from pytest_aisp.results.row import Row

pytest.importorskip("pytest_benchmark")

PLUGIN = ["-p", "pytest_benchmark.plugin"]
"""The pages of the tests leave it out (`INI`), as does the default run of the tests."""
CASE = "ch99/doubling_test.py::test_doubling[doubled-n1001]"


@pytest.fixture
def ran(timed_page, pytester):
    """Run one case with pytest-benchmark, on a simulated GPU; return the run and its JSON."""
    timed_page()

    def run(*arguments):
        done = pytester.runpytest_subprocess(*PLUGIN, "--benchmark-json=run.json", *arguments)
        file = pytester.path / "run.json"
        return done, json.loads(file.read_text()) if file.exists() else None

    return run


def names(data):
    return [b["fullname"] for b in data["benchmarks"]]


def test_both_sides_are_in_its_table_json_and_histogram(ran, pytester):
    done, data = ran("--aisp-artifacts=out", "--benchmark-histogram=plot")
    assert done.ret == 0
    named = CASE.replace("[", "[[]")
    done.stdout.fnmatch_lines([f"*benchmark '{named}': 2 tests*", "*doubled *(1.0)*", "*added *"])
    assert names(data) == [f"{CASE} added", f"{CASE} doubled"]
    for bench, seconds in zip(data["benchmarks"], (2e-5, 1e-5), strict=True):
        assert bench["stats"]["median"] == pytest.approx(seconds, rel=0.02)
        assert bench["stats"]["rounds"] == len(bench["stats"]["data"]) >= 8
        assert bench["extra_info"]["aisp_verdict"] == "new"
        assert bench["params"]["n"] == 1001
    [plot] = pytester.path.glob("plot*.svg")
    assert "doubled" in plot.read_text()
    assert exported(data) == data["benchmarks"]


def exported(data):
    """Return the benchmarks that `aisp results export out` prints for pytest-benchmark."""
    command = [sys.executable, "-c", "from pytest_aisp.cli import app; app.main()"]
    text = subprocess.run([*command, "export", "out"], capture_output=True, text=True, check=True)
    Path("other.json").write_text(text.stdout)
    compare = [sys.executable, "-m", "pytest_benchmark", "compare", "run.json", "other.json"]
    compared = subprocess.run(compare, capture_output=True, text=True, check=True)
    assert compared.stdout.count("test_doubling[doubled-n1001] added") == 2
    return json.loads(text.stdout)["benchmarks"]


def test_it_works_with_xdist(ran):
    done, data = ran("-n1")
    assert names(data) == [f"{CASE} added", f"{CASE} doubled"]
    assert "disabled because xdist" not in "\n".join(done.outlines + done.errlines)


def test_the_marker_gives_the_benchmark_fixture_our_timer(page, pytester, ran):
    pytester.makepyfile(
        marked_test="""
        import pytest


        @pytest.mark.aisp_timer
        def test_marked(benchmark):
            assert benchmark(sum, range(9)) == 36


        @pytest.mark.aisp_timer
        def test_pedantic(benchmark):
            benchmark.pedantic(sum)


        def test_unmarked(benchmark):
            benchmark.pedantic(sum, args=([],), rounds=3)
        """
    )
    done, data = ran("marked_test.py")
    done.stdout.fnmatch_lines(
        [
            "E *benchmark.pedantic under @pytest.mark.aisp_timer: our timer chooses rounds itself",
            "E *Call benchmark(function), or remove @pytest.mark.aisp_timer",
            "*1 failed, 2 passed*",
        ]
    )
    marked, unmarked = data["benchmarks"]
    assert (marked["options"]["timer"], marked["stats"]["rounds"]) == ("aisp", 10)
    assert unmarked["options"]["timer"] == "perf_counter"
    done, _ = ran("marked_test.py", "ch99", "--benchmark-disable", "--benchmark-json=no.json")
    done.stdout.fnmatch_lines(["*1 failed, 2 passed, 1 new*"])
    assert not (pytester.path / "no.json").exists()


def test_export_refuses_a_run_without_times(tmp_path, capsys):
    case = ("id", "ch99.json", "key", "doubling_test.py", "test_doubling", "doubled", {"n": 8})
    rows = [Row(*case, bound="dram", verdict="checked").to_json()]
    fake_results.artifacts(tmp_path, rows)
    assert app.main(["export", str(tmp_path)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"no side was timed in {tmp_path}: its 1 rows have no times",
        "Export a run that measured:",
        "    pytest --aisp-artifacts=out",
    ]


def test_export_without_pytest_benchmark_says_how_to_install_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pytest_benchmark.plugin", None)
    assert app.main(["export", str(tmp_path)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "export writes a file of pytest-benchmark, which is not installed",
        "    pip install pytest-benchmark",
    ]


def test_export_refuses_a_folder_without_a_run(tmp_path, capsys):
    assert app.main(["export", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"{tmp_path}: holds no run: it has no manifest.json")
    assert message.endswith("    pytest --aisp-artifacts=DIR\n")


def test_only_one_module_imports_pytest_benchmark():
    package = Path(pytest_aisp.__file__).parent
    knows = {f.name for f in package.rglob("*.py") if "import pytest_benchmark" in f.read_text()}
    knows |= {f.name for f in package.rglob("*.py") if "from pytest_benchmark" in f.read_text()}
    assert knows == {"benchmark_plugin.py"}


def test_the_guides_example_works(pytester):
    guide = (Path(__file__).parents[1] / "docs/how-to/pytest-benchmark.md").read_text()
    pytester.makepyfile(guide_test=re.search(r"```python\n(.*?)```", guide, re.DOTALL)[1])
    done = pytester.runpytest_subprocess("guide_test.py")
    done.stdout.fnmatch_lines(["*benchmark: 1 tests*", "test_matmul *10 *1", "*1 passed*"])


@pytest.mark.parametrize(
    ("options", "shown"),
    [([], False), (["--benchmark-columns=min"], True), (["others_test.py"], True)],
    ids=["ours alone", "asked for", "beside others"],
)
def test_its_table_is_hidden_if_it_only_repeats_ours(timed_page, pytester, options, shown):
    timed_page()
    pytester.makepyfile(others_test="def test_sum(benchmark):\n    benchmark(sum, range(9))")
    done = pytester.runpytest_subprocess(*PLUGIN, "ch99", *options)
    assert done.ret == 0
    assert ("computed as 1 / Mean" in done.stdout.str()) is shown
    done.stdout.fnmatch_lines(["doubling *doubled *n=1001*new"])
