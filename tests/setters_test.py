"""A side that changes a setting in its call and restores it is found. Libraries may do this."""

from __future__ import annotations

import os
import re
import sys
import threading

import pytest
import torch
from torch.utils import benchmark

from pytest_aisp.isolation import global_state, monkeypatches
from pytest_aisp.page.pair import SideError


@pytest.fixture(autouse=True)
def remembered():
    monkeypatches.remember()
    before = global_state.snapshot()
    yield
    global_state.restore(before)


def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    torch.set_num_threads(before)


def onednn():
    with torch.backends.mkldnn.flags(enabled=False):
        pass


def onednn_by_attribute():
    torch.backends.mkldnn.enabled = False
    torch.backends.mkldnn.enabled = True


def affinity():
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    os.sched_setaffinity(0, cores)


def switch_interval():
    before = sys.getswitchinterval()
    sys.setswitchinterval(before / 2)
    sys.setswitchinterval(before)


@pytest.mark.parametrize(
    ("change", "setting", "word"),
    [
        (threads, "torch's threads", "threads"),
        (onednn, "torch's oneDNN", "onednn"),
        (onednn_by_attribute, "torch's oneDNN", "onednn"),
        (affinity, "the CPU affinity", "affinity"),
        (switch_interval, "Python's switch interval", None),
    ],
)
def test_a_setting_that_changes_inside_the_call_is_refused(change, setting, word):
    if change is affinity and len(os.sched_getaffinity(0)) == 1:
        pytest.skip("needs two cores")
    place = f" inside its call, in {change.__name__} (setters_test.py:"
    with pytest.raises(SideError) as caught, monkeypatches.watching("eager"):
        change()
    message = str(caught.value)
    assert message.startswith(f"eager changes {setting} from ")
    assert place in message
    if word is None:
        assert message.endswith("Remove it")
        return
    assert message.endswith(f'conditions=Conditions(owns=["{word}"])')
    with monkeypatches.watching("eager", [word]):
        change()


def test_setting_the_value_that_a_setting_has_is_no_change():
    with monkeypatches.watching("eager"):
        torch.set_num_threads(torch.get_num_threads())
        with torch.backends.mkldnn.flags(enabled=True):
            pass


def test_a_library_may_change_a_setting_and_restore_it():
    with monkeypatches.watching("eager"):
        timer = benchmark.Timer("1 + 1", num_threads=torch.get_num_threads() + 1)
        timer.timeit(1)


def test_changes_before_the_call_are_no_changes_inside_it():
    threads()
    with monkeypatches.watching("eager"):
        pass


def test_left_oneDNN_off_is_refused_by_the_setting():
    expected = re.escape("eager changed torch's oneDNN: from True to False")
    with pytest.raises(SideError, match=expected), monkeypatches.watching("eager"):
        torch.backends.mkldnn.enabled = False
    assert torch.backends.mkldnn.enabled


def test_a_thread_of_a_library_may_set_its_own_number_of_threads():
    with monkeypatches.watching("eager"):  # as the pinning thread of DataLoader does
        thread = threading.Thread(target=torch.set_num_threads, args=(1,))
        thread.start()
        thread.join()
