"""Generated pages are current, links lead to files, and figures exist and are small."""

import contextlib
import re
import sys

from specjax.registry import METHODS
from support.tools import DOCS, load

LARGEST = 60_000  # bytes of a figure


def test_methods_page_is_current():
    module = load("make_methods")
    assert module.PAGE.read_text(encoding="utf-8") == module.make_page()


def test_page_of_choice_is_current():
    module = load("make_choose")
    assert module.PAGE.read_text(encoding="utf-8") == module.make_page()


def test_overview_is_current():
    module = load("make_figures")
    others = [module.read(name) for name in module.SWEEPS]
    page = module.overview_page(module.read("overview"), others)
    assert module.OVERVIEW.read_text(encoding="utf-8") == page


def test_overview_says_what_its_report_says():
    """Products, draft lengths and missing methods are those of the report that is shown."""
    module = load("make_figures")
    report = module.read("overview")
    names = {True: "our CPU kernels", False: "XLA's products"}
    ours = report["cpu_kernels"]
    assert f"with {names[ours]}" in " ".join(module.overview_page(report, []).split())
    for row in [row for row in report["rows"] if row["method"] == "lookup"]:
        report["rows"].append(row | {"method": "suffix"})
    page = " ".join(module.overview_page(report | {"cpu_kernels": not ours}, [report]).split())
    assert "came to speeds" not in page  # the other run had other products
    assert f"with {names[not ours]}" in page
    assert "but γ = 10 for `lookup` and γ = 10 for `suffix`," in page
    assert "not measured" not in page and "`sdsat-single` (need a tuned target)." in page


def test_draft_lengths_are_fixed_for_methods_of_the_run_alone():
    """infer.bench refuses an option of a method that is not in its run."""
    fixed_lengths = load("make_figures").fixed_lengths
    assert fixed_lengths(["autoregressive", "lookup-mentored", "mentored"]) == []
    assert fixed_lengths(["lookup-mentored", "lookup"]) == ["--set", "lookup.gamma=10"]
    both = fixed_lengths(["lookup", "suffix"])
    assert both == ["--set", "lookup.gamma=10", "--set", "suffix.gamma=10"]


def test_smollm2_is_measured_again_run_by_run(monkeypatch, tmp_path):
    """A break costs the run that was not finished, and the next time all are measured."""
    monkeypatch.syspath_prepend(str(DOCS / "tools"))
    tool = load("make_smollm2")
    figures, unfinished = tmp_path / "figures", tmp_path / "runs" / "smollm2.json"
    for name, value in (("FIGURES", figures), ("UNFINISHED", unfinished)):
        monkeypatch.setattr(tool, name, value)
    for name in ("write_tables", "draw"):
        monkeypatch.setattr(tool, name, lambda *_: None)
    tool.write(figures / "smollm2.json", dict.fromkeys(tool.RUNS, "old"))
    asked = []

    def run(*argv, fails_at=None):
        def measure(args, name):
            if name == fails_at:
                raise KeyboardInterrupt
            asked.append(name)
            return "new"

        asked.clear()
        monkeypatch.setattr(tool, "measure", measure)
        monkeypatch.setattr(sys, "argv", ["make_smollm2.py", "TARGET", "PROMPTS", *argv])
        with contextlib.suppress(KeyboardInterrupt):
            tool.main()
        return asked, list(tool.read(figures / "smollm2.json").values())

    assert run() == ([], ["old"] * 6)
    assert run("--again", fails_at="code") == (["chat"], ["new", *["old"] * 5])
    assert run("--again") == (list(tool.RUNS[1:]), ["new"] * 6)
    assert run("--again")[0] == list(tool.RUNS)


def test_what_methods_need_in_words_is_what_they_refuse_without():
    module = load("make_methods")
    model = module._tiny()
    drafts = {"nothing": None, "a draft model": model, "a head": module._tiny_head(model)}
    for spec in METHODS.values():
        fits = {words for words, draft in drafts.items() if not module._refusal(spec, model, draft)}
        wanted = spec.needs.removesuffix(" and a reward").split(" or ")
        if spec.needs in ("nothing", "a reward"):
            wanted = list(drafts)
        if spec.needs == "a target tuned with SDSAT":
            wanted = []
        assert fits == set(wanted), spec.name


def test_links_between_files_lead_somewhere():
    pages = [*DOCS.rglob("*.md"), *DOCS.parent.glob("*.md"), *DOCS.parent.glob("specjax/**/*.md")]
    links = [(p, link) for p in pages for link in re.findall(r"\]\(([^)#]+)", p.read_text())]
    lost = [
        f"{p.name}: {link}"
        for p, link in links
        if "://" not in link and not (p.parent / link).exists()
    ]
    assert links and not lost


def test_lists_and_tables_look_the_same_on_the_site():
    """The site's Markdown nests a list by four spaces, and ends a table at an empty line alone."""
    wrong = []
    for page in [*DOCS.rglob("*.md"), *DOCS.parent.glob("*.md")]:
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        nested = re.findall(r"^ {1,3}(?:- |\d+\. |\|).*", text, re.M)
        after_a_table = re.findall(r"^ *\|.*\n((?! *\||<!--).+)", text, re.M)
        wrong += [f"{page.name}: {line}" for line in nested + after_a_table]
    assert not wrong


def test_figures_of_the_pages_exist_and_are_small():
    linked = {
        (page.parent / link).resolve()
        for page in (DOCS / "pages").glob("*.md")
        for link in re.findall(r"\]\((\.\./figures/[^)]+)\)", page.read_text())
    }
    assert linked and all(path.exists() for path in linked)
    figures = [path for path in linked if path.suffix == ".svg"]
    assert figures and all(path.stat().st_size < LARGEST for path in figures)
