"""Messages of other machines and libraries are printed in one short line."""

import pytest

from collapipe import errors


def test_only_the_beginning_of_a_long_message_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """To replace the unprintable characters of 100 MB would take minutes."""
    read, printable = list[int](), errors.printable

    def counting(text: str) -> str:
        read.append(len(text))
        return printable(text)

    monkeypatch.setattr(errors, "printable", counting)
    line = errors.one_line("a\x00" * 10**6)
    assert read[0] < 10**5 and len(line) < 500 and line.endswith(" …")


def test_an_error_without_a_message_gives_its_class() -> None:
    assert errors.one_line(ValueError()) == "ValueError"
