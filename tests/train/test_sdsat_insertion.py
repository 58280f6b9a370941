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
        out = mixed_row(insertion, row, number)
        np.testing.assert_array_equal(out["mixed"], mixed)
        np.testing.assert_array_equal(out["index"], index)


@pytest.mark.parametrize(("window", "share"), [(3, 0.188), (5, 0.268), (7, 0.340)])
def test_the_replaced_share_is_as_in_the_paper(window, share):
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


def test_ids_are_one_repeated_or_all_distinct():
    with pytest.raises(InputError, match="one repeated id or 3 distinct"):
        Insertion((90, 91, 91))


def test_isolated_rows_hold_every_window_with_its_labels():
    insertion = Insertion((90, 91, 92), (EOS,), 0.2, seed=1)
    for number in range(20):
        row = some_row(number)
        T, slots = len(row["tokens"]), appended_slots(3, 0.2, 96)
        out = isolated_row(insertion, row, number)
        for name in row:
            assert out[name].shape == (T + slots,) and out[name].dtype == np.int32
            np.testing.assert_array_equal(out[name][:T], row[name])
        windows = slow_windows(insertion, row, number)
        appended = T
        for window, places in enumerate(windows, start=1):
            for i, place in enumerate(places):
                assert out["tokens"][appended] == 90 + i
                for name in ("labels", "positions", "segments"):
                    assert out[name][appended] == row[name][place]
                assert out["windows"][appended] == window and out["index"][appended] == i + 1
                assert out["starts"][appended] == row["positions"][places[0]]
                assert out["sources"][appended - T] == place
                appended += 1
        assert (out["segments"][appended:] == 0).all() and (
            out["labels"][appended:] == IGNORE
        ).all()


def test_windows_that_do_not_fit_are_dropped_whole_and_at_random():
    insertion = Insertion((ID,) * 5, (), 0.9)
    row = {name: np.ones(64, np.int32) for name in ("tokens", "labels", "segments")}
    row["positions"] = np.arange(64, dtype=np.int32)
    kept, dropped = np.zeros(64), 0
    for number in range(300):
        out = isolated_row(insertion, row, number)
        slots = len(out["tokens"]) - 64
        firsts = out["sources"][(out["index"][64:] == 1)]
        kept[firsts] += 1
        dropped += len(draw_windows(insertion, row, number)[0]) - len(firsts)
        assert (out["index"] > 0).sum() <= slots
    assert dropped > 0 and abs(kept[:30].mean() - kept[30:60].mean()) < 0.03 * 300


def test_appended_slots_are_as_in_the_documentation():
    for window, promised in ((3, 0.2), (5, 0.3), (7, 0.4)):
        assert promised < appended_slots(window, 0.1, 16384) / 16384 < promised * 1.08


def test_held_out_windows_are_complete():
    insertion = Insertion((ID,) * 3, (EOS,))
    row = some_row(2)
    out = probe_row(insertion, row, 5, 7)
    slots = len(out["tokens"]) - 96
    assert slots == 6 * 7
    index = out["index"][96:].reshape(6, 7)
    assert ((index == np.arange(1, 8)) | (index == 0)).all() and (index[:, 0] > 0).any()
    sources = out["sources"].reshape(6, 7)[index[:, 0] > 0]
    assert not (row["tokens"][sources] == EOS).any()
    empty = append_windows(row, np.zeros(0, int), np.zeros(0, int), 8, insertion)
    assert (empty["segments"][96:] == 0).all()
