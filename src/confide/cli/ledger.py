"""`confide ledger`: what a data set has been charged, and the ceiling on it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from confide import rules
from confide.cli import fit_options as given
from confide.cli import options
from confide.cli.help_texts import teach
from confide.cli.options import PRIVACY, AdjacencyName, Delta, Json
from confide.cli.output import emit_json, one_line, output
from confide.errors import CommandError, UnsupportedEvents
from confide.wording import delta as shown_delta
from confide.wording import epsilon as epsilon_shown
from confide.wording import remaining

if TYPE_CHECKING:
    from confide.privacy.ledger import Head, Ledger, Limit

SHOW_EXAMPLE = "confide ledger show budget.db"
LIMIT_EXAMPLE = "confide ledger limit budget.db --epsilon 3 --delta 1e-5"
HEAD_EXAMPLE = "confide ledger head budget.db"
VERIFY_EXAMPLE = "confide ledger verify budget.db --head 12:9f86d081... \\\n  --witness /elsewhere/witness"
REPORT_EXAMPLE = "confide ledger report budget.db --out budget.html"
KEY_EXAMPLE = "confide ledger key curator.key"

File = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="The ledger: a file such as budget.db, or a server, postgresql://user@host/database.",
        show_default=False,
    ),
]
NotedHead = Annotated[
    str | None,
    typer.Option(
        "--head",
        metavar="COUNT:HASH",
        help="A head that was noted before, by `ledger head`; or a run's folder, which keeps one. It must still hold.",
        show_default=False,
    ),
]
WitnessFile = Annotated[
    Path | None,
    typer.Option("--witness", metavar="FILE", help="The witness file, whose heads it must hold.", show_default=False),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--key", metavar="FILE", help="The curator's key, which the witness is signed with.", show_default=False
    ),
]
Passphrase = Annotated[
    Path | None,
    typer.Option(
        "--passphrase-file",
        metavar="FILE",
        help="Holds the passphrase without which this ceiling cannot be loosened again.",
        rich_help_panel=PRIVACY,
        show_default=False,
    ),
]
CeilingKey = Annotated[
    Path | None,
    typer.Option(
        "--key",
        metavar="FILE",
        help="The ceiling's own key, instead of a passphrase. Left out: LEDGER.limit-key, made with the first ceiling.",
        rich_help_panel=PRIVACY,
        show_default=False,
    ),
]
ShownDelta = Annotated[
    float | None,
    typer.Option(
        "--delta",
        metavar="D",
        help=f"Delta at which epsilon is shown; the ceiling's own if there is a ceiling, else {rules.DELTA:g}.",
        rich_help_panel=PRIVACY,
        show_default=False,
    ),
]
PageOut = Annotated[
    Path,
    typer.Option("--out", metavar="FILE", help="The page, a new .html file.", show_default=False),
]
Ceiling = Annotated[
    float,
    typer.Option(
        "--epsilon",
        metavar="E",
        help="Ceiling for each data set; a charge that would pass it is refused.",
        rich_help_panel=PRIVACY,
        show_default=False,
    ),
]


def show(file: File, delta: ShownDelta = None, as_json: Json = False) -> None:
    """List what was charged, what it adds up to and what remains."""
    from confide.privacy.ledger import Ledger, for_reading

    if delta is not None:
        options.delta(delta)
    _check_exists(file)
    with for_reading(file) as readable, Ledger(readable) as ledger:
        values = ledger_values(ledger, file, delta)
    if as_json:
        emit_json(values)
        return
    _show(output(), values)


def report(file: File, out: PageOut, delta: ShownDelta = None, as_json: Json = False) -> None:
    """Write a page about a ledger: budgets by data set, history, what remains, heads of the chain.

    The page stands alone: it loads nothing and runs no script.
    """
    from confide.cli.paths import check_page
    from confide.privacy.ledger import Ledger, for_reading
    from confide.privacy.ledger.places import is_server
    from confide.report.ledger_page import render_ledger

    if delta is not None:
        options.delta(delta)
    check_page("--out", out)
    _check_exists(file)
    with for_reading(file) as readable, Ledger(readable) as ledger:
        place = "a server" if is_server(file) else Path(file).name
        page = render_ledger(ledger, place, rules.DELTA if delta is None else delta)
    out.write_text(page, encoding="utf-8")
    if as_json:
        emit_json({"ledger": str(file), "out": str(out)})
        return
    output().print(f"Written: {escape(one_line(str(out)))}", soft_wrap=True)


def limit(
    file: File,
    epsilon: Ceiling,
    delta: Delta,
    adjacency: AdjacencyName = rules.ADJACENCY,
    passphrase_file: Passphrase = None,
    key: CeilingKey = None,
    who: given.Who = None,
    as_json: Json = False,
) -> None:
    """Set the ceiling for each data set of a ledger; the ledger is made if it is new.

    The ceiling may be lowered by everybody who can write to the ledger, and raised with its own passphrase or key only.
    Every change is written down and stays visible.
    """
    from confide.data.fingerprint import read_key
    from confide.privacy.ledger import Ledger, Limit
    from confide.privacy.ledger.keys import passphrase_of

    ceiling = Limit(options.epsilon(epsilon), options.delta(delta), options.adjacency(adjacency))
    if key is not None and passphrase_file is not None:
        raise CommandError(f"--key={key} and --passphrase-file={passphrase_file}: give one of the two")
    passphrase = _passphrase(passphrase_file) if key is None else passphrase_of(read_key(key))
    with Ledger(file, who=who) as ledger:
        made = None
        if passphrase is None:
            passphrase, made = _own_key(ledger, ceiling)
        ledger.limit(ceiling.epsilon, ceiling.delta, ceiling.adjacency, passphrase=passphrase)
        values = ledger_values(ledger, file, None)
    if as_json:
        emit_json(values)
        return
    output().print(f"{escape(one_line(str(file)))}: {_ceiling_words(values['limit'])}", soft_wrap=True)
    if made is not None:
        shown = escape(one_line(str(made)))
        output().print(f"It is raised with {shown} only: keep that where analysts cannot read it.", soft_wrap=True)


def _own_key(ledger: Ledger, ceiling: Limit) -> tuple[str | None, Path | None]:
    """The ceiling's key at its usual place, and the place if it was made just now."""
    from confide.data.fingerprint import make_key, read_key
    from confide.privacy.ledger.keys import passphrase_of

    place, before = ledger.records.limit_key_place, ledger.ceiling
    if before is not None and (ceiling.within(before) or not place.exists()):
        return None, None
    made = None if place.exists() else place
    if made is not None:
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        make_key(place)
    return passphrase_of(read_key(place)), made


def head(file: File, as_json: Json = False) -> None:
    """Print the head of a ledger's chain: note it elsewhere, and `ledger verify` knows whether it still holds."""
    from confide.privacy.ledger import Ledger, for_reading

    _check_exists(file)
    with for_reading(file) as readable, Ledger(readable) as ledger:
        found = ledger.head
    if as_json:
        emit_json({"ledger": str(file), "count": found.count, "hash": found.hash})
        return
    output().print(str(found), soft_wrap=True, highlight=False)


def verify(
    file: File,
    head: NotedHead = None,
    witness: WitnessFile = None,
    key: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Read a ledger from its first entry to its last, and hold it against what was noted elsewhere.

    Finds entries that were changed, removed or put in another order. With a head or a witness it also finds an older
    copy in the ledger's place, a cut end, a chain computed anew and a fork. Exits with 2 if anything is wrong.
    """
    from confide.data.fingerprint import read_key
    from confide.privacy.ledger import Ledger, for_reading

    _check_exists(file)
    if witness is not None and not witness.exists():
        raise CommandError(f"--witness={witness}: no such file")
    noted = None if head is None else _noted(head)
    secret = None if key is None else read_key(key)
    with for_reading(file) as readable, Ledger(readable, witness=witness, key=secret) as ledger:
        found = ledger.verify(noted, sums=True)
    if as_json:
        emit_json({"ledger": str(file), "count": found.count, "hash": found.hash, "holds": True})
        return
    noted_by = [word for word, given in (("the noted head", head), ("the witness", witness)) if given]
    agreed = f"; {' and '.join(noted_by)} {'agrees' if len(noted_by) == 1 else 'agree'}" if noted_by else ""
    output().print(f"{found.count} entries, all in their place{agreed}.", soft_wrap=True)
    output().print(f"Head: {found}", soft_wrap=True, highlight=False)


def key(file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file.", show_default=False)]) -> None:
    """Make a curator's key: it signs heads and hides the sketches by which copies of a data set are recognised."""
    from confide.data.fingerprint import make_key

    make_key(file)
    output().print(f"{escape(one_line(str(file)))}: made; keep it secret, and keep it.", soft_wrap=True)


def _check_exists(file: Path) -> None:
    from confide.privacy.ledger.places import is_server

    if not is_server(file) and not file.exists():
        raise CommandError(f"{file}: no such ledger; `confide fit --ledger` or `confide ledger limit` makes one")


def _noted(head: str) -> Head:
    """The head itself, or the one that a run's folder or its record holds."""
    from confide.privacy.ledger import Head

    path = Path(head)
    record = path / "run.json" if path.is_dir() else path
    if not record.is_file():
        return Head.read(head)
    try:
        found = json.loads(record.read_text("utf-8"))["ledger"]["head"]
        return Head.read(f"{found['count']}:{found['hash']}")
    except (OSError, ValueError, KeyError, TypeError):
        raise CommandError(f"--head={head}: holds no head of a ledger; the run was made without one") from None


def _passphrase(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        return file.read_text("utf-8").splitlines()[0]
    except (OSError, UnicodeDecodeError, IndexError):
        raise CommandError(
            f"--passphrase-file={file}: must be a text file whose first line is the passphrase"
        ) from None


def ledger_values(ledger: Ledger, file: Path, delta: float | None) -> dict[str, Any]:
    """Everything that the ledger says, ready for JSON."""
    ceiling = ledger.ceiling
    at = delta if delta is not None else rules.DELTA if ceiling is None else ceiling.delta
    return {
        "ledger": str(file),
        "head": vars(ledger.head),
        "limit": None if ceiling is None else vars(ceiling),
        "delta": at,
        "datasets": {name: _dataset_values(ledger, name, at) for name in ledger.datasets()},
        "entries": ledger.to_rows(at, None if ceiling is None else ceiling.adjacency),
    }


def _dataset_values(ledger: Ledger, name: str, delta: float) -> dict[str, Any]:
    """What it costs as one plan, and what its filter has taken of the ceiling."""
    try:
        spent, standing = ledger.spent(delta, name), ledger.standing(name)
    except UnsupportedEvents:
        return {"epsilon": None, "remaining": None if ledger.ceiling is None else 0.0}
    values = {"epsilon": spent, "plans": standing.plans, "remaining": None, "proven": standing.sentence()}
    if standing.limit is not None:
        taken = None if math.isinf(standing.epsilon) else standing.epsilon
        values |= {"remaining": standing.remaining, "filter": standing.by, "filter_epsilon": taken}
    return values | {"assumptions": list(standing.assumptions())}


def _show(console: Console, values: dict[str, Any]) -> None:
    if not values["entries"]:
        console.print("No charges yet.")
    else:
        console.print(_entry_table(values["entries"]))
    console.print()
    console.print(_ceiling_words(values["limit"]))
    for name, sums in values["datasets"].items():
        console.print(_remaining_words(name, sums, values["limit"], values["delta"]))
        for line in (
            sums.get("proven"),
            *(f"This rests on your word that {one}." for one in sums.get("assumptions", ())),
        ):
            if line:
                console.print(line, highlight=False)
    console.print("Head: {count}:{hash}".format(**values["head"]), soft_wrap=True, highlight=False)


def _entry_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("time (UTC)", no_wrap=True)
    table.add_column("purpose", overflow="fold")
    table.add_column("data set", overflow="fold")
    table.add_column("event")
    table.add_column("by, with version", overflow="fold")
    table.add_column("epsilon\nso far", justify="right", no_wrap=True)
    for row in rows:
        so_far = row["epsilon"]
        table.add_row(
            escape(row["time"][:16].replace("T", " ")),
            escape(one_line(row["kind"] if row["kind"] == "limit" else row["purpose"] or row["kind"])),
            escape(one_line("all" if row["kind"] == "limit" else row["dataset"])),
            escape(one_line(row["event"])),
            escape(one_line(f"{row['who'] or '(not named)'}, {row['version']}" if row["version"] else row["who"])),
            "" if so_far is None else epsilon_shown(so_far),
        )
    return table


def _ceiling_words(ceiling: dict[str, Any] | None) -> str:
    if ceiling is None:
        return "No ceiling; set one with: confide ledger limit FILE --epsilon E --delta D"
    words = "epsilon {epsilon:g} at delta {delta:g}, {adjacency}".format(**ceiling)
    return f"Ceiling for each data set: {words}."


def _remaining_words(name: str, sums: dict[str, Any], ceiling: dict[str, Any] | None, delta: float) -> str:
    from confide.privacy.filters import FIXED

    spent = "no sound bound" if sums["epsilon"] is None else epsilon_shown(sums["epsilon"])
    left = "" if ceiling is None else f", {remaining(sums['remaining'])} remains"
    if sums.get("filter", FIXED) != FIXED and sums["filter_epsilon"] is not None:
        spent += " if all was fixed in advance"
        left = f"; {epsilon_shown(sums['filter_epsilon'])} by the {sums['filter']} filter{left}"
    shown = escape(one_line(name)) if name else "(unnamed)"
    return f"[bold]{shown}[/bold]: epsilon {spent} spent at delta {shown_delta(delta)}{left}."


def register(app: Any) -> None:
    group = typer.Typer(help="Show what was spent, set a ceiling on it, check it.", rich_markup_mode=None)
    teach(group, show, [SHOW_EXAMPLE])
    teach(group, limit, [LIMIT_EXAMPLE])
    teach(group, report, [REPORT_EXAMPLE])
    teach(group, head, [HEAD_EXAMPLE])
    teach(group, verify, [VERIFY_EXAMPLE])
    teach(group, key, [KEY_EXAMPLE])
    app.add_typer(group, name="ledger")
