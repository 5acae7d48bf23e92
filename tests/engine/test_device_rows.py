"""DeviceRows: page tables on the device are those of the host, however changes get there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pageforge.engine.device_rows import DeviceRows


def make() -> DeviceRows:
    return DeviceRows(torch.device("cpu"), num_groups=2, max_rows=4, max_pages=5)


def assert_up_to_date(rows: DeviceRows) -> None:
    for host, table in zip(rows.host_tables, rows.page_tables, strict=True):
        assert table.tolist() == host.tolist()


def test_changes_are_sent() -> None:
    rows = make()
    rows.set_pages(0, 3, 1, [7, 8, 9, 10])
    rows.set_pages(1, 0, 4, [11])
    rows.set_pages(0, 3, 1, [12])  # the later one counts
    assert rows.num_changes == 5
    assert not any(table.any() for table in rows.page_tables)
    rows.send_changes()
    assert rows.num_changes == 0
    assert rows.host_tables[0][3].tolist() == [0, 12, 8, 9, 10]
    assert_up_to_date(rows)


@pytest.mark.parametrize("count", [2, 6])
def test_a_step_brings_changes(count: int) -> None:
    """Padded with changes that are none. They stay changes until the step was launched."""
    rows = make()
    rows.set_pages(0, 3, 3, [7, 8])
    rows.set_pages(1, 0, 0, [9])
    for _ in range(2):
        changes = rows.changes(count)
        assert {len(part) for change in changes for part in change} == {count}
        assert [part.dtype for part in changes[0]] == [np.int64, np.int32]
    assert rows.num_changes == 2
    rows.apply([(torch.from_numpy(places), torch.from_numpy(ids)) for places, ids in changes])
    assert_up_to_date(rows)
    rows.forget_changes()
    assert rows.num_changes == 0


def test_a_step_without_changes_changes_nothing() -> None:
    rows = make()
    rows.set_pages(0, 1, 0, [7])
    rows.send_changes()
    changes = rows.changes(3)
    rows.apply([(torch.from_numpy(places), torch.from_numpy(ids)) for places, ids in changes])
    rows.apply([])  # a mixed step
    assert_up_to_date(rows)


def test_a_row_moves_with_what_the_device_does_not_know_yet() -> None:
    rows = make()
    rows.last_tokens[3] = 5
    rows.set_pages(0, 3, 0, [7, 8])
    rows.move_row(3, 1)
    rows.set_pages(0, 3, 0, [9])
    rows.send_changes()
    assert rows.last_tokens.tolist() == [0, 5, 0, 5]
    assert rows.page_tables[0][1].tolist() == [7, 8, 0, 0, 0]
    assert_up_to_date(rows)


@pytest.mark.parametrize("chosen", [[], [0, 1], [0, 3], [2]])
def test_last_tokens_are_kept(chosen: list[int]) -> None:
    rows = make()
    rows.keep_tokens(np.array(chosen, np.int64), torch.tensor(chosen, dtype=torch.int64) + 10)
    assert rows.last_tokens.tolist() == [row + 10 if row in chosen else 0 for row in range(4)]


def test_rows_made_in_inference_mode_can_be_written_outside() -> None:
    with torch.inference_mode():
        rows = make()
    rows.set_pages(0, 1, 0, [7])
    rows.send_changes()
    rows.keep_tokens(np.array([0]), torch.tensor([3]))
    assert_up_to_date(rows)
