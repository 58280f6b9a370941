"""One reader per dataset: turns published rows into entries in the format of ``--prompts``.

An entry has the fields of its row, which metrics read, and these, which decoding reads:

* ``prompt``, or ``prefix`` and ``suffix`` around a ``middle``. With ``--chat``, ``messages``.
* ``references``: texts that a completion is compared with.
* ``first_tokens``: cut the prompt after so many. Without references, the rest is the reference.
* ``stop``: texts that end a completion. ``concepts``: words that it should contain.

The prompts are those of the papers' experiments, or of the dataset itself. Spider's prompt has two
examples in the form of the paper's, on a schema made for them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from infer.datasets.files import Row, read_rows
from infer.formats import COMMONGEN, TURN, before_answer

# A function ends at the next top-level statement (Chen et al. 2021, §3.2).
HUMANEVAL_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
# MBPP asks for a whole function; it may be followed by a helper, so "def" does not end it.
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
    """One prompt per paragraph; headings and empty rows are left out."""
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
    """HumanEval in other languages; without stop strings, the model ends a completion itself."""
    for row in rows:
        yield row | {"references": [row["canonical_solution"]]}


def infilling(rows: Iterable[Row], path: Path) -> Iterator[Entry]:
    """Infilling in the order suffix, prefix, middle, in which SDSAT is evaluated."""
    for row in rows:
        middle = row["canonical_solution"]
        yield row | {
            "prefix": row["prompt"],
            "middle": middle,
            "references": [middle],
            "order": "spm",
        }


def mbpp(rows: Iterable[Row], path: Path) -> Iterator[Entry]:
    """Zero-shot: the task and its tests as a docstring, tested as in HumanEval."""
    for row in rows:
        task = row.get("text") or row["prompt"]
        tests = row["test_list"]
        # Of several functions, the entry point is the last one that the first test calls.
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
    """The reference is the baseline's answer, to which a judge compares the completion."""
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
        question = f"Schema:\n{schema(tables[name])}\nQuestion: {row['question']}\nSQL:"
        database = path.parent / "database" / name / f"{name}.sqlite"
        yield row | {
            "prompt": SQL + question,
            "first_tokens": 1024,
            "references": [row["query"]],
            "database": str(database),
        }


def schema(tables: Row) -> str:
    """A database's tables and columns, one table per line, and then its foreign keys."""
    names = tables["table_names_original"]
    columns = tables["column_names_original"]  # pairs: number of the table, name
    lines = []
    for number, name in enumerate(names):
        listed = ["*", *(column for table, column in columns if table == number)]
        lines.append(f"Table {name}, columns = [{','.join(listed)}]")

    full_names = [f"{names[table]}.{column}" for table, column in columns]
    keys = ",".join(f"{full_names[a]} = {full_names[b]}" for a, b in tables["foreign_keys"])
    return "\n".join([*lines, f"Foreign_keys = [{keys}]"])


def chatgpt_prompts(rows: Iterable[Row], path: Path) -> Iterator[Entry]:
    for row in rows:
        yield row | {
            "prompt": row["human_prompt"],
            "references": [row["chatgpt_response"]],
            "first_tokens": 512,
        }


def chatalpaca(rows: Iterable[Row], path: Path) -> Iterator[Entry]:
    """One prompt per answer in a conversation: everything before the answer."""
    roles = {"human": "user", "gpt": "assistant"}
    for row in rows:
        turns = [
            {"role": roles[turn["from"]], "content": turn["value"]} for turn in row["conversations"]
        ]
        for number, turn in enumerate(turns):
            if turn["role"] != "assistant" or number == 0:
                continue
            before = turns[:number]
            yield {
                "id": f"{row.get('id', '')}#{number}",
                "prompt": "".join(f"{message['content']}\n" for message in before),
                "messages": before,
                "references": [turn["content"]],
            }


def mt_bench(rows: Iterable[Row], path: Path) -> Iterator[Entry]:
    """One prompt per turn of a question; a later turn follows answers to those before.

    Spec-Bench and SPEED-Bench have the same fields.
    """
    for row in rows:
        turns = row.get("turns", row.get("prompt"))
        references = row.get("reference") or []
        name = row.get("question_id", row.get("prompt_id"))
        for number, text in enumerate(turns):
            # Later turns may have no reference, or an empty one.
            reference = references[number : number + 1]
            yield row | {
                "id": f"{name}#{number + 1}",
                "prompt": text,
                "turns": turns,
                "turn": number + 1,
                "references": [text for text in reference if text],
            }


def commongen(rows: Iterable[Row], path: Path) -> Iterator[Entry]:
    """One prompt per set of concepts; a file has one row per sentence, or one per set."""
    sets: dict[str, list[str]] = {}  # by the concepts as JSON, because lists do not hash
    for row in rows:
        concepts = row.get("concepts") or row["concept_set"].split("#")
        sentences = row["scene"] if "scene" in row else [row["target"]]
        references = sets.setdefault(json.dumps(concepts), [])
        references += [sentence for sentence in sentences if sentence]

    for words, sentences in sets.items():
        concepts = json.loads(words)
        yield {
            "prompt": COMMONGEN.format(words=", ".join(concepts)),
            "concepts": concepts,
            "references": sentences,
            "stop": ["\n"],
        }


def hh_rlhf(rows: Iterable[Row], path: Path) -> Iterator[Entry]:
    """A conversation up to the assistant's last turn, which is the reference."""
    marks = "|".join(re.escape(TURN.format(name)) for name in ("Human", "Assistant"))
    for row in rows:
        # The marks alternate with the texts of the turns.
        parts = [part for part in re.split(f"({marks})", row["chosen"]) if part]
        messages = []
        for mark, text in zip(parts[::2], parts[1::2], strict=True):
            role = "user" if "Human" in mark else "assistant"
            messages.append({"role": role, "content": text.strip()})
        yield {
            "prompt": before_answer(row["chosen"]),
            "messages": messages[:-1],
            "references": [messages[-1]["content"]],
        }
