"""Options of methods: defaults, presets and their precedence. No model, nothing compiles."""

import pytest

import specjax as sj
from specjax._util.errors import OptionError
from specjax.registry import DRAFTERS, RULES, SEARCHES, TARGET_DISTS, compose, presets

PARTS = [part for table in (DRAFTERS, TARGET_DISTS, RULES, SEARCHES) for part in table.values()]
# Yuan et al. 2024, Table 2 (the second pair is for `improved`), with Table 1's better variant.
TABLE_2 = {
    "wikitext": ("original", 0.1, 0.5),
    "alpacaeval": ("improved", 0.5, 0.5),
    "gsm8k": ("improved", 0.5, 1.0),
    "humaneval": ("original", 0.5, 0.5),
}


@pytest.mark.parametrize("name", ["scd", "block-scd"])
def test_the_amateur_drafts_with_the_targets_warp_by_default(name):
    assert sj.method(name).resolve({})["draft_warp"] is True
    assert sj.method(name).resolve({"draft_warp": "false"})["draft_warp"] is False


@pytest.mark.parametrize("preset", TABLE_2)
@pytest.mark.parametrize(
    "spec",
    [
        *map(sj.method, ("contrastive", "scd", "block-scd", "tree-scd")),
        compose("lookup", "match", "contrastive"),
    ],
    ids=lambda spec: spec.name,
)
def test_a_preset_fills_in_the_papers_options(spec, preset):
    values = spec.resolve({"preset": preset})
    assert (values["variant"], values["alpha"], values["beta"]) == TABLE_2[preset]
    # The paper's amateur draws at temperature 1; a method without that option ignores it.
    assert values.get("draft_warp", False) is False
    others = set(values) - {"preset", "variant", "alpha", "beta", "draft_warp"}
    plain = spec.resolve({})
    assert all(values[name] == plain[name] for name in others)
    assert spec.resolve(values) == values, "resolving resolved options changes nothing"


def test_a_given_option_wins_over_a_preset():
    scd = sj.method("scd")
    given = {"preset": "gsm8k", "beta": "0.25", "draft_warp": True}
    assert scd.resolve(given) == scd.resolve({"preset": "gsm8k"}) | {
        "beta": 0.25,
        "draft_warp": True,
    }
    assert scd.resolve({"preset": "none"}) == scd.resolve({})


def test_an_unknown_preset_is_refused_with_the_known_names():
    with pytest.raises(OptionError, match=r"preset=humanevil: .*") as caught:
        sj.method("scd").resolve({"preset": "humanevil"})
    message = str(caught.value)
    assert len(message.splitlines()) == 1 and all(name in message for name in TABLE_2)
    with pytest.raises(OptionError, match="unknown option 'preset' of method speculative"):
        sj.method("speculative").resolve({"preset": "humaneval"})


def test_presets_fill_in_known_options_with_valid_values():
    known = {}
    for part in PARTS:
        for name, option in part.options.items():
            known.setdefault(name, []).append(option)
    filled = list(presets())
    assert {setting for _, setting, _ in filled} >= {f"preset={name}" for name in TABLE_2}
    for _, _, options in filled:
        for name, value in options.items():
            assert any(option.parse(name, value) == value for option in known[name])
