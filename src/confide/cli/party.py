"""`confide party`: an owner's records behind a socket, for fits over several owners."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from confide.cli import fit_options as given
from confide.cli import options, party_fit
from confide.cli.help_texts import teach
from confide.cli.options import DATA, PRIVACY, Json
from confide.cli.output import emit_json, one_line, output, remarks
from confide.cli.paths import check_ledger
from confide.errors import CommandError

SERVE_EXAMPLE = (
    "confide party serve data.csv --bounds facts.toml --ledger own.db \\\n  --socket party.sock --least-noise 1.5"
)
KEY_EXAMPLE = "confide party key north.key"
SOCKETS = "Socket"

Table = Annotated[
    str,
    typer.Argument(
        metavar="DATA", help="The owner's table (.csv, .csv.gz, .parquet) with a header.", show_default=False
    ),
]

Bounds = Annotated[
    Path,
    typer.Option(
        "--bounds",
        "--facts",
        metavar="FILE.toml",
        help="The public facts: range or categories of each column, classes, a nominal number of records. All parties "
        "use the same ones, but for the number.",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
Ledger = Annotated[
    Path,
    typer.Option(
        "--ledger",
        metavar="FILE",
        help="The owner's own ledger. Its ceiling is the party's ceiling: set one with `confide ledger limit`.",
        rich_help_panel=PRIVACY,
        show_default=False,
    ),
]
LeastNoise = Annotated[
    float,
    typer.Option(
        "--least-noise",
        metavar="Z",
        help="Floor of the noise multiplier. A server that asks for less is refused, and nothing is spent.",
        rich_help_panel=PRIVACY,
        show_default=False,
    ),
]
Socket = Annotated[
    Path,
    typer.Option(
        "--socket",
        metavar="PATH",
        help="Where to listen: a Unix socket, which this user alone can open.",
        rich_help_panel=SOCKETS,
        show_default=False,
    ),
]
Key = Annotated[
    Path | None,
    typer.Option(
        "--key",
        metavar="FILE",
        help="A key shared with the server, from `confide ledger key`: nobody between them can change a message.",
        rich_help_panel=SOCKETS,
        show_default=False,
    ),
]

PeersFile = Annotated[
    Path | None,
    typer.Option(
        "--peers",
        metavar="FILE.toml",
        help="The parties of a secure sum with their public keys, and how many of them may be missing or collude; all "
        "owners have the same file. Left out: the party answers where nobody is trusted, and nowhere else.",
        rich_help_panel=PRIVACY,
        show_default=False,
    ),
]
Secret = Annotated[
    Path | None,
    typer.Option(
        "--secret",
        metavar="FILE",
        help="This party's secret key, from `confide party key`; needed with --peers.",
        rich_help_panel=PRIVACY,
        show_default=False,
    ),
]


def key(file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file.", show_default=False)]) -> None:
    """Make this party's secret key for secure sums, and show the public key that the other owners need.

    FILE stays with the owner. The public key goes into the peers file, which all owners have: exchange it among
    yourselves and not through the server, which could put its own in its place.
    """
    from confide.data.fingerprint import make_key, read_key
    from confide.federated.peers import public_of

    make_key(file)
    output().print(public_of(read_key(file)).hex(), soft_wrap=True)


def serve(
    data: Table,
    *,
    bounds: Bounds,
    ledger: Ledger,
    socket: Socket,
    least_noise: LeastNoise,
    target: given.Target = None,
    name: given.DataName = None,
    peers: PeersFile = None,
    secret: Secret = None,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Answer a server about private records, on the terms of their owner.

    The records stay in this process. It adds its own noise, at least the floor; it charges its own ledger before it
    reads, and the ledger's ceiling can refuse; it answers every step of a run once, also after a restart. What a server
    sends is JSON and tensors: a network and a method by their names and sizes, never code. Stop it with Ctrl+C: the
    same command goes on where it stood.
    """
    options.number("--least-noise", least_noise, above=0, most=1e6)
    check_ledger(ledger)
    from confide.data.fingerprint import read_key
    from confide.federated.peers import Peers
    from confide.federated.serving import PartyServer

    shared = b"" if key is None else read_key(key)
    if (peers is None) != (secret is None):
        raise CommandError("--peers and --secret: a secure sum needs both, and nothing else needs one of them")
    known = None if peers is None or secret is None else Peers.from_toml(peers, read_key(secret))
    party = _party(data, bounds, target, {"ledger": ledger, "key": shared, "peers": known}, name, least_noise)
    server = PartyServer(party, socket)
    _announce(data, socket, least_noise, party.ledger.ceiling, as_json)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: server.close())
    try:
        server.serve()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()


def _party(
    data: str, bounds: Path, target: str | None, terms: dict[str, Any], name: str | None, least_noise: float
) -> Any:
    from confide.cli.records import Records
    from confide.federated import Party
    from confide.workflow.facts import assumptions_of, settle
    from confide.workflow.request import Request

    records = Records(data, target, None, bounds, False, None, None, None)
    records.check()
    dataset = records.load()
    if dataset.schema is None or dataset.schema.records is None:
        raise CommandError(f"--bounds={bounds}: declares no number of records; add records = N, a public round number")
    settled = settle(Request(dataset.train, facts=dataset.schema))
    return Party(
        settled.x,
        settled.y,
        schema=settled.schema,
        name=name or dataset.name,
        least_noise=least_noise,
        **terms,
        vouched=assumptions_of(settled.schema),
    )


def _announce(data: str, socket: Path, least_noise: float, ceiling: Any, as_json: bool) -> None:
    """Say that the party is ready; whoever started it waits for this line."""
    words = "none" if ceiling is None else ceiling.words()
    if ceiling is None:
        remarks().print("No ceiling: servers can ask without end; set one with `confide ledger limit`.", soft_wrap=True)
    if as_json:
        emit_json({"data": data, "socket": str(socket), "least_noise": least_noise, "ceiling": words})
    else:
        output().print(f"Serving {one_line(data)} at {one_line(str(socket))}; ceiling: {words}.", soft_wrap=True)
    sys.stdout.flush()


def register(app: Any) -> None:
    group = typer.Typer(help="Learn from records of several owners who do not pool them.", rich_markup_mode=None)
    teach(group, serve, [SERVE_EXAMPLE])
    teach(group, party_fit.fit, [party_fit.EXAMPLE])
    teach(group, key, [KEY_EXAMPLE])
    app.add_typer(group, name="party")
