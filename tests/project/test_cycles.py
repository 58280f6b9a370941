"""Reading a compiled program's text, and counting a kernel's schedule; needs no compiler."""

from pathlib import Path

import numpy as np
import pytest

TOOLS = Path(__file__).parents[2] / "docs/tools"


@pytest.fixture
def measure(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import measure_training

    return measure_training


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import tpu_kernels

    return tpu_kernels


# A loop with a constant number of turns, then one that ends on data. The first one holds a product,
# a kernel whose call takes three lines, and a sum.
PROGRAM = """
%cond (at: s32[]) -> pred[] {
  %constant.1 = s32[]{:T(128)} constant(3)
  ROOT %lt.1 = pred[]{:T(512)} compare(%at, %constant.1), direction=LT
}

%body (at: s32[]) -> s32[] {
  %product = bf16[8,8] fusion(%at), metadata={op_name="a/weights/dot"}, {"estimated_cycles":"10"}
  %kernel.1 = bf16[2,8,128] custom-call(%product), frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}, metadata={op_name="a/splash/call"}
  ROOT %sum = s32[] add(%kernel.1), metadata={op_name="a/sum"}, {"estimated_cycles":"7"}
}

%unknown (at: s32[]) -> pred[] {
  ROOT %lt.2 = pred[] compare(%at, %at), direction=LT
}

ENTRY %main (x: s32[]) -> s32[] {
  %while.1 = s32[] while(%x), condition=%cond, body=%body, metadata={op_name="a/while"}
  ROOT %while.2 = s32[] while(%x), condition=%unknown, body=%body, metadata={op_name="b/while"}
}
"""
# A kernel's loop. Branches may skip three regions: a row's first block, a visited block, its last.
BUNDLES = """
   0x5   :  { entry }
  0x10 LB: > { loop }
  0x20   : > { (pc) = sbr.rel (%p1) target = $region1 }
  0x30 PF: > { }
  0x34   : > { (pc) = sbr.rel (%p2) target = $region2 }
 0x134 PF: > { }
 0x135   : > { (pc) = sbr.rel (%p3) target = $region3 }
 0x155 PF: > { }
 0x160   : > { (pc) = sbr.rel (!%p4) target = $region4 }
"""


def test_kernels_and_what_stands_behind_them_count_by_their_loops(measure):
    found = measure.cycles(
        PROGRAM,
        lambda path, line: path.split("/")[1],
        lambda path: 2 if path == "b/while" else 0,
        calls=lambda line: 100 if "splash" in line else 0,
    )
    assert found == {"weights": 5 * 10, "splash": 5 * 100, "sum": 5 * 7}


def test_a_kernels_schedule_is_a_turn_a_block_that_is_met_and_the_ends_of_a_row(kernels):
    turn, met, ends = kernels.schedule(BUNDLES)
    assert (met, ends) == (0x100, 0x10 + 0x20)
    assert turn + met + ends == 0x150


def test_a_call_counts_the_blocks_that_its_rows_and_heads_meet(measure, kernels):
    """A causal row visits 10 of 16 blocks, each at a minimum cost; there are 2 rows and 3 heads."""
    kernel = kernels.Kernel(turn=1, met=100, ends=10)
    call = (
        "%splash_mha_fwd.1 = custom-call(), operand_layout_constraints={s8[1,4,4], "
        'bf16[2,3,4096,128]{3,2,1,0}, s32[8]}, {"block_q\\": 1024, \\"block_kv\\": 1024}'
    )

    def counted(rate):
        return measure.kernel_cycles({(kernels.FORWARD, False): kernel}, {}, rate, call)

    assert counted(1e9) == 6 * (16 * 1 + 10 * 100 + 4 * 10)
    assert counted(2**20) == 6 * (16 * 1 + 10 * 256 + 4 * 10)  # 2 products of 1,024² · 128


def test_windows_meet_what_they_see_of_a_drawn_row(measure, kernels):
    """Windows are spread over the row, so they visit about half of the earlier blocks."""
    setup = measure.step_setup(measure.config("isolated", 4096, None))
    table = measure.drawn_tables(setup.insertion, 4096)[kernels.FORWARD]
    assert table.shape == (3, 6)  # 1,360 positions, 5,456 tokens
    assert kernels.met_of(kernels.FORWARD, table) == (18, np.count_nonzero(table), 3)
    assert 9 <= np.count_nonzero(table) < 15


def test_depths_must_rise(measure, capsys):
    with pytest.raises(SystemExit):
        measure.main(["--layers", "4", "2"])
    assert "the shallower copy first" in capsys.readouterr().err
