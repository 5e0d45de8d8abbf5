"""The catalog of what pytest collects, targets by name, and `aisp suite list`."""

from __future__ import annotations

import json
import re

import msgspec
import pytest
from fake_results import case, fake_catalog

from pytest_aisp.cli import app
from pytest_aisp.page.gpu_specs import ARCHS
from pytest_aisp.tools import catalog
from pytest_aisp.util.cli_result import CliError

COLLECT = ("--collect-only", "-q", "-p", catalog.COLLECTOR)


COST = "Cost(read=4 * n, write=4 * n, launches=1) + Cost(launches=1)"


@pytest.fixture
def collect(pytester, page):
    """Collect ch99 and ch98 with the plugin that `aisp` collects with."""
    page(
        variants="[doubled]",
        at_least='{"sm90": 1.5, "cpu": "neutral"}',
        defs="from pytest_aisp import Cost",
        more=f"costs={{doubled: lambda n: {COST}}},",
    )
    page(folder="ch98", name="other_test.py")
    page(folder="ch98", name="broken_test.py", text="import nothing_of_this_name")
    page(folder="ch98", name="skipped_test.py", text="import pytest; pytest.skip('x', True)")
    ini = pytester.path / "tox.ini"
    selected = "addopts = -k nothing --aisp-artifacts=out"
    ini.write_text(ini.read_text().replace("addopts =", selected).replace("= .", "= ch98 ch99"))
    (pytester.path / "elsewhere_test.py").write_text("import nothing_of_this_name")
    (pytester.path / "out").mkdir()
    (pytester.path / "out" / "results.jsonl").write_text("of the run before")

    def collect(*options):
        file = pytester.path / "catalog.json"
        pytester.runpytest_subprocess(*COLLECT, f"--aisp-catalog={file}", *options)
        return catalog.read(file)

    return collect


def test_every_page_is_collected_even_if_the_ini_file_deselects_it(collect, pytester):
    found = collect()
    assert sorted(p.name for p in found.pages) == [
        *("ch98:broken", "ch98:other", "ch98:skipped", "ch99:doubling")
    ]
    assert found.folders == ["ch98", "ch99"]
    assert found.baselines == pytester.path / "baselines"
    (doubling,) = (c for c in found.cases if c.name == "ch99:doubling")
    plain = msgspec.to_builtins(doubling)
    sources = plain.pop("sources")
    texts = plain.pop("text_sources")
    assert len({*sources.values(), *texts.values()}) == 4
    assert plain == {
        "path": "ch99/doubling_test.py",
        "chapter": "ch99",
        "name": "ch99:doubling",
        "title": "Doubling.",
        "nodeid": "ch99/doubling_test.py::test_doubling[doubled-n1001]",
        "key": "doubling_test.py::test_doubling[doubled-n1001]",
        "function": "test_doubling",
        "variant": "doubled",
        "size": {"n": 1001},
        "kind": "gpu",
        "gpus": 1,
        "bound": "dram",
        "needs": [],
        "archs": ["sm90", "sm100", "sm103", "sm121"],
        "claims": {**dict.fromkeys(ARCHS, 1.0), "sm90": 1.5, "cpu": "neutral"},
        "versus": "",
        "work": {"read": 4004, "write": 4004, "flops": {}, "wire": 0},
        "costs": {"optimized": [{"read": 4004, "write": 4004, "launches": 1}, {"launches": 1}]},
        "seen": [],
    }
    assert {p.path: p.outcome for p in found.unread} == {
        "ch98/broken_test.py": "failed",
        "ch98/skipped_test.py": "skipped",
    }
    (broken,) = found.import_errors
    assert broken.startswith("ch98/broken_test.py: ")
    assert "nothing_of_this_name" in broken
    assert (pytester.path / "out" / "results.jsonl").read_text() == "of the run before"


def test_a_claim_is_about_the_first_number_of_gpus(collect, page):
    claims = '{"sm90": 1.5, "sm100-x4": 1.2}'
    page(
        name="ranks_test.py",
        at_least=claims,
        defs="def reference(ranks): return [2 * x.double() for (x,) in ranks]",
        more="conditions=Conditions(gpus=(2, 4)),",
    )
    found = {c.gpus: c.claims for c in collect().cases if c.name == "ch99:ranks"}
    assert (found[2]["sm90"], found[4]["sm90"], found[4]["sm100"]) == (1.5, "yardstick", 1.2)


def test_only_requested_pages_are_imported_and_all_are_listed(collect):
    found = collect("--aisp-catalog-of=ch98:other")
    assert [c.name for c in found.cases] == ["ch98:other"]
    assert (len(found.pages), found.unread) == (4, [])


def test_targets_become_paths(tmp_path, monkeypatch):
    found = fake_catalog(tmp_path, [case("ch07:scan"), case("ch07:gather"), case("ch10:gemm")])
    monkeypatch.chdir(tmp_path)
    assert found.paths(["ch07"]) == ["suites/ch07/scan_test.py", "suites/ch07/gather_test.py"]
    assert found.paths(["ch07:scan", "ch10"]) == [
        *("suites/ch07/scan_test.py", "suites/ch10/gemm_test.py")
    ]
    assert found.paths([]) == ["suites"]
    (tmp_path / "suites").mkdir()
    monkeypatch.chdir(tmp_path / "suites")
    assert found.paths(["ch10"]) == ["ch10/gemm_test.py"]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("ch10:gem", "unknown target 'ch10:gem'; the nearest: ch10:gemm"),
        ("ch1", "unknown target 'ch1'; the nearest: ch10"),
        ("gemm", "unknown target 'gemm'; the nearest: ch10:gemm"),
        ("nothing", "unknown target 'nothing'; chapters: ch07, ch10"),
    ],
)
def test_an_unknown_target_is_an_error_with_the_nearest_ones(tmp_path, target, message):
    found = fake_catalog(tmp_path, [case("ch07:online_softmax"), case("ch10:gemm")])
    with pytest.raises(CliError) as error:
        found.check_targets([target])
    assert str(error.value).splitlines() == [message, "    aisp suite list"]
    assert error.value.code == 2


def test_the_output_of_a_pytest_that_cannot_collect_is_shown(tmp_path, monkeypatch):
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CliError) as error:
        catalog.collect(())
    lines = str(error.value).splitlines()
    assert any("unrecognized arguments: --no-such-option" in line for line in lines)
    assert lines[-2:] == ["pytest cannot collect here", "    pytest --collect-only -q"]


def test_pages_are_listed_with_variants_bounds_needs_and_archs(tmp_path):
    ladder = [
        case("ch10:gemm", "tma", needs=["tma"], bound="tensor"),
        case("ch10:gemm", "wgmma", needs=["tma", "wgmma"], bound="tensor", archs=["sm90"]),
    ]
    ring = case("ch04:ring", gpus=2, title="A ring: " + "long " * 20)
    found = fake_catalog(tmp_path, [*ladder, ring])
    result = catalog.list_targets_result(found, as_json=False)
    assert result.code == 0
    heads, gemm, other = result.lines
    assert heads.split() == ["target", "title", "variants", "bound", "needs", "archs"]
    assert re.split("  +", gemm) == [
        *("ch10:gemm", "About gemm.", "tma, wgmma", "tensor", "tma, wgmma", "sm90, sm100")
    ]
    assert re.split("  +", other)[1:] == [
        *("A ring: " + "long " * 9 + "long...", "tiled", "dram", "2 GPUs", "sm90, sm100")
    ]
    plain = json.loads("\n".join(catalog.list_targets_result(found, as_json=True).lines))
    assert plain["broken"] == []
    assert plain["targets"][0] == {
        "target": "ch10:gemm",
        "path": "suites/ch10/gemm_test.py",
        "title": "About gemm.",
        "variants": ["tma", "wgmma"],
        "bound": ["tensor"],
        "needs": ["tma", "wgmma"],
        "archs": ["sm90", "sm100"],
        "gpus": [1],
        "cases": 2,
    }


def test_a_page_that_cannot_be_imported_is_exit_code_1(tmp_path):
    why = {"path": "suites/ch07/x_test.py", "outcome": "failed", "text": "E\nNameError: y\n"}
    found = fake_catalog(tmp_path, [], unread=[why])
    result = catalog.list_targets_result(found, as_json=False)
    assert (result.code, result.lines) == (
        1,
        ["no pages found", "cannot be imported: suites/ch07/x_test.py: NameError: y"],
    )


def test_the_command_collects_in_a_process_of_its_own(pytester, page, capsys):
    page()
    assert app.main(["bench", "list-targets", "--chapter", "ch99"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("ch99:doubling  Doubling.  doubled")
