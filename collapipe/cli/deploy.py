"""``collapipe deploy``: a federation on machines of several owners."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from collapipe.deployment import LINK_PORT, PORT

app = typer.Typer(no_args_is_help=True, help="Put up a federation of several owners.")
Folder = Annotated[Path, Argument(metavar="DIR", help="Folder that init has made.")]


@app.command()
def init(
    folder: Annotated[Path, Argument(metavar="DIR", help="A new folder.")],
    units: Annotated[str, Option(help="Their names, with commas: berlin,paris")],
    server: Annotated[str, Option(metavar="HOST", help="Name or address that units dial.")],
    port: Annotated[int, Option(min=1, max=65535, help="For units.")] = PORT,
    link_port: Annotated[int, Option(min=1, max=65535, help="For activations.")] = LINK_PORT,
) -> None:
    """Write all that the server and each owner need, with the commands in their order."""
    from collapipe.deployment.server_folder import create

    create(folder, [each.strip() for each in units.split(",")], server, port, link_port)
    print(f"authority    {folder / 'authority'}, for your eyes only: its key admits anybody")
    print(f"owners       {folder / 'units'}: send each its folder, nothing in it is secret")
    print(f"next         {folder / 'README.md'} has the commands in their order")


@app.command()
def serve(folder: Folder) -> None:
    """Run the federation's server, until Ctrl-C or SIGTERM."""
    from collapipe.deployment.server_folder import ServerFolder
    from collapipe.deployment.serving import serve

    serve(ServerFolder(folder.resolve()))


@app.command()
def check(
    path: Annotated[Path, Argument(help="Folder of the server, or an owner's unit.yaml.")],
) -> None:
    """Try ports, certificates, clocks and versions; tell what is wrong; status 1 if anything is."""
    from collapipe.deployment.checking import findings
    from collapipe.errors import printable

    wrong = 0
    for each in findings(path.resolve()):
        if each.error is None:
            print(f"{each.what:12} {each.found}")
        else:
            wrong += 1
            print(f"error: {each.what}: {printable(each.error)}", file=sys.stderr)
    raise typer.Exit(int(wrong > 0))
