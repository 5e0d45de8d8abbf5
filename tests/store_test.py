"""Stored results: round trips, merges, full disks, killed writers and manual edits."""

import builtins
import errno
import fcntl
import json
import math
import multiprocessing
import os
import pickle
import resource
import signal
import tempfile
import threading
from functools import partial
from itertools import permutations
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pytest_aisp.results import metric_limits, store
from pytest_aisp.results.merge import Change, merge, why_kept
from pytest_aisp.results.models import (
    Result,
    Stored,
    differences,
    pooled,
    session_sd,
)
from pytest_aisp.results.stats import trimmed_spread
from pytest_aisp.results.store import StoreError, dump, load, prune, write
from pytest_aisp.results.verdict import UNKNOWN_SESSION
from pytest_aisp.timing import peaks

PRODUCT = "nvidia-h200"
KEY = "transpose_test.py::test_transpose[tiled-n4096]"
OTHER = "copy_test.py::test_copy[vectorized-n1024]"
FACTS = {"driver": "580.65", "cuda": "13.0", "torch": "2.11.0", "triton": "3.6.0"}
TABLE = {
    "a": {**FACTS, "sm_clock_mhz": 1980, "power_limit_w": 700, "date": "2026-08-20"},
    "b": {**FACTS, "sm_clock_mhz": 1980, "power_limit_w": 700, "date": "2026-08-21"},
    "c": {**FACTS, "torch": "2.12.0", "date": "2026-08-22"},
}


def result(session="a", processes=(0.7, 0.701, 0.699), **fields):
    sides = {"baseline": "0a1b", "optimized": "2c3d"}
    given = {"baseline_us": 251.34, "optimized_us": 124.99, "share": 0.91234, "limit": "copy"}
    given |= {"clock": "graph", "sources": sides, "samples": "ff00"}
    return Result(**given | {"values": (processes,), "environments": (session,)} | fields)


def counted(session="a", **fields):
    """A result of a page that asks for goals and no time."""
    sides = {"baseline": "0a1b", "optimized": "2c3d"}
    return Result(**{"environments": (session,), "sources": sides, "goals": UNUSED} | fields)


UNUSED = {"fragmentation": {"baseline": 2576980378.0, "optimized": 60502835.0}}
TAKEN = {"reserved": {"baseline": 10.0, "optimized": 5.0}}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "baselines" / PRODUCT / "ch01.json"


def put(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def record(path, entries, *, replace=False):
    return write(path, PRODUCT, entries, TABLE, replace=replace)


def names(path):
    return sorted(p.name for p in path.parent.iterdir())


# A result


def test_result_is_rounded_to_what_the_file_holds():
    r = result(processes=(0.123456789, -0.000001))
    assert (r.baseline_us, r.optimized_us, r.share) == (251.3, 125.0, 0.9123)
    assert r.values == ((0.12346, 0.0),)
    assert math.copysign(1, r.values[0][1]) == 1


def test_result_summaries():
    r = result(values=((0.5, 0.6, 0.7), (0.8, 0.9)), environments=("a", "b"))
    assert (r.sessions, r.processes) == (2, 5)
    assert r.value == pytest.approx((0.6 + 0.85) / 2)
    assert r.speedup == pytest.approx(math.exp(0.725))


def test_own_spread_is_measured_within_each_session():
    near, far = (0.700, 0.702, 0.704), (0.900, 0.904, 0.908)
    r = result(values=(near, far, (5.0, 6.0)), environments=("a", "b", "c"))
    pooled = math.sqrt((trimmed_spread(near) ** 2 + trimmed_spread(far) ** 2) / 2)
    assert r.own_spread == pytest.approx(pooled)


def test_own_spread_of_two_processes_a_session_needs_two_sessions():
    one = result(values=((0.5, 0.6),), environments=("a",))
    two = result(values=((0.5, 0.6), (0.7, 1.0)), environments=("a", "b"))
    assert one.own_spread is None
    assert result(values=((0.5, 0.6), (0.7,)), environments=("a", "b")).own_spread is None
    assert two.own_spread == pytest.approx(math.sqrt((0.1**2 + 0.3**2) / 2 / 2))


BAD_FIELDS = {
    "baseline_us": [0, -1, math.nan, math.inf, True, "251", None, 10**400],
    "optimized_us": [0.0, [1.0]],
    "share": [-0.1, math.nan, "0.9"],
    "limit": ["", 3],
    "clock": ["", "graf", None],
    "values": [(), ((),), (0.5,), ((math.nan,),), ((math.inf,),), ((60.0,),), (("0.5",),), "0.5"],
    "environments": [(), "a", ("",), (1,)],
    "sources": [{}, {"baseline": "0a"}, {"baseline": "0a", "optimized": "xyz"}, "0a", None],
    "choices": [[], {"x": math.nan}, {"x": {1, 2}}, None],
    "goals": [
        {"speed": {}},
        {"memory": {"baseline": 1}},
        {"memory": {"baseline": 1, "optimized": -1}},
        {"launches": {"baseline": True, "optimized": 1}},
        {"memory": 5},
        None,
    ],
    "samples": ["", "not hex", 5],
}
BAD = [(name, value) for name, values in BAD_FIELDS.items() for value in values]


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{n}={str(v)[:20]}" for n, v in BAD])
def test_a_result_with_an_invalid_field_is_refused(name, value):
    with pytest.raises(ValueError, match=name):
        Result.of(msgspec.to_builtins(result()) | {name: value})


def test_an_untimed_result_has_no_speedup_and_no_spread():
    r = counted()
    assert (r.value, r.speedup, r.own_spread, r.seconds) == (None, None, None, {})
    assert (r.sessions, r.processes) == (1, 0)
    assert pooled([r, result()], "graph") == [result().own_spread]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"goals": {}}, r"goals must not be empty if nothing was timed"),
        ({"share": 0.5, "limit": "copy"}, "share=0.5 of copy must be None without a time"),
        ({"clock": "graph"}, "baseline_us is missing"),
        ({"environments": ("a", "a")}, "must be one per session"),
    ],
)
def test_an_untimed_result_needs_goals_and_has_no_times(fields, says):
    with pytest.raises(ValueError, match=says):
        counted(**fields)


@pytest.mark.parametrize("environments", [("a",), ("a", "a")])
def test_each_session_needs_its_own_environment(environments):
    with pytest.raises(ValueError, match="one per session"):
        result(values=((0.5,), (0.6,)), environments=environments)


# The file

EXPECTED = """\
{
"schema": 1,
"product": "nvidia-h200",
"environments": {
"a": {"cuda": "13.0", "date": "2026-08-20", "driver": "580.65", "power_limit_w": 700, \
"sm_clock_mhz": 1980, "torch": "2.11.0", "triton": "3.6.0"}
},
"results": {
"copy_test.py::test_copy[vectorized-n1024]": {"speedup": 2.014, "baseline_us": 251.3, \
"optimized_us": 125.0, "share": 0.9123, "limit": "copy", "clock": "graph", \
"values": [[0.7, 0.701, 0.699]], "environments": ["a"], \
"sources": {"baseline": "0a1b", "optimized": "2c3d"}, "choices": {"BLOCK": 128}, \
"samples": "ff00", "seal": "1dfb6b83137e"},
"transpose_test.py::test_transpose[tiled-n4096]": {"speedup": 2.014, "baseline_us": 251.3, \
"optimized_us": 125.0, "clock": "graph", "values": [[0.7, 0.701, 0.699]], \
"environments": ["a"], "sources": {"baseline": "0a1b", "optimized": "2c3d"}, \
"seal": "619f3a062daf"}
}
}
"""


def test_file_has_one_result_a_line(path):
    plain = result(share=None, limit=None, samples=None)
    record(path, {KEY: plain, OTHER: result(choices={"BLOCK": 128})})
    assert path.read_bytes().decode() == EXPECTED
    assert names(path) == ["ch01.json"]


def test_an_untimed_result_raises_the_schema_of_the_file(path):
    record(path, {KEY: counted()})
    *_, line, _, _ = path.read_text().splitlines()
    assert line == (
        f'"{KEY}": {{"environments": ["a"], '
        '"sources": {"baseline": "0a1b", "optimized": "2c3d"}, '
        '"goals": {"fragmentation": {"baseline": 2576980378.0, "optimized": 60502835.0}}, '
        '"seal": "e10c9808027d"}'
    )
    assert path.read_text().startswith('{\n"schema": 2,')
    assert load(path).results == {KEY: counted()}
    record(path, {OTHER: result()})
    assert path.read_text().startswith('{\n"schema": 2,')
    prune(path, {KEY})
    assert path.read_text().startswith('{\n"schema": 1,')


def test_an_untimed_result_is_sealed_too(path):
    record(path, {KEY: counted()})
    put(path, path.read_text().replace("60502835", "60502836"))
    with pytest.raises(StoreError, match="its seal is wrong"):
        load(path)


def test_a_missing_file_is_an_empty_store(path):
    assert load(path) == Stored(PRODUCT, {}, {})


def test_an_empty_store_can_be_read_back(path):
    put(path, dump(Stored(PRODUCT)))
    assert load(path) == Stored(PRODUCT)


def test_windows_line_ends_are_read(path):
    put(path, "").write_bytes(EXPECTED.replace("\n", "\r\n").encode())
    assert sorted(load(path).results) == [OTHER, KEY]


TEXT = st.text(min_size=1, max_size=8)
NAME = TEXT.filter(lambda t: "\n" not in t)
HEX = st.text("0123456789abcdef", min_size=1, max_size=8)
SCALARS = st.none() | st.booleans() | st.integers() | TEXT | st.floats(allow_nan=False)
FINITE = SCALARS.filter(lambda v: not isinstance(v, float) or math.isfinite(v))
FACT_TABLES = st.dictionaries(TEXT, FINITE | st.lists(FINITE, max_size=2), max_size=4)
LN = st.floats(-50, 50)
TIMES = st.floats(1e-6, 1e15)


@st.composite
def results(draw, environments):
    own = draw(st.lists(st.sampled_from(sorted(environments)), unique=True, min_size=1))
    if draw(st.booleans()):
        return counted(own[0], samples=draw(st.none() | HEX))
    sessions = st.lists(st.lists(LN, min_size=1, max_size=4), min_size=len(own), max_size=len(own))
    return Result(
        values=draw(sessions),
        clock=draw(st.sampled_from(["graph", "queue", "host", "cpu", "process"])),
        baseline_us=draw(TIMES),
        optimized_us=draw(TIMES),
        share=draw(st.none() | st.floats(0, 1e6)),
        limit=draw(st.none() | NAME),
        sources={"optimized": draw(HEX), "baseline": draw(HEX)},
        environments=own,
        choices=draw(FACT_TABLES),
        samples=draw(st.none() | HEX),
    )


@st.composite
def stores(draw):
    table = draw(st.dictionaries(NAME, FACT_TABLES, min_size=1, max_size=3))
    return Stored(PRODUCT, table, draw(st.dictionaries(TEXT, results(table), max_size=4)))


def reread(text):
    with tempfile.TemporaryDirectory() as folder:
        return load(put(Path(folder) / PRODUCT / "ch01.json", text))


@settings(deadline=None)
@given(stores())
def test_round_trip(stored):
    text = dump(stored)
    again = reread(text)
    assert again == stored
    assert dump(again) == text
    head, entries = 6, len(stored.environments) + len(stored.results)
    assert text.count("\n") == head + entries + 2


def backwards(value):
    if isinstance(value, dict):
        return {key: backwards(value[key]) for key in reversed(value)}
    return value


@settings(deadline=None)
@given(stores())
def test_same_content_gives_the_same_bytes(stored):
    turned = {
        key: replace(r, sources=backwards(r.sources), choices=backwards(r.choices))
        for key, r in reversed(stored.results.items())
    }
    assert dump(Stored(PRODUCT, backwards(stored.environments), turned)) == dump(stored)


# Merging


def test_missing_entries_are_added_and_existing_ones_left_alone(path):
    old, new = result(), result("c", processes=(0.2, 0.3))
    record(path, {KEY: old})
    assert record(path, {KEY: new, OTHER: new}) == [Change(OTHER, None, new)]
    assert load(path).results == {KEY: old, OTHER: new}


def test_replace_rewrites_the_given_entries_only(path):
    old, new = result(), result("c", processes=(0.2, 0.3))
    record(path, {KEY: old, OTHER: old})
    assert record(path, {KEY: new}, replace=True) == [Change(KEY, old, new)]
    assert load(path).results == {KEY: new, OTHER: old}


def test_a_second_session_is_appended(path):
    first, second = result("a"), result("b", processes=(0.8, 0.81), baseline_us=300, samples="ee")
    record(path, {KEY: first})
    [change] = record(path, {KEY: second})
    both = load(path).results[KEY]
    assert change == Change(KEY, first, both)
    assert both.values == ((0.7, 0.701, 0.699), (0.8, 0.81))
    assert both.environments == ("a", "b")
    assert both.baseline_us == pytest.approx(math.sqrt(first.baseline_us * 300), rel=1e-3)
    assert both.samples == "ee"
    assert list(load(path).environments) == ["a", "b"]


@pytest.mark.parametrize(
    "second",
    [
        result("a", processes=(0.8, 0.9)),
        result("c"),
        result("b", clock="queue"),
        result("b", sources={"baseline": "0a1b", "optimized": "4e5f"}),
        result("b", choices={"BLOCK": 64}),
        result(values=((0.5,), (0.6,)), environments=("b", "c")),
    ],
    ids=["same session", "versions", "clock", "sources", "choices", "two sessions"],
)
def test_a_result_that_differs_is_not_added_as_a_second_session(path, second):
    record(path, {KEY: result("a")})
    before = path.read_bytes()
    assert record(path, {KEY: second}) == []
    assert path.read_bytes() == before


NOON = "2026-08-20T120000Z"


@pytest.mark.parametrize(
    ("session", "is_second"),
    [
        ("2026-08-20T120100.000000Z", False),
        ("2026-08-20T175959.999999Z", False),
        ("2026-08-20T060001Z", False),
        ("2026-08-20T180000.000000Z", True),
        ("2026-08-20T060000Z", True),
        ("another key of that day", False),
    ],
)
def test_a_second_session_starts_six_hours_after_the_first(path, session, is_second):
    table = {name: TABLE["a"] for name in (NOON, session)}
    first, second = result(NOON, goals=UNUSED), result(session, goals=TAKEN)
    for new in (first, second):
        write(path, PRODUCT, {KEY: new}, table, replace=False)
    found = load(path)
    assert found.results[KEY].sessions == (2 if is_second else 1)
    if not is_second:
        assert found.results[KEY].goals == {**UNUSED, **TAKEN}
    soon = (
        "a stored session is less than 6 hours away and not known to be on another board,"
        " so this is not another session"
    )
    assert why_kept(found, KEY, second, table) == ("" if is_second else soon)


@pytest.mark.parametrize(("boards", "sessions"), [("ab", 2), ("aa", 1), ("a", 1)])
def test_a_session_on_another_board_is_a_second_one_at_once(path, boards, sessions):
    names = (NOON, "2026-08-20T120100.000000Z")
    table = {name: dict(TABLE["a"]) for name in names}
    for name, board in zip(names, boards, strict=False):  # a session may not know its board
        table[name]["board"] = board
    for name in names:
        write(path, PRODUCT, {KEY: result(name)}, table, replace=False)
    assert load(path).results[KEY].sessions == sessions


@pytest.mark.parametrize(
    ("new", "names"),
    [
        (result("c"), "torch"),
        (result("b", clock="queue"), "clock"),
        (result("b", choices={"BLOCK": 64}), "tuning choices"),
        (result("b", sources={"baseline": "0a1b", "optimized": "4e5f"}), "optimized source"),
        (result("c", sources={"baseline": "4e5f", "optimized": "2c3d"}), "baseline source, torch"),
        (counted("c"), "torch"),
    ],
)
def test_the_reason_names_what_differs_from_the_stored_result(path, new, names):
    record(path, {KEY: result("a")})
    record(path, {KEY: new})
    said = f"it differs from the stored result in {names}"
    assert why_kept(load(path), KEY, new, TABLE) == said


def test_a_session_of_other_machine_code_is_not_added(path):
    one, other = ({"machine_code": {"optimized": digest}} for digest in ("0a1b", "2c3d"))
    record(path, {KEY: result("a", **one)})
    record(path, {KEY: result("b", **other)})
    assert load(path).results[KEY].sessions == 1
    said = "it differs from the stored result in machine code"
    assert why_kept(load(path), KEY, result("b", **other), TABLE) == said
    record(path, {KEY: result("b")})  # earlier versions recorded no machine code
    assert load(path).results[KEY].sessions == 2


def test_a_stored_result_has_no_reason_to_be_left_out(path):
    for session in "ab":
        record(path, {KEY: result(session)})
        assert why_kept(load(path), KEY, result(session), TABLE) == ""


@pytest.mark.parametrize("old", [result(), counted()], ids=["timed", "counted"])
@pytest.mark.parametrize("new", [result("b"), counted("b")], ids=["timed", "counted"])
def test_missing_times_and_goals_are_added_and_others_stay(path, old, new):
    old = replace(old, goals=UNUSED)
    grown = {"fragmentation": {"baseline": 3e9, "optimized": 1e9}}
    record(path, {KEY: old})
    record(path, {KEY: replace(new, goals={**grown, **TAKEN})})
    found = load(path).results[KEY]
    both = metric_limits.with_session(UNUSED["fragmentation"], 1, grown["fragmentation"])
    second = bool(old.values and new.values)  # then both sessions have amounts
    assert found.goals == {"fragmentation": both if second else UNUSED["fragmentation"], **TAKEN}
    assert found.values == old.values + new.values
    again = record(path, {KEY: replace(new, goals=grown)})
    assert again == []


@pytest.mark.parametrize(
    "new",
    [
        counted("c", goals=TAKEN),
        counted("b", goals=TAKEN, sources={"baseline": "0a1b", "optimized": "4e5f"}),
        result("b", clock="queue", goals=TAKEN),
        result("b", choices={"BLOCK": 64}, goals=TAKEN),
    ],
    ids=["versions", "sources", "clock", "choices"],
)
def test_goals_of_other_code_or_another_environment_are_not_added(path, new):
    old = result("a", goals=UNUSED)
    record(path, {KEY: old})
    assert record(path, {KEY: new}) == []


KNOWN = {**FACTS, "cudnn": "91002", "cublas": "13.0.0", "power_limit_w": 700, "mig": False}
KNOWN |= {"cpu": "a CPU", "governor": "performance", "nccl": "2.27.7", "numa_node": 0}
KNOWN["links"] = "NVLink 4 x18"
EVERYWHERE = {"driver", "cuda", "torch", "triton", "cudnn", "cublas", "power_limit_w", "mig"}
ON_THE_HOST = {"cpu", "governor"}


@pytest.mark.parametrize("clock", ["graph", "queue", "host", "cpu", "process"])
@pytest.mark.parametrize("fact", KNOWN)
def test_facts_that_make_times_incomparable(clock, fact):
    compared = EVERYWHERE | (set() if clock in ("graph", "queue") else ON_THE_HOST)
    changed = {**KNOWN, fact: "another"}
    assert differences(KNOWN, changed, clock) == ([fact] if fact in compared else [])
    assert differences(KNOWN, KNOWN, clock) == []


@pytest.mark.parametrize("fact", ["nccl", "links"])
def test_nccl_and_links_count_where_several_gpus_work_together(fact):
    changed = {**KNOWN, fact: "another"}
    assert differences(KNOWN, changed, "graph", several=True) == [fact]
    assert differences(KNOWN, changed, "graph") == []


@pytest.mark.parametrize("fact", sorted(KNOWN.keys() - FACTS.keys()))
@pytest.mark.parametrize("unknown", ["missing", "none"])
def test_an_unknown_fact_is_not_a_difference(fact, unknown):
    older = {**KNOWN, fact: None}
    if unknown == "missing":
        del older[fact]
    for one, other in [(older, KNOWN), (KNOWN, older), (older, older)]:
        assert differences(one, other, "host", several=True) == []


@pytest.mark.parametrize("fact", FACTS)
def test_an_unknown_version_is_a_difference(fact):
    assert differences({**FACTS, fact: None}, FACTS, "graph") == [fact]


def test_another_power_limit_makes_no_second_session(path):
    table = {"a": KNOWN, "b": {**KNOWN, "power_limit_w": 350, "date": "2026-08-21"}}
    for session in "ab":
        write(path, PRODUCT, {KEY: result(session)}, table, replace=False)
    assert load(path).results[KEY].environments == ("a",)


@pytest.mark.parametrize(
    ("product", "kept"), [("nvidia-h200", ("a", "b")), ("nvidia-h200-x2", ("a",))]
)
def test_another_nccl_makes_no_second_session_on_several_gpus(tmp_path, product, kept):
    path = tmp_path / product / "ch01.json"
    table = {name: {**TABLE[name], "nccl": f"2.28.{i}"} for i, name in enumerate("ab")}
    for session in "ab":
        write(path, product, {KEY: result(session)}, table, replace=False)
    assert load(path).results[KEY].environments == kept


STORED = sorted(Path(__file__).parents[1].glob("baselines/*/*.json"))


@pytest.mark.parametrize("file", [file for file in STORED if file.name != "peaks.json"])
def test_the_files_of_this_repository_are_read_and_compared(file):
    stored = load(file)
    assert stored.results
    for facts in stored.environments.values():
        now = {**KNOWN, **{name: fact for name, fact in facts.items() if fact is not None}}
        assert differences(facts, now, "host") == []


@pytest.mark.parametrize("file", STORED, ids=lambda file: "-".join(file.parts[-2:]))
def test_committed_files_are_rewritten_byte_for_byte(file, tmp_path):
    if file.name == "peaks.json":
        copy = tmp_path / file.name
        peaks.save(copy, peaks.load(file))
        assert copy.read_bytes() == file.read_bytes()
    else:
        assert dump(load(file)).encode() == file.read_bytes()


def test_up_to_five_sessions_are_kept_in_the_order_of_their_dates(path):
    names = [f"2026-08-{day}T120000Z" for day in (25, 21, 23, 24, 22, 26)]
    table = {name: {**FACTS, "date": name[:10]} for name in names}
    sizes = dict(zip(names, (1.0, 2.0, 4.0, 8.0, 16.0, 32.0), strict=True))
    for name, size in sizes.items():
        taken = {"reserved": {"baseline": 2 * size, "optimized": size}}
        new = result(name, (size,), baseline_us=size, goals=taken, samples=f"{int(size):02x}")
        write(path, PRODUCT, {KEY: new}, table, replace=False)
    found = load(path).results[KEY]
    assert found.environments == tuple(sorted(names[:5]))
    assert found.values == tuple((sizes[name],) for name in sorted(names[:5]))
    assert found.baseline_us == pytest.approx(4.0, rel=1e-3)
    assert found.goals["reserved"]["optimized"] == pytest.approx(31 / 5)
    assert found.goals["reserved"]["processes"] == 5
    assert found.samples == "01"  # of the latest session
    full = "it has 5 sessions, and more are not kept"
    assert why_kept(load(path), KEY, new, table) == full


def test_a_third_session_must_be_apart_from_both(path):
    names = [NOON, "2026-08-20T120100.000000Z", "2026-08-20T120200.000000Z"]
    table = {n: {**TABLE["a"], "board": b} for n, b in zip(names, "aba", strict=True)}
    for name in names:
        write(path, PRODUCT, {KEY: result(name)}, table, replace=False)
    assert load(path).results[KEY].environments == tuple(names[:2])
    assert why_kept(load(path), KEY, result(names[2]), table).startswith("a stored session is less")


def test_a_result_without_times_gets_a_second_session(path):
    grown = {"fragmentation": {"baseline": 2576980378.0, "optimized": 80502835.0}}
    for session, goals in (("a", UNUSED), ("a", grown), ("b", grown)):
        record(path, {KEY: counted(session, goals=goals)})
    found = load(path).results[KEY]
    assert (found.environments, found.values) == (("a", "b"), ())
    both = metric_limits.with_session(UNUSED["fragmentation"], 1, grown["fragmentation"])
    assert found.goals == {"fragmentation": both}
    assert both["noise"] == pytest.approx(1e7 / 70502835)


def test_an_unchanged_store_is_not_rewritten(path):
    record(path, {})
    assert not path.exists()
    record(path, {KEY: result()})
    inode = path.stat().st_ino
    assert record(path, {KEY: result()}, replace=True) == []
    assert path.stat().st_ino == inode


def test_unused_environments_are_dropped(path):
    record(path, {KEY: result("a")})
    assert list(load(path).environments) == ["a"]
    record(path, {KEY: result("b")}, replace=True)
    assert list(load(path).environments) == ["b"]


def test_a_result_of_an_unknown_environment_is_refused(path):
    with pytest.raises(ValueError, match="its environment 'z' is not in the table"):
        record(path, {KEY: result("z")})
    assert not path.exists()


def test_an_environment_key_cannot_get_other_facts(path):
    record(path, {KEY: result("a")})
    with pytest.raises(ValueError, match="the environment 'a' is stored as"):
        write(path, PRODUCT, {OTHER: result("a")}, {"a": {"driver": "1"}}, replace=False)
    assert list(load(path).results) == [KEY]


SESSIONS = [result("a"), result("b"), result("a", share=0.5), result("b", (0.1,)), counted("b")]
SESSIONS = st.sampled_from(SESSIONS)
BATCHES = st.lists(
    st.dictionaries(st.sampled_from("pqrst"), SESSIONS, max_size=3), min_size=1, max_size=3
)


def merged(batches, replace=False):
    stored = Stored(PRODUCT)
    for batch in batches:
        stored, _ = merge(stored, batch, TABLE, replace=replace)
    return stored


@settings(deadline=None)
@given(st.lists(st.dictionaries(TEXT, SESSIONS, max_size=3), min_size=1, max_size=3))
def test_merging_different_entries_in_any_order_is_the_same(batches):
    apart = [{f"{i}{key}": r for key, r in batch.items()} for i, batch in enumerate(batches)]
    assert len({dump(merged(order)) for order in permutations(apart)}) == 1


@settings(deadline=None)
@given(st.lists(st.sampled_from("pqrst"), unique=True), st.lists(st.sampled_from("pqrst")))
def test_merging_two_sessions_in_any_order_is_the_same(first, second):
    batches = [dict.fromkeys(first, result("a")), dict.fromkeys(second, result("b"))]
    assert dump(merged(batches)) == dump(merged(batches[::-1]))


@settings(deadline=None)
@given(BATCHES, st.lists(st.booleans(), min_size=3, max_size=3))
def test_write_never_loses_an_entry(batches, replaces):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / PRODUCT / "ch01.json"
        for batch, replace in zip(batches, replaces, strict=False):
            before = load(path).results
            changes = record(path, batch, replace=replace)
            after = load(path).results
            assert set(after) == set(before) | set(batch)
            altered = {k for k in after if after[k] != before.get(k)}
            assert [c.key for c in changes] == sorted(altered)
            assert all((c.old, c.new) == (before.get(c.key), after[c.key]) for c in changes)
            if not replace:
                assert all(set(before[k].values) <= set(after[k].values) for k in before)


def test_prune_removes_the_given_entries(path):
    record(path, {KEY: result("a"), OTHER: result("c")})
    assert prune(path, {KEY, "no such key"}) == [KEY]
    assert list(load(path).results) == [OTHER]
    assert list(load(path).environments) == ["c"]
    assert names(path) == ["ch01.json"]


def test_prune_with_nothing_to_remove_touches_nothing(path):
    assert prune(path, {KEY}) == []
    assert not path.parent.exists()
    record(path, {KEY: result()})
    inode = path.stat().st_ino
    assert prune(path, {OTHER}) == []
    assert names(path) == ["ch01.json"]
    assert path.stat().st_ino == inode


def test_spreads_are_pooled_by_clock():
    two = result(values=((0.70, 0.71, 0.72), (0.80, 0.81, 0.82)), environments=("a", "b"))
    stored = [result(), result(processes=(0.5,)), result(clock="cpu"), two]
    assert pooled(stored, "graph") == [stored[0].own_spread, two.own_spread]
    assert pooled(stored, "host") == []
    known = 0.0705**2  # of one more session; four are assumed
    assert session_sd(stored, "graph") == pytest.approx(
        math.sqrt((4 * 0.01**2 + known) / 5), rel=0.01
    )
    assert session_sd(stored, "cpu") == UNKNOWN_SESSION["cpu"]


# Files that cannot be read

RESTORE = "git checkout -- {path}"


def edited(**fields):
    """Return the expected file with some fields of its last entry set, or removed by `...`."""
    data = json.loads(EXPECTED)
    row = data["results"][KEY] | fields
    data["results"][KEY] = {k: v for k, v in row.items() if v is not ...}
    return json.dumps(data)


def whole(**fields):
    data = json.loads(EXPECTED) | fields
    return json.dumps({k: v for k, v in data.items() if v is not ...})


OURS, THEIRS = EXPECTED, EXPECTED.replace("251.3", "260.1")
CONFLICT = f"<<<<<<< HEAD\n{OURS}=======\n{THEIRS}>>>>>>> theirs\n"
TWICE = EXPECTED.replace(OTHER, KEY)
WRITTEN = "{path} was not written by pytest-aisp: "
ENTRY = WRITTEN + f"results[{KEY!r}]: "
LINE = EXPECTED.count("\n")
BROKEN = {
    "empty": ("", "{path} is truncated"),
    "truncated": (EXPECTED[:500], "{path} is truncated"),
    "cut after an entry": (EXPECTED[: EXPECTED.rindex("\n}\n}")], "{path} is truncated"),
    "not JSON": ("hello\n", "{path} is not JSON (Expecting value: line 1 column 1"),
    "comma": (EXPECTED.replace("}\n}\n}", "},\n}\n}"), "{path} is not JSON ("),
    "conflict": (
        CONFLICT,
        "{path} has a merge conflict in line 1; ",
        "git checkout --ours -- {path} && pytest --aisp-update-expectations=missing",
    ),
    "conflict left over": (
        EXPECTED.replace('"copy_test', '=======\n"copy_test'),
        "{path} has a merge conflict in line 8; ",
        "git checkout --ours -- {path} && pytest --aisp-update-expectations=missing",
    ),
    "newer": (
        whole(schema=3, results=[]),
        "{path} was written by a newer pytest-aisp (schema 3; this one reads 1 and 2)",
        "pip install --upgrade pytest-aisp",
    ),
    "older": (whole(schema=0), WRITTEN + "schema=0; this one reads 1"),
    "true": (whole(schema=True), WRITTEN + "schema=True; this one reads 1"),
    "no schema": (whole(schema=...), WRITTEN + "schema=None; this one reads 1"),
    "a list": ("[]", WRITTEN + "schema=None; this one reads 1"),
    "deep": ("[" * 100_000, WRITTEN),
    "other product": (
        whole(product="nvidia-b200"),
        "{path} belongs to nvidia-h200, but its results are of nvidia-b200; ",
        "mv -n {path} {folder}/nvidia-b200/ch01.json",
    ),
    "no product": (whole(product=...), WRITTEN + "Object missing required field `product`"),
    "odd product": (whole(product=3), WRITTEN + "Expected `str`, got `int` - at `$.product`"),
    "results list": (
        whole(results=[]),
        WRITTEN + "Expected `object`, got `array` - at `$.results`",
    ),
    "foreign field": (whole(gpu="x"), WRITTEN + "Object contains unknown field `gpu`"),
    "environment": (
        whole(environments={"a": 3}),
        WRITTEN + "Expected `object`, got `int` - at `$.environments[...]`",
    ),
    "environment NaN": (
        whole(environments={"a": {"clock": math.nan}}),
        WRITTEN + "environments['a']={{'clock': nan}} must be finite JSON values: ",
    ),
    "no environment": (whole(environments={}), WRITTEN + f"results[{OTHER!r}]: its env"),
    "entry twice": (TWICE, WRITTEN + f"it contains the key {KEY!r} twice"),
    "field twice": (
        EXPECTED.replace('"limit": "copy"', '"limit": "copy", "limit": "read"'),
        WRITTEN + "it contains the key 'limit' twice",
    ),
    "entry": (
        whole(results={KEY: 3}),
        WRITTEN + "Expected `object`, got `int` - at `$.results[...]`",
    ),
    "no clock": (edited(clock=...), ENTRY + "clock is missing"),
    "no times": (edited(goals={}, clock=...), ENTRY + "clock is missing"),
    "no values": (edited(values=...), ENTRY + "values is missing; a timed result has"),
    "no speedup": (edited(speedup=...), ENTRY + "speedup=None must be 2.014, which"),
    "unknown": (edited(spread=0.1), ENTRY + "Object contains unknown field `spread`"),
    "NaN": (edited(values=[[math.nan]]), ENTRY),
    "inf": (edited(baseline_us=math.inf), ENTRY),
    "1e999": (EXPECTED.replace("251.3", "1e999"), WRITTEN + f"results[{OTHER!r}]: "),
    "text": (
        edited(baseline_us="9"),
        ENTRY + "Expected `float | null`, got `str` - at `$.baseline_us`",
    ),
    "null": (edited(values=None), ENTRY + "Expected `array`, got `null` - at `$.values`"),
    "odd clock": (edited(clock="graf"), ENTRY + "Invalid enum value 'graf' - at `$.clock`"),
    "edited speedup": (edited(speedup=2.5), ENTRY + "speedup=2.5 must be 2.014, which"),
    "text speedup": (edited(speedup="2"), ENTRY + "Expected `float | null`, got `str`"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_and_never_written_over(path, name):
    text, fault, *rest = BROKEN[name]
    way_out = rest[0] if rest else RESTORE
    before = put(path, text).read_bytes()
    places = {"path": path, "folder": path.parent.parent}
    for use in (
        load,
        partial(record, entries={KEY: result()}, replace=True),
        partial(prune, gone={KEY}),
    ):
        with pytest.raises(StoreError) as caught:
            use(path)
        message = str(caught.value)
        assert message.startswith(fault.format(**places)), message
        assert message.splitlines()[-1] == "    " + way_out.format(**places)
        assert path.read_bytes() == before
        assert names(path) == ["ch01.json"]


def test_every_truncation_is_noticed(path):
    for length in range(len(EXPECTED) - 1):
        put(path, EXPECTED[:length])
        with pytest.raises(StoreError, match="is truncated"):
            load(path)


def test_a_file_that_is_not_text_is_refused(path):
    put(path, "").write_bytes(b"\xff\xfe{}")
    with pytest.raises(StoreError, match="codec can't decode"):
        load(path)


def test_a_folder_instead_of_the_file_is_refused(path):
    path.mkdir(parents=True)
    with pytest.raises(StoreError, match=r"cannot be read: .*Is a directory"):
        record(path, {KEY: result()})
    assert list(path.iterdir()) == []


def test_a_file_instead_of_the_folder_is_refused(path):
    path.parent.parent.mkdir()
    path.parent.write_text("")
    with pytest.raises(StoreError, match=r"cannot be read: .*Not a directory"):
        load(path)
    with pytest.raises(StoreError, match=r"could not be written and .*File exists"):
        record(path, {KEY: result()})


def test_the_command_in_an_error_is_quoted_for_the_shell(tmp_path):
    path = put(tmp_path / "my $results" / PRODUCT / "ch01.json", "")
    with pytest.raises(StoreError) as caught:
        load(path)
    assert str(caught.value).splitlines()[-1] == f"    git checkout -- '{path}'"


def test_results_are_not_written_into_another_products_folder(path):
    with pytest.raises(StoreError, match=r"belongs to nvidia-h200, but .* of nvidia-b200"):
        write(path, "nvidia-b200", {KEY: result()}, TABLE, replace=False)
    assert not path.parent.exists()


def test_errors_can_be_pickled(path):
    put(path, "")
    with pytest.raises(StoreError) as caught:
        load(path)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


# Writes that fail


def full():
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fail(*args, **kwargs):
    raise full()


ACTIONS = {
    "write": lambda path: record(path, {KEY: result("b"), OTHER: result()}, replace=True),
    "prune": lambda path: prune(path, {KEY}),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_a_full_disk_leaves_the_old_file(path, monkeypatch, action):
    record(path, {KEY: result("a")})
    before = path.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail)
        with pytest.raises(StoreError) as caught:
            ACTIONS[action](path)
    first, last = str(caught.value).splitlines()
    assert first == f"{path} could not be written and is unchanged: {full()}"
    assert last.strip().startswith(f"Free space in {path.parent} or make it writable, then run")
    assert path.read_bytes() == before
    assert names(path) == ["ch01.json"]
    ACTIONS[action](path)
    assert path.read_bytes() != before


class Steps:
    """Count the calls that a write makes to the system, and `act` in the place of number `at`."""

    OWNERS = (
        (fcntl, "flock"),
        *((os, n) for n in ["fstat", "stat", "fsync", "replace", "unlink", "open"]),
    )

    def __init__(self, act, at):
        self.act, self.at, self.taken = act, at, 0

    def take(self, call, *args, **kwargs):
        self.taken += 1
        return self.act() if self.taken == self.at else call(*args, **kwargs)

    def install(self, setattr):
        for owner, name in self.OWNERS:
            setattr(owner, name, partial(self.take, getattr(owner, name)))
        setattr(store, "open", self.open)

    def open(self, *args, **kwargs):
        return WatchedFile(self.take(builtins.open, *args, **kwargs), self.take)


class WatchedFile:
    def __init__(self, file, take):
        self.file, self.take = file, take

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.take(self.file.close)

    def __getattr__(self, name):
        return partial(self.take, getattr(self.file, name))


NEXT = {KEY: result("b", processes=(0.9, 0.91)), OTHER: result()}


def every_step(path, interrupted):
    """Interrupt a write at each of its steps in turn; yield whether its result is the new file."""
    for at in range(1, 99):
        record(path, {KEY: result()}, replace=True)
        prune(path, {OTHER})
        old = load(path)
        done = interrupted(at)
        after = load(path)
        assert after == old or after.results == NEXT, at
        yield after != old
        record(path, {KEY: result(processes=(0.1, 0.2))}, replace=True)
        assert load(path).results[KEY].values == ((0.1, 0.2),)
        assert names(path) == ["ch01.json"]
        if done:
            return
    raise AssertionError("a write has no end of steps")


def test_an_error_at_any_step_leaves_the_old_file_or_the_new_one(path, monkeypatch):
    def interrupted(at):
        with monkeypatch.context() as patched:
            steps = Steps(fail, at)
            steps.install(partial(patched.setattr, raising=False))
            try:
                record(path, NEXT, replace=True)
            except StoreError as error:
                said.append(str(error))
            else:
                said.append("")
        return steps.taken < at

    said = []
    for written in every_step(path, interrupted):
        assert written == (not said[-1])
    assert sum(map(bool, said)) > 8
    assert all("could not be written and is unchanged: " in error for error in said if error)


def test_a_writer_killed_at_any_step_leaves_the_old_file_or_the_new_one(path):
    def interrupted(at):
        child = os.fork()
        if child == 0:
            steps = Steps(die, at)
            steps.install(setattr)
            record(path, NEXT, replace=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        return status == 0

    outcomes = list(every_step(path, interrupted))
    assert outcomes == sorted(outcomes)
    assert outcomes.count(False) > 8


def test_a_full_disk_leaves_no_new_file(path, monkeypatch):
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StoreError):
        record(path, {KEY: result()})
    assert names(path) == []


def test_a_file_size_limit_leaves_the_old_file(path):
    record(path, {KEY: result()})
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, hard))
    try:
        with pytest.raises(StoreError, match="File too large"):
            record(path, {OTHER: result("b")})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert names(path) == ["ch01.json"]


def test_a_read_only_folder_leaves_the_old_file(path):
    record(path, {KEY: result()})
    before = path.read_bytes()
    path.parent.chmod(0o555)
    if os.access(path.parent, os.W_OK):
        pytest.skip("needs a user whom modes bind; this one (root) writes anywhere")
    try:
        with pytest.raises(StoreError, match="Permission denied"):
            record(path, {OTHER: result()})
    finally:
        path.parent.chmod(0o755)
    assert path.read_bytes() == before


@pytest.mark.parametrize("syscall", ["open", "fsync"])
def test_an_unsyncable_folder_still_gets_the_new_file(path, monkeypatch, syscall):
    real = getattr(os, syscall)

    def fail_on_folder(target, *args):
        is_folder = os.path.isdir(target if syscall == "open" else f"/proc/self/fd/{target}")
        return fail() if is_folder else real(target, *args)

    monkeypatch.setattr(os, syscall, fail_on_folder)
    assert record(path, {KEY: result()}) == [Change(KEY, None, result())]
    assert load(path).results == {KEY: result()}
    assert names(path) == ["ch01.json"]


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, MemoryError])
def test_an_interrupt_leaves_nothing_behind(path, monkeypatch, interrupt):
    record(path, {KEY: result()})
    before = path.read_bytes()

    def interrupted(*args):
        raise interrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(interrupt):
        record(path, {OTHER: result()})
    assert path.read_bytes() == before
    assert names(path) == ["ch01.json"]


def test_the_file_respects_the_umask_and_symlinks(path, tmp_path):
    target = put(tmp_path / "elsewhere.json", dump(Stored(PRODUCT)))
    path.parent.mkdir(parents=True)
    path.symlink_to(target)
    before = os.umask(0o022)
    try:
        record(path, {KEY: result()})
    finally:
        os.umask(before)
    assert path.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o644
    assert list(load(path).results) == [KEY]


# Writers at once

SPAWN = multiprocessing.get_context("spawn")


def test_concurrent_writers_lose_no_entry(path):
    keys = [f"page_test.py::test_page[v-n{i}]" for i in range(40)]
    tasks = [(path, PRODUCT, {key: result()}, TABLE) for key in keys]
    with SPAWN.Pool(4) as pool:
        changes = pool.starmap(partial(write, replace=False), tasks, chunksize=1)
    assert [change.key for [change] in changes] == keys
    assert sorted(load(path).results) == sorted(keys)
    assert names(path) == ["ch01.json"]


@pytest.mark.parametrize("replace", [False, True])
def test_concurrent_writers_of_one_case_leave_a_whole_result(path, replace):
    sessions = [result("a"), result("b", processes=(0.8, 0.81))] * 4
    tasks = [(path, PRODUCT, {KEY: session}, TABLE) for session in sessions]
    with SPAWN.Pool(4) as pool:
        pool.starmap(partial(write, replace=replace), tasks, chunksize=1)
    after = load(path).results[KEY]
    assert after in sessions if replace else after.values == ((0.7, 0.701, 0.699), (0.8, 0.81))
    assert names(path) == ["ch01.json"]


def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)


# A writer that does not wait is done within this time. A writer that waits takes all of it.
PATIENCE = 0.5


def test_a_writer_waits_for_another(path, monkeypatch):
    real, late = os.replace, threading.Thread(target=record, args=(path, {OTHER: result()}))

    def replace_slowly(*args):
        if late.ident is None:
            late.start()
            late.join(PATIENCE)
        real(*args)

    monkeypatch.setattr(os, "replace", replace_slowly)
    record(path, {KEY: result()})
    late.join()
    assert sorted(load(path).results) == [OTHER, KEY]


def test_a_writer_ignores_a_lock_file_that_was_removed(path):
    record(path, {KEY: result()})
    lock = path.with_name(".ch01.json.lock")
    with open(lock, "w") as removed, open(lock.with_suffix(".new"), "w") as current:
        fcntl.flock(removed, fcntl.LOCK_EX)
        fcntl.flock(current, fcntl.LOCK_EX)
        late = threading.Thread(target=record, args=(path, {OTHER: result()}))
        late.start()
        late.join(PATIENCE)
        os.replace(current.name, lock)
        removed.close()
        late.join(PATIENCE)
        assert list(load(path).results) == [KEY]
    late.join()
    assert sorted(load(path).results) == [OTHER, KEY]


EDITS = [('"share": 0.9123', '"share": 0.9124'), ("251.3", "251.4"), ("0.701", "0.700")]
EDITS += [
    ('"clock": "graph"', '"clock": "host"'),
    ("0a1b", "0a1c"),
    ("copy_test.py", "cope_test.py"),
]


@pytest.mark.parametrize(("was", "becomes"), EDITS, ids=lambda text: str(text)[:12])
def test_a_manual_edit_breaks_the_seal(path, was, becomes):
    path.parent.mkdir(parents=True)
    path.write_text(EXPECTED.replace(was, becomes, 1))
    with pytest.raises(StoreError, match="its seal is wrong: the line was changed after a run rec"):
        store.load(path)
    assert path.read_text() == EXPECTED.replace(was, becomes, 1)


def test_a_line_may_be_removed_by_hand(path):
    text = "\n".join(line for line in EXPECTED.splitlines() if not line.startswith('"copy_test'))
    put(path, text)
    assert list(load(path).results) == [KEY]
