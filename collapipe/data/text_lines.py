"""Lines of a text file, plain or .gz, which must be UTF-8."""

import codecs
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from collapipe.errors import DataError


def text_lines(path: Path) -> Iterator[str]:
    """Each line with its break, without the mark that some programs put before the first.

    Lines end at line feeds only: other breaks may stand inside a text. Raises ``DataError`` that
    names file and line.
    """
    number, opened = 0, gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            for number, line in enumerate(file, 1):
                yield (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).decode("utf-8")
    except UnicodeDecodeError as error:
        byte = f"byte 0x{error.object[error.start]:02x}"
        raise DataError(
            f"{path}:{number} is not UTF-8 ({byte}); convert the file to UTF-8"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}); fetch the file again") from error
