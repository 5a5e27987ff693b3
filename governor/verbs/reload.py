"""`tidegate reload`: make the governor reread its configuration, without a restart if possible."""

from __future__ import annotations

import argparse
import json

from governor.client import ask, node_config
from governor.config import show_value
from governor.errors import ConfigError

SUMMARY = "Make the governor read its configuration again"
EPILOG = """\
An invalid configuration changes nothing: the governor keeps its current one, and this command exits
with status 78. SIGHUP does the same, and the log reports the outcome.

"""
WHEN = {
    "now": "in force now",
    "next": "applies to containers and processes that start from now on",
    "restart": "needs systemctl restart tidegate-governor",
}
IF = {
    "now": "would be in force at once",
    "next": "would apply to containers and processes that start from then on",
    "restart": "would need systemctl restart tidegate-governor",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's own options."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--dry-run", action="store_true", help="only report what would change")
    parser.add_argument(
        "--runtime-dir", metavar="DIR", help="the governor's directory (/run/tidegate)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Print what has changed, and what needs a restart."""
    config = node_config(None, args.runtime_dir)
    answer = ask(config, "config" if args.dry_run else "reload", timeout=20.0)
    if args.dry_run and answer["error"] is not None:
        raise ConfigError(answer["error"]["message"], hint=answer["error"]["hint"])
    files = answer["found" if args.dry_run else "files"]
    changes = answer["changes"]
    if args.json:
        print(json.dumps({"files": files, "changes": changes}, indent=2))
        return 0
    print(f"read: {', '.join(files) or 'no file; the defaults apply'}")
    for one in changes:
        when = (IF if args.dry_run else WHEN)[one["effect"]]
        old, new = (show_value(one["option"], one[which]) for which in ("old", "new"))
        print(f"{one['option']}: {old} -> {new}: {when}")
    if not changes:
        print("nothing has changed")
    return 0
