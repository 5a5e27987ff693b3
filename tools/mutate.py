"""Removes the hook's rules one at a time, and checks that the tests for each rule fail.

    python tools/mutate.py [RULE...]  apply mutants to a copy of the tree, and print what kills them
    python tools/mutate.py --page     write docs/reference/hook-rules.md
    python tools/mutate.py --check    check that page and mutants are up to date; run no tests

The rules and mutants are data: tests/mutants/rules.toml. A mutant that survives means a rule
without a test. Some mutants make mounts on the host that should be in a container, so all of them
run in a separate mount namespace.
"""

from __future__ import annotations

import argparse
import compileall
import os
import py_compile
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "mutants" / "rules.toml"
PAGE = ROOT / "docs" / "reference" / "hook-rules.md"
SECONDS = 600  # limit for the tests of one mutant
MEMORY = 8 << 30  # bytes; some mutants remove a limit
NO_FAILURE, FAILURES = 0, 1

HEAD = """\
# Rules of the hook

The hook, and the runtime that edits config.json before it, run as root on an image that they do not
trust. R1 to R16 come from CVEs in NVIDIA's toolkit and runc, which do the same kind of work.
Each rule has tests that carry out the attack with runc and crun, and mutants: patches that remove
the rule from the code, under which the tests have to fail.
`python tools/mutate.py` applies them to a copy of the tree, one after the other (this takes minutes
and needs root).

This page is generated from `tests/mutants/rules.toml` by `python tools/mutate.py --page`.

## The code and the tests of each rule

| rule | text | code | tests |
| --- | --- | --- | --- |
"""
MUTANTS = """
## Mutants

| rule | mutant |
| --- | --- |
"""


@dataclass(frozen=True)
class Rule:
    """A rule: its text, the code that ensures it, and the tests that attack it."""

    id: str
    text: str
    code: tuple[str, ...]
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Mutant:
    """A patch to one file that removes a rule; `tests` are run on it."""

    rule: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> str:
        """Patch the file under `root`, and return its old text; raise ValueError on a mismatch."""
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(
                f"the text of mutant '{self.name}' occurs {text.count(self.old)} times in"
                f" {self.file}"
            )
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")
        return text


def read_table() -> tuple[list[Rule], list[Mutant]]:
    """Return the rules and the mutants; a mutant without tests gets those of its rule."""
    document = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    rules = [
        Rule(r["id"], r["text"], tuple(r["code"]), tuple(r["tests"])) for r in document["rule"]
    ]
    tests = {rule.id: rule.tests for rule in rules}
    mutants = [
        Mutant(
            m["rule"],
            m["name"],
            m["file"],
            m["old"],
            m["new"],
            tuple(m.get("tests", tests[m["rule"]])),
        )
        for m in document["mutant"]
    ]
    return rules, mutants


def page() -> str:
    """Return the page of the rules."""
    rules, mutants = read_table()
    rows = []
    for rule in rules:
        code = ", ".join(f"`{place}`" for place in rule.code)
        tests = ", ".join(f"`{test.removeprefix('tests/')}`" for test in rule.tests)
        rows.append(f"| {rule.id} | {rule.text} | {code} | {tests} |\n")
    removed = [f"| {mutant.rule} | {mutant.name} |\n" for mutant in mutants]
    return HEAD + "".join(rows) + MUTANTS + "".join(removed)


def problems() -> list[str]:
    """Return the faults in the table and the page, one line each."""
    rules, mutants = read_table()
    found = []
    if [rule.id for rule in rules] != [f"R{n}" for n in range(1, len(rules) + 1)]:
        found.append("the rules are not R1, R2 and so on")
    without = {rule.id for rule in rules} - {mutant.rule for mutant in mutants}
    found += [f"{rule} has no mutant" for rule in sorted(without)]
    for rule in rules:
        for place in rule.code:
            path, _, name = place.partition(":")
            if name.rpartition(".")[2] not in (ROOT / path).read_text(encoding="utf-8"):
                found.append(f"{rule.id}: {place} does not exist")
    named = {test for rule in rules for test in rule.tests}
    for test in sorted(named | {test for mutant in mutants for test in mutant.tests}):
        path, _, name = test.partition("::")
        start = f"def {name}(" if name else ""  # without a name: all tests in the file
        if not (ROOT / path).exists() or start not in (ROOT / path).read_text("utf-8"):
            found.append(f"test {test} does not exist")
    for mutant in mutants:
        text = (ROOT / mutant.file).read_text(encoding="utf-8")
        if text.count(mutant.old) != 1:
            found.append(f"mutant '{mutant.name}' no longer applies to {mutant.file}")
            continue
        try:
            compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")
        except SyntaxError as e:
            found.append(f"mutant '{mutant.name}' is not valid Python: {e}")
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
        found.append(f"{PAGE.relative_to(ROOT)} is stale; run python tools/mutate.py --page")
    return found


def copy_tree(to: Path) -> None:
    """Copy the files that git tracks or would add, and compile those that mutants change."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listing.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    # The default validates bytecode by time stamps in whole seconds, and mutants may change a file
    # more often. Python keeps this mode when it writes the file again.
    compileall.compile_dir(
        to / "oci_hook", quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH
    )


COVERED = """
cover=$(mktemp -d)
mount -t tmpfs tmpfs "$cover"
for directory in etc usr run var; do
    mkdir -p "$cover/$directory/upper" "$cover/$directory/work"
    mount -t overlay overlay "/$directory" \\
        -o "lowerdir=/$directory,upperdir=$cover/$directory/upper,workdir=$cover/$directory/work"
done
exec "$@"
"""
"""Script that runs a command with the host's directories under overlays that disappear when the
command ends, because a mutant may change the host itself as if it were a container.
"""


def run_tests(tree: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """Run tests in a tree until one fails; return pytest's status and the name of that test."""
    command = [
        *("unshare", "-m", "--propagation", "private", "sh", "-ec", COVERED, "sh"),
        *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"),
        *("-m", "not gpu and not cluster"),  # slow tests, too, where a rule names them
        *("--basetemp", str(tree.parent / "t"), *tests),
    ]
    build = os.environ.get("TIDEGATE_BUILD", str(ROOT / "build" / "meson"))
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            check=False,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env={**os.environ, "TIDEGATE_BUILD": build},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY)),
        )
    except subprocess.TimeoutExpired:
        return FAILURES, f"the tests did not end within {SECONDS} s"
    failed = re.search(r"^(?:FAILED|ERROR) [^:]+::(.+?)(?: - |$)", done.stdout, re.MULTILINE)
    return done.returncode, failed[1] if failed else done.stdout[-2000:]


def hunt(rules: list[str]) -> int:
    """Run the mutants of these rules, or of all; return 1 if one survives, else 0."""
    _, mutants = read_table()
    chosen = [mutant for mutant in mutants if not rules or mutant.rule in rules]
    survivors = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as work:
        tree = Path(work) / "tree"
        copy_tree(tree)
        tests = tuple(sorted({test for mutant in chosen for test in mutant.tests}))
        status, killer = run_tests(tree, tests)
        if status != NO_FAILURE:
            print(f"the tests fail without a mutant: {killer}")
            return 1
        print("rule mutant                                                        killed by")
        for mutant in chosen:
            begin = time.monotonic()
            before = mutant.apply(tree)
            status, killer = run_tests(tree, mutant.tests)
            (tree / mutant.file).write_text(before, encoding="utf-8")
            if status != FAILURES:
                survivors += 1
                killer = "SURVIVED" if status == NO_FAILURE else f"NOT RUN: {killer}"
            took = time.monotonic() - begin
            print(f"{mutant.rule:4} {mutant.name:61} {killer} ({took:.0f} s)", flush=True)
    print(f"{len(chosen)} mutants, {survivors} survived")
    return 1 if survivors else 0


def main() -> int:
    """Do what the command line requests, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rules", nargs="*", metavar="RULE")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if arguments.page:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if arguments.check:
        found = problems()
        print("\n".join(found) or f"{len(read_table()[1])} mutants apply")
        return 1 if found else 0
    return hunt(arguments.rules)


if __name__ == "__main__":
    sys.exit(main())
