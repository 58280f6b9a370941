"""The parts in CONTRIBUTING.md work as printed, and each has at most 30 lines."""

import re
from pathlib import Path

import numpy as np
import pytest
from test_laws import point_mass_draft

import specjax as sj
from specjax.core.types import POINT_MASS
from support import laws

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.S)
PROMPTS = [[5, 6, 7, 8, 9], [3], list(range(20))]


@pytest.fixture(scope="module")
def parts():
    names = {}
    for block in BLOCKS[:3]:
        assert len(block.strip().splitlines()) <= 30
        exec(block, names)
    return names


def test_the_rule_has_its_law(parts):
    rule = parts["certain"]
    assert rule.accepts == {POINT_MASS}
    assert laws.rule_p_value(rule, draft_fn=point_mass_draft) > laws.ALPHA


def test_the_drafter_changes_nothing_but_speed(parts, target):
    plain = sj.generate(target, PROMPTS, max_new_tokens=40)
    for rule in ("match", parts["certain"]):
        out = sj.generate(target, PROMPTS, drafter=parts["Repeat"](), rule=rule, max_new_tokens=40)
        for a, b in zip(out.tokens, plain.tokens, strict=True):
            np.testing.assert_array_equal(a, b)
    assert out.stats["drafted"].sum() > 0


def test_the_target_distribution_is_what_it_says(parts, target):
    sampling = sj.Sampling(temperature=0.7)
    plain = sj.generate(target, PROMPTS, max_new_tokens=40, sampling=sampling)
    out = sj.generate(
        target, PROMPTS, target_dist=parts["NoEcho"](), max_new_tokens=40, sampling=sampling
    )
    echoes = [sum((np.diff(row) == 0).sum() for row in o.tokens) for o in (plain, out)]
    assert echoes[0] > 0 and echoes[1] == 0


def test_they_work_together_as_printed(parts, target):
    names = parts | {"sj": sj, "target": target, "prompts": PROMPTS}
    exec(BLOCKS[3], names)
    assert all((np.diff(row) != 0).all() for row in names["out"].tokens)
