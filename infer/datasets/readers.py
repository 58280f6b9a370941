"""A reader per dataset: its published rows to entries in the format of ``--prompts``.

An entry holds what the row holds, for metrics, and over it what decoding reads:

* ``prompt``, or ``prefix`` and ``suffix`` of a ``middle``; ``messages``, which ``--chat`` takes;
* ``references``: texts that a completion is compared with;
* ``first_tokens``: the prompt is cut after so many; without references the rest is the reference;
* ``stop``: texts that end a completion; ``concepts``: what it should hold.

The prompts are those of the papers' experiments, or of the dataset's own; Spider's two examples
are ours, on a schema of ours, in the form of the paper's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from infer.datasets.files import Row, read_rows
from infer.formats import COMMONGEN, TURN, before_answer

# Where a completion of a function is over: the next top-level statement (Chen et al. 2021, §2.1).
HUMANEVAL_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
# A whole function was asked for, so a second one may help it.
MBPP_STOPS = ("\nclass", "\nassert", '\n"""', "\nprint", "\nif")
SQL = """[INST] <<SYS>> You are a SQL expert. You need to write the correct SQL based on the user \
question and database schemas. Below are some examples <</SYS>>
Example 1
Schema:
Table boat, columns = [*,boat_ID,name,berth,length]
Table trip, columns = [*,trip_ID,boat_ID,day]
Foreign_keys = [trip.boat_ID = boat.boat_ID]
Question: "How many boats are longer than 9 ?"
SQL: SELECT count(*) FROM boat WHERE length  >  9;

Example 2
Schema:
Table boat, columns = [*,boat_ID,name,berth,length]
Table trip, columns = [*,trip_ID,boat_ID,day]
Foreign_keys = [trip.boat_ID = boat.boat_ID]
Question: "Which boats made a trip on a Monday ?"
SQL: SELECT DISTINCT T1.name FROM boat AS T1 JOIN trip AS T2 ON T1.boat_ID  =  T2.boat_ID \
WHERE T2.day  =  'Monday';

"""
Entry = dict[str, Any]


def wikitext(rows: Iterable[Row], path: Path) -> Iterator[Entry]:
    """A paragraph per row; headings and empty rows are left out."""
    for row in rows:
        text = row["text"].strip()
        if text and not text.startswith("="):
            yield {"prompt": text, "first_tokens": 32}


def gsm8k(rows: Iterable[Row], path: Path) -> Iterator[Entry]:
    for row in rows:
        prompt = f"Question: {row['question']}\nAnswer:"
        yield row | {"prompt": prompt, "references": [row["answer"]]}


def humaneval(rows: Iterable[Row], path: Path) -> Iterator[Entry]:
    for row in rows:
        references = [row["canonical_solution"]]
        yield row | {"references": references, "stop": list(HUMANEVAL_STOPS)}


def humaneval_x(rows: Iterable[Row], path: Path) -> Iterator[Entry]:
    """Other languages: a completion ends where the model ends it."""
    for row in rows:
        yield row | {"references": [row["canonical_solution"]]}


def infilling(rows: Iterable[Row], path: Path) -> Iterator[Entry]:
    """Suffix, prefix, middle: the order that SDSAT is evaluated in."""
    for row in rows:
        middle = row["canonical_solution"]
        ours = {"prefix": row["prompt"], "middle": middle, "references": [middle], "order": "spm"}
        yield row | ours


def mbpp(rows: Iterable[Row], path: Path) -> Iterator[Entry]:
    """Zero-shot: the task and its tests as a docstring, judged in HumanEval's form."""
    for row in rows:
        task, tests = row.get("text") or row["prompt"], row["test_list"]
        defined = re.findall(r"^def (\w+)", row["code"], flags=re.M)
        name = next(name for name in reversed(defined) if re.search(rf"\b{name}\b", tests[0]))
        setup = [*row.get("test_imports", []), row.get("test_setup_code", "")]
        body = [f"{name} = candidate", *"\n".join(setup).splitlines(), *tests]
        yield row | {
            "prompt": f'"""\n{task}\n' + "\n".join(tests) + '\n"""\n',
            "test": "def check(candidate):\n" + "".join(f"    {line}\n" for line in body),
            "entry_point": name,
            "references": [row["code"]],
            "stop": list(MBPP_STOPS),
        }


def multipl_e(rows: Iterable[Row], path: Path) -> Iterator[Entry]:
    for row in rows:
        yield row | {"id": row["name"], "stop": row["stop_tokens"]}


def alpaca_eval(rows: Iterable[Row], path: Path) -> Iterator[Entry]:
    """The reference is the baseline's answer, which a judge compares with."""
    for row in rows:
        yield row | {"prompt": row["instruction"], "references": [row["output"]]}


def cnn_dailymail(rows: Iterable[Row], path: Path) -> Iterator[Entry]:
    for row in rows:
        yield row | {
            "prompt": f"[INST] <<SYS>> Please Summarize <</SYS>>{row['article']}[/INST]",
            "first_tokens": 512,
            "references": [row["highlights"]],
        }


def spider(rows: Iterable[Row], path: Path) -> Iterator[Entry]:
    """Schemas come from tables.json, which is published beside the questions."""
    tables = {row["db_id"]: row for row in read_rows(str(path.parent / "tables.json"))}
    for row in rows:
        name = row["db_id"]
        asked = f"Schema:\n{schema(tables[name])}\nQuestion: {row['question']}\nSQL:"
        database = path.parent / "database" / name / f"{name}.sqlite"
        ours = {"prompt": SQL + asked, "first_tokens": 1024, "references": [row["query"]]}
        yield row | ours | {"database": str(database)}


def schema(tables: Row) -> str:
    """A database's tables, their columns and foreign keys, a line each."""
    names, columns = tables["table_names_original"], tables["column_names_original"]
    lines = []
    for i, name in enumerate(names):
        listed = ",".join(["*", *(column for table, column in columns if table == i)])
        lines.append(f"Table {name}, columns = [{listed}]")
    full = [f"{names[table]}.{column}" for table, column in columns]
    keys = ",".join(f"{full[a]} = {full[b]}" for a, b in tables["foreign_keys"])
    return "\n".join([*lines, f"Foreign_keys = [{keys}]"])


def chatgpt_prompts(rows: Iterable[Row], path: Path) -> Iterator[Entry]:
    for row in rows:
        ours = {"prompt": row["human_prompt"], "references": [row["chatgpt_response"]]}
        yield row | ours | {"first_tokens": 512}


def chatalpaca(rows: Iterable[Row], path: Path) -> Iterator[Entry]:
    """Every answer of a conversation, asked for with all that precedes it."""
    roles = {"human": "user", "gpt": "assistant"}
    for row in rows:
        turns = [
            {"role": roles[turn["from"]], "content": turn["value"]} for turn in row["conversations"]
        ]
        for at, turn in enumerate(turns):
            if turn["role"] == "assistant" and at:
                yield {
                    "id": f"{row.get('id', '')}#{at}",
                    "prompt": "".join(f"{turn['content']}\n" for turn in turns[:at]),
                    "messages": turns[:at],
                    "references": [turn["content"]],
                }


def mt_bench(rows: Iterable[Row], path: Path) -> Iterator[Entry]:
    """A question's first turn, and its second, which follows an answer to the first."""
    for row in rows:
        turns, references = row.get("turns", row.get("prompt")), row.get("reference") or []
        name = row.get("question_id", row.get("prompt_id"))
        for at, said in enumerate(turns):
            yield row | {
                "id": f"{name}#{at + 1}",
                "prompt": said,
                "turns": turns,
                "turn": at + 1,
                "references": [text for text in references[at : at + 1] if text],
            }


def commongen(rows: Iterable[Row], path: Path) -> Iterator[Entry]:
    """A set of concepts with all its sentences; the file has a row per sentence, or per set."""
    sets: dict[str, list[str]] = {}
    for row in rows:
        concepts = row.get("concepts") or row["concept_set"].split("#")
        sentences = row["scene"] if "scene" in row else [row["target"]]
        sets.setdefault(json.dumps(concepts), []).extend(
            sentence for sentence in sentences if sentence
        )
    for words, sentences in sets.items():
        concepts = json.loads(words)
        yield {
            "prompt": COMMONGEN.format(words=", ".join(concepts)),
            "concepts": concepts,
            "references": sentences,
            "stop": ["\n"],
        }


def hh_rlhf(rows: Iterable[Row], path: Path) -> Iterator[Entry]:
    """A conversation up to the assistant's last turn."""
    mark = "|".join(re.escape(TURN.format(name)) for name in ("Human", "Assistant"))
    for row in rows:
        said = [part for part in re.split(f"({mark})", row["chosen"]) if part]
        roles = ["user" if "Human" in turn else "assistant" for turn in said[::2]]
        messages = [
            {"role": role, "content": text.strip()}
            for role, text in zip(roles, said[1::2], strict=True)
        ]
        yield {
            "prompt": before_answer(row["chosen"]),
            "messages": messages[:-1],
            "references": [messages[-1]["content"]],
        }
