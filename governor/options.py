"""Parse command lines; an error is reported in one line on stderr."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from vdriver.errors import one_line


class Parser(argparse.ArgumentParser):
    """A parser whose error messages are one line: what was found, and a reference to --help."""

    def error(self, message: str) -> NoReturn:
        """End the program with status 2, as argparse does."""
        self.exit(2, f"{self.prog}: {one_line(message)}; see {self.prog} --help\n")

    def parse_verb(self, args: Sequence[str]) -> argparse.Namespace:
        """Parse arguments that begin with a verb; surplus ones are reported as the verb's error."""
        options, rest = self.parse_known_args(args)
        if rest:
            name = f"{self.prog} {options.verb}"
            words = " ".join(rest)
            self.exit(2, f"{name}: {one_line(words)} is not accepted; see {name} --help\n")
        return options
