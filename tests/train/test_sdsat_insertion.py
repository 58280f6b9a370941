"""train.sdsat.insertion: adaptive windows and the layouts that hold them."""

import numpy as np
import pytest

from specjax._util.errors import InputError
from support.insertion_reference import EOS, ID, slow_mixed, slow_windows, some_row
from train.data.packing import IGNORE
from train.sdsat.insertion import (
    Insertion,
    append_windows,
    appended_slots,
    draw_windows,
    isolated_row,
    mixed_row,
    probe_row,
)


@pytest.mark.parametrize("ids", [(ID,) * 5, (90, 91, 92, 93, 94), (ID,)])
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_insertion_equals_the_slow_reference(ids, rate):
    insertion = Insertion(ids, (EOS, 7), rate, seed=3)
    for number in range(40):
        row = some_row(number, padding=number % 3 == 0)
        windows = slow_windows(insertion, row, number)
        starts, lengths = draw_windows(insertion, row, number)
        assert [[*range(s, s + n)] for s, n in zip(starts, lengths, strict=True)] == windows
        mixed, index = slow_mixed(insertion, row, windows)
        laid = mixed_row(insertion, row, number)
        np.testing.assert_array_equal(laid["mixed"], mixed)
        np.testing.assert_array_equal(laid["index"], index)


@pytest.mark.parametrize(("window", "share"), [(3, 0.188), (5, 0.268), (7, 0.340)])
def test_the_replaced_share_is_the_papers(window, share):
    count = 400_000
    row = {"tokens": np.ones(count, np.int32), "segments": np.ones(count, np.int32)}
    index = mixed_row(Insertion((ID,) * window, (EOS,)), row, 0)["index"]
    assert abs((index > 0).mean() - share) < 0.004
    lengths = draw_windows(Insertion((ID,) * window, (EOS,)), row, 0)[1]
    assert abs(lengths.sum() / count - 0.05 * (window + 1)) < 0.005


def test_a_rows_windows_depend_on_seed_and_number_alone():
    row, insertion = some_row(1), Insertion((ID,) * 5, (EOS,), 0.5, seed=4)
    first = mixed_row(insertion, row, 8)["mixed"]
    np.testing.assert_array_equal(first, mixed_row(insertion, row, 8)["mixed"])
    other = Insertion((ID,) * 5, (EOS,), 0.5, seed=5)
    for changed in (mixed_row(insertion, row, 9), mixed_row(other, row, 8)):
        assert (changed["mixed"] != first).any()


def test_distinct_ids_are_one_or_all_different():
    with pytest.raises(InputError, match="one repeated id or 3 distinct"):
        Insertion((90, 91, 91))


def test_isolated_rows_hold_every_window_with_its_labels():
    insertion = Insertion((90, 91, 92), (EOS,), 0.2, seed=1)
    for number in range(20):
        row = some_row(number)
        T, slots = len(row["tokens"]), appended_slots(3, 0.2, 96)
        laid = isolated_row(insertion, row, number)
        for name in row:
            assert laid[name].shape == (T + slots,) and laid[name].dtype == np.int32
            np.testing.assert_array_equal(laid[name][:T], row[name])
        windows = slow_windows(insertion, row, number)
        appended = T
        for window, places in enumerate(windows, start=1):
            for i, place in enumerate(places):
                assert laid["tokens"][appended] == 90 + i
                for name in ("labels", "positions", "segments"):
                    assert laid[name][appended] == row[name][place]
                assert laid["windows"][appended] == window and laid["index"][appended] == i + 1
                assert laid["starts"][appended] == row["positions"][places[0]]
                assert laid["sources"][appended - T] == place
                appended += 1
        assert (laid["segments"][appended:] == 0).all() and (
            laid["labels"][appended:] == IGNORE
        ).all()


def test_windows_beyond_the_slots_are_dropped_whole_and_fairly():
    insertion = Insertion((ID,) * 5, (), 0.9)
    row = {name: np.ones(64, np.int32) for name in ("tokens", "labels", "segments")}
    row["positions"] = np.arange(64, dtype=np.int32)
    kept, dropped = np.zeros(64), 0
    for number in range(300):
        laid = isolated_row(insertion, row, number)
        slots = len(laid["tokens"]) - 64
        firsts = laid["sources"][(laid["index"][64:] == 1)]
        kept[firsts] += 1
        dropped += len(draw_windows(insertion, row, number)[0]) - len(firsts)
        assert (laid["index"] > 0).sum() <= slots
    assert dropped > 0 and abs(kept[:30].mean() - kept[30:60].mean()) < 0.03 * 300


def test_appended_slots_are_what_the_loss_promises():
    for window, promised in ((3, 0.2), (5, 0.3), (7, 0.4)):
        assert promised < appended_slots(window, 0.1, 16384) / 16384 < promised * 1.08


def test_probes_are_whole_windows():
    insertion = Insertion((ID,) * 3, (EOS,))
    row = some_row(2)
    laid = probe_row(insertion, row, 5, 7)
    slots = len(laid["tokens"]) - 96
    assert slots == 6 * 7
    index = laid["index"][96:].reshape(6, 7)
    assert ((index == np.arange(1, 8)) | (index == 0)).all() and (index[:, 0] > 0).any()
    sources = laid["sources"].reshape(6, 7)[index[:, 0] > 0]
    assert not (row["tokens"][sources] == EOS).any()
    empty = append_windows(row, np.zeros(0, int), np.zeros(0, int), 8, insertion)
    assert (empty["segments"][96:] == 0).all()
