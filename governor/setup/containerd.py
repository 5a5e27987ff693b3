"""Set up containerd: a handler for its CRI plugin, in a drop-in or in its own file.

containerd 2 merges the tables of the files that it imports. containerd 1 takes each plugin's whole
section from the last file that has one (containerd issue 5837), so a drop-in would replace CRI's
section of config.toml. Therefore, for containerd 1, the handler is appended to config.toml itself.
This works with both versions, and is also done if the version is not known.
"""

from __future__ import annotations

import fnmatch
import json
import posixpath
from dataclasses import dataclass
from typing import Any

from governor.errors import SetupError
from governor.setup import tomltext
from governor.setup.files import Root
from governor.setup.journal import Journal, Part
from governor.setup.plan import (
    ANNOTATIONS,
    HANDLER,
    WRITTEN,
    Change,
    SetupOptions,
    SetupPlan,
    Validation,
    output,
    packaged,
    read_toml,
    strings,
    table,
    untouched,
    version,
)
from oci_hook.runtime import CONFIG as WRAPPER

CONFIG = "/etc/containerd/config.toml"
DROP_IN = "conf.d/tidegate.toml"
# A pattern, because containerd does not start if an imported file is missing. It matches only
# Tidegate's files, because the directory may have other files, which have not been imported.
IMPORT = "conf.d/tidegate*.toml"
UNDONE = "systemctl restart containerd    # containers keep running"
BASE_SPEC = "tidegate-base-spec.json"
PLUGIN2 = "io.containerd.grpc.v1.cri"
PLUGIN3 = "io.containerd.cri.v1.runtime"
RUNC = "io.containerd.runc.v2"
FORMER = "default_runtime"
COMMENT = WRITTEN.format("containerd")
RUNC_COMMENT = "# Without it containerd 1 would know no other handler than tidegate."
# Keys that the handler `tidegate` does not copy from the default handler.
OWN = ("runtime_type", "runtime_path", "pod_annotations", "container_annotations", "options")


@dataclass(frozen=True)
class ContainerdNode:
    """containerd's configuration, as far as setup needs it."""

    path: str
    text: str | None  # None if there is no file
    version: int
    merges: bool  # whether tables of imported files are merged
    files: dict[str, dict[str, Any]]  # content of each file, main file first
    dump: dict[str, Any]  # the configuration in force according to `config dump`, if known
    release: tuple[int, int] | None  # containerd's own version, if it is known

    @property
    def plugin(self) -> str:
        """The name of the plugin that has the handlers."""
        return PLUGIN2 if self.version == 2 else PLUGIN3

    @property
    def directory(self) -> str:
        """The directory of the file; drop-ins are below it."""
        return self.path.rpartition("/")[0]

    def cri(self, where: dict[str, Any]) -> dict[str, Any]:
        """Return CRI's `containerd` table in a document of any version."""
        found: dict[str, Any] = {}
        for plugin in (PLUGIN2, PLUGIN3):
            found = tomltext.merged(found, table(where, "plugins", plugin, "containerd"))
        return found

    def handlers(self) -> dict[str, Any]:
        """Return the handlers in the files; later files override earlier ones."""
        found: dict[str, Any] = {}
        for document in self.files.values():
            found = tomltext.merged(found, table(self.cri(document), "runtimes"))
            # containerd 1 had a table for the default handler, which became the handler `default`.
            former = table(self.cri(document), FORMER)
            if former.get("runtime_type"):
                found["default"] = former
        return found

    def default(self) -> str:
        """Return the name of the default handler."""
        if any(table(self.cri(d), FORMER).get("runtime_type") for d in self.files.values()):
            return "default"
        names = [self.cri(d).get("default_runtime_name") for d in (*self.files.values(), self.dump)]
        return str(next((n for n in reversed(names) if n), "runc"))


def plan(root: Root, journal: Journal, options: SetupOptions) -> SetupPlan:
    """Plan config.toml and the drop-in; raise SetupError if that is not possible."""
    node = _read_node(root, options)
    result = SetupPlan()
    spec = f"{node.directory}/{BASE_SPEC}" if options.base_spec else None
    program = options.program("tidegate-hook" if spec else "tidegate-runtime")
    if spec:
        result.missing(root, program)
    else:
        result.look_at_wrapper(root, options)
    drop_in = f"{node.directory}/{DROP_IN}"
    there = _existing(root, node, drop_in, program, spec)
    if spec is not None and (
        root.read(spec) is None or untouched(root, journal, "containerd", spec)
    ):
        result.changes.append(Change(spec, _base_spec(root, options), ({"whole": True},)))
    result.todo = [
        UNDONE,
        "tidegate setup containerd --runtime-class | kubectl apply -f -    # once per cluster",
    ]
    result.validation = Validation(
        ("containerd", "--config", node.path, "config", "dump"),
        check=lambda said: _lacking(node, said),
    )
    if there is not None and there != drop_in:
        return result
    handler = _handler(node, program, spec, result)
    if not node.merges:
        result.changes.append(_with_handler(root, node, handler))
    else:
        if there is None:
            text = f"{COMMENT}\nversion = {node.version}\n\n{handler}"
            result.changes.append(Change(drop_in, text, (_part(node, HANDLER),)))
        if not _imports(node, drop_in):
            result.changes.append(_with_import(root, node, result))
    disabled = strings(node.files[node.path].get("disabled_plugins"))
    if {"cri", PLUGIN2, PLUGIN3} & set(disabled):
        result.notes.append(
            f"CRI is among disabled_plugins in {root.shown(node.path)}: Kubernetes cannot use this"
            " containerd"
        )
    return result


def _read_node(root: Root, options: SetupOptions) -> ContainerdNode:
    """Read the files, and query containerd if it is installed."""
    path = options.config or CONFIG
    file = root.read(path)
    main = read_toml(root, path, file)
    says = options.containerd_version or output(root, "containerd", "--version")
    found = version(says)
    if options.containerd_version and found is None:
        raise SetupError(
            f"--containerd-version {options.containerd_version} is not a version",
            hint="give it in the form 1.7 or 2.1",
        )
    number = main.get("version")
    if number is None and not main:
        number = 3 if found and found >= (2, 0) else 2
    if not isinstance(number, int) or not 2 <= number <= 4:
        shown = "no version, which means version 1" if number is None else f"version {number!r}"
        raise SetupError(
            f"{root.shown(path)} has {shown}; versions 2, 3 and 4 are supported",
            hint="convert it to a newer version with `containerd config migrate`; "
            "a file that only disables CRI is Docker's: see tidegate setup docker",
        )
    files = _with_imports(root, path, main)
    merges = number >= 3 or bool(found and found >= (2, 0))
    dump = {}
    if file is not None and (
        text := output(root, "containerd", "--config", path, "config", "dump")
    ):
        try:
            dump = tomltext.parse(text)
        except ValueError as e:
            raise SetupError(
                f"containerd config dump is not TOML: {e}", hint="see what containerd prints"
            ) from e
    if not merges:
        for name, document in list(files.items())[1:]:
            if PLUGIN2 in table(document, "plugins"):
                raise SetupError(
                    f"{root.shown(name)} has a CRI section, which containerd 1 uses in place "
                    f"of everything that {root.shown(path)} says about CRI",
                    hint=f"move its tables to {root.shown(path)}; or pass "
                    "--containerd-version 2.0 if containerd is 2.0 or newer",
                )
    return ContainerdNode(path, file.text() if file else None, number, merges, files, dump, found)


def _with_imports(root: Root, main: str, document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the content of the main file and of those that it imports, in containerd's order."""
    files = {main: document}
    todo = _patterns(main, document)
    while todo and len(files) < 100:
        for path in root.matching(todo.pop(0)):
            if path not in files:
                files[path] = read_toml(root, path)
                todo += _patterns(path, files[path])
    return files


def _lacking(node: ContainerdNode, said: str) -> str | None:
    """Return an error if containerd would lack handlers, as the output of `config dump` shows."""
    try:
        found = set(table(node.cri(tomltext.parse(said)), "runtimes"))
    except ValueError as e:
        return f"containerd config dump is not TOML: {e}"
    # Without a file, containerd has the handler runc. If CRI is disabled, it may have none.
    before = set(table(node.cri(node.dump), "runtimes")) or {"runc"}
    if not found or found >= {HANDLER, *before}:
        return None
    return f"containerd has no handler {', '.join(sorted({HANDLER, *before} - found))}"


def _patterns(path: str, document: dict[str, Any]) -> list[str]:
    """Return a file's imports; relative ones are resolved against the file's directory."""
    directory = path.rpartition("/")[0]
    imports = strings(document.get("imports"))
    return [posixpath.normpath(p if p.startswith("/") else f"{directory}/{p}") for p in imports]


def _imports(node: ContainerdNode, path: str) -> bool:
    """Return whether a file below the main file's directory is imported."""
    return any(
        pattern.count("/") == path.count("/")
        and all(map(fnmatch.fnmatchcase, path.split("/"), pattern.split("/")))
        for name, document in node.files.items()
        for pattern in _patterns(name, document)
    )


def _existing(
    root: Root, node: ContainerdNode, drop_in: str, program: str, spec: str | None
) -> str | None:
    """Return the handler's file; raise SetupError if the handler differs from the requested one.

    A drop-in that is not imported counts as well: only its import is missing.
    """
    sources = dict(node.files)
    if node.merges and drop_in not in sources:
        sources[drop_in] = read_toml(root, drop_in)
    for path, document in {**sources, "containerd config dump": node.dump}.items():
        found = table(node.cri(document), "runtimes").get(HANDLER)
        if found is None:
            continue
        shown = root.shown(path) if path in sources else path
        binary = table(found, "options").get("BinaryName")
        if spec is None and binary != program:
            raise SetupError(
                f"handler {HANDLER} in {shown} runs {str(binary)[:80]}, not {program}",
                hint="remove the handler, or name the program's directory with --bin-dir; if it was"
                " set up with --base-spec, run this command with --undo first",
            )
        if spec is not None and table(found).get("base_runtime_spec") != spec:
            raise SetupError(
                f"handler {HANDLER} in {shown} has a base_runtime_spec other than {spec}",
                hint="run this command with --undo first, or remove the handler",
            )
        for name in ("pod_annotations", "container_annotations"):
            if ANNOTATIONS not in strings(found.get(name)):
                raise SetupError(
                    f"handler {HANDLER} in {shown} has no {ANNOTATIONS} among its {name}",
                    hint="add it, or remove the handler",
                )
        return path
    return None


def _key(path: tuple[str, ...]) -> str:
    """Return the keys of a header in containerd's notation."""
    bare = [k if k.replace("-", "").replace("_", "").isalnum() else json.dumps(k) for k in path]
    return ".".join(bare)


def _part(node: ContainerdNode, handler: str) -> Part:
    return {
        "tables": ["plugins", node.plugin, "containerd", "runtimes", handler],
        "comments": [COMMENT, RUNC_COMMENT],
    }


def _handler(node: ContainerdNode, program: str, spec: str | None, result: SetupPlan) -> str:
    """Return the handler's tables: the default handler's, except for runtime and annotations."""
    default = node.default()
    like = table(node.handlers(), default)
    if like.get("runtime_type", RUNC) != RUNC:
        result.notes.append(
            f"the default handler {default} has a runtime_type other than {RUNC}: nothing is copied"
            " from it"
        )
        like = {}
    values: dict[str, Any] = {"runtime_type": RUNC}
    for name in ("pod_annotations", "container_annotations"):
        values[name] = list(dict.fromkeys([*strings(like.get(name)), ANNOTATIONS]))
    values |= {k: v for k, v in like.items() if k not in OWN and _is_plain(v)}
    if spec is not None:
        values["base_runtime_spec"] = spec
    elif values.get("base_runtime_spec"):
        result.notes.append(
            f"the handler {HANDLER} uses the base_runtime_spec of the handler {default}"
        )
    given = {k: v for k, v in table(like, "options").items() if _is_plain(v)}
    inner: dict[str, Any] = {} if spec is not None else {"BinaryName": program}
    inner |= {k: v for k, v in given.items() if k != "BinaryName"}
    dumped = table(node.cri(node.dump), "runtimes", default, "options")
    # The cgroup driver must be the kubelet's: otherwise no pod starts. It is the same for all
    # handlers, so it is taken from another handler if nothing is copied from the default handler.
    others = [] if like else list(table(node.cri(node.dump), "runtimes").values())
    others += [] if like else list(node.handlers().values())
    if any(
        table(o, "options").get("SystemdCgroup") is True for o in ({"options": dumped}, *others)
    ):
        inner["SystemdCgroup"] = True
    binary = given.get("BinaryName")
    if binary and spec is None and "nvidia" not in str(binary):
        result.notes.append(
            f"the default handler {default} runs {binary}: to have {HANDLER} run it as well, "
            f"write `runtime {binary}` to {WRAPPER}"
        )
    elif binary and spec is not None:
        inner["BinaryName"] = binary
    keys = ("plugins", node.plugin, "containerd", "runtimes", HANDLER)
    lines = [f"[{_key(keys)}]", *(f"  {_key((k,))} = {_value(v)}" for k, v in values.items())]
    if inner:
        lines += ["", f"  [{_key((*keys, 'options'))}]"]
        lines += [f"    {_key((k,))} = {_value(v)}" for k, v in inner.items()]
    return "\n".join(lines) + "\n"


def _is_plain(value: Any) -> bool:
    """Return whether `_value` can write a value."""
    if isinstance(value, list):
        return all(_is_plain(v) for v in value)
    return isinstance(value, bool | int | float | str)


def _value(value: Any) -> str:
    """Format a boolean, number, string or array of these in the common syntax of TOML and JSON."""
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, bool | int | str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value)


def _with_import(root: Root, node: ContainerdNode, result: SetupPlan) -> Change:
    """Return config.toml with an import of the drop-in."""
    shown = root.shown(node.path)
    if node.text is None:
        value = f"{node.directory}/{IMPORT}"
        if node.release is None or node.release >= (2, 2):
            # Without a file, containerd imports the whole directory; the new file must keep that.
            value = f"{node.directory}/conf.d/*.toml"
            others = [n for n in root.names(f"{node.directory}/conf.d") if n.endswith(".toml")]
            result.notes += [f"{root.shown(node.directory)}/conf.d/{n} is imported" for n in others]
        text = f"{COMMENT}\nversion = {node.version}\n"
    else:
        value, text = f"{node.directory}/{IMPORT}", node.text
        if "version" not in node.files[node.path]:
            text = f"version = {node.version}{tomltext.newline(text)}{text}"
    try:
        text = tomltext.add_element(text, "imports", value)
    except ValueError as e:
        raise SetupError(f"{shown}: {e}", hint=f'add "{value}" to its imports by hand') from e
    part = {"element": ["imports", value]}
    mark = {"tables": ["plugins", node.plugin, "containerd", "runtimes", HANDLER]}
    return Change(node.path, text, (part, {**mark, "comments": [COMMENT]}))


def _with_handler(root: Root, node: ContainerdNode, handler: str) -> Change:
    """Return config.toml with the handler appended."""
    parts, block = [_part(node, HANDLER)], f"{COMMENT}\n{handler}"
    default = node.default()
    if not node.handlers() and default == "runc":
        keys = ("plugins", node.plugin, "containerd", "runtimes", "runc")
        block += f'\n{RUNC_COMMENT}\n[{_key(keys)}]\n  runtime_type = "{RUNC}"\n'
        parts.append({**_part(node, "runc"), "spare": True})
    text = node.text or ""
    if "version" not in node.files[node.path]:
        text = f"version = {node.version}{tomltext.newline(text)}{text}"
    try:
        text = tomltext.append(text, block)
    except ValueError as e:
        raise SetupError(
            f"no other table can be appended to {root.shown(node.path)}: {e}",
            hint=f"write plugins.{node.plugin}.containerd.runtimes as tables with headers",
        ) from e
    return Change(node.path, text, tuple(parts))


def _base_spec(root: Root, options: SetupOptions) -> str:
    """Return containerd's default spec with the hook, without the parts that CRI removes.

    For a handler without a base spec, CRI removes the AppArmor profile, the seccomp profile and the
    limits from the default before it adds a container's own (WithoutDefaultSecuritySettings). For a
    handler with a base spec it does not, so a limit of 1024 files and a profile would remain in
    unconfined containers.
    """
    text = output(root, "ctr", "oci", "spec")
    if text is None:
        raise SetupError("--base-spec needs ctr on this node", hint="install it with containerd")
    try:
        spec = json.loads(text)
        process, linux = spec["process"], spec["linux"]
        hooks = spec.setdefault("hooks", {}).setdefault("createRuntime", [])
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise SetupError(
            f"ctr oci spec does not print a runtime configuration: {type(e).__name__}: {e}",
            hint="see what it prints",
        ) from e
    process.pop("rlimits", None)
    process.pop("apparmorProfile", None)
    linux.pop("seccomp", None)
    hook = json.loads(packaged("hooks.d/50-tidegate.json"))["hook"]
    hooks.append({**hook, "path": options.program("tidegate-hook")})
    return json.dumps(spec, indent=1) + "\n"
