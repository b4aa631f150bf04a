"""`confide facts`: a first draft of the public facts of a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from confide import rules
from confide.cli import options
from confide.cli.fit_options import DataName, Delta, LedgerFile, LedgerKey, Who
from confide.cli.help_texts import teach
from confide.cli.options import DATA, OUTPUT, PRIVACY, AdjacencyName, Json
from confide.cli.output import emit_json, for_this_command, one_line, output
from confide.cli.paths import ledger_by
from confide.errors import CommandError

EXAMPLES = (
    "confide facts train.csv --target income --numeric age,hours --out facts.toml",
    "confide facts train.csv --target income --epsilon 0.5 \\\n  --ledger budget.db --out facts.toml",
    "confide facts train.csv --target income --assume-public --out facts.toml",
)

Train = Annotated[
    Path, typer.Argument(metavar="TRAIN", help="A file (.csv, .csv.gz, .parquet) with a header.", show_default=False)
]
Target = Annotated[str, typer.Option(metavar="COLUMN", help="The column to predict.", rich_help_panel=DATA)]
Numeric = Annotated[
    str | None,
    typer.Option(metavar="A,B", help="Columns that hold numbers.", rich_help_panel=DATA, show_default=False),
]
Categorical = Annotated[
    str | None,
    typer.Option(metavar="A,B", help="Columns that hold categories.", rich_help_panel=DATA, show_default=False),
]
Ignore = Annotated[
    str | None, typer.Option(metavar="A,B", help="Columns to leave out.", rich_help_panel=DATA, show_default=False)
]
RecordCount = Annotated[
    int | None,
    typer.Option("--records", metavar="N", help="Public nominal number.", rich_help_panel=DATA, show_default=False),
]
TaskName = Annotated[
    str | None,
    typer.Option(
        "--task",
        metavar="NAME",
        help="classification, which is taken if this is left out, or regression.",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
AssumePublic = Annotated[
    bool,
    typer.Option(
        "--assume-public",
        metavar="",
        help="Read types, bounds, categories and classes off the data. The file and every report say so.",
        rich_help_panel=DATA,
    ),
]
Known = Annotated[
    Path | None,
    typer.Option(
        "--facts",
        metavar="FILE.toml",
        help="With --epsilon: what is declared already. It stays, and bounds that are far too wide are said.",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
Epsilon = Annotated[
    float | None,
    typer.Option(
        metavar="E",
        help="Learn what is left open from the records, for this budget: number, kinds, bounds, categories, classes.",
        rich_help_panel=PRIVACY,
        show_default=False,
    ),
]
Out = Annotated[Path, typer.Option(metavar="FILE.toml", help="A new file.", rich_help_panel=OUTPUT, show_default=False)]


def facts(
    train: Train,
    *,
    target: Target,
    out: Out,
    numeric: Numeric = None,
    categorical: Categorical = None,
    ignore: Ignore = None,
    records: RecordCount = None,
    task: TaskName = None,
    known: Known = None,
    assume_public: AssumePublic = False,
    epsilon: Epsilon = None,
    delta: Delta = rules.DELTA,
    adjacency: AdjacencyName = rules.ADJACENCY,
    ledger: LedgerFile = None,
    name: DataName = None,
    key: LedgerKey = None,
    who: Who = None,
    as_json: Json = False,
) -> None:
    """Draft the file of public facts of a table. Only the names of its columns are read.

    What depends on records (bounds, categories, classes) is left for you to declare. With --epsilon it is learnt from
    the records under that budget, which is charged before they are read: common values and bounds of the bulk, with
    noise. With --assume-public it is read off the data on your word that it is public. Either way the file says so, and
    every privacy statement made from it repeats it.
    """
    kind = options.task(task)
    if epsilon is None and (known is not None or ledger is not None or name is not None):
        raise CommandError(
            "--epsilon: missing; --facts, --ledger and --name are for facts that are learnt and paid for"
        )
    for_this_command(ledger_by(ledger, key, who))
    if epsilon is not None and assume_public:
        raise CommandError("--epsilon, --assume-public: facts are learnt privately or taken as public; give one")
    _check_out(out)
    if not train.is_file():
        raise CommandError(f"TRAIN={train}: no such file")
    from confide.data.draft import draft_text, header_of

    names = header_of(train)
    given = {"numeric": _names(numeric), "categorical": _names(categorical), "ignore": _names(ignore)}
    text = draft_text(names, target, regression=kind == "regression", records=records, **given)
    if assume_public:
        text = _read_off(train, target, given, records, kind)
    elif epsilon is not None:
        from confide.cli import learnt_facts

        wanted = learnt_facts.Wanted(train, target, kind or "classification", records, known, given)
        wanted.check(names)
        price = options.epsilon(epsilon), options.delta(delta, records), options.adjacency(adjacency)
        with options.named():
            learnt_facts.learn(wanted, names, price, ledger, name or train.name, out, as_json)
        return
    out.write_text(text, encoding="utf-8")
    if as_json:
        emit_json({"out": str(out), "columns": len(names), "assumed_public": assume_public})
        return
    output().print(f"Written: {escape(one_line(str(out)))}", soft_wrap=True)
    if assume_public:
        output().print("Its facts were read off the data on your word that they are public: they are not protected.")
    else:
        output().print("Nothing but the header was read: declare what stands behind a # from public knowledge.")


def _read_off(train: Path, target: str, given: dict[str, list[str]], records: int | None, task: Any) -> str:
    from confide.data import Schema, load_table
    from confide.data.draft import facts_text
    from confide.data.schema import Column

    named = [
        *(Column(name) for name in given["numeric"]),
        *(Column(name, "categorical") for name in given["categorical"]),
    ]
    declared = Schema(records=records, target=target, columns=named, ignore=given["ignore"])
    table = load_table(train, target, schema=declared)
    return facts_text(Schema.assume_public(table, declared=declared, task=task))


def _names(text: str | None) -> list[str]:
    return [] if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _check_out(out: Path) -> None:
    from confide.cli.paths import check_writable

    if out.suffix != ".toml":
        raise CommandError(f"--out={out}: facts are a .toml file; name one")
    if out.exists():
        raise CommandError(f"--out={out}: exists already; name a new file")
    check_writable("--out", out)
    if not out.absolute().parent.is_dir():
        raise CommandError(f"--out={out}: {out.absolute().parent} is not a directory; make it first")


def register(app: Any) -> None:
    teach(app, facts, EXAMPLES)
