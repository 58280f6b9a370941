"""The pictures of a benchmark: their axes, curves and labels."""

import itertools
import json

import pytest

from infer.bench import pictures, report, sweep_pictures
from specjax._util.errors import OptionError

HEADS = {"accept_rate_per_draft_of_prompt": "accepted/drafted, mean of prompts"}
COSTS = [0.01, 0.1, 0.2]


@pytest.fixture
def drawn(monkeypatch):
    """Figures instead of files."""
    figures = []
    for module in (pictures, sweep_pictures):
        monkeypatch.setattr(module, "save_figure", lambda figure, path: figures.append(figure))
    yield figures
    for figure in figures:
        pictures.pyplot().close(figure)


def row(method, temperature=0.0, *, speed=30.0, pm=(), options=(), **figures):
    options = dict(options)
    label = " ".join([method, *(f"{name}={value}" for name, value in options.items())])
    mode = "sampled" if temperature else "greedy"
    case = {"method": method, "label": label, "mode": mode, "temperature": temperature}
    rest = {"batch_size": 1, "options": options, "pm": dict(pm), "tokens_per_second": speed}
    return case | rest | {"speedup": None} | figures


def sdsat_report(data, temperatures=(0.0,), off=0.0):
    rows = []
    for temperature in temperatures:
        rows.append(row("autoregressive", temperature, speed=20.0))
        for k in (13, 5, 9):
            rate = {"accept_rate_per_draft_of_prompt": 0.9 - k / 50 - off}
            pm = {"accept_rate_per_draft_of_prompt": 0.01}
            one = row("sdsat", temperature, speed=40.0 + k - off, pm=pm, options={"k": k}, **rate)
            rows.append(one | {"speedup": one["tokens_per_second"] / 20})
    return {"target": "runs/S", "data": data, "sweep": ["k"], "rows": rows, "beside": []}


def contrastive_report():
    rows = [row("autoregressive", 0.7, gsm8k=0.5), row("speculative", 0.7, gsm8k=0.5)]
    for alpha, beta in itertools.product((0.1, 0.5), (0.5, 1.0)):
        options = {"alpha": alpha, "beta": beta, "preset": "gsm8k", "variant": "improved"}
        rows.append(row("scd", 0.7, options=options, gsm8k=0.5 + alpha * beta))
    for one in rows[1:]:
        one["acceptance_rate"] = 0.6
        one |= {f"expected_at_{cost:g}": 2 - cost for cost in COSTS}
    swept = {"sweep": ["alpha", "beta"], "plot": {"gsm8k": "GSM8K"}, "cost": COSTS}
    return {"target": "P", "data": "gsm8k", "rows": rows, "beside": []} | swept


def curves(axis):
    return {line.get_label(): line for line in axis.get_lines()}


def test_curves_of_a_sweep_have_the_papers_axes_and_other_reports(drawn):
    """SDSAT, Figures 3, 4, 6 and 7: a curve per file and temperature, plain decoding as a line."""
    plot = HEADS | {"tokens_per_second": "tokens/s"}
    beside = [sdsat_report("infilling", off=0.1)]
    sweep_pictures.draw_sweep(
        None, sdsat_report("humaneval", (0.0, 0.2)) | {"plot": plot, "beside": beside}
    )
    left, right = drawn[0].axes
    assert left.get_ylabel() == "accepted/drafted, mean of prompts"
    assert right.get_ylabel() == "tokens/s"
    assert {axis.get_xlabel() for axis in (left, right)} == {"number of adaptive tokens, k"}
    assert list(left.get_xticks()) == [5, 9, 13]
    names = ["humaneval, greedy", "humaneval, T = 0.2", "infilling, greedy"]
    expected = {f"{method}, {name}" for method in ("sdsat", "autoregressive") for name in names}
    assert curves(left).keys() == curves(right).keys() == expected
    line = curves(right)["sdsat, infilling, greedy"]
    assert line.get_ydata().tolist() == [44.9, 48.9, 52.9], "in the order of k"
    assert set(curves(right)["autoregressive, infilling, greedy"].get_ydata()) == {20.0}
    assert len(left.collections) == 3 and not right.collections, "the ± of each curve is a band"
    (legend,) = drawn[0].legends
    assert {text.get_text() for text in legend.get_texts()} == expected


def test_two_options_give_a_surface_and_one_value_gives_curves(drawn):
    """SCD, Figures 3 and 5: performance against α and β; the original score has only α."""
    made = contrastive_report()
    sweep_pictures.draw_sweep(None, made)
    surface, bar = drawn[0].axes
    assert (surface.get_xlabel(), surface.get_ylabel(), bar.get_ylabel()) == ("α", "β", "GSM8K")
    assert {text.get_text() for text in surface.texts} == {"0.55", "0.6", "0.75", "1"}
    made["rows"] = [one for one in made["rows"] if one["options"].get("beta", 0.5) == 0.5]
    sweep_pictures.draw_sweep(None, made)
    (axis,) = drawn[1].axes
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("α", "GSM8K")
    assert curves(axis).keys() == {"scd beta=0.5", "autoregressive", "speculative"}


def swept_report(method, **options):
    """A row of ``method`` for each combination of the options' values, and plain decoding's."""
    rows = [row("autoregressive")]
    for number, values in enumerate(itertools.product(*options.values())):
        chosen = dict(zip(options, values, strict=True))
        one = row(method, speed=40.0 + number, options=chosen, acceptance_rate=0.6)
        rows.append(one | {f"expected_at_{cost:g}": 2 - cost for cost in COSTS})
    plot = {"tokens_per_second": "tokens/s"}
    swept = {"sweep": list(options), "plot": plot, "cost": COSTS}
    return {"target": "P", "data": "d", "rows": rows, "beside": []} | swept


@pytest.mark.parametrize(
    ("method", "option", "values", "labels"),
    [
        ("speculative", "gamma", ["auto", 4, 2], ["2", "4", "auto"]),
        ("beam", "early_stopping", [True, "never", False], ["False", "True", "never"]),
        ("specinfer", "branching", [(2, 1), "auto", (2,)], ["auto", "(2,)", "(2, 1)"]),
        ("speculative", "stop", [0.5, None], ["0.5", "None"]),
    ],
)
def test_values_of_several_kinds_stand_side_by_side(drawn, method, option, values, labels):
    """Pictures come after all measuring, so a value that breaks one costs its picture."""
    made = swept_report(method, **{option: values})
    sweep_pictures.draw_sweep(None, made)
    (axis,) = drawn[0].axes
    assert [text.get_text() for text in axis.get_xticklabels()] == labels
    speeds = {str(value): 40.0 + number for number, value in enumerate(values)}
    (curve,) = (line for name, line in curves(axis).items() if name == method)
    assert curve.get_xdata().tolist() == list(range(len(values)))
    assert curve.get_ydata().tolist() == [speeds[label] for label in labels]

    pictures.draw_costs(None, made)
    colors = {name: line.get_color() for name, line in curves(drawn[1].axes[0]).items()}
    assert len(set(colors.values())) >= len(values)

    sweep_pictures.draw_sweep(None, swept_report(method, **{option: values, "k": [1, 2]}))
    surface = drawn[2].axes[0]
    assert [text.get_text() for text in surface.get_xticklabels()] == labels
    pictures.draw_costs(None, swept_report(method, **{"k": [1, 2], option: values}))


def test_values_of_another_report_are_those_of_its_json(drawn):
    """A report that is read back has lists where its run had tuples."""
    made = swept_report("specinfer", branching=[(2, 1), (4, 1)])
    other = json.loads(json.dumps(made | {"data": "e"}))
    sweep_pictures.draw_sweep(None, made | {"beside": [other]})
    lines = curves(drawn[0].axes[0])
    assert lines["specinfer, e"].get_xdata().tolist() == [0, 1]
    assert lines["specinfer, d"].get_xdata().tolist() == [0, 1]


def test_the_expected_acceleration_marks_the_preset(drawn):
    """SCD, Figures 1 and 4: triangles at the chosen α and β, dots for speculative decoding."""
    pictures.draw_costs(None, contrastive_report())
    (axis,) = drawn[0].axes
    assert axis.get_ylabel() == "expected acceleration" and axis.get_xlabel().startswith("c, ")
    lines = {name: line for name, line in curves(axis).items() if "λ" in name}
    assert len(lines) == 5
    marked = [name for name, line in lines.items() if line.get_marker() == "^"]
    assert marked == [name for name in lines if "alpha=0.5 beta=1.0" in name] and len(marked) == 1
    assert [name for name, line in lines.items() if line.get_linestyle() == ":"] == [
        "speculative, sampled, λ = 0.60"
    ]


def test_entropies_are_bars_of_both_models(drawn):
    """SCD, Figure 2: accepted beside rejected tokens, with error bars."""
    outcomes = ("accepted", "rejected")
    keys = [f"{model}_{outcome}" for model in ("target", "draft") for outcome in outcomes]
    heights = dict(zip(keys, (0.25, 1.0, 0.5, 1.5), strict=True))
    measured = row("scd", 0.7, pm=dict.fromkeys(keys, 0.125), **heights)
    pictures.draw_entropies(None, {"rows": [row("autoregressive", 0.7), measured]})
    (axis,) = drawn[0].axes
    assert axis.get_ylabel() == "mean entropy, nats"
    assert [text.get_text() for text in axis.get_xticklabels()] == [
        "target (expert)",
        "draft (amateur)",
    ]
    accepted, rejected = (c for c in axis.containers if hasattr(c, "patches"))
    assert [bar.get_height() for bar in accepted] == [0.25, 0.5]
    assert [bar.get_height() for bar in rejected] == [1.0, 1.5]
    assert accepted.errorbar is not None and rejected.errorbar is not None
    (legend,) = drawn[0].legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "accepted tokens",
        "rejected tokens",
    ]


def test_the_fastest_of_a_sweep_stands_beside_plain_decoding():
    """SDSAT, Table 4: of all k the fastest, per target, temperature and file."""
    made = sdsat_report("humaneval", (0.0, 0.2)) | {"beside": [sdsat_report("infilling", off=1.0)]}
    rows = report.fastest(made)
    keys = (
        "label",
        "target",
        "temperature",
        "data",
        "plain_tokens_per_second",
        "tokens_per_second",
    )
    assert [tuple(one[key] for key in keys) for one in rows] == [
        ("sdsat k=13", "runs/S", 0.0, "humaneval", 20.0, 53.0),
        ("sdsat k=13", "runs/S", 0.2, "humaneval", 20.0, 53.0),
        ("sdsat k=13", "runs/S", 0.0, "infilling", 20.0, 52.0),
    ]


def test_plotted_columns_are_named_by_their_heads():
    metrics = {"gsm8k": "GSM8K", "exact_match_py": "exact match, py"}
    assert report.plotted((), metrics) == {
        "speedup": "speedup",
        "block_efficiency": "tokens/round",
        "perplexity": "perplexity",
        **metrics,
    }
    assert report.plotted([*HEADS.values(), "GSM8K"], metrics) == HEADS | {"gsm8k": "GSM8K"}
    with pytest.raises(OptionError, match=r"--plot loss: no such column; choose some of .*GSM8K"):
        report.plotted(["loss"], metrics)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "No such file"),
        ("[", "not a report"),
        ("[]", "not a report"),
        ('{"target": "t", "data": "d", "sweep": ["k"], "rows": [{}]}', "not a report"),
        ('{"target": "t", "data": "d", "sweep": ["gamma"], "rows": []}', "it swept gamma"),
    ],
)
def test_a_directory_without_such_a_report_is_one_line(tmp_path, text, says):
    if text is not None:
        (tmp_path / "bench.json").write_text(text)
    with pytest.raises(OptionError, match=says) as raised:
        report.read_beside(str(tmp_path), ["k"])
    assert str(tmp_path) in str(raised.value) and "\n" not in str(raised.value)
