"""`aisp machine clean` lists leftovers of runs, removes them with --yes, and nothing else."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from fake_results import case, fake_catalog, result, stored

from pytest_aisp.cli import app
from pytest_aisp.tools import catalog, maintenance


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Return a root with every kind of leftover, and with files of the user."""
    root = tmp_path / "root"
    for name in (
        *("aisp-profile/ch07.x/trace.json", "artifacts/one/results.jsonl"),
        *("artifacts/one/samples/x", "artifacts/mine/notes.txt", "build/x"),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("12345")
    kept = stored(root, {"scan_test.py::test_scan[tiled-n64]": result(2.0)})
    for name in (".ch07.json.lock", ".ch07.json.tmp", ".peaks.json.123", ".gitkeep"):
        (kept.parent / name).write_text("")
    found = fake_catalog(root, [case("ch07:scan")])
    monkeypatch.setattr(catalog, "collect", lambda targets, *, tell: found)
    monkeypatch.chdir(root)
    return root


def refuse(path):
    raise PermissionError("not yours")


def files(root):
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_leftovers_are_listed_with_their_size(root, capsys):
    before = files(root)
    assert app.main(["clean"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "5 B   aisp-profile",
        "10 B  artifacts/one",
        "0 B   baselines/nvidia-h200/.ch07.json.lock",
        "0 B   baselines/nvidia-h200/.ch07.json.tmp",
        "0 B   baselines/nvidia-h200/.peaks.json.123",
        "15 B would be removed:",
        "    aisp machine clean --yes",
    ]
    assert files(root) == before


def test_only_leftovers_are_removed(root, capsys):
    assert app.main(["clean", "--yes"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "15 B removed"
    assert files(root) == {
        "artifacts/mine/notes.txt",
        "build/x",
        "baselines/nvidia-h200/ch07.json",
        "baselines/nvidia-h200/.gitkeep",
    }
    assert app.main(["clean"]) == 0
    assert capsys.readouterr().out == "nothing to clean\n"


def test_json_lists_leftovers_and_errors(root, monkeypatch, capsys):
    names = [root / "aisp-profile", root / "artifacts" / "one"]
    names += [root / f"baselines/nvidia-h200/.{n}" for n in ("ch07.json.lock", "ch07.json.tmp")]
    names += [root / "baselines/nvidia-h200/.peaks.json.123"]

    def left(*words, code=0):
        assert app.main(["clean", "--json", *words]) == code
        return json.loads(capsys.readouterr().out)["left"]

    listed = {"removed": False, "error": None}
    assert left() == [
        {"path": str(path), "bytes": nbytes, **listed}
        for path, nbytes in zip(names, (5, 10, 0, 0, 0), strict=True)
    ]
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", refuse)
        found = {it["path"]: it for it in left("--yes", code=2)}
    assert found[str(names[0])] == {
        "path": str(names[0]),
        "bytes": 5,
        "removed": False,
        "error": "not yours",
    }
    assert found[str(names[-1])]["removed"]
    assert [it["removed"] for it in left("--yes")] == [True, True]
    assert left() == []


def test_targets_of_links_are_never_leftovers(root, tmp_path):
    outside = tmp_path / "outside"
    for name in ("aisp-profile", "artifacts"):
        shutil.move(root / name, outside / name)
        (root / name).symlink_to(outside / name)
    shutil.move(root / "baselines", outside / "baselines")
    (root / "baselines").symlink_to(outside / "baselines")
    assert list(maintenance.leftovers(root, root / "baselines")) == []
    (root / "artifacts").unlink()
    (root / "artifacts").mkdir()
    (root / "artifacts" / "latest").symlink_to(outside / "artifacts" / "one")
    assert list(maintenance.leftovers(root, root / "baselines")) == []


def test_a_link_to_a_leftover_is_removed_too(root):
    latest = root / "artifacts" / "latest"
    latest.symlink_to("one")
    left = [
        (os.path.relpath(it.path, root), it.nbytes)
        for it in maintenance.leftovers(root, root / "b")
    ]
    assert left == [("aisp-profile", 5), ("artifacts/one", 10), ("artifacts/latest", 0)]
    assert app.main(["clean", "--yes"]) == 0
    assert not latest.is_symlink()
    assert (root / "artifacts" / "mine").exists()


def test_a_folder_with_the_stored_results_stays(root):
    shutil.move(root / "baselines", root / "artifacts" / "one" / "baselines")
    left = maintenance.leftovers(root, root / "artifacts" / "one" / "baselines")
    assert "artifacts/one" not in {os.path.relpath(it.path, root) for it in left}


def test_artifacts_itself_is_a_leftover_if_it_holds_a_run(root):
    (root / "artifacts" / "results.jsonl").write_text("")
    left = [
        os.path.relpath(it.path, root) for it in maintenance.leftovers(root, root / "baselines")
    ]
    assert left[:2] == ["aisp-profile", "artifacts"]


def test_a_leftover_that_cannot_be_removed_is_reported(root, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "rmtree", refuse)
    assert app.main(["clean", "--yes"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert f"{root / 'aisp-profile'} cannot be removed: not yours" in lines
    assert lines[-1] == "0 B removed"
