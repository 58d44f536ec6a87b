"""``collapipe deploy``: set up and run a federation on machines of several owners."""

import sys
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer
from typer import Argument, Option

from collapipe.deployment import LINK_PORT, PORT

app = typer.Typer(
    no_args_is_help=True,
    suggest_commands=False,
    help="Put up a federation of several owners.",
)
Folder = Annotated[Path, Argument(metavar="DIR", help="Folder that init has made.")]


@app.command()
def init(
    folder: Annotated[Path, Argument(metavar="DIR", help="A new folder.")],
    units: Annotated[str, Option(help="Their names, with commas: berlin,paris")],
    server: Annotated[str, Option(metavar="HOST", help="Name or address that units dial.")],
    port: Annotated[int, Option(min=1, max=65535, help="For units.")] = PORT,
    link_port: Annotated[int, Option(min=1, max=65535, help="For activations.")] = LINK_PORT,
) -> None:
    """Write the files for the server and each owner, with the commands in their order."""
    from collapipe.deployment.server_folder import create

    create(folder, [each.strip() for each in units.split(",")], server, port, link_port)
    print(f"authority    {folder / 'authority'}, for your eyes only: its key admits anybody")
    print(f"owners       {folder / 'units'}: send each its folder, nothing in it is secret")
    print(f"next         {folder / 'README.md'} has the commands in their order")


@app.command(context_settings={"allow_extra_args": True, "allow_interspersed_args": False})
def trial(
    context: typer.Context,
    units: Annotated[int, Option(min=1, help="How many.")] = 3,
    rows: Annotated[
        Path | None,
        Option(help="CSV, TSV, JSON or text for units to share; default: dates."),
    ] = None,
) -> None:
    """Start a server and its units on this machine, run a command on them, and remove them at the
    end: collapipe deploy trial --units 3 -- run"""
    from collapipe.cli.deploy.trial import trial

    raise typer.Exit(trial(units, rows, context.args, context.obj))


@app.command()
def serve(folder: Folder) -> None:
    """Run the federation's server, until Ctrl-C or SIGTERM."""
    from collapipe.deployment.server_folder import ServerFolder
    from collapipe.deployment.serving import serve

    serve(ServerFolder(folder.resolve()), superlink="server_app.guard")


@app.command()
def renew(folder: Folder) -> None:
    """Make the server's key and certificate anew, for the host in server.yaml."""
    from collapipe.deployment.server_folder import ServerFolder

    opened = ServerFolder(folder)
    opened.renew()
    print(f"certificate  for {opened.settings().host}: {opened.certificate}")
    print(f"next         start the server again: collapipe deploy serve {quote(str(folder))}")


@app.command()
def check(
    path: Annotated[Path, Argument(help="Folder of the server, or an owner's unit.yaml.")],
) -> None:
    """Check ports, certificates, clocks, versions, rows and devices; status 1 for any problem.

    Rows are read whole, each device of the inventory is asked, and a small model trains for a step.
    """
    from rich.console import Console

    from collapipe.cli.deploy.owner_check import check_owner
    from collapipe.deployment.checking import findings
    from collapipe.errors import printable
    from collapipe.formatting import print_lines
    from collapipe.owner_file import read_owner

    path = path.resolve()
    found = [*findings(path)]
    if path.is_file():
        found += check_owner(path, read_owner(path))
    console = Console()
    for each in found:
        result = each.found if each.error is None else f"PROBLEM: {each.error}"
        print_lines(console, [(each.what, printable(result))])
        if each.error is not None and each.way_out:
            print_lines(console, [("", f"→ {printable(each.way_out)}")])
    wrong = sum(each.error is not None for each in found)
    print(
        f"{wrong} of {len(found)} checks found a problem", file=sys.stderr if wrong else sys.stdout
    )
    raise typer.Exit(int(wrong > 0))
