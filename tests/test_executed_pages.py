"""The code blocks of each page run, from top to bottom, as a reader types them."""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copytree, ignore_patterns

import psutil
import pytest
from documented import PAGES, ROOT, TEMPLATES, blocks, text_of
from forked_commands import ROWS, RUN
from reader_files import make_files
from test_documented_commands import is_name

from collapipe.cli.simulation import end_all
from collapipe.flower.commands import free_port

_BLOCK_S, _END_S = 900, 60
_BERT = """model=huggingface model.family=bert 'model.config={hidden_size: 16, \
num_hidden_layers: 4, num_attention_heads: 2, intermediate_size: 16}'"""
_GPT = "model=huggingface model.family=gpt2 'model.config={n_embd: 16, n_layer: 4, n_head: 2}'"
_LLAMA = """model=huggingface model.family=llama 'model.config={hidden_size: 16, \
num_hidden_layers: 4, num_attention_heads: 2, num_key_value_heads: 2, intermediate_size: 16}' \
task.chat_template=template.jinja"""
_LEFT_OUT = {  # options that a reader adds, by task
    "task=classification": _BERT,
    "task=ner": _BERT,
    "task=causal_lm": _GPT,
    "task=chat": _LLAMA,
    "": "",
}
_DATED = "outputs/2026-11-21/04-53-02"  # links to the latest run, like RUN_DIR
_WORDS = {  # replacements, such as this machine for others
    r"outputs/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d": _DATED,
    r"\bedge\.example\b": "127.0.0.1",
    r"(?<=[:=])8000\b": "$PORT",
    r"(?<=[:=])8001\b": "$LINK_PORT",
    r"0\.0\.0\.0:7700": "127.0.0.1:$DEVICE_PORT",
    r"192\.168\.1\.20:7700": "127.0.0.1:$DEVICE_PORT",
    r"192\.168\.1\.21:7700": "127.0.0.1:$SECOND_PORT",
    r"train_file=FILE": "train_file=tagged.jsonl",
    r"--file FILE": "--file other.jsonl",
    r"--public FILE": "--public public.txt",
    r"< FILE": "< inputs.txt",
    r"/home/ann/authority\.crt": "$HOME/federation/authority/authority.crt",
    r"(?<==)/tmp/run": "$HOME/there",
    r"(?<==)/absolute/path": "$HOME/absolute",
    r"\bmake test\b.*": 'make test WORKERS="-n 0" ARGS=tests/collapipe/test_version.py',
    r"train\(\[": f"train([*{[*RUN, *ROWS]!r}, ",
    r'"text-classification", "FOLDER"': '"text-classification", "classifier"',
    r'"token-classification", "FOLDER"': '"token-classification", "tagger"',
    r"load_dataset\(NAME\)": 'load_dataset("named")',
}
_FLWR = """#!/bin/bash
given=()
for each in "$@"; do
    more="{1}"
    [[ $each == *runtime=deployment* ]] || more+=" {2}"
    [[ $each == overrides=* ]] && each="${{each%\\"}} $more\\""
    given+=("$each")
done
exec {0} -m flwr.cli.app "${{given[@]}}"
"""
_SHELL = """set -e -o pipefail
ssh() { :; }
scp() { cp "${1#*:}" "./${2#*:}"; }
"""


@dataclass(frozen=True)
class Reader:
    """Commands that a page leaves to its reader."""

    before: Mapping[str, str] = field(default_factory=dict)  # lines typed before a command


_OWNER = "cd federation/units/berlin"
_ROWS_THERE = "cp $FILES/rows.csv train.csv"
_SIGNED = """cp federation/units/{0}/credentials/request.pem {0}.pem
collapipe credentials sign federation/authority {0}.pem --yes
cp federation/authority/issued/{0}.1.crt federation/units/{0}"""
_PARIS = "cd $HOME/federation/units/paris; {}; cd $HOME"
_FEDERATION = f"""collapipe deploy init federation --units berlin,paris,rome --server 127.0.0.1
for unit in berlin paris rome; do
cd $HOME/federation/units/$unit; collapipe credentials request credentials --name $unit; cd $HOME
{_SIGNED.format("$unit")}
done
collapipe deploy serve federation
for unit in berlin paris rome; do
cd $HOME/federation/units/$unit; {_ROWS_THERE}
collapipe credentials install credentials $unit.1.crt; collapipe unit unit.yaml
done; cd $HOME"""
_PI = """collapipe credentials add ~/cluster pi-5 --output pi-5
collapipe device --listen 127.0.0.1:$SECOND_PORT --credentials pi-5 --memory 3GB"""
READERS = {
    "credentials.md": Reader(
        {"collapipe credentials list farm": "collapipe credentials add farm pi-4 --output pi-4"}
    ),
    "two-owners.md": Reader(
        {
            "collapipe credentials request credentials": _PARIS.format(
                "collapipe credentials request credentials --name paris"
            )
            + f"\n{_OWNER}",
            "collapipe credentials sign": _SIGNED.format("paris")
            + "\ncp federation/units/berlin/credentials/request.pem berlin.pem",
            "collapipe credentials install": _PARIS.format(
                f"{_ROWS_THERE}; collapipe credentials install credentials paris.1.crt; "
                "collapipe unit unit.yaml"
            )
            + f"\n{_OWNER}; {_ROWS_THERE}; cp ../../authority/issued/berlin.1.crt .",
            "collapipe deploy check federation": "for each in validation test; "
            "do cp $FILES/rows.csv $each.csv; done",
        }
    ),
    "deployment.md": Reader({"ssh -N": _FEDERATION}),
    "three-boxes.md": Reader(
        {
            "collapipe credentials sign": "cp ~/credentials/request.pem .",
            "collapipe credentials install": "cp cluster/issued/jetson.1.crt .",
            "collapipe device check": _PI,
        }
    ),
    "data.md": Reader(
        {
            "collapipe run task=classification data.train_file=reviews.csv": "ln -sfn FOLDER "
            "FOLDER_OR_HUB_ID",  # a model that classifies
        }
    ),
    "huggingface.md": Reader(
        {
            "collapipe export": f"""rm FOLDER
collapipe run task=classification data=synthetic {_BERT} hydra.run.dir=classified
collapipe export classified classifier
collapipe run task=ner data=synthetic {_BERT} hydra.run.dir=tagged
collapipe export tagged tagger"""
        }
    ),
    "lora.md": Reader({"collapipe export": "rm FOLDER"}),
    "plan-boxes.md": Reader(
        {"collapipe device check": "collapipe up --devices 3 --inventory boxes.yaml"}
    ),
    "privacy.md": Reader(
        {
            "collapipe audit RUN_DIR --public public.txt\n": "collapipe run task=classification "
            f"{_BERT} data.train_file=rows.csv data.validation_file=rows.csv "
            "data.test_file=rows.csv",
            "zcat": "mkdir mr_en\n"
            "for each in $(seq 20); do cat FOLDER/train.tsv; done | gzip > mr_en/train.tsv.gz",
        }
    ),
    "report.md": Reader(
        {
            "collapipe report RUN_DIR": "collapipe run",
            "collapipe report multirun": "collapipe run -m seed=0,1; mkdir multirun/DATE\n"
            "mv multirun/2*/* multirun/DATE/TIME",
            "collapipe report runs": "for each in random-0 random-1 dssra-0 dssra-1; do\n"
            "collapipe run strategy=${each%-*} seed=${each#*-} hydra.run.dir=runs/$each; done",
            "collapipe trace": "ROUNDS=3 collapipe up --devices 2 -- run",
        }
    ),
    "resume.md": Reader(
        {
            f"collapipe resume {_DATED}\n": "ROUNDS=400 collapipe run framework.train=false "
            "federation.checkpoint_every=1 & run=$!\n"
            "until test -e outputs/*/*/checkpoints/latest; do sleep 0.1; done\n"
            "kill $run; wait $run && false",
            f"collapipe resume {_DATED} federation.rounds=30": "collapipe run",
        }
    ),
    "templates/README.md": Reader(
        {
            "collapipe credentials request": "collapipe deploy init federation --units berlin "
            f"--server 127.0.0.1\n{_OWNER}",
            "collapipe credentials sign": "cp federation/units/berlin/credentials/request.pem .",
            "collapipe credentials install": f"{_OWNER}; cp ../../authority/issued/berlin.1.crt .",
            "collapipe deploy check unit.yaml": f"{_OWNER}; {_ROWS_THERE}",
        }
    ),
}


def name_of(page: Path) -> str:
    return f"templates/{page.name}" if page.parent == TEMPLATES else page.name


def typed(commands: str, reader: Reader) -> str:
    """Return the commands as a reader types them on this machine."""
    lines = []
    for command in read(commands).replace("NAME", "berlin").splitlines():
        begins = [each for each in reader.before if f"{command}\n".startswith(each)]
        lines += [reader.before[max(begins, key=len)]] if begins else []
        task = next(each for each in _LEFT_OUT if each in command)
        more = _LEFT_OUT[task]
        if task == "task=classification" and not re.search(r"data\.\w+=|runtime=dep", command):
            more += " data.train_file=train.tsv"
        if "runtime=deployment" in command:
            more += " data.validation_file=rows.csv data.test_file=rows.csv"
        lines.append(command.replace("…", more))
    return "\n".join([_SHELL, *lines])


def read(text: str) -> str:
    for pattern, word in _WORDS.items():
        text = re.sub(pattern, lambda _, word=word: word, text)
    return text


@dataclass(frozen=True)
class Place:
    """A reader's home that contains the repository, and the environment of all commands."""

    folder: Path
    environment: Mapping[str, str]

    def run(self, script: str) -> None:
        """Run a script and print its output; fail unless its status is 0."""
        terminal, stdin = os.openpty()
        os.write(terminal, b"y\n" * 9)  # answers to questions
        try:
            ended = subprocess.run(
                ["bash", "-c", script],
                cwd=self.folder,
                env=self.environment,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_BLOCK_S,
                check=False,
            )
        finally:
            os.close(terminal)
            os.close(stdin)
        shown = f"{script.removeprefix(_SHELL)}\n{ended.stdout}"
        if ended.returncode:
            pytest.fail(f"{shown}\nstatus {ended.returncode}", pytrace=False)
        print(shown)

    def write(self, name: str, text: str) -> Path:
        """Write a reader's file, with this machine's ports."""
        for each in ("PORT", "LINK_PORT", "DEVICE_PORT", "SECOND_PORT", "HOME"):
            text = re.sub(rf"\${each}\b", self.environment[each], text)
        file = Path(name.replace("~", str(self.folder)))
        file = self.folder / file
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    make_files(folder)
    return folder


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the socket of a process that runs commands."""
    home = str(tmp_path_factory.mktemp("forks"))
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", "HOME": home}
    environment = {**os.environ, **offline, "PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
    with (
        tempfile.TemporaryDirectory(prefix="forks-") as short,  # a socket's path has ≤ 107 letters
        socket.socket(socket.AF_UNIX) as listening,
    ):
        listening.bind(f"{short}/socket")
        listening.listen()
        number = listening.fileno()
        command = [sys.executable, "-P", ROOT / "tests/forked_commands.py", str(number)]
        with subprocess.Popen(command, env=environment, cwd=short, pass_fds=[number]) as served:
            try:
                yield f"{short}/socket"
            finally:
                served.terminate()


@contextmanager
def place(folder: Path, files: Path, forks: str) -> Iterator[Place]:
    """Yield a fresh home; at the end, stop everything that was started in it."""
    copied = ignore_patterns(
        ".git", ".venv", "__pycache__", ".*_cache", "outputs", "multirun", "benchmarks"
    )
    copytree(ROOT, folder, ignore=copied, dirs_exist_ok=True)
    for each in files.iterdir():
        (folder / each.name).symlink_to(each)
    served, programs = folder / "served", folder / ".venv/bin"
    served.mkdir()
    programs.mkdir(parents=True)
    asking = f'exec {sys.executable} -SE {ROOT}/tests/forked_client.py "$@"'
    program(programs / "collapipe", f"#!/bin/sh\n{asking}\n")
    program(programs / "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    program(programs / "pip", "#!/bin/sh\n")
    program(programs / "flwr", _FLWR.format(sys.executable, " ".join(RUN), " ".join(ROWS)))
    (programs / "activate").touch()
    (folder / ".venv/installed").touch()
    (folder / _DATED).parent.mkdir(parents=True)
    (folder / _DATED).symlink_to("../../RUN_DIR")
    names = "PORT", "LINK_PORT", "DEVICE_PORT", "SECOND_PORT"
    names += "FLWR_LOCAL_CONTROL_API_PORT", "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"
    yielded = Place(
        folder,
        {
            "HOME": str(folder),
            "PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "FLWR_HOME": str(folder / ".flwr"),
            "FORKS": forks,
            "SERVED": str(served),
            "FILES": str(files),
            **{name: str(free_port()) for name in names},
        },
    )
    try:
        yield yielded
    finally:
        end(int(each.read_text()) for each in served.glob("*.pid"))
        end_all(folder / ".flwr")
        for log in sorted(served.glob("*.log")):
            print(log.read_text())


def program(file: Path, text: str) -> None:
    file.write_text(text)
    file.chmod(0o755)


def end(numbers: Iterator[int]) -> None:
    """End serving commands through their clients."""
    there = list[psutil.Process]()
    for number in numbers:
        with suppress(psutil.NoSuchProcess):
            there.append(psutil.Process(number))
            there[-1].terminate()
    _, left = psutil.wait_procs(there, _END_S)
    for each in left:
        each.kill()
    assert not left


def has_commands(page: Path) -> bool:
    return any(each.commands and not each.marked for each in blocks(page))


@pytest.mark.thorough
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", [*filter(has_commands, PAGES)], ids=name_of)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path, files: Path, forks: str) -> None:
    reader = READERS.get(name_of(page), Reader())
    with place(tmp_path / "home", files, forks) as there:
        for number, block in enumerate(blocks(page)):
            if block.file:
                there.write(block.file, read(block.text))
            elif block.commands and not block.marked:
                there.run(typed(block.commands, reader))
            elif block.language == "python":
                script = there.write(f"block-{number}.py", read(block.text))
                there.run(f"collapipe {script.name}")
        check_runs(there.folder, read("".join(each.commands for each in blocks(page))))


def check_runs(folder: Path, commands: str) -> None:
    """Check that all runs are complete and that runs with a named folder exist: ``flwr run`` ends
    with status 0 even if the run fails."""
    named = re.findall(r"hydra\.run\.dir=\$\w+/(\w+)", commands)
    ended = [
        *folder.glob("outputs/2*/*/summary.json"),
        *(folder / n / "summary.json" for n in named),
    ]
    assert {json.loads(each.read_text())["status"] for each in ended} <= {"completed"}


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_commands_in_the_tables_of_next_steps_run(tmp_path: Path, files: Path, forks: str) -> None:
    """Run all commands of these tables in order."""
    pages = text_of(ROOT / "README.md"), text_of(ROOT / "docs/tutorials/first-run.md")
    begins = "## Next steps", "## Try other things"
    sections = (
        page.partition(begin)[2].partition("\n## ")[0]
        for page, begin in zip(pages, begins, strict=True)
    )
    commands = re.findall(r"^\|.*?`((?:collapipe|make) [^`]+)`", "\n".join(sections), re.MULTILINE)
    assert len(commands) > 9
    reader = Reader({"collapipe predict RUN_DIR": "collapipe run"})
    with place(tmp_path / "home", files, forks) as there:
        for command in commands:
            if not is_name(command.split()[1:]):
                there.run(typed(command, reader))
