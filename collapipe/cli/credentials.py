"""``collapipe credentials``: make authorities, request, sign and revoke certificates."""

import sys
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from collapipe.credentials.member import DAYS, Role
from collapipe.errors import ConfigError

if TYPE_CHECKING:
    from collapipe.credentials.bundle import Bundle

app = typer.Typer(
    no_args_is_help=True,
    suggest_commands=False,
    help="Manage access between machines by certificates.",
)
AuthorityPath = Annotated[Path, Argument(metavar="AUTHORITY", help="Folder that init has made.")]
Own = Annotated[Path, Argument(metavar="DIR", help="Folder of this member's credentials.")]
As = Annotated[
    Role | None,
    Option(help="Permitted uses of the certificate; default: unit in a federation, else device."),
]
Days = Annotated[int, Option(help="How long the certificate is valid.")]


@app.command()
def init(folder: Annotated[Path, Argument(metavar="DIR", help="A new folder.")]) -> None:
    """Make a cluster's authority, with credentials of the control unit."""
    from collapipe.credentials.authority import CONTROL_UNIT, create

    print(f"authority    {create(folder).fingerprint}")
    print(f"folder       {folder}, for your eyes only: authority.key admits anybody")
    print(f"credentials  {folder / CONTROL_UNIT}, of the control unit")


@app.command()
def request(
    folder: Own, name: Annotated[str, Option(help="The member's name, of a-z, 0-9 and -.")]
) -> None:
    """Make a key on this machine and a request for a certificate; with a key, renew."""
    from collapipe.credentials import credentials
    from collapipe.credentials.bundle import REQUEST
    from collapipe.credentials.keys import fingerprint

    print(f"fingerprint  {fingerprint(credentials.request(folder, name).public_key)}")
    print(f"request      {folder / REQUEST}")
    print(
        "next         bring it to the authority: collapipe credentials sign AUTHORITY request.pem"
    )


@app.command()
def sign(
    authority: AuthorityPath,
    request: Annotated[Path, Argument(metavar="REQUEST", help="request.pem of a member.")],
    role: As = None,
    days: Days = DAYS,
    expected: Annotated[
        str | None,
        Option("--fingerprint", help="Fingerprint that the member printed; default: ask."),
    ] = None,
    yes: Annotated[bool, Option("--yes", help="Sign without comparing fingerprints.")] = False,
) -> None:
    """Sign a request, after its fingerprint was compared."""
    from collapipe.credentials.authority import AuthorityFolder
    from collapipe.credentials.keys import fingerprint, read_request
    from collapipe.process import files

    opened = AuthorityFolder(authority)
    role = role or opened.usual_role()
    member = read_request(files.read(request, "bring a member's request.pem"), request)
    opened.check_free(member, role)
    shown = fingerprint(member.public_key)
    print(f"name         {member.name}\nrole         {role}\nfingerprint  {shown}")
    if expected is not None:
        _compare(shown, expected, request)
    elif not yes:
        _ask(request)
    file, bundle = opened.sign(member, role, days)
    print(f"valid until  {bundle.expires:%F %R} UTC")
    print(f"authority    {opened.fingerprint}")
    print(f"signed       {file}")
    install = f"collapipe credentials install DIR {quote(file.name)}"
    print(f"next         bring it to {member.name}: {install}")


@app.command()
def install(
    folder: Own, file: Annotated[Path, Argument(help="File that sign has named, or revoked.crl.")]
) -> None:
    """Install a file that the authority signed in a member's folder."""
    from collapipe.credentials import credentials
    from collapipe.credentials.keys import fingerprint, public_key

    bundle = credentials.install(folder, file)
    if bundle is None:
        print(f"revoked      {folder}: the list is up to date")
        return
    _show(bundle)
    print(f"authority    {fingerprint(public_key(bundle.authority))}, which sign must have printed")


@app.command()
def add(
    authority: AuthorityPath,
    name: Annotated[str, Argument(help="The member's name, of a-z, 0-9 and -.")],
    output: Annotated[Path, Option(help="A new folder, with the key in it.")],
    role: As = None,
    days: Days = DAYS,
) -> None:
    """Make a member's key and certificate here, for a trial; you must then copy the key."""
    from collapipe.credentials.authority import AuthorityFolder

    opened = AuthorityFolder(authority)
    _show(opened.add(name, role or opened.usual_role(), days, output))
    print(f"credentials  {output}")


@app.command()
def revoke(
    authority: AuthorityPath,
    which: Annotated[str, Argument(metavar="NAME_OR_SERIAL", help="As list prints them.")],
) -> None:
    """Add certificates to the list of revoked ones, which no member accepts."""
    from collapipe.credentials.authority import AuthorityFolder
    from collapipe.credentials.bundle import REVOKED

    for member in AuthorityFolder(authority).revoke(which):
        print(f"revoked      {member}")
    file = authority / REVOKED
    print(f"next         bring {file} to every member: collapipe credentials install DIR {REVOKED}")


@app.command("list")
def list_(authority: AuthorityPath) -> None:
    """Print all certificates that the authority has signed."""
    from rich.console import Console

    from collapipe.credentials.authority import AuthorityFolder
    from collapipe.formatting import print_table

    opened = AuthorityFolder(authority)
    rows = [
        (member.name, member.role, opened.state(each), f"{each.expires:%F}", f"{member.serial:x}")
        for each in opened.issued()
        for member in [each.member]
    ]
    print_table(Console(), ("name", "role", "state", "until", "serial"), rows)


def _show(bundle: "Bundle") -> None:
    print(f"member       {bundle.member}")
    print(f"valid until  {bundle.expires:%F %R} UTC")


def _compare(shown: str, expected: str, file: Path) -> None:
    if "".join(expected.lower().split()) != shown.replace(" ", ""):
        raise ConfigError(
            f"{file}: has fingerprint {shown}, --fingerprint is {expected}; not signed, it is "
            "another key than the member's"
        )


def _ask(file: Path) -> None:
    """Ask the user to compare fingerprints. Raises ``ConfigError`` without a terminal or a yes."""
    if not sys.stdin.isatty():
        raise ConfigError(
            f"{file}: not signed, because standard input is no terminal to compare the "
            "fingerprint; add --fingerprint VALUE, or --yes"
        )
    if not typer.confirm("Has the member printed the same fingerprint?"):
        raise ConfigError(f"{file}: not signed; make the request again on the member's box")
